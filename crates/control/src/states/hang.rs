//! Devices that hang, and what is quarantined because of them.
//!
//! Purpose: a request that a device does not end may still write to extents that were given up; they
//! stay out of use until it has ended, and nothing else waits for it.
//! Design: whoever finds that a device does not answer in time (a revoke, a job) suspects it
//! ([`DeviceStates::suspect`]). One task for each device ([`DeviceStates::run_settler`]) then has one
//! [`Job::Settle`] outstanding there, which ends when everything that was in flight at the device when
//! it was asked has ended: with it ends the quarantine of whatever was quarantined before it was
//! asked, and the suspicion, unless there is a newer one, for which it asks again. A later engine that
//! has its fence on the device ends what concerns its predecessors' requests. Meanwhile nothing is
//! flushed or laundered there, and nothing there is revoked to make room.
//! Not here: which extents are quarantined (the pool), revokes (`revoke`).

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use forebay_device::size::format_bytes;
use forebay_pool::QuarantineMark;
use forebay_xlate::DeviceIndex;
use forebay_xlate::boundary::message::Job;
use tokio::time::{sleep, timeout};

use crate::base::waits::Wait;
use crate::link::session::{AskError, PendingAnswer, Session};
use crate::model::events::EventKind;
use crate::states::DeviceStates;

/// Before a settle that failed is asked for again.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Devices that may hang.
#[derive(Debug, Default)]
pub(crate) struct Hanging {
    suspects: RefCell<BTreeMap<DeviceIndex, Suspicion>>,
    /// Suspicions so far: each has a number.
    raised: Cell<u64>,
    /// Up to which suspicion requests have ended.
    ended: RefCell<BTreeMap<DeviceIndex, u64>>,
}

/// Why a device may hang.
#[derive(Debug, Clone, Copy)]
struct Suspicion {
    number: u64,
    /// The engine whose requests do not end.
    generation: u64,
    what: &'static str,
}

impl DeviceStates {
    /// Requests at a device have not ended in time, among them perhaps some for `what`. Returns the
    /// suspicion's number.
    pub(crate) fn suspect(&self, device: DeviceIndex, generation: u64, what: &'static str) -> u64 {
        let number = self.hanging.raised.get() + 1;
        self.hanging.raised.set(number);
        let suspicion = Suspicion {
            number,
            generation,
            what,
        };
        let known = self.hanging.suspects.borrow_mut().insert(device, suspicion);
        if known.is_none() {
            let spec = self.base.spec_of(device);
            let text =
                format!("device {spec} hangs: {what} did not end there; others go on without it");
            self.base
                .tell_of_device(EventKind::DeviceFailed, device, text);
        }
        self.base.devices_changed.raise();
        number
    }

    /// Waits until everything that was in flight at a device at a suspicion has ended; false if it
    /// takes too long.
    pub(crate) async fn settled(&self, device: DeviceIndex, suspicion: u64) -> bool {
        let has_ended = || {
            let ended = self.hanging.ended.borrow();
            ended.get(&device).copied() >= Some(suspicion)
        };
        let wait = self
            .base
            .devices_changed
            .until(|| has_ended().then_some(()));
        timeout(self.base.limits.settle, wait).await.is_ok()
    }

    /// Whether requests at the device do not end.
    pub(crate) fn is_hanging(&self, device: DeviceIndex) -> bool {
        self.hanging.suspects.borrow().contains_key(&device)
    }

    /// What people must know about hanging devices and quarantined extents.
    pub(crate) fn hang_troubles(&self) -> Vec<String> {
        let core = self.base.core.borrow();
        let extent_bytes = core.pool.info().extent_bytes;
        let mut troubles = Vec::new();
        for record in core.pool.devices() {
            let bytes = core.pool.allocator().quarantined_on(record.index) * extent_bytes;
            let spec = self.base.device_spec(record);
            match self.hanging.suspects.borrow().get(&record.index) {
                Some(Suspicion { what, .. }) => troubles.push(format!(
                    "device {spec} hangs: {what} did not end there; {} of freed space are quarantined until its requests end",
                    format_bytes(bytes)
                )),
                None if bytes > 0 => troubles.push(format!(
                    "device {spec}: {} of freed space are quarantined until earlier requests there have ended",
                    format_bytes(bytes)
                )),
                None => {}
            }
        }
        troubles
    }

    /// Waits for a job of the internal lane; a device that does not end it in time hangs.
    pub(crate) async fn job_within(
        &self,
        session: &Session,
        device: DeviceIndex,
        mut job: PendingAnswer,
    ) -> Result<(), AskError> {
        let _waits = self.base.waits.begin(Wait::Job(device, job.what()));
        let ended = job.within(self.base.limits.job).await;
        if let Err(AskError::TimedOut(_, what)) = ended {
            self.suspect(device, session.generation, what);
        }
        ended
    }

    fn is_in_doubt(&self, device: DeviceIndex) -> bool {
        self.is_hanging(device)
            || self
                .base
                .core
                .borrow()
                .pool
                .allocator()
                .quarantined_on(device)
                > 0
    }

    /// The one task that waits for what is in flight at a device.
    pub(crate) async fn run_settler(self: Rc<Self>, device: DeviceIndex) {
        loop {
            self.base
                .devices_changed
                .until(|| self.is_in_doubt(device).then_some(()))
                .await;
            let session = self.link.wait_session().await;
            if session.devices_ready(&[device]).await.is_err() {
                continue;
            }
            if let Some(mark) = session.quarantined_before.get() {
                // Its predecessors' requests have ended.
                self.requests_ended(device, mark, |s| s.generation < session.generation);
                if !self.is_in_doubt(device) {
                    continue;
                }
            }
            // What comes after this needs another one.
            let mark = self.base.core.borrow().pool.allocator().quarantine_mark();
            let raised = self.hanging.raised.get();
            match session.job(Job::Settle { device }).ended().await {
                Ok(()) => self.requests_ended(device, mark, |s| s.number <= raised),
                Err(AskError::Gone) => {}
                Err(error) => {
                    tracing::warn!(%device, %error, "waiting for a device's requests");
                    sleep(ASK_AGAIN).await;
                }
            }
        }
    }

    /// Requests at a device have ended: those before `mark`, and those of a suspicion that it covers.
    fn requests_ended(
        &self,
        device: DeviceIndex,
        mark: QuarantineMark,
        covers: impl Fn(&Suspicion) -> bool,
    ) {
        let mut suspects = self.hanging.suspects.borrow_mut();
        if let Some(suspicion) = suspects.get(&device).copied().filter(covers) {
            suspects.remove(&device);
            let text = format!("device {} hangs no more", self.base.spec_of(device));
            self.base
                .tell_of_device(EventKind::DeviceReturned, device, text);
            let mut ended = self.hanging.ended.borrow_mut();
            ended.insert(device, suspicion.number);
        }
        drop(suspects);
        let extents = self
            .base
            .core
            .borrow_mut()
            .pool
            .end_quarantine_on(device, mark);
        if extents > 0 {
            tracing::info!(%device, extents, "a quarantine ended: what was in flight has ended");
            self.base.committer.kick();
        }
        self.base.devices_changed.raise();
    }
}
