//! What can be wrong with a device before the first byte moves.
//!
//! **Purpose.** One error for opening and creating devices; each text names the path, what is wrong and what to do.
//!
//! **What it does not do.** Errors of single operations are plain [`rustix::io::Errno`]s, those of the fence are
//! [`crate::fence::FenceError`]s.

use std::path::PathBuf;

use crate::size::format_bytes;

/// Why a device cannot be opened or created.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// Nothing is at the path.
    #[error("{}: there is no such file or device; check the path, or create it first", .path.display())]
    Missing {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// A file that should be new is there already.
    #[error("{}: exists already; remove it or choose another path", .path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// The process may not open it for reading and writing.
    #[error("{}: no permission to read and write it; run as its owner or change its mode", .path.display())]
    Permission {
        /// The file or device.
        path: PathBuf,
    },
    /// The file system or the device is read-only.
    #[error("{}: is read-only; remount its file system or make the device writable", .path.display())]
    ReadOnly {
        /// The file or device.
        path: PathBuf,
    },
    /// A block device that somebody holds exclusively.
    #[error(
        "{}: is in use (mounted, swap, part of RAID or LVM, or opened by another program); free it first",
        .path.display()
    )]
    Busy {
        /// The device.
        path: PathBuf,
    },
    /// Neither a regular file nor a block device, or not the one that the spec says.
    #[error("{}: is {found}, but {wanted} is needed; correct the device spec", .path.display())]
    WrongType {
        /// The path.
        path: PathBuf,
        /// What it is.
        found: &'static str,
        /// What it should be.
        wanted: &'static str,
    },
    /// It is smaller than the pool knows it to be.
    #[error(
        "{}: holds {} but at least {} are expected: it was truncated or replaced; restore it before the pool is opened",
        .path.display(), format_bytes(*.found_bytes), format_bytes(*.expected_bytes)
    )]
    TooSmall {
        /// The file or device.
        path: PathBuf,
        /// Its capacity now.
        found_bytes: u64,
        /// The least that it must have.
        expected_bytes: u64,
    },
    /// The spec asks for something that cannot be.
    #[error("{}: {what}", .path.display())]
    Unusable {
        /// The path.
        path: PathBuf,
        /// What cannot be, and what to do.
        what: String,
    },
    /// A system call failed in a way that has no text of its own here.
    #[error("{}: {doing} failed: {source}", .path.display())]
    Io {
        /// The file or device.
        path: PathBuf,
        /// What was being done.
        doing: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}

impl DeviceError {
    /// An error of `doing` on `path`, told in the most helpful way that the errno allows.
    pub(crate) fn from_errno(
        path: &std::path::Path,
        doing: &'static str,
        errno: rustix::io::Errno,
    ) -> Self {
        use rustix::io::Errno;
        let path = path.to_owned();
        match errno {
            Errno::NOENT => Self::Missing { path },
            Errno::EXIST => Self::Exists { path },
            Errno::ACCESS | Errno::PERM => Self::Permission { path },
            Errno::ROFS => Self::ReadOnly { path },
            Errno::BUSY => Self::Busy { path },
            Errno::ISDIR => Self::WrongType {
                path,
                found: "a directory",
                wanted: "a regular file or a block device",
            },
            _ => Self::Io {
                path,
                doing,
                source: errno.into(),
            },
        }
    }
}
