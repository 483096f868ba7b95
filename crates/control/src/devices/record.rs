//! Which pool this daemon has, and where its devices were last found.
//!
//! Purpose: `devices.json` in the state folder, so that a restart finds the pool without being told.
//! Design: the pool's and the devices' identities with their specification strings; the identities
//! are what counts, the strings say where to look first. It is written when it differs from what is
//! recorded, and never trusted to be complete: the catalog knows which devices there are.
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
                })
                .collect(),
        }
    }
}

/// The file that names the pool's devices.
pub(crate) fn record_path(state_dir: &Path) -> PathBuf {
    state_dir.join("devices.json")
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
        return Err(wrong(format!(
            "format {} is not known to this release",
            version.version
        )));
    }
    Recorded::deserialize(&found)
        .map(Some)
        .map_err(|error| wrong(error.to_string()))
}

/// Records a pool's devices, durably, unless that is what is recorded.
pub(crate) fn record(state_dir: &Path, pool: &Pool) -> io::Result<()> {
    let now = Recorded::of(pool);
    // No write that isn't needed: the disk may be full.
    if recorded(state_dir).is_ok_and(|there| there.as_ref() == Some(&now)) {
        return Ok(());
    }
    files::write_json(&record_path(state_dir), &now, true)
}
