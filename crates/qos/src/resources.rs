//! Amounts of all resources, as a vector of two SSE registers: a check or a charge takes a dozen
//! instructions.
//!
//! Amounts are for one window of at most [`MAX_WINDOW_NS`], so they fit 32 bits.

use std::ops::{Index, IndexMut};

/// The longest window.
pub const MAX_WINDOW_NS: u64 = 10_000_000;
/// Parts of an operation: a small budget has less than one in a window.
pub const PARTS: i32 = 1 << 16;
/// Practically unlimited; the sum of two fits.
pub const PLENTY: i32 = 1 << 29;

/// A resource of the node, or of a budget.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Resource {
    /// Reactor time, in ns.
    Cpu = 0,
    /// Device time for reads, in ns, as if done one at a time.
    DeviceRead = 1,
    /// Device time for writes, in ns, as if done one at a time.
    DeviceWrite = 2,
    /// Bytes from hosts.
    LinkIn = 3,
    /// Bytes to hosts.
    LinkOut = 4,
    /// Operations of the node's software, in [`PARTS`].
    Software = 5,
    /// Operations of a budget, in [`PARTS`].
    Ops = 6,
    /// Bytes of a budget.
    Bytes = 7,
}

/// Number of resources.
pub const COUNT: usize = 8;
/// Number of the node's resources, which come first; the rest are a budget's.
pub const SHARED: usize = 6;

/// The node's resources.
pub const SHARED_RESOURCES: [Resource; SHARED] = [
    Resource::Cpu,
    Resource::DeviceRead,
    Resource::DeviceWrite,
    Resource::LinkIn,
    Resource::LinkOut,
    Resource::Software,
];

impl Resource {
    /// Its name, for people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "processor time",
            Self::DeviceRead => "device reads",
            Self::DeviceWrite => "device writes",
            Self::LinkIn => "link in",
            Self::LinkOut => "link out",
            Self::Software => "software limit",
            Self::Ops => "IOPS",
            Self::Bytes => "bytes/s",
        }
    }
}

/// An amount of each resource.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[repr(C, align(16))]
pub struct ResourceVector(pub [i32; COUNT]);

impl ResourceVector {
    /// No resources.
    pub const ZERO: Self = Self([0; COUNT]);
    /// Practically unlimited.
    pub const PLENTY: Self = Self([PLENTY; COUNT]);

    /// Without overflow checks. Unrolled by hand: not every build does it.
    #[inline(always)]
    fn rest(&self, cost: &Self) -> [i32; COUNT] {
        let sub = |at: usize| self.0[at].wrapping_sub(cost.0[at]);
        [
            sub(0),
            sub(1),
            sub(2),
            sub(3),
            sub(4),
            sub(5),
            sub(6),
            sub(7),
        ]
    }

    /// Subtracts `cost` if all resources suffice.
    #[inline(always)]
    #[must_use]
    pub fn spend(&mut self, cost: &Self) -> bool {
        let rest = self.rest(cost);
        let enough = !is_below_nothing(&rest);
        if enough {
            self.0 = rest;
        }
        enough
    }

    /// Whether all resources suffice.
    #[inline]
    #[must_use]
    pub fn covers(&self, cost: &Self) -> bool {
        let rest = self.rest(cost);
        !is_below_nothing(&rest)
    }

    /// Saturating sum.
    #[inline]
    pub fn add(&mut self, other: &Self) {
        for (own, other) in self.0.iter_mut().zip(&other.0) {
            *own = own.saturating_add(*other);
        }
    }

    #[inline(always)]
    #[must_use]
    pub(crate) fn plus(&self, other: &Self) -> Self {
        let mut sum = *self;
        for (sum, other) in sum.0.iter_mut().zip(&other.0) {
            *sum = sum.wrapping_add(*other);
        }
        sum
    }

    #[inline(always)]
    #[must_use]
    pub(crate) fn minus(&self, other: &Self) -> Self {
        let mut rest = *self;
        for (rest, other) in rest.0.iter_mut().zip(&other.0) {
            *rest = rest.wrapping_sub(*other);
        }
        rest
    }

    /// Difference, at least 0.
    #[inline]
    pub fn sub(&mut self, other: &Self) {
        for (own, other) in self.0.iter_mut().zip(&other.0) {
            *own = own.saturating_sub(*other).max(0);
        }
    }

    /// The smaller of each.
    #[inline]
    #[must_use]
    pub fn min(&self, other: &Self) -> Self {
        let mut least = *self;
        for (own, other) in least.0.iter_mut().zip(&other.0) {
            *own = (*own).min(*other);
        }
        least
    }

    /// The larger of each.
    #[inline]
    #[must_use]
    pub fn max(&self, other: &Self) -> Self {
        let mut most = *self;
        for (own, other) in most.0.iter_mut().zip(&other.0) {
            *own = (*own).max(*other);
        }
        most
    }

    /// Only the node's resources.
    #[inline]
    #[must_use]
    pub fn shared(&self) -> Self {
        let mut part = *self;
        part.0[SHARED..].fill(0);
        part
    }

    /// Only the budget's resources.
    #[inline]
    #[must_use]
    pub fn own(&self) -> Self {
        let mut part = *self;
        part.0[..SHARED].fill(0);
        part
    }

    /// Whether all are 0.
    #[inline]
    #[must_use]
    pub fn is_zero(&self) -> bool {
        *self == Self::ZERO
    }
}

/// By sign bits, in halves, which is fastest.
#[inline(always)]
fn is_below_nothing(amounts: &[i32; COUNT]) -> bool {
    let [a, b, c, d, e, f, g, h] = *amounts;
    let [a, b, c, d] = [a | e, b | f, c | g, d | h];
    (a | c) | (b | d) < 0
}

impl Index<Resource> for ResourceVector {
    type Output = i32;

    #[inline]
    fn index(&self, resource: Resource) -> &i32 {
        &self.0[resource as usize]
    }
}

impl IndexMut<Resource> for ResourceVector {
    #[inline]
    fn index_mut(&mut self, resource: Resource) -> &mut i32 {
        &mut self.0[resource as usize]
    }
}

/// Amount per window, rounded up so that windows don't reduce a promise.
#[must_use]
pub fn in_window(per_second: f64, window_ns: u64) -> i32 {
    (per_second * window_ns as f64 / 1e9)
        .ceil()
        .clamp(0.0, f64::from(PLENTY)) as i32
}
