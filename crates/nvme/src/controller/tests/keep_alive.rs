//! Deadlines.

use super::*;
use crate::feature::KEEP_ALIVE_TIMER;

#[test]
fn keep_alive_moves_the_deadline_and_other_commands_do_not() {
    let mut bench = Bench::ready();
    let began_ns = bench.now_ns;
    assert_eq!(bench.controller.deadline_ns(), Some(began_ns + 5_000 * MS));
    bench.now_ns += 4_000 * MS;
    bench.data(identify(1, 0));
    assert_eq!(bench.controller.deadline_ns(), Some(began_ns + 5_000 * MS));
    bench.ok(Sqe::new(admin::KEEP_ALIVE, 1));
    assert_eq!(bench.controller.deadline_ns(), Some(began_ns + 9_000 * MS));
    assert!(!bench.controller.expire(began_ns + 9_000 * MS - 1));
    assert!(bench.controller.ready());
    assert!(bench.controller.expire(began_ns + 9_000 * MS));
    assert!(bench.csts().cfs() && !bench.controller.ready());
    assert_eq!(bench.controller.state().error_count, 1);
}

#[test]
fn the_timeout_is_rounded_up_and_can_be_changed() {
    let mut bench = Bench::ready();
    bench.ok(set_feature(KEEP_ALIVE_TIMER, 1234));
    assert_eq!(bench.ok(get_feature(KEEP_ALIVE_TIMER, 0)), 1300);
    assert_eq!(
        bench.controller.deadline_ns(),
        Some(bench.now_ns + 1_300 * MS)
    );
    bench.ok(set_feature(KEEP_ALIVE_TIMER, u32::MAX));
    assert!(bench.controller.deadline_ns().unwrap() > bench.now_ns);
    bench.ok(set_feature(KEEP_ALIVE_TIMER, 0));
    assert_eq!(bench.controller.deadline_ns(), None);
    assert!(!bench.controller.expire(u64::MAX));
}

#[test]
fn a_host_that_never_enables_is_not_kept_for_ever() {
    let mut bench = Bench::connected(config());
    assert_eq!(
        bench.controller.deadline_ns(),
        Some(bench.now_ns + 120_000 * MS)
    );
    assert!(bench.controller.expire(bench.now_ns + 120_000 * MS));
}

#[test]
fn a_reset_or_shutdown_begins_its_own_limit() {
    for cc in [0x46_0000, 0x46_4001] {
        let mut bench = Bench::ready();
        bench.ok(set_feature(KEEP_ALIVE_TIMER, 600_000));
        bench.now_ns += 500_000 * MS;
        bench.set_cc(cc).unwrap();
        assert_eq!(
            bench.controller.deadline_ns(),
            Some(bench.now_ns + 120_000 * MS)
        );
    }
}

#[test]
fn a_discovery_controller_without_keep_alive_lives_two_minutes() {
    let mut bench = Bench::discovery();
    bench.ok(set_feature(KEEP_ALIVE_TIMER, 0));
    bench.now_ns += 100_000 * MS;
    bench.data(identify(1, 0));
    assert_eq!(
        bench.controller.deadline_ns(),
        Some(bench.now_ns + 120_000 * MS)
    );
}
