//! Laundering: freed extents read as zeros again before anybody gets them.
//!
//! Purpose: turns dirty extents into clean ones, through the engine's internal lane.
//! Design: one task. A round takes some dirty runs, has them zeroed, flushes their devices, tells the
//! pool, and commits; only that commit makes them clean. What fails goes back and is tried again,
//! later each time. A round runs only with an engine that has its fence on the device: an earlier
//! engine's zeroing must not land on an extent that has got a new owner.
//! Not here: how zeroing is done (the engine, by the device's quickest way).

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use forebay_pool::DeviceRun;
use forebay_xlate::boundary::message::Job;
use forebay_xlate::{DeviceIndex, ExtentRange};
use tokio::time::{sleep, timeout};

use super::Owner;
use super::session::{AskError, DeviceState, Pending, Session};

/// Extents taken in one round.
const EXTENTS_A_ROUND: u64 = 4096;
/// Dirty extents are looked for this often even when nobody said that there are some.
const LOOK_EVERY: Duration = Duration::from_secs(5);
const RETRY_AT_MOST: Duration = Duration::from_secs(30);

/// Why a round has left something dirty.
enum Trouble {
    NotReady(DeviceIndex),
    Failed(String),
}

impl Owner {
    /// The one task that launders.
    pub(super) async fn run_launderer(self: Rc<Self>) {
        self.wait_settled().await;
        let mut failures = 0u32;
        loop {
            match self.launder_round().await {
                // More may be there: at once.
                Ok(true) => failures = 0,
                Ok(false) => {
                    failures = 0;
                    let _ = timeout(LOOK_EVERY, self.launder_wanted.notified()).await;
                }
                Err(trouble) => {
                    match trouble {
                        // As after each start of an engine; a device that has failed is reported as such.
                        Trouble::NotReady(device) => {
                            tracing::debug!(failures, %device, "laundering waits for a device");
                        }
                        Trouble::Failed(error) => {
                            tracing::warn!(failures, error, "laundering freed extents");
                        }
                    }
                    sleep(Duration::from_millis(200 << failures.min(8)).min(RETRY_AT_MOST)).await;
                    failures += 1;
                }
            }
        }
    }

    /// True when something became clean.
    async fn launder_round(self: &Rc<Self>) -> Result<bool, Trouble> {
        let session = self.wait_session().await;
        // An earlier conversation's zeroing may be of these very extents.
        session.inherited_finished().await;
        if session.is_over() {
            return Ok(false);
        }
        let runs = self.core.borrow_mut().pool.take_dirty(EXTENTS_A_ROUND);
        if runs.is_empty() {
            return Ok(false);
        }
        let (mut clean, mut failed) = (Vec::new(), Vec::new());
        let mut trouble = None;
        let jobs: Vec<_> = runs
            .into_iter()
            .map(|run| (run, self.start_zeroing(&session, run)))
            .collect();
        for (run, job) in jobs {
            let Some(mut job) = job else {
                trouble.get_or_insert(Trouble::NotReady(run.device));
                failed.push(run);
                continue;
            };
            match job.within(self.limits.job).await {
                Ok(()) => clean.push(run),
                Err(error @ AskError::TimedOut(..)) => {
                    trouble = Some(Trouble::Failed(format!("{}: {error}", run.device)));
                    self.set_aside(run, job);
                }
                Err(error) => {
                    trouble = Some(Trouble::Failed(format!("{}: {error}", run.device)));
                    failed.push(run);
                }
            }
        }
        let devices: BTreeSet<DeviceIndex> = clean.iter().map(|run| run.device).collect();
        for device in devices {
            if let Err(error) = session
                .job(Job::Flush { device })
                .within(self.limits.job)
                .await
            {
                trouble = Some(Trouble::Failed(format!("flushing {device}: {error}")));
                let (stay, back): (Vec<_>, Vec<_>) =
                    clean.into_iter().partition(|run| run.device != device);
                clean = stay;
                failed.extend(back);
            }
        }
        let any = !clean.is_empty();
        failed.into_iter().for_each(|run| self.give_back(run));
        {
            let mut core = self.core.borrow_mut();
            for run in clean {
                if let Err(error) = core.pool.laundered(run) {
                    tracing::error!(%error, "a laundered run");
                }
            }
        }
        if any {
            self.commit()
                .await
                .map_err(|error| Trouble::Failed(error.to_string()))?;
            self.laundered.raise();
        }
        trouble.map_or(Ok(any), Err)
    }

    fn give_back(&self, run: DeviceRun) {
        if let Err(error) = self.core.borrow_mut().pool.launder_failed(run) {
            tracing::error!(%error, "giving back a run that could not be laundered");
        }
    }

    /// A device hangs: nobody gets the run, and nobody zeroes it a second time, before the zeroing
    /// that is under way has ended (or its engine has, and then its successor has the fence).
    fn set_aside(self: &Rc<Self>, run: DeviceRun, job: Pending) {
        let owner = self.clone();
        self.spawn(async move {
            job.ended().await;
            owner.give_back(run);
        });
    }

    fn start_zeroing(&self, session: &Session, run: DeviceRun) -> Option<Pending> {
        let ready = session.device(run.device) == Some(DeviceState::Ready);
        ready.then(|| {
            session.job(Job::Launder {
                device: run.device,
                extents: ExtentRange::new(run.first.0, run.count),
            })
        })
    }
}
