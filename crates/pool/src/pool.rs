//! The pool in memory: what there is, what changed, what a commit promotes.
//!
//! **Design.** Operations (`admin`, `owner`, `adopt`) validate first and then change the structures
//! here, naming each record they touched. [`Pool::take_batch`] encodes the touched records *as they
//! are now*; so a batch is everything since the one before, and applying batches in order always
//! yields a state that the pool was in. What must wait for durability is listed under the number of
//! the open batch and happens in [`Pool::committed`].
//!
//! A batch that can't be committed may be tried again. To give up, drop the pool and open it anew,
//! as a new daemon would: memory is then what the disk says.
//!
//! **Not here:** the operations themselves, I/O.

use crate::{
    batch::{Batch, BatchId, Key, Table},
    budgets::Budgets,
    catalog::{CatalogUsage, Usage},
    codec::{self, STATE_CHUNK},
    delete::SLICE_EXTENTS,
    error::{PoolError, Result},
    extents::{ExtentState, Extents},
    pending::PendingSet,
    placement::Pattern,
    quarantine::Quarantine,
    records::{
        DeviceRecord, ExportId, ExportRecord, HostReservations, PoolInfo, PortRecord, TenantId,
        TenantRecord, VolumeRecord,
    },
    reservations::Reservations,
    runs::{DeviceRun, RunSet},
    space::{Space, SpaceLevel},
    stock::MIN_RESERVE,
    volume_map::{MAP_CHUNK, VolumeMap},
};
use forebay_device::size::format_bytes;
use forebay_xlate::types::{DeviceIndex, VolumeId};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

/// A volume with everything that is known about it.
#[derive(Debug)]
pub(crate) struct Volume {
    pub(crate) record: VolumeRecord,
    pub(crate) map: VolumeMap,
    /// Reserved durably, never granted.
    pub(crate) stock: RunSet,
    /// Reserved by a batch that is not durable yet; the oldest first.
    pub(crate) incoming: VecDeque<(BatchId, DeviceRun)>,
    pub(crate) incoming_extents: u64,
    /// Mappings that are not durable.
    pub(crate) pending: PendingSet,
    /// How much to have ahead.
    pub(crate) goal: u64,
    /// How many extents it took or missed, ever; and how many when it was looked at before.
    pub(crate) used: u64,
    pub(crate) used_before: u64,
    /// `used` when a batch with a reservation was begun.
    pub(crate) reserved_at: VecDeque<(BatchId, u64)>,
    /// Of what is mapped: perhaps never written, as far as the caller has told.
    pub(crate) ahead: u64,
    /// What the pool owes it, and its part of `Pool::catalog_promised`.
    pub(crate) owed: u64,
    pub(crate) catalog_bytes: u64,
}

impl Volume {
    pub(crate) fn new(record: VolumeRecord) -> Self {
        Self {
            record,
            map: VolumeMap::default(),
            stock: RunSet::default(),
            incoming: VecDeque::new(),
            incoming_extents: 0,
            pending: PendingSet::default(),
            goal: MIN_RESERVE,
            used: 0,
            used_before: 0,
            reserved_at: VecDeque::new(),
            ahead: 0,
            owed: 0,
            catalog_bytes: 0,
        }
    }

    /// How many logical extents it has.
    pub(crate) fn extents(&self, extent_bytes: u64) -> u64 {
        self.record.size_bytes.div_ceil(extent_bytes)
    }
}

/// How many of a volume's extents are what.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct VolumeSpace {
    /// Mapped, durably or not.
    pub mapped: u64,
    /// Of those, not durably.
    pub uncommitted: u64,
    /// Of those mapped, how many lie ahead of its writes ([`Pool::map_around`]).
    pub ahead: u64,
    /// Reserved and not used yet.
    pub reserved: u64,
    /// What its reservation still promises it.
    pub owed: u64,
}

/// What happens when a batch is durable.
#[derive(Debug, Default)]
pub(crate) struct Promotions {
    pub(crate) reserved: BTreeSet<VolumeId>,
    pub(crate) mapped: Vec<(VolumeId, u64)>,
    pub(crate) freed: Vec<DeviceRun>,
}

/// The pool; see the crate.
#[derive(Debug)]
pub struct Pool {
    pub(crate) info: PoolInfo,
    pub(crate) devices: Vec<DeviceRecord>,
    /// The number that each label is known to have.
    pub(crate) device_numbers: BTreeMap<DeviceIndex, u64>,
    pub(crate) tenants: BTreeMap<TenantId, TenantRecord>,
    pub(crate) volumes: BTreeMap<VolumeId, Volume>,
    /// Deleted ones some of whose extents are still to be freed. Nobody else knows them.
    pub(crate) deleting: BTreeMap<VolumeId, Volume>,
    pub(crate) delete_slice: u64,
    pub(crate) exports: BTreeMap<ExportId, ExportRecord>,
    pub(crate) ports: BTreeMap<u16, PortRecord>,
    pub(crate) host_reservations: BTreeMap<VolumeId, HostReservations>,
    pub(crate) budgets: Budgets,
    pub(crate) tenant_names: BTreeMap<String, TenantId>,
    pub(crate) volume_names: BTreeMap<(TenantId, String), VolumeId>,
    pub(crate) volume_exports: BTreeMap<VolumeId, BTreeSet<ExportId>>,
    pub(crate) extents: Extents,
    pub(crate) reservations: Reservations,
    touched: BTreeSet<Key>,
    open_batch: BatchId,
    committed: BatchId,
    promotions: BTreeMap<BatchId, Promotions>,
    pub(crate) next_seq: u64,
    /// The batch that makes this opening's sequences unique; nothing is granted before.
    pub(crate) opening_batch: BatchId,
    /// Whether what a predecessor granted is still being told.
    pub(crate) adopting: bool,
    pub(crate) leaked: u64,
    pub(crate) pattern: Pattern,
    pub(crate) quarantine: Quarantine,
    /// The sum of what volumes are owed.
    pub(crate) promised: u64,
    /// What mappings to come may take in the catalog, in bytes.
    pub(crate) catalog_promised: u64,
    /// The check that is under way, if one is.
    pub(crate) checking: u64,
    usage: Arc<Usage>,
}

impl Pool {
    /// A pool of these devices, with nothing in it.
    pub(crate) fn empty(
        info: PoolInfo,
        devices: Vec<DeviceRecord>,
        extents: Extents,
        usage: Arc<Usage>,
    ) -> Self {
        let quarantine = Quarantine::found(extents.runs_in(ExtentState::Quarantined));
        // An opening has 2^40 sequences, more extents than the largest pool has.
        let next_seq = (info.opens << 40) + 1;
        Self {
            info,
            devices,
            device_numbers: BTreeMap::new(),
            tenants: BTreeMap::new(),
            volumes: BTreeMap::new(),
            deleting: BTreeMap::new(),
            delete_slice: SLICE_EXTENTS,
            exports: BTreeMap::new(),
            ports: BTreeMap::new(),
            host_reservations: BTreeMap::new(),
            budgets: Budgets::default(),
            tenant_names: BTreeMap::new(),
            volume_names: BTreeMap::new(),
            volume_exports: BTreeMap::new(),
            extents,
            reservations: Reservations::default(),
            touched: BTreeSet::new(),
            open_batch: BatchId(1),
            committed: BatchId(0),
            promotions: BTreeMap::new(),
            next_seq,
            opening_batch: BatchId(0),
            adopting: false,
            leaked: 0,
            pattern: Pattern::default(),
            quarantine,
            promised: 0,
            catalog_promised: 0,
            checking: 0,
            usage,
        }
    }

    /// The pool's own record.
    pub fn info(&self) -> &PoolInfo {
        &self.info
    }

    /// Its devices, by index.
    pub fn devices(&self) -> &[DeviceRecord] {
        &self.devices
    }

    /// How many extents are in which state.
    pub fn space(&self) -> Space {
        Space {
            stock: self.volumes.values().map(Volume::unused).sum(),
            ahead: self.volumes.values().map(|volume| volume.ahead).sum(),
            promised: self.promised,
            ..self.extents.space()
        }
    }

    /// The same of one device; stock and promises are not told apart there.
    pub fn device_space(&self, device: DeviceIndex) -> Option<Space> {
        self.extents.device_space(device)
    }

    /// How full the pool is by its own settings.
    pub fn space_level(&self) -> SpaceLevel {
        self.info.settings.level(&self.space())
    }

    /// One extent's state; none if there is no such extent.
    pub fn extent_state(&self, run: DeviceRun) -> Option<ExtentState> {
        self.extents.get(run.device, run.first.0)
    }

    /// How full the catalog is.
    pub fn catalog_usage(&self) -> CatalogUsage {
        self.usage.get()
    }

    /// Extents that the catalog calls used and that nothing uses, as found at opening.
    pub fn leaked_extents(&self) -> u64 {
        self.leaked
    }

    /// How many mappings of all volumes are not durable. Each costs memory until it is committed.
    pub fn uncommitted_extents(&self) -> u64 {
        self.volumes
            .values()
            .map(|volume| volume.pending.len())
            .sum()
    }

    /// Which bytes of a volume may hold something but zeros, from a byte on: at most so many ranges, in order, and where
    /// to go on if that is not all.
    pub fn mapped_bytes(
        &self,
        volume: VolumeId,
        from_bytes: u64,
        most: usize,
    ) -> Result<(Vec<std::ops::Range<u64>>, Option<u64>)> {
        let size_bytes = self.volume(volume)?.size_bytes;
        let bytes = |extent: u64| (extent * self.info.extent_bytes).min(size_bytes);
        let first = from_bytes / self.info.extent_bytes;
        let (ranges, next) = self.volume_ref(volume)?.map.mapped_from(first, most);
        let ranges = ranges
            .into_iter()
            .map(|r| bytes(r.start).max(from_bytes)..bytes(r.end));
        // The last extent may reach beyond the volume's end, and `from_bytes` may be there.
        let ranges = ranges.filter(|range| !range.is_empty());
        Ok((ranges.collect(), next.map(bytes)))
    }

    /// How many of a volume's extents are what.
    pub fn volume_space(&self, volume: VolumeId) -> Result<VolumeSpace> {
        let volume = self.volume_ref(volume)?;
        Ok(VolumeSpace {
            mapped: volume.map.mapped(),
            uncommitted: volume.pending.len(),
            ahead: volume.ahead.min(volume.map.mapped()),
            reserved: volume.unused(),
            owed: volume.owed,
        })
    }

    /// The number that the next batch will have: what was changed last is durable with it.
    pub fn open_batch_id(&self) -> BatchId {
        self.open_batch
    }

    /// The newest batch reported durable.
    pub fn committed_id(&self) -> BatchId {
        self.committed
    }

    /// Everything that changed since the last call, to be committed; none if nothing did.
    pub fn take_batch(&mut self) -> Result<Option<Batch>> {
        if self.touched.is_empty() {
            return Ok(None);
        }
        let mut records = Vec::with_capacity(self.touched.len());
        for key in &self.touched {
            records.push((*key, self.encode(*key)?));
        }
        self.touched.clear();
        let id = self.open_batch;
        self.open_batch = BatchId(id.0 + 1);
        Ok(Some(Batch { id, records }))
    }

    /// Says that the batch, and so every one before it, is durable.
    pub fn committed(&mut self, batch: BatchId) -> Result<()> {
        if batch <= self.committed || batch >= self.open_batch {
            return Err(PoolError::invalid(format!(
                "batch {} is not one that is outstanding",
                batch.0
            )));
        }
        let later = self.promotions.split_off(&BatchId(batch.0 + 1));
        let due = std::mem::replace(&mut self.promotions, later);
        self.committed = batch;
        for promotions in due.into_values() {
            for volume in &promotions.reserved {
                self.promote_incoming(*volume, batch);
            }
            for of_one in promotions.mapped.chunk_by(|a, b| a.0 == b.0) {
                let id = of_one[0].0;
                let Some(volume) = self.volumes.get_mut(&id) else {
                    continue;
                };
                let pending = &mut volume.pending;
                let is_durable = |logical: &u64| {
                    let pending = pending.get(*logical);
                    pending.is_some_and(|pending| pending.committing.is_some_and(|by| by <= batch))
                };
                let logicals = of_one.iter().map(|(_, logical)| *logical);
                let durable: Vec<u64> = logicals.filter(is_durable).collect();
                pending.remove(durable);
                self.settle_account(id);
            }
            for run in promotions.freed {
                self.extents.set(run, ExtentState::Dirty);
            }
        }
        Ok(())
    }

    fn encode(&self, key: Key) -> Result<Option<Vec<u8>>> {
        fn record<T: serde::Serialize>(record: Option<&T>) -> Result<Option<Vec<u8>>> {
            record.map(codec::encode).transpose()
        }
        match key.table {
            Table::Meta => record(Some(&self.info)),
            Table::Tenants => record(self.tenants.get(&TenantId(key.a))),
            Table::Volumes => record(
                self.any_volume(VolumeId(key.a))
                    .map(|volume| &volume.record),
            ),
            Table::Exports => {
                let export = self.exports.get(&ExportId(key.a));
                export.map(codec::encode_export).transpose()
            }
            // A number of the table is one of 16 bits.
            Table::Ports => record(self.ports.get(&(key.a as u16))),
            Table::HostReservations => record(self.host_reservations.get(&VolumeId(key.a))),
            Table::Budgets => record(self.budgets.stored(key.a, key.b)),
            Table::StatedBudgets => record(self.budgets.stored_stated(key.a, key.b)),
            Table::Devices => record(self.devices.get(key.a as usize)),
            // A number of the table is a device's index.
            Table::DeviceNumbers => record(self.device_numbers.get(&DeviceIndex(key.a as u8))),
            Table::States => {
                let states = self.extents.stored_chunk(key.a, key.b, STATE_CHUNK);
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
                let runs =
                    self.reservations
                        .within(DeviceRun::new(device.index, base, STATE_CHUNK));
                if runs.is_empty() {
                    Ok(None)
                } else {
                    codec::encode_reservations(base, &runs).map(Some)
                }
            }
            Table::Maps => {
                let Some(volume) = self.any_volume(VolumeId(key.a)) else {
                    return Ok(None);
                };
                let range = key.b * MAP_CHUNK..(key.b + 1) * MAP_CHUNK;
                let uncommitted: Vec<u64> = volume
                    .pending
                    .within(range.start, range.end)
                    .filter(|(_, pending)| pending.committing.is_none())
                    .map(|(logical, _)| logical)
                    .collect();
                let runs = volume.map.chunk_without(key.b, &uncommitted);
                if runs.is_empty() {
                    Ok(None)
                } else {
                    codec::encode_map(&runs).map(Some)
                }
            }
        }
    }

    /// Counts an opening, so that its sequences are higher than any before.
    pub(crate) fn begin_opening(&mut self) {
        self.info.opens += 1;
        self.next_seq = (self.info.opens << 40) + 1;
        self.opening_batch = self.open_batch;
        self.touch(Table::Meta, 0, 0);
    }

    pub(crate) fn touch(&mut self, table: Table, a: u64, b: u64) {
        self.touched.insert(Key::new(table, a, b));
    }

    /// Puts a run into a state other than reserved, for the open batch to write.
    pub(crate) fn set_extents(&mut self, run: DeviceRun, state: ExtentState) {
        self.extents.set(run, state);
        self.touch_chunks(Table::States, run);
        if self.reservations.remove(run) {
            self.touch_chunks(Table::Reservations, run);
        }
    }

    /// Reserves a run for a volume, for the open batch to write: a clean one, or another volume's.
    pub(crate) fn reserve_run(&mut self, run: DeviceRun, volume: VolumeId) {
        self.extents.set(run, ExtentState::Reserved);
        self.touch_chunks(Table::States, run);
        self.reservations.remove(run);
        self.reservations.insert(run, volume);
        self.touch_chunks(Table::Reservations, run);
    }

    fn touch_chunks(&mut self, table: Table, run: DeviceRun) {
        if run.count == 0 {
            return;
        }
        for chunk in run.first.0 / STATE_CHUNK..=(run.end() - 1) / STATE_CHUNK {
            self.touch(table, u64::from(run.device.0), chunk);
        }
    }

    /// Frees a run: dirty once the open batch is durable.
    pub(crate) fn free_extents(&mut self, run: DeviceRun) {
        self.set_extents(run, ExtentState::Freed);
        self.on_commit().freed.push(run);
    }

    /// How many extents batches that are not durable will free.
    pub(crate) fn extents_to_free(&self) -> u64 {
        let freed = self.promotions.values().flat_map(|due| &due.freed);
        freed.map(|run| run.count).sum()
    }

    /// What the open batch will promote.
    pub(crate) fn on_commit(&mut self) -> &mut Promotions {
        self.promotions.entry(self.open_batch).or_default()
    }

    pub(crate) fn volume_ref(&self, volume: VolumeId) -> Result<&Volume> {
        self.volumes
            .get(&volume)
            .ok_or_else(|| PoolError::not_found(format!("no {volume}")))
    }

    pub(crate) fn volume_mut(&mut self, volume: VolumeId) -> Result<&mut Volume> {
        self.volumes
            .get_mut(&volume)
            .ok_or_else(|| PoolError::not_found(format!("no {volume}")))
    }

    /// What the catalog has room for, in bytes, over what is promised already: a mapping that a
    /// reserved extent may become must find room when it does.
    pub(crate) fn catalog_room(&self) -> u64 {
        let usage = self.usage.get();
        usage
            .limit_bytes
            .saturating_sub(usage.used_bytes + self.catalog_promised)
    }

    /// Whether the catalog has room for `bytes` of records more.
    pub(crate) fn admit(&self, bytes: u64) -> Result<()> {
        if bytes > self.catalog_room() {
            let usage = self.usage.get();
            return Err(PoolError::no_space(format!(
                "the pool's catalog is full ({} of {}): delete volumes or exports",
                format_bytes(usage.used_bytes),
                format_bytes(usage.limit_bytes)
            )));
        }
        Ok(())
    }

    /// Refuses what needs to know all that a predecessor granted.
    pub(crate) fn ready(&self) -> Result<()> {
        if self.adopting {
            return Err(PoolError::in_use(
                "the grants of the daemon before this one are not adopted yet",
            ));
        }
        Ok(())
    }
}

/// The stored state of a device's extents that have no record.
pub(crate) fn initial_state(device: &DeviceRecord) -> u8 {
    if device.known_zero {
        ExtentState::Clean as u8
    } else {
        ExtentState::Dirty as u8
    }
}
