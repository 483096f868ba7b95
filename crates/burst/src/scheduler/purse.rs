//! What a lane may still use, and the short way of an I/O.
//!
//! **Design.** Most I/Os are like the one of their lane before them. So when a read or a write is as long as the last one was, [`AHEAD`]
//! of them are paid for at once, if there is enough of everything; then each of the others is one comparison, one count,
//! and the processor's time of its lane's part. Whoever looks at what is left, or changes it, has those given back first that did not
//! begin. So nothing is charged or refused otherwise than one by one, in whatever order they come. What is kept of costs
//! is forgotten when a lane is shut.
//!
//! **Not here:** what a lane is given, and what becomes of an I/O that this does not cover.

use super::Scheduler;
use crate::cost::{CostTable, Frontend, Operation};
use crate::units::{Resource, Units};

/// So many are paid for at once: as many as a host often asks for at once.
const AHEAD: u8 = 1 << SHIFT;
const SHIFT: u32 = 3;
/// In the place of its kinds: it is shut, and no cost is found.
const SHUT: u16 = u16::MAX;
/// Beside a length: the last was as long, and none is paid for.
const NONE_AHEAD: u64 = 1 << 32;
/// In the place of a length: none was.
const NOTHING: u64 = u64::MAX;
/// What is told apart: reads and writes, by [`Operation`]. All others are rare.
const SORTS: usize = 2;

/// See the module's text. What an I/O that is paid for looks at is in one line of a cache.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(super) struct Purse {
    /// What may still be used in this window, without what is paid for ahead.
    left: Units,
    /// How long the last one was, of each sort; with [`NONE_AHEAD`] unless some are paid for.
    alike: [u64; SORTS],
    /// The processor's time that each of those takes.
    cpu_ns: [i32; SORTS],
    /// Of the processor's time, what may be used until it is looked at again, less 1 ns: below nothing, it is used up.
    part_rest_ns: i32,
    /// So many are paid for.
    ahead: [u8; SORTS],
    /// Where its frontend's costs are in a row, or [`SHUT`].
    kinds: u16,
    /// What each of those costs.
    costs: [Units; SORTS],
}

impl Default for Purse {
    fn default() -> Self {
        Self {
            left: Units::ZERO,
            alike: [NOTHING; SORTS],
            cpu_ns: [0; SORTS],
            part_rest_ns: -1,
            ahead: [0; SORTS],
            kinds: SHUT,
            costs: [Units::ZERO; SORTS],
        }
    }
}

impl Purse {
    /// An I/O begins that is paid for, and it is said whether it uses the part up; `None`: it is not.
    #[inline(always)]
    pub(super) fn pass_alike(&mut self, operation: Operation, len: u32) -> Option<bool> {
        let sort = operation as usize;
        match self.alike.get_mut(sort) {
            Some(alike) if *alike == u64::from(len) => {
                self.ahead[sort] -= 1;
                if self.ahead[sort] == 0 {
                    *alike |= NONE_AHEAD;
                }
                Some(self.spend(self.cpu_ns[sort]))
            }
            _ => None,
        }
    }

    /// The part is less by this: whether it is used up.
    #[inline(always)]
    fn spend(&mut self, cpu_ns: i32) -> bool {
        self.part_rest_ns -= cpu_ns;
        self.part_rest_ns < 0
    }

    /// The same of one that is not paid for: it is now, if there is enough.
    #[inline(never)]
    pub(super) fn pass_unlike(
        &mut self,
        costs: &CostTable,
        operation: Operation,
        len: u32,
    ) -> Option<bool> {
        let sort = operation as usize;
        match self.alike.get_mut(sort) {
            Some(alike) if *alike == u64::from(len) | NONE_AHEAD => {
                if !self.left.take_times(&self.costs[sort], SHIFT) {
                    return self.pass_one(sort);
                }
                *alike = len.into();
                self.ahead[sort] = AHEAD - 1;
                Some(self.spend(self.cpu_ns[sort]))
            }
            _ => self.pass_new(costs, operation, len),
        }
    }

    /// One like the last, where there is not enough for many.
    #[inline(never)]
    fn pass_one(&mut self, sort: usize) -> Option<bool> {
        if !self.left.take(&self.costs[sort]) {
            // Perhaps with what is paid for of the other sort.
            self.settle();
            if !self.left.take(&self.costs[sort]) {
                return None;
            }
        }
        Some(self.spend(self.cpu_ns[sort]))
    }

    /// One that is not like the last.
    #[inline(never)]
    fn pass_new(&mut self, costs: &CostTable, operation: Operation, len: u32) -> Option<bool> {
        let cost = costs.row(self.kinds.into(), operation, len)?;
        let sort = operation as usize;
        // Apart from what is settled first, nothing is called: where lengths change, each I/O comes by here.
        let is_ahead = self.ahead.get(sort).is_some_and(|ahead| *ahead > 0);
        if is_ahead || !self.left.take(cost) {
            return self.pass_settled(cost, sort, len);
        }
        Some(self.passed(cost, sort, len))
    }

    /// The same with what is paid for and did not begin.
    #[inline(never)]
    fn pass_settled(&mut self, cost: &Units, sort: usize, len: u32) -> Option<bool> {
        self.settle();
        (self.left.take(cost)).then(|| self.passed(cost, sort, len))
    }

    /// One was paid for that was not like the last: perhaps the next is.
    #[inline(always)]
    fn passed(&mut self, cost: &Units, sort: usize, len: u32) -> bool {
        let cpu_ns = cost[Resource::Cpu];
        if sort < SORTS {
            self.alike[sort] = u64::from(len) | NONE_AHEAD;
            self.cpu_ns[sort] = cpu_ns;
            self.costs[sort] = *cost;
        }
        self.spend(cpu_ns)
    }

    /// What was paid for ahead is paid for no more.
    #[inline]
    fn settle(&mut self) {
        if self.ahead != [0; SORTS] {
            self.give_back();
        }
    }

    #[inline(never)]
    fn give_back(&mut self) {
        for sort in 0..SORTS {
            let ahead = std::mem::take(&mut self.ahead[sort]);
            if ahead > 0 {
                self.left = self.left.plus(&self.costs[sort].times(ahead.into()));
                self.alike[sort] |= NONE_AHEAD;
            }
        }
    }

    /// What may still be used in this window.
    #[inline]
    pub(super) fn left(&self) -> Units {
        let mut left = self.left;
        if self.ahead != [0; SORTS] {
            for (cost, ahead) in self.costs.iter().zip(self.ahead) {
                left = left.plus(&cost.times(ahead.into()));
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
        self.part_rest_ns.saturating_add(1)
    }

    /// It is so much from now on.
    #[inline]
    pub(super) fn set_part_ns(&mut self, part_ns: i32) {
        self.part_rest_ns = part_ns.saturating_sub(1);
    }

    /// Whether such an I/O is paid for.
    #[cfg(test)]
    pub(super) fn is_paid_for(&self, operation: Operation, len: u32) -> bool {
        self.alike.get(operation as usize) == Some(&len.into())
    }

    /// I/Os that come by this frontend may pass from now on.
    pub(super) fn open(&mut self, frontend: Frontend) {
        self.shut();
        self.kinds = frontend.kinds() as u16;
    }

    /// None of them pass any more.
    #[inline]
    pub(super) fn shut(&mut self) {
        self.settle();
        self.alike = [NOTHING; SORTS];
        self.kinds = SHUT;
    }
}

impl Scheduler {
    /// The short way: an I/O of a lane that is open ([`Self::open`]) and whose allocation covers it begins, and is paid for; it says
    /// whether the lane's part is used up by it. `None`: nothing more was looked at, ask [`Self::admit`]. As long as a lane is
    /// open, costs are the same.
    #[inline(always)]
    pub fn pass(
        &mut self,
        lane: usize,
        costs: &CostTable,
        operation: Operation,
        len: u32,
    ) -> Option<bool> {
        match self.pass_alike(lane, operation, len) {
            None => self.pass_unlike(lane, costs, operation, len),
            passed => passed,
        }
    }

    /// The first half of [`Self::pass`], and by far the most usual: what is like the last I/O of its lane, and paid for with it. `None`:
    /// ask [`Self::pass_unlike`].
    #[inline(always)]
    pub fn pass_alike(&mut self, lane: usize, operation: Operation, len: u32) -> Option<bool> {
        let lane = self.lanes.get_mut(lane)?;
        lane.purse.pass_alike(operation, len)
    }

    /// The other half.
    #[inline]
    pub fn pass_unlike(
        &mut self,
        lane: usize,
        costs: &CostTable,
        operation: Operation,
        len: u32,
    ) -> Option<bool> {
        let lane = self.lanes.get_mut(lane)?;
        lane.purse.pass_unlike(costs, operation, len)
    }

    /// I/Os of this lane, which come by this frontend, may pass from now on.
    pub fn open(&mut self, lane: usize, frontend: Frontend) {
        self.lanes[lane].purse.open(frontend);
    }

    /// None of them pass any more.
    pub fn shut(&mut self, lane: usize) {
        self.lanes[lane].purse.shut();
    }

    /// Of the processor's time, the part that a lane may use until it is looked at again, as far as it is left: the caller's
    /// business, but for what passes.
    #[must_use]
    pub fn part_ns(&self, lane: usize) -> i32 {
        self.lanes[lane].purse.part_ns()
    }

    /// It is so much from now on.
    pub fn set_part_ns(&mut self, lane: usize, part_ns: i32) {
        self.lanes[lane].purse.set_part_ns(part_ns);
    }
}
