//! Zero-fills dirty extents through the engine's internal lane, one task per device.
//!
//! A round zeroes runs in pieces, flushes the device, tells the pool and commits. Bytes bound it,
//! and it ends early if a fault waits for space. Failed runs are retried with growing delays. A
//! round needs an engine that has its fence on the device, and nothing left from an earlier daemon.
//! Otherwise an old zeroing could overwrite an extent's new owner.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use forebay_pool::DeviceRun;
use forebay_xlate::boundary::message::Job;
use forebay_xlate::{DeviceIndex, ExtentRange};
use tokio::time::{Instant, sleep, timeout};

use crate::base::Base;
use crate::changed::Signal;
use crate::link::Link;
use crate::link::session::{AskError, PendingAnswer, Session};
use crate::mapping::adopt::Adoption;
use crate::states::DeviceStates;

/// Zeroed in one round, unless one extent is larger.
const ROUND_BYTES: u64 = 64 << 20;
/// Zeroed at a time, and in a round while a fault waits, unless one extent is larger.
const PIECE_BYTES: u64 = 4 << 20;
/// The period of searches for dirty extents without a wake-up.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
const RETRY_AT_MOST: Duration = Duration::from_secs(30);

enum Trouble {
    /// Expected after each start of an engine. A failed or hanging device is reported elsewhere.
    NotReady,
    Failed(String),
}

#[derive(Debug, Default)]
pub(crate) struct ZeroFilling {
    /// How many faults wait.
    waiting: Cell<u64>,
    /// Devices without progress: the last round failed, or an earlier one does not end.
    stuck: RefCell<BTreeSet<DeviceIndex>>,
}

#[derive(Debug)]
pub(crate) struct ZeroFill {
    pub(super) base: Rc<Base>,
    pub(super) link: Rc<Link>,
    pub(super) states: Rc<DeviceStates>,
    pub(super) adoption: Rc<Adoption>,
    pub(crate) zero_filled: Signal,
    pub(super) zero_filling: ZeroFilling,
}

impl ZeroFill {
    pub(crate) fn new(
        base: &Rc<Base>,
        link: &Rc<Link>,
        states: &Rc<DeviceStates>,
        adoption: &Rc<Adoption>,
    ) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            link: link.clone(),
            states: states.clone(),
            adoption: adoption.clone(),
            zero_filled: Signal::new(),
            zero_filling: Default::default(),
        })
    }

    /// False if no extent became clean within the limit, and none is dirty on a device that makes
    /// progress.
    pub(crate) async fn wait_zero_filled(&self) -> bool {
        let waiting = &self.zero_filling.waiting;
        waiting.set(waiting.get() + 1);
        self.base.zero_fill_wanted.raise();
        let more = timeout(self.base.limits.zero_fill, self.zero_filled.next()).await;
        waiting.set(waiting.get() - 1);
        more.is_ok() || self.is_space_coming()
    }

    fn is_space_coming(&self) -> bool {
        let stuck = self.zero_filling.stuck.borrow();
        self.base.device_indexes().into_iter().any(|device| {
            let space = self
                .base
                .core
                .borrow()
                .pool
                .allocator()
                .device_space(device);
            space.is_some_and(|space| space.dirty > 0)
                && self.base.is_online(device)
                && !self.states.is_hanging(device)
                && !stuck.contains(&device)
        })
    }

    fn set_stuck(&self, device: DeviceIndex, is_stuck: bool) {
        let mut stuck = self.zero_filling.stuck.borrow_mut();
        if is_stuck {
            stuck.insert(device);
        } else {
            stuck.remove(&device);
        }
    }

    /// The device counts as stuck if this takes long.
    async fn stuck_without(&self, device: DeviceIndex, ended: impl Future<Output = ()>) {
        tokio::pin!(ended);
        if timeout(self.base.limits.inherited, &mut ended)
            .await
            .is_err()
        {
            self.set_stuck(device, true);
            ended.await;
            self.set_stuck(device, false);
        }
    }

    pub(crate) async fn run_zero_fill(self: Rc<Self>, device: DeviceIndex) {
        let mut failures = 0u32;
        loop {
            let settled = self.adoption.wait_settled_on(device);
            self.stuck_without(device, settled).await;
            let round = self.zero_fill_round(device).await;
            self.set_stuck(device, round.is_err());
            match round {
                // More may be dirty: go on at once.
                Ok(true) => failures = 0,
                Ok(false) => {
                    failures = 0;
                    let _ = timeout(POLL_INTERVAL, self.base.zero_fill_wanted.next()).await;
                }
                Err(trouble) => {
                    match trouble {
                        Trouble::NotReady => {
                            tracing::debug!(failures, %device, "zero-filling waits for a device");
                        }
                        Trouble::Failed(error) => {
                            tracing::warn!(failures, %device, error, "can't zero-fill freed extents");
                        }
                    }
                    let pause =
                        sleep(Duration::from_millis(200 << failures.min(8)).min(RETRY_AT_MOST));
                    tokio::select! {
                        () = pause => {}
                        // The device may be ready by now.
                        () = self.base.devices_changed.next() => {}
                    }
                    failures += 1;
                }
            }
        }
    }

    async fn zero_fill_round(self: &Rc<Self>, device: DeviceIndex) -> Result<bool, Trouble> {
        let session = self.link.wait_session().await;
        // An earlier session's job may be zeroing these very extents.
        let finished = session.inherited_jobs_finished(device);
        self.stuck_without(device, finished).await;
        if session.is_over() {
            return Ok(false);
        }
        if !session.device_ready(device) || self.states.is_hanging(device) {
            return Err(Trouble::NotReady);
        }
        let (zeroed, trouble) = self.zero_some(device, &session).await;
        if zeroed.is_empty() {
            return trouble.map_or(Ok(false), Err);
        }
        let flushed = if self.states.is_hanging(device) {
            Err(Trouble::NotReady)
        } else {
            let flush = session.job(Job::Flush { device });
            self.states
                .job_within(&session, device, flush)
                .await
                .map_err(|error| Trouble::Failed(format!("can't flush: {error}")))
        };
        if let Err(trouble) = flushed {
            zeroed.into_iter().for_each(|run| self.give_back(run));
            return Err(trouble);
        }
        for run in zeroed {
            if let Err(error) = self.base.core.borrow_mut().pool.zero_filled(run) {
                tracing::error!(%error, "can't record zero-filled extents");
            }
        }
        // Faults may reserve the clean extents from here on; answers wait for this commit.
        self.zero_filled.raise();
        self.base
            .commit()
            .await
            .map_err(|error| Trouble::Failed(error.to_string()))?;
        trouble.map_or(Ok(true), Err)
    }

    async fn zero_some(
        self: &Rc<Self>,
        device: DeviceIndex,
        session: &Session,
    ) -> (Vec<DeviceRun>, Option<Trouble>) {
        let deadline = Instant::now() + self.base.limits.job;
        let extent_bytes = self.base.core.borrow().pool.info().extent_bytes.max(1);
        let mut left = (ROUND_BYTES / extent_bytes).max(1);
        let (mut zeroed, mut trouble) = (Vec::new(), None);
        while left > 0 && trouble.is_none() {
            let piece = (PIECE_BYTES / extent_bytes).clamp(1, left);
            let runs = self.base.core.borrow_mut().pool.take_dirty(device, piece);
            if runs.is_empty() {
                break;
            }
            let jobs: Vec<_> = runs
                .into_iter()
                .map(|run| {
                    let extents = ExtentRange::new(run.first.0, run.count);
                    (run, session.job(Job::ZeroFill { device, extents }))
                })
                .collect();
            for (run, mut job) in jobs {
                let time = deadline.saturating_duration_since(Instant::now());
                match job.within(time).await {
                    Ok(()) => zeroed.push(run),
                    Err(AskError::TimedOut(..)) => {
                        self.states
                            .suspect(device, session.generation, "laundering");
                        trouble = Some(Trouble::NotReady);
                        self.set_aside(run, job);
                    }
                    Err(error) => {
                        trouble = Some(Trouble::Failed(error.to_string()));
                        self.give_back(run);
                    }
                }
            }
            left = left.saturating_sub(piece);
            if self.zero_filling.waiting.get() > 0 {
                break;
            }
        }
        (zeroed, trouble)
    }

    fn give_back(&self, run: DeviceRun) {
        if let Err(error) = self.base.core.borrow_mut().pool.zero_fill_failed(run) {
            tracing::error!(%error, "can't return extents that could not be zero-filled");
        }
    }

    /// Nothing uses or zeroes the run until the job has ended, or its engine has and the successor
    /// has the fence.
    fn set_aside(self: &Rc<Self>, run: DeviceRun, mut job: PendingAnswer) {
        let owner = self.clone();
        self.base.spawn(async move {
            let _ = job.ended().await;
            owner.give_back(run);
            owner.base.zero_fill_wanted.raise();
        });
    }
}
