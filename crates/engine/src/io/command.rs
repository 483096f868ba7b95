//! A command in the core, from the frontend's request to its one completion.
//!
//! **Design.** Commands live in a fixed slab. Code that works on one holds its [`Token`], which
//! must go into a list, into flight, or to the command's end; dropping it panics. **Not here:** the
//! work itself ([`crate::core`]).

use crate::io::parked::NONE;
use crate::io::staging::StagingBuffer;
use crate::lane::LaneIndex;
use forebay_nvme::Status;
use forebay_nvme::reservation::Access;
use forebay_xlate::boundary::region::{Blame, MAX_QUEUE_ENTRIES, MAX_QUEUES, OpKind};
use forebay_xlate::reactor_side::Parked;

/// Receiver of the result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Issuer {
    /// Its frontend.
    pub frontend: FrontendIndex,
    /// The frontend's connection.
    pub conn: u32,
    /// Generation of the connection slot.
    pub conn_generation: u32,
    /// The command's slot on that queue.
    pub slot: u16,
}

/// A frontend's index within its reactor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FrontendIndex(pub u8);

impl FrontendIndex {
    const SHIFT: u32 = 56;

    /// The epoll key of a watched object, whose number has 56 bits.
    pub(crate) const fn key(self, number: u64) -> u64 {
        (self.0 as u64) << Self::SHIFT | number & ((1 << Self::SHIFT) - 1)
    }

    /// Whether the key belongs to the frontend.
    pub(crate) const fn has_key(self, key: u64) -> bool {
        key >> Self::SHIFT == self.0 as u64
    }
}

/// A command's record in the state region, or a VM command's identity.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CommandRef(u32);

impl CommandRef {
    /// A VM's command; its record is in the VM's state file.
    #[inline]
    pub(crate) const fn vm(lane: u32, slot: u16) -> Self {
        Self(Blame::vm(lane, slot) as u32)
    }

    /// Whether it is a VM's command.
    #[inline]
    pub(crate) const fn is_vm(self) -> bool {
        Blame::vm_of_word(self.0 as u64).is_some()
    }

    /// A queue's command.
    #[inline]
    pub(crate) const fn new(queue: u32, slot: u16) -> Self {
        Self(Blame::command(queue, slot) as u32)
    }

    /// Place among all queues' commands; meaningless for a VM's.
    #[inline]
    pub(crate) const fn place(self) -> usize {
        self.0 as usize % (MAX_QUEUES * MAX_QUEUE_ENTRIES)
    }

    /// Queue slot; `None` for a VM's command.
    #[inline]
    pub(crate) const fn queue(self) -> Option<u32> {
        match self.is_vm() {
            true => None,
            false => Some((self.place() / MAX_QUEUE_ENTRIES) as u32),
        }
    }

    /// Lane of a VM's command.
    pub(crate) const fn vm_lane(self) -> Option<LaneIndex> {
        match Blame::vm_of_word(self.0 as u64) {
            Some((lane, _)) => Some(LaneIndex(lane)),
            None => None,
        }
    }

    /// Word in the state region that blames it for a crash.
    #[inline]
    pub(crate) const fn blame(self) -> u64 {
        self.0 as u64
    }
}

/// Operation; ranges are checked against the volume's size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum IoOp {
    /// Reads into the buffer.
    Read {
        /// Start.
        offset_bytes: u64,
        /// Length.
        len_bytes: u32,
    },
    /// Writes from the buffer.
    Write {
        /// Start.
        offset_bytes: u64,
        /// Length.
        len_bytes: u32,
        /// Force unit access.
        fua: bool,
    },
    /// Compares with the buffer.
    Compare {
        /// Start.
        offset_bytes: u64,
        /// Length.
        len_bytes: u32,
    },
    /// Writes one block if the old data is as expected ([`crate::core::Core::start_comparing`]). It
    /// ends as Write, or with Compare Failure.
    CompareAndWrite {
        /// Start.
        offset_bytes: u64,
        /// Length.
        len_bytes: u32,
        /// Force unit access.
        fua: bool,
    },
    /// Makes all completed writes durable.
    Flush,
    /// Writes zeros.
    WriteZeroes {
        /// Start.
        offset_bytes: u64,
        /// Length.
        len_bytes: u64,
        /// Whether the space may be freed.
        deallocate: bool,
        /// Force unit access.
        fua: bool,
    },
    /// Frees space; the buffer holds NVMe ranges of 16 bytes.
    Deallocate {
        /// Number of ranges.
        ranges: u16,
    },
}

impl IoOp {
    /// A flush may be the first half of a read (`core::Core::keeps_vms_from_writing`).
    pub(crate) fn is_let_by(&self, access: &Access) -> bool {
        match self {
            Self::Read { .. } | Self::Compare { .. } => access.read,
            Self::Flush => true,
            _ => access.write,
        }
    }

    /// Kind in the statistics.
    #[inline]
    pub(crate) fn kind(&self) -> OpKind {
        match self {
            Self::Read { .. } | Self::Compare { .. } => OpKind::Read,
            Self::Write { .. } | Self::CompareAndWrite { .. } => OpKind::Write,
            Self::Flush => OpKind::Flush,
            Self::WriteZeroes { .. } | Self::Deallocate { .. } => OpKind::Deallocate,
        }
    }

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

    pub(crate) fn writes(&self) -> bool {
        match self {
            Self::Write { .. }
            | Self::CompareAndWrite { .. }
            | Self::WriteZeroes { .. }
            | Self::Deallocate { .. } => true,
            Self::Read { .. } | Self::Compare { .. } | Self::Flush => false,
        }
    }

    pub(crate) fn reads(&self) -> bool {
        matches!(
            self,
            Self::Read { .. } | Self::Compare { .. } | Self::CompareAndWrite { .. }
        )
    }
}

/// A command for the core.
#[derive(Debug)]
pub(crate) struct NewIo {
    /// Receiver of the result.
    pub owner: Issuer,
    /// Its lane.
    pub lane: LaneIndex,
    /// Operation.
    pub op: IoOp,
    /// Its bytes, at least as long as needed.
    pub buffer: Option<StagingBuffer>,
    /// Its record.
    pub record: CommandRef,
    /// Earlier wait of its lane for budget, if the frontend held it back (`Qos::over_ns`).
    pub over_ns: Option<u64>,
}

/// A command that ended.
#[derive(Debug)]
pub(crate) struct DoneIo {
    /// Receiver of the result.
    pub owner: Issuer,
    /// Its lane.
    pub lane: LaneIndex,
    /// Operation.
    pub op: IoOp,
    /// Result.
    pub status: Status,
    /// Its bytes, to be given back.
    pub buffer: Option<StagingBuffer>,
    /// Start, CLOCK_MONOTONIC ns.
    pub started_ns: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stage {
    Free,
    /// Its slices are at devices, or it is being worked on.
    AtDevices,
    Parked(Parked),
    DeviceWait,
    /// An older overlapping operation may still be at a device.
    RecoveryWait,
    RingWait,
    /// The lane has its maximum of slices.
    SliceWait,
    Flushing,
    Committing,
    Releasing,
    /// Over budget, or the turn's part is used up.
    Throttled,
}

#[derive(Debug)]
pub(crate) struct Io {
    pub owner: Issuer,
    pub lane: LaneIndex,
    pub op: IoOp,
    pub buffer: Option<StagingBuffer>,
    pub record: CommandRef,
    /// The lane's wait for budget when this command began to wait, here or in the frontend.
    pub over_ns: Option<u64>,
    pub started_ns: u64,
    pub deadline_ns: u64,
    pub stage: Stage,
    pub status: Status,
    /// Bytes of the present range that are submitted or done.
    pub cursor: u64,
    pub range_index: u16,
    pub slices: u32,
    pub flushes: u32,
    pub commit: u64,
    /// Bytes of a release that the owner was asked for.
    pub releasing: u64,
    /// The command parked before it, or throttled after it.
    pub link: u32,
    /// Stale answers are ignored.
    pub generation: u32,
    /// Entries of its list ([`crate::io::guest_memory`]).
    pub pieces: u8,
    /// Entries before this one are submitted.
    pub piece_at: u8,
}

impl Io {
    /// Whether it is a write whose rest covers the extent.
    pub(crate) fn covers(&self, extent: u64, extent_shift: u32) -> bool {
        let IoOp::Write {
            offset_bytes,
            len_bytes,
            ..
        } = self.op
        else {
            return false;
        };
        let start = extent << extent_shift;
        offset_bytes + self.cursor <= start
            && start + (1 << extent_shift) <= offset_bytes + u64::from(len_bytes)
    }

    pub(crate) fn empty() -> Self {
        Self {
            owner: Issuer {
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

/// The duty to continue a command.
#[derive(Debug)]
pub(crate) struct Token(u32);

impl Token {
    pub(crate) fn of(index: u32) -> Self {
        Token(index)
    }

    pub(crate) fn index(&self) -> usize {
        self.0 as usize
    }

    /// A list or a slice will find the command by index.
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
