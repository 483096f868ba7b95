//! The gates of a reactor's lanes, and the queues behind them.
//!
//! **Design.** A lane's gate says what must be looked at before a command of it is charged: nothing, most often. What is not
//! admitted is in its lane's queue, linked through the slab, and the lane in one of two lists: those that may go on in
//! a turn, and those that wait for the window's end. All of it is made once, and allocates nothing.
//!
//! Of a turn, each lane has a *lump* of processor time, by what its commands cost; those above their base share one lump
//! among them. Who of these finds nothing left stands in a *line*, and the next turns are theirs in that order, whichever frontend
//! they come by. So a turn is short, and still a lane's commands go in batches.
//!
//! **Not here:** what is done with a command ([`super`]).

use super::super::io::{Io, IoOp};
use super::super::parked::NONE;
use super::delays::Delays;
use crate::lane::{Lane, LaneIndex};
use forebay_burst::board::Board;
use forebay_burst::budget::{Budget, Rate};
use forebay_burst::cost::{CostTable, Frontend, Operation};
use forebay_burst::params::{BadParam, Params, Policy};
use forebay_burst::scheduler::{Scheduler, Seen};
use forebay_burst::units::{PARTS, Resource, SHARED, Units};
use forebay_xlate::boundary::message::Frontend as ExportFrontend;
use forebay_xlate::boundary::region::{LaneRecord, MAX_LANES, ReactorRecord, Region, bump};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// A lane has so much processor time in a turn, and all above their base together.
const LUMP_NS: i32 = 12_000;
/// The least of it that is set aside for a lane above its base.
const LEAST_LUMP_NS: i32 = 500;
/// Work that lanes in line were given and are still to begin when a window ends counts as a delay so many times: as if it stayed.
const BACKLOG_WEIGHT: u64 = 4;
/// A lane with so many commands that wait takes no more from its machine's rings.
const ENOUGH: u32 = 8;
/// Tenants whose records are written at a window's end: each is about every 10 ms.
const RECORDED_AT_ONCE: usize = 32;
/// The same of lanes, which are more.
const LANES_AT_ONCE: usize = 8;
/// What is charged at most for zeroing: its bytes are on no link, and devices do it in their own way.
const MAX_ZEROED_BYTES: u64 = 1 << 20;
/// What zeroes or gives back counts as so many operations at most: a small budget must be able to save for it.
const MAX_PIECES: u64 = 32;

/// How a reactor admits commands.
#[derive(Debug)]
pub struct Admission {
    pub(super) scheduler: Scheduler,
    costs: Arc<CostTable>,
    gates: Box<[Gate]>,
    tenants: Box<[Told]>,
    /// Lanes that wait and were not refused in this window.
    pub(super) ready: VecDeque<u32>,
    /// Of them the one that is asked next.
    at: usize,
    /// Lanes that wait for the next window.
    refused: Vec<u32>,
    pub(super) ends_ns: u64,
    turn: u32,
    /// Lanes above their base that wait for a turn of theirs.
    line: VecDeque<u32>,
    /// Of this turn's lump for those, what is left.
    lump_ns: i32,
    /// Some lane had its part of this turn, and may have more in the next.
    pub(super) again: bool,
    /// Some lane waited, or wanted more than its part of the last turn, or was above its base in the last window.
    contended: bool,
    /// Some lane may have to leave what is in its rings.
    pub(super) stops: bool,
    /// How long operations wait at devices.
    pub(super) delays: Delays,
    /// The tenant whose record is written next.
    record_at: usize,
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
    /// The turn that the line gave it.
    granted: u32,
    /// The turn that the next ones are of: what it had of it, and what is left.
    turn: u32,
    had: i32,
    left: i32,
    /// What is set aside for it in a turn, while it is above its base: as much as it came for before.
    lump: i32,
    tenant: u32,
    /// Commands that wait.
    first: u32,
    last: u32,
    count: u32,
    refused_ns: u64,
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
            granted: 0,
            turn: 0,
            had: 0,
            left: 0,
            lump: LEAST_LUMP_NS,
            tenant: u32::MAX,
            first: NONE,
            last: NONE,
            count: 0,
            refused_ns: 0,
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

#[inline]
fn cost_of(costs: &CostTable, frontend: Frontend, op: &IoOp) -> Units {
    let (operation, len_bytes) = match *op {
        IoOp::Read { len_bytes, .. } | IoOp::Compare { len_bytes, .. } => {
            (Operation::Read, len_bytes)
        }
        IoOp::Write { len_bytes, .. } | IoOp::CompareAndWrite { len_bytes, .. } => {
            (Operation::Write, len_bytes)
        }
        IoOp::WriteZeroes {
            len_bytes,
            deallocate: false,
            ..
        } => (Operation::Write, len_bytes.min(MAX_ZEROED_BYTES) as u32),
        IoOp::WriteZeroes { .. } | IoOp::Flush | IoOp::Deallocate { .. } => (Operation::Other, 0),
    };
    let mut cost = costs.of(frontend, operation, len_bytes);
    if operation == Operation::Other || u64::from(len_bytes) == MAX_ZEROED_BYTES {
        let other = costs.of(frontend, Operation::Other, 0);
        (1..pieces_of(op)).for_each(|_| cost.add(&other));
    }
    cost
}

/// What is done to many places counts as so many operations.
#[cold]
fn pieces_of(op: &IoOp) -> u64 {
    let pieces = match *op {
        IoOp::WriteZeroes { len_bytes, .. } => len_bytes.div_ceil(MAX_ZEROED_BYTES),
        IoOp::Deallocate { ranges } => ranges.into(),
        _ => 1,
    };
    pieces.clamp(1, MAX_PIECES)
}

/// A lane's record says that it was given this.
fn grant(record: &LaneRecord, rate: Rate) {
    record.granted_ops_s.store(rate.iops, Relaxed);
    record.granted_bytes_s.store(rate.bytes, Relaxed);
}

impl Admission {
    /// For one reactor, which has `per_second` of each resource. The first window ends with the first turn.
    ///
    /// # Errors
    /// A parameter that is out of its range.
    pub fn new(
        params: Params,
        per_second: &[f64; SHARED],
        costs: &Arc<CostTable>,
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
            turn: 1,
            line: VecDeque::with_capacity(MAX_LANES),
            lump_ns: LUMP_NS,
            again: false,
            contended: false,
            stops: false,
            delays: Delays::new(),
            record_at: 0,
            lane_at: 0,
            lanes: 0,
        })
    }

    /// A tenant has this budget from now on.
    pub fn set_budget(&mut self, tenant: u32, budget: &Budget) {
        if (tenant as usize) < self.tenants.len() {
            (self.scheduler).set_budget(tenant as usize, budget, &self.costs);
        }
    }

    /// Whether a command may begin; if so, it is paid for.
    #[inline]
    pub(super) fn admit(&mut self, lane: LaneIndex, op: &IoOp) -> bool {
        let at = lane.0 as usize % MAX_LANES;
        if self.gates[at].turn != self.turn {
            self.begin_turn_of(at);
        }
        let gate = &mut self.gates[at];
        if gate.closer & (FREE | WAITS) != 0 || gate.left <= 0 {
            return self.look_closer(at);
        }
        let cost = cost_of(&self.costs, gate.frontend, op);
        let admitted = self.scheduler.admit(at, &cost);
        if admitted {
            gate.left -= cost[Resource::Cpu];
            if gate.left <= 0 {
                self.has_enough(at);
            }
        }
        admitted
    }

    #[cold]
    fn look_closer(&mut self, at: usize) -> bool {
        let closer = self.gates[at].closer;
        if closer & FREE == 0 && closer & WAITS == 0 {
            self.has_enough(at);
        }
        closer & FREE != 0 && closer & WAITS == 0
    }

    /// A lane asks for the first time in this turn.
    fn begin_turn_of(&mut self, at: usize) {
        let gate = &mut self.gates[at];
        gate.turn = self.turn;
        let burst = self.contended
            && gate.closer & FREE == 0
            && self.scheduler.params().policy == Policy::Burst
            && !self.scheduler.is_within_base(at);
        let gate = &mut self.gates[at];
        if !burst {
            gate.closer &= !BURSTS;
            gate.left = match self.scheduler.params().policy {
                Policy::Burst => LUMP_NS,
                Policy::Base | Policy::Wild => i32::MAX,
            };
            return;
        }
        if gate.closer & BURSTS != 0 && gate.had > 0 {
            let used = gate.had - gate.left;
            gate.lump = match gate.left > 0 {
                true => used.clamp(LEAST_LUMP_NS, LUMP_NS),
                false => used.saturating_mul(2).clamp(LEAST_LUMP_NS, LUMP_NS),
            };
        }
        gate.closer |= BURSTS;
        let is_mine = gate.granted == self.turn;
        if !is_mine && self.lump_ns > 0 && self.line.is_empty() {
            self.lump_ns -= gate.lump;
            gate.had = gate.lump;
        } else {
            gate.had = if is_mine { gate.lump } else { 0 };
        }
        gate.left = gate.had;
    }

    /// A lane has had its part of this turn.
    #[cold]
    fn has_enough(&mut self, at: usize) {
        self.stops = true;
        self.again = true;
        let gate = &mut self.gates[at];
        if gate.closer & BURSTS != 0 && !gate.in_line {
            gate.in_line = true;
            self.line.push_back(at as u32);
        }
    }

    /// Whether a lane that has room may take commands from its machine's rings.
    #[inline]
    pub(super) fn may_fetch(&mut self, lane: LaneIndex) -> bool {
        let at = lane.0 as usize % MAX_LANES;
        if self.gates[at].turn != self.turn {
            self.begin_turn_of(at);
        }
        let gate = &self.gates[at];
        if gate.closer & FREE != 0 {
            return gate.count < ENOUGH;
        }
        if gate.left <= 0 {
            self.has_enough(at);
            return false;
        }
        gate.count < ENOUGH
    }

    /// Whether so many commands of a lane wait that nobody looks at its machine's rings.
    pub(super) fn is_full(&self, lane: LaneIndex) -> bool {
        self.gates[lane.0 as usize % MAX_LANES].count >= ENOUGH
    }

    /// Whether commands of it wait for a turn.
    pub(super) fn waits_for_turns(&self, lane: LaneIndex) -> bool {
        let gate = &self.gates[lane.0 as usize % MAX_LANES];
        gate.count > 0 && gate.in_line
    }

    /// A command waits.
    pub(super) fn push(&mut self, index: u32, ios: &mut [Io], now_ns: u64) {
        let io = &mut ios[index as usize];
        let at = io.lane.0 as usize % MAX_LANES;
        let gate = &mut self.gates[at];
        io.link = NONE;
        if gate.closer & FREE == 0 {
            let cost = cost_of(&self.costs, gate.frontend, &io.op);
            self.scheduler.wait(at, &cost);
        }
        match gate.last {
            NONE => gate.first = index,
            last => ios[last as usize].link = index,
        }
        gate.last = index;
        gate.count += 1;
        gate.closer |= WAITS;
        self.stops = true;
        // It had enough of this turn, or its budget did not allow it.
        let enough = gate.turn == self.turn && gate.left <= 0;
        if !gate.listed && !(enough && gate.in_line) {
            (gate.listed, gate.began) = (true, false);
            if enough {
                self.ready.push_back(at as u32);
            } else {
                gate.refused_ns = now_ns;
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
            return Asked::Empty;
        };
        let cost = cost_of(&self.costs, gate.frontend, &io.op);
        if gate.turn != self.turn {
            self.begin_turn_of(at);
        }
        let gate = &mut self.gates[at];
        if gate.left <= 0 && gate.closer & FREE == 0 {
            self.has_enough(at);
            return Asked::Enough;
        }
        if gate.closer & FREE == 0 && !self.scheduler.resume(at, &cost) {
            gate.refused_ns = now_ns;
            return Asked::Refused;
        }
        gate.left -= cost[Resource::Cpu];
        gate.began = true;
        let index = gate.first;
        gate.first = std::mem::replace(&mut io.link, NONE);
        gate.popped();
        Asked::Begin(index)
    }

    /// All lanes in which something waits: not for each turn.
    fn lanes_that_wait(&self) -> Vec<u32> {
        let line = (self.line.iter()).filter(|lane| !self.gates[**lane as usize].listed);
        let lanes = self.ready.iter().chain(&self.refused).chain(line);
        lanes.copied().collect()
    }

    /// The first command that waits in a lane, to begin now: what it costs is owed.
    pub(in crate::core) fn take_owing(&mut self, lane: LaneIndex, ios: &mut [Io]) -> Option<u32> {
        let at = lane.0 as usize % MAX_LANES;
        let gate = &mut self.gates[at];
        let index = gate.first;
        let io = ios.get_mut(index as usize)?;
        if gate.closer & FREE == 0 {
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
        for lane in self.lanes_that_wait() {
            let at = lane as usize;
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
    }

    /// Whether a command that waits no more was over budget; if so, its tenant is told.
    pub(super) fn was_over_budget(&mut self, io: &Io, waited_ns: u64) -> bool {
        let gate = &self.gates[io.lane.0 as usize % MAX_LANES];
        let over = gate.refused_ns >= io.started_ns;
        if over && let Some(tenant) = self.tenants.get_mut(gate.tenant as usize) {
            tenant.throttled_ops += 1;
            tenant.throttled_ns += waited_ns;
        }
        over
    }

    /// A lane has this share.
    pub(super) fn attach(&mut self, lane: &Lane) {
        let at = lane.index.0 as usize % MAX_LANES;
        let gate = &mut self.gates[at];
        gate.frontend = match lane.export.frontend {
            ExportFrontend::NvmeTcp => Frontend::Tcp,
            ExportFrontend::NvmePcie { .. } => Frontend::Pcie,
            ExportFrontend::VhostUser { .. } => Frontend::Vhost,
        };
        let share = lane
            .share
            .filter(|share| (share.tenant as usize) < self.tenants.len());
        let Some(share) = share else {
            self.detach(at);
            grant(lane.record(), Rate { iops: 0, bytes: 0 });
            return;
        };
        self.lanes = self.lanes.max(at + 1);
        if gate.tenant != share.tenant {
            self.detach(at);
            let gate = &mut self.gates[at];
            (gate.tenant, gate.closer) = (share.tenant, gate.closer & !FREE);
            self.tenants[share.tenant as usize].lanes += 1;
            self.scheduler.attach(at, share.tenant as usize);
        }
        self.scheduler.set_volume(at, share.budget.as_ref());
    }

    /// A lane is nobody's.
    pub(super) fn detach(&mut self, at: usize) {
        let gate = &mut self.gates[at];
        gate.closer |= FREE;
        let tenant = std::mem::replace(&mut gate.tenant, u32::MAX);
        if let Some(tenant) = self.tenants.get_mut(tenant as usize) {
            tenant.lanes -= 1;
            self.scheduler.detach(at);
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

    /// A turn begins.
    #[inline]
    pub(super) fn begin_turn(&mut self, now_ns: u64, record: &ReactorRecord, region: &Region) {
        self.turn = self.turn.wrapping_add(1);
        self.delays.turn(now_ns);
        if now_ns >= self.ends_ns {
            self.end_window(now_ns, record, region);
        }
        self.stops = std::mem::take(&mut self.again) || self.waits();
        self.contended = self.stops || self.scheduler.somebody_bursts();
        self.lump_ns = LUMP_NS;
        while self.lump_ns > 0
            && let Some(lane) = self.line.pop_front()
        {
            self.again = true;
            let gate = &mut self.gates[lane as usize];
            (gate.in_line, gate.granted) = (false, self.turn);
            self.lump_ns -= gate.lump;
            self.list_ready(lane);
        }
    }

    /// What waits in a lane is asked for in this turn.
    fn list_ready(&mut self, lane: u32) {
        let gate = &mut self.gates[lane as usize];
        if gate.count > 0 && !std::mem::replace(&mut gate.listed, true) {
            self.ready.push_back(lane);
        }
    }

    /// There is nothing to do in this turn: who is only short of processor time may go on.
    #[inline]
    pub(super) fn is_idle(&mut self) {
        if !self.refused.is_empty() && self.scheduler.is_idle(LUMP_NS) {
            self.ready.extend(self.refused.drain(..));
        }
    }

    /// Whether any lane waits.
    #[inline]
    pub(super) fn waits(&self) -> bool {
        !self.ready.is_empty() || !self.refused.is_empty() || !self.line.is_empty()
    }

    #[cold]
    fn end_window(&mut self, now_ns: u64, record: &ReactorRecord, region: &Region) {
        let window_ns = self.scheduler.params().window_ns;
        let passed = match self.ends_ns {
            0 => 1,
            ends_ns => (now_ns - ends_ns) / window_ns + 1,
        };
        self.ends_ns = match self.ends_ns {
            0 => now_ns + window_ns,
            ends_ns => ends_ns + passed * window_ns,
        };
        // What was given and is still in line: more than there is was given.
        let left = |lane: &u32| self.scheduler.processor_left_ns(*lane as usize);
        let backlog_ns: u64 = self.line.iter().map(left).sum();
        (self.scheduler).observe(Resource::Cpu, BACKLOG_WEIGHT * backlog_ns, 1);
        self.delays.tell(&mut self.scheduler, now_ns);
        self.scheduler.turn(passed);
        // Who is within its base by now stands in no line.
        for at in 0..self.line.len() {
            let lane = self.line[at];
            if self.scheduler.is_within_base(lane as usize) {
                self.list_ready(lane);
            }
        }
        // A budget may be less than one command of each of a tenant's volumes: who had something goes behind who had nothing.
        for began in [false, true] {
            let of = |lane: &&u32| self.gates[**lane as usize].began == began;
            self.ready.extend(self.refused.iter().filter(of));
        }
        for lane in self.refused.drain(..) {
            self.gates[lane as usize].began = false;
        }
        for _ in 0..RECORDED_AT_ONCE.min(self.tenants.len()) {
            let tenant = self.record_at;
            self.record_at = (tenant + 1) % self.tenants.len();
            self.record(tenant, region);
        }
        for _ in 0..LANES_AT_ONCE.min(self.lanes) {
            let lane = self.lane_at;
            self.lane_at = (lane + 1) % self.lanes;
            // The record of a lane that is not here is another reactor's to write.
            if self.gates[lane].tenant != u32::MAX {
                let granted = self.scheduler.granted_to(lane);
                grant(&region.lanes()[lane], granted);
            }
        }
        for (cell, factor) in record
            .corrections_milli
            .iter()
            .zip(self.scheduler.corrections())
        {
            cell.store((factor * 1000.0) as u64, Relaxed);
        }
        bump(&record.windows, passed);
        bump(
            &record.scheduling_ns,
            crate::core::monotonic_ns().saturating_sub(now_ns),
        );
    }

    /// Writes what is known of a tenant into its record.
    fn record(&mut self, tenant: usize, region: &Region) {
        let Some(record) = region.tenants().get(tenant) else {
            return;
        };
        let told = &mut self.tenants[tenant];
        let seen = self.scheduler.seen(tenant);
        if told.lanes == 0 && seen == told.seen && told.throttled_ops == 0 {
            return;
        }
        let old = std::mem::replace(&mut told.seen, seen);
        let add = |cell: &AtomicU64, more: u64| {
            if more > 0 {
                cell.fetch_add(more, Relaxed);
            }
        };
        let parts = |new: u64, old: u64| new / PARTS as u64 - old / PARTS as u64;
        add(&record.used_ops, parts(seen.used_parts, old.used_parts));
        add(&record.used_bytes, seen.used_bytes - old.used_bytes);
        add(
            &record.metered_ops,
            parts(seen.metered_parts, old.metered_parts),
        );
        add(
            &record.metered_bytes,
            seen.metered_bytes - old.metered_bytes,
        );
        add(
            &record.throttled_ops,
            std::mem::take(&mut told.throttled_ops),
        );
        add(&record.throttled_ns, std::mem::take(&mut told.throttled_ns));
        add(&record.taken_ops, seen.taken - old.taken);
        add(&record.lost_ops, seen.lost - old.lost);
        add(&record.reserve_ops, seen.from_reserve - old.from_reserve);
        add(
            &record.active_windows,
            seen.active_windows - old.active_windows,
        );
        add(
            &record.burst_windows,
            seen.burst_windows - old.burst_windows,
        );
        let granted = self.scheduler.grant(tenant);
        for (cell, value) in [
            (&record.credit_ops, seen.credit_parts / PARTS as u64),
            (&record.credit_bytes, seen.credit_bytes),
            (&record.granted_ops_s, granted.iops),
            (&record.granted_bytes_s, granted.bytes),
        ] {
            cell.store(value, Relaxed);
        }
    }

    /// Writes all records, for the last time.
    pub(super) fn record_all(&mut self, record: &ReactorRecord, region: &Region) {
        for tenant in 0..self.tenants.len() {
            self.record(tenant, region);
        }
        record
            .corrections_milli
            .iter()
            .for_each(|cell| cell.store(0, Relaxed));
        for (gate, lane) in self.gates.iter().zip(region.lanes()) {
            if gate.tenant != u32::MAX {
                grant(lane, Rate { iops: 0, bytes: 0 });
            }
        }
    }
}
