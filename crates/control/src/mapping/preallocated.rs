//! Preallocated extents: a write fault may map the neighbours too, as it costs far more than a
//! write.
//!
//! A region of a volume is as large as one message can take back. The more write faults it had
//! lately, the larger its windows. The pool limits the total ([`forebay_pool::Pool::preallocation_room`]).
//! Unwritten extents are taken back from quiet regions, when the pool fills up, and at exit; the
//! next session counts them as written.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use forebay_pool::{Pool, SpaceLevel};
use forebay_xlate::boundary::message::MAX_TAKE_BACK;
use forebay_xlate::{ExtentIndex, ExtentRange, VolumeId};
use futures_util::future::join_all;
use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep, timeout};

use crate::link::session::AskError;
use crate::mapping::revoke::Revoker;

const REGION: u64 = MAX_TAKE_BACK;
/// The largest window, in extents.
const MAX_WINDOW: u64 = 64;
/// A window is at most this part of the region's recent faults.
const FAULTS_PER_EXTENT: u64 = 2;
/// And at most this part of the volume's reserved extents, so that other faults find some.
const SPARE_PART: u64 = 32;
/// Faults of a volume in one [`TICK`] that count as fast.
const MANY: u32 = 64;
const TICK: Duration = Duration::from_millis(100);
/// How long the pool's last answer about the budget is used.
const ROOM_HOLDS: Duration = Duration::from_millis(2);
const BEAT: Duration = Duration::from_secs(1);
/// How long a request for statistics waits for a count.
const ASKED_NOW: Duration = Duration::from_millis(500);
/// A region is quiet if in a beat less than this part of its preallocated extents was written.
const CLAIMED_PART: u64 = 128;
/// After this many quiet beats its preallocated extents are taken back.
const QUIET_BEATS: u8 = 2;
/// The part of the time that counts may take when the budget is out, and the least pause between
/// them.
const COUNT_PART: u32 = 8;
const COUNT_PAUSE: Duration = Duration::from_millis(5);
const AT_ONCE: usize = 16;
/// The limit of tracked regions. Beyond it, no window opens in others.
const MAX_REGIONS: usize = 65_536;

#[derive(Debug, Default)]
struct VolumeRegion {
    /// Write faults; halved at each beat.
    faults: u64,
    preallocated: u64,
    /// Written or preallocated since the last beat.
    active: u64,
    quiet: u8,
}

#[derive(Debug)]
struct FaultRate {
    since: Instant,
    faults: u32,
    was_fast: bool,
    /// What the budget leaves, and when the pool said so.
    room: u64,
    room_since: Option<Instant>,
    /// The sum of its regions' `preallocated`.
    preallocated: u64,
}

#[derive(Debug)]
pub(crate) struct Preallocation {
    /// [`TICK`], except in tests.
    pub(crate) tick: Cell<Duration>,
    regions: RefCell<BTreeMap<(VolumeId, u64), VolumeRegion>>,
    rates: RefCell<BTreeMap<VolumeId, FaultRate>>,
    /// Serializes taking back; `rounds` counts how often it was done.
    taking: tokio::sync::Mutex<()>,
    rounds: Cell<u64>,
    /// A window was refused because the budget seems to be out.
    is_out: Notify,
    /// Set at exit: no window opens.
    closed: Cell<bool>,
}

impl Default for Preallocation {
    fn default() -> Self {
        Self {
            // Zero makes every rate fast, unless the test sets a tick.
            tick: Cell::new(if cfg!(test) { Duration::ZERO } else { TICK }),
            regions: RefCell::default(),
            rates: RefCell::default(),
            taking: tokio::sync::Mutex::new(()),
            rounds: Cell::new(0),
            is_out: Notify::new(),
            closed: Cell::new(false),
        }
    }
}

impl FaultRate {
    fn new(now: Instant) -> Self {
        Self {
            since: now,
            faults: 0,
            was_fast: false,
            room: 0,
            room_since: None,
            preallocated: 0,
        }
    }

    /// Counts a fault; says whether faults come fast.
    fn is_fast(&mut self, now: Instant, tick: Duration) -> bool {
        let passed = now.duration_since(self.since);
        if passed >= tick {
            self.was_fast = self.faults >= MANY && passed < 2 * tick;
            (self.since, self.faults) = (now, 0);
        }
        self.faults = self.faults.saturating_add(1);
        self.was_fast || self.faults >= MANY
    }
}

impl Preallocation {
    /// The extents in which a write fault may preallocate neighbours.
    pub(crate) fn window(
        &self,
        pool: &Pool,
        volume: VolumeId,
        extent: u64,
        now: Instant,
    ) -> Option<Range<u64>> {
        let mut rates = self.rates.borrow_mut();
        let rate = rates.entry(volume).or_insert_with(|| FaultRate::new(now));
        let is_fast = rate.is_fast(now, self.tick.get());
        let mut regions = self.regions.borrow_mut();
        let key = (volume, extent / REGION);
        if regions.len() >= MAX_REGIONS && !regions.contains_key(&key) {
            return None;
        }
        let region = regions.entry(key).or_default();
        region.faults += 1;
        let wanted = (region.faults / FAULTS_PER_EXTENT)
            .min(MAX_WINDOW)
            .min(pool.volumes().spare_of(volume) / SPARE_PART);
        if !is_fast || wanted < 2 || self.closed.get() {
            return None;
        }
        if rate
            .room_since
            .is_none_or(|since| now.duration_since(since) >= ROOM_HOLDS)
        {
            (rate.room, rate.room_since) = (pool.preallocation_room(volume), Some(now));
        }
        if rate.room < wanted {
            self.is_out.notify_one();
        }
        let window = 1u64 << wanted.min(rate.room).checked_ilog2()?;
        let first = extent - extent % window;
        (window > 1).then_some(first..first + window)
    }

    pub(crate) fn given(&self, pool: &mut Pool, volume: VolumeId, extent: u64, count: u64) {
        if let Some(region) = self
            .regions
            .borrow_mut()
            .get_mut(&(volume, extent / REGION))
        {
            region.preallocated += count;
            region.active += count;
        }
        if let Some(rate) = self.rates.borrow_mut().get_mut(&volume) {
            rate.room = rate.room.saturating_sub(count);
            rate.preallocated += count;
            pool.set_preallocated(volume, rate.preallocated);
        }
    }

    pub(crate) fn is_fast(&self, volume: VolumeId) -> bool {
        let rates = self.rates.borrow();
        rates
            .get(&volume)
            .is_some_and(|rate| rate.was_fast || rate.faults >= MANY)
    }

    /// How many extents may be granted together as stored. Stops at preallocated extents, which
    /// must stay known as such to be taken back.
    pub(crate) fn stored_run(&self, volume: VolumeId, extent: u64, count: u64) -> u64 {
        let regions = self.regions.borrow();
        let has = |region| {
            regions
                .get(&(volume, region))
                .is_some_and(|r| r.preallocated > 0)
        };
        let (first, last) = (extent / REGION, (extent + count - 1) / REGION);
        match (first..=last).find(|region| has(*region)) {
            Some(region) if region == first => 1,
            Some(region) => region * REGION - extent,
            None => count,
        }
    }

    pub(crate) fn has_any(&self, volume: VolumeId, range: ExtentRange) -> bool {
        let first = (volume, range.first / REGION);
        let last = (volume, range.end().saturating_sub(1) / REGION);
        let regions = self.regions.borrow();
        regions
            .range(first..=last)
            .any(|(_, region)| region.preallocated > 0)
    }

    /// Regions with preallocated extents, the longest quiet first.
    fn taken_first(&self) -> Vec<(VolumeId, u64)> {
        let regions = self.regions.borrow();
        let mut all: Vec<_> = regions.iter().filter(|(_, r)| r.preallocated > 0).collect();
        all.sort_by_key(|(_, region)| (std::cmp::Reverse(region.quiet), region.active));
        all.into_iter().map(|(key, _)| *key).collect()
    }

    fn fewer(&self, pool: &mut Pool, key: (VolumeId, u64), count: u64) {
        let mut regions = self.regions.borrow_mut();
        let Some(region) = regions.get_mut(&key) else {
            return;
        };
        let count = count.min(region.preallocated);
        region.preallocated -= count;
        if let Some(rate) = self.rates.borrow_mut().get_mut(&key.0) {
            rate.preallocated = rate.preallocated.saturating_sub(count);
            pool.set_preallocated(key.0, rate.preallocated);
        }
    }

    /// A new session counts every grant as written.
    pub(crate) fn forget(&self, pool: &mut Pool) {
        for volume in std::mem::take(&mut *self.rates.borrow_mut()).into_keys() {
            pool.set_preallocated(volume, 0);
        }
        self.regions.borrow_mut().clear();
    }

    /// A snapshot or a rollback has taken the volume's preallocated extents.
    pub(crate) fn forget_volume(&self, pool: &mut Pool, volume: VolumeId) {
        let all = (volume, 0)..=(volume, u64::MAX);
        self.regions
            .borrow_mut()
            .extract_if(all, |_, _| true)
            .for_each(drop);
        if self.rates.borrow_mut().remove(&volume).is_some() {
            pool.set_preallocated(volume, 0);
        }
    }

    fn region_preallocated(&self, key: (VolumeId, u64)) -> u64 {
        self.regions
            .borrow()
            .get(&key)
            .map_or(0, |region| region.preallocated)
    }

    fn beat(&self, pool: &Pool) -> Vec<(VolumeId, u64)> {
        let mut quiet = Vec::new();
        self.regions.borrow_mut().retain(|key, region| {
            let is_quiet = region.active.saturating_mul(CLAIMED_PART) < region.preallocated;
            region.quiet = if is_quiet {
                region.quiet.saturating_add(1)
            } else {
                0
            };
            if is_quiet && region.quiet >= QUIET_BEATS {
                quiet.push(*key);
            }
            region.faults /= 2;
            region.active = 0;
            region.preallocated > 0 || region.faults > 0
        });
        let there = |volume: &VolumeId| pool.volume(*volume).is_ok();
        self.regions
            .borrow_mut()
            .retain(|(volume, _), _| there(volume));
        self.rates.borrow_mut().retain(|volume, _| there(volume));
        quiet
    }
}

fn extents_of((_, region): (VolumeId, u64)) -> ExtentRange {
    ExtentRange::new(region * REGION, REGION)
}

impl Revoker {
    pub(crate) async fn run_preallocation(self: Rc<Self>) {
        self.base.wait_open().await;
        let preallocated = &self.preallocated;
        let mut beat = interval_at(Instant::now() + BEAT, BEAT);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let is_out = tokio::select! {
                _ = beat.tick() => false,
                () = preallocated.is_out.notified() => true,
            };
            if is_out {
                // Most may be written by now.
                let begin = Instant::now();
                self.count_preallocated().await;
                sleep(COUNT_PAUSE.max(begin.elapsed() * COUNT_PART)).await;
                continue;
            }
            if preallocated.regions.borrow().is_empty() {
                continue;
            }
            self.count_preallocated().await;
            let quiet = preallocated.beat(&self.base.core.borrow().pool);
            let is_short = self.base.core.borrow().pool.space_level() != SpaceLevel::Normal;
            let due = if is_short {
                preallocated.taken_first()
            } else {
                quiet
            };
            if !due.is_empty() {
                let _one = preallocated.taking.lock().await;
                self.take_back_all(&due).await;
            }
        }
    }

    pub(crate) async fn count_preallocated_soon(&self) {
        let _ = timeout(ASKED_NOW, self.count_preallocated()).await;
    }

    async fn count_preallocated(&self) {
        let Some(session) = self.link.session() else {
            return;
        };
        let all = self.preallocated.taken_first();
        for some in all.chunks(AT_ONCE) {
            let counts = some.iter().map(|key| {
                let before = self.preallocated.region_preallocated(*key);
                let count =
                    session.count_preallocated(key.0, extents_of(*key), self.base.limits.request);
                async move { (*key, before, count.await) }
            });
            for (key, before, left) in join_all(counts).await {
                let Ok(left) = left else { return };
                let claimed = before.saturating_sub(left);
                self.preallocated
                    .fewer(&mut self.base.core.borrow_mut().pool, key, claimed);
                if let Some(region) = self.preallocated.regions.borrow_mut().get_mut(&key) {
                    region.active += claimed;
                }
            }
        }
    }

    /// The next daemon would count them as used. Stops after `limit`.
    pub(crate) async fn give_up_preallocated(&self, limit: Duration) {
        self.preallocated.closed.set(true);
        let all = async {
            let _one = self.preallocated.taking.lock().await;
            self.count_preallocated().await;
            let all = self.preallocated.taken_first();
            self.take_back_all(&all).await;
        };
        if self.base.has_preallocated() && timeout(limit, all).await.is_err() {
            let left = self.base.core.borrow().pool.volumes().preallocated();
            tracing::warn!(
                left,
                "unwritten preallocated extents stay with their volumes"
            );
        }
    }

    pub(crate) async fn take_back_for_space(&self) -> bool {
        let preallocated = &self.preallocated;
        let before = preallocated.rounds.get();
        let _one = preallocated.taking.lock().await;
        if preallocated.rounds.get() != before {
            // Another task did it while this one waited.
            return true;
        }
        let all = preallocated.taken_first();
        if self.take_back_all(&all).await > 0 {
            return true;
        }
        // Extents whose taking back failed may become free: the caller tries again.
        let is_left = !preallocated.taken_first().is_empty();
        if is_left {
            sleep(TICK).await;
        }
        is_left
    }

    /// Takes back a volume's unwritten extents, as far as that is possible at once.
    pub(crate) async fn take_back_of(&self, volume: VolumeId) {
        let _one = self.preallocated.taking.lock().await;
        let mut regions = self.preallocated.taken_first();
        regions.retain(|(of, _)| *of == volume);
        self.take_back_all(&regions).await;
    }

    /// Does not wait: a running take-back may itself wait for the caller.
    pub(crate) async fn take_back_unless_busy(&self) -> bool {
        let Ok(_one) = self.preallocated.taking.try_lock() else {
            return false;
        };
        let all = self.preallocated.taken_first();
        self.take_back_all(&all).await > 0
    }

    async fn take_back_all(&self, regions: &[(VolumeId, u64)]) -> u64 {
        let mut taken = 0;
        for some in regions.chunks(AT_ONCE) {
            let each = some.iter().map(|key| self.take_back_region(*key));
            for (key, result) in some.iter().zip(join_all(each).await) {
                match result {
                    Ok(count) => taken += count,
                    Err(error) => {
                        tracing::debug!(volume = %key.0, %error, "can't take back unwritten preallocated extents");
                    }
                }
            }
        }
        let preallocated = &self.preallocated;
        preallocated
            .rounds
            .set(preallocated.rounds.get() + u64::from(taken > 0));
        taken
    }

    async fn take_back_region(&self, key: (VolumeId, u64)) -> Result<u64, AskError> {
        let limit = self.base.limits.request;
        let too_late = |_| AskError::TimedOut(limit, "preallocated extents");
        let (volume, range) = (key.0, extents_of(key));
        let hold = timeout(limit, self.locks.hold(volume, range));
        let held = hold.await.map_err(too_late)?;
        let session = self.link.session().ok_or(AskError::Gone)?;
        let before = self.preallocated.region_preallocated(key);
        let taken = session.take_back(volume, range, limit).await?;
        if session.is_over() {
            return Err(AskError::Gone);
        }
        let parts = self
            .locks
            .protocol
            .borrow_mut()
            .took_back(held.id, &taken)?;
        self.preallocated
            .fewer(&mut self.base.core.borrow_mut().pool, key, before);
        if parts.is_empty() {
            return Ok(0);
        }
        let mut extents = 0;
        for part in parts {
            let mut core = self.base.core.borrow_mut();
            let protocol = self.locks.protocol.borrow();
            let undrained = protocol.may_change(held.id)?;
            let first = ExtentIndex(part.first);
            match core.pool.release(volume, first, part.count, undrained) {
                Ok(released) => extents += released.extents,
                // The extents released before the error must still be forgotten. The rest is no
                // longer listed, and faults again.
                Err(error) => {
                    tracing::warn!(%volume, %error, "can't take back unwritten preallocated extents");
                    break;
                }
            }
        }
        self.locks.protocol.borrow_mut().changed(held.id)?;
        self.base.commit_through().await;
        self.locks.protocol.borrow_mut().durable(held.id)?;
        self.forget_grants(&held).await?;
        self.base.zero_fill_wanted.raise();
        Ok(extents)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_many_only_when_they_come_fast() {
        let mut now = Instant::now();
        let mut rate = FaultRate::new(now);
        for _ in 1..MANY {
            assert!(!rate.is_fast(now, TICK));
        }
        assert!(rate.is_fast(now, TICK));
        now += TICK;
        assert!(rate.is_fast(now, TICK), "they were a moment ago");
        now += TICK;
        assert!(!rate.is_fast(now, TICK));
    }
}
