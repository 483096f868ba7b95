//! Lists of what to send, shared by the connections of a reactor.
//!
//! **Design.** A connection has a list while it has something to send. Lists come from here and go back,
//! last in first out, so an idle connection has none and the busy ones work in the same few warm pages.
//! Each connection brings one when it begins ([`BufferPool::grow`]), and takes one away when it has ended, so
//! there is always one for whoever needs it. Its room is made when more connections than ever before
//! have something to send at the same moment, and never again for the same number.
//!
//! **Not here:** data of commands, which is in staging memory.

use super::tx::Item;
use crate::memory::{HeaderList, Memory};
use forebay_xlate::boundary::region::Region;
use forebay_xlate::boundary::region::item::{ItemRecord, MAX_ITEMS};
use std::collections::VecDeque;

/// What a connection has to send.
pub(super) struct List {
    pub headers: HeaderList,
    pub records: &'static [ItemRecord; MAX_ITEMS],
    pub items: VecDeque<Item>,
}

impl List {
    /// An empty one.
    pub(super) fn new(headers: HeaderList, region: &'static Region) -> Self {
        let records = region.all_items(usize::from(headers.index()));
        Self {
            records: records.expect("region and memory have the same lists"),
            headers,
            items: VecDeque::new(),
        }
    }
}

/// See the module's text.
#[derive(Default)]
pub(super) struct BufferPool {
    /// The one that was used last is at the back, what was never used in front.
    lists: VecDeque<List>,
}

impl BufferPool {
    /// A connection begins; false when there is no list for it. `connections` there are then.
    pub(super) fn grow(
        &mut self,
        memory: &'static Memory,
        region: &'static Region,
        connections: usize,
    ) -> bool {
        let Some(headers) = memory.take_list() else {
            return false;
        };
        self.lists.push_front(List::new(headers, region));
        self.lists
            .reserve(connections.saturating_sub(self.lists.len()));
        true
    }

    /// A connection has ended, and has given back what it had.
    pub(super) fn shrink(&mut self) {
        debug_assert!(!self.lists.is_empty());
        self.lists.pop_front();
    }

    /// An empty list.
    #[inline(never)]
    pub(super) fn take_list(&mut self) -> Option<List> {
        let mut list = self.lists.pop_back()?;
        if list.items.capacity() == 0 {
            list.items.reserve_exact(MAX_ITEMS);
        }
        Some(list)
    }

    #[inline]
    pub(super) fn give_list(&mut self, mut list: List) {
        list.items.clear();
        self.lists.push_back(list);
    }
}
