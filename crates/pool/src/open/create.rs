//! Creating and destroying a pool.
//!
//! Creation writes all labels and reads them back, to find two names of one disk. Then it wipes
//! them and writes them last, the first device's at the very end, so that an interrupted creation
//! leaves no complete pool.

use crate::{
    catalog::Catalog,
    error::{PoolError, Result},
    extents::Extents,
    extents::space::PoolSettings,
    journal::batch::Table,
    label::probe::{Probe, probe},
    label::{Label, LabelFormat, Stamp},
    layout::{self, CATALOG_OFFSET_BYTES, Layout},
    mirror::area::{Area, NO_DEVICE},
    mirror::lineage::Epoch,
    pool::tenants::check_name,
    pool::{Pool, initial_state},
    records::{DeviceRecord, PoolInfo},
    store::{BLOCK_BYTES, BlockStore},
};
use forebay_xlate::types::DeviceIndex;
use std::sync::Arc;
use uuid::Uuid;

/// The size of each end, where other software keeps its marks.
const ENDS_BYTES: u64 = 1 << 20;

/// A device for a new pool.
#[derive(Clone)]
pub struct NewDevice {
    /// Where it is, for example `file:/path`.
    pub spec: String,
    /// Its content.
    pub store: Arc<dyn BlockStore>,
    /// Its logical block in bytes: 512 or 4096.
    pub block_bytes: u32,
    /// Whether everything but label and catalog reads as zeros, as in a new sparse file. Otherwise
    /// extents are zero-filled before use.
    pub known_zero: bool,
}

/// A pool to be made.
#[derive(Clone)]
pub struct PoolSpec {
    /// Its name.
    pub name: String,
    /// The extent size in bytes: a power of two from 64 KiB to 4 MiB.
    pub extent_bytes: u64,
    /// The first always has a copy of the catalog.
    pub devices: Vec<NewDevice>,
    /// Placement and warning levels.
    pub settings: PoolSettings,
    /// Take devices in use.
    pub force: bool,
    /// The time in seconds since the epoch.
    pub now_s: u64,
}

pub(crate) fn refuse_used(device: &NewDevice, may_take: impl Fn(&Label) -> bool) -> Result<()> {
    let found = match probe(device.store.as_ref())? {
        Probe::Blank => return Ok(()),
        Probe::Forebay(label) if may_take(&label) => return Ok(()),
        Probe::Forebay(label) => {
            format!(
                "belongs to pool {:?} ({})",
                label.pool_name, label.pool_uuid
            )
        }
        Probe::Unusable(why) => format!("has a Forebay label: {why}"),
        Probe::Other(what) => format!("holds {what}"),
    };
    Err(PoolError::in_use(format!(
        "{} {found}: use --force to overwrite it",
        device.spec
    )))
}

pub(crate) fn capacity_of(device: &NewDevice) -> Result<u64> {
    if !matches!(device.block_bytes, 512 | 4096) {
        return Err(PoolError::invalid(format!(
            "{} has blocks of {} bytes; 512 and 4096 are supported",
            device.spec, device.block_bytes
        )));
    }
    let capacity = device.store.capacity();
    capacity.map_err(|e| PoolError::io(&device.spec, &e))
}

pub(crate) fn describe(
    info: &PoolInfo,
    index: DeviceIndex,
    device: &NewDevice,
    layout: &Layout,
    epoch: Epoch,
    stamp: Option<&Stamp>,
) -> Result<(DeviceRecord, Label)> {
    let record = DeviceRecord {
        index,
        uuid: Uuid::new_v4(),
        spec: device.spec.clone(),
        extents: layout.extents,
        data_offset_bytes: layout.data_offset_bytes,
        block_bytes: device.block_bytes,
        known_zero: device.known_zero,
    };
    let label = Label {
        format: LabelFormat::Current,
        generation: 1,
        pool_uuid: info.uuid,
        pool_name: info.name.clone(),
        device_uuid: record.uuid,
        device_index: index,
        block_bytes: device.block_bytes,
        extent_bytes: info.extent_bytes,
        catalog_offset_bytes: CATALOG_OFFSET_BYTES,
        catalog_bytes: layout.catalog_bytes,
        catalog_areas: layout.catalog_areas,
        data_offset_bytes: layout.data_offset_bytes,
        data_extents: layout.extents,
        epoch,
        owner: stamp.map(|stamp| stamp.owner.clone()),
        number: stamp.map_or(0, |stamp| stamp.number),
        is_clean: false,
    };
    Ok((record, label))
}

pub(crate) fn areas_of(label: &Label, store: &Arc<dyn BlockStore>) -> Result<Vec<Area>> {
    (0..u64::from(label.catalog_areas))
        .map(|nth| {
            Area::new(
                store.clone(),
                label.device_index,
                label.catalog_offset_bytes + nth * label.catalog_bytes,
                label.catalog_bytes,
                label.pool_uuid.into_bytes(),
            )
            .map_err(|error| PoolError::damaged(format!("{}: {error}", label.device_index)))
        })
        .collect()
}

/// Makes a pool.
pub fn create(spec: &PoolSpec) -> Result<(Pool, Catalog)> {
    check_name("pool", &spec.name)?;
    spec.settings.check()?;
    let mut capacities = Vec::with_capacity(spec.devices.len());
    for device in &spec.devices {
        capacities.push(capacity_of(device)?);
        if !spec.force {
            refuse_used(device, |_| false)?;
        }
    }
    let layouts = layout::plan(&capacities, spec.extent_bytes)?;
    let info = PoolInfo {
        name: spec.name.clone(),
        uuid: Uuid::new_v4(),
        extent_bytes: spec.extent_bytes,
        created_s: spec.now_s,
        boot_id: String::new(),
        engine_generation: 0,
        next_id: 1,
        opens: 0,
        settings: spec.settings,
    };
    let mut labels = Vec::with_capacity(layouts.len());
    let mut records = Vec::with_capacity(layouts.len());
    let mut areas = Vec::new();
    // Not known yet.
    let none = Epoch {
        number: 0,
        name: 0,
        copies: [NO_DEVICE; 2],
    };
    let mut extents = Extents::new(spec.extent_bytes);
    for (index, (device, layout)) in spec.devices.iter().zip(&layouts).enumerate() {
        // `plan` allows at most 256 devices.
        let index = DeviceIndex(index as u8);
        let (record, label) = describe(&info, index, device, layout, none, None)?;
        areas.extend(areas_of(&label, &device.store)?);
        labels.push(label);
        extents.add_device(vec![initial_state(&record); layout.extents as usize]);
        records.push(record);
    }
    if spec.force {
        spec.devices.iter().try_for_each(wipe_ends)?;
    }
    for (label, device) in labels.iter().zip(&spec.devices) {
        label.write(device.store.as_ref())?;
    }
    let twins = refuse_twins(&spec.devices, &labels);
    for device in &spec.devices {
        Label::wipe(device.store.as_ref())?;
    }
    twins?;
    // On two devices, or twice on the only one with an area.
    let places = areas.clone();
    areas.truncate(2);
    let catalog = Catalog::create(areas)?;
    let mut pool = Pool::empty(info, records, extents, catalog.usage());
    pool.journal.touch(Table::Meta, 0, 0);
    for index in 0..labels.len() {
        pool.journal.touch(Table::Devices, index as u64, 0);
    }
    if let Some(batch) = pool.take_batch()? {
        catalog.commit(&batch)?;
        pool.committed(batch.id())?;
    }
    for (label, device) in labels.iter_mut().zip(&spec.devices).rev() {
        label.epoch = catalog.epoch();
        label.write(device.store.as_ref())?;
        catalog.add_label(label.device_uuid, &device.store);
    }
    catalog.add_areas(&places);
    Ok((pool, catalog))
}

/// Overridden marks of other software must not come back.
pub(crate) fn wipe_ends(device: &NewDevice) -> Result<()> {
    let store = device.store.as_ref();
    let wipe = || -> std::io::Result<()> {
        let capacity = store.capacity()?;
        let zeros = vec![0; ENDS_BYTES as usize];
        let head = ENDS_BYTES.min(capacity);
        store.write_at(0, &zeros[..head as usize])?;
        // Whole blocks; the last one may be shorter.
        let tail = capacity.saturating_sub(ENDS_BYTES);
        let tail = (tail - tail % BLOCK_BYTES as u64).max(head);
        let zeros = vec![0; (capacity - tail) as usize];
        store.write_at(tail, &zeros)?;
        store.sync()
    };
    wipe().map_err(|error| PoolError::io(&format!("{}: wiping it", device.spec), &error))
}

/// A device with another one's label is the same disk.
fn refuse_twins(devices: &[NewDevice], labels: &[Label]) -> Result<()> {
    for (device, label) in devices.iter().zip(labels) {
        let found = Label::read(device.store.as_ref())?;
        if found.device_uuid == label.device_uuid {
            continue;
        }
        let twin = labels
            .iter()
            .position(|label| label.device_uuid == found.device_uuid)
            .and_then(|at| devices.get(at))
            .map_or("another device", |twin| twin.spec.as_str());
        return Err(PoolError::invalid(format!(
            "{} and {twin} are two names of one disk (multipath, or two loop devices over one file): give it once. No \
             pool was created",
            device.spec
        )));
    }
    Ok(())
}

/// Wipes labels and the catalog's headers. Tenants' data stays.
pub fn destroy(devices: &[Arc<dyn BlockStore>]) -> Result<()> {
    for store in devices {
        let label = Label::read(store.as_ref());
        Label::wipe(store.as_ref())?;
        let Ok(label) = label else { continue };
        for area in areas_of(&label, store)? {
            area.retire()
                .map_err(|error| PoolError::io("wiping the catalog", &error))?;
        }
    }
    Ok(())
}
