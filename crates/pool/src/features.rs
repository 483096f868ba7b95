//! Feature bits of labels and of the catalog: features that a version must know to use a pool.
//!
//! A bit is set by the first use of its feature, never by opening. Its name is stored beside it, so a
//! version that lacks the feature can name it.

use crate::error::{PoolError, Result};

/// The effect of an unknown bit. 1 is for bits without one; there are none yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Class {
    /// Changing the pool.
    ReadOnly = 2,
    /// Opening the pool.
    Incompatible = 3,
}

impl Class {
    /// The class of a stored number; `None` if an unknown bit has no effect.
    pub(crate) fn of(number: u64) -> Option<Self> {
        match number {
            2 => Some(Self::ReadOnly),
            3 => Some(Self::Incompatible),
            _ => None,
        }
    }
}

/// A feature of this version.
pub(crate) struct Feature {
    pub(crate) class: Class,
    pub(crate) bit: u8,
    pub(crate) name: &'static str,
}

/// Maps in layers: snapshots and clones.
pub(crate) const LAYERS: Feature = Feature {
    class: Class::Incompatible,
    bit: 0,
    name: "layers",
};

/// Volumes in RBD images.
pub(crate) const IMAGES: Feature = Feature {
    class: Class::Incompatible,
    bit: 1,
    name: "images",
};

/// The catalog's features that this version knows.
pub(crate) const CATALOG: &[Feature] = &[LAYERS, IMAGES];

/// Names that an error shows, and their characters; the bytes are from outside.
const NAMES: usize = 16;
const NAME_CHARS: usize = 30;

/// Unknown features that were found, by the names to show.
#[derive(Default, Debug)]
pub(crate) struct Unknown(Vec<String>);

impl Unknown {
    /// Notes a set bit if it is not among `known`. `name` is the stored name, if there is one.
    pub(crate) fn note(&mut self, known: &[Feature], class: Class, bit: u64, name: Option<&str>) {
        if (known.iter()).any(|f| f.class == class && u64::from(f.bit) == bit) {
            return;
        }
        let kind = match class {
            Class::ReadOnly => "read-only",
            Class::Incompatible => "incompatible",
        };
        if self.0.len() < NAMES {
            let name: String = name.unwrap_or_default().chars().take(NAME_CHARS).collect();
            self.0.push(match name.is_empty() {
                true => format!("{kind} bit {bit}"),
                false => format!("{name:?}"),
            });
        }
    }

    /// # Errors
    /// The pool has unknown features. Opening it changes it, so a read-only bit forbids that too.
    pub(crate) fn refuse(&self) -> Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        Err(PoolError::invalid(format!(
            "the pool uses features that this Forebay does not know: {}: use a newer version",
            self.0.join(", ")
        )))
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        NewDevice, NewImageVolume, NewSnapshot, NewVolume, Pool, PoolSpec,
        catalog::Catalog,
        journal::batch::{Batch, BatchId, Key, Table},
        mirror::area::Area,
        open::{create::create, load::load},
        store::MemStore,
    };
    use forebay_xlate::types::DeviceIndex;
    use std::sync::Arc;

    const BYTES: u64 = 3 << 20;

    /// Opens a catalog with this feature, whose other records have a later version's form.
    fn opened(class: u64, name: &[u8]) -> String {
        let store = Arc::new(MemStore::new(BYTES as usize));
        let area = Area::new(store, DeviceIndex(0), 0, BYTES, [1; 16]).unwrap();
        let catalog = Catalog::create(vec![area]).unwrap();
        let records = [
            (Key::new(Table::Features, class, 9), Some(name.to_vec())),
            (Key::new(Table::Meta, 0, 0), Some(vec![99])),
        ];
        let batch = Batch {
            id: BatchId(1),
            records: records.into_iter().collect(),
        };
        catalog.commit(&batch).unwrap();
        load(&catalog, |_| Ok(())).unwrap_err().message
    }

    #[test]
    fn unknown_feature_bit_is_named() {
        for class in [2, 3] {
            assert!(opened(class, b"mirror").contains("does not know: \"mirror\": use"));
        }
        assert!(opened(3, b"").contains("incompatible bit 9"));
        assert!(opened(3, b"\xff\xff").contains("incompatible bit 9"));
        assert!(opened(3, &[b'a'; 500]).contains(&format!("\"{}\"", "a".repeat(30))));
        // A compatible bit has no effect, so the record's version is the error.
        assert!(opened(1, b"hints").contains("version 99"));
    }

    /// Earlier versions open a pool until its first snapshot or RBD image.
    #[test]
    fn a_feature_is_set_at_its_first_use() {
        let device = NewDevice {
            spec: "mem".into(),
            store: Arc::new(MemStore::new((11 << 20) + (64 << 16))),
            block_bytes: 512,
            known_zero: true,
        };
        let spec = PoolSpec {
            name: "p".into(),
            extent_bytes: 1 << 16,
            devices: vec![device],
            settings: Default::default(),
            force: false,
            now_s: 0,
        };
        let (mut pool, catalog) = create(&spec).unwrap();
        pool.create_tenant("t", 0).unwrap();
        let new = NewVolume {
            tenant: "t".into(),
            name: "v".into(),
            size_bytes: 1 << 20,
            block_bytes: None,
            reserved_bytes: 0,
        };
        let volume = pool.create_volume(&new, 0).unwrap();
        let commit = |pool: &mut Pool| {
            let batch = pool.take_batch().unwrap().unwrap();
            catalog.commit(&batch).unwrap();
            pool.committed(batch.id()).unwrap();
        };
        let features = || {
            let mut found = Vec::new();
            let mut visit = |table, a, b, value: &[u8]| {
                if table == Table::Features {
                    found.push((a, b, value.to_vec()));
                }
                Ok(())
            };
            catalog.load(&mut visit).unwrap();
            found
        };
        commit(&mut pool);
        assert_eq!(features(), []);
        let name = "s".into();
        pool.snapshots()
            .take(&[NewSnapshot { volume, name }], 0)
            .unwrap();
        commit(&mut pool);
        let layers = (3, 0, b"layers".to_vec());
        assert_eq!(features(), std::slice::from_ref(&layers));
        let image = NewImageVolume::example("r");
        pool.create_image_volume(&image, 0).unwrap();
        commit(&mut pool);
        assert_eq!(features(), [layers, (3, 1, b"images".to_vec())]);
    }
}
