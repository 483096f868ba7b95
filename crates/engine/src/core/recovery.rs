//! Makes commands wait for older operations of a dead engine or a closed connection, to keep writes
//! in order. While spans exist, each command passes here at start and end. **Not here:** spans
//! ([`crate::recovery`]).

use super::Core;
use crate::io::command::{Io, IoOp, Stage, Token};
use forebay_nvme::Status;
use forebay_xlate::{DeviceIndex, kill_point};

impl Core {
    /// A device's fence has passed.
    pub(crate) fn fenced(&mut self, device: DeviceIndex) {
        self.jobs.poll_again();
        self.recovered.fence(device);
    }

    /// Ends closed connections' commands that are not at a device.
    #[cold]
    pub(super) fn end_orphans(&mut self) {
        let Some(closed) = self.recovered.take_closed() else {
            return;
        };
        for io in self.slab.iter_mut() {
            if io.stage != Stage::Free && closed.has(io.record) {
                // The command submits nothing more.
                io.deadline_ns = 0;
                if io.status == Status::SUCCESS {
                    io.status = Status::COMMAND_INTERRUPTED;
                }
            }
        }
        self.end_late();
        self.recovered
            .add_spans_of_closed(closed, &self.slab, &self.lanes);
    }

    #[cold]
    pub(super) fn begin_during_recovery(&mut self, token: Token) {
        let index = token.index() as u32;
        self.blame(Some(index));
        let io = &mut self.slab[token.index()];
        if self.recovered.assign_spans(index, io, &self.lanes) {
            io.deadline_ns = u64::MAX;
            kill_point!("over.waiting");
        } else if matches!(io.op, IoOp::CompareAndWrite { .. }) {
            self.recovered.exclude(index, &self.slab, &self.lanes);
        }
        self.go_on(token);
    }

    /// Begins a command, or makes it wait for older ones.
    fn go_on(&mut self, token: Token) {
        let io = &mut self.slab[token.index()];
        let index = token.index() as u32;
        if io.status == Status::SUCCESS && self.recovered.must_wait(index, io, &self.lanes) {
            (self.waits).push(token, Stage::RecoveryWait, &mut self.slab, &self.clock);
            return;
        }
        if io.deadline_ns == u64::MAX {
            io.deadline_ns = self.clock.owner_deadline_ns();
        }
        self.dispatch(token);
    }

    /// Continues waiting commands at the end of a turn.
    #[cold]
    pub(super) fn advance_recovered(&mut self) {
        self.end_orphans();
        if self.recovered.begin_check() {
            let may_go_on = |core: &Self, io: &Io| core.recovered.may_go_on(io, &core.lanes);
            self.resume_chosen(may_go_on, Self::go_on);
            self.recovered.end_check();
        }
        self.recovered.end_turn(self.fused.any());
    }
}
