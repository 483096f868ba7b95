//! What is known of a lane and of a tenant.

use super::each::Each;
use crate::budget::Rate;
use crate::ledger::{LedgerEntry, Newest, Published};
use crate::resources::{PARTS, Resource, ResourceVector, SHARED};

pub(super) const NOBODY: u32 = u32::MAX;

/// One lane. What an I/O looks at comes first.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(super) struct Lane {
    /// What may still be used in this window.
    pub(super) left: ResourceVector,
    pub(super) tenant: u32,
    pub(super) waiters: u32,
    pub(super) limited: bool,
    /// What was given at its beginning, less what was taken away.
    pub(super) given: ResourceVector,
    pub(super) waiting: ResourceVector,
    /// Its volume's own part of the tenant's base, in a window.
    pub(super) base: ResourceVector,
    pub(super) limit: ResourceVector,
    /// Of what its volume's own base brought, what it did not use: operations, bytes.
    pub(super) entitlement: [i32; 2],
    /// Of that, what was divided to it for this window, and what is shared with it: before its siblings had anything.
    pub(super) promise: ResourceVector,
    /// What its limit allows in this window, savings included. Below zero: debt.
    pub(super) room: ResourceVector,
    /// Used in the last window, and what waits: what the next is divided by.
    pub(super) demand: ResourceVector,
    /// Used in this window beyond what was given: out of what was not its own.
    pub(super) beyond: ResourceVector,
}

impl Default for Lane {
    fn default() -> Self {
        Self {
            left: ResourceVector::ZERO,
            tenant: NOBODY,
            waiters: 0,
            limited: false,
            given: ResourceVector::ZERO,
            waiting: ResourceVector::ZERO,
            base: ResourceVector::ZERO,
            limit: ResourceVector::PLENTY,
            entitlement: [0; 2],
            promise: ResourceVector::ZERO,
            room: ResourceVector::PLENTY,
            demand: ResourceVector::ZERO,
            beyond: ResourceVector::ZERO,
        }
    }
}

impl Lane {
    /// Used in this window. An I/O that is larger than what a window gives is used by parts, as later windows pay for it.
    #[inline]
    pub(super) fn used(&self) -> ResourceVector {
        let left = self
            .left
            .shared()
            .plus(&self.left.own().max(&ResourceVector::ZERO));
        self.given.minus(&left).plus(&self.beyond)
    }

    pub(super) fn debt(&self) -> ResourceVector {
        ResourceVector::ZERO.minus(&self.left.own().min(&ResourceVector::ZERO))
    }

    /// Pays its debt of shared resources, as far as there is so much. Its tenant rests.
    pub(super) fn pay(&mut self, pays: &mut ResourceVector) {
        let left = &mut self.left;
        let debt = ResourceVector::ZERO.minus(&left.min(&ResourceVector::ZERO));
        let paid = debt.min(pays);
        *left = left.plus(&paid);
        self.given = self.given.plus(&paid);
        pays.sub(&paid);
    }

    /// A window begins, with so much and what was saved. Says what of that it may not keep.
    #[inline]
    pub(super) fn begin(&mut self, given: &ResourceVector) -> Each {
        let left = &mut self.left;
        let kept = left.min(given);
        let lost = Each::shared(&left.minus(&kept));
        *left = given.plus(&kept);
        self.given = given.plus(&kept.shared());
        lost
    }

    /// What its limit allows to be given to it.
    #[inline]
    pub(super) fn may(&self) -> ResourceVector {
        self.room.max(&ResourceVector::ZERO)
    }

    #[inline]
    pub(super) fn waits_no_more(&mut self, cost: &ResourceVector) {
        self.waiters = self.waiters.saturating_sub(1);
        // Of many that are large, the sum may be cut; of none, it is nothing.
        match self.waiters {
            0 => self.waiting = ResourceVector::ZERO,
            _ => self.waiting.sub(cost),
        }
    }
}

#[derive(Clone, Default, Debug)]
#[repr(align(64))]
pub(super) struct Tenant {
    pub(super) base: ResourceVector,
    pub(super) burst: ResourceVector,
    pub(super) metered: bool,
    /// Its base comes before those of whom this is not said.
    pub(super) guaranteed: bool,
    pub(super) active: bool,
    pub(super) is_known: bool,
    /// What it may still use as its base, saved from earlier windows too; only what is its own. At a window's beginning.
    pub(super) entitlement: ResourceVector,
    /// Given to it and to no lane of it yet.
    pub(super) spare: ResourceVector,
    /// Given to it for this window, before its lanes had their parts.
    pub(super) whole: ResourceVector,
    pub(super) extra: ResourceVector,
    pub(super) allocated: Each,
    pub(super) demand: Each,
    /// Of what is shared, its base and its burst limit, as in `base` and `burst`.
    pub(super) shared_base: Each,
    pub(super) shared_burst: Each,
    /// Its part of the tenant: this reactor's demand by all reactors'.
    pub(super) share: f32,
    pub(super) published: Published,
    /// It used nothing in the last window, and nothing waits.
    pub(super) rests: bool,
    /// It used more than its entitlement in the last window.
    pub(super) bursts: bool,
    /// Its lane, if that is the only one: [`NOBODY`] else.
    pub(super) only: u32,
    pub(super) above: AboveBase,
    /// So much was used in this window at least, as it was found last.
    pub(super) found: ResourceVector,
    /// What the ledger has of its newest window.
    pub(super) newest: Newest,
    pub(super) earned: Earned,
    pub(super) lanes: Vec<u32>,
    pub(super) statistics: TenantStatistics,
}

/// Up to when a tenant's idle time is credited to it.
#[derive(Clone, Default, Debug)]
pub(super) struct Earned {
    /// The window of its last work, or of the last sum.
    pub(super) window: u64,
    /// What of its base others had used by then ([`LedgerEntry::had`]).
    pub(super) had: u64,
}

/// What a tenant has beyond its base. All are operations, then bytes.
#[derive(Clone, Default, Debug)]
pub(super) struct AboveBase {
    /// What it may use in this window, savings included.
    pub(super) saved: [u64; 2],
    pub(super) drawn: [u64; 2],
    pub(super) of_credit: bool,
    /// Use beyond every limit: it is paid before anything is saved.
    pub(super) debt: [u64; 2],
    /// Parts of less than one that windows left over, of the base and above it.
    pub(super) fractions: [[f32; 2]; 2],
}

impl Tenant {
    pub(super) fn count_lanes(&mut self) {
        self.only = match self.lanes[..] {
            [lane] => lane,
            _ => NOBODY,
        };
    }

    /// From this window on it earns as one that rests.
    pub(super) fn counts_from(&mut self, window: u64, entry: &LedgerEntry) {
        (self.earned.window, self.earned.had) = (window, entry.had());
    }

    /// What a window accrues to it of its own, without savings and whatever others do.
    pub(super) fn accrual(&self, own: usize) -> i32 {
        match self.metered {
            true => self.burst.0[own],
            false => self.base.0[own],
        }
    }

    /// What lies ready for this window of its credit.
    pub(super) fn drawn_credit(&self, own: usize) -> u64 {
        self.above.drawn[own] * u64::from(self.above.of_credit)
    }
}

/// Statistics of a tenant: sums since the beginning, except of the last window.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct TenantStatistics {
    /// Operations used, in parts of 1/65536.
    pub used_parts: u64,
    /// Bytes used.
    pub used_bytes: u64,
    /// Of them above the base: what is metered.
    pub metered_parts: u64,
    /// The same of bytes.
    pub metered_bytes: u64,
    /// I/Os that had to wait.
    pub waited: u64,
    /// I/Os that began out of what a bursting tenant was given.
    pub taken: u64,
    /// I/Os of others that began out of what this one was given.
    pub lost: u64,
    /// I/Os that began out of the reserve.
    pub from_reserve: u64,
    /// Windows in which it used more than its entitlement.
    pub burst_windows: u64,
    /// Windows in which it used anything.
    pub active_windows: u64,
    /// Time of processors and devices that its I/Os cost as they are calibrated, ns.
    pub cost_ns: u64,
    /// The same as it counted, corrected.
    pub corrected_ns: u64,
    /// What it has saved: operations, in parts.
    pub credit_parts: u64,
    /// What it has saved: bytes.
    pub credit_bytes: u64,
    /// The last window: what was given, and what was used of it.
    pub given: ResourceVector,
    /// The last window.
    pub used: ResourceVector,
    /// Of that, what exceeded its entitlement: operations, in parts, and bytes.
    pub above: [u64; 2],
    /// Time of processors and devices that it cost, as calibrated and as it counted, ns.
    pub costs: [u64; 2],
    /// So many windows ended with it: more than one, if the reactor was late.
    pub passed: u64,
    /// I/Os that waited at its end.
    pub waiting: u64,
}

impl TenantStatistics {
    #[must_use]
    pub(super) fn newest(&self, window_ns: u64) -> Newest {
        let ns = window_ns.saturating_mul(self.passed).max(1) as f64;
        let a_second = |amount: f64| (amount * 1e9 / ns) as u64;
        let rate = |parts: f64, bytes: f64| Rate {
            iops: a_second(parts / f64::from(PARTS)),
            bytes: a_second(bytes),
        };
        let [parts, bytes] = [Resource::Ops, Resource::Bytes].map(|own| f64::from(self.used[own]));
        let [cost_ns, corrected_ns] = self.costs.map(|ns| a_second(ns as f64));
        Newest {
            granted: self.granted(window_ns),
            used: rate(parts, bytes),
            above: rate(self.above[0] as f64, self.above[1] as f64),
            waited: self.waiting,
            cost_ns,
            corrected_ns,
        }
    }

    /// What the last window gave it, a second: as its budget says, or less, as far as what it was given of something else does
    /// for I/Os like those that it used last.
    #[must_use]
    pub fn granted(&self, window_ns: u64) -> Rate {
        let mut part = f64::MAX;
        for resource in 0..SHARED {
            let used = self.used.0[resource];
            if used > 0 {
                part = part.min(f64::from(self.given.0[resource]) / f64::from(used));
            }
        }
        let a_second = |own: Resource, each: f64| {
            let like = (f64::from(self.used[own]) * part).max(0.0);
            let given = match self.used[own] {
                0 => f64::from(self.given[own]),
                _ => f64::from(self.given[own]).min(like),
            };
            (given / each * 1e9 / window_ns.max(1) as f64) as u64
        };
        Rate {
            iops: a_second(Resource::Ops, f64::from(PARTS)),
            bytes: a_second(Resource::Bytes, 1.0),
        }
    }
}
