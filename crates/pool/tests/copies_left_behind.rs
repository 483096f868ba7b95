//! Copies older than an acknowledged commit never become the catalog, and never overwrite a newer,
//! damaged one.

mod common;

use common::{
    pools::{AREA, DEVICE_BYTES, add_volume, create_on, open_on, ready, volumes},
    powercut::Power,
};
use forebay_pool::{Catalog, CopyState, ErrorKind, Label, Pool};

fn pool_of(devices: usize) -> (Power, Pool, Catalog) {
    let power = Power::new(&vec![DEVICE_BYTES; devices]);
    let which: Vec<usize> = (0..devices).collect();
    let (mut pool, catalog) = create_on(&power, &which, false).unwrap();
    for n in 0..20 {
        assert!(add_volume(&mut pool, &catalog, &format!("v{n:02}")));
    }
    (power, pool, catalog)
}

/// One device fails for a while. Then a block of the other one rots, and the first is back.
#[test]
fn a_damaged_newest_copy_is_not_overwritten_by_an_older_one() {
    let mut refused = 0;
    for label_is_told in [false, true] {
        for block in 0..6u64 {
            let (power, mut pool, catalog) = pool_of(2);
            power.stores()[1].set_fail_writes(true);
            for n in 0..5 {
                assert!(add_volume(&mut pool, &catalog, &format!("acked{n}")));
            }
            drop((pool, catalog));
            let power = power.after_kill();
            if !label_is_told {
                // Recovery must not depend on the label.
                let mut label = Label::read(power.stores()[0].as_ref()).unwrap();
                label.epoch = Label::read(power.stores()[1].as_ref()).unwrap().epoch;
                label.write(power.stores()[0].as_ref()).unwrap();
            }
            let at = AREA.start + block * 4096;
            power.stores()[0].flip(at + 100, 0);
            match open_on(&power, &[0, 1]) {
                Ok(opened) => assert_eq!(volumes(&opened.pool).len(), 25, "block {block}"),
                Err(error) => {
                    refused += 1;
                    assert_eq!(error.kind, ErrorKind::Damaged);
                    let message = &error.message;
                    assert!(message.contains("nothing was changed"), "{message}");
                    assert!(message.contains("is damaged"), "{message}");
                    power.stores()[0].flip(at + 100, 0);
                    let opened = open_on(&power, &[0, 1]).unwrap();
                    assert_eq!(volumes(&opened.pool).len(), 25, "block {block}");
                }
            }
        }
    }
    assert!(refused >= 2, "{refused}");
}

/// Both headers of the newest copy are unreadable, but its device's label knows its epoch.
#[test]
fn an_unreadable_newest_copy_is_remembered_by_its_label() {
    let (power, mut pool, catalog) = pool_of(2);
    power.stores()[1].set_fail_writes(true);
    assert!(add_volume(&mut pool, &catalog, "acked"));
    drop((pool, catalog));
    let power = power.after_kill();
    for slot in 0..2 {
        power.stores()[0].flip(AREA.start + slot * 4096 + 100, 0);
    }
    let error = open_on(&power, &[0, 1]).map(|_| ()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Damaged);
    assert!(error.message.contains("was left behind"), "{error}");
}

#[test]
fn a_copy_that_was_left_behind_does_not_open() {
    for third_takes_it in [false, true] {
        let (power, mut pool, catalog) = pool_of(3);
        power.stores()[1].set_fail_writes(true);
        for n in 0..5 {
            assert!(add_volume(&mut pool, &catalog, &format!("acked{n}")));
        }
        if third_takes_it {
            catalog.heal().unwrap();
            let copies = catalog.health().copies;
            let devices: Vec<u8> = copies.iter().map(|copy| copy.device.0).collect();
            assert_eq!(devices, [0, 2], "{copies:?}");
            assert!(copies.iter().all(|copy| copy.state == CopyState::Good));
            assert!(add_volume(&mut pool, &catalog, "whole"));
        }
        let power = power.after_cut(1);
        std::mem::forget((pool, catalog));
        let opened = |which: &[usize]| open_on(&power.after_kill(), which);
        match (opened(&[1, 2]), third_takes_it) {
            (Ok(opened), true) => assert_eq!(volumes(&opened.pool).len(), 26),
            (Err(error), false) => {
                assert_eq!(error.kind, ErrorKind::Damaged);
                assert!(error.message.contains("was left behind"), "{error}");
                assert!(error.message.contains("mem:2"), "{error}");
            }
            (result, _) => panic!("{:?}", result.map(|opened| volumes(&opened.pool))),
        }
        let all = 25 + usize::from(third_takes_it);
        for which in [&[0usize][..], &[0, 1], &[0, 2], &[0, 1, 2]] {
            assert_eq!(volumes(&opened(which).unwrap().pool).len(), all);
        }
    }
}

/// A power cut at every write of the labels.
#[test]
fn a_power_cut_while_writing_labels_is_safe() {
    let mut cuts = 0;
    for cut in 0.. {
        let (power, mut pool, catalog) = pool_of(3);
        power.stores()[1].set_fail_writes(true);
        let generation = |power: &Power| {
            let label = Label::read(power.stores()[2].as_ref()).unwrap();
            (label.generation, label.epoch)
        };
        let before = generation(&power);
        power.fail_after(cut);
        let acked = add_volume(&mut pool, &catalog, "acked");
        std::mem::forget((pool, catalog));
        for seed in 0..4 {
            let after = power.after_cut(seed);
            assert!(generation(&after) == before || generation(&after).0 > before.0);
            let found = volumes(&open_on(&after.after_kill(), &[0, 1, 2]).unwrap().pool).len();
            assert!(
                found == 21 || !acked && found == 20,
                "cut at {cut}: {found}"
            );
            if acked {
                let old = open_on(&after, &[1, 2]).map(|_| ()).unwrap_err();
                assert!(old.message.contains("was left behind"), "{old}");
            }
        }
        if acked && !power.is_cut() {
            break;
        }
        cuts += 1;
    }
    assert!(cuts > 8, "{cuts}");
}

#[test]
fn many_openings_do_not_decide_who_went_on() {
    let (power, pool, catalog) = pool_of(2);
    drop((pool, catalog));
    let (mut pool, catalog, _) = ready(&power, &[1]);
    assert!(add_volume(&mut pool, &catalog, "only1"));
    drop((pool, catalog));
    for _ in 0..40 {
        drop(ready(&power, &[0]));
    }
    let (mut pool, catalog, _) = ready(&power, &[0]);
    assert!(add_volume(&mut pool, &catalog, "only0"));
    drop((pool, catalog));
    let error = open_on(&power, &[0, 1]).map(|_| ()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Damaged);
    assert!(error.message.contains("have diverged"), "{error}");
    // Forty openings alone are one epoch.
    let label = Label::read(power.stores()[0].as_ref()).unwrap();
    assert_eq!(label.epoch.number, 1);
}

#[test]
fn a_device_that_stays_bad_does_not_become_a_contradiction() {
    let (power, mut pool, catalog) = pool_of(2);
    power.stores()[1].set_fail_writes(true);
    assert!(add_volume(&mut pool, &catalog, "alone"));
    for _ in 0..40 {
        catalog.heal().unwrap();
    }
    drop((pool, catalog));
    for _ in 0..40 {
        drop(ready(&power, &[0, 1]));
    }
    power.stores()[1].set_fail_writes(false);
    let opened = open_on(&power, &[0, 1]).unwrap();
    assert_eq!(volumes(&opened.pool).len(), 21);
    assert!(opened.catalog.health().is_whole());
    let label = Label::read(power.stores()[1].as_ref()).unwrap();
    assert_eq!(label.epoch.number, 1);
}
