//! Errors: a kind for programs, a message for people.
//!
//! **Design.** One type. The kind decides what the caller does (a REST status, an NVMe status, a
//! retry); the message says what is wrong and what to do about it. **Not here:** logging.

use std::{fmt, io};

/// What sort of failure it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorKind {
    /// The thing that was named does not exist.
    NotFound,
    /// A thing of that name exists already.
    Exists,
    /// Something still uses it, or it is not ready for this yet.
    InUse,
    /// The request makes no sense as it stands.
    Invalid,
    /// The pool, or its catalog, has no room for it.
    NoSpace,
    /// What is on the device contradicts itself or its checksum.
    Damaged,
    /// The device below failed.
    Io,
}

/// An error of the pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolError {
    /// What sort of failure it is.
    pub kind: ErrorKind,
    /// What is wrong and what to do about it.
    pub message: String,
}

/// The result of a pool operation.
pub type Result<T> = std::result::Result<T, PoolError>;

impl PoolError {
    /// An error of `kind` that says `message`.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::NotFound, message)
    }

    pub(crate) fn exists(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Exists, message)
    }

    pub(crate) fn in_use(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InUse, message)
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    pub(crate) fn no_space(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::NoSpace, message)
    }

    pub(crate) fn damaged(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Damaged, message)
    }

    /// An I/O error, with what was being done.
    pub(crate) fn io(doing: &str, error: &io::Error) -> Self {
        Self::new(ErrorKind::Io, format!("{doing}: {error}"))
    }
}

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for PoolError {}
