//! A command in the core: what a frontend hands over, and what comes back, exactly once.
//!
//! **Design.** Commands live in a fixed slab. Code that works on one holds its [`Token`], which can't
//! be dropped: it must go into a list, into flight, or to its end; forgetting one aborts the test
//! that does it. **Not here:** what is done with them ([`crate::core`]).

use crate::io::parked::NONE;
use crate::io::staging::StagingBuffer;
use crate::lane::LaneIndex;
use forebay_nvme::Status;
use forebay_nvme::reservation::Access;
use forebay_xlate::boundary::region::{Blame, MAX_QUEUE_ENTRIES, MAX_QUEUES, OpKind};
use forebay_xlate::reactor_side::Parked;

/// Who gets the result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner {
    /// The frontend that gets it.
    pub frontend: FrontendIndex,
    /// The frontend's connection.
    pub conn: u32,
    /// Which use of that connection slot.
    pub conn_generation: u32,
    /// The command's slot on that queue.
    pub slot: u16,
}

/// A frontend's place among those of its reactor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrontendIndex(pub u8);

impl FrontendIndex {
    const SHIFT: u32 = 56;

    /// The epoll key of something that the frontend watches: its own number for it has 56 bits.
    pub const fn key(self, number: u64) -> u64 {
        (self.0 as u64) << Self::SHIFT | number & ((1 << Self::SHIFT) - 1)
    }

    /// Whether an epoll key is of something that the frontend watches.
    pub const fn has_key(self, key: u64) -> bool {
        key >> Self::SHIFT == self.0 as u64
    }
}

/// Where the command is recorded in the state region; or, of a machine, what it is known by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CommandRef(u32);

impl CommandRef {
    /// Of a machine's lane and its frontend's number. Its record is in the machine file.
    #[inline]
    pub const fn machine(lane: u32, slot: u16) -> Self {
        Self(Blame::machine(lane, slot) as u32)
    }

    /// Whether it is a machine's: it has no place among the commands of queues.
    #[inline]
    pub const fn is_machine(self) -> bool {
        Blame::machine_of_word(self.0 as u64).is_some()
    }

    /// Of a queue's slot and a command's.
    #[inline]
    pub const fn new(queue: u32, slot: u16) -> Self {
        Self(Blame::command(queue, slot) as u32)
    }

    /// Its place among the commands of all queues. Of a machine's it means nothing.
    #[inline]
    pub const fn place(self) -> usize {
        self.0 as usize % (MAX_QUEUES * MAX_QUEUE_ENTRIES)
    }

    /// Queue slot; none of a machine's.
    #[inline]
    pub const fn queue(self) -> Option<u32> {
        match self.is_machine() {
            true => None,
            false => Some((self.place() / MAX_QUEUE_ENTRIES) as u32),
        }
    }

    /// The lane of a machine's command.
    pub const fn machine_lane(self) -> Option<LaneIndex> {
        match Blame::machine_of_word(self.0 as u64) {
            Some((lane, _)) => Some(LaneIndex(lane)),
            None => None,
        }
    }

    /// Who is to blame while a reactor is busy with it.
    #[inline]
    pub const fn blame(self) -> u64 {
        self.0 as u64
    }
}

/// What is to be done, in bytes of the volume; ranges were checked against its size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IoOp {
    /// Into the buffer.
    Read {
        /// From where.
        offset_bytes: u64,
        /// How much.
        len_bytes: u32,
    },
    /// Out of the buffer.
    Write {
        /// To where.
        offset_bytes: u64,
        /// How much.
        len_bytes: u32,
        /// Durable before it ends.
        fua: bool,
    },
    /// Compared with the buffer.
    Compare {
        /// From where.
        offset_bytes: u64,
        /// How much.
        len_bytes: u32,
    },
    /// One block, out of the buffer if it is as expected ([`crate::core::Core::start_comparing`]). It ends as the
    /// Write that it becomes, or with Compare Failure.
    CompareAndWrite {
        /// Where.
        offset_bytes: u64,
        /// How much.
        len_bytes: u32,
        /// Durable before it ends.
        fua: bool,
    },
    /// Everything written and completed before is made durable.
    Flush,
    /// Zeros.
    WriteZeroes {
        /// From where.
        offset_bytes: u64,
        /// How much.
        len_bytes: u64,
        /// Whether the space may be given back.
        deallocate: bool,
        /// Durable before it ends.
        fua: bool,
    },
    /// Gives space back; the buffer holds this many NVMe Dataset Management ranges of 16 bytes.
    Deallocate {
        /// How many.
        ranges: u16,
    },
}

impl IoOp {
    /// Whether a machine with this access may do it. A flush may be the first half of a read
    /// (`core::Core::keeps_machines_from_writing`).
    pub(crate) fn is_let_by(&self, access: &Access) -> bool {
        match self {
            Self::Read { .. } | Self::Compare { .. } => access.read,
            Self::Flush => true,
            _ => access.write,
        }
    }

    /// As what it is counted.
    #[inline]
    pub fn kind(&self) -> OpKind {
        match self {
            Self::Read { .. } | Self::Compare { .. } => OpKind::Read,
            Self::Write { .. } | Self::CompareAndWrite { .. } => OpKind::Write,
            Self::Flush => OpKind::Flush,
            Self::WriteZeroes { .. } | Self::Deallocate { .. } => OpKind::Deallocate,
        }
    }

    /// Where it begins; 0 where it has no such place.
    pub(crate) fn offset_bytes(&self) -> u64 {
        match *self {
            Self::Read { offset_bytes, .. }
            | Self::Write { offset_bytes, .. }
            | Self::Compare { offset_bytes, .. }
            | Self::CompareAndWrite { offset_bytes, .. }
            | Self::WriteZeroes { offset_bytes, .. } => offset_bytes,
            Self::Flush | Self::Deallocate { .. } => 0,
        }
    }

    /// How many bytes of the volume; 0 where that isn't known from it alone.
    pub(crate) fn len_bytes(&self) -> u64 {
        match *self {
            Self::Read { len_bytes, .. }
            | Self::Write { len_bytes, .. }
            | Self::Compare { len_bytes, .. }
            | Self::CompareAndWrite { len_bytes, .. } => u64::from(len_bytes),
            Self::WriteZeroes { len_bytes, .. } => len_bytes,
            Self::Flush | Self::Deallocate { .. } => 0,
        }
    }

    /// Whether it changes what is stored.
    pub(crate) fn writes(&self) -> bool {
        match self {
            Self::Write { .. }
            | Self::CompareAndWrite { .. }
            | Self::WriteZeroes { .. }
            | Self::Deallocate { .. } => true,
            Self::Read { .. } | Self::Compare { .. } | Self::Flush => false,
        }
    }

    /// Whether it is at reading now.
    pub(crate) fn reads(&self) -> bool {
        matches!(
            self,
            Self::Read { .. } | Self::Compare { .. } | Self::CompareAndWrite { .. }
        )
    }
}

/// A command for the core.
#[derive(Debug)]
pub struct NewIo {
    /// Who gets the result.
    pub owner: Owner,
    /// Whose path.
    pub lane: LaneIndex,
    /// What.
    pub op: IoOp,
    /// Its bytes, at least as long as the operation says.
    pub buffer: Option<StagingBuffer>,
    /// Its record.
    pub record: CommandRef,
    /// If its frontend had it wait: how long its lane had waited for its budget until then (`core::Core::over_ns`).
    pub over_ns: Option<u64>,
}

/// A command that ended.
#[derive(Debug)]
pub struct DoneIo {
    /// Who gets the result.
    pub owner: Owner,
    /// Whose path.
    pub lane: LaneIndex,
    /// What it was.
    pub op: IoOp,
    /// How it ended.
    pub status: Status,
    /// Its bytes, to be given back.
    pub buffer: Option<StagingBuffer>,
    /// When it was started, CLOCK_MONOTONIC ns.
    pub started_ns: u64,
}

/// What a command in the slab waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stage {
    /// The slot is free.
    Free,
    /// It has slices at a device, or is being worked on.
    Moving,
    /// The owner was asked about an extent.
    Parked(Parked),
    /// A device is not served yet.
    DeviceWait,
    /// Something older that it overlaps, or its own predecessor, may still be at a device.
    CarriedWait,
    /// The ring had no room.
    RingWait,
    /// The lane has as many slices at devices as it may.
    SliceWait,
    /// Devices are being flushed.
    Flushing,
    /// The owner was asked to commit.
    Committing,
    /// The owner was asked to take back extents.
    Releasing,
    /// It is not admitted yet: its lane is over budget, or had enough of this turn.
    Throttled,
}

/// A command in the slab.
#[derive(Debug)]
pub(crate) struct Io {
    pub owner: Owner,
    pub lane: LaneIndex,
    pub op: IoOp,
    pub buffer: Option<StagingBuffer>,
    pub record: CommandRef,
    /// How long its lane had waited for its budget when it began to wait, here or before it came.
    pub over_ns: Option<u64>,
    pub started_ns: u64,
    pub deadline_ns: u64,
    pub stage: Stage,
    pub status: Status,
    /// Bytes of the present range that are submitted or need nothing.
    pub cursor: u64,
    /// The present range of a Deallocate.
    pub range_index: u16,
    /// Slices at devices.
    pub slices: u32,
    /// Device flushes it waits for.
    pub flushes: u32,
    /// The commit that it waits for.
    pub commit: u64,
    /// Bytes that the owner was asked to take back.
    pub releasing: u64,
    /// In the chain that it is in: the command that parked before it, or that is throttled after it.
    pub link: u32,
    /// Which use of the slot: stale answers are ignored.
    pub generation: u32,
    /// Entries of its list ([`crate::io::machine`]); 0: it has none.
    pub pieces: u8,
    /// Those before this one are submitted.
    pub piece_at: u8,
}

impl Io {
    pub(crate) fn empty() -> Self {
        Self {
            owner: Owner {
                frontend: FrontendIndex(0),
                conn: 0,
                conn_generation: 0,
                slot: 0,
            },
            lane: LaneIndex(0),
            op: IoOp::Flush,
            buffer: None,
            record: CommandRef::new(0, 0),
            over_ns: None,
            started_ns: 0,
            deadline_ns: 0,
            stage: Stage::Free,
            status: Status::SUCCESS,
            cursor: 0,
            range_index: 0,
            slices: 0,
            flushes: 0,
            commit: 0,
            releasing: 0,
            link: NONE,
            generation: 0,
            pieces: 0,
            piece_at: 0,
        }
    }
}

/// The right and the duty to carry a command on.
#[derive(Debug)]
pub(crate) struct Token(u32);

impl Token {
    pub(crate) fn take(index: u32) -> Self {
        Token(index)
    }

    pub(crate) fn index(&self) -> usize {
        self.0 as usize
    }

    /// Gives the duty to a list or to what is in flight, which will take it up again by index.
    pub(crate) fn entrust(self) -> u32 {
        let index = self.0;
        std::mem::forget(self);
        index
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            panic!("command {} was dropped unfinished", self.0);
        }
    }
}
