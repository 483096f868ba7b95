//! Commits mappings, for a FLUSH or now and then: content first, then map.
//!
//! A mapping is committed only after its device was flushed, by the engine before it asks or by a
//! job of its internal lane. One task per device does the latter. Callers that come during a flush
//! share the next one, so a hanging device delays only its own extents. Sequences are read before
//! the flush: mappings granted during it wait for the next round.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use forebay_pool::{ErrorKind, PoolError};
use forebay_xlate::boundary::message::ToEngine;
use forebay_xlate::grants::Grant;
use forebay_xlate::{DeviceIndex, Rights, VolumeId};
use futures_util::future::join_all;
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

use crate::base::Base;
use crate::base::commit::CommitError;
use crate::changed::Signal;
use crate::link::Link;
use crate::link::session::{AskError, Session};
use crate::mapping::adopt::Adoption;
use crate::states::DeviceStates;

impl Flusher {
    /// The device holds no unflushed writes of an earlier engine now.
    pub(crate) fn note_flushed(&self, device: DeviceIndex) {
        let adoption = &self.adoption;
        if !adoption.unflushed.borrow_mut().remove(&device) || !adoption.finished.get() {
            return;
        }
        let named = self
            .base
            .core
            .borrow_mut()
            .pool
            .set_boot_id(&adoption.name());
        match named {
            Ok(()) => self.base.committer.kick(),
            Err(error) => tracing::error!(%error, "can't record the grant table"),
        }
    }

    /// The devices that a volume's FLUSH must cover even if the table does not list them. A missing
    /// device is flushed when it returns, before anything is granted there.
    pub(crate) fn may_hold_unflushed(&self) -> Vec<(DeviceIndex, VolumeId)> {
        let pool = &self.base.core.borrow().pool;
        let devices = self.adoption.unflushed.borrow();
        let open = devices.iter().filter(|d| self.base.is_open_here(**d));
        let volumes_on = |device: &DeviceIndex| {
            let device = *device;
            let volumes = pool.volumes().on_device(device).into_iter();
            volumes.map(move |volume| (device, volume))
        };
        open.flat_map(volumes_on).collect()
    }
}

#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum SyncError {
    /// With the device's specification, as in the next two.
    #[error("can't flush {0}: {1}")]
    Flush(String, AskError),
    #[error("can't flush {0}: {1}")]
    Device(String, String),
    #[error("{0} can't be flushed: it is missing or has failed")]
    Gone(String),
    #[error("{0}")]
    Pool(#[from] PoolError),
    #[error("{0}")]
    Commit(#[from] CommitError),
}

/// The tickets of callers that wait for a device's flush.
#[derive(Debug, Default)]
pub(crate) struct Syncer {
    drawn: Cell<u64>,
    served: Cell<u64>,
    error: RefCell<Option<SyncError>>,
    wake: Notify,
}

#[derive(Debug)]
pub(crate) struct Flusher {
    pub(super) base: Rc<Base>,
    pub(super) link: Rc<Link>,
    pub(super) states: Rc<DeviceStates>,
    pub(super) adoption: Rc<Adoption>,
    pub(super) syncers: RefCell<Syncers>,
    pub(super) synced: Signal,
}

impl Flusher {
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
            syncers: Default::default(),
            synced: Signal::new(),
        })
    }

    /// Answers only the session that asked: in a later one the engine asks again, and another
    /// engine has no such request.
    pub(crate) async fn commit_wanted(
        self: Rc<Self>,
        asked_in: Rc<Session>,
        volume: VolumeId,
        sequence: u64,
    ) {
        self.base.wait_open().await;
        let answer = match self.commit_up_to(volume, sequence).await {
            Ok(()) => ToEngine::Committed { volume, sequence },
            Err(error) => {
                tracing::error!(%volume, sequence, %error, "a flush failed");
                ToEngine::CommitFailed { volume, sequence }
            }
        };
        asked_in.say(&answer);
    }

    async fn commit_up_to(&self, volume: VolumeId, sequence: u64) -> Result<(), SyncError> {
        let mut sequence = sequence;
        if let Some(adopted) = self.adoption.uncommitted(volume) {
            // Adopted mappings may have later sequences than the engine knows: sync all their
            // devices.
            let devices = self
                .base
                .core
                .borrow()
                .pool
                .volumes()
                .pending_on(volume, u64::MAX);
            self.sync_devices(&devices).await?;
            sequence = sequence.max(adopted);
        }
        {
            let mut core = self.base.core.borrow_mut();
            if core.pool.volumes().durable_seq(volume) >= sequence {
                return Ok(());
            }
            let session = self.link.session();
            core.pool.commit_mappings(volume, sequence, |device| {
                session.as_ref().is_some_and(|s| s.device_flushed(device))
            })?;
        }
        self.base.commit().await?;
        let core = self.base.core.borrow();
        if core.pool.volumes().durable_seq(volume) >= sequence {
            return Ok(());
        }
        // Earlier batches are durable by now; a deleted volume has nothing pending.
        let left = core.pool.volumes().pending_on(volume, sequence);
        left.first()
            .map_or(Ok(()), |device| Err(self.gone(*device)))
    }

    fn gone(&self, device: DeviceIndex) -> SyncError {
        SyncError::Gone(self.base.spec_of(device))
    }

    /// Each volume's highest sequence on a device that no batch contains yet.
    fn uncommitted_on(&self, device: DeviceIndex) -> Vec<(VolumeId, u64)> {
        let pool = &self.base.core.borrow().pool;
        let volumes = pool.volumes().records().map(|volume| volume.id);
        volumes
            .filter(|volume| {
                pool.volumes()
                    .pending_on(*volume, u64::MAX)
                    .contains(&device)
            })
            .filter_map(|volume| Some((volume, pool.volumes().uncommitted(volume)?)))
            .collect()
    }

    /// One device's failure does not stop the others.
    pub(crate) async fn sync_all(&self) -> Result<(), SyncError> {
        let devices = self.base.core.borrow().pool.volumes().pending_devices();
        self.sync_devices(&devices).await
    }

    async fn sync_devices(&self, devices: &BTreeSet<DeviceIndex>) -> Result<(), SyncError> {
        let tickets: Vec<_> = devices
            .iter()
            .filter_map(|device| {
                let syncer = self.syncers.borrow().get(device)?.clone();
                syncer.drawn.set(syncer.drawn.get() + 1);
                syncer.wake.notify_one();
                Some((syncer.clone(), syncer.drawn.get()))
            })
            .collect();
        self.synced
            .until(|| {
                let all = tickets.iter().all(|(s, ticket)| s.served.get() >= *ticket);
                all.then_some(())
            })
            .await;
        let error = tickets.iter().find_map(|(s, _)| s.error.borrow().clone());
        error.map_or(Ok(()), Err)
    }

    pub(crate) fn add_syncer(&self, device: DeviceIndex) -> Rc<Syncer> {
        let syncer = Rc::new(Syncer::default());
        self.syncers.borrow_mut().insert(device, syncer.clone());
        syncer
    }

    /// The task of a device.
    pub(crate) async fn run_syncer(self: Rc<Self>, device: DeviceIndex, syncer: Rc<Syncer>) {
        loop {
            let asked = async {
                while syncer.served.get() == syncer.drawn.get() {
                    syncer.wake.notified().await;
                }
            };
            let by_itself = timeout(self.base.limits.sync_every, asked).await.is_err();
            if by_itself && (!self.base.is_open() || self.link.session().is_none()) {
                continue;
            }
            let upto = syncer.drawn.get();
            let result = self.sync_device(device).await;
            match &result {
                Ok(()) | Err(SyncError::Flush(_, AskError::Gone)) => {}
                Err(error) => tracing::warn!(%error, "can't commit mappings"),
            }
            *syncer.error.borrow_mut() = result.err();
            syncer.served.set(upto);
            self.synced.raise();
        }
    }

    pub(crate) async fn sync_device(&self, device: DeviceIndex) -> Result<(), SyncError> {
        let wanted = self.uncommitted_on(device);
        if wanted.is_empty() && !self.adoption.is_unflushed(device) {
            return Ok(());
        }
        self.flush_now(device).await?;
        self.commit_flushed(device, &wanted).await
    }

    /// Flushes a device, whatever is pending there.
    pub(crate) async fn flush_now(&self, device: DeviceIndex) -> Result<(), SyncError> {
        self.states
            .flush_device(device)
            .await
            .map_err(|error| SyncError::Flush(self.base.spec_of(device), error))?;
        self.note_flushed(device);
        Ok(())
    }

    async fn commit_flushed(
        &self,
        device: DeviceIndex,
        wanted: &[(VolumeId, u64)],
    ) -> Result<(), SyncError> {
        {
            let mut core = self.base.core.borrow_mut();
            for (volume, sequence) in wanted {
                match core
                    .pool
                    .commit_mappings(*volume, *sequence, |d| d == device)
                {
                    Ok(_) => {}
                    Err(error) if error.kind == ErrorKind::NotFound => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        self.base.commit().await?;
        self.adoption.note_committed(&self.base.core.borrow().pool);
        for &(volume, sequence) in wanted {
            // Older mappings of the volume on other devices may not be durable.
            let sequence = sequence.min(self.base.core.borrow().pool.volumes().durable_seq(volume));
            self.link.say(&ToEngine::Committed { volume, sequence });
        }
        Ok(())
    }

    /// Uses the daemon's own descriptor. The thread is detached, because the device may hang at
    /// exit.
    pub(crate) async fn flush_here(&self, device: DeviceIndex) -> Result<(), SyncError> {
        let store = {
            let devices = self.base.devices.borrow();
            let open = devices.iter().find(|open| open.index == device);
            open.ok_or_else(|| self.gone(device))?.store.clone()
        };
        let failed =
            |error: std::io::Error| SyncError::Device(self.base.spec_of(device), error.to_string());
        let (sender, ended) = oneshot::channel();
        std::thread::Builder::new()
            .name("device-flush".to_owned())
            .spawn(move || _ = sender.send(store.flush()))
            .map_err(failed)?;
        let ended = ended.await.map_err(std::io::Error::other);
        ended.and_then(|result| result).map_err(failed)
    }

    /// Flushes every device that is open here, because the next daemon may not know which were
    /// written.
    pub(crate) async fn sync_all_without_engine(&self) -> Result<(), SyncError> {
        let mut devices = self.base.core.borrow().pool.volumes().pending_devices();
        devices.extend(self.base.devices.borrow().iter().map(|open| open.index));
        let each = devices.into_iter().map(|device| async move {
            let wanted = self.uncommitted_on(device);
            self.flush_here(device).await?;
            self.commit_flushed(device, &wanted).await
        });
        let results = join_all(each).await;
        // Also commits batches that were already made, and all other changes.
        self.base.commit().await?;
        results.into_iter().collect()
    }

    pub(crate) fn lists_missing(&self) -> bool {
        let core = self.base.core.borrow();
        let stored = |grant: &&Grant| grant.word.rights() != Some(Rights::Hole);
        let mut listed = core.grants.iter().filter(stored);
        listed.any(|grant| !self.base.is_open_here(grant.word.device()))
    }
}

pub(crate) type Syncers = BTreeMap<DeviceIndex, Rc<Syncer>>;
