//! Finds the copies at opening and brings one up to date.
//!
//! The copy whose [`Lineage`] includes all others is the truth; two that diverged are an error. The
//! other one gets the blocks whose checksums differ, then tables and header, in place, because the
//! truth is whole. A copy that failed at run time is rewritten completely, whatever its device
//! still shows.
//!
//! **Not here:** the choice of the truth (`choose`), failed copies (`heal`).

use super::{CopyTable, Labels, Mirror, Replica, State, sync::epoch_name};
use crate::{
    mirror::area::{
        Area, AreaContent, AreaHeader, BLOCK, ENTRIES, HEAD_BYTES, NO_DEVICE, TableBlock, Unusable,
        block_crc, damaged, root,
    },
    mirror::lineage::{Epoch, Lineage},
    store::BLOCK_BYTES,
};
use std::{collections::BTreeSet, io, sync::Mutex};

pub(crate) struct FoundArea {
    pub(crate) area: Area,
    pub(super) content: Result<AreaContent, Unusable>,
}

impl FoundArea {
    pub(crate) fn new(area: Area) -> Self {
        let content = area.read();
        Self { area, content }
    }

    pub(crate) fn is_copy(&self) -> bool {
        self.content.is_ok()
    }

    /// Whether it holds no copy, not even a damaged one.
    fn is_blank(&self) -> bool {
        matches!(self.content, Err(Unusable::Blank | Unusable::Other))
    }
}

impl Mirror {
    pub(crate) fn format(areas: Vec<Area>) -> io::Result<Self> {
        let first = areas.first().ok_or_else(|| damaged("no area"))?;
        let (blocks, tables, area_bytes) = (first.blocks, first.tables, first.bytes);
        for area in &areas {
            area.clear()?;
        }
        let mut state = State {
            seq: 0,
            len: 0,
            lineage: Lineage::first(epoch_name()),
            devices: [NO_DEVICE; 2],
            alone: false,
            base_unsynced: false,
            places: Vec::new(),
            labels: Labels::default(),
            head: Box::new([0; HEAD_BYTES]),
            head_dirty: true,
            tables: (0..tables)
                .map(|index| CopyTable {
                    block: TableBlock::empty(index),
                    dirty: true,
                })
                .collect(),
            tables_dirty: true,
            replicas: areas
                .into_iter()
                .map(|area| Replica {
                    area,
                    header_slot: 1,
                    slots: vec![1; tables as usize],
                })
                .collect(),
            lost: Vec::new(),
            stale: Vec::new(),
            new_epoch: false,
            unsynced: BTreeSet::new(),
            used: Vec::new(),
            sync_failed: false,
            repaired_blocks: 0,
            notes: Vec::new(),
        };
        state.note_devices();
        let mirror = Self {
            blocks,
            area_bytes,
            care: Mutex::new(()),
            state: Mutex::new(state),
        };
        mirror.sync()?;
        Ok(mirror)
    }

    /// Opens the file from the areas present. Only areas that hold something become copies now; see
    /// [`Mirror::settle`]. `given` is the labels' knowledge. Writes nothing unless the best copy has
    /// all that any copy is known to have had.
    pub(crate) fn open(mut found: Vec<FoundArea>, given: &[(String, Epoch)]) -> io::Result<Self> {
        let best = Self::best(&found)?;
        Self::refuse_older(&found, best, given)?;
        let winner = found.swap_remove(best);
        let Ok(content) = winner.content else {
            return Err(damaged("the catalog's best copy can't be read"));
        };
        let bad = content.bad;
        let slots = content.tables.iter().map(|table| table.slot).collect();
        let orphans = content.tables.iter().any(|table| table.orphan);
        let (blocks, area_bytes) = (winner.area.blocks, winner.area.bytes);
        let device = winner.area.device;
        let mut state = State {
            seq: content.header.seq,
            len: content.header.len,
            lineage: content.header.lineage,
            devices: content.header.devices,
            alone: content.header.alone,
            base_unsynced: true,
            places: Vec::new(),
            labels: Labels::default(),
            head: content.header.head,
            head_dirty: false,
            tables_dirty: orphans,
            tables: content
                .tables
                .into_iter()
                .map(|table| CopyTable {
                    block: table.block,
                    dirty: table.orphan,
                })
                .collect(),
            replicas: vec![Replica {
                area: winner.area,
                header_slot: content.header_slot,
                slots,
            }],
            lost: Vec::new(),
            stale: Vec::new(),
            // Until another copy is up to date, unless no other copy has this epoch anyway.
            new_epoch: !content.header.alone,
            unsynced: BTreeSet::new(),
            used: Vec::new(),
            sync_failed: false,
            repaired_blocks: 0,
            notes: Vec::new(),
        };
        state.note_bad(device, &bad);
        // Prefer another device, then a sound copy, then the newer one.
        let mut others: Vec<FoundArea> = found
            .into_iter()
            .filter(|other| !other.is_blank() && other.area.blocks == blocks)
            .collect();
        others.sort_by_key(|other| {
            let seq = other.content.as_ref().map_or(0, |found| found.header.seq);
            (other.area.device == device, std::cmp::Reverse(seq))
        });
        for other in others {
            if state.replicas.len() == 1 {
                state.adopt(other, false);
            } else {
                // It is stale and must not pass for a copy later.
                state.retire(&other.area);
            }
        }
        Ok(Self {
            blocks,
            area_bytes,
            care: Mutex::new(()),
            state: Mutex::new(state),
        })
    }

    pub(crate) fn add_areas(&self, areas: &[Area]) {
        let mut state = self.lock();
        for area in areas {
            if !state.places.iter().any(|place| place.is(area)) {
                state.places.push(area.clone());
            }
        }
    }

    /// Puts the second copy on another device than the first, if there is one.
    pub(crate) fn settle(&self, areas: &[Area]) -> io::Result<()> {
        self.add_areas(areas);
        let mut state = self.lock();
        state.sync()?;
        let Some(first) = state.replicas.first().map(|replica| replica.area.clone()) else {
            return Ok(());
        };
        let apart = state
            .replicas
            .iter()
            .any(|replica| replica.area.device != first.device);
        if apart {
            return Ok(());
        }
        let fits = |area: &&Area| area.blocks == first.blocks && !area.is(&first);
        let elsewhere = areas
            .iter()
            .filter(fits)
            .find(|area| area.device != first.device);
        match (elsewhere, state.replicas.len()) {
            (Some(area), 1) => state.adopt(FoundArea::new(area.clone()), true),
            (Some(area), _) => state.relocate(area),
            (None, 1) => {
                if let Some(area) = areas.iter().find(fits) {
                    state.adopt(FoundArea::new(area.clone()), true);
                }
            }
            (None, _) => {}
        }
        state.sync()
    }

    /// Verifies every block of every copy and repairs it if possible. Fails if no copy has a block
    /// used since the opening.
    pub(crate) fn scrub(&self) -> io::Result<()> {
        let blocks = self.lock().len.div_ceil(BLOCK);
        let mut content = [0; BLOCK_BYTES];
        let mut first_error = None;
        for block in 1..blocks {
            let mut state = self.lock();
            if block * BLOCK >= state.len {
                break;
            }
            let expected = state.entry(block);
            if expected == 0 {
                continue;
            }
            let mut bad = Vec::new();
            let mut good = None;
            for (at, replica) in state.replicas.iter().enumerate() {
                match replica.area.read_data(block, &mut content) {
                    Ok(()) if block_crc(&content) == expected => good = Some(content),
                    Ok(()) => bad.push((
                        at,
                        format!("block {block} of the catalog fails its checksum"),
                    )),
                    Err(error) => bad.push((at, error.to_string())),
                }
            }
            match good {
                Some(good) => state.mend(block, &good, bad),
                // An interrupted commit left it; it is written before it is read.
                None if !state.is_used(block) => {}
                None => {
                    let error = || damaged(format!("block {block} of the catalog is lost"));
                    first_error = first_error.or_else(|| Some(error()));
                }
            }
        }
        self.sync()?;
        first_error.map_or(Ok(()), Err)
    }

    #[cfg(test)]
    pub(crate) fn sequence(&self) -> u64 {
        self.lock().seq
    }
}

impl State {
    fn header(&self) -> AreaHeader {
        AreaHeader {
            seq: self.seq,
            len: self.len,
            root: root(self.tables.iter().map(|table| table.block.as_ref())),
            wrote_tables: false,
            lineage: self.lineage.clone(),
            devices: self.devices,
            alone: self.alone,
            head: self.head.clone(),
        }
    }

    pub(super) fn note_devices(&mut self) {
        let mut devices = [NO_DEVICE; 2];
        for (device, replica) in devices.iter_mut().zip(&self.replicas) {
            *device = replica.area.device.0;
        }
        devices.sort_unstable();
        if devices != self.devices {
            self.devices = devices;
            self.head_dirty = true;
        }
    }

    fn adopt(&mut self, found: FoundArea, is_new: bool) {
        let device = found.area.device;
        let bad = match &found.content {
            Ok(content) => content.bad.clone(),
            Err(_) => Vec::new(),
        };
        let (was, known) = match found.content {
            Ok(content) if content.header.seq == self.seq => (None, Some(content)),
            Ok(content) => (
                Some(format!(
                    "was at sync {} of {}",
                    content.header.seq, self.seq
                )),
                Some(content),
            ),
            Err(Unusable::Damaged(error)) => (Some(format!("was damaged: {error}")), None),
            Err(Unusable::Blank | Unusable::Other | Unusable::Version(_)) => (None, None),
        };
        let was_damaged = was.is_some() && known.is_none();
        match self.bring_up(&found.area, known) {
            Ok(replica) => {
                self.note_bad(device, &bad);
                self.repaired_blocks += u64::from(was_damaged);
                if let Some(was) = was {
                    let repaired = if was_damaged { "repaired and " } else { "" };
                    self.note(format!(
                        "the copy of the catalog on {device} {was}; it was {repaired}brought up to date"
                    ));
                } else if is_new {
                    self.note(format!("{device} now has a copy of the catalog"));
                }
                self.replicas.push(replica);
                self.note_devices();
                if !is_new {
                    self.new_epoch = false;
                }
            }
            Err(error) => {
                self.note(format!(
                    "the copy of the catalog on {device} can't be brought up to date: {error}"
                ));
                self.leave_behind(found.area, error.to_string());
            }
        }
    }

    fn relocate(&mut self, area: &Area) {
        let device = area.device;
        match self.bring_up(area, None) {
            Ok(replica) => {
                self.note(format!("the catalog's second copy is now on {device}"));
                let before = self.replicas.split_off(1);
                self.replicas.push(replica);
                self.note_devices();
                for replica in before {
                    // If that fails, a new epoch marks it as stale.
                    self.new_epoch |= !self.retire(&replica.area);
                }
            }
            Err(error) => self.note(format!(
                "the catalog's second copy can't be placed on {device}: {error}"
            )),
        }
    }

    /// Brings an area durably to the last finished sync by writing the differences. `known` is its
    /// content, or `None` if untrusted. Nothing may be unsynced. An area that is only behind keeps
    /// its own last state whole until the end.
    pub(super) fn bring_up(
        &mut self,
        area: &Area,
        known: Option<AreaContent>,
    ) -> io::Result<Replica> {
        let is_preallocated = |table: &CopyTable| table.block.seq.get() > self.seq;
        if self.alone && self.tables_dirty || self.tables.iter().any(is_preallocated) {
            // Tables must not change below, nor belong to a failed sync.
            self.sync()?;
        }
        match known {
            None => area.clear()?,
            // It falls back to its last state, which must be durable.
            Some(_) => area.store.sync()?,
        }
        let known = known.as_ref();
        let mut wrote = self.bring_up_blocks(area, known)?;
        let slots = self.bring_up_tables(area, known, &mut wrote)?;
        if self.alone && !wrote {
            // A test write: a failure here costs no epoch.
            wrote = true;
            area.write_table(0, slots[0], &self.tables[0].block)?;
        }
        // The header must follow its blocks.
        if wrote {
            area.store.sync()?;
        }
        if self.alone {
            // Copies in use record this before another one has their epoch.
            self.alone = false;
            self.head_dirty = true;
            if let Err(error) = self.sync() {
                self.alone = true;
                return Err(error);
            }
        }
        // From here on it may have the epoch, even after an error.
        let before = std::mem::replace(&mut self.new_epoch, true);
        let header_slot = self.bring_up_header(area, known, wrote)?;
        self.new_epoch = before;
        self.stale.retain(|stale| !stale.is(area));
        self.lost.retain(|lost| !lost.area.is(area));
        Ok(Replica {
            area: area.clone(),
            header_slot,
            slots,
        })
    }

    /// `false` if no copy has the block; an error may pass.
    fn load_for_copy(&mut self, block: u64, expected: u32, into: &mut [u8]) -> io::Result<bool> {
        match self.load_from_copies(block, expected, into) {
            Ok(()) => return Ok(true),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => return Ok(false),
            Err(_) => {}
        }
        // Find out whether the block or the device failed.
        let mut header = [0; BLOCK_BYTES];
        for replica in &self.replicas {
            let area = &replica.area;
            area.store.read_at(area.offset, &mut header)?;
        }
        Ok(self.load_from_copies(block, expected, into).is_ok())
    }

    fn is_level(&self, known: &AreaContent) -> bool {
        known.header.lineage.name() == self.lineage.name()
            && known.header.seq == self.seq
            && known.header.root == root(self.tables.iter().map(|table| table.block.as_ref()))
    }

    /// An unfinished sync may have left anything in its blocks, whatever its tables say.
    fn has_block(
        area: &Area,
        known: &AreaContent,
        is_level: bool,
        block: u64,
        expected: u32,
    ) -> bool {
        let at = block as usize;
        let table = &known.tables[at / ENTRIES].block;
        if table.entries[at % ENTRIES].get() != expected {
            return false;
        }
        let is_newest = known.header.wrote_tables && table.seq.get() == known.header.seq;
        let mut content = [0; BLOCK_BYTES];
        is_level && !is_newest
            || area.read_data(block, &mut content).is_ok() && block_crc(&content) == expected
    }

    /// Returns each table's slot; sets `wrote` if it wrote any.
    fn bring_up_tables(
        &self,
        area: &Area,
        known: Option<&AreaContent>,
        wrote: &mut bool,
    ) -> io::Result<Vec<u64>> {
        let mut slots = Vec::with_capacity(self.tables.len());
        for (index, table) in self.tables.iter().enumerate() {
            let found = known.map(|known| &known.tables[index]);
            let (seq, crc) = (table.block.seq, table.block.crc);
            slots.push(match found {
                Some(found)
                    if !found.orphan && found.block.seq == seq && found.block.crc == crc =>
                {
                    found.slot
                }
                Some(found) if found.block.seq.get() < seq.get() => {
                    *wrote = true;
                    area.write_table(index as u64, 1 - found.slot, &table.block)?;
                    1 - found.slot
                }
                // The existing version could pass for a newer one.
                _ => {
                    *wrote = true;
                    area.write_table(index as u64, 0, &table.block)?;
                    area.write_table(index as u64, 1, &table.block)?;
                    0
                }
            });
        }
        Ok(slots)
    }

    /// Writes the header unless the area has it. Returns its slot.
    fn bring_up_header(
        &self,
        area: &Area,
        known: Option<&AreaContent>,
        wrote: bool,
    ) -> io::Result<u64> {
        let header = self.header();
        let is_same = |found: &AreaHeader| {
            let wrote_tables = found.wrote_tables;
            *found
                == AreaHeader {
                    wrote_tables,
                    ..header.clone()
                }
        };
        let slot = match known.map(|known| (known.header_slot, &known.header)) {
            Some((slot, found)) if !wrote && is_same(found) => slot,
            Some((slot, found)) if found.seq < header.seq => {
                area.write_header(1 - slot, &header)?;
                area.store.sync()?;
                1 - slot
            }
            _ => {
                area.write_header(0, &header)?;
                area.write_header(1, &header)?;
                area.store.sync()?;
                0
            }
        };
        Ok(slot)
    }

    fn bring_up_blocks(&mut self, area: &Area, known: Option<&AreaContent>) -> io::Result<bool> {
        let mut wrote = false;
        let mut content = [0; BLOCK_BYTES];
        let is_level = known.is_some_and(|known| self.is_level(known));
        if known.is_some() && !is_level {
            area.store.will_read(area.data_offset(0), self.len);
        }
        for block in 1..self.len.div_ceil(BLOCK).min(area.blocks) {
            let expected = self.entry(block);
            let has_block = |known| Self::has_block(area, known, is_level, block, expected);
            if expected == 0 || known.is_some_and(has_block) {
                continue;
            }
            if self.load_for_copy(block, expected, &mut content)? {
                area.write_data(block, &content)?;
                wrote = true;
                if is_level {
                    self.note_bad(area.device, &[format!("block {block}")]);
                }
            } else if area.read_data(block, &mut content).is_ok() && block_crc(&content) == expected
            {
                // The good copy's own block is bad.
                area.write_data(block, &content)?;
                wrote = true;
                let what = format!("block {block} of the catalog fails its checksum");
                self.mend(block, &content, vec![(0, what)]);
            }
            // If no copy has the block, its reader gets the error.
        }
        Ok(wrote)
    }
}
