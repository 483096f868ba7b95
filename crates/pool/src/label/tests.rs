//! Tests of labels.

use super::*;
use crate::{error::ErrorKind, store::MemStore};

fn label() -> Label {
    Label {
        format: LabelFormat::Current,
        generation: 3,
        pool_uuid: Uuid::from_bytes([1; 16]),
        pool_name: "main".into(),
        device_uuid: Uuid::from_bytes([2; 16]),
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
        owner: None,
        number: 5,
        is_clean: false,
    }
}

fn labelled() -> MemStore {
    let store = MemStore::new(6 << 20);
    label().write(&store).unwrap();
    store
}

fn break_copy(store: &MemStore, copy: u64, at: usize) {
    let mut block = [0; BLOCK_BYTES];
    store.read_at(copy * SECOND, &mut block).unwrap();
    block[at] ^= 1;
    store.write_at(copy * SECOND, &block).unwrap();
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
    assert!(message.contains("format 5"), "{message}");

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

fn old() -> Label {
    Label {
        format: LabelFormat::Old,
        number: 0,
        ..label()
    }
}

#[test]
fn an_old_label_is_read_and_upgraded() {
    let store = MemStore::new(6 << 20);
    old().write(&store).unwrap();
    assert_eq!(Label::read(&store).unwrap(), old());
    let device = old().device_uuid;
    assert!(!Label::stamp(&store, device, &stamp(9)).unwrap());
    assert_eq!(Label::read(&store).unwrap(), old());
    assert!(Label::upgrade(&store, device).unwrap());
    let label = Label::read(&store).unwrap();
    assert_eq!(label.format, LabelFormat::Current);
    assert_eq!(label.generation, old().generation + 1);
    assert!(!Label::upgrade(&store, device).unwrap());
    assert!(Label::stamp(&store, device, &stamp(9)).unwrap());
    let label = Label::read(&store).unwrap();
    assert_eq!((label.number, label.owner), (9, Some(stamp(9).owner)));
}

#[test]
fn an_upgrade_that_is_cut_short_is_finished() {
    let device = old().device_uuid;
    let after = MemStore::new(6 << 20);
    old().write(&after).unwrap();
    Label::upgrade(&after, device).unwrap();
    for done in 0..3 {
        let store = MemStore::new(6 << 20);
        old().write(&store).unwrap();
        for at in &[SECOND, OLD_SECOND, FIRST][..done] {
            let mut block = [0; BLOCK_BYTES];
            after.read_at(*at, &mut block).unwrap();
            store.write_at(*at, &block).unwrap();
        }
        let label = Label::read(&store).unwrap();
        assert_eq!(label.device_uuid, device, "after {done} writes");
        Label::note_epoch(
            &store,
            device,
            Epoch {
                number: 8,
                ..label.epoch
            },
        )
        .unwrap();
        Label::upgrade(&store, device).unwrap();
        let label = Label::read(&store).unwrap();
        assert_eq!(label.format, LabelFormat::Current, "after {done} writes");
        assert_eq!(label.epoch.number, 8, "after {done} writes");
    }
}

fn stamp(number: u64) -> Stamp {
    Stamp {
        owner: LabelOwner {
            id: Uuid::from_bytes([9; 16]),
            machine: "0123456789abcdef0123456789abcdef".into(),
            host: "alpha".into(),
        },
        number,
        is_clean: true,
    }
}

#[test]
fn foreign_data_over_the_first_label_stays_until_a_repair() {
    let store = labelled();
    let gpt = [0x45; BLOCK_BYTES];
    store.write_at(FIRST, &gpt).unwrap();
    store.write_at(OLD_SECOND, &gpt).unwrap();
    let found = Label::read_copies(&store).unwrap();
    assert!(found.is_first_foreign);
    assert_eq!(found.label, label());
    assert_eq!(Label::read_and_repair(&store).unwrap(), (label(), false));
    Label::stamp(&store, label().device_uuid, &stamp(6)).unwrap();
    assert_eq!(Label::read(&store).unwrap().number, 6);
    let mut first = [0; BLOCK_BYTES];
    store.read_at(FIRST, &mut first).unwrap();
    assert_eq!(first, gpt);
    Label::repair(&store).unwrap();
    assert!(!Label::read_copies(&store).unwrap().is_first_foreign);
}

#[test]
fn a_feature_of_a_later_version_is_refused_by_name() {
    let store = MemStore::new(6 << 20);
    let mut block = LabelBlock::encode(&label()).unwrap();
    block.set_future_feature("time travel");
    for at in [FIRST, SECOND] {
        store.write_at(at, block.as_bytes()).unwrap();
    }
    let error = Label::read(&store).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid);
    assert!(error.message.contains("\"time travel\""), "{error}");
}

#[test]
fn larger_blocks_are_refused_with_both_numbers() {
    label().check_block(512).unwrap();
    let error = label().check_block(4096).unwrap_err();
    assert!(error.message.contains("4096") && error.message.contains("512"));
}
