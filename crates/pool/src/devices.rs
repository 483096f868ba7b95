//! The pool's devices, and what can be set for the pool.
//!
//! **Design.** Whether a device can be used is the caller's to say and nowhere stored. What is on a
//! device that can't be used stays what it was: mapped, stock or free, and is used again when the
//! device is. **Not here:** opening devices, their labels (`create`).

use crate::{
    batch::{BatchId, Table},
    error::{PoolError, Result},
    extents::Health,
    pool::{Pool, initial_state},
    records::DeviceRecord,
    space::PoolSettings,
};
use forebay_xlate::types::{DeviceIndex, VolumeId};

impl Pool {
    /// Whether a device can be used.
    pub fn device_health(&self, device: DeviceIndex) -> Health {
        self.extents.health(device)
    }

    /// Says whether a device can be used. Nothing is allocated, reserved or laundered on one that is
    /// not online; what is mapped on a failing one is served all the same, and faults of what is
    /// mapped on one that is missing or failed say so.
    pub fn set_device_health(&mut self, device: DeviceIndex, health: Health) -> Result<()> {
        if !self.extents.set_health(device, health) {
            return Err(PoolError::not_found(format!("no {device}")));
        }
        self.pattern.update(&self.extents);
        Ok(())
    }

    /// Adds a device, which carries its label already; it is in the pool once the open batch is
    /// durable. It counts as missing until [`Pool::set_device_health`] says that it can be used.
    pub fn add_device(&mut self, record: DeviceRecord) -> Result<()> {
        let index = usize::from(record.index.0);
        if index != self.devices.len() {
            return Err(PoolError::invalid(format!(
                "{} of a pool that has {} devices",
                record.index,
                self.devices.len()
            )));
        }
        if record.extents == 0 || self.devices.iter().any(|device| device.uuid == record.uuid) {
            return Err(PoolError::invalid(format!(
                "{} is in the pool already, or holds nothing",
                record.spec
            )));
        }
        let small = self
            .volumes
            .values()
            .find(|volume| volume.record.block_bytes < record.block_bytes);
        if let Some(volume) = small {
            return Err(PoolError::invalid(format!(
                "{} has blocks of {} bytes and volume {:?} has {}: use a device with smaller blocks",
                record.spec, record.block_bytes, volume.record.name, volume.record.block_bytes
            )));
        }
        // A device's extents fit in memory: a byte each.
        let states = vec![initial_state(&record); record.extents as usize];
        self.extents.add_device(states);
        self.extents.set_health(record.index, Health::Missing);
        self.touch(Table::Devices, index as u64, 0);
        self.devices.push(record);
        Ok(())
    }

    /// The volumes that have something on a device, mapped or in stock. Looks at every map.
    pub fn volumes_on(&self, device: DeviceIndex) -> Vec<VolumeId> {
        self.volumes
            .iter()
            .filter(|(_, volume)| {
                volume.stock.extents_on(device) > 0
                    || volume
                        .map
                        .chunks_from(0)
                        .any(|(_, runs)| runs.iter().any(|run| run.device == device))
            })
            .map(|(id, _)| *id)
            .collect()
    }

    /// What is set for the pool.
    pub fn settings(&self) -> PoolSettings {
        self.info.settings
    }

    /// Sets it, durably with the open batch.
    pub fn set_settings(&mut self, settings: PoolSettings) -> Result<()> {
        settings.check()?;
        if self.info.settings != settings {
            self.info.settings = settings;
            self.touch(Table::Meta, 0, 0);
        }
        Ok(())
    }

    /// A generation for a new engine: higher than any before. Use it once the returned batch is
    /// durable, and not sooner: a fence waits for lower ones only.
    pub fn next_engine_generation(&mut self) -> (u64, BatchId) {
        self.info.engine_generation += 1;
        self.touch(Table::Meta, 0, 0);
        (self.info.engine_generation, self.open_batch_id())
    }

    /// The boot in which a daemon last used the pool; none: never.
    pub fn boot_id(&self) -> Option<&str> {
        Some(self.info.boot_id.as_str()).filter(|id| !id.is_empty())
    }

    /// Records the boot that uses the pool now. Set it after [`Pool::finish_adoption`], so that both
    /// become durable together.
    pub fn set_boot_id(&mut self, boot_id: &str) -> Result<()> {
        if boot_id.is_empty() || boot_id.len() > 64 {
            return Err(PoolError::invalid(format!("{boot_id:?} is no boot id")));
        }
        if self.info.boot_id != boot_id {
            self.info.boot_id = boot_id.to_owned();
            self.touch(Table::Meta, 0, 0);
        }
        Ok(())
    }

    /// Records where a device is now.
    pub fn set_device_spec(&mut self, device: DeviceIndex, spec: &str) -> Result<()> {
        let record = self
            .devices
            .get_mut(usize::from(device.0))
            .ok_or_else(|| PoolError::not_found(format!("no {device}")))?;
        if record.spec != spec {
            record.spec = spec.to_owned();
            self.touch(Table::Devices, u64::from(device.0), 0);
        }
        Ok(())
    }
}
