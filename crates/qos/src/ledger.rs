//! Sums that reactors share to divide a tenant's budget.
//!
//! Once a window, a reactor publishes the change of a tenant's demand. The same atomic instruction
//! returns the sum of all reactors, from which the reactor computes its share. There is no lock. A
//! volume's own base stays with its reactor. Processors aren't shared.

use crate::budget::{Budget, Burst, Rate};
use crate::credit::TokenBucket;
use crate::resources::{PARTS, SHARED};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Sums that divide a budget. `takers` counts reactors with lanes of the tenant.
#[derive(Default, Debug)]
pub struct Shares {
    /// In 1/65536 of the base.
    demand: AtomicU64,
    /// Own bases of volumes, in 1/65536 of the base.
    promised: AtomicU64,
    takers: AtomicU32,
}

/// A tenant's entry, in its own cache lines.
#[derive(Default, Debug)]
#[repr(align(128))]
pub struct LedgerEntry {
    /// The sums that divide its budget.
    pub shares: Shares,
    /// The sums of all reactors' [`Newest`].
    newest: [AtomicU64; 9],
    /// Credit: operations, bytes.
    pub credit: [TokenBucket; 2],
    /// Base that a reactor left to others: at most one window's.
    pub unused: [TokenBucket; 2],
    /// Base that working reactors received, in 1/65536 of a window's. Only grows.
    had: AtomicU64,
}

/// A tenant's newest window, in rates per second.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Newest {
    /// The allocation.
    pub granted: Rate,
    /// The use in the last complete window.
    pub used: Rate,
    /// The part of `used` above the base.
    pub above: Rate,
    /// I/Os waiting at its end.
    pub waited: u64,
    /// Processor and device time by calibrated costs.
    pub cost_ns: u64,
    /// Processor and device time by corrected costs.
    pub corrected_ns: u64,
}

impl Newest {
    /// All fields in order.
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

/// All tenants' entries.
#[derive(Debug)]
pub struct Ledger {
    entries: Box<[LedgerEntry]>,
    awake: AtomicU32,
    /// Sum of all reactors' entitlements per window.
    entitlement: [AtomicU64; SHARED],
}

impl Ledger {
    /// A ledger for this many tenants.
    #[must_use]
    pub fn new(tenants: usize) -> Self {
        Self {
            entries: (0..tenants).map(|_| LedgerEntry::default()).collect(),
            awake: AtomicU32::new(0),
            entitlement: Default::default(),
        }
    }

    /// A tenant's entry.
    #[inline]
    #[must_use]
    pub fn entry(&self, tenant: usize) -> &LedgerEntry {
        &self.entries[tenant]
    }

    /// The number of tenants it can hold.
    #[must_use]
    pub fn tenants(&self) -> usize {
        self.entries.len()
    }

    /// Counts a reactor that starts or stops working.
    pub fn wake(&self, awake: bool) {
        if awake {
            self.awake.fetch_add(1, Relaxed);
        } else {
            self.awake.fetch_sub(1, Relaxed);
        }
    }

    /// Working reactors, at least 1.
    #[must_use]
    pub fn awake(&self) -> u32 {
        self.awake.load(Relaxed).max(1)
    }

    /// Withdraws the demand of an idle tenant.
    pub fn rest(&self, tenant: usize, published: &mut Published) {
        self.entry(tenant).shares.rest(published);
    }

    /// Replaces this reactor's entitlement to a resource; returns the sum of all.
    #[inline]
    pub fn publish_entitlement(&self, resource: usize, published: &mut u64, new: u64) -> u64 {
        let sum = publish(&self.entitlement[resource], *published, new);
        *published = new;
        sum.max(new)
    }
}

/// A reactor's demand, in parts of the base ([`WHOLE`]).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Published {
    /// Demand of volumes, beyond their own bases.
    pub demand: u64,
    /// Own bases of volumes, as far as they need them.
    pub promised: u64,
}

fn publish(sum: &AtomicU64, old: u64, new: u64) -> u64 {
    let change = new.wrapping_sub(old);
    match change {
        0 => sum.load(Relaxed),
        _ => sum.fetch_add(change, Relaxed).wrapping_add(change),
    }
}

/// A demand of one whole base.
pub const WHOLE: u64 = 1 << 16;

impl LedgerEntry {
    /// Sets the caps of credit.
    pub fn set_budget(&self, budget: &Budget) {
        if let Burst::Credit { seconds } = budget.how {
            let [ops, bytes] = &self.credit;
            let cap = |rate: u64| rate.saturating_mul(seconds.into());
            ops.set_cap(cap(budget.base.iops).saturating_mul(PARTS as u64));
            bytes.set_cap(cap(budget.base.bytes));
        }
    }

    /// Counts base that a working reactor received.
    #[inline]
    pub fn have(&self, share: f32, windows: u64) {
        let each = (share * WHOLE as f32) as u64;
        self.had.fetch_add(each.saturating_mul(windows), Relaxed);
    }

    /// Base that working reactors received.
    #[must_use]
    pub fn had(&self) -> u64 {
        self.had.load(Relaxed)
    }

    /// The idle accrual of a reactor, in windows: an equal part of what no reactor received since
    /// `since`.
    #[must_use]
    pub fn idle(&self, windows: u64, since: u64) -> f64 {
        let had = self.had().wrapping_sub(since) as f64 / WHOLE as f64;
        (windows as f64 - had).max(0.0) / self.shares.takers() as f64
    }

    /// Sets the caps and adds credit from an earlier engine; returns all credit.
    pub fn save(&self, budget: &Budget, [ops, bytes]: [u64; 2]) -> [u64; 2] {
        self.set_budget(budget);
        self.credit[0].put(ops.saturating_mul(PARTS as u64));
        self.credit[1].put(bytes);
        [self.credit[0].has() / PARTS as u64, self.credit[1].has()]
    }

    /// Replaces this reactor's window; returns the sum of all.
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
    /// Counts a reactor that gains or loses its lanes of the tenant.
    pub fn attach(&self, attached: bool) {
        if attached {
            self.takers.fetch_add(1, Relaxed);
        } else {
            self.takers.fetch_sub(1, Relaxed);
        }
    }

    /// Whether several reactors serve the tenant.
    #[inline]
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.takers.load(Relaxed) > 1
    }

    /// Replaces this reactor's demand; returns its share (0 to 1). `beginner` is an extra demand in
    /// bases, split over the tenant's reactors, so that an idle one keeps a small share. A single
    /// reactor publishes nothing.
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

    /// Replaces this reactor's demand.
    #[inline]
    pub fn publish(&self, published: &mut Published, new: Published) {
        let old = std::mem::replace(published, new);
        publish(&self.demand, old.demand, new.demand);
        publish(&self.promised, old.promised, new.promised);
    }

    /// Withdraws this reactor's demand.
    pub fn rest(&self, published: &mut Published) {
        if *published != Published::default() {
            self.publish(published, Published::default());
        }
    }

    /// Withdraws a reactor that no longer serves the tenant.
    pub fn detach(&self, mut published: Published) {
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
        let third = entry.share(&mut second, demand(0), 1.0);
        assert!((0.25..0.26).contains(&third), "{third}");
        let other = entry.share(&mut second, demand(WHOLE), FIRST);
        let one = entry.share(&mut first, demand(WHOLE), FIRST);
        assert_eq!((one, other), (0.5, 0.5));
        let one = entry.share(&mut first, demand(0), FIRST);
        let other = entry.share(&mut second, demand(WHOLE), FIRST);
        assert!((one + other - 1.0).abs() < 0.001, "{one} {other}");
        assert!(other > 0.9);
        entry.detach(first);
        assert_eq!(entry.share(&mut second, demand(WHOLE), FIRST), 1.0);
        entry.attach(true);
        let (one, other) = (
            entry.share(&mut Published::default(), demand(WHOLE), FIRST),
            entry.share(&mut second, demand(WHOLE), FIRST),
        );
        assert_eq!((one, other), (0.5, 0.5));
        // A third volume owns half of the base; the others share the rest.
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
        // Promises exceed the base: each gets a part.
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
    fn earlier_credit_is_added_up_to_the_cap() {
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
        assert_eq!(entry.save(&budget, [u64::MAX; 2]), [6000, 60 << 20]);
        assert_eq!(has(), [6000, 60 << 20]);
    }
}
