//! Names of volumes, snapshots and exports: parsing, and shell completion, which asks the daemon.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

use clap_complete::CompletionCandidate;
use clap_complete::engine::ArgValueCompleter;
use forebay_control::api::client::Client;
use forebay_control::model::error::ApiError;
use forebay_control::model::rbd::ImagePath;
use forebay_control::model::{Export, Tenant, Volume};
use serde::de::DeserializeOwned;

/// With a longer wait the shell seems to hang.
const TIME_LIMIT: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VolumeName {
    pub(crate) tenant: String,
    pub(crate) volume: String,
}

impl VolumeName {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        match text.split_once('/') {
            Some((tenant, volume))
                if !tenant.is_empty() && !volume.is_empty() && !volume.contains('/') =>
            {
                Ok(Self {
                    tenant: tenant.to_owned(),
                    volume: volume.to_owned(),
                })
            }
            _ => Err("a volume is named TENANT/VOLUME".to_owned()),
        }
    }
}

impl std::fmt::Display for VolumeName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.tenant, self.volume)
    }
}

/// `TENANT/VOLUME@NAME`, which is a volume's name for the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SnapshotName(pub(crate) VolumeName);

impl SnapshotName {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let name = VolumeName::parse(text).ok();
        let name = name.filter(|name| {
            let parts = name.volume.split_once('@');
            parts.is_some_and(|(of, own)| !of.is_empty() && !own.is_empty())
        });
        name.map(Self)
            .ok_or_else(|| "a snapshot is named TENANT/VOLUME@NAME".to_owned())
    }

    pub(crate) fn tenant(&self) -> &str {
        &self.0.tenant
    }

    /// The volume.
    pub(crate) fn of(&self) -> VolumeName {
        let parts = self.0.volume.split_once('@');
        VolumeName {
            tenant: self.0.tenant.clone(),
            volume: parts.map_or("", |(of, _)| of).to_owned(),
        }
    }
}

impl std::fmt::Display for SnapshotName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// `TENANT` or `TENANT/VOLUME`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SnapshotsOf {
    pub(crate) tenant: String,
    pub(crate) volume: Option<String>,
}

impl SnapshotsOf {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        if !text.is_empty() && !text.contains('/') {
            return Ok(Self {
                tenant: text.to_owned(),
                volume: None,
            });
        }
        let name =
            VolumeName::parse(text).map_err(|_| "give TENANT or TENANT/VOLUME".to_owned())?;
        Ok(Self {
            tenant: name.tenant,
            volume: Some(name.volume),
        })
    }
}

/// An RBD image.
pub(super) fn image(text: &str) -> Result<ImagePath, String> {
    text.parse().map_err(|error: ApiError| match &error.hint {
        Some(hint) => format!("{error}; {hint}"),
        None => error.to_string(),
    })
}

fn ask<T: DeserializeOwned>(path: &str) -> Option<Vec<T>> {
    let said = said_socket(std::env::args_os());
    let socket = crate::config::socket(said).ok()?;
    let client = Client::new(&socket).with_time_limit(TIME_LIMIT);
    client.get(path).ok()
}

/// The shell passes raw words: quotes, `~`, and in bash a separate `=`.
fn said_socket(words: impl Iterator<Item = OsString>) -> Option<PathBuf> {
    let words: Vec<String> = words.filter_map(|word| word.into_string().ok()).collect();
    let at = words
        .iter()
        .rposition(|word| word.starts_with("--socket"))?;
    let value = match words[at].strip_prefix("--socket=") {
        Some(value) => value,
        None => match words.get(at + 1)?.as_str() {
            "=" => words.get(at + 2)?,
            value => value,
        },
    };
    let value = value.trim_matches(['\'', '"']);
    let home = || std::env::var_os("HOME").map(PathBuf::from);
    match value.strip_prefix("~/") {
        Some(below) => home().map(|home| home.join(below)),
        None => Some(value.into()),
    }
}

fn that_begin<T: DeserializeOwned>(
    path: &str,
    with: &OsStr,
    name: impl Fn(T) -> Option<String>,
) -> Vec<CompletionCandidate> {
    let Some(with) = with.to_str() else {
        return Vec::new();
    };
    let all = ask::<T>(path).unwrap_or_default();
    let names = all
        .into_iter()
        .filter_map(name)
        .filter(|name| name.starts_with(with));
    names.map(CompletionCandidate::new).collect()
}

pub(super) fn tenants() -> ArgValueCompleter {
    ArgValueCompleter::new(|with: &OsStr| {
        that_begin("/v1/tenants", with, |of: Tenant| Some(of.name))
    })
}

pub(super) fn new_volumes() -> ArgValueCompleter {
    let name = |of: Tenant| Some(format!("{}/", of.name));
    ArgValueCompleter::new(move |with: &OsStr| that_begin("/v1/tenants", with, name))
}

fn of_volumes(is_wanted: fn(&Volume) -> bool) -> ArgValueCompleter {
    let name = move |of: Volume| is_wanted(&of).then(|| format!("{}/{}", of.tenant, of.name));
    ArgValueCompleter::new(move |with: &OsStr| that_begin("/v1/volumes", with, name))
}

/// Volumes that can be changed.
pub(super) fn volumes() -> ArgValueCompleter {
    of_volumes(|volume| volume.snapshot.is_none())
}

pub(super) fn snapshots() -> ArgValueCompleter {
    of_volumes(|volume| volume.snapshot.is_some())
}

pub(super) fn volumes_and_snapshots() -> ArgValueCompleter {
    of_volumes(|_| true)
}

/// The shell adds the name: `TENANT/VOLUME@`.
pub(super) fn new_snapshots() -> ArgValueCompleter {
    let name = |of: Volume| {
        let is_volume = of.snapshot.is_none();
        is_volume.then(|| format!("{}/{}@", of.tenant, of.name))
    };
    ArgValueCompleter::new(move |with: &OsStr| that_begin("/v1/volumes", with, name))
}

/// `TENANT/VOLUME@ID` for a volume with several exports.
pub(crate) fn exports() -> ArgValueCompleter {
    let name = |of: Export| {
        Some(match of.shared {
            true => format!("{}/{}@{}", of.tenant, of.volume, of.id),
            false => format!("{}/{}", of.tenant, of.volume),
        })
    };
    ArgValueCompleter::new(move |with: &OsStr| that_begin("/v1/exports", with, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_are_named_after_their_volume() {
        let name = SnapshotName::parse("acme/db@monday").unwrap();
        assert_eq!((name.tenant(), &*name.of().volume), ("acme", "db"));
        assert_eq!(name.to_string(), "acme/db@monday");
        for wrong in [
            "acme/db",
            "acme/db@",
            "acme/@monday",
            "db@monday",
            "a/b/c@d",
            "/b@c",
        ] {
            SnapshotName::parse(wrong).unwrap_err();
        }
        let of = |text| SnapshotsOf::parse(text).map(|of| (of.tenant, of.volume));
        assert_eq!(of("acme"), Ok(("acme".to_owned(), None)));
        assert_eq!(
            of("acme/db"),
            Ok(("acme".to_owned(), Some("db".to_owned())))
        );
        for wrong in ["", "acme/", "/db", "a/b/c"] {
            of(wrong).unwrap_err();
        }
    }

    #[test]
    fn the_socket_of_the_line_is_asked() {
        let said = |line: &str| {
            let words = line.split(' ').map(OsString::from);
            said_socket(words).map(|path| path.display().to_string())
        };
        let home = std::env::var("HOME").unwrap();
        for (line, socket) in [
            ("forebay volume show a", None),
            (
                "forebay --socket /x/api.sock volume show a",
                Some("/x/api.sock"),
            ),
            ("forebay volume show a --socket=/x", Some("/x")),
            ("forebay --socket = /x volume show a", Some("/x")),
            ("forebay --socket '/x' volume show a", Some("/x")),
            (
                "forebay --socket ~/x volume show a",
                Some(&*format!("{home}/x")),
            ),
            ("forebay volume show a --socket", None),
        ] {
            assert_eq!(said(line).as_deref(), socket, "{line}");
        }
    }
}
