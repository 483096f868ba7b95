//! The catalog's two copies and their devices: stale pages; missing, moved, foreign and new
//! devices.

mod common;

use common::{
    pools::{
        AREA, DEVICE_BYTES, add_volume, create_on, new_device, open_on, ready, store, try_commit,
        volumes,
    },
    powercut::Power,
};
use forebay_pool::{
    Catalog, CopyState, DeviceHealth, ErrorKind, Label, Pool, PoolError, Probe, add_device,
    destroy, probe,
};
use forebay_xlate::types::DeviceIndex;
use std::collections::BTreeMap;

const D1: DeviceIndex = DeviceIndex(1);

fn two() -> (Power, Pool, Catalog) {
    let power = Power::new(&[DEVICE_BYTES; 2]);
    let (mut pool, catalog) = create_on(&power, &[0, 1], false).unwrap();
    for n in 0..20 {
        assert!(add_volume(&mut pool, &catalog, &format!("v{n:02}")));
    }
    (power, pool, catalog)
}

fn copies(catalog: &Catalog) -> Vec<(u8, CopyState)> {
    let copies = catalog.health().copies;
    copies
        .into_iter()
        .map(|copy| (copy.device.0, copy.state))
        .collect()
}

fn error(result: Result<forebay_pool::Opened, PoolError>) -> PoolError {
    result.map(|_| ()).unwrap_err()
}

/// A lost write that was reported durable: the old page has a valid checksum. One copy is repaired;
/// both are refused.
#[test]
fn stale_page_with_valid_crc_rejected() {
    let (power, mut pool, catalog) = two();
    let blocks = |at: usize| -> BTreeMap<u64, [u8; 4096]> {
        let store = &power.stores()[at];
        let used = store.used_blocks();
        let in_area = used.into_iter().filter(|offset| AREA.contains(offset));
        in_area.map(|offset| (offset, store.peek(offset))).collect()
    };
    let before = [blocks(0), blocks(1)];
    for n in 20..40 {
        assert!(add_volume(&mut pool, &catalog, &format!("v{n:02}")));
    }
    let expected = volumes(&pool);
    std::mem::forget(catalog);
    let after = [blocks(0), blocks(1)];
    let (mut repaired, mut refused, mut stale) = (0, 0, 0);
    for (offset, old) in &before[0] {
        if after[0].get(offset) == Some(old) {
            continue;
        }
        stale += 1;
        for (which, before) in before.iter().enumerate() {
            let power = power.after_kill();
            power.stores()[which].poke(*offset, &before[offset]);
            let opened = open_on(&power, &[0, 1]).unwrap();
            assert_eq!(volumes(&opened.pool), expected, "{offset} on {which}");
            opened.catalog.scrub().unwrap();
            let health = opened.catalog.health();
            assert!(health.is_whole(), "{health:?}");
            repaired += health.repaired_blocks;
            assert_eq!(
                health.repaired_blocks > 0,
                health.notes.iter().any(|n| n.contains("repaired")),
                "{health:?}"
            );
            drop(opened);
            let opened = open_on(&power, &[which]).unwrap();
            assert_eq!(volumes(&opened.pool), expected, "{offset} on {which}");
        }
        let power = power.after_kill();
        for (which, before) in before.iter().enumerate() {
            power.stores()[which].poke(*offset, &before[offset]);
        }
        match open_on(&power, &[0, 1]) {
            Ok(opened) => assert_eq!(volumes(&opened.pool), expected, "{offset} on both"),
            Err(error) => {
                refused += 1;
                assert_eq!(error.kind, ErrorKind::Damaged, "{error}");
            }
        }
    }
    assert!(repaired > 4 && refused > 2, "{stale}: {repaired} {refused}");
}

#[test]
fn a_pool_opens_with_a_device_missing_and_the_copy_comes_back() {
    for gone in [0usize, 1] {
        let here = 1 - gone;
        let (power, pool, catalog) = two();
        let uuid = pool.devices()[gone].uuid;
        assert_eq!(
            copies(&catalog),
            [(0, CopyState::Good), (1, CopyState::Good)]
        );
        drop((pool, catalog));
        let opened = open_on(&power, &[here]).unwrap();
        assert_eq!(opened.indexes, [Some(DeviceIndex(here as u8))]);
        let [missing] = &opened.missing[..] else {
            panic!("{:?}", opened.missing)
        };
        assert_eq!(missing.uuid, uuid);
        assert_eq!(
            (missing.index.0, missing.spec.as_str()),
            (gone as u8, &*format!("mem:{gone}"))
        );
        let health = |at: usize| opened.pool.allocator().device_health(DeviceIndex(at as u8));
        assert_eq!(
            (health(gone), health(here)),
            (DeviceHealth::Missing, DeviceHealth::Online)
        );
        drop(opened);
        let (mut pool, catalog, _) = ready(&power, &[here]);
        assert!(add_volume(&mut pool, &catalog, "alone"));
        assert!(!catalog.health().is_whole());
        assert!(copies(&catalog).contains(&(gone as u8, CopyState::Missing)));
        drop((pool, catalog));
        let opened = open_on(&power, &[gone, here]).unwrap();
        assert!(opened.missing.is_empty());
        assert!(
            opened
                .notes
                .iter()
                .any(|note| note.contains("brought up to date")),
            "{:?}",
            opened.notes
        );
        drop(opened);
        for at in 0..2 {
            let power = power.after_kill();
            assert_eq!(
                open_on(&power, &[at])
                    .unwrap()
                    .pool
                    .volumes()
                    .records()
                    .count(),
                21
            );
        }
        // Each was used without the other: neither is right.
        for at in 0..2 {
            let (mut pool, catalog, _) = ready(&power, &[at]);
            for n in 0..3 {
                assert!(add_volume(&mut pool, &catalog, &format!("only{at}{n}")));
            }
        }
        let error = error(open_on(&power, &[0, 1]));
        assert_eq!(error.kind, ErrorKind::Damaged);
        assert!(error.message.contains("have diverged"), "{error}");
        assert_eq!(
            open_on(&power, &[0])
                .unwrap()
                .pool
                .volumes()
                .records()
                .count(),
            24
        );
    }
}

#[test]
fn a_copy_that_fails_is_left_behind_and_healed() {
    let (power, mut pool, catalog) = two();
    power.stores()[0].set_fail_writes(true);
    assert!(add_volume(&mut pool, &catalog, "degraded"));
    assert!(matches!(
        copies(&catalog)[..],
        [(1, CopyState::Good), (0, CopyState::Failed(_))]
    ));
    for seed in 0..20 {
        let opened = open_on(&power.after_cut(seed), &[0, 1]).unwrap();
        assert_eq!(opened.pool.volumes().records().count(), 21);
    }
    catalog.heal().unwrap();
    assert!(!catalog.health().is_whole());
    power.stores()[0].set_fail_writes(false);
    catalog.heal().unwrap();
    assert!(catalog.health().is_whole());
    assert!(add_volume(&mut pool, &catalog, "whole"));
    for at in 0..2 {
        let opened = open_on(&power.after_cut(at as u64), &[at]).unwrap();
        assert_eq!(opened.pool.volumes().records().count(), 22);
    }
    power.stores()[1].set_fail_reads(true);
    catalog.scrub().unwrap();
    drop((pool, catalog));
    let opened = open_on(&power, &[0, 1]).unwrap();
    assert_eq!(opened.indexes, [Some(DeviceIndex(0)), None]);
    assert_eq!(opened.pool.volumes().records().count(), 22);
}

#[test]
fn devices_that_moved_are_known_and_those_of_two_pools_are_refused() {
    let (power, pool, catalog) = two();
    drop((pool, catalog));
    let swapped = |which: [usize; 2]| {
        let device = |(name, at): (usize, usize)| forebay_pool::OpenDevice {
            spec: format!("moved:{name}"),
            store: power.stores()[at].clone(),
            forced: false,
        };
        forebay_pool::open(
            &which
                .into_iter()
                .enumerate()
                .map(device)
                .collect::<Vec<_>>(),
        )
    };
    let opened = swapped([1, 0]).unwrap();
    assert_eq!(opened.indexes, [Some(D1), Some(DeviceIndex(0))]);
    let specs: Vec<&str> = opened
        .pool
        .devices()
        .iter()
        .map(|d| d.spec.as_str())
        .collect();
    assert_eq!(specs, ["moved:1", "moved:0"]);
    assert_eq!(
        opened
            .notes
            .iter()
            .filter(|note| note.contains("is now at moved:"))
            .count(),
        2
    );
    drop(opened);
    let twice = error(swapped([1, 1]));
    assert_eq!(twice.kind, ErrorKind::Invalid);
    assert!(twice.message.contains("same device"), "{twice}");
    let other = Power::new(&[DEVICE_BYTES]);
    create_on(&other, &[0], false).unwrap();
    let both = [
        ("a", power.stores()[0].clone()),
        ("b", other.stores()[0].clone()),
    ];
    let both: Vec<_> = both
        .map(|(spec, store)| forebay_pool::OpenDevice {
            spec: spec.into(),
            store,
            forced: false,
        })
        .into();
    let mixed = error(forebay_pool::open(&both));
    assert_eq!(mixed.kind, ErrorKind::Invalid);
    assert!(mixed.message.contains("one pool at a time"), "{mixed}");
}

#[test]
fn a_device_that_shrank_or_is_of_another_version_is_named() {
    let (power, pool, catalog) = two();
    drop((pool, catalog));
    power.stores()[1].set_capacity(DEVICE_BYTES / 2);
    let opened = open_on(&power, &[0, 1]).unwrap();
    assert_eq!(opened.missing.len(), 1);
    assert!(
        opened.notes.iter().any(|note| note.contains("truncated")),
        "{:?}",
        opened.notes
    );
    drop(opened);
    power.stores()[0].set_capacity(DEVICE_BYTES / 2);
    let shrunk = error(open_on(&power, &[0, 1]));
    assert_eq!(shrunk.kind, ErrorKind::Damaged);
    assert!(
        shrunk.message.contains("mem:0") && shrunk.message.contains("truncated"),
        "{shrunk}"
    );
    for store in power.stores() {
        store.set_capacity(DEVICE_BYTES);
    }
    for at in 0..2 {
        for copy in [0, 512 << 10] {
            let mut block = power.stores()[at].peek(copy);
            block[16] = 77;
            power.stores()[at].poke(copy, &block);
        }
    }
    let version = error(open_on(&power, &[0, 1]));
    assert_eq!(version.kind, ErrorKind::Invalid);
    assert!(version.message.contains("format 77"), "{version}");
}

#[test]
fn a_device_is_added_and_gets_a_copy() {
    let power = Power::new(&[DEVICE_BYTES; 3]);
    let (mut pool, catalog) = create_on(&power, &[0], false).unwrap();
    assert!(add_volume(&mut pool, &catalog, "v"));
    assert_eq!(
        copies(&catalog),
        [(0, CopyState::Good), (0, CopyState::Good)]
    );
    // Interrupted: labelled, but not in the pool.
    let mut given_up = open_on(&power.after_kill(), &[0]).unwrap();
    drop((pool, catalog));
    given_up.pool.finish_adoption(true).unwrap();
    add_device(
        &mut given_up.pool,
        &given_up.catalog,
        &new_device(&power, 1),
        false,
    )
    .unwrap();
    drop(given_up);
    let opened = open_on(&power, &[0, 1]).unwrap();
    assert_eq!(opened.indexes, [Some(DeviceIndex(0)), None]);
    assert!(
        opened
            .notes
            .iter()
            .any(|note| note.contains("did not finish"))
    );
    assert_eq!(
        copies(&opened.catalog),
        [(0, CopyState::Good), (0, CopyState::Good)]
    );
    let (mut pool, catalog) = (opened.pool, opened.catalog);
    pool.finish_adoption(true).unwrap();
    let index = add_device(&mut pool, &catalog, &new_device(&power, 1), false).unwrap();
    assert_eq!(index, D1);
    assert!(try_commit(&mut pool, &catalog));
    catalog.spread(index, &store(&power, 1)).unwrap();
    assert_eq!(
        copies(&catalog),
        [(0, CopyState::Good), (1, CopyState::Good)]
    );
    let again = add_device(&mut pool, &catalog, &new_device(&power, 1), true).unwrap_err();
    assert_eq!(again.kind, ErrorKind::Exists);
    assert!(add_volume(&mut pool, &catalog, "w"));
    power.stores()[2].poke(70 << 10, &[1; 4096]);
    let used = add_device(&mut pool, &catalog, &new_device(&power, 2), false).unwrap_err();
    assert_eq!(used.kind, ErrorKind::InUse);
    let index = add_device(&mut pool, &catalog, &new_device(&power, 2), true).unwrap();
    assert!(try_commit(&mut pool, &catalog));
    catalog.spread(index, &store(&power, 2)).unwrap();
    drop((pool, catalog));
    // Without the first device the third gets a copy; the first one's is then stale.
    let (mut pool, catalog, _) = ready(&power, &[1, 2]);
    assert_eq!(
        copies(&catalog),
        [(1, CopyState::Good), (2, CopyState::Good)]
    );
    assert!(add_volume(&mut pool, &catalog, "x"));
    drop((pool, catalog));
    let opened = open_on(&power, &[0, 1, 2]).unwrap();
    assert_eq!(volumes(&opened.pool), ["v", "w", "x"]);
    assert!(opened.catalog.health().is_whole());
}

#[test]
fn a_device_without_a_pool_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("foreign.redb");
    let table: redb::TableDefinition<'_, u64, u64> = redb::TableDefinition::new("theirs");
    let database = redb::Database::create(&path).unwrap();
    let transaction = database.begin_write().unwrap();
    transaction.open_table(table).unwrap().insert(1, 2).unwrap();
    transaction.commit().unwrap();
    drop(database);
    let bytes = std::fs::read(&path).unwrap();
    let put = |power: &Power, at: u64| {
        for (index, block) in bytes.chunks_exact(4096).enumerate() {
            let offset = at + index as u64 * 4096;
            if offset + 4096 <= DEVICE_BYTES {
                power.stores()[0].poke(offset, block.try_into().unwrap());
            }
        }
    };
    let power = Power::new(&[DEVICE_BYTES]);
    put(&power, 0);
    let foreign = error(open_on(&power, &[0]));
    assert_eq!(foreign.kind, ErrorKind::NotFound);
    assert!(foreign.message.contains("no Forebay label"), "{foreign}");
    assert!(matches!(
        probe(power.stores()[0].as_ref()).unwrap(),
        Probe::Other(_)
    ));
    let refused = create_on(&power, &[0], false).map(|_| ()).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::InUse);
    create_on(&power, &[0], true).unwrap();
    put(&power, AREA.start);
    for block in 0..2 {
        power.stores()[0].poke((6 << 20) + block * 4096, &[7; 4096]);
    }
    let foreign = error(open_on(&power, &[0]));
    assert_eq!(foreign.kind, ErrorKind::Damaged);
    assert!(
        foreign.message.contains("no good copy of the catalog"),
        "{foreign}"
    );
    destroy(&[store(&power, 0)]).unwrap();
    assert_eq!(
        Label::read(power.stores()[0].as_ref()).unwrap_err().kind,
        ErrorKind::NotFound
    );
}
