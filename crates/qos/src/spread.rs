//! Which reactors serve a tenant's queues.

use serde::{Deserialize, Serialize};

/// How queues spread over reactors. In messages it is one byte; 1 is unused (a removed policy).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub enum Spread {
    /// One reactor serves a queue.
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
            byte => Err(format!(
                "{byte} is not a way to spread queues over reactors"
            )),
        }
    }
}
