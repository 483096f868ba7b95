//! Devices that hang, and the quarantine of extents that requests in flight there may still write.
//!
//! A timed-out revoke or job suspects the device ([`DeviceStates::suspect`]). One [`Job::Settle`]
//! per device ends when all earlier requests have ended, and with it earlier suspicions and
//! quarantines. A later engine's fence has this effect for its predecessors' requests. Meanwhile
//! the device is not flushed, zero-filled or used for eviction.

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

const ASK_AGAIN: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(crate) struct Hanging {
    suspects: RefCell<BTreeMap<DeviceIndex, Suspicion>>,
    /// The number of the newest suspicion.
    raised: Cell<u64>,
    /// The newest suspicion whose requests have ended.
    ended: RefCell<BTreeMap<DeviceIndex, u64>>,
}

#[derive(Debug, Clone, Copy)]
struct Suspicion {
    number: u64,
    /// The engine whose requests do not end.
    generation: u64,
    what: &'static str,
}

impl DeviceStates {
    /// Requests at a device, perhaps for `what`, have not ended in time. Returns the suspicion's
    /// number.
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
            let text = format!(
                "device {spec} hangs: {what} did not end there; other devices are not affected"
            );
            self.base
                .report_device(EventKind::DeviceFailed, device, text);
        }
        self.base.devices_changed.raise();
        number
    }

    /// False after a time limit.
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

    pub(crate) fn is_hanging(&self, device: DeviceIndex) -> bool {
        self.hanging.suspects.borrow().contains_key(&device)
    }

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

    /// On a time-out the device counts as hanging.
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
                self.requests_ended(device, mark, |s| s.generation < session.generation);
                if !self.is_in_doubt(device) {
                    continue;
                }
            }
            // Later suspicions need another job.
            let mark = self.base.core.borrow().pool.allocator().quarantine_mark();
            let raised = self.hanging.raised.get();
            match session.job(Job::Settle { device }).ended().await {
                Ok(()) => self.requests_ended(device, mark, |s| s.number <= raised),
                Err(AskError::Gone) => {}
                Err(error) => {
                    tracing::warn!(%device, %error, "can't wait for a device's requests");
                    sleep(ASK_AGAIN).await;
                }
            }
        }
    }

    /// Ends quarantines before `mark`, and the suspicions that it covers.
    fn requests_ended(
        &self,
        device: DeviceIndex,
        mark: QuarantineMark,
        covers: impl Fn(&Suspicion) -> bool,
    ) {
        let mut suspects = self.hanging.suspects.borrow_mut();
        if let Some(suspicion) = suspects.get(&device).copied().filter(covers) {
            suspects.remove(&device);
            let text = format!("device {} no longer hangs", self.base.spec_of(device));
            self.base
                .report_device(EventKind::DeviceReturned, device, text);
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
            tracing::info!(%device, extents, "a quarantine ended: the requests in flight have ended");
            self.base.committer.kick();
        }
        self.base.devices_changed.raise();
    }
}
