//! Merges layers that one child is left of, in the background.
//!
//! A step holds its range, so that no copy of its extents is running. Extents that it frees may
//! still be read by requests from before a copy, so these must end first.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use forebay_pool::{ErrorKind, LayerId, MergeStep, Unneeded, UnneededCursor};
use forebay_xlate::boundary::message::Job;
use forebay_xlate::{DeviceIndex, VolumeId};
use tokio::time::{sleep, timeout};

use crate::base::Base;
use crate::link::Link;
use crate::link::session::AskError;
use crate::mapping::flush::Flusher;
use crate::mapping::revoke::Revoker;
use crate::states::DeviceStates;

/// How often to look for merges without being told of one.
const POLL: Duration = Duration::from_secs(10);
const ROUND_PAUSE: Duration = Duration::from_millis(200);
/// The pause after a round in which nothing could be merged.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Merger {
    base: Rc<Base>,
    link: Rc<Link>,
    states: Rc<DeviceStates>,
    flusher: Rc<Flusher>,
    revoker: Rc<Revoker>,
    cursor: Cell<UnneededCursor>,
}

impl Merger {
    pub(crate) fn new(
        base: &Rc<Base>,
        link: &Rc<Link>,
        states: &Rc<DeviceStates>,
        flusher: &Rc<Flusher>,
        revoker: &Rc<Revoker>,
    ) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            link: link.clone(),
            states: states.clone(),
            flusher: flusher.clone(),
            revoker: revoker.clone(),
            cursor: Cell::default(),
        })
    }

    pub(crate) async fn run(self: Rc<Self>) {
        self.base.wait_open().await;
        loop {
            let _ = timeout(POLL, self.base.zero_fill_wanted.next()).await;
            while self.merge_each().await {}
            while self.free_some().await {}
            // The signal comes with every deallocation.
            sleep(ROUND_PAUSE).await;
        }
    }

    /// Goes through all possible merges once; says whether any step was made.
    async fn merge_each(&self) -> bool {
        let (mut after, mut any): (Option<LayerId>, bool) = (None, false);
        loop {
            let step = self
                .base
                .core
                .borrow_mut()
                .pool
                .snapshots()
                .next_merge(after);
            let Some(step) = step else {
                return any;
            };
            match self.merge(&step).await {
                Ok(()) => any = true,
                Err(error) => {
                    tracing::debug!(layer = %step.layer, %error, "a merge waits");
                    sleep(PAUSE).await;
                }
            }
            after = Some(step.layer);
        }
    }

    /// Searches a part of the layers for extents that no volume sees. True if some were freed.
    async fn free_some(&self) -> bool {
        let mut cursor = self.cursor.get();
        let unneeded = self
            .base
            .core
            .borrow()
            .pool
            .volumes()
            .next_unneeded(&mut cursor);
        if cursor == self.cursor.get() {
            cursor = UnneededCursor::default();
        }
        self.cursor.set(cursor);
        let Some(unneeded) = unneeded else {
            return false;
        };
        let freed = self.free(&unneeded).await;
        if let Err(error) = &freed {
            tracing::debug!(layer = %unneeded.layer, %error, "unneeded extents stay for now");
        }
        freed.is_ok()
    }

    async fn free(&self, unneeded: &Unneeded) -> Result<(), AskError> {
        for device in &unneeded.devices {
            self.end_requests(*device).await?;
        }
        let freed = self
            .base
            .core
            .borrow_mut()
            .pool
            .snapshots()
            .free_unneeded(unneeded);
        freed.map_err(|error| AskError::Refused(error.message))?;
        self.base.commit_through().await;
        self.base.zero_fill_wanted.raise();
        Ok(())
    }

    async fn merge(&self, step: &MergeStep) -> Result<(), AskError> {
        let mut _held = None;
        if let Some(volume) = step.volume() {
            // Most before the range is held, because its faults wait then.
            self.commit_pending(volume).await?;
            _held = Some(self.revoker.locks.hold(volume, step.range).await);
            self.commit_pending(volume).await?;
        }
        for device in &step.devices {
            self.end_requests(*device).await?;
        }
        let merged = self.base.core.borrow_mut().pool.snapshots().merge(step);
        match merged {
            Ok(_) => {}
            Err(error) if error.kind == ErrorKind::InUse => {
                // Planned anew, unless its mappings are in a batch.
                self.base.commit_through().await;
                return Err(AskError::Refused(error.message));
            }
            Err(error) => return Err(AskError::Refused(error.message)),
        }
        self.base.commit_through().await;
        self.base.zero_fill_wanted.raise();
        Ok(())
    }

    async fn commit_pending(&self, volume: VolumeId) -> Result<(), AskError> {
        let pending = {
            let core = self.base.core.borrow();
            core.pool.volumes().pending_on(volume, u64::MAX)
        };
        for device in pending {
            let synced = self.flusher.sync_device(device).await;
            synced.map_err(|error| AskError::Refused(error.to_string()))?;
        }
        Ok(())
    }

    /// Returns once every request that is now at the device has ended, an earlier engine's too.
    async fn end_requests(&self, device: DeviceIndex) -> Result<(), AskError> {
        let session = self.link.session().ok_or(AskError::Gone)?;
        if !session.device_ready(device) || self.states.is_hanging(device) {
            return Err(AskError::Refused(format!("{device} is not ready")));
        }
        let settle = session.job(Job::Settle { device });
        self.states.job_within(&session, device, settle).await
    }
}
