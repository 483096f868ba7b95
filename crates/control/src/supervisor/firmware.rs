//! The health check of engines of firmware slot 2 (see `crate::firmware::health`).

use std::cell::Cell;
use std::io;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::Supervisor;
use super::blame::Verdict;
use super::process::EngineProcess;
use crate::firmware::{EngineEnd, SERVES_LIMIT, Slot};

/// Waits until an engine of slot 2 has taken too long to serve. A missing device may delay an
/// engine that an earlier daemon started.
pub(super) async fn overdue(
    process: &EngineProcess,
    begin: Instant,
    running: &Cell<Option<Instant>>,
) {
    if process.slot == Slot::Downloaded && process.is_own() {
        sleep_until(begin + SERVES_LIMIT).await;
        if running.get().is_none() {
            return;
        }
    }
    std::future::pending().await
}

impl Supervisor {
    pub(super) fn note_version(&self, process: &EngineProcess, version: &str) {
        self.view.borrow_mut().version = Some(version.to_owned());
        if process.slot == Slot::Installed {
            self.firmware.note_installed(version);
        }
    }

    pub(super) fn give_up_waiting(&self, process: &EngineProcess) {
        let why = format!("it did not begin within {} s", SERVES_LIMIT.as_secs());
        tracing::error!(
            pid = process.pid,
            "the engine does not serve ({why}): it is killed"
        );
        self.given_up.replace(Some(why));
        process.kill();
    }

    /// Whether the next engine is of slot 1 because this one failed the health check.
    pub(super) fn fell_back(
        &self,
        process: &EngineProcess,
        served: Option<Duration>,
        verdict: &Verdict,
    ) -> bool {
        let given_up = self.given_up.take();
        if process.slot != Slot::Downloaded || !self.wanted.get() {
            return false;
        }
        self.firmware.judge(&EngineEnd {
            generation: process.generation,
            served,
            crashed: verdict.crashed,
            given_up,
            cause: &verdict.cause,
        })
    }

    pub(super) fn could_not_start(&self, slot: Slot, generation: u64, error: &io::Error) {
        if slot == Slot::Downloaded {
            self.firmware.judge(&EngineEnd {
                generation,
                served: None,
                crashed: true,
                given_up: None,
                cause: &error.to_string(),
            });
        }
    }
}
