//! The text form of a device, for users, files and messages.
//!
//! ```text
//! /path                    a regular file or a block device, whichever is there
//! file:/path               a regular file
//! block:/path              a block device
//! ram:/path?size=1G        a file (best on tmpfs) that is copied by the CPU through a mapping
//! null:/path?size=64G      the file keeps label and catalog; data vanishes
//! ```
//!
//! A read of vanished data returns zeros through an internal buffer (as over the network), and
//! leaves a VM's own memory as it was. Paths are absolute, because daemon and engine may have
//! different working directories. They are UTF-8, because specs travel as JSON.

use std::fmt;
use std::path::{Path, PathBuf};

use super::info::DeviceKind;
use crate::size::{CAPACITY_BLOCK_BYTES, SizeError, format_exact, parse_capacity};

/// Names a device. See the module for the text forms.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceSpec {
    kind: Option<DeviceKind>,
    path: PathBuf,
    size_bytes: Option<u64>,
    options: String,
}

/// Why a text is not a device spec.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// The part before the colon is unknown.
    #[error("`{spec}`: unknown device kind `{kind}`; use {known}")]
    UnknownKind {
        /// The whole text.
        spec: String,
        /// Its kind.
        kind: String,
        /// Examples of all kinds.
        known: String,
    },
    /// The path is empty or relative.
    #[error("`{spec}`: the path must be absolute")]
    NotAbsolute {
        /// The whole text.
        spec: String,
    },
    /// `ram` or `null` without `?size=`.
    #[error("`{spec}`: the size is missing; add for example ?size=1G")]
    NoSize {
        /// The whole text.
        spec: String,
    },
    /// An option other than `size`.
    #[error("`{spec}`: unknown option `{option}`; only size=... is known")]
    UnknownOption {
        /// The whole text.
        spec: String,
        /// The option.
        option: String,
    },
    /// The size is invalid.
    #[error("`{spec}`: {error}")]
    Size {
        /// The whole text.
        spec: String,
        /// The reason.
        error: SizeError,
    },
    /// The size is zero, not a multiple of 4 KiB, or too large for file offsets.
    #[error("`{spec}`: the size must be a multiple of 4K, at least 4K and below 4E")]
    SizeRange {
        /// The whole text.
        spec: String,
    },
    /// The path holds a NUL byte.
    #[error("`{spec}`: the path contains a NUL byte")]
    Nul {
        /// The whole text.
        spec: String,
    },
}

/// File offsets above this belong to the fence.
pub(crate) const MAX_CAPACITY_BYTES: u64 = 1 << 61;

impl DeviceSpec {
    /// A regular file or a block device; [`DeviceSpec::resolve`] finds out which.
    pub fn bare(path: impl Into<PathBuf>) -> Self {
        Self {
            kind: None,
            path: path.into(),
            size_bytes: None,
            options: String::new(),
        }
    }

    /// A device of this kind; `path` is absolute.
    pub fn new(kind: DeviceKind, path: impl Into<PathBuf>) -> Self {
        Self {
            kind: Some(kind),
            ..Self::bare(path)
        }
    }

    /// Sets the capacity, as `?size=` does.
    #[must_use]
    pub fn with_size(self, size_bytes: u64) -> Self {
        let size_bytes = Some(size_bytes);
        Self { size_bytes, ..self }
    }

    /// Sets options of the kind: `key=value`, joined by `&`.
    #[must_use]
    pub fn with_options(self, options: impl Into<String>) -> Self {
        let options = options.into();
        Self { options, ..self }
    }

    /// The kind; `None` for a bare path.
    pub fn kind(&self) -> Option<DeviceKind> {
        self.kind
    }

    /// The path of the file or node; a remote kind's address.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The capacity in the spec.
    pub fn size_bytes(&self) -> Option<u64> {
        self.size_bytes
    }

    /// Options of the kind.
    pub fn options(&self) -> &str {
        &self.options
    }
}

pub(crate) struct SpecText<'a> {
    pub(super) whole: &'a str,
    pub(super) rest: &'a str,
    pub(super) base_dir: Option<&'a Path>,
}

impl<'a> SpecText<'a> {
    pub(crate) fn absolute(&self, path: &str) -> Result<PathBuf, SpecError> {
        match self.base_dir {
            Some(base) if !path.is_empty() => Ok(base.join(path)),
            _ if path.starts_with('/') => Ok(PathBuf::from(path)),
            _ => Err(SpecError::NotAbsolute {
                spec: self.whole.to_owned(),
            }),
        }
    }

    pub(crate) fn only_path(&self, kind: DeviceKind) -> Result<DeviceSpec, SpecError> {
        Ok(DeviceSpec::new(kind, self.absolute(self.rest)?))
    }

    pub(crate) fn path_and_size(&self, kind: DeviceKind) -> Result<DeviceSpec, SpecError> {
        let spec = || self.whole.to_owned();
        let (path, option) =
            (self.rest.rsplit_once('?')).ok_or_else(|| SpecError::NoSize { spec: spec() })?;
        let size = (option.strip_prefix("size=")).ok_or_else(|| self.unknown_option(option))?;
        let size_bytes = parse_capacity(size).map_err(|error| SpecError::Size {
            spec: spec(),
            error,
        })?;
        if size_bytes == 0
            || !size_bytes.is_multiple_of(CAPACITY_BLOCK_BYTES)
            || size_bytes > MAX_CAPACITY_BYTES
        {
            return Err(SpecError::SizeRange { spec: spec() });
        }
        Ok(DeviceSpec::new(kind, self.absolute(path)?).with_size(size_bytes))
    }

    pub(crate) fn unknown_option(&self, option: &str) -> SpecError {
        SpecError::UnknownOption {
            spec: self.whole.to_owned(),
            option: option.to_owned(),
        }
    }
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(kind) = self.kind {
            write!(f, "{kind}:")?;
        }
        write!(f, "{}", self.path.display())?;
        let mut before = '?';
        if let Some(size_bytes) = self.size_bytes {
            write!(f, "?size={}", format_exact(size_bytes))?;
            before = '&';
        }
        if !self.options.is_empty() {
            write!(f, "{before}{}", self.options)?;
        }
        Ok(())
    }
}

impl serde::Serialize for DeviceSpec {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
