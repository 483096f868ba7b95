//! The label: which pool a device belongs to, as which device, and which installation serves it.
//!
//! It is 4 KiB at offset 0, with a copy at 512 KiB, beyond any partition table that firmware
//! restores. The copies are written with a sync between, so one is always whole. Foreign data over
//! the first copy is left alone. Owner and number expose another machine's pool and outdated
//! devices (`open`).
//!
//! The old format has its second copy at 4 KiB and no owner. The first copy decides the format, so
//! [`Label::upgrade`] writes it last.

mod block;
pub(crate) mod probe;
#[cfg(test)]
mod tests;

use self::block::{Found, LabelBlock};
use crate::{
    error::{PoolError, Result},
    layout::CATALOG_OFFSET_BYTES,
    mirror::lineage::Epoch,
    store::{BLOCK_BYTES, BlockStore},
};
use forebay_device::heartbeat::{HEARTBEAT_BYTES, HEARTBEAT_OFFSET_BYTES};
use forebay_device::size::format_bytes;
use forebay_xlate::types::DeviceIndex;
use uuid::Uuid;
use zerocopy::IntoBytes;

const FIRST: u64 = 0;
const SECOND: u64 = 512 << 10;
const OLD_SECOND: u64 = BLOCK_BYTES as u64;

/// A label's format.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LabelFormat {
    /// No owner and number; the copies are adjacent.
    Old,
    /// The format of new pools.
    Current,
}

impl LabelFormat {
    fn copies(self) -> [u64; 2] {
        match self {
            Self::Old => [FIRST, OLD_SECOND],
            Self::Current => [FIRST, SECOND],
        }
    }
}

/// The installation that last served a pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LabelOwner {
    /// The installation's random id, from its state folder.
    pub id: Uuid,
    /// The machine's id, for messages.
    pub machine: String,
    /// The machine's name, for messages.
    pub host: String,
}

/// A start or stop, as recorded in labels.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stamp {
    /// The pool's owner.
    pub owner: LabelOwner,
    /// Grows with each start and stop of the pool.
    pub number: u64,
    /// Whether it was a clean stop.
    pub is_clean: bool,
}

/// A device's label.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Label {
    /// The stored format.
    pub format: LabelFormat,
    /// Grows with each rewrite; the higher copy counts.
    pub generation: u64,
    /// The pool's identity.
    pub pool_uuid: Uuid,
    /// The pool's name.
    pub pool_name: String,
    /// The device's identity.
    pub device_uuid: Uuid,
    /// The device's index in the pool.
    pub device_index: DeviceIndex,
    /// Logical block size when the pool was made, in bytes.
    pub block_bytes: u32,
    /// Extent size in bytes.
    pub extent_bytes: u64,
    /// Start of the first catalog area; meaningless without one.
    pub catalog_offset_bytes: u64,
    /// Size of a catalog area; 0 without one.
    pub catalog_bytes: u64,
    /// Number of adjacent catalog areas, 0 to 2.
    pub catalog_areas: u32,
    /// Start of extent 0.
    pub data_offset_bytes: u64,
    /// Number of extents.
    pub data_extents: u64,
    /// Latest known epoch of the catalog.
    pub epoch: Epoch,
    /// Last owner; `None` in the old format or before the first start.
    pub owner: Option<LabelOwner>,
    /// Number of its last start or stop; 0 for none.
    pub number: u64,
    /// Whether that was a clean stop.
    pub is_clean: bool,
}

/// A label and the state of its copies.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LabelCopies {
    /// The good label.
    pub label: Label,
    /// Whether foreign data lies over the first copy.
    pub is_first_foreign: bool,
    /// Offsets of copies that differ and may be rewritten.
    bad: Vec<u64>,
}

impl Label {
    /// Reads and checks a label, against the device's capacity too.
    pub fn read(store: &dyn BlockStore) -> Result<Self> {
        Ok(Self::read_copies(store)?.label)
    }

    /// [`Label::read`], with the copies' state.
    pub fn read_copies(store: &dyn BlockStore) -> Result<LabelCopies> {
        let capacity = store
            .capacity()
            .map_err(|e| PoolError::io("reading a device's size", &e))?;
        let first = read_block(store, FIRST, capacity);
        let second = read_block(store, SECOND, capacity);
        let is_first_foreign = matches!(first, Found::Foreign);
        let good = |found: &Found, format| match found {
            Found::Good(label) if label.format == format => Some(label.clone()),
            _ => None,
        };
        let (one, two) = (LabelFormat::Current, LabelFormat::Old);
        let current = newer(good(&first, one), good(&second, one));
        let has_current_first = good(&first, one).is_some();
        let old = match has_current_first {
            true => None,
            false => {
                let beside = read_block(store, OLD_SECOND, capacity);
                let old = newer(good(&first, two), good(&beside, two));
                if current.is_none() && old.is_none() {
                    return Err(worst([first, second, beside]));
                }
                old
            }
        };
        // An interrupted upgrade leaves an old first copy.
        let is_old = old.is_some() && (good(&first, two).is_some() || current.is_none());
        let label = if is_old { old } else { newer(current, old) };
        let Some(label) = label else {
            return Err(no_label());
        };
        label.check_capacity(capacity)?;
        let bad = label.format.copies().into_iter();
        let bad = bad
            .filter(|at| !(*at == FIRST && is_first_foreign))
            .filter(|at| match read_block(store, *at, capacity) {
                Found::Good(copy) => copy != label,
                _ => true,
            })
            .collect();
        Ok(LabelCopies {
            label,
            is_first_foreign,
            bad,
        })
    }

    fn check_capacity(&self, capacity: u64) -> Result<()> {
        let needs = self
            .data_extents
            .checked_mul(self.extent_bytes)
            .and_then(|bytes| bytes.checked_add(self.data_offset_bytes))
            .unwrap_or(u64::MAX);
        if capacity < needs {
            return Err(PoolError::damaged(format!(
                "the device holds {} ({capacity} bytes), but its label says {} ({needs} bytes): it was \
                 truncated, or is not the whole device",
                format_bytes(capacity),
                format_bytes(needs)
            )));
        }
        Ok(())
    }

    /// Refuses a device whose logical block has grown.
    pub fn check_block(&self, block_bytes: u32) -> Result<()> {
        if block_bytes <= self.block_bytes {
            return Ok(());
        }
        Err(PoolError::invalid(format!(
            "the device has blocks of {block_bytes} bytes, but its label says {}: volumes would write less than a \
             block. Put the pool on a device with blocks of at most {} bytes",
            self.block_bytes, self.block_bytes
        )))
    }

    /// Rewrites bad copies, but no foreign data; `true` if there were any.
    pub(crate) fn read_and_repair(store: &dyn BlockStore) -> Result<(Self, bool)> {
        let LabelCopies { label, bad, .. } = Self::read_copies(store)?;
        if !bad.is_empty() {
            write_block(store, LabelBlock::encode(&label)?.as_bytes(), &bad)?;
        }
        Ok((label, !bad.is_empty()))
    }

    /// Rewrites every copy, even over foreign data.
    pub fn repair(store: &dyn BlockStore) -> Result<()> {
        Self::read(store)?.write(store)
    }

    /// Keeps one good copy at any time. Returns the device's index if it repaired a copy.
    fn update(
        store: &dyn BlockStore,
        device: Uuid,
        change: impl FnOnce(&mut Self),
    ) -> Result<Option<DeviceIndex>> {
        // A power cut must not tear the only good copy.
        let (was, was_repaired) = Self::read_and_repair(store)?;
        if was.device_uuid != device {
            return Err(PoolError::invalid("the label belongs to another device"));
        }
        let mut label = was.clone();
        change(&mut label);
        if label != was {
            label.generation = label.generation.saturating_add(1);
            let is_foreign = Self::read_copies(store)?.is_first_foreign;
            let copies = label.format.copies();
            let copies = copies.into_iter().filter(|at| !is_foreign || *at != FIRST);
            let copies: Vec<u64> = copies.collect();
            write_block(store, LabelBlock::encode(&label)?.as_bytes(), &copies)?;
        }
        Ok(was_repaired.then_some(label.device_index))
    }

    pub(crate) fn note_epoch(
        store: &dyn BlockStore,
        device: Uuid,
        epoch: Epoch,
    ) -> Result<Option<DeviceIndex>> {
        Self::update(store, device, |label| label.epoch = epoch)
    }

    /// `false` if the old format has no room for it.
    pub(crate) fn stamp(store: &dyn BlockStore, device: Uuid, stamp: &Stamp) -> Result<bool> {
        let mut has_room = false;
        Self::update(store, device, |label| {
            has_room = label.format == LabelFormat::Current;
            if has_room {
                label.owner = Some(stamp.owner.clone());
                label.number = stamp.number;
                label.is_clean = stamp.is_clean;
            }
        })?;
        Ok(has_room)
    }

    /// `false` if the label has the current format. The old second copy is erased first, so that no
    /// older version reads it.
    pub(crate) fn upgrade(store: &dyn BlockStore, device: Uuid) -> Result<bool> {
        let found = Self::read_copies(store)?;
        if found.label.device_uuid != device {
            return Err(PoolError::invalid("the label belongs to another device"));
        }
        if found.label.format == LabelFormat::Current {
            return Ok(false);
        }
        if found.is_first_foreign {
            return Err(PoolError::in_use(
                "foreign data has overwritten the label's first copy: repair the label first",
            ));
        }
        let label = Self {
            format: LabelFormat::Current,
            generation: found.label.generation.saturating_add(1),
            ..found.label
        };
        label.check()?;
        let block = LabelBlock::encode(&label)?;
        write_block(store, &[0; HEARTBEAT_BYTES], &[HEARTBEAT_OFFSET_BYTES])?;
        write_block(store, block.as_bytes(), &[SECOND])?;
        write_block(store, &[0; BLOCK_BYTES], &[OLD_SECOND])?;
        write_block(store, block.as_bytes(), &[FIRST])?;
        Ok(true)
    }

    /// The end of the catalog areas; 0 without one.
    pub fn catalog_end_bytes(&self) -> u64 {
        if self.catalog_areas == 0 {
            return 0;
        }
        self.catalog_offset_bytes + self.catalog_bytes * u64::from(self.catalog_areas)
    }

    /// A correct checksum does not make the fields consistent.
    fn check(&self) -> Result<()> {
        let catalog_end = self
            .catalog_bytes
            .checked_mul(u64::from(self.catalog_areas))
            .and_then(|bytes| bytes.checked_add(self.catalog_offset_bytes));
        let aligned = |bytes: u64| bytes.is_multiple_of(BLOCK_BYTES as u64);
        let labels_end = match self.format {
            LabelFormat::Old => 2 * BLOCK_BYTES as u64,
            LabelFormat::Current => CATALOG_OFFSET_BYTES,
        };
        let sound = self.extent_bytes.is_power_of_two()
            && (crate::layout::MIN_EXTENT_BYTES..=crate::layout::MAX_EXTENT_BYTES)
                .contains(&self.extent_bytes)
            && matches!(self.block_bytes, 512 | 4096)
            && self.catalog_areas <= 2
            && (self.catalog_areas == 0) == (self.catalog_bytes == 0)
            && catalog_end.is_some_and(|end| end <= self.data_offset_bytes)
            && aligned(self.catalog_offset_bytes)
            && aligned(self.catalog_bytes)
            && aligned(self.data_offset_bytes)
            && self.data_offset_bytes >= labels_end
            && (self.catalog_areas == 0 || self.catalog_offset_bytes >= labels_end);
        if sound {
            Ok(())
        } else {
            Err(PoolError::damaged("the label contradicts itself"))
        }
    }

    /// Writes the copies, durably one after the other.
    pub fn write(&self, store: &dyn BlockStore) -> Result<()> {
        let block = LabelBlock::encode(self)?;
        write_block(store, block.as_bytes(), &self.format.copies())
    }

    /// Overwrites every copy and the heartbeat with zeros, but no foreign data.
    pub fn wipe(store: &dyn BlockStore) -> Result<()> {
        let capacity = store
            .capacity()
            .map_err(|e| PoolError::io("reading a device's size", &e))?;
        let labels = [FIRST, SECOND, OLD_SECOND].into_iter();
        let mut ours: Vec<u64> = labels
            .filter(|at| !matches!(read_block(store, *at, capacity), Found::Foreign))
            .collect();
        ours.push(HEARTBEAT_OFFSET_BYTES);
        ours.retain(|at| at + BLOCK_BYTES as u64 <= capacity);
        write_block(store, &[0; BLOCK_BYTES], &ours)
    }
}

fn no_label() -> PoolError {
    PoolError::not_found("no Forebay label: this device belongs to no pool, or its label is lost")
}

fn worst(found: [Found; 3]) -> PoolError {
    let mut wrong = found.into_iter().filter_map(|found| match found {
        Found::Wrong(error) => Some(error),
        _ => None,
    });
    wrong.next().unwrap_or_else(no_label)
}

fn newer(one: Option<Label>, two: Option<Label>) -> Option<Label> {
    match (one, two) {
        (Some(one), Some(two)) if two.generation > one.generation => Some(two),
        (Some(one), _) => Some(one),
        (None, two) => two,
    }
}

fn read_block(store: &dyn BlockStore, at: u64, capacity: u64) -> Found {
    if capacity < at + BLOCK_BYTES as u64 {
        return Found::Blank;
    }
    let mut block = LabelBlock::zeroed();
    match store.read_at(at, block.as_mut_bytes()) {
        Ok(()) => block.decode(),
        Err(error) => Found::Wrong(PoolError::io("reading a device's label", &error)),
    }
}

fn write_block(store: &dyn BlockStore, block: &[u8], copies: &[u64]) -> Result<()> {
    for at in copies {
        store
            .write_at(*at, block)
            .and_then(|()| store.sync())
            .map_err(|error| PoolError::io("writing a device's label", &error))?;
    }
    Ok(())
}
