//! Ended commands, in order, until their frontend takes them. Each frontend has its own queue of
//! fixed size.

use super::command::{DoneIo, FrontendIndex};
use super::slab::MAX_IOS;
use std::collections::VecDeque;

/// Most frontends of a reactor.
pub(crate) const MAX_FRONTENDS: usize = 4;

pub(crate) struct EndedQueues([VecDeque<DoneIo>; MAX_FRONTENDS]);

impl EndedQueues {
    pub(crate) fn new() -> Self {
        Self(std::array::from_fn(|_| VecDeque::with_capacity(MAX_IOS)))
    }

    #[inline]
    pub(crate) fn push(&mut self, done: DoneIo) {
        self.0[at(done.owner.frontend)].push_back(done);
    }

    #[inline]
    pub(crate) fn next(&mut self, frontend: FrontendIndex) -> Option<DoneIo> {
        self.0[at(frontend)].pop_front()
    }

    #[inline]
    pub(crate) fn is_empty_for(&self, frontend: FrontendIndex) -> bool {
        self.0[at(frontend)].is_empty()
    }

    #[cfg(test)]
    pub(crate) fn count(&self, frontend: FrontendIndex) -> usize {
        self.0[at(frontend)].len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(VecDeque::is_empty)
    }
}

/// The index of a frontend's queue, in bounds for any value.
#[inline]
fn at(frontend: FrontendIndex) -> usize {
    usize::from(frontend.0) % MAX_FRONTENDS
}
