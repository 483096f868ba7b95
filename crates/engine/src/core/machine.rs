//! Commands whose bytes lie in a machine's memory.
//!
//! **Design.** Such a command has no staging buffer, but a list of pieces of its machine's memory, in a fixed table
//! beside the slab ([`forebay_device::Vectors`]). A slice names the entries of that list that are its bytes; where a slice
//! ends within an entry, that is cut in two. So devices read and write the machine's memory directly, and nothing is
//! copied. Its [`Hold`] keeps the memory mapped until it ends, which no command does before all its slices have ended:
//! whoever takes memory away waits for that ([`forebay_guest::Retired`]), and nothing touches it afterwards.
//!
//! What a device can't take as it is (unaligned for direct I/O) *bounces*: that slice goes through a staging buffer, and
//! its bytes are counted (`copied_bytes`), as are those of a Compare. What is compared, and the ranges of a Deallocate,
//! are copied once before the command begins, so that they are the same whenever they are looked at.
//!
//! It does so in small parts, of which a lane never has more than it leaves to all others. Bytes that the processor moves
//! (these copies, zeros of holes, devices in memory) are bounded per lane and turn ([`TURN_BYTES`]): the next turn
//! goes on, first with what was left.
//!
//! Most commands on a device in memory, or on one that keeps nothing, need none of that: they are over before they would
//! have had a place here ([`Core::at_once`]).
//!
//! **Not here:** how a frontend finds the pieces, and what it does of a client that goes away.

#![allow(unsafe_code)]

use super::dispatch::Put;
use super::fused::Expected;
use super::io::{DoneIo, Io, IoOp, NewIo};
use super::staging::{MAX_TRANSFER_BYTES, StagingBuffer};
use super::{BOUNCED, Core, MAX_IOS, MAX_SLICES, Slice};
use crate::lane::LaneIndex;
use forebay_device::{Bufs, Op, Vectors};
use forebay_guest::{Hold, MAX_PIECES, Pieces};
use forebay_nvme::Status;
use forebay_nvme::reservation::Access;
use forebay_qos::cost::Operation;
use forebay_xlate::Word;
use forebay_xlate::boundary::region::MAX_LANES;
use forebay_xlate::drain::SliceSpan;
use forebay_xlate::reactor_side::{self, access};

/// Entries of a command's list: its pieces, and one more for each place where slices cut one in two. Those are where
/// extents end, of which the shortest is 64 KiB, and where parts that bounce do.
const LIST: usize = 176;
const _: () = assert!(LIST <= u8::MAX as usize);
const _: () = assert!(MAX_PIECES + 3 * (MAX_TRANSFER_BYTES / BOUNCE_BYTES) as usize <= LIST);

/// What the processor moves for a machine in one turn, more or less: others have a right to theirs.
const TURN_BYTES: u32 = 1 << 20;
/// The longest part that bounces at once.
const BOUNCE_BYTES: u32 = 64 << 10;
/// How many of them a lane has at once.
const MAX_BOUNCES: usize = 64;

/// A slice whose bytes go through a buffer of ours.
#[derive(Debug)]
struct Bounce {
    buffer: StagingBuffer,
    /// Its command's memory.
    bufs: Bufs,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Machines {
    /// By the command's place in the slab. `None`: there was no memory for them.
    lists: Option<Vectors>,
    /// What keeps them mapped.
    holds: Vec<Hold>,
    /// By the slice's place.
    bounces: Vec<Option<Bounce>>,
    turn: u64,
    /// By lane.
    moved: Vec<Moved>,
}

/// What the processor does for a lane.
#[derive(Clone, Copy, Debug, Default)]
struct Moved {
    /// In this turn,
    turn: u64,
    /// so many bytes.
    bytes: u32,
    /// Parts that are bouncing.
    bounces: u32,
}

impl Machines {
    pub(super) fn new() -> Self {
        Self {
            lists: Vectors::new(MAX_IOS, LIST).ok(),
            holds: (0..MAX_IOS).map(|_| Hold::default()).collect(),
            bounces: (0..MAX_SLICES).map(|_| None).collect(),
            turn: 0,
            moved: vec![Moved::default(); MAX_LANES],
        }
    }

    /// Another turn: before what was set aside goes on, and before anything new.
    #[inline]
    pub(super) fn turn(&mut self) {
        self.turn += 1;
    }

    /// Whether the processor has moved enough for a lane in this turn.
    #[inline]
    pub(super) fn moved_enough(&self, lane: LaneIndex) -> bool {
        let moved = &self.moved[lane.0 as usize % MAX_LANES];
        moved.turn == self.turn && moved.bytes >= TURN_BYTES
    }

    /// Whether anything was over at once for it in this turn.
    #[inline]
    pub(super) fn moved_any(&self, lane: LaneIndex) -> bool {
        self.moved[lane.0 as usize % MAX_LANES].turn == self.turn
    }

    #[inline]
    pub(super) fn moves(&mut self, lane: LaneIndex, bytes: u32) {
        let moved = &mut self.moved[lane.0 as usize % MAX_LANES];
        if moved.turn != self.turn {
            (moved.turn, moved.bytes) = (self.turn, 0);
        }
        moved.bytes = moved.bytes.saturating_add(bytes);
    }

    fn bouncing(&mut self, lane: LaneIndex) -> &mut u32 {
        &mut self.moved[lane.0 as usize % MAX_LANES].bounces
    }

    /// A command has ended, or never began: its memory may be unmapped.
    #[inline]
    pub(super) fn let_go(&mut self, io: usize) {
        self.holds[io] = Hold::default();
    }

    /// Takes over a command's pieces; how many entries they are.
    fn take(&mut self, io: usize, pieces: &mut Pieces) -> u8 {
        let Some(lists) = &mut self.lists else {
            return 0;
        };
        for (at, slice) in pieces.slices().iter().enumerate() {
            // SAFETY: what keeps it mapped is kept below, until the command has ended; no command ends before all its
            // slices have, and none but this command's operations name the entry. Whether it may be written was
            // asked before the command was taken.
            let buf = unsafe { slice.buf() };
            if !lists.set(io, at, buf) {
                return 0;
            }
        }
        let count = pieces.count() as u8;
        self.holds[io] = pieces.take();
        count
    }

    /// The entries that are the next `len_bytes` of a command; `None` if there are none.
    #[inline]
    fn next(&mut self, index: usize, io: &mut Io, len_bytes: u32) -> Option<Bufs> {
        let (at, pieces) = (usize::from(io.piece_at), usize::from(io.pieces));
        let lists = self.lists.as_mut().filter(|_| at < pieces)?;
        let (count, cut) = lists.cut(index, at, pieces, len_bytes)?;
        // A list has fewer than 256.
        io.pieces += u8::from(cut);
        // SAFETY: set when the command began, and kept mapped until it ends. Entries before `piece_at` are of
        // operations that were submitted, and cut by nobody; those from there on are of none.
        unsafe { lists.bufs(index, at, count) }
    }

    /// Fills the next `len_bytes` of a command with zeros; false if it has no such memory.
    #[cold]
    pub(super) fn zero(&mut self, index: usize, io: &mut Io, len_bytes: u32) -> bool {
        let Some(bufs) = self.next(index, io, len_bytes) else {
            return false;
        };
        for buf in bufs.iter() {
            // SAFETY: a piece of the machine's memory that is mapped until the command ends, and may be written: the
            // command reads into it.
            unsafe { buf.ptr().write_bytes(0, buf.len_bytes() as usize) };
        }
        io.piece_at += bufs.count() as u8;
        self.moves(io.lane, len_bytes);
        true
    }
}

/// Copies between a buffer and as much of a machine's memory.
///
/// # Safety
/// The memory is mapped, and for `into` it may be written.
unsafe fn copy(buffer: &mut StagingBuffer, bufs: Bufs, into: bool) {
    let mut rest = buffer.as_mut_slice();
    for buf in bufs.iter() {
        let Some((ours, later)) = rest.split_at_mut_checked(buf.len_bytes() as usize) else {
            return;
        };
        let memory = buf.ptr().as_ptr();
        // SAFETY: as long as each other, and mapped, as the caller says; staging memory is nobody's but ours.
        unsafe {
            if into {
                memory.copy_from_nonoverlapping(ours.as_ptr(), ours.len());
            } else {
                memory.copy_to_nonoverlapping(ours.as_mut_ptr(), ours.len());
            }
        }
        rest = later;
    }
}

impl Core {
    /// Carries a read or a write out here and now, where its device needs no ring for it, all of it lies in one extent that is
    /// translated, and nothing has to be waited for, before or after. False: it is to be started. So is what failed: it
    /// fails once more then, and is counted.
    #[inline]
    pub fn at_once(&mut self, lane: LaneIndex, op: &IoOp, pieces: &Pieces) -> bool {
        let (offset, len_bytes, write) = match *op {
            IoOp::Read {
                offset_bytes,
                len_bytes,
            } => (offset_bytes, len_bytes, false),
            IoOp::Write {
                offset_bytes,
                len_bytes,
                fua: false,
            } => (offset_bytes, len_bytes, true),
            _ => return false,
        };
        let fits = len_bytes == pieces.len_bytes() && (write || pieces.is_writable());
        if !fits || self.carried.any() || self.machines.moved_enough(lane) {
            return false;
        }
        if self.away.is_helped() && self.whose(lane, 0).is_some() {
            return false;
        }
        let Some(Some(of)) = self.lanes.get(lane.0 as usize) else {
            return false;
        };
        let volume = &of.volume;
        let (extent, extent_bytes) = (offset >> volume.extent_shift, 1 << volume.extent_shift);
        let within = offset & (extent_bytes - 1);
        let is_let = of.machines_may == Access::ALL && !of.removed;
        if !is_let || within + u64::from(len_bytes) > extent_bytes {
            return false;
        }
        let reactor_side::Access::Device(word) = access(volume.table.lookup(extent), write) else {
            return false;
        };
        let Some(Some(served)) = self.devices.get(usize::from(word.device().0)) else {
            return false;
        };
        let config = &served.config;
        if word.extent().0 >= config.extents {
            return false;
        }
        let at =
            config.data_offset_bytes + word.extent().0 * u64::from(config.extent_bytes) + within;
        let Some(now) = served.device.now(at, len_bytes) else {
            return false;
        };
        if let Some(admission) = &mut self.admission {
            let operation = if write {
                Operation::Write
            } else {
                Operation::Read
            };
            if !admission.admit(lane, operation, len_bytes) {
                return false;
            }
        }
        // SAFETY: `pieces` holds them, and outlives this; for a read they may be written, as was just asked.
        let bufs = pieces.slices().iter().map(|slice| unsafe { slice.buf() });
        if now.transfer(write, bufs).is_err() {
            return false;
        }
        self.machines.moves(lane, len_bytes);
        if self.away.spreads() {
            self.away.began(true);
        }
        true
    }

    /// Begins a machine's command. Its bytes lie in its memory, in pieces as long as the operation says (and to be
    /// written if it reads); or its frontend has made a buffer of them, and there are no pieces. It comes back through
    /// [`Core::next_ended`], once, and without a buffer. One of more than [`MAX_TRANSFER_BYTES`], or more than its
    /// pieces are, fails.
    ///
    /// # Errors
    /// The command itself, when there is no room or memory for it now; then nothing was taken of the pieces.
    pub fn start_machine(&mut self, mut new: NewIo, pieces: &mut Pieces) -> Result<(), NewIo> {
        if self.is_kept_out(new.lane, &new.op) {
            self.refuse(new, pieces);
            return Ok(());
        }
        let len_bytes = match new.op {
            IoOp::Read { len_bytes, .. } | IoOp::Write { len_bytes, .. } => {
                return self.start_direct(new, pieces, len_bytes);
            }
            IoOp::Compare { len_bytes, .. } => len_bytes,
            IoOp::Deallocate { ranges } => u32::from(ranges) * 16,
            IoOp::Flush | IoOp::WriteZeroes { .. } | IoOp::CompareAndWrite { .. } => 0,
        };
        if !self.may_start(new.lane) {
            return Err(new);
        }
        let has_bytes = len_bytes <= MAX_TRANSFER_BYTES.min(pieces.len_bytes());
        if new.buffer.is_none() && !has_bytes {
            pieces.clear();
            self.ended.push(DoneIo {
                owner: new.owner,
                lane: new.lane,
                op: new.op,
                status: Status::INTERNAL_ERROR,
                buffer: None,
                started_ns: self.now_ns,
            });
            if self.carried.any() {
                self.carried_refused(new.record);
            }
            return Ok(());
        }
        let copies = len_bytes > 0 && new.buffer.is_none();
        if copies {
            let Some(mut buffer) = self.staging.take(len_bytes) else {
                return Err(new);
            };
            // So many there are, as was just looked at.
            let _ = pieces.read(0, buffer.as_mut_slice());
            new.buffer = Some(buffer);
        }
        let (lane, compares) = (new.lane, matches!(new.op, IoOp::Compare { .. }));
        let started = match compares {
            true => self.start_comparing(new, Expected::default()),
            false => self.start(new),
        };
        match started {
            Ok(()) if copies && compares => self.copied(lane, len_bytes),
            Ok(()) => {}
            Err(mut new) => {
                if copies && let Some(buffer) = new.buffer.take() {
                    self.staging.give(buffer);
                }
                return Err(new);
            }
        }
        pieces.clear();
        Ok(())
    }

    /// Whether a host has reserved the volume, and machines may not do this.
    #[inline]
    fn is_kept_out(&self, lane: LaneIndex, op: &IoOp) -> bool {
        match self.lane(lane) {
            Some(lane) if lane.machines_may != Access::ALL => !op.is_let_by(&lane.machines_may),
            _ => false,
        }
    }

    /// Whether a host's reservation keeps machines from writing, and so from flushing (Base 2.0, 8.19.1). Frontends ask
    /// for a guest's own flush: one that [`Core::start_machine`] is given may be the first half of a read, or a shutdown's.
    pub(crate) fn keeps_machines_from_writing(&self, lane: LaneIndex) -> bool {
        self.lane(lane).is_some_and(|lane| !lane.machines_may.write)
    }

    #[cold]
    fn refuse(&mut self, mut new: NewIo, pieces: &mut Pieces) {
        pieces.clear();
        if let Some(buffer) = new.buffer.take() {
            self.staging.give(buffer);
        }
        self.ended.push(DoneIo {
            owner: new.owner,
            lane: new.lane,
            op: new.op,
            status: Status::RESERVATION_CONFLICT.with_dnr(),
            buffer: None,
            started_ns: self.now_ns,
        });
        if self.carried.any() {
            self.carried_refused(new.record);
        }
    }

    /// Begins a read or a write.
    #[inline]
    fn start_direct(
        &mut self,
        new: NewIo,
        pieces: &mut Pieces,
        len_bytes: u32,
    ) -> Result<(), NewIo> {
        if !self.may_start(new.lane) {
            return Err(new);
        }
        if self.carried.any() {
            self.settle_orphans();
        }
        let Some(index) = self.free_ios.pop() else {
            return Err(new);
        };
        // One without memory ends with an error.
        let fits = len_bytes <= MAX_TRANSFER_BYTES.min(pieces.len_bytes())
            && (pieces.is_writable() || !matches!(new.op, IoOp::Read { .. }));
        let count = match fits {
            true => self.machines.take(index as usize, pieces),
            false => 0,
        };
        pieces.clear();
        self.begin(new, index, count);
        Ok(())
    }

    /// Puts a slice of a command to its device, whose bytes are the next of its machine's memory: so many, or fewer.
    pub(super) fn put_pieces(
        &mut self,
        io: usize,
        word: Word,
        device_at: u64,
        len_bytes: &mut u64,
        fua: bool,
        span: SliceSpan,
    ) -> Put {
        if self.machines.moved_enough(self.ios[io].lane) {
            return Put::NoRoom;
        }
        // No longer than a command may be.
        let bytes = *len_bytes as u32;
        let Some(bufs) = self.machines.next(io, &mut self.ios[io], bytes) else {
            return Put::NoMemory;
        };
        let op = match (span.write, fua) {
            (false, _) => Op::read_pieces(device_at, bufs),
            (true, false) => Op::write_pieces(device_at, bufs),
            (true, true) => Op::write_pieces(device_at, bufs).with_dsync(),
        };
        let served = self.devices[usize::from(word.device().0)].as_ref();
        if served.is_some_and(|served| !served.device.takes(&op)) {
            let bytes = bytes.min(BOUNCE_BYTES);
            *len_bytes = u64::from(bytes);
            return self.put_bounced(io, word, (device_at, bytes, fua), span);
        }
        let before = self.ios[io].slices;
        let put = self.put(io, word, op, span);
        if let Put::Ok = put {
            let io = &mut self.ios[io];
            io.piece_at += bufs.count() as u8;
            if io.slices == before {
                // Done at once: by the processor.
                self.machines.moves(io.lane, bytes);
            }
        }
        put
    }

    /// The same through a buffer of ours.
    #[cold]
    fn put_bounced(
        &mut self,
        io: usize,
        word: Word,
        (device_at, len_bytes, fua): (u64, u32, bool),
        span: SliceSpan,
    ) -> Put {
        let lane = self.ios[io].lane;
        let own = *self.machines.bouncing(lane) as usize;
        if own >= self.staging.left_for(len_bytes).clamp(1, MAX_BOUNCES) {
            return Put::NoSlice;
        }
        let Some(bufs) = self.machines.next(io, &mut self.ios[io], len_bytes) else {
            return Put::NoMemory;
        };
        let Some(mut buffer) = self.staging.take(len_bytes) else {
            // Tried again every turn.
            return Put::NoRoom;
        };
        if span.write {
            // SAFETY: the command's own pieces, mapped until it ends.
            unsafe { copy(&mut buffer, bufs, false) };
        }
        let op = match (buffer.part(0, len_bytes), span.write, fua) {
            (None, ..) => {
                self.staging.give(buffer);
                return Put::NoMemory;
            }
            (Some(part), false, _) => Op::read(device_at, part),
            (Some(part), true, false) => Op::write(device_at, part),
            (Some(part), true, true) => Op::write(device_at, part).with_dsync(),
        };
        self.machines.moves(lane, len_bytes);
        // Where it will be, if it is queued.
        let index = self.free_slices.last().map_or(0, |index| *index as usize);
        let put = self.put(io, word, op, span);
        let Put::Ok = put else {
            self.staging.give(buffer);
            return put;
        };
        self.ios[io].piece_at += bufs.count() as u8;
        *self.machines.bouncing(lane) += 1;
        self.copied(lane, len_bytes);
        let bounce = Bounce { buffer, bufs };
        match self.slices[index].as_mut() {
            Some(slice) => {
                slice.marks |= BOUNCED;
                self.machines.bounces[index] = Some(bounce);
            }
            None => self.bounced(lane, bounce, !span.write),
        }
        Put::Ok
    }

    /// A slice that went through a buffer of ours has ended.
    #[cold]
    pub(super) fn bounce_ended(&mut self, index: usize, slice: &Slice, good: bool) {
        let lane = self.ios[slice.io as usize].lane;
        if let Some(bounce) = self.machines.bounces[index].take() {
            self.bounced(lane, bounce, good && !slice.span.write);
        }
    }

    fn bounced(&mut self, lane: LaneIndex, mut bounce: Bounce, read: bool) {
        if read {
            self.machines.moves(lane, bounce.bufs.len_bytes());
            // SAFETY: the pieces of a command that reads and has not ended: mapped, and to be written.
            unsafe { copy(&mut bounce.buffer, bounce.bufs, true) };
        }
        *self.machines.bouncing(lane) -= 1;
        self.staging.give(bounce.buffer);
    }
}
