//! The error of opening and creating devices. Operations fail with a [`rustix::io::Errno`], the
//! fence with a [`crate::fence::FenceError`].

use std::path::PathBuf;

use crate::size::format_bytes;

/// Why a device cannot be opened or created.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// Nothing is at the path.
    #[error("{}: there is no such file or device; check the path, or create it first", .path.display())]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// A new file exists already.
    #[error("{}: already exists; remove it or choose another path", .path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// No permission to read and write it.
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
    /// A block device that another user holds exclusively.
    #[error(
        "{}: is in use (mounted, swap, part of RAID or LVM, or opened by another program); free it first",
        .path.display()
    )]
    Busy {
        /// The device.
        path: PathBuf,
    },
    /// Not a file or block device, or not as the spec says.
    #[error("{}: is {found}, but {wanted} is needed; correct the device spec", .path.display())]
    WrongType {
        /// The path.
        path: PathBuf,
        /// The type found.
        found: &'static str,
        /// The type needed.
        wanted: &'static str,
    },
    /// It is smaller than the pool expects.
    #[error(
        "{}: holds {}, but at least {} are expected: it was truncated or replaced; restore it before you open the pool",
        .path.display(), format_bytes(*.found_bytes), format_bytes(*.expected_bytes)
    )]
    TooSmall {
        /// The file or device.
        path: PathBuf,
        /// Its capacity now.
        found_bytes: u64,
        /// The least capacity expected.
        expected_bytes: u64,
    },
    /// The spec is impossible.
    #[error("{}: {what}", .path.display())]
    Unusable {
        /// The path.
        path: PathBuf,
        /// The problem and the remedy.
        what: String,
    },
    /// Any other failed system call.
    #[error("{}: {doing} failed: {source}", .path.display())]
    Io {
        /// The file or device.
        path: PathBuf,
        /// The step that failed.
        doing: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
}

impl DeviceError {
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
