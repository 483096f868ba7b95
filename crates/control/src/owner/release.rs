//! Giving ranges up: a tenant's deallocation, and what a volume's deletion needs.
//!
//! Purpose: takes extents back from the data path and then from the volume.
//! Design: the range is held, so no fault is answered from it; it is revoked; only when nothing uses
//! it any more the pool gives it up; the commit follows; only then the grant table forgets it. A
//! revoke that the engine can't finish in time changes nothing. A revoke counts when an engine that
//! has its fence on the devices concerned says that nothing uses the range: if the engine dies, its
//! last requests may still be on their way until its locks have fallen, which its successor's fence
//! tells; so the successor is asked again.
//! Not here: what becomes of the extents (`launder`).

use std::rc::Rc;

use forebay_pool::PoolError;
use forebay_xlate::boundary::message::ToEngine;
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, Rights, VolumeId};
use tokio::time::timeout;

use super::commit::CommitError;
use super::session::AskError;
use super::{Owner, count};

/// Why a range was not given up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReleaseError {
    /// It is still in use.
    #[error("{0}")]
    Revoke(#[from] AskError),
    /// The pool refused.
    #[error("{0}")]
    Pool(#[from] PoolError),
    /// It is given up, but not durably.
    #[error("{0}")]
    Commit(#[from] CommitError),
}

impl Owner {
    /// Returns once nothing uses the range. It must be held.
    pub(super) async fn revoke(
        &self,
        volume: VolumeId,
        range: ExtentRange,
    ) -> Result<(), AskError> {
        self.revoke_for(volume, range, None).await
    }

    /// The same for a tenant's deallocation (its number): the engine refuses when that has ended,
    /// because the tenant may have written there since. So it is asked even where nothing is listed.
    async fn revoke_for(
        &self,
        volume: VolumeId,
        range: ExtentRange,
        release: Option<u64>,
    ) -> Result<(), AskError> {
        let granted = self.core.borrow().grants.granted(volume, range);
        if granted.is_empty() && release.is_none() {
            // What is not listed is not granted.
            return Ok(());
        }
        let mut devices: Vec<DeviceIndex> = granted
            .iter()
            .filter(|grant| grant.word.rights() != Some(Rights::Hole))
            .map(|grant| grant.word.device())
            .collect();
        devices.sort_unstable();
        devices.dedup();
        let until_done = async {
            loop {
                let session = self.wait_session().await;
                if session.devices_ready(&devices).await == Err(AskError::Gone) {
                    continue;
                }
                match session
                    .revoke(volume, range, release)
                    .within(self.limits.revoke)
                    .await
                {
                    Err(AskError::Gone) => {}
                    answer => return answer,
                }
            }
        };
        timeout(self.limits.revoke, until_done)
            .await
            .unwrap_or(Err(AskError::TimedOut(self.limits.revoke, "a revoke")))?;
        count(&self.counters.revokes);
        Ok(())
    }

    /// A tenant deallocates. What an engine asks again in a new conversation is done once.
    pub(super) fn on_release(
        self: &Rc<Self>,
        generation: u64,
        release: u64,
        volume: VolumeId,
        range: ExtentRange,
    ) {
        if !self.releasing.borrow_mut().insert((generation, release)) {
            return;
        }
        let owner = self.clone();
        self.spawn(async move {
            owner.wait_open().await;
            if let Err(error) = owner.release(generation, release, volume, range).await {
                // A deallocation is a hint: the tenant need not know.
                tracing::warn!(%volume, ?range, %error, "a deallocation was not carried out");
            }
            owner.releasing.borrow_mut().remove(&(generation, release));
            if let Some(session) = owner.session().filter(|s| s.generation == generation) {
                session.say(&ToEngine::ReleaseDone { release });
            }
        });
    }

    /// Gives a range up, durably, for an engine of `generation`.
    async fn release(
        &self,
        generation: u64,
        release: u64,
        volume: VolumeId,
        range: ExtentRange,
    ) -> Result<(), ReleaseError> {
        if range.count == 0 {
            return Ok(());
        }
        let _held = self.locks.hold(volume, range).await;
        if self.newest_generation.get() != generation {
            // A later engine serves already: tenants may have written there since.
            return Ok(());
        }
        self.revoke_for(volume, range, Some(release)).await?;
        let released =
            self.core
                .borrow_mut()
                .pool
                .release(volume, ExtentIndex(range.first), range.count)?;
        if released.extents > 0 {
            self.commit_through().await;
        }
        self.forget_grants(volume, range).await;
        if released.extents > 0 {
            self.launder_wanted.notify_one();
        }
        Ok(())
    }

    /// Takes a revoked range, whose extents' fate is durable, off the grant table. It must be held.
    pub(super) async fn forget_grants(&self, volume: VolumeId, range: ExtentRange) {
        loop {
            // Cutting a piece out of an entry takes one more.
            let room = self.core.borrow().spare_entries() >= 4;
            if room && self.core.borrow_mut().grants.remove(volume, range).is_ok() {
                return;
            }
            self.evict().await;
        }
    }
}
