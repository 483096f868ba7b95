//! A device whose calibrated costs are wrong. The test sets the clock. Operations end at once in
//! reality; the core sees their ends as if the device did one after the other.

use super::admit::{QUIET, quiet_lane};
use super::*;
use crate::lane::Share;
use forebay_device::ring::Completion;
use forebay_qos::budget::{Budget, Burst, Rate};
use forebay_qos::cost::{CostTable, Profile};
use forebay_qos::ledger::Ledger;
use forebay_qos::params::Params;
use forebay_qos::resources::Resource;
use forebay_xlate::boundary::message::NodeCapacity;

const WINDOW_NS: u64 = 1_000_000;
const STEP_NS: u64 = 50_000;
/// Shortest time of an operation, even on an idle device.
const LEAST_NS: u64 = 80_000;
/// Calibrated time for 4 KiB, and its part for each byte.
const SAID_NS: f64 = 20_000.0;
const BYTE_NS: f64 = 0.8;
const SMALL: u32 = 4096;
/// Windows until corrections have settled.
const WARM: u64 = 200;

/// A volume on another device, of a third tenant.
const OTHER: VolumeId = VolumeId(11);

/// A noisy lane (3) and a quiet one (4) on one device, and lane 5 on another, idle at first.
struct Rig {
    b: Bench,
    now_ns: u64,
    /// Steps made. They place the quiet lane's reads anywhere in a window, identically in each run.
    step: u64,
    /// Each device's true time, as a factor of the calibrated time.
    truth: [f64; 2],
    free_ns: [f64; 2],
    /// For each device: end time, slice, result.
    there: [VecDeque<(u64, usize, i32)>; 2],
    /// Reads of the other device in flight; a new one begins after `other_every` steps at the
    /// earliest.
    other_depth: u64,
    other_every: u64,
    other: u64,
    sent: usize,
    asked_ns: Vec<u64>,
    /// Quiet lane: number of ended reads, and their total time.
    quiet: (u64, u64),
    noisy: u64,
}

fn metered(base: u64, burst: u64) -> Budget {
    let rate = |iops: u64| Rate {
        iops,
        bytes: iops * (64 << 10),
    };
    Budget {
        base: rate(base),
        burst: rate(burst),
        how: Burst::Metered,
    }
}

fn rig(params: Params, noisy: &Budget, truth: f64) -> Rig {
    let mut b = bench();
    let region = b.core.region.clone();
    b.core.set_lane(quiet_lane(&region));
    b.grant(0, 0, Rights::ReadWrite, 100);
    let path = b.path.with_file_name("second");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(16 << 20).unwrap();
    let spec = format!("file:{}", path.display()).parse().unwrap();
    b.core.set_device(device(1, &spec).0);
    b.core.fenced(DeviceIndex(1));
    let (other, volume) = lane(5, OTHER, &region);
    let word = Word::new(DeviceIndex(1), ExtentIndex(0), Rights::ReadWrite).unwrap();
    volume.table.install(volume.whole(), word);
    b.core.set_lane(other);
    let device = (SAID_NS - BYTE_NS * f64::from(SMALL), BYTE_NS);
    let costs = CostTable::new([[Profile::line((100.0, 0.0), device, 0); 3]; 3]);
    let per_second = NodeCapacity::UNLIMITED.capacity(1).per_second();
    let ledger = Arc::new(Ledger::new(3));
    let params = Params {
        window_ns: WINDOW_NS,
        ..params
    };
    let mut admission = Admission::new(params, &per_second, &Arc::new(costs), &ledger).unwrap();
    admission.set_budget(0, noisy, false);
    admission.set_budget(1, &metered(5_000, 5_000), false);
    admission.set_budget(2, &metered(1_000, 1_000_000), false);
    b.core.set_admission(Some(Box::new(admission)));
    for (tenant, volume) in [(0, V), (1, QUIET), (2, OTHER)] {
        let budget = None;
        b.core.set_share(volume, Some(Share { tenant, budget }));
    }
    let now_ns = b.core.now_ns();
    let mut rig = Rig {
        b,
        now_ns,
        step: 0,
        truth: [truth, 1.0],
        free_ns: [0.0; 2],
        there: [VecDeque::new(), VecDeque::new()],
        other_depth: 0,
        other_every: 1,
        other: 0,
        sent: 0,
        asked_ns: Vec::new(),
        quiet: (0, 0),
        noisy: 0,
    };
    // Alone, before any burst.
    rig.runs(5, 0, &[SMALL]);
    rig
}

impl Rig {
    fn read(&mut self, lane: u32, len_bytes: u32) -> bool {
        let slot = self.asked_ns.len();
        let new = NewIo {
            owner: Issuer {
                frontend: FrontendIndex(0),
                conn: slot as u32,
                conn_generation: 0,
                slot: slot as u16,
            },
            lane: LaneIndex(lane),
            op: IoOp::Read {
                offset_bytes: 0,
                len_bytes,
            },
            buffer: self.b.core.staging.allocate(len_bytes),
            record: CommandRef::new(lane, (slot % 256) as u16),
            over_ns: None,
        };
        match self.b.core.start(new) {
            Ok(()) => self.asked_ns.push(self.now_ns),
            Err(new) => self.b.core.staging.release(new.buffer.unwrap()),
        }
        self.asked_ns.len() > slot
    }

    fn submitted(&mut self) {
        let mut new = Vec::new();
        for _ in crate::patience::patiently() {
            let mut batch = [Completion::default(); 64];
            let count = self.b.core.devices.ring.drain(&mut batch);
            new.extend_from_slice(&batch[..count]);
            if self.sent + new.len()
                == self
                    .b
                    .core
                    .offload
                    .at_devices(self.b.core.slices.in_flight())
            {
                break;
            }
        }
        assert_eq!(
            self.sent + new.len(),
            self.b
                .core
                .offload
                .at_devices(self.b.core.slices.in_flight())
        );
        self.sent += new.len();
        let mut new: Vec<(usize, i32)> = (new.iter())
            .map(|c| ((c.user_data & 0xffff_ffff) as usize, c.result))
            .collect();
        new.sort_by_key(|(at, _)| {
            let slice = self.b.core.slices.get(*at).unwrap();
            self.b.core.slab[slice.io as usize].owner.conn
        });
        for (at, result) in new {
            let slice = self.b.core.slices.get(at).unwrap();
            let (len, device) = (slice.op.len_bytes() as f64, usize::from(slice.device));
            let takes = self.truth[device] * (SAID_NS + BYTE_NS * (len - f64::from(SMALL)));
            let begins = self.free_ns[device].max(self.now_ns as f64);
            self.free_ns[device] = begins + takes;
            let ends = (begins + takes.max(LEAST_NS as f64)) as u64;
            self.there[device].push_back((ends, at, result));
        }
    }

    /// Runs windows with `depth` noisy reads of these sizes in flight, and sometimes a small quiet
    /// one.
    fn runs(&mut self, windows: u64, depth: u64, sizes: &[u32]) {
        for _ in 0..windows * WINDOW_NS / STEP_NS {
            self.now_ns += STEP_NS;
            self.step += 1;
            self.b.core.clock.set_clock_ns(self.now_ns);
            self.b.core.begin_turn();
            for device in 0..2 {
                while let Some((ends, at, result)) = self.there[device].front().copied()
                    && ends <= self.now_ns
                {
                    self.there[device].pop_front();
                    self.sent -= 1;
                    let core = &mut self.b.core;
                    if let Some(ended) = core.slices.completed(at, result, &mut core.devices) {
                        core.slice_ended(at, ended);
                    }
                }
            }
            while let Some(done) = self.b.core.next_done() {
                assert_eq!(done.status, Status::SUCCESS);
                self.b.core.staging.release(done.buffer.unwrap());
                let took = self.now_ns - self.asked_ns[done.owner.conn as usize];
                match done.lane {
                    LaneIndex(3) => self.noisy += 1,
                    LaneIndex(5) => self.other += 1,
                    _ => self.quiet = (self.quiet.0 + 1, self.quiet.1 + took),
                }
            }
            let in_hand = |rig: &Self, lane| rig.b.core.lane(LaneIndex(lane)).unwrap().in_flight;
            while self.step.is_multiple_of(self.other_every)
                && u64::from(in_hand(self, 5)) < self.other_depth
                && self.read(5, SMALL)
            {}
            while u64::from(in_hand(self, 3)) < depth
                && self.read(3, sizes[self.asked_ns.len() % sizes.len()])
            {}
            if in_hand(self, 4) == 0 && self.step.is_multiple_of(10) {
                assert!(self.read(4, SMALL));
            }
            self.b.core.end_turn();
            self.submitted();
        }
    }

    fn correction(&self) -> f64 {
        let cell = &self.b.core.record().corrections_milli[Resource::DeviceRead as usize];
        cell.load(Relaxed) as f64 / 1000.0
    }

    /// After corrections have settled: reads of the noisy lane per window, and the quiet lane's
    /// mean time, us.
    fn settled(&mut self, depth: u64, sizes: &[u32]) -> (f64, f64) {
        self.runs(WARM, depth, sizes);
        (self.noisy, self.quiet) = (0, (0, 0));
        self.runs(50, depth, sizes);
        let mean_us = self.quiet.1 as f64 / self.quiet.0 as f64 / 1e3;
        (self.noisy as f64 / 50.0, mean_us)
    }
}

fn uncorrected() -> Params {
    Params {
        correction_least: 1.0,
        correction_most: 1.0,
        ..Params::default()
    }
}

#[test]
fn a_device_slower_than_its_cost_is_charged_more_and_a_victim_feels_little() {
    let noisy = metered(1_000, 1_000_000);
    let (_, without_us) = rig(uncorrected(), &noisy, 3.0).settled(64, &[SMALL]);
    let mut rig = rig(Params::default(), &noisy, 3.0);
    let (noisy, us) = rig.settled(64, &[SMALL]);
    assert!(
        (2.3..=3.8).contains(&rig.correction()),
        "{}",
        rig.correction()
    );
    assert!(us < 0.4 * without_us, "{us} us, {without_us} uncorrected");
    // It can do 16 in a window, a few of them for the quiet lane.
    assert!(noisy > 8.0, "{noisy}");
}

#[test]
fn a_device_faster_than_its_cost_is_charged_less() {
    let noisy = metered(1_000, 1_000_000);
    let (without, _) = rig(uncorrected(), &noisy, 0.2).settled(64, &[SMALL]);
    let mut rig = rig(Params::default(), &noisy, 0.2);
    let (noisy, us) = rig.settled(64, &[SMALL]);
    assert!(rig.correction() < 0.4, "{}", rig.correction());
    assert!(noisy > 2.5 * without, "{noisy}, {without} uncorrected");
    assert!(us < 1000.0, "{us}");
}

#[test]
fn throttled_or_large_commands_make_no_device_look_slow() {
    // A long queue for a budget of 10 per window.
    let mut over = rig(Params::default(), &metered(10_000, 10_000), 1.0);
    over.settled(200, &[SMALL]);
    assert!(
        over.b
            .core
            .lane(LaneIndex(3))
            .unwrap()
            .record()
            .throttled
            .load(Relaxed)
            > 20
    );
    assert!(
        (0.9..=1.1).contains(&over.correction()),
        "{}",
        over.correction()
    );
    // Large operations take long, as calibrated, with small ones between.
    for sizes in [&[512 << 10][..], &[SMALL, 512 << 10]] {
        let mut large = rig(Params::default(), &metered(1_000, 1_000_000), 1.0);
        large.settled(4, sizes);
        assert!(
            (0.6..=1.3).contains(&large.correction()),
            "{sizes:?}: {}",
            large.correction()
        );
    }
}

/// The other device had quiet moments too, so its time is known.
fn both_known(params: Params, noisy: &Budget, truth: f64) -> Rig {
    let mut rig = rig(params, noisy, truth);
    rig.other_depth = 1;
    rig.runs(5, 0, &[SMALL]);
    rig
}

#[test]
fn a_slow_or_hung_device_slows_no_tenant_of_another_device() {
    // Costs are right, or too high and corrected.
    for truth in [1.0, 0.4] {
        let noisy = metered(30_000, 1_000_000);
        let (had, had_us) = rig(Params::default(), &noisy, truth).settled(64, &[SMALL]);
        let mut rig = both_known(Params::default(), &noisy, truth);
        rig.other_depth = 0;
        rig.runs(WARM, 64, &[SMALL]);
        // It is slow and has a queue; then it hangs.
        rig.other_depth = 8;
        for other in [100.0, 1e9] {
            rig.truth[1] = other;
            let (noisy, us) = rig.settled(64, &[SMALL]);
            let at = format!("{truth}, {other}: {}", rig.correction());
            // The third tenant is active now: its base is set aside.
            assert!(noisy > 0.87 * had, "{at}: {noisy} of {had}");
            assert!(us < 1.3 * had_us + 50.0, "{at}: {us} us of {had_us}");
        }
        assert!(rig.other > 0);
    }
}

#[test]
fn costs_are_dear_while_all_devices_are_slow_and_not_for_what_hangs_elsewhere() {
    let noisy = metered(30_000, 1_000_000);
    let mut rig = both_known(Params::default(), &noisy, 3.0);
    (rig.truth[1], rig.other_depth) = (30.0, 8);
    rig.runs(WARM, 64, &[SMALL]);
    assert!(rig.correction() > 2.0, "{}", rig.correction());
    // Few enough not to wait for each other.
    rig.truth = [1.0, 1e9];
    rig.runs(WARM, 4, &[SMALL]);
    assert!(rig.correction() < 1.2, "{}", rig.correction());
}

#[test]
fn a_few_operations_on_an_idle_device_do_not_hide_that_another_is_full() {
    let noisy = metered(1_000, 1_000_000);
    let mut alone = rig(Params::default(), &noisy, 1.0);
    let (had, had_us) = alone.settled(64, &[SMALL]);
    let mut rig = both_known(Params::default(), &noisy, 1.0);
    rig.other_every = 7;
    let (has, us) = rig.settled(64, &[SMALL]);
    let (least, at) = (0.8 * alone.correction(), rig.correction());
    assert!(at > least, "{at}, {} alone", alone.correction());
    assert!(us < 1.3 * had_us, "{us} us, {had_us} alone");
    assert!(has > 0.8 * had, "{has}, {had} alone");
}
