//! A volume's reservations in the core: what a host that lost its access still has in hand.
//!
//! **Design.** A host that takes others' access away must not see their writes land after its answer. So when access
//! has changed, what of them isn't at a device ends, and the answer waits until the rest has ended ([`Drain`]): the
//! commands in the slab, by place and generation; and every span of the volume that there is then
//! ([`super::carried`]), because a span may be anybody's. That includes what a dead engine may still
//! have at a device, until its fence has passed.
//!
//! **Not here:** the rules (`nvme::reservation`), who has lost what, and the answer (`tcp::reserve`).

use super::io::{IoOp, Owner, Stage};
use super::{Core, OWNER_WAIT_LIMIT_NS};
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

impl Core {
    /// Ends the commands of a volume that `which` chooses: with `status` and now what has nothing at a device. Says
    /// what is to be waited for until nothing of them can change anything.
    pub fn drain(
        &mut self,
        volume: VolumeId,
        status: Status,
        which: impl Fn(&Owner, &IoOp) -> bool,
    ) -> Drain {
        self.settle_orphans();
        let lanes = self.lanes.iter().flatten();
        let lanes: Vec<LaneIndex> = (lanes.filter(|lane| lane.volume.id() == volume))
            .map(|lane| lane.index)
            .collect();
        let chosen =
            |owner: &Owner, op: &IoOp, lane: LaneIndex| lanes.contains(&lane) && which(owner, op);
        self.end_waiting(status, chosen);
        Drain {
            volume,
            commands: (0..)
                .zip(&self.ios)
                .filter(|(_, io)| io.stage != Stage::Free && chosen(&io.owner, &io.op, io.lane))
                .map(|(index, io)| (index, io.generation))
                .collect(),
            spans_before: self.carried.next_number(),
        }
    }

    /// Whether all of it has ended.
    pub fn is_drained(&self, drain: &mut Drain) -> bool {
        drain.commands.retain(|(index, generation)| {
            let io = &self.ios[*index as usize];
            io.stage != Stage::Free && io.generation == *generation
        });
        drain.commands.is_empty() && !self.carried.has(drain.volume, drain.spans_before)
    }

    /// Whether the daemon was not heard to answer by then.
    pub fn owner_is_late(&self, deadline_ns: u64) -> bool {
        deadline_ns <= self.heard_ns.min(self.now_ns)
    }

    /// When a command that asks the daemon now has waited long enough.
    pub fn owner_deadline_ns(&self) -> u64 {
        self.now_ns + OWNER_WAIT_LIMIT_NS
    }
}
