//! The state of a lane and of a tenant.

use super::each::Each;
use crate::budget::Rate;
use crate::ledger::{LedgerEntry, Newest, Published};
use crate::resources::{PARTS, Resource, ResourceVector, SHARED};

pub(super) const NOBODY: u32 = u32::MAX;

/// One lane. What an I/O looks at comes first.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(super) struct Lane {
    /// What is left of this window.
    pub(super) left: ResourceVector,
    pub(super) tenant: u32,
    pub(super) waiters: u32,
    pub(super) limited: bool,
    /// The window's grant, less what was taken away.
    pub(super) given: ResourceVector,
    pub(super) waiting: ResourceVector,
    /// The volume's own base, in a window; so is `limit`.
    pub(super) base: ResourceVector,
    pub(super) limit: ResourceVector,
    /// Unused accrual of the volume's own base: operations, bytes.
    pub(super) entitlement: [i32; 2],
    /// What it has of this window before equal parts.
    pub(super) promise: ResourceVector,
    /// What its limit allows in this window, savings included. Below zero: debt.
    pub(super) room: ResourceVector,
    /// Use of the last window, and what waits.
    pub(super) demand: ResourceVector,
    /// Use in this window beyond the grant.
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

    /// Pays an idle tenant's debt of shared resources out of `pays`.
    pub(super) fn pay(&mut self, pays: &mut ResourceVector) {
        let left = &mut self.left;
        let debt = ResourceVector::ZERO.minus(&left.min(&ResourceVector::ZERO));
        let paid = debt.min(pays);
        *left = left.plus(&paid);
        self.given = self.given.plus(&paid);
        pays.sub(&paid);
    }

    /// Begins a window. Returns the savings that it may not keep.
    #[inline]
    pub(super) fn begin(&mut self, given: &ResourceVector) -> Each {
        let left = &mut self.left;
        let kept = left.min(given);
        let lost = Each::shared(&left.minus(&kept));
        *left = given.plus(&kept);
        self.given = given.plus(&kept.shared());
        lost
    }

    /// What its limit allows.
    #[inline]
    pub(super) fn may(&self) -> ResourceVector {
        self.room.max(&ResourceVector::ZERO)
    }

    #[inline]
    pub(super) fn waits_no_more(&mut self, cost: &ResourceVector) {
        self.waiters = self.waiters.saturating_sub(1);
        // The sum saturates, so it starts again at zero.
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
    /// The saved base at the window's beginning, of its own resources.
    pub(super) entitlement: ResourceVector,
    /// Granted to it, but to no lane yet.
    pub(super) spare: ResourceVector,
    /// The window's grant before it is divided.
    pub(super) whole: ResourceVector,
    pub(super) extra: ResourceVector,
    pub(super) allocated: Each,
    pub(super) demand: Each,
    pub(super) shared_base: Each,
    pub(super) shared_burst: Each,
    /// This reactor's part of the tenant's demand.
    pub(super) share: f32,
    pub(super) published: Published,
    /// Nothing was used in the last window, and nothing waits.
    pub(super) rests: bool,
    /// It used more than its entitlement in the last window.
    pub(super) bursts: bool,
    /// Its only lane, else [`NOBODY`].
    pub(super) only: u32,
    pub(super) above: AboveBase,
    /// A lower bound of this window's use.
    pub(super) found: ResourceVector,
    pub(super) newest: Newest,
    pub(super) earned: Earned,
    pub(super) lanes: Vec<u32>,
    pub(super) statistics: TenantStatistics,
}

/// Where a tenant's idle accrual begins.
#[derive(Clone, Default, Debug)]
pub(super) struct Earned {
    /// The window of its last work, or last accrual.
    pub(super) window: u64,
    /// What others had used of its base by then ([`LedgerEntry::had`]).
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
    /// Fractions that are carried on, of the base and above it.
    pub(super) fractions: [[f32; 2]; 2],
}

impl TenantShare {
    pub(super) fn count_lanes(&mut self) {
        self.only = match self.lanes[..] {
            [lane] => lane,
            _ => NOBODY,
        };
    }

    /// Begins idle accrual at this window.
    pub(super) fn counts_from(&mut self, window: u64, entry: &LedgerEntry) {
        (self.earned.window, self.earned.had) = (window, entry.had());
    }

    /// A window's accrual of its own resources, without savings.
    pub(super) fn accrual(&self, own: usize) -> i32 {
        match self.metered {
            true => self.burst.0[own],
            false => self.base.0[own],
        }
    }

    /// The credit drawn for this window.
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
    /// Metered operations above the base, in parts.
    pub metered_parts: u64,
    /// Metered bytes above the base.
    pub metered_bytes: u64,
    /// I/Os that had to wait.
    pub waited: u64,
    /// I/Os that began out of a bursting tenant's grant.
    pub taken: u64,
    /// Others' I/Os that began out of its grant.
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
    /// The last window's grant.
    pub given: ResourceVector,
    /// The last window's use.
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

    /// The last window's grant a second, or less if shared resources limit I/Os like its last.
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
