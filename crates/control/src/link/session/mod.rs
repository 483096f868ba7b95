//! A session with one engine: matches answers with questions, and tracks the engine's fences.
//!
//! Requests, revokes and jobs have numbers; open ones end with [`AskError::Gone`]. Numbers start at
//! the monotonic clock's nanoseconds, so no later session of this boot reuses one. Grants are
//! batched, but sent before any other message, so their order stays.

mod deposit;
mod greet;
mod preallocated;
mod vms;

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

use self::deposit::Deposit;
use self::preallocated::PreallocatedAnswer;
use super::wire::Wire;
use crate::changed::Signal;
use crate::readiness::in_time;

pub(crate) use self::deposit::{Conversion, Estate};
pub(crate) use self::greet::{GreetError, Greeting};

/// Messages handled before the owner's other tasks run. With [`MAX_BATCH`] faults in each, this
/// takes a few milliseconds.
const MESSAGES_AT_ONCE: usize = 8;
/// Grants per message. Few, so that the engine works on some while the next ones are looked up;
/// this nearly doubles the rate of first writes.
const GRANTS_AT_ONCE: usize = 8;
const _: () = assert!(GRANTS_AT_ONCE <= MAX_BATCH);

/// Why a question to the engine failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AskError {
    #[error("the engine went away")]
    Gone,
    #[error("the engine did not answer within {0:?}: {1}")]
    TimedOut(Duration, &'static str),
    #[error("the engine refused: {0}")]
    Refused(String),
    /// With the devices' specifications.
    #[error("the copy of an extent at {0} has not ended")]
    Copying(String),
    #[error("{}", io::Error::from_raw_os_error(*.0))]
    Errno(i32),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DeviceState {
    /// The engine was told of it.
    Opening,
    /// Every earlier engine's lock is released: it is served.
    Ready,
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

#[derive(Debug)]
pub(crate) struct PendingAnswer {
    pub(crate) number: u64,
    answer: oneshot::Receiver<AskResult>,
    what: &'static str,
}

impl PendingAnswer {
    /// Waits at most `limit`; the answer may still come later.
    pub(crate) async fn within(&mut self, limit: Duration) -> AskResult {
        match in_time(limit, &mut self.answer).await {
            Some(Ok(answer)) => answer,
            Some(Err(_)) => Err(AskError::Gone),
            None => Err(AskError::TimedOut(limit, self.what)),
        }
    }

    pub(crate) fn what(&self) -> &'static str {
        self.what
    }

    pub(crate) fn now(&mut self) -> Option<AskResult> {
        match self.answer.try_recv() {
            Ok(answer) => Some(answer),
            Err(oneshot::error::TryRecvError::Empty) => None,
            Err(oneshot::error::TryRecvError::Closed) => Some(Err(AskError::Gone)),
        }
    }

    /// Waits until the answer comes or the session ends.
    pub(crate) async fn ended(&mut self) -> AskResult {
        (&mut self.answer).await.unwrap_or(Err(AskError::Gone))
    }
}

#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) pid: u32,
    pub(crate) generation: u64,
    /// Its program's.
    pub(crate) version: String,
    pub(crate) region: Rc<Region>,
    deposit: RefCell<Deposit>,
    /// The engine's account of its take-over.
    conversion: RefCell<Option<Conversion>>,
    wire: Wire,
    /// Grants that are not sent yet.
    grants: RefCell<Vec<GrantOf>>,
    next_number: Cell<u64>,
    open: RefCell<HashMap<(AskKind, u64), oneshot::Sender<AskResult>>>,
    /// Changes of exports whose removed hosts are still connected, by request.
    settling: RefCell<HashMap<u64, oneshot::Sender<u32>>>,
    /// Questions about preallocated extents.
    asked_preallocated: RefCell<HashMap<u64, oneshot::Sender<PreallocatedAnswer>>>,
    devices: RefCell<BTreeMap<DeviceIndex, DeviceState>>,
    /// Revokes and zeroing of an earlier session that the engine has not finished.
    inherited_revokes: RefCell<Vec<u64>>,
    inherited_jobs: RefCell<Vec<(u64, DeviceIndex)>>,
    /// Set if this engine is known to be a successor: extents quarantined before the mark concern
    /// only earlier engines.
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
    /// Reads the messages that have come, up to a bound, perhaps none for the owner. Answers go to
    /// their callers directly.
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

    /// Takes messages that concern the session; returns the others.
    pub(crate) fn absorb(
        &self,
        message: FromEngine,
        descriptors: Vec<OwnedFd>,
    ) -> Option<FromEngine> {
        match message {
            FromEngine::Socket { socket } => self.keep_socket(socket, descriptors),
            FromEngine::SocketGone { socket } => self.drop_socket(socket),
            FromEngine::Vm { socket, export } => {
                self.keep_vm(socket, export, descriptors);
                return Some(FromEngine::Vm { socket, export });
            }
            FromEngine::Deposits { socket, numbers } => {
                self.keep_deposits(socket, &numbers, descriptors);
            }
            FromEngine::Withdrawn { socket, numbers } => self.drop_deposits(socket, &numbers),
            FromEngine::Converted {
                request,
                queues,
                commands,
                vms,
                closed,
            } => {
                *self.conversion.borrow_mut() = Some(Conversion {
                    queues,
                    commands,
                    vms,
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
                self.answer_preallocated(revoke, PreallocatedAnswer::Taken(taken));
            }
            FromEngine::PreallocatedCounted {
                count,
                preallocated,
            } => {
                self.answer_preallocated(count, PreallocatedAnswer::Left(preallocated));
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

    /// Sends batched grants, and queued messages when the socket has room. Ends only by an error.
    pub(crate) async fn run_writer(&self) -> io::Result<()> {
        loop {
            self.wire.wants_write.notified().await;
            self.send_grants();
            self.wire.write_queued().await?;
        }
    }

    /// Batches a grant, to be sent soon.
    pub(crate) fn grant(&self, grant: GrantOf) {
        let mut grants = self.grants.borrow_mut();
        grants.push(grant);
        match grants.len() {
            1 => self.wire.wants_write.notify_one(),
            GRANTS_AT_ONCE => {
                drop(grants);
                self.send_grants();
            }
            _ => {}
        }
    }

    pub(crate) fn send_grants(&self) {
        let mut gathered = self.grants.borrow_mut();
        if gathered.is_empty() {
            return;
        }
        let grants = std::mem::take(&mut *gathered);
        drop(gathered);
        self.send(&ToEngine::Grants { grants }, Vec::new());
    }

    /// Sends a message without an answer. A failure appears as the session's end.
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

    /// Sends a request that `Done` answers.
    pub(crate) fn request(
        &self,
        what: &'static str,
        message: impl FnOnce(u64) -> ToEngine,
    ) -> PendingAnswer {
        self.ask(AskKind::Request, what, Vec::new(), message)
    }

    /// Changes an export; returns, when removed hosts are disconnected, how many of their commands
    /// are still at devices.
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
                None => Err(AskError::TimedOut(limit, "disconnecting hosts")),
            },
            Err(error) => Err(error),
        };
        self.settling.borrow_mut().remove(&pending.number);
        settled
    }

    pub(crate) fn request_with(
        &self,
        what: &'static str,
        descriptor: OwnedFd,
        message: impl FnOnce(u64) -> ToEngine,
    ) -> PendingAnswer {
        self.ask(AskKind::Request, what, vec![Arc::new(descriptor)], message)
    }

    /// Revokes all grants on a range; for a tenant's deallocation only while that is open.
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
                freeze: None,
                release,
            }
        })
    }

    /// Revokes the write right on a whole volume by a new epoch.
    pub(crate) fn freeze(&self, volume: VolumeId, range: ExtentRange, epoch: u16) -> PendingAnswer {
        self.ask(AskKind::Revoke, "the end of writes", Vec::new(), |revoke| {
            ToEngine::Revoke {
                revoke,
                volume,
                range,
                freeze: Some(epoch),
                release: None,
            }
        })
    }

    pub(crate) fn job(&self, work: Job) -> PendingAnswer {
        let what = match work {
            Job::Flush { .. } => "a flush",
            Job::ZeroFill { .. } => "zero-filling",
            Job::Copy { .. } => "a copy",
            Job::Overwrite { .. } => "a write of a whole extent",
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

    pub(crate) fn device(&self, device: DeviceIndex) -> Option<DeviceState> {
        self.devices.borrow().get(&device).cloned()
    }

    pub(crate) fn device_ready(&self, device: DeviceIndex) -> bool {
        self.devices.borrow().get(&device) == Some(&DeviceState::Ready)
    }

    /// Whether the engine's flushes include this device: it was told of the device and has not
    /// refused it. After a take-over it serves and flushes devices before their fence.
    pub(crate) fn device_flushed(&self, device: DeviceIndex) -> bool {
        let devices = self.devices.borrow();
        matches!(
            devices.get(&device),
            Some(DeviceState::Opening | DeviceState::Ready)
        )
    }

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

    /// Waits until the engine was told of devices; it is told of all present ones at once.
    pub(crate) async fn published_devices(&self) -> BTreeSet<DeviceIndex> {
        let published = || {
            let devices = self.devices.borrow();
            (!devices.is_empty()).then(|| devices.keys().copied().collect())
        };
        self.changed.until(published).await
    }

    /// Waits for the next fence and removes that device from `waiting`. `None` if no other can
    /// come.
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

    /// Waits until the requests of an earlier session are finished, or this one is over.
    pub(crate) async fn inherited_finished(&self) {
        self.changed
            .until(|| {
                let none = self.inherited_revokes.borrow().is_empty()
                    && self.inherited_jobs.borrow().is_empty();
                (none || self.ended.get()).then_some(())
            })
            .await;
    }

    /// Likewise for one device's jobs.
    pub(crate) async fn inherited_jobs_finished(&self, device: DeviceIndex) {
        self.changed
            .until(|| {
                let jobs = self.inherited_jobs.borrow();
                let none = !jobs.iter().any(|(_, d)| *d == device);
                (none || self.ended.get()).then_some(())
            })
            .await;
    }

    /// Abandons the revokes of an earlier session, to free their places.
    pub(crate) fn abandon_inherited(&self) {
        let revokes = std::mem::take(&mut *self.inherited_revokes.borrow_mut());
        for revoke in revokes {
            self.say(&ToEngine::Abandon { revoke });
        }
    }

    pub(crate) fn inherited(&self) -> usize {
        self.inherited_revokes.borrow().len() + self.inherited_jobs.borrow().len()
    }

    /// Ends the session: every open question fails with [`AskError::Gone`].
    pub(crate) fn end(&self) {
        self.ended.set(true);
        self.open.borrow_mut().clear();
        self.settling.borrow_mut().clear();
        self.asked_preallocated.borrow_mut().clear();
        self.changed.raise();
    }

    pub(crate) fn is_over(&self) -> bool {
        self.ended.get()
    }
}
