//! The health check of engines of firmware slot 2 (see `crate::firmware::health`).

use std::cell::Cell;
use std::io;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::Supervisor;
use super::blame::Verdict;
use super::process::EngineProcess;
use crate::firmware::{EngineEnd, SERVES_LIMIT, Slot};

impl Supervisor {
    pub(super) fn note_version(&self, process: &EngineProcess, version: &str) {
        self.view.borrow_mut().version = Some(version.to_owned());
        if process.slot == Slot::Installed {
            self.firmware.note_installed(version);
        }
    }

    /// Kills an engine of slot 2 that takes too long to serve, and returns how it ended. A missing
    /// device may delay an engine that an earlier daemon started.
    pub(super) async fn overdue(
        &self,
        process: &EngineProcess,
        begin: Instant,
        running: &Cell<Option<Instant>>,
    ) -> String {
        if process.slot == Slot::Downloaded && process.is_own() {
            sleep_until(begin + SERVES_LIMIT).await;
            if running.get().is_none() {
                let limit = SERVES_LIMIT.as_secs();
                self.give_up(process, &format!("it does not serve within {limit} s"));
                return process.ended().await;
            }
        }
        std::future::pending().await
    }

    pub(super) fn give_up(&self, process: &EngineProcess, why: &str) {
        tracing::error!(
            error = why,
            pid = process.pid,
            "the engine does not take over: it is killed"
        );
        self.given_up.replace(Some(why.to_owned()));
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
