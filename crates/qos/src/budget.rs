//! The budget of a tenant or a volume.
//!
//! A base is available at any time. Bursts above it, up to a limit, use resources that others
//! leave. They spend credit, which unused base has saved, or are metered for a bill.

use serde::{Deserialize, Serialize};

/// Operations and bytes per second.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Hash, Serialize, Deserialize)]
pub struct Rate {
    /// IOPS.
    pub iops: u64,
    /// Bytes per second.
    pub bytes: u64,
}

/// How a tenant may burst.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
pub enum Burst {
    /// Bursts spend saved base.
    Credit {
        /// Cap of the credit, in seconds of base.
        seconds: u32,
    },
    /// Bursts need no credit; use above the base is counted.
    Metered,
}

/// A tenant's or volume's budget.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
pub struct Budget {
    /// Available at any time.
    pub base: Rate,
    /// The burst limit. Savings of a few windows may exceed it briefly.
    pub burst: Rate,
    /// How it may burst.
    pub how: Burst,
}

/// The smallest valid rate.
pub const LEAST: Rate = Rate {
    iops: 10,
    bytes: 64 << 10,
};
/// The largest valid rate: well above the paper's largest disk (1 M IOPS, 4 GB/s).
pub const MOST: Rate = Rate {
    iops: 20_000_000,
    bytes: 100_000_000_000,
};
/// The longest time of saved base: a week.
pub const MOST_CREDIT_SECONDS: u32 = 7 * 24 * 3600;

/// A part of a budget.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Field {
    /// `base.iops`.
    BaseIops,
    /// `base.bytes`.
    BaseBytes,
    /// `burst.iops`.
    BurstIops,
    /// `burst.bytes`.
    BurstBytes,
    /// The cap of credit.
    CreditSeconds,
}

impl Field {
    /// Its name in messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::BaseIops => "base IOPS",
            Self::BaseBytes => "base bytes/s",
            Self::BurstIops => "burst IOPS",
            Self::BurstBytes => "burst bytes/s",
            Self::CreditSeconds => "credit seconds",
        }
    }

    const fn range(self) -> (u64, u64) {
        match self {
            Self::BaseIops | Self::BurstIops => (LEAST.iops, MOST.iops),
            Self::BaseBytes | Self::BurstBytes => (LEAST.bytes, MOST.bytes),
            Self::CreditSeconds => (1, MOST_CREDIT_SECONDS as u64),
        }
    }

    /// Checks that a value is in range.
    pub fn check(self, value: u64) -> Result<(), BadBudget> {
        let (least, most) = self.range();
        match (least..=most).contains(&value) {
            true => Ok(()),
            false => Err(BadBudget::Range {
                field: self,
                value,
                least,
                most,
            }),
        }
    }
}

/// Why a budget is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BadBudget {
    /// Out of range.
    Range {
        /// The part.
        field: Field,
        /// Its value.
        value: u64,
        /// The least valid value.
        least: u64,
        /// The largest valid value.
        most: u64,
    },
    /// The base exceeds the burst limit.
    BaseOverBurst {
        /// The part.
        field: Field,
        /// The base.
        base: u64,
        /// The burst limit.
        burst: u64,
    },
    /// The volumes' bases exceed their tenant's.
    VolumesOverTenant {
        /// The part.
        field: Field,
        /// Its value.
        value: u64,
        /// The rest of the tenant's base.
        left: u64,
    },
}

impl std::fmt::Display for BadBudget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Range {
                field,
                value,
                least,
                most,
            } => write!(
                f,
                "{} of {value} is out of range: use {least} to {most}",
                field.name()
            ),
            Self::BaseOverBurst { field, base, burst } => write!(
                f,
                "{} of {base} is above its burst limit of {burst}: a base of at most {burst} fits",
                field.name()
            ),
            Self::VolumesOverTenant { field, value, left } if *left < field.range().0 => write!(
                f,
                "{} of {value} for this volume does not fit: its tenant has {left} left for volumes, which is less \
                 than the minimum base: leave the volume's base out, to limit it only, or raise the tenant's",
                field.name()
            ),
            Self::VolumesOverTenant { field, value, left } => write!(
                f,
                "{} of {value} for this volume is more than its tenant has left for volumes: at most {left} fits",
                field.name()
            ),
        }
    }
}

impl std::error::Error for BadBudget {}

impl Budget {
    /// For a tenant without a budget, beside others that have one.
    #[must_use]
    pub const fn unstated() -> Self {
        Self {
            base: LEAST,
            burst: MOST,
            how: Burst::Metered,
        }
    }

    /// Exactly this rate, in operations of up to 128 KiB.
    #[must_use]
    pub const fn fixed(iops: u64) -> Self {
        let rate = Rate {
            iops,
            bytes: iops * (128 << 10),
        };
        Self {
            base: rate,
            burst: rate,
            how: Burst::Credit { seconds: 1 },
        }
    }

    /// Checks all parts; the error names the first invalid one.
    pub fn check(&self) -> Result<(), BadBudget> {
        use Field::{BaseBytes, BaseIops, BurstBytes, BurstIops, CreditSeconds};
        for (field, value) in [
            (BaseIops, self.base.iops),
            (BaseBytes, self.base.bytes),
            (BurstIops, self.burst.iops),
            (BurstBytes, self.burst.bytes),
        ] {
            field.check(value)?;
        }
        for (field, base, burst) in [
            (BaseIops, self.base.iops, self.burst.iops),
            (BaseBytes, self.base.bytes, self.burst.bytes),
        ] {
            if base > burst {
                return Err(BadBudget::BaseOverBurst { field, base, burst });
            }
        }
        match self.how {
            Burst::Credit { seconds } => CreditSeconds.check(seconds.into()),
            Burst::Metered => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Budget {
        Budget {
            base: Rate {
                iops: 20_000,
                bytes: 100_000_000,
            },
            burst: Rate {
                iops: 60_000,
                bytes: 300_000_000,
            },
            how: Burst::Credit { seconds: 60 },
        }
    }

    fn said(change: impl FnOnce(&mut Budget)) -> String {
        let mut budget = good();
        change(&mut budget);
        budget
            .check()
            .map_or_else(|bad| bad.to_string(), |()| "good".to_owned())
    }

    #[test]
    fn bad_budgets_are_refused_with_which_and_what_would_fit() {
        assert_eq!(said(|_| ()), "good");
        assert_eq!(said(|b| b.how = Burst::Metered), "good");
        assert_eq!(
            said(|b| b.base.iops = 60_001),
            "base IOPS of 60001 is above its burst limit of 60000: a base of at most 60000 fits"
        );
        assert_eq!(
            said(|b| b.base.bytes = 300_000_001),
            "base bytes/s of 300000001 is above its burst limit of 300000000: a base of at most 300000000 fits"
        );
        assert_eq!(
            said(|b| b.base.iops = 0),
            "base IOPS of 0 is out of range: use 10 to 20000000"
        );
        assert_eq!(
            said(|b| b.burst.bytes = u64::MAX),
            format!(
                "burst bytes/s of {} is out of range: use 65536 to 100000000000",
                u64::MAX
            )
        );
        assert_eq!(
            said(|b| b.how = Burst::Credit { seconds: 0 }),
            "credit seconds of 0 is out of range: use 1 to 604800"
        );
    }

    #[test]
    fn a_refusal_names_the_base_left_for_a_volume() {
        let said = |left| {
            let field = Field::BaseIops;
            let value = 5001;
            BadBudget::VolumesOverTenant { field, value, left }.to_string()
        };
        let fits = said(5000);
        assert!(fits.ends_with("at most 5000 fits"), "{fits}");
        for left in [0, LEAST.iops - 1] {
            let none = said(left);
            assert!(!none.contains("at most"), "{none}");
            assert!(none.contains("leave the volume's base out"), "{none}");
        }
    }
}
