//! The core of a reactor: commands from any frontend, through translation, to devices and back.
//!
//! **Design.** All state is the reactor's own and of fixed size. It is in parts that own it ([`crate::io`], [`crate::qos`],
//! [`crate::offload`], [`crate::recovery`]); the core brings a command from one to the next. A command goes
//! start -> [`dispatch`] (translate, slice, submit) -> slices end -> flush and commit where asked
//! ([`flush`]) -> [`Core::next_ended`]. What happens once a turn is in [`turn`]. A miss parks a command until the owner's
//! answer comes through the mailbox. The internal lane's jobs ([`jobs`]) use the same ring.
//!
//! **Not here:** sockets and protocols ([`crate::frontend::nvme_tcp`]), the loop itself ([`crate::reactor`]).

mod admission;
mod dispatch;
mod flush;
mod fused;
mod jobs;
mod machine;
mod offload;
mod recovery;
mod reserve;
mod turn;
mod waiting;

pub use crate::io::clock::{OWNER_WAIT_LIMIT_NS, monotonic_ns};
pub use crate::io::command::{CommandRef, DoneIo, FrontendIndex, IoOp, NewIo, Owner};
pub use crate::io::devices::ServedDevice;
pub use crate::io::ended::MAX_FRONTENDS;
pub use crate::io::fused::Expected;
pub use crate::io::slab::MAX_IOS;
pub use crate::io::staging;
pub use crate::offload::{Links, links};
pub use crate::qos::Admission;
pub use crate::recovery::{CarriedSpan, Devices};
pub use reserve::Drain;
pub use waiting::Released;

use crate::io::clock::Clock;
use crate::io::command::{Io, Stage, Token};
use crate::io::devices::DeviceRing;
use crate::io::ended::EndedQueues;
use crate::io::flush::Flusher;
use crate::io::fused::Fused;
use crate::io::jobs::Jobs;
use crate::io::lanes::Lanes;
use crate::io::machine::VmCommands;
use crate::io::parked::ParkedTable;
use crate::io::records::Records;
use crate::io::settle::Settles;
use crate::io::slab::Slab;
use crate::io::slice::Slices;
use crate::io::staging::Staging;
use crate::io::waits::Waits;
use crate::lane::{Lane, LaneIndex};
use crate::offload::Away;
use crate::qos::Qos;
use crate::recovery::Carried;
use crate::upcall::Upcall;
use forebay_device::ring::Ring;
use forebay_nvme::Status;
use forebay_xlate::boundary::region::{RECORDS, ReactorRecord, Region};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// See the module's text.
pub struct Core {
    /// Memory between network and device.
    pub staging: Staging,
    /// The state region.
    pub region: Arc<Region>,
    /// This reactor's number.
    pub reactor: usize,
    records: Records,
    /// The time.
    pub(crate) clock: Clock,
    /// Exports that are served here.
    pub(crate) lanes: Lanes,
    slab: Slab,
    waits: Waits,
    parked: ParkedTable,
    /// The ring, and what is behind it.
    pub(crate) devices: DeviceRing,
    /// What is at devices.
    pub(crate) slices: Slices,
    settles: Settles,
    /// Who may begin a command.
    pub(crate) qos: Qos,
    /// What other reactors do for this one, and this one for them.
    pub(crate) away: Away,
    /// What a dead engine, or a connection that closed, may still have at devices.
    pub(crate) carried: Carried,
    flusher: Flusher,
    fused: Fused,
    /// What the internal lane does.
    pub(crate) jobs: Jobs,
    ended: EndedQueues,
    machines: VmCommands,
    /// Messages for the control thread.
    pub(crate) upcalls: VecDeque<Upcall>,
}

impl Core {
    /// A core without lanes or devices, on the thread that will use it.
    pub fn new(reactor: usize, region: Arc<Region>, staging: Staging, ring: Ring) -> Self {
        let records = Records::new(&region, reactor);
        Self {
            staging,
            reactor,
            clock: Clock::new(),
            lanes: Lanes::new(),
            slab: Slab::new(),
            waits: Waits::new(),
            parked: ParkedTable::new(),
            devices: DeviceRing::new(ring, region.clone()),
            slices: Slices::new(),
            settles: Settles::default(),
            qos: Qos::new(),
            away: Away::new(),
            carried: Carried::new(records.reactor),
            flusher: Flusher::new(),
            fused: Fused::default(),
            jobs: Jobs::new(),
            ended: EndedQueues::new(),
            machines: VmCommands::new(),
            upcalls: VecDeque::with_capacity(4 * MAX_IOS),
            region,
            records,
        }
    }

    /// CLOCK_MONOTONIC as of this turn, or of when its commands began to end.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.clock.now_ns
    }

    /// Whether [`Core::start`] has room for another command of this lane. A lane never gets more than
    /// what it leaves to all others, neither of commands nor of staging buffers: so whatever hangs, and
    /// however many lanes it takes along, a lane that has little in flight gets on.
    #[inline]
    pub fn may_start(&self, lane: LaneIndex) -> bool {
        self.has_room(lane) && self.qos.may_hold(lane)
    }

    /// The same, whatever waits for the lane's budget.
    #[inline]
    pub fn has_room(&self, lane: LaneIndex) -> bool {
        let left = self.slab.left().min(self.staging.left());
        match self.lanes.get(lane) {
            Some(lane) => (lane.in_flight as usize) < left.max(1) && self.slab.left() > 0,
            _ => self.slab.left() > 0,
        }
    }

    /// This reactor's record.
    #[inline]
    pub fn record(&self) -> &'static ReactorRecord {
        self.records.reactor
    }

    /// Begins a command. It comes back through [`Core::next_ended`], once.
    ///
    /// # Errors
    /// The command itself, when there is no room for it now.
    pub fn start(&mut self, new: NewIo) -> Result<(), NewIo> {
        if !self.may_start(new.lane) {
            return Err(new);
        }
        if self.carried.any() {
            self.settle_orphans();
        }
        match self.slab.take_free() {
            Some(index) => self.begin(new, index, 0),
            None => return Err(new),
        }
        Ok(())
    }

    /// Begins a command in a place of the slab that was free: nothing can refuse it any more. So many entries of its list
    /// are its memory.
    #[inline]
    fn begin(&mut self, new: NewIo, index: u32, pieces: u8) {
        let token = Token::take(index);
        let now = self.clock.now_ns;
        let io = &mut self.slab[token.index()];
        *io = Io {
            owner: new.owner,
            lane: new.lane,
            op: new.op,
            buffer: new.buffer,
            record: new.record,
            over_ns: new.over_ns,
            started_ns: now,
            deadline_ns: now + OWNER_WAIT_LIMIT_NS,
            stage: Stage::Moving,
            generation: io.generation.wrapping_add(1),
            pieces,
            ..Io::empty()
        };
        match self.lanes.get_mut(new.lane) {
            Some(lane) if !lane.removed => {
                lane.in_flight += 1;
                lane.record()
                    .in_flight
                    .store(u64::from(lane.in_flight), Relaxed);
                let io = &mut self.slab[token.index()];
                // Then some may be what a dead engine had begun.
                let may_begin = match self.carried.any() {
                    true => self.qos.admit_carried(io, &self.carried),
                    false => self.qos.admit_op(new.lane, &new.op),
                };
                if !may_begin {
                    return (self.qos).throttle(token, &mut self.slab, &self.lanes, now);
                }
                if new.over_ns.is_some() {
                    self.qos.waited_elsewhere(io, &self.lanes, now);
                }
                self.begin_admitted(token);
            }
            _ => {
                // The export went while the command was on its way: nothing was counted.
                io.stage = Stage::Free;
                let new = NewIo {
                    buffer: io.buffer.take(),
                    ..new
                };
                self.machines.let_go(token.index());
                self.slab.give_back(token);
                self.refuse(new, Status::INVALID_NAMESPACE_OR_FORMAT);
            }
        }
    }

    /// Ends a command that has no place: it never began.
    #[cold]
    fn refuse(&mut self, new: NewIo, status: Status) {
        let done = DoneIo {
            owner: new.owner,
            lane: new.lane,
            op: new.op,
            status,
            buffer: new.buffer,
            started_ns: self.clock.now_ns,
        };
        self.give_back(done, new.record);
        self.carried.refused(new.record);
    }

    /// Begins a command that is paid for.
    #[inline]
    fn begin_admitted(&mut self, token: Token) {
        if self.carried.any() {
            self.begin_beside_carried(token);
        } else {
            self.dispatch(token);
        }
    }

    /// The next command of a frontend's that ended.
    #[inline]
    pub fn next_ended(&mut self, frontend: FrontendIndex) -> Option<DoneIo> {
        self.ended.next(frontend)
    }

    /// Whether a frontend has a command that ended.
    pub(crate) fn has_ended(&self, frontend: FrontendIndex) -> bool {
        !self.ended.is_empty_for(frontend)
    }

    /// Gives a command back to its frontend; a VM's without the buffer, which was the core's.
    #[inline]
    fn give_back(&mut self, mut done: DoneIo, record: CommandRef) {
        if record.is_machine()
            && let Some(buffer) = done.buffer.take()
        {
            self.staging.give(buffer);
        }
        self.ended.push(done);
    }

    /// How many of a test's first frontend have ended.
    #[cfg(test)]
    pub(crate) fn ended_count(&self) -> usize {
        self.ended.count(FrontendIndex(0))
    }

    /// The next command of a test's first frontend that ended.
    #[cfg(test)]
    pub(crate) fn next_done(&mut self) -> Option<DoneIo> {
        self.ended.next(FrontendIndex(0))
    }

    /// Ends a command.
    fn finish(&mut self, mut token: Token) {
        if self.carried.any() {
            token = match self.compared(token) {
                Some(token) => token,
                None => return,
            };
        }
        let io = &mut self.slab[token.index()];
        debug_assert_eq!(io.slices, 0, "a command ends when its slices have");
        io.stage = Stage::Free;
        if io.pieces > 0 {
            self.machines.let_go(token.index());
        }
        let io = &mut self.slab[token.index()];
        let lane = io.lane;
        let done = DoneIo {
            owner: io.owner,
            lane,
            op: io.op,
            status: io.status,
            buffer: io.buffer.take(),
            started_ns: io.started_ns,
        };
        let record = io.record;
        self.give_back(done, record);
        self.slab.give_back(token);
        if let Some(lane) = self.lanes.get_mut(lane) {
            lane.in_flight -= 1;
            lane.record()
                .in_flight
                .store(u64::from(lane.in_flight), Relaxed);
            if lane.removed && lane.in_flight == 0 {
                let index = lane.index;
                self.remove_lane(index);
            }
        }
    }

    /// Notes what this reactor works on from here, should it die of it: a command, or (`None`) what is
    /// no tenant's.
    #[inline]
    pub(crate) fn blame(&self, io: Option<u32>) {
        if RECORDS {
            (self.records).blame(io.map_or(0, |io| self.slab[io as usize].record.blame()));
        }
    }

    /// A lane that is served here.
    #[inline]
    pub fn lane(&self, index: LaneIndex) -> Option<&Lane> {
        self.lanes.get(index)
    }

    /// Adds a lane, or changes what an existing one shows.
    pub fn set_lane(&mut self, lane: Lane) {
        let index = lane.index;
        self.lanes.set(lane);
        if let Some(lane) = self.lanes.get(index) {
            self.qos.attach(lane, &self.slab);
        }
    }

    /// Removes a lane as soon as its commands have ended, and tells the control thread. What isn't at
    /// a device yet ends now and never gets there.
    pub fn remove_lane(&mut self, index: LaneIndex) {
        if let Some(lane) = self.lanes.get_mut(index) {
            lane.removed = true;
            if lane.in_flight == 0 {
                self.lanes.remove(index);
                self.qos.detach(index, &self.slab);
                self.upcalls.push_back(Upcall::LaneGone { lane: index });
            } else {
                // As if their time were over.
                self.end_waiting(Status::COMMAND_INTERRUPTED, |_, _, of| of == index);
            }
        }
    }

    /// A device is served from now on; but see [`Core::fenced`].
    pub fn set_device(&mut self, served: ServedDevice) {
        let device = served.config.device;
        self.devices.set(served);
        (self.qos).note_devices(Some(device.0), &self.devices);
        self.carried.serve(device.0);
        self.take_up(|_, io| io.stage == Stage::DeviceWait, Self::dispatch);
    }

    /// Whether any command is in hand.
    pub fn busy_ios(&self) -> usize {
        self.slab.busy()
    }

    /// Whether commands wait for the daemon: a sleeping reactor must wake to time them out.
    pub fn has_waiting(&self) -> bool {
        !self.waits.is_empty() || !self.parked.is_empty() || self.flusher.is_busy()
    }
}

#[cfg(test)]
mod tests;
