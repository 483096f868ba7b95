//! The engine's memory: bytes that its successor may need (command data, unsent headers, received
//! parts of PDUs), in a file that outlives it.
//!
//! **Design.** One sparse memfd of fixed layout, mapped once and never unmapped: the kernel may
//! move data of commands after a reactor is gone. Its parts are owned values. A successor copies
//! from the old file ([`OldMemory`]) and never maps it, so late kernel accesses touch unused pages.
//! **Not here:** the division of staging memory ([`crate::core::staging`]).

#![allow(unsafe_code)]

use crate::core::staging::{MAX_TRANSFER_BYTES, STAGING_BYTES};
use forebay_xlate::boundary::region::item::HEADER_BYTES;
use forebay_xlate::boundary::region::{
    MAX_LISTS, MAX_QUEUES, MAX_REACTORS, RECEIVE_AT, RECEIVE_BYTES,
};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};
use std::sync::{Mutex, PoisonError};

const PAGE_BYTES: usize = 4096;
/// Bytes of each of the two buffers of a [`Keep`].
pub(crate) const KEEP_BYTES: usize = RECEIVE_BYTES;
const RECEIVE_BUFFER_BYTES: usize = RECEIVE_AT + RECEIVE_BYTES;
const REACTOR_BYTES: usize = RECEIVE_BUFFER_BYTES + STAGING_BYTES;

const LISTS_AT: usize = 0;
const KEEPS_AT: usize = LISTS_AT + MAX_LISTS * HEADER_BYTES;
const REACTORS_AT: usize = KEEPS_AT + MAX_QUEUES * 2 * KEEP_BYTES;
const INHERITED_AT: usize = REACTORS_AT + MAX_REACTORS * REACTOR_BYTES;
/// As much as all reactors can have in use.
const INHERITED_BYTES: usize = MAX_REACTORS * STAGING_BYTES;
const ZEROS_AT: usize = INHERITED_AT + INHERITED_BYTES;
const ZEROS_BYTES: usize = MAX_TRANSFER_BYTES as usize;
/// Size of the sparse file.
pub(crate) const MEMORY_BYTES: usize = ZEROS_AT + ZEROS_BYTES;
// The range that a buffer reference can name.
const _: () = assert!(MEMORY_BYTES as u64 <= 1 << 36 && REACTOR_BYTES.is_multiple_of(PAGE_BYTES));

pub(crate) fn headers_at(list: u16) -> u64 {
    (LISTS_AT + usize::from(list) * HEADER_BYTES) as u64
}

pub(crate) fn keep_at(keep: u32, which: u8) -> Option<u64> {
    let buffer = (keep as usize) * 2 + usize::from(which & 1);
    ((keep as usize) < MAX_QUEUES).then_some((KEEPS_AT + buffer * KEEP_BYTES) as u64)
}

pub(crate) fn receive_buffer_at(reactor: usize) -> Option<u64> {
    (reactor < MAX_REACTORS).then_some((REACTORS_AT + reactor * REACTOR_BYTES) as u64)
}

/// The engine's memory.
#[derive(Debug)]
pub(crate) struct Memory {
    base: NonNull<u8>,
    file: OwnedFd,
    reactors: AtomicU64,
    lists: Mutex<Vec<u16>>,
    keeps: Mutex<Vec<u32>>,
    inherited: AtomicUsize,
}
const _: () = assert!(MAX_REACTORS <= 64);

// SAFETY: the mapping is never unmapped, and each part has one owner at a time.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Creates the memory, which is never freed.
    ///
    /// # Errors
    /// Those of the system.
    pub(crate) fn create() -> io::Result<&'static Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("forebay-memory", flags)?;
        rustix::fs::ftruncate(&file, MEMORY_BYTES as u64)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                MEMORY_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &file,
                0,
            )
        }?;
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| io::Error::other("mmap returned null"))?;
        // SAFETY: pages of the new mapping, to which nothing refers.
        unsafe {
            let zeros = base.add(ZEROS_AT).as_ptr().cast();
            rustix::mm::mprotect(zeros, ZEROS_BYTES, rustix::mm::MprotectFlags::READ)?;
        }
        Ok(Box::leak(Box::new(Self {
            base,
            file,
            reactors: AtomicU64::new(0),
            lists: Mutex::new((0..MAX_LISTS as u16).rev().collect()),
            keeps: Mutex::new((0..MAX_QUEUES as u32).rev().collect()),
            inherited: AtomicUsize::new(0),
        })))
    }

    /// The file.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn part(&self, at: usize) -> NonNull<u8> {
        debug_assert!(at < MEMORY_BYTES);
        // SAFETY: callers compute `at` from the layout, with bounded indexes.
        unsafe { self.base.add(at) }
    }

    /// A reactor's part; `None` if taken or out of range.
    pub(crate) fn reactor(&'static self, reactor: usize) -> Option<ReactorMemory> {
        let bit = (reactor < MAX_REACTORS).then(|| 1u64 << reactor)?;
        if self.reactors.fetch_or(bit, AcqRel) & bit != 0 {
            return None;
        }
        let at = REACTORS_AT + reactor * REACTOR_BYTES;
        Some(ReactorMemory {
            receive: ReceiveBuffer(self.part(at)),
            staging: StagingMemory {
                base: self.part(at + RECEIVE_BUFFER_BYTES),
                offset_bytes: (at + RECEIVE_BUFFER_BYTES) as u64,
                zeros: Zeros {
                    ptr: self.part(ZEROS_AT),
                    offset_bytes: ZEROS_AT as u64,
                },
            },
        })
    }

    /// There are as many lists as queues.
    pub(crate) fn take_list(&'static self) -> Option<HeaderList> {
        let index = lock(&self.lists).pop()?;
        let bytes = self.part(headers_at(index) as usize);
        Some(HeaderList {
            index,
            bytes,
            memory: self,
        })
    }

    /// There are as many keeps as queues.
    pub(crate) fn take_keep(&'static self) -> Option<Keep> {
        let index = lock(&self.keeps).pop()?;
        let bytes = self.part(keep_at(index, 0)? as usize);
        Some(Keep {
            index,
            bytes,
            most: 0,
            memory: self,
        })
    }

    pub(crate) fn inherit(&'static self, len_bytes: u32) -> Option<Inherited> {
        let room = (len_bytes as usize).next_multiple_of(PAGE_BYTES);
        let taken = self
            .inherited
            .fetch_update(AcqRel, Acquire, |at| {
                Some(at + room).filter(|end| *end <= INHERITED_BYTES)
            })
            .ok()?;
        Some(Inherited {
            ptr: self.part(INHERITED_AT + taken),
            offset_bytes: (INHERITED_AT + taken) as u64,
        })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns whole pages to the system; they then read as zeros.
///
/// # Safety
/// `bytes` bytes from `base` lie in the memory's mapping, and their contents are no longer needed.
pub(crate) unsafe fn remove(base: NonNull<u8>, bytes: usize) {
    // SAFETY: the caller's promise. A failure only costs memory.
    let _ = unsafe { rustix::mm::madvise(base.as_ptr().cast(), bytes, Advice::LinuxRemove) };
}

/// A reactor's part.
#[derive(Debug)]
pub(crate) struct ReactorMemory {
    pub(crate) receive: ReceiveBuffer,
    /// Its staging memory.
    pub staging: StagingMemory,
}

/// Bytes that [`crate::core::staging`] divides.
#[derive(Debug)]
pub(crate) struct StagingMemory {
    pub(crate) base: NonNull<u8>,
    pub(crate) offset_bytes: u64,
    pub(crate) zeros: Zeros,
}

// SAFETY: it owns its bytes, and the zeros are read-only.
unsafe impl Send for StagingMemory {}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Zeros {
    pub ptr: NonNull<u8>,
    pub offset_bytes: u64,
}

/// Room for a buffer that is never reused.
#[derive(Debug)]
pub(crate) struct Inherited {
    pub ptr: NonNull<u8>,
    pub offset_bytes: u64,
}

/// Bytes are received at `RECEIVE_AT`; the room before it takes kept bytes.
#[derive(Debug)]
pub(crate) struct ReceiveBuffer(NonNull<u8>);

// SAFETY: it owns its bytes.
unsafe impl Send for ReceiveBuffer {}

impl std::ops::Deref for ReceiveBuffer {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: never unmapped, and `self` is the only owner.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), RECEIVE_BUFFER_BYTES) }
    }
}

impl std::ops::DerefMut for ReceiveBuffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` excludes other borrows.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_ptr(), RECEIVE_BUFFER_BYTES) }
    }
}

/// Header bytes of transmit items; returned on drop.
#[derive(Debug)]
pub(crate) struct HeaderList {
    index: u16,
    bytes: NonNull<u8>,
    memory: &'static Memory,
}

// SAFETY: it owns its bytes.
unsafe impl Send for HeaderList {}

impl HeaderList {
    #[inline]
    pub(crate) fn index(&self) -> u16 {
        self.index
    }

    #[inline]
    pub(crate) fn bytes(&self) -> &[u8; HEADER_BYTES] {
        // SAFETY: never unmapped, and `self` is the only owner.
        unsafe { self.bytes.cast().as_ref() }
    }

    #[inline]
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8; HEADER_BYTES] {
        // SAFETY: as above, and `&mut self` excludes other borrows.
        unsafe { self.bytes.cast().as_mut() }
    }
}

impl Drop for HeaderList {
    fn drop(&mut self) {
        lock(&self.memory.lists).push(self.index);
    }
}

/// Two buffers, used in turn, for received bytes not yet consumed; returned on drop.
#[derive(Debug)]
pub(crate) struct Keep {
    index: u32,
    bytes: NonNull<u8>,
    most: usize,
    memory: &'static Memory,
}

// SAFETY: it owns its bytes.
unsafe impl Send for Keep {}

/// A keep that once held more than this returns its pages to the system.
const KEEP_LITTLE_BYTES: usize = 16 * 1024;

impl Keep {
    pub(crate) fn index(&self) -> u32 {
        self.index
    }

    pub(crate) fn bytes(&self, which: u8) -> &[u8; KEEP_BYTES] {
        let at = usize::from(which & 1) * KEEP_BYTES;
        // SAFETY: both buffers are adjacent and never unmapped, and `self` is their only owner.
        unsafe { self.bytes.add(at).cast().as_ref() }
    }

    pub(crate) fn put(&mut self, which: u8, bytes: &[u8]) {
        let at = usize::from(which & 1) * KEEP_BYTES;
        self.most = self.most.max(bytes.len());
        // SAFETY: as above, and `&mut self` excludes other borrows.
        let buffer: &mut [u8; KEEP_BYTES] = unsafe { self.bytes.add(at).cast().as_mut() };
        if let Some(room) = buffer.get_mut(..bytes.len()) {
            room.copy_from_slice(bytes);
        }
    }

    /// Copies a part of the other buffer to the start of this one.
    pub(crate) fn turn(&mut self, which: u8, part: std::ops::Range<usize>) {
        self.most = self.most.max(part.len());
        // SAFETY: as above.
        let both: &mut [[u8; KEEP_BYTES]; 2] = unsafe { self.bytes.cast().as_mut() };
        let [first, second] = both;
        let (to, from) = match which & 1 {
            0 => (first, second),
            _ => (second, first),
        };
        if let (Some(to), Some(from)) = (to.get_mut(..part.len()), from.get(part)) {
            to.copy_from_slice(from);
        }
    }
}

impl Drop for Keep {
    fn drop(&mut self) {
        // A test's panic stands for a killed engine: the bytes stay as they are.
        if !std::thread::panicking() {
            if self.most > KEEP_LITTLE_BYTES {
                // SAFETY: these are its own bytes, whose life ends with it.
                unsafe { remove(self.bytes, 2 * KEEP_BYTES) };
            } else {
                // SAFETY: as above. The bytes are cleared so that a damaged record of their count
                // cannot show them to the next user.
                let both: &mut [[u8; KEEP_BYTES]; 2] = unsafe { self.bytes.cast().as_mut() };
                for buffer in both {
                    buffer[..self.most].fill(0);
                }
            }
        }
        lock(&self.memory.keeps).push(self.index);
    }
}

#[derive(Debug)]
pub(crate) struct OldMemory(OwnedFd);

impl OldMemory {
    pub(crate) fn adopt(file: OwnedFd) -> io::Result<Self> {
        let len = rustix::fs::fstat(&file)?.st_size;
        if len != MEMORY_BYTES as i64 {
            return Err(io::Error::other(
                "the memory file's length does not match this version's layout",
            ));
        }
        Ok(Self(file))
    }

    pub(crate) fn read(&self, offset_bytes: u64, out: &mut [u8]) -> io::Result<()> {
        let mut have = 0;
        while let Some(room) = out.get_mut(have..).filter(|room| !room.is_empty()) {
            match rustix::io::pread(&self.0, room, offset_bytes.saturating_add(have as u64)) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => have += n,
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_one_owner_and_are_found_in_the_file() {
        let memory = Memory::create().unwrap();
        let mut reactor = memory.reactor(63).unwrap();
        assert!(memory.reactor(63).is_none() && memory.reactor(64).is_none());
        reactor.receive[RECEIVE_AT] = 1;
        let (mut list, mut keep) = (memory.take_list().unwrap(), memory.take_keep().unwrap());
        let other = memory.take_list().unwrap();
        assert_ne!(other.index(), list.index());
        list.bytes_mut()[HEADER_BYTES - 1] = 2;
        keep.put(0, &[3; 5]);
        keep.put(1, &[4; KEEP_BYTES]);
        let old = OldMemory::adopt(memory.fd().try_clone_to_owned().unwrap()).unwrap();
        let read = |at: u64| {
            let mut out = [0u8; 1];
            old.read(at, &mut out).unwrap();
            out[0]
        };
        assert_eq!(read(receive_buffer_at(63).unwrap() + RECEIVE_AT as u64), 1);
        assert_eq!(read(headers_at(list.index()) + HEADER_BYTES as u64 - 1), 2);
        assert_eq!(read(keep_at(keep.index(), 0).unwrap() + 4), 3);
        let last = keep_at(keep.index(), 1).unwrap() + KEEP_BYTES as u64 - 1;
        assert_eq!(read(last), 4);
        assert!(old.read(MEMORY_BYTES as u64 - 1, &mut [0; 2]).is_err());
        assert!(keep_at(MAX_QUEUES as u32, 0).is_none());
        let index = keep.index();
        drop(keep);
        assert_eq!(read(last), 0, "what held much gives its pages back");
        let mut keep = memory.take_keep().unwrap();
        assert_eq!(keep.index(), index);
        keep.put(0, &[5; 9]);
        keep.turn(1, 1..9);
        drop(keep);
        let both = [0, 1].map(|which| read(keep_at(index, which).unwrap() + 7));
        assert_eq!(both, [0, 0], "what held little is zeros");
        let file = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC).unwrap();
        assert!(OldMemory::adopt(file).is_err());
    }

    #[test]
    fn inherited_memory_is_never_shared() {
        let memory = Memory::create().unwrap();
        let (a, b) = (memory.inherit(1).unwrap(), memory.inherit(4097).unwrap());
        assert_eq!(b.offset_bytes - a.offset_bytes, 4096);
        let mut rest = INHERITED_BYTES - 3 * 4096;
        while rest > 0 {
            let n = rest.min(1 << 30);
            memory.inherit(n as u32).unwrap();
            rest -= n;
        }
        assert!(memory.inherit(1).is_none());
    }
}
