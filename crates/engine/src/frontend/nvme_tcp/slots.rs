//! The commands of one queue, from capsule to sent response.
//!
//! Slots are made on first use and reused last in, first out, so that a quiet connection touches
//! few pages. Commands that lack memory or room in the core wait in order in a list through the
//! slots. Nothing grows beyond the reserved entries. **Not here:** a command's record in the state
//! region ([`super::conn`]).

use super::cids::Cids;
use crate::core::IoOp;
use crate::core::staging::StagingBuffer;
use forebay_nvme::{Sqe, Status};

pub(super) const NONE: u16 = u16::MAX;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SlotStage {
    Free,
    Taken,
    /// In the list, for memory or for room in the core.
    Waiting,
    Receiving,
    InFlight,
    /// A fused half: it waits for the other one, or that one is in the core.
    Paired,
    /// The daemon decides about it ([`super::reserve`]).
    Reserving,
    /// An Asynchronous Event Request.
    Kept,
    Answering,
}

#[derive(Debug)]
pub(super) enum Work {
    Io(IoOp),
    /// A read with FUA: a flush, then the read.
    DurableRead(IoOp),
    Compare(IoOp),
    First {
        op: IoOp,
        /// The compared data must be durable.
        fua: bool,
    },
    /// The second: the pair, or only its write if the compare passed in a dead engine.
    Second(IoOp),
    Reserve {
        action: u32,
    },
    Report {
        /// With host identifiers of 128 bits.
        extended: bool,
    },
    /// No operation, once its data is there.
    Hint,
    /// An admin command; that path may allocate.
    Admin(Box<Sqe>),
}

#[derive(Debug)]
pub(super) struct Slot {
    pub cid: u16,
    pub stage: SlotStage,
    /// Next in the list of free or waiting slots.
    next: u16,
    /// Distinguishes R2Ts of this slot, so that data for an old one is noticed: the TTAG's upper
    /// half, or no such half with several R2Ts ([`super::r2t`]).
    pub tag: u16,
    pub by_r2t: bool,
    /// Its status once all data has come: an error if a data digest was wrong or the host lost
    /// access.
    pub fate: Status,
    pub len_bytes: u32,
    /// Bytes received; with several R2Ts, where the next byte belongs.
    pub received_bytes: u32,
    pub work: Work,
    pub buffer: Option<StagingBuffer>,
    /// When it was taken, and when its awaited data was asked for. CLOCK_MONOTONIC ns.
    pub taken_ns: u64,
    pub asked_ns: u64,
    /// If it waited: the lane's throttled time until then.
    pub over_ns: Option<u64>,
}

impl Slot {
    pub(super) fn is_ready(&self) -> bool {
        self.len_bytes == 0 || self.buffer.is_some()
    }

    fn taken(cid: u16, taken_ns: u64) -> Self {
        Self {
            cid,
            stage: SlotStage::Taken,
            next: NONE,
            tag: 0,
            by_r2t: false,
            fate: Status::SUCCESS,
            len_bytes: 0,
            received_bytes: 0,
            work: Work::Hint,
            buffer: None,
            taken_ns,
            asked_ns: 0,
            over_ns: None,
        }
    }
}

#[derive(PartialEq, Eq, Debug)]
pub(super) enum NoSlot {
    Conflict,
    Full,
}

#[derive(Debug)]
pub(super) struct Slots {
    slots: Vec<Slot>,
    entries: usize,
    free: u16,
    cids: Cids,
    first: u16,
    last: u16,
    /// The last of the leading waiting commands that have their memory.
    ready: u16,
    used: usize,
}

impl Slots {
    pub(super) fn oldest_asked_ns(&self) -> Option<u64> {
        let receiving = self.all().filter(|(_, s)| s.stage == SlotStage::Receiving);
        receiving.map(|(_, s)| s.asked_ns).min()
    }

    pub(super) fn new(entries: usize) -> Self {
        Self {
            slots: Vec::with_capacity(entries),
            entries,
            free: NONE,
            cids: Cids::new(entries),
            first: NONE,
            last: NONE,
            ready: NONE,
            used: 0,
        }
    }

    pub(super) fn used(&self) -> usize {
        self.used
    }

    pub(super) fn get(&self, slot: u16) -> Option<&Slot> {
        self.slots.get(usize::from(slot))
    }

    pub(super) fn get_mut(&mut self, slot: u16) -> Option<&mut Slot> {
        self.slots.get_mut(usize::from(slot))
    }

    /// All slots made so far, including free ones.
    pub(super) fn all(&self) -> impl Iterator<Item = (u16, &Slot)> {
        (0..).zip(&self.slots)
    }

    /// Restarts the time limits of all awaited data.
    pub(super) fn asked_now(&mut self, now_ns: u64) {
        let receiving = self.slots.iter_mut();
        for s in receiving.filter(|s| s.stage == SlotStage::Receiving) {
            s.asked_ns = now_ns;
        }
    }

    pub(super) fn by_cid(&self, cid: u16) -> Option<u16> {
        self.cids.get(cid)
    }

    #[inline]
    pub(super) fn claim(&mut self, cid: u16, now_ns: u64) -> Result<u16, NoSlot> {
        let slot = match self.free {
            NONE if self.slots.len() < self.entries => self.slots.len() as u16,
            NONE => return Err(NoSlot::Full),
            free => free,
        };
        if !self.cids.insert(cid, slot) {
            return Err(NoSlot::Conflict);
        }
        self.used += 1;
        let fresh = Slot::taken(cid, now_ns);
        match self.slots.get_mut(usize::from(slot)) {
            Some(old) => {
                self.free = old.next;
                *old = fresh;
            }
            None => self.slots.push(fresh),
        }
        Ok(slot)
    }

    pub(super) fn claim_at(&mut self, slot: u16, cid: u16, taken_ns: u64) -> Result<(), NoSlot> {
        if usize::from(slot) >= self.entries {
            return Err(NoSlot::Full);
        }
        // Make all slots up to this one, as if they had been used.
        while self.slots.len() <= usize::from(slot) {
            let made = self.slots.len() as u16;
            self.slots.push(Slot {
                next: self.free,
                ..Slot::taken(0, 0)
            });
            self.slots[usize::from(made)].stage = SlotStage::Free;
            self.free = made;
        }
        // Unlink it from the free list.
        let (mut before, mut at) = (NONE, self.free);
        while at != slot {
            let free = self.slots.get(usize::from(at)).ok_or(NoSlot::Conflict)?;
            (before, at) = (at, free.next);
        }
        if !self.cids.insert(cid, slot) {
            return Err(NoSlot::Conflict);
        }
        let next = self.slots[usize::from(slot)].next;
        match before {
            NONE => self.free = next,
            before => self.slots[usize::from(before)].next = next,
        }
        self.slots[usize::from(slot)] = Slot::taken(cid, taken_ns);
        self.used += 1;
        Ok(())
    }

    /// Frees a slot that is in no list; returns its buffer.
    #[inline(always)]
    pub(super) fn release(&mut self, slot: u16) -> Option<StagingBuffer> {
        let s = self.slots.get_mut(usize::from(slot))?;
        debug_assert!(
            s.stage != SlotStage::Free && s.stage != SlotStage::Waiting,
            "{:?}",
            s.stage
        );
        s.stage = SlotStage::Free;
        s.work = Work::Hint;
        s.next = self.free;
        self.free = slot;
        self.used -= 1;
        self.cids.remove(s.cid);
        s.buffer.take()
    }

    pub(super) fn first_waiting(&self) -> Option<u16> {
        (self.first != NONE).then_some(self.first)
    }

    /// Queues a command: one with memory before those without, behind others with memory.
    pub(super) fn wait(&mut self, slot: u16) {
        let is_ready = self.get(slot).is_some_and(Slot::is_ready);
        let before = if is_ready { self.ready } else { self.last };
        self.wait_behind(before, slot);
        if is_ready {
            self.ready = slot;
        }
    }

    pub(super) fn wait_first(&mut self, slot: u16) {
        self.wait_behind(NONE, slot);
        if self.ready == NONE
            && self
                .slots
                .get(usize::from(slot))
                .is_some_and(Slot::is_ready)
        {
            self.ready = slot;
        }
    }

    pub(super) fn ready_waits(&self) -> bool {
        self.ready != NONE
    }

    fn wait_behind(&mut self, before: u16, slot: u16) {
        let next = match self.slots.get(usize::from(before)) {
            Some(before) => before.next,
            None => self.first,
        };
        let Some(s) = self.slots.get_mut(usize::from(slot)) else {
            return;
        };
        (s.stage, s.next) = (SlotStage::Waiting, next);
        match self.slots.get_mut(usize::from(before)) {
            Some(before) => before.next = slot,
            None => self.first = slot,
        }
        if next == NONE {
            self.last = slot;
        }
    }

    /// False if it is not there.
    pub(super) fn stop_waiting(&mut self, slot: u16) -> bool {
        let (mut before, mut at) = (NONE, self.first);
        while at != slot {
            let Some(s) = self.slots.get(usize::from(at)) else {
                return false;
            };
            (before, at) = (at, s.next);
        }
        let Some(s) = self.slots.get_mut(usize::from(slot)) else {
            return false;
        };
        s.stage = SlotStage::Taken;
        let next = s.next;
        match self.slots.get_mut(usize::from(before)) {
            Some(s) => s.next = next,
            None => self.first = next,
        }
        if self.last == slot {
            self.last = before;
        }
        if self.ready == slot {
            self.ready = before;
        }
        true
    }

    pub(super) fn unlink_first_waiting(&mut self) {
        if let Some(s) = self.slots.get_mut(usize::from(self.first)) {
            s.stage = SlotStage::Taken;
            if self.ready == self.first {
                self.ready = NONE;
            }
            self.first = s.next;
            if self.first == NONE {
                self.last = NONE;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_bounded_and_wait_in_order() {
        let mut s = Slots::new(3);
        let a = s.claim(7, 0).unwrap();
        assert_eq!(s.claim(7, 0), Err(NoSlot::Conflict));
        let b = s.claim(8, 0).unwrap();
        let c = s.claim(9, 0).unwrap();
        assert_eq!(s.claim(10, 0), Err(NoSlot::Full));
        for slot in [b, a, c] {
            s.wait(slot);
        }
        for slot in [b, a, c] {
            assert_eq!(s.first_waiting(), Some(slot));
            s.unlink_first_waiting();
            s.wait_first(slot);
            assert_eq!(s.first_waiting(), Some(slot));
            s.unlink_first_waiting();
            assert!(s.release(slot).is_none());
        }
        assert_eq!((s.first_waiting(), s.used()), (None, 0));
        assert_eq!(s.claim(7, 0), Ok(c), "the last freed is used first");
        assert_eq!((s.by_cid(7), s.by_cid(8)), (Some(c), None));
        s.wait(c);
        assert_eq!(s.first_waiting(), Some(c));
    }

    #[test]
    fn a_recovered_command_claims_its_old_slot() {
        let mut s = Slots::new(5);
        assert_eq!(s.claim_at(3, 70, 9), Ok(()));
        assert_eq!(s.claim_at(3, 71, 9), Err(NoSlot::Conflict));
        assert_eq!(s.claim_at(1, 70, 9), Err(NoSlot::Conflict));
        assert_eq!(s.claim_at(5, 72, 9), Err(NoSlot::Full));
        assert_eq!(s.claim_at(0, 72, 9), Ok(()));
        assert_eq!(
            (s.used(), s.by_cid(70), s.by_cid(72)),
            (2, Some(3), Some(0))
        );
        let mut rest: Vec<u16> = (0..3).map(|cid| s.claim(cid, 0).unwrap()).collect();
        rest.sort_unstable();
        assert_eq!((rest, s.claim(9, 0)), (vec![1, 2, 4], Err(NoSlot::Full)));
        assert!(s.release(3).is_none());
        assert_eq!(s.claim(9, 0), Ok(3));
    }
}
