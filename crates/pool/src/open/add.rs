//! Adding a device to a pool.
//!
//! The label comes first, then the record with the caller's next commit. After a crash in between,
//! opening ignores and reports the device, which can be added again.

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

/// Labels a device durably and adds it with the open batch. Call [`Catalog::spread`] once that is
/// durable. `force` takes a device in use.
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
        // Not even with `force`.
        Ok(label) if known(&label) => {
            return Err(PoolError::exists(format!(
                "{} is already in the pool",
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
    pool.images().check_device(index)?;
    let (record, label) = describe(
        pool.info(),
        index,
        device,
        &layout,
        catalog.epoch(),
        catalog.last_stamp().as_ref(),
    )?;
    // Another catalog's remains must not pass for a copy.
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

/// If this overwrites another device's label, both are one disk: restores it and fails.
fn label_alone(catalog: &Catalog, device: &NewDevice, label: &Label) -> Result<()> {
    let stores = catalog.label_stores().into_iter();
    // A device that does not answer can't be compared.
    let before: Vec<_> = stores
        .filter_map(|(_, store)| Some((Label::read(store.as_ref()).ok()?, store)))
        .collect();
    label.write(device.store.as_ref())?;
    for (was, store) in &before {
        let found = Label::read(store.as_ref());
        if found.is_ok_and(|found| found.device_uuid == label.device_uuid) {
            was.write(store.as_ref())?;
            return Err(PoolError::exists(format!(
                "{} is another name for {}, which is already in the pool",
                device.spec, was.device_index
            )));
        }
    }
    Ok(())
}

impl Catalog {
    /// Gives a device with a durable record a copy of the catalog, if there is only one, or two on
    /// one device. Blocks, and delays commits.
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
