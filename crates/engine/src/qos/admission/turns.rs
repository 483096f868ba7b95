//! Quanta, turns and windows.
//!
//! **Design.** A lane begins commands while its quantum of processor time lasts. Lanes within their
//! base have one each turn; lanes above share the turn's [`QUANTA`] in order. A rest expires with
//! the turn; an overrun is deducted from the next quantum. **Not here:** allocations
//! (`forebay_qos`).

use super::records::A_ROUND;
use super::{Admission, FREE, LaneList};
use forebay_device::{Op, OpKind};
use forebay_qos::cost::{Operation, Transport};
use forebay_qos::params::BACKLOG_WEIGHT;
use forebay_qos::resources::{Resource, ResourceVector};
use forebay_xlate::boundary::region::{ReactorRecord, Region, bump};

/// By frontend, ns; longer over TCP, where many commands share an answer's system call.
const QUANTUM_NS: [i32; 3] = [48_000, 12_000, 12_000];
const ALONE_QUANTUM_NS: i32 = 75_000;
/// Per turn, for remote operations, or to give out when idle.
pub(crate) const TURN_NS: i32 = 12_000;
/// Per turn, for lanes above their base; one over TCP is the last.
const QUANTA: usize = 4;
/// Windows without others' requests after which a lane is alone.
pub(crate) const ALONE_WINDOWS: u32 = 32;

impl Admission {
    pub(super) fn has_quantum(&mut self, at: usize) -> bool {
        if self.lane_states[at].turn != self.turn {
            self.begin_turn_of(at);
        }
        let lane_state = &mut self.lane_states[at];
        if lane_state.quantum_ns > 0 {
            return true;
        }
        if lane_state.bursts && lane_state.place == LaneList::Nowhere {
            lane_state.place = LaneList::Queue;
            self.queue.push_back(at as u32);
        }
        self.stops = true;
        self.again = true;
        false
    }

    pub(super) fn spend(&mut self, at: usize, cost: &ResourceVector) {
        self.lane_states[at].quantum_ns -= cost[Resource::Cpu];
    }

    #[inline(never)]
    pub(super) fn begin_turn_of(&mut self, at: usize) {
        if self.only.0 != at {
            self.only = (at, self.windows);
        }
        let alone = self.windows.wrapping_sub(self.only.1) >= ALONE_WINDOWS;
        let lane_state = &mut self.lane_states[at];
        lane_state.turn = self.turn;
        lane_state.bursts = self.contended
            && !alone
            && lane_state.closer & FREE == 0
            && !self.scheduler.is_within_base(lane_state.unit);
        if !lane_state.bursts {
            self.calm = true;
            lane_state.quantum_ns = match alone {
                true => ALONE_QUANTUM_NS,
                false => QUANTUM_NS[lane_state.route.frontend() as usize],
            };
            return;
        }
        lane_state.quantum_ns = lane_state.quantum_ns.min(0);
        if lane_state.place != LaneList::Queue && self.queue.is_empty() && self.quanta > 0 {
            self.give_quantum(at);
        }
    }

    fn give_quantum(&mut self, at: usize) {
        let lane_state = &mut self.lane_states[at];
        (lane_state.turn, lane_state.bursts) = (self.turn, true);
        lane_state.quantum_ns =
            lane_state.quantum_ns.min(0) + QUANTUM_NS[lane_state.route.frontend() as usize];
        self.quanta = match lane_state.route.frontend() {
            Transport::Tcp => 0,
            _ => self.quanta.saturating_sub(1),
        };
    }

    pub(crate) fn set_processors(&mut self, processors: f32) {
        self.scheduler.set_processors(processors);
    }

    /// Processor time of a remote operation: its cost without a network.
    pub(crate) fn remote_op_ns(&self, op: &Op) -> i32 {
        let operation = match op.kind() {
            OpKind::Read => Operation::Read,
            OpKind::Write => Operation::Write,
            OpKind::Flush | OpKind::WriteZeroes | OpKind::Punch => Operation::Other,
        };
        let len_bytes = op.len_bytes().min(u32::MAX.into()) as u32;
        self.costs.of(Transport::Pcie, operation, len_bytes)[Resource::Cpu]
    }

    #[inline]
    pub(in crate::qos) fn begin_turn(
        &mut self,
        now_ns: u64,
        record: &ReactorRecord,
        region: &Region,
    ) {
        self.turn = self.turn.wrapping_add(1);
        self.delays.turn(now_ns);
        if now_ns >= self.ends_ns || self.stops || self.contended {
            self.begin_contended_turn(now_ns, record, region);
        }
    }

    #[inline(never)]
    fn begin_contended_turn(&mut self, now_ns: u64, record: &ReactorRecord, region: &Region) {
        if now_ns >= self.ends_ns {
            self.end_window(now_ns, record, region);
        }
        // A turn in which only lanes above their base asked counts as idle.
        if !std::mem::take(&mut self.calm) {
            self.give_idle();
        }
        self.stops = std::mem::take(&mut self.again) || self.waits();
        self.contended = self.stops || self.scheduler.any_bursts();
        self.quanta = QUANTA;
        while self.quanta > 0
            && let Some(lane) = self.queue.pop_front()
        {
            self.again = true;
            self.give_quantum(lane as usize);
            self.leave_queue(lane);
        }
    }

    fn leave_queue(&mut self, lane: u32) {
        let lane_state = &mut self.lane_states[lane as usize];
        lane_state.place = match lane_state.count {
            0 => LaneList::Nowhere,
            _ => LaneList::Ready,
        };
        if lane_state.place == LaneList::Ready {
            self.ready.push_back(lane);
        }
    }

    #[inline]
    pub(in crate::qos) fn is_idle(&mut self, region: &Region) {
        if std::mem::take(&mut self.stale) {
            self.record_tenants(region);
        }
        self.give_idle();
    }

    /// Gives processor time to refused lanes that lack only that.
    fn give_idle(&mut self) {
        if !self.refused.is_empty() && self.scheduler.is_idle(TURN_NS) {
            self.ask_refused();
        }
    }

    fn ask_refused(&mut self) {
        // A budget may not cover a command of each volume: lanes that began one come last.
        for began in [false, true] {
            let lane_states = &self.lane_states;
            let of = |lane: &&u32| lane_states[**lane as usize].began == began;
            self.ready.extend(self.refused.iter().filter(of));
        }
        for lane in self.refused.drain(..) {
            let lane_state = &mut self.lane_states[lane as usize];
            (lane_state.place, lane_state.began) = (LaneList::Ready, false);
        }
    }

    #[inline]
    pub(in crate::qos) fn waits(&self) -> bool {
        !self.ready.is_empty() || !self.refused.is_empty() || !self.queue.is_empty()
    }

    #[cold]
    fn end_window(&mut self, now_ns: u64, record: &ReactorRecord, region: &Region) {
        let window_ns = self.scheduler.params().window_ns;
        let ended = |until_ns: u64| match self.ends_ns {
            0 => 1,
            ends_ns if until_ns < ends_ns => 0,
            ends_ns => (until_ns - ends_ns) / window_ns + 1,
        };
        let (passed, slept) = (ended(now_ns), ended(self.woke_ns));
        self.ends_ns = match self.ends_ns {
            0 => now_ns + window_ns,
            ends_ns => ends_ns + passed * window_ns,
        };
        // Lanes with processor time wait for a quantum: too much was allocated.
        let left = |lane: &u32| {
            let unit = self.lane_states[*lane as usize].unit;
            self.scheduler.processor_left_ns(unit) / u64::from(self.units[unit].lanes.max(1))
        };
        let backlog_ns: u64 = self.queue.iter().map(left).sum();
        let weight = BACKLOG_WEIGHT;
        (self.scheduler).observe(Resource::Cpu, weight * backlog_ns, 1);
        self.delays.report(&mut self.scheduler, now_ns);
        let was_reckoned_with = self.scheduler.is_reckoned_with();
        self.scheduler.refill(passed, slept);
        self.windows = self.windows.wrapping_add(1);
        let rests = was_reckoned_with && !self.scheduler.is_reckoned_with();
        self.stale |= rests || passed > A_ROUND;
        for _ in 0..self.queue.len() {
            match self.queue.pop_front() {
                Some(lane)
                    if (self.scheduler).is_within_base(self.lane_states[lane as usize].unit) =>
                {
                    self.leave_queue(lane)
                }
                Some(lane) => self.queue.push_back(lane),
                None => {}
            }
        }
        self.ask_refused();
        self.record_some(record, region);
        bump(&record.windows, passed);
        bump(
            &record.scheduling_ns,
            crate::io::clock::monotonic_ns().saturating_sub(now_ns),
        );
    }
}
