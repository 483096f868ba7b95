//! The table, and its two writers at once.

use super::*;
use crate::types::{DeviceIndex, ExtentIndex};
use std::sync::atomic::AtomicBool;

fn word(e: u64) -> Word {
    Word::new(DeviceIndex(1), ExtentIndex(e), Rights::ReadWrite).unwrap()
}

#[test]
fn install_lookup_clear() {
    let t = Table::new(2000);
    assert_eq!(t.lookup(700), Word::MISS);
    t.install(ExtentRange::new(510, 4), word(100));
    assert_eq!(t.lookup(509), Word::MISS);
    assert_eq!(t.lookup(511), word(101));
    assert_eq!(t.lookup(513), word(103));
    assert_eq!(t.lookup(514), Word::MISS);
    t.clear(ExtentRange::new(511, 2));
    assert_eq!(t.lookup(510), word(100));
    assert_eq!(t.lookup(511), Word::MISS);
    assert_eq!(t.lookup(512), Word::MISS);
    t.install(ExtentRange::new(1999, 50), word(1));
    assert_eq!(t.lookup(1999), word(1));
    assert_eq!(t.lookup(2000), Word::MISS);
    assert_eq!(t.lookup(u64::MAX), Word::MISS);
}

#[test]
fn growth_shares_leaves() {
    let old = Table::new(600);
    old.install(ExtentRange::new(3, 1), word(3));
    let new = old.grown(5000);
    assert_eq!(new.lookup(3), word(3));
    new.clear(ExtentRange::new(3, 1));
    assert_eq!(
        old.lookup(3),
        Word::MISS,
        "a reader on the old table must see the revoke"
    );
    new.install(ExtentRange::new(4000, 1), word(9));
    assert_eq!(new.lookup(4000), word(9));
    old.install(ExtentRange::new(3, 1), word(3));
    new.set_epoch(1);
    assert_eq!(
        old.lookup(3),
        word(3).read_only(),
        "a reader on the old table must see the freeze"
    );
}

#[test]
fn a_new_epoch_leaves_words_for_reading() {
    let t = Table::new(8);
    let range = ExtentRange::new(0, 3);
    t.install(range, word(20));
    t.set_epoch(1);
    assert_eq!(t.lookup(1), word(21).read_only());
    t.install(ExtentRange::new(1, 1), word(40).with_epoch(1));
    assert_eq!(t.lookup(1), word(40));
    t.set_epoch(0);
    assert_eq!(t.lookup(0), word(20), "a failed snapshot gives it back");
    assert_eq!(t.lookup(1), word(40).read_only());
    t.set_epoch(EPOCHS + 1);
    assert_eq!((t.epoch(), t.lookup(1)), (1, word(40)));
}

#[test]
fn preallocated_extents_of_another_epoch_are_plain_holes() {
    let t = Table::new(8);
    let all = ExtentRange::new(0, 8);
    t.install(ExtentRange::new(0, 2), preallocated(20));
    t.set_epoch(1);
    assert_eq!(t.lookup(0), Word::HOLE);
    assert_eq!((t.count_preallocated(all), t.take_back(all)), (0, vec![]));
    assert_eq!(
        t.claim(0, preallocated(20)),
        Word::HOLE,
        "a freeze came between lookup and claim"
    );
    t.install(ExtentRange::new(2, 2), preallocated(30).with_epoch(1));
    assert_eq!(t.claim(2, t.lookup(2)), word(30));
    assert_eq!(t.count_preallocated(all), 1);
    assert_eq!(t.take_back(all), [ExtentRange::new(3, 1)]);
    t.set_epoch(0);
    assert_eq!(t.claim(0, t.lookup(0)), word(20));
    assert_eq!(t.lookup(2), word(30).read_only());
}

fn preallocated(e: u64) -> Word {
    Word::preallocated(DeviceIndex(1), ExtentIndex(e)).unwrap()
}

#[test]
fn claimed_extents_stay_and_the_rest_can_be_taken_back() {
    let t = Table::new(2000);
    let range = ExtentRange::new(508, 8);
    t.install(ExtentRange::new(511, 1), Word::HOLE);
    t.install(ExtentRange::new(512, 1), word(700));
    t.install(range, preallocated(100));
    assert_eq!(t.lookup(511), preallocated(103), "a hole gets a place");
    assert_eq!(t.lookup(512), word(700), "what is stored stays");
    assert_eq!(t.claim(509, t.lookup(509)), word(101));
    assert_eq!(t.lookup(509), word(101));
    assert_eq!(
        t.claim(509, preallocated(101)),
        word(101),
        "somebody else has"
    );
    assert_eq!(
        t.claim(508, preallocated(7)),
        preallocated(100),
        "not what is there"
    );
    assert_eq!(t.claim(5, Word::HOLE), Word::MISS);
    t.install(range, preallocated(100));
    assert_eq!(t.lookup(509), word(101), "never ahead again");
    let run = ExtentRange::new;
    assert_eq!(t.count_preallocated(run(0, u64::MAX)), 6);
    assert_eq!(t.count_preallocated(run(509, 2)), 1);
    assert_eq!(t.take_back(range), [run(508, 1), run(510, 2), run(513, 3)]);
    assert_eq!(t.take_back(run(0, u64::MAX)), []);
    assert_eq!(t.lookup(510), Word::MISS);
    assert_eq!(t.claim(510, preallocated(102)), Word::MISS);
    assert_eq!(t.lookup(509), word(101));
}

#[test]
fn a_revoke_clears_preallocated_extents() {
    let t = Table::new(8);
    t.install(ExtentRange::new(0, 2), preallocated(3));
    t.claim(1, preallocated(4));
    t.clear(ExtentRange::new(0, 8));
    assert_eq!((t.lookup(0), t.lookup(1)), (Word::MISS, Word::MISS));
}

struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Reactors claim while the control thread preallocates, grants, takes back and revokes. Each
/// extent is granted once: it must be used or taken back.
#[test]
fn a_preallocated_extent_has_exactly_one_owner() {
    const ROUNDS: usize = 1_000_000;
    const EXTENTS: u64 = 16;
    let table = Table::new(EXTENTS);
    let used: Vec<AtomicBool> = (0..ROUNDS).map(|_| AtomicBool::new(false)).collect();
    let laps = AtomicU64::new(0);
    let over = AtomicBool::new(false);
    let mut taken = Vec::new();
    std::thread::scope(|scope| {
        for reactor in 0..2 {
            let (table, used, laps, over) = (&table, &used, &laps, &over);
            scope.spawn(move || {
                let mut at = reactor;
                while !over.load(Ordering::Relaxed) {
                    at += 1;
                    let seen = table.lookup(at % EXTENTS);
                    if seen.is_preallocated() {
                        // Varies the time between lookup and claim.
                        (0..at % 8).for_each(|_| std::hint::spin_loop());
                        table.claim(at % EXTENTS, seen);
                    }
                    let now = table.lookup(at % EXTENTS);
                    if now.writable() {
                        used[now.extent().0 as usize].store(true, Ordering::SeqCst);
                    }
                    if at % EXTENTS == 0 {
                        laps.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        // Stops the reactors on panic too.
        let _end = Ending(&over);
        for place in 0..ROUNDS as u64 {
            let extent = ExtentRange::new(place % EXTENTS, 1);
            table.install(extent, preallocated(place));
            if place % 4096 == 1 {
                // After three laps, one reactor has claimed this extent.
                let lap = laps.load(Ordering::Relaxed);
                while laps.load(Ordering::Relaxed) < lap + 3 {
                    std::thread::yield_now();
                }
            }
            (0..place % 24).for_each(|_| std::hint::spin_loop());
            match place % 5 {
                0 => table.install(extent, word(place)),
                1 => table.install(extent, preallocated(place)),
                _ => {}
            }
            let took = table.take_back(extent);
            if took.is_empty() {
                assert_eq!(table.lookup(extent.first), word(place));
                table.clear(extent);
            } else {
                assert_ne!(place % 5, 0, "it was granted as stored");
                taken.push(place);
            }
        }
    });
    let used = |place: &&u64| used[**place as usize].load(Ordering::SeqCst);
    assert_eq!(taken.iter().find(used), None, "taken back, and used");
    let preallocated = (0..ROUNDS).filter(|place| place % 5 != 0).count();
    assert!(
        !taken.is_empty() && taken.len() < preallocated,
        "both must win"
    );
}
