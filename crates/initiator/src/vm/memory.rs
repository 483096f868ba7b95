//! A VM's memory as its driver sees it: a memory file that the target maps too, and the target's
//! doorbell pages.
//!
//! The target may write at any time, so words are atomics, all else is copied, and no reference is
//! given out. Offsets outside panic, because they never come from the target. The file is sealed
//! against shrinking.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags};

/// Start of the VM's address space: neither 0 nor our own mapping, so that a target that confuses
/// addresses fails.
pub(crate) const GUEST_BASE: u64 = 0x1_0000_0000;
/// Alignment of data and queues.
pub(crate) const PAGE_BYTES: usize = 4096;
const HUGE_BYTES: usize = 2 << 20;

#[derive(Debug)]
pub(crate) struct MappedMemory {
    fd: OwnedFd,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: stays mapped as long as this value, and is only reached through atomics and copies; no
// method may return another reference.
unsafe impl Send for MappedMemory {}
// SAFETY: as for Send; concurrent copies may mix, as on a disk.
unsafe impl Sync for MappedMemory {}

impl MappedMemory {
    /// A new zeroed memory file of at least `bytes`.
    pub(crate) fn new(bytes: usize, huge: bool) -> io::Result<Self> {
        let unit = if huge { HUGE_BYTES } else { PAGE_BYTES };
        let bytes = bytes.next_multiple_of(unit);
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        if huge {
            flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        }
        let fd = memfd_create("machine", flags)?;
        ftruncate(&fd, bytes as u64)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
        Self::map(fd, 0, bytes)
    }

    pub(crate) fn map(fd: OwnedFd, offset: u64, len: usize) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, not MAP_FIXED, overlaps nothing. Atomics and copies handle
        // concurrent writes by others.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                prot,
                MapFlags::SHARED,
                &fd,
                offset,
            )?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { fd, base, len })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The VM's address.
    pub(crate) fn guest(&self, place: usize) -> u64 {
        assert!(place <= self.len, "a place outside the memory");
        GUEST_BASE + place as u64
    }

    /// This process's address.
    pub(crate) fn user(&self, place: usize) -> u64 {
        assert!(place <= self.len, "a place outside the memory");
        self.base.addr().get() as u64 + place as u64
    }

    fn at(&self, place: usize, bytes: usize) -> *mut u8 {
        let end = place.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.len),
            "a place outside the memory"
        );
        // SAFETY: inside the mapping, just checked, as long as `len` is the mapped length.
        unsafe { self.base.as_ptr().add(place) }
    }

    fn atomic16(&self, place: usize) -> &AtomicU16 {
        assert!(place.is_multiple_of(2), "a word that is not aligned");
        // SAFETY: mapped for as long as `self`, aligned, and shared only as an atomic.
        unsafe { AtomicU16::from_ptr(self.at(place, 2).cast()) }
    }

    fn atomic32(&self, place: usize) -> &AtomicU32 {
        assert!(place.is_multiple_of(4), "a word that is not aligned");
        // SAFETY: as for 16 bits.
        unsafe { AtomicU32::from_ptr(self.at(place, 4).cast()) }
    }

    /// Acquire.
    pub(crate) fn load16(&self, place: usize) -> u16 {
        u16::from_le(self.atomic16(place).load(Ordering::Acquire))
    }

    /// Release.
    pub(crate) fn store16(&self, place: usize, value: u16) {
        self.atomic16(place).store(value.to_le(), Ordering::Release);
    }

    /// Acquire.
    pub(crate) fn load32(&self, place: usize) -> u32 {
        u32::from_le(self.atomic32(place).load(Ordering::Acquire))
    }

    /// Release.
    pub(crate) fn store32(&self, place: usize, value: u32) {
        self.atomic32(place).store(value.to_le(), Ordering::Release);
    }

    pub(crate) fn read(&self, place: usize, to: &mut [u8]) {
        // SAFETY: the source is mapped and `to` is exclusively ours, so they don't overlap. A
        // concurrent write by the target yields mixed, still valid, bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(self.at(place, to.len()), to.as_mut_ptr(), to.len());
        }
    }

    pub(crate) fn write(&self, place: usize, from: &[u8]) {
        // SAFETY: as for `read`, in the other direction.
        unsafe {
            std::ptr::copy_nonoverlapping(from.as_ptr(), self.at(place, from.len()), from.len());
        }
    }
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        // SAFETY: exactly this mapping, whose users all borrow `self`; no address may be kept
        // elsewhere.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[derive(Debug, Default)]
pub(crate) struct Allotment {
    end: usize,
}

impl Allotment {
    /// `align` is a power of two.
    pub(crate) fn take(&mut self, bytes: usize, align: usize) -> usize {
        let place = self.end.next_multiple_of(align);
        self.end = place + bytes;
        place
    }

    pub(crate) fn bytes(&self) -> usize {
        self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_are_visible_through_another_mapping() {
        let memory = MappedMemory::new(10_000, false).unwrap();
        assert_eq!(memory.len(), 12_288);
        let fd = memory.fd().try_clone_to_owned().unwrap();
        let other = MappedMemory::map(fd, 4096, 4096).unwrap();
        memory.write(4098, &[1, 2, 3]);
        memory.store16(4102, 0x0504);
        memory.store32(4104, 7);
        let mut seen = [0; 6];
        other.read(2, &mut seen);
        assert_eq!(seen, [1, 2, 3, 0, 4, 5]);
        assert_eq!((other.load16(6), other.load32(8)), (0x0504, 7));
        assert_eq!(memory.guest(4096), GUEST_BASE + 4096);
    }

    #[test]
    #[should_panic(expected = "outside the memory")]
    fn nothing_outside_is_reached() {
        MappedMemory::new(4096, false).unwrap().load32(4096);
    }

    #[test]
    fn places_do_not_overlap() {
        let mut layout = Allotment::default();
        assert_eq!(layout.take(10, 16), 0);
        assert_eq!(layout.take(10, 16), 16);
        assert_eq!(layout.take(1, 4096), 4096);
        assert_eq!(layout.bytes(), 4097);
    }
}
