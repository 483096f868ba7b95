//! Resource limits of the process.
//!
//! They are raised as far as possible; the start fails if too little is left. The limit of threads
//! also depends on other processes and control groups, so it is tested by starting threads.

use std::io;
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};

use forebay_engine::documented_limits::BUFFER_BYTES;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::failure::{Failure, Outcome};

/// Code, stacks and heaps besides the engine's memory.
const ADDRESSES_BESIDE: u64 = 1 << 30;
/// Daemon and engine have dozens each without hosts.
const DESCRIPTORS: u64 = 256;
/// More than daemon and engine have besides the reactors.
const THREADS: usize = 32;
const TRIED_STACK_BYTES: usize = 64 << 10;
/// Enough for the first thread. More than usual would change an engine's memory layout.
const STACK_BYTES: u64 = 1 << 20;
const USUAL_STACK_BYTES: u64 = 8 << 20;

struct Limit {
    resource: Resource,
    what: &'static str,
    /// In `ulimit` and in systemd units.
    names: (&'static str, &'static str),
    needed: u64,
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
        what: "bytes per file",
        names: ("-f", "LimitFSIZE"),
        needed: BUFFER_BYTES as u64,
        is_lifted: true,
    },
    Limit {
        resource: Resource::As,
        what: "bytes of address space",
        names: ("-v", "LimitAS"),
        needed: BUFFER_BYTES as u64 + ADDRESSES_BESIDE,
        is_lifted: true,
    },
    Limit {
        resource: Resource::Data,
        what: "bytes of data",
        names: ("-d", "LimitDATA"),
        needed: ADDRESSES_BESIDE,
        is_lifted: true,
    },
    // The kernel kills a process that exceeds it.
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

const STACK: Limit = Limit {
    resource: Resource::Stack,
    what: "bytes of stack",
    names: ("-s", "LimitSTACK"),
    needed: STACK_BYTES,
    is_lifted: false,
};

/// Must come before much stack is used; fails if it stays too low.
pub(crate) fn raise_stack() -> Outcome {
    let Rlimit { current, maximum } = getrlimit(STACK.resource);
    if current.is_some_and(|current| current < USUAL_STACK_BYTES) {
        let usual = maximum.map_or(USUAL_STACK_BYTES, |most| most.min(USUAL_STACK_BYTES));
        let raised = Rlimit {
            current: Some(usual),
            maximum,
        };
        let _ = setrlimit(STACK.resource, raised);
    }
    STACK.check(getrlimit(STACK.resource).current)
}

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

pub(crate) fn descriptors() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

pub(crate) fn check(reactors: u16) -> Outcome {
    LIMITS.iter().try_for_each(|limit| {
        let current = getrlimit(limit.resource).current;
        limit.check(current)
    })?;
    try_threads(THREADS + usize::from(reactors), |gate| {
        let thread = Builder::new().stack_size(TRIED_STACK_BYTES);
        thread.spawn(move || drop(gate.lock()))
    })
}

/// Starts threads that wait for a lock, and ends them.
fn try_threads(
    needed: usize,
    start: impl Fn(Arc<Mutex<()>>) -> io::Result<JoinHandle<()>>,
) -> Outcome {
    let gate = Arc::new(Mutex::new(()));
    let shut = gate.lock();
    let (mut threads, mut failed) = (Vec::new(), None);
    while threads.len() < needed && failed.is_none() {
        match start(gate.clone()) {
            Ok(thread) => threads.push(thread),
            Err(error) => failed = Some(error),
        }
    }
    drop(shut);
    let started = threads.len();
    threads.into_iter().for_each(|thread| _ = thread.join());
    let Some(error) = failed else {
        return Ok(());
    };
    Err(Failure::new(format!(
        "this process may start only {started} threads, but Forebay needs at least {needed}: {error}"
    ))
    .hint(
        "raise the limit where Forebay is started: `ulimit -u` in a shell, `LimitNPROC=` or `TasksMax=` in a systemd \
         unit; or stop other processes of this user",
    ))
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
            "this process may have only {current} {}, but Forebay needs {needed}",
            self.what
        ))
        .hint(format!(
            "raise the limit where Forebay is started: `ulimit {shell}` in a shell, `{unit}=` in a systemd unit"
        )))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn too_low_a_limit_is_named() {
        for limit in LIMITS.iter().chain([&STACK]) {
            assert!(limit.check(None).is_ok(), "{}", limit.what);
            assert!(limit.check(Some(limit.needed)).is_ok(), "{}", limit.what);
            let Some(less) = limit.needed.checked_sub(1) else {
                continue;
            };
            let error = limit.check(Some(less)).unwrap_err().to_string();
            assert!(error.contains(limit.what), "{error}");
        }
    }

    #[test]
    fn too_few_threads_are_named() {
        let left = Cell::new(3);
        let start = |gate: Arc<Mutex<()>>| {
            left.set(left.get() - 1);
            match left.get() {
                0 => Err(io::ErrorKind::WouldBlock.into()),
                _ => Builder::new().spawn(move || drop(gate.lock())),
            }
        };
        assert!(try_threads(1, start).is_ok());
        let error = try_threads(9, start).unwrap_err().to_string();
        assert!(
            error.contains("only 1 threads") && error.contains("at least 9"),
            "{error}"
        );
    }
}
