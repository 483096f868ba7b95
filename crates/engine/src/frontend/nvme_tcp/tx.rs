//! What a connection has to send, and how it is sent.
//!
//! **Design.** Headers and small responses are written into a ring of bytes; data stays where it is, in
//! staging memory. A list of items says in which order they go out. Its records in the state region
//! say the same to a successor, once they are *published*, which is just before they are sent.
//! [`Tx::flush`] makes one `sendmsg` of up to [`MAX_PARTS`] parts; what the socket doesn't take stays,
//! and the connection is *blocked* until the socket has room. An item's buffer, and the command it ends,
//! are given to the caller when its last byte has been handed to the kernel, and not before: what is not
//! published is not answered, and a successor carries it out again.
//!
//! A list comes from the reactor's pool and is there only while there is something to send; then it begins
//! at its begin. Its size is fixed: every command has at most [`ITEMS_PER_COMMAND`] items of
//! [`BYTES_PER_COMMAND`] bytes here, and keeps its slot until the last is sent; the few things that
//! belong to no command are counted by [`Tx::has_room`].
//!
//! **Not here:** when to send ([`super`]).

use super::command::MAX_R2TS_OF_ONE;
use super::pool::{BufferPool, List};
use super::record::QueueRecords;
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

/// An R2T, a data header, a data digest with the response.
const ITEMS_PER_COMMAND: usize = 3;
/// The same in bytes: 28, at most 128 with padding, 4 and 28.
const BYTES_PER_COMMAND: usize = 192;
/// Room for what belongs to no command: conflicts' responses, the Connect's, a TermReq; and for a fourth R2T of
/// each command that may have so many.
const SPARE_ITEMS: usize = 32 + MAX_R2TS_OF_ONE as usize;
/// Items of the largest queue.
const MOST_ITEMS: usize = MAX_QUEUE_ENTRIES * ITEMS_PER_COMMAND + SPARE_ITEMS;
/// Their bytes, with what may be left out at the end of the ring.
const MOST_BYTES: usize =
    MAX_QUEUE_ENTRIES * BYTES_PER_COMMAND + SPARE_ITEMS * MAX_HEADER_BYTES + 2 * MAX_TERM_REQ_BYTES;
const _: () = assert!(MOST_ITEMS <= MAX_ITEMS && MOST_BYTES < HEADER_BYTES);
/// Parts of one `sendmsg`.
const MAX_PARTS: usize = 64;
/// With so few items, room is made for their parts alone: a header and data of each, and what [`gather`] leaves free.
const FEW_ITEMS: usize = 8;
const FEW_PARTS: usize = 2 * FEW_ITEMS + 2;

/// What is in a list's records, with the buffers themselves.
#[derive(Debug)]
pub(super) struct Item {
    /// As it is recorded: its header's place in the list's bytes, how long that is, and the command that has
    /// ended when this is sent.
    header: u64,
    /// How much of the data is sent: less than all of the buffer, or nothing, perhaps.
    data_len: u32,
    /// Held until this is sent.
    data: Option<StagingBuffer>,
}

impl Item {
    /// An item that is recorded, with its buffer.
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

/// See the module's text.
pub(super) struct Tx {
    list: Option<List>,
    /// A counter of the first item that isn't all sent; its place is this modulo [`MAX_ITEMS`].
    first: u16,
    /// The end of those that are published, such a counter too.
    published: u16,
    /// Bytes of the first that are sent.
    sent: usize,
    /// Where the next header goes.
    header_at: usize,
    /// The position in the stream after all that is queued.
    at: u64,
    queued_bytes: usize,
    blocked: bool,
}

impl Tx {
    /// Nothing to send; the stream is at `at`.
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

    /// What a successor has to send: the items of `list`, which are recorded and published from the list's
    /// begin on, up to the position `at` of the stream. Of the first, `sent` bytes are sent already.
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

    /// Bytes not yet sent.
    #[inline]
    pub(super) fn queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    /// The position in the stream after all that is queued.
    #[inline]
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// How many items they are.
    #[inline]
    pub(super) fn count(&self) -> usize {
        self.list.as_ref().map_or(0, |l| l.items.len())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count() == 0
    }

    /// The socket took less than it was given: wait until it has room.
    pub(super) fn blocked(&self) -> bool {
        self.blocked
    }

    /// The socket has room again, perhaps.
    pub(super) fn unblock(&mut self) {
        self.blocked = false;
    }

    /// Whether something that belongs to no command has room, whatever `used` commands may need.
    pub(super) fn has_room(&self, used: usize) -> bool {
        self.count() + used * ITEMS_PER_COMMAND < MOST_ITEMS
    }

    /// Appends bytes that `put` writes into the buffer it is given; it returns how many they are. `data`
    /// is a buffer, of which the first so many bytes follow.
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

    /// What is queued will be sent, whatever happens.
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
    ///
    /// # Errors
    /// The connection's.
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

    /// The list is empty: others may have it.
    fn give_back(&mut self, pool: &RefCell<BufferPool>) {
        (self.first, self.published, self.sent, self.header_at) = (0, 0, 0, 0);
        if let Some(list) = self.list.take() {
            pool.borrow_mut().give_list(list);
        }
    }

    /// Drops everything unsent; `ended` as in [`Tx::flush`]. The queue's records don't count any more.
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

/// Sends what comes after the first `skip` bytes, in at most so many parts; returns how many bytes the socket took, and
/// how many it was given.
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

/// Collects the parts to send next, after the first `skip` bytes; returns how many they are, and their
/// bytes.
fn gather<'a>(list: &'a List, mut skip: usize, parts: &mut [IoSlice<'a>]) -> (usize, usize) {
    let headers = list.headers.bytes();
    let (mut count, mut bytes) = (0, 0);
    // A run of neighbours among the headers.
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
    use crate::memory::Memory;
    use crate::records::keep_for_ever;
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
                    let mut buffer = staging.take(data + 1).unwrap();
                    buffer.as_mut_slice().fill(!(i as u8));
                    want.resize(want.len() + *data as usize, !(i as u8));
                    tx.push(&pool, &records, i as u16, Some((buffer, *data)), header);
                    out += 1;
                }
                let mut rounds = *flush;
                // As its users do: never beyond what was reserved.
                while rounds > 0 || !tx.has_room(0) {
                    rounds = rounds.saturating_sub(1);
                    tx.flush(&pool, &records, &a, |slot, buffer| {
                        assert_eq!(slot, ended);
                        ended += 1;
                        out -= usize::from(buffer.is_some());
                        if let Some(b) = buffer { staging.give(b) }
                    }).unwrap();
                    if let Ok((_, n)) = recv(&b, &mut scrap[..], RecvFlags::DONTWAIT) {
                        got.extend_from_slice(&scrap[..n]);
                        tx.unblock();
                    }
                    prop_assert!(tx.list.as_ref().is_none_or(|l| l.items.capacity() == MAX_ITEMS));
                    // A successor sees the same items, and where they begin.
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
                tx.flush(&pool, &records, &a, |_, buffer| if let Some(b) = buffer { out -= 1; staging.give(b) }).unwrap();
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
