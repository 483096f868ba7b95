//! A power cut at every write and sync of label and catalog: the pool opens with everything
//! acknowledged.
//!
//! Each run of a life is cut one operation later, with several outcomes; some are cut again during
//! the opening.

mod common;

use common::{
    Choices,
    pools::{DEVICE_BYTES, add_volume, create_on, new_device, open_on, store, try_commit, volumes},
    powercut::Power,
};
use forebay_pool::{Catalog, ErrorKind, Pool, add_device, destroy};
use forebay_xlate::types::DeviceIndex;

/// The acknowledged state of a life.
#[derive(Clone, Debug, Default)]
struct Known {
    created: bool,
    volumes: usize,
    added: bool,
}

fn live(power: &Power, known: &mut Known) -> Option<()> {
    let (mut pool, catalog) = create_on(power, &[0, 1], false).ok()?;
    known.created = true;
    let add = |pool: &mut Pool, catalog: &Catalog, known: &mut Known| {
        let name = format!("v{:02}", known.volumes);
        let done = add_volume(pool, catalog, &name);
        known.volumes += usize::from(done);
        done.then_some(())
    };
    add(&mut pool, &catalog, known)?;
    add(&mut pool, &catalog, known)?;
    drop((pool, catalog));
    let open = |which: &[usize]| {
        let opened = open_on(power, which).ok()?;
        let mut pool = opened.pool;
        pool.finish_adoption(true).unwrap();
        try_commit(&mut pool, &opened.catalog).then_some((pool, opened.catalog))
    };
    let (mut pool, catalog) = open(&[1])?;
    add(&mut pool, &catalog, known)?;
    drop((pool, catalog));
    let (mut pool, catalog) = open(&[0, 1])?;
    add(&mut pool, &catalog, known)?;
    let index = add_device(&mut pool, &catalog, &new_device(power, 2), false).ok()?;
    if !try_commit(&mut pool, &catalog) {
        return None;
    }
    known.added = true;
    catalog.spread(index, &store(power, 2)).ok()?;
    drop((pool, catalog));
    let (mut pool, catalog) = open(&[1, 2])?;
    add(&mut pool, &catalog, known)?;
    drop((pool, catalog));
    let (mut pool, catalog) = open(&[0, 1, 2])?;
    add(&mut pool, &catalog, known)?;
    (!power.is_cut()).then_some(())
}

/// Checks the state after a cut, and that the pool is usable.
fn check(power: &Power, known: &Known, what: &str) {
    let opened = match open_on(power, &[0, 1, 2]) {
        Ok(opened) => opened,
        Err(error) => {
            assert!(!known.created, "{what}: {error}");
            let kinds = [ErrorKind::NotFound, ErrorKind::Damaged];
            assert!(kinds.contains(&error.kind), "{what}: {error}");
            return;
        }
    };
    let found = volumes(&opened.pool).len();
    assert!(
        found == known.volumes || found == known.volumes + 1,
        "{what}: {found} volumes, {known:?}"
    );
    if known.added {
        assert_eq!(opened.indexes[2], Some(DeviceIndex(2)), "{what}");
    }
    if known.created {
        assert!(opened.missing.is_empty(), "{what}: {:?}", opened.missing);
    }
    let (mut pool, catalog) = (opened.pool, opened.catalog);
    pool.finish_adoption(true).unwrap();
    assert!(add_volume(&mut pool, &catalog, "after"), "{what}");
    if known.created {
        assert!(
            catalog.health().is_whole(),
            "{what}: {:?}",
            catalog.health()
        );
    }
}

#[test]
fn the_power_cut_at_every_write_and_sync() {
    let mut choices = Choices::with_seed(11);
    let mut cut = 0;
    loop {
        let power = Power::new(&[DEVICE_BYTES; 3]);
        power.fail_after(cut);
        let mut known = Known::default();
        let done = live(&power, &mut known).is_some();
        let outcomes = if power.cut_in_sync() { 4 } else { 2 };
        for nth in 0..outcomes {
            let seed = choices.u64(..);
            let after = power.after_cut(seed);
            let what = format!("cut at {cut}, outcome {nth} (seed {seed})");
            if nth % 2 == 0 {
                after.fail_after(choices.u64(..40));
                if let Ok(opened) = open_on(&after, &[0, 1, 2]) {
                    drop(opened);
                }
                let again = after.after_cut(choices.u64(..));
                check(&again, &known, &format!("{what}, and in opening"));
            } else {
                check(&after, &known, &what);
            }
        }
        check(&power.after_kill(), &known, &format!("killed at {cut}"));
        if done {
            break;
        }
        cut += 1;
    }
    assert!(cut > 200, "only {cut} operations");
}

/// A second destruction finishes an interrupted one.
#[test]
fn destruction_cut_anywhere() {
    let mut choices = Choices::with_seed(5);
    let whole = Power::new(&[DEVICE_BYTES; 2]);
    let (mut pool, catalog) = create_on(&whole, &[0, 1], false).unwrap();
    assert!(add_volume(&mut pool, &catalog, "v"));
    drop((pool, catalog));
    for cut in 0.. {
        let power = whole.after_kill();
        power.fail_after(cut);
        let stores = [store(&power, 0), store(&power, 1)];
        let done = destroy(&stores).is_ok();
        for _ in 0..4 {
            let after = power.after_cut(choices.u64(..));
            match open_on(&after, &[0, 1]) {
                Ok(opened) => {
                    assert!(!done, "it was destroyed");
                    assert_eq!(volumes(&opened.pool), ["v"], "cut at {cut}");
                }
                Err(error) => assert!(
                    matches!(error.kind, ErrorKind::NotFound | ErrorKind::Damaged),
                    "cut at {cut}: {error}"
                ),
            }
            destroy(&[store(&after, 0), store(&after, 1)]).unwrap();
            let gone = open_on(&after, &[0, 1]).map(|_| ()).unwrap_err();
            assert_eq!(gone.kind, ErrorKind::NotFound);
        }
        if done {
            assert!(cut > 4);
            break;
        }
    }
}
