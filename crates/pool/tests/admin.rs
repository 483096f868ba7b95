//! Tenants, volumes, exports and settings: refusals, and survival of the rest.

mod common;

use common::{DRAINED, commit, new_pool, reopen, spec, stores, try_open};
use forebay_pool::{
    ErrorKind, ExportId, MAX_VOLUME_BYTES, NewExport, NewSnapshot, NewVolume, Pool, PoolError,
    Probe, create, destroy, probe,
};
use forebay_qos::budget::{Budget, Burst, LEAST, Rate};
use forebay_qos::stated_budget::Stated;
use forebay_xlate::types::{DeviceIndex, VolumeId};
use std::sync::Arc;
use uuid::Uuid;

fn new(tenant: &str, name: &str, size_bytes: u64, block_bytes: Option<u32>) -> NewVolume {
    NewVolume {
        tenant: tenant.into(),
        name: name.into(),
        size_bytes,
        block_bytes,
        reserved_bytes: 0,
    }
}

fn kind<T>(result: Result<T, PoolError>) -> ErrorKind {
    result.map(|_| ()).unwrap_err().kind
}

fn with_tenant() -> (Vec<Arc<common::CrashStore>>, Pool, forebay_pool::Catalog) {
    let stores = stores(&[64]);
    let (mut pool, catalog) = new_pool(&stores);
    pool.create_tenant("acme", 5).unwrap();
    (stores, pool, catalog)
}

fn export_to(
    pool: &mut Pool,
    volume: VolumeId,
    hosts: Vec<String>,
    any_host: bool,
    now_s: u64,
) -> Result<ExportId, PoolError> {
    let new = NewExport {
        hosts,
        any_host,
        ..NewExport::default()
    };
    pool.create_export_as(volume, new, now_s)
}

#[test]
fn names_are_checked() {
    let (_, mut pool, _) = with_tenant();
    for name in ["", "Big", "a.b", "a b", "-a", "ä", &"x".repeat(64)] {
        assert_eq!(
            kind(pool.create_tenant(name, 0)),
            ErrorKind::Invalid,
            "{name:?}"
        );
        assert_eq!(
            kind(pool.create_volume(&new("acme", name, 512, None), 0)),
            ErrorKind::Invalid
        );
    }
    pool.create_tenant(&"x".repeat(63), 0).unwrap();
    assert_eq!(kind(pool.create_tenant("acme", 0)), ErrorKind::Exists);
}

#[test]
fn sizes_and_blocks_are_checked() {
    let (_, mut pool, _) = with_tenant();
    for (size, block) in [
        (0, None),
        (513, None),
        (512, Some(4096)),
        (4096, Some(1024)),
        (MAX_VOLUME_BYTES + 512, None),
        (u64::MAX, None),
    ] {
        let result = pool.create_volume(&new("acme", "v", size, block), 0);
        assert_eq!(kind(result), ErrorKind::Invalid, "{size} {block:?}");
    }
    assert_eq!(
        kind(pool.create_volume(&new("nobody", "v", 512, None), 0)),
        ErrorKind::NotFound
    );
    let v = pool
        .create_volume(&new("acme", "v", MAX_VOLUME_BYTES, None), 0)
        .unwrap();
    assert_eq!(pool.volume(v).unwrap().block_bytes, 512);
    assert_eq!(
        kind(pool.create_volume(&new("acme", "v", 512, None), 0)),
        ErrorKind::Exists
    );
    assert_eq!(kind(pool.grow_volume(v, 512)), ErrorKind::Invalid);
    assert_eq!(
        kind(pool.grow_volume(v, MAX_VOLUME_BYTES + 512)),
        ErrorKind::Invalid
    );

    // Devices of 4 KiB blocks allow no volume of 512.
    let stores = stores(&[64]);
    let mut spec = spec(&stores, true);
    spec.devices[0].block_bytes = 4096;
    let (mut pool, _) = create(&spec).unwrap();
    pool.create_tenant("acme", 0).unwrap();
    assert_eq!(
        kind(pool.create_volume(&new("acme", "v", 8192, Some(512)), 0)),
        ErrorKind::Invalid
    );
    let v = pool
        .create_volume(&new("acme", "v", 8192, None), 0)
        .unwrap();
    assert_eq!(pool.volume(v).unwrap().block_bytes, 4096);
}

#[test]
fn objects_in_use_are_not_deleted() {
    let (_, mut pool, _) = with_tenant();
    let v = pool
        .create_volume(&new("acme", "v", 65536, None), 0)
        .unwrap();
    assert_eq!(kind(pool.delete_tenant("acme")), ErrorKind::InUse);
    assert_eq!(kind(pool.delete_tenant("nobody")), ErrorKind::NotFound);
    assert_eq!(
        kind(export_to(&mut pool, v, vec![], false, 0)),
        ErrorKind::Invalid
    );
    assert_eq!(
        kind(export_to(&mut pool, v, vec!["me".into()], false, 0)),
        ErrorKind::Invalid
    );
    let host = "nqn.2014-08.org.nvmexpress:uuid:1".to_owned();
    let twice = vec![host.clone(), host.clone()];
    assert_eq!(
        kind(export_to(&mut pool, v, twice, false, 0)),
        ErrorKind::Invalid
    );
    let e = export_to(&mut pool, v, vec![host.clone()], false, 0).unwrap();
    let node: String = pool.info().uuid.to_string().replace('-', "")[..12].into();
    assert_eq!(
        pool.exports().get(e).unwrap().nqn,
        format!("nqn.2026-01.io.forebay:{node}:acme.v")
    );
    assert_eq!(pool.exports().first_of(v).unwrap().hosts, [host]);
    assert_eq!(
        kind(export_to(&mut pool, v, vec![], true, 0)),
        ErrorKind::Exists
    );
    assert_eq!(kind(pool.delete_volume(v, &DRAINED)), ErrorKind::InUse);
    pool.delete_export(e).unwrap();
    assert_eq!(kind(pool.delete_export(e)), ErrorKind::NotFound);
    pool.delete_volume(v, &DRAINED).unwrap();
    assert_eq!(kind(pool.delete_volume(v, &DRAINED)), ErrorKind::NotFound);
    pool.delete_tenant("acme").unwrap();
}

#[test]
fn everything_survives_and_ids_are_not_reused() {
    let (stores, mut pool, catalog) = with_tenant();
    let v = pool
        .create_volume(&new("acme", "v", 65536, None), 7)
        .unwrap();
    let gone = pool
        .create_volume(&new("acme", "gone", 65536, None), 7)
        .unwrap();
    pool.grow_volume(v, 1 << 20).unwrap();
    let e = export_to(&mut pool, v, vec![], true, 8).unwrap();
    pool.set_export_hosts(e, vec!["nqn.2014-08.a:b".into()], false)
        .unwrap();
    commit(&mut pool, &catalog);
    pool.delete_volume(gone, &DRAINED).unwrap();
    pool.set_boot_id("boot-1").unwrap();
    assert_eq!(pool.next_engine_generation().0, 1);
    assert_eq!(pool.next_engine_generation().0, 2);
    commit(&mut pool, &catalog);
    let (info, volume) = (pool.info().clone(), pool.volume(v).unwrap().clone());
    let export = pool.exports().get(e).unwrap().clone();
    let devices = pool.devices().to_vec();
    assert_ne!(volume.uuid, Uuid::default());
    drop((pool, catalog));

    let (mut pool, _) = reopen(&stores, true);
    assert_eq!(pool.volume(v).unwrap(), &volume);
    assert_eq!(pool.volume_by_name("acme", "v").unwrap(), &volume);
    assert_eq!(pool.exports().get(e).unwrap(), &export);
    assert_eq!(pool.volumes().records().count(), 1);
    assert_eq!(pool.tenants().named("acme").unwrap().created_s, 5);
    assert_eq!(
        (pool.info().uuid, &pool.info().name),
        (info.uuid, &info.name)
    );
    assert_eq!(pool.info().boot_id(), Some("boot-1"));
    assert_eq!(pool.devices(), devices);
    assert_eq!(pool.next_engine_generation().0, 3);
    let next = pool
        .create_volume(&new("acme", "next", 65536, None), 7)
        .unwrap();
    assert!(next > gone);
    assert_eq!(pool.volumes().of_tenant(volume.tenant).count(), 2);
}

#[test]
fn pool_creation_spares_existing_data() {
    let stores = stores(&[64]);
    let (pool, catalog) = new_pool(&stores);
    let name = pool.info().name.clone();
    drop((pool, catalog));
    assert!(matches!(
        probe(stores[0].as_ref()).unwrap(),
        Probe::Forebay(_)
    ));
    let error = create(&spec(&stores, true)).map(|_| ()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::InUse);
    assert!(
        error.message.contains(&name) && error.message.contains("--force"),
        "{error}"
    );
    let mut forced = spec(&stores, false);
    forced.force = true;
    create(&forced).unwrap();

    destroy(&[stores[0].clone()]).unwrap();
    assert_eq!(probe(stores[0].as_ref()).unwrap(), Probe::Blank);
    let error = try_open(&stores).map(|_| ()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotFound);
    assert!(error.message.contains("no Forebay label"), "{error}");

    stores[0].rot(70_000);
    assert!(matches!(
        probe(stores[0].as_ref()).unwrap(),
        Probe::Other(_)
    ));
    assert_eq!(kind(create(&spec(&stores, true))), ErrorKind::InUse);
}

#[test]
fn a_creation_that_is_cut_short_leaves_no_pool() {
    let whole = stores(&[64, 64]);
    let _kept = new_pool(&whole);
    let operations = whole[0].operations();
    for cut in 0..operations {
        let stores = stores(&[64, 64]);
        stores[0].fail_after(cut);
        let created = create(&spec(&stores, true)).is_ok();
        let after: Vec<_> = stores
            .iter()
            .map(|store| Arc::new(store.after_kill()))
            .collect();
        match try_open(&after) {
            // Only the last label's copy may be missing.
            Ok((pool, _)) => assert!(created || cut + 4 >= operations, "{cut}: {:?}", pool.info()),
            Err(error) => assert_eq!(error.kind, ErrorKind::NotFound, "{cut}: {error}"),
        }
    }
}

#[test]
fn devices_are_known_by_their_labels() {
    let mut devices = stores(&[64, 32, 48]);
    let (pool, catalog) = new_pool(&devices);
    drop((pool, catalog));
    devices.rotate_left(1);
    let (pool, catalog) = reopen(&devices, true);
    let specs: Vec<&str> = pool
        .devices()
        .iter()
        .map(|device| device.spec.as_str())
        .collect();
    assert_eq!(specs, ["mem:2", "mem:0", "mem:1"]);
    assert_eq!(pool.devices()[1].extents, 32);
    assert_eq!(pool.devices()[1].index, DeviceIndex(1));
    drop((pool, catalog));

    let error = try_open(&devices[..2]).map(|_| ()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotFound);
    assert!(error.message.contains("no copy of the catalog"), "{error}");
    let twice = [devices.clone(), vec![devices[0].clone()]].concat();
    assert_eq!(kind(try_open(&twice)), ErrorKind::Invalid);
    let others = stores(&[64, 32, 48]);
    new_pool(&others);
    let mixed = [others[0].clone(), devices[0].clone(), devices[1].clone()];
    let error = try_open(&mixed).map(|_| ()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid);
    assert!(error.message.contains("one pool at a time"), "{error}");
}

#[test]
fn two_exports_of_a_volume_are_both_shared() {
    use forebay_pool::NewExport;
    use forebay_xlate::boundary::message::FrontendKind;
    let (_, mut pool, _) = with_tenant();
    let v = pool
        .create_volume(&new("acme", "v", 65536, None), 0)
        .unwrap();
    let machine = |shared, socket: &str| NewExport {
        frontend: FrontendKind::VhostUser {
            queues: 1,
            pinned_memory: false,
        },
        socket: Some(socket.into()),
        shared,
        ..NewExport::default()
    };
    let alone = pool.create_export_as(v, machine(false, "/a"), 0).unwrap();
    let second = pool.create_export_as(v, machine(true, "/b"), 0);
    assert_eq!(kind(second), ErrorKind::Exists);
    assert_eq!(
        kind(export_to(&mut pool, v, vec![], true, 0)),
        ErrorKind::Exists
    );
    assert!(pool.set_export_hosts(alone, vec![], true).is_err());
    pool.delete_export(alone).unwrap();
    assert!(pool.exports().first_of(v).is_none());
    // Nobody writes a snapshot.
    let name = "s".to_owned();
    let taken = pool.snapshots().take(&[NewSnapshot { volume: v, name }], 0);
    let taken = taken.unwrap()[0];
    let of_snapshot = ["/a", "/b"].map(|socket| {
        let export = pool.create_export_as(taken, machine(false, socket), 0);
        export.unwrap()
    });
    for export in of_snapshot {
        pool.delete_export(export).unwrap();
    }

    let tcp = NewExport {
        any_host: true,
        shared: true,
        ..NewExport::default()
    };
    let first = pool.create_export_as(v, tcp.clone(), 0).unwrap();
    let nqn = pool.exports().get(first).unwrap().nqn.clone();
    assert_eq!(kind(pool.create_export_as(v, tcp, 0)), ErrorKind::Exists);
    assert_eq!(
        kind(pool.create_export_as(v, machine(false, "/a"), 0)),
        ErrorKind::Exists
    );
    let renamed = NewExport {
        node: Some("other".into()),
        ..machine(true, "/a")
    };
    let second = pool.create_export_as(v, renamed, 0).unwrap();
    assert_eq!(
        pool.exports().get(second).unwrap().nqn,
        nqn,
        "one namespace is in one subsystem"
    );
    assert_eq!(
        kind(pool.create_export_as(v, machine(true, "/a"), 0)),
        ErrorKind::Exists,
        "one socket, one export"
    );
    let shown: Vec<_> = pool
        .exports()
        .of_volume(v)
        .map(|export| export.id)
        .collect();
    assert_eq!(shown, [first, second]);
    pool.delete_export(first).unwrap();
    assert_eq!(pool.exports().first_of(v).unwrap().id, second);
    for bad in [
        NewExport {
            any_host: true,
            ..machine(true, "/c")
        },
        NewExport {
            frontend: FrontendKind::VhostUser {
                queues: 0,
                pinned_memory: false,
            },
            ..machine(true, "/c")
        },
        machine(true, &"x".repeat(108)),
    ] {
        assert_eq!(kind(pool.create_export_as(v, bad, 0)), ErrorKind::Invalid);
    }
}

/// In any order, a tenant's base covers its volumes' bases, and all budgets survive a reopening.
#[test]
fn budgets_are_kept_and_volumes_share_their_tenants() {
    let budget = |iops: u64| Budget {
        base: Rate {
            iops,
            bytes: 1 << 20,
        },
        burst: Rate {
            iops: 100_000,
            bytes: 1 << 30,
        },
        how: Burst::Credit { seconds: 60 },
    };
    let (stores, mut pool, mut catalog) = with_tenant();
    let tenant = pool.tenants().named("acme").unwrap().id;
    let volumes: Vec<_> = ["a", "b", "c"]
        .map(|name| {
            pool.create_volume(&new("acme", name, 4096, None), 0)
                .unwrap()
        })
        .into();
    // The least base counts as none; bytes are no constraint here.
    let of_volume = |iops: u64| Budget {
        base: Rate {
            iops,
            bytes: LEAST.bytes,
        },
        ..budget(iops)
    };
    let (mut whole, mut parts) = (None, [None; 3]);
    let mut random = fastrand::Rng::with_seed(7);
    let mut next = |below: u64| random.u64(..below);
    let mut refused = 0;
    for step in 0..200 {
        let iops = (next(4) > 0).then(|| 10 + next(1000));
        let who = next(4) as usize;
        let (mut new_whole, mut new_parts) = (whole, parts);
        let done = match who {
            3 => {
                new_whole = iops;
                pool.set_tenant_budget(tenant, iops.map(|iops| Stated::of(&budget(iops))))
            }
            volume => {
                new_parts[volume] = iops;
                pool.set_volume_budget(
                    volumes[volume],
                    iops.map(|iops| Stated::of(&of_volume(iops))),
                )
            }
        };
        let counted = |iops: &Option<u64>| iops.filter(|iops| *iops > 10).unwrap_or(0);
        let fits = new_parts.iter().map(counted).sum::<u64>() <= new_whole.unwrap_or(0);
        let shrinks = who < 3 && counted(&new_parts[who]) == 0;
        assert_eq!(
            done.is_ok(),
            fits || shrinks,
            "step {step}: {new_whole:?} {new_parts:?}"
        );
        match done {
            Ok(_) => (whole, parts) = (new_whole, new_parts),
            Err(error) => {
                assert_eq!(error.kind, ErrorKind::Invalid);
                refused += 1;
            }
        }
        if step % 50 == 49 {
            commit(&mut pool, &catalog);
            drop((pool, catalog));
            (pool, catalog) = reopen(&stores, true);
        }
        assert_eq!(pool.budgets().of_tenant(tenant).copied(), whole.map(budget));
        for (volume, part) in volumes.iter().zip(parts) {
            assert_eq!(
                pool.budgets().of_volume(*volume).copied(),
                part.map(of_volume)
            );
        }
    }
    assert!((20..180).contains(&refused), "{refused}");
    for volume in &volumes {
        pool.delete_volume(*volume, &DRAINED).unwrap();
    }
    pool.delete_tenant("acme").unwrap();
    commit(&mut pool, &catalog);
    drop((pool, catalog));
    let (pool, _catalog) = reopen(&stores, true);
    assert_eq!(
        (
            pool.budgets().tenants().count(),
            pool.budgets().volumes().count()
        ),
        (0, 0)
    );
}

#[test]
fn a_function_serves_one_volume_and_keeps_it() {
    let (stores, mut pool, catalog) = with_tenant();
    let [a, b] = ["a", "b"].map(|name| {
        let new = new("acme", name, 65536, None);
        pool.create_volume(&new, 0).unwrap()
    });
    let at = |number| NewExport {
        any_host: true,
        function: Some(number),
        ..NewExport::default()
    };
    let first = pool.create_export_as(a, at(3), 0).unwrap();
    assert_eq!(kind(pool.create_export_as(b, at(3), 0)), ErrorKind::Exists);
    let second = pool.create_export_as(b, at(7), 0).unwrap();
    commit(&mut pool, &catalog);
    drop((pool, catalog));
    let (mut pool, catalog) = reopen(&stores, true);
    let known: Vec<_> = pool.exports().functions().map(|(n, e)| (n, e.id)).collect();
    assert_eq!(known, [(3, first), (7, second)]);
    pool.delete_export(first).unwrap();
    commit(&mut pool, &catalog);
    drop((pool, catalog));
    let (pool, _catalog) = reopen(&stores, true);
    assert!(pool.exports().of_function(3).is_none());
    assert_eq!(pool.exports().of_function(7).unwrap().volume, b);
}
