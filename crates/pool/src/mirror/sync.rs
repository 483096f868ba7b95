//! Makes writes durable on every copy.
//!
//! Tables and header go into each copy's older slot before the devices' syncs; then the slots swap.
//! A failed copy is left behind, and another sync records that. A survivor may acknowledge only
//! after it, and the other devices' labels (`labels`), record that it is alone.
//!
//! If every copy fails, the caller retries into the same slots. Devices may have dropped unsynced
//! blocks, so those are read back, verified and rewritten.

use super::State;
use crate::{
    mirror::area::{Area, AreaHeader, BLOCK, root},
    store::BLOCK_BYTES,
};
use std::io;
use uuid::Uuid;

/// A random name for an epoch, of 62 random bits.
pub(super) fn epoch_name() -> u64 {
    Uuid::new_v4().as_u64_pair().1
}

/// Syncs each device once, all at the same time.
pub(super) fn sync_areas(areas: &[&Area]) -> Vec<io::Result<()>> {
    if let [one, other] = areas
        && one.same_store(other)
    {
        let result = one.store.sync();
        let again = |error: &io::Error| io::Error::new(error.kind(), error.to_string());
        return vec![result.as_ref().copied().map_err(again), result];
    }
    let begun: Vec<u64> = areas.iter().map(|area| area.store.begin_sync()).collect();
    let ended = areas.iter().zip(begun);
    ended
        .map(|(area, begun)| area.store.end_sync(begun))
        .collect()
}

impl State {
    pub(super) fn sync(&mut self) -> io::Result<()> {
        self.sync_base()?;
        if self.sync_failed {
            self.write_again()?;
        }
        // Each further round has one copy less.
        loop {
            if self.new_epoch {
                self.lineage.begin(epoch_name(), self.seq);
                self.alone = self.replicas.len() == 1;
                self.head_dirty = true;
                self.new_epoch = false;
            }
            if !self.tables_dirty && !self.head_dirty {
                return self.sync_only();
            }
            let failed = self.sync_round()?;
            if failed.is_empty() {
                self.sync_failed = false;
                self.unsynced.clear();
                self.publish_labels();
                return Ok(());
            }
            self.lose(failed);
        }
    }

    /// After opening: the content must be durable before a header goes into the other slot.
    fn sync_base(&mut self) -> io::Result<()> {
        if !self.base_unsynced {
            return Ok(());
        }
        let areas: Vec<&Area> = self.replicas.iter().map(|replica| &replica.area).collect();
        let mut failed: Vec<(usize, io::Error)> = Vec::new();
        for (at, result) in sync_areas(&areas).into_iter().enumerate() {
            if let Err(error) = result {
                failed.push((at, error));
            }
        }
        if failed.len() == self.replicas.len()
            && let Some((_, error)) = failed.pop()
        {
            return Err(error);
        }
        self.base_unsynced = false;
        if !failed.is_empty() {
            self.lose(failed);
        }
        Ok(())
    }

    /// Nothing known changed, but devices must be synced.
    fn sync_only(&mut self) -> io::Result<()> {
        let areas: Vec<&Area> = self.replicas.iter().map(|replica| &replica.area).collect();
        let mut failed: Vec<(usize, io::Error)> = Vec::new();
        for (at, result) in sync_areas(&areas).into_iter().enumerate() {
            if let Err(error) = result {
                failed.push((at, error));
            }
        }
        if failed.len() == self.replicas.len()
            && let Some((_, error)) = failed.pop()
        {
            self.sync_failed = true;
            return Err(error);
        }
        if failed.is_empty() {
            self.unsynced.clear();
            self.publish_labels();
            return Ok(());
        }
        self.lose(failed);
        self.sync()
    }

    /// Returns the failed copies.
    fn sync_round(&mut self) -> io::Result<Vec<(usize, io::Error)>> {
        let seq = self.seq + 1;
        let wrote_tables = self.tables_dirty;
        for table in self.tables.iter_mut().filter(|table| table.dirty) {
            table.block.seal(seq);
        }
        let header = AreaHeader {
            seq,
            len: self.len,
            root: root(self.tables.iter().map(|table| table.block.as_ref())),
            wrote_tables,
            lineage: self.lineage.clone(),
            devices: self.devices,
            alone: self.alone,
            head: self.head.clone(),
        };
        let mut failed: Vec<(usize, io::Error)> = Vec::new();
        let mut written = Vec::new();
        for (at, replica) in self.replicas.iter().enumerate() {
            let tables = self.tables.iter().enumerate();
            let result = tables
                .filter(|(_, table)| table.dirty)
                .try_for_each(|(index, table)| {
                    let slot = 1 - replica.slots[index];
                    replica.area.write_table(index as u64, slot, &table.block)
                })
                .and_then(|()| replica.area.write_header(1 - replica.header_slot, &header));
            match result {
                Ok(()) => written.push(at),
                Err(error) => failed.push((at, error)),
            }
        }
        let areas: Vec<&Area> = written.iter().map(|at| &self.replicas[*at].area).collect();
        for (at, result) in written.iter().zip(sync_areas(&areas)) {
            if let Err(error) = result {
                failed.push((*at, error));
            }
        }
        if failed.len() == self.replicas.len() {
            // Retry into the same slots.
            self.sync_failed = true;
            let error = failed.swap_remove(0).1;
            return Err(error);
        }
        self.seq = seq;
        self.head_dirty = false;
        for (at, replica) in self.replicas.iter_mut().enumerate() {
            if failed.iter().any(|(other, _)| *other == at) {
                continue;
            }
            replica.header_slot = 1 - replica.header_slot;
            if !wrote_tables {
                // Only the header changed, so the older slot is useless: make it a copy, durable
                // with the next sync. Best effort.
                let _ = replica.area.write_header(1 - replica.header_slot, &header);
            }
            for (index, table) in self.tables.iter().enumerate() {
                if table.dirty {
                    replica.slots[index] = 1 - replica.slots[index];
                }
            }
        }
        for table in &mut self.tables {
            table.dirty = false;
        }
        self.tables_dirty = false;
        Ok(failed)
    }

    /// Rewrites blocks that a device may have dropped.
    fn write_again(&mut self) -> io::Result<()> {
        let blocks: Vec<u64> = self.unsynced.iter().copied().collect();
        let mut content = [0; BLOCK_BYTES];
        for block in blocks {
            // Truncated since, or made zeros.
            if block * BLOCK >= self.len || self.entry(block) == 0 {
                continue;
            }
            let expected = self.entry(block);
            // A lost block was unreachable: its commit was incomplete.
            if self.load_from_copies(block, expected, &mut content).is_ok() {
                self.save(block, &content)?;
            }
        }
        Ok(())
    }
}
