//! A tenant with volumes on several reactors whose load is uneven or moves.

use super::reactors::reactors;
use super::*;
use crate::cost::Routes;

/// I/Os asked for, begun and metered, and the longest backlog at a window's end.
#[derive(Clone, Copy, Default, Debug)]
struct Had {
    asked: f64,
    begun: u64,
    metered: f64,
    behind: f64,
}

impl Had {
    fn left(&self) -> f64 {
        self.asked - self.begun as f64
    }
}

/// Reactors with one lane each; `asks` says how many I/Os come per window.
fn had(
    reactors: &mut [Scheduler],
    cost: &ResourceVector,
    windows: u64,
    asks: &dyn Fn(usize, u64) -> f64,
) -> Had {
    let mut had = Had::default();
    let metered = |reactors: &[Scheduler]| {
        let parts = reactors.iter().map(|one| one.statistics(0).metered_parts);
        parts.sum::<u64>() as f64 / f64::from(PARTS)
    };
    let before = metered(reactors);
    let mut asked = vec![0f64; reactors.len()];
    let mut waiting = vec![0u32; reactors.len()];
    for window in 0..windows {
        for _ in 0..STEPS {
            for (at, scheduler) in reactors.iter_mut().enumerate() {
                let more = asks(at, window) / STEPS as f64;
                had.asked += more;
                asked[at] += more;
                while asked[at] >= 1.0 {
                    asked[at] -= 1.0;
                    waiting[at] += 1;
                    scheduler.wait(0, cost);
                }
                while waiting[at] > 0 && scheduler.resume(0, cost) {
                    waiting[at] -= 1;
                    had.begun += 1;
                }
            }
        }
        reactors
            .iter_mut()
            .for_each(|scheduler| scheduler.refill(1, 0));
        let behind = had.asked - had.begun as f64 - asked.iter().sum::<f64>();
        had.behind = had.behind.max(behind);
    }
    had.metered = metered(reactors) - before;
    had
}

#[test]
fn a_base_is_had_where_it_is_asked_for() {
    // 20 per window; little or nothing elsewhere.
    for others in [0.0, 0.03, 0.1] {
        for count in [2usize, 3, 8] {
            for more in [1, 4] {
                let all = budget(20_000, 20_000 * more, Burst::Metered);
                let (mut reactors, cost) = reactors(&vec![1; count], &all, &params());
                let part = if others == 0.0 { 0.96 } else { 0.98 };
                let rest = others * 20.0 / (count - 1) as f64;
                let first = (part - others) * 20.0;
                let asks = |at: usize, _| if at == 0 { first } else { rest };
                let had = had(&mut reactors, &cost, 2000, &asks);
                assert!(
                    had.behind <= 30.0
                        && had.left() <= 10.0
                        && had.metered <= 20.0 + had.begun as f64 / 50.0,
                    "{others} {count} {more}: {had:?}"
                );
            }
        }
    }
}

fn moves(period: u64, count: usize, each: f64) -> impl Fn(usize, u64) -> f64 {
    move |at, window| match period {
        0 => each / count as f64,
        _ if (window / period) as usize % count == at => each,
        _ => 0.0,
    }
}

/// A moving tenant exceeds its burst limit, or its base and credit, only slightly.
#[test]
fn a_tenants_limit_holds_over_reactors() {
    const WINDOWS: u64 = 1000;
    for how in [Burst::Metered, Burst::Credit { seconds: 1 }] {
        for count in [2usize, 4] {
            for period in [0, 1, 2, 3, 4, 5, 8, 20] {
                let all = budget(4000, 10_000, how);
                let (mut reactors, cost) = reactors(&vec![1; count], &all, &params());
                let mut begun = 0;
                let mut waits = vec![false; count];
                for window in 0..WINDOWS {
                    for (at, scheduler) in reactors.iter_mut().enumerate() {
                        let wants = period == 0 || (window / period) as usize % count == at;
                        while wants && scheduler.admit(0, &cost) {
                            begun += 1;
                        }
                        if wants != std::mem::replace(&mut waits[at], wants) {
                            match wants {
                                true => scheduler.wait(0, &cost),
                                false => scheduler.cancel(0, &cost),
                            }
                        }
                    }
                    reactors
                        .iter_mut()
                        .for_each(|scheduler| scheduler.refill(1, 0));
                }
                let most = match how {
                    Burst::Metered => 10_100,
                    Burst::Credit { .. } => 4_600,
                };
                assert!(begun <= most, "{how:?} {count} {period}: {begun}");
            }
        }
    }
}

/// At least four fifths of a moving tenant's use above its base is metered, and at most a sixth of
/// the base more.
#[test]
fn a_moving_tenant_is_metered_above_its_base() {
    const WINDOWS: u64 = 1000;
    let all = budget(10_000, 60_000, Burst::Metered);
    for count in [2usize, 4] {
        for period in [0, 1, 2, 3, 5, 8, 20] {
            for each in [9.8, 15.0, 30.0] {
                let (mut reactors, cost) = reactors(&vec![1; count], &all, &params());
                let had = had(&mut reactors, &cost, WINDOWS, &moves(period, count, each));
                let above = (had.begun as f64 - 10.0 * WINDOWS as f64).max(0.0);
                // Other reactors see a move one window later.
                let most = above + if period == 0 { 25.0 } else { 1700.0 };
                assert!(
                    (0.8 * above..=most).contains(&had.metered),
                    "{count} {period} {each}: {had:?} {above}"
                );
            }
        }
    }
}

/// Use above the base is metered once, while bursts are metered.
#[test]
fn a_change_of_the_way_to_burst_is_metered_once() {
    const WINDOWS: u64 = 500;
    let credit = Burst::Credit { seconds: 1 };
    for period in [0, 3, 7] {
        let all = |how| budget(10_000, 40_000, how);
        let (mut reactors, cost) = reactors(&[1, 1], &all(credit), &params());
        let costs = table();
        let mut phase = |how, each: f64| {
            let change = |one: &mut Scheduler| one.set_budget(0, &all(how), &costs, Routes::LOCAL);
            reactors.iter_mut().for_each(change);
            had(&mut reactors, &cost, WINDOWS, &moves(period, 2, each))
        };
        let [saves, metered, spends] = [
            phase(credit, 5.0),
            phase(Burst::Metered, 30.0),
            phase(credit, 14.0),
        ];
        assert!(
            saves.metered <= 20.0 && spends.metered <= 20.0,
            "{saves:?} {spends:?}"
        );
        assert!(
            (9_900.0..=10_400.0).contains(&metered.metered),
            "{metered:?}"
        );
    }
}

fn busy_window(reactors: &mut [Scheduler], at: usize, cost: &ResourceVector) -> u64 {
    let mut begun = 0;
    while reactors[at].admit(0, cost) {
        begun += 1;
    }
    reactors.iter_mut().for_each(|one| one.refill(1, 0));
    begun
}

/// In I/Os, including credit that reactors have drawn.
fn saved(reactors: &[Scheduler]) -> u64 {
    let has = reactors[0].ledger.entry(0).credit[0].has();
    let drawn = reactors.iter().map(|one| one.tenants[0].drawn_credit(0));
    (has + drawn.sum::<u64>()) / PARTS as u64
}

fn turns(reactors: &mut [Scheduler], windows: u64) {
    (0..windows).for_each(|_| reactors.iter_mut().for_each(|one| one.refill(1, 0)));
}

fn all_ask(reactors: &mut [Scheduler], cost: &ResourceVector) -> u64 {
    let each = reactors.iter_mut().map(|one| one.admit(0, cost));
    each.map(u64::from).sum()
}

/// Base that one reactor used is not saved by another that wakes, even when there is no demand.
#[test]
fn base_used_on_one_reactor_is_not_saved_on_another() {
    const BASE: u64 = 10;
    let all = budget(BASE * 1000, BASE * 8000, Burst::Credit { seconds: 600 });
    for count in [2usize, 8] {
        for quiet in [1, 2, 4, 12] {
            let (mut reactors, cost) = reactors(&vec![1; count], &all, &params());
            let mut begun = all_ask(&mut reactors, &cost);
            let mut windows = 20;
            turns(&mut reactors, windows);
            for busy in std::iter::once(20_000).chain([30; 40]) {
                for _ in 0..busy {
                    begun += busy_window(&mut reactors, 0, &cost);
                }
                turns(&mut reactors, quiet);
                begun += all_ask(&mut reactors, &cost);
                windows += busy + quiet;
                let (has, brought) = (begun + saved(&reactors), BASE * windows);
                assert!(
                    has <= brought + brought / 200,
                    "{count} {quiet} {windows}: {has} of {brought}"
                );
            }
        }
    }
}

#[test]
fn a_tenant_idle_on_all_reactors_saves_its_base() {
    const BASE: u64 = 10;
    const IDLE: u64 = 9000;
    let all = budget(BASE * 1000, BASE * 1000, Burst::Credit { seconds: 600 });
    for count in [2usize, 8] {
        for [before, after] in [[0, 0], [0, 1], [1, 0]] {
            let (mut reactors, cost) = reactors(&vec![1; count], &all, &params());
            for _ in 0..1000 {
                busy_window(&mut reactors, before, &cost);
            }
            let had = saved(&reactors);
            turns(&mut reactors, IDLE);
            for _ in 0..1000 {
                busy_window(&mut reactors, after, &cost);
            }
            all_ask(&mut reactors, &cost);
            let earned = saved(&reactors) - had;
            let due = BASE * IDLE;
            assert!(
                (due * 99 / 100..=due + due / 200).contains(&earned),
                "{count} {before} {after}: {earned} of {due}"
            );
        }
    }
}
