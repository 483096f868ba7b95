//! How many descriptors a process may have open.
//!
//! Purpose: each connection of a host takes one in the engine and one in the daemon.
//! Design: as many as the system allows without asking anybody: the soft limit is raised to the hard
//! one.
//! Not here: how many connections the engine's tables have room for.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit; says what it is now. A failure leaves it as it was.
pub(crate) fn raise_descriptors() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum.unwrap_or(u64::MAX),
        Err(_) => limit.current.unwrap_or(u64::MAX),
    }
}
