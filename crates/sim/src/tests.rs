//! Properties of any tenants under any load.

use super::model::{Guest, Load, Model, metered};
use super::simulation::{SimSpread, Simulation};
use crate::policy::{Params, Policy};
use forebay_qos::admission::{Node, usable};
use forebay_qos::budget::{Budget, Burst, Rate};
use forebay_qos::cost::Routes;
use forebay_qos::params::{IDLE_NS, Params as SchedulerParams};
use forebay_qos::placement::PlacementPlan;
use forebay_qos::resources::Resource;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use std::collections::BTreeSet;

/// Bound of an admitted I/O's time at the backend and an idle link.
const CARRIED_NS: u64 = 400_000;

/// Bound of the I/Os that a tenant with base load lags behind at any window's end. Others may spend
/// saved bases at once (`saved_windows`), and waiting saves one more window. I/Os in flight count,
/// behind one of each other tenant on the link. Each admitting reactor adds two.
fn behind(params: &Params, all: &[Someone], link: f64, iops: f64, reactors: usize) -> f64 {
    let windows = u64::from(params.saved_windows) + 2;
    let ahead: f64 = all.iter().map(|one| one.largest() / link).sum();
    let under_way = (windows * params.window_ns + CARRIED_NS) as f64 / 1e9 + ahead;
    iops * under_way + 2.0 * reactors as f64
}

#[derive(Clone, Debug)]
struct Someone {
    thousand: u64,
    more: u64,
    size: u32,
    reads: u32,
    /// Seconds of credit, unless metered.
    credit: Option<u32>,
    start_ns: u64,
    does: Does,
    volumes: usize,
    uses: Uses,
}

#[derive(Clone, Copy, Debug)]
enum Uses {
    Evenly,
    Mostly,
    /// The next one after this many quarters of a window.
    Moves(u64),
}

#[derive(Clone, Copy, Debug)]
enum Does {
    /// Asks for just its base, evenly.
    Keeps,
    /// Keeps this many I/Os in flight.
    Bursts(u32),
    /// Bursts in one of this many windows: at the window's period, and to gather credit.
    Pulses(u32, u64),
    /// Bursts of 512 bytes and 1 MiB, mixed.
    Mixes(u32),
}

impl Someone {
    fn budget(&self) -> Budget {
        let rate = |thousand: u64| Rate {
            iops: 1000 * thousand,
            bytes: 1000 * thousand * u64::from(self.size),
        };
        Budget {
            base: rate(self.thousand),
            burst: rate(self.thousand * self.more),
            how: match self.credit {
                Some(seconds) => Burst::Credit { seconds },
                None => Burst::Metered,
            },
        }
    }

    /// IOPS it asks for within its base.
    fn iops(&self) -> f64 {
        980.0 * self.thousand as f64
    }

    fn largest(&self) -> f64 {
        match self.does {
            Does::Mixes(_) => f64::from(1 << 20),
            _ => f64::from(self.size),
        }
    }

    fn guest(&self, homes: Vec<usize>, window_ns: u64) -> Guest {
        let volumes = self.volumes as f64;
        let mut queues = vec![100.0 / volumes; self.volumes];
        if let (Uses::Mostly, [first, rest @ ..]) = (self.uses, &mut queues[..]) {
            rest.fill(10.0 / volumes);
            *first = 100.0 - rest.iter().sum::<f64>();
        }
        let moves_ns = match self.uses {
            Uses::Moves(quarters) => Some(quarters * window_ns / 4),
            _ => None,
        };
        Guest {
            queues,
            homes,
            moves_ns,
            ..Guest::new(self.budget(), self.load(window_ns))
        }
    }

    fn load(&self, window_ns: u64) -> Load {
        let load = |depth| Load {
            sizes: vec![self.size],
            reads: self.reads,
            start_ns: self.start_ns,
            ..Load::small(depth)
        };
        match self.does {
            // Deep enough that the backend's time does not matter.
            Does::Keeps => Load {
                rate: Some(self.iops()),
                ..load(1024)
            },
            Does::Bursts(depth) => load(depth),
            Does::Pulses(depth, windows) => Load {
                pulse: Some((window_ns.div_ceil(4), windows * window_ns)),
                ..load(depth)
            },
            Does::Mixes(depth) => Load {
                sizes: vec![512, 1 << 20],
                ..load(depth)
            },
        }
    }
}

fn does() -> impl Strategy<Value = Does> {
    let depth = 1u32..256;
    prop_oneof![
        Just(Does::Keeps),
        depth.clone().prop_map(Does::Bursts),
        (depth.clone(), prop::sample::select(vec![1u64, 2, 7, 25]))
            .prop_map(|(depth, windows)| Does::Pulses(depth, windows)),
        (1u32..32).prop_map(Does::Mixes),
    ]
}

fn uses() -> impl Strategy<Value = Uses> {
    prop_oneof![
        Just(Uses::Evenly),
        Just(Uses::Mostly),
        prop::sample::select(vec![1u64, 4, 8, 9, 40]).prop_map(Uses::Moves),
    ]
}

prop_compose! {
    fn someone()(
        thousand in 2u64..80,
        more in 1u64..100,
        size in prop::sample::select(vec![512u32, 4096, 8192, 16384, 65536]),
        reads in prop::sample::select(vec![0u32, 50, 100]),
        credit in prop::option::of(1u32..10),
        start_ns in 0u64..10_000_000,
        does in does(),
        volumes in prop::sample::select(vec![1usize, 1, 2, 3, 6]),
        uses in uses(),
    ) -> Someone {
        Someone { thousand, more, size, reads, credit, start_ns, does, volumes, uses }
    }
}

prop_compose! {
    /// All policies but `wild` promise bases.
    fn promising()(
        policy in prop::sample::select(vec![Policy::Burst, Policy::Burst, Policy::Burst, Policy::Base]),
        window_ns in prop::sample::select(vec![100_000u64, 300_000, 300_000, 1_000_000]),
        keep in 0f32..0.9,
        weight_waiting in 0f32..8.0,
        utilisation in 0.9f32..0.99,
        reserve in (0u32..5, 0f32..0.1),
        choices in 0u32..3,
        // With 1, accrual beyond whole I/Os is lost. A tenant that asks for its whole base would
        // then exceed it at times.
        saved_windows in 2u32..9,
        headroom in 0f32..0.5,
        target_delay_ns in 100_000u64..400_000,
        (correction_least, correction_most) in prop::sample::select(vec![(0.1f32, 4f32), (1.0, 1.0)]),
    ) -> Params {
        Params {
            policy,
            scheduler: SchedulerParams {
                correction_least, correction_most, window_ns, keep, weight_waiting, utilisation, choices, saved_windows, headroom, target_delay_ns,
                reserve_tenants: reserve.0, reserve_most: reserve.1,
            },
        }
    }
}

/// Tenants whose bases fit, in the node and on the reactors that [`PlacementPlan`] picks, as in the
/// engine.
fn taken(all: Vec<Someone>, model: &Model, params: &Params) -> Vec<(Someone, Vec<usize>)> {
    let costs = model.costs();
    let mut node = Node::new(model.capacity(), params, 1.0);
    let mut placement = PlacementPlan::new(model.reactors, 1e9 * usable(params));
    let mut taken = Vec::new();
    for someone in all {
        let budget = someone.budget();
        let (tenant, mut then) = (taken.len() as u64, placement.clone());
        then.set_cost(tenant, costs.most_of(budget.base)[Resource::Cpu as usize]);
        let mut homes = Vec::new();
        for _ in 0..someone.volumes {
            homes.push(then.best(tenant));
            then.export(tenant, homes[homes.len() - 1]);
        }
        if then.fit() && node.promise(&budget, &costs, Routes::LOCAL).is_ok() {
            placement = then;
            taken.push((someone, homes));
        }
    }
    taken
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, max_shrink_iters: 200, failure_persistence: None, rng_seed: RngSeed::Fixed(14), ..ProptestConfig::default() })]

    /// An admitted tenant within its base gets it, whatever the others do: its lag stays within the
    /// bound.
    #[test]
    fn base_is_guaranteed(
        params in promising(),
        mut all in prop::collection::vec(someone(), 2..48),
        reactors in 1usize..4,
        spread in prop::sample::select(vec![SimSpread::OneToOne, SimSpread::OneToN]),
        turn_ns in prop::sample::select(vec![0u64, 500]),
        seed: u64,
    ) {
        all[0].does = Does::Keeps;
        let mut model = Model { reactors, turn_ns, ..Model::default() };
        if params.correction_most == 1.0 && turn_ns == 0 {
            // Budgets alone must suffice. A correction would take the long queue for wrong costs
            // and grant too little.
            (model.base_first, model.ahead_ns) = (false, u64::MAX);
        }
        let link = model.link;
        let (all, homes): (Vec<_>, Vec<_>) = taken(all, &model, &params).into_iter().unzip();
        prop_assume!(all.iter().any(|one| matches!(one.does, Does::Keeps)));
        let guests = all.iter().zip(&homes).map(|(one, homes)| one.guest(homes.clone(), params.window_ns));
        let mut simulation = Simulation::new(model, &params, guests.collect(), spread, seed).expect("good");
        simulation.count_windows();
        let had = simulation.run(0, 30_000_000);
        let windows = 30_000_000 / params.window_ns;
        for ((one, had), homes) in all.iter().zip(had).zip(&homes).filter(|((one, _), _)| matches!(one.does, Does::Keeps)) {
            let admit = homes.iter().collect::<BTreeSet<_>>().len();

            let (iops, mut got) = (one.iops(), 0.0);
            for window in 0..windows {
                got += f64::from(had.by_window.get(window as usize).copied().unwrap_or(0));
                let time_ns = ((window + 1) * params.window_ns).saturating_sub(one.start_ns);
                let asked = iops * time_ns as f64 / 1e9;
                let bound = behind(&params, &all, link, iops, admit);
                prop_assert!(got + bound >= asked, "{got} of {asked} at the end of window {window}: {one:?}");
            }
        }
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
    let mut simulation =
        Simulation::new(model, &params, guests, SimSpread::OneToOne, 1).expect("good");
    simulation.run(40_000_000, 20_000_000)[0].latency.mean_us()
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

/// Reads and writes share one queue, so a wait for one link blocks the other.
#[test]
fn link_capacity_lost_to_ordering_is_redistributed() {
    let bytes = |policy| {
        let params = Params {
            policy,
            ..Params::default()
        };
        let model = Model {
            link: 6e9,
            ..Model::default()
        };
        let budget = metered((20_000, 140_000_000), (1_000_000, 3_000_000_000));
        let guests = vec![Guest::new(budget, Load::bytes(32)); 16];
        let mut simulation =
            Simulation::new(model, &params, guests, SimSpread::OneToOne, 1).expect("good");
        let had = simulation.run(30_000_000, 100_000_000);
        had.iter().map(|had| had.bytes).sum::<u64>() as f64
    };
    let part = bytes(Policy::Burst) / bytes(Policy::Wild);
    assert!(part > 0.92, "{part}");
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
        let mut simulation =
            Simulation::new(model, &Params::default(), guests, spread, 1).expect("good");
        let count = simulation.run(20_000_000, 20_000_000)[0].latency.count();
        let busy = simulation.busy();
        let most = busy.iter().copied().fold(0.0, f64::max);
        (
            count as f64,
            most / busy.iter().copied().fold(1.0, f64::min),
        )
    };
    let (one, _) = iops(1, SimSpread::OneToOne);
    let (two, uneven) = iops(2, SimSpread::OneToN);
    assert!(two > 1.8 * one && uneven < 1.1, "{one} {two} {uneven}");
    let (alone, _) = iops(2, SimSpread::OneToOne);
    assert!(alone < 1.1 * one, "one queue is one reactor's: {alone}");
}

/// A tenant that arrives when its reactor begins to help waits at most for the operation in
/// progress.
#[test]
fn a_pulse_at_the_threshold_of_help_costs_no_base() {
    let params = Params::default();
    let threshold_ns = IDLE_NS;
    for turn_ns in [0, 500] {
        for (late_ns, early_ns) in [(0, 0), (0, 20_000), (1000, 0), (20_000, 0), (60_000, 0)] {
            let run = |spread| {
                let model = Model {
                    reactors: 2,
                    turn_ns,
                    ..Model::default()
                };
                // Within its base: 20 of its 30 in a window, once in a little more than two.
                let pulse = Load {
                    pulse: Some((1000, threshold_ns + late_ns - early_ns)),
                    ..Load::small(20)
                };
                let budget = |base| metered((base, base << 12), (1_000_000, 40_000_000_000));
                let victim = Guest {
                    homes: vec![1],
                    ..Guest::new(budget(100_000), pulse)
                };
                let bursts = Guest {
                    homes: vec![0],
                    ..Guest::new(budget(100_000), Load::small(256))
                };
                let guests = vec![victim, bursts];
                let simulation = Simulation::new(model, &params, guests, spread, 3);
                let mut simulation = simulation.expect("good");
                let had = simulation.run(20_000_000, 60_000_000);
                let [victim, bursts] = had else { panic!() };
                (
                    victim.latency.count(),
                    victim.latency.mean_us(),
                    victim.latency.percentile_us(99.0),
                    bursts.latency.count(),
                )
            };
            let (alone, helps) = (run(SimSpread::OneToOne), run(SimSpread::OneToN));
            assert!(
                helps.0 + 2 >= alone.0 && helps.1 < alone.1 + 7.0 && helps.2 < alone.2 + 15.0,
                "{turn_ns} {late_ns} {early_ns}: {alone:?} {helps:?}"
            );
        }
    }
}

/// Overestimated costs throttle no tenant at an idle processor.
#[test]
fn a_wrong_correction_throttles_no_tenant_on_an_idle_cpu() {
    let base = metered((200_000, 819_200_000), (200_000, 819_200_000));
    let keeps = Load {
        rate: Some(180_000.0),
        ..Load::small(1024)
    };
    // Any queue is taken for wrong costs.
    let scheduler = SchedulerParams {
        target_delay_ns: 1000,
        ..SchedulerParams::default()
    };
    let params = Params {
        scheduler,
        ..Params::default()
    };
    let guests = vec![Guest::new(base, keeps); 3];
    let simulation = Simulation::new(Model::default(), &params, guests, SimSpread::OneToOne, 1);
    let mut simulation = simulation.expect("good");
    let had = simulation.run(20_000_000, 40_000_000);
    let least = had.iter().map(|had| had.bytes).min().unwrap_or(0);
    let factor = simulation.correction(Resource::Cpu);
    let asked = 4096.0 * 180_000.0 * 0.04;
    assert!(
        factor > 2.0 && least as f64 > 0.97 * asked,
        "{factor}: {least} of {asked}"
    );
}

#[test]
fn a_weighted_round_robin_is_of_time() {
    let base = |iops| metered((iops, iops << 12), (1_000_000, 40_000_000_000));
    let large = Load {
        sizes: vec![64 << 10],
        ..Load::small(512)
    };
    let guests = vec![
        Guest::new(base(30_000), Load::small(512)),
        Guest::new(base(10_000), large),
    ];
    let params = Params {
        policy: Policy::Wild,
        ..Params::default()
    };
    for turn_ns in [0, 500] {
        let model = Model {
            turn_ns,
            ..Model::default()
        };
        let (fixed, byte) = model.cpu_ns;
        let mut simulation =
            Simulation::new(model, &params, guests.clone(), SimSpread::OneToOne, 1).expect("good");
        let had = simulation.run(20_000_000, 40_000_000);
        let parts = had.iter().zip([4096.0, 65536.0]);
        let ns: Vec<f64> = parts
            .map(|(had, size)| had.bytes as f64 * (fixed / size + byte))
            .collect();
        let ratio = ns[0] / ns[1];
        assert!((2.9..3.1).contains(&ratio), "{ns:?}: {ratio}");
        assert!(ns[0] + ns[1] > 0.95 * 40e6, "nothing is lost: {ns:?}");
    }
}
