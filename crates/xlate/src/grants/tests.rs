//! The grant table against a map of single extents, with adoption at any point.

use super::*;
use crate::types::{DeviceIndex, ExtentIndex};
use proptest::prelude::*;

const BOOT: [u8; 16] = [1; 16];
const POOL: [u8; 16] = [2; 16];

fn word(extent: u64) -> Word {
    Word::new(DeviceIndex(0), ExtentIndex(extent), Rights::ReadWrite).unwrap()
}

fn grant(volume: u64, first: u64, count: u64, at: u64) -> Grant {
    Grant {
        volume: VolumeId(volume),
        range: ExtentRange::new(first, count),
        word: word(at),
        epoch: 1,
        commit_sequence: 0,
    }
}

fn table(capacity: usize) -> (tempfile::TempDir, GrantTable) {
    let dir = tempfile::tempdir().unwrap();
    let t = GrantTable::create(&dir.path().join("grants"), capacity, &BOOT, &POOL).unwrap();
    (dir, t)
}

fn flat(t: &GrantTable) -> BTreeMap<(u64, u64), Word> {
    let each = |g: &Grant| {
        let g = *g;
        (0..g.range.count).map(move |i| ((g.volume.0, g.range.first + i), g.word.advance(i)))
    };
    t.iter().flat_map(each).collect()
}

#[test]
fn contiguous_grants_merge_and_split() {
    let (_dir, mut t) = table(16);
    t.insert(grant(1, 0, 4, 100)).unwrap();
    t.insert(grant(1, 4, 4, 104)).unwrap();
    assert_eq!(t.usage().0, 1);
    t.remove(VolumeId(1), ExtentRange::new(2, 2)).unwrap();
    assert_eq!(t.usage().0, 2);
    assert_eq!(t.granted(VolumeId(1), ExtentRange::new(0, 10)).len(), 2);
    assert!(t.covers(VolumeId(1), ExtentRange::new(4, 4), Rights::Read));
    assert!(!t.covers(VolumeId(1), ExtentRange::new(3, 2), Rights::Read));
}

/// A successor adopts each target alone.
#[test]
fn targets_of_copies_do_not_merge() {
    let (_dir, mut t) = table(8);
    for at in 0..2 {
        let volume = copy_target_of(VolumeId(1)).0;
        t.insert(grant(volume, at, 1, at)).unwrap();
    }
    assert_eq!(t.iter().count(), 2);
}

#[test]
fn full_is_said_and_victims_go_round() {
    let (_dir, mut t) = table(5);
    for i in 0..3 {
        t.insert(grant(1, i * 10, 1, i * 50)).unwrap();
    }
    assert_eq!(t.insert(grant(1, 90, 1, 900)), Err(Full));
    let seen: Vec<u64> = (0..4).map(|_| t.victim().unwrap().range.first).collect();
    assert_eq!(seen, [0, 10, 20, 0]);
    let victim = t.victim().unwrap();
    t.remove(victim.volume, victim.range).unwrap();
    t.insert(grant(1, 90, 1, 900)).unwrap();
}

#[test]
fn another_boot_or_pool_is_not_adopted() {
    let (dir, mut t) = table(8);
    t.insert(grant(1, 0, 4, 100)).unwrap();
    let again = || SharedMemory::open(&dir.path().join("grants")).unwrap();
    assert!(
        GrantTable::adopt(again(), &[9; 16], &POOL)
            .unwrap()
            .is_none()
    );
    assert!(
        GrantTable::adopt(again(), &BOOT, &[9; 16])
            .unwrap()
            .is_none()
    );
    let adopted = GrantTable::adopt(again(), &BOOT, &POOL).unwrap().unwrap();
    assert_eq!(flat(&adopted), flat(&t));
}

#[test]
fn a_full_table_splits_nothing() {
    let (_dir, mut t) = table(5);
    t.insert(grant(1, 0, 100, 0)).unwrap();
    for middle in [10, 30, 50, 70] {
        t.remove(VolumeId(1), ExtentRange::new(middle, 1)).unwrap();
    }
    let all = flat(&t);
    assert_eq!(t.remove(VolumeId(1), ExtentRange::new(90, 1)), Err(Full));
    assert_eq!(flat(&t), all, "a refusal changes nothing");
    assert_eq!(t.remove(VolumeId(1), ExtentRange::new(71, 5)), Err(Full));
    t.remove(VolumeId(1), ExtentRange::new(71, 29)).unwrap();
    t.remove(VolumeId(1), ExtentRange::new(5, 1)).unwrap();
}

/// A death between writing the new entry and freeing the old one.
#[test]
fn adoption_takes_the_later_of_two() {
    let (dir, mut t) = table(16);
    t.insert(grant(1, 0, 10, 100)).unwrap();
    t.write(grant(1, 4, 2, 500));
    let memory = SharedMemory::open(&dir.path().join("grants")).unwrap();
    let adopted = GrantTable::adopt(memory, &BOOT, &POOL).unwrap().unwrap();
    let places: Vec<u64> = (0..10)
        .map(|e| flat(&adopted)[&(1, e)].extent().0)
        .collect();
    assert_eq!(places, [100, 101, 102, 103, 500, 501, 106, 107, 108, 109]);
}

proptest! {
    #[test]
    fn grant_table_is_a_map(ops in proptest::collection::vec((0u8..3, 1u64..3, 0u64..40, 1u64..9, 0u64..60), 1..120)) {
        let (dir, mut t) = table(256);
        let mut model: BTreeMap<(u64, u64), Word> = BTreeMap::new();
        for (op, volume, first, count, at) in ops {
            match op {
                0 | 1 => {
                    t.insert(grant(volume, first, count, at)).unwrap();
                    for i in 0..count {
                        model.insert((volume, first + i), word(at + i));
                    }
                }
                _ => {
                    t.remove(VolumeId(volume), ExtentRange::new(first, count)).unwrap();
                    for i in 0..count {
                        model.remove(&(volume, first + i));
                    }
                }
            }
            prop_assert_eq!(&flat(&t), &model);
        }
        let memory = SharedMemory::open(&dir.path().join("grants")).unwrap();
        let adopted = GrantTable::adopt(memory, &BOOT, &POOL).unwrap().unwrap();
        prop_assert_eq!(&flat(&adopted), &model);
    }
}
