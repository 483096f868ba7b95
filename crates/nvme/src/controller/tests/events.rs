//! Asynchronous events and Abort.

use super::*;
use crate::feature::ASYNC_EVENT_CONFIGURATION;
use crate::log_page;

const NAMESPACE_CHANGED: u64 = 0x04_0002;
const DISCOVERY_CHANGED: u64 = 0x70_F002;

fn park(bench: &mut Bench, cids: impl IntoIterator<Item = u16>) {
    for cid in cids {
        assert_eq!(bench.run(event_request(cid)), AdminOutcome::Parked);
    }
}

fn event(bench: &mut Bench) -> Option<(u16, Status, u64)> {
    bench
        .controller
        .next_event()
        .map(|e| (e.cid, e.status, e.result))
}

fn enabled() -> Bench {
    let mut bench = Bench::ready();
    bench.ok(set_feature(ASYNC_EVENT_CONFIGURATION, 0x100));
    bench
}

fn changed_list(offset: u64, bytes: u32) -> Sqe {
    get_log(log_page::CHANGED_NAMESPACE_LIST, offset, bytes)
}

#[test]
fn growth_is_reported_once_until_the_list_is_read() {
    let mut bench = enabled();
    park(&mut bench, 10..12);
    assert_eq!(event(&mut bench), None);
    bench.controller.namespace_changed(1);
    assert_eq!(
        event(&mut bench),
        Some((10, Status::SUCCESS, NAMESPACE_CHANGED))
    );
    // Masked until read.
    bench.controller.namespace_changed(1);
    assert_eq!(event(&mut bench), None);
    assert_eq!(
        bench.data(changed_list(0, 4096))[..8],
        [1, 0, 0, 0, 0, 0, 0, 0]
    );
    assert_eq!(event(&mut bench), None);
    assert_eq!(bench.data(changed_list(0, 4096))[..4], [0; 4]);
    bench.controller.namespace_changed(1);
    assert_eq!(
        event(&mut bench),
        Some((11, Status::SUCCESS, NAMESPACE_CHANGED))
    );
}

#[test]
fn an_event_waits_for_a_request() {
    let mut bench = enabled();
    bench.controller.namespace_changed(1);
    assert_eq!(event(&mut bench), None);
    park(&mut bench, [3]);
    assert_eq!(
        event(&mut bench),
        Some((3, Status::SUCCESS, NAMESPACE_CHANGED))
    );
}

#[test]
fn retained_events_stay() {
    let mut bench = enabled();
    park(&mut bench, 0..4);
    bench.controller.namespace_changed(1);
    assert!(event(&mut bench).is_some());
    assert_eq!(bench.data(retained(changed_list(0, 4096)))[0], 1);
    bench.controller.namespace_changed(1);
    assert_eq!(event(&mut bench), None);
    assert_eq!(bench.data(changed_list(0, 4096))[0], 1);
    assert_eq!(event(&mut bench), None);
}

#[test]
fn a_change_between_two_pieces_of_the_list_is_not_lost() {
    let mut bench = enabled();
    park(&mut bench, 0..4);
    bench.controller.namespace_changed(1);
    assert!(event(&mut bench).is_some());
    assert_eq!(bench.data(retained(changed_list(0, 2048)))[0], 1);
    bench.controller.namespace_changed(1);
    assert_eq!(bench.data(changed_list(2048, 2048))[0], 0);
    assert_eq!(
        event(&mut bench),
        Some((1, Status::SUCCESS, NAMESPACE_CHANGED))
    );
    assert_eq!(bench.data(changed_list(0, 4096))[0], 1);
}

#[test]
fn events_that_are_not_configured_are_not_sent() {
    let mut bench = Bench::ready();
    park(&mut bench, [1]);
    bench.controller.namespace_changed(1);
    assert_eq!(event(&mut bench), None);
    assert_eq!(bench.data(changed_list(0, 4096))[0], 1);
    bench.ok(set_feature(ASYNC_EVENT_CONFIGURATION, 0x100));
    for nsid in [0, 2, 65, u32::MAX] {
        bench.controller.namespace_changed(nsid);
    }
    assert_eq!(event(&mut bench), None);
}

#[test]
fn the_discovery_list_changes() {
    let mut bench = Bench::discovery();
    park(&mut bench, 1..4);
    bench.controller.discovery_is(6);
    bench.controller.discovery_is(7);
    assert_eq!(event(&mut bench), None, "nobody asked to be told");
    bench.ok(set_feature(ASYNC_EVENT_CONFIGURATION, 1 << 31));
    bench.controller.discovery_is(6);
    assert_eq!(event(&mut bench), None, "nothing has changed for this host");
    bench.controller.discovery_is(7);
    let reported = |cid| Some((cid, Status::SUCCESS, DISCOVERY_CHANGED));
    assert_eq!(event(&mut bench), reported(1));
    bench.controller.discovery_is(8);
    assert_eq!(event(&mut bench), None);
    bench.world.generation.set(8);
    bench.data(get_log(log_page::DISCOVERY, 0, 1024));
    bench.controller.discovery_is(8);
    assert_eq!(event(&mut bench), None);
    bench.controller.discovery_is(9);
    assert_eq!(event(&mut bench), reported(2));
    // The event must survive the second piece.
    bench.world.generation.set(9);
    bench.data(get_log(log_page::DISCOVERY, 0, 1024));
    bench.world.generation.set(10);
    bench.controller.discovery_is(10);
    bench.data(get_log(log_page::DISCOVERY, 1024, 1024));
    assert_eq!(event(&mut bench), reported(3));
}

#[test]
fn requests_are_limited_and_can_be_aborted() {
    let mut bench = enabled();
    park(&mut bench, 0..4);
    assert_eq!(
        bench.fails(event_request(4)),
        Status::ASYNC_EVENT_REQUEST_LIMIT_EXCEEDED
    );
    let abort = |sqid: u32, cid: u32| Sqe::new(admin::ABORT, 99).with_cdw(10, sqid | cid << 16);
    // Result bit 0: 0 is aborted.
    assert_eq!(bench.ok(abort(0, 2)), 0);
    assert_eq!(
        event(&mut bench),
        Some((2, Status::COMMAND_ABORT_REQUESTED, 0))
    );
    assert_eq!(event(&mut bench), None);
    assert_eq!(bench.ok(abort(0, 2)), 1);
    assert_eq!(bench.ok(abort(1, 3)), 1);
    assert_eq!(bench.ok(abort(0, 77)), 1);
    park(&mut bench, [5]);
    assert_eq!(
        bench.fails(event_request(6)),
        Status::ASYNC_EVENT_REQUEST_LIMIT_EXCEEDED
    );
    let mut bench = Bench::discovery();
    assert_eq!(bench.fails(abort(0, 2)), Status::INVALID_OPCODE);
}
