//! Volumes in RBD images: their places, clients and sessions.

mod common;

use common::{
    DRAINED, commit,
    images::{assert_clean, clients, new, snapshot, world},
    new_pool, reopen, stores, try_open,
};
use forebay_pool::{
    Adopted, ClientOwner, DeviceRecord, ErrorKind, FaultAnswer, IMAGE_EXTENT_BYTES,
    MAX_VOLUME_BYTES, NewClone, NewImageVolume, NewSnapshot, NewVolume, Pool, PoolError,
    VolumeSpace,
};
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};
use std::collections::BTreeSet;
use uuid::Uuid;

const CLIENT: DeviceIndex = DeviceIndex(255);
const SPAN: u64 = 1 << 24;

fn place(pool: &Pool, volume: VolumeId) -> (u8, u32) {
    let image = pool.images().of(volume).unwrap();
    (image.client.0, image.span)
}

fn refusal<T>(result: Result<T, PoolError>) -> (ErrorKind, String) {
    let error = result.map(|_| ()).unwrap_err();
    (error.kind, error.message)
}

#[test]
fn images_and_clients_survive() {
    let (stores, mut pool, catalog) = world();
    let a = pool.create_image_volume(&new("a"), 3).unwrap();
    let s = pool
        .create_image_volume(&snapshot(a, "a", "monday"), 4)
        .unwrap();
    let own = NewImageVolume {
        namespace: "n".into(),
        own_client: true,
        ..new("b")
    };
    let b = pool.create_image_volume(&own, 5).unwrap();
    let bs = snapshot(b, "b", "s");
    let bs = NewImageVolume {
        namespace: "n".into(),
        ..bs
    };
    let bs = pool.create_image_volume(&bs, 5).unwrap();
    let other = NewImageVolume {
        cluster: "far".into(),
        ..new("c")
    };
    let c = pool.create_image_volume(&other, 5).unwrap();
    pool.note_client(CLIENT, "10.0.0.1:0/7").unwrap();
    pool.note_client(CLIENT, "10.0.0.1:0/9").unwrap();
    pool.note_client(CLIENT, "10.0.0.1:0/7").unwrap();
    let tenant = pool.tenants().named("acme").unwrap().id;
    let owners: Vec<_> = (pool.images().clients())
        .map(|c| (c.index.0, c.cluster.as_str(), c.owner))
        .collect();
    assert_eq!(
        owners,
        [
            (253, "far", ClientOwner::Tenant(tenant)),
            (254, "ceph", ClientOwner::Volume(b)),
            (255, "ceph", ClientOwner::Tenant(tenant)),
        ]
    );
    let places = [a, s, b, bs, c].map(|volume| place(&pool, volume));
    assert_eq!(places, [(255, 0), (255, 1), (254, 0), (254, 1), (253, 0)]);
    assert_clean(&mut pool);
    commit(&mut pool, &catalog);
    let known = |pool: &Pool| {
        let images = [a, s, b, bs, c].map(|volume| {
            let record = pool.volume(volume).unwrap().clone();
            (record, pool.images().of(volume).cloned())
        });
        (images, clients(pool))
    };
    let before = known(&pool);
    drop((pool, catalog));
    let (mut pool, _catalog) = reopen(&stores, true);
    assert_eq!(known(&pool), before);
    assert_clean(&mut pool);
    let record = pool.volume(s).unwrap();
    assert_eq!(
        (record.name.as_str(), record.is_snapshot()),
        ("a@monday", true)
    );
    assert!(!pool.volume(a).unwrap().is_snapshot());
    let of = |snapshot| pool.images().volume_of("ceph", "rbd", "", "a", snapshot);
    assert_eq!(
        (of(None), of(Some("monday")), of(Some("x"))),
        (Some(a), Some(s), None)
    );
    let addresses = &pool.images().client(CLIENT).unwrap().addresses;
    assert_eq!(addresses[..], ["10.0.0.1:0/7", "10.0.0.1:0/9"]);
}

#[test]
fn the_map_is_one_run_on_the_client() {
    let (stores, mut pool, catalog) = world();
    let a = pool.create_image_volume(&new("a"), 0).unwrap();
    let s = pool.create_image_volume(&snapshot(a, "a", "s"), 0).unwrap();
    commit(&mut pool, &catalog);
    drop((pool, catalog));
    // Before adoption too.
    let (mut pool, _catalog) = try_open(&stores).unwrap();
    for write in [false, true] {
        let answer = pool.fault(a, ExtentIndex(3), write).unwrap();
        let mapped = FaultAnswer::Mapped {
            device: CLIENT,
            extent: ExtentIndex(3),
            count: 8,
            commit_seq: None,
        };
        assert_eq!(answer, mapped);
        let shared = FaultAnswer::Shared {
            device: CLIENT,
            extent: ExtentIndex(SPAN + 10),
            count: 1,
        };
        assert_eq!(pool.fault(s, ExtentIndex(10), write).unwrap(), shared);
        assert!(pool.fault(a, ExtentIndex(11), write).is_err());
    }
    let volumes = pool.volumes();
    let at = |volume, logical, extent, count| {
        volumes.maps_at(
            volume,
            ExtentIndex(logical),
            CLIENT,
            ExtentIndex(extent),
            count,
        )
    };
    assert_eq!(at(a, 2, 2, 5), (true, 5));
    assert_eq!(at(a, 2, 2, u64::MAX), (true, 9));
    assert_eq!(at(s, 2, 2, 5), (false, 5));
    assert_eq!(at(a, 11, 11, 5), (false, 5));
    assert_eq!(at(a, u64::MAX, u64::MAX, 1), (false, 1));
    assert_eq!(volumes.on_device(CLIENT), [a, s]);
    assert_eq!(volumes.on_device(DeviceIndex(0)), []);
    assert_eq!(volumes.devices_of(a), BTreeSet::from([CLIENT]));
    assert_eq!(volumes.space_of(a).unwrap(), VolumeSpace::default());
    assert_eq!(volumes.extent_bytes_of(a).unwrap(), IMAGE_EXTENT_BYTES);
    assert_eq!(volumes.alone(s, 0).unwrap(), (0, None));
    let size_bytes = new("a").size_bytes;
    let mapped = |from| {
        let (ranges, next) = volumes.mapped_bytes(a, from, 1).unwrap();
        assert_eq!(next, None);
        ranges.into_iter().next()
    };
    assert_eq!(mapped(0), Some(0..size_bytes));
    assert_eq!(mapped(5000), Some(5000..size_bytes));
    assert_eq!(mapped(size_bytes), None);
    assert_eq!(mapped(u64::MAX), None);
    assert_eq!(pool.space().owned, 0);
}

#[test]
fn a_grant_is_durable_if_it_is_in_place() {
    let (stores, mut pool, catalog) = world();
    let a = pool.create_image_volume(&new("a"), 0).unwrap();
    let b = pool.create_image_volume(&new("b"), 0).unwrap();
    commit(&mut pool, &catalog);
    drop((pool, catalog));
    let (mut pool, _catalog) = try_open(&stores).unwrap();
    let mut adopt = |volume, logical, device, extent, count| {
        let (logical, extent) = (ExtentIndex(logical), ExtentIndex(extent));
        pool.adopt_grant(volume, logical, device, extent, count, 0)
            .unwrap()
    };
    assert_eq!(adopt(a, 0, CLIENT, 0, 11), Adopted::Durable);
    assert_eq!(adopt(b, 4, CLIENT, SPAN + 4, 2), Adopted::Durable);
    for (volume, logical, device, extent, count) in [
        (a, 0, CLIENT, SPAN, 1),
        (a, 1, CLIENT, 0, 1),
        (a, 0, DeviceIndex(254), 0, 1),
        (a, 0, DeviceIndex(0), 0, 1),
        (a, 0, CLIENT, 0, 12),
        (a, 11, CLIENT, 11, 1),
        (a, u64::MAX, CLIENT, u64::MAX, u64::MAX),
    ] {
        assert_eq!(
            adopt(volume, logical, device, extent, count),
            Adopted::Stale
        );
    }
    let report = pool.finish_adoption(true).unwrap();
    assert_eq!(report, Default::default());
}

#[test]
fn what_ceph_does_is_refused() {
    let (_stores, mut pool, _catalog) = world();
    let a = pool.create_image_volume(&new("a"), 0).unwrap();
    let s = pool.create_image_volume(&snapshot(a, "a", "s"), 0).unwrap();
    let volume = |volume: VolumeId| NewSnapshot {
        volume,
        name: "x".into(),
    };
    let clone = NewClone {
        snapshot: s,
        tenant: "acme".into(),
        name: "x".into(),
        reserved_bytes: 0,
    };
    let refused = [
        refusal(pool.release(a, ExtentIndex(0), 1, &DRAINED)),
        refusal(pool.reserve(a, 1)),
        refusal(pool.map_around(a, ExtentIndex(0), 0..8)),
        refusal(pool.set_volume_reservation(a, 0)),
        refusal(pool.grow_volume(a, 1 << 40)),
        refusal(pool.snapshots().take(&[volume(a)], 0)),
        refusal(pool.snapshots().take(&[volume(s)], 0)),
        refusal(pool.snapshots().clone_snapshot(&clone, 0)),
        refusal(pool.snapshots().roll_back(a, Some(s), &DRAINED)),
        refusal(pool.snapshots().roll_back(a, None, &DRAINED)),
        refusal(pool.snapshots().begin_copy(a, ExtentIndex(0)).map(|_| ())),
        refusal(pool.snapshots().begin_copy(s, ExtentIndex(0)).map(|_| ())),
    ];
    for (kind, message) in refused {
        assert_eq!(kind, ErrorKind::Invalid, "{message}");
        assert!(message.contains("is an RBD image"), "{message}");
    }
    assert_eq!(pool.wants_reserve(a, true), None);
    pool.set_preallocated(a, 5);
    assert_eq!(pool.space().preallocated, 0);
    assert_eq!(pool.commit_mappings(a, u64::MAX, |_| true).unwrap(), 0);
    pool.snapshots().adopt_copy(a, CLIENT, ExtentIndex(0));
    assert!(pool.snapshots().end_copy(a, ExtentIndex(0)).is_err());
    assert_clean(&mut pool);
}

#[test]
fn an_image_is_shown_once() {
    let (_stores, mut pool, _catalog) = world();
    let a = pool.create_image_volume(&new("a"), 0).unwrap();
    let again = NewImageVolume {
        tenant: "beta".into(),
        name: "b".into(),
        ..new("a")
    };
    let (kind, message) = refusal(pool.create_image_volume(&again, 0));
    assert_eq!(kind, ErrorKind::Exists);
    assert!(
        message.contains(r#"volume "a" of tenant "acme""#),
        "{message}"
    );
    let named = NewImageVolume {
        image: "b".into(),
        ..new("a")
    };
    assert_eq!(
        refusal(pool.create_image_volume(&named, 0)).0,
        ErrorKind::Exists
    );
    let elsewhere = [
        ("b", "ceph", "rbd", "n"),
        ("c", "ceph", "p", ""),
        ("d", "far", "rbd", ""),
    ];
    for (name, cluster, ceph_pool, namespace) in elsewhere {
        let new = NewImageVolume {
            name: name.into(),
            cluster: cluster.into(),
            pool: ceph_pool.into(),
            namespace: namespace.into(),
            ..new("a")
        };
        pool.create_image_volume(&new, 0).unwrap();
    }
    let mut monday = snapshot(a, "a", "monday");
    pool.create_image_volume(&monday, 0).unwrap();
    monday.name = "tuesday".into();
    let (kind, message) = refusal(pool.create_image_volume(&monday, 0));
    assert_eq!(kind, ErrorKind::Exists);
    assert!(message.contains(r#"volume "a@monday""#), "{message}");
    assert_clean(&mut pool);
}

#[test]
fn invalid_images_are_refused() {
    let (_stores, mut pool, catalog) = world();
    let a = pool.create_image_volume(&new("a"), 0).unwrap();
    let local = NewVolume {
        tenant: "acme".into(),
        name: "local".into(),
        size_bytes: 1 << 20,
        block_bytes: None,
        reserved_bytes: 0,
    };
    let local = pool.create_volume(&local, 0).unwrap();
    commit(&mut pool, &catalog);
    type Change = fn(&mut NewImageVolume);
    let wrong: [Change; 16] = [
        |new| new.name = "b@c".into(),
        |new| new.image = String::new(),
        |new| new.image = "x".repeat(256),
        |new| new.image = "a/b".into(),
        |new| new.image = "a@b".into(),
        |new| new.image = "a\n".into(),
        |new| new.pool = String::new(),
        |new| new.pool = "a/b".into(),
        |new| new.namespace = "a/b".into(),
        |new| new.cluster = "a/b".into(),
        |new| new.size_bytes = 0,
        |new| new.size_bytes = 513,
        |new| new.size_bytes = MAX_VOLUME_BYTES + 512,
        |new| new.block_bytes = 1024,
        // A snapshot without its volume.
        |new| new.snapshot = Some("s".into()),
        |new| new.snapshot = Some("a@b".into()),
    ];
    for (at, change) in wrong.into_iter().enumerate() {
        let mut new = new("b");
        change(&mut new);
        let kind = refusal(pool.create_image_volume(&new, 0)).0;
        assert_eq!(kind, ErrorKind::Invalid, "{at}");
    }
    let not_snapshots = [
        snapshot(a, "b", "s"),
        snapshot(local, "a", "s"),
        NewImageVolume {
            snapshot: None,
            ..snapshot(a, "a", "s")
        },
        NewImageVolume {
            tenant: "beta".into(),
            ..snapshot(a, "a", "s")
        },
        NewImageVolume {
            name: "a@s".into(),
            ..snapshot(a, "a", "s")
        },
    ];
    for new in not_snapshots {
        let kind = refusal(pool.create_image_volume(&new, 0)).0;
        assert_eq!(kind, ErrorKind::Invalid, "{new:?}");
    }
    assert!(pool.take_batch().unwrap().is_none(), "nothing has changed");
}

#[test]
fn clients_and_spans_are_used_again() {
    let (_stores, mut pool, _catalog) = world();
    let a = pool.create_image_volume(&new("a"), 0).unwrap();
    let b = pool.create_image_volume(&new("b"), 0).unwrap();
    let first = clients(&pool)[0].uuid;
    pool.delete_volume(a, &BTreeSet::from([CLIENT])).unwrap();
    assert_eq!(pool.images().of(a), None);
    let c = pool.create_image_volume(&new("c"), 0).unwrap();
    let d = pool.create_image_volume(&new("d"), 0).unwrap();
    assert_eq!(
        [b, c, d].map(|v| place(&pool, v)),
        [(255, 1), (255, 0), (255, 2)]
    );
    for volume in [b, c, d] {
        assert_eq!(clients(&pool)[0].uuid, first);
        pool.delete_volume(volume, &DRAINED).unwrap();
    }
    assert_eq!(clients(&pool), []);
    let e = pool.create_image_volume(&new("e"), 0).unwrap();
    assert_eq!(place(&pool, e), (255, 0));
    assert_ne!(clients(&pool)[0].uuid, first);
    assert!(!pool.volumes().has_more_to_delete());
    assert_clean(&mut pool);
}

#[test]
fn a_client_stays_while_a_session_may_write() {
    let (stores, mut pool, catalog) = world();
    let a = pool.create_image_volume(&new("a"), 0).unwrap();
    pool.note_client(CLIENT, "10.0.0.1:0/1").unwrap();
    pool.note_client(CLIENT, "10.0.0.1:0/2").unwrap();
    pool.delete_volume(a, &DRAINED).unwrap();
    pool.delete_tenant("acme").unwrap();
    commit(&mut pool, &catalog);
    drop((pool, catalog));
    let (mut pool, catalog) = reopen(&stores, true);
    // Its index stays in use.
    let beta = NewImageVolume {
        tenant: "beta".into(),
        ..new("b")
    };
    let b = pool.create_image_volume(&beta, 0).unwrap();
    assert_eq!(place(&pool, b), (254, 0));
    pool.forget_clients(CLIENT, &["10.0.0.1:0/2".into()]);
    assert_eq!(clients(&pool)[1].addresses, ["10.0.0.1:0/1"]);
    pool.forget_clients(CLIENT, &["10.0.0.1:0/1".into()]);
    assert_eq!(pool.images().client(CLIENT), None);
    pool.forget_clients(DeviceIndex(254), &["10.0.0.1:0/1".into()]);
    assert_eq!(clients(&pool).len(), 1);
    commit(&mut pool, &catalog);
    drop((pool, catalog));
    assert_eq!(clients(&reopen(&stores, true).0).len(), 1);
}

#[test]
fn sessions_have_addresses() {
    let (_stores, mut pool, _catalog) = world();
    pool.create_image_volume(&new("a"), 0).unwrap();
    for address in ["", "a b", "a\n", &"x".repeat(256)] {
        let kind = refusal(pool.note_client(CLIENT, address)).0;
        assert_eq!(kind, ErrorKind::Invalid, "{address:?}");
    }
    let nobody = DeviceIndex(254);
    assert_eq!(
        refusal(pool.note_client(nobody, "a")).0,
        ErrorKind::NotFound
    );
    for number in 0..1024 {
        pool.note_client(CLIENT, &number.to_string()).unwrap();
    }
    pool.note_client(CLIENT, "7").unwrap();
    assert_eq!(
        refusal(pool.note_client(CLIENT, "1024")).0,
        ErrorKind::InUse
    );
}

#[test]
fn an_image_grows_and_shrinks() {
    let (stores, mut pool, catalog) = world();
    let a = pool.create_image_volume(&new("a"), 0).unwrap();
    pool.set_image_size(a, 2 * IMAGE_EXTENT_BYTES).unwrap();
    assert!(pool.fault(a, ExtentIndex(2), true).is_err());
    let held = |pool: &Pool| {
        let one = ExtentIndex(2);
        pool.volumes().maps_at(a, one, CLIENT, one, 1).0
    };
    assert!(!held(&pool));
    for wrong in [0, 513, MAX_VOLUME_BYTES + 512] {
        assert_eq!(refusal(pool.set_image_size(a, wrong)).0, ErrorKind::Invalid);
    }
    pool.set_image_size(a, MAX_VOLUME_BYTES).unwrap();
    commit(&mut pool, &catalog);
    assert!(held(&pool));
    let last = pool.fault(a, ExtentIndex(SPAN - 1), true).unwrap();
    assert!(
        matches!(last, FaultAnswer::Mapped { count: 1, .. }),
        "{last:?}"
    );
    pool.set_image_size(a, MAX_VOLUME_BYTES).unwrap();
    assert!(pool.take_batch().unwrap().is_none());
    let local = NewVolume {
        tenant: "acme".into(),
        name: "local".into(),
        size_bytes: 1 << 20,
        block_bytes: None,
        reserved_bytes: 0,
    };
    let local = pool.create_volume(&local, 0).unwrap();
    assert!(pool.set_image_size(local, 1 << 20).is_err());
    drop((pool, catalog));
    let (mut pool, _catalog) = reopen(&stores, true);
    assert_eq!(pool.volume(a).unwrap().size_bytes, MAX_VOLUME_BYTES);
    assert_clean(&mut pool);
}

fn device(index: u8, block_bytes: u32) -> DeviceRecord {
    DeviceRecord {
        index: DeviceIndex(index),
        uuid: Uuid::new_v4(),
        spec: format!("mem:{index}"),
        extents: 4,
        data_offset_bytes: 1 << 20,
        block_bytes,
        known_zero: true,
    }
}

#[test]
fn clients_and_devices_share_the_indexes() {
    let (_stores, mut pool, _catalog) = world();
    let own = |name: String| NewImageVolume {
        own_client: true,
        ..new(&name)
    };
    for number in (9..=255).rev() {
        let volume = pool.create_image_volume(&own(format!("v{number}")), 0);
        assert_eq!(place(&pool, volume.unwrap()), (number, 0));
    }
    let (kind, message) = refusal(pool.create_image_volume(&own("more".into()), 0));
    assert_eq!(
        (kind, message.contains("247 clients")),
        (ErrorKind::NoSpace, true)
    );
    // An image's block is not the devices' concern.
    for index in 1..9 {
        pool.add_device(device(index, 4096)).unwrap();
    }
    let (kind, message) = refusal(pool.add_device(device(9, 512)));
    assert_eq!((kind, message.contains("client")), (ErrorKind::InUse, true));
    let last = pool.volume_by_name("acme", "v9").unwrap().id;
    pool.delete_volume(last, &DRAINED).unwrap();
    pool.add_device(device(9, 512)).unwrap();
}

#[test]
fn a_client_has_4096_spans() {
    let stores = stores(&[20_000]);
    let (mut pool, _catalog) = new_pool(&stores);
    pool.create_tenant("acme", 0).unwrap();
    let mut last = None;
    for number in 0..4096 {
        last = Some(pool.create_image_volume(&new(&format!("v{number}")), 0));
    }
    assert_eq!(place(&pool, last.unwrap().unwrap()), (255, 4095));
    let (kind, message) = refusal(pool.create_image_volume(&new("more"), 0));
    assert_eq!((kind, message.contains("4096")), (ErrorKind::NoSpace, true));
}
