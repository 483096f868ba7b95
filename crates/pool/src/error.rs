//! Errors: a kind for the caller's decision, a message with the problem and its remedy.

use std::{fmt, io};

/// The kind of an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorKind {
    /// The named object does not exist.
    NotFound,
    /// An object with this name exists.
    Exists,
    /// It is in use, or not ready for this yet.
    InUse,
    /// The request is invalid.
    Invalid,
    /// The pool, or its catalog, is full.
    NoSpace,
    /// Data contradicts itself or its checksum.
    Damaged,
    /// The device failed.
    Io,
}

/// An error of the pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolError {
    /// The kind.
    pub kind: ErrorKind,
    /// The problem and its remedy.
    pub message: String,
}

/// The result of a pool operation.
pub type Result<T> = std::result::Result<T, PoolError>;

impl PoolError {
    /// An error with this kind and message.
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

    /// `doing` names the failed operation.
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
