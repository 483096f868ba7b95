//! Polling and admission on a reactor.
//!
//! Without turns a reactor polls at a window's end and between any two I/Os. A turn, as in the
//! engine, begins a quantum above base and executes it. In rounds, as under `wild`, lanes begin a
//! batch each and go to the end of the queue.
//!
//! **Not here:** an I/O's path after it began ([`super::path`]).

use super::{ALONE_TURN_NS, Io, SimEvent, SimSpread, Simulation};
use forebay_qos::resources::{PLENTY, Resource};

/// Mean batch, ns: 32 I/Os of 32 KiB; storage hosts take 32 from a queue at once.
const BATCH_NS: f64 = 75_000.0;
/// A lane's least batch per round, ns.
const LEAST_BATCH_NS: f64 = 500.0;

impl Simulation {
    /// Begins a turn if there is work.
    pub(super) fn poll(&mut self, number: usize) {
        let reactor = &mut self.reactors[number];
        if reactor.busy {
            return;
        }
        // An idle processor serves tenants that lack only processor time. Without turns, all I/Os
        // were asked by now.
        let quantum_ns = self.quantum_ns.min(PLENTY.into()) as i32;
        let asked = reactor.stuck || self.model.turn_ns == 0;
        let has = asked && reactor.came.is_empty() && reactor.scheduler.is_idle(quantum_ns);
        if has {
            reactor.stuck = false;
        }
        if self.model.turn_ns == 0 {
            if has {
                self.resume_all(number);
            }
            return;
        }
        let waits = !reactor.stuck && !reactor.run_queue.is_empty();
        if waits || !reactor.came.is_empty() || !reactor.remote_operations.is_empty() {
            reactor.busy = true;
            reactor.busy_ns += self.model.turn_ns;
            let end = self.now + self.model.turn_ns;
            self.at(end, SimEvent::Polled(number as u32));
        }
    }

    /// Waiting I/Os come before new ones.
    pub(super) fn polled(&mut self, number: usize) {
        self.reactors[number].busy = false;
        self.reactors[number].quantum_ns = self.quantum_of(number);
        self.reactors[number].round += 1;
        self.resume_all(number);
        for io in std::mem::take(&mut self.reactors[number].came) {
            self.arrive(number, io);
        }
        self.take_remote_operations(number);
        self.serve(number);
    }

    /// The quantum above base. As in the engine it is larger if no tenant, or only one lane,
    /// bursts.
    pub(super) fn quantum_of(&self, number: usize) -> i64 {
        let reactor = &self.reactors[number];
        let waiting = reactor.run_queue.iter().map(|queue| queue / 2);
        let came = reactor.came.iter().map(|io| self.ios[*io as usize].lane);
        let mut lanes = waiting.chain(came);
        let first = lanes.next();
        let alone = lanes.all(|lane| Some(lane) == first);
        match alone || !reactor.scheduler.any_bursts() {
            true => self.quantum_ns.max(ALONE_TURN_NS),
            false => self.quantum_ns,
        }
    }

    /// Whether a reactor may begin I/Os above base.
    pub(super) fn has_room(&self, number: usize) -> bool {
        let reactor = &self.reactors[number];
        match self.model.turn_ns {
            0 => reactor.ahead_ns < self.model.ahead_ns,
            _ => reactor.quantum_ns > 0,
        }
    }

    fn has_batch(&mut self, number: usize, lane: usize) -> bool {
        if !self.rounds {
            return true;
        }
        let reactor = &mut self.reactors[number];
        if std::mem::replace(&mut reactor.rounds[lane], reactor.round) != reactor.round {
            let batch_ns = self.batch_ns(lane);
            let left = &mut self.reactors[number].batches[lane];
            *left = (*left).min(0) + batch_ns;
        }
        self.reactors[number].batches[lane] > 0
    }

    /// [`BATCH_NS`], scaled by its tenant's base relative to the active tenants' mean. Excess
    /// reduces the next batch (deficit round robin), so sizes don't matter.
    fn batch_ns(&self, lane: usize) -> i64 {
        let weight = |tenant: usize| {
            let base = self.guests[tenant].budget.base;
            self.costs.most_of(base)[Resource::Cpu as usize]
        };
        let at_work = (0..self.guests.len()).filter(|tenant| self.under_way[*tenant] > 0);
        let (mut sum, mut count) = (0.0, 0.0);
        for tenant in at_work {
            (sum, count) = (sum + weight(tenant), count + 1.0);
        }
        let batch = match sum > 0.0 {
            true => BATCH_NS * weight(self.tenant_of[lane]) * count / sum,
            false => BATCH_NS,
        };
        batch.max(LEAST_BATCH_NS) as i64
    }

    /// Whether a lane's new I/O may begin. Without turns the run queue must be empty; that ends the
    /// round.
    pub(super) fn is_its_round(&mut self, number: usize, lane: usize) -> bool {
        if !self.rounds || self.model.turn_ns > 0 {
            return self.has_batch(number, lane);
        }
        let reactor = &self.reactors[number];
        if !reactor.stuck && !reactor.run_queue.is_empty() {
            return false;
        }
        while !self.has_batch(number, lane) {
            self.end_batch(number, lane);
        }
        true
    }

    /// Without turns, the lane gets a new batch at its next turn.
    fn end_batch(&mut self, number: usize, lane: usize) {
        if self.model.turn_ns == 0 {
            self.reactors[number].rounds[lane] = 0;
        }
    }

    pub(super) fn spend_batch(&mut self, number: usize, io: u32) {
        if self.rounds {
            let Io { lane, cost, .. } = self.ios[io as usize];
            self.reactors[number].batches[lane as usize] -= i64::from(cost[Resource::Cpu]);
        }
    }

    pub(super) fn arrive(&mut self, number: usize, io: u32) {
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
            self.ios[io as usize].waits_for_processor = false;
            self.measured.had[tenant as usize].throttled += 1;
        }
        if waiting.is_empty() {
            reactor.run_queue.push_back(queue as u32);
            reactor.stuck = false;
        } else {
            self.ios[io as usize].waits_for_processor = false;
        }
        waiting.push_back(io);
        reactor.scheduler.wait(lane, &cost);
    }

    pub(super) fn is_first(&self, number: usize, lane: usize) -> bool {
        self.model.base_first && self.reactors[number].scheduler.is_within_base(lane)
    }

    /// Queues it at the processor.
    pub(super) fn begin(&mut self, number: usize, io: u32) {
        let cpu = self.cpu_ns(io);
        self.ios[io as usize].ready = self.now;
        self.ios[io as usize].reactor = number as u32;
        self.reactors[number].begun_ns = Some(self.now);
        self.spend_batch(number, io);
        let first = self.is_first(number, self.ios[io as usize].lane as usize);
        let lane = self.ios[io as usize].lane as usize;
        let helper = self.whose(number, lane);
        let reactor = &mut self.reactors[number];
        if !first {
            reactor.quantum_ns -= cpu as i64;
        }
        if let Some(helper) = helper {
            self.hand_over(helper, io);
            return;
        }
        match first {
            true => reactor.first.push_back(io),
            false => reactor.ready.push_back(io),
        }
        reactor.ahead_ns += cpu;
        if self.model.turn_ns > 0 {
            return;
        }
        if !reactor.busy {
            self.serve(number);
        } else if self.spread == SimSpread::Stealing {
            // An idle reactor steals.
            if let Some(idle) = self.reactors.iter().position(|other| !other.busy) {
                self.serve(idle);
            }
        }
    }

    pub(super) fn end_window(&mut self) {
        // Stagger the reactors.
        let window = self.now / self.window_ns;
        for number in 0..self.reactors.len() {
            self.poll_others(number);
            let reactor = &mut self.reactors[number];
            if self.model.held_windows > 0 && (window + 37 * number as u64).is_multiple_of(100) {
                reactor.held_ns = self.model.held_windows * self.window_ns;
            }
            if self.now < reactor.held_until {
                reactor.late += 1;
                continue;
            }
            if self.model.turn_ns > 0 {
                let lanes = reactor.run_queue.iter().map(|queue| *queue as usize / 2);
                let left = lanes.map(|lane| reactor.scheduler.processor_left_ns(lane));
                let backlog_ns: u64 = left.sum();
                let delay_ns = self.backlog_weight * backlog_ns;
                reactor.scheduler.observe(Resource::Cpu, delay_ns, 1);
            }
            reactor
                .scheduler
                .refill(1 + std::mem::take(&mut reactor.late), 0);
            reactor.stuck = false;
            if self.model.turn_ns > 0 {
                self.poll(number);
                continue;
            }
            self.resume_all(number);
            self.poll(number);
        }
        self.at(self.now + self.window_ns, SimEvent::WindowEnd);
    }

    /// Waiting I/Os begin, those within their base first.
    fn resume_all(&mut self, number: usize) {
        if self.model.base_first {
            self.resume(number, true);
        }
        self.resume(number, false);
    }

    /// Lanes begin one I/O each, or a batch, in turn. `first`: only those within their base,
    /// whatever the processor's queue.
    pub(super) fn resume(&mut self, number: usize, first: bool) {
        if self.reactors[number].stuck {
            return;
        }
        let (mut refused, mut had_enough) = (0, false);
        while refused < self.reactors[number].run_queue.len() && (first || self.has_room(number)) {
            let Some(queue) = self.reactors[number].run_queue.pop_front() else {
                break;
            };
            let lane = queue as usize / 2;
            if first && !self.is_first(number, lane) {
                refused += 1;
                self.reactors[number].run_queue.push_back(queue);
                continue;
            }
            if !self.has_batch(number, lane) {
                self.end_batch(number, lane);
                if self.model.turn_ns > 0 {
                    (refused, had_enough) = (refused + 1, true);
                }
                self.reactors[number].run_queue.push_back(queue);
                continue;
            }
            let reactor = &mut self.reactors[number];
            let waiting = &mut self.waiting[number][queue as usize];
            let Some(io) = waiting.front().copied() else {
                continue;
            };
            if reactor.scheduler.resume(lane, &self.ios[io as usize].cost) {
                waiting.pop_front();
                refused = 0;
                let is_empty = waiting.is_empty();
                self.begin(number, io);
                if !is_empty && self.rounds && self.has_batch(number, lane) {
                    self.reactors[number].run_queue.push_front(queue);
                    continue;
                }
                self.end_batch(number, lane);
                if !is_empty {
                    self.reactors[number].run_queue.push_back(queue);
                }
            } else {
                refused += 1;
                let io = &mut self.ios[io as usize];
                io.waits_for_processor = false;
                if !std::mem::replace(&mut io.refused, true) {
                    self.measured.had[io.tenant as usize].throttled += 1;
                }
                reactor.run_queue.push_back(queue);
                reactor.stuck = !first && !had_enough && refused >= reactor.run_queue.len();
            }
        }
    }
}
