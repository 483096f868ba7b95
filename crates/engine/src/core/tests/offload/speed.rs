//! One queue over two reactors, timed by `cargo xtask bench burst`.
//!
//! **Design.** Two reactor threads; one has a lane with random 4 KiB reads on a device in memory,
//! with added processor cost. `FOREBAY_SPREAD=one-to-n:64:2:5000` means depth 64 for two seconds at
//! 5 us each; `alone` instead of `one-to-n` uses one reactor; `:both` at the end gives the second
//! reactor equal work. It prints reads per second, operations carried out by each reactor, and
//! their busy time in per cent.

use super::super::admit::quiet_lane;
use super::*;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

const VARIABLE: &str = "FOREBAY_SPREAD";

struct Host {
    lane: LaneIndex,
    depth: u64,
    random: u64,
    left: u64,
    ended: u64,
    /// The reactor's busy time.
    busy_ns: u64,
}

impl Host {
    fn new(lane: LaneIndex, depth: u64) -> Self {
        Self {
            lane,
            depth,
            random: 1 + u64::from(lane.0),
            left: 0,
            ended: 0,
            busy_ns: 0,
        }
    }

    fn start(&mut self, core: &mut Core, slot: u16) {
        self.random = self.random.wrapping_mul(0x5851_f42d_4c95_7f2d) | 1;
        self.left += 1;
        let new = NewIo {
            owner: Issuer {
                frontend: FrontendIndex(0),
                conn: 0,
                conn_generation: 0,
                slot,
            },
            lane: self.lane,
            op: read(
                (self.random ^ self.random >> 33) % (100 * EXTENT / BLOCK),
                1,
            ),
            buffer: core.staging.allocate(BLOCK as u32),
            record: CommandRef::new(self.lane.0, slot),
            over_ns: None,
        };
        assert!(core.start(new).is_ok());
    }

    /// A reactor's turn; restarts ended reads while `more`. False when nothing is left.
    fn turn(&mut self, core: &mut Core, more: bool) -> bool {
        let begun = core.begin_turn();
        let mut busy = core.reap();
        if more && self.left == 0 {
            (0..self.depth as u16).for_each(|slot| self.start(core, slot));
        }
        // Reads that end at once belong to the next turn.
        for _ in 0..core.ended_count() {
            let Some(done) = core.next_done() else { break };
            assert_eq!(done.status, Status::SUCCESS);
            core.staging.release(done.buffer.unwrap());
            (busy, self.ended, self.left) = (true, self.ended + 1, self.left - 1);
            if more {
                self.start(core, done.owner.slot);
            }
        }
        busy |= core.carry_out(busy);
        if !busy {
            core.is_idle();
        }
        core.end_turn();
        if busy {
            self.busy_ns += monotonic_ns() - begun;
        }
        self.left > 0
    }
}

#[test]
fn a_queue_is_spread() {
    let wanted = std::env::var(VARIABLE).unwrap_or_else(|_| "one-to-n:32:0:0".into());
    let mut words = wanted.split(':');
    let name = words.next().unwrap();
    let alone = name == "alone";
    let spread = [Spread::OneToOne, Spread::OneToN]
        .into_iter()
        .find(|spread| spread.name() == name);
    let spread = spread.or(alone.then_some(Spread::OneToOne));
    let spread = spread.expect("alone, one-to-one or one-to-n");
    let depth: u64 = words.next().unwrap().parse().unwrap();
    let seconds: f64 = words.next().unwrap().parse().unwrap();
    let cost_ns: u64 = words.next().unwrap().parse().unwrap();
    let both = words.next() == Some("both");

    let mut b = bench_with("ram");
    b.grant(0, 3, Rights::ReadWrite, 100);
    b.gate.cost(cost_ns);
    let bells = [ReactorBell::new().unwrap(), ReactorBell::new().unwrap()];
    let [of_home, of_other]: [Links; 2] = links(&bells).try_into().ok().unwrap();
    if !alone {
        b.core.offload.link(of_home);
        b.core.set_spread(Spread::default());
        b.core.set_spread(spread);
    }
    let stop = AtomicBool::new(alone);
    let (region, served) = (
        b.core.region.clone(),
        b.core.devices.served[0].clone().unwrap(),
    );
    let mut host = Host::new(LANE, depth);
    let mut elapsed = 0.0;
    let others = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let ring = Ring::new(&RingOptions::default()).unwrap();
            let mut core = Core::new(1, region.clone(), Staging::new().unwrap(), ring);
            core.set_device(served);
            core.fenced(DeviceIndex(0));
            core.set_lane(quiet_lane(&region));
            core.offload.link(of_other);
            core.set_spread(Spread::default());
            core.set_spread(spread);
            let mut host = Host::new(LaneIndex(4), depth);
            loop {
                let stops = stop.load(Relaxed);
                let left = host.turn(&mut core, both && !stops);
                if stops && !left {
                    break host;
                }
            }
        });
        let begun = Instant::now();
        for _ in std::iter::repeat(()) {
            let more = host.ended < 1000 || begun.elapsed().as_secs_f64() < seconds;
            if !host.turn(&mut b.core, more) && !more {
                break;
            }
        }
        elapsed = begun.elapsed().as_secs_f64();
        stop.store(true, Relaxed);
        // The other may still have handed operations to this one.
        while !other.is_finished() {
            host.turn(&mut b.core, false);
        }
        other.join().unwrap()
    });
    let record = |at: usize| &b.core.region.reactors()[at];
    let there = record(1).carried_out.load(Relaxed);
    let here = record(0).carried_out.load(Relaxed);
    // Returned operations were done at home.
    assert!(there <= record(0).handed_over.load(Relaxed));
    assert!(here <= record(1).handed_over.load(Relaxed));
    assert_eq!((b.core.staging.out(), b.core.offload.out), (0, 0));
    let per_cent = |ns: u64| ns as f64 / elapsed / 1e7;
    println!(
        "iops {} home {} there {} busy {} {}",
        (host.ended + others.ended) as f64 / elapsed,
        host.ended + here - there,
        others.ended + there - here,
        per_cent(host.busy_ns),
        per_cent(others.busy_ns)
    );
}
