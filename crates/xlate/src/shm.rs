//! Shared memory between processes: a mapped file, accessed only as atomics ([`Cells`]), because
//! the other process may change any byte at any time. The crate's only unsafe code.

#![allow(unsafe_code)]

use rustix::fs::{Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Types that may lie in memory which another process changes.
///
/// # Safety
/// `repr(C)`, no padding, valid for all bit patterns. Fields are atomics, `Cells` types or arrays
/// of them.
pub unsafe trait Cells: Sync {}
// SAFETY: an atomic is valid for all bit patterns and may change under a shared reference.
unsafe impl Cells for AtomicU64 {}
// SAFETY: as above.
unsafe impl Cells for AtomicU32 {}
// SAFETY: an array adds no padding.
unsafe impl<T: Cells, const N: usize> Cells for [T; N] {}

/// A shared mapping and its descriptor.
#[derive(Debug)]
pub struct SharedMemory {
    base: *mut u8,
    len: usize,
    file: OwnedFd,
}

// SAFETY: the mapping lives as long as the value and is reached only through `Cells`, which are
// Sync.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Creates or empties the file at `path`: `len` zero bytes, for its owner only.
    pub fn create(path: &Path, len: usize) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?;
        rustix::fs::ftruncate(&file, len as u64)?;
        Self::map(file, len)
    }

    /// Maps an existing file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        Self::from_fd(file)
    }

    /// Maps a descriptor's file at its present length.
    pub fn from_fd(file: OwnedFd) -> io::Result<Self> {
        let len = rustix::fs::fstat(&file)?.st_size;
        let len = usize::try_from(len)
            .map_err(|_| io::Error::other("shared memory of negative length"))?;
        Self::map(file, len)
    }

    /// Anonymous shared memory with a descriptor.
    pub fn anonymous(name: &str, len: usize) -> io::Result<Self> {
        let file = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, len as u64)?;
        Self::map(file, len)
    }

    fn map(file: OwnedFd, len: usize) -> io::Result<Self> {
        if len == 0 {
            return Err(io::Error::other("shared memory of no bytes"));
        }
        // SAFETY: a new mapping, where the kernel chooses, aliases none of our memory.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )
        }?;
        Ok(Self {
            base: base.cast(),
            len,
            file,
        })
    }

    /// Allocates the whole file. Otherwise a store to an untouched page raises SIGBUS on a full
    /// file system.
    pub fn allocate(&self) -> io::Result<()> {
        let flags = rustix::fs::FallocateFlags::empty();
        match rustix::fs::fallocate(&self.file, flags, 0, self.len as u64) {
            Err(rustix::io::Errno::OPNOTSUPP) | Ok(()) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Bytes mapped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: an empty mapping cannot be made.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The descriptor, for passing on.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Lays `count` values of `T` over the mapping; `None` if outside or misaligned.
    pub fn cells<T: Cells>(&self, offset: usize, count: usize) -> Option<&[T]> {
        let bytes = count.checked_mul(size_of::<T>())?;
        if offset.checked_add(bytes)? > self.len || !offset.is_multiple_of(align_of::<T>()) {
            return None;
        }
        // SAFETY: in bounds and aligned (the mapping is page aligned). `Cells` types allow any
        // bytes and changes at any time. Truncation would break this: only we may write to the
        // file, and never shorten it.
        Some(unsafe { std::slice::from_raw_parts(self.base.add(offset).cast::<T>(), count) })
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: our own mapping; the borrows of `cells` end before `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.len) };
    }
}

/// Replaces the kernel's boot id in tests.
#[cfg(feature = "test-device")]
pub const BOOT_VARIABLE: &str = "FOREBAY_BOOT_ID";

/// The kernel's boot id; files of earlier boots have another.
pub fn boot_id() -> io::Result<[u8; 16]> {
    #[cfg(feature = "test-device")]
    let reported = std::env::var(BOOT_VARIABLE).ok();
    #[cfg(not(feature = "test-device"))]
    let reported = None;
    let text = match reported {
        Some(text) => text,
        None => std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?,
    };
    let hex: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let mut id = [0; 16];
    if hex.len() != 32 {
        return Err(io::Error::other("the boot id is not a UUID"));
    }
    for (i, byte) in id.iter_mut().enumerate() {
        let pair = std::str::from_utf8(&hex[2 * i..2 * i + 2]).map_err(io::Error::other)?;
        *byte = u8::from_str_radix(pair, 16).map_err(io::Error::other)?;
    }
    Ok(id)
}

/// Declares a `repr(C)` struct of [`Cells`] fields, which is [`Cells`].
#[macro_export]
macro_rules! cells {
    ($(#[$meta:meta])* $vis:vis struct $name:ident { $($(#[$fmeta:meta])* $fvis:vis $field:ident : $ty:ty,)* }) => {
        $(#[$meta])*
        #[repr(C)]
        $vis struct $name { $($(#[$fmeta])* $fvis $field: $ty,)* }
        const _: () = {
            const fn cells<T: $crate::shm::Cells>() -> usize { size_of::<T>() }
            assert!(size_of::<$name>() == 0 $(+ cells::<$ty>())*, "padding");
        };
        // SAFETY: the assertion above checks for `Cells` fields and no padding.
        #[allow(unsafe_code)]
        unsafe impl $crate::shm::Cells for $name {}
    };
}
