//! The machine: events in order of their time.
//!
//! **Design.** A tenant keeps so many I/Os under way. One that may begin stands before its reactor's processor, first come
//! first served; then its data goes over a link, the backend takes its time, and a read's data comes back over the other
//! link. What may not begin waits in its lane, and at each window's turn lanes begin one I/O each in turns. A reactor that works
//! in turns ([`Model::turn_ns`]) looks at what came, and at what waits, only between them.

mod turns;

use super::model::{Guest, Model};
use super::stats::Had;
use crate::admission::Capacity;
use crate::board::{Board, Shares};
use crate::cost::{CostTable, Frontend, Operation};
use crate::params::{BadParam, Params, Policy};
use crate::scheduler::Scheduler;
use crate::units::{Resource, Units};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

pub use crate::spread::Spread;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Event {
    /// A tenant asks for its next I/O.
    Ask(u32),
    /// A reactor's processor has finished with this I/O.
    Cpu(u32, u32),
    /// A reactor has looked at all that there is to do.
    Looked(u32),
    /// The backend has answered.
    Backend(u32),
    /// The I/O has ended.
    End(u32),
    /// A window ends.
    Turn,
}

#[derive(Clone, Copy, Debug)]
struct Io {
    tenant: u32,
    lane: u32,
    len: u32,
    read: bool,
    /// Who admitted it.
    reactor: u32,
    /// It was over budget at least once.
    refused: bool,
    /// Its wait is the processor's.
    told: bool,
    asked: u64,
    ready: u64,
    cost: Units,
    /// The processor's time that it is said to take.
    cpu: i32,
}

#[derive(Debug)]
struct Reactor {
    scheduler: Scheduler,
    /// Of those within their base: they go first.
    first: VecDeque<u32>,
    ready: VecDeque<u32>,
    /// The processor's time that stands in `ready`.
    ahead_ns: u64,
    /// What came since the last turn.
    came: Vec<u32>,
    /// Of a turn's lump, what is left.
    lump_ns: i64,
    busy: bool,
    /// In this measurement.
    busy_ns: u64,
    /// Lanes in which something waits, in turns.
    turns: VecDeque<u32>,
    /// None of them may, in this window.
    stuck: bool,
    /// The next I/O is carried out so much later; until when one is; and windows that ended meanwhile.
    held_ns: u64,
    held_until: u64,
    late: u64,
    /// Under `wild`, this turn, and that of which each lane was last given a batch: outside of turns there is but one, and a lane
    /// whose part is over was last given none.
    round: u64,
    rounds: Vec<u64>,
}

/// See the module's text.
#[derive(Debug)]
pub struct Machine {
    model: Model,
    costs: CostTable,
    guests: Vec<Guest>,
    spread: Spread,
    reactors: Vec<Reactor>,
    /// By reactor, lane and direction: what waits.
    waiting: Vec<Vec<VecDeque<u32>>>,
    ios: Vec<Io>,
    free: Vec<u32>,
    under_way: Vec<u32>,
    /// When a tenant with a rate may ask next; whether it will.
    due: Vec<u64>,
    asks: Vec<bool>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    sequence: u64,
    links: [u64; 2],
    /// When the device has ended what was given to it.
    device: u64,
    now: u64,
    window_ns: u64,
    lump_ns: i64,
    backlog_weight: u64,
    /// Lanes begin in rounds.
    wild: bool,
    calm_lump_ns: i64,
    random: u64,
    measure_from: u64,
    had: Vec<Had>,
    windows: bool,
}

/// Which lane is whose: as many as a tenant has queues.
fn lanes_of(guests: &[Guest]) -> Vec<(usize, usize)> {
    let mut lanes = Vec::new();
    for (tenant, guest) in guests.iter().enumerate() {
        for queue in 0..guest.queues.len() {
            lanes.push((tenant, queue));
        }
    }
    lanes
}

impl Machine {
    /// With these tenants.
    ///
    /// # Errors
    /// A parameter that is out of its range.
    pub fn new(
        model: Model,
        params: &Params,
        guests: Vec<Guest>,
        spread: Spread,
        seed: u64,
    ) -> Result<Self, BadParam> {
        let costs = model.costs();
        let mut model = model;
        model.base_first &= params.policy == Policy::Burst;
        match params.policy {
            Policy::Burst => {}
            // It begins whatever comes.
            Policy::Base => model.ahead_ns = u64::MAX,
            // A round is of what waits.
            Policy::Wild => model.ahead_ns = Model::default().ahead_ns,
        }
        let board = Arc::new(Board::new(guests.len()));
        let lanes = lanes_of(&guests);
        // What is begun here may be carried out anywhere where who is idle helps.
        let own = Capacity {
            reactors: match spread {
                Spread::Stealing => model.reactors as u32,
                _ => 1,
            },
            ..model.capacity()
        };
        let volumes: Vec<_> = lanes.iter().map(|_| Arc::new(Shares::default())).collect();
        let mut reactors = Vec::new();
        for number in 0..model.reactors {
            let mut scheduler =
                Scheduler::new(params.clone(), &own.per_second(), lanes.len(), &board)?;
            for (tenant, guest) in guests.iter().enumerate() {
                scheduler.set_budget(tenant, &guest.budget, &costs);
            }
            for (lane, (tenant, _)) in lanes.iter().enumerate() {
                if spread == Spread::OneToN || spread.home(lane, model.reactors) == number {
                    scheduler.attach(lane, *tenant);
                    if model.shared_volumes {
                        let budget = Some(&guests[*tenant].budget);
                        scheduler.set_volume(lane, budget, Some(&volumes[lane]));
                    }
                }
            }
            reactors.push(Reactor {
                scheduler,
                first: VecDeque::new(),
                ready: VecDeque::new(),
                ahead_ns: 0,
                came: Vec::new(),
                lump_ns: 0,
                busy: false,
                busy_ns: 0,
                turns: VecDeque::new(),
                stuck: false,
                held_ns: 0,
                held_until: 0,
                late: 0,
                round: 1,
                rounds: vec![0; lanes.len()],
            });
        }
        let count = guests.len();
        let mut machine = Self {
            waiting: vec![vec![VecDeque::new(); 2 * lanes.len()]; model.reactors],
            reactors,
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
            lump_ns: match params.policy {
                Policy::Burst => params.lump_ns.into(),
                _ => i64::MAX / 2,
            },
            backlog_weight: params.backlog_weight.into(),
            wild: params.policy == Policy::Wild,
            calm_lump_ns: params.calm_lump_ns.into(),
            random: seed | 1,
            measure_from: 0,
            had: vec![Had::default(); count],
            windows: false,
            model,
            guests,
        };
        machine.at(machine.window_ns, Event::Turn);
        for tenant in 0..count {
            machine.ask_later(tenant as u32);
        }
        Ok(machine)
    }

    /// Runs for `warm_ns` and forgets it, then for `ns`. Says what each tenant had.
    pub fn run(&mut self, warm_ns: u64, ns: u64) -> &[Had] {
        self.until(self.now + warm_ns);
        self.had.fill(Had::default());
        self.measure_from = self.now;
        for reactor in &mut self.reactors {
            reactor.busy_ns = 0;
        }
        self.until(self.now + ns);
        &self.had
    }

    /// How much of the measurement each reactor was busy.
    #[must_use]
    pub fn busy(&self) -> Vec<f64> {
        let time = (self.now - self.measure_from).max(1) as f64;
        let parts = self.reactors.iter();
        parts.map(|reactor| reactor.busy_ns as f64 / time).collect()
    }

    /// Of the first reactor: how many times what is calibrated costs count.
    #[must_use]
    pub fn correction(&self, resource: Resource) -> f32 {
        self.reactors[0].scheduler.corrections()[resource as usize]
    }

    /// Another truth of the processor, from now on.
    pub fn set_truth(&mut self, truth: f64) {
        self.model.cpu_truth = truth;
    }

    /// Windows are counted one by one.
    pub fn count_windows(&mut self) {
        self.windows = true;
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
                Event::Ask(tenant) => self.ask(tenant),
                Event::Cpu(reactor, io) => self.served(reactor as usize, io),
                Event::Looked(reactor) => self.looked(reactor as usize),
                Event::Backend(io) => self.answered(io),
                Event::End(io) => self.ended(io),
                Event::Turn => self.turn(),
            }
        }
        self.now = end;
    }

    fn at(&mut self, time: u64, event: Event) {
        self.sequence += 1;
        self.events.push(Reverse((time, self.sequence, event)));
    }

    fn draw(&mut self) -> f64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) as f64 / (1u64 << 53) as f64
    }

    /// The next I/O of a tenant is asked for when its rate and its pulse allow it.
    fn ask_later(&mut self, tenant: u32) {
        let at = tenant as usize;
        let load = &self.guests[at].load;
        if self.asks[at] || self.under_way[at] >= load.depth {
            return;
        }
        let mut time = self.due[at].max(self.now);
        if let Some((on, of)) = load.pulse
            && time % of >= on
        {
            time += of - time % of;
        }
        self.asks[at] = true;
        self.at(time, Event::Ask(tenant));
    }

    fn ask(&mut self, tenant: u32) {
        let at = tenant as usize;
        self.asks[at] = false;
        let (first, second, third) = (self.draw(), self.draw(), self.draw());
        let load = &self.guests[at].load;
        if let Some(rate) = load.rate {
            self.due[at] = self.due[at].max(self.now) + (1e9 / rate) as u64;
        }
        let len = load.sizes[(first * load.sizes.len() as f64) as usize];
        let read = second * 100.0 < f64::from(load.reads);
        // Its queue, by how its machine's processors are used.
        let mut queue = 0;
        let mut sum = 0.0;
        for (number, part) in self.guests[at].queues.iter().enumerate() {
            sum += part;
            queue = number;
            if third * 100.0 < sum {
                break;
            }
        }
        let before: usize = self.guests[..at]
            .iter()
            .map(|guest| guest.queues.len())
            .sum();
        let lane = (before + queue) as u32;
        let operation = if read {
            Operation::Read
        } else {
            Operation::Write
        };
        let charged = if self.model.counted { 4096 } else { len };
        let io = Io {
            tenant,
            lane,
            len,
            read,
            reactor: 0,
            refused: false,
            told: true,
            asked: self.now,
            ready: 0,
            cost: self.costs.of(Frontend::Tcp, operation, charged),
            cpu: self.costs.of(Frontend::Tcp, operation, len)[Resource::Cpu],
        };
        let number = match self.free.pop() {
            Some(number) => {
                self.ios[number as usize] = io;
                number
            }
            None => {
                self.ios.push(io);
                self.ios.len() as u32 - 1
            }
        };
        self.under_way[at] += 1;
        self.come(number);
        self.ask_later(tenant);
    }

    /// It comes to its reactor.
    fn come(&mut self, io: u32) {
        let lane = self.ios[io as usize].lane as usize;
        let count = self.reactors.len();
        let number = match self.spread {
            Spread::OneToN => {
                let load = |number: &usize| self.reactors[*number].ahead_ns;
                // The least loaded; of equals the next in turn.
                (0..count)
                    .map(|at| (at + io as usize) % count)
                    .min_by_key(load)
                    .unwrap_or(0)
            }
            Spread::OneToOne | Spread::Stealing => self.spread.home(lane, count),
        };
        if self.model.turn_ns == 0 {
            self.arrive(number, io);
            return;
        }
        self.reactors[number].came.push(io);
        self.look(number);
    }

    /// It is admitted, or waits.
    fn arrive(&mut self, number: usize, io: u32) {
        let Io {
            lane,
            cost,
            tenant,
            read,
            ..
        } = self.ios[io as usize];
        let lane = lane as usize;
        let queue = 2 * lane + usize::from(read && self.model.apart);
        let may_begin = (self.has_room(number) || self.is_first(number, lane))
            && self.is_its_round(number, lane);
        let reactor = &mut self.reactors[number];
        let waiting = &mut self.waiting[number][queue];
        if waiting.is_empty() && may_begin {
            if reactor.scheduler.admit(lane, &cost) {
                self.begin(number, io);
                return;
            }
            self.ios[io as usize].refused = true;
            self.ios[io as usize].told = false;
            self.had[tenant as usize].throttled += 1;
        }
        if waiting.is_empty() {
            reactor.turns.push_back(queue as u32);
            reactor.stuck = false;
        } else {
            self.ios[io as usize].told = false;
        }
        waiting.push_back(io);
        reactor.scheduler.wait(lane, &cost);
    }

    fn is_first(&self, number: usize, lane: usize) -> bool {
        self.model.base_first && self.reactors[number].scheduler.is_within_base(lane)
    }

    /// It stands before the processor.
    fn begin(&mut self, number: usize, io: u32) {
        let cpu = self.cpu_ns(io);
        self.ios[io as usize].ready = self.now;
        self.ios[io as usize].reactor = number as u32;
        self.spend_batch(number, io);
        let first = self.is_first(number, self.ios[io as usize].lane as usize);
        let reactor = &mut self.reactors[number];
        match first {
            true => reactor.first.push_back(io),
            false => {
                reactor.ready.push_back(io);
                reactor.lump_ns -= cpu as i64;
            }
        }
        reactor.ahead_ns += cpu;
        if self.model.turn_ns > 0 {
            return;
        }
        if !reactor.busy {
            self.serve(number);
        } else if self.spread == Spread::Stealing {
            // Whoever is idle looks around.
            if let Some(idle) = self.reactors.iter().position(|other| !other.busy) {
                self.serve(idle);
            }
        }
    }

    fn cpu_ns(&self, io: u32) -> u64 {
        let io = &self.ios[io as usize];
        let more = match self.spread {
            Spread::Stealing => 1.0 + self.model.steal_cost,
            Spread::OneToOne | Spread::OneToN => 1.0,
        };
        (f64::from(io.cpu) * self.model.cpu_truth * more) as u64
    }

    /// The processor takes the next.
    fn serve(&mut self, number: usize) {
        let mut from = number;
        let stand = |reactor: &Reactor| reactor.first.len() + reactor.ready.len();
        if stand(&self.reactors[number]) == 0 {
            if self.spread != Spread::Stealing {
                self.look(number);
                return;
            }
            let longest = (0..self.reactors.len()).max_by_key(|at| stand(&self.reactors[*at]));
            from = longest.unwrap_or(number);
        }
        let reactor = &mut self.reactors[from];
        let next = reactor.first.pop_front();
        let Some(io) = next.or_else(|| reactor.ready.pop_front()) else {
            return;
        };
        let plain = self.cpu_ns(io);
        self.reactors[from].ahead_ns = self.reactors[from].ahead_ns.saturating_sub(plain);
        // Whoever was within its budget, and not behind others of its own, waited for the processor from the beginning on,
        // also where the lane kept it. Of the others that can't be told but where all that may begin does at once.
        let Io {
            told, asked, ready, ..
        } = self.ios[io as usize];
        let scheduler = &mut self.reactors[from].scheduler;
        if self.model.turn_ns > 0 {
            // What is left when a window ends says it.
        } else if told {
            scheduler.observe(Resource::Cpu, self.now - asked, 1);
        } else if self.model.ahead_ns == u64::MAX {
            scheduler.observe(Resource::Cpu, self.now - ready, 1);
        }
        let mut cpu = self.cpu_ns(io);
        let reactor = &mut self.reactors[number];
        if reactor.held_ns > 0 {
            cpu += std::mem::take(&mut reactor.held_ns);
            reactor.held_until = self.now + cpu;
        }
        reactor.busy = true;
        reactor.busy_ns += cpu;
        self.at(self.now + cpu, Event::Cpu(number as u32, io));
    }

    fn served(&mut self, number: usize, io: u32) {
        self.reactors[number].busy = false;
        let Io { read, len, .. } = self.ios[io as usize];
        let bytes = if read { 0 } else { len } + self.model.header;
        let sent = self.carry(io, 0, bytes);
        let sent = self.use_device(io, sent);
        let (least, mean) = if read {
            self.model.backend_read_ns
        } else {
            self.model.backend_write_ns
        };
        let delay = least - mean * (1.0 - self.draw()).ln();
        self.at(sent + delay as u64, Event::Backend(io));
        if self.model.ahead_ns != u64::MAX && self.model.turn_ns == 0 {
            self.resume(number, false);
        }
        if !self.reactors[number].busy {
            self.serve(number);
        }
    }

    /// A link carries one after the other. Says when it has.
    fn carry(&mut self, io: u32, link: usize, bytes: u32) -> u64 {
        let begins = self.links[link].max(self.now);
        if self.model.links_told {
            let resource = [Resource::LinkIn, Resource::LinkOut][link];
            let number = self.ios[io as usize].reactor as usize;
            let scheduler = &mut self.reactors[number].scheduler;
            scheduler.observe(resource, begins - self.now, 1);
        }
        let time = f64::from(bytes) * 1e9 / self.model.link;
        self.links[link] = begins + time as u64;
        self.links[link]
    }

    /// The device takes one after the other. Says when it has ended this one, which is there from `at` on.
    fn use_device(&mut self, io: u32, at: u64) -> u64 {
        let (fixed, byte) = self.model.device_ns;
        if fixed == 0.0 && byte == 0.0 {
            return at;
        }
        let Io {
            read, len, reactor, ..
        } = self.ios[io as usize];
        let begins = self.device.max(at);
        let resource = if read {
            Resource::DeviceRead
        } else {
            Resource::DeviceWrite
        };
        let scheduler = &mut self.reactors[reactor as usize].scheduler;
        scheduler.observe(resource, begins - at, 1);
        let takes = self.model.device_truth * (fixed + byte * f64::from(len));
        self.device = begins + takes as u64;
        self.device
    }

    fn answered(&mut self, io: u32) {
        let Io { read, len, .. } = self.ios[io as usize];
        let end = if read {
            self.carry(io, 1, len + self.model.header)
        } else {
            self.now
        };
        self.at(end, Event::End(io));
    }

    fn ended(&mut self, io: u32) {
        let Io {
            tenant, len, asked, ..
        } = self.ios[io as usize];
        let had = &mut self.had[tenant as usize];
        if asked >= self.measure_from {
            had.latency.add(self.now - asked);
        }
        had.bytes += u64::from(len);
        if self.windows {
            let window = ((self.now - self.measure_from) / self.window_ns) as usize;
            had.by_window.resize(had.by_window.len().max(window + 1), 0);
            had.by_window[window] += 1;
        }
        self.under_way[tenant as usize] -= 1;
        self.free.push(io);
        self.ask_later(tenant);
    }
}
