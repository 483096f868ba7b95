//! The pool in memory, which sequences its parts.
//!
//! Operations validate, then change the parts, which name each touched record in the [`Journal`].
//! [`Pool::take_batch`] encodes the touched records *as they are now*. So batches applied in order
//! always yield a past state of the pool. [`Pool::committed`] does what must wait for durability.
//!
//! A failed batch may be retried. To give up, reopen the pool.

pub(crate) mod admin;
pub(crate) mod adopt;
pub(crate) mod budgets;
mod devices;
mod encode;
pub(crate) mod exports;
mod faults;
pub(crate) mod hosts;
pub(crate) mod images;
pub(crate) mod snapshots;
pub(crate) mod tenants;

use crate::{
    catalog::{CatalogUsage, Usage},
    error::{PoolError, Result},
    extents::{
        ExtentState, Extents,
        allocator::Allocator,
        space::{Space, SpaceLevel},
    },
    journal::{
        Journal,
        batch::{Batch, BatchId, Table},
    },
    records::{DeviceRecord, PoolInfo, VolumeRecord},
    volumes::Volumes,
};
use budgets::Budgets;
use encode::Encoder;
use exports::Exports;
use forebay_device::size::format_bytes;
use forebay_xlate::types::{DeviceIndex, VolumeId};
use hosts::Hosts;
use images::Images;
use std::{collections::BTreeMap, sync::Arc};
use tenants::Tenants;

/// A pool.
#[derive(Debug)]
pub struct Pool {
    pub(crate) info: PoolInfo,
    pub(crate) devices: Vec<DeviceRecord>,
    /// The known number of each label.
    pub(crate) device_numbers: BTreeMap<DeviceIndex, u64>,
    pub(crate) tenants: Tenants,
    pub(crate) volumes: Volumes,
    pub(crate) exports: Exports,
    pub(crate) hosts: Hosts,
    pub(crate) budgets: Budgets,
    pub(crate) images: Images,
    pub(crate) allocator: Allocator,
    pub(crate) journal: Journal,
    /// It makes this opening's sequences unique; nothing is granted before.
    opening_batch: BatchId,
    /// Adoption is going on.
    pub(crate) adopting: bool,
    /// The number of the latest check.
    pub(crate) checking: u64,
    usage: Arc<Usage>,
}

/// An opening has 2^40 sequences, more than the largest pool has extents.
fn first_seq(opens: u64) -> u64 {
    (opens << 40) + 1
}

impl Pool {
    pub(crate) fn empty(
        info: PoolInfo,
        devices: Vec<DeviceRecord>,
        extents: Extents,
        usage: Arc<Usage>,
    ) -> Self {
        Self {
            volumes: Volumes::new(info.extent_bytes, first_seq(info.opens)),
            info,
            devices,
            device_numbers: BTreeMap::new(),
            tenants: Tenants::default(),
            exports: Exports::default(),
            hosts: Hosts::default(),
            budgets: Budgets::default(),
            images: Images::default(),
            allocator: Allocator::new(extents),
            journal: Journal::new(),
            opening_batch: BatchId(0),
            adopting: false,
            checking: 0,
            usage,
        }
    }

    /// The pool's own record.
    pub fn info(&self) -> &PoolInfo {
        &self.info
    }

    /// The devices, by index.
    pub fn devices(&self) -> &[DeviceRecord] {
        &self.devices
    }

    /// The tenants.
    pub fn tenants(&self) -> &Tenants {
        &self.tenants
    }

    /// The volumes with their maps.
    pub fn volumes(&self) -> &Volumes {
        &self.volumes
    }

    /// A volume by id.
    pub fn volume(&self, volume: VolumeId) -> Result<&VolumeRecord> {
        self.volumes.record(volume)
    }

    /// The exports.
    pub fn exports(&self) -> &Exports {
        &self.exports
    }

    /// Hosts' reservations and ports.
    pub fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// The budgets of tenants and volumes.
    pub fn budgets(&self) -> &Budgets {
        &self.budgets
    }

    /// The RBD images of volumes, and their RADOS clients.
    pub fn images(&self) -> &Images {
        &self.images
    }

    /// Extents' states and devices' health.
    pub fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    /// The open and durable batches.
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    /// Extents by state.
    pub fn space(&self) -> Space {
        Space {
            spare: self.volumes.unused(),
            preallocated: self.volumes.preallocated(),
            promised: self.volumes.promised_extents(),
            ..self.allocator.extents.space()
        }
    }

    /// How full the pool is by its settings.
    pub fn space_level(&self) -> SpaceLevel {
        self.info.settings.level(&self.space())
    }

    /// How full the catalog is.
    pub fn catalog_usage(&self) -> CatalogUsage {
        self.usage.get()
    }

    /// All changes since the last call; `None` without changes.
    pub fn take_batch(&mut self) -> Result<Option<Batch>> {
        let mut records = Vec::new();
        for key in self.journal.touched() {
            records.push((key, Encoder(self).record(key)?));
        }
        Ok(self.journal.close_batch(records))
    }

    /// Notes that a batch and all before it are durable.
    pub fn committed(&mut self, batch: BatchId) -> Result<()> {
        for promotions in self.journal.mark_committed(batch)? {
            for volume in &promotions.reserved {
                self.volumes.promote_incoming(*volume, batch);
            }
            self.volumes.mark_durable(&promotions.mapped, batch);
            for run in promotions.freed {
                self.allocator.extents.set(run, ExtentState::Dirty);
            }
        }
        Ok(())
    }

    /// Makes this opening's sequences exceed all earlier ones.
    pub(crate) fn begin_opening(&mut self) {
        self.info.opens += 1;
        self.volumes.next_seq = first_seq(self.info.opens);
        self.opening_batch = self.journal.open_batch_id();
        self.journal.touch(Table::Meta, 0, 0);
    }

    fn admit(&self, bytes: u64) -> Result<()> {
        if bytes > self.usage.room(self.volumes.catalog_promised) {
            let usage = self.usage.get();
            return Err(PoolError::no_space(format!(
                "the pool's catalog is full ({} of {}): delete volumes or exports",
                format_bytes(usage.used_bytes),
                format_bytes(usage.limit_bytes)
            )));
        }
        Ok(())
    }

    /// Refuses until a predecessor's grants are adopted.
    pub(crate) fn ready(&self) -> Result<()> {
        if self.adopting {
            return Err(PoolError::in_use(
                "the grants of the previous daemon are not adopted yet",
            ));
        }
        Ok(())
    }
}

pub(crate) fn initial_state(device: &DeviceRecord) -> u8 {
    if device.known_zero {
        ExtentState::Clean as u8
    } else {
        ExtentState::Dirty as u8
    }
}
