//! One queue over two reactors, that `cargo xtask bench burst` times.
//!
//! Design: two threads, as a reactor's loop; one has a lane and starts 4 KiB reads at random on a device in memory, so
//! many at once, to which each operation costs the processor so many ns. `FOREBAY_SPREAD` says what to do:
//! `one-to-n:64:2:5000` for two seconds at depth 64 with 5 us each; `alone` instead of `one-to-n`: without another reactor. It prints the reads per second, how many each reactor has
//! carried out, and how long each was at it per cent.

use super::*;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// The variable that says what to do.
const VARIABLE: &str = "FOREBAY_SPREAD";

/// A turn of who has nothing of its own; ns that it was busy.
fn other_turn(core: &mut Core) -> u64 {
    let begun = core.begin_turn();
    let mut busy = core.reap();
    busy |= core.carry_out(false);
    if !busy {
        core.is_idle();
    }
    core.submit();
    match busy {
        true => monotonic_ns() - begun,
        false => 0,
    }
}

#[test]
fn a_queue_is_spread() {
    let wanted = std::env::var(VARIABLE).unwrap_or_else(|_| "one-to-n:32:0:0".into());
    let mut words = wanted.split(':');
    let name = words.next().unwrap();
    let alone = name == "alone";
    let spread = Spread::ALL.into_iter().find(|spread| spread.name() == name);
    let spread = spread.or(alone.then_some(Spread::OneToOne));
    let spread = spread.expect("alone, one-to-one, stealing or one-to-n");
    let depth: u64 = words.next().unwrap().parse().unwrap();
    let seconds: f64 = words.next().unwrap().parse().unwrap();
    let cost_ns: u64 = words.next().unwrap().parse().unwrap();

    let mut b = bench_with("ram");
    b.grant(0, 3, Rights::ReadWrite, 100);
    b.gate.cost(cost_ns);
    let bells = [ReactorBell::new().unwrap(), ReactorBell::new().unwrap()];
    let [of_home, of_other]: [Links; 2] = links(&bells).try_into().ok().unwrap();
    if !alone {
        b.core.link(of_home);
        b.core.set_spread(spread);
    }
    let stop = AtomicBool::new(alone);
    let (region, served) = (b.core.region.clone(), b.core.devices[0].clone().unwrap());
    let (mut ended, mut busy_ns, mut random) = (0u64, 0, 1u64);
    let mut elapsed = 0.0;
    let other_ns = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let ring = Ring::new(&RingOptions::default()).unwrap();
            let mut core = Core::new(1, region, Staging::new().unwrap(), ring);
            core.set_device(served);
            core.link(of_other);
            core.set_spread(spread);
            let mut busy_ns = 0;
            while !stop.load(Relaxed) {
                busy_ns += other_turn(&mut core);
            }
            busy_ns
        });
        let mut start = |core: &mut Core, slot: u16| {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d) | 1;
            let new = NewIo {
                owner: Owner {
                    conn: 0,
                    conn_generation: 0,
                    slot,
                },
                lane: LANE,
                op: read((random ^ random >> 33) % (100 * EXTENT / BLOCK), 1),
                buffer: core.staging.take(BLOCK as u32),
                record: CommandRef::new(0, slot),
            };
            assert!(core.start(new).is_ok());
        };
        let begun = Instant::now();
        (0..depth as u16).for_each(|slot| start(&mut b.core, slot));
        let mut left = depth;
        for _ in std::iter::repeat(()) {
            let core = &mut b.core;
            let turn = core.begin_turn();
            let mut busy = core.reap();
            let more = ended < 1000 || begun.elapsed().as_secs_f64() < seconds;
            // As many as there are now: what ends at once is the next turn's.
            for _ in 0..core.done.len() {
                let Some(done) = core.next_done() else { break };
                assert_eq!(done.status, Status::SUCCESS);
                core.staging.give(done.buffer.unwrap());
                (busy, ended) = (true, ended + 1);
                match more {
                    true => start(core, done.owner.slot),
                    false => left -= 1,
                }
            }
            core.submit();
            if busy {
                busy_ns += monotonic_ns() - turn;
            }
            if left == 0 {
                break;
            }
        }
        elapsed = begun.elapsed().as_secs_f64();
        stop.store(true, Relaxed);
        other.join().unwrap()
    });
    let there = b.core.region.reactors()[1].carried_out.load(Relaxed);
    assert_eq!(there, b.core.record().handed_over.load(Relaxed));
    assert_eq!((b.core.staging.out(), b.core.away.out), (0, 0));
    let per_cent = |ns: u64| ns as f64 / elapsed / 1e7;
    println!(
        "iops {} home {} there {there} busy {} {}",
        ended as f64 / elapsed,
        ended - there,
        per_cent(busy_ns),
        per_cent(other_ns)
    );
}
