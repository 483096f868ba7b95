//! What a tenant or a volume may use, as people state it.
//!
//! **Design.** A base that is theirs at any time, and a burst limit that is reached out of what others leave: by credit,
//! which is earned below the base and spent above it, or metered, where all above the base is counted for a bill. Both in
//! operations and in bytes a second. What cannot be is refused with which number it is and what could be.
//! **Not here:** whether a node has it ([`crate::admission`]).

use serde::{Deserialize, Serialize};

/// Operations and bytes a second.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Hash, Serialize, Deserialize)]
pub struct Rate {
    /// Operations a second.
    pub iops: u64,
    /// Bytes a second.
    pub bytes: u64,
}

/// How a tenant comes above its base.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
pub enum Burst {
    /// What was not used of the base, for as long as that of so many seconds at most.
    Credit {
        /// So many seconds of whole base can be saved.
        seconds: u32,
    },
    /// Without end; what is above the base is counted.
    Metered,
}

/// See the module's text.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
pub struct Budget {
    /// Theirs at any time.
    pub base: Rate,
    /// Never more than this.
    pub burst: Rate,
    /// How they come above the base.
    pub how: Burst,
}

/// The least and the most that can be stated. The most of a disk is well above the paper's (1 M IOPS, 4 GB/s).
pub const LEAST: Rate = Rate {
    iops: 10,
    bytes: 64 << 10,
};
/// See [`LEAST`].
pub const MOST: Rate = Rate {
    iops: 20_000_000,
    bytes: 100_000_000_000,
};
/// The longest time whose base can be saved.
pub const MOST_CREDIT_SECONDS: u32 = 7 * 24 * 3600;

/// What of a budget is meant.
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
    /// The credit's seconds.
    CreditSeconds,
}

impl Field {
    /// Its name.
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

    /// The least and the most that it can be.
    const fn range(self) -> (u64, u64) {
        match self {
            Self::BaseIops | Self::BurstIops => (LEAST.iops, MOST.iops),
            Self::BaseBytes | Self::BurstBytes => (LEAST.bytes, MOST.bytes),
            Self::CreditSeconds => (1, MOST_CREDIT_SECONDS as u64),
        }
    }

    /// Whether it can be so much at all.
    /// Errors: what would fit.
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

/// A budget that cannot be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BadBudget {
    /// A number that is too small or too large.
    Range {
        /// Which.
        field: Field,
        /// What was stated.
        value: u64,
        /// The least that fits.
        least: u64,
        /// The most that fits.
        most: u64,
    },
    /// A base above its burst limit.
    BaseOverBurst {
        /// Which base.
        field: Field,
        /// The base.
        base: u64,
        /// Its burst limit: the most that fits.
        burst: u64,
    },
    /// The volumes' bases are more than their tenant's.
    VolumesOverTenant {
        /// Which.
        field: Field,
        /// What was stated.
        value: u64,
        /// What is left of the tenant's: the most that fits.
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
                "{} of {value} does not fit: {least} to {most} does",
                field.name()
            ),
            Self::BaseOverBurst { field, base, burst } => write!(
                f,
                "{} of {base} is above its burst limit of {burst}: a base of at most {burst} fits",
                field.name()
            ),
            Self::VolumesOverTenant { field, value, left } if *left < field.range().0 => write!(
                f,
                "{} of {value} for this volume does not fit: its tenant has {left} left for volumes, which is less than any base: \
                 leave the volume's base out, to limit it only, or raise the tenant's",
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
    /// Of a tenant for which nothing is stated, beside others for which something is: next to nothing is its own, and it has
    /// what others leave.
    #[must_use]
    pub const fn unstated() -> Self {
        Self {
            base: LEAST,
            burst: MOST,
            how: Burst::Metered,
        }
    }

    /// So many operations a second and no more, each of up to 128 KiB.
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

    /// Whether it can be at all.
    /// Errors: which number cannot, and what would fit.
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
            "base IOPS of 0 does not fit: 10 to 20000000 does"
        );
        assert_eq!(
            said(|b| b.burst.bytes = u64::MAX),
            format!(
                "burst bytes/s of {} does not fit: 65536 to 100000000000 does",
                u64::MAX
            )
        );
        assert_eq!(
            said(|b| b.how = Burst::Credit { seconds: 0 }),
            "credit seconds of 0 does not fit: 1 to 604800 does"
        );
    }

    #[test]
    fn what_is_left_for_a_volume_is_said() {
        let said = |left| {
            let field = Field::BaseIops;
            let value = 5001;
            BadBudget::VolumesOverTenant { field, value, left }.to_string()
        };
        let fits = said(5000);
        assert!(fits.ends_with("at most 5000 fits"), "{fits}");
        // What is refused itself does not fit.
        for left in [0, LEAST.iops - 1] {
            let none = said(left);
            assert!(!none.contains("at most"), "{none}");
            assert!(none.contains("leave the volume's base out"), "{none}");
        }
    }
}
