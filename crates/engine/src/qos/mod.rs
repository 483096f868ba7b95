//! Quality of service in a reactor, by `forebay_qos`.
//!
//! **Design.** Each command is charged when it begins; others wait in their lane's queue, in order.
//! A window's end refills budgets, and each turn asks the waiting lanes again. A lane begins one
//! quantum of commands in a turn ([`admission`]), so none waits for a neighbour's whole queue. Time
//! over budget counts while a lane's first waiting command was refused. A VM's commands stay in its
//! ring while enough of its lane wait. Recovered commands and internal jobs are not charged. **Not
//! here:** allocations (`forebay_qos`), the daemon's settings ([`crate::control`]).

mod admission;
mod costs;
mod delays;
mod held;

use crate::io::command::{Io, IoOp, Stage, Token};
use crate::io::devices::DeviceRing;
use crate::io::lanes::Lanes;
use crate::io::slab::Slab;
use crate::io::slice::Slice;
use crate::lane::{Lane, LaneIndex};
use crate::recovery::RecoveredIo;
use forebay_device::Op;
use forebay_qos::budget::Budget;
use forebay_qos::cost::Operation;
use forebay_xlate::boundary::region::{MAX_LANES, ReactorRecord, Region, bump};
use held::Throttled;

#[cfg(test)]
pub(crate) use admission::ALONE_WINDOWS;
pub(crate) use admission::Admission;
pub(crate) use admission::TURN_NS;

/// By which a sleeping reactor may delay its report that it uses nothing.
const RECKONED_WINDOWS: u64 = 8;

#[derive(Debug)]
pub(crate) struct Qos {
    pub(crate) admission: Option<Box<Admission>>,
    pub(crate) throttled: Throttled,
}

impl Qos {
    pub(crate) fn new() -> Self {
        Self {
            admission: None,
            throttled: Throttled::new(),
        }
    }

    pub(crate) fn begin_tenant(&mut self, tenant: u32) {
        if let Some(admission) = &mut self.admission {
            admission.begin_tenant(tenant);
        }
    }

    /// A `guaranteed` base has precedence if bases exceed the node's resources.
    pub(crate) fn set_budget(&mut self, tenant: u32, budget: &Budget, guaranteed: bool) {
        if let Some(admission) = &mut self.admission {
            admission.set_budget(tenant, budget, guaranteed);
        }
    }

    /// Processors that carry out the work charged here.
    pub(crate) fn set_processors(&mut self, processors: f32) {
        if let Some(admission) = &mut self.admission {
            admission.set_processors(processors);
        }
    }

    pub(crate) fn attach(&mut self, lane: &Lane, ios: &[Io]) {
        if let Some(admission) = &mut self.admission {
            admission.attach(lane, ios);
        }
    }

    pub(crate) fn detach(&mut self, index: LaneIndex, ios: &[Io]) {
        if let Some(admission) = &mut self.admission {
            admission.detach(index.0 as usize % MAX_LANES, ios);
        }
    }

    pub(crate) fn note_devices(&mut self, changed: Option<u8>, devices: &DeviceRing) {
        if let Some(admission) = &mut self.admission {
            let some_at_once = devices.some_end_at_once();
            admission.delays.note_devices(changed, some_at_once);
        }
    }

    /// Whether a VM's lane may take commands from its rings. If not, a later turn or window
    /// continues.
    #[inline]
    pub(crate) fn may_fetch(&mut self, lane: LaneIndex) -> bool {
        let admission = self.admission.as_ref();
        if admission.is_none_or(|a| !a.stops) {
            return true;
        }
        // Without room, it needs no quantum.
        self.may_hold(lane)
            && (self.admission.as_mut()).is_none_or(|admission| admission.may_fetch(lane))
    }

    #[inline]
    pub(crate) fn may_answer(&mut self, lane: Option<LaneIndex>) -> bool {
        match (&mut self.admission, lane) {
            (Some(admission), Some(lane)) => admission.may_answer(lane),
            _ => true,
        }
    }

    /// Too many commands wait, of this lane or of all, to look at its rings.
    #[inline]
    pub(crate) fn is_held_back(&self, lane: LaneIndex) -> bool {
        let admission = self.admission.as_ref().filter(|a| a.stops);
        admission.is_some_and(|a| a.is_full(lane) || !self.may_hold(lane))
    }

    #[inline]
    pub(crate) fn waits_for_turns(&self, lane: LaneIndex) -> bool {
        let admission = self.admission.as_ref().filter(|a| a.stops);
        admission.is_some_and(|a| a.waits_for_turns(lane))
    }

    pub(crate) fn waits_for_processor(&self, lane: LaneIndex) -> u32 {
        let admission = self.admission.as_ref();
        admission.map_or(0, |a| a.waits_for_processor(lane))
    }

    /// Whether lanes are above their base or wait, so that order matters.
    #[inline]
    pub(crate) fn any_bursts(&self) -> bool {
        (self.admission.as_ref()).is_some_and(|a| a.contended)
    }

    pub(crate) fn is_calm(&self, lane: LaneIndex) -> bool {
        (self.admission.as_ref()).is_some_and(|admission| admission.is_calm(lane))
    }

    #[inline(always)]
    pub(crate) fn admit(&mut self, lane: LaneIndex, operation: Operation, len_bytes: u32) -> bool {
        match &mut self.admission {
            Some(admission) => admission.admit(lane, operation, len_bytes),
            None => true,
        }
    }

    #[inline(always)]
    pub(crate) fn admit_op(&mut self, lane: LaneIndex, op: &IoOp) -> bool {
        let Some(admission) = &mut self.admission else {
            return true;
        };
        match *op {
            IoOp::Read { len_bytes, .. } => admission.admit(lane, Operation::Read, len_bytes),
            IoOp::Write { len_bytes, .. } => admission.admit(lane, Operation::Write, len_bytes),
            _ => admission.admit_any(lane, op),
        }
    }

    /// Whether a command may begin; a recovered one always may.
    pub(crate) fn admit_during_recovery(&mut self, io: &Io, recovered: &RecoveredIo) -> bool {
        self.admission.is_none()
            || recovered.any() && recovered.is_recovered(io.record)
            || self.admit_op(io.lane, &io.op)
    }

    pub(crate) fn over_ns(&self, lane: LaneIndex, now_ns: u64) -> u64 {
        let admission = self.admission.as_ref();
        admission.map_or(0, |a| a.over_ns(lane, now_ns))
    }

    #[cold]
    pub(crate) fn throttle(&mut self, token: Token, slab: &mut Slab, lanes: &Lanes, now_ns: u64) {
        let io = &mut slab[token.index()];
        io.stage = Stage::Throttled;
        // A wait for budget never times out.
        io.deadline_ns = u64::MAX;
        self.throttled.count(io, lanes, true);
        let index = token.entrust();
        if let Some(admission) = &mut self.admission {
            admission.push(index, slab, now_ns);
        }
    }

    pub(crate) fn waited(&mut self, io: &mut Io, lanes: &Lanes, now_ns: u64) {
        if let Some(admission) = &mut self.admission {
            self.throttled.count(io, lanes, false);
            admission.count_over(io, lanes, now_ns);
            now_at_devices(io, now_ns);
        }
    }

    /// Counts the wait of a command in its frontend.
    #[cold]
    pub(crate) fn waited_elsewhere(&mut self, io: &mut Io, lanes: &Lanes, now_ns: u64) {
        if let Some(admission) = &mut self.admission {
            admission.count_over(io, lanes, now_ns);
        }
    }

    #[inline]
    pub(crate) fn is_any_ready(&self) -> bool {
        (self.admission.as_ref()).is_some_and(|admission| !admission.ready.is_empty())
    }

    #[inline]
    pub(crate) fn begin_turn(&mut self, now_ns: u64, record: &ReactorRecord, region: &Region) {
        if let Some(admission) = &mut self.admission {
            admission.begin_turn(now_ns, record, region);
        }
    }

    #[inline]
    pub(crate) fn is_idle(&mut self, region: &Region) {
        if let Some(admission) = &mut self.admission {
            admission.is_idle(region);
            admission.delays.idle();
        }
    }

    pub(crate) fn has_ready(&self) -> bool {
        let admission = self.admission.as_ref();
        admission.is_some_and(|a| !a.ready.is_empty() || a.again)
    }

    /// `None` if not needed; some windows later if no command waits.
    pub(crate) fn window_ends_ns(&self) -> Option<u64> {
        let admission = self.admission.as_ref()?;
        let later_ns = RECKONED_WINDOWS * admission.scheduler.params().window_ns;
        let scheduler = &admission.scheduler;
        match admission.waits() || scheduler.shares_with_others() {
            true => Some(admission.ends_ns),
            false if scheduler.is_reckoned_with() => Some(admission.ends_ns + later_ns),
            false => None,
        }
    }

    /// Windows that ended during the sleep are not lost.
    pub(crate) fn woke(&mut self, now_ns: u64) {
        if let Some(admission) = self.admission.as_mut().filter(|a| !a.waits()) {
            admission.woke_ns = now_ns;
        }
    }

    pub(crate) fn take_overdue(&mut self, slab: &mut Slab, now_ns: u64, overdue: &mut Vec<u32>) {
        if let Some(admission) = self.admission.as_mut().filter(|a| a.waits()) {
            admission.take_overdue(slab, now_ns, overdue);
        }
    }

    /// The start of an operation, or 0 if its delay is not measured.
    #[inline]
    pub(crate) fn slice_begins(&mut self, device: u8, op: &Op, remote: bool) -> u64 {
        match &mut self.admission {
            Some(admission) => admission.delays.begun(device, op, remote),
            None => 0,
        }
    }

    #[inline]
    pub(crate) fn slice_ended(&mut self, slice: &Slice, good: bool, now_ns: u64) {
        if let Some(admission) = &mut self.admission {
            let (device, op, begun_ns) = (slice.device, &slice.op, slice.begun_ns);
            (admission.delays).ended(device, op, begun_ns, good, now_ns);
        }
    }

    pub(crate) fn remote_op_ns(&self, op: &Op) -> Option<i32> {
        Some(self.admission.as_ref()?.remote_op_ns(op))
    }
}

impl Admission {
    pub(crate) fn count_over(&mut self, io: &mut Io, lanes: &Lanes, now_ns: u64) {
        let over_ns = self.was_over_budget(io, now_ns);
        io.over_ns = None;
        if let Some(lane) = lanes.get(io.lane).filter(|_| over_ns > 0) {
            let record = lane.record();
            bump(&record.throttled_ops, 1);
            record.throttled_times.record(over_ns);
        }
    }
}

/// The time from here on is the devices'.
pub(crate) fn now_at_devices(io: &mut Io, now_ns: u64) {
    io.stage = Stage::AtDevices;
    io.started_ns = io.started_ns.max(now_ns);
}
