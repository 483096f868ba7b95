//! Commands wait for what a dead engine, or a connection that closed, may still have at a device.
//!
//! **Purpose.** Keeps the order of writes across deaths and reconnects.
//! **Design.** While anything is carried, each command that begins or ends passes here; whoever waits is looked for at the end
//! of a turn. **Not here:** what is carried, and what overlaps ([`crate::recovery`]).

use super::Core;
use crate::io::command::{Io, IoOp, Stage, Token};
use forebay_nvme::Status;
use forebay_xlate::{DeviceIndex, kill_point};

impl Core {
    /// Nothing of an earlier engine is at this device any more.
    pub fn fenced(&mut self, device: DeviceIndex) {
        self.jobs.look_again();
        self.carried.fence(device);
    }

    /// Ends what closed connections and machines have in hand, as far as it isn't at a device.
    #[cold]
    pub(super) fn settle_orphans(&mut self) {
        let Some(closed) = self.carried.take_closed() else {
            return;
        };
        for io in self.slab.iter_mut() {
            if io.stage != Stage::Free && closed.has(io.record) {
                // Nothing more of it goes to a device; what waits, waits no longer.
                io.deadline_ns = 0;
                if io.status == Status::SUCCESS {
                    io.status = Status::COMMAND_INTERRUPTED;
                }
            }
        }
        self.end_late();
        self.carried.leave(closed, &self.slab, &self.lanes);
    }

    /// Begins a command while something is carried.
    #[cold]
    pub(super) fn begin_beside_carried(&mut self, token: Token) {
        let index = token.index() as u32;
        self.blame(Some(index));
        let io = &mut self.slab[token.index()];
        if self.carried.adopt(index, io, &self.lanes) {
            io.deadline_ns = u64::MAX;
            kill_point!("over.waiting");
        } else if matches!(io.op, IoOp::CompareAndWrite { .. }) {
            self.carried.exclude(index, &self.slab, &self.lanes);
        }
        self.go_on(token);
    }

    /// Begins a command, or has it wait for what is older.
    fn go_on(&mut self, token: Token) {
        let io = &mut self.slab[token.index()];
        let index = token.index() as u32;
        if io.status == Status::SUCCESS && self.carried.must_wait(index, io, &self.lanes) {
            (self.waits).push(token, Stage::CarriedWait, &mut self.slab, &self.clock);
            return;
        }
        if io.deadline_ns == u64::MAX {
            // Its time begins.
            io.deadline_ns = self.clock.owner_deadline_ns();
        }
        self.dispatch(token);
    }

    /// The end of a turn: whoever has nothing older before it any more goes on.
    #[cold]
    pub(super) fn advance_carried(&mut self) {
        self.settle_orphans();
        if self.carried.begin_look() {
            let may_go_on = |core: &Self, io: &Io| core.carried.may_go_on(io, &core.lanes);
            self.take_up(may_go_on, Self::go_on);
            self.carried.end_look();
        }
        self.carried.end_turn(self.fused.any());
    }
}
