//! From samples to costs.
//!
//! Purpose: what of many rounds is stored, and how far they were apart.
//! Design: the median of the rounds in which reactors had the most to do (what one does as it wakes is not in its time, so who
//! sleeps now and then seems to cost nothing), then what never falls with size: neighbours that do are averaged. Nothing costs nothing.
//! A device's time is one command's part of the time at its full load, where the device was the limit; where reactors were, it
//! can do more than was seen, and counts so that it will never be the limit before all reactors are: what is known of it is
//! only that, and the correction of costs finds out the rest while it runs.
//! Not here: measuring.

use forebay_burst::cost::{Profile, SIZES};

/// The least that a cost is, ns: nothing takes less, but clocks may say so.
const LEAST_NS: f64 = 50.0;

/// One load's figures.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Sample {
    /// Time of reactors for one command, ns.
    pub(super) cpu_ns: f64,
    /// Time from one command's end to the next's, ns.
    pub(super) between_ns: f64,
    /// Of the time, how much reactors had something to do.
    pub(super) busy: f64,
    /// Whether the device was what they waited for.
    pub(super) device_is_limit: bool,
}

/// The rounds of one size.
pub(super) type Rounds = Vec<Sample>;

/// The middle value; 0 of none.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    match n {
        0 => 0.0,
        _ if n % 2 == 1 => values[n / 2],
        _ => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

/// Those of the rounds that tell what the processor's time is.
fn busiest(rounds: &[Sample]) -> impl Iterator<Item = f64> {
    let most = rounds.iter().map(|sample| sample.busy).fold(0.0, f64::max);
    let busy = rounds
        .iter()
        .filter(move |sample| sample.busy >= most / 2.0);
    busy.map(|sample| sample.cpu_ns)
}

/// How far rounds were apart: the largest less the least, of the median.
pub(super) fn spread(rounds: &[Sample]) -> f64 {
    let cpu = || busiest(rounds);
    let most = cpu().fold(0.0, f64::max);
    let least = cpu().fold(f64::INFINITY, f64::min);
    let middle = median(cpu().collect());
    if middle > 0.0 {
        (most - least) / middle
    } else {
        0.0
    }
}

/// What never falls, nearest to what was measured; at least [`LEAST_NS`].
fn rising(values: [f64; 6]) -> [f64; 6] {
    // Runs of neighbours that are averaged: their sum and how many.
    let mut runs: Vec<(f64, usize)> = Vec::with_capacity(6);
    for value in values {
        let mut run = (value.max(LEAST_NS), 1);
        while let Some(last) = runs.last().copied() {
            if last.0 / last.1 as f64 <= run.0 / run.1 as f64 {
                break;
            }
            runs.pop();
            run = (run.0 + last.0, run.1 + last.1);
        }
        runs.push(run);
    }
    let flat = runs
        .iter()
        .flat_map(|(sum, n)| std::iter::repeat_n(sum / *n as f64, *n));
    let mut all = [LEAST_NS; 6];
    for (all, value) in all.iter_mut().zip(flat) {
        *all = value;
    }
    all
}

/// Processor time by size.
pub(super) fn cpu(sizes: &[Rounds; 6]) -> [f64; 6] {
    let of = |rounds: &Rounds| median(busiest(rounds).collect());
    rising(sizes.each_ref().map(of))
}

/// Device time by size, out of what all frontends saw of the same devices.
pub(super) fn device(frontends: &[&[Rounds; 6]], reactors: u32) -> [f64; 6] {
    let mut all = [0.0; 6];
    for (size, value) in all.iter_mut().enumerate() {
        let seen = frontends.iter().filter_map(|sizes| {
            let rounds = &sizes[size];
            let limited = rounds.iter().filter(|s| s.device_is_limit).count() * 2 > rounds.len();
            let between = median(rounds.iter().map(|s| s.between_ns).collect());
            (!rounds.is_empty()).then_some((limited, between))
        });
        let seen: Vec<(bool, f64)> = seen.collect();
        let least = |wanted: bool| {
            let of = seen.iter().filter(|(limited, _)| *limited == wanted);
            of.map(|(_, ns)| *ns).reduce(f64::min)
        };
        *value = match (least(true), least(false)) {
            (Some(ns), _) => ns,
            (None, Some(ns)) => ns / (2.0 * f64::from(reactors.max(1))),
            (None, None) => 0.0,
        };
    }
    rising(all)
}

/// Of commands without data: the same at each size.
pub(super) fn flat(cpu_ns: f64, device_ns: f64, header_bytes: u32) -> Profile {
    Profile {
        cpu_ns: [cpu_ns.max(LEAST_NS); 6],
        device_ns: [device_ns.max(LEAST_NS); 6],
        header_bytes,
    }
}

const _: () = assert!(SIZES.len() == 6);

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(cpu_ns: f64, between_ns: f64, device_is_limit: bool) -> Sample {
        Sample {
            cpu_ns,
            between_ns,
            busy: 1.0,
            device_is_limit,
        }
    }

    #[test]
    fn who_slept_tells_nothing() {
        let asleep = Sample {
            busy: 0.1,
            ..sample(0.1, 1.0, false)
        };
        let rounds = vec![asleep, asleep, sample(70.0, 1.0, false)];
        assert_eq!(cpu(&std::array::from_fn(|_| rounds.clone())), [70.0; 6]);
    }

    #[test]
    fn costs_never_fall_and_are_never_nothing() {
        assert_eq!(
            rising([400.0, 300.0, 500.0, 900.0, 800.0, 700.0]),
            [350.0, 350.0, 500.0, 800.0, 800.0, 800.0]
        );
        assert_eq!(rising([0.0, -3.0, f64::NAN, 0.5, 1.0, 60.0])[4], LEAST_NS);
        let rounds = vec![
            sample(100.0, 1.0, false),
            sample(900.0, 1.0, false),
            sample(120.0, 1.0, false),
        ];
        let sizes: [Rounds; 6] = std::array::from_fn(|_| rounds.clone());
        assert_eq!(cpu(&sizes), [120.0; 6]);
        assert!((spread(&rounds) - 800.0 / 120.0).abs() < 1e-9);
        assert_eq!(cpu(&Default::default()), [LEAST_NS; 6]);
    }

    #[test]
    fn a_device_is_judged_by_who_waited_for_it() {
        let of = |ns: f64, limit: bool| -> [Rounds; 6] {
            std::array::from_fn(|_| vec![sample(1.0, ns, limit); 3])
        };
        let (slow, fast) = (of(4000.0, true), of(1000.0, false));
        // Who waited for it knows.
        assert_eq!(device(&[&slow, &fast], 2), [4000.0; 6]);
        // Nobody did: two reactors have twice as much, and it is not to be the limit then.
        assert_eq!(device(&[&of(3000.0, false), &fast], 2), [250.0; 6]);
        assert_eq!(device(&[], 2), [LEAST_NS; 6]);
    }
}
