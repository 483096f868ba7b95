//! How full the pool is, and the settings that say how full is too full.
//!
//! **Design.** Numbers in extents, helpers in bytes. **Not here:** who is told.

use crate::error::{PoolError, Result};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// How many extents are in which state. The sum of `clean` to `quarantined` is `total`; the rest
/// are parts of those, or promises.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Space {
    /// The size of an extent in bytes.
    pub extent_bytes: u64,
    /// All extents.
    pub total: u64,
    /// Free to use.
    pub clean: u64,
    /// Set aside for volumes, or granted and not yet durably mapped.
    pub reserved: u64,
    /// Mapped by volumes.
    pub owned: u64,
    /// Freed and not yet zeroed.
    pub dirty: u64,
    /// Not usable until something that hangs has ended.
    pub quarantined: u64,
    /// Of `reserved`: never granted, and there for others when nothing else is.
    pub stock: u64,
    /// Of `reserved` and `owned`: mapped ahead of a write, and taken back when somebody else needs it.
    pub ahead: u64,
    /// What volumes with a reservation have not got yet and will, when they ask.
    pub promised: u64,
    /// Of `clean` and `dirty`: on devices that can't be used now.
    pub unavailable: u64,
}

impl Space {
    /// The pool's size in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.total * self.extent_bytes
    }

    fn used(&self) -> u64 {
        (self.reserved + self.owned + self.quarantined).saturating_sub(self.stock + self.ahead)
    }

    /// What volumes use, in bytes; what hangs counts too; stock, and what is mapped ahead of writes,
    /// do not.
    pub fn used_bytes(&self) -> u64 {
        self.used() * self.extent_bytes
    }

    /// What reservations will take beyond that, in bytes.
    pub fn promised_bytes(&self) -> u64 {
        self.promised * self.extent_bytes
    }

    /// What any volume may have, now or once laundered, in bytes.
    pub fn free_bytes(&self) -> u64 {
        (self.clean + self.dirty + self.stock + self.ahead)
            .saturating_sub(self.promised + self.unavailable)
            .saturating_mul(self.extent_bytes)
    }

    /// What is used or promised, in percent of all, rounded down.
    pub fn used_percent(&self) -> u8 {
        let used = u128::from(self.used() + self.promised).min(u128::from(self.total));
        // At most 100.
        (used * 100)
            .checked_div(u128::from(self.total))
            .unwrap_or(0) as u8
    }
}

/// How full a pool is by its own settings.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum SpaceLevel {
    /// Below both marks.
    Normal,
    /// `warn_percent` is reached.
    Warn,
    /// `critical_percent` is reached.
    Critical,
}

/// Where a volume's extents come from when there are several devices.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Consecutive runs of 16 extents go round the devices, more of them where more is free.
    #[default]
    Stripe,
    /// The first device that has space.
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
                "{other:?} is no placement: it is stripe or fill"
            ))),
        }
    }
}

/// What can be set for a pool, at its creation and later.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PoolSettings {
    /// Where extents come from.
    pub placement: Placement,
    /// From this much used on there is a warning, in percent.
    pub warn_percent: u8,
    /// From this much on a louder one.
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
    /// Whether they make sense.
    pub fn check(&self) -> Result<()> {
        let (warn, critical) = (self.warn_percent, self.critical_percent);
        if (1..=critical).contains(&warn) && critical <= 100 {
            return Ok(());
        }
        Err(PoolError::invalid(format!(
            "warnings at {warn} % and {critical} %: both are 1 to 100, the first not above the second"
        )))
    }

    /// Where a pool with this space is.
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
    fn levels_follow_what_is_used_and_promised() {
        let settings = PoolSettings::default();
        let mut space = Space {
            extent_bytes: 65536,
            total: 1000,
            clean: 100,
            reserved: 200,
            owned: 700,
            stock: 101,
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
