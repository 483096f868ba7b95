//! Computes costs from samples.
//!
//! Processor cost is the median of the rounds with the busiest reactors, as sleeping hides time.
//! Costs never fall with size: neighbours that do are averaged. Device cost is a command's time at
//! full load, if commands waited for the device. Otherwise only a lower bound of its speed is
//! known. The cost then keeps it from being the limit before all reactors are.

use forebay_qos::cost::{Profile, SIZES};

/// The least cost, ns: clocks may show less.
const LEAST_NS: f64 = 50.0;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Sample {
    /// Reactor time per command, ns.
    pub(super) cpu_ns: f64,
    /// Time between the ends of two commands, ns.
    pub(super) between_ns: f64,
    /// The busy fraction of the reactors.
    pub(super) busy: f64,
    pub(super) device: DeviceFit,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DeviceFit {
    /// Commands waited for it; a greater depth was no faster.
    AtLimit,
    /// Commands waited for it; a depth above the maximum may be faster.
    Deeper,
    /// Commands waited for something else.
    Unknown,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct DeviceFits {
    /// For one command, ns.
    pub(super) ns: [f64; 6],
    /// Commands per second at least, for sizes below its limit.
    pub(super) at_least: [Option<f64>; 6],
}

pub(super) type Rounds = Vec<Sample>;

pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    match n {
        0 => 0.0,
        _ if n % 2 == 1 => values[n / 2],
        _ => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

fn busiest(rounds: &[Sample]) -> impl Iterator<Item = f64> {
    let most = rounds.iter().map(|sample| sample.busy).fold(0.0, f64::max);
    let busy = rounds
        .iter()
        .filter(move |sample| sample.busy >= most / 2.0);
    busy.map(|sample| sample.cpu_ns)
}

/// The range of the rounds, relative to the median.
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

/// The nearest sequence that never falls; at least [`LEAST_NS`].
fn rising(values: [f64; 6]) -> [f64; 6] {
    // Averaged neighbours: their sum and number.
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

pub(super) fn cpu(sizes: &[Rounds; 6]) -> [f64; 6] {
    let of = |rounds: &Rounds| median(busiest(rounds).collect());
    rising(sizes.each_ref().map(of))
}

/// From all frontends' samples of the same devices.
pub(super) fn device(frontends: &[&[Rounds; 6]], reactors: u32) -> DeviceFits {
    let (mut all, mut at_least) = ([0.0; 6], [None; 6]);
    for size in 0..all.len() {
        let seen = frontends.iter().filter_map(|sizes| {
            let rounds = &sizes[size];
            let most = |is: fn(DeviceFit) -> bool| {
                rounds.iter().filter(|s| is(s.device)).count() * 2 > rounds.len()
            };
            let device = match most(|device| device != DeviceFit::Unknown) {
                true if most(|device| device == DeviceFit::AtLimit) => DeviceFit::AtLimit,
                true => DeviceFit::Deeper,
                false => DeviceFit::Unknown,
            };
            let between = median(rounds.iter().map(|s| s.between_ns).collect());
            (!rounds.is_empty()).then_some((device, between))
        });
        let seen: Vec<(DeviceFit, f64)> = seen.collect();
        let least = |is: fn(DeviceFit) -> bool| {
            let of = seen.iter().filter(|(device, _)| is(*device));
            of.copied().min_by(|a, b| a.1.total_cmp(&b.1))
        };
        let (waited, any) = (
            least(|device| device != DeviceFit::Unknown),
            least(|_| true),
        );
        all[size] = match (waited, any) {
            (Some((_, ns)), _) => ns,
            (None, Some((_, ns))) => ns / (2.0 * f64::from(reactors.max(1))),
            (None, None) => 0.0,
        };
        let unknown = waited
            .or(any)
            .filter(|(device, _)| *device != DeviceFit::AtLimit);
        at_least[size] = unknown.map(|(_, ns)| 1e9 / ns.max(LEAST_NS));
    }
    DeviceFits {
        ns: rising(all),
        at_least,
    }
}

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

    fn sample(cpu_ns: f64, between_ns: f64, device: DeviceFit) -> Sample {
        Sample {
            cpu_ns,
            between_ns,
            busy: 1.0,
            device,
        }
    }

    #[test]
    fn samples_of_an_idle_reactor_are_ignored() {
        let asleep = Sample {
            busy: 0.1,
            ..sample(0.1, 1.0, DeviceFit::Unknown)
        };
        let rounds = vec![asleep, asleep, sample(70.0, 1.0, DeviceFit::Unknown)];
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
            sample(100.0, 1.0, DeviceFit::Unknown),
            sample(900.0, 1.0, DeviceFit::Unknown),
            sample(120.0, 1.0, DeviceFit::Unknown),
        ];
        let sizes: [Rounds; 6] = std::array::from_fn(|_| rounds.clone());
        assert_eq!(cpu(&sizes), [120.0; 6]);
        assert!((spread(&rounds) - 800.0 / 120.0).abs() < 1e-9);
        assert_eq!(cpu(&Default::default()), [LEAST_NS; 6]);
    }

    #[test]
    fn only_commands_that_waited_judge_a_device() {
        let of = |ns: f64, device: DeviceFit| -> [Rounds; 6] {
            std::array::from_fn(|_| vec![sample(1.0, ns, device); 3])
        };
        let (slow, fast) = (
            of(4000.0, DeviceFit::AtLimit),
            of(1000.0, DeviceFit::Unknown),
        );
        let known = device(&[&slow, &fast], 2);
        assert_eq!((known.ns, known.at_least), ([4000.0; 6], [None; 6]));
        // Two reactors do twice as much; the device must not limit them.
        let unknown = device(&[&of(3000.0, DeviceFit::Unknown), &fast], 2);
        assert_eq!(unknown.ns, [250.0; 6]);
        assert_eq!(unknown.at_least, [Some(1e6); 6], "as measured");
        let deeper = device(&[&of(2000.0, DeviceFit::Deeper), &fast], 2);
        assert_eq!((deeper.ns, deeper.at_least), ([2000.0; 6], [Some(5e5); 6]));
        let both = device(&[&slow, &of(2000.0, DeviceFit::Deeper)], 2);
        assert_eq!((both.ns, both.at_least), ([2000.0; 6], [Some(5e5); 6]));
        assert_eq!(device(&[], 2).ns, [LEAST_NS; 6]);
    }
}
