//! Tests of one ring: sleeping, waking, fullness, cancelling.

use super::*;
use rustix::event::{EventfdFlags, eventfd};

fn ring() -> Ring {
    Ring::new(&RingOptions {
        entries: 4,
        cq_entries: 8,
        iowq_cpus: vec![0],
        ..RingOptions::default()
    })
    .expect("io_uring works here")
}

#[test]
fn a_forbidden_ring_says_so() {
    let error = setup_error(io::Error::from_raw_os_error(libc::ENOSYS));
    assert!(matches!(error, RingError::Forbidden { .. }));
}

#[test]
fn sleeps_until_time_or_event() {
    let mut ring = ring();
    let short = Some(Duration::from_millis(5));
    assert_eq!(ring.wait(1, short).expect("wait"), Wake::TimedOut);
    let event = eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd");
    ring.poll_add(&event, libc::POLLIN as u32, 7).expect("room");
    assert_ne!(ring.wait(1, short).expect("wait"), Wake::Completions);
    rustix::io::write(&event, &1u64.to_ne_bytes()).expect("write");
    let long = Some(Duration::from_secs(20));
    assert_eq!(ring.wait(1, long).expect("wait"), Wake::Completions);
    let mut out = [Completion::default(); 4];
    assert_eq!(ring.drain(&mut out), 1);
    assert_eq!(out[0].user_data, 7);
    assert_eq!(out[0].result & i32::from(libc::POLLIN), 1);
    assert_eq!(ring.drain(&mut out), 0);
}

#[test]
fn a_full_ring_is_reported_and_loses_no_completion() {
    let mut ring = ring();
    let event = eventfd(1, EventfdFlags::CLOEXEC).expect("eventfd");
    let mut taken = Vec::new();
    // More than the completion queue holds, taken late: the kernel keeps the rest.
    for user_data in 0..40 {
        if ring.poll_add(&event, libc::POLLIN as u32, user_data) == Err(RingFull) {
            assert_eq!(ring.free_entries(), 0);
            ring.submit().expect("submit");
            ring.poll_add(&event, libc::POLLIN as u32, user_data)
                .expect("room again");
        }
    }
    while taken.len() < 40 {
        ring.submit().expect("submit");
        let mut out = [Completion::default(); 3];
        let count = ring.drain(&mut out);
        taken.extend(out[..count].iter().map(|done| done.user_data));
    }
    taken.sort_unstable();
    assert_eq!(taken, (0..40).collect::<Vec<_>>());
}

#[test]
fn cancels() {
    let mut ring = ring();
    let event = eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd");
    ring.poll_add(&event, libc::POLLIN as u32, 1).expect("room");
    ring.cancel(1, 2).expect("room");
    let mut results = Vec::new();
    while results.len() < 2 {
        ring.wait(1, Some(Duration::from_secs(20))).expect("wait");
        ring.for_each_completion(|done| results.push((done.user_data, done.result)));
    }
    results.sort_unstable();
    assert_eq!(results, [(1, -libc::ECANCELED), (2, 0)]);
    assert!(ring.raw_fd() >= 0);
}

#[test]
fn many_entries_at_once_with_deferred_completions() {
    let mut ring = Ring::new(&RingOptions {
        defer_taskrun: true,
        ..RingOptions::default()
    })
    .expect("io_uring works here");
    let event = eventfd(1, EventfdFlags::CLOEXEC).expect("eventfd");
    for user_data in 0..100 {
        ring.poll_add(&event, libc::POLLIN as u32, user_data)
            .expect("room");
    }
    assert_eq!(ring.queued(), 100);
    let mut count = 0;
    while count < 100 {
        ring.wait(1, Some(Duration::from_secs(20))).expect("wait");
        count += ring.for_each_completion(|done| assert!(done.result > 0));
    }
}
