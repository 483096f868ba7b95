//! Answers the data path's faults from the map, or by allocating.
//!
//! One step without an await checks the locks, asks the pool, lists the grant and sends it. So a
//! later revoke finds the entry, and its message follows the grant's. Faults that must wait repeat
//! the step; a repeated fault gets the same answer. `NoSpace` means that no space is coming;
//! otherwise the engine's time limit ends the command.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::rc::Rc;

use forebay_pool::{BatchId, FaultAnswer};
use forebay_xlate::boundary::message::{FaultAsk, FaultFailure, ToEngine};
use forebay_xlate::grants::Grant;
use forebay_xlate::owner_side::Refused;
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, Rights, VolumeId, Word};
use tokio::sync::Notify;
use tokio::time::{Duration, Instant};

use crate::base::{Base, Core};
use crate::link::Link;
use crate::link::session::Session;
use crate::mapping::revoke::Revoker;
use crate::mapping::zero_fill::ZeroFill;

pub(crate) const MAX_RUN: u64 = 256;
pub(crate) const MAX_HOLE_RUN: u64 = 4096;
/// Free entries kept in the grant table, because cutting a range out of an entry needs more.
pub(crate) const SPARE_ENTRIES: usize = 32;
/// How long a fault waits for preallocated extents to be taken back. Below the engine's limit for a
/// command, so that a full pool is reported as full.
const TAKE_BACK_LIMIT: Duration = Duration::from_secs(15);

#[derive(Debug, PartialEq, Eq)]
pub(super) enum FaultStep {
    Done,
    /// No engine to answer. The same engine may return with a new session and won't ask again, so
    /// the fault is kept.
    NoEngine,
    Locked,
    Commit(BatchId),
    ZeroFill,
    TableFull,
    /// This range is listed at another place, and must be revoked first.
    Moved(ExtentRange),
    /// A write to an extent of a snapshot.
    Copy,
    Failed(FaultFailure),
}

/// Faults by the batch whose commit they await. One task serves them all, because filling a volume
/// makes many.
#[derive(Debug, Default)]
pub(crate) struct AwaitingCommit {
    by_batch: std::cell::RefCell<BTreeMap<BatchId, Vec<FaultAsk>>>,
    wake: Notify,
}

impl Core {
    pub(crate) fn spare_entries(&self) -> usize {
        let (used, capacity) = self.grants.usage();
        capacity.saturating_sub(used)
    }
}

#[derive(Debug)]
pub(crate) struct Faults {
    pub(super) base: Rc<Base>,
    pub(super) link: Rc<Link>,
    pub(super) revoker: Rc<Revoker>,
    pub(super) zero_fill: Rc<ZeroFill>,
    pub(super) faulting: RefCell<HashSet<(VolumeId, u64, bool)>>,
    pub(super) awaiting_commit: AwaitingCommit,
}

impl Faults {
    pub(crate) fn new(
        base: &Rc<Base>,
        link: &Rc<Link>,
        revoker: &Rc<Revoker>,
        zero_fill: &Rc<ZeroFill>,
    ) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            link: link.clone(),
            revoker: revoker.clone(),
            zero_fill: zero_fill.clone(),
            faulting: Default::default(),
            awaiting_commit: Default::default(),
        })
    }

    /// Answers in one pass what can be answered at once; queues the rest.
    pub(crate) fn answer_faults(self: &Rc<Self>, faults: &[FaultAsk]) {
        if faults.is_empty() {
            return;
        }
        let session = self.link.session().filter(|_| self.base.is_open());
        let mut later = Vec::new();
        if let Some(session) = &session {
            let mut core = self.base.core.borrow_mut();
            let mut writers: Vec<VolumeId> = Vec::new();
            let now = Instant::now();
            for fault in faults {
                match self.fault_step(&mut core, session, fault, now) {
                    FaultStep::Done => {
                        if fault.write && !writers.contains(&fault.volume) {
                            writers.push(fault.volume);
                        }
                    }
                    step => later.push((*fault, step)),
                }
            }
            for volume in writers {
                self.reserve_spare(&mut core, volume);
            }
        } else {
            later.extend(faults.iter().map(|fault| (*fault, FaultStep::NoEngine)));
        }
        if let Some(session) = &session {
            session.send_grants();
            self.revoker.evict_early();
        }
        for (fault, step) in later {
            match step {
                FaultStep::Commit(batch) => self.await_commit(fault, batch),
                // First, preallocated extents of other volumes are taken back.
                FaultStep::Failed(FaultFailure::NoSpace) => self.leave_to_a_task(fault),
                FaultStep::Failed(reason) => self.fail_fault(&fault, reason),
                _ => self.leave_to_a_task(fault),
            }
        }
    }

    fn fail_fault(&self, fault: &FaultAsk, reason: FaultFailure) {
        self.link.say(&ToEngine::FaultFailed {
            volume: fault.volume,
            range: ExtentRange::new(fault.extent, 1),
            write: fault.write,
            reason,
        });
    }

    fn await_commit(&self, fault: FaultAsk, batch: BatchId) {
        let waiting = &self.awaiting_commit;
        let mut by_batch = waiting.by_batch.borrow_mut();
        by_batch.entry(batch).or_default().push(fault);
        waiting.wake.notify_one();
    }

    pub(crate) async fn run_awaiting_commit(self: Rc<Self>) {
        let waiting = &self.awaiting_commit;
        loop {
            let oldest = waiting.by_batch.borrow().keys().next().copied();
            let Some(batch) = oldest else {
                waiting.wake.notified().await;
                continue;
            };
            let committed = self.base.commit_of(batch).await;
            let durable = self
                .base
                .core
                .borrow()
                .pool
                .journal()
                .committed_id()
                .max(batch);
            let faults: Vec<FaultAsk> = {
                let mut by_batch = waiting.by_batch.borrow_mut();
                let later = by_batch.split_off(&BatchId(durable.0 + 1));
                let due = std::mem::replace(&mut *by_batch, later);
                due.into_values().flatten().collect()
            };
            match committed {
                Ok(()) => self.answer_faults(&faults),
                Err(error) => {
                    tracing::error!(faults = faults.len(), %error, "faults failed");
                    for fault in &faults {
                        self.fail_fault(fault, FaultFailure::Internal);
                    }
                }
            }
        }
    }

    fn leave_to_a_task(self: &Rc<Self>, fault: FaultAsk) {
        // One task per question; it answers whichever engine is there then.
        let key = (fault.volume, fault.extent, fault.write);
        if self.faulting.borrow_mut().insert(key) {
            let owner = self.clone();
            self.base.spawn(async move {
                owner.fault(fault).await;
                owner.faulting.borrow_mut().remove(&key);
            });
        }
    }

    async fn fault(&self, fault: FaultAsk) {
        let FaultAsk { volume, extent, .. } = fault;
        self.base.wait_open().await;
        let mut hopeless = false;
        let begun = Instant::now();
        let mut copy = None;
        loop {
            let step = match self.link.session() {
                Some(session) => {
                    let core = &mut self.base.core.borrow_mut();
                    self.fault_step(core, &session, &fault, Instant::now())
                }
                None => FaultStep::NoEngine,
            };
            let step = match step {
                FaultStep::Copy => {
                    let copied = self.copy_extent(volume, extent, fault.whole).await;
                    match copied {
                        Ok(listed) => {
                            copy = Some(listed);
                            continue;
                        }
                        Err(step) => step,
                    }
                }
                step => step,
            };
            if step == FaultStep::Done {
                if fault.write {
                    self.reserve_spare(&mut self.base.core.borrow_mut(), volume);
                }
                // The grant is listed by now.
                if let Some(copy) = copy {
                    copy.unlist();
                }
                return;
            }
            let Err(failure) = self.wait_for(step, &fault, &mut hopeless).await else {
                continue;
            };
            if failure == FaultFailure::NoSpace
                && begun.elapsed() < TAKE_BACK_LIMIT
                && self.revoker.take_back_for_space().await
            {
                hopeless = false;
                continue;
            }
            self.fail_fault(&fault, failure);
            return;
        }
    }

    /// Waits until another step may succeed.
    async fn wait_for(
        &self,
        step: FaultStep,
        fault: &FaultAsk,
        hopeless: &mut bool,
    ) -> Result<(), FaultFailure> {
        let FaultAsk { volume, extent, .. } = *fault;
        match step {
            FaultStep::Done => {}
            FaultStep::NoEngine => _ = self.link.wait_session().await,
            FaultStep::Locked | FaultStep::Copy => {
                self.revoker.locks.wait_free(volume, extent).await;
            }
            FaultStep::Commit(batch) => {
                if let Err(error) = self.base.commit_of(batch).await {
                    tracing::error!(%volume, extent, %error, "a fault failed");
                    return Err(FaultFailure::Internal);
                }
            }
            // Other space may have become free: one more step decides.
            FaultStep::ZeroFill if *hopeless => return Err(FaultFailure::NoSpace),
            FaultStep::ZeroFill => *hopeless = !self.zero_fill.wait_zero_filled().await,
            FaultStep::TableFull => self.revoker.evict().await,
            FaultStep::Moved(range) => {
                if let Err(error) = self.revoker.take_back(volume, range).await {
                    tracing::error!(%volume, extent, %error, "a fault failed: the extent's old place is still in use");
                    return Err(FaultFailure::Internal);
                }
            }
            FaultStep::Failed(failure) => return Err(failure),
        }
        Ok(())
    }

    fn fault_step(
        &self,
        core: &mut Core,
        session: &Session,
        fault: &FaultAsk,
        now: Instant,
    ) -> FaultStep {
        let FaultAsk {
            volume,
            extent,
            write,
            ..
        } = *fault;
        if !self.revoker.locks.is_free(volume, extent) {
            return FaultStep::Locked;
        }
        if core.spare_entries() < SPARE_ENTRIES {
            return FaultStep::TableFull;
        }
        if write && self.map_around(core, session, fault, now) {
            return FaultStep::Done;
        }
        let (word, count, commit_sequence) = match self.translation(core, fault) {
            Ok(translation) => translation,
            Err(step) => return step,
        };
        let Some(word) = word else {
            tracing::error!(%volume, extent, "the extent's place is beyond the range of a translation");
            return FaultStep::Failed(FaultFailure::Internal);
        };
        let grant = Grant {
            volume,
            range: ExtentRange::new(extent, count.max(1)),
            word,
            epoch: session.generation,
            commit_sequence,
        };
        let epoch = core.pool.volume(volume);
        let epoch = epoch.map_or(0, |record| self.base.epoch_of(record));
        match self
            .revoker
            .locks
            .enter_grant(&mut core.grants, grant, epoch)
        {
            Ok(grant) => session.grant(grant),
            Err(Refused::Taken) => return FaultStep::Locked,
            Err(Refused::Elsewhere(range)) => return FaultStep::Moved(range),
            Err(Refused::Full) => return FaultStep::TableFull,
        }
        FaultStep::Done
    }

    /// A word, the number of extents, and the sequence of a mapping that is not durable.
    fn translation(
        &self,
        core: &mut Core,
        fault: &FaultAsk,
    ) -> Result<(Option<Word>, u64, u64), FaultStep> {
        let FaultAsk {
            volume,
            extent,
            write,
            ..
        } = *fault;
        Ok(match core.pool.fault(volume, ExtentIndex(extent), write) {
            Ok(FaultAnswer::Mapped {
                device,
                extent: at,
                count,
                commit_seq,
            }) => (
                place(device, at),
                self.revoker
                    .preallocated
                    .stored_run(volume, extent, count.min(MAX_RUN)),
                commit_seq.unwrap_or(0),
            ),
            Ok(FaultAnswer::Shared { .. }) if write => return Err(FaultStep::Copy),
            Ok(FaultAnswer::Shared {
                device,
                extent: at,
                count,
            }) => (Word::new(device, at, Rights::Read), count.min(MAX_RUN), 0),
            Ok(FaultAnswer::Allocated {
                device,
                extent: at,
                commit_seq,
            }) => (place(device, at), 1, commit_seq),
            Ok(FaultAnswer::Hole { count }) => (Some(Word::HOLE), count.min(MAX_HOLE_RUN), 0),
            Ok(FaultAnswer::NeedReserve { count }) => {
                return Err(match core.pool.reserve(volume, count) {
                    Ok(_) => FaultStep::Commit(core.pool.journal().open_batch_id()),
                    Err(error) => failed(volume, extent, &error),
                });
            }
            Ok(FaultAnswer::AwaitCommit { batch }) => return Err(FaultStep::Commit(batch)),
            Ok(FaultAnswer::AwaitZeroFill) => return Err(FaultStep::ZeroFill),
            Ok(FaultAnswer::DeviceGone { .. }) => {
                return Err(FaultStep::Failed(FaultFailure::Device));
            }
            Ok(FaultAnswer::NoSpace) => return Err(FaultStep::Failed(FaultFailure::NoSpace)),
            Err(error) => return Err(failed(volume, extent, &error)),
        })
    }

    /// False if the fault is not answered.
    fn map_around(
        &self,
        core: &mut Core,
        session: &Session,
        fault: &FaultAsk,
        now: Instant,
    ) -> bool {
        let FaultAsk { volume, extent, .. } = *fault;
        let Some(window) = self
            .revoker
            .preallocated
            .window(&core.pool, volume, extent, now)
        else {
            return false;
        };
        let window = ExtentRange::new(window.start, window.end - window.start);
        let free = self
            .revoker
            .locks
            .protocol
            .borrow()
            .free_parts(volume, window);
        let Some(free) = free.into_iter().find(|part| part.contains(extent)) else {
            return false;
        };
        let at = ExtentIndex(extent);
        let mapped = core.pool.map_around(volume, at, free.first..free.end());
        let around = match mapped {
            Ok(Some(around)) => around,
            Ok(None) => return false,
            Err(error) => {
                tracing::debug!(%volume, extent, %error, "can't preallocate extents");
                return false;
            }
        };
        let Some(word) = Word::preallocated(around.run.device, around.run.first) else {
            return false;
        };
        let grant = Grant {
            volume,
            range: ExtentRange::new(around.first.0, around.run.count),
            word,
            epoch: session.generation,
            commit_sequence: around.commit_seq,
        };
        let epoch = core.pool.volume(volume);
        let epoch = epoch.map_or(0, |record| self.base.epoch_of(record));
        // After a refusal the extent is mapped, and the caller answers it as such.
        let entered = self
            .revoker
            .locks
            .enter_grant(&mut core.grants, grant, epoch);
        let Ok(grant) = entered else {
            return false;
        };
        if Word::from_bits(grant.word).is_preallocated() {
            let count = grant.range.count - 1;
            self.revoker
                .preallocated
                .given(&mut core.pool, volume, extent, count);
        }
        session.grant(grant);
        grant.range.contains(extent)
    }

    fn reserve_spare(&self, core: &mut Core, volume: VolumeId) {
        let is_fast = self.revoker.preallocated.is_fast(volume);
        let Some(wanted) = core.pool.wants_reserve(volume, is_fast) else {
            return;
        };
        match core.pool.reserve(volume, wanted) {
            Ok(_) => self.base.committer.kick(),
            Err(error) => tracing::debug!(%volume, %error, "can't reserve extents to preallocate"),
        }
    }
}

fn place(device: DeviceIndex, extent: ExtentIndex) -> Option<Word> {
    Word::new(device, extent, Rights::ReadWrite)
}

pub(super) fn failed(volume: VolumeId, extent: u64, error: &forebay_pool::PoolError) -> FaultStep {
    if error.kind == forebay_pool::ErrorKind::NoSpace {
        return FaultStep::Failed(FaultFailure::NoSpace);
    }
    tracing::warn!(%volume, extent, %error, "a fault failed");
    FaultStep::Failed(FaultFailure::Internal)
}
