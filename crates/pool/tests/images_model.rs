//! Random operations on volumes in RBD images, and crashes.

mod common;

use common::{
    DRAINED, commit,
    images::{assert_clean, clients, new, snapshot, world},
    reopen,
};
use forebay_pool::{
    ClientRecord, FaultAnswer, IMAGE_EXTENT_BYTES, ImageRecord, NewImageVolume, Pool,
};
use forebay_xlate::types::{ExtentIndex, VolumeId};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug)]
enum Op {
    Create { tenant: usize, own: bool },
    Snapshot { pick: usize },
    Delete { pick: usize },
    Size { pick: usize, extents: u64 },
    Note { pick: usize, address: u8 },
    Forget { pick: usize, address: u8 },
    Commit,
    Crash,
}

fn op() -> impl Strategy<Value = Op> {
    let pick = || 0usize..16;
    prop_oneof![
        4 => (0usize..2, any::<bool>()).prop_map(|(tenant, own)| Op::Create { tenant, own }),
        3 => pick().prop_map(|pick| Op::Snapshot { pick }),
        4 => pick().prop_map(|pick| Op::Delete { pick }),
        1 => (pick(), 1u64..9).prop_map(|(pick, extents)| Op::Size { pick, extents }),
        3 => (pick(), 0u8..3).prop_map(|(pick, address)| Op::Note { pick, address }),
        3 => (pick(), 0u8..3).prop_map(|(pick, address)| Op::Forget { pick, address }),
        3 => Just(Op::Commit),
        2 => Just(Op::Crash),
    ]
}

type State = (Vec<(VolumeId, u64, ImageRecord)>, Vec<ClientRecord>);

fn state(pool: &Pool) -> State {
    let volumes = pool.volumes().records();
    let images = volumes.map(|record| {
        let image = pool.images().of(record.id).unwrap();
        (record.id, record.size_bytes, image.clone())
    });
    (images.collect(), clients(pool))
}

/// Every image has a place of its own, on a client that has images or sessions.
fn assert_sound(pool: &mut Pool) {
    assert_clean(pool);
    let (images, clients) = state(pool);
    let mut used: BTreeMap<u8, BTreeSet<u32>> = BTreeMap::new();
    for (volume, _, image) in &images {
        assert!(used.entry(image.client.0).or_default().insert(image.span));
        let answer = pool.fault(*volume, ExtentIndex(0), true).unwrap();
        let (FaultAnswer::Mapped { device, extent, .. }
        | FaultAnswer::Shared { device, extent, .. }) = answer
        else {
            panic!("{answer:?}");
        };
        let first = u64::from(image.span) << 24;
        assert_eq!((device, extent.0), (image.client, first));
    }
    for client in &clients {
        let used = used.remove(&client.index.0);
        assert!(used.is_some() || !client.addresses.is_empty(), "{client:?}");
    }
    assert!(used.is_empty(), "without a client: {used:?}");
}

fn apply(pool: &mut Pool, op: &Op, number: usize) {
    let images: Vec<VolumeId> = pool.volumes().records().map(|record| record.id).collect();
    let image = |pick: &usize| images.get(pick % images.len().max(1)).copied();
    let known = clients(pool);
    let client = |pick: &usize| known.get(pick % known.len().max(1)).map(|c| c.index);
    match op {
        Op::Create { tenant, own } => {
            let new = NewImageVolume {
                tenant: ["acme", "beta"][*tenant].into(),
                own_client: *own,
                ..new(&format!("v{number}"))
            };
            pool.create_image_volume(&new, 0).unwrap();
        }
        Op::Snapshot { pick } => {
            let Some(of) = image(pick) else { return };
            let record = pool.volume(of).unwrap();
            if record.is_snapshot() {
                return;
            }
            let tenant = pool.tenants().get(record.tenant).unwrap().name.clone();
            let name = record.name.clone();
            let new = NewImageVolume {
                tenant,
                ..snapshot(of, &name, &format!("s{number}"))
            };
            pool.create_image_volume(&new, 0).unwrap();
        }
        Op::Delete { pick } => {
            if let Some(volume) = image(pick) {
                pool.delete_volume(volume, &DRAINED).unwrap();
            }
        }
        Op::Size { pick, extents } => {
            if let Some(volume) = image(pick) {
                let bytes = extents * IMAGE_EXTENT_BYTES;
                pool.set_image_size(volume, bytes).unwrap();
            }
        }
        Op::Note { pick, address } => {
            if let Some(client) = client(pick) {
                pool.note_client(client, &address.to_string()).unwrap();
            }
        }
        Op::Forget { pick, address } => {
            if let Some(client) = client(pick) {
                pool.forget_clients(client, &[address.to_string()]);
            }
        }
        Op::Commit | Op::Crash => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// After a crash the pool is as it was at the last commit.
    #[test]
    fn images_keep_their_places(ops in prop::collection::vec(op(), 1..60)) {
        let (stores, mut pool, mut catalog) = world();
        commit(&mut pool, &catalog);
        let mut committed = state(&pool);
        for (number, op) in ops.iter().enumerate() {
            apply(&mut pool, op, number);
            assert_sound(&mut pool);
            match op {
                Op::Commit => {
                    commit(&mut pool, &catalog);
                    committed = state(&pool);
                }
                Op::Crash => {
                    drop((pool, catalog));
                    (pool, catalog) = reopen(&stores, true);
                    prop_assert_eq!(&state(&pool), &committed);
                }
                _ => {}
            }
        }
    }
}
