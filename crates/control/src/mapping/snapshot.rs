//! Snapshots of volumes at one moment, and rollback.
//!
//! A snapshot freezes its volumes: a new epoch revokes the write right, and the writes in flight
//! end. Then the devices are flushed, pending mappings and the snapshot committed, and writes go on
//! with copies. Most is flushed and committed beforehand, so that writes stall briefly; nothing in
//! the stall grows with a volume. If a step fails, the earlier epoch gives the rights back.

use std::collections::BTreeSet;
use std::rc::Rc;

use forebay_pool::{NewSnapshot, PoolError};
use forebay_xlate::boundary::message::ToEngine;
use forebay_xlate::{DeviceIndex, ExtentRange, VolumeId};
use futures_util::future::{join_all, try_join_all};
use tokio::time::{Instant, timeout, timeout_at};

use crate::base::Base;
use crate::devices::now_s;
use crate::link::Link;
use crate::link::session::{AskError, Session};
use crate::mapping::ALL_EXTENTS;
use crate::mapping::flush::{Flusher, SyncError};
use crate::mapping::locks::LockGuard;
use crate::mapping::release::ReleaseError;
use crate::mapping::revoke::Revoker;
use crate::model::error::ApiError;

/// Extents whose words are cleared at once before the epochs repeat.
const CLEAR_EXTENTS: u64 = 1 << 16;

/// Why no snapshot was taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SnapshotError {
    #[error("writes in flight did not end: {0}")]
    Freeze(#[from] AskError),
    #[error("{0}")]
    Sync(#[from] SyncError),
    #[error("{0}")]
    Pool(#[from] PoolError),
    #[error("{0}")]
    InUse(#[from] ApiError),
}

impl From<ReleaseError> for SnapshotError {
    fn from(error: ReleaseError) -> Self {
        match error {
            ReleaseError::Revoke(error) => Self::Freeze(error),
            ReleaseError::Pool(error) => Self::Pool(error),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Snapshots {
    base: Rc<Base>,
    link: Rc<Link>,
    flusher: Rc<Flusher>,
    revoker: Rc<Revoker>,
}

impl Snapshots {
    pub(crate) fn new(
        base: &Rc<Base>,
        link: &Rc<Link>,
        flusher: &Rc<Flusher>,
        revoker: &Rc<Revoker>,
    ) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            link: link.clone(),
            flusher: flusher.clone(),
            revoker: revoker.clone(),
        })
    }

    /// Takes snapshots of several volumes at one moment; returns their ids.
    pub(crate) async fn take(&self, new: &[NewSnapshot]) -> Result<Vec<VolumeId>, SnapshotError> {
        self.base.core.borrow_mut().pool.snapshots().check(new)?;
        let volumes: BTreeSet<VolumeId> = new.iter().map(|new| new.volume).collect();
        for volume in &volumes {
            self.clear_old_epochs(*volume).await?;
            self.revoker.take_back_of(*volume).await;
        }
        self.sync(&volumes).await?;
        // In one order, so that two groups don't wait for each other.
        let mut held = Vec::new();
        // Writes to those already held wait meanwhile.
        let begun = Instant::now();
        for volume in &volumes {
            let limit = self.base.limits.freeze;
            let hold = self.revoker.hold_without_copies(*volume, begun, limit);
            held.push(hold.await?);
        }
        let result = self.take_held(new, &volumes, &held).await;
        self.base
            .frozen
            .borrow_mut()
            .retain(|volume, _| !volumes.contains(volume));
        if result.is_err() {
            self.thaw(&volumes).await;
        }
        result
    }

    async fn take_held(
        &self,
        new: &[NewSnapshot],
        volumes: &BTreeSet<VolumeId>,
        held: &[LockGuard<'_>],
    ) -> Result<Vec<VolumeId>, SnapshotError> {
        for volume in volumes {
            let core = self.base.core.borrow();
            let epoch = core.pool.volume(*volume)?.next_epoch();
            self.base.frozen.borrow_mut().insert(*volume, epoch);
        }
        let limit = self.base.limits.freeze;
        let deadline = Instant::now() + limit;
        let freezes = held.iter().map(|held| self.freeze(held, deadline));
        // After a failure too, each one abandons what the engine still waits for.
        for frozen in join_all(freezes).await {
            frozen?;
        }
        timeout_at(deadline, self.sync(volumes))
            .await
            .map_err(|_| AskError::TimedOut(limit, "a flush for a snapshot"))??;
        for held in held {
            let protocol = &self.revoker.locks.protocol;
            protocol
                .borrow_mut()
                .changed(held.id)
                .map_err(AskError::from)?;
        }
        let taken = self
            .base
            .core
            .borrow_mut()
            .pool
            .snapshots()
            .take(new, now_s())?;
        // The mappings of later writes must not be adopted without it.
        self.base.commit_through().await;
        let pool = &mut self.base.core.borrow_mut().pool;
        for volume in volumes {
            // Unwritten extents are the snapshot's now.
            self.revoker.preallocated.forget_volume(pool, *volume);
        }
        Ok(taken)
    }

    /// Ends the writes in flight of a held volume.
    async fn freeze(&self, held: &LockGuard<'_>, deadline: Instant) -> Result<(), AskError> {
        let protocol = &self.revoker.locks.protocol;
        let limit = self.base.limits.freeze;
        let too_late = || AskError::TimedOut(limit, "the end of writes for a snapshot");
        loop {
            let session = timeout_at(deadline, self.link.wait_session());
            let session = session.await.map_err(|_| too_late())?;
            let (devices, epoch) = {
                let core = self.base.core.borrow();
                let record = core.pool.volume(held.volume);
                let record = record.map_err(|error| AskError::Refused(error.message))?;
                let devices = core.pool.volumes().devices_of(held.volume);
                (devices, self.base.epoch_of(record))
            };
            let list: Vec<DeviceIndex> = devices.iter().copied().collect();
            protocol
                .borrow_mut()
                .freezing(held.id, devices, session.generation)?;
            let mut freeze = session.freeze(held.volume, ALL_EXTENTS, epoch);
            let answered = async {
                freeze.ended().await?;
                protocol
                    .borrow_mut()
                    .acknowledged(held.id, session.generation);
                // An earlier engine's writes may be in flight.
                session.devices_ready(&list).await
            };
            match timeout_at(deadline, answered).await {
                Ok(Ok(())) => {
                    let fenced = |device| session.device_ready(device);
                    if protocol.borrow_mut().is_drained(held.id, fenced) {
                        return Ok(());
                    }
                }
                Ok(Err(AskError::Gone)) => {}
                Ok(Err(error)) => return Err(error),
                Err(_) => {
                    session.say(&ToEngine::Abandon {
                        revoke: freeze.number,
                    });
                    return Err(too_late());
                }
            }
            protocol.borrow_mut().gone(held.id);
        }
    }

    /// Gives the write right back.
    async fn thaw(&self, volumes: &BTreeSet<VolumeId>) {
        let Some(session) = self.link.session() else {
            // The next session begins with the present epochs.
            return;
        };
        let thawed = volumes
            .iter()
            .map(|volume| self.push_volume(&session, *volume));
        for (volume, result) in volumes.iter().zip(join_all(thawed).await) {
            if let Err(error) = result {
                tracing::error!(%volume, %error, "can't give the write right back after a failed snapshot");
            }
        }
    }

    async fn push_volume(&self, session: &Session, volume: VolumeId) -> Result<(), AskError> {
        let volume = {
            let core = self.base.core.borrow();
            let record = core.pool.volume(volume);
            let record = record.map_err(|error| AskError::Refused(error.message))?;
            self.base.volume_config(&core.pool, record)
        };
        session
            .request("a volume", |request| ToEngine::SetVolume {
                request,
                volume,
            })
            .within(self.base.limits.request)
            .await
    }

    /// Flushes the devices that the volumes are on, and commits their pending mappings.
    async fn sync(&self, volumes: &BTreeSet<VolumeId>) -> Result<(), SyncError> {
        let (devices, wanted): (BTreeSet<DeviceIndex>, Vec<(VolumeId, u64)>) = {
            let core = self.base.core.borrow();
            let known = core.pool.volumes();
            let devices = volumes.iter().flat_map(|volume| known.devices_of(*volume));
            // Mappings granted during the flush are not covered by it.
            let pending = volumes
                .iter()
                .filter_map(|volume| Some((*volume, known.uncommitted(*volume)?)));
            (devices.collect(), pending.collect())
        };
        let flushes = devices.iter().map(|device| self.flusher.flush_now(*device));
        try_join_all(flushes).await?;
        if wanted.is_empty() {
            return Ok(());
        }
        for (volume, sequence) in wanted {
            let pool = &mut self.base.core.borrow_mut().pool;
            pool.commit_mappings(volume, sequence, |device| devices.contains(&device))?;
        }
        Ok(self.base.commit().await?)
    }

    /// Before the number of an epoch repeats, its words must be gone.
    async fn clear_old_epochs(&self, volume: VolumeId) -> Result<(), SnapshotError> {
        let extents = {
            let core = self.base.core.borrow();
            let record = core.pool.volume(volume)?;
            if record.next_epoch() != 0 {
                return Ok(());
            }
            record.size_bytes.div_ceil(core.pool.info().extent_bytes)
        };
        for first in (0..extents).step_by(CLEAR_EXTENTS as usize) {
            let range = ExtentRange::new(first, CLEAR_EXTENTS.min(extents - first));
            let limit = self.base.limits.revoke;
            let held = timeout(limit, self.revoker.locks.hold(volume, range)).await;
            let busy = AskError::TimedOut(limit, "other changes of the volume");
            let held = held.map_err(|_| busy)?;
            // Mappings that are not durable must stay listed.
            self.sync(&BTreeSet::from([volume])).await?;
            let revoke = self.revoker.revoke_listed_or_not(&held, None, limit);
            if !revoke.await?.is_empty() {
                return Err(AskError::TimedOut(limit, "a revoke").into());
            }
            self.revoker.forget_grants(&held).await?;
        }
        Ok(())
    }

    /// Gives a volume a snapshot's content, or zeros, if `check` still allows it.
    pub(crate) async fn roll_back(
        &self,
        volume: VolumeId,
        to: Option<VolumeId>,
        check: &dyn Fn() -> Result<(), ApiError>,
    ) -> Result<(), SnapshotError> {
        self.base
            .core
            .borrow_mut()
            .pool
            .snapshots()
            .check_roll_back(volume, to)?;
        let limit = self.base.limits.revoke;
        let hold = self
            .revoker
            .hold_without_copies(volume, Instant::now(), limit);
        let held = hold.await?;
        let undrained = self.revoker.revoke_for(&held, None, limit).await?;
        // A host that connects from now on finds the snapshot's content.
        check()?;
        let released = {
            let pool = &mut self.base.core.borrow_mut().pool;
            let released = pool.snapshots().roll_back(volume, to, &undrained)?;
            self.revoker.preallocated.forget_volume(pool, volume);
            released
        };
        self.base.commit_through().await;
        self.revoker.given_up(&held, &released).await?;
        Ok(())
    }
}
