//! ANA log page, event and take-over.

use super::*;
use crate::feature::{AEC_ANA_CHANGE, ASYNC_EVENT_CONFIGURATION};
use crate::log_page::ASYMMETRIC_NAMESPACE_ACCESS;

const ANA_CHANGED: u64 = 0x0C_0302;

fn listening() -> Bench {
    let mut bench = Bench::ready();
    bench.controller.ana_is(AnaState::Optimized);
    bench.ok(set_feature(ASYNC_EVENT_CONFIGURATION, AEC_ANA_CHANGE));
    assert_eq!(bench.run(event_request(1)), AdminOutcome::Parked);
    assert_eq!(bench.run(event_request(2)), AdminOutcome::Parked);
    bench
}

#[test]
fn the_page_has_one_group_of_all_namespaces() {
    let mut bench = Bench::ready();
    let page = get_log(ASYMMETRIC_NAMESPACE_ACCESS, 0, 64);
    let data = bench.data(page);
    assert_eq!(data[..16], [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    // Group 1, one namespace, change count 0, optimized.
    assert_eq!(
        data[16..32],
        [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    );
    assert_eq!(
        data[32..48],
        [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    );
    assert_eq!(data[48..], [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    bench.world.ana.set(Ana {
        state: AnaState::Inaccessible,
        changes: 0x102,
    });
    // RGO: without namespaces.
    let data = bench.data(page.with_cdw(10, page.cdw(10) | 1 << 8));
    assert_eq!(data[..8], 0x102u64.to_le_bytes());
    assert_eq!(data[16..24], [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!((data[24..32].to_vec(), data[32]), (data[..8].to_vec(), 3));
    assert_eq!(data[48..], [0; 16]);
    let tail = get_log(ASYMMETRIC_NAMESPACE_ACCESS, 32, 4);
    assert_eq!(bench.data(tail), [3, 0, 0, 0]);
}

#[test]
fn an_ana_change_is_reported_once_until_the_log_page_is_read() {
    let mut bench = listening();
    let page = get_log(ASYMMETRIC_NAMESPACE_ACCESS, 0, 64);
    bench.controller.ana_is(AnaState::Optimized);
    assert_eq!(bench.controller.next_event(), None);
    bench.controller.ana_is(AnaState::Inaccessible);
    let reported = bench.controller.next_event().unwrap();
    assert_eq!((reported.cid, reported.result), (1, ANA_CHANGED));
    bench.controller.ana_is(AnaState::NonOptimized);
    assert_eq!(bench.controller.next_event(), None);
    bench.data(retained(page));
    bench.controller.ana_is(AnaState::Optimized);
    assert_eq!(bench.controller.next_event(), None);
    bench.data(page);
    bench.controller.ana_is(AnaState::Inaccessible);
    assert_eq!(bench.controller.next_event().unwrap().cid, 2);
}

#[test]
fn a_successor_tells_what_its_predecessor_did_not() {
    let bench = listening();
    let state = bench.controller.state();
    let mut successor = Controller::restore(*bench.controller.config(), state).unwrap();
    successor.ana_is(AnaState::Optimized);
    assert_eq!(successor.next_event(), None);
    successor.ana_is(AnaState::Inaccessible);
    assert_eq!(successor.next_event().unwrap().result, ANA_CHANGED);
}

#[test]
fn ana_changes_are_reported_only_to_subscribed_hosts() {
    let mut bench = Bench::ready();
    bench.run(event_request(1));
    bench.controller.ana_is(AnaState::Optimized);
    bench.controller.ana_is(AnaState::Inaccessible);
    assert_eq!(bench.controller.next_event(), None);
}
