//! Records that are sound, and records that contradict each other.

use super::*;
use crate::{
    NewDevice, NewVolume, PoolSpec,
    error::ErrorKind,
    extents::space::PoolSettings,
    journal::batch::{Batch, Key},
    open::create::create,
    records::{ClientOwner, ClientRecord, ImageRecord, Layering, TenantId, VolumeRecord},
    store::MemStore,
    volumes::{layers::Place, map::MapRun},
};
use forebay_qos::budget::Budget;

/// Loads 64 extents and these records.
fn load_with(records: Records) -> Result<Pool> {
    let device = NewDevice {
        spec: "mem".into(),
        store: Arc::new(MemStore::new((11 << 20) + (64 << 16))),
        block_bytes: 512,
        known_zero: true,
    };
    let spec = PoolSpec {
        name: "p".into(),
        extent_bytes: 1 << 16,
        devices: vec![device],
        settings: PoolSettings::default(),
        force: false,
        now_s: 0,
    };
    let (mut pool, catalog) = create(&spec).unwrap();
    pool.create_tenant("t", 0).unwrap();
    for name in ["a", "b"] {
        let new = NewVolume {
            tenant: "t".into(),
            name: name.into(),
            size_bytes: 100 << 16,
            block_bytes: None,
            reserved_bytes: 0,
        };
        pool.create_volume(&new, 0).unwrap();
    }
    catalog
        .commit(&pool.take_batch().unwrap().unwrap())
        .unwrap();
    let records = records
        .into_iter()
        .map(|(key, value)| (key, Some(value)))
        .collect();
    catalog
        .commit(&Batch {
            id: pool.journal().open_batch_id(),
            records,
        })
        .unwrap();
    load(&catalog, |_| Ok(()))
}

type Records = Vec<(Key, Vec<u8>)>;

/// The volumes' ids; the tenant has 1.
const A: u64 = 2;
const B: u64 = 3;

fn states(reserved: usize, owned: usize) -> (Key, Vec<u8>) {
    let mut all = vec![0; 64];
    all[..reserved].fill(ExtentState::Reserved as u8);
    all[reserved..reserved + owned].fill(ExtentState::Owned as u8);
    (
        Key::new(Table::States, 0, 0),
        codec::encode_states(&all).unwrap(),
    )
}

fn map(volume: u64, start: u16, count: u16, extent: u64) -> (Key, Vec<u8>) {
    let run = MapRun {
        start,
        count,
        device: DeviceIndex(0),
        extent,
    };
    (
        Key::new(Table::Maps, volume, 0),
        codec::encode_map(&[run]).unwrap(),
    )
}

fn reserved(device: u64, chunk: u64, runs: &[(u64, u64, u64)]) -> (Key, Vec<u8>) {
    let runs: Vec<_> = runs
        .iter()
        .map(|(volume, first, count)| {
            (
                DeviceRun::new(DeviceIndex(0), *first, *count),
                VolumeId(*volume),
            )
        })
        .collect();
    let base = chunk.wrapping_mul(STATE_CHUNK);
    let bytes = codec::encode_reservations(base, &runs).unwrap();
    (Key::new(Table::Reservations, device, chunk), bytes)
}

fn layer(id: u64, map: u64, parent: Option<u64>) -> (Key, Vec<u8>) {
    let record = LayerRecord {
        map: MapId(map),
        parent: parent.map(LayerId),
    };
    (
        Key::new(Table::Layers, id, 0),
        codec::encode(&record).unwrap(),
    )
}

fn above(volume: u64, name: &str, parent: u64) -> (Key, Vec<u8>) {
    let record = VolumeRecord {
        id: VolumeId(volume),
        uuid: Default::default(),
        tenant: TenantId(1),
        name: name.into(),
        size_bytes: 100 << 16,
        block_bytes: 512,
        reserved_bytes: 0,
        created_s: 0,
        layering: Layering {
            parent: Some(LayerId(parent)),
            ..Layering::default()
        },
    };
    let bytes = codec::encode_volume(&record).unwrap();
    (Key::new(Table::Volumes, volume, 0), bytes)
}

fn hidden(map: u64, chunk: u64) -> (Key, Vec<u8>) {
    (
        Key::new(Table::Hidden, map, chunk),
        codec::encode_hidden(&[5; 8]).unwrap(),
    )
}

#[test]
fn contradictions_between_layers_are_damage() {
    let wrong: Vec<(&str, Records)> = vec![
        ("based on layer 9, which", vec![above(A, "a", 9)]),
        ("based on layer 9, which", vec![layer(8, 8, Some(9))]),
        ("or on itself", vec![layer(9, 9, Some(9))]),
        (
            "or on itself",
            vec![layer(8, 8, Some(9)), layer(9, 9, Some(8))],
        ),
        ("needs a layer", vec![layer(9, 9, None), above(A, "", 9)]),
        ("belongs to layer 9 and volume 2", vec![layer(9, A, None)]),
        ("belongs to", vec![layer(8, 9, None), layer(9, 9, None)]),
        ("next id, 4, is in use", vec![layer(9, 9, None)]),
        ("next id, 4, is in use", vec![layer(3, 9, None)]),
        ("map 9, which does not exist", vec![hidden(9, 0)]),
        ("out of range", vec![hidden(A, u64::MAX)]),
        (
            "cannot be read",
            vec![(Key::new(Table::Hidden, A, 0), vec![3, 1])],
        ),
        (
            "two owners",
            vec![
                layer(9, 9, None),
                states(0, 4),
                map(9, 0, 1, 0),
                map(A, 0, 1, 0),
            ],
        ),
        (
            "layer 9 maps extents beyond its end",
            vec![
                layer(9, 9, None),
                states(0, 4),
                (Key::new(Table::Maps, 9, 1 << 50), map(9, 0, 1, 0).1),
            ],
        ),
        (
            "cannot be read",
            vec![(Key::new(Table::Layers, 9, 0), vec![3])],
        ),
    ];
    for (what, records) in wrong {
        let error = load_with(records).map(|_| ()).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Damaged, "{error}");
        assert!(error.message.contains(what), "{what}: {error}");
    }
}

/// Layers as this version writes them, and as deep as they may be.
#[test]
fn sound_layers_are_loaded() {
    let depth = MAX_LAYERS as u64;
    let mut records: Records = (10..10 + depth)
        .map(|id| layer(id, id, (id > 10).then(|| id - 1)))
        .collect();
    let mut info = load_with(Vec::new()).unwrap().info;
    info.next_id = 10_000;
    records.push((Key::new(Table::Meta, 0, 0), codec::encode(&info).unwrap()));
    records.extend([above(A, "a", 9 + depth), above(B, "b", 9 + depth)]);
    records.extend([states(0, 2), map(10, 3, 2, 0), hidden(11, 0), hidden(B, 1)]);
    let mut pool = load_with(records).unwrap();
    pool.finish_adoption(true).unwrap();
    assert_eq!(pool.check().unwrap().problems, []);
    let volume = pool.volumes.get(VolumeId(A)).unwrap();
    assert_eq!(pool.volumes.layers.below(volume).count(), MAX_LAYERS);
    // Layer 11 hides extents 0, 2 and so on.
    let shows = |logical| pool.volumes.layers.place(volume, logical, 1);
    assert!(matches!(shows(3), Place::Shared(_)));
    assert!(matches!(shows(2), Place::Zeros(_)));
}

fn reservation(volume: u64, first: u64, count: u64) -> (Key, Vec<u8>) {
    reserved(0, 0, &[(volume, first, count)])
}

#[test]
fn sound_records_are_loaded_and_leaks_are_counted() {
    let sound = vec![
        states(4, 10),
        reservation(A, 0, 4),
        map(A, 0, 6, 4),
        map(B, 90, 3, 10),
    ];
    let pool = load_with(sound).unwrap();
    assert_eq!(pool.allocator().leaked_extents(), 1);
    assert_eq!(pool.space().owned, 10);
}

fn budget(a: u64, b: u64, iops: u64) -> (Key, Vec<u8>) {
    let mut budget = Budget::unstated();
    budget.base.iops = iops;
    (
        Key::new(Table::Budgets, a, b),
        codec::encode(&budget).unwrap(),
    )
}

#[test]
fn budgets_of_deleted_tenants_and_volumes_are_dropped() {
    let records = vec![
        budget(1, 0, 100),
        budget(A, 1, 50),
        budget(99, 0, 100),
        budget(98, 1, 100),
    ];
    let mut pool = load_with(records).unwrap();
    assert_eq!(pool.budgets().tenants().count(), 1);
    assert_eq!(pool.budgets().of_volume(VolumeId(A)).unwrap().base.iops, 50);
    assert_eq!(pool.budgets().volumes().count(), 1);
    let batch = pool.take_batch().unwrap().unwrap();
    let gone = [
        Key::new(Table::Budgets, 98, 1),
        Key::new(Table::Budgets, 99, 0),
        Key::new(Table::StatedBudgets, 98, 1),
        Key::new(Table::StatedBudgets, 99, 0),
    ];
    assert_eq!(batch.records, gone.map(|key| (key, None)));
}

fn image(volume: u64, name: &str, client: u8, span: u32) -> (Key, Vec<u8>) {
    let record = ImageRecord {
        cluster: "c".into(),
        pool: "rbd".into(),
        namespace: String::new(),
        image: name.into(),
        snapshot: None,
        client: DeviceIndex(client),
        span,
    };
    let bytes = codec::encode(&record).unwrap();
    (Key::new(Table::Images, volume, 0), bytes)
}

fn client(index: u8, record: ClientRecord) -> (Key, Vec<u8>) {
    let bytes = codec::encode(&record).unwrap();
    (Key::new(Table::Clients, u64::from(index), 0), bytes)
}

fn client_of(index: u8) -> ClientRecord {
    ClientRecord {
        index: DeviceIndex(index),
        uuid: Default::default(),
        cluster: "c".into(),
        owner: ClientOwner::Tenant(TenantId(1)),
        addresses: Vec::new(),
    }
}

fn sized(volume: u64, change: impl Fn(&mut VolumeRecord)) -> (Key, Vec<u8>) {
    let record = codec::decode_volume(&above(volume, "a", 9).1).unwrap();
    let mut record = VolumeRecord {
        layering: Layering::default(),
        ..record
    };
    change(&mut record);
    let bytes = codec::encode_volume(&record).unwrap();
    (Key::new(Table::Volumes, volume, 0), bytes)
}

#[test]
fn contradictions_of_images_are_damage() {
    let known = || client(255, client_of(255));
    let with = |change: fn(&mut ClientRecord)| {
        let mut record = client_of(255);
        change(&mut record);
        client(255, record)
    };
    let wrong: Vec<(&str, Records)> = vec![
        ("to volume 9, which", vec![known(), image(9, "r", 255, 0)]),
        (
            "to volume 2, which",
            vec![known(), image(A, "r", 255, 0), sized(A, |v| v.name.clear())],
        ),
        ("client 255, which", vec![image(A, "r", 255, 0)]),
        (
            "client 255, which",
            vec![image(A, "r", 255, 0), with(|c| c.cluster = "d".into())],
        ),
        (
            "beyond the end of its client",
            vec![known(), image(A, "r", 255, 4096)],
        ),
        (
            "the same place",
            vec![known(), image(A, "r", 255, 7), image(B, "q", 255, 7)],
        ),
        (
            "show one image",
            vec![known(), image(A, "r", 255, 7), image(B, "r", 255, 8)],
        ),
        ("not a valid name", vec![known(), image(A, "r/", 255, 0)]),
        (
            "something of the pool",
            vec![
                known(),
                image(A, "r", 255, 0),
                states(0, 4),
                map(A, 0, 1, 0),
            ],
        ),
        (
            "something of the pool",
            vec![
                known(),
                image(A, "r", 255, 0),
                states(4, 0),
                reservation(A, 0, 1),
            ],
        ),
        (
            "something of the pool",
            vec![known(), image(A, "r", 255, 0), hidden(A, 0)],
        ),
        (
            "too large",
            vec![
                known(),
                image(A, "r", 255, 0),
                sized(A, |v| v.size_bytes = MAX_VOLUME_BYTES + 512),
            ],
        ),
        (
            "something of the pool",
            vec![
                known(),
                image(A, "r", 255, 0),
                sized(A, |v| v.reserved_bytes = 512),
            ],
        ),
        (
            "something of the pool",
            vec![
                known(),
                image(A, "r", 255, 0),
                sized(A, |v| v.layering.snapshot_of = Some(VolumeId(1))),
            ],
        ),
        (
            "something of the pool",
            vec![
                known(),
                image(A, "r", 255, 0),
                sized(A, |v| v.layering.map = Some(MapId(1))),
            ],
        ),
        ("device 0 is also a client", vec![client(0, client_of(0))]),
        ("another number", vec![client(254, client_of(255))]),
        (
            "another number",
            vec![(Key::new(Table::Clients, 511, 0), known().1)],
        ),
        (
            "addresses are invalid",
            vec![with(|c| c.addresses = vec!["a b".into()])],
        ),
        (
            "addresses are invalid",
            vec![with(|c| c.addresses = vec!["a".into(); 1025])],
        ),
        (
            "next id, 4, is in use",
            vec![with(|c| c.owner = ClientOwner::Volume(VolumeId(4)))],
        ),
        (
            "cannot be read",
            vec![(Key::new(Table::Images, A, 0), vec![3])],
        ),
    ];
    for (what, records) in wrong {
        let error = load_with(records).map(|_| ()).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Damaged, "{error}");
        assert!(error.message.contains(what), "{what}: {error}");
    }
    let sound = vec![known(), image(A, "r", 255, 4095), image(B, "q", 255, 0)];
    let mut pool = load_with(sound).unwrap();
    pool.finish_adoption(true).unwrap();
    assert_eq!(pool.check().unwrap().problems, []);
}

#[test]
fn contradictions_are_damage() {
    let wrong: Vec<(&str, Records)> = vec![
        (
            "two owners",
            vec![states(0, 10), map(A, 0, 6, 4), map(B, 0, 1, 9)],
        ),
        (
            "two owners",
            vec![states(5, 0), reserved(0, 0, &[(A, 0, 4), (B, 3, 2)])],
        ),
        ("is not Owned", vec![states(4, 0), map(A, 0, 1, 0)]),
        ("is not Owned", vec![map(A, 0, 1, 60)]),
        ("is not Reserved", vec![states(0, 4), reservation(A, 0, 1)]),
        ("does not have", vec![states(0, 64), map(A, 0, 2, 63)]),
        ("does not have", vec![reserved(0, 1, &[(A, 1024, 1)])]),
        ("does not have", vec![reserved(1, 0, &[(A, 0, 1)])]),
        ("no device", vec![reserved(256, 0, &[(A, 0, 1)])]),
        ("out of range", vec![reserved(0, u64::MAX, &[])]),
        ("does not exist", vec![states(0, 4), map(9, 0, 1, 0)]),
        ("does not exist", vec![states(4, 0), reservation(9, 0, 1)]),
        ("beyond its end", vec![states(0, 4), map(A, 99, 2, 0)]),
        (
            "states beyond",
            vec![(Key::new(Table::States, 0, 1), states(0, 0).1)],
        ),
        (
            "states beyond",
            vec![(Key::new(Table::States, 1, 0), states(0, 0).1)],
        ),
        (
            "states beyond",
            vec![(Key::new(Table::States, 0, u64::MAX), states(0, 0).1)],
        ),
        (
            "cannot be read",
            vec![(Key::new(Table::Volumes, 2, 0), vec![1, 2, 3])],
        ),
        (
            "port 1 is numbered 7",
            vec![(
                Key::new(Table::Ports, 1, 0),
                codec::encode(&PortRecord {
                    address: "a:1".into(),
                    port_id: 7,
                    ana: Default::default(),
                    changes: 0,
                })
                .unwrap(),
            )],
        ),
        (
            "which does not exist",
            vec![(
                Key::new(Table::HostReservations, 9, 0),
                codec::encode(&HostReservations::default()).unwrap(),
            )],
        ),
        (
            "too many recent reservations",
            vec![(
                Key::new(Table::HostReservations, A, 0),
                codec::encode(&HostReservations {
                    recent: vec![
                        forebay_xlate::boundary::message::ReserveToken {
                            socket: 1,
                            number: 1
                        };
                        MAX_RECENT + 1
                    ],
                    ..HostReservations::default()
                })
                .unwrap(),
            )],
        ),
        (
            "cannot be read",
            vec![(Key::new(Table::HostReservations, A, 0), vec![3, 0, 1])],
        ),
        (
            "cannot be read",
            vec![(Key::new(Table::Tenants, 1, 0), vec![9])],
        ),
        (
            "cannot be read",
            vec![(Key::new(Table::Budgets, 1, 0), vec![3, 1])],
        ),
        ("the budget 1/2 is invalid", vec![budget(1, 2, 100)]),
        ("the budget 1/0 is invalid", vec![budget(1, 0, 0)]),
        (
            "cannot be read",
            vec![(Key::new(Table::Maps, A, 0), vec![])],
        ),
    ];
    for (what, records) in wrong {
        let error = load_with(records).map(|_| ()).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Damaged, "{error}");
        assert!(error.message.contains(what), "{what}: {error}");
    }
}
