//! Faults: where does this extent lie?
//!
//! Purpose: answers every miss of the data path, from the map or by allocating.
//! Design: one step without a wait in it looks at the locks, asks the pool, writes the grant table's
//! entry, and sends the grant, in this order; so a revoke that begins later finds the entry, and goes
//! out behind the grant. When the step needs something first (a commit, laundering, room in the
//! table), the fault waits for that and takes the step again. A fault is idempotent: an engine that
//! asks again gets the same place. What is listed already at the same place is not written again.
//! Not here: which extents are handed out (the pool).

use std::rc::Rc;

use forebay_pool::FaultAnswer;
use forebay_xlate::boundary::message::{FaultFailure, GrantOf, ToEngine};
use forebay_xlate::grants::{Full, Grant};
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, Rights, VolumeId, Word};
use tokio::time::{Duration, Instant, sleep, timeout};

use super::release::ReleaseError;
use super::{Core, Owner, count};

/// The longest run that one grant covers.
pub(super) const MAX_RUN: u64 = 256;
/// The longest run of holes that one grant covers.
pub(super) const MAX_HOLE_RUN: u64 = 4096;
/// Entries of the grant table that are kept free, so that ranges can be cut out of entries.
pub(super) const SPARE_ENTRIES: usize = 32;
/// How many grants are taken back at once when the table is full.
const EVICT_AT_ONCE: usize = 32;

/// What became of a step.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Answered.
    Done,
    /// Nobody is there to answer to. It may be the same engine in a new conversation, which won't ask
    /// again, so the answer is kept for whoever comes.
    NoEngine,
    /// Somebody changes the range.
    Locked,
    /// A commit must come first.
    Commit,
    /// Dirty extents must be laundered first.
    Launder,
    /// The grant table is full.
    TableFull,
    /// The extent is listed at another place, as this range is, which must be revoked first.
    Moved(ExtentRange),
    /// It can't be answered.
    Failed(FaultFailure),
}

impl Core {
    /// Free entries of the grant table.
    pub(super) fn spare_entries(&self) -> usize {
        let (used, capacity) = self.grants.usage();
        capacity.saturating_sub(used)
    }

    /// The first part of a grant's range that is listed at another place.
    fn listed_elsewhere(&self, grant: &Grant) -> Option<ExtentRange> {
        let listed = self.grants.granted(grant.volume, grant.range);
        let elsewhere = listed.iter().find(|listed| {
            listed.word.rights() != Some(Rights::Hole)
                && listed.word != grant.word.advance(listed.range.first - grant.range.first)
        });
        elsewhere.map(|listed| listed.range)
    }

    /// Lists a grant where it is not listed yet, in place of holes.
    fn record(&mut self, grant: Grant) -> Result<(), Full> {
        let mut missing = Vec::new();
        let mut at = grant.range.first;
        for listed in self.grants.granted(grant.volume, grant.range) {
            if listed.word == grant.word.advance(listed.range.first - grant.range.first) {
                if at < listed.range.first {
                    missing.push(ExtentRange::new(at, listed.range.first - at));
                }
                at = listed.range.end();
            }
        }
        if at < grant.range.end() {
            missing.push(ExtentRange::new(at, grant.range.end() - at));
        }
        for range in missing {
            let word = grant.word.advance(range.first - grant.range.first);
            self.grants.insert(Grant {
                range,
                word,
                ..grant
            })?;
        }
        Ok(())
    }
}

impl Owner {
    /// A fault came: answers it at once if it can, or leaves it to a task.
    pub(super) fn on_fault(self: &Rc<Self>, volume: VolumeId, extent: u64, write: bool) {
        count(&self.counters.faults);
        if self.is_open() {
            let step = self.fault_step(volume, extent, write);
            if step == Step::Done {
                return;
            }
        }
        // One task is enough for one question; it answers to whichever engine is there then.
        if self.faulting.borrow_mut().insert((volume, extent, write)) {
            let owner = self.clone();
            self.spawn(async move {
                owner.fault(volume, extent, write).await;
                owner.faulting.borrow_mut().remove(&(volume, extent, write));
            });
        }
    }

    async fn fault(&self, volume: VolumeId, extent: u64, write: bool) {
        self.wait_open().await;
        let mut launder_until = None;
        loop {
            let failure = match self.fault_step(volume, extent, write) {
                Step::Done => return,
                Step::NoEngine => {
                    self.wait_session().await;
                    continue;
                }
                Step::Locked => {
                    self.locks.wait_free(volume, extent).await;
                    continue;
                }
                Step::Commit => match self.commit().await {
                    Ok(()) => continue,
                    Err(error) => {
                        tracing::error!(%volume, extent, %error, "a fault fails");
                        FaultFailure::Internal
                    }
                },
                Step::Launder => {
                    let until =
                        *launder_until.get_or_insert_with(|| Instant::now() + self.limits.launder);
                    self.launder_wanted.notify_one();
                    let left = until.saturating_duration_since(Instant::now());
                    match timeout(left, self.laundered.next()).await {
                        Ok(()) => continue,
                        Err(_) => FaultFailure::NoSpace,
                    }
                }
                Step::TableFull => {
                    self.evict().await;
                    continue;
                }
                Step::Moved(range) => match self.take_back(volume, range).await {
                    Ok(()) => continue,
                    Err(error) => {
                        tracing::error!(%volume, extent, %error, "a fault fails: its old place is still in use");
                        FaultFailure::Internal
                    }
                },
                Step::Failed(failure) => failure,
            };
            let range = ExtentRange::new(extent, 1);
            self.say(&ToEngine::FaultFailed {
                volume,
                range,
                reason: failure,
            });
            return;
        }
    }

    /// One attempt, without a wait in it.
    fn fault_step(&self, volume: VolumeId, extent: u64, write: bool) -> Step {
        let Some(session) = self.session() else {
            return Step::NoEngine;
        };
        if self.locks.free_run(volume, extent, 1) == 0 {
            return Step::Locked;
        }
        let mut core = self.core.borrow_mut();
        let core = &mut *core;
        if core.spare_entries() < SPARE_ENTRIES {
            return Step::TableFull;
        }
        let (word, count, commit_sequence) =
            match core.pool.fault(volume, ExtentIndex(extent), write) {
                Ok(FaultAnswer::Mapped {
                    device,
                    extent: at,
                    count,
                    commit_seq,
                }) => (
                    place(device, at),
                    count.min(MAX_RUN),
                    commit_seq.unwrap_or(0),
                ),
                Ok(FaultAnswer::Allocated {
                    device,
                    extent: at,
                    commit_seq,
                }) => (place(device, at), 1, commit_seq),
                Ok(FaultAnswer::Hole { count }) => (Some(Word::HOLE), count.min(MAX_HOLE_RUN), 0),
                Ok(FaultAnswer::NeedReserve { count }) => {
                    return match core.pool.reserve(volume, count) {
                        Ok(_) => Step::Commit,
                        Err(error) => failed(volume, extent, &error),
                    };
                }
                Ok(FaultAnswer::AwaitCommit { .. }) => return Step::Commit,
                Ok(FaultAnswer::AwaitLaunder) => return Step::Launder,
                Ok(FaultAnswer::NoSpace) => return Step::Failed(FaultFailure::NoSpace),
                Err(error) => return failed(volume, extent, &error),
            };
        let Some(word) = word else {
            tracing::error!(%volume, extent, "its place is past what a translation can name");
            return Step::Failed(FaultFailure::Internal);
        };
        // At least the extent itself is free, as looked at above.
        let count = self.locks.free_run(volume, extent, count.max(1)).max(1);
        let mut grant = Grant {
            volume,
            range: ExtentRange::new(extent, count),
            word,
            epoch: session.generation,
            commit_sequence,
        };
        match core.listed_elsewhere(&grant) {
            Some(elsewhere) if elsewhere.first <= extent => return Step::Moved(elsewhere),
            Some(elsewhere) => grant.range.count = elsewhere.first - extent,
            None => {}
        }
        if core.record(grant) == Err(Full) {
            return Step::TableFull;
        }
        let range = grant.range;
        session.say(&ToEngine::Grants {
            grants: vec![GrantOf {
                volume,
                range,
                word: word.bits(),
                commit_sequence,
            }],
        });
        if write {
            self.reserve_ahead(core, volume);
        }
        Step::Done
    }

    fn reserve_ahead(&self, core: &mut Core, volume: VolumeId) {
        let Some(wanted) = core.pool.wants_reserve(volume) else {
            return;
        };
        match core.pool.reserve(volume, wanted) {
            Ok(_) => self.committer.kick(),
            // Said again by the fault that then finds nothing.
            Err(error) => tracing::debug!(%volume, %error, "reserving ahead"),
        }
    }

    /// Revokes a listed range that the pool does not know there any more, and takes it off the list.
    async fn take_back(&self, volume: VolumeId, range: ExtentRange) -> Result<(), ReleaseError> {
        let _held = self.locks.hold(volume, range).await;
        self.revoke(volume, range).await?;
        // Whatever took it away must be durable before the list forgets it.
        self.commit_through().await;
        self.forget_grants(volume, range).await;
        Ok(())
    }

    /// Makes room in the grant table: takes back some grants whose mappings are durable.
    pub(super) async fn evict(&self) {
        let _one_at_a_time = self.evicting.lock().await;
        if self.core.borrow().spare_entries() >= SPARE_ENTRIES + EVICT_AT_ONCE {
            return;
        }
        if self.sync_all().await.is_err() {
            sleep(Duration::from_millis(200)).await;
        }
        let mut evicted = 0;
        for _ in 0..EVICT_AT_ONCE {
            let Some(victim) = self.core.borrow_mut().grants.victim() else {
                break;
            };
            let Some(_held) = self.locks.try_hold(victim.volume, victim.range) else {
                continue;
            };
            if !self.is_durable(&victim) {
                continue;
            }
            match self.revoke(victim.volume, victim.range).await {
                Ok(()) => {
                    let removed = self
                        .core
                        .borrow_mut()
                        .grants
                        .remove(victim.volume, victim.range);
                    // If it has been joined with others meanwhile, it may stay: it is only a list.
                    evicted += usize::from(removed.is_ok());
                }
                Err(error) => {
                    tracing::warn!(volume = %victim.volume, %error, "making room in the grant table")
                }
            }
        }
        if evicted == 0 {
            // Everything is held or uncommitted: others must get on first.
            sleep(Duration::from_millis(20)).await;
        }
    }

    fn is_durable(&self, grant: &Grant) -> bool {
        grant.word.rights() == Some(Rights::Hole)
            || grant.commit_sequence <= self.core.borrow().pool.durable_seq(grant.volume)
    }
}

fn place(device: DeviceIndex, extent: ExtentIndex) -> Option<Word> {
    Word::new(device, extent, Rights::ReadWrite)
}

fn failed(volume: VolumeId, extent: u64, error: &forebay_pool::PoolError) -> Step {
    if error.kind == forebay_pool::ErrorKind::NoSpace {
        return Step::Failed(FaultFailure::NoSpace);
    }
    tracing::warn!(%volume, extent, %error, "a fault fails");
    Step::Failed(FaultFailure::Internal)
}
