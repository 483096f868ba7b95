//! One mapped range of a client's file, until its last holder drops it.
//!
//! The file must be in memory (tmpfs, memfd or huge pages): a page of any other may wait for a disk
//! or for the client. Until that is known, no call may reach the file system, which may be the
//! client's own. A seal against shrinking is recorded, not required.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::guard::Guarded;

pub(crate) const PAGE_BYTES: u64 = 4096;
/// `linux/magic.h`.
const HUGETLBFS_MAGIC: u64 = 0x958_458f6;

/// Why a client's range is not mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// Not a file, or one served by a disk or another process: an access could block.
    #[error("the descriptor is not a file in memory (tmpfs, memfd or huge pages)")]
    NotMemory,
    /// The range is empty or exceeds the address space.
    #[error("the range is empty or too long")]
    BadRange,
    /// The file ends before the range does.
    #[error("the file ends at {file_bytes}, before the end of the range")]
    PastEnd {
        /// The file's size.
        file_bytes: u64,
    },
    /// It overlaps an existing region.
    #[error("it overlaps memory that is already mapped")]
    Overlaps,
    /// Too many regions.
    #[error("there are already {limit} regions")]
    TooMany {
        /// The limit.
        limit: usize,
    },
    /// Too much memory in all regions.
    #[error("the memory would be longer than {limit_bytes} bytes")]
    TooLong {
        /// The limit.
        limit_bytes: u64,
    },
    /// A system error; `EACCES` and `EPERM`: the descriptor is not writable.
    #[error("it can't be mapped: {0}")]
    System(Errno),
}

impl MapError {
    /// As an error number for protocols.
    pub fn errno(&self) -> Errno {
        match self {
            Self::NotMemory | Self::BadRange | Self::PastEnd { .. } => Errno::INVAL,
            Self::Overlaps => Errno::EXIST,
            Self::TooMany { .. } | Self::TooLong { .. } => Errno::NOSPC,
            Self::System(errno) => *errno,
        }
    }
}

/// A mapped range of a client's file.
#[derive(Debug)]
pub struct Mapping {
    /// The start of the requested range.
    ptr: NonNull<u8>,
    len_bytes: u64,
    writable: bool,
    cannot_shrink: bool,
    /// Whole pages around the range.
    pub(crate) whole: NonNull<u8>,
    pub(crate) whole_bytes: usize,
    /// The page size.
    pub(crate) page_bytes: usize,
    /// Whether `mincore` is reliable: see `tells`.
    pub(crate) tells: bool,
    /// Removed; no new use begins.
    retired: AtomicBool,
    /// `None` during unmapping.
    guarded: Option<Guarded>,
}

// SAFETY: the address range stays mapped as long as the value lives. This crate uses only raw
// pointers to it; a safe method that returned a reference would break this.
unsafe impl Send for Mapping {}
// SAFETY: as for Send. Concurrent accesses mix bytes, but no Rust value with invariants lives
// there.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len_bytes` of a client's file from `offset_bytes` on.
    pub fn new(
        file: BorrowedFd<'_>,
        offset_bytes: u64,
        len_bytes: u64,
        writable: bool,
    ) -> Result<Self, MapError> {
        // Only files in memory have seals. Others must not be asked more: their file system could
        // block for ever.
        let seals = rustix::fs::fcntl_get_seals(file).map_err(|_| MapError::NotMemory)?;
        let stat = rustix::fs::fstat(file).map_err(MapError::System)?;
        let system = rustix::fs::fstatfs(file).map_err(MapError::System)?;
        let unit = match system.f_type as u64 {
            kind if kind == libc::TMPFS_MAGIC as u64 => PAGE_BYTES,
            HUGETLBFS_MAGIC => u64::try_from(system.f_bsize).unwrap_or(PAGE_BYTES),
            _ => return Err(MapError::NotMemory),
        };
        let end = offset_bytes.checked_add(len_bytes);
        let end = end.filter(|end| len_bytes > 0 && *end < 1 << 62);
        let end = end.ok_or(MapError::BadRange)?;
        let file_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        if end > file_bytes {
            return Err(MapError::PastEnd { file_bytes });
        }
        // All are below 2^62; a unit is far smaller.
        let unit = unit.max(PAGE_BYTES).next_power_of_two().min(1 << 34);
        let from = offset_bytes & !(unit - 1);
        let whole_bytes = usize::try_from(end.next_multiple_of(unit) - from);
        let whole_bytes = whole_bytes.map_err(|_| MapError::BadRange)?;
        let cannot_shrink = seals.contains(SealFlags::SHRINK);
        let mut protection = ProtFlags::READ;
        protection.set(ProtFlags::WRITE, writable);
        // SAFETY: a new mapping at an address of the kernel's choice; MAP_FIXED would break this.
        let whole = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                whole_bytes,
                protection,
                MapFlags::SHARED,
                file,
                from,
            )
        };
        let whole = whole.map_err(MapError::System)?;
        let whole = NonNull::new(whole.cast::<u8>()).ok_or(MapError::System(Errno::NOMEM))?;
        // SAFETY: the range begins less than `whole_bytes` after the mapping does.
        let ptr = unsafe { whole.add((offset_bytes - from) as usize) };
        // From here on `drop` unmaps.
        let mut mapping = Self {
            ptr,
            len_bytes,
            writable,
            cannot_shrink,
            whole,
            whole_bytes,
            page_bytes: unit as usize,
            tells: crate::held::tells(file),
            retired: AtomicBool::new(false),
            guarded: None,
        };
        for advice in [Advice::LinuxDontDump, Advice::LinuxDontFork] {
            // SAFETY: names exactly the new mapping, whose content stays. A dump would contain a
            // tenant's memory.
            let _ = unsafe { rustix::mm::madvise(whole.as_ptr().cast(), whole_bytes, advice) };
        }
        let guarded = Guarded::new(whole.addr().get(), whole_bytes, unit as usize);
        mapping.guarded = Some(guarded.map_err(MapError::System)?);
        Ok(mapping)
    }

    /// Its length.
    #[inline]
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Whether it is writable.
    #[inline]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Tells background work on it to stop.
    pub(crate) fn retire(&self) {
        self.retired.store(true, Ordering::Relaxed);
    }

    /// Whether it is being removed.
    pub fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Relaxed)
    }

    /// Whether the file is sealed against shrinking.
    pub fn cannot_shrink(&self) -> bool {
        self.cannot_shrink
    }

    /// Whether a missing page was touched. It reads as zeros, and the client sees no more writes.
    #[inline]
    pub fn is_broken(&self) -> bool {
        self.guarded.as_ref().is_some_and(Guarded::is_broken)
    }

    /// The address of `from_bytes`; `None` if the bytes are not inside.
    #[inline]
    pub(crate) fn at(&self, from_bytes: u64, len_bytes: u64) -> Option<NonNull<u8>> {
        if from_bytes.checked_add(len_bytes)? > self.len_bytes {
            return None;
        }
        // SAFETY: inside the mapping, or one past its end.
        Some(unsafe { self.ptr.add(from_bytes as usize) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // First, so that the handler maps nothing here afterwards.
        self.guarded = None;
        // SAFETY: exactly the mapped range; every user of its addresses held the mapping, so none
        // is left.
        let _ = unsafe { rustix::mm::munmap(self.whole.as_ptr().cast(), self.whole_bytes) };
    }
}
