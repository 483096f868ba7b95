//! Reservation notifications and SMART warnings.

use super::*;
use crate::NSID_ALL;
use crate::feature::*;
use crate::log_page::{RESERVATION_NOTIFICATION, SMART_HEALTH};
use crate::opcode::nvm;
use crate::reservation::{HostId, ReservationCommand, Reservations};

const LOG_AVAILABLE: u64 = 0x80_0006;
const ME: HostId = [5; 16];
const OTHER: HostId = [6; 16];

fn run(state: &mut Reservations, host: HostId, opcode: u8, cdw10: u32, keys: [u64; 2]) {
    let action = cdw10 | u32::from(opcode) << 16;
    let command = ReservationCommand::new(action, keys).unwrap();
    state.apply(host, &command).unwrap();
}

fn preempt_me(state: &mut Reservations, times: usize) {
    for _ in 0..times {
        run(state, ME, nvm::RESERVATION_REGISTER, 0, [0, 1]);
        run(state, OTHER, nvm::RESERVATION_REGISTER, 0, [0, 2]);
        run(state, OTHER, nvm::RESERVATION_ACQUIRE, 0x0101, [2, 1]);
    }
}

fn page() -> Sqe {
    get_log(RESERVATION_NOTIFICATION, 0, 64)
}

#[test]
fn the_log_is_read_one_by_one() {
    let mut bench = Bench::ready();
    let mut state = Reservations::default();
    assert_eq!(bench.data(page()), [0; 64]);
    bench.run(event_request(1));
    bench.run(event_request(2));
    preempt_me(&mut state, 2);
    bench.controller.reservations_changed(&state);
    bench.controller.reservations_changed(&state);
    assert_eq!(bench.controller.next_event().unwrap().result, LOG_AVAILABLE);
    assert_eq!(bench.controller.next_event(), None);
    // A partial read removes nothing.
    bench.data(get_log(RESERVATION_NOTIFICATION, 0, 16));
    let first = bench.data(page());
    assert_eq!(
        first[..16],
        [1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0]
    );
    assert_eq!(bench.controller.next_event().unwrap().cid, 2);
    assert_eq!(bench.data(page())[..10], [2, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
    assert_eq!(bench.data(page()), [0; 64]);
}

#[test]
fn dropped_notifications_leave_a_gap_in_the_count() {
    let mut bench = Bench::ready();
    let mut state = Reservations::default();
    preempt_me(&mut state, 9);
    bench.controller.reservations_changed(&state);
    let first = bench.data(page());
    assert_eq!((first[0], first[9]), (3, 6));
    for count in 4..=9 {
        assert_eq!(bench.data(page())[0], count);
    }
    assert_eq!(bench.data(page()), [0; 64]);
}

#[test]
fn masks_and_other_hosts_keep_it_out() {
    let mut bench = Bench::ready();
    let mask = set_feature(RESERVATION_NOTIFICATION_MASK, 0xFFFF_FFF2);
    bench.ok(mask.with_nsid(NSID_ALL));
    let get = get_feature(RESERVATION_NOTIFICATION_MASK, 0);
    assert_eq!(bench.ok(get.with_nsid(1)), 2);
    assert_eq!(bench.fails(get.with_nsid(NSID_ALL)), Status::INVALID_FIELD);
    let unknown = Status::INVALID_NAMESPACE_OR_FORMAT;
    assert_eq!(bench.fails(get.with_nsid(2)), unknown);
    assert_eq!(bench.fails(mask), unknown);
    let mut state = Reservations::default();
    preempt_me(&mut state, 1);
    bench.controller.reservations_changed(&state);
    assert_eq!(bench.data(page()), [0; 64]);
    bench.ok(set_feature(RESERVATION_NOTIFICATION_MASK, 0).with_nsid(1));
    bench.controller.reservations_changed(&state);
    assert_eq!(bench.data(page()), [0; 64], "what was masked is gone");
    // Existing notices are not for a later host.
    preempt_me(&mut state, 1);
    bench.controller.skip_notices(&state);
    bench.controller.reservations_changed(&state);
    assert_eq!(bench.data(page()), [0; 64]);
}

#[test]
fn setting_persistence_becomes_a_reservation_action() {
    let mut bench = Bench::ready();
    let set = set_feature(RESERVATION_PERSISTENCE, 1).with_nsid(1);
    let action = crate::reservation::action_of_persistence(true);
    assert_eq!(bench.run(set), AdminOutcome::Reserve { action });
    assert_eq!(
        bench.ok(get_feature(RESERVATION_PERSISTENCE, 0).with_nsid(1)),
        0
    );
    bench.world.persistent.set(true);
    assert_eq!(
        bench.ok(get_feature(RESERVATION_PERSISTENCE, 0).with_nsid(1)),
        1
    );
    assert_eq!(
        bench.fails(set.with_nsid(0)),
        Status::INVALID_NAMESPACE_OR_FORMAT
    );
}

#[test]
fn a_new_warning_is_reported_to_hosts_that_enabled_it() {
    let mut bench = Bench::ready();
    bench.run(event_request(1));
    bench.run(event_request(2));
    bench.controller.warnings_are(1);
    assert_eq!(bench.controller.next_event(), None);
    bench.controller.warnings_are(0);
    bench.ok(set_feature(ASYNC_EVENT_CONFIGURATION, 0b101));
    bench.controller.warnings_are(1);
    assert_eq!(bench.controller.next_event().unwrap().result, 0x02_0201);
    bench.data(get_log(SMART_HEALTH, 0, 512));
    bench.controller.warnings_are(1);
    bench.controller.warnings_are(0);
    assert_eq!(bench.controller.next_event(), None);
    bench.controller.warnings_are(4);
    assert_eq!(bench.controller.next_event().unwrap().result, 0x02_0001);
}
