//! A float per resource, for the end of a window: each step is two SSE instructions without
//! branches.

use crate::resources::{COUNT, ResourceVector};

#[derive(Clone, Copy, PartialEq, Default, Debug)]
#[repr(C, align(16))]
pub(super) struct Each(pub(super) [f32; COUNT]);

impl Each {
    pub(super) const ZERO: Self = Self([0.0; COUNT]);

    #[inline(always)]
    pub(super) fn of(vector: &ResourceVector) -> Self {
        let mut each = Self::ZERO;
        for (each, vector) in each.0.iter_mut().zip(&vector.0) {
            *each = *vector as f32;
        }
        each
    }

    #[inline(always)]
    pub(super) fn shared(vector: &ResourceVector) -> Self {
        Self::of(&vector.shared())
    }

    #[inline(always)]
    pub(super) fn vector(&self) -> ResourceVector {
        let mut vector = ResourceVector::ZERO;
        for (vector, each) in vector.0.iter_mut().zip(&self.0) {
            *vector = *each as i32;
        }
        vector
    }

    #[inline(always)]
    pub(super) fn with(&self, other: &Self, of: impl Fn(f32, f32) -> f32) -> Self {
        let mut each = Self::ZERO;
        for ((each, own), other) in each.0.iter_mut().zip(&self.0).zip(&other.0) {
            *each = of(*own, *other);
        }
        each
    }

    #[inline(always)]
    pub(super) fn times(&self, factor: f32) -> Self {
        self.with(self, |own, _| own * factor)
    }

    #[inline(always)]
    pub(super) fn plus(&self, other: &Self) -> Self {
        self.with(other, |own, other| own + other)
    }

    #[inline(always)]
    pub(super) fn min(&self, other: &Self) -> Self {
        self.with(other, |own, other| if own < other { own } else { other })
    }

    #[inline(always)]
    pub(super) fn max(&self, other: &Self) -> Self {
        self.with(other, |own, other| if own > other { own } else { other })
    }

    #[inline(always)]
    pub(super) fn exceeds(&self, other: &Self) -> bool {
        let [a, b, c, d, e, f, g, h] = self.with(other, |own, other| other - own).0;
        // By sign bits: equal numbers give +0.
        let signs = [
            a.to_bits() | e.to_bits(),
            b.to_bits() | f.to_bits(),
            c.to_bits() | g.to_bits(),
            d.to_bits() | h.to_bits(),
        ];
        (signs[0] | signs[1] | signs[2] | signs[3]) >> 31 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::SHARED;

    #[test]
    fn an_excess_is_found_in_any_resource() {
        let even = Each([1.0; COUNT]);
        assert!(!even.exceeds(&even) && !Each::ZERO.exceeds(&Each::ZERO));
        for at in 0..COUNT {
            let mut more = even;
            more.0[at] = 1.5;
            assert!(more.exceeds(&even) && !even.exceeds(&more));
        }
        assert_eq!(
            Each::shared(&ResourceVector([3; COUNT])).vector().0[SHARED..],
            [0, 0]
        );
        assert_eq!(Each([2.9; COUNT]).vector(), ResourceVector([2; COUNT]));
    }
}
