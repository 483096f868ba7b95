//! Granting and taking back, and the steps that break each rule.

use super::*;
use crate::table::Table;
use crate::types::ExtentIndex;
use crate::word::EPOCHS;

const V: VolumeId = VolumeId(3);

fn word(device: u8, extent: u64) -> Word {
    Word::new(DeviceIndex(device), ExtentIndex(extent), Rights::ReadWrite).unwrap()
}

fn grant(first: u64, count: u64, word: Word) -> Grant {
    Grant {
        volume: V,
        range: ExtentRange::new(first, count),
        word,
        epoch: 1,
        commit_sequence: 4,
    }
}

fn table() -> (tempfile::TempDir, GrantTable) {
    let dir = tempfile::tempdir().unwrap();
    let table = GrantTable::create(&dir.path().join("g"), 32, &[1; 16], &[2; 16]).unwrap();
    (dir, table)
}

fn all(_: DeviceIndex) -> bool {
    true
}

#[test]
fn a_grant_is_listed_first_and_skips_extents_being_revoked() {
    let (_dir, mut table) = table();
    let mut side = OwnerSide::default();
    let taken = side.begin_take_back(V, ExtentRange::new(6, 2)).unwrap();
    assert_eq!(side.begin_take_back(V, ExtentRange::new(7, 4)), None);
    let said = side.grant(&mut table, grant(4, 8, word(0, 40)), 0).unwrap();
    assert_eq!(said.range, ExtentRange::new(4, 2), "up to what is taken");
    assert!(table.covers(V, said.range, Rights::ReadWrite));
    assert_eq!(
        side.grant(&mut table, grant(7, 1, word(0, 43)), 0),
        Err(Refused::Taken)
    );
    assert_eq!(table.granted(V, ExtentRange::new(6, 20)), []);
    side.let_go(taken);
    side.grant(&mut table, grant(6, 10, Word::HOLE), 0).unwrap();
    let said = side.grant(&mut table, grant(0, 9, word(0, 80)), 0).unwrap();
    assert_eq!(
        said.range,
        ExtentRange::new(0, 4),
        "up to what is elsewhere"
    );
    assert_eq!(
        side.grant(&mut table, grant(5, 2, word(0, 90)), 0),
        Err(Refused::Elsewhere(ExtentRange::new(5, 1)))
    );
    side.grant(&mut table, grant(6, 2, word(0, 42)), 0).unwrap();
    let listed = table.granted(V, ExtentRange::new(4, 6));
    assert_eq!(
        listed.iter().map(|g| (g.range, g.word)).collect::<Vec<_>>(),
        [
            (ExtentRange::new(4, 2), word(0, 40)),
            (ExtentRange::new(6, 2), word(0, 42)),
            (ExtentRange::new(8, 2), Word::HOLE)
        ]
    );
}

#[test]
fn a_new_session_gets_unrevoked_grants_and_counted_devices() {
    let (_dir, mut table) = table();
    let mut side = OwnerSide::default();
    side.grant(&mut table, grant(0, 6, word(1, 10)), 0).unwrap();
    side.grant(&mut table, grant(6, 4, Word::HOLE), 0).unwrap();
    side.begin_take_back(V, ExtentRange::new(2, 2)).unwrap();
    let reported: Vec<_> = side
        .republish(&table)
        .into_iter()
        .map(|g| (g.range.first, g.range.count, Word::from_bits(g.word)))
        .collect();
    assert_eq!(
        reported,
        [
            (0, 2, word(1, 10)),
            (4, 2, word(1, 14)),
            (0, 0, word(1, 10))
        ]
    );
}

#[test]
fn a_range_is_taken_back_in_this_order_and_no_other() {
    let (_dir, mut table) = table();
    let mut side = OwnerSide::default();
    side.grant(&mut table, grant(0, 4, word(1, 10)), 0).unwrap();
    let id = side.begin_take_back(V, ExtentRange::new(1, 2)).unwrap();
    assert!(side.unlisted(id, &table).is_err());
    assert!(side.changed(id).is_err() && side.durable(id).is_err());
    assert!(side.forget(id, &mut table).is_err());
    side.asked(id, &table, 5).unwrap();
    assert!(side.asked(id, &table, 5).is_err());
    side.acknowledged(id, 4);
    assert!(!side.is_drained(id, all), "another engine's word");
    side.gone(id);
    side.acknowledged(id, 5);
    assert!(!side.is_drained(id, all), "it must be asked again");
    side.asked(id, &table, 6).unwrap();
    side.acknowledged(id, 6);
    assert!(!side.is_drained(id, |d| d != DeviceIndex(1)), "not fenced");
    assert!(side.forget(id, &mut table).is_err());
    assert!(side.is_drained(id, all));
    assert!(side.may_change(id).unwrap().is_empty());
    side.changed(id).unwrap();
    assert!(side.forget(id, &mut table).is_err(), "not durable");
    side.durable(id).unwrap();
    side.forget(id, &mut table).unwrap();
    assert!(!table.covers(V, ExtentRange::new(1, 1), Rights::Read));
    assert!(table.covers(V, ExtentRange::new(3, 1), Rights::Read));
    side.let_go(id);
    assert_eq!(side.free_run(V, 0, 9), 9);
}

#[test]
fn an_undrained_revoke_lists_its_hung_devices() {
    let (_dir, mut table) = table();
    let mut side = OwnerSide::default();
    for device in 0..3 {
        let at = u64::from(device);
        side.grant(&mut table, grant(at, 1, word(device, 9)), 0)
            .unwrap();
    }
    let id = side.begin_take_back(V, ExtentRange::new(0, 9)).unwrap();
    side.asked(id, &table, 1).unwrap();
    assert!(side.give_up(id), "the engine must be told");
    side.acknowledged(id, 1);
    assert!(!side.is_drained(id, all), "too late");
    side.settled(id, DeviceIndex(0), 2);
    let unheard = {
        let mut side = side.clone();
        side.settle(id, all);
        side.stage(id).cloned()
    };
    assert_eq!(unheard, Some(Stage::Taken), "perhaps it never heard of it");
    side.settled(id, DeviceIndex(1), 1);
    side.settled(id, DeviceIndex(2), 1);
    side.settle(id, |d| d != DeviceIndex(2));
    let hang: BTreeSet<_> = [DeviceIndex(0), DeviceIndex(2)].into();
    assert_eq!(side.may_change(id).unwrap(), &hang);
    assert!(
        side.forget(id, &mut table).is_err(),
        "only once the quarantine is durable"
    );
    side.changed(id).unwrap();
    side.durable(id).unwrap();
    side.forget(id, &mut table).unwrap();
    let (_dir, mut table) = self::table();
    let mut side = OwnerSide::default();
    side.grant(&mut table, grant(0, 1, word(4, 9)), 0).unwrap();
    let id = side.begin_take_back(V, ExtentRange::new(0, 1)).unwrap();
    side.asked(id, &table, 1).unwrap();
    side.acknowledged(id, 1);
    assert!(!side.give_up(id), "nothing to say");
    side.settle(id, |_| false);
    assert_eq!(side.may_change(id).unwrap(), &[DeviceIndex(4)].into());
}

#[test]
fn nothing_listed_needs_no_revoke() {
    let (_dir, table) = table();
    let mut side = OwnerSide::default();
    let id = side
        .begin_take_back(V, ExtentRange::new(0, u64::MAX))
        .unwrap();
    side.unlisted(id, &table).unwrap();
    assert!(side.may_change(id).unwrap().is_empty());
}

fn preallocated(extent: u64) -> Word {
    Word::preallocated(DeviceIndex(0), ExtentIndex(extent)).unwrap()
}

#[test]
fn a_preallocated_extent_is_published_only_over_holes() {
    let (_dir, mut table) = table();
    let side = OwnerSide::default();
    side.grant(&mut table, grant(2, 4, Word::HOLE), 0).unwrap();
    let said = side
        .grant(&mut table, grant(0, 4, preallocated(40)), 0)
        .unwrap();
    assert_eq!(said.word, preallocated(40).bits());
    assert!(table.covers(V, said.range, Rights::ReadWrite));
    let said = side
        .grant(&mut table, grant(1, 1, preallocated(41)), 0)
        .unwrap();
    assert_eq!(said.word, word(0, 41).bits());
    let said = side
        .grant(&mut table, grant(0, 6, preallocated(40)), 0)
        .unwrap();
    assert_eq!(said.word, word(0, 40).bits());
    assert_eq!(
        side.grant(&mut table, grant(3, 1, preallocated(90)), 0),
        Err(Refused::Elsewhere(ExtentRange::new(3, 1)))
    );
}

#[test]
fn reclaimed_extents_are_unlisted_and_the_rest_stay() {
    let (_dir, mut table) = table();
    let mut side = OwnerSide::default();
    side.grant(&mut table, grant(0, 8, preallocated(40)), 0)
        .unwrap();
    let range = ExtentRange::new(0, 6);
    let id = side.begin_take_back(V, range).unwrap();
    let taken = [1, 3, 6].map(|first| ExtentRange::new(first, 1));
    let parts = side.took_back(id, &taken).unwrap();
    assert_eq!(parts, taken[..2], "not beyond what was asked");
    assert!(side.took_back(id, &taken).is_err());
    side.changed(id).unwrap();
    assert!(side.forget(id, &mut table).is_err());
    side.durable(id).unwrap();
    side.forget(id, &mut table).unwrap();
    side.let_go(id);
    let left = table.granted(V, ExtentRange::new(0, 9));
    let left: Vec<_> = left.iter().map(|g| (g.range, g.word)).collect();
    let part = |first, count| (ExtentRange::new(first, count), word(0, 40 + first));
    assert_eq!(left, [part(0, 1), part(2, 1), part(4, 4)]);
    let id = side.begin_take_back(V, range).unwrap();
    side.asked(id, &table, 1).unwrap();
    assert!(side.took_back(id, &taken).is_err());
}

/// The engine's part, in terms of its table.
fn install(words: &Table, said: GrantOf) {
    words.install(said.range, Word::from_bits(said.word));
}

const WHOLE: ExtentRange = ExtentRange::new(0, 8);

/// Freezes the volume for a snapshot, as an engine and its owner do.
fn freeze(side: &mut OwnerSide, words: &Table, epoch: u16) {
    let id = side.begin_take_back(V, WHOLE).unwrap();
    side.freezing(id, [DeviceIndex(0)].into(), 1).unwrap();
    words.set_epoch(epoch);
    side.acknowledged(id, 1);
    assert!(side.is_drained(id, all));
    side.changed(id).unwrap();
    side.durable(id).unwrap();
    side.let_go(id);
}

#[test]
fn a_freeze_leaves_its_entries_listed() {
    let (_dir, mut table) = table();
    let mut side = OwnerSide::default();
    side.grant(&mut table, grant(0, 4, word(1, 10)), 0).unwrap();
    let id = side.begin_take_back(V, WHOLE).unwrap();
    assert!(side.unlisted(id, &table).is_err());
    let devices: BTreeSet<_> = [DeviceIndex(1), DeviceIndex(4)].into();
    side.freezing(id, devices.clone(), 5).unwrap();
    assert_eq!(side.devices(id), devices);
    assert!(side.freezing(id, devices.clone(), 5).is_err());
    side.gone(id);
    side.freezing(id, devices, 6).unwrap();
    side.acknowledged(id, 6);
    assert!(!side.is_drained(id, |d| d != DeviceIndex(4)), "not fenced");
    assert!(side.is_drained(id, all));
    assert!(side.forget(id, &mut table).is_err());
    side.changed(id).unwrap();
    side.durable(id).unwrap();
    assert!(side.forget(id, &mut table).is_err());
    side.let_go(id);
    assert!(table.covers(V, ExtentRange::new(0, 4), Rights::ReadWrite));
}

#[test]
fn a_freeze_that_leaves_writes_in_flight_changes_nothing() {
    let (_dir, mut table) = table();
    let mut side = OwnerSide::default();
    side.grant(&mut table, grant(0, 4, word(1, 10)), 0).unwrap();
    let id = side.begin_take_back(V, WHOLE).unwrap();
    side.freezing(id, [DeviceIndex(1)].into(), 5).unwrap();
    assert!(side.give_up(id));
    side.heard(id, 5);
    side.settle(id, all);
    assert_eq!(side.may_change(id).unwrap(), &[DeviceIndex(1)].into());
    assert!(side.changed(id).is_err());
    assert!(side.forget(id, &mut table).is_err());
    side.let_go(id);
    let said = side.grant(&mut table, grant(2, 1, word(1, 12)), 0).unwrap();
    assert_eq!(said.word, word(1, 12).bits(), "the right is back");
}

#[test]
fn a_listed_word_of_another_epoch_is_only_for_reading() {
    let (_dir, mut table) = table();
    let side = OwnerSide::default();
    let listed = |table: &GrantTable| {
        let all = table.granted(V, WHOLE);
        all.iter().map(|g| (g.range, g.word)).collect::<Vec<_>>()
    };
    side.grant(&mut table, grant(0, 4, word(0, 40)), 6).unwrap();
    let old = |extent: u64| word(0, 40 + extent).with_epoch(6);
    // Less or as much at the same place.
    let read = grant(0, 4, word(0, 40).read_only());
    for epoch in [6, 7] {
        let said = side.grant(&mut table, read, epoch).unwrap();
        assert_eq!(said.word, read.word.with_epoch(epoch).bits());
        assert_eq!(listed(&table), [(ExtentRange::new(0, 4), old(0))]);
    }
    // Another place, while this one may be written.
    assert_eq!(
        side.grant(&mut table, grant(1, 1, word(0, 90)), 6),
        Err(Refused::Elsewhere(ExtentRange::new(1, 1)))
    );
    // An upgrade, a copy, and a copy ahead of which nothing may be claimed.
    let run = |first| ExtentRange::new(first, 1);
    let said = side.grant(&mut table, grant(0, 1, word(0, 40)), 7).unwrap();
    assert_eq!(said.word, word(0, 40).with_epoch(7).bits());
    side.grant(&mut table, grant(1, 1, word(0, 90)), 7).unwrap();
    let said = side.grant(&mut table, grant(2, 1, preallocated(91)), 7);
    assert_eq!(said.unwrap().word, word(0, 91).with_epoch(7).bits());
    assert_eq!(
        listed(&table),
        [
            (run(0), word(0, 40).with_epoch(7)),
            (run(1), word(0, 90).with_epoch(7)),
            (run(2), word(0, 91).with_epoch(7)),
            (run(3), old(3)),
        ]
    );
    // A hole replaces nothing, and has no epoch.
    assert_eq!(
        side.grant(&mut table, grant(3, 1, Word::HOLE), 7),
        Err(Refused::Elsewhere(run(3)))
    );
    side.grant(&mut table, grant(4, 2, Word::HOLE), 7).unwrap();
    side.grant(&mut table, grant(6, 2, Word::HOLE), 8).unwrap();
    assert_eq!(listed(&table)[4..], [(ExtentRange::new(4, 4), Word::HOLE)]);
}

#[test]
fn successor_gets_no_write_right_back() {
    let (_dir, mut table) = table();
    let mut side = OwnerSide::default();
    let words = Table::new(8);
    side.grant(&mut table, grant(0, 4, word(0, 10)), 0).unwrap();
    side.grant(&mut table, grant(4, 2, preallocated(20)), 0)
        .unwrap();
    freeze(&mut side, &words, 1);
    side.grant(&mut table, grant(2, 1, word(0, 30)), 1).unwrap();
    let successor = Table::new(8);
    successor.set_epoch(1);
    for said in side.republish(&table) {
        install(&successor, said);
    }
    for extent in [0, 1, 3] {
        let read = word(0, 10 + extent).read_only();
        assert_eq!(successor.lookup(extent), read);
    }
    for extent in [4, 5] {
        let read = word(0, 16 + extent).read_only();
        assert_eq!(successor.lookup(extent), read, "perhaps it was claimed");
    }
    assert_eq!(successor.lookup(2), word(0, 30), "copied since");
}

/// An extent is never written while the epochs go round: its word has the first number again.
#[test]
fn snapshot_epoch_wraps() {
    let (_dir, mut table) = table();
    let mut side = OwnerSide::default();
    let words = Table::new(8);
    let said = side.grant(&mut table, grant(0, 4, word(0, 10)), 0).unwrap();
    install(&words, said);
    for epoch in 1..EPOCHS {
        freeze(&mut side, &words, epoch);
        // A write to one extent, which is copied each time.
        let place = word(0, 20 + u64::from(epoch));
        let said = side.grant(&mut table, grant(0, 1, place), epoch).unwrap();
        install(&words, said);
        assert_eq!(words.lookup(0), place);
        assert!((1..4).all(|extent| !words.lookup(extent).writable()));
    }
    // Its next number is the first one: the old words would be writable again.
    words.set_epoch(EPOCHS);
    assert!(words.lookup(3).writable());
    words.set_epoch(EPOCHS - 1);
    // So the owner takes all grants back before.
    let id = side.begin_take_back(V, WHOLE).unwrap();
    side.asked(id, &table, 1).unwrap();
    words.clear(WHOLE);
    side.acknowledged(id, 1);
    assert!(side.is_drained(id, all));
    side.forget(id, &mut table).unwrap();
    side.let_go(id);
    freeze(&mut side, &words, 0);
    assert!((0..8).all(|extent| words.lookup(extent) == Word::MISS));
    assert_eq!(side.republish(&table), []);
    let said = side.grant(&mut table, grant(3, 1, word(0, 9)), 0).unwrap();
    install(&words, said);
    assert_eq!(words.lookup(3), word(0, 9));
}
