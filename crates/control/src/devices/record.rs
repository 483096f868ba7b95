//! `devices.json` in the state folder: this daemon's pool, and where its devices were last found.
//!
//! Identities count; specifications say where to look first. The catalog knows the complete list. A
//! copy in the run folder replaces a damaged record, or a lost one while an engine lives.

use std::io;
use std::path::{Path, PathBuf};

use forebay_pool::Pool;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::files;

const RECORD_VERSION: u32 = 2;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Recorded {
    version: u32,
    #[serde(with = "uuid::serde::compact")]
    pub(crate) pool: Uuid,
    pub(crate) name: String,
    pub(crate) devices: Vec<RecordedDevice>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RecordedDevice {
    #[serde(with = "uuid::serde::compact")]
    pub(crate) uuid: Uuid,
    pub(crate) spec: String,
    /// Set when it was truncated to this size while in use, until the operator accepts that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cut_short_bytes: Option<u64>,
}

impl Recorded {
    fn of(pool: &Pool) -> Self {
        Self {
            version: RECORD_VERSION,
            pool: pool.info().uuid,
            name: pool.info().name.clone(),
            devices: pool
                .devices()
                .iter()
                .map(|device| RecordedDevice {
                    uuid: device.uuid,
                    spec: device.spec.clone(),
                    cut_short_bytes: None,
                })
                .collect(),
        }
    }
}

pub(crate) fn record_path(folder: &Path) -> PathBuf {
    folder.join("devices.json")
}

/// `None` if there is no record.
pub(crate) fn recorded(state_dir: &Path) -> io::Result<Option<Recorded>> {
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    let path = record_path(state_dir);
    let wrong = |what: String| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{}: {what}", path.display()),
        )
    };
    let Some(found) = files::read_json::<serde_json::Value>(&path)? else {
        return Ok(None);
    };
    let version = Version::deserialize(&found).map_err(|error| wrong(error.to_string()))?;
    if version.version != RECORD_VERSION {
        let what = format!("this release does not know format {}", version.version);
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            wrong(what).to_string(),
        ));
    }
    Recorded::deserialize(&found)
        .map(Some)
        .map_err(|error| wrong(error.to_string()))
}

pub(crate) fn restore(state_dir: &Path, copy: &Recorded) -> io::Result<()> {
    files::write_json(&record_path(state_dir), copy, true)
}

/// Records that a device was truncated.
pub(crate) fn mark_cut_short(state_dir: &Path, device: &Uuid, bytes: u64) -> io::Result<()> {
    set_cut_short(state_dir, |uuid| uuid == device, Some(bytes))
}

/// The operator has accepted these devices.
pub(crate) fn forgive_cut_short(state_dir: &Path, devices: &[Uuid]) -> io::Result<()> {
    set_cut_short(state_dir, |uuid| devices.contains(uuid), None)
}

fn set_cut_short(
    state_dir: &Path,
    which: impl Fn(&Uuid) -> bool,
    bytes: Option<u64>,
) -> io::Result<()> {
    let Some(before) = recorded(state_dir)? else {
        return Ok(());
    };
    let mut now = before.clone();
    for device in now.devices.iter_mut().filter(|device| which(&device.uuid)) {
        device.cut_short_bytes = bytes;
    }
    if now == before {
        return Ok(());
    }
    files::write_json(&record_path(state_dir), &now, true)
}

/// Records a pool's devices durably if they changed; keeps the marks of truncated ones.
pub(crate) fn record(state_dir: &Path, pool: &Pool) -> io::Result<()> {
    let mut now = Recorded::of(pool);
    let there = recorded(state_dir);
    if let Ok(Some(before)) = &there {
        for device in &mut now.devices {
            let before = before.devices.iter().find(|d| d.uuid == device.uuid);
            device.cut_short_bytes = before.and_then(|before| before.cut_short_bytes);
        }
    }
    // Avoids needless writes: the disk may be full.
    if there.is_ok_and(|there| there.as_ref() == Some(&now)) {
        return Ok(());
    }
    files::write_json(&record_path(state_dir), &now, true)
}
