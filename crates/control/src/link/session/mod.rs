//! One conversation with one engine, from its greeting to its end.
//!
//! Purpose: carry messages both ways, match answers with what was asked, and know which devices the
//! engine has its fence on.
//! Design: the boundary's channel behind the runtime's readiness. Each thing that is asked (a
//! request, a revoke, a job) has a number and a one-shot answer; when the session ends every answer
//! that is still open ends with [`AskError::Gone`]. Numbers start at the monotonic clock's
//! nanoseconds, so that no later session of this boot, in whatever daemon, uses one again. Grants are
//! gathered and go out as one message, at the latest with whatever is said next, or when the tasks
//! that can run have run; so their order among everything else stays.
//! What a successor would need of the engine is kept with its session ([`deposit`]).
//! Not here: what is said (the owner's business), and processes (the supervisor's).

mod ahead;
mod deposit;
mod greet;
mod machines;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use forebay_pool::QuarantineMark;
use forebay_xlate::boundary::message::{FromEngine, GrantOf, Job, MAX_BATCH, ToEngine};
use forebay_xlate::boundary::region::Region;
use forebay_xlate::{DeviceIndex, ExtentRange, VolumeId};
use tokio::sync::oneshot;

use self::ahead::AheadAnswer;
use self::deposit::Deposit;
use super::wire::Wire;
use crate::readiness::in_time;
use crate::signal::Signal;

pub(crate) use self::deposit::{Conversion, Estate};
pub(crate) use self::greet::{GreetError, Greeting};

/// Messages that are taken in before others of the owner's tasks get a turn. With faults of
/// [`MAX_BATCH`] in each that is a few milliseconds' work.
const MESSAGES_AT_ONCE: usize = 8;
/// So many grants are sent at once: few enough that the engine works on some while others are still
/// looked for, which nearly doubles the rate of first writes when nothing else is in the way.
const GRANTS_AT_ONCE: usize = 8;
const _: () = assert!(GRANTS_AT_ONCE <= MAX_BATCH);

/// Why something asked of the engine has no good answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AskError {
    /// The engine, or the conversation with it, ended.
    #[error("the engine went away")]
    Gone,
    /// No answer came in time.
    #[error("the engine did not answer within {0:?}: {1}")]
    TimedOut(Duration, &'static str),
    /// It said no.
    #[error("the engine refused: {0}")]
    Refused(String),
    /// A job of the internal lane failed.
    #[error("{}", io::Error::from_raw_os_error(*.0))]
    Errno(i32),
}

/// How far the engine is with a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DeviceState {
    /// It was told of it.
    Opening,
    /// Every earlier engine's lock has fallen: it is served.
    Ready,
    /// It can't be used.
    Failed(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum AskKind {
    Request,
    TakeOver,
    Revoke,
    Job,
}

type AskResult = Result<(), AskError>;

/// An answer that is on its way.
#[derive(Debug)]
pub(crate) struct PendingAnswer {
    /// The number that it was asked under.
    pub(crate) number: u64,
    answer: oneshot::Receiver<AskResult>,
    what: &'static str,
}

impl PendingAnswer {
    /// Waits for it, for at most `limit`; it may still come later.
    pub(crate) async fn within(&mut self, limit: Duration) -> AskResult {
        match in_time(limit, &mut self.answer).await {
            Some(Ok(answer)) => answer,
            Some(Err(_)) => Err(AskError::Gone),
            None => Err(AskError::TimedOut(limit, self.what)),
        }
    }

    /// What was asked.
    pub(crate) fn what(&self) -> &'static str {
        self.what
    }

    /// The answer if it is there.
    pub(crate) fn now(&mut self) -> Option<AskResult> {
        match self.answer.try_recv() {
            Ok(answer) => Some(answer),
            Err(oneshot::error::TryRecvError::Empty) => None,
            Err(oneshot::error::TryRecvError::Closed) => Some(Err(AskError::Gone)),
        }
    }

    /// Waits for it as long as the conversation goes on.
    pub(crate) async fn ended(&mut self) -> AskResult {
        (&mut self.answer).await.unwrap_or(Err(AskError::Gone))
    }
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Session {
    /// The engine's process.
    pub(crate) pid: u32,
    /// The engine's generation.
    pub(crate) generation: u64,
    /// What the engine records.
    pub(crate) region: Rc<Region>,
    deposit: RefCell<Deposit>,
    /// What the engine said it made of a dead one's connections.
    conversion: RefCell<Option<Conversion>>,
    wire: Wire,
    /// Grants that are not sent yet.
    grants: RefCell<Vec<GrantOf>>,
    next_number: Cell<u64>,
    open: RefCell<HashMap<(AskKind, u64), oneshot::Sender<AskResult>>>,
    /// Changes of exports that hosts are being shut out for, by request.
    settling: RefCell<HashMap<u64, oneshot::Sender<u32>>>,
    /// Questions about places ahead.
    asked_ahead: RefCell<HashMap<u64, oneshot::Sender<AheadAnswer>>>,
    devices: RefCell<BTreeMap<DeviceIndex, DeviceState>>,
    /// Revokes and zeroing of an earlier conversation that the engine has not finished.
    inherited_revokes: RefCell<Vec<u64>>,
    inherited_jobs: RefCell<Vec<(u64, DeviceIndex)>>,
    /// Everything quarantined before this engine was granted anything, if it is known to be a later
    /// one than that was granted to.
    pub(crate) quarantined_before: Cell<Option<QuarantineMark>>,
    ended: Cell<bool>,
    changed: Signal,
}

fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let (seconds, rest) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
    seconds.saturating_mul(1_000_000_000).saturating_add(rest)
}

impl Session {
    /// The next messages that the owner must act on, all that have come up to a bound (perhaps
    /// none); answers find their askers by themselves.
    pub(crate) async fn next_some(&self, into: &mut Vec<FromEngine>) -> io::Result<()> {
        let mut next = Some(self.wire.next().await?);
        let mut heard = 0;
        while let Some((message, descriptors)) = next {
            into.extend(self.absorb(message, descriptors));
            heard += 1;
            next = if heard < MESSAGES_AT_ONCE {
                self.wire.next_now()?
            } else {
                None
            };
        }
        Ok(())
    }

    /// Takes what concerns the conversation itself; gives back what the owner must act on.
    pub(crate) fn absorb(
        &self,
        message: FromEngine,
        descriptors: Vec<OwnedFd>,
    ) -> Option<FromEngine> {
        match message {
            FromEngine::Socket { socket } => self.keep_socket(socket, descriptors),
            FromEngine::SocketGone { socket } => self.drop_socket(socket),
            FromEngine::Machine { socket, export } => {
                self.keep_machine(socket, export, descriptors);
                return Some(FromEngine::Machine { socket, export });
            }
            FromEngine::Deposits { socket, numbers } => {
                self.keep_deposits(socket, &numbers, descriptors);
            }
            FromEngine::Withdrawn { socket, numbers } => self.drop_deposits(socket, &numbers),
            FromEngine::Converted {
                request,
                queues,
                commands,
                machines,
                closed,
            } => {
                *self.conversion.borrow_mut() = Some(Conversion {
                    queues,
                    commands,
                    machines,
                    closed,
                });
                self.answer(AskKind::TakeOver, request, Ok(()));
            }
            FromEngine::DeviceReady { device } => {
                self.set_device(device, DeviceState::Ready);
                return Some(FromEngine::DeviceReady { device });
            }
            FromEngine::DeviceFailed { device, error } => {
                self.set_device(device, DeviceState::Failed(error.clone()));
                return Some(FromEngine::DeviceFailed { device, error });
            }
            other => return self.absorb_answer(other),
        }
        None
    }

    /// Takes an answer to something that was asked; gives back what is none.
    fn absorb_answer(&self, message: FromEngine) -> Option<FromEngine> {
        match message {
            FromEngine::Refused { request, error } => {
                self.answer(AskKind::TakeOver, request, Err(AskError::Refused(error)));
            }
            FromEngine::Done { request, error } => {
                self.answer(
                    AskKind::Request,
                    request,
                    error.map_or(Ok(()), |e| Err(AskError::Refused(e))),
                );
            }
            FromEngine::ExportSettled {
                request,
                at_devices,
            } => {
                if let Some(asker) = self.settling.borrow_mut().remove(&request) {
                    let _ = asker.send(at_devices);
                }
            }
            FromEngine::RevokeDone { revoke } => {
                self.inherited_revokes
                    .borrow_mut()
                    .retain(|number| *number != revoke);
                self.answer(AskKind::Revoke, revoke, Ok(()));
            }
            FromEngine::TookBack { revoke, taken } => {
                self.answer_ahead(revoke, AheadAnswer::Taken(taken));
            }
            FromEngine::AheadCounted { count, ahead } => {
                self.answer_ahead(count, AheadAnswer::Left(ahead));
            }
            FromEngine::RevokeRefused { revoke } => {
                let why = "the deallocation has ended meanwhile".to_owned();
                self.answer(AskKind::Revoke, revoke, Err(AskError::Refused(why)));
            }
            FromEngine::JobDone { job, errno } => {
                self.inherited_jobs
                    .borrow_mut()
                    .retain(|(number, _)| *number != job);
                self.answer(
                    AskKind::Job,
                    job,
                    errno.map_or(Ok(()), |e| Err(AskError::Errno(e))),
                );
            }
            other => return Some(other),
        }
        None
    }

    fn answer(&self, kind: AskKind, number: u64, answer: AskResult) {
        if let Some(asker) = self.open.borrow_mut().remove(&(kind, number)) {
            let _ = asker.send(answer);
        }
        self.changed.raise();
    }

    /// Sends grants that were gathered, and what is queued when the socket was full; ends only by an
    /// error.
    pub(crate) async fn write(&self) -> io::Result<()> {
        loop {
            self.wire.wants_room.notified().await;
            self.send_grants();
            self.wire.write_queued().await?;
        }
    }

    /// Grants something; it is sent soon.
    pub(crate) fn grant(&self, grant: GrantOf) {
        let mut grants = self.grants.borrow_mut();
        grants.push(grant);
        match grants.len() {
            1 => self.wire.wants_room.notify_one(),
            GRANTS_AT_ONCE => {
                drop(grants);
                self.send_grants();
            }
            _ => {}
        }
    }

    /// Sends the grants that were gathered.
    pub(crate) fn send_grants(&self) {
        let mut gathered = self.grants.borrow_mut();
        if gathered.is_empty() {
            return;
        }
        let grants = std::mem::take(&mut *gathered);
        drop(gathered);
        self.send(&ToEngine::Grants { grants }, Vec::new());
    }

    /// Says something that has no answer of its own. A failure shows as the session's end.
    pub(crate) fn say(&self, message: &ToEngine) {
        self.say_with(message, Vec::new());
    }

    fn say_with(&self, message: &ToEngine, descriptors: Vec<Arc<OwnedFd>>) {
        self.send_grants();
        self.send(message, descriptors);
    }

    fn send(&self, message: &ToEngine, descriptors: Vec<Arc<OwnedFd>>) {
        if self.ended.get() {
            return;
        }
        if let Err(error) = self.wire.send(message, descriptors) {
            tracing::warn!(%error, "sending to the engine failed");
        }
    }

    fn ask(
        &self,
        kind: AskKind,
        what: &'static str,
        descriptors: Vec<Arc<OwnedFd>>,
        message: impl FnOnce(u64) -> ToEngine,
    ) -> PendingAnswer {
        let number = self.next_number.get();
        self.next_number.set(number + 1);
        let (sender, answer) = oneshot::channel();
        if !self.ended.get() {
            self.open.borrow_mut().insert((kind, number), sender);
            self.say_with(&message(number), descriptors);
        }
        PendingAnswer {
            number,
            answer,
            what,
        }
    }

    /// Asks for something that is answered by `Done`.
    pub(crate) fn request(
        &self,
        what: &'static str,
        message: impl FnOnce(u64) -> ToEngine,
    ) -> PendingAnswer {
        self.ask(AskKind::Request, what, Vec::new(), message)
    }

    /// Asks for a change of an export, and returns once hosts that it shuts out are shut out: with how
    /// many commands of theirs are still at devices.
    pub(crate) async fn request_settled(
        &self,
        what: &'static str,
        limit: Duration,
        message: impl FnOnce(u64) -> ToEngine,
    ) -> Result<u32, AskError> {
        let mut pending = self.request(what, message);
        let (sender, settled) = oneshot::channel();
        if !self.ended.get() {
            self.settling.borrow_mut().insert(pending.number, sender);
        }
        let settled = match pending.within(limit).await {
            Ok(()) => match in_time(limit, settled).await {
                Some(at_devices) => at_devices.map_err(|_| AskError::Gone),
                None => Err(AskError::TimedOut(limit, "hosts to be shut out")),
            },
            Err(error) => Err(error),
        };
        self.settling.borrow_mut().remove(&pending.number);
        settled
    }

    /// The same with a descriptor.
    pub(crate) fn request_with(
        &self,
        what: &'static str,
        descriptor: OwnedFd,
        message: impl FnOnce(u64) -> ToEngine,
    ) -> PendingAnswer {
        self.ask(AskKind::Request, what, vec![Arc::new(descriptor)], message)
    }

    /// Takes all rights on a range back; for a tenant's deallocation only while that is open.
    pub(crate) fn revoke(
        &self,
        volume: VolumeId,
        range: ExtentRange,
        release: Option<u64>,
    ) -> PendingAnswer {
        self.ask(AskKind::Revoke, "a revoke", Vec::new(), |revoke| {
            ToEngine::Revoke {
                revoke,
                volume,
                range,
                keep: None,
                release,
            }
        })
    }

    /// Has the internal lane do something.
    pub(crate) fn job(&self, work: Job) -> PendingAnswer {
        let what = match work {
            Job::Flush { .. } => "a flush",
            Job::Launder { .. } => "laundering",
            Job::Settle { .. } => "the end of a device's requests",
        };
        self.ask(AskKind::Job, what, Vec::new(), |job| ToEngine::Job {
            job,
            work,
        })
    }

    pub(crate) fn set_device(&self, device: DeviceIndex, state: DeviceState) {
        self.devices.borrow_mut().insert(device, state);
        self.changed.raise();
    }

    /// How far the engine is with a device.
    pub(crate) fn device(&self, device: DeviceIndex) -> Option<DeviceState> {
        self.devices.borrow().get(&device).cloned()
    }

    /// Whether the engine has its fence on a device.
    pub(crate) fn device_ready(&self, device: DeviceIndex) -> bool {
        self.devices.borrow().get(&device) == Some(&DeviceState::Ready)
    }

    /// Whether what the engine says that it flushed includes this device: it was told of it and has
    /// not refused it. After a take-over it serves and flushes devices before their fence.
    pub(crate) fn device_flushed(&self, device: DeviceIndex) -> bool {
        let devices = self.devices.borrow();
        matches!(
            devices.get(&device),
            Some(DeviceState::Opening | DeviceState::Ready)
        )
    }

    /// Waits until the engine has its fence on all of these devices.
    pub(crate) async fn devices_ready(&self, devices: &[DeviceIndex]) -> Result<(), AskError> {
        self.changed
            .until(|| {
                if self.ended.get() {
                    Some(Err(AskError::Gone))
                } else {
                    devices
                        .iter()
                        .all(|d| self.device_ready(*d))
                        .then_some(Ok(()))
                }
            })
            .await
    }

    /// Waits until the engine was told of devices, which happens for all that are here at once.
    pub(crate) async fn devices_told(&self) -> BTreeSet<DeviceIndex> {
        let told = || {
            let devices = self.devices.borrow();
            (!devices.is_empty()).then(|| devices.keys().copied().collect())
        };
        self.changed.until(told).await
    }

    /// Waits until the engine has its fence on one of these devices, or can't have it (none then); takes
    /// it from them.
    pub(crate) async fn next_fence(
        &self,
        waiting: &mut BTreeSet<DeviceIndex>,
    ) -> Option<DeviceIndex> {
        let next = || {
            let devices = self.devices.borrow();
            waiting.iter().find_map(|device| match devices.get(device) {
                Some(DeviceState::Opening) => None,
                Some(DeviceState::Ready) => Some((*device, true)),
                Some(DeviceState::Failed(_)) | None => Some((*device, false)),
            })
        };
        let (device, ready) = self.changed.until(next).await;
        waiting.remove(&device);
        ready.then_some(device)
    }

    /// Waits until nothing that an earlier conversation asked for is unfinished, or this one is over.
    pub(crate) async fn inherited_finished(&self) {
        self.changed
            .until(|| {
                let none = self.inherited_revokes.borrow().is_empty()
                    && self.inherited_jobs.borrow().is_empty();
                (none || self.ended.get()).then_some(())
            })
            .await;
    }

    /// Waits until no job that an earlier conversation asked for is unfinished on a device, or this
    /// one is over.
    pub(crate) async fn inherited_jobs_finished(&self, device: DeviceIndex) {
        self.changed
            .until(|| {
                let jobs = self.inherited_jobs.borrow();
                let none = !jobs.iter().any(|(_, d)| *d == device);
                (none || self.ended.get()).then_some(())
            })
            .await;
    }

    /// Gives up the revokes of an earlier conversation, so that they take up no room any more.
    pub(crate) fn abandon_inherited(&self) {
        let revokes = std::mem::take(&mut *self.inherited_revokes.borrow_mut());
        for revoke in revokes {
            self.say(&ToEngine::Abandon { revoke });
        }
    }

    /// How many of an earlier conversation's revokes and jobs are unfinished.
    pub(crate) fn inherited(&self) -> usize {
        self.inherited_revokes.borrow().len() + self.inherited_jobs.borrow().len()
    }

    /// The conversation is over: everything asked ends with [`AskError::Gone`].
    pub(crate) fn end(&self) {
        self.ended.set(true);
        self.open.borrow_mut().clear();
        self.settling.borrow_mut().clear();
        self.asked_ahead.borrow_mut().clear();
        self.changed.raise();
    }

    /// Whether it is over.
    pub(crate) fn is_over(&self) -> bool {
        self.ended.get()
    }
}
