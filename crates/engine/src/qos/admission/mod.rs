//! Admission of a reactor's lanes, and the queues of waiting commands.
//!
//! **Design.** A command that its lane's quantum and allocation cover is charged and begins
//! ([`Admission::admit`]). Others wait in their lane's queue. The lane is in one of three lists:
//! asked each turn, waiting for a quantum, waiting for the window's end. Nothing is allocated after
//! the start. **Not here:** quanta and turns ([`turns`]), [`tenants`], allocations (`forebay_qos`).

mod records;
mod tenants;
mod turns;

use super::costs::cost_of;
use super::delays::Delays;
use crate::io::command::{Io, IoOp};
use crate::io::parked::NONE;
use crate::lane::LaneIndex;
use forebay_qos::budget::Budget;
use forebay_qos::cost::{CostTable, Operation, Route, Routes, Transport};
use forebay_qos::ledger::Ledger;
use forebay_qos::params::{BadParam, Params};
use forebay_qos::resources::{Resource, ResourceVector, SHARED};
use forebay_qos::scheduler::{Scheduler, TenantStatistics};
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::region::MAX_LANES;
use std::collections::VecDeque;
use std::sync::Arc;

#[cfg(test)]
pub(crate) use turns::ALONE_WINDOWS;
pub(crate) use turns::TURN_NS;

/// With this many waiting, a lane takes no more from its VM's rings.
const ENOUGH: u32 = 8;

/// Admission of commands on one reactor.
#[derive(Debug)]
pub(crate) struct Admission {
    pub(crate) scheduler: Scheduler,
    costs: CostTable,
    lane_states: Box<[LaneState; MAX_LANES]>,
    tenants: Box<[TenantRecord]>,
    /// Lanes to ask in this turn; `at` is the next.
    pub(super) ready: VecDeque<u32>,
    at: usize,
    /// Lanes above their base that wait for a quantum.
    queue: VecDeque<u32>,
    refused: Vec<u32>,
    pub(crate) ends_ns: u64,
    /// When the reactor last woke with no waiting command.
    pub(super) woke_ns: u64,
    turn: u32,
    /// Quanta left in this turn for lanes above their base.
    quanta: usize,
    /// A lane may have more for the next turn.
    pub(super) again: bool,
    /// A lane waited, or was above its base, in the last window.
    pub(super) contended: bool,
    /// A lane within its base asked in this turn.
    calm: bool,
    /// Lanes may have to leave commands in their rings.
    pub(super) stops: bool,
    pub(crate) delays: Delays,
    /// The lane that asked last, and since which window alone.
    only: (usize, u32),
    windows: u32,
    units: Box<[Unit]>,
    record_at: usize,
    /// The next idle turn writes all tenant records.
    stale: bool,
    lane_at: usize,
    lanes: usize,
}

#[derive(Clone, Debug)]
struct LaneState {
    /// [`FREE`] and [`WAITS`] keep a command off the fast path.
    closer: u8,
    route: Route,
    place: LaneList,
    /// A waiting command began since the last refusal.
    began: bool,
    bursts: bool,
    turn: u32,
    quantum_ns: i32,
    tenant: u32,
    unit: usize,
    first: u32,
    last: u32,
    count: u32,
    /// Start of its wait for budget, or 0; `over_ns` has earlier ones.
    refused_ns: u64,
    over_ns: u64,
}

/// The volume has no tenant, so nothing is charged.
const FREE: u8 = 1;
const WAITS: u8 = 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum LaneList {
    Nowhere,
    Ready,
    Queue,
    Refused,
}

/// A scheduler's lane, shared by a volume's exports.
#[derive(Clone, Copy, Default, Debug)]
struct Unit {
    of: Option<(VolumeId, u32)>,
    lanes: u32,
}

#[derive(Clone, Default, Debug)]
struct TenantRecord {
    lanes: u32,
    budget: Option<Budget>,
    routes: Routes,
    seen: TenantStatistics,
    throttled_ops: u64,
    throttled_ns: u64,
}

impl Default for LaneState {
    fn default() -> Self {
        Self {
            closer: FREE,
            route: Route::local(Transport::Tcp),
            place: LaneList::Nowhere,
            began: false,
            bursts: false,
            turn: 0,
            quantum_ns: 0,
            tenant: u32::MAX,
            unit: 0,
            first: NONE,
            last: NONE,
            count: 0,
            refused_ns: 0,
            over_ns: 0,
        }
    }
}

impl LaneState {
    fn popped(&mut self) {
        self.count -= 1;
        if self.count == 0 {
            (self.first, self.last) = (NONE, NONE);
            self.closer &= !WAITS;
        }
    }

    /// Ends a wait for budget; the lane may still wait for a turn.
    fn let_on(&mut self, now_ns: u64) {
        self.over_ns = self.over_ns(now_ns);
        self.refused_ns = 0;
    }

    fn over_ns(&self, now_ns: u64) -> u64 {
        match self.refused_ns {
            0 => self.over_ns,
            since_ns => self.over_ns + now_ns.saturating_sub(since_ns),
        }
    }
}

enum Verdict {
    Begin(u32),
    Empty,
    Enough,
    Refused,
}

impl Admission {
    /// Admission for a reactor with `per_second` of each resource. Fails if a parameter is out of
    /// range. The first window ends with the first turn.
    pub(crate) fn new(
        params: Params,
        per_second: &[f64; SHARED],
        costs: &CostTable,
        ledger: &Arc<Ledger>,
    ) -> Result<Self, BadParam> {
        Ok(Self {
            scheduler: Scheduler::new(params, per_second, MAX_LANES, ledger)?,
            costs: costs.clone(),
            lane_states: Box::new(std::array::from_fn(|_| LaneState::default())),
            tenants: vec![TenantRecord::default(); ledger.tenants()].into(),
            ready: VecDeque::with_capacity(MAX_LANES),
            at: 0,
            queue: VecDeque::with_capacity(MAX_LANES),
            refused: Vec::with_capacity(MAX_LANES),
            ends_ns: 0,
            woke_ns: 0,
            turn: 1,
            quanta: 0,
            again: false,
            contended: false,
            calm: false,
            stops: false,
            delays: Delays::new(),
            only: (usize::MAX, 0),
            windows: 0,
            units: vec![Unit::default(); MAX_LANES].into(),
            record_at: 0,
            stale: false,
            lane_at: 0,
            lanes: 0,
        })
    }

    /// Charges a command and returns true if it may begin.
    #[inline(always)]
    pub(crate) fn admit(&mut self, lane: LaneIndex, operation: Operation, len_bytes: u32) -> bool {
        let at = lane.0 as usize % MAX_LANES;
        if self.lane_states[at].turn != self.turn {
            self.begin_turn_of(at);
        }
        let lane_state = &mut self.lane_states[at];
        if lane_state.closer == 0
            && lane_state.quantum_ns > 0
            && let Some(cost) = (self.costs).row(lane_state.route, operation, len_bytes)
            && self.scheduler.spend(lane_state.unit, cost)
        {
            lane_state.quantum_ns -= cost[Resource::Cpu];
            return true;
        }
        self.admit_else(at, operation, len_bytes)
    }

    #[inline(never)]
    fn admit_else(&mut self, at: usize, operation: Operation, len_bytes: u32) -> bool {
        let cost = (self.costs).of(self.lane_states[at].route, operation, len_bytes);
        self.admit_cost(at, &cost)
    }

    #[cold]
    #[inline(never)]
    pub(super) fn admit_any(&mut self, lane: LaneIndex, op: &IoOp) -> bool {
        let at = lane.0 as usize % MAX_LANES;
        let cost = cost_of(&self.costs, self.lane_states[at].route, op);
        self.admit_cost(at, &cost)
    }

    fn admit_cost(&mut self, at: usize, cost: &ResourceVector) -> bool {
        let lane_state = &self.lane_states[at];
        if lane_state.closer & (FREE | WAITS) != 0 {
            return lane_state.closer & WAITS == 0;
        }
        let unit = lane_state.unit;
        if !self.has_quantum(at) || !self.scheduler.admit(unit, cost) {
            return false;
        }
        self.spend(at, cost);
        true
    }

    #[inline]
    pub(super) fn may_fetch(&mut self, lane: LaneIndex) -> bool {
        let at = lane.0 as usize % MAX_LANES;
        let lane_state = &self.lane_states[at];
        lane_state.count < ENOUGH && (lane_state.closer & FREE != 0 || self.has_quantum(at))
    }

    /// Whether a command that ended unbegun may be answered. It costs quantum, and an operation as
    /// debt.
    #[cold]
    #[inline(never)]
    pub(super) fn may_answer(&mut self, lane: LaneIndex) -> bool {
        let at = lane.0 as usize % MAX_LANES;
        let lane_state = &self.lane_states[at];
        if lane_state.closer & FREE != 0 {
            return true;
        }
        let whole = (self.costs).of(lane_state.route, Operation::Other, 0);
        if !self.has_quantum(at) {
            return false;
        }
        let mut cost = ResourceVector::ZERO;
        for resource in [Resource::Cpu, Resource::Software, Resource::Ops] {
            cost[resource] = whole[resource];
        }
        self.spend(at, &cost);
        let unit = self.lane_states[at].unit;
        if self.scheduler.may_borrow(unit) {
            self.scheduler.borrow(unit, &cost);
        }
        true
    }

    /// Commands that wait for a quantum, and the one that begins now.
    pub(crate) fn waits_for_processor(&self, lane: LaneIndex) -> u32 {
        let lane_state = &self.lane_states[lane.0 as usize % MAX_LANES];
        match lane_state.place {
            LaneList::Ready | LaneList::Queue => lane_state.count + 1,
            LaneList::Nowhere | LaneList::Refused => 0,
        }
    }

    pub(super) fn is_full(&self, lane: LaneIndex) -> bool {
        self.lane_states[lane.0 as usize % MAX_LANES].count >= ENOUGH
    }

    pub(crate) fn may_hold(&self, lane: LaneIndex) -> bool {
        (self.scheduler).may_hold(self.lane_states[lane.0 as usize % MAX_LANES].unit)
    }

    pub(super) fn waits_for_turns(&self, lane: LaneIndex) -> bool {
        let lane_state = &self.lane_states[lane.0 as usize % MAX_LANES];
        lane_state.bursts
            && lane_state.count > 0
            && matches!(lane_state.place, LaneList::Ready | LaneList::Queue)
    }

    /// Whether a lane within its base has no waiting command while others burst.
    pub(super) fn is_calm(&self, lane: LaneIndex) -> bool {
        let at = lane.0 as usize % MAX_LANES;
        self.contended
            && self.lane_states[at].closer & (FREE | WAITS) == 0
            && self.scheduler.is_within_base(self.lane_states[at].unit)
    }

    pub(crate) fn push(&mut self, index: u32, ios: &mut [Io], now_ns: u64) {
        let io = &mut ios[index as usize];
        let at = io.lane.0 as usize % MAX_LANES;
        let lane_state = &mut self.lane_states[at];
        io.link = NONE;
        io.over_ns.get_or_insert(lane_state.over_ns(now_ns));
        if lane_state.closer & FREE == 0 {
            let cost = cost_of(&self.costs, lane_state.route, &io.op);
            self.scheduler.wait(lane_state.unit, &cost);
        }
        let is_first = lane_state.count == 0;
        match lane_state.last {
            NONE => lane_state.first = index,
            last => ios[last as usize].link = index,
        }
        lane_state.last = index;
        lane_state.count += 1;
        lane_state.closer |= WAITS;
        self.stops = true;
        if is_first && lane_state.place == LaneList::Nowhere {
            // Out of quantum, or refused by its budget.
            if lane_state.turn == self.turn && lane_state.quantum_ns <= 0 {
                lane_state.place = LaneList::Ready;
                self.ready.push_back(at as u32);
            } else {
                lane_state.refused_ns = now_ns;
                lane_state.place = LaneList::Refused;
                self.refused.push(at as u32);
            }
        }
    }

    pub(crate) fn next(
        &mut self,
        of_lane: Option<LaneIndex>,
        ios: &mut [Io],
        now_ns: u64,
    ) -> Option<u32> {
        while let Some(lane) = self.ready.get(self.at).copied() {
            let at = lane as usize;
            if of_lane.is_some_and(|of| of.0 != lane) {
                return None;
            }
            match self.ask(at, ios, now_ns) {
                Verdict::Begin(index) => return Some(index),
                // Within its base, it continues in the next turn.
                Verdict::Enough if !self.lane_states[at].bursts => self.at += 1,
                Verdict::Enough => {
                    self.ready.remove(self.at);
                    self.lane_states[at].place = LaneList::Queue;
                    self.queue.push_back(lane);
                }
                Verdict::Empty => {
                    self.ready.remove(self.at);
                    self.lane_states[at].place = LaneList::Nowhere;
                }
                Verdict::Refused => {
                    self.ready.remove(self.at);
                    self.lane_states[at].place = LaneList::Refused;
                    self.refused.push(lane);
                }
            }
        }
        self.at = 0;
        None
    }

    fn ask(&mut self, at: usize, ios: &mut [Io], now_ns: u64) -> Verdict {
        let lane_state = &mut self.lane_states[at];
        let Some(io) = ios.get_mut(lane_state.first as usize) else {
            lane_state.let_on(now_ns);
            return Verdict::Empty;
        };
        if lane_state.closer & FREE == 0 {
            let cost = cost_of(&self.costs, lane_state.route, &io.op);
            let unit = lane_state.unit;
            if !self.has_quantum(at) {
                self.lane_states[at].let_on(now_ns);
                return Verdict::Enough;
            }
            if !self.scheduler.resume(unit, &cost) {
                let since_ns = &mut self.lane_states[at].refused_ns;
                *since_ns = if *since_ns == 0 { now_ns } else { *since_ns };
                return Verdict::Refused;
            }
            self.spend(at, &cost);
        }
        let lane_state = &mut self.lane_states[at];
        lane_state.let_on(now_ns);
        lane_state.began = true;
        let index = lane_state.first;
        lane_state.first = std::mem::replace(&mut io.link, NONE);
        lane_state.popped();
        Verdict::Begin(index)
    }

    /// To begin as debt; `None` at a second's worth of debt.
    pub(crate) fn take_owing(&mut self, lane: LaneIndex, ios: &mut [Io]) -> Option<u32> {
        let at = lane.0 as usize % MAX_LANES;
        let lane_state = &mut self.lane_states[at];
        let index = lane_state.first;
        let io = ios.get_mut(index as usize)?;
        if lane_state.closer & FREE == 0 {
            if !self.scheduler.may_borrow(lane_state.unit) {
                return None;
            }
            let cost = cost_of(&self.costs, lane_state.route, &io.op);
            self.scheduler.cancel(lane_state.unit, &cost);
            self.scheduler.borrow(lane_state.unit, &cost);
        }
        lane_state.first = std::mem::replace(&mut io.link, NONE);
        lane_state.popped();
        Some(index)
    }

    pub(super) fn take_overdue(&mut self, ios: &mut [Io], now_ns: u64, overdue: &mut Vec<u32>) {
        for lane_state in self.lane_states.iter_mut() {
            let (mut before, mut next) = (NONE, lane_state.first);
            while let Some(io) = ios.get_mut(next as usize) {
                let (index, link) = (next, io.link);
                next = link;
                if io.deadline_ns > now_ns {
                    before = index;
                    continue;
                }
                if lane_state.closer & FREE == 0 {
                    let cost = cost_of(&self.costs, lane_state.route, &io.op);
                    self.scheduler.cancel(lane_state.unit, &cost);
                }
                io.link = NONE;
                match before {
                    NONE => lane_state.first = link,
                    before => ios[before as usize].link = link,
                }
                if lane_state.last == index {
                    lane_state.last = before;
                }
                lane_state.popped();
                overdue.push(index);
            }
        }
    }

    /// Time that a lane has waited for its budget, but not for turns.
    pub(super) fn over_ns(&self, lane: LaneIndex, now_ns: u64) -> u64 {
        self.lane_states[lane.0 as usize % MAX_LANES].over_ns(now_ns)
    }

    /// Time over budget while a command waited; also counts it for the tenant.
    pub(super) fn was_over_budget(&mut self, io: &Io, now_ns: u64) -> u64 {
        let lane_state = &self.lane_states[io.lane.0 as usize % MAX_LANES];
        let over_ns = lane_state.over_ns(now_ns);
        let ns = over_ns.saturating_sub(io.over_ns.unwrap_or(over_ns));
        if ns > 0
            && let Some(tenant) = self.tenants.get_mut(lane_state.tenant as usize)
        {
            tenant.throttled_ops += 1;
            tenant.throttled_ns += ns;
        }
        ns
    }

    pub(crate) fn go_on_counting(&mut self, other: &Self, now_ns: u64) {
        for (lane_state, other) in self.lane_states.iter_mut().zip(other.lane_states.iter()) {
            lane_state.over_ns = other.over_ns(now_ns);
        }
    }

    pub(crate) fn give_up(&mut self, ios: &mut [Io], waited: &mut Vec<u32>) {
        self.scheduler.withdraw();
        for lane_state in self.lane_states.iter() {
            let mut next = lane_state.first;
            while let Some(io) = ios.get_mut(next as usize) {
                waited.push(next);
                next = std::mem::replace(&mut io.link, NONE);
            }
        }
    }
}
