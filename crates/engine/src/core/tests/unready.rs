//! Commands whose image is not open, or not yet writable.

use super::*;

const BLOCK: IoOp = IoOp::Write {
    offset_bytes: 0,
    len_bytes: 4096,
    fua: false,
};

#[test]
fn commands_wait_for_their_image() {
    let mut b = bench();
    b.grant(0, 0, Rights::ReadWrite, 100);
    b.gate.set_unready(true);
    let zeroes = IoOp::WriteZeroes {
        offset_bytes: 8192,
        len_bytes: 4096,
        deallocate: false,
        fua: false,
    };
    let slots = [b.start(BLOCK, Some(&[3; 4096])), b.start(zeroes, None)];
    b.nothing_ends();
    assert!(b.core.has_waiting());
    assert!(!b.core.must_turn(), "they keep nobody awake");
    assert_eq!(b.core.slices.in_flight(), 0);
    b.gate.set_unready(false);
    b.core.retry_not_ready();
    let mut ended = [b.end(), b.end()];
    ended.sort_by_key(|(slot, ..)| *slot);
    for (slot, (ended, status, _)) in slots.into_iter().zip(ended) {
        assert_eq!((ended, status), (slot, Status::SUCCESS));
    }
    assert_eq!(b.read(0, 4096), [3; 4096]);
    assert!(!b.core.has_waiting());
}

/// Its image is closed while it waits to be submitted again.
#[test]
fn begun_slices_wait_without_turns() {
    let mut b = bench_with("volatile");
    b.grant(0, 0, Rights::ReadWrite, 100);
    b.gate.hold();
    let slot = b.start(BLOCK, Some(&[3; 4096]));
    b.turn();
    b.gate.set_unready(true);
    b.gate.release();
    while b.core.slices.not_ready.is_empty() {
        b.turn();
    }
    b.nothing_ends();
    assert!(b.core.has_waiting());
    assert!(!b.core.must_turn(), "it keeps nobody awake");
    b.core.tick();
    assert!(b.core.must_turn(), "it is tried again from time to time");
    b.turn();
    assert!(!b.core.must_turn());
    b.gate.set_unready(false);
    b.core.tick();
    let (ended, status, _) = b.end();
    assert_eq!((ended, status), (slot, Status::SUCCESS));
    assert!(!b.core.has_waiting());
}
