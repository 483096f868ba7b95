//! Doorbells: reading them, and asking the host to ring.
//!
//! A doorbell is in a register, in a page of ours, or in memory that the driver has named (shadow,
//! I/O queues only). Values in memory are hostile: an invalid one is corrected and reported. Event
//! indexes ask for no messages while we poll, and for one at the next command before a sleep.

use super::record::CommandRecords;
use super::rings::{Bells, Rings, Shadow};
use forebay_guest::GuestMemory;
use forebay_nvme::pcie::{Doorbell, PAGE_BYTES, shadow};
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::fence;

impl Rings {
    #[inline]
    pub(super) fn bell(&self, records: &CommandRecords, doorbell: Doorbell) -> u32 {
        let (Doorbell::Tail(qid) | Doorbell::Head(qid)) = doorbell;
        match (&self.shadow, &self.bells) {
            // The Admin queue always uses its registers.
            (Some(shadow), _) if qid > 0 => {
                let bells = shadow.bells.as_ref();
                let value = bells.and_then(|bells| bells.load_u32(doorbell.offset(), Acquire));
                // Unchanged while its memory is missing.
                value.unwrap_or_else(|| self.known(doorbell))
            }
            (_, Bells::Page(page)) => page.load_u32(doorbell.offset(), Acquire).unwrap_or(0),
            (_, Bells::Registers) => records.doorbell(doorbell),
        }
    }

    pub(super) fn known(&self, doorbell: Doorbell) -> u32 {
        match doorbell {
            Doorbell::Tail(qid) => {
                let sq = self.sqs.get(usize::from(qid)).and_then(Option::as_ref);
                sq.map_or(0, |sq| sq.cursor.tail())
            }
            Doorbell::Head(qid) => {
                let cq = self.cqs.get(usize::from(qid)).and_then(Option::as_ref);
                cq.map_or(0, |cq| cq.cursor.head())
            }
        }
    }

    /// Replaces an invalid value in memory by the last valid one.
    #[cold]
    pub(super) fn mend(&self, doorbell: Doorbell) {
        let (Doorbell::Tail(qid) | Doorbell::Head(qid)) = doorbell;
        let known = self.known(doorbell);
        let page = match (&self.shadow, &self.bells) {
            (Some(shadow), _) if qid > 0 => shadow.bells.as_ref(),
            (_, Bells::Page(page)) => Some(page),
            (_, Bells::Registers) => None,
        };
        if let Some(page) = page {
            let _ = page.store_u32(doorbell.offset(), known, Relaxed);
        }
    }

    pub(super) fn clear_bells(&self, qid: u16, tail: bool, head: bool) {
        if let Bells::Page(page) = &self.bells {
            for (doorbell, clears) in [(Doorbell::Tail(qid), tail), (Doorbell::Head(qid), head)] {
                if clears {
                    let _ = page.store_u32(doorbell.offset(), 0, Relaxed);
                }
            }
        }
    }

    pub(super) fn place_shadow(&mut self, at: Option<(u64, u64)>, memory: &GuestMemory) {
        self.shadow = at.map(|(bells, event_index)| Shadow {
            bells: memory.area(bells, PAGE_BYTES as usize),
            event_index: memory.area(event_index, PAGE_BYTES as usize),
        });
    }

    /// Reads all doorbells before they move, so that none is lost.
    pub(super) fn read_all(&mut self, records: &CommandRecords) {
        for qid in 1..self.sqs.len() as u16 {
            let tail = self.bell(records, Doorbell::Tail(qid));
            if let Some(sq) = self.sqs[usize::from(qid)].as_mut() {
                let _ = sq.cursor.set_tail(tail);
            }
            let head = self.bell(records, Doorbell::Head(qid));
            if let Some(cq) = self.cqs[usize::from(qid)].as_mut() {
                let _ = cq.cursor.set_head(head);
            }
        }
    }

    /// Fills new shadow doorbells with the queues' present values.
    pub(super) fn fill_shadow(&self) {
        let Some(shadow) = &self.shadow else { return };
        for qid in 1..self.sqs.len() as u16 {
            for doorbell in [Doorbell::Tail(qid), Doorbell::Head(qid)] {
                if let Some(bells) = &shadow.bells {
                    let _ = bells.store_u32(doorbell.offset(), self.known(doorbell), Relaxed);
                }
                if let Some(index) = &shadow.event_index {
                    let _ = index.store_u32(doorbell.offset(), shadow::QUIET, Relaxed);
                }
            }
        }
    }

    /// Moves the tail's event index before the host's next lap can pass it.
    #[inline]
    pub(super) fn stay_quiet(&mut self, qid: u16) {
        let Some(sq) = &self.sqs[usize::from(qid)] else {
            return;
        };
        let (head, entries) = (u32::from(sq.cursor.head()), sq.cursor.entries());
        let lap = if head < sq.quiet { entries } else { 0 };
        if head + lap - sq.quiet > entries / 4 {
            self.set_quiet(qid);
        }
    }

    #[cold]
    fn set_quiet(&mut self, qid: u16) {
        let Some(sq) = self.sqs[usize::from(qid)].as_mut() else {
            return;
        };
        sq.quiet = shadow::behind(u32::from(sq.cursor.head()), sq.cursor.entries());
        let index = self.shadow.as_ref().and_then(|s| s.event_index.as_ref());
        if let Some(index) = index.filter(|_| qid > 0) {
            let _ = index.store_u32(Doorbell::Tail(qid).offset(), sq.quiet, Relaxed);
        }
    }

    #[cold]
    pub(super) fn read_head(&mut self, records: &CommandRecords, cqid: u16) -> bool {
        let doorbell = Doorbell::Head(cqid);
        let head = self.bell(records, doorbell);
        let Some(cq) = self.cqs[usize::from(cqid)].as_mut() else {
            return true;
        };
        let bad = cq.cursor.set_head(head).is_err();
        let index = self.shadow.as_ref().and_then(|s| s.event_index.as_ref());
        if let Some(index) = index.filter(|_| cqid > 0 && !self.armed) {
            let quiet = shadow::behind(cq.cursor.head(), cq.cursor.entries());
            let _ = index.store_u32(doorbell.offset(), quiet, Relaxed);
        }
        if bad {
            self.mend(doorbell);
        }
        !bad
    }

    #[cold]
    pub(super) fn be_quiet(&mut self) {
        self.armed = false;
        for at in 0..self.active.len() {
            self.set_quiet(self.active[at]);
        }
    }

    /// Whether no notification comes with a doorbell.
    pub(super) fn must_be_polled(&self) -> bool {
        // Even with shadow doorbells, the Admin queue's are in the page.
        matches!(self.bells, Bells::Page(_))
    }

    /// Asks the host to ring, and checks once more. False: there is work.
    pub(super) fn arm(&mut self, records: &CommandRecords, held_back: bool) -> bool {
        let Some(shadow) = &self.shadow else {
            return true;
        };
        let Some(index) = &shadow.event_index else {
            return true;
        };
        self.armed = true;
        for qid in &self.active {
            let Some(sq) = &self.sqs[usize::from(*qid)] else {
                continue;
            };
            let tail = sq.cursor.tail();
            let _ = index.store_u32(Doorbell::Tail(*qid).offset(), tail, Relaxed);
            if let (false, Some(cq)) =
                (sq.cursor.is_empty(), &self.cqs[usize::from(sq.cursor.cqid)])
            {
                // It may wait for room there.
                let doorbell = Doorbell::Head(sq.cursor.cqid);
                let _ = index.store_u32(doorbell.offset(), cq.cursor.head(), Relaxed);
            }
        }
        // Either the host sees the event index, or we see its doorbell.
        fence(SeqCst);
        !self.active.iter().any(|qid| {
            let Some(sq) = &self.sqs[usize::from(*qid)] else {
                return false;
            };
            let cqid = sq.cursor.cqid;
            let rang = self.bell(records, Doorbell::Tail(*qid)) != sq.cursor.tail();
            let room = !held_back
                && !sq.cursor.is_empty()
                && self.bell(records, Doorbell::Head(cqid)) != self.known(Doorbell::Head(cqid));
            rang || room
        })
    }
}
