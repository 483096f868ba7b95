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
    area.write(0, &[0; 320]).unwrap();
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
                assert_eq!(content[0], logical as u8);
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Blocks are written to fresh places, then block 0 names them (as redb does); the crash loses
    /// any sectors of what is not synced. What block 0 then names can be read, and block 0 is one of
    /// the last two synced or the one being synced.
    #[test]
    fn crash_leaves_a_synced_state(
        rounds in prop::collection::vec((1u64..20, any::<bool>()), 1..12),
        kept in prop::collection::vec(any::<bool>(), 64),
        cut in any::<prop::sample::Index>(),
    ) {
        let bytes = 200 * 4096;
        let store = Arc::new(Crashing(Mutex::new(Journal { synced: vec![0; bytes], writes: vec![] })));
        let area = Area::format(store.clone(), 0, bytes as u64, OWNER).unwrap();
        area.set_len(area.capacity()).unwrap();
        area.sync().unwrap();
        let cut = cut.index(rounds.len());
        let mut next = 1u64;
        let mut last = 0u8;
        for (round, (count, _)) in rounds.iter().enumerate() {
            let version = round as u8 + 1;
            let first = next;
            for _ in 0..*count {
                // Two halves of the area in turn: never what block 0 names.
                area.write(next * 4096, &[version; 4096]).unwrap();
                next = next % 180 + 1;
            }
            let head: Vec<u8> =
                [&[version], &first.to_le_bytes()[..], &count.to_le_bytes()[..]].concat();
            if round == cut && rounds[round].1 {
                break; // Cut before its data is synced: block 0 still names the old ones.
            }
            area.sync().unwrap();
            area.write(0, &head).unwrap();
            if round == cut {
                // Cut within the sync: the writes are there, the sync is not.
                let journal_len = store.0.lock().unwrap().writes.len();
                let synced = store.0.lock().unwrap().synced.clone();
                area.sync().unwrap();
                let full = store.0.lock().unwrap().synced.clone();
                let mut journal = store.0.lock().unwrap();
                journal.synced = synced.clone();
                prop_assert!(journal_len == 0);
                for sector in 0..bytes / 512 {
                    let range = sector * 512..sector * 512 + 512;
                    if synced[range.clone()] != full[range.clone()] {
                        journal.writes.push(((sector * 512) as u64, full[range].to_vec()));
                    }
                }
                break;
            }
            area.sync().unwrap();
            last = version;
        }
        {
            let mut journal = store.0.lock().unwrap();
            let mut at = 0;
            for (offset, data) in std::mem::take(&mut journal.writes) {
                for (sector, piece) in data.chunks(512).enumerate() {
                    if kept[at % kept.len()] {
                        let to = offset as usize + sector * 512;
                        journal.synced[to..to + 512].copy_from_slice(piece);
                    }
                    at += 1;
                }
            }
        }
        let area = Area::open(store, 0, bytes as u64, OWNER).unwrap();
        let mut head = [0; 17];
        area.read(0, &mut head).unwrap();
        prop_assert!(head[0] == last || head[0] == last + 1, "{} after {}", head[0], last);
        if head[0] > 0 {
            let mut block = u64::from_le_bytes(head[1..9].try_into().unwrap());
            for _ in 0..u64::from_le_bytes(head[9..17].try_into().unwrap()) {
                let mut content = [0; 4096];
                area.read(block * 4096, &mut content).unwrap();
                prop_assert_eq!(content[0], head[0]);
                block = block % 180 + 1;
            }
        }
    }
}
