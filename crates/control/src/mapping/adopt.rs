//! Adopts the grant table of an earlier daemon, which the engine or the run folder kept.
//!
//! The table counts only if its boot and pool ids match and the catalog names it. Faults wait until
//! devices are flushed, adopted mappings committed and stale parts revoked, up to a time limit;
//! zero-fill has no such limit. Without a table every device may hold unflushed writes: each is
//! flushed before any grant, or is in every FLUSH until that succeeds.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use forebay_pool::{Adopted, ErrorKind, Pool};
use forebay_xlate::grants::{GrantTable, copied_for};
use forebay_xlate::shm::SharedMemory;
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, Rights, VolumeId};
use futures_util::future::join_all;
use tokio::time::{sleep, timeout};

use crate::base::Base;
use crate::changed::Signal;
use crate::link::session::Session;
use crate::mapping::flush::Flusher;
use crate::mapping::revoke::Revoker;

/// 16 MiB of address space; only the used part costs memory.
pub(crate) const fn grants_capacity() -> usize {
    256 * 1024
}

#[derive(Debug)]
pub(crate) struct Grants {
    table: GrantTable,
    adopting: bool,
    same_boot: bool,
    stamp: String,
    /// Devices that may hold unflushed writes although no entry names them.
    unflushed: BTreeSet<DeviceIndex>,
    stale: Vec<Stale>,
}

/// A listed range that the pool does not map there, at least in part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stale {
    volume: VolumeId,
    range: ExtentRange,
    device: DeviceIndex,
}

#[derive(Debug)]
pub(crate) struct Adoption {
    pub(crate) finished: Cell<bool>,
    /// Whether the pool's changes by adoption are durable.
    recorded: Cell<bool>,
    same_boot: bool,
    /// The name by which the catalog knows the grant table.
    stamp: String,
    pub(crate) unflushed: RefCell<BTreeSet<DeviceIndex>>,
    /// Volumes with adopted mappings that may not be durable, and their highest sequences.
    uncommitted: RefCell<BTreeMap<VolumeId, u64>>,
    stale: RefCell<Vec<Stale>>,
    progress: Signal,
}

/// Suffix of the catalog's name for a grant table while unlisted devices must be flushed.
const UNFLUSHED: &str = "+";
const LEAST_ENTRIES: usize = 1024;

impl Grants {
    pub(crate) fn fresh(
        path: &Path,
        pool: &Pool,
        boot_id: &[u8; 16],
        capacity: usize,
    ) -> io::Result<Self> {
        let table = new_table(path, capacity, boot_id, pool.info().uuid.as_bytes())?;
        let stamp = stamp(boot_id, table.memory())?;
        Ok(Self {
            table,
            adopting: false,
            same_boot: true,
            stamp,
            unflushed: BTreeSet::new(),
            stale: Vec::new(),
        })
    }

    /// For a pool that was just opened. Takes `deposited`, the table that a live engine kept, else
    /// the file at `path`, else a new table.
    pub(crate) fn adopt(
        path: &Path,
        pool: &mut Pool,
        deposited: Option<OwnedFd>,
        boot_id: &[u8; 16],
        capacity: usize,
    ) -> io::Result<Self> {
        let pool_id = pool.info().uuid.into_bytes();
        let memory = match deposited {
            Some(descriptor) => Some(SharedMemory::from_fd(descriptor)?),
            None => match SharedMemory::open(path) {
                Ok(memory) => Some(memory),
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(error) => return Err(error),
            },
        };
        let devices = pool.devices().iter().map(|device| device.index);
        let all: BTreeSet<DeviceIndex> = devices.collect();
        if pool
            .info()
            .boot_id()
            .is_some_and(|id| !id.starts_with(&boot_name(boot_id)))
        {
            for volume in pool.lose_host_reservations() {
                tracing::info!(%volume, "this machine was restarted: hosts' registrations are gone");
            }
        }
        let recorded = pool.info().boot_id().unwrap_or_default();
        let known = recorded.strip_suffix(UNFLUSHED).unwrap_or(recorded);
        let all_flushed = known == recorded;
        let found = match memory {
            Some(memory) if known == stamp(boot_id, &memory)? => {
                GrantTable::adopt(memory, boot_id, &pool_id)?
            }
            _ => None,
        };
        let Some(table) = found else {
            let table = new_table(path, capacity, boot_id, &pool_id)?;
            let stamp = stamp(boot_id, table.memory())?;
            return Ok(Self {
                table,
                adopting: true,
                same_boot: false,
                stamp,
                unflushed: all,
                stale: Vec::new(),
            });
        };
        let stamp = stamp(boot_id, table.memory())?;
        let stale = adopt_into_pool(pool, &table)?;
        Ok(Self {
            table,
            adopting: true,
            same_boot: true,
            stamp,
            unflushed: if all_flushed { BTreeSet::new() } else { all },
            stale,
        })
    }

    /// Whether the table is of this boot: only then a live engine's grants hold.
    pub(crate) fn same_boot(&self) -> bool {
        self.same_boot
    }

    pub(crate) fn into_parts(self) -> (GrantTable, Adoption) {
        let adoption = Adoption {
            finished: Cell::new(!self.adopting),
            same_boot: self.same_boot,
            recorded: Cell::new(false),
            stamp: self.stamp,
            unflushed: RefCell::new(self.unflushed),
            uncommitted: RefCell::default(),
            stale: RefCell::new(self.stale),
            progress: Signal::new(),
        };
        (self.table, adoption)
    }
}

/// Tells the pool each entry; returns those that the pool does not map there.
fn adopt_into_pool(pool: &mut Pool, table: &GrantTable) -> io::Result<Vec<Stale>> {
    let mut stale = Vec::new();
    let mut copies = Vec::new();
    for grant in table.iter() {
        if let Some(volume) = copied_for(grant.volume) {
            copies.push((volume, *grant));
            continue;
        }
        if !matches!(grant.word.rights(), Some(Rights::Read | Rights::ReadWrite)) {
            continue;
        }
        let doubtful = Stale {
            volume: grant.volume,
            range: grant.range,
            device: grant.word.device(),
        };
        let reported = pool.adopt_grant(
            grant.volume,
            ExtentIndex(grant.range.first),
            grant.word.device(),
            grant.word.extent(),
            grant.range.count,
            grant.commit_sequence,
        );
        match reported {
            Ok(Adopted::Durable | Adopted::Uncommitted) => {}
            Ok(Adopted::Stale) => stale.push(doubtful),
            Err(error) if error.kind == ErrorKind::NotFound => {
                stale.push(doubtful);
            }
            Err(error) => return Err(io::Error::other(error)),
        }
    }
    // A grant of the same extent proves that its copy has ended, so copies come last. The next
    // commit makes their extents dirty; until then a successor needs these entries.
    for (volume, grant) in copies {
        pool.snapshots()
            .adopt_copy(volume, grant.word.device(), grant.word.extent());
        stale.push(Stale {
            volume: grant.volume,
            range: grant.range,
            device: grant.word.device(),
        });
    }
    Ok(stale)
}

/// Smaller if the run folder's file system is nearly full: only a running daemon can make room
/// there.
fn new_table(
    path: &Path,
    capacity: usize,
    boot_id: &[u8; 16],
    pool_id: &[u8; 16],
) -> io::Result<GrantTable> {
    let mut entries = capacity;
    loop {
        match GrantTable::create(path, entries, boot_id, pool_id) {
            Err(error) if error.kind() == io::ErrorKind::StorageFull && entries > LEAST_ENTRIES => {
                entries = (entries / 8).max(LEAST_ENTRIES);
                tracing::warn!(
                    entries,
                    "little space for the grant table: it becomes smaller"
                );
            }
            result => return result,
        }
    }
}

/// The catalog's name for a grant table: the boot and the file. It rejects a table that is older
/// than another daemon's use of the pool from another run folder.
fn stamp(boot_id: &[u8; 16], memory: &SharedMemory) -> io::Result<String> {
    let file = rustix::fs::fstat(memory.fd())?;
    let boot = boot_name(boot_id);
    Ok(format!("{boot}{:08x}{:016x}", file.st_dev, file.st_ino))
}

fn boot_name(boot_id: &[u8; 16]) -> String {
    boot_id.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Adoption {
    /// The highest sequence of a volume's adopted mappings, while some may not be durable.
    pub(crate) fn uncommitted(&self, volume: VolumeId) -> Option<u64> {
        self.uncommitted.borrow().get(&volume).copied()
    }

    pub(crate) fn note_committed(&self, pool: &Pool) {
        let mut uncommitted = self.uncommitted.borrow_mut();
        if !uncommitted.is_empty() {
            uncommitted.retain(|volume, highest| pool.volumes().durable_seq(*volume) < *highest);
        }
    }

    pub(crate) fn is_unflushed(&self, device: DeviceIndex) -> bool {
        self.unflushed.borrow().contains(&device)
    }

    pub(crate) fn name(&self) -> String {
        let all_flushed = self.unflushed.borrow().is_empty();
        let ending = if all_flushed { "" } else { UNFLUSHED };
        format!("{}{ending}", self.stamp)
    }

    /// Whether an adopted mapping is not durable, or a stale range not yet revoked.
    pub(crate) fn is_unfinished(&self) -> bool {
        !self.uncommitted.borrow().is_empty() || !self.stale.borrow().is_empty()
    }

    /// Whether the end of adoption in the pool is durable. Before that nothing may be granted.
    pub(crate) fn is_recorded(&self) -> bool {
        self.recorded.get()
    }

    pub(crate) fn uncommitted_volumes(&self) -> Vec<VolumeId> {
        self.uncommitted.borrow().keys().copied().collect()
    }

    pub(crate) fn stale_devices(&self) -> BTreeSet<DeviceIndex> {
        let stale = self.stale.borrow();
        stale.iter().map(|stale| stale.device).collect()
    }

    pub(crate) async fn wait_adopted(&self) {
        self.progress
            .until(|| self.finished.get().then_some(()))
            .await;
    }

    pub(crate) async fn wait_settled_on(&self, device: DeviceIndex) {
        self.progress
            .until(|| self.is_settled_on(device).then_some(()))
            .await;
    }

    fn is_settled_on(&self, device: DeviceIndex) -> bool {
        self.finished.get() && !self.stale.borrow().iter().any(|s| s.device == device)
    }
}

#[derive(Debug)]
pub(crate) struct Adopter {
    pub(super) base: Rc<Base>,
    pub(super) flusher: Rc<Flusher>,
    pub(super) revoker: Rc<Revoker>,
    pub(super) adoption: Rc<Adoption>,
}

impl Adopter {
    pub(crate) fn new(
        base: &Rc<Base>,
        flusher: &Rc<Flusher>,
        revoker: &Rc<Revoker>,
        adoption: &Rc<Adoption>,
    ) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            flusher: flusher.clone(),
            revoker: revoker.clone(),
            adoption: adoption.clone(),
        })
    }

    /// Idempotent. First, a live engine gets a moment to end what an earlier daemon began.
    pub(crate) async fn finish_adoption(&self, session: Option<&Rc<Session>>) {
        let adoption = &self.adoption;
        if let Some(session) = session.filter(|_| !adoption.finished.get()) {
            let wait = session.inherited_finished();
            if timeout(self.base.limits.inherited, wait).await.is_err() {
                tracing::warn!(
                    unfinished = session.inherited(),
                    "the engine has not finished requests of an earlier daemon; space that it still zero-fills stays \
                    unused until then"
                );
                // Nothing was given up for these requests, or the range is listed and revoked again
                // below.
                session.abandon_inherited();
            }
        }
        if !adoption.finished.get() {
            self.flush_unflushed().await;
        }
        {
            let mut core = self.base.core.borrow_mut();
            let finished = adoption.finished.replace(true);
            if !finished {
                match core.pool.finish_adoption(adoption.same_boot) {
                    Ok(report) => tracing::info!(
                        same_boot = adoption.same_boot,
                        uncommitted = report.uncommitted,
                        spare = report.spare,
                        dirty = report.dirty,
                        stale = adoption.stale.borrow().len(),
                        "took over the grants"
                    ),
                    Err(error) => tracing::error!(%error, "can't take over the grants"),
                }
                let volumes = core.pool.volumes().records();
                *adoption.uncommitted.borrow_mut() = volumes
                    .filter_map(|volume| {
                        Some((volume.id, core.pool.volumes().uncommitted(volume.id)?))
                    })
                    .collect();
            }
            if let Err(error) = core.pool.set_boot_id(&adoption.name()) {
                tracing::error!(%error, "can't record the grant table");
            }
        }
        while !adoption.recorded.get() {
            match self.base.commit().await {
                Ok(()) => adoption.recorded.set(true),
                Err(_) => sleep(Duration::from_secs(1)).await,
            }
        }
        adoption.progress.raise();
    }

    async fn flush_unflushed(&self) {
        let devices = self.adoption.unflushed.borrow().clone();
        let open = devices.into_iter().filter(|d| self.base.is_open_here(*d));
        let flushes = open.map(|device| async move {
            (
                device,
                timeout(self.base.limits.adoption, self.flusher.flush_here(device)).await,
            )
        });
        for (device, flushed) in join_all(flushes).await {
            match flushed {
                Ok(Ok(())) => _ = self.adoption.unflushed.borrow_mut().remove(&device),
                Ok(Err(error)) => {
                    tracing::warn!(%error, "can't flush what an earlier engine wrote")
                }
                Err(_) => {
                    tracing::warn!(%device, "flushing what an earlier engine wrote takes too long");
                }
            }
        }
    }

    pub(crate) async fn open_after_adoption(self: &Rc<Self>) {
        if self.base.is_open() {
            return;
        }
        if timeout(self.base.limits.adoption, self.settle())
            .await
            .is_err()
        {
            tracing::warn!(
                "some mappings that were taken over are not durable, or are in use where they should not be; flushes \
                and freed space wait for that"
            );
            let owner = self.clone();
            self.base.spawn(async move { owner.settle().await });
        }
        self.base.set_open();
    }

    /// Commits adopted mappings and revokes stale ranges, for each device on its own.
    async fn settle(&self) {
        let devices: BTreeSet<DeviceIndex> = {
            let stale = self.adoption.stale.borrow();
            stale.iter().map(|stale| stale.device).collect()
        };
        let revokes = devices.into_iter().map(|device| self.revoke_stale(device));
        let (synced, _) = tokio::join!(self.flusher.sync_all(), join_all(revokes));
        if let Err(error) = synced {
            // Retried by a later FLUSH or the next sync.
            tracing::warn!(%error, "mappings that were taken over are not durable");
        }
    }

    async fn revoke_stale(&self, device: DeviceIndex) {
        let stale = &self.adoption.stale;
        loop {
            // Stays in the list until it is done, because any await may be cancelled.
            let next = stale
                .borrow()
                .iter()
                .rev()
                .find(|s| s.device == device)
                .copied();
            let Some(one) = next else {
                break;
            };
            let Some(part) = self.revoker.unknown_part(one.volume, one.range) else {
                stale.borrow_mut().retain(|s| *s != one);
                continue;
            };
            if let Err(error) = self.revoker.revoke_unknown(one.volume, part).await {
                tracing::warn!(volume = %one.volume, ?part, %error, "can't revoke a grant that the pool does not know");
                sleep(Duration::from_millis(500)).await;
            }
        }
        self.adoption.progress.raise();
    }
}
