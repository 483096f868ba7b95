//! The catalog's usage after a failed commit.

use super::*;
use crate::{
    journal::batch::{BatchId, Key},
    store::MemStore,
    store::bounded::BoundedStore,
};

const BYTES: u64 = 3 << 20;

fn batch(keys: std::ops::Range<u64>, value: Option<usize>) -> Batch {
    let key = |a| Key::new(Table::Volumes, a, 0);
    Batch {
        id: BatchId(1),
        records: keys
            .map(|a| (key(a), value.map(|bytes| vec![a as u8; bytes])))
            .collect(),
    }
}

/// A device whose sync fails on demand, after everything was written.
struct FailingSync {
    store: MemStore,
    left: AtomicU64,
}

impl BlockStore for FailingSync {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.store.read_at(offset, buf)
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.store.write_at(offset, data)
    }
    fn sync(&self) -> io::Result<()> {
        match self.left.fetch_sub(1, Ordering::Relaxed) {
            1 => Err(io::Error::other("a sync that failed")),
            _ => Ok(()),
        }
    }
    fn capacity(&self) -> io::Result<u64> {
        self.store.capacity()
    }
}

#[test]
fn usage_is_right_after_a_commit_that_failed_and_is_there() {
    let mut failures = 0;
    for failing in 1..12 {
        let store = Arc::new(FailingSync {
            store: MemStore::new(BYTES as usize),
            left: AtomicU64::new(u64::MAX),
        });
        let device = forebay_xlate::types::DeviceIndex(0);
        let area = Area::new(store.clone(), device, 0, BYTES, [1; 16]).unwrap();
        let catalog = Catalog::create(vec![area]).unwrap();
        let expected = |records: u64| records * (RECORD_BYTES + 10);
        catalog.commit(&batch(0..20, Some(10))).unwrap();
        store.left.store(failing, Ordering::Relaxed);
        let added = batch(20..50, Some(10));
        if catalog.commit(&added).is_err() {
            failures += 1;
            store.left.store(u64::MAX, Ordering::Relaxed);
            catalog.commit(&added).unwrap();
        }
        assert_eq!(catalog.usage().get().used_bytes, expected(50), "{failing}");
        store.left.store(u64::MAX, Ordering::Relaxed);
        catalog.commit(&batch(0..50, None)).unwrap();
        assert_eq!(catalog.usage().get().used_bytes, 0, "{failing}");
    }
    assert!(failures > 1, "{failures}");
}

/// A flush failed on both devices at once.
#[test]
fn a_catalog_whose_copies_failed_all_at_once_goes_on() {
    let devices: Vec<Arc<BoundedStore>> = (0..2)
        .map(|_| {
            let store = Arc::new(MemStore::new(BYTES as usize));
            Arc::new(BoundedStore::new(store, Duration::from_secs(10)))
        })
        .collect();
    let areas = (0..).zip(&devices).map(|(index, device)| {
        let of = forebay_xlate::types::DeviceIndex(index);
        Area::new(device.clone(), of, 0, BYTES, [1 + index; 16]).unwrap()
    });
    let catalog = Catalog::create(areas.collect()).unwrap();
    catalog.commit(&batch(0..20, Some(10))).unwrap();
    for device in &devices {
        device.note_failure(&io::Error::other("a flush that failed"));
    }
    let added = batch(0..30, Some(10));
    assert!(catalog.commit(&added).is_err(), "it is told");
    catalog.commit(&added).unwrap();
    assert_eq!(catalog.usage().get().used_bytes, 30 * (RECORD_BYTES + 10));
}
