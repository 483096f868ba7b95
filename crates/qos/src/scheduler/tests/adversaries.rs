//! Tenants that exploit the algorithm: a tenant within its base falls behind by at most two
//! windows' base.

use super::{ALL, Bench, FIT, NONE, STEPS, budget, even, params};
use crate::budget::Burst;

const BEHIND: u64 = 2;

/// Four victims at 90 % of their base of 50,000 against twelve others with the same budget.
fn against(
    how: Burst,
    windows: u64,
    adversary: &dyn Fn(usize, u64, usize) -> (usize, u32),
) -> Bench {
    let mut bench = Bench::new(&[budget(50_000, 900_000, how); 16], params());
    let mut ended = [0u64; 4];
    for _ in 0..windows {
        bench.window(1000, &|tenant, window, step| {
            if tenant < 4 {
                even(45, window, step)
            } else {
                adversary(tenant - 4, window, step)
            }
        });
        for (victim, ended) in ended.iter_mut().enumerate() {
            *ended += bench.ended[victim];
            let asked = 45 * bench.window;
            assert!(
                *ended + BEHIND * 45 >= asked,
                "window {}: victim {victim} has {ended} of {asked}",
                bench.window
            );
        }
    }
    bench
}

#[test]
fn pulse_at_window_period() {
    for phase in 0..STEPS {
        // The whole load in one step of each window, or of every second one.
        against(Burst::Metered, 60, &|_, _, step| {
            if step == phase { (400, 4096) } else { NONE }
        });
        against(Burst::Metered, 60, &|_, window, step| {
            if step == phase && window % 2 == 0 {
                (400, 4096)
            } else {
                NONE
            }
        });
        against(Burst::Metered, 60, &|tenant, window, step| {
            let mine = (window as usize + tenant).is_multiple_of(3);
            if mine && (step + tenant) % STEPS == phase {
                (400, 65536)
            } else {
                NONE
            }
        });
    }
}

#[test]
fn idle_and_burst_to_fish_for_credit() {
    for period in [2, 7, 50] {
        against(Burst::Credit { seconds: 10 }, 300, &|tenant, window, _| {
            if (window + tenant as u64).is_multiple_of(period) {
                ALL
            } else {
                NONE
            }
        });
    }
}

#[test]
fn mixed_sizes() {
    against(Burst::Metered, 200, &|tenant, window, step| {
        let large = (tenant + step + window as usize).is_multiple_of(5);
        if large { (4, 1 << 20) } else { (50, 512) }
    });
}

#[test]
fn all_wake_at_once() {
    // Two burst over the whole reactor; 32 wake at once and ask for their base of 20,000, together
    // 640 of about 790 per window.
    let mut budgets = vec![budget(20_000, 900_000, Burst::Metered); 34];
    budgets[0] = budget(50_000, 900_000, Burst::Metered);
    budgets[1] = budgets[0];
    for phase in 0..STEPS {
        let mut bench = Bench::new(&budgets, params());
        let wake = 30;
        let mut ended = vec![0u64; 34];
        for window in 0..60u64 {
            bench.window(1000, &|tenant, window, step| {
                let at = window as usize * STEPS + step;
                let woken = wake * STEPS + phase;
                if tenant < 2 {
                    ALL
                } else if at >= woken {
                    even(20, 0, (at - woken) % STEPS)
                } else {
                    NONE
                }
            });
            if window < wake as u64 {
                let sum = bench.ended[0] + bench.ended[1];
                assert!(window < 2 || sum > FIT * 90 / 100, "{:?}", bench.ended);
                continue;
            }
            let steps = (window as usize + 1 - wake) * STEPS - phase;
            let asked = 20 * steps as u64 / STEPS as u64;
            for tenant in 2..34 {
                ended[tenant] += bench.ended[tenant];
                assert!(
                    ended[tenant] + BEHIND * 20 >= asked,
                    "phase {phase}, window {window}: {tenant} has {} of {asked}",
                    ended[tenant]
                );
                if window == wake as u64 + 5 {
                    assert!(ended[tenant] + 5 >= asked, "{} of {asked}", ended[tenant]);
                }
            }
        }
    }
}
