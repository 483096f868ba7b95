//! Making, opening and destroying a pool.
//!
//! **Design.** Creation wipes the labels first and writes them last, the first device's at the very
//! end; so a creation that was cut short leaves no pool. Opening goes by labels, not by where a
//! device was found. **Not here:** opening and locking devices: the caller hands in stores that it
//! alone uses.

use crate::{
    admin::check_name,
    area::Area,
    batch::Table,
    catalog::Catalog,
    error::{PoolError, Result},
    extents::Extents,
    label::Label,
    layout::{self, CATALOG_OFFSET_BYTES},
    load::load,
    pool::{Pool, initial_state},
    probe::{Probe, probe},
    records::{DeviceRecord, PoolInfo},
    space::PoolSettings,
    store::{BLOCK_BYTES, BlockStore},
    uuid::Uuid,
};
use forebay_xlate::types::DeviceIndex;
use std::{io, sync::Arc};

/// A device for a new pool.
#[derive(Clone)]
pub struct NewDevice {
    /// Where it is (`file:/path` and the like).
    pub spec: String,
    /// Its bytes.
    pub store: Arc<dyn BlockStore>,
    /// Its logical block, in bytes: 512 or 4096.
    pub block_bytes: u32,
    /// Whether all of it, beyond label and catalog, reads as zeros now: a new sparse file, not a
    /// device with a past. Otherwise every extent is laundered before its first use.
    pub known_zero: bool,
}

/// What a pool is to be.
#[derive(Clone)]
pub struct PoolSpec {
    /// Its name.
    pub name: String,
    /// The size of an extent in bytes: a power of two from 64 KiB to 4 MiB.
    pub extent_bytes: u64,
    /// Its devices; the first has the catalog.
    pub devices: Vec<NewDevice>,
    /// Take devices that hold something.
    pub force: bool,
    /// The time, in seconds since the epoch.
    pub now_s: u64,
}

/// A device that may belong to a pool.
#[derive(Clone)]
pub struct OpenDevice {
    /// Where it is (`file:/path` and the like).
    pub spec: String,
    /// Its bytes.
    pub store: Arc<dyn BlockStore>,
}

fn area_error(error: &io::Error) -> PoolError {
    match error.kind() {
        io::ErrorKind::InvalidData => PoolError::damaged(error.to_string()),
        io::ErrorKind::Unsupported => PoolError::invalid(error.to_string()),
        io::ErrorKind::StorageFull => PoolError::no_space(format!("the pool's catalog: {error}")),
        _ => PoolError::io("the pool's catalog", error),
    }
}

/// Makes a pool.
pub fn create(spec: &PoolSpec) -> Result<(Pool, Catalog)> {
    check_name("pool", &spec.name)?;
    let mut capacities = Vec::with_capacity(spec.devices.len());
    for device in &spec.devices {
        if !matches!(device.block_bytes, 512 | 4096) {
            return Err(PoolError::invalid(format!(
                "{} has blocks of {} bytes; 512 and 4096 are supported",
                device.spec, device.block_bytes
            )));
        }
        let capacity = device.store.capacity();
        capacities.push(capacity.map_err(|e| PoolError::io(&device.spec, &e))?);
        if spec.force {
            continue;
        }
        let found = match probe(device.store.as_ref())? {
            Probe::Blank => continue,
            Probe::Forebay(label) => {
                format!(
                    "belongs to pool {:?} ({})",
                    label.pool_name, label.pool_uuid
                )
            }
            Probe::Other(what) => format!("holds {what}"),
        };
        return Err(PoolError::in_use(format!(
            "{} {found}: use --force to overwrite it",
            device.spec
        )));
    }
    let layouts = layout::plan(&capacities, spec.extent_bytes)?;
    let info = PoolInfo {
        name: spec.name.clone(),
        uuid: Uuid::random()?,
        extent_bytes: spec.extent_bytes,
        created_s: spec.now_s,
        boot_id: String::new(),
        engine_generation: 0,
        next_id: 1,
        opens: 0,
        settings: PoolSettings::default(),
    };
    let mut labels = Vec::with_capacity(layouts.len());
    let mut records = Vec::with_capacity(layouts.len());
    let mut extents = Extents::new(spec.extent_bytes);
    for (index, (device, layout)) in spec.devices.iter().zip(&layouts).enumerate() {
        // `plan` allows at most 256 devices.
        let index = DeviceIndex(index as u8);
        let record = DeviceRecord {
            index,
            uuid: Uuid::random()?,
            spec: device.spec.clone(),
            extents: layout.extents,
            data_offset_bytes: layout.data_offset_bytes,
            block_bytes: device.block_bytes,
            known_zero: device.known_zero,
        };
        labels.push(Label {
            generation: 1,
            pool_uuid: info.uuid,
            pool_name: info.name.clone(),
            device_uuid: record.uuid,
            device_index: index,
            device_count: layouts.len() as u32,
            block_bytes: device.block_bytes,
            extent_bytes: spec.extent_bytes,
            catalog_offset_bytes: CATALOG_OFFSET_BYTES,
            catalog_bytes: layout.catalog_bytes,
            data_offset_bytes: layout.data_offset_bytes,
            data_extents: layout.extents,
        });
        extents.add_device(vec![initial_state(&record); layout.extents as usize]);
        records.push(record);
    }
    for device in &spec.devices {
        Label::wipe(device.store.as_ref())?;
    }
    let first = &spec.devices[0];
    let area = Area::format(
        first.store.clone(),
        CATALOG_OFFSET_BYTES,
        layouts[0].catalog_bytes,
        info.uuid.0,
    )
    .map_err(|error| area_error(&error))?;
    let catalog = Catalog::create(area)?;
    let mut pool = Pool::empty(info, records, extents, catalog.usage());
    pool.touch(Table::Meta, 0, 0);
    for index in 0..labels.len() {
        pool.touch(Table::Devices, index as u64, 0);
    }
    if let Some(batch) = pool.take_batch()? {
        catalog.commit(&batch)?;
        pool.committed(batch.id())?;
    }
    for (label, device) in labels.iter().zip(&spec.devices).rev() {
        label.write(device.store.as_ref())?;
    }
    Ok((pool, catalog))
}

/// Opens a pool, given all of its devices in any order. Its grants are to be adopted next
/// ([`Pool::adopt_grant`], [`Pool::finish_adoption`]).
pub fn open(devices: &[OpenDevice]) -> Result<(Pool, Catalog)> {
    let mut found: Vec<(Label, &OpenDevice)> = Vec::with_capacity(devices.len());
    for device in devices {
        let label = Label::read(device.store.as_ref()).map_err(|error| {
            PoolError::new(error.kind, format!("{}: {}", device.spec, error.message))
        })?;
        found.push((label, device));
    }
    found.sort_by_key(|(label, _)| label.device_index);
    let Some((first, first_device)) = found.first() else {
        return Err(PoolError::invalid("a pool has at least one device"));
    };
    for (label, device) in &found {
        if label.pool_uuid != first.pool_uuid {
            return Err(PoolError::invalid(format!(
                "{} belongs to pool {:?} ({}), {} to pool {:?} ({}): open one pool at a time",
                first_device.spec,
                first.pool_name,
                first.pool_uuid,
                device.spec,
                label.pool_name,
                label.pool_uuid
            )));
        }
    }
    for pair in found.windows(2) {
        if pair[0].0.device_index == pair[1].0.device_index {
            return Err(PoolError::invalid(format!(
                "{} and {} are the same device of the pool: give each once",
                pair[0].1.spec, pair[1].1.spec
            )));
        }
    }
    if found.len() as u64 != u64::from(first.device_count) {
        let missing: Vec<String> = (0..first.device_count)
            .filter(|index| {
                !found
                    .iter()
                    .any(|(label, _)| u32::from(label.device_index.0) == *index)
            })
            .map(|index| index.to_string())
            .collect();
        return Err(PoolError::not_found(format!(
            "pool {:?} has {} devices, {} are here; missing: number {}",
            first.pool_name,
            first.device_count,
            found.len(),
            missing.join(", ")
        )));
    }
    let area = Area::open(
        first_device.store.clone(),
        first.catalog_offset_bytes,
        first.catalog_bytes,
        first.pool_uuid.0,
    )
    .map_err(|error| area_error(&error))?;
    let catalog = Catalog::open(area);
    let extents: Vec<u64> = found.iter().map(|(label, _)| label.data_extents).collect();
    let mut pool = load(&catalog, &extents)?;
    for ((label, device), record) in found.iter().zip(pool.devices.clone()) {
        let agree = label.device_uuid == record.uuid
            && label.extent_bytes == pool.info.extent_bytes
            && label.data_offset_bytes == record.data_offset_bytes;
        if !agree {
            return Err(PoolError::damaged(format!(
                "{} and the pool's catalog disagree about the device",
                device.spec
            )));
        }
        pool.set_device_spec(record.index, &device.spec)?;
    }
    pool.begin_opening();
    Ok((pool, catalog))
}

/// Ends a pool: wipes the labels, and the catalog's headers. Tenants' bytes stay where they are.
pub fn destroy(devices: &[Arc<dyn BlockStore>]) -> Result<()> {
    for store in devices {
        let label = Label::read(store.as_ref());
        Label::wipe(store.as_ref())?;
        let Ok(label) = label else { continue };
        if label.catalog_bytes > 0 {
            for block in 0..2 {
                store
                    .write_at(
                        label.catalog_offset_bytes + block * BLOCK_BYTES as u64,
                        &[0; BLOCK_BYTES],
                    )
                    .map_err(|error| PoolError::io("wiping the catalog", &error))?;
            }
            store
                .sync()
                .map_err(|error| PoolError::io("wiping the catalog", &error))?;
        }
    }
    Ok(())
}
