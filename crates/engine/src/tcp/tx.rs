//! What a connection has to send, and how it is sent.
//!
//! **Design.** Headers and small responses are appended to one byte buffer; data stays where it is, in
//! staging memory. A list of items says in which order they go out. [`Tx::flush`] makes one `sendmsg`
//! of up to [`MAX_PARTS`] parts; what the socket doesn't take stays, and the connection is *blocked*
//! until the socket has room. An item's buffer, and the command it ends, are given to the caller when
//! its last byte has been handed to the kernel.
//!
//! Both lists come from the reactor's pool and are there only while there is something to send. Their
//! size is fixed: every command has at most [`ITEMS_PER_COMMAND`] items of [`BYTES_PER_COMMAND`] bytes
//! here, and keeps its slot until the last is sent; the few things that belong to no command are counted
//! by [`Tx::has_room`].
//!
//! **Not here:** when to send ([`super`]).

use super::pool::{Lists, Pool};
use super::slots::NONE;
use crate::core::staging::StagingBuffer;
use forebay_nvme::tcp::{MAX_HEADER_BYTES, MAX_TERM_REQ_BYTES};
use forebay_xlate::boundary::region::MAX_QUEUE_ENTRIES;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags};
use std::cell::RefCell;
use std::io::IoSlice;
use std::os::fd::AsFd;

/// An R2T, a data header, a data digest with the response.
const ITEMS_PER_COMMAND: usize = 3;
/// The same in bytes: 28, at most 128 with padding, 4 and 28.
const BYTES_PER_COMMAND: usize = 192;
/// Room for what belongs to no command: conflicts' responses, the Connect's, a TermReq.
const SPARE_ITEMS: usize = 32;
/// Items of the largest queue.
pub(super) const MAX_ITEMS: usize = MAX_QUEUE_ENTRIES * ITEMS_PER_COMMAND + SPARE_ITEMS;
/// Their bytes.
pub(super) const MAX_BYTES: usize =
    MAX_QUEUE_ENTRIES * BYTES_PER_COMMAND + SPARE_ITEMS * MAX_HEADER_BYTES + MAX_TERM_REQ_BYTES;
/// Parts of one `sendmsg`.
const MAX_PARTS: usize = 64;

#[derive(Debug)]
pub(super) struct Item {
    /// Its header's place in `bytes`.
    start: u32,
    len: u32,
    data: Option<StagingBuffer>,
    /// How much of the data is sent: less than all of the buffer, perhaps.
    data_len: u32,
    /// The command that has ended when this is sent.
    ends: u16,
}

impl Item {
    fn total(&self) -> usize {
        self.len as usize + self.data_len as usize
    }
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Tx {
    lists: Lists,
    /// The first item that isn't all sent.
    first: usize,
    /// Bytes of it that are.
    sent: usize,
    queued_bytes: usize,
    blocked: bool,
}

impl Tx {
    /// Nothing to send.
    pub(super) fn new() -> Self {
        Self {
            lists: Lists::none(),
            first: 0,
            sent: 0,
            queued_bytes: 0,
            blocked: false,
        }
    }

    /// Bytes not yet sent.
    #[inline]
    pub(super) fn queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first == self.lists.items.len()
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
        self.lists.items.len() - self.first + used * ITEMS_PER_COMMAND < MAX_ITEMS
    }

    /// Appends bytes that `put` writes into the buffer it is given; it returns how many they are.
    #[inline]
    pub(super) fn push(
        &mut self,
        pool: &RefCell<Pool>,
        ends: u16,
        put: impl FnOnce(&mut [u8]) -> usize,
    ) {
        self.push_with(pool, ends, None, 0, put);
    }

    /// Appends a header and the first `data_len` bytes of a buffer.
    #[inline]
    pub(super) fn push_data(
        &mut self,
        pool: &RefCell<Pool>,
        ends: u16,
        data: StagingBuffer,
        data_len: u32,
        put: impl FnOnce(&mut [u8]) -> usize,
    ) {
        self.push_with(pool, ends, Some(data), data_len, put);
    }

    fn push_with(
        &mut self,
        pool: &RefCell<Pool>,
        ends: u16,
        data: Option<StagingBuffer>,
        data_len: u32,
        put: impl FnOnce(&mut [u8]) -> usize,
    ) {
        if self.lists.items.capacity() == 0 {
            self.lists = pool.borrow_mut().take_lists();
        }
        self.compact();
        let start = self.lists.bytes.len();
        self.lists.bytes.resize(start + MAX_TERM_REQ_BYTES, 0);
        let len = put(&mut self.lists.bytes[start..]);
        self.lists.bytes.truncate(start + len);
        debug_assert!(data.as_ref().is_none_or(|d| data_len as usize <= d.len()));
        let item = Item {
            start: start as u32,
            len: len as u32,
            data,
            data_len,
            ends,
        };
        self.queued_bytes += item.total();
        self.lists.items.push(item);
    }

    /// Makes room at the end, where a backlog has kept the lists from being emptied.
    fn compact(&mut self) {
        if self.first == 0
            || (self.lists.items.len() < MAX_ITEMS
                && self.lists.bytes.len() + MAX_TERM_REQ_BYTES <= MAX_BYTES)
        {
            return;
        }
        self.lists.items.drain(..self.first);
        self.first = 0;
        let gone = self
            .lists
            .items
            .first()
            .map_or(self.lists.bytes.len(), |i| i.start as usize);
        self.lists.bytes.drain(..gone);
        for item in &mut self.lists.items {
            item.start -= gone as u32;
        }
    }

    /// Sends what the socket takes. `ended` gets each command that is all sent, and each buffer.
    ///
    /// # Errors
    /// The connection's.
    pub(super) fn flush(
        &mut self,
        pool: &RefCell<Pool>,
        fd: impl AsFd,
        mut ended: impl FnMut(u16, Option<StagingBuffer>),
    ) -> Result<(), Errno> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        while !self.is_empty() && !self.blocked {
            let mut parts = [IoSlice::new(&[]); MAX_PARTS];
            let (count, want) = self.gather(&mut parts);
            match rustix::net::sendmsg(
                &fd,
                &parts[..count],
                &mut SendAncillaryBuffer::default(),
                flags,
            ) {
                Ok(n) => {
                    self.advance(n, &mut ended);
                    self.blocked = n < want;
                }
                Err(Errno::AGAIN) => self.blocked = true,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        }
        if self.is_empty() {
            self.give_back(pool);
        }
        Ok(())
    }

    /// The lists are empty: others may have them.
    fn give_back(&mut self, pool: &RefCell<Pool>) {
        pool.borrow_mut()
            .give_lists(std::mem::replace(&mut self.lists, Lists::none()));
    }

    /// Collects the parts to send next; returns how many they are, and their bytes.
    fn gather<'a>(&'a self, parts: &mut [IoSlice<'a>; MAX_PARTS]) -> (usize, usize) {
        let (mut count, mut bytes) = (0, 0);
        // A run of neighbours in `bytes`.
        let (mut from, mut to) = (0, 0);
        let mut skip = self.sent;
        for item in &self.lists.items[self.first..] {
            let header = item.len as usize;
            let start = item.start as usize + skip.min(header);
            let end = item.start as usize + header;
            if to == start && to > from {
                to = end;
            } else {
                if to > from {
                    parts[count] = IoSlice::new(&self.lists.bytes[from..to]);
                    bytes += to - from;
                    count += 1;
                }
                (from, to) = (start, end);
            }
            if count + 2 >= MAX_PARTS {
                break;
            }
            if let Some(data) = &item.data {
                if to > from {
                    parts[count] = IoSlice::new(&self.lists.bytes[from..to]);
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
            parts[count] = IoSlice::new(&self.lists.bytes[from..to]);
            bytes += to - from;
            count += 1;
        }
        (count, bytes)
    }

    fn advance(&mut self, mut n: usize, ended: &mut impl FnMut(u16, Option<StagingBuffer>)) {
        self.queued_bytes -= n;
        while let Some(item) = self.lists.items.get_mut(self.first) {
            let left = item.total() - self.sent;
            if n < left {
                self.sent += n;
                return;
            }
            n -= left;
            self.sent = 0;
            self.first += 1;
            if item.ends != NONE || item.data.is_some() {
                ended(item.ends, item.data.take());
            }
        }
        self.lists.items.clear();
        self.lists.bytes.clear();
        self.first = 0;
    }

    /// Drops everything unsent; `ended` as in [`Tx::flush`].
    pub(super) fn abandon(
        &mut self,
        pool: &RefCell<Pool>,
        mut ended: impl FnMut(u16, Option<StagingBuffer>),
    ) {
        for item in self.lists.items.drain(self.first..) {
            if item.ends != NONE || item.data.is_some() {
                ended(item.ends, item.data);
            }
        }
        (self.first, self.sent, self.queued_bytes) = (0, 0, 0);
        self.give_back(pool);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::staging::Staging;
    use proptest::prelude::*;
    use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};

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
            let mut staging = Staging::new().unwrap();
            let pool = RefCell::new(Pool::new());
            let mut tx = Tx::new();
            let (a, b) = pair();
            let (mut want, mut got) = (Vec::new(), Vec::new());
            let (mut ended, mut out) = (0u16, 0);
            let mut scrap = [0u8; 5000];
            for (i, (len, data, flush)) in items.iter().enumerate() {
                let header = |out: &mut [u8]| { out[..*len].fill(i as u8); *len };
                want.resize(want.len() + len, i as u8);
                if *data == 0 {
                    tx.push(&pool, i as u16, header);
                } else {
                    let mut buffer = staging.take(data + 1).unwrap();
                    buffer.as_mut_slice().fill(!(i as u8));
                    want.resize(want.len() + *data as usize, !(i as u8));
                    tx.push_data(&pool, i as u16, buffer, *data, header);
                    out += 1;
                }
                let mut rounds = *flush;
                // As its users do: never beyond what was reserved.
                while rounds > 0 || !tx.has_room(0) {
                    rounds = rounds.saturating_sub(1);
                    tx.flush(&pool, &a, |slot, buffer| {
                        assert_eq!(slot, ended);
                        ended += 1;
                        out -= usize::from(buffer.is_some());
                        if let Some(b) = buffer { staging.give(b) }
                    }).unwrap();
                    if let Ok((_, n)) = recv(&b, &mut scrap[..], RecvFlags::DONTWAIT) {
                        got.extend_from_slice(&scrap[..n]);
                        tx.unblock();
                    }
                    let (items, bytes) = (tx.lists.items.capacity(), tx.lists.bytes.capacity());
                    prop_assert!(items == 0 || (items == MAX_ITEMS && bytes == MAX_BYTES));
                }
            }
            while got.len() < want.len() {
                tx.unblock();
                tx.flush(&pool, &a, |_, buffer| if let Some(b) = buffer { out -= 1; staging.give(b) }).unwrap();
                while let Ok((_, n)) = recv(&b, &mut scrap[..], RecvFlags::DONTWAIT) {
                    got.extend_from_slice(&scrap[..n]);
                }
            }
            prop_assert_eq!(got, want);
            prop_assert_eq!((out, staging.out(), tx.queued_bytes()), (0, 0, 0));
            prop_assert!(tx.is_empty());
        }
    }
}
