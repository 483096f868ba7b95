//! Tests of the mirror: damage, failed copies, crashes, diverged copies.

use super::*;
use crate::store::{BlockStore, MemStore};
use proptest::prelude::*;
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

const OFFSET: u64 = 1 << 20;
const BYTES: u64 = 5 << 20;
const OWNER: [u8; 16] = [7; 16];
/// Headers and the slots of two tables.
const META_BLOCKS: u64 = 6;

fn device() -> Arc<MemStore> {
    Arc::new(MemStore::new((OFFSET + BYTES) as usize))
}

fn area(store: &Arc<dyn BlockStore>, device: u8, bytes: u64) -> Area {
    Area::new(store.clone(), DeviceIndex(device), OFFSET, bytes, OWNER).unwrap()
}

fn found(stores: &[Arc<MemStore>]) -> Vec<FoundArea> {
    stores
        .iter()
        .enumerate()
        .map(|(at, store)| {
            let store: Arc<dyn BlockStore> = store.clone();
            FoundArea::new(area(&store, at as u8, BYTES))
        })
        .collect()
}

fn open(stores: &[Arc<MemStore>]) -> io::Result<Mirror> {
    Mirror::open(found(stores), &[])
}

/// Two copies of 1100 blocks; each block holds its number.
fn filled() -> (Vec<Arc<MemStore>>, Mirror) {
    let stores = vec![device(), device()];
    let areas = found(&stores).into_iter().map(|found| found.area).collect();
    let mirror = Mirror::format(areas).unwrap();
    mirror.set_len(4096 * 1100).unwrap();
    for block in 0..1100u64 {
        mirror
            .write(block * 4096, &[block as u8; 4000 / 2])
            .unwrap();
    }
    mirror.sync().unwrap();
    // As redb ends a commit: with the header alone.
    mirror.write(0, &[77; 320]).unwrap();
    mirror.sync().unwrap();
    (stores, mirror)
}

fn heal(mirror: &Mirror) -> io::Result<()> {
    mirror.sync()?;
    mirror.heal(&mirror.probe())
}

fn expect_filled(mirror: &Mirror) {
    let mut content = [0; 4096];
    for block in 0..1100u64 {
        mirror.read(block * 4096, &mut content).unwrap();
        let expected = if block == 0 { 77 } else { block as u8 };
        assert_eq!(content[0], expected, "block {block}");
    }
}

fn block(store: &MemStore, at: u64) -> [u8; 4096] {
    let mut content = [0; 4096];
    store.read_at(OFFSET + at * 4096, &mut content).unwrap();
    content
}

fn put(store: &MemStore, at: u64, content: &[u8; 4096]) {
    store.write_at(OFFSET + at * 4096, content).unwrap();
}

fn flip(store: &MemStore, at: u64) {
    let mut content = block(store, at);
    content[1100] ^= 0x10;
    put(store, at, &content);
}

fn states(mirror: &Mirror) -> Vec<CopyState> {
    mirror
        .health()
        .copies
        .into_iter()
        .map(|copy| copy.state)
        .collect()
}

fn same(stores: &[Arc<MemStore>]) {
    // Headers and tables may be in other slots.
    for at in META_BLOCKS..META_BLOCKS + 1100 {
        assert_eq!(block(&stores[0], at), block(&stores[1], at), "block {at}");
    }
}

#[test]
fn reads_back_after_opening() {
    let (stores, mirror) = filled();
    drop(mirror);
    let mirror = open(&stores).unwrap();
    assert_eq!(mirror.len(), 4096 * 1100);
    expect_filled(&mirror);
    assert_eq!(states(&mirror), [CopyState::Good, CopyState::Good]);
    let mut some = vec![0; 9000];
    mirror.read(4096 * 3 + 100, &mut some).unwrap();
    assert!(some[..1900].iter().all(|byte| *byte == 3));
    assert!(some[1900..3996].iter().all(|byte| *byte == 0));
    assert!(some[3996..5996].iter().all(|byte| *byte == 4));
    assert!(
        mirror.read(4096 * 1100 - 10, &mut some).is_err(),
        "beyond the end"
    );
    same(&stores);
}

#[test]
fn new_bytes_are_zeros_whatever_was_there() {
    let (_, mirror) = filled();
    mirror.set_len(4096 * 5 + 50).unwrap();
    mirror.set_len(4096 * 1050).unwrap();
    let mut rest = vec![1; 4096 * 1045 - 50];
    mirror.read(4096 * 5 + 50, &mut rest).unwrap();
    assert!(rest.iter().all(|byte| *byte == 0));
    let mut before = [0; 50];
    mirror.read(4096 * 5, &mut before).unwrap();
    assert_eq!(before, [5; 50]);
}

#[test]
fn a_flipped_bit_in_one_copy_costs_nothing() {
    for at in (0..META_BLOCKS).chain([META_BLOCKS + 1, 500, 1030, META_BLOCKS + 1099]) {
        for which in 0..2 {
            let (stores, mirror) = filled();
            drop(mirror);
            flip(&stores[which], at);
            let mirror = open(&stores).unwrap();
            expect_filled(&mirror);
            mirror.scrub().unwrap();
            let MirrorHealth {
                copies,
                repaired_blocks: repaired,
                notes,
                ..
            } = mirror.health();
            assert_eq!(copies.len(), 2, "{notes:?}");
            assert_eq!(states(&mirror), [CopyState::Good, CopyState::Good]);
            if at > META_BLOCKS {
                assert_eq!(repaired, 1, "block {at}: {notes:?}");
                assert!(notes[0].contains("repaired"), "{notes:?}");
            }
            drop(mirror);
            same(&stores);
            expect_filled(&open(&stores[which..=which]).unwrap());
        }
    }
}

#[test]
fn the_same_block_bad_on_both_is_damage_and_only_that_block() {
    let (stores, mirror) = filled();
    drop(mirror);
    for store in &stores {
        flip(store, META_BLOCKS + 9);
    }
    let mirror = open(&stores).unwrap();
    let mut content = [0; 4096];
    let error = mirror.read(9 * 4096, &mut content).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    mirror.read(10 * 4096, &mut content).unwrap();
}

/// A crash between a block's write and its checksum's leaves such a block, which no catalog reads.
#[test]
fn an_unused_bad_block_is_not_reported_lost() {
    let (stores, mirror) = filled();
    drop(mirror);
    for store in &stores {
        flip(store, META_BLOCKS + 9);
    }
    let mirror = open(&stores).unwrap();
    mirror.scrub().unwrap();
    // A block that was used since the opening is lost.
    mirror.read(10 * 4096, &mut [0; 4096]).unwrap();
    for store in &stores {
        flip(store, META_BLOCKS + 10);
    }
    assert_eq!(
        mirror.scrub().unwrap_err().kind(),
        io::ErrorKind::InvalidData
    );
}

#[test]
fn two_faults_in_different_places_are_survived() {
    let (stores, mirror) = filled();
    drop(mirror);
    flip(&stores[0], 0);
    flip(&stores[0], 1);
    flip(&stores[1], META_BLOCKS + 9);
    let mirror = open(&stores).unwrap();
    expect_filled(&mirror);
    drop(mirror);
    same(&stores);
}

#[test]
fn a_lost_write_with_a_valid_checksum_is_repaired() {
    let (stores, mirror) = filled();
    let old = block(&stores[1], META_BLOCKS + 9);
    mirror.write(9 * 4096, &[0xAA; 4096]).unwrap();
    mirror.sync().unwrap();
    drop(mirror);
    // The write was reported durable and is missing.
    put(&stores[1], META_BLOCKS + 9, &old);
    let mirror = open(&stores[1..]).unwrap();
    let mut content = [0; 4096];
    let error = mirror.read(9 * 4096, &mut content).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    drop(mirror);
    let mirror = open(&stores).unwrap();
    mirror.scrub().unwrap();
    mirror.read(9 * 4096, &mut content).unwrap();
    assert_eq!(content, [0xAA; 4096]);
    assert_eq!(mirror.health().repaired_blocks, 1);
    same(&stores);
}

#[test]
fn lost_table_writes_are_repaired() {
    for slot in 2..META_BLOCKS {
        let (stores, mirror) = filled();
        let before = block(&stores[0], slot);
        for round in 0..2 {
            mirror.write(9 * 4096, &[0xA0 + round; 4096]).unwrap();
            mirror.sync().unwrap();
            mirror.write(0, &[77; 320]).unwrap();
            mirror.sync().unwrap();
        }
        drop(mirror);
        put(&stores[0], slot, &before);
        let mirror = open(&stores).unwrap();
        let mut content = [0; 4096];
        mirror.read(9 * 4096, &mut content).unwrap();
        assert_eq!(content, [0xA1; 4096]);
        drop(mirror);
        let mirror = open(&stores[..1]).unwrap();
        mirror.read(9 * 4096, &mut content).unwrap();
        assert_eq!(content, [0xA1; 4096]);
    }
}

#[test]
fn another_pools_area_is_refused() {
    let (stores, mirror) = filled();
    drop(mirror);
    let store: Arc<dyn BlockStore> = stores[0].clone();
    let other = Area::new(store.clone(), DeviceIndex(0), OFFSET, BYTES, [8; 16]).unwrap();
    let error = Mirror::open(vec![FoundArea::new(other)], &[]).unwrap_err();
    assert!(error.to_string().contains("another pool"), "{error}");
    let other = Area::new(store, DeviceIndex(0), OFFSET + 4096, BYTES - 4096, OWNER).unwrap();
    let error = Mirror::open(vec![FoundArea::new(other)], &[]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
}

#[test]
fn the_file_is_bounded() {
    let (_, mirror) = filled();
    mirror.set_len(mirror.capacity()).unwrap();
    mirror.write(mirror.capacity() - 4096, &[1; 4096]).unwrap();
    assert_eq!(
        mirror.set_len(mirror.capacity() + 1).unwrap_err().kind(),
        io::ErrorKind::StorageFull
    );
    let store: Arc<dyn BlockStore> = device();
    assert!(Area::new(store, DeviceIndex(0), OFFSET, 4096 * 5, OWNER).is_err());
}

#[test]
fn a_copy_left_behind_is_brought_up_and_two_lives_are_refused() {
    let (stores, mirror) = filled();
    drop(mirror);
    let mirror = open(&stores[..1]).unwrap();
    mirror.write(9 * 4096, &[0xAA; 4096]).unwrap();
    mirror.sync().unwrap();
    assert_eq!(states(&mirror), [CopyState::Good, CopyState::Missing]);
    drop(mirror);
    let mirror = open(&stores).unwrap();
    assert!(mirror.health().notes[0].contains("brought up to date"));
    drop(mirror);
    let mut content = [0; 4096];
    let mirror = open(&stores[1..]).unwrap();
    mirror.read(9 * 4096, &mut content).unwrap();
    assert_eq!(content, [0xAA; 4096]);
    same(&stores);
    mirror.write(9 * 4096, &[0xBB; 4096]).unwrap();
    for _ in 0..5 {
        mirror.write(0, &[78; 320]).unwrap();
        mirror.sync().unwrap();
    }
    drop(mirror);
    let mirror = open(&stores[..1]).unwrap();
    mirror.write(9 * 4096, &[0xCC; 4096]).unwrap();
    mirror.sync().unwrap();
    drop(mirror);
    let error = open(&stores).unwrap_err();
    assert!(error.to_string().contains("have diverged"), "{error}");
    expect_head(&open(&stores[..1]).unwrap(), 0xCC);
    expect_head(&open(&stores[1..]).unwrap(), 0xBB);
}

fn expect_head(mirror: &Mirror, byte: u8) {
    let mut content = [0; 4096];
    mirror.read(9 * 4096, &mut content).unwrap();
    assert_eq!(content, [byte; 4096]);
}

/// A device whose writes or syncs fail on demand, and that can forget unsynced writes.
struct Failing {
    store: Arc<MemStore>,
    writes: AtomicBool,
    syncs: AtomicBool,
    /// Content before the unsynced writes.
    before: Mutex<Vec<(u64, [u8; 4096])>>,
    /// Offsets of all writes.
    written: Mutex<Vec<u64>>,
}

impl Failing {
    fn new(store: &Arc<MemStore>) -> Arc<Self> {
        Arc::new(Self {
            store: store.clone(),
            writes: AtomicBool::new(false),
            syncs: AtomicBool::new(false),
            before: Mutex::new(Vec::new()),
            written: Mutex::new(Vec::new()),
        })
    }

    fn set(&self, writes: bool, syncs: bool) {
        self.writes.store(writes, Ordering::Relaxed);
        self.syncs.store(syncs, Ordering::Relaxed);
    }

    fn forget(&self) {
        for (at, content) in self.before.lock().unwrap().drain(..).rev() {
            self.store.write_at(at, &content).unwrap();
        }
    }
}

impl BlockStore for Failing {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.store.read_at(offset, buf)
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if self.writes.load(Ordering::Relaxed) {
            return Err(io::Error::other("write"));
        }
        for at in (0..data.len() as u64).step_by(4096) {
            let mut content = [0; 4096];
            self.store.read_at(offset + at, &mut content)?;
            self.before.lock().unwrap().push((offset + at, content));
            self.written.lock().unwrap().push(offset + at);
        }
        self.store.write_at(offset, data)
    }
    fn sync(&self) -> io::Result<()> {
        if self.syncs.load(Ordering::Relaxed) {
            return Err(io::Error::other("sync"));
        }
        self.before.lock().unwrap().clear();
        Ok(())
    }
    fn capacity(&self) -> io::Result<u64> {
        self.store.capacity()
    }
}

fn failing(stores: &[Arc<MemStore>]) -> (Vec<Arc<Failing>>, Mirror) {
    let failing: Vec<Arc<Failing>> = stores.iter().map(Failing::new).collect();
    let found = failing
        .iter()
        .enumerate()
        .map(|(at, store)| {
            let store: Arc<dyn BlockStore> = store.clone();
            FoundArea::new(area(&store, at as u8, BYTES))
        })
        .collect();
    (failing, Mirror::open(found, &[]).unwrap())
}

/// The other copy first records that it is alone. The failed one is whole again when it works
/// again.
#[test]
fn a_copy_that_fails_is_left_behind_and_comes_back() {
    for which in 0..2 {
        for (writes, syncs) in [(true, false), (false, true)] {
            let (stores, mirror) = filled();
            drop(mirror);
            let (devices, mirror) = failing(&stores);
            devices[which].set(writes, syncs);
            mirror.write(9 * 4096, &[0xAA; 4096]).unwrap();
            mirror.sync().unwrap();
            let MirrorHealth { copies, notes, .. } = mirror.health();
            assert!(notes.iter().any(|note| note.contains("left behind")));
            assert!(
                copies.iter().any(|copy| copy.device.0 == which as u8
                    && matches!(copy.state, CopyState::Failed(_)))
            );
            // After a power loss both copies are found, and the survivor counts.
            devices[which].forget();
            expect_head(&open(&stores).unwrap(), 0xAA);
            heal(&mirror).unwrap();
            assert!(states(&mirror).contains(&CopyState::Good));
            devices[which].set(false, false);
            heal(&mirror).unwrap();
            assert_eq!(states(&mirror), [CopyState::Good, CopyState::Good]);
            mirror.write(10 * 4096, &[0xBB; 4096]).unwrap();
            mirror.sync().unwrap();
            drop(mirror);
            for store in &stores {
                let mirror = open(std::slice::from_ref(store)).unwrap();
                expect_head(&mirror, 0xAA);
            }
        }
    }
}

#[test]
fn a_failed_sync_of_all_is_an_error_and_loses_nothing() {
    for count in 1..=2 {
        let (stores, mirror) = filled();
        drop(mirror);
        let (devices, mirror) = failing(&stores[..count]);
        // It knows by now whether it is alone.
        mirror.sync().unwrap();
        let before = mirror.sequence();
        mirror.write(9 * 4096, &[0xAA; 4096]).unwrap();
        for device in &devices {
            device.set(false, true);
        }
        for _ in 0..3 {
            assert!(mirror.sync().is_err());
            assert_eq!(mirror.sequence(), before);
        }
        for device in &devices {
            device.set(false, false);
        }
        mirror.sync().unwrap();
        drop(mirror);
        for store in &stores[..count] {
            expect_head(&open(std::slice::from_ref(store)).unwrap(), 0xAA);
        }
    }
}

/// A device may forget the writes of a failed sync although later syncs succeed.
#[test]
fn a_sync_after_a_failed_one_writes_again() {
    let (stores, mirror) = filled();
    drop(mirror);
    let (devices, mirror) = failing(&stores[..1]);
    mirror.sync().unwrap();
    devices[0].set(false, true);
    mirror.write(9 * 4096, &[0xAA; 4096]).unwrap();
    assert!(mirror.sync().is_err());
    // The page cache may call it clean now, and never write it.
    let data = OFFSET + (META_BLOCKS + 9) * 4096;
    let before = std::mem::take(&mut *devices[0].written.lock().unwrap());
    assert!(before.contains(&data));
    devices[0].set(false, false);
    mirror.sync().unwrap();
    let again = std::mem::take(&mut *devices[0].written.lock().unwrap());
    assert!(again.contains(&data), "{again:?}");
    mirror.write(0, &[7; 9]).unwrap();
    mirror.sync().unwrap();
    assert!(!devices[0].written.lock().unwrap().contains(&data));
    drop(mirror);
    expect_head(&open(&stores[..1]).unwrap(), 0xAA);
}

#[test]
fn the_second_copy_moves_to_another_device() {
    let stores: Vec<Arc<dyn BlockStore>> = vec![
        Arc::new(MemStore::new((OFFSET + 2 * BYTES) as usize)),
        device(),
        device(),
    ];
    let at = |device: usize, nth: u64| {
        Area::new(
            stores[device].clone(),
            DeviceIndex(device as u8),
            OFFSET + nth * BYTES,
            BYTES,
            OWNER,
        )
        .unwrap()
    };
    let devices = |mirror: &Mirror| -> Vec<u8> {
        let copies = mirror.health().copies;
        copies.iter().map(|copy| copy.device.0).collect()
    };
    let mirror = Mirror::format(vec![at(0, 0), at(0, 1)]).unwrap();
    mirror.set_len(4096 * 20).unwrap();
    mirror.write(9 * 4096, &[0xAA; 4096]).unwrap();
    mirror.sync().unwrap();
    mirror.settle(&[at(0, 0), at(0, 1)]).unwrap();
    assert_eq!(devices(&mirror), [0, 0]);
    mirror.settle(&[at(0, 0), at(0, 1), at(1, 0)]).unwrap();
    assert_eq!(devices(&mirror), [0, 1]);
    mirror.write(9 * 4096, &[0xBB; 4096]).unwrap();
    mirror.sync().unwrap();
    drop(mirror);
    let mirror = Mirror::open(
        vec![FoundArea::new(at(1, 0)), FoundArea::new(at(2, 0))],
        &[],
    )
    .unwrap();
    mirror.settle(&[at(1, 0), at(2, 0)]).unwrap();
    assert_eq!(devices(&mirror), [1, 2]);
    expect_head(&mirror, 0xBB);
    mirror.write(9 * 4096, &[0xCC; 4096]).unwrap();
    mirror.sync().unwrap();
    drop(mirror);
    // The first device returns; its content must not pass for a copy.
    let all = vec![
        FoundArea::new(at(0, 0)),
        FoundArea::new(at(0, 1)),
        FoundArea::new(at(1, 0)),
        FoundArea::new(at(2, 0)),
    ];
    let mirror = Mirror::open(all, &[]).unwrap();
    expect_head(&mirror, 0xCC);
    drop(mirror);
    let alone = Mirror::open(
        vec![FoundArea::new(at(0, 0)), FoundArea::new(at(0, 1))],
        &[],
    );
    match alone {
        Ok(mirror) => expect_head(&mirror, 0xCC),
        Err(error) => assert!(error.kind() == io::ErrorKind::NotFound, "{error}"),
    }
}

/// `MIRROR_CASES` overrides the number of cases.
fn cases(usual: u32) -> u32 {
    let given = std::env::var("MIRROR_CASES").ok();
    given.and_then(|given| given.parse().ok()).unwrap_or(usual)
}

mod cuts;
mod stalls;
