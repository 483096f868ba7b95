//! Ends slices that other reactors carried out, and carries out theirs. **Not here:** the choice of
//! slices and helpers ([`crate::offload`]).

use super::Core;
use crate::offload::{RemoteAnswer, RemoteResult};
use forebay_xlate::boundary::message::Spread;

impl Core {
    /// Sets how queues are spread; offloaded slices come back.
    pub(crate) fn set_spread(&mut self, spread: Spread) {
        let processors = self.offload.set_spread(spread, self.clock.now_ns);
        self.qos.set_processors(processors);
    }

    #[inline(never)]
    pub(super) fn take_answers(&mut self) -> bool {
        let mut any = false;
        for from in 0..self.offload.others() {
            while let Some(RemoteAnswer { slice, ended }) = self.offload.next_answer(from) {
                any = true;
                let index = slice as usize;
                let slice = self.slices.get_mut(index);
                let Some(slice) = slice.filter(|slice| slice.remote) else {
                    continue;
                };
                slice.remote = false;
                self.offload.out -= 1;
                let io = &self.slab[slice.io as usize];
                self.records.blame(io.record.blame());
                if let Some(lane) = self.lanes.get_mut(io.lane) {
                    lane.remote -= 1;
                }
                let result = match ended {
                    RemoteResult::Done => Some(Ok(())),
                    RemoteResult::Failed(errno) => Some(Err(errno)),
                    RemoteResult::NotHere | RemoteResult::NotNow => {
                        self.slices.queue_again(index, &mut self.devices)
                    }
                };
                if let Some(result) = result {
                    self.slice_ended(index, result);
                }
            }
        }
        any
    }

    /// Carries out remote operations, fewer if `busy`; true if any.
    pub(crate) fn carry_out(&mut self, busy: bool) -> bool {
        let now = (self.slices.in_flight(), self.clock.now_ns);
        let record = self.records.reactor;
        self.offload.has_peers()
            && (self.offload).carry_out(busy, &self.qos, &mut self.devices, record, now)
    }
}
