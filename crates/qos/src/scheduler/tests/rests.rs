//! Tenants that become idle and return: no debt is forgiven, and no base is counted twice.

use super::*;

fn rests(scheduler: &mut Scheduler) {
    for _ in 0..20 {
        scheduler.refill(1, 0);
        if scheduler.active() == 0 {
            return;
        }
    }
    panic!("it is never forgotten");
}

/// At most the base, plus once the savings, a new tenant's window and one I/O.
#[test]
fn a_returning_tenant_gets_no_more_than_its_budget() {
    const BASE: u64 = 50;
    for (burst, how) in [(BASE, Burst::Metered), (900, Burst::Credit { seconds: 10 })] {
        let all = budget(BASE * 1000, burst * 1000, how);
        {
            for idle in [1, 2, 7, 8, 9, 12] {
                let params = params();
                let once = BASE * (u64::from(params.saved_windows) + 1) + 1;
                let mut bench = Bench::new(&[all], params);
                let cost = bench.costs.of(Transport::Tcp, Operation::Read, 4096);
                let scheduler = &mut bench.scheduler;
                let (mut begun, mut rested) = (0, 0);
                for round in 1..=300 {
                    while scheduler.admit(0, &cost) {
                        begun += 1;
                    }
                    (0..=idle).for_each(|_| scheduler.refill(1, 0));
                    rested += u32::from(scheduler.active() == 0);
                    let most = BASE * round * (idle + 1) + once;
                    assert!(
                        begun <= most,
                        "{how:?} {idle}: {begun} of {most} in {round}"
                    );
                }
                assert_eq!(rested > 0, idle > 6, "{idle} {rested}");
                let least = BASE * 299 * (idle + 1) - once;
                assert!(
                    how == Burst::Metered || begun >= least,
                    "{begun} of {least}"
                );
            }
        }
    }
}

#[test]
fn a_tenants_base_pays_its_lanes_debt() {
    let all = budget(100_000, 100_000, Burst::Metered);
    let mut bench = Bench::new(&[all], params());
    let cost = bench.costs.of(Transport::Tcp, Operation::Read, 4096);
    let scheduler = &mut bench.scheduler;
    let cpu = Resource::Cpu;
    let debt = |scheduler: &Scheduler| -scheduler.lanes[0].left[cpu];
    let base = scheduler.tenants[0].base[cpu];
    let mut much = ResourceVector::ZERO;
    much[cpu] = 20 * base;
    scheduler.borrow(0, &much);
    rests(scheduler);
    let left = debt(scheduler);
    assert!(left > 10 * base, "{left}");
    assert!(scheduler.admit(0, &cost));
    assert_eq!(debt(scheduler), left);
    rests(scheduler);
    let left = debt(scheduler);
    assert!(left > 5 * base, "{left}");
    // Five windows pay five times the base.
    scheduler.refill(5, 0);
    scheduler.earn(0);
    assert_eq!(debt(scheduler), left - 5 * base);
    scheduler.refill(1000, 0);
    assert!(scheduler.admit(0, &cost));
    assert!(debt(scheduler) <= 0);
}

/// Only time pays a volume's debt against its limit.
#[test]
fn a_volumes_limit_holds_while_its_tenant_rests() {
    let all = budget(100_000, 100_000, Burst::Metered);
    let mut bench = Bench::new(&[all], params());
    let cost = bench.costs.of(Transport::Tcp, Operation::Read, 4096);
    let scheduler = &mut bench.scheduler;
    scheduler.set_volume(0, Some(&budget(1000, 1000, Burst::Metered)));
    (0..100).for_each(|_| scheduler.borrow(0, &cost));
    rests(scheduler);
    scheduler.refill(30, 0);
    assert!(!scheduler.admit(0, &cost));
    rests(scheduler);
    scheduler.refill(70, 0);
    assert!(scheduler.admit(0, &cost));
}

#[test]
fn a_leaving_reactor_turns_savings_into_credit() {
    let all = budget(10_000, 50_000, Burst::Credit { seconds: 10 });
    let mut bench = Bench::new(&[all], params());
    let cost = bench.costs.of(Transport::Tcp, Operation::Read, 4096);
    let scheduler = &mut bench.scheduler;
    assert!(scheduler.admit(0, &cost));
    rests(scheduler);
    scheduler.refill(1000, 0);
    assert!(scheduler.admit(0, &cost));
    let ledger = scheduler.ledger.clone();
    let has = || [0, 1].map(|at: usize| ledger.entry(0).credit[at].has());
    let all = [
        scheduler.statistics(0).credit_parts,
        scheduler.statistics(0).credit_bytes,
    ];
    assert!(has()[0] < all[0] && has()[1] < all[1], "nothing was drawn");
    // Four windows' base accrued, and one I/O used it.
    let due = [PARTS as u64, 4096].map(|each| each * (4 * 10 - 1));
    scheduler.withdraw();
    assert_eq!(has(), [all[0] + due[0], all[1] + due[1]]);
    assert_eq!(scheduler.statistics(0).used_parts, 2 * PARTS as u64);
}

/// When a lane must stop, its waiting I/Os begin on debt. The next stop waits for at most a second
/// and one I/O.
#[test]
fn a_stop_waits_for_no_more_than_seconds() {
    let rate = |bytes| Rate { iops: 1000, bytes };
    let small = |base, burst, how| Budget {
        base: rate(base),
        burst: rate(burst),
        how,
    };
    let saved = Burst::Credit { seconds: 10 };
    for (one, bytes) in [
        (small(66_000, 66_000, Burst::Metered), 66_000),
        (small(66_000, 1_000_000, Burst::Metered), 1_000_000),
        (small(66_000, 1_000_000, saved), 66_000),
        (small(8_000_000, 8_000_000, saved), 8_000_000),
    ] {
        for len in [4096, 128 << 10, 1 << 20] {
            let mut bench = Bench::new(&[one], params());
            let cost = bench.costs.of(Transport::Tcp, Operation::Write, len);
            let scheduler = &mut bench.scheduler;
            let hold = |scheduler: &mut Scheduler| {
                let mut waits = 0u64;
                while waits < 32 && (waits == 0 || scheduler.may_hold(0)) {
                    scheduler.wait(0, &cost);
                    waits += 1;
                }
                waits
            };
            let begin = |scheduler: &mut Scheduler, waits: &mut u64| {
                while *waits > 0 && scheduler.may_borrow(0) {
                    scheduler.cancel(0, &cost);
                    scheduler.borrow(0, &cost);
                    *waits -= 1;
                }
            };
            let mut waits = hold(scheduler);
            let second = bytes + u64::from(len);
            assert!(waits == 32 || waits * u64::from(len) >= bytes);
            assert!(waits * u64::from(len) <= second + 1000, "{waits}");
            let mut sum = waits;
            begin(scheduler, &mut waits);
            assert_eq!(waits, 0, "{len} of {one:?}");
            let (mut windows, mut longest) = (0u64, 0);
            for _ in 0..6 {
                let mut since = 0u64;
                waits = hold(scheduler);
                sum += waits;
                while waits > 0 {
                    scheduler.refill(1, 0);
                    since += 1;
                    begin(scheduler, &mut waits);
                }
                windows += since;
                longest = longest.max(since);
            }
            let most = 1000 * (bytes + 2 * u64::from(len)) / bytes + 100;
            assert!(longest <= most, "{longest} of {most}: {len} of {one:?}");
            let most = bytes * windows / 1000 + second + bytes / 10;
            let begun = sum * u64::from(len);
            assert!(begun <= most, "{begun} of {most}: {len} of {one:?}");
        }
    }
}
