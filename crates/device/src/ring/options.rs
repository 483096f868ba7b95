//! The plain values of [`super::Ring`]'s interface: options, errors, completions, wake-ups.

use std::io;

use rustix::io::Errno;

use crate::op::Submitted;

use super::kernel::{KernelVersion, MINIMUM_KERNEL, forbidden_reason};

/// Options of a new ring.
#[derive(Debug, Clone)]
pub struct RingOptions {
    /// Entries of the submission queue (rounded up to a power of two).
    pub entries: u32,
    /// Entries of the completion queue; at least `entries`.
    pub cq_entries: u32,
    /// Run completions only inside `Ring::wait` and `Ring::submit`: faster, but the fence falls
    /// later.
    pub defer_taskrun: bool,
    /// Most kernel threads for work on regular files (fsync, zeroing, punching); 0: the kernel's
    /// default.
    pub iowq_bounded: u32,
    /// Most kernel threads for other work that blocks; 0: the kernel's default.
    pub iowq_unbounded: u32,
    /// Processors for these threads; empty: all.
    pub iowq_cpus: Vec<usize>,
}

impl Default for RingOptions {
    fn default() -> Self {
        Self {
            entries: 256,
            cq_entries: 1024,
            defer_taskrun: false,
            iowq_bounded: 4,
            iowq_unbounded: 4,
            iowq_cpus: Vec::new(),
        }
    }
}

/// Why a ring can't be made.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// The kernel is below [`MINIMUM_KERNEL`].
    #[error(
        "the kernel is {found}, but Linux {MINIMUM_KERNEL} or newer is needed: update the kernel"
    )]
    KernelTooOld {
        /// The running kernel.
        found: KernelVersion,
    },
    /// The kernel's release string holds no version.
    #[error(
        "the kernel release `{release}` contains no version number: Linux {MINIMUM_KERNEL} or newer is needed"
    )]
    UnknownKernel {
        /// The string.
        release: String,
    },
    /// io_uring is switched off or filtered.
    #[error("io_uring is forbidden here ({source}): {reason}")]
    Forbidden {
        /// What forbids it, and what to do.
        reason: String,
        /// The system's error.
        source: io::Error,
    },
    /// Something else failed.
    #[error("io_uring: {doing} failed: {source}")]
    Io {
        /// The step that failed.
        doing: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// The submission queue has no room: submit, take completions, try again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the submission queue is full")]
pub struct RingFull;

/// The end of one entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Completion {
    /// The entry's user data.
    pub user_data: u64,
    /// Bytes, events or zero; a negative value is an errno.
    pub result: i32,
}

/// Why `Ring::wait` returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// There are completions.
    Completions,
    /// The timeout passed without completions.
    TimedOut,
    /// A signal or a spurious wake-up; there are no completions.
    Interrupted,
}

pub(super) fn is_transient(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::INTR | Errno::BUSY | Errno::AGAIN)
    )
}

pub(super) fn setup_error(source: io::Error) -> RingError {
    match Errno::from_io_error(&source) {
        Some(Errno::PERM | Errno::NOSYS | Errno::ACCESS) => RingError::Forbidden {
            reason: forbidden_reason(
                std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled")
                    .ok()
                    .as_deref(),
            ),
            source,
        },
        _ => RingError::Io {
            doing: "setting it up",
            source,
        },
    }
}

impl From<Result<(), RingFull>> for Submitted {
    fn from(pushed: Result<(), RingFull>) -> Self {
        match pushed {
            Ok(()) => Self::Queued,
            Err(RingFull) => Self::RingFull,
        }
    }
}
