//! What holds of any tenants under any load.

use super::machine::{Machine, Spread};
use super::model::{Guest, Load, Model, metered};
use crate::admission::Node;
use crate::params::{Params, Policy};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

/// Windows' base that a tenant may be behind what is due to it: the others may use at once what they saved of their bases
/// (`saved_windows`), and what waits saves another window's.
fn behind(params: &Params) -> f64 {
    f64::from(params.saved_windows) + 2.0
}

prop_compose! {
    fn guest()(
        thousand in 2u64..80,
        more in 1u64..20,
        depth in 1u32..128,
        size in prop::sample::select(vec![512u32, 4096, 8192, 16384, 65536]),
        reads in prop::sample::select(vec![0u32, 50, 100]),
        pulse in prop::option::of((100_000u64..3_000_000, 1_500_000u64..6_000_000)),
        start_ns in 0u64..10_000_000,
    ) -> Guest {
        let base = thousand * 1000;
        let budget = metered((base, base * u64::from(size)), (base * more, base * more * u64::from(size)));
        let load = Load {
            sizes: vec![size],
            reads,
            pulse: pulse.map(|(on, of)| (on.min(of), of)),
            start_ns,
            ..Load::small(depth)
        };
        Guest::new(budget, load)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, max_shrink_iters: 200, failure_persistence: None, rng_seed: RngSeed::Fixed(7), ..ProptestConfig::default() })]

    /// Whoever is taken by the node has their base, beside whatever the others do.
    #[test]
    fn base_is_guaranteed(neighbours in prop::collection::vec(guest(), 1..40), thousand in 2u64..60, seed: u64) {
        let model = Model { reactors: 1, ..Model::default() };
        let params = Params::default();
        let mut node = Node::new(model.capacity(), &params, 1.0);
        let base = thousand * 1000;
        // It asks for its base, evenly, and deep enough that the backend's time does not count.
        let mut victim = Guest::new(metered((base, base * 4096), (base, base * 4096)), Load::small(512));
        victim.load.rate = Some(base as f64 * 0.98);
        let mut guests = vec![victim];
        guests.extend(neighbours);
        let costs = model.costs();
        guests.retain(|guest| node.take(&guest.budget, &costs).is_ok());
        prop_assume!(guests[0].load.depth == 512);
        let mut machine = Machine::new(model, &params, guests, Spread::OneToOne, seed).expect("good");
        let ms = 40;
        let had = machine.run(20_000_000, ms * 1_000_000);
        let asked = base as f64 * 0.98 * ms as f64 / 1e3;
        let behind = behind(&params) * base as f64 * params.window_ns as f64 / 1e9;
        // What was asked for before, and ended after the warm-up, is in it.
        let got = had[0].bytes as f64 / 4096.0;
        prop_assert!(got + behind + 2.0 >= asked, "{got} of {asked}");
    }
}

fn mean(policy: Policy, truth: f64, neighbours: usize) -> f64 {
    let budget = metered((20_000, 140_000_000), (1_000_000, 4_096_000_000));
    let mut guests = vec![Guest::new(budget, Load::small(1))];
    guests.extend(vec![Guest::new(budget, Load::iops(64)); neighbours]);
    let model = Model {
        cpu_truth: truth,
        ..Model::default()
    };
    let params = Params {
        policy,
        ..Params::default()
    };
    let mut machine = Machine::new(model, &params, guests, Spread::OneToOne, 1).expect("good");
    machine.run(40_000_000, 20_000_000)[0].latency.mean_us()
}

#[test]
fn a_victim_feels_little_of_its_neighbours() {
    let alone = mean(Policy::Burst, 1.0, 0);
    let (ours, wild) = (mean(Policy::Burst, 1.0, 15), mean(Policy::Wild, 1.0, 15));
    assert!(
        ours < wild * 0.4 && ours < alone * 4.0,
        "alone {alone}, {ours}, wild {wild}"
    );
    let (ours, wild) = (mean(Policy::Burst, 2.0, 15), mean(Policy::Wild, 2.0, 15));
    assert!(ours < wild * 0.4, "costs are double: {ours}, wild {wild}");
}

#[test]
fn one_queue_over_two_reactors() {
    let iops = |reactors, spread| {
        let budget = metered((100_000, 400_000_000), (9_000_000, 40_000_000_000));
        let model = Model {
            reactors,
            ..Model::default()
        };
        let guests = vec![Guest::new(budget, Load::small(512))];
        let mut machine = Machine::new(model, &Params::default(), guests, spread, 1).expect("good");
        let count = machine.run(20_000_000, 20_000_000)[0].latency.count();
        let busy = machine.busy();
        let most = busy.iter().copied().fold(0.0, f64::max);
        (
            count as f64,
            most / busy.iter().copied().fold(1.0, f64::min),
        )
    };
    let (one, _) = iops(1, Spread::OneToOne);
    let (two, uneven) = iops(2, Spread::OneToN);
    assert!(two > 1.8 * one && uneven < 1.1, "{one} {two} {uneven}");
    let (alone, _) = iops(2, Spread::OneToOne);
    assert!(alone < 1.1 * one, "one queue is one reactor's: {alone}");
}
