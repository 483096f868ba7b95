//! How long an estate is kept.
//!
//! Purpose: what one engine left goes through a line of successors; where it is what kills them, or keeps
//! them from starting, all tenants are down until it is dropped.
//! Design: counters, each with its limit: successors that die before they act on it, engines that crash
//! soon after they took over, starts that fail while it waits. Crashes for which an export is to blame
//! are not among the second: its quarantine ends those. Dropped means that hosts connect again.
//! Not here: what an estate is (`link::session`).

use std::cell::Cell;
use std::rc::Rc;

use super::Supervisor;
use super::blame::Verdict;
use crate::events::News;
use crate::model::events::EventKind;
use crate::owner::session::{Estate, Session};

/// So many successors may crash over an estate before it is dropped ...
pub(super) const CRASHES_OVER_ESTATE: u32 = 2;
/// ... and so many may be killed.
pub(super) const DEATHS_OVER_ESTATE: u32 = 5;
/// So many engines one after the other may crash soon after they took over.
pub(super) const YOUNG_CRASHES: u32 = 5;
/// So many starts may fail while an estate waits: it has thousands of the daemon's descriptors.
pub(super) const FAILED_STARTS: u32 = 5;

/// What is counted along a line of engines.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Successors that crashed over the estate that waits.
    estate_crashes: Cell<u32>,
    young_crashes: Cell<u32>,
    failed_starts: Cell<u32>,
    /// Estates that were dropped.
    drops: Cell<u32>,
}

impl Counts {
    /// An engine was greeted.
    pub(super) fn started(&self) {
        self.failed_starts.set(0);
    }

    /// A successor acts on the estate.
    pub(super) fn converted(&self) {
        self.estate_crashes.set(0);
    }

    /// How many estates were dropped so far.
    pub(super) fn drops(&self) -> u32 {
        self.drops.get()
    }

    fn reset(&self) {
        self.estate_crashes.set(0);
        self.young_crashes.set(0);
        self.failed_starts.set(0);
    }
}

impl Supervisor {
    /// An estate is of no use.
    pub(super) fn dropped(&self, generation: u64, why: &str) {
        self.line.reset();
        self.line.drops.set(self.line.drops.get() + 1);
        let text = format!("what the dead engine left is dropped, its hosts connect again: {why}");
        self.events
            .tell(EventKind::NotTakenOver, generation, text, News::default());
    }

    /// What there is to take over now: still what the engine before the dead one left, if the dead one
    /// had not got it yet, else what the dead one left. With its conversation goes whether it died young.
    pub(super) fn keep_estate(&self, session: Option<(&Rc<Session>, bool)>, verdict: &Verdict) {
        if self.estate.borrow().is_some() {
            self.died_over_estate(verdict);
        } else if let Some((session, young)) = session {
            self.keep_left(session.leave(verdict.blamed), verdict, young);
        }
    }

    fn died_over_estate(&self, verdict: &Verdict) {
        let mut estate = self.estate.borrow_mut();
        let Some(waiting) = &*estate else { return };
        let (generation, tries) = (waiting.generation, waiting.tries);
        let crashes = &self.line.estate_crashes;
        if tries > 0 && verdict.crashed {
            crashes.set(crashes.get() + 1);
        }
        if crashes.get() >= CRASHES_OVER_ESTATE || tries >= DEATHS_OVER_ESTATE {
            *estate = None;
            drop(estate);
            self.dropped(generation, &format!("{tries} successors died over it"));
        }
    }

    pub(super) fn keep_left(&self, left: Option<Estate>, verdict: &Verdict, young: bool) {
        let crashes = &self.line.young_crashes;
        if !young {
            crashes.set(0);
        } else if verdict.crashed && verdict.export.is_none() {
            crashes.set(crashes.get() + 1);
        }
        let Some(left) = left else { return };
        if crashes.get() >= YOUNG_CRASHES {
            let why = format!("{YOUNG_CRASHES} engines crashed soon after they took over");
            self.dropped(left.generation, &why);
            return;
        }
        tracing::info!(
            generation = left.generation,
            connections = left.sockets(),
            "kept what the engine left"
        );
        *self.estate.borrow_mut() = Some(left);
    }

    /// No engine could be started.
    pub(super) fn start_failed(&self) {
        let failed = &self.line.failed_starts;
        let Some(generation) = self.estate.borrow().as_ref().map(|e| e.generation) else {
            return;
        };
        failed.set(failed.get() + 1);
        if failed.get() >= FAILED_STARTS {
            self.estate.take();
            self.dropped(
                generation,
                &format!("{FAILED_STARTS} starts of an engine failed"),
            );
        }
    }
}
