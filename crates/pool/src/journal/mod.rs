//! Changes in memory that are not durable yet.
//!
//! The pool's parts name each changed record. Actions that wait for durability are listed under the
//! open batch's number. Batches are taken and committed in order.
//!
//! **Not here:** encoding (`pool`) and writing records (`catalog`).

pub(crate) mod batch;

use crate::{
    codec::STATE_CHUNK,
    error::{PoolError, Result},
    extents::runs::DeviceRun,
};
use batch::{Batch, BatchId, Key, Table};
use forebay_xlate::types::VolumeId;
use std::collections::{BTreeMap, BTreeSet};

/// Actions for when a batch is durable.
#[derive(Debug, Default)]
pub(crate) struct Promotions {
    /// Volumes with new reserved extents.
    pub(crate) reserved: BTreeSet<VolumeId>,
    /// Mappings: a volume and its logical extent.
    pub(crate) mapped: Vec<(VolumeId, u64)>,
    /// Runs that become dirty.
    pub(crate) freed: Vec<DeviceRun>,
}

/// A pool's changes that are not durable.
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

    /// The next batch, which carries the latest changes.
    pub fn open_batch_id(&self) -> BatchId {
        self.open_batch
    }

    /// The newest durable batch.
    pub fn committed_id(&self) -> BatchId {
        self.committed
    }

    pub(crate) fn touch(&mut self, table: Table, a: u64, b: u64) {
        self.touched.insert(Key::new(table, a, b));
    }

    /// Touches a run's records in a table by chunk of the device.
    pub(crate) fn touch_chunks(&mut self, table: Table, run: DeviceRun) {
        if run.count == 0 {
            return;
        }
        for chunk in run.first.0 / STATE_CHUNK..=(run.end() - 1) / STATE_CHUNK {
            self.touch(table, u64::from(run.device.0), chunk);
        }
    }

    pub(crate) fn touched(&self) -> impl Iterator<Item = Key> {
        self.touched.iter().copied()
    }

    pub(crate) fn on_commit(&mut self) -> &mut Promotions {
        self.promotions.entry(self.open_batch).or_default()
    }

    /// Makes a batch of the encoded records and opens the next one.
    pub(crate) fn close_batch(&mut self, records: Vec<(Key, Option<Vec<u8>>)>) -> Option<Batch> {
        if records.is_empty() {
            return None;
        }
        self.touched.clear();
        let id = self.open_batch;
        self.open_batch = BatchId(id.0 + 1);
        Some(Batch { id, records })
    }

    /// Returns what the batch and all before it promote.
    pub(crate) fn mark_committed(&mut self, batch: BatchId) -> Result<Vec<Promotions>> {
        if batch <= self.committed || batch >= self.open_batch {
            return Err(PoolError::invalid(format!(
                "batch {} is not outstanding",
                batch.0
            )));
        }
        let later = self.promotions.split_off(&BatchId(batch.0 + 1));
        let due = std::mem::replace(&mut self.promotions, later);
        self.committed = batch;
        Ok(due.into_values().collect())
    }

    /// Extents that outstanding batches will free.
    pub(crate) fn extents_to_free(&self) -> u64 {
        let freed = self.promotions.values().flat_map(|due| &due.freed);
        freed.map(|run| run.count).sum()
    }
}
