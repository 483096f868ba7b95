//! How a device is named: in the catalog, in configuration, on the command line, and between the processes.
//!
//! **Purpose.** One text form, the same everywhere, and its parser.
//!
//! ```text
//! /path                    a regular file or a block device, whichever is there
//! file:/path               a regular file
//! block:/path              a block device
//! ram:/path?size=1G        a file (best on tmpfs) that is copied by the CPU through a mapping
//! null:/path?size=64G      the file keeps label and catalog; data vanishes
//! ```
//!
//! What is read of data that vanished is undefined: zeros where it passes through a buffer of ours, as over the network;
//! whatever was in its own memory before for who reads directly into that, as a machine does.
//!
//! **Design.** Paths are absolute, because daemon and engine need not share a working directory;
//! [`DeviceSpec::parse_in`] makes them so for the command line. Only UTF-8 paths: a spec travels as JSON.
//!
//! **What it does not do.** It opens nothing; only [`DeviceSpec::resolve`] looks at the file system.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::error::DeviceError;
use crate::size::{CAPACITY_BLOCK_BYTES, SizeError, format_exact, parse_capacity};

/// Names a device. See the module for the text forms.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeviceSpec {
    /// A regular file or a block device: [`DeviceSpec::resolve`] finds out which.
    Path {
        /// Absolute path.
        path: PathBuf,
    },
    /// A regular file.
    File {
        /// Absolute path.
        path: PathBuf,
    },
    /// A block device node.
    Block {
        /// Absolute path. Everybody must open the same node: the fence's locks live on the node's inode.
        path: PathBuf,
    },
    /// A mapped file, best on tmpfs.
    Ram {
        /// Absolute path of the file.
        path: PathBuf,
        /// Capacity.
        size_bytes: u64,
    },
    /// For tests: a file with a volatile write cache, see [`crate::volatile`]. On the command line
    /// `volatile:/path?size=1G`.
    #[cfg(feature = "test-device")]
    Volatile {
        /// Absolute path of what reads see.
        path: PathBuf,
        /// Capacity.
        size_bytes: u64,
    },
    /// For tests: a file whose faults a test chooses, see [`crate::faulty`]. On the command line
    /// `faulty:/path?size=1G&seed=7`.
    #[cfg(feature = "test-device")]
    Faulty {
        /// Absolute path of the file.
        path: PathBuf,
        /// Capacity.
        size_bytes: u64,
        /// Start of what is left to chance.
        seed: u64,
    },
    /// A device without data.
    Null {
        /// Absolute path of the file with label and catalog.
        path: PathBuf,
        /// Capacity that it shows.
        size_bytes: u64,
    },
}

/// Why a text is not a device spec.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// The part before the colon is unknown.
    #[error(
        "`{spec}`: unknown device kind `{kind}`; use /path, file:/path, block:/path, ram:/path?size=1G or null:/path?size=64G"
    )]
    UnknownKind {
        /// The whole text.
        spec: String,
        /// Its kind.
        kind: String,
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
    /// Something else than `size` after the question mark.
    #[error("`{spec}`: unknown option `{option}`; only size=... is known")]
    UnknownOption {
        /// The whole text.
        spec: String,
        /// The option.
        option: String,
    },
    /// The size cannot be read.
    #[error("`{spec}`: {error}")]
    Size {
        /// The whole text.
        spec: String,
        /// What is wrong with it.
        error: SizeError,
    },
    /// The size is zero, not a multiple of 4 KiB, or beyond what file offsets can say.
    #[error("`{spec}`: the size must be a multiple of 4K, at least 4K and below 4E")]
    SizeRange {
        /// The whole text.
        spec: String,
    },
    /// The path holds a NUL byte.
    #[error("`{spec}`: the path holds a NUL byte")]
    Nul {
        /// The whole text.
        spec: String,
    },
}

/// File offsets above this belong to the fence.
pub(crate) const MAX_CAPACITY_BYTES: u64 = 1 << 61;

impl DeviceSpec {
    /// The path of the file or node.
    pub fn path(&self) -> &Path {
        match self {
            Self::Path { path }
            | Self::File { path }
            | Self::Block { path }
            | Self::Ram { path, .. }
            | Self::Null { path, .. } => path,
            #[cfg(feature = "test-device")]
            Self::Volatile { path, .. } | Self::Faulty { path, .. } => path,
        }
    }

    /// Parses a spec whose path may be relative to `base_dir` (which should be absolute itself).
    pub fn parse_in(base_dir: &Path, text: &str) -> Result<Self, SpecError> {
        Self::parse(text, Some(base_dir))
    }

    /// Looks what a bare path is. Other specs are returned as they are.
    pub fn resolve(self) -> Result<Self, DeviceError> {
        match self {
            Self::Path { path } => match file_type(&path)? {
                rustix::fs::FileType::RegularFile => Ok(Self::File { path }),
                rustix::fs::FileType::BlockDevice => Ok(Self::Block { path }),
                other => Err(DeviceError::WrongType {
                    path,
                    found: type_name(other),
                    wanted: "a regular file or a block device",
                }),
            },
            other => Ok(other),
        }
    }

    fn parse(spec: &str, base_dir: Option<&Path>) -> Result<Self, SpecError> {
        let owned = || spec.to_owned();
        if spec.contains('\0') {
            return Err(SpecError::Nul { spec: owned() });
        }
        let absolute = |path: &str| -> Result<PathBuf, SpecError> {
            match base_dir {
                Some(base) if !path.is_empty() => Ok(base.join(path)),
                _ if path.starts_with('/') => Ok(PathBuf::from(path)),
                _ => Err(SpecError::NotAbsolute { spec: owned() }),
            }
        };
        // A path may hold colons, so only a plain word before the first one is a kind.
        let (kind, rest) = match spec.split_once(':') {
            Some((kind, rest)) if !kind.contains('/') => (kind, rest),
            _ => ("", spec),
        };
        match kind {
            "" if spec.starts_with(':') => Err(SpecError::UnknownKind {
                spec: owned(),
                kind: String::new(),
            }),
            "" => Ok(Self::Path {
                path: absolute(rest)?,
            }),
            "file" => Ok(Self::File {
                path: absolute(rest)?,
            }),
            "block" => Ok(Self::Block {
                path: absolute(rest)?,
            }),
            _ if kind == "ram" || kind == "null" || is_for_tests(kind) => {
                let (path, option) = rest
                    .rsplit_once('?')
                    .ok_or(SpecError::NoSize { spec: owned() })?;
                let unknown = |option: &str| SpecError::UnknownOption {
                    spec: owned(),
                    option: option.to_owned(),
                };
                #[cfg(feature = "test-device")]
                let (option, seed) = match option.split_once("&seed=") {
                    Some((option, seed)) if kind == "faulty" => {
                        (option, seed.parse().map_err(|_| unknown(seed))?)
                    }
                    _ => (option, 0),
                };
                let size = option
                    .strip_prefix("size=")
                    .ok_or_else(|| unknown(option))?;
                let size_bytes = parse_capacity(size).map_err(|error| SpecError::Size {
                    spec: owned(),
                    error,
                })?;
                if size_bytes == 0
                    || !size_bytes.is_multiple_of(CAPACITY_BLOCK_BYTES)
                    || size_bytes > MAX_CAPACITY_BYTES
                {
                    return Err(SpecError::SizeRange { spec: owned() });
                }
                let path = absolute(path)?;
                Ok(match kind {
                    "ram" => Self::Ram { path, size_bytes },
                    #[cfg(feature = "test-device")]
                    "volatile" => Self::Volatile { path, size_bytes },
                    #[cfg(feature = "test-device")]
                    "faulty" => Self::Faulty {
                        path,
                        size_bytes,
                        seed,
                    },
                    _ => Self::Null { path, size_bytes },
                })
            }
            _ => Err(SpecError::UnknownKind {
                spec: owned(),
                kind: kind.to_owned(),
            }),
        }
    }
}

/// Only where tests run.
fn is_for_tests(kind: &str) -> bool {
    cfg!(feature = "test-device") && (kind == "volatile" || kind == "faulty")
}

pub(crate) fn file_type(path: &Path) -> Result<rustix::fs::FileType, DeviceError> {
    let stat = rustix::fs::stat(path)
        .map_err(|errno| DeviceError::from_errno(path, "looking at it", errno))?;
    Ok(rustix::fs::FileType::from_raw_mode(stat.st_mode))
}

pub(crate) fn type_name(kind: rustix::fs::FileType) -> &'static str {
    use rustix::fs::FileType;
    match kind {
        FileType::RegularFile => "a regular file",
        FileType::BlockDevice => "a block device",
        FileType::Directory => "a directory",
        FileType::CharacterDevice => "a character device",
        FileType::Fifo => "a pipe",
        FileType::Socket => "a socket",
        _ => "something else",
    }
}

impl FromStr for DeviceSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        Self::parse(text, None)
    }
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path { path } => write!(f, "{}", path.display()),
            Self::File { path } => write!(f, "file:{}", path.display()),
            Self::Block { path } => write!(f, "block:{}", path.display()),
            Self::Ram { path, size_bytes } => {
                write!(
                    f,
                    "ram:{}?size={}",
                    path.display(),
                    format_exact(*size_bytes)
                )
            }
            #[cfg(feature = "test-device")]
            Self::Volatile { path, size_bytes } => {
                write!(
                    f,
                    "volatile:{}?size={}",
                    path.display(),
                    format_exact(*size_bytes)
                )
            }
            #[cfg(feature = "test-device")]
            Self::Faulty {
                path,
                size_bytes,
                seed,
            } => write!(
                f,
                "faulty:{}?size={}&seed={seed}",
                path.display(),
                format_exact(*size_bytes)
            ),
            Self::Null { path, size_bytes } => {
                write!(
                    f,
                    "null:{}?size={}",
                    path.display(),
                    format_exact(*size_bytes)
                )
            }
        }
    }
}

impl serde::Serialize for DeviceSpec {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for DeviceSpec {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_every_kind() {
        let path = || PathBuf::from("/a/b");
        for (text, spec) in [
            ("/a/b", DeviceSpec::Path { path: path() }),
            ("file:/a/b", DeviceSpec::File { path: path() }),
            ("block:/a/b", DeviceSpec::Block { path: path() }),
            (
                "ram:/a/b?size=1G",
                DeviceSpec::Ram {
                    path: path(),
                    size_bytes: 1 << 30,
                },
            ),
            (
                "null:/a/b?size=64G",
                DeviceSpec::Null {
                    path: path(),
                    size_bytes: 64 << 30,
                },
            ),
            (
                "faulty:/a/b?size=1G&seed=7",
                DeviceSpec::Faulty {
                    path: path(),
                    size_bytes: 1 << 30,
                    seed: 7,
                },
            ),
            (
                "/dev/disk/by-path/pci-0:1",
                DeviceSpec::Path {
                    path: "/dev/disk/by-path/pci-0:1".into(),
                },
            ),
        ] {
            assert_eq!(text.parse(), Ok(spec.clone()), "{text}");
            assert_eq!(spec.to_string(), text);
        }
    }

    #[test]
    fn decimal_sizes_are_rounded_up() {
        for (text, whole) in [
            ("ram:/x?size=10MB", "ram:/x?size=9768K"),
            ("null:/x?size=0.01GB", "null:/x?size=9768K"),
            ("ram:/x?size=0.3G", "ram:/x?size=314576K"),
        ] {
            let spec: DeviceSpec = text.parse().unwrap();
            assert_eq!(spec.to_string(), whole, "{text}");
        }
    }

    #[test]
    fn refuses_with_the_reason() {
        for (text, reason) in [
            ("", "absolute"),
            ("disk.img", "absolute"),
            ("file:disk.img", "absolute"),
            ("ram:/x", "size is missing"),
            ("ram:/x?pages=1", "unknown option"),
            ("ram:/x?size=lots", "not a size"),
            ("ram:/x?size=0", "multiple of 4K"),
            ("null:/x?size=5000", "multiple of 4K"),
            ("null:/x?size=8E", "below 4E"),
            ("ram:/x?size=4K&seed=1", "not a size"),
            ("faulty:/x?size=4K&seed=x", "unknown option"),
            ("nvme:/x", "unknown device kind `nvme`"),
            (":/x", "unknown device kind"),
            ("/x\0y", "NUL"),
        ] {
            let error = text.parse::<DeviceSpec>().expect_err(text).to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn relative_paths_need_a_base() {
        let spec = DeviceSpec::parse_in(Path::new("/base"), "ram:x?size=4K");
        assert_eq!(
            spec,
            Ok(DeviceSpec::Ram {
                path: "/base/x".into(),
                size_bytes: 4096
            })
        );
        assert!(DeviceSpec::parse_in(Path::new("/base"), "file:").is_err());
    }

    #[test]
    fn a_bare_path_is_resolved() {
        let file = tempfile::NamedTempFile::new().expect("temporary file");
        let spec = DeviceSpec::Path {
            path: file.path().to_owned(),
        };
        assert_eq!(
            spec.resolve().expect("resolves"),
            DeviceSpec::File {
                path: file.path().to_owned()
            }
        );
        let null = DeviceSpec::Path {
            path: "/dev/null".into(),
        };
        let error = null.resolve().expect_err("a character device").to_string();
        assert!(error.contains("a character device"), "{error}");
        let gone = DeviceSpec::Path {
            path: "/nonexistent/x".into(),
        };
        assert!(matches!(gone.resolve(), Err(DeviceError::Missing { .. })));
    }

    proptest! {
        #[test]
        fn text_reads_back(path in "/[a-z?:=/.-]{0,20}", size in 1u64..1 << 40, kind in 0..6) {
            let path = PathBuf::from(path);
            let size_bytes = size * 4096;
            let spec = match kind {
                0 => DeviceSpec::Path { path },
                1 => DeviceSpec::File { path },
                2 => DeviceSpec::Block { path },
                3 => DeviceSpec::Ram { path, size_bytes },
                4 => DeviceSpec::Volatile { path, size_bytes },
                _ => DeviceSpec::Null { path, size_bytes },
            };
            prop_assert_eq!(spec.to_string().parse(), Ok(spec.clone()));
            let json = serde_json::to_string(&spec).expect("to JSON");
            prop_assert_eq!(serde_json::from_str::<DeviceSpec>(&json).expect("from JSON"), spec);
        }
        #[test]
        fn never_panics(text in ".{0,60}") {
            let _ = text.parse::<DeviceSpec>();
        }
    }
}
