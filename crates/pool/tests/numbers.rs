//! Numbers of starts and stops in labels and catalog: outdated devices, two names of a disk,
//! foreign marks.

mod common;

use common::pools::{DEVICE_BYTES, create_on, new_device, open_on};
use common::powercut::Power;
use forebay_pool::{
    BLOCK_BYTES, BlockStore, Catalog, DeviceHealth, ErrorKind, ExtentState, Label, LabelFormat,
    LabelOwner, MemStore, NewDevice, NewVolume, OpenDevice, Opened, Pool, PoolSettings, PoolSpec,
    Stamp, add_device, create, open,
};
use forebay_xlate::types::{DeviceIndex, ExtentIndex};
use std::sync::Arc;
use uuid::Uuid;

const SIZE: usize = DEVICE_BYTES as usize;

fn stores(count: usize) -> Vec<Arc<MemStore>> {
    (0..count).map(|_| Arc::new(MemStore::new(SIZE))).collect()
}

fn new(store: &Arc<MemStore>, name: &str) -> NewDevice {
    NewDevice {
        spec: name.into(),
        store: store.clone(),
        block_bytes: 512,
        known_zero: true,
    }
}

fn make(devices: Vec<NewDevice>, force: bool) -> forebay_pool::Result<(Pool, Catalog)> {
    create(&PoolSpec {
        name: "test".into(),
        extent_bytes: 64 << 10,
        devices,
        settings: PoolSettings::default(),
        force,
        now_s: 1,
    })
}

fn open_all(stores: &[Arc<MemStore>], forced: &[usize]) -> forebay_pool::Result<Opened> {
    let devices: Vec<OpenDevice> = stores
        .iter()
        .enumerate()
        .map(|(at, store)| OpenDevice {
            spec: format!("mem:{at}"),
            store: store.clone(),
            forced: forced.contains(&at),
        })
        .collect();
    open(&devices)
}

fn commit(pool: &mut Pool, catalog: &Catalog) {
    if let Some(batch) = pool.take_batch().unwrap() {
        catalog.commit(&batch).unwrap();
        pool.committed(batch.id()).unwrap();
    }
}

fn stamp(pool: &mut Pool, catalog: &Catalog, is_clean: bool) {
    commit(pool, catalog);
    let stamped = catalog.stamp(&Stamp {
        owner: LabelOwner {
            id: Uuid::from_bytes([1; 16]),
            machine: String::new(),
            host: "here".into(),
        },
        number: pool.info().opens,
        is_clean,
    });
    assert_eq!(stamped.notes, [""; 0]);
    pool.note_stamped(&stamped.devices, pool.info().opens);
    commit(pool, catalog);
}

fn start(stores: &[Arc<MemStore>], forced: &[usize]) -> (Opened, Vec<DeviceIndex>) {
    let mut opened = open_all(stores, forced).unwrap();
    let missing = opened.missing.iter().map(|missing| missing.index).collect();
    opened.pool.finish_adoption(false).unwrap();
    for index in opened.indexes.iter().flatten() {
        opened
            .pool
            .set_device_health(*index, DeviceHealth::Online)
            .unwrap();
    }
    stamp(&mut opened.pool, &opened.catalog, false);
    (opened, missing)
}

fn stop(mut opened: Opened) {
    opened.pool.count_stop();
    stamp(&mut opened.pool, &opened.catalog, true);
}

fn copy(store: &MemStore) -> Arc<MemStore> {
    let copy = MemStore::new(SIZE);
    let mut bytes = vec![0; SIZE];
    store.read_at(0, &mut bytes).unwrap();
    copy.write_at(0, &bytes).unwrap();
    Arc::new(copy)
}

fn write(opened: &mut Opened, name: &str, extents: u64) {
    let pool = &mut opened.pool;
    if pool.tenants().named("t").is_err() {
        pool.create_tenant("t", 0).unwrap();
    }
    let new = NewVolume {
        tenant: "t".into(),
        name: name.into(),
        size_bytes: extents << 16,
        block_bytes: None,
        reserved_bytes: 0,
    };
    let volume = pool.create_volume(&new, 0).unwrap();
    pool.reserve(volume, extents).unwrap();
    commit(&mut opened.pool, &opened.catalog);
    for logical in 0..extents {
        opened
            .pool
            .fault(volume, ExtentIndex(logical), true)
            .unwrap();
    }
    opened
        .pool
        .commit_mappings(volume, u64::MAX, |_| true)
        .unwrap();
    commit(&mut opened.pool, &opened.catalog);
}

fn three() -> Vec<Arc<MemStore>> {
    let stores = stores(3);
    let devices = stores.iter().enumerate();
    let devices = devices.map(|(at, store)| new(store, &format!("mem:{at}")));
    drop(make(devices.collect(), false).unwrap());
    stores
}

#[test]
fn an_older_copy_of_a_device_is_missing_until_it_is_forced() {
    for older in 0..3 {
        let mut stores = three();
        let (mut opened, missing) = start(&stores, &[]);
        assert_eq!(missing, []);
        write(&mut opened, "a", 300);
        stop(opened);
        let old = copy(&stores[older]);
        let (mut opened, missing) = start(&stores, &[]);
        assert_eq!(missing, []);
        write(&mut opened, "b", 300);
        stop(opened);

        stores[older] = old;
        let opened = open_all(&stores, &[]).unwrap();
        let [missing] = &opened.missing[..] else {
            panic!("device {older}: {:?}", opened.missing);
        };
        assert_eq!(usize::from(missing.index.0), older);
        let why = missing.why.as_ref().unwrap();
        assert!(
            why.contains("number 2") && why.contains("number 4"),
            "{why}"
        );
        drop(opened);

        let (opened, missing) = start(&stores, &[older]);
        assert_eq!(missing, [], "device {older}");
        let clean = (0..opened.pool.devices()[older].extents).filter(|extent| {
            let run = forebay_pool::DeviceRun::new(DeviceIndex(older as u8), *extent, 1);
            opened.pool.allocator().extent_state(run) == Some(ExtentState::Clean)
        });
        assert_eq!(clean.count(), 0, "device {older}");
        stop(opened);
        assert_eq!(start(&stores, &[]).1, []);
    }
}

#[test]
fn a_device_that_was_away_is_no_older_copy() {
    let stores = three();
    stop(start(&stores, &[]).0);
    for away in [0, 2] {
        let mut here = stores.clone();
        here.remove(away);
        for _ in 0..2 {
            let (opened, missing) = start(&here, &[]);
            assert_eq!(missing, [DeviceIndex(away as u8)]);
            stop(opened);
        }
        let (opened, missing) = start(&stores, &[]);
        assert_eq!(missing, []);
        stop(opened);
    }
}

#[test]
fn an_older_catalog_is_refused_until_it_is_forced() {
    let mut stores = three();
    stop(start(&stores, &[]).0);
    let old: Vec<_> = stores[..2].iter().map(|store| copy(store)).collect();
    let (mut opened, _) = start(&stores, &[]);
    write(&mut opened, "b", 30);
    stop(opened);
    stores.splice(..2, old);
    let error = open_all(&stores, &[]).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Damaged);
    assert!(
        error.message.contains("start 2") && error.message.contains("start 4"),
        "{error}"
    );
    open_all(&stores, &[0]).unwrap_err();
    let (opened, missing) = start(&stores, &[0, 1]);
    assert_eq!(missing, []);
    assert!(opened.pool.info().opens > 4);
}

#[test]
fn a_start_that_is_cut_short_makes_no_device_old() {
    for after in 0..3 {
        let stores = three();
        stop(start(&stores, &[]).0);
        let mut opened = open_all(&stores, &[]).unwrap();
        opened.pool.finish_adoption(false).unwrap();
        if after > 0 {
            commit(&mut opened.pool, &opened.catalog);
        }
        if after > 1 {
            let number = opened.pool.info().opens;
            let owner = Label::read(stores[0].as_ref()).unwrap().owner.unwrap();
            opened.catalog.stamp(&Stamp {
                owner,
                number,
                is_clean: false,
            });
        }
        drop(opened);
        assert_eq!(start(&stores, &[]).1, [], "after {after} steps");
    }
}

#[test]
fn two_names_of_one_disk_make_no_pool() {
    let stores = stores(2);
    let devices = vec![
        new(&stores[0], "a"),
        new(&stores[1], "b"),
        new(&stores[0], "c"),
    ];
    let error = make(devices, false).unwrap_err();
    assert!(error.message.contains("a and c"), "{error}");
    for store in &stores {
        assert_eq!(
            Label::read(store.as_ref()).unwrap_err().kind,
            ErrorKind::NotFound
        );
    }
    let (mut pool, catalog) = make(vec![new(&stores[0], "a")], false).unwrap();
    let error = add_device(&mut pool, &catalog, &new(&stores[0], "c"), true).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Exists);
}

#[test]
fn force_wipes_both_ends_and_an_opening_neither() {
    let store = stores(1).remove(0);
    let marks = [8192u64, 65536, SIZE as u64 - 4096];
    for at in marks {
        store.write_at(at, &[7; BLOCK_BYTES]).unwrap();
    }
    make(vec![new(&store, "a")], false).unwrap_err();
    drop(make(vec![new(&store, "a")], true).unwrap());
    let mut block = [1; BLOCK_BYTES];
    for at in marks {
        store.read_at(at, &mut block).unwrap();
        assert_eq!(block, [0; BLOCK_BYTES], "{at}");
    }
    let at = SIZE as u64 - 4096;
    store.write_at(at, &[7; BLOCK_BYTES]).unwrap();
    drop(start(std::slice::from_ref(&store), &[]));
    store.read_at(at, &mut block).unwrap();
    assert_eq!(block, [7; BLOCK_BYTES]);
}

#[test]
fn an_old_pool_is_opened_as_it_is_and_upgraded() {
    let power = Power::new(&[DEVICE_BYTES; 2]);
    let (_, catalog) = create_on(&power, &[0, 1], false).unwrap();
    drop(catalog);
    for store in power.stores() {
        let label = Label::read(store.as_ref()).unwrap();
        Label::wipe(store.as_ref()).unwrap();
        Label {
            format: LabelFormat::Old,
            ..label
        }
        .write(store.as_ref())
        .unwrap();
    }
    let _ = new_device(&power, 0);
    let opened = open_on(&power, &[0, 1]).unwrap();
    assert_eq!(opened.catalog.label_troubles().0.len(), 2);
    assert_eq!(opened.catalog.upgrade_labels().unwrap(), 2);
    assert_eq!(opened.catalog.upgrade_labels().unwrap(), 0);
    drop(opened);
    let opened = open_on(&power, &[0, 1]).unwrap();
    assert_eq!(opened.catalog.label_troubles(), (vec![], vec![]));
}
