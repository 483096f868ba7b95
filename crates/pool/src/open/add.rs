//! Adding a device to a pool.
//!
//! **Design.** The label first, then the record with the caller's next commit, then, once that is durable,
//! a copy of the catalog. So a cut between leaves a device that carries a label of a pool which does not
//! know it: opening reports and ignores it, and it can be added again. **Not here:** when the engine hears
//! of it, and when it may be allocated from.

use crate::{
    catalog::Catalog,
    error::{PoolError, Result},
    label::Label,
    layout::{self, MAX_DEVICES},
    open::create::{NewDevice, areas_of, capacity_of, describe, refuse_used, wipe_ends},
    pool::Pool,
    store::BlockStore,
};
use forebay_xlate::types::DeviceIndex;
use std::sync::Arc;

/// Labels a device, durably, and adds it to the pool: it is in it once the open batch is durable. Call
/// [`Catalog::spread`] after that. `force` takes a device that holds something.
pub fn add_device(
    pool: &mut Pool,
    catalog: &Catalog,
    device: &NewDevice,
    force: bool,
) -> Result<DeviceIndex> {
    let capacity = capacity_of(device)?;
    let ours = pool.info().uuid;
    let known = |label: &Label| {
        label.pool_uuid == ours
            && pool
                .devices()
                .iter()
                .any(|record| record.uuid == label.device_uuid)
    };
    match Label::read(device.store.as_ref()) {
        // Not even by force.
        Ok(label) if known(&label) => {
            return Err(PoolError::exists(format!(
                "{} is in the pool already",
                device.spec
            )));
        }
        _ if force => {}
        _ => refuse_used(device, |label| label.pool_uuid == ours)?,
    }
    let count = pool.devices().len();
    if count >= MAX_DEVICES {
        return Err(PoolError::invalid(format!(
            "a pool has at most {MAX_DEVICES} devices"
        )));
    }
    let layout = layout::plan_addition(
        &device.spec,
        capacity,
        catalog.area_bytes(),
        pool.info().extent_bytes,
    )?;
    // Below 256.
    let index = DeviceIndex(count as u8);
    let (record, label) = describe(
        pool.info(),
        index,
        device,
        &layout,
        catalog.epoch(),
        catalog.last_stamp().as_ref(),
    )?;
    // What is left of another catalog there must not be taken for a copy of this one.
    for area in areas_of(&label, &device.store)? {
        area.retire()
            .map_err(|error| PoolError::io(&device.spec, &error))?;
    }
    label_alone(catalog, device, &label)?;
    if force {
        wipe_ends(device)?;
        label.write(device.store.as_ref())?;
    }
    let number = label.number;
    pool.add_device(record)?;
    if number > 0 {
        pool.note_stamped(&[label.device_uuid], number);
    }
    Ok(index)
}

/// Writes the label of a new device, unless that overwrites the label of a device of the pool: then both are names of
/// one disk, and the old label is written again.
fn label_alone(catalog: &Catalog, device: &NewDevice, label: &Label) -> Result<()> {
    let stores = catalog.label_stores().into_iter();
    // A device that does not answer tells nothing.
    let before: Vec<_> = stores
        .filter_map(|(_, store)| Some((Label::read(store.as_ref()).ok()?, store)))
        .collect();
    label.write(device.store.as_ref())?;
    for (was, store) in &before {
        let found = Label::read(store.as_ref());
        if found.is_ok_and(|found| found.device_uuid == label.device_uuid) {
            was.write(store.as_ref())?;
            return Err(PoolError::exists(format!(
                "{} is another name of {}, which is in the pool already",
                device.spec, was.device_index
            )));
        }
    }
    Ok(())
}

impl Catalog {
    /// Gives a device of the pool, whose record is durable, a copy of the catalog if that makes it safer:
    /// where there is one copy only, or two on one device. Blocks; commits wait meanwhile.
    pub fn spread(&self, index: DeviceIndex, store: &Arc<dyn BlockStore>) -> Result<()> {
        let label = Label::read(store.as_ref())?;
        if label.device_index != index {
            return Err(PoolError::invalid(format!(
                "this is {}, not {index}",
                label.device_index
            )));
        }
        self.add_label(label.device_uuid, store);
        self.settle(&areas_of(&label, store)?)
    }
}
