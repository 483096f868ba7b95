//! The core of a reactor: commands from any frontend, through translation, to devices and back.
//!
//! **Design.** All state is the reactor's own and of fixed size. A command goes
//! start -> [`dispatch`] (translate, slice, submit) -> slices end -> flush and commit where asked
//! ([`flush`]) -> [`Core::next_ended`]. What happens once a turn is in [`turn`]. A miss parks a command until the owner's
//! answer comes through the mailbox. The internal lane's jobs ([`jobs`]) use the same ring.
//!
//! **Not here:** sockets and protocols ([`crate::frontend::nvme_tcp`]), the loop itself ([`crate::reactor`]).

mod admit;
mod away;
mod carried;
mod dispatch;
mod ended;
mod flush;
mod fused;
mod held;
mod io;
mod jobs;
mod lanes;
mod machine;
mod parked;
mod reserve;
mod settle;
pub mod staging;
mod turn;
mod waiting;
mod zero;

pub use admit::Admission;
pub use away::{Links, links};
pub use carried::{CarriedSpan, Devices};
pub use ended::MAX_FRONTENDS;
pub use fused::Expected;
pub use io::{CommandRef, DoneIo, FrontendIndex, IoOp, NewIo, Owner};
use io::{Io, Stage, Token};
pub use reserve::Drain;
pub use turn::monotonic_ns;

use crate::heartbeat::Pulse;
use crate::lane::{Lane, LaneIndex};
use crate::records::keep_for_ever;
use crate::upcall::Upcall;
use away::Away;
use carried::Carried;
use ended::Ended;
use flush::Flusher;
use forebay_device::ring::Ring;
use forebay_device::{Device, Errno, Op, OpKind, Pinned, Registration};
use forebay_nvme::Status;
use forebay_xlate::boundary::message::DeviceConfig;
use forebay_xlate::boundary::region::{
    CommandRecord, DeviceOp, MAX_QUEUE_ENTRIES, MAX_QUEUES, RECORDS, ReactorRecord, Region, bump,
};
use forebay_xlate::drain::{Drains, SliceSpan};
use forebay_xlate::{ExtentRange, Rights, VolumeId};
use fused::Fused;
use held::Throttled;
use jobs::Jobs;
use machine::Machines;
use parked::ParkedTable;
use settle::Settles;
use staging::Staging;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Commands that a reactor has in hand at once.
pub const MAX_IOS: usize = 4096;
/// Slices at devices at once.
const MAX_SLICES: usize = 8192;
/// A command that waits for the daemon longer than this ends with Command Interrupted.
pub const OWNER_WAIT_LIMIT_NS: u64 = 20_000_000_000;

/// What a completion on the ring is about: the top byte of its user data.
mod kind {
    pub(super) const SLICE: u64 = 1;
    pub(super) const FLUSH: u64 = 2;
    pub(super) const JOB: u64 = 3;
    pub(super) const WAKE: u64 = 4;
    pub(super) const AWAY: u64 = 5;
    pub(super) const SHIFT: u32 = 56;
}

/// A device that is served. Its fence may still have to pass ([`Core::fenced`]).
#[derive(Clone, Debug)]
pub struct ServedDevice {
    /// Where its extents are.
    pub config: Arc<DeviceConfig>,
    /// The open device.
    pub device: Arc<Device>,
}

/// A slice's bytes go through a buffer of ours ([`machine`]).
const BOUNCED: u8 = 1;

/// The part of a command that is contiguous on one device.
#[derive(Debug)]
struct Slice {
    io: u32,
    device: u8,
    /// What its end is more for than others': [`BOUNCED`].
    marks: u8,
    /// Another reactor carries it out ([`away`]).
    away: bool,
    /// When it began, if its delay is measured ([`admit`]); 0: it is not.
    begun_ns: u64,
    op: Op,
    span: SliceSpan,
}

/// See the module's text.
pub struct Core {
    /// Memory between network and device.
    pub staging: Staging,
    /// The state region.
    pub region: Arc<Region>,
    /// This reactor's number.
    pub reactor: usize,
    record: &'static ReactorRecord,
    /// The records of all queues' commands.
    commands: &'static [CommandRecord; MAX_QUEUES * MAX_QUEUE_ENTRIES],
    ring: Ring,
    /// Whether the pool is still this engine's.
    pulse: Arc<Pulse>,
    now_ns: u64,
    /// What the daemon had said by then is here: see [`Core::owner_was_heard`].
    heard_ns: u64,
    /// A test's clock.
    #[cfg(test)]
    clock_ns: Option<u64>,
    lanes: Vec<Option<Lane>>,
    devices: Vec<Option<ServedDevice>>,
    admission: Option<Box<Admission>>,
    throttled: Throttled,
    ios: Vec<Io>,
    free_ios: Vec<u32>,
    slices: Vec<Option<Slice>>,
    free_slices: Vec<u32>,
    /// When a slice ended last.
    slice_ended_ns: u64,
    away: Away,
    drains: Drains,
    settles: Settles,
    carried: Carried,
    parked: ParkedTable,
    /// Commands waiting for the daemon or a device in other ways: committing, releasing.
    waiting: Vec<u32>,
    /// Spare list for walking `waiting` without allocating.
    scratch: Vec<u32>,
    ring_wait: Vec<u32>,
    /// How many of those waiting wait for room among the slices, and whether there is more now.
    slice_waits: usize,
    slices_freed: bool,
    slice_again: Vec<u32>,
    flusher: Flusher,
    fused: Fused,
    jobs: Jobs,
    ended: Ended,
    machines: Machines,
    upcalls: VecDeque<Upcall>,
    wake_armed: bool,
}

impl Core {
    /// A core without lanes or devices, on the thread that will use it.
    pub fn new(reactor: usize, region: Arc<Region>, staging: Staging, ring: Ring) -> Self {
        Self {
            record: &keep_for_ever(&region).reactors()[reactor],
            commands: keep_for_ever(&region).commands_in_a_row(),
            staging,
            region,
            reactor,
            ring,
            pulse: Arc::default(),
            now_ns: monotonic_ns(),
            heard_ns: u64::MAX,
            #[cfg(test)]
            clock_ns: None,
            lanes: (0..forebay_xlate::boundary::region::MAX_LANES)
                .map(|_| None)
                .collect(),
            devices: (0..256).map(|_| None).collect(),
            admission: None,
            throttled: Throttled::default(),
            ios: (0..MAX_IOS).map(|_| Io::empty()).collect(),
            free_ios: (0..MAX_IOS as u32).rev().collect(),
            slices: (0..MAX_SLICES).map(|_| None).collect(),
            free_slices: (0..MAX_SLICES as u32).rev().collect(),
            slice_ended_ns: 0,
            away: Away::new(),
            drains: Drains::default(),
            settles: Settles::default(),
            carried: Carried::new(),
            parked: ParkedTable::new(),
            waiting: Vec::with_capacity(MAX_IOS),
            scratch: Vec::with_capacity(MAX_IOS),
            ring_wait: Vec::with_capacity(MAX_IOS),
            slice_waits: 0,
            slices_freed: false,
            slice_again: Vec::with_capacity(MAX_SLICES),
            flusher: Flusher::new(),
            fused: Fused::default(),
            jobs: Jobs::new(),
            ended: Ended::new(),
            machines: Machines::new(),
            upcalls: VecDeque::with_capacity(4 * MAX_IOS),
            wake_armed: false,
        }
    }

    /// What tells whether the pool is still this engine's.
    pub fn set_pulse(&mut self, pulse: Arc<Pulse>) {
        self.pulse = pulse;
    }

    /// CLOCK_MONOTONIC as of this turn, or of when its commands began to end.
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// What the daemon had said by then is here. Whoever waits for it has waited too long only if a look at its socket was
    /// later than the deadline.
    pub fn owner_was_heard(&mut self, ns: u64) {
        self.heard_ns = ns;
    }

    /// Time since `then_ns`. What ends in the turn that it began in has the clock read for it: no time is 0.
    #[inline]
    pub fn since(&self, then_ns: u64) -> u64 {
        match self.now_ns.saturating_sub(then_ns) {
            0 => self.clock().saturating_sub(then_ns),
            ns => ns,
        }
    }

    /// Lets time pass in a test that makes no turns.
    #[cfg(test)]
    pub(crate) fn set_now_ns(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
    }

    /// From now on time passes by itself.
    #[cfg(test)]
    pub(crate) fn let_clock_run(&mut self) {
        self.clock_ns = None;
    }

    /// From now on it is as late as a test says, in turns too.
    #[cfg(test)]
    pub(crate) fn set_clock_ns(&mut self, clock_ns: u64) {
        self.clock_ns = Some(clock_ns);
        self.now_ns = clock_ns;
    }

    /// Whether [`Core::start`] has room for another command of this lane. A lane never gets more than
    /// what it leaves to all others, neither of commands nor of staging buffers: so whatever hangs, and
    /// however many lanes it takes along, a lane that has little in flight gets on.
    #[inline]
    pub fn may_start(&self, lane: LaneIndex) -> bool {
        self.has_room(lane) && self.may_hold(lane)
    }

    /// The same, whatever waits for the lane's budget.
    #[inline]
    pub fn has_room(&self, lane: LaneIndex) -> bool {
        let left = self.free_ios.len().min(self.staging.left());
        match self.lanes.get(lane.0 as usize) {
            Some(Some(lane)) => {
                (lane.in_flight as usize) < left.max(1) && !self.free_ios.is_empty()
            }
            _ => !self.free_ios.is_empty(),
        }
    }

    /// This reactor's record.
    #[inline]
    pub fn record(&self) -> &'static ReactorRecord {
        self.record
    }

    /// Counts bytes of data that were copied on their way.
    #[inline]
    pub(crate) fn copied(&self, lane: LaneIndex, bytes: u32) {
        if let Some(lane) = self.lane(lane) {
            bump(&lane.record().copied_bytes, u64::from(bytes));
        }
    }

    /// Counts in the state region that an operation on a device failed.
    #[cold]
    fn count_error(&self, device: u8, op: &Op, errno: Errno) {
        if errno == Errno::FAULT {
            // Its own machine's memory was gone, which is no fault of the device.
            return;
        }
        let what = match op.kind() {
            OpKind::Read => DeviceOp::Read,
            OpKind::Flush => DeviceOp::Flush,
            OpKind::Write | OpKind::WriteZeroes | OpKind::Punch => DeviceOp::Write,
        };
        let is_no_room = matches!(errno, Errno::NOSPC | Errno::DQUOT);
        let errno = errno.raw_os_error();
        self.region.devices()[usize::from(device)].record(
            what,
            errno,
            is_no_room,
            op.offset_bytes(),
            self.now_ns,
        );
    }

    /// A device's error becomes a command's: counted for its export. What a device has no room for is no media's.
    #[cold]
    fn device_failed(&mut self, io: usize, errno: Errno, write: bool) {
        let status = dispatch::status_of(errno, write);
        let io = &mut self.ios[io];
        if io.status != Status::SUCCESS {
            return;
        }
        io.status = status;
        let lane = io.lane;
        if let Some(lane) = self.lane(lane).filter(|_| status.is_media_error()) {
            bump(&lane.record().media_errors, 1);
        }
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
        match self.free_ios.pop() {
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
        let now = self.now_ns;
        let io = &mut self.ios[token.index()];
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
        match self
            .lanes
            .get_mut(new.lane.0 as usize)
            .and_then(Option::as_mut)
        {
            Some(lane) if !lane.removed => {
                lane.in_flight += 1;
                lane.record()
                    .in_flight
                    .store(u64::from(lane.in_flight), Relaxed);
                // Then some may be what a dead engine had begun.
                if self.carried.any() {
                    return self.begin_while_carrying(token);
                }
                if self.is_new_admitted(new.lane, &new.op) {
                    if new.over_ns.is_some() {
                        self.waited_elsewhere(index);
                    }
                    self.dispatch(token);
                } else {
                    self.throttle(token);
                }
            }
            _ => {
                // The export went while the command was on its way: nothing was counted.
                let io = &mut self.ios[token.index()];
                let done = DoneIo {
                    owner: io.owner,
                    lane: io.lane,
                    op: io.op,
                    status: Status::INVALID_NAMESPACE_OR_FORMAT,
                    buffer: io.buffer.take(),
                    started_ns: now,
                };
                io.stage = Stage::Free;
                self.machines.let_go(token.index());
                self.free_ios.push(token.entrust());
                self.give_back(done, new.record);
                self.carried_refused(new.record);
            }
        }
    }

    /// Begins a command that has its place, if it may, while there are some of a dead engine.
    #[cold]
    fn begin_while_carrying(&mut self, token: Token) {
        let io = &self.ios[token.index()];
        let (lane, op, record, waited) = (io.lane, io.op, io.record, io.over_ns.is_some());
        if self.is_admitted(lane, &op, record) {
            if waited {
                self.waited_elsewhere(token.index() as u32);
            }
            self.begin_admitted(token);
        } else {
            self.throttle(token);
        }
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
    #[inline]
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
        let io = &mut self.ios[token.index()];
        debug_assert_eq!(io.slices, 0, "a command ends when its slices have");
        io.stage = Stage::Free;
        if io.pieces > 0 {
            self.machines.let_go(token.index());
        }
        let io = &mut self.ios[token.index()];
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
        self.free_ios.push(token.entrust());
        if let Some(lane) = self.lanes[lane.0 as usize].as_mut() {
            lane.in_flight -= 1;
            lane.record()
                .in_flight
                .store(u64::from(lane.in_flight), Relaxed);
            if lane.removed && lane.in_flight == 0 {
                let index = lane.index;
                self.lane_gone(index);
            }
        }
    }

    /// Notes what this reactor works on from here, should it die of it: a command, or (`None`) what is
    /// no tenant's.
    #[inline]
    pub(super) fn blame(&self, io: Option<u32>) {
        if !RECORDS {
            return;
        }
        let word = io.map_or(0, |io| self.ios[io as usize].record.blame());
        self.record().blame.store(word, Relaxed);
    }

    /// What this reactor does from here on is no tenant's.
    #[inline]
    pub(crate) fn blame_nobody(&self) {
        self.blame(None);
    }

    /// A device is served from now on; but see [`Core::fenced`].
    pub fn set_device(&mut self, served: ServedDevice) {
        let at = usize::from(served.config.device.0);
        self.forget_delays(at);
        if served.device.is_native() {
            // Without, it is used as any block device is.
            let _ = self.ring.prepare_native();
        }
        self.devices[at] = Some(served);
        self.take_up(|_, io| io.stage == Stage::DeviceWait, Self::dispatch);
    }

    /// Has the ring know memory that is held; given back if that can't be.
    pub(crate) fn register(&mut self, pinned: Pinned) -> Result<Registration, Pinned> {
        self.ring.register(pinned).map_err(|(pinned, _)| pinned)
    }

    /// Has the ring forget memory, of which nothing is at devices or on its way there. What held it is to be dropped
    /// elsewhere.
    pub(crate) fn unregister(&mut self, name: Registration) -> Option<Pinned> {
        self.ring.unregister(name)
    }

    /// Requests so far whose memory the ring knew.
    #[cfg(test)]
    pub(crate) fn fixed_requests(&self) -> u64 {
        self.ring.fixed_requests()
    }

    /// Takes a revoke whose words are cleared; answers now or when the overlapping slices ended.
    pub fn revoke(
        &mut self,
        revoke: u64,
        volume: VolumeId,
        range: ExtentRange,
        keep: Option<Rights>,
    ) {
        let in_flight = self.slices.iter().flatten().map(|s| s.span);
        if self.drains.post(revoke, volume, range, keep, in_flight) {
            self.upcalls.push_back(Upcall::Drained { revoke });
        }
    }

    /// The owner has given a revoke up.
    pub fn abandon(&mut self, revoke: u64) {
        self.drains.abandon(revoke);
    }

    /// The next message for the control thread.
    pub fn next_upcall(&mut self) -> Option<Upcall> {
        self.upcalls.pop_front()
    }

    /// A message for the control thread, from the reactor or a frontend.
    pub fn upcall(&mut self, upcall: Upcall) {
        self.upcalls.push_back(upcall);
    }

    /// Puts back what found no room.
    pub fn unsend(&mut self, upcall: Upcall) {
        self.upcalls.push_front(upcall);
    }

    /// Whether messages for the control thread wait.
    pub fn has_upcalls(&self) -> bool {
        !self.upcalls.is_empty()
    }

    /// Whether any command is in hand.
    pub fn busy_ios(&self) -> usize {
        MAX_IOS - self.free_ios.len()
    }

    /// Whether commands wait for the daemon: a sleeping reactor must wake to time them out.
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty() || !self.parked.is_empty() || self.flusher.is_busy()
    }
}

#[cfg(test)]
mod tests;
