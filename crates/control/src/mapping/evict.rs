//! Making room in the grant table.
//!
//! Purpose: the table is bounded; when it is nearly full, some grants are taken back.
//! Design: only grants whose mappings are durable may leave the table, because an entry is what a
//! daemon's successor learns an uncommitted mapping from. So mappings are committed first, then some
//! entries, in the table's own order of turns, are revoked, all at once and not for long: what lies on
//! a device that hangs stays listed, and others are taken instead. Their devices are flushed before
//! they are forgotten. One such round at a time, which costs a commit and a flush whatever it takes
//! back: so it takes back a good part of a large table, neighbours with one revoke, and begins before
//! the table is full, so that no fault waits for it as long as it keeps up.
//! Not here: what a fault does meanwhile (it waits, `fault`).

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use forebay_pool::FaultAnswer;
use forebay_xlate::grants::Grant;
use forebay_xlate::owner_side::NotForgotten;
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, Rights, VolumeId};
use tokio::time::{sleep, timeout};

use crate::base::Core;
use crate::base::together::join_all;
use crate::link::session::AskError;
use crate::mapping::fault::SPARE_ENTRIES;
use crate::mapping::locks::LockGuard;
use crate::mapping::revoke::Revoker;

/// How many grants are taken back at once, at least.
const AT_LEAST: usize = 32;
/// And as a part of the table.
const PART: usize = 64;
/// How many revokes that takes, at least.
const REVOKES: usize = 16;
/// How many entries are looked at to find them, beside those.
const LOOK_AT: usize = 1024;
/// How long commits and revokes may take before others are tried.
const ROUND_LIMIT: Duration = Duration::from_secs(2);

impl Core {
    fn evicted_at_once(&self) -> usize {
        (self.grants.usage().1 / PART).max(AT_LEAST)
    }

    /// Whether the grant table is so full that grants should be taken back.
    pub(crate) fn is_short_of_entries(&self) -> bool {
        self.spare_entries() < SPARE_ENTRIES + self.evicted_at_once()
    }
}

impl Revoker {
    /// Makes room in the grant table before there is none.
    pub(crate) fn evict_ahead(self: &Rc<Self>) {
        if self.base.core.borrow().is_short_of_entries() && self.evicting.try_lock().is_ok() {
            let owner = self.clone();
            self.base.spawn(async move { owner.evict().await });
        }
    }

    /// Makes room in the grant table.
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
            // Taking back forgets entries too, which may need this.
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
                    tracing::warn!(volume = %held.volume, %error, "making room in the grant table");
                    return None;
                }
                Some(held)
            })
            .collect();
        let evicted = self.forget_flushed(drained).await;
        drop(one_at_a_time);
        if evicted == 0 {
            // Everything is held or uncommitted: others must get on first.
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Ranges of which all that is listed may leave the table.
    fn hold_victims(&self, even_ahead: bool) -> Vec<LockGuard<'_>> {
        let at_once = self.base.core.borrow().evicted_at_once();
        let mut spans: Vec<(VolumeId, ExtentRange, usize)> = Vec::new();
        let (mut found, mut goes_on) = (0, false);
        for _ in 0..at_once + LOOK_AT {
            if found == at_once {
                break;
            }
            let Some(victim) = self.base.core.borrow_mut().grants.victim() else {
                break;
            };
            if !self.may_leave(&victim, even_ahead) {
                goes_on = false;
                continue;
            }
            match spans.last_mut() {
                // Between two that come one after the other nothing is listed.
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

    pub(crate) fn may_leave(&self, grant: &Grant, even_ahead: bool) -> bool {
        if grant.word.rights() == Some(Rights::Hole) {
            return true;
        }
        // What lies ahead of writes would be lost sight of: only if nothing else can go.
        let is_ahead = self.ahead.has_any(grant.volume, grant.range);
        if self.states.is_hanging(grant.word.device()) || (is_ahead && !even_ahead) {
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

    /// An older mapping elsewhere may hold the volume's sequence back: looks at these themselves.
    fn maps_durably(&self, volume: VolumeId, range: ExtentRange) -> bool {
        let pool = &mut self.base.core.borrow_mut().pool;
        let mut at = range.first;
        while at < range.end() {
            match pool.fault(volume, ExtentIndex(at), false) {
                Ok(FaultAnswer::Mapped {
                    count,
                    commit_seq: None,
                    ..
                }) => at = at.saturating_add(count.max(1)),
                _ => return false,
            }
        }
        true
    }

    /// Flushes the devices that drained ranges were written on, and forgets the ranges; returns how
    /// many. A later engine is not told of them, so its FLUSH would leave these devices out.
    async fn forget_flushed(&self, drained: Vec<LockGuard<'_>>) -> usize {
        let devices_of = |held: &LockGuard<'_>| self.locks.side.borrow().devices(held.id);
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
            if durable && self.locks.side.borrow().forget(held.id, grants).is_ok() {
                forgotten += 1;
            }
        }
        forgotten
    }

    /// Takes a held range, whose extents' fate is durable, off the grant table.
    pub(crate) async fn forget_grants(&self, held: &LockGuard<'_>) -> Result<(), AskError> {
        loop {
            // Cutting a piece out of an entry takes one more.
            if self.base.core.borrow().spare_entries() >= 4 {
                let grants = &mut self.base.core.borrow_mut().grants;
                match self.locks.side.borrow().forget(held.id, grants) {
                    Ok(()) => return Ok(()),
                    Err(NotForgotten::OutOfOrder(error)) => return Err(error.into()),
                    Err(NotForgotten::Full) => {}
                }
            }
            self.evict().await;
        }
    }
}
