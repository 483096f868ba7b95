//! Which pool this daemon has, and where its devices were last found.
//!
//! Purpose: `devices.json` in the state folder, so that a restart finds the pool without being told.
//! Design: the pool's and the devices' identities with their specification strings; the identities
//! are what counts, the strings say where to look first. It is written when it differs from what is
//! recorded, and never trusted to be complete: the catalog knows which devices there are. The run folder has the
//! same file beside what names the engine: it stands in for a damaged one and, while an engine lives, for a lost one.
//! Not here: looking (`open`, `find`).

use std::io;
use std::path::{Path, PathBuf};

use forebay_pool::{Pool, Uuid};
use serde::{Deserialize, Serialize};

use crate::files;

const RECORD_VERSION: u32 = 2;

/// A pool as it was last seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Recorded {
    version: u32,
    pub(crate) pool: Uuid,
    pub(crate) name: String,
    pub(crate) devices: Vec<RecordedDevice>,
}

/// A device as it was last seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RecordedDevice {
    pub(crate) uuid: Uuid,
    pub(crate) spec: String,
    /// It was cut short to so many bytes while in use, and nobody has taken that as it is.
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

/// The file that names the pool's devices, in the state folder or the run folder.
pub(crate) fn record_path(folder: &Path) -> PathBuf {
    folder.join("devices.json")
}

/// The recorded pool; `None` when there is none.
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
        let what = format!("format {} is not known to this release", version.version);
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            wrong(what).to_string(),
        ));
    }
    Recorded::deserialize(&found)
        .map(Some)
        .map_err(|error| wrong(error.to_string()))
}

/// Writes a record in place of one that was lost.
pub(crate) fn restore(state_dir: &Path, copy: &Recorded) -> io::Result<()> {
    files::write_json(&record_path(state_dir), copy, true)
}

/// Keeps in mind that a device was cut short to so many bytes.
pub(crate) fn mark_cut_short(state_dir: &Path, device: &Uuid, bytes: u64) -> io::Result<()> {
    set_cut_short(state_dir, |uuid| uuid == device, Some(bytes))
}

/// A person has taken these devices as they are.
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

/// Records a pool's devices, durably, unless that is what is recorded. What is kept in mind of them
/// stays.
pub(crate) fn record(state_dir: &Path, pool: &Pool) -> io::Result<()> {
    let mut now = Recorded::of(pool);
    let there = recorded(state_dir);
    if let Ok(Some(before)) = &there {
        for device in &mut now.devices {
            let before = before.devices.iter().find(|d| d.uuid == device.uuid);
            device.cut_short_bytes = before.and_then(|before| before.cut_short_bytes);
        }
    }
    // No write that isn't needed: the disk may be full.
    if there.is_ok_and(|there| there.as_ref() == Some(&now)) {
        return Ok(());
    }
    files::write_json(&record_path(state_dir), &now, true)
}
