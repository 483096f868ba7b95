//! What a lane may still use, and the short way of an I/O.
//!
//! **Design.** Most I/Os are like the one of their lane before them. So if two reads or two writes in a row are as long as each other,
//! so many of them are paid for *ahead*, if there is enough of everything ([`SHIFT`]); then each of the others is one
//! comparison and one count. Whoever looks at what is left, or changes it, has those given back first that did not begin. So
//! nothing is charged, refused or found to be used up otherwise than one by one, in whatever order they come; and what is
//! kept of costs is never older than what is paid for.
//!
//! **Not here:** what a lane is given, and what becomes of an I/O that this does not cover.

use crate::cost::{CostTable, Frontend, Operation};
use crate::units::{Resource, Units};

/// Ahead are 8, with the one that begins: as many as a host often asks for at once.
const SHIFT: u32 = 3;
/// In the place of its kinds: it is shut, and no cost is found.
const SHUT: u32 = u32::MAX;
/// Beside a length: the last was as long, and none is paid for.
const NONE_AHEAD: u64 = 1 << 32;
/// What is told apart: reads and writes, by [`Operation`]. All others are rare.
const SORTS: usize = 2;

/// See the module's text. What an I/O that is paid for looks at is in one line of a cache.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(super) struct Purse {
    /// What may still be used in this window, without what is paid for ahead.
    left: Units,
    /// Of the processor's time, what may be used until it is looked at again; the same.
    part_ns: i32,
    /// Where its frontend's costs are in a row, or [`SHUT`].
    kinds: u32,
    /// How long the last one was, of each sort; with [`NONE_AHEAD`] unless some are paid for.
    alike: [u64; SORTS],
    /// So many like that are.
    ahead: [u32; SORTS],
    /// What each of those cost.
    costs: [Units; SORTS],
}

impl Default for Purse {
    fn default() -> Self {
        Self {
            left: Units::ZERO,
            part_ns: 0,
            kinds: SHUT,
            alike: [NONE_AHEAD; SORTS],
            ahead: [0; SORTS],
            costs: [Units::ZERO; SORTS],
        }
    }
}

impl Purse {
    /// See [`super::Scheduler::pass`].
    #[inline(always)]
    pub(super) fn pass(
        &mut self,
        costs: &CostTable,
        operation: Operation,
        len: u32,
    ) -> Option<bool> {
        let sort = operation as usize;
        match self.alike.get_mut(sort) {
            Some(alike) if *alike == u64::from(len) => {
                self.ahead[sort] -= 1;
                if self.ahead[sort] == 0 {
                    *alike |= NONE_AHEAD;
                }
                // Or they would not be paid for.
                Some(false)
            }
            _ => self.pass_unlike(costs, operation, len),
        }
    }

    #[inline(never)]
    fn pass_unlike(&mut self, costs: &CostTable, operation: Operation, len: u32) -> Option<bool> {
        // A copy, so that it is known how it lies in memory.
        let cost = *costs.row(self.kinds, operation, len)?;
        let sort = operation as usize;
        if let Some(alike) = self.alike.get_mut(sort) {
            let new = u64::from(len) | NONE_AHEAD;
            if *alike == new {
                if self.pay_ahead(sort, &cost) {
                    return Some(false);
                }
            } else {
                self.give_back(sort);
                self.alike[sort] = new;
            }
        }
        let cpu_ns = cost[Resource::Cpu];
        if self.part_ns > cpu_ns && self.left.take(&cost) {
            self.part_ns -= cpu_ns;
            return Some(false);
        }
        // Perhaps with what is paid for and did not begin.
        self.settle();
        if !self.left.take(&cost) {
            return None;
        }
        let part_ns = self.part_ns;
        self.part_ns = part_ns - cpu_ns;
        Some(part_ns <= cpu_ns)
    }

    /// One begins, and others like it are paid for, if there is so much.
    #[inline]
    fn pay_ahead(&mut self, sort: usize, cost: &Units) -> bool {
        // The last of them may not be the one that uses the part up.
        if self.part_ns >> SHIFT <= cost[Resource::Cpu] || !self.left.has_times(cost, SHIFT) {
            return false;
        }
        self.left = self.left.minus(&cost.times(1 << SHIFT));
        self.part_ns -= cost[Resource::Cpu] << SHIFT;
        self.ahead[sort] = (1 << SHIFT) - 1;
        self.alike[sort] &= !NONE_AHEAD;
        self.costs[sort] = *cost;
        true
    }

    /// What was paid for ahead is paid for no more.
    #[inline]
    fn settle(&mut self) {
        if self.ahead != [0; SORTS] {
            (0..SORTS).for_each(|sort| self.give_back(sort));
        }
    }

    fn give_back(&mut self, sort: usize) {
        let ahead = std::mem::take(&mut self.ahead[sort]) as i32;
        if ahead > 0 {
            let cost = self.costs[sort].times(ahead);
            self.left = self.left.plus(&cost);
            self.part_ns += cost[Resource::Cpu];
            self.alike[sort] |= NONE_AHEAD;
        }
    }

    /// What may still be used in this window.
    #[inline]
    pub(super) fn left(&self) -> Units {
        let mut left = self.left;
        if self.ahead != [0; SORTS] {
            for (cost, ahead) in self.costs.iter().zip(self.ahead) {
                left = left.plus(&cost.times(ahead as i32));
            }
        }
        left
    }

    /// The same, to be changed.
    #[inline]
    pub(super) fn left_mut(&mut self) -> &mut Units {
        self.settle();
        &mut self.left
    }

    /// Of the processor's time, what may be used until it is looked at again.
    #[inline]
    pub(super) fn part_ns(&self) -> i32 {
        let paid = self.costs.iter().zip(self.ahead);
        let paid = paid.map(|(cost, ahead)| cost[Resource::Cpu] * ahead as i32);
        self.part_ns + paid.sum::<i32>()
    }

    /// It is so much from now on.
    #[inline]
    pub(super) fn set_part_ns(&mut self, part_ns: i32) {
        self.settle();
        self.part_ns = part_ns;
    }

    /// Whether such an I/O is paid for.
    #[cfg(test)]
    pub(super) fn is_paid_for(&self, operation: Operation, len: u32) -> bool {
        self.alike.get(operation as usize) == Some(&len.into())
    }

    /// I/Os that come by this frontend may pass from now on.
    pub(super) fn open(&mut self, frontend: Frontend) {
        self.settle();
        self.kinds = frontend.kinds();
    }

    /// None of them pass any more.
    #[inline]
    pub(super) fn shut(&mut self) {
        self.settle();
        self.kinds = SHUT;
    }
}
