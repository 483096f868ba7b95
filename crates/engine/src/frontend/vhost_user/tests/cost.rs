//! A fixed run whose instructions `cargo xtask bench instructions` counts.
//!
//! Requests are indirect chains as in Linux. `FOREBAY_COST` selects kind, depth, rounds and ring:
//! `read:8:1000:packed`; with `:admitted`, for a tenant with ample budget. See
//! `frontend::nvme_tcp::tests::cost`.

use super::guest::{Guest, PLAIN, Way};
use super::rig::Rig;
use super::{IN, OUT};
use crate::lane::LaneIndex;
use std::sync::atomic::Ordering::Relaxed;

/// Rounds before the counted ones.
const WARM_ROUNDS: u64 = 100;

#[test]
fn requests_are_executed() {
    let wanted = std::env::var("FOREBAY_COST").unwrap_or("write:8:1:packed".into());
    let words: Vec<&str> = wanted.split(':').collect();
    let kind = match words[0] {
        "read" => IN,
        _ => OUT,
    };
    let (batch, rounds): (u64, u64) = (words[1].parse().unwrap(), words[2].parse().unwrap());
    let way = Way {
        packed: words.get(3) != Some(&"split"),
        event_idx: true,
        ..PLAIN
    };
    let mut rig = Rig::on("null", 1);
    let mut guest = rig.guest(way);
    for round in 0..WARM_ROUNDS + rounds {
        for i in 0..batch {
            guest.offer_again(i as usize, kind, (round * 7 + i * 5) % 1600 * 8);
        }
        if words.get(4) == Some(&"admitted") {
            rig.core.admit_plenty(round);
        }
        match round < WARM_ROUNDS {
            true => turn(&mut rig),
            false => counted_turn(&mut rig),
        }
        for _ in 0..batch {
            assert!(is_done(&mut guest));
        }
    }
    let record = rig.core.lane(LaneIndex(3)).unwrap().record();
    assert_eq!(record.throttled_ops.load(Relaxed), 0);
}

fn is_done(guest: &mut Guest) -> bool {
    guest.drivers[0].collect().is_some()
}

fn turn(rig: &mut Rig) {
    rig.core.begin_turn();
    rig.core.reap();
    rig.vms.poll_all(&mut rig.core);
    rig.core.end_turn();
}

#[inline(never)]
fn counted_turn(rig: &mut Rig) {
    turn(std::hint::black_box(rig));
}
