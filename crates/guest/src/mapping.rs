//! One range of a client's file, mapped.
//!
//! **Design.** What a client hands over is looked at before it is mapped: it must be a file of memory (tmpfs, where a
//! memfd is too, or huge pages), because touching a page of any other may wait for a disk or for the client itself. The
//! descriptor is asked nothing that its file system would have to answer before that is known: it may be the client's
//! own. The file must be as long as the range says; a seal against shrinking is noted, not demanded. Who holds the [`Mapping`]
//! keeps it mapped; the last one unmaps it.
//!
//! **What it does not do.** It doesn't keep the descriptor.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::guard::Guarded;

pub(crate) const PAGE_BYTES: u64 = 4096;
/// Of a file system of huge pages (`linux/magic.h`).
const HUGETLBFS_MAGIC: u64 = 0x958_458f6;

/// Why a client's range isn't mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// No file, or one on a disk, or that another process serves: touching it could block.
    #[error("the descriptor is not of a file in memory (tmpfs, memfd or huge pages)")]
    NotMemory,
    /// The range is empty, or ends past what can be addressed.
    #[error("the range is empty or too long")]
    BadRange,
    /// The file ends before the range does.
    #[error("the file ends at {file_bytes}, before its range does")]
    PastEnd {
        /// The file's size.
        file_bytes: u64,
    },
    /// It overlaps a region that is there.
    #[error("it overlaps memory that is mapped already")]
    Overlaps,
    /// There are as many regions as there may be.
    #[error("there are {limit} regions already")]
    TooMany {
        /// So many may be.
        limit: usize,
    },
    /// Together the regions would be too long.
    #[error("the memory would be longer than {limit_bytes} bytes")]
    TooLong {
        /// So long they may be.
        limit_bytes: u64,
    },
    /// The system refused; `EACCES` and `EPERM` mean that the descriptor has no right to write.
    #[error("it can't be mapped: {0}")]
    System(Errno),
}

impl MapError {
    /// As an error number, as protocols answer with one.
    pub fn errno(&self) -> Errno {
        match self {
            Self::NotMemory | Self::BadRange | Self::PastEnd { .. } => Errno::INVAL,
            Self::Overlaps => Errno::EXIST,
            Self::TooMany { .. } | Self::TooLong { .. } => Errno::NOSPC,
            Self::System(errno) => *errno,
        }
    }
}

/// See the module's text.
#[derive(Debug)]
pub struct Mapping {
    /// Of the range that was asked for.
    ptr: NonNull<u8>,
    len_bytes: u64,
    writable: bool,
    cannot_shrink: bool,
    /// What was mapped: whole pages around the range.
    pub(crate) whole: NonNull<u8>,
    pub(crate) whole_bytes: usize,
    /// Of its pages.
    pub(crate) page_bytes: usize,
    /// Whether it is known which pages are there.
    pub(crate) tells: bool,
    /// It was taken away: nobody begins anything with it.
    retired: AtomicBool,
    /// `None` once it is being unmapped.
    guarded: Option<Guarded>,
}

// SAFETY: an address range that stays mapped as long as the value lives; this crate reaches it through raw pointers
// only, and never makes a reference into it. Wrong if a safe method gave one out.
unsafe impl Send for Mapping {}
// SAFETY: as for Send. Whoever touches one place at once (threads, the kernel, the guest) leaves a mixture; no Rust
// value with invariants lives there.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len_bytes` of a client's file from `offset_bytes` on.
    pub fn new(
        file: BorrowedFd<'_>,
        offset_bytes: u64,
        len_bytes: u64,
        writable: bool,
    ) -> Result<Self, MapError> {
        // Only files in memory have seals; any other is refused without asking its file system, which could take for ever.
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
        // All are below 2^62, and a unit is far below that.
        let unit = unit.max(PAGE_BYTES).next_power_of_two().min(1 << 34);
        let from = offset_bytes & !(unit - 1);
        let whole_bytes = usize::try_from(end.next_multiple_of(unit) - from);
        let whole_bytes = whole_bytes.map_err(|_| MapError::BadRange)?;
        let cannot_shrink = seals.contains(SealFlags::SHRINK);
        let mut protection = ProtFlags::READ;
        protection.set(ProtFlags::WRITE, writable);
        // SAFETY: a new mapping at an address of the kernel's choice touches nobody's memory. Wrong with MAP_FIXED.
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
            // SAFETY: names exactly the new mapping; neither changes what it holds. A dump would hold a tenant's memory.
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

    /// Whether its bytes may be changed.
    #[inline]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// It is being taken away: whoever works on it in the background need not go on.
    pub(crate) fn retire(&self) {
        self.retired.store(true, Ordering::Relaxed);
    }

    /// Whether it is being taken away.
    pub fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Relaxed)
    }

    /// Whether the file is sealed against being shrunk.
    pub fn cannot_shrink(&self) -> bool {
        self.cannot_shrink
    }

    /// Whether a page was gone when it was touched: it reads as zeros since, and the client sees nothing of what is
    /// written there.
    #[inline]
    pub fn is_broken(&self) -> bool {
        self.guarded.as_ref().is_some_and(Guarded::is_broken)
    }

    /// The address of so many bytes from `from_bytes` on; `None` if they aren't inside.
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
        // The handler must not map anything here afterwards.
        self.guarded = None;
        // SAFETY: exactly what was mapped; whoever had an address of it has held the mapping, and does no more. Wrong
        // if an address were used without holding it.
        let _ = unsafe { rustix::mm::munmap(self.whole.as_ptr().cast(), self.whole_bytes) };
    }
}
