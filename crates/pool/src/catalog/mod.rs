//! The catalog on disk: one redb database over a mirrored file.
//!
//! **Design.** Tables of (u64, u64) -> bytes. A [`Batch`] is one write transaction, durable
//! when [`Catalog::commit`] returns, on both copies where there are two: two-phase, because the
//! [`Mirror`] relies on no reachable block being unsynced, and with the allocator's state in it, so that
//! opening after a crash costs nothing extra. redb refuses all work after an I/O error; the database is
//! then dropped and opened again by the next call, so a batch that failed can be tried again. A panic in
//! redb is damage (`guard`).
//!
//! **Full.** The pool keeps records below a third of the area ([`CatalogUsage`]) and refuses what
//! would grow them further, so that freeing always finds room. redb asks for more by doubling; when
//! the area has less than that, it is opened again with all there is.
//!
//! **Not here:** what records mean, where the copies are (`create`, `open`), compaction.

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
    uuid::Uuid,
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

type Definition = TableDefinition<'static, (u64, u64), &'static [u8]>;

/// redb's cache in bytes. The catalog is read once; only its inner pages are wanted later.
const CACHE_BYTES: usize = 16 << 20;
/// Between two looks whether a device answers again.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// What a record costs beside its value: its key and its place in a page.
const RECORD_BYTES: u64 = 24;

const fn definition(table: Table) -> Definition {
    TableDefinition::new(table.name())
}

/// How full the catalog is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CatalogUsage {
    /// What its records take, in bytes.
    pub used_bytes: u64,
    /// What they may take before nothing can be added, in bytes.
    pub limit_bytes: u64,
}

/// How the catalog and its copies are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CatalogHealth {
    /// The copies that there are or should be; two, if all is well.
    pub copies: Vec<CatalogCopy>,
    /// Blocks of copies and labels that were bad on one copy and are good again, since opening.
    pub repaired_blocks: u64,
    /// What happened to the copies, in sentences; the first of them only.
    pub notes: Vec<String>,
    /// Whether nothing is left for [`Catalog::heal`] to do.
    pub is_settled: bool,
    /// How long the database's file is, in bytes; each copy is that large.
    pub metadata_bytes: u64,
    /// How long it can get, in bytes.
    pub area_bytes: u64,
}

impl CatalogHealth {
    /// Whether there are two good copies.
    pub fn is_whole(&self) -> bool {
        let good = |copy: &&CatalogCopy| copy.state == CopyState::Good;
        self.copies.iter().filter(good).count() > 1
    }
}

/// The usage as catalog and pool share it.
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

    /// What the catalog has room for, in bytes, over what is promised already: a mapping that a
    /// reserved extent may become must find room when it does.
    pub(crate) fn room(&self, promised_bytes: u64) -> u64 {
        let usage = self.get();
        usage
            .limit_bytes
            .saturating_sub(usage.used_bytes + promised_bytes)
    }
}

/// The catalog; shared freely between threads.
#[derive(Debug)]
pub struct Catalog {
    file: Arc<Mirror>,
    /// None after an error, until the next call opens it again.
    database: Mutex<Option<Database>>,
    usage: Arc<Usage>,
    /// A commit failed, and may be there all the same: what is there is counted before the next.
    recount: AtomicBool,
}

/// A redb error as ours.
fn convert(error: impl Into<redb::Error>) -> PoolError {
    match error.into() {
        redb::Error::Io(error) => match error.kind() {
            io::ErrorKind::StorageFull => PoolError::no_space(format!(
                "the pool's catalog cannot grow ({error}): delete volumes or snapshots, \
                 or free space below the pool"
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
            "what is in the catalog's place is no catalog of Forebay's: {error}"
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
    /// Makes a new catalog in these one or two areas, whatever was there.
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

    /// Opens the catalog that these areas hold; [`Catalog::load`] reads it.
    /// `told` is what labels say of it, with whose they are.
    pub(crate) fn open(found: Vec<FoundArea>, told: &[(String, Epoch)]) -> Result<Self> {
        Ok(Self::new(
            Mirror::open(found, told).map_err(|error| area_error(&error))?,
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

    /// How the catalog and its copies are.
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

    /// Other areas of the pool's devices, for a copy that has to move.
    pub(crate) fn add_places(&self, areas: &[Area]) {
        self.file.add_places(areas);
    }

    /// Runs `work` while no transaction does: what is written is synced or will be by `work`.
    fn between_commits<T>(&self, work: impl FnOnce(&Mirror) -> io::Result<T>) -> Result<T> {
        let _nobody = self.database.lock().unwrap_or_else(PoisonError::into_inner);
        work(&self.file).map_err(|error| area_error(&error))
    }

    /// Puts the second copy where it belongs, given the areas of the pool's devices that are here.
    pub(crate) fn settle(&self, areas: &[Area]) -> Result<()> {
        let _care = self.file.take_care();
        self.between_commits(|file| file.settle(areas))
    }

    /// One copy of a device's label was bad and is written anew.
    pub(crate) fn note_repaired_label(&self, device: DeviceIndex) {
        self.file.note_repaired_label(device);
    }

    /// The label of a device of the pool is kept up to date about the catalog's epoch.
    pub(crate) fn add_label(&self, device: Uuid, store: &Arc<dyn BlockStore>) {
        self.file.add_label(device, store);
    }

    /// Stamps the labels; of each device, whether its label has room for it.
    pub(crate) fn stamp_labels(&self, stamp: &Stamp) -> Vec<(Uuid, Result<bool>)> {
        let _nobody = self.database.lock().unwrap_or_else(PoisonError::into_inner);
        self.file.stamp_labels(stamp)
    }

    /// The last stamp of this opening, for the label of a device that is added.
    pub(crate) fn last_stamp(&self) -> Option<Stamp> {
        self.file.last_stamp()
    }

    /// The pool's devices that are here, with their identities.
    pub(crate) fn label_stores(&self) -> Vec<(Uuid, Arc<dyn BlockStore>)> {
        self.file.label_stores()
    }

    /// The catalog's epoch, as labels note it.
    pub(crate) fn epoch(&self) -> Epoch {
        self.file.epoch()
    }

    /// Tries to bring copies back that failed while running, or to put them elsewhere. Blocks; commits wait
    /// only while a copy is written to a device that answers.
    pub fn heal(&self) -> Result<()> {
        let _care = self.file.take_care();
        self.between_commits(Mirror::sync)?;
        let probed = self.file.probe();
        self.between_commits(|file| file.heal(&probed))
    }

    /// Reads every block of every copy and repairs what one of them has; [`Catalog::health`] counts.
    /// Blocks; commits go on. An error: a block that no copy has.
    pub fn scrub(&self) -> Result<()> {
        self.file.scrub().map_err(|error| area_error(&error))
    }

    /// The size of the area that each copy is in, in bytes.
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
                // Something failed.
                self.file.hear_failures();
                guarded(|| self.open_database())?
            }
        };
        let result = guarded(|| work(&database));
        if result.is_ok() {
            *slot = Some(database);
        } else {
            // Its end may meet what its work met.
            let _ = guarded(|| {
                drop(database);
                Ok(())
            });
        }
        result
    }

    /// Makes a batch durable. Batches are committed in the order of their ids; one that failed can
    /// be committed again. Waits for as long as no copy's device answers, and then fails.
    pub fn commit(&self, batch: &Batch) -> Result<()> {
        let result = self.with_database(|database| self.write(database, batch));
        if result.is_err() {
            self.recount.store(true, Ordering::Relaxed);
            // With no other copy there is nothing to do but wait; an error would reach hosts.
            while self.file.is_stuck() {
                std::thread::sleep(LOOK_AGAIN);
            }
        }
        match result {
            Err(error) if error.kind == ErrorKind::NoSpace => {
                // redb wanted more than there is: give it what there is, once.
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

    /// Calls `visit` with every record, table by table in the order of [`Table::ALL`].
    pub(crate) fn load(
        &self,
        visit: impl FnMut(Table, u64, u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        self.file.read_ahead();
        self.with_database(|database| Self::visit(database, &self.usage, visit))
    }

    /// Visits every record and counts what they take.
    fn visit(
        database: &Database,
        usage: &Usage,
        mut visit: impl FnMut(Table, u64, u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let transaction = database.begin_read().map_err(convert)?;
        let mut used = 0;
        for table in Table::ALL {
            let records = match transaction.open_table(definition(table)) {
                // Made with its first record, where an earlier version made the catalog.
                Err(redb::TableError::TableDoesNotExist(_))
                    if matches!(
                        table,
                        Table::Budgets | Table::StatedBudgets | Table::DeviceNumbers
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

    /// Verifies every page of the database against redb's own checksums too.
    pub fn check(&self) -> Result<()> {
        let mut slot = self.database.lock().unwrap_or_else(PoisonError::into_inner);
        // An integrity check needs the database alone, so it is opened for it.
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
        // It writes its allocator's state; that may meet what nobody met before.
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
                format!("the pool's catalog refuses durability: {error}"),
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
