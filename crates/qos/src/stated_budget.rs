//! The stated parts of a budget, and the whole budget.
//!
//! Missing parts follow from the stated ones. A base of operations alone gets 4 KiB for each; one
//! of bytes alone, an operation for every 128 KiB. A missing burst limit defaults to the stated
//! base, else to unlimited.

use serde::{Deserialize, Serialize};

use crate::budget::{BadBudget, Budget, Burst, Field, LEAST, MOST, Rate};

/// Bytes for each operation if only operations are stated.
pub const SMALL_BYTES: u64 = 4 << 10;
/// Bytes for each operation if only bytes are stated.
pub const LARGE_BYTES: u64 = 128 << 10;

/// The stated parts.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
pub struct Stated {
    /// Base IOPS.
    pub base_iops: Option<u64>,
    /// Base in bytes per second.
    pub base_bytes: Option<u64>,
    /// Burst limit in IOPS.
    pub burst_iops: Option<u64>,
    /// Burst limit in bytes per second.
    pub burst_bytes: Option<u64>,
    /// Cap of the credit, in seconds of base; `None`: metered.
    pub credit_seconds: Option<u32>,
}

impl Stated {
    /// Whether any base is stated.
    #[must_use]
    pub fn has_base(&self) -> bool {
        self.base_iops.or(self.base_bytes).is_some()
    }

    /// Whether there is no base and no limit.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.has_base() && self.burst_iops.or(self.burst_bytes).is_none()
    }

    /// The whole budget; the error names the first invalid part.
    pub fn budget(&self) -> Result<Budget, BadBudget> {
        // Errors name stated parts before derived ones.
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

    /// Guesses the stated parts: those that don't follow from others.
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
    fn missing_parts_follow_from_stated_ones() {
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
        stated.burst_iops = Some(1500);
        assert!(matches!(
            stated.budget(),
            Err(BadBudget::BaseOverBurst { .. })
        ));
    }

    proptest! {
        #[test]
        fn guessed_parts_give_the_same_budget(
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
