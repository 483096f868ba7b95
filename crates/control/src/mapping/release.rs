//! Gives up ranges: deallocations by tenants and deletions of volumes.
//!
//! The order is: hold the range, revoke it, release it in the pool, commit, and forget its grants.
//! Extents on a device that does not drain are quarantined until its requests have ended. A large
//! deleted volume is freed in slices, across restarts ([`Releaser::run_deleter`]). If the engine
//! does not hear a revoke, nothing changes.

use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;

use forebay_pool::PoolError;
use forebay_xlate::boundary::message::ToEngine;
use forebay_xlate::{ExtentIndex, ExtentRange, VolumeId};
use tokio::time::Instant;

use crate::base::Base;
use crate::link::Link;
use crate::link::session::AskError;
use crate::mapping::revoke::{Deallocation, Revoker};

#[derive(Debug, thiserror::Error)]
pub(crate) enum ReleaseError {
    #[error("{0}")]
    Revoke(#[from] AskError),
    #[error("{0}")]
    Pool(#[from] PoolError),
}

#[derive(Debug)]
pub(crate) struct Releaser {
    pub(super) base: Rc<Base>,
    pub(super) link: Rc<Link>,
    pub(super) revoker: Rc<Revoker>,
    pub(super) releasing: RefCell<HashSet<Deallocation>>,
}

impl Releaser {
    pub(crate) fn new(base: &Rc<Base>, link: &Rc<Link>, revoker: &Rc<Revoker>) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            link: link.clone(),
            revoker: revoker.clone(),
            releasing: Default::default(),
        })
    }

    /// A request repeated in a new session is done once.
    pub(crate) fn on_release(
        self: &Rc<Self>,
        generation: u64,
        release: u64,
        volume: VolumeId,
        range: ExtentRange,
    ) {
        let of = Deallocation {
            generation,
            number: release,
        };
        if !self.releasing.borrow_mut().insert(of) {
            return;
        }
        let owner = self.clone();
        self.base.spawn(async move {
            owner.base.wait_open().await;
            let released = owner.release(of, volume, range).await;
            owner.releasing.borrow_mut().remove(&of);
            let Some(session) = owner.link.session().filter(|s| s.generation == generation) else {
                // A later engine that continues the command asks by itself.
                return;
            };
            session.say(&match released {
                Ok(()) => ToEngine::ReleaseDone { release },
                Err(error) => {
                    tracing::warn!(%volume, ?range, %error, "a deallocation failed");
                    ToEngine::ReleaseFailed { release }
                }
            });
        });
    }

    async fn release(
        &self,
        of: Deallocation,
        volume: VolumeId,
        range: ExtentRange,
    ) -> Result<(), ReleaseError> {
        if range.count == 0 {
            return Ok(());
        }
        // The engine knows from the revoke how much this is, and asks again for the rest.
        let range = {
            let core = self.base.core.borrow();
            let (first, count) = (ExtentIndex(range.first), range.count);
            let count = core.pool.volumes().releases_at_once(volume, first, count);
            ExtentRange::new(range.first, count)
        };
        let held = self.revoker.locks.hold(volume, range).await;
        if self.base.newest_generation.get() != of.generation {
            // A later engine already serves: tenants may have written there since.
            return Ok(());
        }
        let undrained = self
            .revoker
            .revoke_for(&held, Some(of), self.base.limits.revoke)
            .await?;
        let released = self.base.core.borrow_mut().pool.release(
            volume,
            ExtentIndex(range.first),
            range.count,
            &undrained,
        )?;
        self.revoker.given_up(&held, &released).await
    }

    pub(crate) async fn give_up_volume(&self, volume: VolumeId) -> Result<(), ReleaseError> {
        let limit = self.base.limits.revoke;
        let hold = self.revoker.hold_volume(volume, Instant::now(), limit);
        let held = &hold.await?;
        let undrained = self.revoker.revoke_for(held, None, limit).await?;
        let released = self
            .base
            .core
            .borrow_mut()
            .pool
            .delete_volume(held.volume, &undrained)?;
        self.revoker.given_up(held, &released).await
    }

    /// The task that frees deleted volumes, in slices because each one blocks this thread.
    pub(crate) async fn run_deleter(self: Rc<Self>) {
        self.base.wait_open().await;
        loop {
            let has_more = || self.base.core.borrow().pool.volumes().has_more_to_delete();
            self.base
                .zero_fill_wanted
                .until(|| has_more().then_some(()))
                .await;
            let freed = self.base.core.borrow_mut().pool.delete_more();
            if let Err(error) = freed {
                tracing::error!(%error, "can't free the extents of a deleted volume");
                return;
            }
            self.base.commit_through().await;
            self.base.zero_fill_wanted.raise();
        }
    }
}
