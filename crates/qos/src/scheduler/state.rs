//! State of lanes and tenants.

use super::each::Each;
use crate::budget::Rate;
use crate::ledger::{LedgerEntry, Newest, Published};
use crate::resources::{PARTS, Resource, ResourceVector, SHARED};

pub(super) const NOBODY: u32 = u32::MAX;

/// Fields used by each I/O come first.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(super) struct Lane {
    /// Left in this window.
    pub(super) left: ResourceVector,
    pub(super) tenant: u32,
    pub(super) waiters: u32,
    pub(super) limited: bool,
    /// Allocated in this window, less amounts taken away.
    pub(super) given: ResourceVector,
    pub(super) waiting: ResourceVector,
    /// The volume's own base per window, like `limit`.
    pub(super) base: ResourceVector,
    pub(super) limit: ResourceVector,
    /// Unused accrual of the own base: operations, bytes.
    pub(super) entitlement: [i32; 2],
    /// The amount it gets before the rest is divided equally.
    pub(super) promise: ResourceVector,
    /// What its limit allows now, savings included. Below zero: debt.
    pub(super) room: ResourceVector,
    /// Last use, and waiting I/Os.
    pub(super) demand: ResourceVector,
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
    /// Use in this window, without debt of its own resources.
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

    /// Pays an idle tenant's debt of shared resources from `pays`.
    pub(super) fn pay(&mut self, pays: &mut ResourceVector) {
        let left = &mut self.left;
        let debt = ResourceVector::ZERO.minus(&left.min(&ResourceVector::ZERO));
        let paid = debt.min(pays);
        *left = left.plus(&paid);
        self.given = self.given.plus(&paid);
        pays.sub(&paid);
    }

    /// Begins a window; returns savings that it can't keep.
    #[inline]
    pub(super) fn begin(&mut self, given: &ResourceVector) -> Each {
        let left = &mut self.left;
        let kept = left.min(given);
        let lost = Each::shared(&left.minus(&kept));
        *left = given.plus(&kept);
        self.given = given.plus(&kept.shared());
        lost
    }

    #[inline]
    pub(super) fn may(&self) -> ResourceVector {
        self.room.max(&ResourceVector::ZERO)
    }

    #[inline]
    pub(super) fn waits_no_more(&mut self, cost: &ResourceVector) {
        self.waiters = self.waiters.saturating_sub(1);
        // The sum saturates, so restart at zero.
        match self.waiters {
            0 => self.waiting = ResourceVector::ZERO,
            _ => self.waiting.sub(cost),
        }
    }
}

#[derive(Clone, Default, Debug)]
#[repr(align(64))]
pub(super) struct TenantShare {
    pub(super) base: ResourceVector,
    pub(super) burst: ResourceVector,
    pub(super) metered: bool,
    pub(super) guaranteed: bool,
    pub(super) active: bool,
    pub(super) is_known: bool,
    /// Saved base when the window began.
    pub(super) entitlement: ResourceVector,
    pub(super) spare: ResourceVector,
    pub(super) whole: ResourceVector,
    pub(super) extra: ResourceVector,
    pub(super) allocated: Each,
    pub(super) demand: Each,
    pub(super) shared_base: Each,
    pub(super) shared_burst: Each,
    pub(super) share: f32,
    pub(super) published: Published,
    /// No use in the last window, and none waiting.
    pub(super) rests: bool,
    /// Used more than its entitlement in the last window.
    pub(super) bursts: bool,
    /// Its only lane, or [`NOBODY`].
    pub(super) only: u32,
    pub(super) above: AboveBase,
    /// Lower bound of the use in this window.
    pub(super) found: ResourceVector,
    pub(super) newest: Newest,
    pub(super) earned: Earned,
    pub(super) lanes: Vec<u32>,
    pub(super) statistics: TenantStatistics,
}

#[derive(Clone, Default, Debug)]
pub(super) struct Earned {
    /// Window of the last work or accrual.
    pub(super) window: u64,
    /// Base that others had used by then ([`LedgerEntry::had`]).
    pub(super) had: u64,
}

/// Resources above the base: operations, then bytes.
#[derive(Clone, Default, Debug)]
pub(super) struct AboveBase {
    /// Allowed in this window, savings included.
    pub(super) saved: [u64; 2],
    pub(super) drawn: [u64; 2],
    pub(super) of_credit: bool,
    /// Use beyond all limits, paid before anything is saved.
    pub(super) debt: [u64; 2],
    /// Carried fractions, of the base and above it.
    pub(super) fractions: [[f32; 2]; 2],
}

impl TenantShare {
    pub(super) fn count_lanes(&mut self) {
        self.only = match self.lanes[..] {
            [lane] => lane,
            _ => NOBODY,
        };
    }

    /// Starts idle accrual at this window.
    pub(super) fn counts_from(&mut self, window: u64, entry: &LedgerEntry) {
        (self.earned.window, self.earned.had) = (window, entry.had());
    }

    /// One window's accrual of own resources.
    pub(super) fn accrual(&self, own: usize) -> i32 {
        match self.metered {
            true => self.burst.0[own],
            false => self.base.0[own],
        }
    }

    pub(super) fn drawn_credit(&self, own: usize) -> u64 {
        self.above.drawn[own] * u64::from(self.above.of_credit)
    }
}

/// A tenant's statistics: sums, and the last window.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct TenantStatistics {
    /// Used operations, in parts of 1/65536.
    pub used_parts: u64,
    /// Used bytes.
    pub used_bytes: u64,
    /// Metered operations, in parts.
    pub metered_parts: u64,
    /// Metered bytes.
    pub metered_bytes: u64,
    /// I/Os that waited.
    pub waited: u64,
    /// I/Os begun from bursting tenants' allocations.
    pub taken: u64,
    /// Others' I/Os begun from its allocation.
    pub lost: u64,
    /// I/Os begun from the reserve.
    pub from_reserve: u64,
    /// Windows with use above its entitlement.
    pub burst_windows: u64,
    /// Windows with use.
    pub active_windows: u64,
    /// Processor and device time by calibrated costs, in ns.
    pub cost_ns: u64,
    /// Processor and device time by corrected costs, in ns.
    pub corrected_ns: u64,
    /// Saved operations, in parts.
    pub credit_parts: u64,
    /// Saved bytes.
    pub credit_bytes: u64,
    /// Last window: allocation.
    pub given: ResourceVector,
    /// Last window: use.
    pub used: ResourceVector,
    /// Last window: use above its entitlement, in parts and bytes.
    pub above: [u64; 2],
    /// Last window: calibrated and corrected costs, in ns.
    pub costs: [u64; 2],
    /// Windows that one refill ended; above 1 if the reactor was late.
    pub passed: u64,
    /// I/Os waiting at the end of the last window.
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

    /// The last allocation per second, or less if shared resources allow fewer I/Os of the last
    /// window's mix.
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
