//! The core of a reactor: commands from any frontend, through translation, to devices and back.
//!
//! **Design.** All state is the reactor's own and of fixed size. A command goes: start ->
//! [`dispatch`] (translate, slice, submit) -> slices end -> flush and commit if needed ([`flush`])
//! -> [`Core::next_ended`]. A fault parks it until the owner answers. **Not here:** protocols
//! ([`crate::frontend::nvme_tcp`]), the loop ([`crate::reactor`]).

mod admission;
mod dispatch;
mod flush;
mod fused;
mod guest_io;
mod jobs;
mod offload;
mod recovery;
mod reserve;
mod turn;
mod waiting;

pub(crate) use crate::io::clock::{OWNER_WAIT_LIMIT_NS, monotonic_ns};
pub(crate) use crate::io::command::{CommandRef, DoneIo, FrontendIndex, IoOp, Issuer, NewIo};
pub(crate) use crate::io::devices::ServedDevice;
pub(crate) use crate::io::ended::MAX_FRONTENDS;
pub(crate) use crate::io::fused::Expected;
pub(crate) use crate::io::slab::MAX_IOS;
pub(crate) use crate::io::staging;
pub(crate) use crate::offload::{Links, links};
pub(crate) use crate::qos::Admission;
pub(crate) use crate::recovery::{FenceSet, RecoveredSpan};
pub(crate) use reserve::Drain;
pub(crate) use waiting::Released;

use crate::io::clock::Clock;
use crate::io::command::{Io, Stage, Token};
use crate::io::devices::DeviceRing;
use crate::io::ended::EndedQueues;
use crate::io::flush::Flusher;
use crate::io::fused::Fused;
use crate::io::guest_memory::VmCommands;
use crate::io::jobs::Jobs;
use crate::io::lanes::Lanes;
use crate::io::overwrites::Overwrites;
use crate::io::parked::ParkedTable;
use crate::io::records::Records;
use crate::io::settle::Settles;
use crate::io::slab::Slab;
use crate::io::slice::Slices;
use crate::io::staging::Staging;
use crate::io::waits::Waits;
use crate::lane::{Lane, LaneIndex};
use crate::offload::Offload;
use crate::qos::Qos;
use crate::recovery::RecoveredIo;
use crate::upcall::Upcall;
use forebay_device::ring::Ring;
use forebay_nvme::Status;
use forebay_xlate::boundary::region::{RECORDS, ReactorRecord, Region};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// A reactor's core.
pub(crate) struct Core {
    /// Staging buffers.
    pub staging: Staging,
    /// The state region.
    pub region: Arc<Region>,
    records: Records,
    pub(crate) clock: Clock,
    pub(crate) lanes: Lanes,
    pub(crate) slab: Slab,
    waits: Waits,
    parked: ParkedTable,
    pub(crate) overwrites: Overwrites,
    pub(crate) devices: DeviceRing,
    pub(crate) slices: Slices,
    settles: Settles,
    pub(crate) qos: Qos,
    pub(crate) offload: Offload,
    pub(crate) recovered: RecoveredIo,
    flusher: Flusher,
    fused: Fused,
    pub(crate) jobs: Jobs,
    ended: EndedQueues,
    vms: VmCommands,
    /// Messages for the control thread.
    pub(crate) upcalls: VecDeque<Upcall>,
}

impl Core {
    /// A core without lanes or devices. Call it on the thread that will use it.
    pub(crate) fn new(reactor: usize, region: Arc<Region>, staging: Staging, ring: Ring) -> Self {
        let records = Records::new(&region, reactor);
        Self {
            staging,
            clock: Clock::new(),
            lanes: Lanes::new(),
            slab: Slab::new(),
            waits: Waits::new(),
            parked: ParkedTable::new(),
            overwrites: Overwrites::new(),
            devices: DeviceRing::new(ring, region.clone()),
            slices: Slices::new(),
            settles: Settles::default(),
            qos: Qos::new(),
            offload: Offload::new(),
            recovered: RecoveredIo::new(records.reactor),
            flusher: Flusher::new(),
            fused: Fused::default(),
            jobs: Jobs::new(),
            ended: EndedQueues::new(),
            vms: VmCommands::new(),
            upcalls: VecDeque::with_capacity(4 * MAX_IOS),
            region,
            records,
        }
    }

    /// Time of this turn, or when its commands began to end.
    #[inline]
    pub(crate) fn now_ns(&self) -> u64 {
        self.clock.now_ns
    }

    /// Whether [`Core::start`] has room for this lane. A lane never gets more commands or buffers
    /// than it leaves to others, so lanes with few proceed even when others hang.
    #[inline]
    pub(crate) fn may_start(&self, lane: LaneIndex) -> bool {
        self.has_room(lane) && self.qos.may_hold(lane)
    }

    /// Whether there is room for this lane, regardless of its budget.
    #[inline]
    pub(crate) fn has_room(&self, lane: LaneIndex) -> bool {
        let left = self.slab.left().min(self.staging.left());
        match self.lanes.get(lane) {
            Some(lane) => (lane.in_flight as usize) < left.max(1) && self.slab.left() > 0,
            _ => self.slab.left() > 0,
        }
    }

    /// This reactor's record.
    #[inline]
    pub(crate) fn record(&self) -> &'static ReactorRecord {
        self.records.reactor
    }

    /// Begins a command, which comes back once, through [`Core::next_ended`].
    ///
    /// # Errors
    /// The command, if there is no room now.
    pub(crate) fn start(&mut self, new: NewIo) -> Result<(), NewIo> {
        if !self.may_start(new.lane) {
            return Err(new);
        }
        if self.recovered.any() {
            self.end_orphans();
        }
        match self.slab.allocate() {
            Some(index) => self.begin(new, index, 0),
            None => return Err(new),
        }
        Ok(())
    }

    /// Begins a command in a free place; it cannot be refused any longer.
    #[inline]
    fn begin(&mut self, new: NewIo, index: u32, pieces: u8) {
        let token = Token::of(index);
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
            stage: Stage::AtDevices,
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
                // Some commands may be recovered ones.
                let may_begin = match self.recovered.any() {
                    true => self.qos.admit_during_recovery(io, &self.recovered),
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
                // The export was removed; nothing was counted.
                io.stage = Stage::Free;
                let new = NewIo {
                    buffer: io.buffer.take(),
                    ..new
                };
                self.vms.let_go(token.index());
                self.slab.give_back(token);
                self.refuse(new, Status::INVALID_NAMESPACE_OR_FORMAT);
            }
        }
    }

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
        self.recovered.refused(new.record);
    }

    #[inline]
    fn begin_admitted(&mut self, token: Token) {
        if self.recovered.any() {
            self.begin_during_recovery(token);
        } else {
            self.dispatch(token);
        }
    }

    /// The next ended command of a frontend.
    #[inline]
    pub(crate) fn next_ended(&mut self, frontend: FrontendIndex) -> Option<DoneIo> {
        self.ended.next(frontend)
    }

    pub(crate) fn has_ended(&self, frontend: FrontendIndex) -> bool {
        !self.ended.is_empty_for(frontend)
    }

    /// Returns a command to its frontend, but keeps a VM's buffer.
    #[inline]
    fn give_back(&mut self, mut done: DoneIo, record: CommandRef) {
        if record.is_vm()
            && let Some(buffer) = done.buffer.take()
        {
            self.staging.release(buffer);
        }
        self.ended.push(done);
    }

    #[cfg(test)]
    pub(crate) fn ended_count(&self) -> usize {
        self.ended.count(FrontendIndex(0))
    }

    #[cfg(test)]
    pub(crate) fn next_done(&mut self) -> Option<DoneIo> {
        self.ended.next(FrontendIndex(0))
    }

    fn finish(&mut self, mut token: Token) {
        if self.overwrites.any() {
            (self.overwrites).gave_up(token.index(), &mut self.upcalls);
        }
        if self.recovered.any() {
            token = match self.compared(token) {
                Some(token) => token,
                None => return,
            };
        }
        let io = &mut self.slab[token.index()];
        debug_assert_eq!(io.slices, 0, "a command ends when its slices have");
        io.stage = Stage::Free;
        if io.pieces > 0 {
            self.vms.let_go(token.index());
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

    /// Whom to blame if this reactor dies from here on; `None`: no tenant.
    #[inline]
    pub(crate) fn blame(&self, io: Option<u32>) {
        if RECORDS {
            (self.records).blame(io.map_or(0, |io| self.slab[io as usize].record.blame()));
        }
    }

    /// A lane that is served here.
    #[inline]
    pub(crate) fn lane(&self, index: LaneIndex) -> Option<&Lane> {
        self.lanes.get(index)
    }

    /// Adds or updates a lane.
    pub(crate) fn set_lane(&mut self, lane: Lane) {
        let index = lane.index;
        self.lanes.set(lane);
        if let Some(lane) = self.lanes.get(index) {
            self.qos.attach(lane, &self.slab);
        }
    }

    /// Removes a lane once its commands have ended. Commands not at a device end now.
    pub(crate) fn remove_lane(&mut self, index: LaneIndex) {
        if let Some(lane) = self.lanes.get_mut(index) {
            lane.removed = true;
            if lane.in_flight == 0 {
                self.lanes.remove(index);
                self.qos.detach(index, &self.slab);
                self.upcalls.push_back(Upcall::LaneGone { lane: index });
            } else {
                // They end as if they had timed out.
                self.end_waiting(Status::COMMAND_INTERRUPTED, |_, _, of| of == index);
            }
        }
    }

    /// Serves a device; see also [`Core::fenced`].
    pub(crate) fn set_device(&mut self, served: ServedDevice) {
        let device = served.config.device;
        self.devices.set(served);
        (self.qos).note_devices(Some(device.0), &self.devices);
        self.recovered.serve(device.0);
        self.retry_not_ready();
    }

    /// Continues commands that wait for a device, or for an image of one.
    pub(crate) fn retry_not_ready(&mut self) {
        self.slices.retry_not_ready();
        self.resume_chosen(|_, io| io.stage == Stage::DeviceWait, Self::dispatch);
    }

    /// Whether commands wait for the daemon, with a time limit.
    pub(crate) fn has_waiting(&self) -> bool {
        !self.waits.is_empty()
            || !self.parked.is_empty()
            || self.flusher.is_busy()
            || !self.slices.not_ready.is_empty()
    }
}

#[cfg(test)]
mod tests;
