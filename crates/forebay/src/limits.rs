//! What a process may use of the system.
//!
//! Purpose: limits that were inherited by accident (`ulimit` in a shell) neither end an engine nor hold hosts up.
//! Design: each limit that matters is raised as far as the system allows: away with privileges, else the soft limit to the
//! hard one. Where too little is left, the start fails and says so.
//! Not here: how many connections the engine's tables have room for.

use forebay_engine::memory::MEMORY_BYTES;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::failure::{Failure, Outcome};

/// What code, stacks and heaps take beside the engine's memory.
const ADDRESSES_BESIDE: u64 = 1 << 30;
/// A daemon and an engine without hosts have some dozens each.
const DESCRIPTORS: u64 = 256;

struct Limit {
    resource: Resource,
    what: &'static str,
    /// Of `ulimit`, and of a unit of systemd.
    names: (&'static str, &'static str),
    /// With less it does not work.
    needed: u64,
    /// There is nothing for it to protect, so it is lifted if the system allows.
    is_lifted: bool,
}

const LIMITS: [Limit; 7] = [
    Limit {
        resource: Resource::Nofile,
        what: "open files",
        names: ("-n", "LimitNOFILE"),
        needed: DESCRIPTORS,
        is_lifted: false,
    },
    Limit {
        resource: Resource::Fsize,
        what: "bytes of a file",
        names: ("-f", "LimitFSIZE"),
        needed: MEMORY_BYTES as u64,
        is_lifted: true,
    },
    Limit {
        resource: Resource::As,
        what: "bytes of address space",
        names: ("-v", "LimitAS"),
        needed: MEMORY_BYTES as u64 + ADDRESSES_BESIDE,
        is_lifted: true,
    },
    Limit {
        resource: Resource::Data,
        what: "bytes of data",
        names: ("-d", "LimitDATA"),
        needed: ADDRESSES_BESIDE,
        is_lifted: true,
    },
    // The kernel kills a process that has used it up.
    Limit {
        resource: Resource::Cpu,
        what: "seconds of CPU time",
        names: ("-t", "LimitCPU"),
        needed: u64::MAX,
        is_lifted: true,
    },
    Limit {
        resource: Resource::Memlock,
        what: "bytes of locked memory",
        names: ("-l", "LimitMEMLOCK"),
        needed: 0,
        is_lifted: false,
    },
    Limit {
        resource: Resource::Nproc,
        what: "processes",
        names: ("-u", "LimitNPROC"),
        needed: 0,
        is_lifted: false,
    },
];

/// Raises the limits. A failure leaves them as they were.
pub(crate) fn raise() {
    for limit in &LIMITS {
        let maximum = getrlimit(limit.resource).maximum;
        let to = |maximum: Option<u64>| {
            let raised = Rlimit {
                current: maximum,
                maximum,
            };
            setrlimit(limit.resource, raised).is_ok()
        };
        if !(limit.is_lifted && to(None)) {
            to(maximum);
        }
    }
}

/// How many descriptors this process may have.
pub(crate) fn descriptors() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Fails if a limit is too low for daemon and engine.
pub(crate) fn check() -> Outcome {
    LIMITS.iter().try_for_each(|limit| {
        let current = getrlimit(limit.resource).current;
        limit.check(current)
    })
}

impl Limit {
    fn check(&self, current: Option<u64>) -> Outcome {
        let Some(current) = current.filter(|current| *current < self.needed) else {
            return Ok(());
        };
        let (shell, unit) = self.names;
        let needed = match self.needed {
            u64::MAX => "no limit".to_owned(),
            needed => format!("at least {needed}"),
        };
        Err(Failure::new(format!(
            "this process may have only {current} {}, and Forebay needs {needed}",
            self.what
        ))
        .hint(format!(
            "raise the limit where this is started: `ulimit {shell}` in a shell, `{unit}=` in a unit of systemd"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_low_a_limit_is_named() {
        for limit in &LIMITS {
            assert!(limit.check(None).is_ok(), "{}", limit.what);
            assert!(limit.check(Some(limit.needed)).is_ok(), "{}", limit.what);
            let Some(less) = limit.needed.checked_sub(1) else {
                continue;
            };
            let error = limit.check(Some(less)).unwrap_err().to_string();
            assert!(error.contains(limit.what), "{error}");
        }
    }
}
