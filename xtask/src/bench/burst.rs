//! `cargo xtask bench burst`: the effect of neighbours' bursts on tenants within their base.
//!
//! Measures a victim at depth 1 beside bursts, bases at several depths, total throughput and waking
//! tenants. It also measures 16 tenants within their base, and scheduling overhead. One busy
//! reactor runs on processor 0, all hosts in one thread on processor 1 ([`super::burst_client`]).
//! Costs are calibrated first; policies alternate, and values are medians of rounds. Capacity is
//! measured with scheduling off. See also [`super::burst_spread`].

use std::time::Duration;

use anyhow::{Context, Result};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::burst_client::{Did, Does, run as load};
use super::burst_rig::{POLICIES, Policy, Rig, Way};
use super::measure::{Clock, DISTURBED_CORES, Summary, median};
use super::{Options, burst_spread, forebay};

/// Mean and p99 in us, own IOPS and others' IOPS, per round.
type Figures = [Vec<f64>; 4];

/// The first is the victim.
const TENANTS: usize = 4;
const NEIGHBOURS: std::ops::Range<usize> = 1..TENANTS;
const WAKERS: usize = 32;
/// Tenants within their base, and their bases' share of the capacity.
const WITHIN: usize = 16;
const WITHIN_PART: f64 = 0.9;
const WINDOW_US: f64 = 300.0;
/// Shares of capacity: base of the victim and of each neighbour; base of all waking tenants.
const BASE_PART: f64 = 0.1;
const WAKERS_PART: f64 = 0.3;
/// The victim at depth 1 requests this part of its base, at most the paper's base: beyond that
/// depth 1 is the limit.
const INSIDE: f64 = 0.5;
const INSIDE_MOST: f64 = 20_000.0;
/// A base is kept at this part of the request, or of the host's throughput alone if that is less.
const KEPT: f64 = 0.98;
const CLIENT_CPU: usize = 1;

struct Bench {
    summary: Summary,
    quick: bool,
    time: Duration,
    rounds: u32,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let mut bench = Bench {
        summary: Summary::default(),
        quick: options.quick,
        time: Duration::from_millis(if options.quick { 250 } else { 1500 }),
        rounds: if options.quick { 3 } else { 5 },
    };
    let wanted = |name: &str| options.only.as_ref().is_none_or(|only| name.contains(only));
    if wanted("spread") {
        burst_spread::run(options, &mut bench.summary)?;
    }
    if options.only.as_deref() == Some("spread") {
        return bench.summary.print("burst", options.json.as_deref());
    }
    let program = forebay::build()?;
    for way in [Way::Pcie, Way::Tcp] {
        if !wanted(way.name()) {
            continue;
        }
        let mut rig = Rig::start(&program, "ram", way, TENANTS)?;
        rig.calibrate(options.quick)?;
        pin()?;
        bench.prepare(&mut rig, way, TENANTS, BASE_PART)?;
        bench.victim(&mut rig, way)?;
        bench.bursts(&mut rig, way)?;
        bench.base(&mut rig, way)?;
        bench.wake(&mut rig, way, 1)?;
        unpin()?;
    }
    if wanted("wake") {
        let mut rig = Rig::start(&program, "ram", Way::Pcie, TENANTS + WAKERS)?;
        rig.calibrate(options.quick)?;
        pin()?;
        let way = Way::Pcie;
        bench.prepare(&mut rig, way, TENANTS, BASE_PART)?;
        let each = rig.bases[0] as f64 / BASE_PART * WAKERS_PART / WAKERS as f64;
        for base in rig.bases.iter_mut().skip(TENANTS) {
            *base = each as u64;
        }
        bench.wake(&mut rig, way, WAKERS)?;
        unpin()?;
    }
    for way in [Way::Pcie, Way::Tcp] {
        if wanted("within") {
            let mut rig = Rig::start(&program, "ram", way, WITHIN)?;
            rig.calibrate(options.quick)?;
            pin()?;
            bench.within(&mut rig, way)?;
            unpin()?;
        }
    }
    for device in ["file", "ram"] {
        if wanted("overhead") {
            let mut rig = Rig::start(&program, device, Way::Pcie, 1)?;
            rig.calibrate(options.quick)?;
            pin()?;
            bench.overhead(&mut rig, device)?;
            unpin()?;
        }
    }
    bench.summary.print("burst", options.json.as_deref())
}

fn pin() -> Result<()> {
    let mut set = CpuSet::new();
    set.set(CLIENT_CPU);
    sched_setaffinity(None, &set).context("pin the hosts' thread")
}

/// For programs started later.
fn unpin() -> Result<()> {
    let mut set = CpuSet::new();
    let processors = std::thread::available_parallelism().map_or(2, |n| n.get().max(2));
    (0..processors).for_each(|cpu| set.set(cpu));
    sched_setaffinity(None, &set).context("unpin the hosts' thread")
}

fn all(depth: u16) -> Vec<(usize, Does)> {
    NEIGHBOURS.map(|at| (at, Does::All(depth))).collect()
}

impl Bench {
    fn load(&mut self, rig: &mut Rig, does: &[(usize, Does)]) -> Result<Vec<Did>> {
        let clock = Clock::start(&rig.forebay.processes())?;
        let did = load(&mut rig.streams, does, self.time)?;
        self.summary.disturbed |= clock.used()?.others_cores > DISTURBED_CORES;
        Ok(did)
    }

    /// Sets bases as parts of the measured capacity.
    fn prepare(&mut self, rig: &mut Rig, way: Way, tenants: usize, part: f64) -> Result<()> {
        rig.set(Policy::Off)?;
        let does: Vec<_> = (0..TENANTS).map(|at| (at, Does::All(32))).collect();
        let mut sums = Vec::new();
        for _ in 0..self.rounds {
            let did = self.load(rig, &does)?;
            sums.push(did.iter().map(Did::iops).sum());
        }
        let capacity = median(sums);
        println!("{:<6}a reactor's capacity: {capacity:.0} IOPS", way.name());
        self.summary
            .put(format!("{}_capacity", way.name()), capacity);
        for base in rig.bases.iter_mut().take(tenants) {
            *base = (capacity * part) as u64;
        }
        Ok(())
    }

    fn victim(&mut self, rig: &mut Rig, way: Way) -> Result<()> {
        let way = way.name();
        let depths: &[u16] = if self.quick {
            &[1, 16, 64]
        } else {
            &[1, 2, 4, 8, 16, 32, 64]
        };
        let pace = (rig.bases[0] as f64 * INSIDE).min(INSIDE_MOST);
        let victim = (0, Does::Pace(1, pace));
        println!(
            "{way:<6}a victim with {pace:.0} IOPS, of a base of {}\n{:<6}{:<7}{:<7}{:>10}{:>10}{:>10}{:>12}",
            rig.bases[0], "", "depth", "policy", "mean us", "p99 us", "IOPS", "others IOPS"
        );
        let mut worst = [f64::INFINITY, 0.0, 0.0, f64::INFINITY];
        for depth in depths {
            let (figures, of_off) = self.beside(rig, victim, *depth)?;
            let [others, mean] = of_off.map(median);
            let prefix = format!("{way}_depth{depth}");
            println!(
                "{way:<6}{depth:<7}of off: others' throughput {others:.3}, the victim's mean {mean:.3}"
            );
            self.summary
                .put(format!("{prefix}_others_over_off_iops_ratio"), others);
            self.summary
                .put(format!("{prefix}_victim_over_off_latency_share"), mean);
            let names = POLICIES.map(Policy::name).into_iter().chain(["alone"]);
            let mut of = Vec::new();
            for (name, figures) in names.zip(figures) {
                let [mean, p99, own, others] = figures.map(median);
                println!(
                    "{way:<6}{depth:<7}{name:<7}{mean:>10.1}{p99:>10.1}{own:>10.0}{others:>12.0}"
                );
                let prefix = format!("{way}_depth{depth}_{name}");
                self.summary.put(format!("{prefix}_victim_mean_us"), mean);
                self.summary.put(format!("{prefix}_victim_p99_us"), p99);
                if name != "alone" {
                    self.summary.put(format!("{prefix}_others_iops"), others);
                }
                of.push((mean, p99, own + others));
            }
            let [_, wild, _, burst, alone] = of[..] else {
                continue;
            };
            let ratios = [
                (1.0 - burst.0 / wild.0) * 100.0,
                burst.0 / alone.0,
                burst.1 / alone.1,
                burst.2 / wild.2,
            ];
            println!(
                "{way:<6}{depth:<7}mean {:.0} % below wild's, {:.2} times alone; p99 {:.2} times alone; throughput {:.3} of wild's",
                ratios[0], ratios[1], ratios[2], ratios[3]
            );
            worst[0] = worst[0].min(ratios[0]);
            worst[1] = worst[1].max(ratios[1]);
            worst[2] = worst[2].max(ratios[2]);
            worst[3] = worst[3].min(ratios[3]);
            self.summary
                .put(format!("{way}_depth{depth}_below_wild_percent"), ratios[0]);
        }
        for (name, value) in [
            "least_below_wild_percent",
            "worst_mean_over_alone",
            "worst_p99_over_alone",
            "least_throughput_over_wild",
        ]
        .into_iter()
        .zip(worst)
        {
            self.summary.put(format!("{way}_{name}"), value);
        }
        Ok(())
    }

    /// Values per policy and alone; with scheduling off, others' throughput and the victim's mean.
    fn beside(
        &mut self,
        rig: &mut Rig,
        victim: (usize, Does),
        depth: u16,
    ) -> Result<(Vec<Figures>, [Vec<f64>; 2])> {
        let mut figures: Vec<Figures> = vec![Figures::default(); POLICIES.len() + 1];
        let mut of_off: [Vec<f64>; 2] = Default::default();
        for _ in 0..self.rounds {
            for (policy, figures) in POLICIES.into_iter().zip(&mut figures) {
                rig.set(policy)?;
                let does = [vec![victim], all(depth)].concat();
                let did = self.load(rig, &does)?;
                put(figures, &did);
            }
            let did = self.load(rig, &[victim])?;
            if let Some(alone) = figures.last_mut() {
                put(alone, &did);
            }
            for (ratios, at) in of_off.iter_mut().zip([3, 0]) {
                let last = |policy: Policy| figures[policy as usize][at].last().copied();
                let pair = last(Policy::Burst).zip(last(Policy::Off));
                ratios.extend(pair.map(|(burst, off)| burst / off));
            }
        }
        Ok((figures, of_off))
    }

    /// Total throughput of bursts against scheduling off.
    fn bursts(&mut self, rig: &mut Rig, way: Way) -> Result<()> {
        let mut least = f64::INFINITY;
        for depth in [1u16, 8, 64] {
            let does: Vec<_> = (0..TENANTS).map(|at| (at, Does::All(depth))).collect();
            let (mut ratios, mut of_off, mut all) = (Vec::new(), Vec::new(), Vec::new());
            for _ in 0..self.rounds {
                let mut iops = [0.0; 3];
                let policies = [Policy::Off, Policy::Wild, Policy::Burst];
                for (iops, policy) in iops.iter_mut().zip(policies) {
                    rig.set(policy)?;
                    *iops = self.load(rig, &does)?.iter().map(Did::iops).sum();
                }
                of_off.push(iops[2] / iops[0]);
                ratios.push(iops[2] / iops[1]);
                all.push(iops[2]);
            }
            let (ratio, of_off, all) = (median(ratios), median(of_off), median(all));
            least = least.min(ratio);
            let way = way.name();
            println!(
                "{way:<6}all {TENANTS} burst at depth {depth}: {all:.0} IOPS, {of_off:.3} of off, {ratio:.3} of wild's"
            );
            let prefix = format!("{way}_bursts_depth{depth}");
            self.summary.put(format!("{prefix}_iops"), all);
            self.summary.put(format!("{prefix}_iops_ratio"), ratio);
            self.summary
                .put(format!("{prefix}_over_off_iops_ratio"), of_off);
        }
        let name = format!("{}_least_bursts_over_wild", way.name());
        self.summary.put(name, least);
        Ok(())
    }

    /// A base at each depth beside neighbours: the paper's base, and a part of the reactor.
    fn base(&mut self, rig: &mut Rig, way: Way) -> Result<()> {
        let part = rig.bases[0];
        if part as f64 > INSIDE_MOST {
            self.base_of(rig, way, "paper_base", INSIDE_MOST)?;
        }
        self.base_of(rig, way, "base", part as f64)
    }

    fn base_of(&mut self, rig: &mut Rig, way: Way, name: &str, base: f64) -> Result<()> {
        // Budgets are published when set anew.
        rig.set(Policy::Off)?;
        let was = std::mem::replace(&mut rig.bases[0], base as u64);
        rig.set(Policy::Burst)?;
        let mut got = 0;
        for depth in [1u16, 2, 4, 8, 16, 32, 64, 128] {
            let does = [vec![(0, Does::Pace(depth, base))], all(depth.min(64))].concat();
            let (mut beside, mut alone) = (Vec::new(), Vec::new());
            for _ in 0..self.rounds {
                beside.push(self.load(rig, &does)?[0].iops());
                alone.push(self.load(rig, &does[..1])?[0].iops());
            }
            let (iops, alone) = (median(beside), median(alone));
            let has = has_base(iops, base, alone);
            got += u32::from(has);
            println!(
                "{:<6}depth {depth:<4} asks for its base of {base:.0}, gets {iops:.0}, alone {alone:.0}: {:.1} and {:.1} %{}",
                way.name(),
                100.0 * iops / base,
                100.0 * alone / base,
                if has { "" } else { ", too little" }
            );
            let prefix = format!("{}_{name}_depth{depth}", way.name());
            self.summary.put(format!("{prefix}_iops"), iops);
            self.summary.put(format!("{prefix}_alone_iops"), alone);
        }
        self.summary
            .put(format!("{}_{name}_at_depths", way.name()), f64::from(got));
        println!("{:<6}base of {base:.0} at {got} of 8 depths", way.name());
        rig.set(Policy::Off)?;
        rig.bases[0] = was;
        Ok(())
    }

    /// Idle tenants wake and request one window of base.
    fn wake(&mut self, rig: &mut Rig, way: Way, wakers: usize) -> Result<()> {
        rig.set(Policy::Burst)?;
        let first = if wakers == 1 { 0 } else { TENANTS };
        let many = (rig.bases[first] as f64 * WINDOW_US / 1e6).clamp(1.0, 128.0) as u16;
        let pause = Duration::from_millis(40);
        let does: Vec<_> = (first..first + wakers)
            .map(|at| (at, Does::Wake(pause, many)))
            .chain(all(32))
            .collect();
        let time = std::mem::replace(&mut self.time, Duration::from_millis(60));
        let mut longest = Vec::new();
        for _ in 0..if self.quick { 10 } else { 100 } {
            let did = self.load(rig, &does)?;
            let of = |did: &Did| did.part_us(1.0);
            longest.push(did.iter().take(wakers).map(of).fold(0.0, f64::max));
        }
        self.time = time;
        longest.sort_by(f64::total_cmp);
        let at = |part: f64| longest[((longest.len() - 1) as f64 * part) as usize] / WINDOW_US;
        let name = format!("{}_wake{wakers}", way.name());
        println!(
            "{:<6}{wakers} that wake beside bursts, {many} commands each: all done after {:.2} windows, p90 {:.2}, at most {:.2}",
            way.name(),
            at(0.5),
            at(0.9),
            at(1.0)
        );
        self.summary.put(format!("{name}_windows"), at(0.5));
        self.summary.put(format!("{name}_p90_windows"), at(0.9));
        Ok(())
    }

    /// Total throughput within the bases against scheduling off.
    fn within(&mut self, rig: &mut Rig, way: Way) -> Result<()> {
        rig.set(Policy::Off)?;
        let all = |does: Does| -> Vec<_> { (0..WITHIN).map(|at| (at, does)).collect() };
        let most = self.load(rig, &all(Does::All(8)))?;
        let base = most.iter().map(Did::iops).sum::<f64>() * WITHIN_PART / WITHIN as f64;
        rig.bases.fill(base as u64);
        let mut ratios = Vec::new();
        for _ in 0..self.rounds {
            let mut iops = [0.0; 2];
            for (iops, policy) in iops.iter_mut().zip([Policy::Off, Policy::Burst]) {
                rig.set(policy)?;
                let did = self.load(rig, &all(Does::Pace(8, base)))?;
                *iops = did.iter().map(Did::iops).sum();
            }
            ratios.push(iops[1] / iops[0]);
        }
        let (ratio, way) = (median(ratios), way.name());
        println!(
            "{way:<6}{WITHIN} tenants that ask for their base of {base:.0}: {ratio:.3} of off"
        );
        self.summary
            .put(format!("{way}_within_over_off_iops_ratio"), ratio);
        Ok(())
    }

    /// The cost of scheduling without contention.
    fn overhead(&mut self, rig: &mut Rig, device: &str) -> Result<()> {
        // More than it uses.
        rig.bases[0] = if device == "file" { 500_000 } else { 2_000_000 };
        let mut ratios = Vec::new();
        for _ in 0..if self.quick { 9 } else { 15 } {
            let mut iops = [0.0; 2];
            for (iops, policy) in iops.iter_mut().zip([Policy::Off, Policy::Burst]) {
                rig.set(policy)?;
                *iops = self.load(rig, &[(0, Does::All(32))])?[0].iops();
            }
            ratios.push(iops[1] / iops[0]);
        }
        let ratio = median(ratios);
        println!("{device:<6}IOPS with scheduling over those without: {ratio:.3}");
        self.summary
            .put(format!("{device}_overhead_iops_ratio"), ratio);
        Ok(())
    }
}

fn has_base(iops: f64, asked: f64, alone: f64) -> bool {
    iops >= KEPT * asked.min(alone)
}

fn put(figures: &mut [Vec<f64>; 4], did: &[Did]) {
    let Some((victim, others)) = did.split_first() else {
        return;
    };
    let values = [
        victim.mean_us(),
        victim.part_us(0.99),
        victim.iops(),
        others
            .iter()
            .map(Did::iops)
            .fold(0.0, |sum, iops| sum + iops),
    ];
    for (figures, value) in figures.iter_mut().zip(values) {
        figures.push(value);
    }
}

#[cfg(test)]
mod tests {
    use super::has_base;

    #[test]
    fn a_base_is_met_within_two_percent() {
        assert!(has_base(98.0, 100.0, 150.0));
        assert!(!has_base(97.0, 100.0, 150.0));
        // Limited by its depth.
        assert!(has_base(59.0, 100.0, 60.0));
        assert!(!has_base(58.0, 100.0, 60.0));
    }
}
