//! Loads the pool from the catalog's records.
//!
//! One pass claims each extent at most once by clearing a bit. The bits of a terabyte of small
//! extents take 2 MB, which fits into the processor's cache. Contradictions are damage and fail the
//! opening. An extent in use without a user is a leak, which is harmless and counted.

use crate::{
    catalog::{Catalog, Usage},
    codec::{self, STATE_CHUNK},
    error::{PoolError, Result},
    extents::reservations::Reservations,
    extents::runs::DeviceRun,
    extents::{ExtentState, Extents},
    features::{CATALOG, Class, Unknown},
    journal::batch::Table,
    layout::{MAX_DEVICE_EXTENTS, MAX_EXTENT_BYTES, MIN_EXTENT_BYTES},
    pool::admin::MAX_VOLUME_BYTES,
    pool::budgets::Budgets,
    pool::hosts::{MAX_RECENT, PORTS_KEPT},
    pool::images::Images,
    pool::{Pool, initial_state},
    records::{
        ClientOwner, DeviceRecord, ExportId, ExportRecord, HostReservations, LayerId, LayerRecord,
        MapId, PoolInfo, PortRecord, TenantRecord,
    },
    volumes::{
        PoolVolume,
        hidden::Hidden,
        layers::{Layer, Layers, MAX_LAYERS, Node},
        map::{MAP_CHUNK, VolumeMap},
    },
};
use forebay_xlate::types::{DeviceIndex, VolumeId};
use std::{collections::BTreeMap, sync::Arc};

/// More ids than are ever given.
const MAX_ID: u64 = 1 << 60;

/// Used extents that no volume has claimed yet.
struct Unclaimed {
    reserved: Vec<u64>,
    owned: Vec<u64>,
}

impl Unclaimed {
    fn of(states: &[u8]) -> Self {
        let bits = |state: ExtentState| {
            let word = |states: &[u8]| {
                let bits = states.iter().enumerate();
                bits.fold(0, |word, (at, byte)| {
                    word | u64::from(*byte == state as u8) << at
                })
            };
            states.chunks(64).map(word).collect()
        };
        Self {
            reserved: bits(ExtentState::Reserved),
            owned: bits(ExtentState::Owned),
        }
    }

    fn of_state(&mut self, state: ExtentState) -> &mut [u64] {
        if state == ExtentState::Reserved {
            &mut self.reserved
        } else {
            &mut self.owned
        }
    }
}

#[derive(Default)]
struct Loader {
    unknown_features: Unknown,
    info: Option<PoolInfo>,
    devices: Vec<DeviceRecord>,
    device_numbers: BTreeMap<DeviceIndex, u64>,
    /// By device and extent.
    states: Vec<Vec<u8>>,
    /// By device; made once all states are known.
    unclaimed: Vec<Unclaimed>,
    tenants: Vec<TenantRecord>,
    volumes: BTreeMap<VolumeId, PoolVolume>,
    layers: BTreeMap<LayerId, Layer>,
    /// The holder of each map.
    maps: BTreeMap<MapId, Node>,
    images: Images,
    exports: Vec<ExportRecord>,
    functions: Vec<(u16, ExportId)>,
    ports: BTreeMap<u16, PortRecord>,
    host_reservations: BTreeMap<VolumeId, HostReservations>,
    budgets: Budgets,
    reservations: Reservations,
    claimed: u64,
}

fn wrong(what: impl std::fmt::Display) -> PoolError {
    PoolError::damaged(format!("the pool's catalog contradicts itself: {what}"))
}

fn decode_info(value: &[u8]) -> Result<PoolInfo> {
    let info: PoolInfo = codec::decode(value)?;
    if !info.extent_bytes.is_power_of_two()
        || !(MIN_EXTENT_BYTES..=MAX_EXTENT_BYTES).contains(&info.extent_bytes)
    {
        return Err(wrong(format!(
            "extents of {} bytes are invalid",
            info.extent_bytes
        )));
    }
    Ok(info)
}

impl Loader {
    fn feature(&mut self, class: u64, bit: u64, name: &[u8]) {
        if let Some(class) = Class::of(class) {
            let name = std::str::from_utf8(name).ok();
            self.unknown_features.note(CATALOG, class, bit, name);
        }
    }

    /// Features come first: with unknown ones, the other records may have unknown forms.
    fn meta(&mut self, value: &[u8]) -> Result<()> {
        self.unknown_features.refuse()?;
        self.info = Some(decode_info(value)?);
        Ok(())
    }

    fn record(&mut self, table: Table, a: u64, b: u64, value: &[u8]) -> Result<()> {
        match table {
            Table::Features => self.feature(a, b, value),
            Table::Meta => self.meta(value)?,
            Table::Devices => self.device_record(a, value)?,
            Table::DeviceNumbers => {
                let device = u8::try_from(a).map_err(|_| wrong("a number belongs to no device"))?;
                self.device_numbers
                    .insert(DeviceIndex(device), codec::decode(value)?);
            }
            Table::Tenants => {
                let record: TenantRecord = codec::decode(value)?;
                if record.id.0 != a {
                    return Err(wrong(format!("tenant {a} is recorded as {}", record.id.0)));
                }
                self.tenants.push(record);
            }
            Table::Volumes => self.volume_record(a, value)?,
            Table::Layers => {
                let record: LayerRecord = codec::decode(value)?;
                self.hold_map(record.map, Node::Layer(LayerId(a)))?;
                self.layers.insert(LayerId(a), Layer::new(record));
            }
            Table::Images => self.image_record(a, value)?,
            Table::Clients => self.client_record(a, value)?,
            Table::Exports => {
                let record: ExportRecord = codec::decode_export(value)?;
                if record.id.0 != a {
                    return Err(wrong(format!("export {a} is recorded as {}", record.id.0)));
                }
                self.exports.push(record);
            }
            Table::Functions => {
                let number = u16::try_from(a).map_err(|_| wrong("a function out of range"))?;
                self.functions.push((number, codec::decode(value)?));
            }
            Table::Ports => {
                let record: PortRecord = codec::decode(value)?;
                if u64::from(record.port_id) != a || self.ports.len() >= PORTS_KEPT {
                    return Err(wrong(format!("port {a} is numbered {}", record.port_id)));
                }
                self.ports.insert(record.port_id, record);
            }
            Table::HostReservations => {
                let record: HostReservations = codec::decode(value)?;
                if record.recent.len() > MAX_RECENT {
                    return Err(wrong(format!(
                        "volume {a} has too many recent reservations"
                    )));
                }
                self.host_reservations.insert(VolumeId(a), record);
            }
            Table::Budgets => {
                let budget = codec::decode(value)?;
                if !self.budgets.load(a, b, budget) {
                    return Err(wrong(format!("the budget {a}/{b} is invalid")));
                }
            }
            Table::StatedBudgets => self.budgets.load_stated(a, b, codec::decode(value)?),
            Table::States => self.states_chunk(a, b, value)?,
            Table::Reservations => self.reservations_chunk(a, b, value)?,
            Table::Maps => self.map_chunk(a, b, value)?,
            Table::Hidden => {
                let bits = codec::decode_hidden(value)?;
                if b > u64::MAX / MAP_CHUNK - 1 {
                    return Err(wrong("a chunk out of range"));
                }
                self.map_of(a)?.1.load_chunk(b, bits);
            }
        }
        Ok(())
    }

    fn device_record(&mut self, a: u64, value: &[u8]) -> Result<()> {
        let record: DeviceRecord = codec::decode(value)?;
        if a != self.devices.len() as u64 || u64::from(record.index.0) != a {
            return Err(wrong(format!("device {a} is out of order")));
        }
        if record.extents > MAX_DEVICE_EXTENTS {
            return Err(wrong(format!("device {a} has too many extents")));
        }
        self.devices.push(record);
        Ok(())
    }

    fn volume_record(&mut self, a: u64, value: &[u8]) -> Result<()> {
        let record = codec::decode_volume(value)?;
        if record.id.0 != a {
            return Err(wrong(format!("volume {a} is recorded as {}", record.id.0)));
        }
        if record.name.is_empty() && record.layering.parent.is_some() {
            return Err(wrong(format!(
                "{} is being deleted but needs a layer",
                record.id
            )));
        }
        self.hold_map(record.map_id(), Node::Volume(record.id))?;
        self.volumes.insert(record.id, PoolVolume::new(record));
        Ok(())
    }

    fn reservations_chunk(&mut self, a: u64, b: u64, value: &[u8]) -> Result<()> {
        let device = u8::try_from(a).map_err(|_| wrong("a reservation is on no device"))?;
        for (run, id) in codec::decode_reservations(DeviceIndex(device), b, value)? {
            self.claim(Node::Volume(id), run, ExtentState::Reserved)?;
            self.volume(id.0)?.spare.insert(run);
            self.reservations.insert(run, id);
        }
        Ok(())
    }

    fn hold_map(&mut self, map: MapId, node: Node) -> Result<()> {
        match self.maps.insert(map, node) {
            None => Ok(()),
            Some(other) => Err(wrong(format!(
                "map {} belongs to {node} and {other}",
                map.0
            ))),
        }
    }

    /// A map, its hidden extents, and its holder.
    fn map_of(&mut self, map: u64) -> Result<(&mut VolumeMap, &mut Hidden, Node)> {
        let node = self.maps.get(&MapId(map)).copied();
        let parts = match node {
            Some(Node::Volume(id)) => {
                let volume = self.volumes.get_mut(&id);
                volume.map(|volume| (&mut volume.map, &mut volume.hidden))
            }
            Some(Node::Layer(id)) => {
                let layer = self.layers.get_mut(&id);
                layer.map(|layer| (&mut layer.map, &mut layer.hidden))
            }
            None => None,
        };
        match (parts, node) {
            (Some((map, hidden)), Some(node)) => Ok((map, hidden, node)),
            _ => Err(wrong(format!(
                "extents belong to map {map}, which does not exist"
            ))),
        }
    }

    /// Enters each layer's children. Every chain ends, because a parent is older: its number is
    /// lower, or it was frozen later than its child's map was made.
    fn link_layers(&mut self) -> Result<()> {
        let volumes = self.volumes.values().map(|volume| &volume.record);
        let volumes = volumes.map(|record| (Node::Volume(record.id), record.layering.parent));
        let layers = self.layers.iter();
        let layers = layers.map(|(id, layer)| (Node::Layer(*id), layer.record.parent));
        let links: Vec<(Node, LayerId)> = volumes
            .chain(layers)
            .filter_map(|(node, parent)| Some((node, parent?)))
            .collect();
        for (node, parent) in links {
            let layer = self.layers.get_mut(&parent);
            let layer = layer.ok_or_else(|| {
                wrong(format!("{node} is based on {parent}, which does not exist"))
            })?;
            layer.children.insert(node);
        }
        for id in self.layers.keys() {
            let parent = |id: &LayerId| self.layers.get(id)?.record.parent;
            let depth = std::iter::successors(Some(*id), parent);
            if depth.take(MAX_LAYERS + 2).count() > MAX_LAYERS + 1 {
                return Err(wrong(format!(
                    "{id} is based on too many layers, or on itself"
                )));
            }
        }
        Ok(())
    }

    /// A number given twice could replace a layer, even by one below itself.
    fn check_next_id(&self) -> Result<()> {
        let next = self.info.as_ref().map_or(0, |info| info.next_id);
        let tenants = self.tenants.iter().map(|tenant| tenant.id.0);
        let exports = self.exports.iter().map(|export| export.id.0);
        let volumes = self.volumes.keys().map(|id| id.0);
        let layers = self.layers.keys().map(|id| id.0);
        let maps = self.maps.keys().map(|id| id.0);
        let owners = self.images.clients().map(|client| match client.owner {
            ClientOwner::Tenant(id) => id.0,
            ClientOwner::Volume(id) => id.0,
        });
        let highest = (tenants.chain(exports).chain(volumes))
            .chain(layers)
            .chain(maps)
            .chain(owners)
            .max();
        if highest.is_some_and(|highest| highest >= next) || next > MAX_ID {
            return Err(wrong(format!("the next id, {next}, is in use or invalid")));
        }
        Ok(())
    }

    fn initial_states(&self, check: &impl Fn(&DeviceRecord) -> Result<()>) -> Result<Vec<Vec<u8>>> {
        let of = |record: &DeviceRecord| {
            check(record)?;
            Ok(vec![initial_state(record); record.extents as usize])
        };
        self.devices.iter().map(of).collect()
    }

    fn volume(&mut self, id: u64) -> Result<&mut PoolVolume> {
        self.volumes.get_mut(&VolumeId(id)).ok_or_else(|| {
            wrong(format!(
                "extents belong to volume {id}, which does not exist"
            ))
        })
    }

    fn states_chunk(&mut self, device: u64, chunk: u64, value: &[u8]) -> Result<()> {
        let slice = self.states.get_mut(device as usize).and_then(|states| {
            let from = chunk.checked_mul(STATE_CHUNK)?;
            let to = from.checked_add(STATE_CHUNK)?.min(states.len() as u64);
            states.get_mut(usize::try_from(from).ok()?..usize::try_from(to).ok()?)
        });
        let slice = slice.filter(|slice| !slice.is_empty());
        codec::decode_states(
            value,
            slice.ok_or_else(|| wrong(format!("there are states beyond device {device}")))?,
        )
    }

    fn map_chunk(&mut self, map: u64, chunk: u64, value: &[u8]) -> Result<()> {
        let runs = codec::decode_map(value)?;
        let extent_bytes = self.info.as_ref().map_or(1, |info| info.extent_bytes);
        let (_, _, node) = self.map_of(map)?;
        let end = match node {
            Node::Volume(id) => self.volume(id.0)?.extents(extent_bytes),
            Node::Layer(_) => MAX_VOLUME_BYTES / extent_bytes,
        };
        for run in &runs {
            let last = chunk
                .checked_mul(MAP_CHUNK)
                .and_then(|base| base.checked_add(u64::from(run.start) + u64::from(run.count)));
            if last.is_none_or(|last| last > end) {
                return Err(wrong(format!("{node} maps extents beyond its end")));
            }
            let run = DeviceRun::new(run.device, run.extent, u64::from(run.count));
            self.claim(node, run, ExtentState::Owned)?;
        }
        if !runs.is_empty() {
            self.map_of(map)?.0.load_chunk(chunk, runs);
        }
        Ok(())
    }

    /// The run must be in `state` and unclaimed.
    fn claim(&mut self, holder: Node, run: DeviceRun, state: ExtentState) -> Result<()> {
        if self.unclaimed.is_empty() {
            self.unclaimed = self
                .states
                .iter()
                .map(|states| Unclaimed::of(states))
                .collect();
        }
        let device = usize::from(run.device.0);
        let states = self
            .states
            .get(device)
            .filter(|states| run.end() <= states.len() as u64);
        let (Some(states), Some(unclaimed)) = (states, self.unclaimed.get_mut(device)) else {
            return Err(wrong(format!(
                "{holder} has extents that {} does not have",
                run.device
            )));
        };
        let words = unclaimed.of_state(state);
        for extent in run.first.0..run.end() {
            let (word, bit) = (&mut words[(extent / 64) as usize], 1u64 << (extent % 64));
            if *word & bit == 0 {
                return Err(wrong(if states[extent as usize] == state as u8 {
                    format!("extent {extent} of {} has two owners", run.device)
                } else {
                    format!(
                        "{holder} has extent {extent} of {}, which is not {state:?}",
                        run.device
                    )
                }));
            }
            *word &= !bit;
        }
        self.claimed += run.count;
        Ok(())
    }
}

/// Table, both halves of the key, value.
pub(crate) type Visit<'a> = &'a mut dyn FnMut(Table, u64, u64, &[u8]) -> Result<()>;

/// The pool then waits for adoption. `check` validates a device's record.
pub(crate) fn load(catalog: &Catalog, check: impl Fn(&DeviceRecord) -> Result<()>) -> Result<Pool> {
    load_records(|visit| catalog.load(visit), catalog.usage(), check)
}

/// The source yields the records in order.
pub(crate) fn load_records(
    source: impl FnOnce(Visit<'_>) -> Result<()>,
    usage: Arc<Usage>,
    check: impl Fn(&DeviceRecord) -> Result<()>,
) -> Result<Pool> {
    let mut loader = Loader::default();
    source(&mut |table, a, b, value| {
        if table > Table::Devices && loader.states.is_empty() {
            // All devices are known; their extents follow.
            loader.states = loader.initial_states(&check)?;
        }
        loader.record(table, a, b, value)
    })?;
    if loader.states.is_empty() {
        loader.states = loader.initial_states(&check)?;
    }
    loader.link_layers()?;
    loader.check_next_id()?;
    loader.check_images()?;
    let info = loader
        .info
        .ok_or_else(|| wrong("it does not name its pool"))?;
    if loader.devices.is_empty() {
        return Err(wrong("it has no devices"));
    }
    let mut all = Extents::new(info.extent_bytes);
    for states in loader.states {
        all.add_device(states);
    }
    let used = all.count(ExtentState::Owned) + all.count(ExtentState::Reserved);
    let mut pool = Pool::empty(info, loader.devices, all, usage);
    pool.allocator.leaked = used - loader.claimed;
    pool.adopting = true;
    pool.device_numbers = loader.device_numbers;
    for tenant in loader.tenants {
        pool.tenants.load(tenant);
    }
    let (deleting, volumes): (BTreeMap<_, _>, BTreeMap<_, _>) = loader
        .volumes
        .into_iter()
        .partition(|(_, volume)| volume.record.name.is_empty());
    let has_tenant = |volume: &PoolVolume| pool.tenants.get(volume.record.tenant).is_ok();
    if let Some((id, _)) = volumes.iter().find(|(_, volume)| !has_tenant(volume)) {
        return Err(wrong(format!("{id} belongs to no tenant")));
    }
    pool.volumes.load(
        volumes,
        deleting,
        Layers::loaded(loader.layers, loader.maps),
    );
    pool.allocator.reservations = loader.reservations;
    for export in loader.exports {
        if pool.volumes.get(export.volume).is_err() {
            return Err(wrong(format!("{} exports no volume", export.id)));
        }
        pool.exports.load(export);
    }
    for (number, export) in loader.functions {
        pool.exports.load_function(number, export);
    }
    let volumes = &pool.volumes;
    if let Some(id) = (loader.host_reservations.keys()).find(|id| volumes.get(**id).is_err()) {
        return Err(wrong(format!(
            "hosts have reserved {id}, which does not exist"
        )));
    }
    pool.hosts.reservations = loader.host_reservations;
    pool.hosts.ports = loader.ports;
    pool.images = loader.images;
    pool.budgets = loader.budgets;
    // A version without budgets has deleted their tenants or volumes.
    pool.budgets.forget_lost(
        &mut pool.journal,
        |tenant| pool.tenants.get(tenant).is_ok(),
        |volume| volumes.get(volume).is_ok(),
    );
    Ok(pool)
}

mod images;

#[cfg(test)]
mod tests;
