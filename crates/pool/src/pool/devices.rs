//! The pool's devices and settings.
//!
//! The caller reports devices' health, which is not stored. Extents on an unusable device keep
//! their state.

use super::{Pool, initial_state};
use crate::{
    error::{PoolError, Result},
    extents::{DeviceHealth, space::PoolSettings},
    journal::batch::{BatchId, Table},
    records::DeviceRecord,
};
use forebay_xlate::types::DeviceIndex;
use uuid::Uuid;

impl Pool {
    /// Sets a device's health. Extents are allocated, reserved and zero-filled only on online
    /// devices. A failing one serves mapped extents; on a missing or failed one, faults return an
    /// error.
    pub fn set_device_health(&mut self, device: DeviceIndex, health: DeviceHealth) -> Result<()> {
        self.allocator.set_health(device, health)
    }

    /// Adds a labelled device with the open batch. It counts as missing until
    /// [`Pool::set_device_health`].
    pub fn add_device(&mut self, record: DeviceRecord) -> Result<()> {
        let index = usize::from(record.index.0);
        if index != self.devices.len() {
            return Err(PoolError::invalid(format!(
                "{} can't be added to a pool that has {} devices",
                record.index,
                self.devices.len()
            )));
        }
        if record.extents == 0 || self.devices.iter().any(|device| device.uuid == record.uuid) {
            return Err(PoolError::invalid(format!(
                "{} is already in the pool, or has no extents",
                record.spec
            )));
        }
        self.images.check_device(record.index)?;
        let small = self.volumes.records().find(|volume| {
            volume.block_bytes < record.block_bytes && self.images.of(volume.id).is_none()
        });
        if let Some(volume) = small {
            return Err(PoolError::invalid(format!(
                "{} has blocks of {} bytes, but volume {:?} has blocks of {}: use a device with smaller blocks",
                record.spec, record.block_bytes, volume.name, volume.block_bytes
            )));
        }
        // Extents take a byte each.
        let states = vec![initial_state(&record); record.extents as usize];
        self.allocator.extents.add_device(states);
        self.allocator
            .extents
            .set_health(record.index, DeviceHealth::Missing);
        self.journal.touch(Table::Devices, index as u64, 0);
        self.devices.push(record);
        Ok(())
    }

    /// Changes the settings; durable with the open batch.
    pub fn set_settings(&mut self, settings: PoolSettings) -> Result<()> {
        settings.check()?;
        if self.info.settings != settings {
            self.info.settings = settings;
            self.journal.touch(Table::Meta, 0, 0);
        }
        Ok(())
    }

    /// A new engine's generation. Use it only once the returned batch is durable: a fence waits
    /// only for lower ones.
    pub fn next_engine_generation(&mut self) -> (u64, BatchId) {
        self.info.engine_generation += 1;
        self.journal.touch(Table::Meta, 0, 0);
        (self.info.engine_generation, self.journal.open_batch_id())
    }

    /// Records the current boot. Call it after [`Pool::finish_adoption`], so that both become
    /// durable together.
    pub fn set_boot_id(&mut self, boot_id: &str) -> Result<()> {
        if boot_id.is_empty() || boot_id.len() > 64 {
            return Err(PoolError::invalid(format!("{boot_id:?} is not a boot id")));
        }
        if self.info.boot_id != boot_id {
            self.info.boot_id = boot_id.to_owned();
            self.journal.touch(Table::Meta, 0, 0);
        }
        Ok(())
    }

    /// Counts a clean stop; returns its number.
    pub fn count_stop(&mut self) -> u64 {
        self.info.opens += 1;
        self.journal.touch(Table::Meta, 0, 0);
        self.info.opens
    }

    /// Notes which labels have a number; durable with the open batch.
    pub fn note_stamped(&mut self, devices: &[Uuid], number: u64) {
        let known: Vec<DeviceIndex> = self
            .devices
            .iter()
            .filter(|record| devices.contains(&record.uuid))
            .map(|record| record.index)
            .collect();
        for device in known {
            self.device_numbers.insert(device, number);
            self.journal
                .touch(Table::DeviceNumbers, u64::from(device.0), 0);
        }
    }
}
