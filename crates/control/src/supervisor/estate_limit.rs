//! Limits how long a dead engine's estate is kept.
//!
//! If the estate itself kills its successors, or keeps them from starting, all tenants are down
//! until it is dropped. Then hosts must connect again. Three counters decide: deaths before a
//! successor acts, crashes soon after, and failed starts. Deaths blamed on an export count only for
//! the first, because quarantine ends them.

use std::cell::Cell;
use std::rc::Rc;

use super::Supervisor;
use super::blame::Verdict;
use crate::events::EventFields;
use crate::model::events::EventKind;
use crate::owner::session::{Estate, Session};

/// An estate is dropped after this many crashes of successors ...
pub(super) const CRASHES_OVER_ESTATE: u32 = 2;
/// ... or this many deaths of any kind.
pub(super) const DEATHS_OVER_ESTATE: u32 = 5;
/// Consecutive engines that may crash soon after they took over.
pub(super) const YOUNG_CRASHES: u32 = 5;
/// Starts that may fail while an estate waits, which holds thousands of the daemon's descriptors.
pub(super) const FAILED_STARTS: u32 = 5;

#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Successors that crashed before they acted on the waiting estate.
    estate_crashes: Cell<u32>,
    young_crashes: Cell<u32>,
    failed_starts: Cell<u32>,
    drops: Cell<u32>,
}

impl Counts {
    pub(super) fn started(&self) {
        self.failed_starts.set(0);
    }

    pub(super) fn converted(&self) {
        self.estate_crashes.set(0);
    }

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
    pub(super) fn dropped(&self, generation: u64, why: &str) {
        self.line.reset();
        self.line.drops.set(self.line.drops.get() + 1);
        let text = format!("the dead engine's state is dropped, and its hosts reconnect: {why}");
        self.events.report(
            EventKind::NotTakenOver,
            generation,
            text,
            EventFields::default(),
        );
    }

    /// The waiting estate stays if the dead engine had not acted on it. `session` includes whether
    /// the engine died young.
    pub(super) fn keep_estate(&self, session: Option<(&Rc<Session>, bool)>, verdict: &Verdict) {
        if self.estate.borrow().is_some() {
            self.died_over_estate(verdict);
        } else if let Some((session, young)) = session {
            self.keep_left(session.take_estate(verdict.blamed), verdict, young);
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
            self.dropped(generation, &format!("{tries} successors died of it"));
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
            "kept the dead engine's state"
        );
        *self.estate.borrow_mut() = Some(left);
    }

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
