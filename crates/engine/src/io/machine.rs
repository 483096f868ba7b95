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
//! have had a place here ([`crate::core::Core::at_once`]).
//!
//! **Not here:** how a frontend finds the pieces, and what it does of a client that goes away.

#![allow(unsafe_code)]

use crate::io::command::Io;
use crate::io::slab::MAX_IOS;
use crate::io::slice::MAX_SLICES;
use crate::io::staging::{MAX_TRANSFER_BYTES, Staging, StagingBuffer};
use crate::io::submit::{Put, Submission};
use crate::lane::LaneIndex;
use forebay_device::{Bufs, Op, Vectors};
use forebay_guest::{Hold, MAX_PIECES, Pieces};
use forebay_xlate::Word;
use forebay_xlate::boundary::region::{MAX_LANES, bump};
use forebay_xlate::drain::SliceSpan;

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
pub(crate) struct VmCommands {
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

impl VmCommands {
    pub(crate) fn new() -> Self {
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
    pub(crate) fn turn(&mut self) {
        self.turn += 1;
    }

    /// Whether the processor has moved enough for a lane in this turn.
    #[inline]
    pub(crate) fn moved_enough(&self, lane: LaneIndex) -> bool {
        let moved = &self.moved[lane.0 as usize % MAX_LANES];
        moved.turn == self.turn && moved.bytes >= TURN_BYTES
    }

    /// Whether anything was over at once for it in this turn.
    #[inline]
    pub(crate) fn moved_any(&self, lane: LaneIndex) -> bool {
        self.moved[lane.0 as usize % MAX_LANES].turn == self.turn
    }

    #[inline]
    pub(crate) fn moves(&mut self, lane: LaneIndex, bytes: u32) {
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
    pub(crate) fn let_go(&mut self, io: usize) {
        self.holds[io] = Hold::default();
    }

    /// Takes over a command's pieces; how many entries they are.
    pub(crate) fn take(&mut self, io: usize, pieces: &mut Pieces) -> u8 {
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

    /// A slice that went through a buffer of ours has ended. `into`: what it read goes into the machine's memory.
    #[cold]
    pub(crate) fn bounce_ended(
        &mut self,
        index: usize,
        lane: LaneIndex,
        into: bool,
        staging: &mut Staging,
    ) {
        let Some(Bounce { mut buffer, bufs }) = self.bounces[index].take() else {
            return;
        };
        if into {
            self.moves(lane, bufs.len_bytes());
            // SAFETY: the pieces of a command that reads and has not ended: mapped, and to be written.
            unsafe { copy(&mut buffer, bufs, true) };
        }
        *self.bouncing(lane) -= 1;
        staging.give(buffer);
    }

    /// Fills the next `len_bytes` of a command with zeros; false if it has no such memory.
    #[cold]
    pub(crate) fn zero(&mut self, index: usize, io: &mut Io, len_bytes: u32) -> bool {
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

impl Submission<'_> {
    /// Puts a slice of the command to its device, whose bytes are the next of its machine's memory: so many, or fewer.
    pub(crate) fn put_pieces(
        &mut self,
        word: Word,
        device_at: u64,
        len_bytes: &mut u64,
        fua: bool,
        span: SliceSpan,
    ) -> Put {
        if self.machines.moved_enough(self.io.lane) {
            return Put::NoRoom;
        }
        // No longer than a command may be.
        let bytes = *len_bytes as u32;
        let Some(bufs) = self.machines.next(self.index, self.io, bytes) else {
            return Put::NoMemory;
        };
        let op = match (span.write, fua) {
            (false, _) => Op::read_pieces(device_at, bufs),
            (true, false) => Op::write_pieces(device_at, bufs),
            (true, true) => Op::write_pieces(device_at, bufs).with_dsync(),
        };
        let served = self.devices.get(word.device().0);
        if served.is_some_and(|served| !served.device.takes(&op)) {
            let bytes = bytes.min(BOUNCE_BYTES);
            *len_bytes = u64::from(bytes);
            return self.put_bounced(word, (device_at, bytes, fua), span);
        }
        let before = self.io.slices;
        let put = self.put(word, op, span);
        if let Put::Ok = put {
            self.io.piece_at += bufs.count() as u8;
            if self.io.slices == before {
                // Done at once: by the processor.
                self.machines.moves(self.io.lane, bytes);
            }
        }
        put
    }

    /// The same through a buffer of ours.
    #[cold]
    fn put_bounced(
        &mut self,
        word: Word,
        (device_at, len_bytes, fua): (u64, u32, bool),
        span: SliceSpan,
    ) -> Put {
        let lane = self.io.lane;
        let own = *self.machines.bouncing(lane) as usize;
        if own >= self.staging.left_for(len_bytes).clamp(1, MAX_BOUNCES) {
            return Put::NoSlice;
        }
        let Some(bufs) = self.machines.next(self.index, self.io, len_bytes) else {
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
        let index = self.slices.free.last().map_or(0, |index| *index as usize);
        let put = self.put(word, op, span);
        let Put::Ok = put else {
            self.staging.give(buffer);
            return put;
        };
        self.io.piece_at += bufs.count() as u8;
        *self.machines.bouncing(lane) += 1;
        bump(&self.lane.record().copied_bytes, u64::from(len_bytes));
        self.machines.bounces[index] = Some(Bounce { buffer, bufs });
        match self.slices.get_mut(index) {
            Some(slice) => slice.bounced = true,
            None => (self.machines).bounce_ended(index, lane, !span.write, self.staging),
        }
        Put::Ok
    }
}
