//! Begins waiting commands when they are admitted. **Not here:** which commands may begin
//! ([`crate::qos`]).

#[cfg(test)]
mod tests;

use super::{Core, OWNER_WAIT_LIMIT_NS};
use crate::io::command::Token;
use crate::lane::{LaneIndex, Share};
use crate::qos::{Admission, now_at_devices};
use forebay_xlate::VolumeId;

impl Core {
    /// Replaces admission; `None` admits everything.
    pub(crate) fn set_admission(&mut self, admission: Option<Box<Admission>>) {
        let now_ns = self.clock.now_ns;
        let old = std::mem::replace(&mut self.qos.admission, admission);
        if let Some(admission) = &mut self.qos.admission {
            for lane in self.lanes.iter() {
                admission.attach(lane, &self.slab);
            }
            if let Some(old) = &old {
                admission.go_on_counting(old, now_ns);
            }
        }
        self.qos.note_devices(None, &self.devices);
        let Some(mut old) = old else {
            return;
        };
        let mut waited = std::mem::take(&mut self.waits.spare);
        old.give_up(&mut self.slab, &mut waited);
        for index in waited.drain(..) {
            // Those that still wait keep their order.
            let token = Token::of(index);
            let io = &mut self.slab[token.index()];
            if self.qos.admit_during_recovery(io, &self.recovered) {
                self.qos.throttled.count(io, &self.lanes, false);
                old.count_over(io, &self.lanes, now_ns);
                now_at_devices(io, now_ns);
                io.deadline_ns = now_ns + OWNER_WAIT_LIMIT_NS;
                self.blame(Some(index));
                self.begin_admitted(token);
            } else if let Some(admission) = &mut self.qos.admission {
                admission.push(token.entrust(), &mut self.slab, now_ns);
            }
        }
        self.blame(None);
        self.waits.spare = waited;
        old.record_all(self.records.reactor, &self.region);
    }

    /// Assigns a volume's tenant.
    pub(crate) fn set_share(&mut self, volume: VolumeId, share: Option<Share>) {
        for lane in self.lanes.of_volume(volume) {
            lane.share = share;
            self.qos.attach(lane, &self.slab);
        }
    }

    /// Begins admitted commands, at most a lane's quantum. Returns their number.
    #[inline]
    pub(crate) fn begin_throttled(&mut self) -> usize {
        let mut begun = 0;
        if !self.qos.is_any_ready() {
            return begun;
        }
        let mut of_lane = None;
        while let Some(admission) = &mut self.qos.admission
            && let Some(index) = admission.next(of_lane, &mut self.slab, self.clock.now_ns)
        {
            begun += 1;
            of_lane = Some(self.slab[index as usize].lane);
            self.begin_waited(index);
        }
        self.blame(None);
        begun
    }

    fn begin_waited(&mut self, index: u32) {
        let now_ns = self.clock.now_ns;
        let io = &mut self.slab[index as usize];
        self.qos.waited(io, &self.lanes, now_ns);
        io.deadline_ns = now_ns + OWNER_WAIT_LIMIT_NS;
        self.blame(Some(index));
        self.begin_admitted(Token::of(index));
    }

    /// Begins a lane's commands as debt, until its tenant owes a second's worth.
    pub(crate) fn begin_owing(&mut self, lane: LaneIndex) {
        if !self.qos.is_throttled(lane) {
            return;
        }
        while let Some(admission) = &mut self.qos.admission
            && let Some(index) = admission.take_owing(lane, &mut self.slab)
        {
            self.begin_waited(index);
        }
        self.blame(None);
    }
}
