//! Laundering: freed extents read as zeros again before anybody gets them.
//!
//! Purpose: turns dirty extents into clean ones, through the engine's internal lane.
//! Design: one task for each device, so that one which hangs keeps nobody else's space dirty. A round
//! takes dirty runs piece by piece, has them zeroed, flushes the device, tells the pool, and commits.
//! Rounds and pieces are bounded by bytes, whatever an extent's size; a round ends at the next piece
//! when a fault waits for space, so that it gets some soon. What fails goes back and is tried again,
//! later each time; until that has succeeded nothing is expected of the device. A round runs only
//! with an engine that has its fence on the device, and when nothing is left there of what an earlier
//! daemon granted or asked for: an earlier engine's zeroing must not land on an extent that has got a
//! new owner.
//! Not here: how zeroing is done (the engine, by the device's quickest way).

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use forebay_pool::DeviceRun;
use forebay_xlate::boundary::message::Job;
use forebay_xlate::{DeviceIndex, ExtentRange};
use tokio::time::{Instant, sleep, timeout};

use crate::base::Base;
use crate::link::Link;
use crate::link::session::{AskError, PendingAnswer, Session};
use crate::mapping::adopt::Adoption;
use crate::signal::Signal;
use crate::states::DeviceStates;

/// Made clean in one round: this, or one extent.
const ROUND_BYTES: u64 = 64 << 20;
/// Zeroed at a time, and made clean in a round while somebody waits for space: this, or one extent.
const PIECE_BYTES: u64 = 4 << 20;
/// Dirty extents are looked for this often even when nobody said that there are some.
const LOOK_EVERY: Duration = Duration::from_secs(5);
const RETRY_AT_MOST: Duration = Duration::from_secs(30);

/// Why a round has left something dirty.
enum Trouble {
    /// As after each start of an engine; a device that has failed or hangs is reported as such.
    NotReady,
    Failed(String),
}

/// How laundering is going.
#[derive(Debug, Default)]
pub(crate) struct Laundering {
    /// How many faults wait for it.
    waiting: Cell<u64>,
    /// Devices where it does not go on: the last round failed, or an earlier one does not end.
    stuck: RefCell<BTreeSet<DeviceIndex>>,
}

/// Has freed extents zeroed before anybody gets them.
#[derive(Debug)]
pub(crate) struct ZeroFill {
    pub(super) base: Rc<Base>,
    pub(super) link: Rc<Link>,
    pub(super) states: Rc<DeviceStates>,
    pub(super) adoption: Rc<Adoption>,
    /// Raised after each round of laundering.
    pub(crate) laundered: Signal,
    pub(super) laundering: Laundering,
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
            laundered: Signal::new(),
            laundering: Default::default(),
        })
    }

    /// Waits until something more is clean, for as long as that may be expected; false if for a whole
    /// limit nothing became clean, and nothing is dirty where it could.
    pub(crate) async fn wait_laundered(&self) -> bool {
        let waiting = &self.laundering.waiting;
        waiting.set(waiting.get() + 1);
        self.base.launder_wanted.raise();
        let more = timeout(self.base.limits.launder, self.laundered.next()).await;
        waiting.set(waiting.get() - 1);
        more.is_ok() || self.is_space_coming()
    }

    /// Whether something is dirty on a device that launders.
    fn is_space_coming(&self) -> bool {
        let stuck = self.laundering.stuck.borrow();
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
        let mut stuck = self.laundering.stuck.borrow_mut();
        if is_stuck {
            stuck.insert(device);
        } else {
            stuck.remove(&device);
        }
    }

    /// Waits for what an earlier daemon or engine began; while that takes long, the device is stuck.
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

    /// The one task that launders a device.
    pub(crate) async fn run_launderer(self: Rc<Self>, device: DeviceIndex) {
        let mut failures = 0u32;
        loop {
            let settled = self.adoption.wait_settled_on(device);
            self.stuck_without(device, settled).await;
            let round = self.launder_round(device).await;
            self.set_stuck(device, round.is_err());
            match round {
                // More may be there: at once.
                Ok(true) => failures = 0,
                Ok(false) => {
                    failures = 0;
                    let _ = timeout(LOOK_EVERY, self.base.launder_wanted.next()).await;
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
                        () = self.base.devices_changed.next() => {}
                    }
                    failures += 1;
                }
            }
        }
    }

    /// True when something became clean.
    async fn launder_round(self: &Rc<Self>, device: DeviceIndex) -> Result<bool, Trouble> {
        let session = self.link.wait_session().await;
        // An earlier conversation's zeroing may be of these very extents.
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
                .map_err(|error| Trouble::Failed(format!("flushing: {error}")))
        };
        if let Err(trouble) = flushed {
            zeroed.into_iter().for_each(|run| self.give_back(run));
            return Err(trouble);
        }
        for run in zeroed {
            if let Err(error) = self.base.core.borrow_mut().pool.laundered(run) {
                tracing::error!(%error, "a laundered run");
            }
        }
        // Reserved from here on; granted once that is durable, and this with it.
        self.laundered.raise();
        self.base
            .commit()
            .await
            .map_err(|error| Trouble::Failed(error.to_string()))?;
        trouble.map_or(Ok(true), Err)
    }

    /// A round's zeroing: what it zeroed, and why it left something dirty.
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
                    (run, session.job(Job::Launder { device, extents }))
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
            if self.laundering.waiting.get() > 0 {
                break;
            }
        }
        (zeroed, trouble)
    }

    fn give_back(&self, run: DeviceRun) {
        if let Err(error) = self.base.core.borrow_mut().pool.launder_failed(run) {
            tracing::error!(%error, "giving back a run that could not be laundered");
        }
    }

    /// A device hangs: nobody gets the run, and nobody zeroes it a second time, before the zeroing
    /// that is under way has ended (or its engine has, and then its successor has the fence).
    fn set_aside(self: &Rc<Self>, run: DeviceRun, mut job: PendingAnswer) {
        let owner = self.clone();
        self.base.spawn(async move {
            // However it ended.
            let _ = job.ended().await;
            owner.give_back(run);
            owner.base.launder_wanted.raise();
        });
    }
}
