//! What a device asks of a ring, and its entry in the kernel's words.
//!
//! **Purpose.** One value that says what is to be read, written, flushed or zeroed where, before it is an entry.
//!
//! **Design.** Memory that the ring knows makes the entry of another kind, which costs the kernel less. Nothing here
//! allocates.
//!
//! **Not here:** which descriptor and which method a device chooses (`kind`).

use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::opcode;
use io_uring::squeue::Entry;
use io_uring::types::{Fd, FsyncFlags};

use crate::fixed::Fixed;
use crate::mem::IoMemory;

/// `struct nvme_uring_cmd`, as bytes of an entry.
pub(crate) type CommandBytes = [u8; 80];

/// What a device asks of a ring.
pub(crate) enum RingIo<'a> {
    Read {
        fd: BorrowedFd<'a>,
        offset_bytes: u64,
        memory: IoMemory,
    },
    Write {
        fd: BorrowedFd<'a>,
        offset_bytes: u64,
        memory: IoMemory,
        dsync: bool,
    },
    Flush {
        fd: BorrowedFd<'a>,
    },
    /// An NVMe command, for the second ring.
    Native {
        fd: BorrowedFd<'a>,
        memory: IoMemory,
        bytes: CommandBytes,
    },
    Fallocate {
        fd: BorrowedFd<'a>,
        offset_bytes: u64,
        len_bytes: u64,
        mode: i32,
    },
}

impl RingIo<'_> {
    /// That of a transfer whose memory is the ring's entry of this number.
    fn fixed_entry(&self, index: u16) -> Entry {
        match *self {
            RingIo::Read {
                fd,
                offset_bytes,
                memory: IoMemory::One(buf),
            } => {
                let (fd, ptr) = (Fd(fd.as_raw_fd()), buf.ptr().as_ptr());
                opcode::ReadFixed::new(fd, ptr, buf.len_bytes(), index)
                    .offset(offset_bytes)
                    .build()
            }
            RingIo::Read {
                fd,
                offset_bytes,
                memory: IoMemory::Many(bufs),
            } => {
                let (fd, list) = (Fd(fd.as_raw_fd()), bufs.ptr().as_ptr());
                opcode::ReadvFixed::new(fd, list, bufs.count(), index)
                    .offset(offset_bytes)
                    .build()
            }
            RingIo::Write {
                fd,
                offset_bytes,
                memory: IoMemory::One(buf),
                dsync,
            } => {
                let (fd, ptr) = (Fd(fd.as_raw_fd()), buf.ptr().as_ptr());
                opcode::WriteFixed::new(fd, ptr, buf.len_bytes(), index)
                    .offset(offset_bytes)
                    .rw_flags(if dsync { libc::RWF_DSYNC } else { 0 })
                    .build()
            }
            RingIo::Write {
                fd,
                offset_bytes,
                memory: IoMemory::Many(bufs),
                dsync,
            } => {
                let (fd, list) = (Fd(fd.as_raw_fd()), bufs.ptr().as_ptr());
                opcode::WritevFixed::new(fd, list, bufs.count(), index)
                    .offset(offset_bytes)
                    .rw_flags(if dsync { libc::RWF_DSYNC } else { 0 })
                    .build()
            }
            // Nothing else has such memory.
            _ => opcode::Nop::new().build(),
        }
    }

    /// Its entry, without a mark.
    pub(super) fn entry(&self, fixed: &Fixed) -> Entry {
        if let RingIo::Read { memory, .. } | RingIo::Write { memory, .. } = self
            && let Some(index) = fixed.index_of(memory)
        {
            return self.fixed_entry(index);
        }
        match *self {
            RingIo::Read {
                fd,
                offset_bytes,
                memory: IoMemory::One(buf),
            } => opcode::Read::new(Fd(fd.as_raw_fd()), buf.ptr().as_ptr(), buf.len_bytes())
                .offset(offset_bytes)
                .build(),
            RingIo::Read {
                fd,
                offset_bytes,
                memory: IoMemory::Many(bufs),
            } => opcode::Readv::new(Fd(fd.as_raw_fd()), bufs.ptr().as_ptr(), bufs.count())
                .offset(offset_bytes)
                .build(),
            RingIo::Write {
                fd,
                offset_bytes,
                memory: IoMemory::One(buf),
                dsync,
            } => opcode::Write::new(Fd(fd.as_raw_fd()), buf.ptr().as_ptr(), buf.len_bytes())
                .offset(offset_bytes)
                .rw_flags(if dsync { libc::RWF_DSYNC } else { 0 })
                .build(),
            RingIo::Write {
                fd,
                offset_bytes,
                memory: IoMemory::Many(bufs),
                dsync,
            } => opcode::Writev::new(Fd(fd.as_raw_fd()), bufs.ptr().as_ptr(), bufs.count())
                .offset(offset_bytes)
                .rw_flags(if dsync { libc::RWF_DSYNC } else { 0 })
                .build(),
            // `push_io` doesn't ask.
            RingIo::Native { .. } => opcode::Nop::new().build(),
            RingIo::Flush { fd } => opcode::Fsync::new(Fd(fd.as_raw_fd()))
                .flags(FsyncFlags::DATASYNC)
                .build(),
            RingIo::Fallocate {
                fd,
                offset_bytes,
                len_bytes,
                mode,
            } => opcode::Fallocate::new(Fd(fd.as_raw_fd()), len_bytes)
                .offset(offset_bytes)
                .mode(mode)
                .build(),
        }
    }
}
