//! What a lane may begin of a turn.
//!
//! **Design.** Of a turn, each lane has a *lump* of processor time, by what its commands cost (while nobody is above their base: a new one
//! when the last is used up, but not in the same turn); a longer one while it is [`Alone`]; those above their base share one lump
//! among them. Who of these finds nothing left stands in a *line*, and the next turns are theirs in that order, whichever frontend
//! they come by. So a turn is short, and still a lane's commands go in batches.
//!
//! **Not here:** who is in the line first, and what a turn begins with ([`super`]).

use super::{Admission, BURSTS, FREE};
use forebay_burst::cost::{Frontend, Operation};
use forebay_burst::params::{Params, Policy};
use forebay_burst::units::{Resource, Units};
use forebay_device::{Op, OpKind};

/// The least of a lump that is set aside for a lane above its base. No lump is less (`Params`).
pub(super) const LEAST_LUMP_NS: i32 = 500;

/// Whether a lane is the only one that comes, and has been for a while: who comes now and then, every few windows, is to find turns
/// as short as they are among many.
#[derive(Debug)]
pub(super) struct Alone {
    /// Who came first, since there were others.
    first: usize,
    others: bool,
    /// So many windows ended without others.
    windows: u32,
}

impl Default for Alone {
    fn default() -> Self {
        Self {
            first: usize::MAX,
            others: false,
            windows: 0,
        }
    }
}

impl Alone {
    /// A lane asks.
    pub(super) fn came(&mut self, at: usize) {
        if self.first == usize::MAX {
            self.first = at;
        }
        self.others |= self.first != at;
    }

    /// A window ends.
    pub(super) fn turn(&mut self) {
        *self = match self.others {
            true => Self::default(),
            false => Self {
                windows: self.windows.saturating_add(1),
                ..*self
            },
        };
    }

    fn is(&self, at: usize, params: &Params) -> bool {
        !self.others && self.first == at && self.windows >= params.alone_windows
    }
}

impl Admission {
    /// Whether a lane may begin anything in this turn.
    pub(super) fn has_part(&mut self, at: usize) -> bool {
        let (gate, left) = (&self.gates[at], self.scheduler.part_ns(at));
        if gate.turn != self.turn && (self.contended || left <= 0) {
            self.begin_turn_of(at);
        }
        let has = self.scheduler.part_ns(at) > 0;
        if !has {
            self.has_enough(at);
        }
        has
    }

    pub(super) fn spend(&mut self, at: usize, cost: &Units) {
        let left = self.scheduler.part_ns(at) - cost[Resource::Cpu];
        self.scheduler.set_part_ns(at, left);
    }

    /// A lane asks for the first time in this turn.
    fn begin_turn_of(&mut self, at: usize) {
        let gate = &mut self.gates[at];
        gate.turn = self.turn;
        gate.short = self.scheduler.part_ns(at) <= 0;
        let burst = self.contended
            && !self.alone.is(at, self.scheduler.params())
            && gate.closer & FREE == 0
            && self.scheduler.params().policy == Policy::Burst
            && !self.scheduler.is_within_base(at);
        let most = self.whole_lump_ns();
        let gate = &mut self.gates[at];
        if !burst {
            self.begin_calm_turn_of(at);
            return;
        }
        if gate.closer & BURSTS != 0 && gate.had > 0 {
            let left = self.scheduler.part_ns(at);
            let used = gate.had - left;
            gate.lump = match left > 0 {
                true => used.clamp(LEAST_LUMP_NS, most),
                false => used.saturating_mul(2).clamp(LEAST_LUMP_NS, most),
            };
        }
        gate.closer |= BURSTS;
        let is_mine = gate.granted == self.turn;
        if !is_mine && self.lump_ns > 0 && self.line.is_empty() {
            self.lump_ns -= gate.lump;
            gate.had = gate.lump;
        } else {
            gate.had = if is_mine { gate.lump } else { 0 };
        }
        self.scheduler.set_part_ns(at, gate.had);
    }

    /// The same while there is nothing to contend for, or of one that is within its base.
    pub(super) fn begin_calm_turn_of(&mut self, at: usize) {
        let gate = &mut self.gates[at];
        gate.turn = self.turn;
        gate.closer &= !BURSTS;
        self.calm = true;
        let params = self.scheduler.params();
        let lump_ns = match params.policy {
            Policy::Burst if self.alone.is(at, params) => self.by_costs(params.calm_lump_ns),
            // A turn is a round.
            Policy::Wild => return self.scheduler.begin_batch(at),
            _ => self.whole_lump_ns(),
        };
        self.scheduler.set_part_ns(at, lump_ns);
    }

    /// What a lane has of a turn, and so have all above their base together, and all other reactors.
    pub(in crate::core) fn whole_lump_ns(&self) -> i32 {
        let params = self.scheduler.params();
        match params.policy {
            Policy::Burst => self.by_costs(params.lump_ns),
            Policy::Wild => params.batch_ns as i32,
            Policy::Base => i32::MAX,
        }
    }

    /// So much processor time, by costs as they are calibrated: where those are too much, a turn would be too short to be worth it. It is never
    /// less: what makes the processor dear may be anything that keeps a line long, and shorter turns would do less still.
    fn by_costs(&self, ns: u32) -> i32 {
        let correction = self.scheduler.corrections()[Resource::Cpu as usize];
        (ns as f32 / correction.min(1.0)) as i32
    }

    /// So many processors carry out what is charged here.
    pub(in crate::core) fn set_processors(&mut self, processors: f32) {
        self.scheduler.set_processors(processors);
    }

    /// What another reactor's operation takes of the processor here: at most what it costs without a network.
    pub(in crate::core) fn errand_ns(&self, op: &Op) -> i32 {
        let operation = match op.kind() {
            OpKind::Read => Operation::Read,
            OpKind::Write => Operation::Write,
            OpKind::Flush | OpKind::WriteZeroes | OpKind::Punch => Operation::Other,
        };
        let len_bytes = op.len_bytes().min(u32::MAX.into()) as u32;
        self.costs.of(Frontend::Pcie, operation, len_bytes)[Resource::Cpu]
    }

    /// A lane has had its part of this turn.
    #[cold]
    pub(super) fn has_enough(&mut self, at: usize) {
        self.stops = true;
        self.again = true;
        self.scheduler.shut(at);
        let gate = &mut self.gates[at];
        if gate.closer & BURSTS != 0 && !gate.in_line {
            gate.in_line = true;
            self.line.push_back(at as u32);
        }
    }
}
