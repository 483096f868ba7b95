//! Holds a device's operations in flight, and fails them, at a test's will.
//!
//! A held operation is linked behind a poll of an eventfd in the reactor's ring. It isn't at the
//! device yet, so it holds no fence lock and dies with its process. A failing operation can be held
//! too. Any thread may control the gate.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use crate::device::Device;
use crate::fence::Fence;
use crate::kind::{Backend, note};
use crate::op::{Finish, Op, OpKind, Submitted};
use crate::ring::{Ring, RingIo};

/// The gate. Attach it with [`Device::attach_gate`].
#[derive(Debug)]
pub struct TestGate {
    state: Mutex<GateState>,
    open: OwnedFd,
    held: AtomicU64,
    cost_ns: AtomicU64,
}

#[derive(Debug, Default)]
struct GateState {
    hold: Option<Selector>,
    failures: Vec<Failure>,
    is_unready: bool,
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
        // A flush has no range: it matches every range.
        let range = op.kind == OpKind::Flush
            || (op.offset_bytes < self.range_bytes.end
                && self.range_bytes.start < op.offset_bytes.saturating_add(op.len_bytes));
        kind && range
    }
}

impl TestGate {
    /// An open gate. Panics if the system has no eventfd left.
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

    /// Holds operations of these kinds (empty: all) that overlap a range.
    pub fn hold_some(&self, range_bytes: Range<u64>, kinds: &[OpKind]) {
        let mut state = self.state();
        let mut count = [0; 8];
        // If the gate was shut already, there is nothing to read.
        let _ = rustix::io::read(&self.open, &mut count);
        state.hold = Some(Selector {
            range_bytes,
            kinds: kinds.to_vec(),
        });
    }

    /// Releases all held operations, and holds no more.
    pub fn release(&self) {
        let mut state = self.state();
        state.hold = None;
        self.held.store(0, Ordering::SeqCst);
        let _ = rustix::io::write(&self.open, &1u64.to_ne_bytes());
    }

    /// How many operations are held.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::SeqCst)
    }

    /// Fails the next `times` operations of these kinds (empty: all) that overlap a range.
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

    /// Whether operations find no image ([`Submitted::NotReady`]).
    pub fn set_unready(&self, is_unready: bool) {
        self.state().is_unready = is_unready;
    }

    /// Sets the processor time in ns that each operation burns.
    pub fn cost(&self, ns: u64) {
        self.cost_ns.store(ns, Ordering::Relaxed);
    }

    fn spend(&self) {
        let cost = Duration::from_nanos(self.cost_ns.load(Ordering::Relaxed));
        if !cost.is_zero() {
            let begin = Instant::now();
            while begin.elapsed() < cost {
                std::hint::spin_loop();
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Device {
    /// Puts a gate before all operations. Call it before the device is shared.
    pub fn attach_gate(&mut self, gate: Arc<TestGate>) {
        let below = self.backend.clone();
        *self = Self::over(self.info().clone(), Arc::new(Gated { below, gate }));
    }
}

#[derive(Debug)]
struct Gated {
    below: Arc<dyn Backend>,
    gate: Arc<TestGate>,
}

impl Backend for Gated {
    fn submit(&self, ring: &mut Ring, op: &mut Op, user_data: u64) -> Submitted {
        self.gate.spend();
        op.note &= !note::WAITS;
        let mut state = self.gate.state();
        if state.is_unready && op.kind != OpKind::Flush {
            return Submitted::NotReady;
        }
        let held = state.hold.as_ref().is_some_and(|hold| hold.matches(op));
        let failure = state
            .failures
            .iter_mut()
            .find(|failure| failure.times > 0 && failure.selector.matches(op));
        if !held && failure.is_none() {
            drop(state);
            return self.below.submit(ring, op, user_data);
        }
        let request = match &failure {
            Some(failure) => ring.answer(failure.errno.raw_os_error().saturating_neg(), user_data),
            None => match self.below.request(op) {
                Some(io) => ring.request(&io, user_data),
                None => {
                    op.note |= note::WAITS;
                    ring.answer(0, user_data)
                }
            },
        };
        let pushed = if held {
            ring.push_request_behind(self.gate.open.as_fd(), &request)
        } else {
            ring.push_request(&request)
        };
        if pushed.is_ok() {
            if let Some(failure) = failure {
                failure.times -= 1;
            }
            if held {
                self.gate.held.fetch_add(1, Ordering::SeqCst);
            }
        }
        pushed.into()
    }

    fn finish(&self, op: Op, result: i32) -> Finish {
        if op.note & note::WAITS != 0 {
            let note = op.note & !note::WAITS;
            return Finish::Again(Op { note, ..op });
        }
        // The device below interprets an injected error as its own.
        self.below.finish(op, result)
    }

    fn request(&self, op: &mut Op) -> Option<RingIo<'_>> {
        self.below.request(op)
    }

    fn is_native(&self) -> bool {
        self.below.is_native()
    }

    fn native_commands(&self) -> u64 {
        self.below.native_commands()
    }

    fn fence(&self) -> &dyn Fence {
        self.below.fence()
    }
}
