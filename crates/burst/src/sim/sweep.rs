//! What the parameters do: each alone, the others at their defaults.
//!
//! **Design.** One load that hurts in all ways: a victim at depth 1, neighbours that burst without end, some that pulse, costs
//! that are a fifth too low. Where it is about turns, reactors work in turns, as the engine's do: each takes some time besides its
//! I/Os, so that of a short one throughput is lost, and of a long one the victim waits. What matters only where a reactor is late,
//! where a tenant has several or where one is alone has a load of that ([`Stage`]). A default is good if no other value is better at one thing and not worse at another.
//! **Not here:** which is the default ([`crate::params`]), what a reactor keeps of buffers ([`super::pool`]), who helps whom ([`super::helped`]).

use super::figures::Effort;
use super::machine::{Machine, Spread};
use super::model::{Guest, Load, Model, metered};
use crate::params::{Params, Policy};

/// What one setting does.
#[derive(Clone, Debug)]
pub struct Row {
    /// Which parameter.
    pub name: &'static str,
    /// Its value.
    pub value: f64,
    /// Whether that is the default.
    pub default: bool,
    /// The victim's mean, p99 and p99.9, us.
    pub us: [f64; 3],
    /// Of wild's bytes, per cent.
    pub throughput: f64,
    /// Of the I/Os of those that pulse within their base, or ask for it evenly, so many had to wait for their budget, per cent.
    pub throttled: f64,
    /// The least that one of them has, per cent of what it asks for.
    pub base: f64,
}

/// What a turn takes besides its I/Os, assumed: an entry into the kernel.
pub(super) const TURN_NS: u64 = 500;

/// Where a parameter is tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Crowd,
    /// The same, with turns.
    Turns,
    /// The same, and each reactor is held up for 20 windows of a hundred; who pulsed asks for its base instead, evenly.
    Held,
    /// The same crowd with all queues on two reactors, as exports of volumes that both show.
    Several,
    /// The policy is `wild`.
    Wild,
    /// One tenant, in turns.
    Alone,
    /// One tenant that comes now and then, before a device that is twice as fast as was measured: too seldom for its costs to be
    /// corrected.
    Device,
}

const STAGES: [Stage; 7] = [
    Stage::Crowd,
    Stage::Turns,
    Stage::Held,
    Stage::Several,
    Stage::Wild,
    Stage::Alone,
    Stage::Device,
];

fn stage(name: &str) -> Stage {
    match name {
        "lump_ns" | "backlog_weight" => Stage::Turns,
        "late_windows" => Stage::Held,
        "beginner" | "new_lane" | "most_told" => Stage::Several,
        "batch_ns" => Stage::Wild,
        "calm_lump_ns" => Stage::Alone,
        "alone_most" => Stage::Device,
        _ => Stage::Crowd,
    }
}

/// Nearly a base of 20,000.
const STEADY: f64 = 19_600.0;

pub(super) type Set = fn(&mut Params, f64);

/// Parameters and the values that are tried.
const TRIED: &[(&str, Set, &[f64])] = &[
    (
        "window_ns",
        |p, v| p.window_ns = v as u64,
        &[100e3, 200e3, 300e3, 500e3, 1e6, 2e6],
    ),
    (
        "keep",
        |p, v| p.keep = v as f32,
        &[0.0, 0.25, 0.5, 0.75, 0.9],
    ),
    (
        "weight_waiting",
        |p, v| p.weight_waiting = v as f32,
        &[0.0, 0.5, 1.0, 2.0, 8.0],
    ),
    (
        "utilisation",
        |p, v| p.utilisation = v as f32,
        &[0.9, 0.95, 0.97, 0.99, 1.0],
    ),
    (
        "reserve_tenants",
        |p, v| p.reserve_tenants = v as u32,
        &[0.0, 1.0, 2.0, 4.0, 16.0],
    ),
    (
        "reserve_most",
        |p, v| p.reserve_most = v as f32,
        &[0.0, 0.02, 0.05, 0.1],
    ),
    (
        "reserve_carried",
        |p, v| p.reserve_carried = v as f32,
        &[0.0, 0.5, 1.0],
    ),
    (
        "link_carried",
        |p, v| p.link_carried = v as f32,
        &[0.0, 0.0625, 0.125, 0.25, 0.5],
    ),
    ("choices", |p, v| p.choices = v as u32, &[0.0, 1.0, 2.0]),
    (
        "saved_windows",
        |p, v| p.saved_windows = v as u32,
        &[1.0, 2.0, 4.0, 8.0, 32.0],
    ),
    (
        "late_windows",
        |p, v| p.late_windows = v as u32,
        &[1.0, 8.0, 64.0, 256.0],
    ),
    (
        "headroom",
        |p, v| p.headroom = v as f32,
        &[0.0, 0.125, 0.25, 0.5],
    ),
    (
        "target_delay_ns",
        |p, v| p.target_delay_ns = v as u64,
        &[20e3, 50e3, 100e3, 200e3, 400e3],
    ),
    (
        "calm_delay",
        |p, v| p.calm_delay = v as f32,
        &[0.0, 0.1, 0.25, 0.5, 1.0],
    ),
    ("step_up", |p, v| p.step_up = v as f32, &[0.01, 0.04, 0.16]),
    (
        "step_down",
        |p, v| p.step_down = v as f32,
        &[0.0025, 0.01, 0.04],
    ),
    (
        "correction_least",
        |p, v| p.correction_least = v as f32,
        &[0.1, 0.25, 0.5, 1.0],
    ),
    (
        "correction_most",
        |p, v| p.correction_most = v as f32,
        &[1.0, 2.0, 4.0, 16.0],
    ),
    ("busy", |p, v| p.busy = v as f32, &[0.0, 0.25, 0.5, 0.9]),
    (
        "forget",
        |p, v| p.forget = v as f32,
        &[1.0 / 256.0, 1.0 / 64.0, 1.0 / 8.0],
    ),
    (
        "lump_ns",
        |p, v| p.lump_ns = v as u32,
        &[3e3, 6e3, 8e3, 10e3, 12e3, 16e3, 24e3, 48e3],
    ),
    (
        "calm_lump_ns",
        |p, v| p.calm_lump_ns = v as u32,
        &[12e3, 40e3, 75e3, 150e3],
    ),
    (
        "batch_ns",
        |p, v| p.batch_ns = v as u32,
        &[10e3, 20e3, 40e3, 75e3, 150e3, 300e3],
    ),
    (
        "alone_most",
        |p, v| p.alone_most = v as f32,
        &[1.0, 2.0, 4.0],
    ),
    (
        "alone_windows",
        |p, v| p.alone_windows = v as u32,
        &[1.0, 8.0, 32.0, 128.0],
    ),
    (
        "backlog_weight",
        |p, v| p.backlog_weight = v as u32,
        &[0.0, 1.0, 2.0, 4.0, 8.0, 16.0],
    ),
    (
        "beginner",
        |p, v| p.beginner = v as f32,
        &[1.0 / 4096.0, 1.0 / 256.0, 1.0 / 64.0, 1.0 / 16.0, 1.0],
    ),
    (
        "new_lane",
        |p, v| p.new_lane = v as f32,
        &[1.0 / 4096.0, 1.0 / 256.0, 1.0 / 16.0, 1.0],
    ),
    (
        "most_told",
        |p, v| p.most_told = v as f32,
        &[1.0, 10.0, 1000.0, 100_000.0],
    ),
];

/// The value that a parameter has.
fn value(params: &Params, name: &str) -> f64 {
    let mut values = params.values();
    values
        .find(|(own, _)| *own == name)
        .map_or(f64::NAN, |(_, value)| value)
}

/// Whether it is the default.
pub(super) fn default_of(name: &str, tried: f64) -> bool {
    (value(&Params::default(), name) - tried).abs() < tried * 1e-6 + 1e-9
}

/// All that is tried, in order.
#[must_use]
pub fn burst(effort: Effort) -> Vec<Row> {
    let wild = Params {
        policy: Policy::Wild,
        ..Params::default()
    };
    let wild = STAGES.map(|stage| run(&wild, stage, effort).1);
    let mut rows = Vec::new();
    for (name, set, values) in TRIED {
        let stage = stage(name);
        for tried in *values {
            let mut params = Params::default();
            set(&mut params, *tried);
            let default = default_of(name, *tried);
            if stage == Stage::Wild {
                params.policy = Policy::Wild;
            }
            let (us, bytes, base, throttled) = run(&params, stage, effort);
            rows.push(Row {
                name,
                value: *tried,
                default,
                us,
                throughput: 100.0 * bytes / wild[stage as usize],
                throttled,
                base,
            });
        }
    }
    rows
}

fn run(params: &Params, stage: Stage, effort: Effort) -> ([f64; 3], f64, f64, f64) {
    let budget = metered((20_000, 140_000_000), (1_000_000, 4_096_000_000));
    let mut guests = vec![Guest::new(budget, Load::small(1))];
    // Within their base, but not evenly: for a tenth of the time ten times 1,500.
    let pulse = Load {
        rate: Some(15_000.0),
        pulse: Some((1_000_000, 10_000_000)),
        ..Load::small(64)
    };
    guests.extend(vec![Guest::new(budget, pulse); 7]);
    guests.extend(vec![Guest::new(budget, Load::iops(64)); 12]);
    guests.extend(vec![Guest::new(budget, Load::bytes(32)); 12]);
    let mut model = Model {
        reactors: 2,
        cpu_truth: 1.2,
        ..Model::default()
    };
    if !matches!(stage, Stage::Crowd | Stage::Several | Stage::Wild) {
        model.turn_ns = TURN_NS;
    }
    let alone = Load {
        reads: 100,
        ..Load::small(256)
    };
    match stage {
        Stage::Crowd | Stage::Turns | Stage::Wild => {}
        Stage::Held => {
            model.held_windows = 20;
            for guest in &mut guests[1..8] {
                guest.load = Load {
                    rate: Some(STEADY),
                    ..Load::small(1024)
                };
            }
        }
        Stage::Several => model.shared_volumes = true,
        Stage::Alone => guests = vec![Guest::new(budget, alone)],
        Stage::Device => {
            (model.device_ns, model.device_truth) = ((2_900.0, 0.1), 0.5);
            let pulse = Some((3_000_000, 30_000_000));
            guests = vec![Guest::new(budget, Load { pulse, ..alone })];
        }
    }
    let machine = Machine::new(model, params, guests, Spread::OneToOne, 5);
    let mut machine = machine.unwrap_or_else(|bad| panic!("{bad}"));
    let had = machine.run(30_000_000, effort.ms * 1_000_000);
    let latency = &had[0].latency;
    let us = [
        latency.mean_us(),
        latency.percentile_us(99.0),
        latency.percentile_us(99.9),
    ];
    let bytes = had.iter().map(|had| had.bytes as f64).sum();
    let a_second = if stage == Stage::Held {
        STEADY
    } else {
        1_500.0
    };
    let asked = a_second * effort.ms as f64 / 1e3;
    let pulsing = had.get(1..8).unwrap_or_default();
    let counts = || pulsing.iter().map(|had| had.latency.count());
    // Nobody pulses within a base there.
    let least = counts().min().map_or(asked, |least| least as f64);
    let throttled: u64 = pulsing.iter().map(|had| had.throttled).sum();
    let throttled = 100.0 * throttled as f64 / counts().sum::<u64>().max(1) as f64;
    (us, bytes, 100.0 * least / asked, throttled)
}

#[cfg(test)]
mod tests {
    use super::super::{helped, pool};
    use super::*;

    #[test]
    fn every_parameter_is_tried_at_its_default_too() {
        let defaults = Params::default();
        for (name, default) in defaults.values() {
            let mut tried = TRIED.iter().chain(pool::TRIED).chain(helped::TRIED);
            let tried = tried.find(|(own, _, _)| *own == name);
            let (_, set, values) = tried.unwrap_or_else(|| panic!("{name} is not tried"));
            let mut params = defaults.clone();
            assert!(
                values.iter().any(|value| {
                    set(&mut params, *value);
                    super::value(&params, name) == default
                }),
                "{name}: its default is not tried"
            );
        }
    }
}
