//! A device that dies after any instruction: its successor returns each chain once.
//!
//! The device is a single-stepped child process (ptrace) that shares memory with the test, which is
//! the driver. After each instruction that changes the memory, a successor recovers a copy. Then
//! successors die the same way. Nothing depends on time.

#![allow(unsafe_code)]

use forebay_virtio::model::{Driver, GUEST_ADDRESS, Layout, Offered, Vm};
use forebay_virtio::queue::Queue;
use forebay_virtio::ring::{Chain, RingFeatures};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Mutex, MutexGuard, PoisonError};

const SIZE: u16 = 4;
const BYTES: usize = 4096;
/// The turn: odd for the driver, even for the device.
const TURN: usize = BYTES - 8;
const ROUNDS: u64 = 5;

fn queue(vm: &Vm, driver: &Driver) -> Queue {
    Queue::new(&driver.config(&vm.memory)).expect("a queue")
}

/// A child maps the memory again: it doesn't inherit the mapping.
fn same(vm: &Vm) -> Vm {
    Vm::of(vm.file.try_clone().expect("a descriptor"), BYTES as u64)
}

/// Chains stay in flight over turns, and return in batches and out of order.
fn device(vm: &Vm, driver: &Driver) {
    let mut queue = queue(vm, driver);
    let mut chain = Chain::default();
    let mut mine = Vec::with_capacity(16);
    for round in 0..ROUNDS {
        while vm.all.load_u64(TURN, SeqCst) != Some(2 * round) {}
        while let Some(tag) = queue.pop(&vm.memory, &mut chain).expect("sound") {
            mine.push(tag);
        }
        let keep = usize::from(round + 1 < ROUNDS);
        if round % 2 == 0 {
            mine.reverse();
        }
        while mine.len() > keep {
            let tag = mine.pop().expect("not empty");
            queue.put(tag, 7);
            if mine.len() % 2 == 1 {
                queue.publish();
            }
        }
        queue.publish();
        assert!(vm.all.store_u64(TURN, 2 * round + 1, SeqCst));
    }
}

fn drive(driver: &mut Driver, indirect: bool) {
    while driver.collect().is_some() {}
    let piece = |i: u64, writable| Offered {
        address: GUEST_ADDRESS + i,
        len: 1,
        writable,
    };
    for i in 0.. {
        let both = [piece(i, false), piece(i + 1, true)];
        let pieces = if i % 3 == 1 { &both[..] } else { &both[1..] };
        if driver.offer(pieces, indirect && i == 0).is_none() {
            break;
        }
    }
}

fn successor_ends_all(copy: &Vm, driver: &Driver) {
    let mut driver = driver.in_copy(&copy.all);
    let mut queue = queue(copy, &driver);
    let mut chain = Chain::default();
    let mut tags = BTreeSet::new();
    while let Some(tag) = (queue.next_left(&copy.memory, &mut chain)).expect("sound") {
        assert!(tags.insert(tag));
    }
    while let Some(tag) = queue.pop(&copy.memory, &mut chain).expect("sound") {
        assert!(tags.insert(tag));
    }
    // One by one, so that the driver sees the dead device's last batch if it was shown.
    for tag in tags {
        queue.put(tag, 9);
        queue.publish();
        while driver.collect().is_some() {}
    }
    while driver.collect().is_some() {}
    assert_eq!(driver.outstanding(), 0, "a chain did not come back");
    assert_eq!(
        queue.in_flight(),
        0,
        "a chain was in flight that nobody waits for"
    );
    assert_eq!(queue.pop(&copy.memory, &mut chain), Ok(None));
}

fn step(child: impl FnOnce(), mut between: impl FnMut()) -> u64 {
    // SAFETY: the child runs test code in a copy of this process and leaves by _exit; this C
    // library's allocator is usable after fork.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork");
    if pid == 0 {
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            // SAFETY: asks the parent to trace it, and stops; names no memory. It exits if that is
            // forbidden.
            unsafe {
                if libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) != 0 {
                    libc::_exit(2);
                }
                libc::raise(libc::SIGSTOP);
            }
            child();
        }));
        // SAFETY: ends the child without running the parent's destructors.
        unsafe { libc::_exit(i32::from(done.is_err())) };
    }
    let mut steps = 0;
    loop {
        let mut status = 0;
        // SAFETY: waits for our child; `status` outlives the call.
        let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
        assert_eq!(waited, pid);
        if libc::WIFEXITED(status) {
            assert_eq!(libc::WEXITSTATUS(status), 0, "the device failed");
            return steps;
        }
        assert!(libc::WIFSTOPPED(status), "the device was killed: {status}");
        if steps == 0 {
            // SAFETY: the child is stopped; it dies with us if the test fails.
            let set =
                unsafe { libc::ptrace(libc::PTRACE_SETOPTIONS, pid, 0, libc::PTRACE_O_EXITKILL) };
            assert_eq!(set, 0, "ptrace");
        }
        between();
        steps += 1;
        // SAFETY: the child is stopped; it runs one instruction, without a signal.
        let stepped = unsafe { libc::ptrace(libc::PTRACE_SINGLESTEP, pid, 0, 0) };
        assert_eq!(stepped, 0, "ptrace");
    }
}

fn bytes(vm: &Vm) -> Vec<u8> {
    let mut bytes = vec![0; BYTES];
    assert!(vm.all.read(0, &mut bytes));
    bytes
}

/// Returns every state that a death can leave, with its driver.
fn every_death(packed: bool, indirect: bool) -> Vec<(Vec<u8>, Driver)> {
    let vm = Vm::new(BYTES as u64);
    let copy = Vm::new(BYTES as u64);
    let features = RingFeatures {
        event_idx: false,
        indirect: true,
    };
    let layout = Layout::new(0, SIZE);
    assert!(layout.end <= TURN);
    let mut driver = Driver::new(&vm.all, layout, SIZE, packed, features);
    drive(&mut driver, indirect);
    let first = driver.clone();
    let mut states = Vec::new();
    let mut before = Vec::new();
    let steps = step(
        || {
            let vm = same(&vm);
            device(&vm, &first.in_copy(&vm.all));
        },
        || {
            let now = bytes(&vm);
            if now != before {
                assert!(copy.all.write(0, &now));
                successor_ends_all(&copy, &driver);
                states.push((now.clone(), driver.clone()));
                before = now;
            }
            let turn = vm.all.load_u64(TURN, SeqCst).expect("inside");
            if turn % 2 == 1 {
                drive(&mut driver, indirect);
                assert!(vm.all.store_u64(TURN, turn + 1, SeqCst));
            }
        },
    );
    assert!(
        steps > 1000 && states.len() > 50,
        "{steps} {}",
        states.len()
    );
    states
}

fn dies_anywhere(packed: bool, indirect: bool) {
    let states = every_death(packed, indirect);
    let vm = Vm::new(BYTES as u64);
    let copy = Vm::new(BYTES as u64);
    // A successor dies during recovery. Neighbouring states differ by one store, so a sample
    // suffices.
    for (state, driver) in states.iter().step_by(STRIDE) {
        assert!(vm.all.write(0, state));
        let mut before = state.clone();
        step(
            || {
                let vm = same(&vm);
                queue(&vm, &driver.in_copy(&vm.all));
            },
            || {
                let now = bytes(&vm);
                if now != before {
                    assert!(copy.all.write(0, &now));
                    successor_ends_all(&copy, driver);
                    before = now;
                }
            },
        );
    }
}

/// Coprime to the number of stores of one operation, so each state is met in some round.
const STRIDE: usize = 7;

/// One test at a time: a process forked while another thread holds a lock never gets that lock.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn a_split_ring_dies_anywhere() {
    let _alone = alone();
    dies_anywhere(false, false);
}

#[test]
fn a_split_ring_with_tables_dies_anywhere() {
    let _alone = alone();
    every_death(false, true);
}

#[test]
fn a_packed_ring_dies_anywhere() {
    let _alone = alone();
    dies_anywhere(true, false);
}

#[test]
fn a_packed_ring_with_tables_dies_anywhere() {
    let _alone = alone();
    every_death(true, true);
}
