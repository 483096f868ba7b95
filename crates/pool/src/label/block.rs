//! The label as bytes, in both formats: fixed layout, little-endian, CRC32C.
//!
//! The version says whether the layout is readable; feature bits name further requirements. Bits
//! carry names, so that a version that lacks one can report it.

use super::{Label, LabelFormat, LabelOwner};
use crate::{
    error::{PoolError, Result},
    features::{Class, Feature, Unknown},
    mirror::lineage::Epoch,
    store::BLOCK_BYTES,
};
use forebay_xlate::types::DeviceIndex;
use uuid::Uuid;
use zerocopy::{
    FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout,
    little_endian::{U32, U64},
};

const MAGIC: [u8; 16] = *b"Forebay label\r\n\0";
const FORMAT_VERSION: u32 = 4;
/// No owner; the copies are adjacent.
const OLD_VERSION: u32 = 3;
const NAME_BYTES: usize = 64;
const FEATURES: usize = 16;
const FEATURE_NAME_BYTES: usize = 30;

/// The known features, all set in labels of the current format.
const KNOWN: &[Feature] = &[Feature {
    class: Class::Incompatible,
    bit: 0,
    name: "owner and heartbeat",
}];

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy)]
#[repr(C)]
struct StoredFeature {
    /// 0: no feature.
    class: u8,
    bit: u8,
    name: [u8; FEATURE_NAME_BYTES],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone)]
#[repr(C)]
pub(super) struct LabelBlock {
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
    // Zeros in the old format from here on.
    has_owner: u8,
    is_clean: u8,
    owner_machine_bytes: u8,
    owner_host_bytes: u8,
    unused_before_owner: [u8; 2],
    number: U64,
    owner_id: [u8; 16],
    owner_machine: [u8; 32],
    owner_host: [u8; NAME_BYTES],
    features: [StoredFeature; FEATURES],
    unused: [u8; BLOCK_BYTES - 864],
}

const _: () = assert!(size_of::<LabelBlock>() == BLOCK_BYTES);

/// The content of a label's place.
#[derive(Debug)]
pub(super) enum Found {
    Good(Label),
    /// All zeros.
    Blank,
    /// Not a label of Forebay.
    Foreign,
    /// An unusable label, or a read error.
    Wrong(PoolError),
}

fn text(bytes: &[u8], len: usize) -> Option<String> {
    let text = std::str::from_utf8(bytes.get(..len)?).ok()?;
    Some(text.to_owned())
}

/// Copies as many whole characters as fit; returns the bytes.
fn put(into: &mut [u8], from: &str) -> usize {
    let len = (0..=into.len().min(from.len()))
        .rev()
        .find(|len| from.is_char_boundary(*len))
        .unwrap_or(0);
    into[..len].copy_from_slice(&from.as_bytes()[..len]);
    len
}

impl LabelBlock {
    pub(super) fn zeroed() -> Self {
        Self::new_zeroed()
    }

    fn unknown_features(&self) -> Unknown {
        let bits = [
            (Class::ReadOnly, self.read_only_compatible.get()),
            (Class::Incompatible, self.incompatible.get()),
        ];
        let mut unknown = Unknown::default();
        for (class, bits) in bits {
            for bit in (0..64u8).filter(|bit| bits >> bit & 1 == 1) {
                let mut stored = self.features.iter();
                let stored = stored.find(|f| f.class == class as u8 && f.bit == bit);
                let name = stored.and_then(|f| {
                    let end = f.name.iter().position(|byte| *byte == 0);
                    text(&f.name, end.unwrap_or(FEATURE_NAME_BYTES))
                });
                unknown.note(KNOWN, class, bit.into(), name.as_deref());
            }
        }
        unknown
    }

    pub(super) fn decode(mut self) -> Found {
        if self.magic != MAGIC {
            let is_blank = self.as_bytes().iter().all(|byte| *byte == 0);
            let alike = self.magic.iter().zip(&MAGIC).filter(|(a, b)| a == b);
            return if is_blank {
                Found::Blank
            } else if alike.count() > MAGIC.len() / 2 {
                Found::Wrong(PoolError::damaged("the label is damaged"))
            } else {
                Found::Foreign
            };
        }
        let format = match self.version.get() {
            FORMAT_VERSION => LabelFormat::Current,
            OLD_VERSION => LabelFormat::Old,
            version => {
                return Found::Wrong(PoolError::invalid(format!(
                    "it belongs to a Forebay pool of another version: its label has format {version}, but this \
                     Forebay reads {OLD_VERSION} and {FORMAT_VERSION}: use the version that made it"
                )));
            }
        };
        let crc = self.crc.get();
        self.crc = U32::new(0);
        if crc_fast::crc32_iscsi(self.as_bytes()) != crc {
            return Found::Wrong(PoolError::damaged("the label fails its checksum"));
        }
        if let Err(error) = self.unknown_features().refuse() {
            return Found::Wrong(error);
        }
        match self.label(format) {
            Some(label) => match label.check() {
                Ok(()) => Found::Good(label),
                Err(error) => Found::Wrong(error),
            },
            None => Found::Wrong(PoolError::damaged("the label contradicts itself")),
        }
    }

    fn label(&self, format: LabelFormat) -> Option<Label> {
        let owner = match self.has_owner {
            0 => None,
            _ => Some(LabelOwner {
                id: Uuid::from_bytes(self.owner_id),
                machine: text(&self.owner_machine, self.owner_machine_bytes.into())?,
                host: text(&self.owner_host, self.owner_host_bytes.into())?,
            }),
        };
        Some(Label {
            format,
            generation: self.generation.get(),
            pool_uuid: Uuid::from_bytes(self.pool_uuid),
            pool_name: text(&self.name, self.name_bytes.get() as usize)?,
            device_uuid: Uuid::from_bytes(self.device_uuid),
            device_index: DeviceIndex(u8::try_from(self.device_index.get()).ok()?),
            block_bytes: self.block_bytes.get(),
            extent_bytes: self.extent_bytes.get(),
            catalog_offset_bytes: self.catalog_offset_bytes.get(),
            catalog_bytes: self.catalog_bytes.get(),
            catalog_areas: self.catalog_areas.get(),
            data_offset_bytes: self.data_offset_bytes.get(),
            data_extents: self.data_extents.get(),
            epoch: Epoch {
                number: self.epoch_number.get(),
                name: self.epoch_name.get(),
                copies: self.epoch_copies,
            },
            owner,
            number: self.number.get(),
            is_clean: self.is_clean != 0,
        })
    }

    pub(super) fn encode(label: &Label) -> Result<Self> {
        if label.pool_name.len() > NAME_BYTES {
            return Err(PoolError::invalid(format!(
                "a pool's name has at most {NAME_BYTES} bytes"
            )));
        }
        let mut block = Self::new_zeroed();
        block.magic = MAGIC;
        block.version = U32::new(match label.format {
            LabelFormat::Current => FORMAT_VERSION,
            LabelFormat::Old => OLD_VERSION,
        });
        block.generation = U64::new(label.generation);
        block.pool_uuid = label.pool_uuid.into_bytes();
        block.device_uuid = label.device_uuid.into_bytes();
        block.device_index = U32::new(u32::from(label.device_index.0));
        block.catalog_areas = U32::new(label.catalog_areas);
        block.block_bytes = U32::new(label.block_bytes);
        block.extent_bytes = U64::new(label.extent_bytes);
        block.catalog_offset_bytes = U64::new(label.catalog_offset_bytes);
        block.catalog_bytes = U64::new(label.catalog_bytes);
        block.data_offset_bytes = U64::new(label.data_offset_bytes);
        block.data_extents = U64::new(label.data_extents);
        block.epoch_number = U64::new(label.epoch.number);
        block.epoch_name = U64::new(label.epoch.name);
        block.epoch_copies = label.epoch.copies;
        // At most 64.
        block.name_bytes = U32::new(put(&mut block.name, &label.pool_name) as u32);
        if label.format == LabelFormat::Current {
            block.number = U64::new(label.number);
            block.is_clean = u8::from(label.is_clean);
            if let Some(owner) = &label.owner {
                block.has_owner = 1;
                block.owner_id = owner.id.into_bytes();
                // Both at most 64.
                block.owner_machine_bytes = put(&mut block.owner_machine, &owner.machine) as u8;
                block.owner_host_bytes = put(&mut block.owner_host, &owner.host) as u8;
            }
            for (stored, feature) in block.features.iter_mut().zip(KNOWN) {
                stored.class = feature.class as u8;
                stored.bit = feature.bit;
                put(&mut stored.name, feature.name);
                let bits = match feature.class {
                    Class::ReadOnly => &mut block.read_only_compatible,
                    Class::Incompatible => &mut block.incompatible,
                };
                *bits = U64::new(bits.get() | 1 << feature.bit);
            }
        }
        block.crc = U32::new(crc_fast::crc32_iscsi(block.as_bytes()));
        Ok(block)
    }

    /// Sets an unknown feature, as a later version may.
    #[cfg(test)]
    pub(super) fn set_future_feature(&mut self, name: &str) {
        self.incompatible = U64::new(self.incompatible.get() | 1 << 9);
        let stored = &mut self.features[FEATURES - 1];
        (stored.class, stored.bit) = (Class::Incompatible as u8, 9);
        put(&mut stored.name, name);
        self.crc = U32::new(0);
        self.crc = U32::new(crc_fast::crc32_iscsi(self.as_bytes()));
    }
}
