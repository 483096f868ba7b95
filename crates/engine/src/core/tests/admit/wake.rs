//! Wakeups: a reactor that slept, and many tenants at once while others burst.

use super::*;
use forebay_qos::budget::{Burst, Rate};
use forebay_qos::cost::Profile;

/// Processor time of a read, and of a turn: a window is 200 reads.
const READ_NS: u64 = 1_500;
const TURN_NS: u64 = 200;
const A_SECOND: f64 = 1e9 / READ_NS as f64;
/// Lanes that burst, each with this many commands in flight.
const BURST: std::ops::Range<usize> = 0..3;
const DEPTH: usize = 32;
/// Lanes that wake.
const WAKERS: usize = 32;
/// The first lane.
const FIRST: usize = 5;
const WARM_WINDOWS: u64 = 40;
const BOUND_WINDOWS: u64 = 7;

fn metered(base: u64) -> Budget {
    let rate = |iops| Rate {
        iops,
        bytes: iops * 4096,
    };
    Budget {
        base: rate(base),
        burst: rate(4_000_000),
        how: Burst::Metered,
    }
}

/// A reactor whose time three bursting lanes use up, while 32 others, with this part of it as their
/// base, sleep.
fn asleep(part: f64) -> (Rig, u64) {
    let each = (A_SECOND * part) as u64 / WAKERS as u64;
    let mut rig = rig(&fixed(1), &fixed(1));
    let tenants = BURST.len() + WAKERS;
    let region = rig.b.core.region.clone();
    let profile = Profile::line((READ_NS as f64, 0.0), (0.0, 0.0), 0);
    let costs = CostTable::new([[profile; 3]; 3]);
    let ledger = Arc::new(Ledger::new(tenants));
    let per_second = NodeCapacity::UNLIMITED.capacity(1).per_second();
    let mut admission = Admission::new(Params::default(), &per_second, &costs, &ledger).unwrap();
    for tenant in 0..tenants {
        let base = if BURST.contains(&tenant) {
            10_000
        } else {
            each
        };
        admission.set_budget(tenant as u32, &metered(base), false);
    }
    rig.b.core.set_admission(Some(Box::new(admission)));
    for at in 0..tenants {
        let volume = VolumeId(100 + at as u64);
        let lane = mapped_lane((FIRST + at) as u32, volume, &region);
        rig.b.core.set_lane(lane);
        let (tenant, budget) = (at as u32, None);
        (rig.b.core).set_share(volume, Some(Share { tenant, budget }));
    }
    (rig, each)
}

/// They wake at `phase` of a window, at this depth; reads cost `dear` times their calibrated cost.
/// Returns the windows until each had a window's base, and the largest lag after the bound.
fn wake(part: f64, dear: f64, depth: usize, phase: f64) -> (f64, f64) {
    let (mut rig, each) = asleep(part);
    let window_ns = Params::default().window_ns;
    let (begun_ns, mut woke_ns) = (rig.now_ns, None);
    let mut in_hand = [0; BURST.end + WAKERS];
    let mut had = [0u64; WAKERS];
    let a_window = each as f64 * window_ns as f64 / 1e9;
    let (mut all_ns, mut behind) = (None, 0f64);
    let mut of_slot = std::collections::BTreeMap::new();
    let mut took_ns = 0;
    loop {
        rig.pass(took_ns);
        let since_ns = rig.now_ns - begun_ns;
        let wakes_ns = WARM_WINDOWS * window_ns + (phase * window_ns as f64) as u64;
        if since_ns >= wakes_ns {
            woke_ns.get_or_insert(rig.now_ns);
        }
        // The bursting lanes come first.
        for (at, in_hand) in in_hand.iter_mut().enumerate() {
            let most = match BURST.contains(&at) {
                true => DEPTH,
                false if woke_ns.is_some() => depth,
                false => 0,
            };
            while *in_hand < most
                && let Some(slot) = rig.try_read((FIRST + at) as u32)
            {
                *in_hand += 1;
                of_slot.insert(slot, at);
            }
        }
        let ended = rig.ended_well();
        for slot in &ended {
            let at = of_slot.remove(slot).unwrap();
            in_hand[at] -= 1;
            if !BURST.contains(&at) {
                had[at - BURST.end] += 1;
            }
        }
        if ended.is_empty() {
            rig.b.core.is_idle();
        }
        took_ns = TURN_NS + (ended.len() as f64 * dear * READ_NS as f64) as u64;
        let Some(woke_ns) = woke_ns else {
            continue;
        };
        let windows = (rig.now_ns + took_ns - woke_ns) as f64 / window_ns as f64;
        let least = had.iter().copied().min().unwrap() as f64;
        if least >= a_window.ceil() {
            all_ns.get_or_insert(windows);
        }
        if windows >= BOUND_WINDOWS as f64 {
            behind = behind.max(windows - least / a_window);
        }
        if windows >= 3.0 * BOUND_WINDOWS as f64 {
            return (all_ns.unwrap_or(f64::INFINITY), behind);
        }
    }
}

/// With right costs and with costs far too low.
#[test]
fn all_wake_at_once() {
    for (part, dear) in [(0.3, 1.0), (0.8, 1.0), (0.3, 2.0), (0.5, 1.5)] {
        for depth in [1, 4, 16, 32] {
            for phase in [0.0, 0.4, 0.8] {
                let (windows, behind) = wake(part, dear, depth, phase);
                let what = format!(
                    "{part} of the reactor, reads {dear} times as dear, depth {depth}, {phase} of a window: all had their base after {windows:.2} windows; later {behind:.2} behind"
                );
                println!("{what}");
                let bound = BOUND_WINDOWS as f64;
                assert!(windows <= bound && behind <= bound, "{what}");
            }
        }
    }
}

/// A waking reactor offers one window's refill; a late one makes up for the rest.
#[test]
fn a_waking_reactor_offers_one_window() {
    for (late, begins) in [(false, 4), (true, 20)] {
        let mut rig = rig(&fixed(4), &Budget::unstated());
        rig.read(3);
        assert_eq!(rig.ended_well().len(), 1);
        rig.now_ns += 40 * WINDOW_NS;
        rig.b.core.clock.set_now_ns(rig.now_ns);
        if !late {
            rig.b.core.qos.woke(rig.b.core.now_ns());
        }
        rig.pass(0);
        (0..20).for_each(|_| _ = rig.read(3));
        let mut begun = 0;
        for _ in 0..20 {
            begun += rig.ended_well().len();
            rig.pass(1000);
        }
        assert_eq!(begun, begins, "{late}");
    }
}
