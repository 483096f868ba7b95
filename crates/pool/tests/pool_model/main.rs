//! Random operations, kills and power cuts against a simple model.
//!
//! The model has maps, the possible values of each block (`tenant`), devices with a volatile cache
//! (`disk`), the grant table, and each batch's expected catalog. After a crash the pool must match
//! the last committed batch or the one being committed. In addition:
//! - an acknowledged flush survives;
//! - a block is old, new, or zero if never flushed;
//! - tenants never see other tenants' data;
//! - nothing written is lost in the same boot;
//! - a snapshot keeps its content; a shared extent is freed once no volume shows it;
//! - the pool opens and passes its own check.
//!
//! A failure names its seed: `POOL_MODEL_SEED=<seed>` runs that case alone. `POOL_MODEL_CASES` sets
//! the number of cases, `POOL_MODEL_FIRST` the first seed.

#[path = "../common/mod.rs"]
mod common;
mod crash;
mod disk;
mod frees;
mod layers;
mod moves;
mod tenant;
mod world;

use proptest::{
    prelude::*,
    test_runner::{RngAlgorithm, TestRng, TestRunner},
};
use world::World;

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Create {
        extents: u64,
        reserved: u64,
    },
    Delete {
        volume: usize,
        hanging: u8,
    },
    DeleteMore,
    Grow {
        volume: usize,
        by: u64,
    },
    Reserve {
        volume: usize,
        extents: u64,
    },
    Write {
        volume: usize,
        logical: u64,
        sectors: u8,
    },
    WriteAround {
        volume: usize,
        logical: u64,
        window: u64,
        sectors: u8,
    },
    Read {
        volume: usize,
        logical: u64,
    },
    ReservePreallocated {
        volume: usize,
    },
    ReturnIdle,
    Flush {
        volume: usize,
        part: u64,
    },
    Release {
        volume: usize,
        first: u64,
        count: u64,
        hanging: u8,
    },
    Take,
    Commit,
    ZeroFill {
        device: u8,
        max: u64,
        fate: u64,
    },
    LateWrite {
        pick: usize,
    },
    Settle {
        device: u8,
    },
    EndQuarantine,
    Away {
        device: u8,
    },
    Back {
        device: u8,
    },
    Placement {
        fill: bool,
    },
    CheckPiece {
        extents: u64,
    },
    /// A group of volumes, by bit.
    TakeSnapshot {
        volumes: u8,
        flushed: bool,
    },
    DeleteSnapshot {
        pick: usize,
    },
    Clone {
        pick: usize,
        reserved: u64,
    },
    RollBack {
        volume: usize,
        pick: usize,
        hanging: u8,
    },
    BeginCopy {
        volume: usize,
        pick: usize,
    },
    EndCopy {
        pick: usize,
        fate: u64,
        sectors: u8,
    },
    PlanMerge {
        skip: u8,
    },
    Merge,
    AddDevice,
    Crash {
        same_boot: bool,
        power: bool,
        during_commit: Option<u64>,
        seed: u64,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let volume = || 0usize..4;
    let device = || 0u8..3;
    let logical = || prop_oneof![0u64..24, 505u64..520, 0u64..1500];
    let hanging = || prop_oneof![3 => Just(0u8), 1 => 1u8..4, 1 => Just(7u8)];
    prop_oneof![
        3 => (prop_oneof![1u64..40, 500u64..1500], prop_oneof![1 => Just(0u64), 1 => 0u64..30])
            .prop_map(|(extents, reserved)| Op::Create { extents, reserved }),
        1 => (volume(), hanging()).prop_map(|(volume, hanging)| Op::Delete { volume, hanging }),
        1 => Just(Op::DeleteMore),
        1 => (volume(), 0u64..600).prop_map(|(volume, by)| Op::Grow { volume, by }),
        1 => (volume(), 0u64..30).prop_map(|(volume, extents)| Op::Reserve { volume, extents }),
        24 => (volume(), logical(), 1u8..4)
            .prop_map(|(volume, logical, sectors)| Op::Write { volume, logical, sectors }),
        7 => (volume(), logical(), 0u32..5, 1u8..4).prop_map(|(volume, logical, window, sectors)| {
            Op::WriteAround { volume, logical, window: 1 << window, sectors }
        }),
        5 => (0usize..10, logical()).prop_map(|(volume, logical)| Op::Read { volume, logical }),
        2 => volume().prop_map(|volume| Op::ReservePreallocated { volume }),
        1 => Just(Op::ReturnIdle),
        6 => (volume(), 0u64..4).prop_map(|(volume, part)| Op::Flush { volume, part }),
        4 => (volume(), logical(), 1u64..30, hanging())
            .prop_map(|(volume, first, count, hanging)| Op::Release { volume, first, count, hanging }),
        5 => Just(Op::Take),
        7 => Just(Op::Commit),
        5 => (device(), 1u64..20, 0u64..8)
            .prop_map(|(device, max, fate)| Op::ZeroFill { device, max, fate }),
        2 => (0usize..8).prop_map(|pick| Op::LateWrite { pick }),
        3 => device().prop_map(|device| Op::Settle { device }),
        3 => Just(Op::EndQuarantine),
        1 => device().prop_map(|device| Op::Away { device }),
        2 => device().prop_map(|device| Op::Back { device }),
        1 => any::<bool>().prop_map(|fill| Op::Placement { fill }),
        3 => (1u64..600).prop_map(|extents| Op::CheckPiece { extents }),
        1 => Just(Op::AddDevice),
        2 => (any::<bool>(), any::<bool>(), prop::option::of(0u64..40), any::<u64>())
            .prop_map(|(same_boot, power, during_commit, seed)| Op::Crash {
                same_boot, power, during_commit, seed,
            }),
    ]
}

/// Operations with layers, and those that they need often.
fn layer_op() -> impl Strategy<Value = Op> {
    let volume = || 0usize..6;
    let pick = || 0usize..48;
    let logical = || prop_oneof![4 => 0u64..6, 2 => 510u64..514, 1 => 1023u64..1026];
    prop_oneof![
        4 => (prop_oneof![3 => (0u32..4).prop_map(|at| 1 << at), 1 => 1u8..16], prop::bool::weighted(0.9))
            .prop_map(|(volumes, flushed)| Op::TakeSnapshot { volumes, flushed }),
        3 => pick().prop_map(|pick| Op::DeleteSnapshot { pick }),
        3 => (pick(), prop_oneof![Just(0u64), 0u64..20])
            .prop_map(|(pick, reserved)| Op::Clone { pick, reserved }),
        1 => (volume(), pick(), prop_oneof![Just(0u8), 0u8..8])
            .prop_map(|(volume, pick, hanging)| Op::RollBack { volume, pick, hanging }),
        6 => (volume(), pick()).prop_map(|(volume, pick)| Op::BeginCopy { volume, pick }),
        3 => (pick(), 0u64..6, 1u8..4)
            .prop_map(|(pick, fate, sectors)| Op::EndCopy { pick, fate, sectors }),
        1 => (0u8..3).prop_map(|skip| Op::PlanMerge { skip }),
        5 => Just(Op::Merge),
        2 => Just(Op::DeleteMore),
        3 => prop_oneof![2 => 4u64..20, 1 => 1030u64..1500]
            .prop_map(|extents| Op::Create { extents, reserved: 0 }),
        14 => (volume(), logical(), 1u8..4)
            .prop_map(|(volume, logical, sectors)| Op::Write { volume, logical, sectors }),
        3 => volume().prop_map(|volume| Op::Flush { volume, part: 3 }),
        2 => (0usize..10, logical()).prop_map(|(volume, logical)| Op::Read { volume, logical }),
        2 => (volume(), logical(), 1u64..5, Just(0u8))
            .prop_map(|(volume, first, count, hanging)| Op::Release { volume, first, count, hanging }),
    ]
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name}={text} is no number")),
    )
}

fn case(seed: u64) -> Result<(), String> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = ProptestConfig {
        cases: 1,
        max_shrink_iters: 3000,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(config, rng);
    // Every other pair of cases has no layers.
    let layers = if (seed / 2).is_multiple_of(2) { 0 } else { 3 };
    let any = prop_oneof![1 => op(), layers => layer_op()];
    let ops = prop::collection::vec(any, 1..160);
    let result = runner.run(&ops, |ops| {
        let mut world = World::new();
        for op in ops {
            world.step(op);
        }
        world.end();
        Ok(())
    });
    result.map_err(|error| format!("POOL_MODEL_SEED={seed}: {error}"))
}

#[test]
fn pool_model() {
    if let Some(seed) = number("POOL_MODEL_SEED") {
        case(seed).unwrap_or_else(|error| panic!("{error}"));
        return;
    }
    let cases = number("POOL_MODEL_CASES").unwrap_or(4000);
    let first = number("POOL_MODEL_FIRST").unwrap_or(0);
    // Two threads; the cases are independent.
    let half = |odd: u64| (first..first + cases).filter(move |seed| seed % 2 == odd);
    let run = |odd| half(odd).try_for_each(case);
    let results = std::thread::scope(|scope| {
        let other = scope.spawn(move || run(1));
        [
            run(0),
            other
                .join()
                .unwrap_or_else(|_| Err("a panic outside a case".into())),
        ]
    });
    for result in results {
        result.unwrap_or_else(|error| panic!("{error}"));
    }
}
