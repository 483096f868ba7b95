//! The list of all kinds. A spec's text names its kind; for a bare path, the file system tells it.

use std::path::Path;
use std::str::FromStr;

use super::info::DeviceKind;
use super::spec::{DeviceSpec, SpecError, SpecText};
use super::{BackendKind, block, file, local, null, ram, rbd};
use crate::error::DeviceError;

/// In the order in which messages name them.
static KINDS: &[&dyn BackendKind] = &[
    &file::FileKind,
    &block::BlockKind,
    &ram::RamKind,
    &null::NullKind,
    &rbd::RbdKind,
    #[cfg(feature = "test-device")]
    &super::volatile::VolatileKind,
    #[cfg(feature = "test-device")]
    &super::faulty::FaultyKind,
    #[cfg(all(test, feature = "test-device"))]
    &super::fake_remote::ThreadsKind,
];

pub(crate) fn resolved(
    spec: &DeviceSpec,
) -> Result<(DeviceSpec, &'static dyn BackendKind), DeviceError> {
    let spec = spec.clone().resolve()?;
    match KINDS.iter().find(|kind| spec.kind() == Some(kind.kind())) {
        Some(kind) => Ok((spec, *kind)),
        None => Err(DeviceError::Unusable {
            path: spec.path().to_owned(),
            what: "its kind is unknown; correct the device spec".to_owned(),
        }),
    }
}

impl DeviceSpec {
    /// Parses a spec whose path may be relative to `base_dir` (which should be absolute).
    pub fn parse_in(base_dir: &Path, text: &str) -> Result<Self, SpecError> {
        parse(text, Some(base_dir))
    }

    /// Finds the kind of a bare path. Other specs are returned unchanged.
    pub fn resolve(self) -> Result<Self, DeviceError> {
        if self.kind().is_some() {
            return Ok(self);
        }
        let path = self.path();
        match local::file_type(path)? {
            rustix::fs::FileType::RegularFile => Ok(Self::new(DeviceKind::File, path)),
            rustix::fs::FileType::BlockDevice => Ok(Self::new(DeviceKind::Block, path)),
            other => Err(DeviceError::WrongType {
                path: path.to_owned(),
                found: local::type_name(other),
                wanted: "a regular file or a block device",
            }),
        }
    }
}

fn parse(spec: &str, base_dir: Option<&Path>) -> Result<DeviceSpec, SpecError> {
    let owned = || spec.to_owned();
    if spec.contains('\0') {
        return Err(SpecError::Nul { spec: owned() });
    }
    // A path may hold colons, so only a plain word before the first one is a kind.
    let (name, rest) = match spec.split_once(':') {
        Some((name, rest)) if !name.contains('/') => (Some(name), rest),
        _ => (None, spec),
    };
    let text = SpecText {
        whole: spec,
        rest,
        base_dir,
    };
    let Some(name) = name else {
        return Ok(DeviceSpec::bare(text.absolute(rest)?));
    };
    match KINDS.iter().find(|kind| kind.kind().name() == name) {
        Some(kind) => kind.parse(&text),
        None => Err(SpecError::UnknownKind {
            spec: owned(),
            kind: name.to_owned(),
            known: known(),
        }),
    }
}

fn known() -> String {
    let examples = KINDS.iter().map(|kind| kind.example());
    let mut examples: Vec<&str> = examples.filter(|example| !example.is_empty()).collect();
    let last = examples.pop().unwrap_or_default();
    format!("/path, {} or {last}", examples.join(", "))
}

impl FromStr for DeviceSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        parse(text, None)
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
    use crate::kind::DeviceKind;
    use proptest::prelude::*;
    use std::path::PathBuf;

    #[test]
    fn reads_every_kind() {
        let path = || PathBuf::from("/a/b");
        for (text, spec) in [
            ("/a/b", DeviceSpec::bare(path())),
            ("file:/a/b", DeviceSpec::new(DeviceKind::File, path())),
            ("block:/a/b", DeviceSpec::new(DeviceKind::Block, path())),
            (
                "ram:/a/b?size=1G",
                DeviceSpec::new(DeviceKind::Ram, path()).with_size(1 << 30),
            ),
            (
                "null:/a/b?size=64G",
                DeviceSpec::new(DeviceKind::Null, path()).with_size(64 << 30),
            ),
            (
                "faulty:/a/b?size=1G&seed=7",
                DeviceSpec::new(DeviceKind::Faulty, path())
                    .with_size(1 << 30)
                    .with_options("seed=7"),
            ),
            (
                "/dev/disk/by-path/pci-0:1",
                DeviceSpec::bare("/dev/disk/by-path/pci-0:1"),
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
            Ok(DeviceSpec::new(DeviceKind::Ram, "/base/x").with_size(4096))
        );
        assert!(DeviceSpec::parse_in(Path::new("/base"), "file:").is_err());
    }

    #[test]
    fn a_bare_path_is_resolved() {
        let file = tempfile::NamedTempFile::new().expect("temporary file");
        let spec = DeviceSpec::bare(file.path().to_owned());
        assert_eq!(
            spec.resolve().expect("resolves"),
            DeviceSpec::new(DeviceKind::File, file.path().to_owned())
        );
        let null = DeviceSpec::bare("/dev/null");
        let error = null.resolve().expect_err("a character device").to_string();
        assert!(error.contains("a character device"), "{error}");
        let gone = DeviceSpec::bare("/nonexistent/x");
        assert!(matches!(gone.resolve(), Err(DeviceError::Missing { .. })));
    }

    proptest! {
        #[test]
        fn text_reads_back(path in "/[a-z?:=/.-]{0,20}", size in 1u64..1 << 40, kind in 0..6) {
            let path = PathBuf::from(path);
            let size_bytes = size * 4096;
            let spec = match kind {
                0 => DeviceSpec::bare(path),
                1 => DeviceSpec::new(DeviceKind::File, path),
                2 => DeviceSpec::new(DeviceKind::Block, path),
                3 => DeviceSpec::new(DeviceKind::Ram, path).with_size(size_bytes),
                4 => DeviceSpec::new(DeviceKind::Volatile, path).with_size(size_bytes),
                _ => DeviceSpec::new(DeviceKind::Null, path).with_size(size_bytes),
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
