//! A gate before a device, for tests: holds operations in flight, and fails them, at will.
//!
//! **Purpose.** "While a slice is in flight" must be a state that a test enters and leaves, not a matter of luck.
//!
//! **Design.** A held operation is a real one in the reactor's own ring: it is linked behind a poll of an eventfd, and
//! starts when the gate is released. The engine sees nothing but a slow device. A failing operation comes back as a
//! completion with the errno, like a real error; it can be held as well. Any thread may turn the gate.
//!
//! **What it does not do.** A held operation isn't at the device yet, so it holds no fence's lock; a process that dies
//! takes it along. On a memory device a gated operation goes through the ring instead of the mapping.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use crate::device::{Device, Submitted};
use crate::op::{Method, Op, OpKind};
use crate::ring::{Io, Ring};

/// The gate. Attach it with [`Device::attach_gate`].
#[derive(Debug)]
pub struct TestGate {
    state: Mutex<State>,
    /// Readable while open.
    open: OwnedFd,
    held: AtomicU64,
    cost_ns: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    hold: Option<Selector>,
    failures: Vec<Failure>,
}

#[derive(Debug, Clone)]
struct Selector {
    range_bytes: Range<u64>,
    kinds: Vec<OpKind>,
}

#[derive(Debug)]
struct Failure {
    selector: Selector,
    errno: Errno,
    times: u32,
}

impl Selector {
    fn matches(&self, op: &Op) -> bool {
        let kind = self.kinds.is_empty() || self.kinds.contains(&op.kind);
        // A flush has no range: it is everywhere.
        let range = op.kind == OpKind::Flush
            || (op.offset_bytes < self.range_bytes.end
                && self.range_bytes.start < op.offset_bytes.saturating_add(op.len_bytes));
        kind && range
    }
}

impl TestGate {
    /// A gate that is open.
    ///
    /// # Panics
    ///
    /// If the system has no eventfd left.
    pub fn new() -> Arc<Self> {
        let open = eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Arc::new(Self {
            state: Mutex::default(),
            open: open.expect("an eventfd for a test"),
            held: AtomicU64::new(0),
            cost_ns: AtomicU64::new(0),
        })
    }

    /// Holds every operation that is submitted from now on.
    pub fn hold(&self) {
        self.hold_some(0..u64::MAX, &[]);
    }

    /// Holds operations that overlap a range and are of these kinds (none given: of any kind).
    pub fn hold_some(&self, range_bytes: Range<u64>, kinds: &[OpKind]) {
        let mut state = self.state();
        let mut count = [0; 8];
        // Not open any more; if it wasn't, there is nothing to read.
        let _ = rustix::io::read(&self.open, &mut count);
        state.hold = Some(Selector {
            range_bytes,
            kinds: kinds.to_vec(),
        });
    }

    /// Lets everything go that is held, and holds nothing more.
    pub fn release(&self) {
        let mut state = self.state();
        state.hold = None;
        self.held.store(0, Ordering::SeqCst);
        let _ = rustix::io::write(&self.open, &1u64.to_ne_bytes());
    }

    /// How many operations were submitted and are held.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::SeqCst)
    }

    /// Fails the next `times` operations that overlap a range and are of these kinds (none given: of any kind).
    pub fn fail(&self, range_bytes: Range<u64>, kinds: &[OpKind], errno: Errno, times: u32) {
        self.state().failures.push(Failure {
            selector: Selector {
                range_bytes,
                kinds: kinds.to_vec(),
            },
            errno,
            times,
        });
    }

    /// Each operation costs the processor so much from now on.
    pub fn cost(&self, ns: u64) {
        self.cost_ns.store(ns, Ordering::Relaxed);
    }

    /// Takes the operation if the gate has something to do with it.
    pub(crate) fn submit(
        &self,
        device: &Device,
        ring: &mut Ring,
        op: &mut Op,
        user_data: u64,
    ) -> Option<Submitted> {
        let cost = Duration::from_nanos(self.cost_ns.load(Ordering::Relaxed));
        if !cost.is_zero() {
            let begin = Instant::now();
            while begin.elapsed() < cost {
                std::hint::spin_loop();
            }
        }
        let mut state = self.state();
        let held = state.hold.as_ref().is_some_and(|hold| hold.matches(op));
        let failure = state
            .failures
            .iter_mut()
            .find(|failure| failure.times > 0 && failure.selector.matches(op));
        if !held && failure.is_none() {
            return None;
        }
        let io = match &failure {
            Some(failure) => Io::Answer {
                result: failure.errno.raw_os_error().saturating_neg(),
                user_data,
            },
            None if device.stores_nothing(op) => Io::Answer {
                result: nothing_done(op),
                user_data,
            },
            None if device.hold(op) => Io::Answer {
                result: 0,
                user_data,
            },
            None => device.io(op),
        };
        let pushed = if held {
            ring.push_io_behind(self.open.as_fd(), &io, user_data)
        } else {
            ring.push_io(&io, user_data)
        };
        if pushed.is_err() {
            return Some(Submitted::RingFull);
        }
        if let Some(failure) = failure {
            failure.times -= 1;
        }
        if held {
            self.held.fetch_add(1, Ordering::SeqCst);
        }
        Some(Submitted::Queued)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Does an operation that touches nothing, and says what the ring is to answer.
fn nothing_done(op: &mut Op) -> i32 {
    // A method that answers zero, whatever the length.
    op.method = Method::ZeroRange;
    match (op.kind, op.memory()) {
        (OpKind::Read, Some(memory)) => {
            memory.fill_zero();
            i32::try_from(op.len_bytes).unwrap_or(i32::MAX)
        }
        (OpKind::Write, _) => i32::try_from(op.len_bytes).unwrap_or(i32::MAX),
        _ => 0,
    }
}
