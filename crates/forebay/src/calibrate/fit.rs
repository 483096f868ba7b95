//! From samples to costs.
//!
//! Purpose: what of many rounds is stored, and how far they were apart.
//! Design: the median of the rounds in which reactors had the most to do (what one does as it wakes is not in its time, so who
//! sleeps now and then seems to cost nothing), then what never falls with size: neighbours that do are averaged. Nothing costs nothing.
//! A device's time is one command's part of the time at its full load, where the device was what commands waited for, whether or not more
//! of them at once would have been done faster still; where reactors were, it
//! can do more than was seen, and counts so that it will never be the limit before all reactors are: what is known of it is
//! only that, and the correction of costs finds out the rest while it runs. Either is said of it.
//! Not here: measuring.

use forebay_qos::cost::{Profile, SIZES};

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
    pub(super) device: DeviceFit,
}

/// What a load says of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DeviceFit {
    /// It does no more: commands waited for it, and more of them at once were done no faster.
    AtLimit,
    /// Commands waited for it, but more of them at once than there could be may be done faster.
    Deeper,
    /// Commands waited for something else.
    Unknown,
}

/// Of a size, what is known of devices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct DeviceFits {
    /// Of one command, ns.
    pub(super) ns: [f64; 6],
    /// Commands a second, of sizes of which it can do that at least: it was not at its limit.
    pub(super) at_least: [Option<f64>; 6],
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

    fn sample(cpu_ns: f64, between_ns: f64, device: DeviceFit) -> Sample {
        Sample {
            cpu_ns,
            between_ns,
            busy: 1.0,
            device,
        }
    }

    #[test]
    fn who_slept_tells_nothing() {
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
    fn a_device_is_judged_by_who_waited_for_it() {
        let of = |ns: f64, device: DeviceFit| -> [Rounds; 6] {
            std::array::from_fn(|_| vec![sample(1.0, ns, device); 3])
        };
        let (slow, fast) = (
            of(4000.0, DeviceFit::AtLimit),
            of(1000.0, DeviceFit::Unknown),
        );
        // Who waited for it knows.
        let known = device(&[&slow, &fast], 2);
        assert_eq!((known.ns, known.at_least), ([4000.0; 6], [None; 6]));
        // Nobody did: two reactors have twice as much, and it is not to be the limit then.
        let unknown = device(&[&of(3000.0, DeviceFit::Unknown), &fast], 2);
        assert_eq!(unknown.ns, [250.0; 6]);
        assert_eq!(unknown.at_least, [Some(1e6); 6], "as was seen");
        // Who waited for it and could not wait for more knows what it does at least.
        let deeper = device(&[&of(2000.0, DeviceFit::Deeper), &fast], 2);
        assert_eq!((deeper.ns, deeper.at_least), ([2000.0; 6], [Some(5e5); 6]));
        let both = device(&[&slow, &of(2000.0, DeviceFit::Deeper)], 2);
        assert_eq!((both.ns, both.at_least), ([2000.0; 6], [Some(5e5); 6]));
        assert_eq!(device(&[], 2).ns, [LEAST_NS; 6]);
    }
}
