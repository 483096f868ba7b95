//! Copies shared extents for writes.
//!
//! A snapshot has the extent, so the write gets a copy of it, which the internal lane makes. The
//! extent is held meanwhile: another write to it waits, reads under a present grant go on. The
//! copy's target is listed in the grant table from before the copy until after its grant. So a
//! successor of this daemon knows that its content is not to be trusted.

use std::rc::Rc;

use forebay_pool::{CopyFailure, ExtentCopy, FaultAnswer};
use forebay_xlate::boundary::message::{FaultFailure, Job};
use forebay_xlate::grants::{Full, Grant, copy_target_of};
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, Rights, VolumeId, Word};
use tokio::time::timeout;

use crate::base::{Base, Core};
use crate::link::session::{AskError, PendingAnswer, Session};
use crate::mapping::fault::{FaultStep, Faults, SPARE_ENTRIES, failed};

/// The listed target of a copy. If nothing unlists it, a successor frees the extent, unless it is
/// mapped.
#[derive(Debug)]
pub(super) struct ListedCopy {
    base: Rc<Base>,
    volume: VolumeId,
    device: DeviceIndex,
    target: ExtentIndex,
}

/// Where the table lists a target. By its place: an earlier daemon's copy of the same logical
/// extent may still be listed, and is removed later.
fn listed_at(device: DeviceIndex, target: ExtentIndex) -> ExtentRange {
    ExtentRange::new(u64::from(device.0) << 48 | target.0, 1)
}

impl ListedCopy {
    /// Call it when the extent's grant is listed, or when the extent is durably dirty.
    pub(super) fn unlist(self) {
        let place = listed_at(self.device, self.target);
        let grants = &mut self.base.core.borrow_mut().grants;
        if grants.remove(copy_target_of(self.volume), place).is_err() {
            // One entry is removed whole, which needs no room.
            tracing::error!(volume = %self.volume, target = ?self.target, "can't unlist a copy");
        }
    }
}

impl Faults {
    /// Makes the extent the volume's own. Otherwise returns why not, as a step of the fault.
    /// `whole`: a waiting command writes the whole extent, so its data may replace the copy.
    pub(super) async fn copy_extent(
        &self,
        volume: VolumeId,
        extent: u64,
        whole: bool,
    ) -> Result<ListedCopy, FaultStep> {
        let one = ExtentRange::new(extent, 1);
        let held = self.revoker.locks.try_hold(volume, one);
        let _held = held.ok_or(FaultStep::Locked)?;
        let copy = self.begin_copy(&mut self.base.core.borrow_mut(), volume, extent)?;
        let listed = ListedCopy {
            base: self.base.clone(),
            volume,
            device: copy.target.device,
            target: copy.target.first,
        };
        let at = ExtentIndex(extent);
        let overwrite = whole.then_some(Job::Overwrite {
            volume,
            extent,
            to: copy.target.device,
            target: copy.target.first,
        });
        let failure = match self.run_copy(&copy, overwrite).await {
            Ok(()) => {
                let ended = self
                    .base
                    .core
                    .borrow_mut()
                    .pool
                    .snapshots()
                    .end_copy(volume, at);
                return match ended {
                    Ok(_) => Ok(listed),
                    Err(error) => Err(failed(volume, extent, &error)),
                };
            }
            Err((error, None)) => {
                tracing::warn!(%volume, extent, %error, "can't copy an extent of a snapshot");
                self.give_up_copy(volume, at, CopyFailure::Ended);
                FaultFailure::Device
            }
            Err((error, Some(job))) => {
                tracing::error!(%volume, extent, %error, "the copy of an extent of a snapshot hangs");
                self.set_aside(volume, at, job, listed);
                return Err(FaultStep::Failed(FaultFailure::Device));
            }
        };
        // The target must be durably dirty before the table forgets it.
        self.base.commit_through().await;
        listed.unlist();
        Err(FaultStep::Failed(failure))
    }

    fn begin_copy(
        &self,
        core: &mut Core,
        volume: VolumeId,
        extent: u64,
    ) -> Result<ExtentCopy, FaultStep> {
        if core.spare_entries() < SPARE_ENTRIES {
            return Err(FaultStep::TableFull);
        }
        let begun = core
            .pool
            .snapshots()
            .begin_copy(volume, ExtentIndex(extent));
        let copy = match begun {
            Ok(Ok(copy)) => copy,
            Ok(Err(FaultAnswer::NeedReserve { count })) => {
                return Err(match core.pool.reserve(volume, count) {
                    Ok(_) => FaultStep::Commit(core.pool.journal().open_batch_id()),
                    Err(error) => failed(volume, extent, &error),
                });
            }
            Ok(Err(FaultAnswer::AwaitCommit { batch })) => return Err(FaultStep::Commit(batch)),
            Ok(Err(FaultAnswer::AwaitZeroFill)) => return Err(FaultStep::ZeroFill),
            Ok(Err(_)) => return Err(FaultStep::Failed(FaultFailure::NoSpace)),
            Err(error) => return Err(failed(volume, extent, &error)),
        };
        let word = Word::new(copy.target.device, copy.target.first, Rights::Read);
        let word = word.unwrap_or(Word::HOLE);
        let entry = Grant {
            volume: copy_target_of(volume),
            range: listed_at(copy.target.device, copy.target.first),
            word,
            epoch: 0,
            commit_sequence: 0,
        };
        match core.grants.insert(entry) {
            Ok(()) => Ok(copy),
            Err(Full) => {
                // Nothing was written to the target; a fresh one is taken later.
                let at = ExtentIndex(extent);
                self.give_up_copy_in(core, volume, at, CopyFailure::Ended);
                Err(FaultStep::TableFull)
            }
        }
    }

    /// Fails with the open job if that hangs. If the engine dies, its successor makes the whole copy
    /// again, once earlier requests at both devices have ended. A failed overwrite may leave a part
    /// of its data: the copy replaces it.
    async fn run_copy(
        &self,
        copy: &ExtentCopy,
        mut overwrite: Option<Job>,
    ) -> Result<(), (AskError, Option<PendingAnswer>)> {
        let devices = [copy.source.device, copy.target.device];
        loop {
            let session = self.link.wait_session().await;
            let limit = self.base.limits.job;
            // After a lost session, the job of the same engine may still write the target.
            let finished = session.inherited_jobs_finished(copy.target.device);
            if timeout(limit, finished).await.is_err() {
                self.suspect(&session, copy);
                continue;
            }
            let ready = timeout(limit, session.devices_ready(&devices)).await;
            match ready.unwrap_or(Err(AskError::TimedOut(limit, "a device's fence"))) {
                Ok(()) => {}
                Err(AskError::Gone) => continue,
                Err(error) => return Err((error, None)),
            }
            let is_overwrite = overwrite.is_some();
            let work = overwrite.take().unwrap_or(Job::Copy {
                from: copy.source.device,
                source: copy.source.first,
                to: copy.target.device,
                target: copy.target.first,
                count: copy.target.count,
            });
            let mut job = session.job(work);
            match job.within(limit).await {
                Ok(()) => return Ok(()),
                Err(AskError::Gone) => {}
                Err(error @ AskError::TimedOut(..)) => {
                    self.suspect(&session, copy);
                    return Err((error, Some(job)));
                }
                Err(_) if is_overwrite => {}
                Err(error) => return Err((error, None)),
            }
        }
    }

    fn suspect(&self, session: &Session, copy: &ExtentCopy) {
        for device in [copy.source.device, copy.target.device] {
            let states = &self.revoker.states;
            states.suspect(device, session.generation, "a copy");
        }
    }

    fn give_up_copy(&self, volume: VolumeId, extent: ExtentIndex, failure: CopyFailure) {
        let core = &mut self.base.core.borrow_mut();
        self.give_up_copy_in(core, volume, extent, failure);
    }

    fn give_up_copy_in(
        &self,
        core: &mut Core,
        volume: VolumeId,
        extent: ExtentIndex,
        failure: CopyFailure,
    ) {
        if let Err(error) = core.pool.snapshots().fail_copy(volume, extent, failure) {
            tracing::debug!(%volume, %error, "a failed copy's extent is gone");
        }
        self.base.zero_fill_wanted.raise();
    }

    /// The target stays reserved and listed until the job has ended, or its engine has.
    fn set_aside(
        &self,
        volume: VolumeId,
        extent: ExtentIndex,
        mut job: PendingAnswer,
        listed: ListedCopy,
    ) {
        let base = self.base.clone();
        let link = self.link.clone();
        self.base.spawn(async move {
            let _ = job.ended().await;
            // A dead engine's writes end before its successor is fenced on the device.
            let devices = [listed.device];
            while link
                .wait_session()
                .await
                .devices_ready(&devices)
                .await
                .is_err()
            {}
            let failed = {
                let pool = &mut base.core.borrow_mut().pool;
                pool.snapshots()
                    .fail_copy(volume, extent, CopyFailure::Ended)
            };
            if let Err(error) = failed {
                tracing::debug!(%volume, %error, "a failed copy's extent is gone");
            }
            base.commit_through().await;
            base.zero_fill_wanted.raise();
            listed.unlist();
        });
    }
}
