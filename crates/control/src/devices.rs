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
use forebay_device::{Device, DeviceError, DeviceKind, DeviceSpec, OpenOptions};
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
/// The hint about a device with contents that are not Forebay's.
pub(crate) const OVERWRITE_HINT: &str = "use --force to overwrite it; what it holds is lost";

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

/// Records the pool's devices, durably, unless that is what is recorded.
pub(crate) fn record(state_dir: &Path, devices: &[PoolDevice]) -> io::Result<()> {
    let devices: Vec<String> = devices.iter().map(|device| device.spec.clone()).collect();
    // No write that isn't needed: the disk may be full.
    if recorded(state_dir).is_ok_and(|there| there.as_ref() == Some(&devices)) {
        return Ok(());
    }
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

fn open_device(spec: &DeviceSpec, options: &OpenOptions) -> Result<SyncDevice, ApiError> {
    SyncDevice::open(spec, options).map_err(|error| match error {
        DeviceError::Missing { .. } => ApiError::not_found(error.to_string()),
        DeviceError::Busy { .. } => ApiError::in_use(error.to_string()),
        DeviceError::TooSmall { .. } => ApiError::damaged(error.to_string()),
        error => invalid(error),
    })
}

/// Takes a device for this daemon alone, for as long as it is open.
fn claim(device: &SyncDevice) -> Result<(), ApiError> {
    let begin = std::time::Instant::now();
    loop {
        match device.claim_for_daemon() {
            Ok(()) => return Ok(()),
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

/// Claims devices, which must all be different ones.
fn claim_all(devices: &[SyncDevice]) -> Result<(), ApiError> {
    refuse_twins(devices)?;
    devices.iter().try_for_each(claim)
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
        opened.push(open_device(&spec, &exclusive())?);
    }
    claim_all(&opened)?;
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
    // A pool made before this was done, or copied as a sparse file.
    if let Err(error) = reserve_catalog(&devices) {
        tracing::warn!(%error, "the pool's catalog may not be able to grow");
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
        let device = open_device(&spec, &options)?;
        let kind = device.info().kind;
        if missing && matches!(kind, DeviceKind::Ram | DeviceKind::Null) {
            made.push(spec.path().to_owned());
        }
        zero.push(missing || kind == DeviceKind::Null);
        opened.push(device);
    }
    claim_all(&opened)?;
    let mut stores = Vec::new();
    let mut new = Vec::new();
    for (device, known_zero) in opened.into_iter().zip(zero) {
        let store = Arc::new(SyncStore(device));
        if !body.force {
            refuse_used(&store)?;
        }
        let spec = store.0.info().spec.clone();
        let block_bytes = engine_block_bytes(&spec)?;
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
    reserve_catalog(&devices)?;
    Ok(OpenPool {
        pool,
        catalog,
        devices,
        is_new: true,
    })
}

fn refuse_used(device: &SyncStore) -> Result<(), ApiError> {
    let spec = &device.0.info().spec;
    // The pool knows its own labels; the device crate knows everybody else's.
    match forebay_pool::probe(device).map_err(api_error)? {
        Probe::Forebay(label) => Err(ApiError::in_use(format!(
            "{spec} belongs to the Forebay pool {} ({})",
            label.pool_name, label.pool_uuid
        ))
        .hint(
            "start the daemon whose state folder records that pool to use it; --force makes a new \
             pool here, and what the old one holds is lost",
        )),
        Probe::Blank | Probe::Other(_) => {
            let found = device
                .0
                .blank_check(b"")
                .map_err(|error| ApiError::unavailable(format!("{spec}: {error}")))?;
            match found {
                Content::Foreign(what) => {
                    Err(ApiError::in_use(format!("{spec} holds {what}")).hint(OVERWRITE_HINT))
                }
                // What else it holds, the pool refuses itself.
                Content::Blank | Content::Ours => Ok(()),
            }
        }
    }
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

/// Takes the room of label and catalog from the file system below a pool in a sparse file, so that its
/// being full keeps nobody from committing what makes room. Again and again does no harm.
fn reserve_catalog(devices: &[PoolDevice]) -> Result<(), ApiError> {
    for device in devices {
        let info = device.store.0.info();
        let label = forebay_pool::Label::read(device.store.as_ref()).map_err(api_error)?;
        if info.kind != DeviceKind::File || label.catalog_bytes == 0 {
            continue;
        }
        let end = label.catalog_offset_bytes + label.catalog_bytes;
        let reserve = || -> io::Result<()> {
            let file = std::fs::File::options()
                .write(true)
                .open(info.spec.path())?;
            let keep_size = rustix::fs::FallocateFlags::KEEP_SIZE;
            match rustix::fs::fallocate(&file, keep_size, 0, end) {
                Err(rustix::io::Errno::OPNOTSUPP) | Ok(()) => Ok(()),
                Err(error) => Err(error.into()),
            }
        };
        reserve().map_err(|error| {
            let message = format!("{}: no room for the pool's catalog: {error}", device.spec);
            ApiError::new(error::ErrorKind::NoSpace, message)
                .hint(format!("it needs {end} bytes of the file system below it"))
        })?;
    }
    Ok(())
}

/// Whether a device carries a pool's label.
pub(crate) fn has_pool(spec: &str) -> Result<bool, ApiError> {
    let spec: DeviceSpec = spec.parse().map_err(invalid)?;
    let device = open_device(&spec, &exclusive())?;
    claim(&device)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn body(devices: &[String], size_bytes: Option<u64>, force: bool) -> PoolCreate {
        PoolCreate {
            name: "p".to_owned(),
            devices: devices.to_vec(),
            force,
            extent_bytes: None,
            size_bytes,
        }
    }

    fn refused(result: Result<OpenPool, ApiError>) -> ApiError {
        result.err().expect("it is refused")
    }

    #[test]
    fn what_a_device_holds_is_not_lost_by_accident() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("d");
        let spec = [path.display().to_string()];
        let error = refused(create(&body(&spec, None, false)));
        assert_eq!(error.kind, error::ErrorKind::NotFound);
        assert!(error.hint.is_some_and(|hint| hint.contains("size")));
        let pool = create(&body(&spec, Some(64 << 20), false)).unwrap();
        let uuid = pool.pool.info().uuid;
        drop(pool);
        let error = refused(create(&body(&spec, Some(64 << 20), false)));
        assert_eq!(error.kind, error::ErrorKind::InUse, "{error}");
        let named = format!("belongs to the Forebay pool p ({uuid})");
        assert!(error.message.contains(&named), "{error}");
        assert!(error.hint.is_some_and(|hint| hint.contains("--force")));
        assert!(path.exists(), "a refusal removes nothing that was there");
        assert_eq!(open(&spec).unwrap().pool.info().uuid, uuid);
        let other = create(&body(&spec, None, true)).unwrap();
        assert_ne!(other.pool.info().uuid, uuid);
        destroy(&other.devices).unwrap();
        drop(other);
        assert!(open(&spec).is_err());
    }

    #[test]
    fn two_names_of_one_device_and_a_device_that_shrank_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = (folder.path().join("a"), folder.path().join("b"));
        std::fs::File::create(&a)
            .unwrap()
            .set_len(64 << 20)
            .unwrap();
        std::fs::hard_link(&a, &b).unwrap();
        let specs = [a.display().to_string(), b.display().to_string()];
        let error = refused(create(&body(&specs, None, false)));
        assert!(error.message.contains("same device"), "{error}");
        drop(create(&body(&specs[..1], None, false)).unwrap());
        std::fs::File::options()
            .write(true)
            .open(&a)
            .unwrap()
            .set_len(40 << 20)
            .unwrap();
        let error = refused(open(&specs[..1]));
        assert_eq!(error.kind, error::ErrorKind::Damaged, "{error}");
    }

    #[test]
    fn a_file_made_in_vain_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("small");
        // Too small for a pool.
        let error = refused(create(&body(
            &[path.display().to_string()],
            Some(1 << 20),
            false,
        )));
        assert_eq!(error.kind, error::ErrorKind::Invalid, "{error}");
        assert!(!path.exists());
    }

    #[test]
    fn the_record_of_devices_is_found_again() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(recorded(folder.path()).unwrap(), None);
        let spec = format!("file:{}", folder.path().join("d").display());
        let pool = create(&body(std::slice::from_ref(&spec), Some(64 << 20), false)).unwrap();
        record(folder.path(), &pool.devices).unwrap();
        assert_eq!(recorded(folder.path()).unwrap(), Some(vec![spec]));
        std::fs::write(record_path(folder.path()), r#"{"version":9,"devices":[]}"#).unwrap();
        assert!(
            recorded(folder.path())
                .unwrap_err()
                .to_string()
                .contains("format 9")
        );
    }
}
