//! Commands that wait for the owner's answer about an extent.
//!
//! **Design.** When a thin volume fills, every write parks and grants come by the hundreds. So a
//! hash table finds commands by extent; its chains link the commands, without allocation. The owner
//! is asked once per extent and right. After [`crate::io::clock::OWNER_WAIT_LIMIT_NS`] a command
//! ends with Command Interrupted, which the host may retry. **Not here:** the effect of answers
//! ([`forebay_xlate::reactor_side`]).

use crate::io::command::{Io, Stage, Token};
use crate::io::lanes::Lanes;
use crate::io::slab::MAX_IOS;
use crate::io::slab::Slab;
use crate::upcall::Upcall;
use forebay_xlate::boundary::region::{TimesOf, bump};
use forebay_xlate::reactor_side::Parked;
use forebay_xlate::{ExtentRange, VolumeId};
use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;

const HOMES: usize = 4096;
/// The end of a chain.
pub(crate) const NONE: u32 = u32::MAX;

#[derive(Debug)]
pub(crate) struct ParkedTable {
    /// The newest of each chain; older ones follow by [`crate::io::command::Io::link`].
    homes: Box<[u32]>,
    count: usize,
    /// Start of each command's wait.
    since_ns: Box<[u64]>,
}

impl ParkedTable {
    pub(crate) fn new() -> Self {
        Self {
            homes: vec![NONE; HOMES].into(),
            since_ns: vec![0; MAX_IOS].into(),
            count: 0,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Asks the owner unless another command has.
    pub(crate) fn park(
        &mut self,
        token: Token,
        parked: Parked,
        slab: &mut Slab,
        lanes: &Lanes,
        now_ns: u64,
        upcalls: &mut VecDeque<Upcall>,
    ) {
        let i = token.index();
        let at = home(parked.volume, parked.extent);
        let mut asked = false;
        let mut next = self.homes[at];
        while next != NONE && !asked {
            let io = &slab[next as usize];
            asked = io.stage == Stage::Parked(parked);
            next = io.link;
        }
        let io = &mut slab[i];
        io.stage = Stage::Parked(parked);
        io.link = self.homes[at];
        let mut whole = false;
        if let Some(lane) = lanes.get(io.lane) {
            whole = parked.write && io.covers(parked.extent, lane.volume.extent_shift);
            let record = lane.record();
            bump(&record.faults, 1);
            record
                .parked
                .store(record.parked.load(Relaxed) + 1, Relaxed);
        }
        self.since_ns[i] = now_ns;
        self.homes[at] = token.entrust();
        self.count += 1;
        if !asked {
            let Parked {
                volume,
                extent,
                write,
            } = parked;
            upcalls.push_back(Upcall::Fault {
                volume,
                extent,
                write,
                whole,
            });
        }
    }

    /// Takes commands that an answer concerns, the oldest of an extent first.
    pub(crate) fn take_concerned(
        &mut self,
        volume: VolumeId,
        range: ExtentRange,
        concerned: impl Fn(&Parked) -> bool,
        slab: &mut Slab,
        chosen: &mut Vec<u32>,
    ) {
        if range.count < HOMES as u64 {
            for extent in range.first..range.end() {
                let this = |parked: &Parked| parked.extent == extent && concerned(parked);
                self.unlink(home(volume, extent), this, slab, chosen);
            }
        } else {
            for at in 0..HOMES {
                self.unlink(at, &concerned, slab, chosen);
            }
        }
    }

    /// Takes one command that waits for this and is selected.
    pub(crate) fn take_one(
        &mut self,
        parked: Parked,
        slab: &mut Slab,
        which: impl Fn(&Io) -> bool,
    ) -> Option<u32> {
        let mut newer = NONE;
        let at = home(parked.volume, parked.extent);
        let mut next = self.homes[at];
        while next != NONE {
            let io = &slab[next as usize];
            let before = io.link;
            if io.stage == Stage::Parked(parked) && which(io) {
                self.cut(at, newer, before, slab);
                return Some(next);
            }
            newer = next;
            next = before;
        }
        None
    }

    /// Takes a command out of a chain; `newer` and `before` are its neighbours.
    fn cut(&mut self, at: usize, newer: u32, before: u32, slab: &mut Slab) {
        match newer {
            NONE => self.homes[at] = before,
            newer => slab[newer as usize].link = before,
        }
        self.count -= 1;
    }

    /// Takes the selected commands out of a chain, oldest first.
    fn unlink(
        &mut self,
        at: usize,
        which: impl Fn(&Parked) -> bool,
        slab: &mut Slab,
        chosen: &mut Vec<u32>,
    ) {
        let from = chosen.len();
        let mut newer = NONE;
        let mut next = self.homes[at];
        while next != NONE {
            let before = slab[next as usize].link;
            let taken =
                matches!(&slab[next as usize].stage, Stage::Parked(parked) if which(parked));
            if taken {
                self.cut(at, newer, before, slab);
                chosen.push(next);
            } else {
                newer = next;
            }
            next = before;
        }
        chosen[from..].reverse();
    }

    /// Continues a command that is in no chain now.
    pub(crate) fn resume(&self, index: u32, slab: &mut Slab, lanes: &Lanes, now_ns: u64) -> Token {
        let io = &mut slab[index as usize];
        io.stage = Stage::AtDevices;
        io.link = NONE;
        let waited_ns = now_ns.saturating_sub(self.since_ns[index as usize]);
        // The rest counts as the devices' time.
        io.started_ns += waited_ns;
        if let Some(lane) = lanes.get(io.lane) {
            let record = lane.record();
            let parked = &record.parked;
            parked.store(parked.load(Relaxed).saturating_sub(1), Relaxed);
            record.ops[io.op.kind() as usize].times[TimesOf::Translating as usize]
                .record(waited_ns);
        }
        Token::of(index)
    }

    pub(crate) fn take_late(&mut self, slab: &mut Slab, now_ns: u64, late: &mut Vec<u32>) {
        if self.is_empty() {
            return;
        }
        for index in 0..slab.len() as u32 {
            let io = &slab[index as usize];
            let Stage::Parked(parked) = io.stage else {
                continue;
            };
            if io.deadline_ns > now_ns {
                continue;
            }
            let at = home(parked.volume, parked.extent);
            let mut next = self.homes[at];
            let before = io.link;
            if next == index {
                self.homes[at] = before;
            } else {
                while slab[next as usize].link != index {
                    next = slab[next as usize].link;
                }
                slab[next as usize].link = before;
            }
            self.count -= 1;
            late.push(index);
        }
    }
}

fn home(volume: VolumeId, extent: u64) -> usize {
    let mixed = (extent ^ volume.0.rotate_left(40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> (64 - HOMES.ilog2())) as usize
}
