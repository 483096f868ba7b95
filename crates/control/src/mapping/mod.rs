//! Volume maps: where each extent lies.
//!
//! The owner answers the engine's faults, deallocations and commits, and alone changes a map. The
//! rest of the daemon knows an owner by the trait [`MapOwner`]; [`PoolOwner`] implements it for a
//! pool's volumes; every other file here is a part of it. `forebay_pool` chooses the extents. A pool has
//! one owner, which [`crate::owner`] makes.

pub(crate) mod adopt;
pub(crate) mod copy;
pub(crate) mod evict;
pub(crate) mod fault;
pub(crate) mod flush;
pub(crate) mod locks;
pub(crate) mod merge;
pub(crate) mod preallocated;
pub(crate) mod release;
pub(crate) mod report;
pub(crate) mod revoke;
pub(crate) mod snapshot;
pub(crate) mod zero_fill;

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use forebay_pool::{NewClone, NewSnapshot, PoolError};
use forebay_xlate::boundary::message::FaultAsk;
use forebay_xlate::owner_side::TakingId;
use forebay_xlate::{DeviceIndex, ExtentRange, VolumeId};

use crate::base::Base;
use crate::devices::now_s;
use crate::link::Link;
use crate::link::session::{AskError, Session};
use crate::mapping::adopt::{Adopter, Adoption};
use crate::mapping::fault::Faults;
use crate::mapping::flush::{Flusher, SyncError};
use crate::mapping::merge::Merger;
use crate::mapping::release::{ReleaseError, Releaser};
use crate::mapping::revoke::Revoker;
use crate::mapping::snapshot::{SnapshotError, Snapshots};
use crate::mapping::zero_fill::ZeroFill;
use crate::model::error::ApiError;
use crate::states::DeviceStates;

pub(crate) const ALL_EXTENTS: ExtentRange = ExtentRange::new(0, u64::MAX);

pub(crate) type OwnerWork<'a, T = ()> = Pin<Box<dyn Future<Output = T> + 'a>>;

pub(crate) trait MapOwner: Debug {
    fn begin(&self);
    fn serve_device(&self, device: DeviceIndex);

    /// Some answers come later.
    fn answer_faults(&self, faults: &[FaultAsk]);
    /// Answers the engine when the deallocation is durable.
    fn release(&self, generation: u64, release: u64, volume: VolumeId, range: ExtentRange);
    /// Answers a FLUSH when the mappings up to `sequence` are durable.
    fn commit_wanted(&self, session: &Rc<Session>, volume: VolumeId, sequence: u64);

    fn adoption(&self) -> &Adoption;
    /// Ends adoption in the map. First, a live engine gets a moment to end what an earlier daemon
    /// began.
    fn finish_adoption<'a>(&'a self, session: Option<&'a Rc<Session>>) -> OwnerWork<'a>;
    fn open_after_adoption(&self) -> OwnerWork<'_>;
    /// A new session begins: the engine counts every grant in it as written.
    fn forget_preallocated(&self);
    /// What each volume's FLUSH must cover and wait for.
    fn send_flush_state(&self, session: &Session);
    fn publish_all_grants<'a>(&'a self, session: &'a Session) -> OwnerWork<'a>;

    fn delete_volume(&self, volume: VolumeId) -> OwnerWork<'_, Result<(), ReleaseError>>;
    /// Revokes every grant of a volume, before the engine stops serving it.
    fn revoke_volume(&self, volume: VolumeId) -> OwnerWork<'_, Result<(), AskError>>;
    /// Takes snapshots of several volumes at one moment. Their ids, in the same order.
    fn snapshot(
        &self,
        new: Vec<NewSnapshot>,
    ) -> OwnerWork<'_, Result<Vec<VolumeId>, SnapshotError>>;
    /// Makes a volume with a snapshot's content, in memory: the caller commits.
    fn clone_snapshot(&self, new: &NewClone) -> Result<VolumeId, PoolError>;
    /// Gives a volume the content of one of its snapshots, or zeros. `check` runs when no grant of the volume
    /// is left: only hosts that it sees have read the present content.
    fn roll_back<'a>(
        &'a self,
        volume: VolumeId,
        to: Option<VolumeId>,
        check: &'a dyn Fn() -> Result<(), ApiError>,
    ) -> OwnerWork<'a, Result<(), SnapshotError>>;
    /// For a request that finds no space. False if no unwritten preallocated extents exist.
    fn take_back_for_space(&self) -> OwnerWork<'_, bool>;
    /// Counts unwritten preallocated extents, within a short time limit.
    fn count_preallocated_soon(&self) -> OwnerWork<'_>;
    /// Before this daemon leaves or ends its engine.
    fn give_up_preallocated(&self, limit: Duration) -> OwnerWork<'_>;

    fn revoke_device(&self, device: DeviceIndex);
    /// The devices on which a held range lies.
    fn devices_of(&self, taking: TakingId) -> BTreeSet<DeviceIndex>;
    fn sync_all(&self) -> OwnerWork<'_, Result<(), SyncError>>;
    /// Flushes every device that is open here.
    fn sync_all_without_engine(&self) -> OwnerWork<'_, Result<(), SyncError>>;
    /// Whether the next daemon needs the grant table, as it names a device that can't be flushed
    /// from here.
    fn lists_missing(&self) -> bool;
}

#[derive(Debug)]
pub(crate) struct PoolOwner {
    base: Rc<Base>,
    states: Rc<DeviceStates>,
    pub(crate) adoption: Rc<Adoption>,
    pub(crate) flusher: Rc<Flusher>,
    pub(crate) revoker: Rc<Revoker>,
    pub(crate) releaser: Rc<Releaser>,
    pub(crate) zero_fill: Rc<ZeroFill>,
    pub(crate) adopter: Rc<Adopter>,
    pub(crate) faults: Rc<Faults>,
    snapshots: Rc<Snapshots>,
    merger: Rc<Merger>,
}

impl PoolOwner {
    pub(crate) fn new(
        base: &Rc<Base>,
        link: &Rc<Link>,
        states: &Rc<DeviceStates>,
        adoption: Adoption,
    ) -> Rc<Self> {
        let adoption = Rc::new(adoption);
        let flusher = Flusher::new(base, link, states, &adoption);
        let revoker = Revoker::new(base, link, states, &flusher);
        let zero_fill = ZeroFill::new(base, link, states, &adoption);
        Rc::new(Self {
            base: base.clone(),
            states: states.clone(),
            releaser: Releaser::new(base, link, &revoker),
            adopter: Adopter::new(base, &flusher, &revoker, &adoption),
            faults: Faults::new(base, link, &revoker, &zero_fill),
            snapshots: Snapshots::new(base, link, &flusher, &revoker),
            merger: Merger::new(base, link, states, &flusher, &revoker),
            adoption,
            flusher,
            revoker,
            zero_fill,
        })
    }
}

impl MapOwner for PoolOwner {
    fn begin(&self) {
        self.base.spawn(self.faults.clone().run_awaiting_commit());
        self.base.spawn(self.revoker.clone().run_preallocation());
        self.base.spawn(self.releaser.clone().run_deleter());
        self.base.spawn(self.merger.clone().run());
    }

    fn serve_device(&self, device: DeviceIndex) {
        let syncer = self.flusher.add_syncer(device);
        let syncing = self.flusher.clone().run_syncer(device, syncer);
        self.base.spawn(syncing);
        let zeroing = self.zero_fill.clone().run_zero_fill(device);
        self.base.spawn(zeroing);
        let (adoption, states) = (self.adoption.clone(), self.states.clone());
        self.base.spawn(async move {
            adoption.wait_adopted().await;
            states.run_settler(device).await;
        });
    }

    fn answer_faults(&self, faults: &[FaultAsk]) {
        self.faults.answer_faults(faults);
    }

    fn release(&self, generation: u64, release: u64, volume: VolumeId, range: ExtentRange) {
        self.releaser.on_release(generation, release, volume, range);
    }

    fn commit_wanted(&self, session: &Rc<Session>, volume: VolumeId, sequence: u64) {
        let flusher = self.flusher.clone();
        let committing = flusher.commit_wanted(session.clone(), volume, sequence);
        self.base.spawn(committing);
    }

    fn adoption(&self) -> &Adoption {
        &self.adoption
    }

    fn finish_adoption<'a>(&'a self, session: Option<&'a Rc<Session>>) -> OwnerWork<'a> {
        Box::pin(self.adopter.finish_adoption(session))
    }

    fn open_after_adoption(&self) -> OwnerWork<'_> {
        Box::pin(self.adopter.open_after_adoption())
    }

    fn forget_preallocated(&self) {
        let pool = &mut self.base.core.borrow_mut().pool;
        self.revoker.preallocated.forget(pool);
    }

    fn send_flush_state(&self, session: &Session) {
        self.revoker.send_flush_state(session);
    }

    fn publish_all_grants<'a>(&'a self, session: &'a Session) -> OwnerWork<'a> {
        Box::pin(self.revoker.publish_all_grants(session))
    }

    fn delete_volume(&self, volume: VolumeId) -> OwnerWork<'_, Result<(), ReleaseError>> {
        Box::pin(self.releaser.give_up_volume(volume))
    }

    fn revoke_volume(&self, volume: VolumeId) -> OwnerWork<'_, Result<(), AskError>> {
        Box::pin(self.revoker.revoke_volume(volume))
    }

    fn snapshot(
        &self,
        new: Vec<NewSnapshot>,
    ) -> OwnerWork<'_, Result<Vec<VolumeId>, SnapshotError>> {
        Box::pin(async move { self.snapshots.take(&new).await })
    }

    fn clone_snapshot(&self, new: &NewClone) -> Result<VolumeId, PoolError> {
        let pool = &mut self.base.core.borrow_mut().pool;
        pool.snapshots().clone_snapshot(new, now_s())
    }

    fn roll_back<'a>(
        &'a self,
        volume: VolumeId,
        to: Option<VolumeId>,
        check: &'a dyn Fn() -> Result<(), ApiError>,
    ) -> OwnerWork<'a, Result<(), SnapshotError>> {
        Box::pin(self.snapshots.roll_back(volume, to, check))
    }

    fn take_back_for_space(&self) -> OwnerWork<'_, bool> {
        Box::pin(self.revoker.take_back_for_space())
    }

    fn count_preallocated_soon(&self) -> OwnerWork<'_> {
        Box::pin(self.revoker.count_preallocated_soon())
    }

    fn give_up_preallocated(&self, limit: Duration) -> OwnerWork<'_> {
        Box::pin(self.revoker.give_up_preallocated(limit))
    }

    fn revoke_device(&self, device: DeviceIndex) {
        self.base.spawn(self.revoker.clone().cut_off(device));
    }

    fn devices_of(&self, taking: TakingId) -> BTreeSet<DeviceIndex> {
        self.revoker.locks.protocol.borrow().devices(taking)
    }

    fn sync_all(&self) -> OwnerWork<'_, Result<(), SyncError>> {
        Box::pin(self.flusher.sync_all())
    }

    fn sync_all_without_engine(&self) -> OwnerWork<'_, Result<(), SyncError>> {
        Box::pin(self.flusher.sync_all_without_engine())
    }

    fn lists_missing(&self) -> bool {
        self.flusher.lists_missing()
    }
}
