//! Commands that ended, until their frontend takes them.
//!
//! **Purpose.** Each frontend gets its own commands back, in the order in which they ended.
//! **Design.** A queue of fixed room for each frontend: none of them sees, or waits for, another's.
//! **Not here:** what a frontend makes of it.

use super::command::{DoneIo, FrontendIndex};
use super::slab::MAX_IOS;
use std::collections::VecDeque;

/// So many frontends a reactor has at most.
pub const MAX_FRONTENDS: usize = 4;

/// See the module's text.
pub(crate) struct EndedQueues([VecDeque<DoneIo>; MAX_FRONTENDS]);

impl EndedQueues {
    /// Nothing has ended.
    pub(crate) fn new() -> Self {
        Self(std::array::from_fn(|_| VecDeque::with_capacity(MAX_IOS)))
    }

    /// A command has ended.
    #[inline]
    pub(crate) fn push(&mut self, done: DoneIo) {
        self.0[at(done.owner.frontend)].push_back(done);
    }

    /// The next of a frontend's.
    #[inline]
    pub(crate) fn next(&mut self, frontend: FrontendIndex) -> Option<DoneIo> {
        self.0[at(frontend)].pop_front()
    }

    /// Whether a frontend has none to take.
    #[inline]
    pub(crate) fn is_empty_for(&self, frontend: FrontendIndex) -> bool {
        self.0[at(frontend)].is_empty()
    }

    /// How many a frontend has to take.
    #[cfg(test)]
    pub(crate) fn count(&self, frontend: FrontendIndex) -> usize {
        self.0[at(frontend)].len()
    }

    /// Whether no frontend has any to take.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(VecDeque::is_empty)
    }
}

/// The place of a frontend's queue, without a check that could fail.
#[inline]
fn at(frontend: FrontendIndex) -> usize {
    usize::from(frontend.0) % MAX_FRONTENDS
}
