//! The pool's devices, as the daemon opens, claims, creates, finds and wipes them.
//!
//! A device is claimed while it is open; the claim ends with the process. `devices.json` in the
//! state folder ([`mod@record`]) names them for a restart, but their labels identify them
//! ([`mod@open`], [`find`]).

mod create;
mod find;
mod inspect;
mod open;
mod place;
mod record;
mod returned;
#[cfg(test)]
mod tests;
use std::collections::{BTreeSet, HashMap};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use forebay_device::fence::FenceError;
use forebay_device::size::format_bytes;
use forebay_device::sync_io::SyncDevice;
use forebay_device::{DeviceError, DeviceSpec, OpenOptions};
use forebay_pool::{BlockStore, Catalog, ErrorKind, Pool, PoolError, Probe};
use forebay_xlate::DeviceIndex;
use uuid::Uuid;

pub(crate) use self::create::{
    NewPoolDevice, create, create_embedded, open_new, refuse_own, remove_made, reserve_catalog,
    settings_of,
};
pub(crate) use self::inspect::{Opening, may_answer};
#[cfg(test)]
pub(crate) use self::open::open;
pub(crate) use self::open::{OPEN_HINT, Places, open_at};
pub(crate) use self::record::{
    Recorded, forgive_cut_short, mark_cut_short, record, record_path, recorded, restore,
};
pub(crate) use self::returned::{Back, find_missing, find_returned};
use crate::model::error::{self, ApiError};
use crate::ownership::{self, Installation, Tenure};
use crate::store::SyncStore;

/// How long a dead daemon's claim may last.
const CLAIM_LIMIT: Duration = Duration::from_secs(3);
const CLAIM_PAUSE: Duration = Duration::from_millis(20);
/// The limit for opening a device, including all requests to it until its pool is open.
const OPEN_LIMIT: Duration = Duration::from_secs(10);
const HANGS_HINT: &str = "the daemon retries from time to time, and takes the device back when it answers; \
    `forebay pool open` retries at once";
pub(crate) const OVERWRITE_HINT: &str = "use --force to overwrite it; its data is lost";

#[derive(Debug, Clone)]
pub(crate) struct PoolDevice {
    pub(crate) index: DeviceIndex,
    /// Its resolved specification.
    pub(crate) spec: String,
    /// Its label and catalog area.
    pub(crate) store: Arc<SyncStore>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MissingDevice {
    pub(crate) index: DeviceIndex,
    pub(crate) uuid: Uuid,
    /// Where it was last found.
    pub(crate) spec: String,
    /// Why it is not used.
    pub(crate) why: String,
    /// It is there, but did not answer.
    pub(crate) is_silent: bool,
    /// Its label is older than in the catalog: an older copy is in its place.
    pub(crate) is_older: bool,
}

pub(crate) struct OpenPool {
    pub(crate) pool: Pool,
    pub(crate) catalog: Catalog,
    pub(crate) devices: Vec<PoolDevice>,
    pub(crate) missing: Vec<MissingDevice>,
    /// The hold on the pool, if its labels have an owner.
    pub(crate) tenure: Option<Arc<Tenure>>,
    /// It was just created, so no daemon has granted anything.
    pub(crate) is_new: bool,
}

pub(crate) fn cut_short_text(bytes: u64) -> String {
    format!(
        "the file was cut short to {} ({bytes} bytes) while in use: data beyond that is lost, and reads as zeros if \
        the file grows again",
        format_bytes(bytes)
    )
}

pub(crate) fn now_s() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

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

fn invalid(error: impl ToString) -> ApiError {
    ApiError::invalid(error.to_string())
}

/// Resolves the folder, but not the last name: a link in `/dev/disk/by-id` names a disk better than
/// its target.
fn canonical(spec: &DeviceSpec) -> Option<DeviceSpec> {
    let path = spec.path();
    let at = path.parent()?.canonicalize().ok()?.join(path.file_name()?);
    let text = spec.to_string().replacen(path.to_str()?, at.to_str()?, 1);
    text.parse().ok()
}

/// Whether two specifications name the same existing file or disk.
fn is_same_place(one: &str, other: &str) -> bool {
    let place = |text: &str| {
        let spec: DeviceSpec = text.parse().ok()?;
        let found = spec.path().metadata().ok()?;
        Some(match found.file_type().is_block_device() {
            true => (0, found.rdev()),
            false => (found.dev(), found.ino()),
        })
    };
    place(one).is_some_and(|one| Some(one) == place(other))
}

/// Opens a device within a time limit: opening may wait for requests in flight there.
fn open_device(spec: &DeviceSpec, options: &OpenOptions) -> Result<SyncDevice, ApiError> {
    let spec = canonical(spec).unwrap_or_else(|| spec.clone());
    let text = spec.to_string();
    let silent = || {
        let limit = OPEN_LIMIT.as_secs();
        ApiError::unavailable(format!(
            "{text}: opening it takes more than {limit} s: the device hangs"
        ))
        .hint(HANGS_HINT)
    };
    // Under two names, a device may be opened twice at a time.
    let begin = Instant::now();
    while !opening().insert(text.clone()) {
        if begin.elapsed() >= OPEN_LIMIT {
            return Err(silent());
        }
        std::thread::sleep(CLAIM_PAUSE);
    }
    let (sender, receiver) = mpsc::channel();
    let (name, options) = (text.clone(), options.clone());
    let work = move || {
        let opened = open_exclusively(&spec, &options);
        opening().remove(&name);
        // If the receiver has given up, the device is closed again.
        let _ = sender.send(opened);
    };
    let thread = std::thread::Builder::new().name("device-open".to_owned());
    if let Err(error) = thread.spawn(work) {
        opening().remove(&text);
        return Err(ApiError::unavailable(format!("{text}: {error}")));
    }
    let opened = receiver.recv_timeout(OPEN_LIMIT).map_err(|_| silent())?;
    opened.map_err(|error| match error {
        DeviceError::Missing { .. } => ApiError::not_found(error.to_string()),
        DeviceError::Busy { .. } => ApiError::in_use(error.to_string()),
        DeviceError::TooSmall { .. } => ApiError::damaged(error.to_string()),
        error => invalid(error),
    })
}

/// Devices being opened.
fn opening() -> MutexGuard<'static, BTreeSet<String>> {
    static OPENING: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    OPENING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens a device, perhaps beside a dying daemon. Retries while it is in use: store threads and
/// processes close their descriptors some time after they end.
fn open_exclusively(spec: &DeviceSpec, options: &OpenOptions) -> Result<SyncDevice, DeviceError> {
    let beside = OpenOptions {
        exclusive: false,
        ..options.clone()
    };
    let begin = Instant::now();
    loop {
        let busy = match SyncDevice::open(spec, options) {
            Err(error @ DeviceError::Busy { .. }) if options.exclusive => error,
            opened => return opened,
        };
        let device = SyncDevice::open(spec, &beside)?;
        if let Ok(true) | Err(FenceError::Hangs { .. }) = device.check_claim() {
            return Ok(device);
        }
        if begin.elapsed() >= CLAIM_LIMIT {
            return Err(busy);
        }
        std::thread::sleep(CLAIM_PAUSE);
    }
}

fn claim(device: &SyncDevice) -> Result<(), ApiError> {
    patiently(|| device.claim_for_daemon())
}

/// A device at which an earlier daemon was killed would not answer.
fn refuse_hanging(device: &SyncDevice) -> Result<(), ApiError> {
    patiently(|| match device.check_claim() {
        Err(error @ FenceError::Hangs { .. }) => Err(error),
        // The claim itself checks for other users later.
        _ => Ok(()),
    })
}

fn patiently(claim: impl Fn() -> Result<(), FenceError>) -> Result<(), ApiError> {
    let begin = Instant::now();
    loop {
        match claim() {
            Ok(()) => return Ok(()),
            Err(FenceError::Held { .. } | FenceError::Hangs { .. })
                if begin.elapsed() < CLAIM_LIMIT =>
            {
                std::thread::sleep(CLAIM_PAUSE);
            }
            // Not in use, but as good as missing until that ends.
            Err(error @ FenceError::Hangs { .. }) => {
                return Err(ApiError::unavailable(error.to_string()).hint(HANGS_HINT));
            }
            Err(error @ FenceError::Held { .. }) => {
                return Err(ApiError::in_use(error.to_string()).hint(
                    "another daemon serves this device's pool: stop that daemon, or use it",
                ));
            }
            Err(error) => return Err(ApiError::unavailable(error.to_string())),
        }
    }
}

/// Claims devices, which must all differ.
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

pub(crate) fn has_pool(spec: &str) -> Result<bool, ApiError> {
    let spec: DeviceSpec = spec.parse().map_err(invalid)?;
    let device = open_device(&spec, &exclusive())?;
    claim(&device)?;
    let found = forebay_pool::probe(&SyncStore::new(device)).map_err(api_error)?;
    Ok(matches!(found, Probe::Forebay(_)))
}

pub(crate) fn destroy(devices: &[PoolDevice]) -> Result<(), ApiError> {
    let stores: Vec<Arc<dyn BlockStore>> = devices
        .iter()
        .map(|device| -> Arc<dyn BlockStore> { device.store.clone() })
        .collect();
    forebay_pool::destroy(&stores).map_err(api_error)
}

/// Writes this installation's heartbeat to the devices of a new pool.
pub(crate) fn hold(me: &Installation, devices: &[PoolDevice]) -> Result<Arc<Tenure>, ApiError> {
    let stores: Vec<_> = devices.iter().map(|device| device.store.clone()).collect();
    ownership::begin(me, &stores)
}
