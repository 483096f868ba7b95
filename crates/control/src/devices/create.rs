//! Making a pool of devices, and getting a device ready to join one.
//!
//! Purpose: open, claim and look at devices that shall hold a pool's data from now on.
//! Design: what a device holds is lost only if the caller insists. A device file that is missing is
//! made, sparse, if a size is given, and removed again if nothing comes of it.
//! Not here: what is written to the device (the pool), opening a pool that is there (`open`).

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use forebay_device::sync_io::{self, Content};
use forebay_device::{Device, DeviceKind, DeviceSpec, OpenOptions};
use forebay_pool::{DEFAULT_EXTENT_BYTES, NewDevice, Pool, PoolSpec, Probe};

use super::{
    OVERWRITE_HINT, OpenPool, PoolDevice, api_error, claim_all, exclusive, invalid, now_s,
    open_device,
};
use crate::api::error::{self, ApiError};
use crate::api::model::PoolCreate;
use crate::store::SyncStore;

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
    let devices = in_order(&pool, stores);
    reserve_catalog(&devices)?;
    Ok(OpenPool {
        pool,
        catalog,
        devices,
        missing: Vec::new(),
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
pub(super) fn reserve_catalog(devices: &[PoolDevice]) -> Result<(), ApiError> {
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

/// A new pool's devices are its stores, in their order.
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
