//! Opens, claims and checks devices that are to hold a pool's data.
//!
//! A device's contents are lost only with `--force`. A missing file is created if the caller allows
//! it (`place`), and removed again on failure.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use forebay_device::size::format_bytes;
use forebay_device::sync_io::{self, Content, SyncDevice};
use forebay_device::{Device, DeviceKind, DeviceSpec, OpenOptions};
use forebay_pool::{DEFAULT_EXTENT_BYTES, NewDevice, Pool, PoolSettings, PoolSpec, Probe};
use forebay_xlate::DeviceIndex;

use super::place::{self, NewFiles};
use super::{
    OVERWRITE_HINT, OpenPool, PoolDevice, api_error, claim, claim_all, exclusive, invalid,
    is_same_place, now_s, open_device,
};
use crate::model::error::{self, ApiError};
use crate::model::{DeviceAdd, Placement, PoolCreate};
use crate::ownership;
use crate::store::SyncStore;

pub(crate) fn create(body: &PoolCreate) -> Result<OpenPool, ApiError> {
    place::check(&body.devices, body.size_bytes, allowed(body.create))?;
    make(body)
}

/// Creates the configured pool. Its sparse file may exceed the free space.
pub(crate) fn create_embedded(body: &PoolCreate) -> Result<OpenPool, ApiError> {
    place::check(&body.devices, body.size_bytes, NewFiles::Any)?;
    make(body)
}

fn allowed(create: bool) -> NewFiles {
    match create {
        true => NewFiles::WithinRoom,
        false => NewFiles::Refused,
    }
}

fn make(body: &PoolCreate) -> Result<OpenPool, ApiError> {
    if body.devices.is_empty() {
        return Err(ApiError::invalid("a pool needs at least one device"));
    }
    let mut made = Vec::new();
    let result = create_with(body, &mut made);
    if result.is_err() {
        remove_made(&made);
    }
    result
}

fn create_with(body: &PoolCreate, made: &mut Vec<PathBuf>) -> Result<OpenPool, ApiError> {
    refuse_twice(&body.devices)?;
    let mut opened = Vec::new();
    let mut zero = Vec::new();
    for text in &body.devices {
        let (device, known_zero) = open_or_make(text, body.size_bytes, made)?;
        zero.push(known_zero);
        opened.push(device);
    }
    claim_all(&opened)?;
    let mut stores = Vec::new();
    let mut new = Vec::new();
    for (device, known_zero) in opened.into_iter().zip(zero) {
        let device = take_new(device, known_zero, body.force)?;
        new.push(device.new);
        stores.push(device.store);
    }
    if body.force {
        ownership::refuse_alive(&stores)?;
    }
    let settings = settings_of(
        PoolSettings::default(),
        body.placement,
        body.warn_percent,
        body.critical_percent,
    );
    let (pool, catalog) = forebay_pool::create(&PoolSpec {
        name: body.name.clone(),
        extent_bytes: body.extent_bytes.unwrap_or(DEFAULT_EXTENT_BYTES),
        devices: new,
        settings,
        force: body.force,
        now_s: now_s(),
    })
    .map_err(api_error)?;
    let devices = in_order(&pool, stores);
    reserve_catalog(&devices)?;
    Ok(OpenPool {
        pool,
        catalog,
        devices,
        missing: Vec::new(),
        tenure: None,
        is_new: true,
    })
}

/// A second open of the same disk would find it in use by this daemon.
fn refuse_twice(specs: &[String]) -> Result<(), ApiError> {
    for (at, spec) in specs.iter().enumerate() {
        if let Some(other) = specs[..at].iter().find(|other| is_same_place(spec, other)) {
            return Err(
                ApiError::invalid(format!("{spec} and {other} are the same device"))
                    .hint("give each device once"),
            );
        }
    }
    Ok(())
}

/// Refuses a device that this daemon has open already; it would be reported as in use.
pub(crate) fn refuse_own(own: &[(DeviceIndex, String)], spec: &str) -> Result<(), ApiError> {
    let own = own.iter().find(|(_, own)| is_same_place(own, spec));
    own.map_or(Ok(()), |(index, own)| {
        Err(
            ApiError::exists(format!("{spec} is already in the pool, as {index} ({own})"))
                .hint("`forebay device list` shows the pool's devices"),
        )
    })
}

pub(crate) fn settings_of(
    settings: PoolSettings,
    placement: Option<Placement>,
    warn_percent: Option<u8>,
    critical_percent: Option<u8>,
) -> PoolSettings {
    PoolSettings {
        placement: match placement {
            Some(Placement::Stripe) => forebay_pool::Placement::Stripe,
            Some(Placement::Fill) => forebay_pool::Placement::Fill,
            None => settings.placement,
        },
        warn_percent: warn_percent.unwrap_or(settings.warn_percent),
        critical_percent: critical_percent.unwrap_or(settings.critical_percent),
    }
}

/// An open and claimed device that is about to join a pool.
pub(crate) struct NewPoolDevice {
    pub(crate) new: NewDevice,
    /// Its label and catalog area.
    pub(crate) store: Arc<SyncStore>,
    /// Whether it is taken whatever it holds.
    pub(crate) force: bool,
    /// The file created for it, if any.
    made: Vec<PathBuf>,
}

impl NewPoolDevice {
    /// The files to remove if it does not join.
    pub(crate) fn made(&self) -> Vec<PathBuf> {
        self.made.clone()
    }
}

pub(crate) fn open_new(body: &DeviceAdd) -> Result<NewPoolDevice, ApiError> {
    let specs = std::slice::from_ref(&body.spec);
    place::check(specs, body.size_bytes, allowed(body.create))?;
    let mut made = Vec::new();
    let opened =
        open_or_make(&body.spec, body.size_bytes, &mut made).and_then(|(device, known_zero)| {
            if device.info().kind == DeviceKind::Null && !body.force {
                return Err(ApiError::invalid(format!(
                    "{} keeps no data: data that volumes store there is lost",
                    device.info().spec
                ))
                .hint("--force adds it anyway, to measure speed without a disk"));
            }
            claim(&device)?;
            let taken = take_new(device, known_zero, body.force)?;
            if body.force {
                ownership::refuse_alive(std::slice::from_ref(&taken.store))?;
            }
            Ok(taken)
        });
    match opened {
        Ok(device) => Ok(NewPoolDevice { made, ..device }),
        Err(error) => {
            remove_made(&made);
            Err(error)
        }
    }
}

pub(crate) fn remove_made(made: &[PathBuf]) {
    for path in made {
        let _ = std::fs::remove_file(path);
    }
}

/// Opens a device; creates a missing file if a size is given. The flag says whether the device
/// reads as zeros.
fn open_or_make(
    text: &str,
    size_bytes: Option<u64>,
    made: &mut Vec<PathBuf>,
) -> Result<(SyncDevice, bool), ApiError> {
    let spec: DeviceSpec = text.parse().map_err(invalid)?;
    let missing = !spec.path().exists();
    if missing && matches!(spec.kind(), None | Some(DeviceKind::File)) {
        let size_bytes = size_bytes.unwrap_or(0);
        sync_io::create_sparse_file(spec.path(), size_bytes).map_err(invalid)?;
        made.push(spec.path().to_owned());
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
    Ok((device, missing || kind == DeviceKind::Null))
}

/// Refuses a device that holds something, unless forced.
fn take_new(device: SyncDevice, known_zero: bool, force: bool) -> Result<NewPoolDevice, ApiError> {
    let store = Arc::new(SyncStore::new(device));
    if !force {
        refuse_used(&store)?;
    }
    let spec = store.0.info().spec.clone();
    let block_bytes = engine_block_bytes(&spec)?;
    Ok(NewPoolDevice {
        new: NewDevice {
            spec: spec.to_string(),
            store: store.clone(),
            block_bytes,
            known_zero,
        },
        store,
        force,
        made: Vec::new(),
    })
}

fn refuse_used(device: &SyncStore) -> Result<(), ApiError> {
    let spec = &device.0.info().spec;
    // The pool recognizes its own labels; the device crate recognizes others.
    match forebay_pool::probe(device).map_err(api_error)? {
        Probe::Forebay(label) => Err(ApiError::in_use(format!(
            "{spec} belongs to the Forebay pool {} ({})",
            label.pool_name, label.pool_uuid
        ))
        .hint(
            "to use that pool, start the daemon whose state folder records it (`forebay pool open --device` returns a \
            missing device to its pool); --force overwrites the device, and its data is lost",
        )),
        Probe::Unusable(why) => {
            Err(ApiError::in_use(format!("{spec} has a Forebay label: {why}")).hint(OVERWRITE_HINT))
        }
        Probe::Blank | Probe::Other(_) => {
            let found = device
                .0
                .blank_check(b"")
                .map_err(|error| ApiError::unavailable(format!("{spec}: {error}")))?;
            match found {
                Content::Foreign(what) => {
                    Err(ApiError::in_use(format!("{spec} holds {what}")).hint(OVERWRITE_HINT))
                }
                // The pool itself refuses other contents.
                Content::Blank | Content::Ours => Ok(()),
            }
        }
    }
}

/// The logical block size that the engine will see with direct I/O.
pub(super) fn engine_block_bytes(spec: &DeviceSpec) -> Result<u32, ApiError> {
    let options = OpenOptions {
        data_offset_bytes: u64::MAX,
        ..OpenOptions::default()
    };
    let device = Device::open(spec, &options).map_err(invalid)?;
    Ok(device.info().block_bytes)
}

/// Allocates label and catalog in a sparse file's file system, so that commits work even when that
/// is full. Idempotent.
pub(crate) fn reserve_catalog(devices: &[PoolDevice]) -> Result<(), ApiError> {
    for device in devices {
        let info = device.store.0.info();
        let label = forebay_pool::Label::read(device.store.as_ref()).map_err(api_error)?;
        if info.kind != DeviceKind::File || label.catalog_bytes == 0 {
            continue;
        }
        let end = label.catalog_end_bytes();
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
            ApiError::new(error::ErrorKind::NoSpace, message).hint(format!(
                "the catalog needs {} on the file system below",
                format_bytes(end)
            ))
        })?;
    }
    Ok(())
}

fn in_order(pool: &Pool, stores: Vec<Arc<SyncStore>>) -> Vec<PoolDevice> {
    pool.devices()
        .iter()
        .zip(stores)
        .map(|(record, store)| PoolDevice {
            index: record.index,
            spec: record.spec.clone(),
            store,
        })
        .collect()
}
