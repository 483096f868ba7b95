//! The simulated node: events in order of time.
//!
//! An admitted I/O queues at its reactor's processor (FIFO), crosses a link, takes the backend's
//! time, and a read's data returns over the other link. A throttled I/O waits in its lane; after
//! each window, lanes begin one I/O each, in turns. A reactor with turns ([`Model::turn_ns`]) polls
//! only between them.
//!
//! **Not here:** load ([`load`]), admission ([`turns`]), an I/O's path ([`path`]), offload
//! ([`help`]).

mod help;
mod load;
mod path;
mod turns;

use self::help::Need;
use super::model::{Guest, Model};
use super::stats::Had;
use crate::policy::{Params, Policy};
use forebay_qos::admission::Capacity;
use forebay_qos::cost::CostTable;
use forebay_qos::cost::Routes;
use forebay_qos::ledger::Ledger;
use forebay_qos::params::{BACKLOG_WEIGHT, BadParam};
use forebay_qos::resources::{Resource, ResourceVector};
use forebay_qos::scheduler::Scheduler;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

pub use crate::policy::SimSpread;

/// Calibrated cost above base that may begin in a turn, as in the engine.
const TURN_NS: i64 = 12_000;
/// `TURN_NS` while only one lane has I/Os.
const ALONE_TURN_NS: i64 = 75_000;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum SimEvent {
    /// A tenant asks for its next I/O.
    Ask(u32),
    /// A reactor's processor finished with this I/O.
    Cpu(u32, u32),
    /// A reactor has polled everything.
    Polled(u32),
    Backend(u32),
    End(u32),
    WindowEnd,
}

#[derive(Clone, Copy, Debug)]
struct Io {
    tenant: u32,
    lane: u32,
    len: u32,
    read: bool,
    reactor: u32,
    /// Over budget at least once.
    refused: bool,
    /// It waits only for the processor.
    waits_for_processor: bool,
    asked: u64,
    ready: u64,
    cost: ResourceVector,
    /// Calibrated processor time.
    cpu: i32,
}

#[derive(Debug)]
struct Reactor {
    scheduler: Scheduler,
    /// I/Os within their base.
    first: VecDeque<u32>,
    ready: VecDeque<u32>,
    /// Processor time queued in `ready`.
    ahead_ns: u64,
    came: Vec<u32>,
    quantum_ns: i64,
    busy: bool,
    /// In total; and before the measurement.
    busy_ns: u64,
    before_ns: u64,
    /// When it last began or executed its own I/O.
    begun_ns: Option<u64>,
    need: Need,
    /// Remote operations to begin; and those offloaded to each reactor.
    remote_operations: VecDeque<u32>,
    offloaded: Vec<usize>,
    /// Lanes with waiting I/Os, in order.
    run_queue: VecDeque<u32>,
    /// No lane may begin in this window.
    stuck: bool,
    /// Delay of the next I/O; its end; and windows that ended meanwhile.
    held_ns: u64,
    held_until: u64,
    late: u64,
    /// This turn's round, and the round of each lane's last batch. Without turns there is one
    /// round; a lane that used its part has 0.
    round: u64,
    rounds: Vec<u64>,
    /// The rest of each lane's batch, ns.
    batches: Vec<i64>,
}

impl Reactor {
    fn new(scheduler: Scheduler, reactors: usize, lanes: usize) -> Self {
        Self {
            scheduler,
            first: VecDeque::new(),
            ready: VecDeque::new(),
            ahead_ns: 0,
            came: Vec::new(),
            quantum_ns: 0,
            busy: false,
            busy_ns: 0,
            before_ns: 0,
            begun_ns: None,
            need: Need::UNKNOWN,
            remote_operations: VecDeque::new(),
            offloaded: vec![0; reactors],
            run_queue: VecDeque::new(),
            stuck: false,
            held_ns: 0,
            held_until: 0,
            late: 0,
            round: 1,
            rounds: vec![0; lanes],
            batches: vec![0; lanes],
        }
    }

    fn stand(&self) -> usize {
        self.first.len() + self.ready.len()
    }
}

/// The simulation; see the module.
#[derive(Debug)]
pub struct Simulation {
    model: Model,
    costs: CostTable,
    guests: Vec<Guest>,
    spread: SimSpread,
    reactors: Vec<Reactor>,
    /// Each lane's home reactor, tenant, and I/Os in flight.
    homes: Vec<usize>,
    tenant_of: Vec<usize>,
    in_lane: Vec<u32>,
    /// Waiting I/Os by reactor, lane and direction.
    waiting: Vec<Vec<VecDeque<u32>>>,
    ios: Vec<Io>,
    free: Vec<u32>,
    under_way: Vec<u32>,
    /// When a tenant with a rate may ask next; whether that is scheduled.
    due: Vec<u64>,
    asks: Vec<bool>,
    events: BinaryHeap<Reverse<(u64, u64, SimEvent)>>,
    sequence: u64,
    links: [u64; 2],
    /// When the device's queue is empty.
    device: u64,
    now: u64,
    window_ns: u64,
    quantum_ns: i64,
    backlog_weight: u64,
    /// Lanes begin in rounds, with a batch in each.
    rounds: bool,
    random: u64,
    measured: Measured,
}

#[derive(Debug)]
struct Measured {
    from_ns: u64,
    had: Vec<Had>,
    /// Count windows one by one.
    by_window: bool,
}

/// The tenant and queue of each lane.
fn lanes_of(guests: &[Guest]) -> Vec<(usize, usize)> {
    let mut lanes = Vec::new();
    for (tenant, guest) in guests.iter().enumerate() {
        for queue in 0..guest.queues.len() {
            lanes.push((tenant, queue));
        }
    }
    lanes
}

fn homes_of(lanes: &[(usize, usize)], guests: &[Guest], reactors: usize) -> Vec<usize> {
    let homes = lanes.iter().enumerate().map(|(lane, (tenant, queue))| {
        let home = guests[*tenant].homes.get(*queue).copied();
        home.unwrap_or(lane % reactors.max(1))
    });
    homes.collect()
}

/// Sets all budgets, and the lanes at home here.
fn set_up(
    scheduler: &mut Scheduler,
    number: usize,
    guests: &[Guest],
    lanes: &[(usize, usize)],
    homes: &[usize],
    costs: &CostTable,
) {
    for (tenant, guest) in guests.iter().enumerate() {
        scheduler.set_budget(tenant, &guest.budget, costs, Routes::LOCAL);
    }
    for (lane, (tenant, _)) in lanes.iter().enumerate() {
        if homes[lane] == number {
            scheduler.attach(lane, *tenant);
        }
    }
}

impl Simulation {
    /// A new simulation.
    ///
    /// # Errors
    /// A parameter out of range.
    pub fn new(
        model: Model,
        params: &Params,
        guests: Vec<Guest>,
        spread: SimSpread,
        seed: u64,
    ) -> Result<Self, BadParam> {
        let costs = model.costs();
        let mut model = model;
        model.base_first &= params.policy == Policy::Burst;
        match params.policy {
            Policy::Burst => {}
            // It begins every I/O.
            Policy::Base => model.ahead_ns = u64::MAX,
            // A round serves waiting I/Os.
            Policy::Wild => model.ahead_ns = Model::default().ahead_ns,
        }
        let mut guests = guests;
        for guest in &mut guests {
            guest.budget = params.policy.budget(&guest.budget);
        }
        let ledger = Arc::new(Ledger::new(guests.len()));
        let lanes = lanes_of(&guests);
        let homes = homes_of(&lanes, &guests, model.reactors);
        let own = Capacity {
            reactors: match spread {
                SimSpread::Stealing => model.reactors as u32,
                _ => 1,
            },
            ..model.capacity()
        };
        let per_second = params.policy.per_second(own.per_second(), params.window_ns);
        let mut reactors = Vec::new();
        for number in 0..model.reactors {
            let mut scheduler =
                Scheduler::new(params.scheduler.clone(), &per_second, lanes.len(), &ledger)?;
            set_up(&mut scheduler, number, &guests, &lanes, &homes, &costs);
            reactors.push(Reactor::new(scheduler, model.reactors, lanes.len()));
        }
        let count = guests.len();
        let mut simulation = Self {
            waiting: vec![vec![VecDeque::new(); 2 * lanes.len()]; model.reactors],
            reactors,
            in_lane: vec![0; homes.len()],
            tenant_of: lanes.iter().map(|(tenant, _)| *tenant).collect(),
            homes,
            costs,
            spread,
            ios: Vec::new(),
            free: Vec::new(),
            under_way: vec![0; count],
            due: guests.iter().map(|guest| guest.load.start_ns).collect(),
            asks: vec![false; count],
            events: BinaryHeap::new(),
            sequence: 0,
            links: [0; 2],
            device: 0,
            now: 0,
            window_ns: params.window_ns,
            quantum_ns: match params.policy {
                Policy::Burst => TURN_NS,
                _ => i64::MAX / 2,
            },
            backlog_weight: BACKLOG_WEIGHT,
            rounds: model.rounds || params.policy == Policy::Wild,
            random: seed | 1,
            measured: Measured {
                from_ns: 0,
                had: vec![Had::default(); count],
                by_window: false,
            },
            model,
            guests,
        };
        simulation.at(simulation.window_ns, SimEvent::WindowEnd);
        for tenant in 0..count {
            simulation.ask_later(tenant as u32);
        }
        Ok(simulation)
    }

    /// Runs `warm_ns` unmeasured, then `ns`. Returns each tenant's results.
    pub fn run(&mut self, warm_ns: u64, ns: u64) -> &[Had] {
        self.until(self.now + warm_ns);
        self.measured.had.fill(Had::default());
        self.measured.from_ns = self.now;
        for reactor in &mut self.reactors {
            reactor.before_ns = reactor.busy_ns;
        }
        self.until(self.now + ns);
        &self.measured.had
    }

    /// Busy fraction of each reactor during the measurement.
    #[must_use]
    pub fn busy(&self) -> Vec<f64> {
        let time = (self.now - self.measured.from_ns).max(1) as f64;
        let parts = self.reactors.iter();
        let busy = |of: &Reactor| (of.busy_ns - of.before_ns) as f64 / time;
        parts.map(busy).collect()
    }

    /// The first reactor's correction of calibrated costs.
    #[must_use]
    pub fn correction(&self, resource: Resource) -> f32 {
        self.reactors[0].scheduler.corrections()[resource as usize]
    }

    /// Counts windows one by one.
    pub fn count_windows(&mut self) {
        self.measured.by_window = true;
    }

    fn until(&mut self, end: u64) {
        while let Some(Reverse((time, _, _))) = self.events.peek() {
            if *time > end {
                break;
            }
            let Some(Reverse((time, _, event))) = self.events.pop() else {
                break;
            };
            self.now = time;
            match event {
                SimEvent::Ask(tenant) => self.ask(tenant),
                SimEvent::Cpu(reactor, io) => self.served(reactor as usize, io),
                SimEvent::Polled(reactor) => self.polled(reactor as usize),
                SimEvent::Backend(io) => self.answered(io),
                SimEvent::End(io) => self.ended(io),
                SimEvent::WindowEnd => self.end_window(),
            }
        }
        self.now = end;
    }

    fn at(&mut self, time: u64, event: SimEvent) {
        self.sequence += 1;
        self.events.push(Reverse((time, self.sequence, event)));
    }

    fn draw(&mut self) -> f64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) as f64 / (1u64 << 53) as f64
    }
}
