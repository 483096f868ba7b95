//! The pool's devices as the daemon has them open, and the record of which they are.
//!
//! Purpose: open, claim, create, find again, wipe.
//! Design: each device is opened once and claimed for this daemon for as long as it is open (the
//! claim falls with the process). `devices.json` in the state folder names them, so that a restart
//! finds the pool; the labels say which is which. Two names of one device are noticed by what they
//! resolve to.
//! Not here: label and catalog (the pool), I/O on extents (the engine).

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forebay_device::fence::FenceError;
use forebay_device::sync_io::{self, Content, SyncDevice};
use forebay_device::{Device, DeviceKind, DeviceSpec, OpenOptions};
use forebay_pool::{
    BlockStore, Catalog, DEFAULT_EXTENT_BYTES, ErrorKind, NewDevice, OpenDevice, Pool, PoolError,
    PoolSpec, Probe,
};
use forebay_xlate::DeviceIndex;
use serde::{Deserialize, Serialize};

use crate::api::error::{self, ApiError};
use crate::api::model::PoolCreate;
use crate::files;
use crate::store::SyncStore;

/// How long a dead daemon's claim may take to fall.
const CLAIM_LIMIT: Duration = Duration::from_secs(3);
const RECORD_VERSION: u32 = 1;

/// A device of the pool, open.
#[derive(Debug)]
pub(crate) struct PoolDevice {
    /// Its place in the pool.
    pub(crate) index: DeviceIndex,
    /// Its specification string, resolved.
    pub(crate) spec: String,
    /// Its label and catalog area.
    pub(crate) store: Arc<SyncStore>,
}

/// A pool with its devices.
pub(crate) struct OpenPool {
    pub(crate) pool: Pool,
    pub(crate) catalog: Catalog,
    pub(crate) devices: Vec<PoolDevice>,
    /// It was just made, so no daemon has granted anything.
    pub(crate) is_new: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    version: u32,
    devices: Vec<String>,
}

/// Seconds since the Unix epoch.
pub(crate) fn now_s() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// The pool's errors in the API's words.
pub(crate) fn api_error(error: PoolError) -> ApiError {
    let kind = match error.kind {
        ErrorKind::NotFound => error::ErrorKind::NotFound,
        ErrorKind::Exists => error::ErrorKind::Exists,
        ErrorKind::InUse => error::ErrorKind::InUse,
        ErrorKind::Invalid => error::ErrorKind::Invalid,
        ErrorKind::NoSpace => error::ErrorKind::NoSpace,
        ErrorKind::Damaged => error::ErrorKind::Damaged,
        ErrorKind::Io => error::ErrorKind::Unavailable,
    };
    ApiError::new(kind, error.message)
}

/// The file that names the pool's devices.
pub(crate) fn record_path(state_dir: &Path) -> PathBuf {
    state_dir.join("devices.json")
}

/// The recorded devices; `None` when there is no pool.
pub(crate) fn recorded(state_dir: &Path) -> io::Result<Option<Vec<String>>> {
    let path = record_path(state_dir);
    let Some(record) = files::read_json::<Record>(&path)? else {
        return Ok(None);
    };
    if record.version != RECORD_VERSION {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!(
                "{}: format {} is not known to this release",
                path.display(),
                record.version
            ),
        ));
    }
    Ok(Some(record.devices))
}

/// Records the pool's devices, durably.
pub(crate) fn record(state_dir: &Path, devices: &[PoolDevice]) -> io::Result<()> {
    let devices = devices.iter().map(|device| device.spec.clone()).collect();
    files::write_json(
        &record_path(state_dir),
        &Record {
            version: RECORD_VERSION,
            devices,
        },
        true,
    )
}

fn invalid(error: impl ToString) -> ApiError {
    ApiError::invalid(error.to_string())
}

/// Opens a device for this daemon alone.
fn claim(spec: &DeviceSpec, options: &OpenOptions) -> Result<SyncDevice, ApiError> {
    let device = SyncDevice::open(spec, options).map_err(|error| match error {
        forebay_device::DeviceError::Missing { .. } => ApiError::not_found(error.to_string()),
        forebay_device::DeviceError::Busy { .. } => ApiError::in_use(error.to_string()),
        forebay_device::DeviceError::TooSmall { .. } => ApiError::damaged(error.to_string()),
        error => invalid(error),
    })?;
    let begin = std::time::Instant::now();
    loop {
        match device.claim_for_daemon() {
            Ok(()) => return Ok(device),
            Err(FenceError::Held { .. }) if begin.elapsed() < CLAIM_LIMIT => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error @ FenceError::Held { .. }) => {
                return Err(ApiError::in_use(error.to_string())
                    .hint("another daemon serves this device's pool: stop it, or use that one"));
            }
            Err(error) => return Err(ApiError::unavailable(error.to_string())),
        }
    }
}

fn refuse_twins(devices: &[SyncDevice]) -> Result<(), ApiError> {
    let mut seen = HashMap::new();
    for device in devices {
        let info = device.info();
        if let Some(other) = seen.insert(info.identity, info.spec.to_string()) {
            return Err(ApiError::invalid(format!(
                "{} and {other} are the same device",
                info.spec
            ))
            .hint("give each device once"));
        }
    }
    Ok(())
}

fn exclusive() -> OpenOptions {
    OpenOptions {
        exclusive: true,
        data_offset_bytes: u64::MAX,
        ..OpenOptions::default()
    }
}

/// Opens the pool on these devices.
pub(crate) fn open(specs: &[String]) -> Result<OpenPool, ApiError> {
    let mut opened = Vec::new();
    for text in specs {
        let spec: DeviceSpec = text.parse().map_err(invalid)?;
        opened.push(claim(&spec, &exclusive())?);
    }
    refuse_twins(&opened)?;
    let stores: Vec<Arc<SyncStore>> = opened
        .into_iter()
        .map(|device| Arc::new(SyncStore(device)))
        .collect();
    let devices: Vec<OpenDevice> = stores
        .iter()
        .map(|store| OpenDevice {
            spec: store.0.info().spec.to_string(),
            store: store.clone(),
        })
        .collect();
    let (pool, catalog) = forebay_pool::open(&devices).map_err(api_error)?;
    let devices = in_order(&pool, stores)?;
    for device in &devices {
        let record = pool
            .devices()
            .iter()
            .find(|record| record.index == device.index);
        let needed = record.map_or(Some(0), |record| {
            record
                .extents
                .checked_mul(pool.info().extent_bytes)?
                .checked_add(record.data_offset_bytes)
        });
        let capacity = device.store.0.info().capacity_bytes;
        if needed.is_none_or(|needed| needed > capacity) {
            return Err(ApiError::damaged(format!(
                "{}: has {capacity} bytes, fewer than the pool knows it to have: it was truncated or replaced",
                device.spec
            ))
            .hint("restore the device before the pool is opened; nothing was changed"));
        }
    }
    Ok(OpenPool {
        pool,
        catalog,
        devices,
        is_new: false,
    })
}

fn in_order(pool: &Pool, stores: Vec<Arc<SyncStore>>) -> Result<Vec<PoolDevice>, ApiError> {
    let mut devices = Vec::new();
    for store in stores {
        let label = forebay_pool::Label::read(store.as_ref()).map_err(api_error)?;
        let spec = store.0.info().spec.to_string();
        devices.push(PoolDevice {
            index: label.device_index,
            spec,
            store,
        });
    }
    devices.sort_by_key(|device| device.index);
    if devices.len() != pool.devices().len() {
        return Err(ApiError::damaged(
            "the pool's labels and its catalog name different devices",
        ));
    }
    Ok(devices)
}

/// Makes a pool.
pub(crate) fn create(body: &PoolCreate) -> Result<OpenPool, ApiError> {
    if body.devices.is_empty() {
        return Err(ApiError::invalid("a pool needs at least one device"));
    }
    let mut made = Vec::new();
    let result = create_with(body, &mut made);
    if result.is_err() {
        for path in made {
            let _ = std::fs::remove_file(path);
        }
    }
    result
}

fn create_with(body: &PoolCreate, made: &mut Vec<PathBuf>) -> Result<OpenPool, ApiError> {
    let mut opened = Vec::new();
    let mut zero = Vec::new();
    for text in &body.devices {
        let spec: DeviceSpec = text.parse().map_err(invalid)?;
        let missing = !spec.path().exists();
        if missing && let DeviceSpec::Path { path } | DeviceSpec::File { path } = &spec {
            let Some(size_bytes) = body.size_bytes else {
                return Err(ApiError::not_found(format!(
                    "{}: there is no such file or device",
                    path.display()
                ))
                .hint("give a size to have a sparse file made there"));
            };
            sync_io::create_sparse_file(path, size_bytes).map_err(invalid)?;
            made.push(path.clone());
        }
        let options = OpenOptions {
            create_missing: true,
            ..exclusive()
        };
        let device = claim(&spec, &options)?;
        let kind = device.info().kind;
        if missing && matches!(kind, DeviceKind::Ram | DeviceKind::Null) {
            made.push(spec.path().to_owned());
        }
        zero.push(missing || kind == DeviceKind::Null);
        opened.push(device);
    }
    refuse_twins(&opened)?;
    let mut stores = Vec::new();
    let mut new = Vec::new();
    for (device, known_zero) in opened.into_iter().zip(zero) {
        if !body.force {
            refuse_used(&device)?;
        }
        let spec = device.info().spec.clone();
        let block_bytes = engine_block_bytes(&spec)?;
        let store = Arc::new(SyncStore(device));
        new.push(NewDevice {
            spec: spec.to_string(),
            store: store.clone(),
            block_bytes,
            known_zero,
        });
        stores.push(store);
    }
    let (pool, catalog) = forebay_pool::create(&PoolSpec {
        name: body.name.clone(),
        extent_bytes: body.extent_bytes.unwrap_or(DEFAULT_EXTENT_BYTES),
        devices: new,
        force: body.force,
        now_s: now_s(),
    })
    .map_err(api_error)?;
    let devices = in_order(&pool, stores)?;
    Ok(OpenPool {
        pool,
        catalog,
        devices,
        is_new: true,
    })
}

fn refuse_used(device: &SyncDevice) -> Result<(), ApiError> {
    let spec = &device.info().spec;
    // The pool knows its own labels; the device crate knows everybody else's.
    let found = device
        .blank_check(b"")
        .map_err(|error| ApiError::unavailable(format!("{spec}: {error}")))?;
    match found {
        Content::Blank => Ok(()),
        Content::Ours => Err(ApiError::in_use(format!(
            "{spec} belongs to a Forebay pool"
        ))),
        Content::Foreign(what) => Err(ApiError::in_use(format!("{spec} holds {what}"))),
    }
    .map_err(|error| error.hint("use --force to overwrite it; what it holds is lost"))
}

/// The logical block as the engine will see it, past the page cache.
fn engine_block_bytes(spec: &DeviceSpec) -> Result<u32, ApiError> {
    let options = OpenOptions {
        data_offset_bytes: u64::MAX,
        ..OpenOptions::default()
    };
    let device = Device::open(spec, &options).map_err(invalid)?;
    Ok(device.info().block_bytes)
}

/// Whether a device carries a pool's label.
pub(crate) fn has_pool(spec: &str) -> Result<bool, ApiError> {
    let spec: DeviceSpec = spec.parse().map_err(invalid)?;
    let device = claim(&spec, &exclusive())?;
    let found = forebay_pool::probe(&SyncStore(device)).map_err(api_error)?;
    Ok(matches!(found, Probe::Forebay(_)))
}

/// Ends a pool: wipes its labels.
pub(crate) fn destroy(devices: &[PoolDevice]) -> Result<(), ApiError> {
    let stores: Vec<Arc<dyn BlockStore>> = devices
        .iter()
        .map(|device| -> Arc<dyn BlockStore> { device.store.clone() })
        .collect();
    forebay_pool::destroy(&stores).map_err(api_error)
}
