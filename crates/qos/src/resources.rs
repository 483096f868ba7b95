//! Amounts of everything that an I/O uses, side by side.
//!
//! **Design.** Eight numbers of 32 bits: two registers of the smallest x86-64, so that "is there enough of everything"
//! and "take it" are a dozen instructions. Amounts are for one window, which is at most [`MAX_WINDOW_NS`] long, so they fit.
//! **Not here:** rates, which are numbers of 64 bits ([`crate::budget`], [`crate::admission`]).

use std::ops::{Index, IndexMut};

/// The longest window, in which the amounts of any machine fit.
pub const MAX_WINDOW_NS: u64 = 10_000_000;
/// Of one operation: operations are counted in parts, because a small budget has less than one in a window.
pub const PARTS: i32 = 1 << 16;
/// As good as endless; two of it can be added.
pub const PLENTY: i32 = 1 << 29;

/// What an I/O uses, and a tenant has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Resource {
    /// Time of a reactor's processor, ns.
    Cpu = 0,
    /// Time of the devices for reads, ns: as if one read after the other took all of it.
    DeviceRead = 1,
    /// Time of the devices for writes, ns.
    DeviceWrite = 2,
    /// Bytes that come in from hosts.
    LinkIn = 3,
    /// Bytes that go out to hosts.
    LinkOut = 4,
    /// The software limit: operations that a node carries at most, in [`PARTS`].
    Software = 5,
    /// A tenant's own operations, in [`PARTS`].
    Ops = 6,
    /// A tenant's own bytes.
    Bytes = 7,
}

/// How many there are.
pub const COUNT: usize = 8;
/// The first so many are a node's, and are shared; the others are what a tenant's budget says.
pub const SHARED: usize = 6;

/// What is shared, in order.
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

/// An amount of each [`Resource`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[repr(C, align(16))]
pub struct ResourceVector(pub [i32; COUNT]);

impl ResourceVector {
    /// Nothing of anything.
    pub const ZERO: Self = Self([0; COUNT]);
    /// As good as endless.
    pub const PLENTY: Self = Self([PLENTY; COUNT]);

    /// What is left of two amounts that can be subtracted. Written out: a loop is not unrolled in each build.
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

    /// Takes `cost` if there is so much of everything.
    #[inline(always)]
    #[must_use]
    pub fn take(&mut self, cost: &Self) -> bool {
        let rest = self.rest(cost);
        let enough = !is_below_nothing(&rest);
        if enough {
            self.0 = rest;
        }
        enough
    }

    /// Whether there is so much of everything.
    #[inline]
    #[must_use]
    pub fn covers(&self, cost: &Self) -> bool {
        let rest = self.rest(cost);
        !is_below_nothing(&rest)
    }

    /// Both together.
    #[inline]
    pub fn add(&mut self, other: &Self) {
        for (own, other) in self.0.iter_mut().zip(&other.0) {
            *own = own.saturating_add(*other);
        }
    }

    /// The sum of amounts of which two can be added.
    #[inline(always)]
    #[must_use]
    pub(crate) fn plus(&self, other: &Self) -> Self {
        let mut sum = *self;
        for (sum, other) in sum.0.iter_mut().zip(&other.0) {
            *sum = sum.wrapping_add(*other);
        }
        sum
    }

    /// The difference of such amounts.
    #[inline(always)]
    #[must_use]
    pub(crate) fn minus(&self, other: &Self) -> Self {
        let mut rest = *self;
        for (rest, other) in rest.0.iter_mut().zip(&other.0) {
            *rest = rest.wrapping_sub(*other);
        }
        rest
    }

    /// Without `other`, at least 0.
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

    /// Only what is shared.
    #[inline]
    #[must_use]
    pub fn shared(&self) -> Self {
        let mut part = *self;
        part.0[SHARED..].fill(0);
        part
    }

    /// Only what a tenant's budget says.
    #[inline]
    #[must_use]
    pub fn own(&self) -> Self {
        let mut part = *self;
        part.0[..SHARED].fill(0);
        part
    }

    /// Nothing of anything is left.
    #[inline]
    #[must_use]
    pub fn is_zero(&self) -> bool {
        *self == Self::ZERO
    }
}

/// Anywhere: by its sign. In halves, which is how a processor does it best.
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

/// `per_second` of something is so much in a window, rounded up: what was promised is not less for being cut into windows.
#[must_use]
pub fn in_window(per_second: f64, window_ns: u64) -> i32 {
    (per_second * window_ns as f64 / 1e9)
        .ceil()
        .clamp(0.0, f64::from(PLENTY)) as i32
}
