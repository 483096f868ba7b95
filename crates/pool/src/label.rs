//! The label: how a device says which pool it belongs to, and as what.
//!
//! **Design.** 4 KiB at offset 0 and a copy at 4 KiB, written one after the other with a sync
//! between, so that one is always whole. Fixed layout, little-endian, a CRC32C over all of it. The
//! version says whether the layout can be read at all, feature bits what else it needs. It says which
//! pool a device belongs to and where its catalog areas are; which devices a pool has, the catalog says.
//! **Not here:** what is on the data area, the pool's records.

use crate::{
    error::{PoolError, Result},
    lineage::Epoch,
    store::{BLOCK_BYTES, BlockStore},
    uuid::Uuid,
};
use forebay_device::size::format_bytes;
use forebay_xlate::types::DeviceIndex;
use zerocopy::{
    FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout,
    little_endian::{U32, U64},
};

const MAGIC: [u8; 16] = *b"Forebay label\r\n\0";
/// The label format that this code reads and writes.
pub const FORMAT_VERSION: u32 = 3;
/// Incompatible features that this code knows: none yet.
const KNOWN_INCOMPATIBLE: u64 = 0;
/// Features which unknown allow reading only: none yet.
const KNOWN_READ_ONLY_COMPATIBLE: u64 = 0;
const NAME_BYTES: usize = 64;
const COPIES: u64 = 2;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone)]
#[repr(C)]
struct LabelBlock {
    magic: [u8; 16],
    version: U32,
    /// CRC32C of the block with this field zero.
    crc: U32,
    compatible: U64,
    read_only_compatible: U64,
    incompatible: U64,
    generation: U64,
    pool_uuid: [u8; 16],
    device_uuid: [u8; 16],
    device_index: U32,
    catalog_areas: U32,
    block_bytes: U32,
    name_bytes: U32,
    extent_bytes: U64,
    catalog_offset_bytes: U64,
    catalog_bytes: U64,
    data_offset_bytes: U64,
    data_extents: U64,
    name: [u8; NAME_BYTES],
    epoch_number: U64,
    epoch_name: U64,
    epoch_copies: [u8; 2],
    unused: [u8; BLOCK_BYTES - 226],
}

const _: () = assert!(size_of::<LabelBlock>() == BLOCK_BYTES);

/// A device's label.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Label {
    /// Grows with each rewrite; the higher of two copies counts.
    pub generation: u64,
    /// The pool.
    pub pool_uuid: Uuid,
    /// The pool's name, for people.
    pub pool_name: String,
    /// This device.
    pub device_uuid: Uuid,
    /// Its place in the pool.
    pub device_index: DeviceIndex,
    /// Its logical block when the pool was made, in bytes.
    pub block_bytes: u32,
    /// The size of an extent in bytes.
    pub extent_bytes: u64,
    /// Where the first catalog area begins; meaningless where there is none.
    pub catalog_offset_bytes: u64,
    /// The size of a catalog area; 0 where this device has none.
    pub catalog_bytes: u64,
    /// How many catalog areas there are, one after the other: 0 to 2.
    pub catalog_areas: u32,
    /// Where extent 0 begins.
    pub data_offset_bytes: u64,
    /// How many extents the device holds.
    pub data_extents: u64,
    /// The latest epoch of the catalog that this device knows of.
    pub epoch: Epoch,
}

/// What was found where a label should be.
enum Found {
    Good(Label),
    Nothing,
    Wrong(PoolError),
}

impl Label {
    /// Reads and checks a device's label, its capacity included.
    pub fn read(store: &dyn BlockStore) -> Result<Self> {
        Ok(Self::read_copies(store)?.0)
    }

    /// The label, and the copies of it that are not as they should be.
    fn read_copies(store: &dyn BlockStore) -> Result<(Self, Vec<u64>)> {
        let capacity = store
            .capacity()
            .map_err(|e| PoolError::io("asking a device's size", &e))?;
        let mut found: Vec<(u64, Label)> = Vec::new();
        let mut wrong = None;
        for copy in 0..COPIES {
            let at = copy * BLOCK_BYTES as u64;
            if capacity < at + BLOCK_BYTES as u64 {
                continue;
            }
            let mut block = LabelBlock::new_zeroed();
            if let Err(error) = store.read_at(at, block.as_mut_bytes()) {
                wrong = wrong.or(Some(PoolError::io("reading a device's label", &error)));
                continue;
            }
            match Self::decode(block) {
                Found::Good(label) => found.push((copy, label)),
                Found::Nothing => {}
                Found::Wrong(error) => wrong = wrong.or(Some(error)),
            }
        }
        let best = found.iter().max_by_key(|(_, label)| label.generation);
        let Some((_, label)) = best.cloned() else {
            return Err(wrong.unwrap_or_else(|| {
                PoolError::not_found(
                    "no Forebay label: this device belongs to no pool, or its label is lost",
                )
            }));
        };
        let needs = label
            .data_extents
            .checked_mul(label.extent_bytes)
            .and_then(|bytes| bytes.checked_add(label.data_offset_bytes))
            .unwrap_or(u64::MAX);
        if capacity < needs {
            return Err(PoolError::damaged(format!(
                "the device holds {} ({capacity} bytes), but its label says {} ({needs} bytes): it was \
                 truncated, or is not the whole device",
                format_bytes(capacity),
                format_bytes(needs)
            )));
        }
        let bad = (0..COPIES)
            .filter(|copy| !found.contains(&(*copy, label.clone())))
            .collect();
        Ok((label, bad))
    }

    /// Reads a label and writes its other copy anew if that is bad; whether it was.
    pub(crate) fn read_and_repair(store: &dyn BlockStore) -> Result<(Self, bool)> {
        let (label, bad) = Self::read_copies(store)?;
        if !bad.is_empty() {
            Self::write_block(store, label.block()?.as_bytes(), &bad)?;
        }
        Ok((label, !bad.is_empty()))
    }

    /// Makes the label of `device` note the catalog's epoch, if it does not; one good copy of it is there
    /// at any time. Whose label it is if a copy of it was repaired.
    pub(crate) fn note_epoch(
        store: &dyn BlockStore,
        device: Uuid,
        epoch: Epoch,
    ) -> Result<Option<DeviceIndex>> {
        // A bad copy first: the good one must not be the one that a cut tears.
        let (mut label, was_repaired) = Self::read_and_repair(store)?;
        if label.device_uuid != device {
            return Err(PoolError::invalid("this is another device's label"));
        }
        if label.epoch != epoch {
            label.epoch = epoch;
            label.generation = label.generation.saturating_add(1);
            label.write(store)?;
        }
        Ok(was_repaired.then_some(label.device_index))
    }

    /// Where its catalog areas end; 0 where it has none.
    pub fn catalog_end_bytes(&self) -> u64 {
        if self.catalog_areas == 0 {
            return 0;
        }
        // Checked when it was read; what is not read was planned.
        self.catalog_offset_bytes + self.catalog_bytes * u64::from(self.catalog_areas)
    }

    fn decode(mut block: LabelBlock) -> Found {
        if block.magic != MAGIC {
            return Found::Nothing;
        }
        if block.version.get() != FORMAT_VERSION {
            return Found::Wrong(PoolError::invalid(format!(
                "it belongs to a Forebay pool of another version: its label has format {}, this Forebay reads \
                 {FORMAT_VERSION}: use the version that made it",
                block.version.get()
            )));
        }
        let crc = block.crc.get();
        block.crc = U32::new(0);
        if crc_fast::crc32_iscsi(block.as_bytes()) != crc {
            return Found::Wrong(PoolError::damaged("the label fails its checksum"));
        }
        let unknown = block.incompatible.get() & !KNOWN_INCOMPATIBLE
            | block.read_only_compatible.get() & !KNOWN_READ_ONLY_COMPATIBLE;
        if unknown != 0 {
            return Found::Wrong(PoolError::invalid(format!(
                "the pool uses features this Forebay does not know ({unknown:#x}): use a newer one"
            )));
        }
        let name = block.name.get(..block.name_bytes.get() as usize);
        let name = name.and_then(|name| std::str::from_utf8(name).ok());
        let (Some(name), Ok(index)) = (name, u8::try_from(block.device_index.get())) else {
            return Found::Wrong(PoolError::damaged("the label contradicts itself"));
        };
        let label = Label {
            generation: block.generation.get(),
            pool_uuid: Uuid(block.pool_uuid),
            pool_name: name.to_owned(),
            device_uuid: Uuid(block.device_uuid),
            device_index: DeviceIndex(index),
            block_bytes: block.block_bytes.get(),
            extent_bytes: block.extent_bytes.get(),
            catalog_offset_bytes: block.catalog_offset_bytes.get(),
            catalog_bytes: block.catalog_bytes.get(),
            catalog_areas: block.catalog_areas.get(),
            data_offset_bytes: block.data_offset_bytes.get(),
            data_extents: block.data_extents.get(),
            epoch: Epoch {
                number: block.epoch_number.get(),
                name: block.epoch_name.get(),
                copies: block.epoch_copies,
            },
        };
        match label.check() {
            Ok(()) => Found::Good(label),
            Err(error) => Found::Wrong(error),
        }
    }

    /// Whether the fields fit each other: a right checksum does not make them true.
    fn check(&self) -> Result<()> {
        let catalog_end = self
            .catalog_bytes
            .checked_mul(u64::from(self.catalog_areas))
            .and_then(|bytes| bytes.checked_add(self.catalog_offset_bytes));
        let aligned = |bytes: u64| bytes.is_multiple_of(BLOCK_BYTES as u64);
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
            && self.data_offset_bytes >= COPIES * BLOCK_BYTES as u64
            && (self.catalog_areas == 0
                || self.catalog_offset_bytes >= COPIES * BLOCK_BYTES as u64);
        if sound {
            Ok(())
        } else {
            Err(PoolError::damaged("the label contradicts itself"))
        }
    }

    /// Writes both copies, one durable before the other is touched.
    pub fn write(&self, store: &dyn BlockStore) -> Result<()> {
        Self::write_block(store, self.block()?.as_bytes(), &[0, 1])
    }

    fn block(&self) -> Result<LabelBlock> {
        let name = self.pool_name.as_bytes();
        if name.len() > NAME_BYTES {
            return Err(PoolError::invalid(format!(
                "a pool's name has at most {NAME_BYTES} bytes"
            )));
        }
        let mut block = LabelBlock::new_zeroed();
        block.magic = MAGIC;
        block.version = U32::new(FORMAT_VERSION);
        block.generation = U64::new(self.generation);
        block.pool_uuid = self.pool_uuid.0;
        block.device_uuid = self.device_uuid.0;
        block.device_index = U32::new(u32::from(self.device_index.0));
        block.catalog_areas = U32::new(self.catalog_areas);
        block.block_bytes = U32::new(self.block_bytes);
        block.name_bytes = U32::new(name.len() as u32);
        block.extent_bytes = U64::new(self.extent_bytes);
        block.catalog_offset_bytes = U64::new(self.catalog_offset_bytes);
        block.catalog_bytes = U64::new(self.catalog_bytes);
        block.data_offset_bytes = U64::new(self.data_offset_bytes);
        block.data_extents = U64::new(self.data_extents);
        block.epoch_number = U64::new(self.epoch.number);
        block.epoch_name = U64::new(self.epoch.name);
        block.epoch_copies = self.epoch.copies;
        block.name[..name.len()].copy_from_slice(name);
        block.crc = U32::new(crc_fast::crc32_iscsi(block.as_bytes()));
        Ok(block)
    }

    /// Overwrites both copies with zeros.
    pub fn wipe(store: &dyn BlockStore) -> Result<()> {
        Self::write_block(store, &[0; BLOCK_BYTES], &[0, 1])
    }

    fn write_block(store: &dyn BlockStore, block: &[u8], copies: &[u64]) -> Result<()> {
        for copy in copies {
            store
                .write_at(copy * BLOCK_BYTES as u64, block)
                .and_then(|()| store.sync())
                .map_err(|error| PoolError::io("writing a device's label", &error))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{error::ErrorKind, store::MemStore};

    fn label() -> Label {
        Label {
            generation: 3,
            pool_uuid: Uuid([1; 16]),
            pool_name: "main".into(),
            device_uuid: Uuid([2; 16]),
            device_index: DeviceIndex(0),
            block_bytes: 512,
            extent_bytes: 65536,
            catalog_offset_bytes: 1 << 20,
            catalog_bytes: 2 << 20,
            catalog_areas: 2,
            data_offset_bytes: 5 << 20,
            data_extents: 16,
            epoch: Epoch {
                number: 7,
                name: 8,
                copies: [0, 255],
            },
        }
    }

    fn labelled() -> MemStore {
        let store = MemStore::new(6 << 20);
        label().write(&store).unwrap();
        store
    }

    fn break_copy(store: &MemStore, copy: u64, at: usize) {
        let mut block = [0; BLOCK_BYTES];
        store.read_at(copy * 4096, &mut block).unwrap();
        block[at] ^= 1;
        store.write_at(copy * 4096, &block).unwrap();
    }

    #[test]
    fn read_back() {
        assert_eq!(Label::read(&labelled()).unwrap(), label());
    }

    #[test]
    fn one_broken_copy_is_survived() {
        for copy in 0..2 {
            let store = labelled();
            break_copy(&store, copy, 40);
            assert_eq!(Label::read(&store).unwrap(), label());
        }
    }

    #[test]
    fn a_broken_copy_is_written_anew() {
        for copy in 0..2 {
            let store = labelled();
            break_copy(&store, copy, 4000);
            assert_eq!(Label::read_and_repair(&store).unwrap(), (label(), true));
            break_copy(&store, 1 - copy, 4000);
            assert_eq!(Label::read_and_repair(&store).unwrap(), (label(), true));
            assert_eq!(Label::read_and_repair(&store).unwrap(), (label(), false));
        }
    }

    #[test]
    fn the_newer_copy_counts() {
        let store = labelled();
        let mut old = [0; BLOCK_BYTES];
        store.read_at(0, &mut old).unwrap();
        Label {
            generation: 4,
            ..label()
        }
        .write(&store)
        .unwrap();
        store.write_at(0, &old).unwrap();
        assert_eq!(Label::read(&store).unwrap().generation, 4);
    }

    #[test]
    fn each_failure_has_its_own_error() {
        let kind = |store: &MemStore| {
            let error = Label::read(store).unwrap_err();
            (error.kind, error.message)
        };
        let (found, message) = kind(&MemStore::new(1 << 20));
        assert_eq!(found, ErrorKind::NotFound, "{message}");
        let (found, _) = kind(&MemStore::new(0));
        assert_eq!(found, ErrorKind::NotFound);

        let store = labelled();
        break_copy(&store, 0, 40);
        break_copy(&store, 1, 4000);
        let (found, message) = kind(&store);
        assert_eq!(found, ErrorKind::Damaged);
        assert!(message.contains("checksum"), "{message}");

        let store = labelled();
        break_copy(&store, 0, 16);
        break_copy(&store, 1, 16);
        let (found, message) = kind(&store);
        assert_eq!(found, ErrorKind::Invalid);
        assert!(message.contains("format 2"), "{message}");

        let store = labelled();
        store.set_capacity((6 << 20) - 4096);
        let (found, message) = kind(&store);
        assert_eq!(found, ErrorKind::Damaged);
        assert!(message.contains("truncated"), "{message}");
    }

    #[test]
    fn a_label_that_contradicts_itself_is_damaged() {
        for wrong in [
            Label {
                extent_bytes: 65537,
                ..label()
            },
            Label {
                catalog_areas: 3,
                ..label()
            },
            Label {
                data_offset_bytes: 1 << 20,
                ..label()
            },
            Label {
                catalog_bytes: u64::MAX,
                ..label()
            },
            Label {
                catalog_bytes: 0,
                ..label()
            },
        ] {
            let store = labelled();
            wrong.write(&store).unwrap();
            assert_eq!(
                Label::read(&store).unwrap_err().kind,
                ErrorKind::Damaged,
                "{wrong:?}"
            );
        }
    }
}
