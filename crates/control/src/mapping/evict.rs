//! Evicts grants from a nearly full grant table.
//!
//! Only grants with durable mappings may leave, because the next daemon learns of uncommitted ones
//! from the table. A round commits, revokes entries in turn, flushes their devices and forgets
//! them; entries on hanging devices stay. A round costs a commit and a flush whatever it evicts. So
//! it takes a good part of the table, and begins early enough that faults rarely wait.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use forebay_pool::FaultAnswer;
use forebay_xlate::grants::{Grant, copied_for};
use forebay_xlate::owner_side::NotForgotten;
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, Rights, VolumeId};
use futures_util::future::join_all;
use tokio::time::{sleep, timeout};

use crate::base::Core;
use crate::link::session::AskError;
use crate::mapping::fault::SPARE_ENTRIES;
use crate::mapping::locks::LockGuard;
use crate::mapping::revoke::Revoker;

/// Least number of grants evicted in a round.
const AT_LEAST: usize = 32;
/// Or one in this many of the table's entries.
const PART: usize = 64;
/// Least number of revokes for that.
const REVOKES: usize = 16;
/// Additional entries that a search looks at.
const POLL_AT: usize = 1024;
const ROUND_LIMIT: Duration = Duration::from_secs(2);

impl Core {
    fn evicted_at_once(&self) -> usize {
        (self.grants.usage().1 / PART).max(AT_LEAST)
    }

    pub(crate) fn is_short_of_entries(&self) -> bool {
        self.spare_entries() < SPARE_ENTRIES + self.evicted_at_once()
    }
}

impl Revoker {
    pub(crate) fn evict_early(self: &Rc<Self>) {
        if self.base.core.borrow().is_short_of_entries() && self.evicting.try_lock().is_ok() {
            let owner = self.clone();
            self.base.spawn(async move { owner.evict().await });
        }
    }

    pub(crate) async fn evict(&self) {
        let mut one_at_a_time = self.evicting.lock().await;
        if !self.base.core.borrow().is_short_of_entries() {
            return;
        }
        let limit = ROUND_LIMIT.min(self.base.limits.revoke);
        if !matches!(timeout(limit, self.flusher.sync_all()).await, Ok(Ok(()))) {
            sleep(Duration::from_millis(200)).await;
        }
        let mut victims = self.hold_victims(false);
        if victims.is_empty() {
            // Taking back forgets entries too, which may need this lock.
            drop(one_at_a_time);
            if self.take_back_unless_busy().await {
                return;
            }
            one_at_a_time = self.evicting.lock().await;
            victims = self.hold_victims(true);
        }
        let revokes = victims.iter().map(|held| self.revoke(held, limit));
        let results = join_all(revokes).await;
        let drained: Vec<LockGuard<'_>> = victims
            .into_iter()
            .zip(results)
            .filter_map(|(held, result)| {
                if let Err(error) = result {
                    tracing::warn!(volume = %held.volume, %error, "can't make room in the grant table");
                    return None;
                }
                Some(held)
            })
            .collect();
        let evicted = self.forget_flushed(drained).await;
        drop(one_at_a_time);
        if evicted == 0 {
            // Everything is held or uncommitted: let other tasks run.
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Holds ranges all of whose entries may leave the table.
    fn hold_victims(&self, even_preallocated: bool) -> Vec<LockGuard<'_>> {
        let at_once = self.base.core.borrow().evicted_at_once();
        let mut spans: Vec<(VolumeId, ExtentRange, usize)> = Vec::new();
        let (mut found, mut goes_on) = (0, false);
        for _ in 0..at_once + POLL_AT {
            if found == at_once {
                break;
            }
            let Some(victim) = self.base.core.borrow_mut().grants.victim() else {
                break;
            };
            if !self.may_leave(&victim, even_preallocated) {
                goes_on = false;
                continue;
            }
            match spans.last_mut() {
                // Nothing is listed between two consecutive entries.
                Some((volume, range, entries))
                    if goes_on
                        && *volume == victim.volume
                        && range.end() <= victim.range.first
                        && *entries < at_once / REVOKES =>
                {
                    range.count = victim.range.end() - range.first;
                    *entries += 1;
                }
                _ => spans.push((victim.volume, victim.range, 1)),
            }
            (found, goes_on) = (found + 1, true);
        }
        let hold = |(volume, range, _)| self.locks.try_hold(volume, range);
        spans.into_iter().filter_map(hold).collect()
    }

    pub(crate) fn may_leave(&self, grant: &Grant, even_preallocated: bool) -> bool {
        if copied_for(grant.volume).is_some() {
            return false;
        }
        if grant.word.rights() == Some(Rights::Hole) {
            return true;
        }
        // Evicted preallocated extents can't be taken back, so they go last.
        let is_preallocated = self.preallocated.has_any(grant.volume, grant.range);
        if self.states.is_hanging(grant.word.device()) || (is_preallocated && !even_preallocated) {
            return false;
        }
        let durable = self
            .base
            .core
            .borrow()
            .pool
            .volumes()
            .durable_seq(grant.volume);
        grant.commit_sequence <= durable || self.maps_durably(grant.volume, grant.range)
    }

    /// Checks these mappings themselves: an older one elsewhere may hold back the volume's
    /// sequence.
    fn maps_durably(&self, volume: VolumeId, range: ExtentRange) -> bool {
        let pool = &mut self.base.core.borrow_mut().pool;
        let mut at = range.first;
        while at < range.end() {
            match pool.fault(volume, ExtentIndex(at), false) {
                Ok(
                    FaultAnswer::Mapped {
                        count,
                        commit_seq: None,
                        ..
                    }
                    | FaultAnswer::Shared { count, .. },
                ) => at = at.saturating_add(count.max(1)),
                _ => return false,
            }
        }
        true
    }

    /// Flushes the devices of revoked ranges, because a later engine's FLUSH won't cover them, and
    /// forgets the ranges; returns how many.
    async fn forget_flushed(&self, drained: Vec<LockGuard<'_>>) -> usize {
        let devices_of = |held: &LockGuard<'_>| self.locks.protocol.borrow().devices(held.id);
        let devices: BTreeSet<DeviceIndex> = drained.iter().flat_map(devices_of).collect();
        let flushes = devices.iter().map(|device| async move {
            (*device, self.states.flush_device(*device).await.is_ok())
        });
        let flushed = join_all(flushes).await;
        let mut forgotten = 0;
        for held in &drained {
            let named = devices_of(held);
            let durable = flushed.iter().all(|(d, ok)| *ok || !named.contains(d));
            let grants = &mut self.base.core.borrow_mut().grants;
            if durable && self.locks.protocol.borrow().forget(held.id, grants).is_ok() {
                forgotten += 1;
            }
        }
        forgotten
    }

    /// The fate of the range's extents must be durable.
    pub(crate) async fn forget_grants(&self, held: &LockGuard<'_>) -> Result<(), AskError> {
        loop {
            // Cutting a piece out of an entry adds one.
            if self.base.core.borrow().spare_entries() >= 4 {
                let grants = &mut self.base.core.borrow_mut().grants;
                match self.locks.protocol.borrow().forget(held.id, grants) {
                    Ok(()) => return Ok(()),
                    Err(NotForgotten::OutOfOrder(error)) => return Err(error.into()),
                    Err(NotForgotten::Full) => {}
                }
            }
            self.evict().await;
        }
    }
}
