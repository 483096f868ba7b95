//! Giving ranges up: a tenant's deallocation, and a volume's deletion.
//!
//! Purpose: takes extents back from the data path and then from the volume.
//! Design: the range is held, so no fault is answered from it; it is revoked; only then the pool
//! gives it up; the commit follows; only then the grant table forgets it. Extents on a device that
//! does not drain are given up as *quarantined*: the volume is rid of them, and nobody gets them
//! before what is in flight there has ended (`hang`). What a large volume had is freed in slices, after its
//! name, over restarts ([`Releaser::run_deleter`]). A revoke that the engine does not hear changes
//! nothing.
//! Not here: how rights are taken back (`revoke`), what becomes of the extents (`launder`).

use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;

use forebay_pool::PoolError;
use forebay_xlate::boundary::message::ToEngine;
use forebay_xlate::{ExtentIndex, ExtentRange, VolumeId};

use crate::base::Base;
use crate::link::Link;
use crate::link::session::AskError;
use crate::mapping::ALL_EXTENTS;
use crate::mapping::revoke::{Deallocation, Revoker};

/// Why a range was not given up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReleaseError {
    /// It is still in use.
    #[error("{0}")]
    Revoke(#[from] AskError),
    /// The pool refused.
    #[error("{0}")]
    Pool(#[from] PoolError),
}

/// Gives up what tenants deallocate and what deleted volumes have.
#[derive(Debug)]
pub(crate) struct Releaser {
    pub(super) base: Rc<Base>,
    pub(super) link: Rc<Link>,
    pub(super) revoker: Rc<Revoker>,
    /// Deallocations that are under way.
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

    /// A tenant deallocates. What an engine asks again in a new conversation is done once.
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
                // Nobody to answer: a later engine, which carries the command on, asks by itself.
                return;
            };
            session.say(&match released {
                Ok(()) => ToEngine::ReleaseDone { release },
                Err(error) => {
                    tracing::warn!(%volume, ?range, %error, "a deallocation was not carried out");
                    ToEngine::ReleaseFailed { release }
                }
            });
        });
    }

    /// Gives a range up, durably, for the engine that asks.
    async fn release(
        &self,
        of: Deallocation,
        volume: VolumeId,
        range: ExtentRange,
    ) -> Result<(), ReleaseError> {
        if range.count == 0 {
            return Ok(());
        }
        // The rest is asked for anew: the engine knows from the revoke how much this is.
        let range = {
            let core = self.base.core.borrow();
            let (first, count) = (ExtentIndex(range.first), range.count);
            let count = core.pool.volumes().releases_at_once(volume, first, count);
            ExtentRange::new(range.first, count)
        };
        let held = self.revoker.locks.hold(volume, range).await;
        if self.base.newest_generation.get() != of.generation {
            // A later engine serves already: tenants may have written there since.
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

    /// Ends a volume.
    pub(crate) async fn give_up_volume(&self, volume: VolumeId) -> Result<(), ReleaseError> {
        let held = self.revoker.locks.hold(volume, ALL_EXTENTS).await;
        let held = &held;
        let undrained = self
            .revoker
            .revoke_for(held, None, self.base.limits.revoke)
            .await?;
        let released = self
            .base
            .core
            .borrow_mut()
            .pool
            .delete_volume(held.volume, &undrained)?;
        self.revoker.given_up(held, &released).await
    }

    /// The one task that gives up what deleted volumes still have: a slice at a time, because nothing else
    /// happens on this thread meanwhile.
    pub(crate) async fn run_deleter(self: Rc<Self>) {
        self.base.wait_open().await;
        loop {
            let has_more = || self.base.core.borrow().pool.volumes().has_more_to_delete();
            self.base
                .launder_wanted
                .until(|| has_more().then_some(()))
                .await;
            let freed = self.base.core.borrow_mut().pool.delete_more();
            if let Err(error) = freed {
                tracing::error!(%error, "freeing what a deleted volume has");
                return;
            }
            self.base.commit_through().await;
            self.base.launder_wanted.raise();
        }
    }
}
