//! Who may begin a command now: the crate `burst` in a reactor.
//!
//! **Design.** Each command is charged when it would begin ([`Core::begin`], [`Core::at_once`]), whichever frontend it came by.
//! One that is not admitted waits in its lane's queue, which runs through the slab ([`Stage::Throttled`]); what is younger in
//! its lane waits behind it, so nothing is overtaken. At a window's end everything is given out anew, and in each
//! turn what waits is asked again, lane after lane.
//!
//! Who is above their base has only so much of a turn's processor time ([`TURN_NS`], by what commands cost, shared by those
//! that want more), and goes on in the next one. So turns stay short, and whoever is within their base waits for no
//! neighbour's whole queue. This is not over budget, and not counted as such.
//!
//! A machine's commands stay in its ring while its lane has enough that wait ([`Core::may_fetch`]).
//!
//! What waits is ended by whatever ends waiting commands ([`Core::end_waiting`]); for the budget alone it waits without end.
//! Commands that a dead engine had begun are not charged, nor is what the internal lane does.
//!
//! **Not here:** what is given to whom (`forebay_burst`), what the daemon says of it ([`crate::control`]).

use super::io::{Io, IoOp, Stage, Token};
use super::parked::NONE;
use super::{Core, OWNER_WAIT_LIMIT_NS};
use crate::lane::{Lane, LaneIndex, Share};
use forebay_burst::board::Board;
use forebay_burst::budget::Budget;
use forebay_burst::cost::{CostTable, Frontend, Operation};
use forebay_burst::params::{BadParam, Params, Policy};
use forebay_burst::scheduler::{Scheduler, Seen};
use forebay_burst::units::{PARTS, Resource, SHARED, Units};
use forebay_nvme::Status;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::Frontend as ExportFrontend;
use forebay_xlate::boundary::region::{MAX_LANES, ReactorRecord, Region, bump};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Of a turn, lanes above their base have so much processor time together, by what their commands cost.
const TURN_NS: i32 = 20_000;
/// A lane with so many commands that wait takes no more from its machine's rings.
const ENOUGH: u32 = 8;
/// Tenants whose records are written at a window's end: each is about every 10 ms.
const RECORDED_AT_ONCE: usize = 32;
/// What is charged at most for zeroing: its bytes are on no link, and devices do it in their own way.
const MAX_ZEROED_BYTES: u64 = 1 << 20;

/// See the module's text.
#[derive(Debug)]
pub struct Admission {
    scheduler: Scheduler,
    costs: Arc<CostTable>,
    gates: Box<[Gate]>,
    tenants: Box<[Told]>,
    /// Lanes that wait and were not refused in this window.
    ready: Vec<u32>,
    /// Of them the one that is asked next.
    at: usize,
    /// Lanes that wait for the next window.
    refused: Vec<u32>,
    ends_ns: u64,
    turn: u32,
    /// What a lane above its base has of a turn; and how many wanted more in this one.
    quantum: i32,
    wanting: i32,
    /// Some lane may have to leave what is in its rings.
    stops: bool,
    /// Turns in this window that had something to do: how long together, and how many.
    turns: (u64, u64),
    /// The tenant whose record is written next.
    record_at: usize,
}

/// A lane, as far as it is asked whether a command may begin.
#[derive(Clone, Debug)]
struct Gate {
    /// Whether more than its budget must be looked at: [`FREE`], [`WAITS`].
    closer: u8,
    frontend: Frontend,
    /// It is in one of the lists.
    listed: bool,
    /// The turn in which it was found above its base, with its part of it used.
    above: u32,
    /// The turn that the next one is of.
    turn: u32,
    left: i32,
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
            above: 0,
            turn: 0,
            left: 0,
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
    costs.of(frontend, operation, len_bytes)
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
            ready: Vec::with_capacity(MAX_LANES),
            at: 0,
            refused: Vec::with_capacity(MAX_LANES),
            ends_ns: 0,
            turn: 1,
            quantum: TURN_NS,
            wanting: 0,
            stops: false,
            turns: (0, 0),
            record_at: 0,
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
    fn admit(&mut self, lane: LaneIndex, op: &IoOp) -> bool {
        let at = lane.0 as usize % MAX_LANES;
        let gate = &mut self.gates[at];
        if gate.turn != self.turn {
            (gate.turn, gate.left) = (self.turn, self.quantum);
        }
        if gate.closer != 0 || gate.left <= 0 {
            return self.look_closer(at, op);
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
    fn look_closer(&mut self, at: usize, op: &IoOp) -> bool {
        let gate = &self.gates[at];
        if gate.closer != 0 {
            return gate.closer == FREE;
        }
        let cost = cost_of(&self.costs, gate.frontend, op);
        !self.has_enough(at) && self.scheduler.admit(at, &cost)
    }

    /// Whether a lane has had its part of this turn; who is within their base never has.
    #[cold]
    fn has_enough(&mut self, at: usize) -> bool {
        let gate = &mut self.gates[at];
        if gate.left > 0 || gate.turn != self.turn || gate.closer & FREE != 0 {
            return false;
        }
        if gate.above != self.turn {
            if self.scheduler.is_within_base(at) {
                return false;
            }
            gate.above = self.turn;
            self.wanting += 1;
            self.stops = true;
        }
        true
    }

    /// Whether a lane that has room may take commands from its machine's rings.
    #[inline]
    fn may_fetch(&self, lane: LaneIndex) -> bool {
        let gate = &self.gates[lane.0 as usize % MAX_LANES];
        gate.count < ENOUGH && gate.above != self.turn
    }

    /// A command waits.
    fn push(&mut self, index: u32, ios: &mut [Io], now_ns: u64) {
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
        if !std::mem::replace(&mut gate.listed, true) {
            if gate.above == self.turn {
                self.ready.push(at as u32);
            } else {
                gate.refused_ns = now_ns;
                self.refused.push(at as u32);
            }
        }
    }

    /// The next command that waited and may begin in this turn.
    fn next(&mut self, ios: &mut [Io], now_ns: u64) -> Option<u32> {
        while let Some(lane) = self.ready.get(self.at).copied() {
            match self.ask(lane as usize, ios, now_ns) {
                Asked::Begin(index) => return Some(index),
                Asked::Enough => self.at += 1,
                Asked::Empty => {
                    self.gates[lane as usize].listed = false;
                    self.ready.swap_remove(self.at);
                }
                Asked::Refused => {
                    self.refused.push(lane);
                    self.ready.swap_remove(self.at);
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
        if gate.turn != self.turn {
            (gate.turn, gate.left) = (self.turn, self.quantum);
        }
        let cost = cost_of(&self.costs, gate.frontend, &io.op);
        if self.has_enough(at) {
            return Asked::Enough;
        }
        let gate = &mut self.gates[at];
        if gate.closer & FREE == 0 && !self.scheduler.resume(at, &cost) {
            gate.refused_ns = now_ns;
            return Asked::Refused;
        }
        gate.left -= cost[Resource::Cpu];
        let index = gate.first;
        gate.first = std::mem::replace(&mut io.link, NONE);
        gate.popped();
        Asked::Begin(index)
    }

    /// Takes out what waits and should end by now.
    fn take_overdue(&mut self, ios: &mut [Io], now_ns: u64, overdue: &mut Vec<u32>) {
        for lane in self.ready.iter().chain(&self.refused) {
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
    }

    /// Whether a command that waits no more was over budget; if so, its tenant is told.
    fn was_over_budget(&mut self, io: &Io, waited_ns: u64) -> bool {
        let gate = &self.gates[io.lane.0 as usize % MAX_LANES];
        let over = gate.refused_ns >= io.started_ns;
        if over && let Some(tenant) = self.tenants.get_mut(gate.tenant as usize) {
            tenant.throttled_ops += 1;
            tenant.throttled_ns += waited_ns;
        }
        over
    }

    /// A lane has this share.
    fn attach(&mut self, lane: &Lane) {
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
            return;
        };
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
    fn detach(&mut self, at: usize) {
        let gate = &mut self.gates[at];
        gate.closer |= FREE;
        let tenant = std::mem::replace(&mut gate.tenant, u32::MAX);
        if let Some(tenant) = self.tenants.get_mut(tenant as usize) {
            tenant.lanes -= 1;
            self.scheduler.detach(at);
        }
    }

    /// Gives up everything that waits, in order within each lane.
    fn give_up(&mut self, ios: &mut [Io], waited: &mut Vec<u32>) {
        self.scheduler.leave();
        for lane in self.ready.drain(..).chain(self.refused.drain(..)) {
            let mut next = self.gates[lane as usize].first;
            while let Some(io) = ios.get_mut(next as usize) {
                waited.push(next);
                next = std::mem::replace(&mut io.link, NONE);
            }
        }
    }

    /// A turn begins.
    #[inline]
    fn begin_turn(&mut self, now_ns: u64, ios: &[Io], record: &ReactorRecord, region: &Region) {
        self.turn = self.turn.wrapping_add(1);
        self.quantum = match self.scheduler.params().policy {
            Policy::Burst => TURN_NS / std::mem::take(&mut self.wanting).max(1),
            Policy::Base | Policy::Wild => i32::MAX,
        };
        if now_ns >= self.ends_ns {
            self.end_window(now_ns, ios, record, region);
        }
        self.stops = self.waits();
    }

    /// Whether any lane waits.
    #[inline]
    fn waits(&self) -> bool {
        !self.ready.is_empty() || !self.refused.is_empty()
    }

    #[cold]
    fn end_window(&mut self, now_ns: u64, ios: &[Io], record: &ReactorRecord, region: &Region) {
        let window_ns = self.scheduler.params().window_ns;
        let passed = match self.ends_ns {
            0 => 1,
            ends_ns => (now_ns - ends_ns) / window_ns + 1,
        };
        self.ends_ns = match self.ends_ns {
            0 => now_ns + window_ns,
            ends_ns => ends_ns + passed * window_ns,
        };
        // What arrives waits for the turn that it finds; and what may begin, but has no turn, for those before it.
        let (sum_ns, turns) = std::mem::take(&mut self.turns);
        let turn_ns = sum_ns.checked_div(turns).unwrap_or(0);
        let first = |lane: &u32| ios.get(self.gates[*lane as usize].first as usize);
        let queued = self.ready.iter().filter_map(first);
        let queued_ns = queued.map(|io| now_ns.saturating_sub(io.started_ns)).max();
        let delay_ns = turn_ns.max(queued_ns.unwrap_or(0));
        if delay_ns > 0 {
            self.scheduler.observe(Resource::Cpu, delay_ns, 1);
        }
        self.scheduler.turn(passed);
        self.ready.append(&mut self.refused);
        for _ in 0..RECORDED_AT_ONCE.min(self.tenants.len()) {
            let tenant = self.record_at;
            self.record_at = (tenant + 1) % self.tenants.len();
            self.record(tenant, region);
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
            super::monotonic_ns().saturating_sub(now_ns),
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
        let granted = seen.granted(self.scheduler.params().window_ns);
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
    fn record_all(&mut self, record: &ReactorRecord, region: &Region) {
        for tenant in 0..self.tenants.len() {
            self.record(tenant, region);
        }
        record
            .corrections_milli
            .iter()
            .for_each(|cell| cell.store(0, Relaxed));
    }
}

impl Core {
    /// I/O is admitted by this from now on; `None`: all of it is. What waits begins.
    pub fn set_admission(&mut self, admission: Option<Box<Admission>>) {
        let old = std::mem::replace(&mut self.admission, admission);
        if let Some(admission) = &mut self.admission {
            for lane in self.lanes.iter().flatten() {
                admission.attach(lane);
            }
        }
        let Some(mut old) = old else {
            return;
        };
        let mut waited = std::mem::take(&mut self.scratch);
        old.give_up(&mut self.ios, &mut waited);
        for index in waited.drain(..) {
            // Who still has to wait does so again, in the same order.
            let token = Token::take(index);
            if self.is_admitted(token.index()) {
                self.waited(index, &mut old);
                self.ios[token.index()].deadline_ns = self.now_ns + OWNER_WAIT_LIMIT_NS;
                self.begin_admitted(token);
            } else if let Some(admission) = &mut self.admission {
                admission.push(token.entrust(), &mut self.ios, self.now_ns);
            }
        }
        self.scratch = waited;
        old.record_all(self.record, &self.region);
    }

    /// All lanes are of one tenant with this budget, in windows of 1 ms.
    #[cfg(test)]
    pub(crate) fn admit_all_by(&mut self, budget: &Budget) {
        let params = Params {
            window_ns: 1_000_000,
            saved_windows: 1,
            ..Params::default()
        };
        let capacity = forebay_xlate::boundary::message::NodeCapacity::UNLIMITED.capacity(1);
        let costs = Arc::new(CostTable::new(forebay_burst::cost::default_profiles()));
        let board = Arc::new(Board::new(1));
        let mut admission = Admission::new(params, &capacity.per_second(), &costs, &board).unwrap();
        admission.set_budget(0, budget);
        for lane in self.lanes.iter_mut().flatten() {
            lane.share = Some(Share {
                tenant: 0,
                budget: None,
            });
        }
        self.set_admission(Some(Box::new(admission)));
        self.begin_admission();
    }

    /// A tenant has this budget from now on.
    pub fn set_budget(&mut self, tenant: u32, budget: &Budget) {
        if let Some(admission) = &mut self.admission {
            admission.set_budget(tenant, budget);
        }
    }

    /// A volume is this tenant's from now on; `None`: nobody's.
    pub fn set_share(&mut self, volume: VolumeId, share: Option<Share>) {
        for lane in self.lanes.iter_mut().flatten() {
            if lane.volume.id() == volume {
                lane.share = share;
                if let Some(admission) = &mut self.admission {
                    admission.attach(lane);
                }
            }
        }
    }

    /// A lane is there, or shows something else.
    pub(super) fn attach(&mut self, index: LaneIndex) {
        let lane = self.lanes[index.0 as usize].as_ref();
        if let (Some(admission), Some(lane)) = (&mut self.admission, lane) {
            admission.attach(lane);
        }
    }

    /// A lane is gone.
    pub(super) fn detach(&mut self, index: LaneIndex) {
        if let Some(admission) = &mut self.admission {
            admission.detach(index.0 as usize % MAX_LANES);
        }
    }

    /// Whether a machine's lane may take commands from its rings. Who may not, goes on by itself: the
    /// reactor makes a turn, or wakes when the window ends.
    #[inline]
    pub(crate) fn may_fetch(&self, lane: LaneIndex) -> bool {
        match &self.admission {
            Some(admission) if admission.stops => admission.may_fetch(lane),
            _ => true,
        }
    }

    /// Whether a machine's lane waits for a window, so that there is no use in looking at its rings.
    pub(crate) fn is_held_back(&self, lane: LaneIndex) -> bool {
        let admission = self.admission.as_ref();
        admission.is_some_and(|a| a.gates[lane.0 as usize % MAX_LANES].count >= ENOUGH)
    }

    /// Whether a command may begin; if so, it is paid for. One that a dead engine had begun may.
    #[inline]
    pub(super) fn is_admitted(&mut self, index: usize) -> bool {
        let Some(admission) = &mut self.admission else {
            return true;
        };
        let io = &self.ios[index];
        if self.carried.any() && self.carried.is_carried(io.record) {
            return true;
        }
        admission.admit(io.lane, &io.op)
    }

    /// The same of one that would be over at once.
    #[inline]
    pub(super) fn is_admitted_at_once(
        admission: &mut Option<Box<Admission>>,
        lane: LaneIndex,
        op: &IoOp,
    ) -> bool {
        match admission {
            Some(admission) => admission.admit(lane, op),
            None => true,
        }
    }

    /// Sets a command aside until it is admitted.
    #[cold]
    pub(super) fn throttle(&mut self, token: Token) {
        let io = &mut self.ios[token.index()];
        io.stage = Stage::Throttled;
        // However small a budget is, waiting for it is no failure.
        io.deadline_ns = u64::MAX;
        let index = token.entrust();
        let lane = self.ios[index as usize].lane;
        if let Some(admission) = &mut self.admission {
            admission.push(index, &mut self.ios, self.now_ns);
        }
        if let Some(lane) = self.lane(lane) {
            bump(&lane.record().throttled, 1);
        }
    }

    /// A command waits for its budget no more.
    fn waited(&mut self, index: u32, admission: &mut Admission) {
        let now_ns = self.now_ns;
        let io = &mut self.ios[index as usize];
        let waited_ns = now_ns.saturating_sub(io.started_ns);
        let over = admission.was_over_budget(io, waited_ns);
        io.stage = Stage::Moving;
        // What is left from there on is the devices' time.
        io.started_ns += waited_ns;
        if let Some(lane) = self.lanes[io.lane.0 as usize].as_ref() {
            let record = lane.record();
            let throttled = record.throttled.load(Relaxed);
            record.throttled.store(throttled.saturating_sub(1), Relaxed);
            if over {
                bump(&record.throttled_ops, 1);
                record.throttled_times.record(waited_ns);
            }
        }
    }

    /// Begins what waited and is admitted in this turn; true if there was any.
    #[inline]
    pub(super) fn begin_throttled(&mut self) -> bool {
        match &self.admission {
            Some(admission) if !admission.ready.is_empty() => self.begin_ready(),
            _ => false,
        }
    }

    #[cold]
    fn begin_ready(&mut self) -> bool {
        let mut any = false;
        while let Some(index) =
            (self.admission.as_mut()).and_then(|a| a.next(&mut self.ios, self.now_ns))
        {
            any = true;
            self.no_longer_throttled(index);
            let io = &mut self.ios[index as usize];
            io.deadline_ns = self.now_ns + OWNER_WAIT_LIMIT_NS;
            self.blame(Some(index));
            self.begin_admitted(Token::take(index));
        }
        self.blame(None);
        any
    }

    fn no_longer_throttled(&mut self, index: u32) {
        if let Some(mut admission) = self.admission.take() {
            self.waited(index, &mut admission);
            self.admission = Some(admission);
        }
    }

    /// Ends what waits for its budget and should have ended.
    pub(super) fn tick_throttled(&mut self) {
        let Some(admission) = self.admission.as_mut().filter(|a| a.waits()) else {
            return;
        };
        let mut overdue = std::mem::take(&mut self.scratch);
        admission.take_overdue(&mut self.ios, self.now_ns, &mut overdue);
        for index in overdue.drain(..) {
            self.no_longer_throttled(index);
            self.fail(Token::take(index), Status::COMMAND_INTERRUPTED);
        }
        self.scratch = overdue;
    }

    /// A turn begins: perhaps a window has ended.
    #[inline]
    pub(super) fn begin_admission(&mut self) {
        if let Some(admission) = &mut self.admission {
            admission.begin_turn(self.now_ns, &self.ios, self.record, &self.region);
        }
    }

    /// A turn in which there was something to do took so long.
    #[inline]
    pub(crate) fn turn_took(&mut self, ns: u64) {
        if let Some(admission) = &mut self.admission {
            admission.turns.0 += ns;
            admission.turns.1 += 1;
        }
    }

    /// Whether the next turn has something to begin.
    pub(super) fn has_ready(&self) -> bool {
        let admission = self.admission.as_ref();
        admission.is_some_and(|a| !a.ready.is_empty() || a.wanting > 0)
    }

    /// When the window ends, if that is waited for.
    pub(crate) fn window_ends_ns(&self) -> Option<u64> {
        let admission = self.admission.as_ref()?;
        (admission.waits() || admission.scheduler.is_reckoned_with()).then_some(admission.ends_ns)
    }
}
