//! Pools on devices with power cuts, for tests of labels and of the catalog's copies.

use super::powercut::Power;
use forebay_pool::{
    BlockStore, Catalog, NewDevice, NewVolume, OpenDevice, Opened, Pool, PoolSettings, PoolSpec,
    Result, create, open,
};
use std::sync::Arc;

/// A device with a catalog area of 5 MiB.
pub const DEVICE_BYTES: u64 = 24 << 20;
/// The area of a device with only one.
pub const AREA: std::ops::Range<u64> = 1 << 20..6 << 20;

pub fn new_device(power: &Power, at: usize) -> NewDevice {
    NewDevice {
        spec: format!("mem:{at}"),
        store: power.stores()[at].clone(),
        block_bytes: 512,
        known_zero: true,
    }
}

pub fn create_on(power: &Power, which: &[usize], force: bool) -> Result<(Pool, Catalog)> {
    create(&PoolSpec {
        name: "test".into(),
        extent_bytes: 64 << 10,
        devices: which.iter().map(|at| new_device(power, *at)).collect(),
        settings: PoolSettings::default(),
        force,
        now_s: 1,
    })
}

pub fn open_on(power: &Power, which: &[usize]) -> Result<Opened> {
    let devices: Vec<OpenDevice> = which
        .iter()
        .map(|at| OpenDevice {
            spec: format!("mem:{at}"),
            store: power.stores()[*at].clone(),
            forced: false,
        })
        .collect();
    open(&devices)
}

pub fn store(power: &Power, at: usize) -> Arc<dyn BlockStore> {
    power.stores()[at].clone()
}

/// `false` if the commit fails.
pub fn try_commit(pool: &mut Pool, catalog: &Catalog) -> bool {
    match pool.take_batch().unwrap() {
        Some(batch) => {
            let done = catalog.commit(&batch).is_ok();
            if done {
                pool.committed(batch.id()).unwrap();
            }
            done
        }
        None => true,
    }
}

pub fn add_volume(pool: &mut Pool, catalog: &Catalog, name: &str) -> bool {
    if pool.tenants().named("t").is_err() {
        pool.create_tenant("t", 0).unwrap();
    }
    let new = NewVolume {
        tenant: "t".into(),
        name: name.into(),
        size_bytes: 1 << 20,
        block_bytes: None,
        reserved_bytes: 0,
    };
    pool.create_volume(&new, 0).unwrap();
    try_commit(pool, catalog)
}

pub fn volumes(pool: &Pool) -> Vec<String> {
    let mut names: Vec<String> = pool
        .volumes()
        .records()
        .map(|volume| volume.name.clone())
        .collect();
    names.sort();
    names
}

/// Opens for changes.
pub fn ready(power: &Power, which: &[usize]) -> (Pool, Catalog, Vec<String>) {
    let opened = open_on(power, which).unwrap();
    let mut pool = opened.pool;
    pool.finish_adoption(true).unwrap();
    assert!(try_commit(&mut pool, &opened.catalog));
    (pool, opened.catalog, opened.notes)
}
