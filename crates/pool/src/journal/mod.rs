//! What changed in memory and is not durable yet.
//!
//! **Purpose.** The parts of a pool name each record that they change; what must wait until a change is durable is listed
//! under the number of the open batch.
//! **Design.** A batch is everything since the one before. Batches are taken, and become durable, in the order of their
//! numbers. **Not here:** how a record is encoded (`pool`), and written (`catalog`).

pub(crate) mod batch;

use crate::{
    codec::STATE_CHUNK,
    error::{PoolError, Result},
    extents::runs::DeviceRun,
};
use batch::{Batch, BatchId, Key, Table};
use forebay_xlate::types::VolumeId;
use std::collections::{BTreeMap, BTreeSet};

/// What happens when a batch is durable.
#[derive(Debug, Default)]
pub(crate) struct Promotions {
    /// Volumes for which something was reserved.
    pub(crate) reserved: BTreeSet<VolumeId>,
    /// Mappings: a volume and its logical extent.
    pub(crate) mapped: Vec<(VolumeId, u64)>,
    /// Runs that become dirty.
    pub(crate) freed: Vec<DeviceRun>,
}

/// The changes of a pool that are not durable.
#[derive(Debug)]
pub struct Journal {
    touched: BTreeSet<Key>,
    open_batch: BatchId,
    committed: BatchId,
    promotions: BTreeMap<BatchId, Promotions>,
}

impl Journal {
    pub(crate) fn new() -> Self {
        Self {
            touched: BTreeSet::new(),
            open_batch: BatchId(1),
            committed: BatchId(0),
            promotions: BTreeMap::new(),
        }
    }

    /// The number that the next batch will have: what was changed last is durable with it.
    pub fn open_batch_id(&self) -> BatchId {
        self.open_batch
    }

    /// The newest batch reported durable.
    pub fn committed_id(&self) -> BatchId {
        self.committed
    }

    /// Names a record that changed.
    pub(crate) fn touch(&mut self, table: Table, a: u64, b: u64) {
        self.touched.insert(Key::new(table, a, b));
    }

    /// Names the records that describe a run, in a table by chunk of the device.
    pub(crate) fn touch_chunks(&mut self, table: Table, run: DeviceRun) {
        if run.count == 0 {
            return;
        }
        for chunk in run.first.0 / STATE_CHUNK..=(run.end() - 1) / STATE_CHUNK {
            self.touch(table, u64::from(run.device.0), chunk);
        }
    }

    /// The records that changed since the last batch.
    pub(crate) fn touched(&self) -> impl Iterator<Item = Key> {
        self.touched.iter().copied()
    }

    /// What the open batch will promote.
    pub(crate) fn on_commit(&mut self) -> &mut Promotions {
        self.promotions.entry(self.open_batch).or_default()
    }

    /// Makes a batch of the touched records, as encoded, and opens the next one; none if there are none.
    pub(crate) fn close_batch(&mut self, records: Vec<(Key, Option<Vec<u8>>)>) -> Option<Batch> {
        if records.is_empty() {
            return None;
        }
        self.touched.clear();
        let id = self.open_batch;
        self.open_batch = BatchId(id.0 + 1);
        Some(Batch { id, records })
    }

    /// Notes that a batch, and so every one before it, is durable; says what that promotes.
    pub(crate) fn mark_committed(&mut self, batch: BatchId) -> Result<Vec<Promotions>> {
        if batch <= self.committed || batch >= self.open_batch {
            return Err(PoolError::invalid(format!(
                "batch {} is not one that is outstanding",
                batch.0
            )));
        }
        let later = self.promotions.split_off(&BatchId(batch.0 + 1));
        let due = std::mem::replace(&mut self.promotions, later);
        self.committed = batch;
        Ok(due.into_values().collect())
    }

    /// How many extents batches that are not durable will free.
    pub(crate) fn extents_to_free(&self) -> u64 {
        let freed = self.promotions.values().flat_map(|due| &due.freed);
        freed.map(|run| run.count).sum()
    }
}
