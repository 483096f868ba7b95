//! Tests of the area: that damage is seen, that a crash leaves the last sync or the one it cut.

use super::*;
use crate::store::MemStore;
use proptest::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};

const OFFSET: u64 = 1 << 20;
const BYTES: u64 = 5 << 20;
const OWNER: [u8; 16] = [7; 16];

fn device() -> Arc<MemStore> {
    Arc::new(MemStore::new((OFFSET + BYTES) as usize))
}

fn open(store: &Arc<MemStore>) -> io::Result<Area> {
    Area::open(store.clone(), OFFSET, BYTES, OWNER)
}

fn filled() -> (Arc<MemStore>, Area) {
    let store = device();
    let area = Area::format(store.clone(), OFFSET, BYTES, OWNER).unwrap();
    area.set_len(4096 * 1100).unwrap();
    for block in 0..1100u64 {
        area.write(block * 4096, &[block as u8; 4000]).unwrap();
    }
    area.sync().unwrap();
    // As redb ends a commit: with the header alone.
    area.write(0, &[77; 320]).unwrap();
    area.sync().unwrap();
    (store, area)
}

fn flip(store: &MemStore, offset: u64) {
    let mut block = [0; 4096];
    let at = offset / 4096 * 4096;
    store.read_at(at, &mut block).unwrap();
    block[(offset - at) as usize] ^= 0x10;
    store.write_at(at, &block).unwrap();
}

#[test]
fn reads_back_after_opening() {
    let (store, area) = filled();
    drop(area);
    let area = open(&store).unwrap();
    assert_eq!(area.len(), 4096 * 1100);
    let mut some = vec![0; 9000];
    area.read(4096 * 3 + 100, &mut some).unwrap();
    assert!(some[..3900].iter().all(|byte| *byte == 3));
    assert!(some[3900..3996].iter().all(|byte| *byte == 0));
    assert!(some[3996..7996].iter().all(|byte| *byte == 4));
    assert!(
        area.read(4096 * 1100 - 10, &mut some).is_err(),
        "beyond the end"
    );
}

#[test]
fn new_bytes_are_zeros_whatever_was_there() {
    let (_, area) = filled();
    area.set_len(4096 * 5 + 50).unwrap();
    area.set_len(4096 * 1050).unwrap();
    let mut rest = vec![1; 4096 * 1045 - 50];
    area.read(4096 * 5 + 50, &mut rest).unwrap();
    assert!(rest.iter().all(|byte| *byte == 0));
    let mut before = [0; 50];
    area.read(4096 * 5, &mut before).unwrap();
    assert_eq!(before, [5; 50]);
}

#[test]
fn a_flipped_bit_anywhere_is_seen_or_survived() {
    // Headers and tables have two versions; in data, the block is refused.
    for block in (0..6).chain([6, 7, 500, 1030]) {
        let (store, area) = filled();
        let data_starts = 2 + 2 * area.tables;
        assert_eq!(data_starts, 6);
        drop(area);
        flip(&store, OFFSET + block * 4096 + 2100);
        let area = match open(&store) {
            Ok(area) => area,
            Err(error) => {
                assert!((2..6).contains(&block), "{block}: {error}");
                assert_eq!(error.kind(), io::ErrorKind::InvalidData);
                continue;
            }
        };
        let mut content = [0; 4096];
        for logical in 0..1100 {
            let result = area.read(logical * 4096, &mut content);
            if block >= data_starts && logical == block - data_starts && logical != 0 {
                assert_eq!(result.unwrap_err().kind(), io::ErrorKind::InvalidData);
            } else {
                result.unwrap();
                let expected = if logical == 0 { 77 } else { logical as u8 };
                assert_eq!(content[0], expected, "block {logical}, rot in {block}");
            }
        }
    }
}

#[test]
fn a_stale_block_with_a_valid_checksum_is_seen() {
    let (store, area) = filled();
    let at = area.data_offset(9);
    let mut old = [0; 4096];
    store.read_at(at, &mut old).unwrap();
    area.write(9 * 4096, &[0xAA; 4096]).unwrap();
    area.sync().unwrap();
    drop(area);
    // The write was reported durable and is not there.
    store.write_at(at, &old).unwrap();
    let mut content = [0; 4096];
    let error = open(&store)
        .unwrap()
        .read(9 * 4096, &mut content)
        .unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
}

#[test]
fn a_lost_table_write_is_damage_once_a_later_sync_relied_on_it() {
    let (store, area) = filled();
    let mut tables = vec![0; 4096 * 4];
    area.write(9 * 4096, &[0xAA; 4096]).unwrap();
    store.read_at(OFFSET + 2 * 4096, &mut tables).unwrap();
    area.sync().unwrap();
    area.write(0, &[1; 320]).unwrap();
    area.sync().unwrap();
    drop(area);
    store.write_at(OFFSET + 2 * 4096, &tables).unwrap();
    assert_eq!(open(&store).unwrap_err().kind(), io::ErrorKind::InvalidData);
}

#[test]
fn another_pools_area_is_refused() {
    let (store, area) = filled();
    drop(area);
    let error = Area::open(store.clone(), OFFSET, BYTES, [8; 16]).unwrap_err();
    assert!(error.to_string().contains("another pool"), "{error}");
    let error = Area::open(store, OFFSET + 4096, BYTES - 4096, OWNER).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
}

#[test]
fn the_area_is_bounded() {
    let (_, area) = filled();
    area.set_len(area.capacity()).unwrap();
    area.write(area.capacity() - 4096, &[1; 4096]).unwrap();
    assert_eq!(
        area.set_len(area.capacity() + 1).unwrap_err().kind(),
        io::ErrorKind::StorageFull
    );
    assert!(Area::format(device(), OFFSET, 4096 * 5, OWNER).is_err());
}

/// A device that fails its sync when told.
struct Failing(Arc<MemStore>, AtomicBool);

impl BlockStore for Failing {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, buf)
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_at(offset, data)
    }
    fn sync(&self) -> io::Result<()> {
        if self.1.load(Ordering::Relaxed) {
            Err(io::Error::other("sync"))
        } else {
            Ok(())
        }
    }
    fn capacity(&self) -> io::Result<u64> {
        self.0.capacity()
    }
}

#[test]
fn a_failed_sync_does_not_touch_the_good_slots() {
    let (store, area) = filled();
    drop(area);
    let failing = Arc::new(Failing(store.clone(), AtomicBool::new(true)));
    let area = Area::open(failing.clone(), OFFSET, BYTES, OWNER).unwrap();
    let before = area.sequence();
    area.write(0, &[9; 100]).unwrap();
    area.write(9 * 4096, &[0xAA; 4096]).unwrap();
    for _ in 0..3 {
        assert!(area.sync().is_err());
        assert_eq!(area.sequence(), before);
    }
    failing.1.store(false, Ordering::Relaxed);
    area.sync().unwrap();
    drop(area);
    let area = open(&store).unwrap();
    let mut content = [0; 4096];
    area.read(9 * 4096, &mut content).unwrap();
    assert_eq!(content, [0xAA; 4096]);
}

/// A device whose writes since the last sync can be undone piecewise.
#[derive(Default)]
struct Journal {
    synced: Vec<u8>,
    writes: Vec<(u64, Vec<u8>)>,
}

struct Crashing(Mutex<Journal>);

impl BlockStore for Crashing {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let journal = self.0.lock().unwrap();
        let mut now = journal.synced.clone();
        for (at, data) in &journal.writes {
            now[*at as usize..*at as usize + data.len()].copy_from_slice(data);
        }
        buf.copy_from_slice(&now[offset as usize..offset as usize + buf.len()]);
        Ok(())
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.lock().unwrap().writes.push((offset, data.to_vec()));
        Ok(())
    }
    fn sync(&self) -> io::Result<()> {
        let mut journal = self.0.lock().unwrap();
        for (at, data) in std::mem::take(&mut journal.writes) {
            journal.synced[at as usize..at as usize + data.len()].copy_from_slice(&data);
        }
        Ok(())
    }
    fn capacity(&self) -> io::Result<u64> {
        Ok(self.0.lock().unwrap().synced.len() as u64)
    }
}

impl Crashing {
    /// Cuts the power: of each sector that is not synced, `keep` says whether it is there.
    fn cut(&self, mut keep: impl FnMut() -> bool) {
        let mut journal = self.0.lock().unwrap();
        for (offset, data) in std::mem::take(&mut journal.writes) {
            for (sector, piece) in data.chunks(512).enumerate() {
                if keep() {
                    let to = offset as usize + sector * 512;
                    journal.synced[to..to + 512].copy_from_slice(piece);
                }
            }
        }
    }

    /// Undoes the sync that just ended, so that it can be cut.
    fn unsync(&self, before: Vec<u8>) {
        let mut journal = self.0.lock().unwrap();
        let after = std::mem::replace(&mut journal.synced, before);
        for (sector, piece) in after.chunks(512).enumerate() {
            if journal.synced[sector * 512..][..512] != *piece {
                journal.writes.push((sector as u64 * 512, piece.to_vec()));
            }
        }
    }

    fn synced(&self) -> Vec<u8> {
        self.0.lock().unwrap().synced.clone()
    }
}

/// What block 0 says: a version, and the blocks that carry it.
fn head(area: &Area) -> (u8, u64, u64) {
    let mut bytes = [0; 17];
    area.read(0, &mut bytes).unwrap();
    let number = |from: usize| u64::from_le_bytes(bytes[from..from + 8].try_into().unwrap());
    (bytes[0], number(1), number(9))
}

/// Where a life ends: which sync of its last round is cut, if any.
#[derive(Clone, Copy, Debug)]
enum Cut {
    BeforeData,
    InData,
    InHead,
}

fn life() -> impl Strategy<Value = (Vec<u64>, Cut, u64)> {
    let cut = prop_oneof![Just(Cut::BeforeData), Just(Cut::InData), Just(Cut::InHead)];
    (prop::collection::vec(1u64..20, 1..4), cut, any::<u64>())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Blocks are written to fresh places, then block 0 names them (as redb does); a crash loses
    /// any sectors of what is not synced. What block 0 then names can be read, and block 0 is the
    /// last one synced or the one being synced. And so on for several lives, each of which begins with
    /// a sync of the header alone.
    #[test]
    fn crashes_leave_a_synced_state(lives in prop::collection::vec(life(), 1..6)) {
        let bytes = 200 * 4096;
        let store =
            Arc::new(Crashing(Mutex::new(Journal { synced: vec![0; bytes], writes: vec![] })));
        let area = Area::format(store.clone(), 0, bytes as u64, OWNER).unwrap();
        area.set_len(area.capacity()).unwrap();
        area.sync().unwrap();
        drop(area);
        let mut version = 0;
        for (rounds, cut, seed) in lives {
            let area = Area::open(store.clone(), 0, bytes as u64, OWNER).unwrap();
            let (found, first, count) = head(&area);
            prop_assert!(found <= version);
            // As redb does: a life begins with the header, which is not what was cut.
            let mut same = [0; 17];
            area.read(0, &mut same).unwrap();
            area.write(0, &same).unwrap();
            area.sync().unwrap();
            let mut last = found;
            let mut next = (first + count).max(1);
            for (round, count) in rounds.iter().enumerate() {
                version += 1;
                let first = next;
                for at in 0..*count {
                    // Around the area: what block 0 names is far behind.
                    area.write((first + at - 1) % 180 * 4096 + 4096, &[version; 4096]).unwrap();
                }
                next += count;
                let ends = round + 1 == rounds.len();
                if ends && matches!(cut, Cut::BeforeData) {
                    break;
                }
                let before = store.synced();
                area.sync().unwrap();
                if ends && matches!(cut, Cut::InData) {
                    store.unsync(before);
                    break;
                }
                let named: Vec<u8> =
                    [&[version], &first.to_le_bytes()[..], &count.to_le_bytes()[..]].concat();
                area.write(0, &named).unwrap();
                let before = store.synced();
                area.sync().unwrap();
                if ends {
                    store.unsync(before);
                    break;
                }
                last = version;
            }
            drop(area);
            let mut choices = seed;
            store.cut(|| {
                choices = choices.wrapping_mul(6364136223846793005).wrapping_add(1);
                choices >> 62 != 0
            });
            let area = Area::open(store.clone(), 0, bytes as u64, OWNER).unwrap();
            let (found, first, count) = head(&area);
            let in_head = matches!(cut, Cut::InHead) && found == version;
            prop_assert!(found == last || in_head, "{} after {}", found, last);
            for at in 0..count {
                let mut content = [0; 4096];
                area.read((first + at - 1) % 180 * 4096 + 4096, &mut content).unwrap();
                prop_assert_eq!(content[0], found);
            }
        }
    }
}
