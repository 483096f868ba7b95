//! A machine's memory, as a driver in it sees it.
//!
//! Purpose: one memory file that the target maps too: rings, queues, tables and data lie in it, and doorbell pages that
//! the target hands out are mapped the same way.
//!
//! Design: a mapping is never given out as a reference, because the target may write to it at any time: words are
//! atomics, everything else is copied. Places are offsets; what is outside panics, because places are always our own and
//! never what a target says. The file can't shrink (sealed), and pages come as they are touched; huge pages if asked for.
//!
//! What it does *not* do: say what is where; a [`Allotment`] hands out places, and drivers remember them.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags};

/// Where a machine's memory begins in its own addresses: not 0 and not the address that we have it at, so that a target
/// that mixes them up is found out.
pub(crate) const GUEST_BASE: u64 = 0x1_0000_0000;
/// The unit of data places and queues.
pub(crate) const PAGE_BYTES: usize = 4096;
/// The unit of a file of huge pages.
const HUGE_BYTES: usize = 2 << 20;

/// Shared memory, mapped.
#[derive(Debug)]
pub(crate) struct MappedMemory {
    fd: OwnedFd,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address range that stays mapped as long as this value; it is only reached through atomics and copies.
// Wrong if a method gave out a reference to anything but an atomic.
unsafe impl Send for MappedMemory {}
// SAFETY: as for Send; two copies at once to one place mix, as on a disk.
unsafe impl Sync for MappedMemory {}

impl MappedMemory {
    /// A new memory file of at least `bytes` zeros.
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

    /// Maps a part of somebody's file.
    pub(crate) fn map(fd: OwnedFd, offset: u64, len: usize) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nobody's memory; MAP_FIXED would make it
        // wrong. That the file's other users write to it is what atomics and copies are for.
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

    /// The address that the machine has this place at.
    pub(crate) fn guest(&self, place: usize) -> u64 {
        assert!(place <= self.len, "a place outside of the memory");
        GUEST_BASE + place as u64
    }

    /// The address that this process has this place at.
    pub(crate) fn user(&self, place: usize) -> u64 {
        assert!(place <= self.len, "a place outside of the memory");
        self.base.addr().get() as u64 + place as u64
    }

    fn at(&self, place: usize, bytes: usize) -> *mut u8 {
        let end = place.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.len),
            "a place outside of the memory"
        );
        // SAFETY: inside the mapping, just checked. Wrong only if `len` were not what is mapped.
        unsafe { self.base.as_ptr().add(place) }
    }

    fn atomic16(&self, place: usize) -> &AtomicU16 {
        assert!(place.is_multiple_of(2), "a word that is not aligned");
        // SAFETY: mapped and aligned, and an atomic may be shared with anybody. Lives as long as the mapping.
        unsafe { AtomicU16::from_ptr(self.at(place, 2).cast()) }
    }

    fn atomic32(&self, place: usize) -> &AtomicU32 {
        assert!(place.is_multiple_of(4), "a word that is not aligned");
        // SAFETY: as for 16 bits.
        unsafe { AtomicU32::from_ptr(self.at(place, 4).cast()) }
    }

    /// Loads (acquire).
    pub(crate) fn load16(&self, place: usize) -> u16 {
        u16::from_le(self.atomic16(place).load(Ordering::Acquire))
    }

    /// Stores (release).
    pub(crate) fn store16(&self, place: usize, value: u16) {
        self.atomic16(place).store(value.to_le(), Ordering::Release);
    }

    /// Loads (acquire).
    pub(crate) fn load32(&self, place: usize) -> u32 {
        u32::from_le(self.atomic32(place).load(Ordering::Acquire))
    }

    /// Stores (release).
    pub(crate) fn store32(&self, place: usize, value: u32) {
        self.atomic32(place).store(value.to_le(), Ordering::Release);
    }

    /// Copies out.
    pub(crate) fn read(&self, place: usize, to: &mut [u8]) {
        // SAFETY: the source is mapped for all of its length, `to` is ours alone, so they don't overlap. What the target
        // writes meanwhile makes a mixture, which is bytes all the same.
        unsafe {
            std::ptr::copy_nonoverlapping(self.at(place, to.len()), to.as_mut_ptr(), to.len());
        }
    }

    /// Copies in.
    pub(crate) fn write(&self, place: usize, from: &[u8]) {
        // SAFETY: as for `read`, the other way.
        unsafe {
            std::ptr::copy_nonoverlapping(from.as_ptr(), self.at(place, from.len()), from.len());
        }
    }
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        // SAFETY: this very mapping, whose only users borrow `self`. Wrong if an address of it were kept elsewhere.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Hands out places, one after the other.
#[derive(Debug, Default)]
pub(crate) struct Allotment {
    end: usize,
}

impl Allotment {
    /// The next place of so many bytes; `align` is a power of two.
    pub(crate) fn take(&mut self, bytes: usize, align: usize) -> usize {
        let place = self.end.next_multiple_of(align);
        self.end = place + bytes;
        place
    }

    /// How much was handed out.
    pub(crate) fn bytes(&self) -> usize {
        self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_there_for_another_mapping() {
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
    #[should_panic(expected = "outside of the memory")]
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
