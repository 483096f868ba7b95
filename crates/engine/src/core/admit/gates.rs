//! The gates of a reactor's lanes, and the queues behind them.
//!
//! **Design.** Most often a lane is open: then a command is charged and begins, and nothing else is looked at
//! ([`Scheduler::pass`]; most often its first half is enough). A lane's gate says what must be looked at else. What is not
//! admitted is in its lane's queue, linked through the slab, and the lane in one of two lists: those that may go on in
//! a turn, and those that wait for the window's end. All of it is made once, and allocates nothing.
//!
//! **Not here:** what is done with a command ([`super`]), a lane's part of a turn ([`parts`]), whose lanes are ([`whose`]), what a turn and a window begin with ([`windows`]).

mod parts;
mod records;
mod whose;
mod windows;

use super::super::io::{Io, IoOp};
use super::super::parked::NONE;
use super::costs::cost_of;
use super::delays::Delays;
use crate::lane::LaneIndex;
use forebay_burst::board::Board;
use forebay_burst::budget::Budget;
use forebay_burst::cost::{CostTable, Frontend, Frontends, Operation};
use forebay_burst::params::{BadParam, Params, Policy};
use forebay_burst::scheduler::{Scheduler, Seen};
use forebay_burst::units::{Resource, SHARED, Units};
use forebay_xlate::boundary::region::MAX_LANES;
use parts::{Alone, LEAST_LUMP_NS};
use std::collections::VecDeque;
use std::sync::Arc;

/// A lane with so many commands that wait takes no more from its machine's rings.
const ENOUGH: u32 = 8;

/// How a reactor admits commands.
#[derive(Debug)]
pub struct Admission {
    pub(super) scheduler: Scheduler,
    costs: CostTable,
    gates: Box<[Gate]>,
    tenants: Box<[Told]>,
    /// Lanes that wait and were not refused in this window.
    pub(super) ready: VecDeque<u32>,
    /// Of them the one that is asked next.
    at: usize,
    /// Lanes that wait for the next window.
    refused: Vec<u32>,
    pub(super) ends_ns: u64,
    /// When the reactor last woke, while nobody waited.
    pub(super) woke_ns: u64,
    turn: u32,
    /// Lanes above their base that wait for a turn of theirs.
    line: VecDeque<u32>,
    /// Of this turn's lump for those, what is left.
    lump_ns: i32,
    /// Some lane had its part of this turn, and may have more in the next.
    pub(super) again: bool,
    /// Some lane waited, or wanted more than its part of the last turn, or was above its base in the last window.
    contended: bool,
    /// A lane within its base began something in this turn.
    calm: bool,
    /// Some lane may have to leave what is in its rings: always while anything waits.
    pub(super) stops: bool,
    /// How long operations wait at devices.
    pub(super) delays: Delays,
    /// Lanes that were opened: each turn shuts them, while there is anything to contend for, and each window.
    opened: Vec<u32>,
    alone: Alone,
    /// The tenant whose record is written next.
    record_at: usize,
    /// The lanes of one look at all that wait.
    looked_at: Vec<u32>,
    /// Tenants' records are older than that makes them: all are written when there is nothing else to do.
    stale: bool,
    /// The same of lanes, of which there have been so many.
    lane_at: usize,
    lanes: usize,
}

/// A lane, as far as it is asked whether a command may begin.
#[derive(Clone, Debug)]
struct Gate {
    /// Whether more than its budget must be looked at: [`FREE`], [`WAITS`].
    closer: u8,
    frontend: Frontend,
    /// It is in one of the lists.
    listed: bool,
    /// One of its commands that waited has begun in this window.
    began: bool,
    /// It is in the line.
    in_line: bool,
    /// It is among those that were opened.
    opened: bool,
    /// It used up what it was last given of a turn.
    short: bool,
    /// The turn that the line gave it.
    granted: u32,
    /// The turn of which it was last given a part, and that part.
    turn: u32,
    had: i32,
    /// What is set aside for it in a turn, while it is above its base: as much as it came for before.
    lump: i32,
    tenant: u32,
    /// Commands that wait.
    first: u32,
    last: u32,
    count: u32,
    /// Since when it waits for its budget, if it does; and how long it did before.
    refused_ns: Option<u64>,
    over_ns: u64,
}

/// Its volume is no tenant's: nothing is charged.
const FREE: u8 = 1;
/// Commands wait.
const WAITS: u8 = 2;
/// It is above its base, in this turn.
const BURSTS: u8 = 4;

/// What a tenant's record was told.
#[derive(Clone, Default, Debug)]
struct Told {
    lanes: u32,
    budget: Option<Budget>,
    /// Its lanes' here.
    frontends: Frontends,
    seen: Seen,
    throttled_ops: u64,
    throttled_ns: u64,
}

impl Default for Gate {
    fn default() -> Self {
        Self {
            closer: FREE,
            frontend: Frontend::Tcp,
            listed: false,
            began: false,
            in_line: false,
            opened: false,
            short: false,
            granted: 0,
            turn: 0,
            had: 0,
            lump: LEAST_LUMP_NS,
            tenant: u32::MAX,
            first: NONE,
            last: NONE,
            count: 0,
            refused_ns: None,
            over_ns: 0,
        }
    }
}

impl Gate {
    /// One waits no more.
    fn popped(&mut self) {
        self.count -= 1;
        if self.count == 0 {
            (self.first, self.last) = (NONE, NONE);
            self.closer &= !WAITS;
        }
    }

    /// It does not wait for its budget any more, but perhaps for its turn.
    fn let_on(&mut self, now_ns: u64) {
        self.over_ns = self.over_ns(now_ns);
        self.refused_ns = None;
    }

    fn over_ns(&self, now_ns: u64) -> u64 {
        let now = (self.refused_ns).map_or(0, |since_ns| now_ns.saturating_sub(since_ns));
        self.over_ns + now
    }
}

/// What comes of asking a lane that waits.
enum Asked {
    Begin(u32),
    /// Nothing waits there.
    Empty,
    /// It has had its part of this turn.
    Enough,
    Refused,
}

impl Admission {
    /// For one reactor, which has `per_second` of each resource. The first window ends with the first turn.
    ///
    /// # Errors
    /// A parameter that is out of its range.
    pub fn new(
        params: Params,
        per_second: &[f64; SHARED],
        costs: &CostTable,
        board: &Arc<Board>,
    ) -> Result<Self, BadParam> {
        Ok(Self {
            scheduler: Scheduler::new(params, per_second, MAX_LANES, board)?,
            costs: costs.clone(),
            gates: vec![Gate::default(); MAX_LANES].into(),
            tenants: vec![Told::default(); board.tenants()].into(),
            ready: VecDeque::with_capacity(MAX_LANES),
            at: 0,
            refused: Vec::with_capacity(MAX_LANES),
            ends_ns: 0,
            woke_ns: 0,
            turn: 1,
            line: VecDeque::with_capacity(MAX_LANES),
            lump_ns: 0,
            again: false,
            contended: false,
            calm: false,
            stops: false,
            delays: Delays::new(),
            opened: Vec::with_capacity(MAX_LANES),
            alone: Alone::default(),
            record_at: 0,
            looked_at: Vec::with_capacity(MAX_LANES),
            stale: false,
            lane_at: 0,
            lanes: 0,
        })
    }

    /// Whether such a command may begin; if so, it is paid for.
    #[inline(always)]
    pub(crate) fn admit(&mut self, lane: LaneIndex, operation: Operation, len_bytes: u32) -> bool {
        let at = lane.0 as usize;
        match (self.scheduler).pass_alike(at, operation, len_bytes) {
            Some(false) => true,
            Some(true) => {
                self.used_up(at);
                true
            }
            None => match (self.scheduler).pass_unlike(at, &self.costs, operation, len_bytes) {
                Some(false) => true,
                // Few, so that is not to be where each command is.
                passed => self.admit_else(at, operation, len_bytes, passed),
            },
        }
    }

    /// The same of one that uses the part up, or did not pass.
    #[cold]
    #[inline(never)]
    fn admit_else(
        &mut self,
        at: usize,
        operation: Operation,
        len_bytes: u32,
        passed: Option<bool>,
    ) -> bool {
        if passed.is_some() {
            self.used_up(at);
            return true;
        }
        let at = at % MAX_LANES;
        let cost = (self.costs).of(self.gates[at].frontend, operation, len_bytes);
        self.admit_cost(at, &cost)
    }

    /// The same of any command.
    #[cold]
    #[inline(never)]
    pub(super) fn admit_any(&mut self, lane: LaneIndex, op: &IoOp) -> bool {
        let at = lane.0 as usize % MAX_LANES;
        let cost = cost_of(&self.costs, self.gates[at].frontend, op);
        self.admit_cost(at, &cost)
    }

    fn admit_cost(&mut self, at: usize, cost: &Units) -> bool {
        self.alone.came(at);
        let gate = &self.gates[at];
        if gate.closer & (FREE | WAITS) != 0 {
            return gate.closer & WAITS == 0;
        }
        if !self.has_part(at) || !self.scheduler.admit(at, cost) {
            return false;
        }
        self.spend(at, cost);
        if self.has_part(at) {
            let gate = &mut self.gates[at];
            self.scheduler.open(at, gate.frontend);
            if !std::mem::replace(&mut gate.opened, true) {
                self.opened.push(at as u32);
            }
        }
        true
    }

    /// A lane that is open has used its part. If it has another one, it stays open.
    #[cold]
    #[inline(never)]
    fn used_up(&mut self, at: usize) {
        if self.gates[at].turn != self.turn && !self.contended {
            self.begin_calm_turn_of(at);
        } else {
            self.has_part(at);
        }
    }

    /// Whether a lane that has room may take commands from its machine's rings.
    #[inline]
    pub(super) fn may_fetch(&mut self, lane: LaneIndex) -> bool {
        let at = lane.0 as usize % MAX_LANES;
        let gate = &self.gates[at];
        gate.count < ENOUGH && (gate.closer & FREE != 0 || self.has_part(at))
    }

    /// Whether a command that is over without having begun may be answered now. It waits for no budget, but it takes the processor's
    /// time as others do, and counts as an operation that is owed: or who asks for nonsense alone would have a turn without an end.
    #[cold]
    #[inline(never)]
    pub(super) fn may_answer(&mut self, lane: LaneIndex) -> bool {
        let at = lane.0 as usize % MAX_LANES;
        let gate = &self.gates[at];
        if gate.closer & FREE != 0 {
            return true;
        }
        let whole = (self.costs).of(gate.frontend, Operation::Other, 0);
        if !self.has_part(at) {
            return false;
        }
        let mut cost = Units::ZERO;
        for resource in [Resource::Cpu, Resource::Software, Resource::Ops] {
            cost[resource] = whole[resource];
        }
        self.spend(at, &cost);
        if self.scheduler.may_owe(at) {
            self.scheduler.owe(at, &cost);
        }
        true
    }

    /// How many commands of a lane wait for more of the processor's time than it is given in a turn, with the one that begins
    /// now.
    pub(in crate::core) fn waits_for_processor(&self, lane: LaneIndex) -> u32 {
        let gate = &self.gates[lane.0 as usize % MAX_LANES];
        if gate.short { gate.count + 1 } else { 0 }
    }

    /// Whether so many commands of a lane wait that nobody looks at its machine's rings.
    pub(super) fn is_full(&self, lane: LaneIndex) -> bool {
        self.gates[lane.0 as usize % MAX_LANES].count >= ENOUGH
    }

    /// Whether a lane in which something waits may have more that does ([`Scheduler::may_hold`]).
    pub(in crate::core) fn may_hold(&self, lane: LaneIndex) -> bool {
        self.scheduler.may_hold(lane.0 as usize % MAX_LANES)
    }

    /// Whether commands of it wait for a turn.
    pub(super) fn waits_for_turns(&self, lane: LaneIndex) -> bool {
        let gate = &self.gates[lane.0 as usize % MAX_LANES];
        gate.count > 0 && (gate.in_line || gate.granted == self.turn)
    }

    /// Whether a lane waited or is above its base.
    #[inline]
    pub(super) fn is_contended(&self) -> bool {
        self.contended
    }

    /// Whether a lane is within its base, nothing waits there, and others burst.
    pub(super) fn is_calm(&self, lane: LaneIndex) -> bool {
        let at = lane.0 as usize % MAX_LANES;
        self.contended
            && self.scheduler.params().policy == Policy::Burst
            && self.gates[at].closer & (FREE | WAITS) == 0
            && self.scheduler.is_within_base(at)
    }

    /// Whether a lane was above its base when it last asked.
    #[inline]
    pub(super) fn bursts(&self, lane: LaneIndex) -> bool {
        self.contended && self.gates[lane.0 as usize % MAX_LANES].closer & BURSTS != 0
    }

    /// A command waits.
    pub(super) fn push(&mut self, index: u32, ios: &mut [Io], now_ns: u64) {
        let io = &mut ios[index as usize];
        let at = io.lane.0 as usize % MAX_LANES;
        let gate = &mut self.gates[at];
        io.link = NONE;
        io.over_ns.get_or_insert(gate.over_ns(now_ns));
        if gate.closer & FREE == 0 {
            let cost = cost_of(&self.costs, gate.frontend, &io.op);
            self.scheduler.wait(at, &cost);
        }
        let is_first = gate.count == 0;
        match gate.last {
            NONE => gate.first = index,
            last => ios[last as usize].link = index,
        }
        gate.last = index;
        gate.count += 1;
        gate.closer |= WAITS;
        self.stops = true;
        // It had enough of this turn, or its budget did not allow it.
        let enough = gate.turn == self.turn && self.scheduler.part_ns(at) <= 0;
        self.scheduler.shut(at);
        // Whoever waits behind another, waits where that does.
        if is_first && !gate.listed && !(enough && gate.in_line) {
            (gate.listed, gate.began) = (true, false);
            if enough {
                self.ready.push_back(at as u32);
            } else {
                gate.refused_ns = Some(now_ns);
                self.refused.push(at as u32);
            }
        }
    }

    /// The next command that waited and may begin in this turn.
    pub(super) fn next(&mut self, ios: &mut [Io], now_ns: u64) -> Option<u32> {
        while let Some(lane) = self.ready.get(self.at).copied() {
            match self.ask(lane as usize, ios, now_ns) {
                Asked::Begin(index) => return Some(index),
                Asked::Enough if !self.gates[lane as usize].in_line => self.at += 1,
                // Its place in the line brings it back.
                Asked::Enough | Asked::Empty => {
                    self.gates[lane as usize].listed = false;
                    self.ready.remove(self.at);
                }
                Asked::Refused => {
                    self.refused.push(lane);
                    self.ready.remove(self.at);
                }
            }
        }
        self.at = 0;
        None
    }

    fn ask(&mut self, at: usize, ios: &mut [Io], now_ns: u64) -> Asked {
        let gate = &mut self.gates[at];
        let Some(io) = ios.get_mut(gate.first as usize) else {
            gate.let_on(now_ns);
            return Asked::Empty;
        };
        self.alone.came(at);
        if gate.closer & FREE == 0 {
            let cost = cost_of(&self.costs, gate.frontend, &io.op);
            if !self.has_part(at) {
                self.gates[at].let_on(now_ns);
                return Asked::Enough;
            }
            if !self.scheduler.resume(at, &cost) {
                self.gates[at].refused_ns.get_or_insert(now_ns);
                return Asked::Refused;
            }
            self.spend(at, &cost);
        }
        let gate = &mut self.gates[at];
        gate.let_on(now_ns);
        gate.began = true;
        let index = gate.first;
        gate.first = std::mem::replace(&mut io.link, NONE);
        gate.popped();
        Asked::Begin(index)
    }

    /// All lanes in which something waits: not for each turn. The list is to be given back to `looked_at`.
    fn lanes_that_wait(&mut self) -> Vec<u32> {
        let mut all = std::mem::take(&mut self.looked_at);
        let line = (self.line.iter()).filter(|lane| !self.gates[**lane as usize].listed);
        let lanes = self.ready.iter().chain(&self.refused).chain(line);
        all.clear();
        all.extend(lanes);
        all
    }

    /// The first command that waits in a lane, to begin now: what it costs is owed. None if a second's worth is owed already.
    pub(in crate::core) fn take_owing(&mut self, lane: LaneIndex, ios: &mut [Io]) -> Option<u32> {
        let at = lane.0 as usize % MAX_LANES;
        let gate = &mut self.gates[at];
        let index = gate.first;
        let io = ios.get_mut(index as usize)?;
        if gate.closer & FREE == 0 {
            if !self.scheduler.may_owe(at) {
                return None;
            }
            let cost = cost_of(&self.costs, gate.frontend, &io.op);
            self.scheduler.cancel(at, &cost);
            self.scheduler.owe(at, &cost);
        }
        gate.first = std::mem::replace(&mut io.link, NONE);
        gate.popped();
        Some(index)
    }

    /// Takes out what waits and should end by now.
    pub(super) fn take_overdue(&mut self, ios: &mut [Io], now_ns: u64, overdue: &mut Vec<u32>) {
        let lanes = self.lanes_that_wait();
        for lane in &lanes {
            let at = *lane as usize;
            let gate = &mut self.gates[at];
            let (mut before, mut next) = (NONE, gate.first);
            while let Some(io) = ios.get_mut(next as usize) {
                let (index, link) = (next, io.link);
                next = link;
                if io.deadline_ns > now_ns {
                    before = index;
                    continue;
                }
                self.scheduler
                    .cancel(at, &cost_of(&self.costs, gate.frontend, &io.op));
                io.link = NONE;
                match before {
                    NONE => gate.first = link,
                    before => ios[before as usize].link = link,
                }
                if gate.last == index {
                    gate.last = before;
                }
                gate.popped();
                overdue.push(index);
            }
        }
        self.looked_at = lanes;
    }

    /// How long a lane has waited for its budget, all in all: while it does, that grows as time does. What it waits for its turns is
    /// not in it.
    pub(super) fn over_ns(&self, lane: LaneIndex, now_ns: u64) -> u64 {
        self.gates[lane.0 as usize % MAX_LANES].over_ns(now_ns)
    }

    /// Of the time that a command waited, which it does no more, that in which its lane was over budget; its tenant is told.
    pub(super) fn was_over_budget(&mut self, io: &Io, now_ns: u64) -> u64 {
        let gate = &self.gates[io.lane.0 as usize % MAX_LANES];
        let over_ns = gate.over_ns(now_ns);
        let ns = over_ns.saturating_sub(io.over_ns.unwrap_or(over_ns));
        if ns > 0
            && let Some(tenant) = self.tenants.get_mut(gate.tenant as usize)
        {
            tenant.throttled_ops += 1;
            tenant.throttled_ns += ns;
        }
        ns
    }

    /// How long lanes have waited so far is what another one says.
    pub(super) fn go_on_counting(&mut self, other: &Self, now_ns: u64) {
        for (gate, other) in self.gates.iter_mut().zip(&other.gates) {
            gate.over_ns = other.over_ns(now_ns);
        }
    }

    /// Gives up everything that waits, in order within each lane.
    pub(super) fn give_up(&mut self, ios: &mut [Io], waited: &mut Vec<u32>) {
        self.scheduler.leave();
        for lane in self.lanes_that_wait() {
            let mut next = self.gates[lane as usize].first;
            while let Some(io) = ios.get_mut(next as usize) {
                waited.push(next);
                next = std::mem::replace(&mut io.link, NONE);
            }
        }
    }
}
