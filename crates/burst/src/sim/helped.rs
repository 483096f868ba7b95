//! One queue's help: what the parameters of who helps whom do.
//!
//! **Design.** Two reactors. At one is what asks for 50, 100 or 150 % of its processor, now this, now that; so help is needed for a while,
//! and then it is not. At the other somebody within its base comes in pulses, and between them that reactor helps. How long either lasts is
//! tried over a range, as nobody knows it. Three things are told: what the first has of what it asks for, and how long that takes; how much of the
//! other processor helps; and how long who pulses there waits. A default is good if with less the first lacks more, and with more the others
//! pay for nothing.
//! **Not here:** that a reactor which helps is woken for it, and what that costs (`cargo xtask bench burst --only spread`).

use super::figures::Effort;
use super::machine::{Machine, Spread};
use super::model::{Guest, Load, Model, metered};
use super::stats::Latency;
use super::sweep::{TURN_NS, default_of};
use crate::params::Params;

/// How far apart loads go up, and pulses come, ns: each with each.
const SWINGS_NS: [u64; 3] = [4_000_000, 10_000_000, 20_000_000];
const PULSES_NS: [u64; 4] = [510_000, 1_130_000, 2_330_000, 7_130_000];
const MS: u64 = 40;
/// What is asked for at once in a pulse.
const AT_ONCE: u32 = 20;
/// I/Os of 4 KiB a second that are half of a processor.
const PART: f64 = 431_000.0;

/// What one setting does.
#[derive(Clone, Debug)]
pub struct Row {
    /// Which parameter.
    pub name: &'static str,
    /// Its value.
    pub value: f64,
    /// Whether that is the default.
    pub default: bool,
    /// Of what is asked for at the reactor that is helped, so much is had, per cent.
    pub has: f64,
    /// The mean of that, us.
    pub us: f64,
    /// Of the other processor, what helps, per cent.
    pub helpers: f64,
    /// Who pulses there: mean and p99, us.
    pub pulse_us: [f64; 2],
}

/// Parameters and the values that are tried.
pub(super) const TRIED: &[(&str, super::sweep::Set, &[f64])] = &[
    (
        "idle_windows",
        |p, v| p.idle_windows = v as u32,
        &[1.0, 2.0, 3.0, 4.0, 8.0, 32.0],
    ),
    (
        "help_from",
        |p, v| p.help_from = v as f32,
        &[0.5, 0.8, 0.9, 0.95, 0.98, 1.0],
    ),
    (
        "help_until",
        |p, v| p.help_until = v as f32,
        &[0.0, 0.5, 0.8, 0.9, 0.95, 1.0],
    ),
    (
        "help_ns",
        |p, v| p.help_ns = v as u64,
        &[300e3, 1e6, 2e6, 4e6, 10e6, 50e6],
    ),
];

/// All that is tried, in order.
#[must_use]
pub fn sweep(effort: Effort) -> Vec<Row> {
    let mut rows = Vec::new();
    for (name, set, values) in TRIED {
        for value in *values {
            let mut params = Params::default();
            set(&mut params, *value);
            rows.push(row(name, *value, &params, effort));
        }
    }
    rows
}

fn row(name: &'static str, value: f64, params: &Params, effort: Effort) -> Row {
    let (mut helped, mut pulsing) = (Latency::default(), Latency::default());
    let (mut helpers, mut runs) = (0.0, 0);
    // All loads go up and down within this some times, and end as they began.
    let ms = (effort.ms / 2).max(MS);
    for swing_ns in SWINGS_NS {
        for pulse_ns in PULSES_NS {
            let (had, other) = run(params, swing_ns, pulse_ns, ms);
            helped.add_all(&had[0]);
            pulsing.add_all(&had[1]);
            helpers += other;
            runs += 1;
        }
    }
    // The half of two parts, and the whole of one.
    let asked = 2.0 * PART * f64::from(runs) * ms as f64 / 1e3;
    Row {
        name,
        value,
        default: default_of(name, value),
        has: 100.0 * helped.count() as f64 / asked,
        us: helped.mean_us(),
        helpers: 100.0 * helpers / f64::from(runs),
        pulse_us: [pulsing.mean_us(), pulsing.percentile_us(99.0)],
    }
}

/// Of those who are helped, and of who pulses; and what of the other processor helps.
fn run(params: &Params, swing_ns: u64, pulse_ns: u64, ms: u64) -> ([Latency; 2], f64) {
    let budget = metered((100_000, 400_000_000), (2_000_000, 8_000_000_000));
    let part = |pulse| Guest {
        homes: vec![0],
        ..Guest::new(
            budget,
            Load {
                rate: Some(PART),
                pulse,
                ..Load::small(256)
            },
        )
    };
    let pulse = Guest {
        homes: vec![1],
        ..Guest::new(
            budget,
            Load {
                pulse: Some((1000, pulse_ns)),
                ..Load::small(AT_ONCE)
            },
        )
    };
    let guests = vec![
        part(None),
        part(Some((swing_ns / 2, swing_ns))),
        part(Some((swing_ns, 2 * swing_ns))),
        pulse,
    ];
    let model = Model {
        reactors: 2,
        turn_ns: TURN_NS,
        ..Model::default()
    };
    let own_ns = model.cpu_ns.0 + 4096.0 * model.cpu_ns.1;
    let machine = Machine::new(model, params, guests, Spread::OneToN, 3);
    let mut machine = machine.unwrap_or_else(|bad| panic!("{bad}"));
    let had = machine.run(30_000_000, ms * 1_000_000);
    let mut helped = Latency::default();
    had[..3].iter().for_each(|had| helped.add_all(&had.latency));
    let pulsing = had[3].latency.clone();
    let own = pulsing.count() as f64 * own_ns / (ms as f64 * 1e6);
    ([helped, pulsing], machine.busy()[1] - own)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who counts as idle sooner helps more, and who is helped has more; who comes back there waits hardly longer.
    #[test]
    fn who_is_idle_sooner_helps_more_at_nobodys_cost() {
        let rows = [1u32, 2, 8].map(|windows| {
            let params = Params {
                idle_windows: windows,
                ..Params::default()
            };
            row("idle_windows", windows.into(), &params, Effort::QUICK)
        });
        for pair in rows.windows(2) {
            assert!(pair[0].has > pair[1].has + 0.5, "{pair:?}");
            assert!(pair[0].us < pair[1].us, "{pair:?}");
            assert!(pair[0].helpers > pair[1].helpers + 0.5, "{pair:?}");
            assert!(pair[0].pulse_us[0] < pair[1].pulse_us[0] + 1.0, "{pair:?}");
        }
    }
}
