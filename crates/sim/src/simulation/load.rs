//! Tenants' requests, and their way to a reactor.

use super::{Io, SimEvent, Simulation};
use forebay_qos::cost::{Operation, Transport};
use forebay_qos::resources::Resource;

impl Simulation {
    /// Schedules a tenant's next I/O by its rate and pulse.
    pub(super) fn ask_later(&mut self, tenant: u32) {
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
        self.at(time, SimEvent::Ask(tenant));
    }

    pub(super) fn ask(&mut self, tenant: u32) {
        let at = tenant as usize;
        self.asks[at] = false;
        let (first, second, third) = (self.draw(), self.draw(), self.draw());
        let load = &self.guests[at].load;
        if let Some(rate) = load.rate {
            self.due[at] = self.due[at].max(self.now) + (1e9 / rate) as u64;
        }
        let len = load.sizes[(first * load.sizes.len() as f64) as usize];
        let read = second * 100.0 < f64::from(load.reads);
        // Its queue, in proportion to its VM's processors, or in turns.
        let mut queue = 0;
        let mut sum = 0.0;
        let guest = &self.guests[at];
        if let Some(ns) = guest.moves_ns {
            queue = (self.now / ns) as usize % guest.queues.len();
        }
        let parts = guest.queues.iter().enumerate();
        let parts = parts.filter(|_| guest.moves_ns.is_none());
        for (number, part) in parts {
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
            waits_for_processor: true,
            asked: self.now,
            ready: 0,
            cost: self.costs.of(Transport::Tcp, operation, charged),
            cpu: self.costs.of(Transport::Tcp, operation, len)[Resource::Cpu],
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
        self.in_lane[lane as usize] += 1;
        self.come(number);
        self.ask_later(tenant);
    }

    pub(super) fn come(&mut self, io: u32) {
        let lane = self.ios[io as usize].lane as usize;
        let number = self.homes[lane];
        if self.model.turn_ns == 0 {
            self.arrive(number, io);
            self.poll(number);
            return;
        }
        self.reactors[number].came.push(io);
        self.poll(number);
    }
}
