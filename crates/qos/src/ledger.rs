//! What reactors that serve the same tenants publish to each other.
//!
//! **Design.** Each tenant has one sum of the demand on all reactors. A reactor adds its change once a window, and the same instruction
//! returns the sum: its share of the tenant's budget is its part of the demand. Volumes' own bases are not shared by demand: the reactor
//! of the volume has them. No lock, and no access on the path of an I/O. Credit is here too: it belongs to the tenant, not to a reactor.
//! Each reactor also publishes entitlements to shared resources other than processors; the awake reactors divide the rest.
//! **Not here:** processors, of which each reactor has its own.

use crate::budget::{Budget, Burst, Rate};
use crate::credit::TokenBucket;
use crate::resources::{PARTS, SHARED};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// What reactors have together: a tenant's budget.
#[derive(Default, Debug)]
pub struct Shares {
    /// The demand of all of them, as parts of base, in 1/65536.
    demand: AtomicU64,
    /// The same of what their volumes' own bases come to.
    promised: AtomicU64,
    takers: AtomicU32,
}

/// A tenant's, in lines of memory of its own.
#[derive(Default, Debug)]
#[repr(align(128))]
pub struct LedgerEntry {
    /// Reactors that have lanes of it.
    pub shares: Shares,
    /// Its newest windows on all reactors, as they said last: see [`Newest`].
    newest: [AtomicU64; 9],
    /// What it saved: operations, bytes.
    pub credit: [TokenBucket; 2],
    /// What of its base a reactor had no use for, until another has: a window's at most.
    pub unused: [TokenBucket; 2],
    /// So many windows' base did reactors have on which it was at work, in 1/65536 of one. Only grows.
    had: AtomicU64,
}

/// What a tenant's newest window was like.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Newest {
    /// What it was given, a second.
    pub granted: Rate,
    /// What it used in the one that ended last, a second.
    pub used: Rate,
    /// Of that, what was above its base, a second.
    pub above: Rate,
    /// I/Os that waited at its end.
    pub waited: u64,
    /// Time of processors and devices that its I/Os cost in it as they are calibrated, ns a second.
    pub cost_ns: u64,
    /// The same as it counted, corrected.
    pub corrected_ns: u64,
}

impl Newest {
    /// Granted, used, above the base (each operations and bytes), waiting, costs, corrected costs.
    #[must_use]
    pub fn words(&self) -> [u64; 9] {
        let (granted, used, above) = (&self.granted, &self.used, &self.above);
        [
            granted.iops,
            granted.bytes,
            used.iops,
            used.bytes,
            above.iops,
            above.bytes,
            self.waited,
            self.cost_ns,
            self.corrected_ns,
        ]
    }
}

/// See the module's text.
#[derive(Debug)]
pub struct Ledger {
    entries: Box<[LedgerEntry]>,
    awake: AtomicU32,
    /// Entitlements of all reactors' tenants in a window, of each shared resource.
    entitlement: [AtomicU64; SHARED],
}

impl Ledger {
    /// For so many tenants.
    #[must_use]
    pub fn new(tenants: usize) -> Self {
        Self {
            entries: (0..tenants).map(|_| LedgerEntry::default()).collect(),
            awake: AtomicU32::new(0),
            entitlement: Default::default(),
        }
    }

    /// A tenant's.
    #[inline]
    #[must_use]
    pub fn entry(&self, tenant: usize) -> &LedgerEntry {
        &self.entries[tenant]
    }

    /// How many tenants can be.
    #[must_use]
    pub fn tenants(&self) -> usize {
        self.entries.len()
    }

    /// A reactor begins to work (`true`), or sleeps.
    pub fn wake(&self, awake: bool) {
        if awake {
            self.awake.fetch_add(1, Relaxed);
        } else {
            self.awake.fetch_sub(1, Relaxed);
        }
    }

    /// So many work, at least the one that asks.
    #[must_use]
    pub fn awake(&self) -> u32 {
        self.awake.load(Relaxed).max(1)
    }

    /// It rests there: withdraws the demand that the reactor published.
    pub fn rest(&self, tenant: usize, published: &mut Published) {
        self.entry(tenant).shares.rest(published);
    }

    /// Replaces this reactor's `published` entitlement to a resource by `new`. Returns the sum of all reactors.
    #[inline]
    pub fn publish_entitlement(&self, resource: usize, published: &mut u64, new: u64) -> u64 {
        let sum = publish(&self.entitlement[resource], *published, new);
        *published = new;
        sum.max(new)
    }
}

/// What a reactor publishes of its part of a tenant, in parts of the tenant's base ([`WHOLE`]).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Published {
    /// What its volumes want, without what is promised to them.
    pub demand: u64,
    /// What its volumes have of the base for themselves, as far as they want it.
    pub promised: u64,
}

fn publish(sum: &AtomicU64, old: u64, new: u64) -> u64 {
    let change = new.wrapping_sub(old);
    match change {
        0 => sum.load(Relaxed),
        _ => sum.fetch_add(change, Relaxed).wrapping_add(change),
    }
}

/// Demand as large as the whole base.
pub const WHOLE: u64 = 1 << 16;

impl LedgerEntry {
    /// What can be saved is what this budget says.
    pub fn set_budget(&self, budget: &Budget) {
        if let Burst::Credit { seconds } = budget.how {
            let [ops, bytes] = &self.credit;
            let cap = |rate: u64| rate.saturating_mul(seconds.into());
            ops.set_cap(cap(budget.base.iops).saturating_mul(PARTS as u64));
            bytes.set_cap(cap(budget.base.bytes));
        }
    }

    /// A reactor on which it is at work has this share of so many windows' base.
    #[inline]
    pub fn have(&self, share: f32, windows: u64) {
        let each = (share * WHOLE as f32) as u64;
        self.had.fetch_add(each.saturating_mul(windows), Relaxed);
    }

    /// What those had so far: who rests remembers it.
    #[must_use]
    pub fn had(&self) -> u64 {
        self.had.load(Relaxed)
    }

    /// In windows, what a reactor on which it rested for so many has of their base, since others had so much: an equal part of what
    /// none had that was at work, whatever is wanted at this moment.
    #[must_use]
    pub fn idle(&self, windows: u64, since: u64) -> f64 {
        let had = self.had().wrapping_sub(since) as f64 / WHOLE as f64;
        (windows as f64 - had).max(0.0) / self.shares.takers() as f64
    }

    /// It had saved so much before, operations and bytes, and has this budget now. Says what it has of that.
    pub fn save(&self, budget: &Budget, [ops, bytes]: [u64; 2]) -> [u64; 2] {
        self.set_budget(budget);
        self.credit[0].put(ops.saturating_mul(PARTS as u64));
        self.credit[1].put(bytes);
        [self.credit[0].has() / PARTS as u64, self.credit[1].has()]
    }

    /// This reactor said `published`, and it is `new` now. Says what all do together.
    pub fn publish_newest(&self, published: &mut Newest, new: Newest) -> Newest {
        let (old, new) = (std::mem::replace(published, new).words(), new.words());
        let sum = |at: usize| publish(&self.newest[at], old[at], new[at]);
        let rate = |at: usize| Rate {
            iops: sum(at),
            bytes: sum(at + 1),
        };
        Newest {
            granted: rate(0),
            used: rate(2),
            above: rate(4),
            waited: sum(6),
            cost_ns: sum(7),
            corrected_ns: sum(8),
        }
    }
}

impl Shares {
    /// There is one more that has a part (`true`), or one less: a reactor that has lanes of this tenant.
    pub fn attach(&self, attached: bool) {
        if attached {
            self.takers.fetch_add(1, Relaxed);
        } else {
            self.takers.fetch_sub(1, Relaxed);
        }
    }

    /// More than one has a part: each must publish its demand.
    #[inline]
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.takers.load(Relaxed) > 1
    }

    /// Replaces `published` by `new`. Returns this reactor's share of the tenant (0 to 1), where all count as `beginner` of a base besides, each
    /// as its part. A single reactor has all of it and publishes nothing.
    #[inline]
    pub fn share(&self, published: &mut Published, new: Published, beginner: f32) -> f32 {
        if !self.is_shared() {
            return 1.0;
        }
        self.publish(published, new);
        let part = self.part(published, beginner);
        let promised = self.promised.load(Relaxed);
        if promised == 0 {
            return part;
        }
        let whole = promised.max(new.promised).max(WHOLE);
        let rest = whole.saturating_sub(promised) as f32;
        (new.promised as f32 + rest * part) / whole as f32
    }

    fn takers(&self) -> u64 {
        u64::from(self.takers.load(Relaxed)).max(1)
    }

    fn part(&self, published: &Published, beginner: f32) -> f32 {
        let takers = self.takers();
        let beginner = ((beginner * WHOLE as f32) as u64 / takers).max(1);
        let demand = self.demand.load(Relaxed).max(published.demand) + beginner * takers;
        (published.demand + beginner) as f32 / demand as f32
    }

    /// Replaces `published` by `new`.
    #[inline]
    pub fn publish(&self, published: &mut Published, new: Published) {
        let old = std::mem::replace(published, new);
        publish(&self.demand, old.demand, new.demand);
        publish(&self.promised, old.promised, new.promised);
    }

    /// Withdraws the published demand.
    pub fn rest(&self, published: &mut Published) {
        if *published != Published::default() {
            self.publish(published, Published::default());
        }
    }

    /// The reactor that published this has no part any more.
    pub fn leave(&self, mut published: Published) {
        self.rest(&mut published);
        self.attach(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: f32 = 1.0 / 16.0;

    #[test]
    fn shares_follow_demand_and_make_a_whole() {
        let ledger = Ledger::new(1);
        let entry = &ledger.entry(0).shares;
        let (mut first, mut second) = (Published::default(), Published::default());
        let demand = |demand| Published {
            demand,
            promised: 0,
        };
        entry.attach(true);
        assert_eq!(entry.share(&mut first, demand(WHOLE), FIRST), 1.0);
        entry.attach(true);
        entry.share(&mut first, demand(WHOLE), FIRST);
        let other = entry.share(&mut second, demand(0), FIRST);
        assert!(other > 0.0 && other < 0.1, "{other}");
        // If beginners count as a whole base, each of two does as half of one besides what it wants.
        let third = entry.share(&mut second, demand(0), 1.0);
        assert!((0.25..0.26).contains(&third), "{third}");
        // Both see the same demand: half of it each.
        let other = entry.share(&mut second, demand(WHOLE), FIRST);
        let one = entry.share(&mut first, demand(WHOLE), FIRST);
        assert_eq!((one, other), (0.5, 0.5));
        // One stops: the other has nearly all.
        let one = entry.share(&mut first, demand(0), FIRST);
        let other = entry.share(&mut second, demand(WHOLE), FIRST);
        assert!((one + other - 1.0).abs() < 0.001, "{one} {other}");
        assert!(other > 0.9);
        // It is gone: all is the other's, and of the next that comes it is not counted.
        entry.leave(first);
        assert_eq!(entry.share(&mut second, demand(WHOLE), FIRST), 1.0);
        entry.attach(true);
        let (one, other) = (
            entry.share(&mut Published::default(), demand(WHOLE), FIRST),
            entry.share(&mut second, demand(WHOLE), FIRST),
        );
        assert_eq!((one, other), (0.5, 0.5));
        // A third has a volume with half of the base for itself: the others share the rest.
        entry.attach(true);
        let mut third = Published::default();
        let new = Published {
            demand: 0,
            promised: WHOLE / 2,
        };
        let its = entry.share(&mut third, new, FIRST);
        assert!((0.5..0.52).contains(&its), "{its}");
        let other = entry.share(&mut second, demand(WHOLE), FIRST);
        assert!((0.23..0.25).contains(&other), "{other}");
        // More than all is promised: none has more than its part of it.
        let more = Published {
            demand: WHOLE,
            promised: WHOLE * 3 / 2,
        };
        let other = entry.share(&mut second, more, FIRST);
        let its = entry.share(&mut third, new, FIRST);
        assert_eq!((other, its), (0.75, 0.25));
    }

    #[test]
    fn an_account_is_never_below_nothing_nor_above_its_cap() {
        let bucket = TokenBucket::default();
        bucket.set_cap(1000);
        assert_eq!(bucket.draw(1), 0);
        bucket.put(600);
        bucket.put(u64::MAX);
        assert_eq!(bucket.has(), 1000);
        assert_eq!(bucket.draw(300), 300);
        assert_eq!(bucket.draw(u64::MAX), 700);
        assert_eq!((bucket.has(), bucket.draw(5)), (0, 0));
        bucket.put(900);
        bucket.set_cap(100);
        assert_eq!((bucket.has(), bucket.cap()), (100, 100));
    }

    #[test]
    fn what_was_saved_before_is_there_once() {
        let ledger = Ledger::new(1);
        let rate = Rate {
            iops: 100,
            bytes: 1 << 20,
        };
        let budget = Budget {
            base: rate,
            burst: rate,
            how: Burst::Credit { seconds: 60 },
        };
        let entry = ledger.entry(0);
        assert_eq!(entry.save(&budget, [500, 7000]), [500, 7000]);
        let has = || [entry.credit[0].has() / PARTS as u64, entry.credit[1].has()];
        assert_eq!(has(), [500, 7000]);
        // And no more than can be saved.
        assert_eq!(entry.save(&budget, [u64::MAX; 2]), [6000, 60 << 20]);
        assert_eq!(has(), [6000, 60 << 20]);
    }
}
