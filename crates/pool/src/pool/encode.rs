//! The records of a batch, encoded as the pool is now.

use super::{Pool, initial_state};
use crate::{
    codec::{self, STATE_CHUNK},
    error::Result,
    extents::runs::DeviceRun,
    features::{self, Feature},
    journal::batch::{Key, Table},
    records::LayerId,
};
use forebay_xlate::types::{DeviceIndex, VolumeId};

fn bytes<T: serde::Serialize>(record: Option<&T>) -> Result<Option<Vec<u8>>> {
    record.map(codec::encode).transpose()
}

pub(super) struct Encoder<'a>(pub(super) &'a Pool);

impl Encoder<'_> {
    /// A record's value; `None` if it is removed.
    pub(super) fn record(&self, key: Key) -> Result<Option<Vec<u8>>> {
        let Self(pool) = *self;
        match key.table {
            Table::Features => {
                let is = |f: &&Feature| f.class as u64 == key.a && u64::from(f.bit) == key.b;
                let feature = features::CATALOG.iter().find(is);
                Ok(feature.map(|feature| feature.name.into()))
            }
            Table::Meta => bytes(Some(&pool.info)),
            Table::Tenants => bytes(pool.tenants.stored(key.a)),
            Table::Volumes => {
                let volume = pool.volumes.any(VolumeId(key.a));
                volume
                    .map(|volume| codec::encode_volume(&volume.record))
                    .transpose()
            }
            Table::Layers => {
                let layer = pool.volumes.layers.get(LayerId(key.a));
                bytes(layer.map(|layer| &layer.record))
            }
            Table::Images => bytes(pool.images.of(VolumeId(key.a))),
            // A device's index.
            Table::Clients => bytes(pool.images.client(DeviceIndex(key.a as u8))),
            Table::Exports => {
                let export = pool.exports.stored(key.a);
                export.map(codec::encode_export).transpose()
            }
            Table::Functions => bytes(pool.exports.stored_function(key.a)),
            // A 16-bit number.
            Table::Ports => bytes(pool.hosts.ports.get(&(key.a as u16))),
            Table::HostReservations => bytes(pool.hosts.reservations.get(&VolumeId(key.a))),
            Table::Budgets => bytes(pool.budgets.stored(key.a, key.b)),
            Table::StatedBudgets => bytes(pool.budgets.stored_stated(key.a, key.b)),
            Table::Devices => bytes(pool.devices.get(key.a as usize)),
            // A device's index.
            Table::DeviceNumbers => bytes(pool.device_numbers.get(&DeviceIndex(key.a as u8))),
            Table::States => {
                let states = pool
                    .allocator
                    .extents
                    .stored_chunk(key.a, key.b, STATE_CHUNK);
                let Some(device) = pool.devices.get(key.a as usize) else {
                    return Ok(None);
                };
                let initial = initial_state(device);
                if states.iter().all(|state| *state == initial) {
                    return Ok(None);
                }
                codec::encode_states(&states).map(Some)
            }
            Table::Reservations => {
                let Some(device) = pool.devices.get(key.a as usize) else {
                    return Ok(None);
                };
                let base = key.b * STATE_CHUNK;
                let chunk = DeviceRun::new(device.index, base, STATE_CHUNK);
                let runs = pool.allocator.reservations.within(chunk);
                let encoded = codec::encode_reservations(base, &runs);
                encoded.map(|bytes| (!runs.is_empty()).then_some(bytes))
            }
            Table::Maps => {
                let Some((map, _, volume)) = pool.volumes.map_of(key.a) else {
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
                let map = pool.volumes.map_of(key.a);
                let bits = map.and_then(|(_, hidden, _)| hidden.chunk(key.b));
                bits.map(codec::encode_hidden).transpose()
            }
        }
    }
}
