//! Commands whose bytes lie in a VM's memory.
//!
//! **Design.** Such a command has a list of memory pieces beside the slab
//! ([`forebay_device::Vectors`]); slices name its entries and cut them where necessary. So devices
//! access VM memory without copies. The command's [`Hold`] keeps it mapped until all slices have
//! ended ([`forebay_guest::Retired`]). A slice that the device cannot take directly (unaligned for
//! direct I/O) *bounces* through staging buffers, in small parts; `copied_bytes` counts this, as it
//! counts Compare. Data to compare and Deallocate ranges are copied before the command begins, so
//! that they cannot change.
//!
//! A lane never has more bouncing parts than it leaves to others. The bytes that the processor
//! moves per lane and turn (copies, holes, devices in memory) are bounded ([`TURN_BYTES`]). **Not
//! here:** commands that end at once ([`crate::core::Core::at_once`]), and the frontend's search
//! for pieces.

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

/// Entries of a list: its pieces, and one per cut, at ends of extents (at least 64 KiB) and of
/// bouncing parts.
const LIST: usize = 176;
const _: () = assert!(LIST <= u8::MAX as usize);
const _: () = assert!(MAX_PIECES + 3 * (MAX_TRANSFER_BYTES / BOUNCE_BYTES) as usize <= LIST);

/// Bytes that the processor moves for a VM in one turn, approximately.
const TURN_BYTES: u32 = 1 << 20;
const BOUNCE_BYTES: u32 = 64 << 10;
/// Most bouncing parts of a lane.
const MAX_BOUNCES: usize = 64;

#[derive(Debug)]
struct Bounce {
    buffer: StagingBuffer,
    bufs: Bufs,
}

#[derive(Debug)]
pub(crate) struct VmCommands {
    /// By place in the slab. `None`: no memory for the table.
    lists: Option<Vectors>,
    holds: Vec<Hold>,
    /// By the slice's place.
    bounces: Vec<Option<Bounce>>,
    turn: u64,
    moved: Vec<Submitted>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Submitted {
    turn: u64,
    bytes: u32,
    bounces: u32,
}

impl VmCommands {
    pub(crate) fn new() -> Self {
        Self {
            lists: Vectors::new(MAX_IOS, LIST).ok(),
            holds: (0..MAX_IOS).map(|_| Hold::default()).collect(),
            bounces: (0..MAX_SLICES).map(|_| None).collect(),
            turn: 0,
            moved: vec![Submitted::default(); MAX_LANES],
        }
    }

    /// Begins a turn, before set-aside and new commands.
    #[inline]
    pub(crate) fn turn(&mut self) {
        self.turn += 1;
    }

    #[inline]
    pub(crate) fn moved_enough(&self, lane: LaneIndex) -> bool {
        let moved = &self.moved[lane.0 as usize % MAX_LANES];
        moved.turn == self.turn && moved.bytes >= TURN_BYTES
    }

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

    /// Releases a command's memory, which may then be unmapped.
    #[inline]
    pub(crate) fn let_go(&mut self, io: usize) {
        self.holds[io] = Hold::default();
    }

    /// Takes over a command's pieces; returns the number of entries.
    pub(crate) fn hold_pieces(&mut self, io: usize, pieces: &mut Pieces) -> u8 {
        let Some(lists) = &mut self.lists else {
            return 0;
        };
        for (at, slice) in pieces.slices().iter().enumerate() {
            // SAFETY: the hold stored below keeps it mapped until the command has ended, after all
            // its slices. Only this command's operations name the entry. Write permission was
            // checked before the command was taken.
            let buf = unsafe { slice.buf() };
            if !lists.set(io, at, buf) {
                return 0;
            }
        }
        let count = pieces.count() as u8;
        self.holds[io] = pieces.take();
        count
    }

    /// The entries of the next `len_bytes`.
    #[inline]
    fn next(&mut self, index: usize, io: &mut Io, len_bytes: u32) -> Option<Bufs> {
        let (at, pieces) = (usize::from(io.piece_at), usize::from(io.pieces));
        let lists = self.lists.as_mut().filter(|_| at < pieces)?;
        let (count, cut) = lists.cut(index, at, pieces, len_bytes)?;
        io.pieces += u8::from(cut);
        // SAFETY: set when the command began, and mapped until it ends. Entries before `piece_at`
        // belong to submitted operations and are never cut. Later ones belong to no operation.
        unsafe { lists.bufs(index, at, count) }
    }

    /// Ends a bounced slice. `into`: it was a read, whose data goes into the VM's memory.
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
            // SAFETY: the pieces of a read that has not ended: mapped and writable.
            unsafe { copy(&mut buffer, bufs, true) };
        }
        *self.bouncing(lane) -= 1;
        staging.release(buffer);
    }

    /// Fills the next bytes of a command with zeros; false if it has no memory there.
    #[cold]
    pub(crate) fn zero(&mut self, index: usize, io: &mut Io, len_bytes: u32) -> bool {
        let Some(bufs) = self.next(index, io, len_bytes) else {
            return false;
        };
        for buf in bufs.iter() {
            // SAFETY: a piece of the VM's memory that stays mapped until the command ends. It is
            // writable, since the command is a read.
            unsafe { buf.ptr().write_bytes(0, buf.len_bytes() as usize) };
        }
        io.piece_at += bufs.count() as u8;
        self.moves(io.lane, len_bytes);
        true
    }
}

/// Copies between a buffer and a VM's memory of equal length.
///
/// # Safety
/// The memory is mapped and, for `into`, writable.
unsafe fn copy(buffer: &mut StagingBuffer, bufs: Bufs, into: bool) {
    let mut rest = buffer.as_mut_slice();
    for buf in bufs.iter() {
        let Some((ours, later)) = rest.split_at_mut_checked(buf.len_bytes() as usize) else {
            return;
        };
        let memory = buf.ptr().as_ptr();
        // SAFETY: equal lengths, and mapped as the caller promises. Staging memory belongs only to
        // the engine, so the two do not overlap.
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
    /// Submits the next `len_bytes` as a slice; shortens `len_bytes` if necessary.
    pub(crate) fn put_pieces(
        &mut self,
        word: Word,
        device_at: u64,
        len_bytes: &mut u64,
        fua: bool,
        span: SliceSpan,
    ) -> Put {
        if self.vms.moved_enough(self.io.lane) {
            return Put::NoRoom;
        }
        let bytes = *len_bytes as u32;
        let Some(bufs) = self.vms.next(self.index, self.io, bytes) else {
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
                // The processor did it at once.
                self.vms.moves(self.io.lane, bytes);
            }
        }
        put
    }

    #[cold]
    fn put_bounced(
        &mut self,
        word: Word,
        (device_at, len_bytes, fua): (u64, u32, bool),
        span: SliceSpan,
    ) -> Put {
        let lane = self.io.lane;
        let own = *self.vms.bouncing(lane) as usize;
        if own >= self.staging.left_for(len_bytes).clamp(1, MAX_BOUNCES) {
            return Put::NoSlice;
        }
        let Some(bufs) = self.vms.next(self.index, self.io, len_bytes) else {
            return Put::NoMemory;
        };
        let Some(mut buffer) = self.staging.allocate(len_bytes) else {
            // It is retried every turn.
            return Put::NoRoom;
        };
        if span.write {
            // SAFETY: the command's own pieces, mapped until it ends.
            unsafe { copy(&mut buffer, bufs, false) };
        }
        let op = match (buffer.part(0, len_bytes), span.write, fua) {
            (None, ..) => {
                self.staging.release(buffer);
                return Put::NoMemory;
            }
            (Some(part), false, _) => Op::read(device_at, part),
            (Some(part), true, false) => Op::write(device_at, part),
            (Some(part), true, true) => Op::write(device_at, part).with_dsync(),
        };
        self.vms.moves(lane, len_bytes);
        let index = self.slices.free.last().map_or(0, |index| *index as usize);
        let put = self.put(word, op, span);
        let Put::Ok = put else {
            self.staging.release(buffer);
            return put;
        };
        self.io.piece_at += bufs.count() as u8;
        *self.vms.bouncing(lane) += 1;
        bump(&self.lane.record().copied_bytes, u64::from(len_bytes));
        self.vms.bounces[index] = Some(Bounce { buffer, bufs });
        match self.slices.get_mut(index) {
            Some(slice) => slice.bounced = true,
            None => (self.vms).bounce_ended(index, lane, !span.write, self.staging),
        }
        Put::Ok
    }
}
