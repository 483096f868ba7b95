//! Lanes that are alone, and reactors that sleep.

use super::*;

/// A lane alone for a while begins more per turn, until another lane asks. So a lane that asks
/// every few windows still finds short turns.
#[test]
fn a_lane_that_is_alone_gets_a_longer_quantum() {
    let alone_windows = crate::qos::ALONE_WINDOWS as usize;
    let mut rig = rig(&Budget::unstated(), &Budget::unstated());
    let mut begun = |others: bool| {
        rig.pass(WINDOW_NS);
        rig.ended();
        (0..24).for_each(|_| _ = rig.read(3));
        if others {
            rig.read(4);
        }
        let first = rig.ended_well().len();
        rig.pass(1000);
        while !rig.ended_well().is_empty() {
            rig.pass(1000);
        }
        first
    };
    let shared: Vec<usize> = [true; 4].into_iter().map(&mut begun).collect();
    let alone: Vec<usize> = (0..2 * alone_windows).map(|_| begun(false)).collect();
    // The first turn had begun when the other lane asked.
    let again = [true; 2].map(&mut begun)[1];
    let most = shared[3];
    assert!(most > 0 && again <= most + 1, "{shared:?} {again}");
    let (before, after) = alone.split_at(alone_windows - 2);
    assert!(
        before.iter().all(|n| *n <= most + 1),
        "{shared:?} {before:?}"
    );
    assert!(
        after[4..].iter().all(|n| *n >= most + most / 2),
        "{shared:?} {after:?}"
    );
    // A lane that asks sometimes, but more often than that.
    for window in 0..3 * alone_windows {
        let comes = window % (alone_windows / 2) == 0;
        let first = begun(comes);
        assert!(first <= most + 1, "{window}: {first}");
    }
}

/// A reactor with a part of a shared tenant sleeps only until the others can have it.
#[test]
fn an_idle_reactor_ends_windows_in_time_where_others_have_a_part() {
    for shared in [false, true] {
        let mut rig = rig(&fixed(100), &fixed(1));
        if shared {
            rig.ledger.entry(0).shares.attach(true);
        }
        rig.read(3);
        rig.ended_well();
        // Windows until the reactor wakes.
        let mut sleeps = || {
            let until_ns = rig.b.core.qos.window_ends_ns()?;
            let ns = until_ns - rig.now_ns;
            rig.now_ns = until_ns;
            rig.b.core.clock.set_now_ns(rig.now_ns);
            rig.b.core.qos.woke(rig.b.core.now_ns());
            rig.pass(0);
            Some(ns.div_ceil(WINDOW_NS))
        };
        let windows: Vec<u64> = std::iter::from_fn(&mut sleeps).take(10).collect();
        let expected: &[u64] = if shared { &[1, 1, 9] } else { &[9, 9] };
        assert_eq!(windows, expected, "{shared}");
    }
}
