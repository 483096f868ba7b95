//! Waits for the commands of hosts that lost access by a reservation.
//!
//! **Design.** None of their writes may land after the answer to the command that removed access.
//! So commands not at a device end, and the answer waits for the rest ([`Drain`]). It also waits
//! for all present spans of the volume ([`crate::recovery`]), which may be anyone's, even a dead
//! engine's until its fence. **Not here:** the rules (`nvme::reservation`), and the answer
//! (`frontend::nvme_tcp::reserve`).

use super::Core;
use crate::io::command::{IoOp, Issuer, Stage};
use crate::lane::LaneIndex;
use forebay_nvme::Status;
use forebay_xlate::VolumeId;

/// Commands and spans that must end.
#[derive(Debug)]
pub(crate) struct Drain {
    volume: VolumeId,
    /// Commands, by place and generation.
    commands: Vec<(u32, u32)>,
    spans_before: u64,
}

impl Drain {
    /// Ends the selected commands that are not at a device. Returns the wait for the others.
    pub(crate) fn begin(
        core: &mut Core,
        volume: VolumeId,
        status: Status,
        which: impl Fn(&Issuer, &IoOp) -> bool,
    ) -> Self {
        core.end_orphans();
        let lanes = core.lanes.iter();
        let lanes: Vec<LaneIndex> = (lanes.filter(|lane| lane.volume.id() == volume))
            .map(|lane| lane.index)
            .collect();
        let chosen =
            |owner: &Issuer, op: &IoOp, lane: LaneIndex| lanes.contains(&lane) && which(owner, op);
        core.end_waiting(status, chosen);
        Self {
            volume,
            commands: (0..)
                .zip(core.slab.iter())
                .filter(|(_, io)| io.stage != Stage::Free && chosen(&io.owner, &io.op, io.lane))
                .map(|(index, io)| (index, io.generation))
                .collect(),
            spans_before: core.recovered.next_number(),
        }
    }

    /// Whether all have ended.
    pub(crate) fn is_over(&mut self, core: &Core) -> bool {
        self.commands.retain(|(index, generation)| {
            let io = &core.slab[*index as usize];
            io.stage != Stage::Free && io.generation == *generation
        });
        self.commands.is_empty() && !core.recovered.has(self.volume, self.spans_before)
    }
}
