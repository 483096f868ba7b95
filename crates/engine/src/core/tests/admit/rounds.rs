//! Under `wild`, lanes begin by turns, by what their tenants' bases are.

use super::*;
use forebay_burst::budget::{Burst, Rate};
use forebay_burst::params::Policy;

/// So much of a base, and as much as there is.
fn weighs(ops: u64) -> Budget {
    let rate = |iops| Rate {
        iops,
        bytes: iops * 4096,
    };
    Budget {
        base: rate(ops),
        burst: rate(4_000_000),
        how: Burst::Metered,
    }
}

/// The noisy lane's tenant has three times the base of the quiet one's.
fn wild() -> Rig {
    let mut rig = rig(&fixed(1), &fixed(1));
    let params = Params {
        window_ns: WINDOW_NS,
        policy: Policy::Wild,
        batch_ns: 12_000,
        ..Params::default()
    };
    let per_second = NodeCapacity::UNLIMITED.capacity(1).per_second();
    let costs = CostTable::new(default_profiles());
    let board = Arc::new(Board::new(2));
    let mut admission = Admission::new(params, &per_second, &costs, &board).unwrap();
    admission.set_budget(0, &weighs(30_000));
    admission.set_budget(1, &weighs(10_000));
    rig.b.core.set_admission(Some(Box::new(admission)));
    for (tenant, volume) in [(0, V), (1, QUIET)] {
        let budget = None;
        let share = Some(Share { tenant, budget });
        rig.b.core.set_share(volume, share);
    }
    rig
}

#[test]
fn wild_is_a_weighted_round_robin() {
    let mut rig = wild();
    for _ in 0..3 {
        rig.pass(WINDOW_NS);
        rig.read(3);
        rig.read(4);
        rig.ended_well();
    }
    rig.pass(1000);
    let before = [3, 4].map(|lane| rig.throttled(lane).0);
    // In every turn as many come as can wait. What comes first takes no more than is its own of the turn.
    let (mut begun, mut ended) = ([const { Vec::new() }; 2], [const { Vec::new() }; 2]);
    for turn in 0..20 {
        for (lane, begun) in [3, 4].into_iter().zip(&mut begun) {
            while rig.throttled(lane).1 < 30 {
                begun.push(rig.read(lane));
            }
        }
        for slot in rig.ended_well() {
            let of = begun.iter().position(|begun| begun.contains(&slot));
            ended[of.unwrap()].push(slot);
        }
        assert!(
            rig.b.core.must_turn(),
            "turn {turn}: no event is waited for"
        );
        rig.pass(1000);
    }
    let [noisy, quiet] = [0, 1].map(|at| ended[at].len() as f64);
    assert!((2.8..3.2).contains(&(noisy / quiet)), "{noisy} {quiet}");
    assert!(quiet >= 20.0, "{quiet}");
    for (begun, ended) in begun.iter().zip(&mut ended) {
        assert_eq!(*ended, begun[..ended.len()]);
    }
    // That was no window's end, and nobody was over budget.
    assert_eq!([3, 4].map(|lane| rig.throttled(lane).0), before);
}
