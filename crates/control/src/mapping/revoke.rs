//! Revokes grants: returns once nothing uses a range, or names the devices that hang.
//!
//! Only an engine that has its fence on the devices can acknowledge a revoke; a successor is asked
//! again. A timed-out revoke is abandoned ([`ToEngine::Abandon`]), which frees its drain. Messages
//! are handled in order: any later answer shows that the words are cleared. Then only commands in
//! flight remain, which settled devices do not have. Without any answer, nothing has changed.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use forebay_pool::Released;
use forebay_xlate::boundary::message::ToEngine;
use forebay_xlate::owner_side::OutOfOrder;
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, Rights, VolumeId};
use futures_util::future::join_all;
use tokio::time::{Instant, timeout_at};

use crate::base::waits::Wait;
use crate::base::{Base, count};
use crate::link::Link;
use crate::link::session::{AskError, PendingAnswer, Session};
use crate::mapping::flush::Flusher;
use crate::mapping::locks::{LockGuard, Locks};
use crate::mapping::preallocated::Preallocation;
use crate::mapping::release::ReleaseError;
use crate::states::DeviceStates;

impl Revoker {
    /// The first part of a range that is listed where the pool does not map it.
    pub(crate) fn unknown_part(&self, volume: VolumeId, range: ExtentRange) -> Option<ExtentRange> {
        let core = self.base.core.borrow();
        for grant in core.grants.granted(volume, range) {
            if grant.word.rights() == Some(Rights::Hole) {
                continue;
            }
            let mut at = grant.range.first;
            while at < grant.range.end() {
                let word = grant.word.advance(at - grant.range.first);
                let (is_there, count) = core.pool.volumes().maps_at(
                    volume,
                    ExtentIndex(at),
                    word.device(),
                    word.extent(),
                    grant.range.end() - at,
                );
                if !is_there {
                    return Some(ExtentRange::new(at, count));
                }
                at += count;
            }
        }
        None
    }

    pub(crate) async fn revoke_unknown(
        &self,
        volume: VolumeId,
        part: ExtentRange,
    ) -> Result<(), AskError> {
        let held = self.locks.hold(volume, part).await;
        if self.unknown_part(volume, part) != Some(part) {
            // Another task took it back meanwhile, and it may lie elsewhere now.
            return Ok(());
        }
        self.revoke(&held, self.base.limits.revoke).await?;
        // That the extents are dirty must be durable before the table forgets them.
        self.base.commit_through().await;
        self.forget_grants(&held).await
    }

    /// Revokes a range that the pool no longer maps there, and removes it from the table.
    pub(crate) async fn take_back(
        &self,
        volume: VolumeId,
        range: ExtentRange,
    ) -> Result<(), ReleaseError> {
        let held = self.locks.hold(volume, range).await;
        self.revoke(&held, self.base.limits.revoke).await?;
        // The unmapping must be durable before the table forgets the range.
        self.base.commit_through().await;
        Ok(self.forget_grants(&held).await?)
    }

    /// Forgets the range's grants only after the commit.
    pub(crate) async fn given_up(
        &self,
        held: &LockGuard<'_>,
        released: &Released,
    ) -> Result<(), ReleaseError> {
        let protocol = &self.locks.protocol;
        if released.quarantined > 0 {
            tracing::error!(
                volume = %held.volume,
                extents = released.quarantined,
                "freed extents are quarantined: requests that a device has not ended may still write there"
            );
        }
        protocol
            .borrow_mut()
            .changed(held.id)
            .map_err(AskError::from)?;
        let is_changed = released.extents > 0 || released.hidden > 0;
        if is_changed || self.base.core.borrow().pool.volume(held.volume).is_err() {
            self.base.commit_through().await;
        }
        protocol
            .borrow_mut()
            .durable(held.id)
            .map_err(AskError::from)?;
        self.forget_grants(held).await?;
        self.base.devices_changed.raise();
        self.base.zero_fill_wanted.raise();
        Ok(())
    }
}

/// Devices on which requests under revoked grants may be in flight.
pub(crate) type Undrained = BTreeSet<DeviceIndex>;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Deallocation {
    pub(crate) generation: u64,
    /// The engine's number for it; each engine begins at 1.
    pub(crate) number: u64,
}

impl From<OutOfOrder> for AskError {
    fn from(error: OutOfOrder) -> Self {
        Self::Refused(error.to_string())
    }
}

#[derive(Debug)]
pub(crate) struct Revoker {
    pub(super) base: Rc<Base>,
    pub(super) link: Rc<Link>,
    pub(super) states: Rc<DeviceStates>,
    pub(super) flusher: Rc<Flusher>,
    pub(crate) locks: Locks,
    pub(crate) preallocated: Preallocation,
    pub(super) evicting: tokio::sync::Mutex<()>,
}

impl Revoker {
    pub(crate) fn new(
        base: &Rc<Base>,
        link: &Rc<Link>,
        states: &Rc<DeviceStates>,
        flusher: &Rc<Flusher>,
    ) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            link: link.clone(),
            states: states.clone(),
            flusher: flusher.clone(),
            locks: Locks::new(),
            preallocated: Default::default(),
            evicting: Default::default(),
        })
    }

    /// Holds a whole volume, `limit` after `begun` at the latest. A copy that was given up may go on
    /// at its devices.
    pub(crate) async fn hold_volume(
        &self,
        volume: VolumeId,
        begun: Instant,
        limit: Duration,
    ) -> Result<LockGuard<'_>, AskError> {
        match timeout_at(begun + limit, self.locks.hold_volume(volume)).await {
            Ok(held) => Ok(held),
            Err(_) => {
                self.refuse_copying(volume)?;
                Err(AskError::TimedOut(limit, "other changes of the volume"))
            }
        }
    }

    /// As above, but refuses while such a copy goes on.
    pub(crate) async fn hold_without_copies(
        &self,
        volume: VolumeId,
        begun: Instant,
        limit: Duration,
    ) -> Result<LockGuard<'_>, AskError> {
        let held = self.hold_volume(volume, begun, limit).await?;
        self.refuse_copying(volume)?;
        Ok(held)
    }

    fn refuse_copying(&self, volume: VolumeId) -> Result<(), AskError> {
        let devices = {
            let pool = &mut self.base.core.borrow_mut().pool;
            pool.snapshots().copying_on(volume)
        };
        if devices.is_empty() {
            return Ok(());
        }
        let specs = devices.into_iter().map(|device| self.base.spec_of(device));
        let specs = specs.collect::<Vec<_>>();
        Err(AskError::Copying(specs.join(" and ")))
    }

    /// The volume's mappings must be durable.
    pub(crate) async fn revoke_volume(&self, volume: VolumeId) -> Result<(), AskError> {
        let limit = self.base.limits.request;
        let held = self.hold_volume(volume, Instant::now(), limit).await?;
        self.revoke(&held, limit).await?;
        self.forget_grants(&held).await
    }

    /// A device that hangs is an error: for callers that change nothing on failure.
    pub(crate) async fn revoke(
        &self,
        held: &LockGuard<'_>,
        limit: Duration,
    ) -> Result<(), AskError> {
        let undrained = self.revoke_for(held, None, limit).await?;
        if undrained.is_empty() {
            Ok(())
        } else {
            Err(AskError::TimedOut(limit, "a revoke"))
        }
    }

    /// Returns the devices that hang; their extents must not be reused for now. A deallocation is
    /// sent even if nothing is listed: the engine refuses one that has ended, because the tenant
    /// may have written there since. Its number is valid for that engine only.
    pub(crate) async fn revoke_for(
        &self,
        held: &LockGuard<'_>,
        release: Option<Deallocation>,
        limit: Duration,
    ) -> Result<Undrained, AskError> {
        let protocol = &self.locks.protocol;
        if release.is_none()
            && protocol
                .borrow_mut()
                .unlisted(held.id, &self.base.core.borrow().grants)
                .is_ok()
        {
            return Ok(Undrained::new());
        }
        self.revoke_listed_or_not(held, release, limit).await
    }

    /// As above, but asks the engine in any case: if a daemon died while it replaced an entry, the
    /// engine may know a grant that is no longer listed.
    pub(crate) async fn revoke_listed_or_not(
        &self,
        held: &LockGuard<'_>,
        release: Option<Deallocation>,
        limit: Duration,
    ) -> Result<Undrained, AskError> {
        let protocol = &self.locks.protocol;
        count(&self.base.counters.revokes);
        let _waits = self.base.waits.begin(Wait::Revoke(held.id, held.volume));
        let too_late = || AskError::TimedOut(limit, "a revoke");
        let deadline = Instant::now() + limit;
        loop {
            let session = timeout_at(deadline, self.link.wait_session())
                .await
                .map_err(|_| too_late())?;
            let generation = session.generation;
            if release.is_some_and(|of| of.generation != generation) {
                return Err(AskError::Gone);
            }
            protocol
                .borrow_mut()
                .asked(held.id, &self.base.core.borrow().grants, generation)?;
            let devices: Vec<_> = protocol.borrow().devices(held.id).into_iter().collect();
            let number = release.map(|of| of.number);
            let mut revoke = session.revoke(held.volume, held.range, number);
            let answered = async {
                revoke.ended().await?;
                protocol.borrow_mut().acknowledged(held.id, generation);
                // The words are cleared, but an earlier engine's requests may be in flight.
                session.devices_ready(&devices).await
            };
            match timeout_at(deadline, answered).await {
                Ok(Ok(())) => {
                    let fenced = |device| session.device_ready(device);
                    if protocol.borrow_mut().is_drained(held.id, fenced) {
                        break;
                    }
                }
                Ok(Err(AskError::Gone)) => {}
                Ok(Err(refused)) => return Err(refused),
                Err(_) => match self.give_up(&session, revoke, held).await {
                    Ok(()) => break,
                    Err(refused @ AskError::Refused(_)) => return Err(refused),
                    Err(_) => return Err(too_late()),
                },
            }
            protocol.borrow_mut().gone(held.id);
        }
        Ok(protocol.borrow().may_change(held.id)?.clone())
    }

    /// After the time limit: finds out which devices hang.
    async fn give_up(
        &self,
        session: &Rc<Session>,
        mut revoke: PendingAnswer,
        held: &LockGuard<'_>,
    ) -> Result<(), AskError> {
        let protocol = &self.locks.protocol;
        let fenced = |device: DeviceIndex| session.device_ready(device);
        if protocol.borrow_mut().give_up(held.id) {
            session.say(&ToEngine::Abandon {
                revoke: revoke.number,
            });
            self.wait_heard(session, held.volume).await?;
            if let Some(Err(error)) = revoke.now() {
                return Err(error);
            }
            protocol.borrow_mut().heard(held.id, session.generation);
            // The words are cleared. Once the commands in flight on a device end, nothing uses the
            // range.
            let devices = protocol.borrow().devices(held.id);
            let settled = devices
                .into_iter()
                .filter(|d| fenced(*d))
                .map(|device| async move {
                    let suspicion = self.states.suspect(device, session.generation, "a revoke");
                    (device, self.states.settled(device, suspicion).await)
                });
            for (device, ended) in join_all(settled).await {
                if ended {
                    protocol
                        .borrow_mut()
                        .settled(held.id, device, session.generation);
                }
            }
            if session.is_over() {
                return Err(AskError::Gone);
            }
        }
        protocol.borrow_mut().settle(held.id, fenced);
        for device in protocol.borrow().may_change(held.id)? {
            tracing::error!(%device, volume = %held.volume, "a device hangs: a revoke did not end there; other devices \
            are not affected");
        }
        Ok(())
    }

    /// Returns once the engine has handled every earlier message.
    async fn wait_heard(&self, session: &Session, volume: VolumeId) -> Result<(), AskError> {
        // Sets what the engine knows already: only the answer matters.
        let volume = {
            let core = self.base.core.borrow();
            let record = core.pool.volume(volume);
            // Nothing is granted on a deleted volume: the revoke may be repeated.
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

    /// Extents elsewhere fault again.
    pub(crate) async fn cut_off(self: Rc<Self>, device: DeviceIndex) {
        let volumes: Vec<_> = {
            let core = self.base.core.borrow();
            let extent_bytes = core.pool.info().extent_bytes;
            let volumes = core.pool.volumes().on_device(device).into_iter();
            let sized = volumes.filter_map(|id| Some((id, core.pool.volume(id).ok()?.size_bytes)));
            sized
                .map(|(id, bytes)| (id, bytes.div_ceil(extent_bytes)))
                .collect()
        };
        for (volume, extents) in volumes {
            let held = self.locks.hold(volume, ExtentRange::new(0, extents)).await;
            if let Err(error) = self.revoke(&held, self.base.limits.revoke).await {
                tracing::warn!(%device, %volume, %error, "can't revoke extents on a device that was cut short");
            }
        }
    }
}
