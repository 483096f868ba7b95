//! Memory that the kernel reads and writes while a request is in flight.
//!
//! Making a [`Buf`] from a pointer is the only unsafe step, and its contract covers every operation
//! that names it. Buffers of a [`StaticRegion`] are safe by construction.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::vectors::Bufs;

/// A piece of memory that an operation reads from or writes into.
#[derive(Debug, Clone, Copy)]
pub struct Buf {
    ptr: NonNull<u8>,
    len_bytes: u32,
}

// SAFETY: a Buf is an address and a length; `Buf::new`'s caller vouches for each access, on any
// thread. Wrong if a safe method returned a reference to the memory.
unsafe impl Send for Buf {}
// SAFETY: as for Send; there is no interior state.
unsafe impl Sync for Buf {}

impl Buf {
    /// Names the memory from `ptr` on.
    ///
    /// # Safety
    ///
    /// The contract starts when an operation that names this buffer (or a part or copy) is
    /// submitted. It ends when its completion was taken from the ring, or with the call if the
    /// operation completes at once. In between:
    ///
    /// - the memory is mapped and readable, and, if the operation is a read, writable;
    /// - the memory isn't freed, unmapped or reused, even if the ring is dropped first;
    /// - no Rust reference to it is used: none at all if the operation is a read, no `&mut` if it
    ///   is a write.
    pub const unsafe fn new(ptr: NonNull<u8>, len_bytes: u32) -> Self {
        Self { ptr, len_bytes }
    }

    /// Its length.
    pub const fn len_bytes(&self) -> u32 {
        self.len_bytes
    }

    /// Its address.
    pub const fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// The part of `len_bytes` from `from_bytes` on; `None` if it isn't inside.
    pub fn slice(&self, from_bytes: u32, len_bytes: u32) -> Option<Self> {
        if from_bytes.checked_add(len_bytes)? > self.len_bytes {
            return None;
        }
        // SAFETY: from_bytes <= self.len_bytes was just checked, so the address is inside the
        // memory or one past its end. The part inherits the contract of the whole.
        Some(unsafe { Self::new(self.ptr.add(from_bytes as usize), len_bytes) })
    }

    pub(crate) fn is_aligned(&self, align_bytes: u32) -> bool {
        self.ptr.addr().get().is_multiple_of(align_bytes as usize)
    }

    /// Only for a read operation in progress.
    pub(crate) fn fill_zero(&self) {
        // SAFETY: called in `Device::queue` of a read, so by `Buf::new`'s contract the memory is
        // mapped, writable and unreferenced. Wrong for the buffer of a write.
        unsafe { self.ptr.write_bytes(0, self.len_bytes as usize) }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum IoMemory {
    One(Buf),
    Many(Bufs),
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Named {
    ptr: NonNull<u8>,
    len_bytes: u32,
    /// 0: a single buffer.
    pieces: u32,
}

// SAFETY: as for `Buf` and `Bufs`, from which it is made.
unsafe impl Send for Named {}
// SAFETY: as for Send; there is no interior state.
unsafe impl Sync for Named {}

impl Named {
    pub(crate) const fn one(buf: Buf) -> Self {
        Self {
            ptr: buf.ptr,
            len_bytes: buf.len_bytes,
            pieces: 0,
        }
    }

    pub(crate) fn list(ptr: NonNull<libc::iovec>, len_bytes: u32, pieces: u32) -> Self {
        Self {
            ptr: ptr.cast(),
            len_bytes,
            pieces,
        }
    }

    #[inline]
    pub(crate) fn get(self) -> IoMemory {
        match self.pieces {
            // SAFETY: pointer and length come from a `Buf`, whose contract still holds.
            0 => IoMemory::One(unsafe { Buf::new(self.ptr, self.len_bytes) }),
            pieces => IoMemory::Many(Bufs::again(self.ptr.cast(), self.len_bytes, pieces)),
        }
    }
}

impl IoMemory {
    /// Calls `each` for every buffer in order, with the number of bytes before it.
    pub(crate) fn try_each(
        &self,
        mut each: impl FnMut(u64, Buf) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        match self {
            Self::One(buf) => each(0, *buf),
            Self::Many(bufs) => {
                let mut before = 0;
                for buf in bufs.iter() {
                    each(before, buf)?;
                    before += u64::from(buf.len_bytes());
                }
                Ok(())
            }
        }
    }
}

/// Memory that stays mapped until the process ends, accessed only by copying in and out.
///
/// It is never unmapped, because the kernel may still write into it after the requester is gone.
/// Make few and large ones. Untouched pages cost nothing.
#[derive(Debug)]
pub struct StaticRegion {
    ptr: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: the address range is mapped forever; safe methods copy through raw pointers and never
// make references. Wrong if `Drop` unmapped it.
unsafe impl Send for StaticRegion {}
// SAFETY: as for Send. Threads (or a thread and the kernel) that copy to one place at once leave a
// mixture, as on a disk. No Rust value with invariants lives here.
unsafe impl Sync for StaticRegion {}

impl StaticRegion {
    /// Zeroed private memory of at least `len_bytes`, page aligned and sparse.
    pub fn anonymous(len_bytes: usize) -> io::Result<Self> {
        // SAFETY: a new anonymous mapping at an address that the kernel chooses. Wrong with
        // MAP_FIXED.
        let ptr = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        Self::adopt(ptr, len_bytes)
    }

    /// Maps `len_bytes` of a memory file that other processes may share. The file must not be
    /// shortened later.
    pub fn shared(file: impl AsFd, len_bytes: usize) -> io::Result<Self> {
        Self::shared_fd(file.as_fd(), len_bytes)
    }

    fn shared_fd(file: BorrowedFd<'_>, len_bytes: usize) -> io::Result<Self> {
        let size = rustix::fs::fstat(file)?.st_size;
        if u64::try_from(size).unwrap_or(0) < len_bytes as u64 {
            return Err(rustix::io::Errno::INVAL.into());
        }
        // SAFETY: a new shared mapping at an address that the kernel chooses; only this region
        // refers to it. Wrong with MAP_FIXED. If the file is shortened later, an access faults
        // (documented above).
        let ptr = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                file,
                0,
            )
        }?;
        Self::adopt(ptr, len_bytes)
    }

    fn adopt(ptr: *mut std::ffi::c_void, len_bytes: usize) -> io::Result<Self> {
        // SAFETY: the advice names exactly the new mapping and leaves its content alone. It keeps
        // tenants' data out of core dumps, which would also delay the fence.
        unsafe { rustix::mm::madvise(ptr, len_bytes, Advice::LinuxDontDump) }?;
        let ptr = NonNull::new(ptr.cast::<u8>()).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Self { ptr, len_bytes })
    }

    /// Its length.
    pub const fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// The buffer of `len_bytes` at `from_bytes`; `None` if it isn't inside.
    pub fn buf(&self, from_bytes: usize, len_bytes: u32) -> Option<Buf> {
        let ptr = self.at(from_bytes, len_bytes as usize)?;
        // SAFETY: the range was checked; the memory stays mapped, readable and writable until the
        // process ends; safe code never has a reference to it. Wrong if the region were unmapped.
        Some(unsafe { Buf::new(ptr, len_bytes) })
    }

    /// Copies bytes out. False if the range isn't inside.
    #[must_use]
    pub fn copy_out(&self, from_bytes: usize, into: &mut [u8]) -> bool {
        let Some(ptr) = self.at(from_bytes, into.len()) else {
            return false;
        };
        // SAFETY: the source range was checked and is mapped. `into` is a different object, because
        // no reference to the region exists.
        unsafe { std::ptr::copy_nonoverlapping(ptr.as_ptr(), into.as_mut_ptr(), into.len()) }
        true
    }

    /// Copies bytes in. False if the range isn't inside.
    #[must_use]
    pub fn copy_in(&self, to_bytes: usize, from: &[u8]) -> bool {
        let Some(ptr) = self.at(to_bytes, from.len()) else {
            return false;
        };
        // SAFETY: as in `copy_out`, with the directions exchanged.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), ptr.as_ptr(), from.len()) }
        true
    }

    pub(crate) fn at(&self, from_bytes: usize, len_bytes: usize) -> Option<NonNull<u8>> {
        if from_bytes.checked_add(len_bytes)? > self.len_bytes {
            return None;
        }
        // SAFETY: from_bytes <= self.len_bytes, so the address is inside the mapping or one past
        // its end.
        Some(unsafe { self.ptr.add(from_bytes) })
    }
}

/// The most zeros that one write takes to a device that can't zero by itself.
pub(crate) const ZEROS_BYTES: u32 = 64 * 1024;

#[repr(align(4096))]
struct ZeroBlock([u8; ZEROS_BYTES as usize]);

static ZEROS: ZeroBlock = ZeroBlock([0; ZEROS_BYTES as usize]);

/// At most [`ZEROS_BYTES`], to be written only.
pub(crate) fn zeros(len_bytes: u32) -> Buf {
    let len_bytes = len_bytes.min(ZEROS_BYTES);
    // SAFETY: a static lives forever and is never written; only write operations name this buffer.
    // Wrong for a read.
    unsafe { Buf::new(NonNull::from(&ZEROS.0).cast(), len_bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_checked() {
        let region = StaticRegion::anonymous(8192).expect("maps");
        assert!(region.copy_in(8190, &[1, 2]));
        let mut two = [0; 2];
        assert!(region.copy_out(8190, &mut two));
        assert_eq!(two, [1, 2]);
        assert!(!region.copy_in(8191, &two));
        assert!(!region.copy_out(usize::MAX, &mut two));
        assert!(region.buf(4096, 4096).is_some());
        assert!(region.buf(4097, 4096).is_none());
        assert!(region.buf(usize::MAX, 1).is_none());
        let buf = region.buf(0, 4096).expect("inside");
        assert!(buf.slice(4095, 1).is_some());
        assert!(buf.slice(4095, 2).is_none());
        assert!(buf.slice(u32::MAX, 2).is_none());
    }

    #[test]
    fn a_shared_region_is_no_longer_than_its_file() {
        let file = tempfile::tempfile().expect("temporary file");
        file.set_len(4096).expect("set length");
        assert!(StaticRegion::shared(&file, 8192).is_err());
        let region = StaticRegion::shared(&file, 4096).expect("maps");
        assert!(region.copy_in(10, b"here"));
        let mut back = [0; 4];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut back, 10).expect("read");
        assert_eq!(&back, b"here");
    }
}
