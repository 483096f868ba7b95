//! Why a connection does not survive a take-over.
//!
//! **Design.** Few fixed phrases: they are told to the daemon, counted, and labels of a metric.
//! **Not here:** where they are found.

use super::counters::NoFacts;
use std::fmt;

/// See the module's text.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Closing {
    /// The host, or we, had ended it before.
    Ended,
    /// Its counters could not be read.
    Unreadable,
    /// It had been told to go.
    Leaving,
    /// It was accepted, had said something, and has no record: it was about to be closed.
    Unrecorded,
    /// Its records contradict themselves, each other or the kernel.
    Damaged,
    /// Its export is not served any more, or not to this host.
    NotServed,
    /// Its association's admin queue is gone.
    NoAdmin,
    /// Its bytes killed the engine before they became a command.
    Blamed,
    /// There is no room for it.
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
