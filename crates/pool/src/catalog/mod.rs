//! The catalog on disk: a redb database on a [`Mirror`].
//!
//! A [`Batch`] is one transaction. It is two-phase, as the [`Mirror`] needs every reachable block
//! synced, and holds the allocator's state, so that opening after a crash is cheap. redb refuses
//! all work after an I/O error, so the next call reopens the database. A panic in redb counts as
//! damage (`guard`).
//!
//! Records fill at most a third of the area ([`CatalogUsage`]), so that freeing always finds room.
//! redb grows by doubling; near the end it gets the rest of the area.

use crate::{
    error::{ErrorKind, PoolError, Result},
    guard::guarded,
    journal::batch::{Batch, Table},
    label::Stamp,
    layout::LIVE_FRACTION,
    mirror::area::Area,
    mirror::lineage::Epoch,
    mirror::{Backend, CatalogCopy, CopyState, FoundArea, Mirror},
    store::BlockStore,
};
use forebay_xlate::types::DeviceIndex;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use std::{
    io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use uuid::Uuid;

type Definition = TableDefinition<'static, (u64, u64), &'static [u8]>;

/// redb's cache in bytes. After the load only inner pages matter.
const CACHE_BYTES: usize = 16 << 20;
const POLL_AGAIN: Duration = Duration::from_millis(20);
/// A record's key and overhead in a page.
const RECORD_BYTES: u64 = 24;

const fn definition(table: Table) -> Definition {
    TableDefinition::new(table.name())
}

/// How full the catalog is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CatalogUsage {
    /// The size of its records in bytes.
    pub used_bytes: u64,
    /// The limit of `used_bytes`, above which nothing can be added.
    pub limit_bytes: u64,
}

/// State of the catalog and its copies.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CatalogHealth {
    /// The copies that exist or should; two if healthy.
    pub copies: Vec<CatalogCopy>,
    /// Blocks of copies and labels repaired since the opening.
    pub repaired_blocks: u64,
    /// Events of the copies; only the first are kept.
    pub notes: Vec<String>,
    /// Whether [`Catalog::heal`] has nothing left to do.
    pub is_settled: bool,
    /// Length of the database's file and of each copy, in bytes.
    pub metadata_bytes: u64,
    /// Maximum of `metadata_bytes`.
    pub area_bytes: u64,
}

impl CatalogHealth {
    /// Whether there are two good copies.
    pub fn is_whole(&self) -> bool {
        let good = |copy: &&CatalogCopy| copy.state == CopyState::Good;
        self.copies.iter().filter(good).count() > 1
    }
}

#[derive(Debug)]
pub(crate) struct Usage {
    used: AtomicU64,
    limit: u64,
}

impl Usage {
    pub(crate) fn get(&self) -> CatalogUsage {
        CatalogUsage {
            used_bytes: self.used.load(Ordering::Relaxed),
            limit_bytes: self.limit,
        }
    }

    /// Free room in bytes beyond `promised_bytes`, which mappings of reserved extents may need.
    pub(crate) fn room(&self, promised_bytes: u64) -> u64 {
        let usage = self.get();
        usage
            .limit_bytes
            .saturating_sub(usage.used_bytes + promised_bytes)
    }
}

/// The catalog.
#[derive(Debug)]
pub struct Catalog {
    file: Arc<Mirror>,
    /// `None` after an error, until the next call.
    database: Mutex<Option<Database>>,
    usage: Arc<Usage>,
    /// A failed commit may have become durable: recount.
    recount: AtomicBool,
}

fn convert(error: impl Into<redb::Error>) -> PoolError {
    match error.into() {
        redb::Error::Io(error) => match error.kind() {
            io::ErrorKind::StorageFull => PoolError::no_space(format!(
                "the pool's catalog cannot grow ({error}): delete volumes, or free \
                 space in the storage below the pool"
            )),
            io::ErrorKind::InvalidData => {
                PoolError::damaged(format!("the pool's catalog is damaged: {error}"))
            }
            _ => PoolError::io("the pool's catalog", &error),
        },
        redb::Error::Corrupted(what) => {
            PoolError::damaged(format!("the pool's catalog is damaged: {what}"))
        }
        error @ (redb::Error::TableDoesNotExist(_)
        | redb::Error::TableTypeMismatch { .. }
        | redb::Error::TableIsMultimap(_)
        | redb::Error::TableIsNotMultimap(_)
        | redb::Error::TypeDefinitionChanged { .. }) => PoolError::damaged(format!(
            "the pool's catalog area does not hold a Forebay catalog: {error}"
        )),
        error @ redb::Error::UpgradeRequired(_) => {
            PoolError::invalid(format!("the pool's catalog: {error}"))
        }
        error => PoolError::new(ErrorKind::Io, format!("the pool's catalog: {error}")),
    }
}

fn area_error(error: &io::Error) -> PoolError {
    match error.kind() {
        io::ErrorKind::InvalidData => PoolError::damaged(error.to_string()),
        io::ErrorKind::Unsupported => PoolError::invalid(error.to_string()),
        io::ErrorKind::NotFound => PoolError::not_found(error.to_string()),
        io::ErrorKind::StorageFull => PoolError::no_space(format!("the pool's catalog: {error}")),
        _ => PoolError::io("the pool's catalog", error),
    }
}

impl Catalog {
    pub(crate) fn create(areas: Vec<Area>) -> Result<Self> {
        let catalog = Self::new(Mirror::format(areas).map_err(|error| area_error(&error))?);
        catalog.with_database(|database| {
            let transaction = begin(database)?;
            for table in Table::ALL {
                transaction.open_table(definition(table)).map_err(convert)?;
            }
            transaction.commit().map_err(convert)
        })?;
        Ok(catalog)
    }

    /// `given` has each label's owner and epoch.
    pub(crate) fn open(found: Vec<FoundArea>, given: &[(String, Epoch)]) -> Result<Self> {
        Ok(Self::new(
            Mirror::open(found, given).map_err(|error| area_error(&error))?,
        ))
    }

    fn new(file: Mirror) -> Self {
        let limit = file.capacity() / LIVE_FRACTION;
        Self {
            file: Arc::new(file),
            database: Mutex::new(None),
            usage: Arc::new(Usage {
                used: AtomicU64::new(0),
                limit,
            }),
            recount: AtomicBool::new(false),
        }
    }

    pub(crate) fn usage(&self) -> Arc<Usage> {
        self.usage.clone()
    }

    /// State of the catalog and its copies.
    pub fn health(&self) -> CatalogHealth {
        let health = self.file.health();
        CatalogHealth {
            copies: health.copies,
            repaired_blocks: health.repaired_blocks,
            notes: health.notes,
            is_settled: health.is_settled,
            metadata_bytes: self.file.len(),
            area_bytes: self.file.capacity(),
        }
    }

    pub(crate) fn add_areas(&self, areas: &[Area]) {
        self.file.add_areas(areas);
    }

    /// Runs `work` while no transaction runs.
    fn between_commits<T>(&self, work: impl FnOnce(&Mirror) -> io::Result<T>) -> Result<T> {
        let _nobody = self.database.lock().unwrap_or_else(PoisonError::into_inner);
        work(&self.file).map_err(|error| area_error(&error))
    }

    pub(crate) fn settle(&self, areas: &[Area]) -> Result<()> {
        let _care = self.file.take_care();
        self.between_commits(|file| file.settle(areas))
    }

    pub(crate) fn note_repaired_label(&self, device: DeviceIndex) {
        self.file.note_repaired_label(device);
    }

    pub(crate) fn add_label(&self, device: Uuid, store: &Arc<dyn BlockStore>) {
        self.file.add_label(device, store);
    }

    /// Says for each device whether its label has room for a stamp.
    pub(crate) fn stamp_labels(&self, stamp: &Stamp) -> Vec<(Uuid, Result<bool>)> {
        let _nobody = self.database.lock().unwrap_or_else(PoisonError::into_inner);
        self.file.stamp_labels(stamp)
    }

    pub(crate) fn last_stamp(&self) -> Option<Stamp> {
        self.file.last_stamp()
    }

    pub(crate) fn label_stores(&self) -> Vec<(Uuid, Arc<dyn BlockStore>)> {
        self.file.label_stores()
    }

    pub(crate) fn epoch(&self) -> Epoch {
        self.file.epoch()
    }

    /// Brings failed copies back, or moves them. Blocks; commits wait only for writes to devices
    /// that answer.
    pub fn heal(&self) -> Result<()> {
        let _care = self.file.take_care();
        self.between_commits(Mirror::sync)?;
        let probed = self.file.probe();
        self.between_commits(|file| file.heal(&probed))
    }

    /// Verifies every block of every copy and repairs it from the other. Blocks; commits go on.
    /// Fails if no copy has a block.
    pub fn scrub(&self) -> Result<()> {
        self.file.scrub().map_err(|error| area_error(&error))
    }

    pub(crate) fn area_bytes(&self) -> u64 {
        self.file.area_bytes()
    }

    fn open_database(&self) -> Result<Database> {
        redb::Builder::new()
            .set_cache_size(CACHE_BYTES)
            .create_with_backend(Backend(self.file.clone()))
            .map_err(convert)
    }

    fn with_database<T>(&self, work: impl FnOnce(&Database) -> Result<T>) -> Result<T> {
        let mut slot = self.database.lock().unwrap_or_else(PoisonError::into_inner);
        let database = match slot.take() {
            Some(database) => database,
            None => {
                self.file.hear_failures();
                guarded(|| self.open_database())?
            }
        };
        let result = guarded(|| work(&database));
        if result.is_ok() {
            *slot = Some(database);
        } else {
            // Closing it may meet the error again.
            let _ = guarded(|| {
                drop(database);
                Ok(())
            });
        }
        result
    }

    /// Makes a batch durable. Batches commit in order; a failed one may be retried. Waits while no
    /// copy's device answers, then fails.
    pub fn commit(&self, batch: &Batch) -> Result<()> {
        let result = self.with_database(|database| self.write(database, batch));
        if result.is_err() {
            self.recount.store(true, Ordering::Relaxed);
            // There is no other copy; an error would reach hosts.
            while self.file.is_stuck() {
                std::thread::sleep(POLL_AGAIN);
            }
        }
        match result {
            Err(error) if error.kind == ErrorKind::NoSpace => {
                // redb asked for more than the area has: give it the rest.
                if self.file.len() < self.file.capacity() {
                    self.file
                        .set_len(self.file.capacity())
                        .map_err(|error| convert(redb::Error::Io(error)))?;
                    return self.with_database(|database| self.write(database, batch));
                }
                Err(error)
            }
            result => result,
        }
    }

    fn write(&self, database: &Database, batch: &Batch) -> Result<()> {
        if self.recount.load(Ordering::Relaxed) {
            Self::visit(database, &self.usage, |_, _, _, _| Ok(()))?;
            self.recount.store(false, Ordering::Relaxed);
        }
        let transaction = begin(database)?;
        let (mut added, mut removed) = (0u64, 0u64);
        for records in batch.records.chunk_by(|a, b| a.0.table == b.0.table) {
            let Some((first, _)) = records.first() else {
                continue;
            };
            let mut table = transaction
                .open_table(definition(first.table))
                .map_err(convert)?;
            for (key, value) in records {
                let old = match value {
                    Some(value) => {
                        added += RECORD_BYTES + value.len() as u64;
                        table
                            .insert((key.a, key.b), value.as_slice())
                            .map_err(convert)?
                    }
                    None => table.remove((key.a, key.b)).map_err(convert)?,
                };
                if let Some(old) = old {
                    removed += RECORD_BYTES + old.value().len() as u64;
                }
            }
        }
        transaction.commit().map_err(convert)?;
        let used = self.usage.used.load(Ordering::Relaxed);
        let used = used.saturating_add(added).saturating_sub(removed);
        self.usage.used.store(used, Ordering::Relaxed);
        Ok(())
    }

    /// Visits every record in the order of [`Table::ALL`].
    pub(crate) fn load(
        &self,
        visit: impl FnMut(Table, u64, u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        self.file.read_ahead();
        self.with_database(|database| Self::visit(database, &self.usage, visit))
    }

    fn visit(
        database: &Database,
        usage: &Usage,
        mut visit: impl FnMut(Table, u64, u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let transaction = database.begin_read().map_err(convert)?;
        let mut used = 0;
        for table in Table::ALL {
            let records = match transaction.open_table(definition(table)) {
                // Older catalogs get these tables with their first record.
                Err(redb::TableError::TableDoesNotExist(_))
                    if matches!(
                        table,
                        Table::Features
                            | Table::Layers
                            | Table::Images
                            | Table::Clients
                            | Table::Functions
                            | Table::Budgets
                            | Table::StatedBudgets
                            | Table::DeviceNumbers
                            | Table::Hidden
                    ) =>
                {
                    continue;
                }
                records => records.map_err(convert)?,
            };
            for record in records.iter().map_err(convert)? {
                let (key, value) = record.map_err(convert)?;
                let (a, b) = key.value();
                used += RECORD_BYTES + value.value().len() as u64;
                visit(table, a, b, value.value())?;
            }
        }
        usage.used.store(used, Ordering::Relaxed);
        Ok(())
    }

    /// Verifies every page, with redb's own checksums too.
    pub fn check(&self) -> Result<()> {
        let mut slot = self.database.lock().unwrap_or_else(PoisonError::into_inner);
        // An integrity check needs exclusive access.
        *slot = None;
        let (sound, database) = guarded(|| {
            let mut database = self.open_database()?;
            let sound = database.check_integrity().map_err(convert)?;
            Ok((sound, database))
        })?;
        *slot = Some(database);
        if sound {
            Ok(())
        } else {
            Err(PoolError::damaged("the pool's catalog needed repair"))
        }
    }
}

impl Drop for Catalog {
    fn drop(&mut self) {
        let slot = self.database.get_mut();
        let database = slot.unwrap_or_else(PoisonError::into_inner).take();
        // Closing writes the allocator's state, which may panic on damage.
        let _ = guarded(|| {
            drop(database);
            Ok(())
        });
    }
}

fn begin(database: &Database) -> Result<redb::WriteTransaction> {
    let mut transaction = database.begin_write().map_err(convert)?;
    transaction
        .set_durability(redb::Durability::Immediate)
        .map_err(|error| {
            PoolError::new(
                ErrorKind::Io,
                format!("the pool's catalog refused durable commits: {error}"),
            )
        })?;
    transaction.set_two_phase_commit(true);
    transaction.set_quick_repair(true);
    Ok(transaction)
}

#[cfg(test)]
mod failed_tests;

#[cfg(test)]
mod tests;
