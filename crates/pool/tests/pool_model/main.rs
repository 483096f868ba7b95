//! Random operations, kills and power cuts against a simple model.
//!
//! **Design.** The model is maps and vectors: what each volume maps, what lies on each extent of the
//! device, what the grant table lists, and a copy of the catalog's expected content per batch. After
//! a crash the pool must be exactly one of the two: the last committed batch, or the one being
//! committed. The device keeps every byte ever written (the strictest case), so handing out anything
//! that was not laundered shows at once.
//!
//! **Not here:** device flushes and the engine; later power-cut tests have them.

#[path = "../common/mod.rs"]
mod common;
mod crash;
mod world;

use common::{DRAINED, EXTENT};
use forebay_pool::NewVolume;
use forebay_xlate::types::VolumeId;
use proptest::prelude::*;
use world::{ModelVolume, World};

#[derive(Clone, Debug)]
enum Op {
    Create {
        extents: u64,
    },
    Delete {
        volume: usize,
    },
    Grow {
        volume: usize,
        by: u64,
    },
    Write {
        volume: usize,
        logical: u64,
    },
    Read {
        volume: usize,
        logical: u64,
    },
    ReserveAhead {
        volume: usize,
    },
    Flush {
        volume: usize,
        part: u64,
    },
    Release {
        volume: usize,
        first: u64,
        count: u64,
    },
    Take,
    Commit,
    Launder {
        max: u64,
        fate: u64,
    },
    Crash {
        same_boot: bool,
        power: bool,
        during_commit: Option<u64>,
        seed: u64,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let volume = 0usize..4;
    // Near each other, near a chunk's end, and far away.
    let logical = prop_oneof![0u64..24, 505u64..520, 0u64..1500];
    prop_oneof![
        2 => prop_oneof![1u64..40, 500u64..1500].prop_map(|extents| Op::Create { extents }),
        1 => volume.clone().prop_map(|volume| Op::Delete { volume }),
        1 => (volume.clone(), 0u64..600).prop_map(|(volume, by)| Op::Grow { volume, by }),
        20 => (volume.clone(), logical.clone()).prop_map(|(volume, logical)| Op::Write { volume, logical }),
        4 => (volume.clone(), logical.clone()).prop_map(|(volume, logical)| Op::Read { volume, logical }),
        2 => volume.clone().prop_map(|volume| Op::ReserveAhead { volume }),
        6 => (volume.clone(), 0u64..4).prop_map(|(volume, part)| Op::Flush { volume, part }),
        4 => (volume, logical, 1u64..30).prop_map(|(volume, first, count)| Op::Release { volume, first, count }),
        6 => Just(Op::Take),
        8 => Just(Op::Commit),
        5 => (1u64..20, 0u64..8).prop_map(|(max, fate)| Op::Launder { max, fate }),
        2 => (any::<bool>(), any::<bool>(), prop::option::of(0u64..24), any::<u64>())
            .prop_map(|(same_boot, power, during_commit, seed)| Op::Crash { same_boot, power, during_commit, seed }),
    ]
}

impl World {
    fn step(&mut self, op: Op) {
        match op {
            Op::Create { extents } => {
                if self.volumes.len() >= 4 {
                    return;
                }
                self.names += 1;
                let new = NewVolume {
                    tenant: "t".into(),
                    name: format!("v{}", self.names),
                    size_bytes: extents * EXTENT,
                    block_bytes: None,
                    reserved_bytes: 0,
                };
                let id = self.pool.create_volume(&new, 0).unwrap();
                let known = ModelVolume {
                    extents,
                    ..ModelVolume::default()
                };
                // An id that a crash took back may come again; its grants must not.
                self.table.retain(|(volume, _), _| *volume != id.0);
                assert!(self.volumes.insert(id.0, known).is_none());
            }
            Op::Delete { volume } => {
                let Some(volume) = self.nth(volume) else {
                    return;
                };
                let released = self.pool.delete_volume(VolumeId(volume), &DRAINED).unwrap();
                let known = self.volumes.remove(&volume).unwrap();
                assert_eq!(released.extents, known.map.len() as u64);
                for (logical, place) in known.map {
                    self.free(volume, logical, place);
                }
            }
            Op::Grow { volume, by } => {
                let Some(volume) = self.nth(volume) else {
                    return;
                };
                let known = self.volumes.get_mut(&volume).unwrap();
                known.extents += by;
                self.pool
                    .grow_volume(VolumeId(volume), known.extents * EXTENT)
                    .unwrap();
            }
            Op::Write { volume, logical } => {
                let Some(volume) = self.nth(volume) else {
                    return;
                };
                self.write(volume, logical);
            }
            Op::Read { volume, logical } => {
                let Some(volume) = self.nth(volume) else {
                    return;
                };
                self.read(volume, logical);
            }
            Op::ReserveAhead { volume } => {
                let Some(volume) = self.nth(volume) else {
                    return;
                };
                if let Some(count) = self.pool.wants_reserve(VolumeId(volume)) {
                    assert!(self.pool.reserve(VolumeId(volume), count).unwrap() > 0);
                }
            }
            Op::Flush { volume, part } => {
                let Some(volume) = self.nth(volume) else {
                    return;
                };
                self.flush(volume, part);
            }
            Op::Release {
                volume,
                first,
                count,
            } => {
                let Some(volume) = self.nth(volume) else {
                    return;
                };
                self.release(volume, first, count);
            }
            Op::Take => self.take(),
            Op::Commit => {
                if self.taken.is_empty() {
                    self.take();
                }
                self.commit_one();
            }
            Op::Launder { max, fate } => self.launder(max, fate),
            Op::Crash {
                same_boot,
                power,
                during_commit,
                seed,
            } => {
                self.crash(same_boot, power, during_commit, seed);
            }
        }
        self.check();
    }
}

/// 150 cases, or as many as `PROPTEST_CASES` says.
fn config() -> ProptestConfig {
    let cases = match std::env::var_os("PROPTEST_CASES") {
        Some(_) => ProptestConfig::default().cases,
        None => 150,
    };
    ProptestConfig {
        cases,
        max_shrink_iters: 4000,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn pool_model(ops in prop::collection::vec(op(), 1..160)) {
        let mut world = World::new();
        for op in ops {
            world.step(op);
        }
    }
}
