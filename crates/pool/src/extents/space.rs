//! How full the pool is, and its settings.

use crate::error::{PoolError, Result};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// Extents by state. `clean` to `quarantined` add up to `total`; the rest are parts of those, or
/// promises.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Space {
    /// The size of an extent in bytes.
    pub extent_bytes: u64,
    /// All extents.
    pub total: u64,
    /// Free, and zeros.
    pub clean: u64,
    /// Reserved, or granted and not durably mapped.
    pub reserved: u64,
    /// Mapped by volumes.
    pub owned: u64,
    /// Freed and not yet zeroed.
    pub dirty: u64,
    /// Blocked by a hanging request.
    pub quarantined: u64,
    /// Part of `reserved`: never granted, and given to others if necessary.
    pub spare: u64,
    /// Part of `reserved` and `owned`: preallocated, and taken back if necessary.
    pub preallocated: u64,
    /// Space reservations not yet taken.
    pub promised: u64,
    /// Part of `clean` and `dirty`: on unusable devices.
    pub unavailable: u64,
}

impl Space {
    /// The pool's size in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.total * self.extent_bytes
    }

    fn used(&self) -> u64 {
        (self.reserved + self.owned + self.quarantined)
            .saturating_sub(self.spare + self.preallocated)
    }

    /// Used bytes; quarantined extents count, spare and preallocated ones do not.
    pub fn used_bytes(&self) -> u64 {
        self.used() * self.extent_bytes
    }

    /// Bytes that space reservations will take.
    pub fn promised_bytes(&self) -> u64 {
        self.promised * self.extent_bytes
    }

    /// Bytes available to any volume, now or after zero-filling.
    pub fn free_bytes(&self) -> u64 {
        (self.clean + self.dirty + self.spare + self.preallocated)
            .saturating_sub(self.promised + self.unavailable)
            .saturating_mul(self.extent_bytes)
    }

    /// Used and promised space in percent, rounded down.
    pub fn used_percent(&self) -> u8 {
        let used = u128::from(self.used() + self.promised).min(u128::from(self.total));
        (used * 100)
            .checked_div(u128::from(self.total))
            .unwrap_or(0) as u8
    }
}

/// How full a pool is by its settings.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum SpaceLevel {
    /// Below `warn_percent`.
    Normal,
    /// `warn_percent` is reached.
    Warn,
    /// `critical_percent` is reached.
    Critical,
}

/// Placement of a volume's extents on several devices.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Runs of 16 extents go round the devices, weighted by free space.
    #[default]
    Stripe,
    /// The first device with space.
    Fill,
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stripe => "stripe",
            Self::Fill => "fill",
        })
    }
}

impl FromStr for Placement {
    type Err = PoolError;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "stripe" => Ok(Self::Stripe),
            "fill" => Ok(Self::Fill),
            other => Err(PoolError::invalid(format!(
                "{other:?} is not a placement: use stripe or fill"
            ))),
        }
    }
}

/// A pool's settings.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PoolSettings {
    /// Placement of extents.
    pub placement: Placement,
    /// Warning level in percent.
    pub warn_percent: u8,
    /// Critical level in percent.
    pub critical_percent: u8,
}

impl Default for PoolSettings {
    fn default() -> Self {
        Self {
            placement: Placement::default(),
            warn_percent: 80,
            critical_percent: 95,
        }
    }
}

impl PoolSettings {
    /// Validates the settings.
    pub fn check(&self) -> Result<()> {
        let (warn, critical) = (self.warn_percent, self.critical_percent);
        if (1..=critical).contains(&warn) && critical <= 100 {
            return Ok(());
        }
        Err(PoolError::invalid(format!(
            "warnings at {warn} % and {critical} %: both must be 1 to 100, and the first must not be above the second"
        )))
    }

    /// The level of a pool with this space.
    pub fn level(&self, space: &Space) -> SpaceLevel {
        let used = space.used_percent();
        if used >= self.critical_percent {
            SpaceLevel::Critical
        } else if used >= self.warn_percent {
            SpaceLevel::Warn
        } else {
            SpaceLevel::Normal
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_follow_used_and_promised_space() {
        let settings = PoolSettings::default();
        let mut space = Space {
            extent_bytes: 65536,
            total: 1000,
            clean: 100,
            reserved: 200,
            owned: 700,
            spare: 101,
            ..Space::default()
        };
        assert_eq!(space.used_percent(), 79);
        assert_eq!(settings.level(&space), SpaceLevel::Normal);
        space.promised = 1;
        assert_eq!(settings.level(&space), SpaceLevel::Warn);
        assert_eq!(space.free_bytes(), 200 * 65536);
        space.promised = 151;
        assert_eq!(settings.level(&space), SpaceLevel::Critical);
        assert_eq!(Space::default().used_percent(), 0);
    }

    #[test]
    fn senseless_settings_are_refused() {
        let with = |warn_percent, critical_percent| PoolSettings {
            warn_percent,
            critical_percent,
            ..PoolSettings::default()
        };
        assert!(with(1, 100).check().is_ok() && with(90, 90).check().is_ok());
        assert!(with(0, 90).check().is_err() && with(91, 90).check().is_err());
        assert!(with(90, 101).check().is_err());
        assert_eq!("fill".parse::<Placement>().unwrap(), Placement::Fill);
        assert_eq!(Placement::Stripe.to_string(), "stripe");
        assert!("Stripe".parse::<Placement>().is_err());
    }
}
