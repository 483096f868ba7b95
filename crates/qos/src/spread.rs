//! Which reactor serves what of a tenant's queues.
//!
//! **Design.** `one-to-one`: a queue is one reactor's, for good. `one-to-n`: reactors that have no queue of their own to
//! serve help as well.
//! **Not here:** the order rules of NVMe and virtio, which need a volume's home.

use serde::{Deserialize, Serialize};

/// See the module's text. In messages it is one byte; 1 stood for a third way.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub enum Spread {
    /// A queue is one reactor's.
    OneToOne = 0,
    /// Idle reactors help.
    #[default]
    OneToN = 2,
}

impl Spread {
    /// Its name in a setting.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::OneToOne => "one-to-one",
            Self::OneToN => "one-to-n",
        }
    }
}

impl From<Spread> for u8 {
    fn from(spread: Spread) -> Self {
        spread as Self
    }
}

impl TryFrom<u8> for Spread {
    type Error = String;

    fn try_from(byte: u8) -> Result<Self, String> {
        match byte {
            0 => Ok(Self::OneToOne),
            2 => Ok(Self::OneToN),
            byte => Err(format!("{byte} is no way to spread queues over reactors")),
        }
    }
}
