//! Lists and buffers that a connection needs only at times, shared by all of a reactor.
//!
//! **Design.** A connection has lists of what to send while it has something to send, and a buffer for
//! received bytes while it keeps some. They come from here and go back, last in first out, so an idle
//! connection has none and the busy ones work in the same few warm pages. [`Pool::new`] makes
//! [`SPARES`] of each; one more is made when more connections than ever before need one at the same
//! moment, so at most as many as there are connections, and never again for the same number.
//!
//! **Not here:** data of commands, which is in staging memory.

use super::rx::RECEIVE_BYTES;
use super::tx::{Item, MAX_BYTES, MAX_ITEMS};

/// Made at the start.
const SPARES: usize = 32;

/// What a connection has to send.
#[derive(Debug)]
pub(super) struct Lists {
    pub items: Vec<Item>,
    pub bytes: Vec<u8>,
}

impl Lists {
    fn new() -> Self {
        Self {
            items: Vec::with_capacity(MAX_ITEMS),
            bytes: Vec::with_capacity(MAX_BYTES),
        }
    }

    /// None: what a connection has that has nothing to send.
    pub(super) const fn none() -> Self {
        Self {
            items: Vec::new(),
            bytes: Vec::new(),
        }
    }
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Pool {
    lists: Vec<Lists>,
    buffers: Vec<Vec<u8>>,
}

impl Pool {
    pub(super) fn new() -> Self {
        Self {
            lists: (0..SPARES).map(|_| Lists::new()).collect(),
            buffers: (0..SPARES)
                .map(|_| Vec::with_capacity(RECEIVE_BYTES))
                .collect(),
        }
    }

    /// Has room to take back as many as so many connections can have taken.
    pub(super) fn reserve(&mut self, connections: usize) {
        self.lists
            .reserve((connections + SPARES).saturating_sub(self.lists.len()));
        self.buffers
            .reserve((connections + SPARES).saturating_sub(self.buffers.len()));
    }

    /// Empty lists.
    #[inline]
    pub(super) fn take_lists(&mut self) -> Lists {
        self.lists.pop().unwrap_or_else(Lists::new)
    }

    #[inline]
    pub(super) fn give_lists(&mut self, mut lists: Lists) {
        if lists.items.capacity() > 0 {
            lists.items.clear();
            lists.bytes.clear();
            self.lists.push(lists);
        }
    }

    /// An empty buffer of at least [`RECEIVE_BYTES`].
    #[inline]
    pub(super) fn take_buffer(&mut self) -> Vec<u8> {
        self.buffers
            .pop()
            .unwrap_or_else(|| Vec::with_capacity(RECEIVE_BYTES))
    }

    #[inline]
    pub(super) fn give_buffer(&mut self, mut buffer: Vec<u8>) {
        if buffer.capacity() > 0 {
            buffer.clear();
            self.buffers.push(buffer);
        }
    }
}
