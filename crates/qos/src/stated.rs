//! A budget as people state it, part by part, and the budget that follows.
//!
//! **Design.** A part that nobody stated is derived from the others. A change of one part changes the parts derived from
//! it, and no others. A base of operations alone has 4 KiB for each of them. A base of bytes alone has one operation for
//! every 128 KiB. A burst limit that is not stated is the stated base, or none.
//! **Not here:** whether a node has it ([`crate::admission`]).

use serde::{Deserialize, Serialize};

use crate::budget::{BadBudget, Budget, Burst, Field, LEAST, MOST, Rate};

/// Bytes for each operation of a base that states operations only.
pub const SMALL_BYTES: u64 = 4 << 10;
/// Bytes for each operation of a base that states bytes only.
pub const LARGE_BYTES: u64 = 128 << 10;

/// The parts of a budget that were stated.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
pub struct Stated {
    /// Operations a second of the base.
    pub base_iops: Option<u64>,
    /// Bytes a second of the base.
    pub base_bytes: Option<u64>,
    /// The most operations a second.
    pub burst_iops: Option<u64>,
    /// The most bytes a second.
    pub burst_bytes: Option<u64>,
    /// Seconds of unused base that can be saved; none: metered.
    pub credit_seconds: Option<u32>,
}

impl Stated {
    /// Whether any base is stated.
    #[must_use]
    pub fn has_base(&self) -> bool {
        self.base_iops.or(self.base_bytes).is_some()
    }

    /// Whether there is neither a base nor a burst limit.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.has_base() && self.burst_iops.or(self.burst_bytes).is_none()
    }

    /// The budget.
    /// Errors: the first part that cannot be, with what could be.
    pub fn budget(&self) -> Result<Budget, BadBudget> {
        // An error names a stated part before one that follows from it.
        for (field, stated) in [
            (Field::BaseIops, self.base_iops),
            (Field::BaseBytes, self.base_bytes),
            (Field::BurstIops, self.burst_iops),
            (Field::BurstBytes, self.burst_bytes),
        ] {
            stated.map_or(Ok(()), |value| field.check(value))?;
        }
        let burst = Rate {
            iops: self.burst_iops.or(self.base_iops).unwrap_or(MOST.iops),
            bytes: self.burst_bytes.or(self.base_bytes).unwrap_or(MOST.bytes),
        };
        let base = match (self.base_iops, self.base_bytes) {
            (Some(iops), Some(bytes)) => Rate { iops, bytes },
            (Some(iops), None) => Rate {
                iops,
                bytes: bytes_of(iops).min(burst.bytes),
            },
            (None, Some(bytes)) => Rate {
                iops: iops_of(bytes).min(burst.iops),
                bytes,
            },
            (None, None) => LEAST,
        };
        let how = match self.credit_seconds {
            Some(seconds) => Burst::Credit { seconds },
            None => Burst::Metered,
        };
        let budget = Budget { base, burst, how };
        budget.check()?;
        Ok(budget)
    }

    /// Guesses the stated parts of a budget: those that are not derived from the others.
    #[must_use]
    pub fn of(budget: &Budget) -> Self {
        let (base, burst) = (budget.base, budget.burst);
        let (base_iops, base_bytes) = if base == LEAST {
            (None, None)
        } else if base.bytes == bytes_of(base.iops).min(burst.bytes) {
            (Some(base.iops), None)
        } else if base.iops == iops_of(base.bytes).min(burst.iops) {
            (None, Some(base.bytes))
        } else {
            (Some(base.iops), Some(base.bytes))
        };
        let limit = |burst: u64, base: Option<u64>, most: u64| {
            (burst != base.unwrap_or(most)).then_some(burst)
        };
        Self {
            base_iops,
            base_bytes,
            burst_iops: limit(burst.iops, base_iops, MOST.iops),
            burst_bytes: limit(burst.bytes, base_bytes, MOST.bytes),
            credit_seconds: match budget.how {
                Burst::Credit { seconds } => Some(seconds),
                Burst::Metered => None,
            },
        }
    }
}

fn bytes_of(iops: u64) -> u64 {
    iops.saturating_mul(SMALL_BYTES).max(LEAST.bytes)
}

fn iops_of(bytes: u64) -> u64 {
    (bytes / LARGE_BYTES).max(LEAST.iops)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_not_stated_follows() {
        let mut stated = Stated {
            base_iops: Some(1000),
            ..Stated::default()
        };
        let budget = stated.budget().unwrap();
        assert_eq!(budget.base.bytes, 1000 * SMALL_BYTES);
        assert_eq!((budget.burst.iops, budget.burst.bytes), (1000, MOST.bytes));
        stated.base_iops = Some(2000);
        let budget = stated.budget().unwrap();
        assert_eq!(budget.base.bytes, 2000 * SMALL_BYTES);
        assert_eq!(budget.burst.iops, 2000);
        // A part that was stated stays.
        stated.burst_iops = Some(1500);
        assert!(matches!(
            stated.budget(),
            Err(BadBudget::BaseOverBurst { .. })
        ));
    }

    proptest! {
        #[test]
        fn what_is_guessed_gives_the_same_budget(
            base_iops in prop::option::of(10..5000u64), base_bytes in prop::option::of(65_536..100_000_000u64),
            burst_iops in prop::option::of(5000..9000u64), burst_bytes in prop::option::of(100_000_000..200_000_000u64),
            credit_seconds in prop::option::of(1..100u32),
        ) {
            let stated = Stated { base_iops, base_bytes, burst_iops, burst_bytes, credit_seconds };
            if let Ok(budget) = stated.budget() {
                prop_assert_eq!(Stated::of(&budget).budget(), Ok(budget));
            }
        }
    }
}
