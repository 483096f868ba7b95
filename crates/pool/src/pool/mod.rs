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
pub(crate) mod exports;
mod faults;
pub(crate) mod hosts;
pub(crate) mod images;
pub(crate) mod snapshots;
pub(crate) mod tenants;

use crate::{
    catalog::{CatalogUsage, Usage},
    codec::{self, STATE_CHUNK},
    error::{PoolError, Result},
    extents::{
        ExtentState, Extents,
        allocator::Allocator,
        runs::DeviceRun,
        space::{Space, SpaceLevel},
    },
    features::{self, Feature},
    journal::{
        Journal,
        batch::{Batch, BatchId, Key, Table},
    },
    records::{DeviceRecord, LayerId, PoolInfo, VolumeRecord},
    volumes::Volumes,
};
use budgets::Budgets;
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
            records.push((key, self.encode(key)?));
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

    fn encode(&self, key: Key) -> Result<Option<Vec<u8>>> {
        fn record<T: serde::Serialize>(record: Option<&T>) -> Result<Option<Vec<u8>>> {
            record.map(codec::encode).transpose()
        }
        match key.table {
            Table::Features => {
                let is = |f: &&Feature| f.class as u64 == key.a && u64::from(f.bit) == key.b;
                let feature = features::CATALOG.iter().find(is);
                Ok(feature.map(|feature| feature.name.into()))
            }
            Table::Meta => record(Some(&self.info)),
            Table::Tenants => record(self.tenants.stored(key.a)),
            Table::Volumes => {
                let volume = self.volumes.any(VolumeId(key.a));
                volume
                    .map(|volume| codec::encode_volume(&volume.record))
                    .transpose()
            }
            Table::Layers => {
                let layer = self.volumes.layers.get(LayerId(key.a));
                record(layer.map(|layer| &layer.record))
            }
            Table::Images => record(self.images.of(VolumeId(key.a))),
            // A device's index.
            Table::Clients => record(self.images.client(DeviceIndex(key.a as u8))),
            Table::Exports => {
                let export = self.exports.stored(key.a);
                export.map(codec::encode_export).transpose()
            }
            Table::Functions => record(self.exports.stored_function(key.a)),
            // A 16-bit number.
            Table::Ports => record(self.hosts.ports.get(&(key.a as u16))),
            Table::HostReservations => record(self.hosts.reservations.get(&VolumeId(key.a))),
            Table::Budgets => record(self.budgets.stored(key.a, key.b)),
            Table::StatedBudgets => record(self.budgets.stored_stated(key.a, key.b)),
            Table::Devices => record(self.devices.get(key.a as usize)),
            // A device's index.
            Table::DeviceNumbers => record(self.device_numbers.get(&DeviceIndex(key.a as u8))),
            Table::States => {
                let states = self
                    .allocator
                    .extents
                    .stored_chunk(key.a, key.b, STATE_CHUNK);
                let Some(device) = self.devices.get(key.a as usize) else {
                    return Ok(None);
                };
                let initial = initial_state(device);
                if states.iter().all(|state| *state == initial) {
                    return Ok(None);
                }
                codec::encode_states(&states).map(Some)
            }
            Table::Reservations => {
                let Some(device) = self.devices.get(key.a as usize) else {
                    return Ok(None);
                };
                let base = key.b * STATE_CHUNK;
                let chunk = DeviceRun::new(device.index, base, STATE_CHUNK);
                let runs = self.allocator.reservations.within(chunk);
                let encoded = codec::encode_reservations(base, &runs);
                encoded.map(|bytes| (!runs.is_empty()).then_some(bytes))
            }
            Table::Maps => {
                let Some((map, _, volume)) = self.volumes.map_of(key.a) else {
                    return Ok(None);
                };
                let uncommitted = volume.map_or_else(Vec::new, |v| v.uncommitted_in(key.b));
                let runs = map.chunk_without(key.b, &uncommitted);
                if runs.is_empty() {
                    return Ok(None);
                }
                codec::encode_map(&runs).map(Some)
            }
            Table::Hidden => {
                let map = self.volumes.map_of(key.a);
                let bits = map.and_then(|(_, hidden, _)| hidden.chunk(key.b));
                bits.map(codec::encode_hidden).transpose()
            }
        }
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
