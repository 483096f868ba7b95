//! Commands that wait for the owner's answer about an extent.
//!
//! **Design.** While a thin volume is filled, every write parks, and grants come hundreds at a time: so
//! the parked are found by their extent, in a hash table whose chains run through the commands
//! themselves. Nothing is allocated, and a grant costs what it takes up. The owner is asked once for an
//! extent and a right, however many commands wait for it. What an answer means to a command is said in
//! [`forebay_xlate::reactor_side`]. Each waits for [`super::OWNER_WAIT_LIMIT_NS`] at most, then ends with
//! Command Interrupted, which the host may retry.
//!
//! **Not here:** commands that wait for other things ([`super::waiting`]).

use super::io::{Stage, Token};
use super::{Core, MAX_IOS};
use crate::upcall::Upcall;
use forebay_nvme::Status;
use forebay_xlate::boundary::message::FaultFailure;
use forebay_xlate::boundary::region::{TimesOf, bump};
use forebay_xlate::reactor_side::{Answer, Heard, Parked};
use forebay_xlate::{ExtentRange, VolumeId};
use std::sync::atomic::Ordering::Relaxed;

const HOMES: usize = 4096;
/// The end of a chain.
pub(super) const NONE: u32 = u32::MAX;

/// See the module's text.
#[derive(Debug)]
pub(super) struct ParkedTable {
    /// The newest command of each chain; older ones follow ([`super::io::Io::link`]).
    homes: Box<[u32]>,
    count: usize,
    /// Since when each command waits, CLOCK_MONOTONIC ns.
    since_ns: Box<[u64]>,
}

impl ParkedTable {
    pub(super) fn new() -> Self {
        Self {
            homes: vec![NONE; HOMES].into(),
            since_ns: vec![0; MAX_IOS].into(),
            count: 0,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }
}

fn home(volume: VolumeId, extent: u64) -> usize {
    let mixed = (extent ^ volume.0.rotate_left(40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> (64 - HOMES.ilog2())) as usize
}

impl Core {
    /// Sets a command aside until the owner has answered, and asks unless another one has.
    pub(super) fn park(&mut self, token: Token, parked: Parked) {
        let i = token.index();
        let at = home(parked.volume, parked.extent);
        let mut asked = false;
        let mut next = self.parked.homes[at];
        while next != NONE && !asked {
            let io = &self.ios[next as usize];
            asked = io.stage == Stage::Parked(parked);
            next = io.link;
        }
        let io = &mut self.ios[i];
        io.stage = Stage::Parked(parked);
        io.link = self.parked.homes[at];
        if let Some(lane) = self.lanes[io.lane.0 as usize].as_ref() {
            let record = lane.record();
            bump(&record.faults, 1);
            record
                .parked
                .store(record.parked.load(Relaxed) + 1, Relaxed);
        }
        self.parked.since_ns[i] = self.now_ns;
        self.parked.homes[at] = token.entrust();
        self.parked.count += 1;
        if !asked {
            let Parked {
                volume,
                extent,
                write,
            } = parked;
            self.upcalls.push_back(Upcall::Fault {
                volume,
                extent,
                write,
            });
        }
    }

    /// The owner answered faults in `range`.
    pub fn granted(&mut self, volume: VolumeId, range: ExtentRange) {
        self.hear(volume, range, Answer::Granted);
    }

    /// The owner can't answer the faults in `range` that were for writing, or those that weren't.
    pub fn fault_failed(
        &mut self,
        volume: VolumeId,
        range: ExtentRange,
        write: bool,
        reason: FaultFailure,
    ) {
        self.hear(volume, range, Answer::Failed { write, reason });
    }

    fn hear(&mut self, volume: VolumeId, range: ExtentRange, answer: Answer) {
        if self.parked.is_empty() {
            return;
        }
        let concerned = |parked: &Parked| parked.hear(volume, range, answer) != Heard::Stay;
        let mut chosen = std::mem::take(&mut self.scratch);
        debug_assert!(chosen.is_empty());
        if range.count < HOMES as u64 {
            for extent in range.first..range.end() {
                let this = |parked: &Parked| parked.extent == extent && concerned(parked);
                self.unpark(home(volume, extent), this, &mut chosen);
            }
        } else {
            for at in 0..HOMES {
                self.unpark(at, concerned, &mut chosen);
            }
        }
        for index in chosen.drain(..) {
            let Stage::Parked(parked) = self.ios[index as usize].stage else {
                continue;
            };
            let token = self.unparked(index);
            self.blame(Some(index));
            match parked.hear(volume, range, answer) {
                Heard::Fail(reason) => {
                    let read = self.ios[index as usize].op.reads();
                    self.fail(token, status_of_fault(reason, !read));
                }
                Heard::Translate | Heard::Stay => self.dispatch(token),
            }
        }
        self.scratch = chosen;
    }

    /// Takes those out of a chain that `which` chooses; the oldest comes first.
    fn unpark(&mut self, at: usize, which: impl Fn(&Parked) -> bool, chosen: &mut Vec<u32>) {
        let from = chosen.len();
        let mut newer = NONE;
        let mut next = self.parked.homes[at];
        while next != NONE {
            let before = self.ios[next as usize].link;
            let taken =
                matches!(&self.ios[next as usize].stage, Stage::Parked(parked) if which(parked));
            if taken {
                match newer {
                    NONE => self.parked.homes[at] = before,
                    newer => self.ios[newer as usize].link = before,
                }
                self.parked.count -= 1;
                chosen.push(next);
            } else {
                newer = next;
            }
            next = before;
        }
        chosen[from..].reverse();
    }

    /// A command that is in no chain any more goes on.
    fn unparked(&mut self, index: u32) -> Token {
        let io = &mut self.ios[index as usize];
        io.stage = Stage::Moving;
        io.link = NONE;
        let waited_ns = (self.now_ns).saturating_sub(self.parked.since_ns[index as usize]);
        // What is left from there on is the devices' time.
        io.started_ns += waited_ns;
        if let Some(lane) = self.lanes[io.lane.0 as usize].as_ref() {
            let record = lane.record();
            let parked = &record.parked;
            parked.store(parked.load(Relaxed).saturating_sub(1), Relaxed);
            record.ops[io.op.kind() as usize].times[TimesOf::Translating as usize]
                .record(waited_ns);
        }
        Token::take(index)
    }

    /// Ends commands that have been parked too long.
    pub(super) fn tick_parked(&mut self, now: u64) {
        if self.parked.is_empty() {
            return;
        }
        for index in 0..self.ios.len() as u32 {
            let io = &self.ios[index as usize];
            let Stage::Parked(parked) = io.stage else {
                continue;
            };
            if io.deadline_ns > now {
                continue;
            }
            let at = home(parked.volume, parked.extent);
            let mut next = self.parked.homes[at];
            let before = io.link;
            if next == index {
                self.parked.homes[at] = before;
            } else {
                while self.ios[next as usize].link != index {
                    next = self.ios[next as usize].link;
                }
                self.ios[next as usize].link = before;
            }
            self.parked.count -= 1;
            let token = self.unparked(index);
            self.fail(token, Status::COMMAND_INTERRUPTED);
        }
    }
}

fn status_of_fault(reason: FaultFailure, write: bool) -> Status {
    match reason {
        FaultFailure::NoSpace => Status::CAPACITY_EXCEEDED,
        FaultFailure::Internal => Status::INTERNAL_ERROR,
        FaultFailure::Busy => Status::COMMAND_INTERRUPTED,
        FaultFailure::Device if write => Status::WRITE_FAULT,
        FaultFailure::Device => Status::UNRECOVERED_READ_ERROR,
    }
}
