//! A volume's reservations in the core: what a host that lost its access still has in hand.
//!
//! **Design.** A host that takes others' access away must not see their writes land after its answer. So when access
//! has changed, what of them isn't at a device ends, and the answer waits until the rest has ended ([`Drain`]): the
//! commands in the slab, by place and generation; and every span of the volume that there is then
//! ([`crate::recovery`]), because a span may be anybody's. That includes what a dead engine may still
//! have at a device, until its fence has passed.
//!
//! **Not here:** the rules (`nvme::reservation`), who has lost what, and the answer (`tcp::reserve`).

use super::Core;
use crate::io::command::{IoOp, Owner, Stage};
use crate::lane::LaneIndex;
use forebay_nvme::Status;
use forebay_xlate::VolumeId;

/// What has to end.
#[derive(Debug)]
pub struct Drain {
    volume: VolumeId,
    /// Commands, by place and generation.
    commands: Vec<(u32, u32)>,
    /// Spans numbered below this.
    spans_before: u64,
}

impl Drain {
    /// Ends the commands of a volume that `which` chooses: with `status` and now what has nothing at a device. Says
    /// what is to be waited for until nothing of them can change anything.
    pub fn begin(
        core: &mut Core,
        volume: VolumeId,
        status: Status,
        which: impl Fn(&Owner, &IoOp) -> bool,
    ) -> Self {
        core.settle_orphans();
        let lanes = core.lanes.iter();
        let lanes: Vec<LaneIndex> = (lanes.filter(|lane| lane.volume.id() == volume))
            .map(|lane| lane.index)
            .collect();
        let chosen =
            |owner: &Owner, op: &IoOp, lane: LaneIndex| lanes.contains(&lane) && which(owner, op);
        core.end_waiting(status, chosen);
        Self {
            volume,
            commands: (0..)
                .zip(core.slab.iter())
                .filter(|(_, io)| io.stage != Stage::Free && chosen(&io.owner, &io.op, io.lane))
                .map(|(index, io)| (index, io.generation))
                .collect(),
            spans_before: core.carried.next_number(),
        }
    }

    /// Whether all of it has ended.
    pub fn is_over(&mut self, core: &Core) -> bool {
        self.commands.retain(|(index, generation)| {
            let io = &core.slab[*index as usize];
            io.stage != Stage::Free && io.generation == *generation
        });
        self.commands.is_empty() && !core.carried.has(self.volume, self.spans_before)
    }
}
