//! Starts and ends Compare and compare-and-write.
//!
//! **Design.** A comparing command first reads ([`crate::io::fused`]); while any is in progress,
//! each command's end is checked here. A passed command is recorded before its write goes to a
//! device. **Not here:** pairs and answers (`nvme_tcp::fused`).

use super::Core;
use crate::io::command::{IoOp, NewIo, Token};
use crate::io::fused::{Comparing, Expected, Judged, PIECE_BYTES, SMALL_PIECE_BYTES};
use forebay_xlate::kill_point;

impl Core {
    /// Begins a Compare (its buffer is expected) or a compare-and-write (writes its buffer if the
    /// block is as `expected`). A Write has passed its compare in a dead engine.
    ///
    /// # Errors
    /// The command, if there is no room now.
    pub(crate) fn start_comparing(
        &mut self,
        mut new: NewIo,
        expected: Expected<'_>,
    ) -> Result<(), NewIo> {
        self.end_orphans();
        let served = self.lanes.get(new.lane).is_some_and(|lane| !lane.removed);
        if !served || !self.may_start(new.lane) {
            return self.start(new);
        }
        // From here on it is not refused: its own scratch buffer would count against it.
        let scratch = match new.op {
            IoOp::Compare { len_bytes, .. } => (self.staging.allocate(len_bytes.min(PIECE_BYTES)))
                .or_else(|| self.staging.allocate(len_bytes.min(SMALL_PIECE_BYTES))),
            // Space for read and expected data.
            IoOp::CompareAndWrite { len_bytes, .. }
                if expected.bytes.len() == len_bytes as usize =>
            {
                self.staging.allocate(2 * len_bytes)
            }
            IoOp::Write { .. } => new.buffer.take(),
            _ => return self.start(new),
        };
        let Some(mut scratch) = scratch else {
            return Err(new);
        };
        let Some(index) = self.slab.allocate() else {
            self.staging.release(scratch);
            return Err(new);
        };
        if let IoOp::CompareAndWrite { len_bytes, .. } = new.op {
            scratch.as_mut_slice()[len_bytes as usize..].copy_from_slice(expected.bytes);
        }
        let comparing = Comparing {
            from_host: new.buffer.replace(scratch),
            done_bytes: 0,
            flushes: expected.durable,
            passed: matches!(new.op, IoOp::Write { .. }),
        };
        self.fused.begin(index, comparing);
        self.recovered.compares();
        self.begin(new, index, 0);
        Ok(())
    }

    /// Checks a command that would end; `None` if it must compare or write more.
    #[cold]
    pub(super) fn compared(&mut self, token: Token) -> Option<Token> {
        let i = token.index();
        let io = &mut self.slab[i];
        match self.fused.judge(i, io, &mut self.staging) {
            Judged::Ended => {
                self.recovered.command_ended(i as u32, io, &self.lanes);
                return Some(token);
            }
            Judged::Written => {
                if let Some(volume) = self.lanes.volume_of(io) {
                    self.recovered.hold(volume, i as u32, io.record);
                }
                return Some(token);
            }
            Judged::More => self.dispatch(token),
            Judged::Passed => {
                kill_point!("fused.compared");
                self.records.passes(io.record);
                kill_point!("fused.passed");
                self.dispatch(token);
                kill_point!("fused.put");
            }
        }
        None
    }
}
