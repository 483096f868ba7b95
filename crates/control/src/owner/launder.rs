//! Laundering: freed extents read as zeros again before anybody gets them.
//!
//! Purpose: turns dirty extents into clean ones, through the engine's internal lane.
//! Design: one task for each device, so that one which hangs keeps nobody else's space dirty. A round
//! takes some dirty runs, has them zeroed, flushes the device, tells the pool, and commits; only that
//! commit makes them clean. While a fault waits for space, rounds are small, so that it gets some
//! soon. What fails goes back and is tried again, later each time. A round runs only with an engine
//! that has its fence on the device, and when nothing is left there of what an earlier daemon granted
//! or asked for: an earlier engine's zeroing must not land on an extent that has got a new owner.
//! Not here: how zeroing is done (the engine, by the device's quickest way).

use std::rc::Rc;
use std::time::Duration;

use forebay_pool::DeviceRun;
use forebay_xlate::boundary::message::Job;
use forebay_xlate::{DeviceIndex, ExtentRange};
use tokio::time::{Instant, sleep, timeout};

use super::Owner;
use super::session::{AskError, Pending};

/// Extents taken in one round.
const EXTENTS_A_ROUND: u64 = 4096;
/// The same while somebody waits for space.
const EXTENTS_IN_A_HURRY: u64 = 64;
/// Dirty extents are looked for this often even when nobody said that there are some.
const LOOK_EVERY: Duration = Duration::from_secs(5);
const RETRY_AT_MOST: Duration = Duration::from_secs(30);

/// Why a round has left something dirty.
enum Trouble {
    /// As after each start of an engine; a device that has failed or hangs is reported as such.
    NotReady,
    Failed(String),
}

impl Owner {
    /// The one task that launders a device.
    pub(super) async fn run_launderer(self: Rc<Self>, device: DeviceIndex) {
        let mut failures = 0u32;
        loop {
            self.wait_settled_on(device).await;
            match self.launder_round(device).await {
                // More may be there: at once.
                Ok(true) => failures = 0,
                Ok(false) => {
                    failures = 0;
                    let _ = timeout(LOOK_EVERY, self.launder_wanted.next()).await;
                }
                Err(trouble) => {
                    match trouble {
                        Trouble::NotReady => {
                            tracing::debug!(failures, %device, "laundering waits for a device");
                        }
                        Trouble::Failed(error) => {
                            tracing::warn!(failures, %device, error, "laundering freed extents");
                        }
                    }
                    let pause =
                        sleep(Duration::from_millis(200 << failures.min(8)).min(RETRY_AT_MOST));
                    tokio::select! {
                        () = pause => {}
                        // It may be ready by now.
                        () = self.devices_changed.next() => {}
                    }
                    failures += 1;
                }
            }
        }
    }

    /// True when something became clean.
    async fn launder_round(self: &Rc<Self>, device: DeviceIndex) -> Result<bool, Trouble> {
        let session = self.wait_session().await;
        // An earlier conversation's zeroing may be of these very extents.
        session.inherited_jobs_finished(device).await;
        if session.is_over() {
            return Ok(false);
        }
        if !session.device_ready(device) || self.is_hanging(device) {
            return Err(Trouble::NotReady);
        }
        let at_most = if self.launder_hurry.get() > 0 {
            EXTENTS_IN_A_HURRY
        } else {
            EXTENTS_A_ROUND
        };
        let runs = self.core.borrow_mut().pool.take_dirty(device, at_most);
        if runs.is_empty() {
            return Ok(false);
        }
        let jobs: Vec<_> = runs
            .into_iter()
            .map(|run| {
                let extents = ExtentRange::new(run.first.0, run.count);
                (run, session.job(Job::Launder { device, extents }))
            })
            .collect();
        let deadline = Instant::now() + self.limits.job;
        let (mut zeroed, mut trouble) = (Vec::new(), None);
        for (run, mut job) in jobs {
            let left = deadline.saturating_duration_since(Instant::now());
            match job.within(left).await {
                Ok(()) => zeroed.push(run),
                Err(AskError::TimedOut(..)) => {
                    self.suspect(device, session.generation, "laundering");
                    trouble = Some(Trouble::NotReady);
                    self.set_aside(run, job);
                }
                Err(error) => {
                    trouble = Some(Trouble::Failed(error.to_string()));
                    self.give_back(run);
                }
            }
        }
        if zeroed.is_empty() {
            return trouble.map_or(Ok(false), Err);
        }
        let flushed = if self.is_hanging(device) {
            Err(Trouble::NotReady)
        } else {
            let flush = session.job(Job::Flush { device });
            self.job_within(&session, device, flush)
                .await
                .map_err(|error| Trouble::Failed(format!("flushing: {error}")))
        };
        if let Err(trouble) = flushed {
            zeroed.into_iter().for_each(|run| self.give_back(run));
            return Err(trouble);
        }
        for run in zeroed {
            if let Err(error) = self.core.borrow_mut().pool.laundered(run) {
                tracing::error!(%error, "a laundered run");
            }
        }
        self.commit()
            .await
            .map_err(|error| Trouble::Failed(error.to_string()))?;
        self.laundered.raise();
        trouble.map_or(Ok(true), Err)
    }

    fn give_back(&self, run: DeviceRun) {
        if let Err(error) = self.core.borrow_mut().pool.launder_failed(run) {
            tracing::error!(%error, "giving back a run that could not be laundered");
        }
    }

    /// A device hangs: nobody gets the run, and nobody zeroes it a second time, before the zeroing
    /// that is under way has ended (or its engine has, and then its successor has the fence).
    fn set_aside(self: &Rc<Self>, run: DeviceRun, mut job: Pending) {
        let owner = self.clone();
        self.spawn(async move {
            // However it ended.
            let _ = job.ended().await;
            owner.give_back(run);
            owner.launder_wanted.raise();
        });
    }
}
