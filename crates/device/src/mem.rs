//! Memory that the kernel reads and writes while a request is in flight.
//!
//! **Purpose.** Say once, in one place, what must hold of a buffer that is named by an operation, so that submitting
//! operations is safe code.
//!
//! **Design.** A [`Buf`] is a pointer and a length and owns nothing. Making one out of a pointer is the single unsafe
//! step, and its contract covers every operation that names it. [`StaticRegion`] is memory that is never unmapped and
//! to which safe code gets no reference: its buffers are safe by construction.
//!
//! **What it does not do.** It allocates no slots and counts no users: which part of a region is free is its owner's
//! business. It registers nothing with a ring.
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

// SAFETY: a Buf is an address and a length; dereferencing it is what `Buf::new` makes its caller answer for, on
// whatever thread. It would be wrong if a safe method gave out a reference to the memory.
unsafe impl Send for Buf {}
// SAFETY: as for Send; there is no interior state.
unsafe impl Sync for Buf {}

impl Buf {
    /// Names the memory from `ptr` on.
    ///
    /// # Safety
    ///
    /// From the submission of an operation that names this buffer (or a part or copy of it) until its completion was
    /// taken from the ring, and for an operation that completes at once, during the call:
    ///
    /// - the memory is mapped and readable, and, if the operation is a read, writable;
    /// - the memory isn't freed, unmapped or given another use, not even when the ring is dropped first;
    /// - no Rust reference to it is used: none at all if the operation is a read, no `&mut` if it is a write.
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

    /// The part of `len_bytes` from `from_bytes` on; `None` if that isn't inside.
    pub fn slice(&self, from_bytes: u32, len_bytes: u32) -> Option<Self> {
        if from_bytes.checked_add(len_bytes)? > self.len_bytes {
            return None;
        }
        // SAFETY: from_bytes <= self.len_bytes was just checked, so the address stays inside the named memory (or one
        // past its end); the part inherits the contract of the whole. Wrong only if the check were.
        Some(unsafe { Self::new(self.ptr.add(from_bytes as usize), len_bytes) })
    }

    pub(crate) fn is_aligned(&self, align_bytes: u32) -> bool {
        self.ptr.addr().get().is_multiple_of(align_bytes as usize)
    }

    /// Writes zeros over the buffer. Only for a read operation in progress.
    pub(crate) fn fill_zero(&self) {
        // SAFETY: called inside `Device::submit` of a read, so the contract of `Buf::new` says mapped, writable and
        // unreferenced. Wrong if it were called for the buffer of a write.
        unsafe { self.ptr.write_bytes(0, self.len_bytes as usize) }
    }
}

/// What an operation names: a buffer, or a list of them.
#[derive(Debug, Clone, Copy)]
pub(crate) enum IoMemory {
    One(Buf),
    Many(Bufs),
}

/// The same in few bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Named {
    ptr: NonNull<u8>,
    len_bytes: u32,
    /// 0: one buffer, and no list.
    pieces: u32,
}

// SAFETY: as for `Buf` and `Bufs`, of which it is made, and which it is made into.
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
            // SAFETY: of a `Buf`, whose contract this one has.
            0 => IoMemory::One(unsafe { Buf::new(self.ptr, self.len_bytes) }),
            pieces => IoMemory::Many(Bufs::again(self.ptr.cast(), self.len_bytes, pieces)),
        }
    }
}

impl IoMemory {
    /// Each buffer, in order, with how many bytes come before it.
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

/// Memory that stays mapped until the process ends, reached only by copying in and out.
///
/// Never unmapped, because the kernel may still write into it after whoever asked is gone. Make few and large ones.
/// Pages that were never touched cost nothing.
#[derive(Debug)]
pub struct StaticRegion {
    ptr: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: the region is an address range that is mapped forever; safe methods copy through raw pointers and never make
// references. It would be wrong if `Drop` unmapped it.
unsafe impl Send for StaticRegion {}
// SAFETY: as for Send. Two threads (or a thread and the kernel) that copy to one place at once leave a mixture of
// both, as they would on a disk; no Rust value with invariants lives here.
unsafe impl Sync for StaticRegion {}

impl StaticRegion {
    /// Zeroed private memory of at least `len_bytes`, page aligned, sparse.
    pub fn anonymous(len_bytes: usize) -> io::Result<Self> {
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches nobody's memory. MAP_FIXED would
        // make it wrong.
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

    /// Maps `len_bytes` of a memory file, shared with whoever has it too. The file must not be shortened afterwards.
    pub fn shared(file: impl AsFd, len_bytes: usize) -> io::Result<Self> {
        Self::shared_fd(file.as_fd(), len_bytes)
    }

    fn shared_fd(file: BorrowedFd<'_>, len_bytes: usize) -> io::Result<Self> {
        let size = rustix::fs::fstat(file)?.st_size;
        if u64::try_from(size).unwrap_or(0) < len_bytes as u64 {
            return Err(rustix::io::Errno::INVAL.into());
        }
        // SAFETY: a new shared mapping at an address of the kernel's choice; nothing but this region refers to it.
        // Wrong with MAP_FIXED. A file that is shortened later makes an access fault (documented above).
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
        // A core dump of staging memory would hold tenants' data and delay the fence.
        // SAFETY: the advice changes nothing about the mapping's content or validity, and names exactly the range that
        // was just mapped.
        unsafe { rustix::mm::madvise(ptr, len_bytes, Advice::LinuxDontDump) }?;
        let ptr = NonNull::new(ptr.cast::<u8>()).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Self { ptr, len_bytes })
    }

    /// Its length.
    pub const fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// The buffer of `len_bytes` at `from_bytes`; `None` if that isn't inside.
    pub fn buf(&self, from_bytes: usize, len_bytes: u32) -> Option<Buf> {
        let ptr = self.at(from_bytes, len_bytes as usize)?;
        // SAFETY: the range was checked, the memory stays mapped, readable and writable until the process ends, and no
        // reference to it ever exists in safe code. Wrong if the region were unmapped.
        Some(unsafe { Buf::new(ptr, len_bytes) })
    }

    /// Copies bytes out. False if the range isn't inside.
    #[must_use]
    pub fn copy_out(&self, from_bytes: usize, into: &mut [u8]) -> bool {
        let Some(ptr) = self.at(from_bytes, into.len()) else {
            return false;
        };
        // SAFETY: the source range was checked and is mapped; `into` is a different object, because no reference to
        // the region exists. Wrong if a slice of the region could be passed here.
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
        // SAFETY: from_bytes <= self.len_bytes, so the address is inside the mapping or one past its end.
        Some(unsafe { self.ptr.add(from_bytes) })
    }
}

/// How many zeros one write can bring to a device that can't zero by itself.
pub(crate) const ZEROS_BYTES: u32 = 64 * 1024;

#[repr(align(4096))]
struct ZeroBlock([u8; ZEROS_BYTES as usize]);

static ZEROS: ZeroBlock = ZeroBlock([0; ZEROS_BYTES as usize]);

/// Constant zeros to be written: at most [`ZEROS_BYTES`].
pub(crate) fn zeros(len_bytes: u32) -> Buf {
    let len_bytes = len_bytes.min(ZEROS_BYTES);
    // SAFETY: a static lives forever and is never written; only write operations name this buffer. Wrong if it were
    // given to a read.
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
