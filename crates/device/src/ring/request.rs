//! A device's request, before it is an entry of a ring. In registered memory it becomes the fixed
//! kind of entry.

use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::opcode;
use io_uring::squeue::Entry;
use io_uring::types::{Fd, FsyncFlags};

use crate::fixed::Fixed;
use crate::mem::IoMemory;

/// `struct nvme_uring_cmd`, as bytes of an entry.
pub(crate) type CommandBytes = [u8; 80];

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
    /// The entry of a transfer in the registered buffer `index`.
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
            _ => opcode::Nop::new().build(),
        }
    }

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
