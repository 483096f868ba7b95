//! What a turn begins with, and what a window's end gives out anew.
//!
//! **Design.** While nobody waits and nobody is above their base, a turn's begin is one comparison. **Not here:** what a lane may
//! begin of a turn ([`super::parts`]), what is given to whom (`forebay_burst`).

use super::Admission;
use super::records::A_ROUND;
use forebay_burst::units::Resource;
use forebay_xlate::boundary::region::{ReactorRecord, Region, bump};

impl Admission {
    /// A turn begins.
    #[inline]
    pub(in crate::core::admit) fn begin_turn(
        &mut self,
        now_ns: u64,
        record: &ReactorRecord,
        region: &Region,
    ) {
        self.turn = self.turn.wrapping_add(1);
        self.delays.turn(now_ns);
        // What stops somebody says so; without, all is as it was.
        if now_ns >= self.ends_ns || self.stops || self.contended {
            self.begin_contended_turn(now_ns, record, region);
        }
    }

    #[inline(never)]
    fn begin_contended_turn(&mut self, now_ns: u64, record: &ReactorRecord, region: &Region) {
        let window_ends = now_ns >= self.ends_ns;
        if window_ends {
            self.end_window(now_ns, record, region);
        }
        // A turn of those above their base alone is as good as an idle one.
        if !std::mem::take(&mut self.calm) {
            self.give_idle();
        }
        self.stops = std::mem::take(&mut self.again) || self.waits();
        self.contended = self.stops || self.scheduler.somebody_bursts();
        if self.contended || window_ends {
            for lane in self.opened.drain(..) {
                self.gates[lane as usize].opened = false;
                self.scheduler.shut(lane as usize);
            }
        }
        self.lump_ns = self.whole_lump_ns();
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
    pub(in crate::core::admit) fn is_idle(&mut self, region: &Region) {
        if std::mem::take(&mut self.stale) {
            self.record_tenants(region);
        }
        self.give_idle();
    }

    /// Nobody within their base is kept waiting: who is only short of processor time has a lump more.
    fn give_idle(&mut self) {
        let lump_ns = self.whole_lump_ns();
        if !self.refused.is_empty() && self.scheduler.is_idle(lump_ns) {
            self.ready.extend(self.refused.drain(..));
        }
    }

    /// Whether any lane waits.
    #[inline]
    pub(in crate::core::admit) fn waits(&self) -> bool {
        !self.ready.is_empty() || !self.refused.is_empty() || !self.line.is_empty()
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
        // What was given and is still in line: more than there is was given.
        let left = |lane: &u32| self.scheduler.processor_left_ns(*lane as usize);
        let backlog_ns: u64 = self.line.iter().map(left).sum();
        let weight = u64::from(self.scheduler.params().backlog_weight);
        (self.scheduler).observe(Resource::Cpu, weight * backlog_ns, 1);
        self.delays.tell(&mut self.scheduler, now_ns);
        let was_reckoned_with = self.scheduler.is_reckoned_with();
        self.scheduler.wake(passed, slept);
        self.alone.turn();
        let rests = was_reckoned_with && !self.scheduler.is_reckoned_with();
        self.stale |= rests || passed > A_ROUND;
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
        self.record_some(record, region);
        bump(&record.windows, passed);
        bump(
            &record.scheduling_ns,
            crate::core::monotonic_ns().saturating_sub(now_ns),
        );
    }
}
