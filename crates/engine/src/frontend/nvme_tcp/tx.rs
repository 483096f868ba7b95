//! A connection's send queue.
//!
//! Headers and small responses are written into a byte ring; data stays in staging memory. A list
//! of items gives the order; its records tell a successor the same once they are *published*, just
//! before sending. An unpublished answer does not exist: a successor repeats the command. An item's
//! buffer and command return to the caller only when its last byte is in the kernel.
//!
//! A list comes from the reactor's pool while there is something to send. A command has at most
//! [`ITEMS_PER_COMMAND`] items of [`BYTES_PER_COMMAND`] bytes, and keeps its slot until the last is
//! sent. [`Tx::has_room`] counts items without a command.

use super::command::MAX_R2TS_OF_ONE;
use super::record::QueueRecords;
use super::send_lists::{BufferPool, List};
use super::slots::NONE;
use crate::core::staging::StagingBuffer;
use forebay_nvme::tcp::{MAX_HEADER_BYTES, MAX_TERM_REQ_BYTES};
use forebay_xlate::boundary::region::MAX_QUEUE_ENTRIES;
use forebay_xlate::boundary::region::item::{self, HEADER_BYTES, MAX_ITEMS, Span};
use forebay_xlate::kill_point;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags};
use std::cell::RefCell;
use std::io::IoSlice;
use std::os::fd::AsFd;

/// An R2T; a data header; a data digest with the response.
const ITEMS_PER_COMMAND: usize = 3;
/// Their bytes: 28, at most 128 with padding, 4 and 28.
const BYTES_PER_COMMAND: usize = 192;
/// Room for items without a command (conflicts' responses, the Connect's, a TermReq), and for a
/// fourth R2T of commands with several.
const SPARE_ITEMS: usize = 32 + MAX_R2TS_OF_ONE as usize;
const MOST_ITEMS: usize = MAX_QUEUE_ENTRIES * ITEMS_PER_COMMAND + SPARE_ITEMS;
const MOST_BYTES: usize =
    MAX_QUEUE_ENTRIES * BYTES_PER_COMMAND + SPARE_ITEMS * MAX_HEADER_BYTES + 2 * MAX_TERM_REQ_BYTES;
const _: () = assert!(MOST_ITEMS <= MAX_ITEMS && MOST_BYTES < HEADER_BYTES);
const MAX_PARTS: usize = 64;
/// For so few items a small array suffices, with the slots that [`gather`] leaves free.
const FEW_ITEMS: usize = 8;
const FEW_PARTS: usize = 2 * FEW_ITEMS + 2;

#[derive(Debug)]
pub(super) struct Item {
    /// The recorded word: the header's offset and length, and the command that ends with it.
    header: u64,
    /// Bytes of the buffer to send; may be fewer than it holds, or 0.
    data_len: u32,
    data: Option<StagingBuffer>,
}

impl Item {
    pub(super) fn inherited(recorded: &item::Item, data: Option<StagingBuffer>) -> Self {
        Self {
            header: recorded.words()[1],
            data_len: recorded.data_bytes,
            data,
        }
    }

    fn at(&self) -> usize {
        usize::from(self.header as u16)
    }

    fn len(&self) -> usize {
        usize::from((self.header >> 16) as u16)
    }

    fn ends(&self) -> u16 {
        (self.header >> 32) as u16
    }

    fn total(&self) -> usize {
        self.len() + self.data_len as usize
    }
}

pub(super) struct Tx {
    list: Option<List>,
    /// The counter of the first unsent item; its index is this modulo [`MAX_ITEMS`].
    first: u16,
    /// The counter after the last published item.
    published: u16,
    /// Bytes of the first item that are sent.
    sent: usize,
    header_at: usize,
    at: u64,
    queued_bytes: usize,
    blocked: bool,
}

impl Tx {
    pub(super) fn new(at: u64) -> Self {
        Self {
            list: None,
            first: 0,
            published: 0,
            sent: 0,
            header_at: 0,
            at,
            queued_bytes: 0,
            blocked: false,
        }
    }

    /// For a successor: `list` ends at stream position `at`; its first item has `sent` bytes sent.
    pub(super) fn inherit(list: List, at: u64, sent: usize) -> Self {
        let last = list.items.back();
        Self {
            first: 0,
            published: list.items.len() as u16,
            sent,
            header_at: last.map_or(0, |i| i.at() + i.len()),
            at,
            queued_bytes: list.items.iter().map(Item::total).sum::<usize>() - sent,
            blocked: false,
            list: Some(list),
        }
    }

    #[inline]
    pub(super) fn queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    /// The stream position after all queued bytes.
    #[inline]
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    #[inline]
    pub(super) fn count(&self) -> usize {
        self.list.as_ref().map_or(0, |l| l.items.len())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count() == 0
    }

    /// The socket is full: wait until it has room.
    pub(super) fn blocked(&self) -> bool {
        self.blocked
    }

    pub(super) fn unblock(&mut self) {
        self.blocked = false;
    }

    /// Whether an item without a command has room, whatever `used` commands may need.
    pub(super) fn has_room(&self, used: usize) -> bool {
        self.count() + used * ITEMS_PER_COMMAND < MOST_ITEMS
    }

    /// Appends the bytes that `put` writes (it returns their number), then a prefix of the buffer
    /// in `data`.
    #[inline]
    pub(super) fn push(
        &mut self,
        pool: &RefCell<BufferPool>,
        records: &QueueRecords,
        ends: u16,
        data: Option<(StagingBuffer, u32)>,
        put: impl FnOnce(&mut [u8]) -> usize,
    ) {
        if self.list.is_none() {
            self.list = pool.borrow_mut().take_list();
        }
        let Some(list) = &mut self.list else {
            debug_assert!(false, "there are as many lists as connections");
            return;
        };
        if self.header_at + MAX_TERM_REQ_BYTES > HEADER_BYTES {
            self.header_at = 0;
        }
        let header = &mut list.headers.bytes_mut()[self.header_at..][..MAX_TERM_REQ_BYTES];
        let len = put(header);
        let (data, data_len) = match data {
            Some((buffer, len)) => (Some(buffer), len),
            None => (None, 0),
        };
        debug_assert!(data.as_ref().is_none_or(|d| data_len as usize <= d.len()));
        let header = item::Item::header_word(self.header_at as u16, len as u16, ends);
        let data_word = match &data {
            Some(data) if data_len > 0 => item::Item::data_word(data.place(), data_len),
            _ => 0,
        };
        let count = self.first.wrapping_add(list.items.len() as u16);
        records.item(list.records, count, [self.at, header, data_word]);
        let item = Item {
            header,
            data_len,
            data,
        };
        self.header_at += len;
        self.queued_bytes += item.total();
        self.at = self.at.wrapping_add(item.total() as u64);
        list.items.push_back(item);
    }

    /// Guarantees that the queued items will be sent, even by a successor.
    #[inline]
    pub(super) fn publish(&mut self, records: &QueueRecords) {
        let Some(list) = &self.list else { return };
        let tail = self.first.wrapping_add(list.items.len() as u16);
        if tail != self.published {
            self.published = tail;
            records.publish(Span {
                list: list.headers.index(),
                first: self.first,
                tail,
            });
        }
    }

    /// Sends what the socket takes. `ended` gets each command that is all sent, and each buffer.
    #[inline(always)]
    pub(super) fn flush(
        &mut self,
        pool: &RefCell<BufferPool>,
        records: &QueueRecords,
        fd: impl AsFd,
        mut ended: impl FnMut(u16, Option<StagingBuffer>),
    ) -> Result<(), Errno> {
        self.publish(records);
        while let Some(list) = &self.list
            && !self.blocked
        {
            let sent = match list.items.len() <= FEW_ITEMS {
                true => send::<FEW_PARTS>(&fd, list, self.sent),
                false => send::<MAX_PARTS>(&fd, list, self.sent),
            };
            match sent {
                Ok((n, want)) => {
                    kill_point!("tx.sent");
                    self.advance(pool, records, n, &mut ended);
                    self.blocked = n < want;
                }
                Err(Errno::AGAIN) => self.blocked = true,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn advance(
        &mut self,
        pool: &RefCell<BufferPool>,
        records: &QueueRecords,
        mut n: usize,
        ended: &mut impl FnMut(u16, Option<StagingBuffer>),
    ) {
        let Some(list) = &mut self.list else { return };
        self.queued_bytes -= n;
        let before = self.first;
        while let Some(item) = list.items.front() {
            let left = item.total() - self.sent;
            if n < left {
                self.sent += n;
                if self.first != before {
                    records.sent(Span {
                        list: list.headers.index(),
                        first: self.first,
                        tail: self.published,
                    });
                }
                return;
            }
            n -= left;
            self.sent = 0;
            self.first = self.first.wrapping_add(1);
            if let Some(item) = list.items.pop_front()
                && (item.ends() != NONE || item.data.is_some())
            {
                ended(item.ends(), item.data);
            }
        }
        records.sent_all(self.at);
        self.give_back(pool);
    }

    fn give_back(&mut self, pool: &RefCell<BufferPool>) {
        (self.first, self.published, self.sent, self.header_at) = (0, 0, 0, 0);
        if let Some(list) = self.list.take() {
            pool.borrow_mut().give_list(list);
        }
    }

    /// Drops all unsent items; `ended` as in [`Tx::flush`]. The queue's records are already void.
    pub(super) fn abandon(
        &mut self,
        pool: &RefCell<BufferPool>,
        mut ended: impl FnMut(u16, Option<StagingBuffer>),
    ) {
        if let Some(list) = &mut self.list {
            for item in list.items.drain(..) {
                if item.ends() != NONE || item.data.is_some() {
                    ended(item.ends(), item.data);
                }
            }
        }
        self.queued_bytes = 0;
        self.give_back(pool);
    }
}

/// Skips `skip` bytes; returns how many bytes the socket took, and how many it was given.
#[inline]
fn send<const PARTS: usize>(
    fd: impl AsFd,
    list: &List,
    skip: usize,
) -> Result<(usize, usize), Errno> {
    let mut parts = [IoSlice::new(&[]); PARTS];
    let (count, want) = gather(list, skip, &mut parts);
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let mut none = SendAncillaryBuffer::default();
    let n = rustix::net::sendmsg(fd, &parts[..count], &mut none, flags)?;
    Ok((n, want))
}

/// Collects the parts after the first `skip` bytes; returns their number and bytes.
fn gather<'a>(list: &'a List, mut skip: usize, parts: &mut [IoSlice<'a>]) -> (usize, usize) {
    let headers = list.headers.bytes();
    let (mut count, mut bytes) = (0, 0);
    let (mut from, mut to) = (0, 0);
    for item in &list.items {
        let header = item.len();
        let start = item.at() + skip.min(header);
        let end = item.at() + header;
        if to == start && to > from {
            to = end;
        } else {
            if to > from {
                parts[count] = IoSlice::new(&headers[from..to]);
                bytes += to - from;
                count += 1;
            }
            (from, to) = (start, end);
        }
        if count + 2 >= parts.len() {
            break;
        }
        if let Some(data) = item.data.as_ref().filter(|_| item.data_len > 0) {
            if to > from {
                parts[count] = IoSlice::new(&headers[from..to]);
                bytes += to - from;
                count += 1;
            }
            from = to;
            let data = &data.as_slice()[skip.saturating_sub(header)..item.data_len as usize];
            parts[count] = IoSlice::new(data);
            bytes += data.len();
            count += 1;
        }
        skip = 0;
    }
    if to > from {
        parts[count] = IoSlice::new(&headers[from..to]);
        bytes += to - from;
        count += 1;
    }
    (count, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::staging::Staging;
    use crate::io::records::keep_for_ever;
    use crate::memory::Memory;
    use forebay_xlate::boundary::region::check::Seed;
    use forebay_xlate::boundary::region::{MAX_LISTS, Region};
    use proptest::prelude::*;
    use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};
    use std::sync::Arc;
    use std::sync::atomic::Ordering::Relaxed;

    fn pair() -> (std::os::fd::OwnedFd, std::os::fd::OwnedFd) {
        let (a, b) = socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::NONBLOCK,
            None,
        )
        .unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&a, 4096).unwrap();
        (a, b)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
        #[test]
        fn bytes_come_out_as_they_went_in(items in proptest::collection::vec((1usize..150, 0u32..9000, 0usize..3), 1..150)) {
            let memory = Memory::create().unwrap();
            let mut staging = Staging::over(memory.reactor(0).unwrap().staging);
            let region = keep_for_ever(&Arc::new(Region::anonymous(1).unwrap()));
            let records = QueueRecords::new(region, 7, 0).unwrap();
            let pool = RefCell::new(BufferPool::default());
            assert!(pool.borrow_mut().grow(memory, region, 1));
            let begin = u64::MAX - 70_000;
            let mut tx = Tx::new(begin);
            let (a, b) = pair();
            let (mut want, mut got) = (Vec::new(), Vec::new());
            let (mut ended, mut out) = (0u16, 0);
            let mut scrap = [0u8; 5000];
            for (i, (len, data, flush)) in items.iter().enumerate() {
                let header = |out: &mut [u8]| { out[..*len].fill(i as u8); *len };
                want.resize(want.len() + len, i as u8);
                if *data == 0 {
                    tx.push(&pool, &records, i as u16, None, header);
                } else {
                    let mut buffer = staging.allocate(data + 1).unwrap();
                    buffer.as_mut_slice().fill(!(i as u8));
                    want.resize(want.len() + *data as usize, !(i as u8));
                    tx.push(&pool, &records, i as u16, Some((buffer, *data)), header);
                    out += 1;
                }
                let mut rounds = *flush;
                while rounds > 0 || !tx.has_room(0) {
                    rounds = rounds.saturating_sub(1);
                    tx.flush(&pool, &records, &a, |slot, buffer| {
                        assert_eq!(slot, ended);
                        ended += 1;
                        out -= usize::from(buffer.is_some());
                        if let Some(b) = buffer { staging.release(b) }
                    }).unwrap();
                    if let Ok((_, n)) = recv(&b, &mut scrap[..], RecvFlags::DONTWAIT) {
                        got.extend_from_slice(&scrap[..n]);
                        tx.unblock();
                    }
                    prop_assert!(tx.list.as_ref().is_none_or(|l| l.items.capacity() == MAX_ITEMS));
                    let span = Span::of_word(region.queues()[7].tx_span.load(Relaxed), MAX_LISTS).unwrap();
                    prop_assert_eq!(span.map_or(0, Span::count), tx.count());
                    if let (Some(span), Some(list)) = (span, &tx.list) {
                        let mut at = tx.at.wrapping_sub(tx.queued_bytes as u64 + tx.sent as u64);
                        for (place, item) in span.places().zip(&list.items) {
                            let seed = Seed::items(region.header().key.load(Relaxed), 7);
                            let seen = list.records[usize::from(place)].sound(seed, place).unwrap();
                            prop_assert_eq!((seen.start, seen.ends, seen.data_bytes), (at, item.ends(), item.data_len));
                            at = seen.end();
                        }
                        prop_assert_eq!(at, tx.at);
                    }
                }
            }
            while got.len() < want.len() {
                tx.unblock();
                tx.flush(&pool, &records, &a, |_, buffer| if let Some(b) = buffer { out -= 1; staging.release(b) }).unwrap();
                while let Ok((_, n)) = recv(&b, &mut scrap[..], RecvFlags::DONTWAIT) {
                    got.extend_from_slice(&scrap[..n]);
                }
            }
            let want_bytes = want.len() as u64;
            prop_assert_eq!(got, want);
            prop_assert_eq!((out, staging.out(), tx.queued_bytes()), (0, 0, 0));
            prop_assert!(tx.is_empty());
            prop_assert_eq!(tx.at().wrapping_sub(begin), want_bytes);
            prop_assert_eq!(region.queues()[7].tx_at.load(Relaxed), tx.at());
        }
    }
}
