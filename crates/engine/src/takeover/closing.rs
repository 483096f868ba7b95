//! Why a connection does not survive a take-over: fixed phrases, also labels of a metric.

use super::counters::NoFacts;
use std::fmt;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Closing {
    /// The host or the engine had ended it.
    Ended,
    Unreadable,
    /// It had been refused.
    Leaving,
    /// It was used but has no record, so it was about to be closed.
    Unrecorded,
    /// Its records contradict each other or the kernel.
    Damaged,
    /// Its export is not served now, or not to this host.
    NotServed,
    NoAdmin,
    /// Its bytes killed the engine before they became a command.
    Blamed,
    NoRoom,
}

impl fmt::Display for Closing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Closing::Ended => "ended before",
            Closing::Unreadable => "no counters",
            Closing::Leaving => "told to go",
            Closing::Unrecorded => "no record",
            Closing::Damaged => "damaged records",
            Closing::NotServed => "export not served",
            Closing::NoAdmin => "association ended",
            Closing::Blamed => "killed the engine",
            Closing::NoRoom => "no room",
        })
    }
}

impl From<NoFacts> for Closing {
    fn from(why: NoFacts) -> Self {
        match why {
            NoFacts::Ended => Closing::Ended,
            NoFacts::Moving | NoFacts::Unknown => Closing::Unreadable,
        }
    }
}
