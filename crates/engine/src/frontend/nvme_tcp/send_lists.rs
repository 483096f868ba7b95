//! Send lists, shared by a reactor's connections. A connection has a list only while it has
//! something to send. Lists are reused last in, first out, so busy connections work in few warm
//! pages. Each connection adds a list when it begins and removes one when it ends, so one is always
//! free.

use super::tx::Item;
use crate::memory::{HeaderList, Memory};
use forebay_xlate::boundary::region::Region;
use forebay_xlate::boundary::region::item::{ItemRecord, MAX_ITEMS};
use std::collections::VecDeque;

pub(super) struct List {
    pub headers: HeaderList,
    pub records: &'static [ItemRecord; MAX_ITEMS],
    pub items: VecDeque<Item>,
}

impl List {
    pub(super) fn new(headers: HeaderList, region: &'static Region) -> Self {
        let records = region.all_items(usize::from(headers.index()));
        Self {
            records: records.expect("region and memory have the same lists"),
            headers,
            items: VecDeque::new(),
        }
    }
}

#[derive(Default)]
pub(super) struct BufferPool {
    /// The last used one is at the back, unused ones in front.
    lists: VecDeque<List>,
}

impl BufferPool {
    /// A connection begins, the `connections`-th; false when there is no list for it.
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

    /// A connection has ended and returned its list.
    pub(super) fn shrink(&mut self) {
        debug_assert!(!self.lists.is_empty());
        self.lists.pop_front();
    }

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
