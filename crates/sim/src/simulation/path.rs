//! The path of an admitted I/O: processor, link, device, backend.

use super::{Io, SimEvent, SimSpread, Simulation};
use forebay_qos::resources::Resource;

impl Simulation {
    pub(super) fn cpu_ns(&self, io: u32) -> u64 {
        let io = &self.ios[io as usize];
        let more = match self.spread {
            SimSpread::Stealing => 1.0 + self.model.steal_cost,
            SimSpread::OneToOne | SimSpread::OneToN => 1.0,
        };
        (f64::from(io.cpu) * self.model.cpu_truth * more) as u64
    }

    /// The processor takes the next I/O.
    pub(super) fn serve(&mut self, number: usize) {
        let mut from = number;
        if self.model.turn_ns == 0 && self.reactors[number].stand() == 0 {
            self.take_remote_operations(number);
        }
        if self.reactors[number].stand() == 0 {
            if self.spread != SimSpread::Stealing {
                self.poll(number);
                return;
            }
            let longest = (0..self.reactors.len()).max_by_key(|at| self.reactors[*at].stand());
            from = longest.unwrap_or(number);
        }
        let reactor = &mut self.reactors[from];
        let next = reactor.first.pop_front();
        let Some(io) = next.or_else(|| reactor.ready.pop_front()) else {
            return;
        };
        let plain = self.cpu_ns(io);
        self.reactors[from].ahead_ns = self.reactors[from].ahead_ns.saturating_sub(plain);
        // An I/O within its budget and first in its lane waited only for the processor, in its lane
        // too. For others this is known only if admitted I/Os begin at once.
        let Io {
            waits_for_processor,
            asked,
            ready,
            reactor: home,
            ..
        } = self.ios[io as usize];
        let scheduler = &mut self.reactors[home as usize].scheduler;
        if self.model.turn_ns > 0 {
            // The work left at a window's end tells.
        } else if waits_for_processor {
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
        if home as usize == number {
            reactor.begun_ns = Some(self.now);
        }
        reactor.busy = true;
        reactor.busy_ns += cpu;
        self.at(self.now + cpu, SimEvent::Cpu(number as u32, io));
    }

    pub(super) fn served(&mut self, number: usize, io: u32) {
        self.reactors[number].busy = false;
        let Io { read, len, .. } = self.ios[io as usize];
        let bytes = if read { 0 } else { len } + self.model.header;
        let sent = self.recover(io, 0, bytes);
        let sent = self.use_device(io, sent);
        let (least, mean) = if read {
            self.model.backend_read_ns
        } else {
            self.model.backend_write_ns
        };
        let delay = least - mean * (1.0 - self.draw()).ln();
        self.at(sent + delay as u64, SimEvent::Backend(io));
        let home = self.ios[io as usize].reactor as usize;
        let goes_on = self.model.ahead_ns != u64::MAX && self.model.turn_ns == 0;
        if self.spread == SimSpread::OneToN && home != number {
            self.reactors[home].offloaded[number] -= 1;
            if goes_on {
                self.resume(home, false);
            }
        }
        if goes_on {
            self.resume(number, false);
        }
        if !self.reactors[number].busy {
            self.serve(number);
        }
    }

    /// A link carries I/Os in sequence. Returns the end.
    fn recover(&mut self, io: u32, link: usize, bytes: u32) -> u64 {
        let begins = self.links[link].max(self.now);
        if self.model.links_known {
            let resource = [Resource::LinkIn, Resource::LinkOut][link];
            let number = self.ios[io as usize].reactor as usize;
            let scheduler = &mut self.reactors[number].scheduler;
            scheduler.observe(resource, begins - self.now, 1);
        }
        let time = f64::from(bytes) * 1e9 / self.model.link;
        self.links[link] = begins + time as u64;
        self.links[link]
    }

    /// The device serves I/Os in sequence. Returns the end of this one, which arrives at `at`.
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

    pub(super) fn answered(&mut self, io: u32) {
        let Io { read, len, .. } = self.ios[io as usize];
        let end = if read {
            self.recover(io, 1, len + self.model.header)
        } else {
            self.now
        };
        self.at(end, SimEvent::End(io));
    }

    pub(super) fn ended(&mut self, io: u32) {
        let Io {
            tenant, len, asked, ..
        } = self.ios[io as usize];
        let had = &mut self.measured.had[tenant as usize];
        if asked >= self.measured.from_ns {
            had.latency.add(self.now - asked);
        }
        had.bytes += u64::from(len);
        if self.measured.by_window {
            let window = ((self.now - self.measured.from_ns) / self.window_ns) as usize;
            had.by_window.resize(had.by_window.len().max(window + 1), 0);
            had.by_window[window] += 1;
        }
        self.under_way[tenant as usize] -= 1;
        self.free.push(io);
        self.ask_later(tenant);
    }
}
