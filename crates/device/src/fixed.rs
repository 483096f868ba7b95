//! Registered memory: the kernel pins it once, not at each request.
//!
//! Pinning gigabytes would block a ring for long, so a [`Pinned`] does it on any thread with a
//! small ring. [`crate::ring::Ring::register`] then clones the entries
//! (`IORING_REGISTER_CLONE_BUFFERS`, Linux 6.13). Their mapping stays, so that an address can't
//! change its meaning. New entries go behind all others if possible: kernels without a later fix
//! forget those behind. Registered memory stays resident, so never register pages that may be given
//! back.
#![allow(unsafe_code)]

use std::any::Any;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use io_uring::register::Probe;
use io_uring::types::CloneBuffersFlags;
use io_uring::{IoUring, Submitter, opcode};
use rustix::io::Errno;

use crate::mem::{Buf, IoMemory, StaticRegion};

/// The longest entry that the kernel takes.
pub const MAX_ENTRY_BYTES: usize = 1 << 30;
/// Entries of one [`Pinned`].
pub const MAX_ENTRIES: u32 = 256;
const MAX_SLOTS: u32 = 1 << 14;

/// Memory that the kernel pins while this lives or a ring has it registered.
pub struct Pinned {
    ring: Box<IoUring>,
    entries: Vec<(usize, usize)>,
    keeps: Arc<dyn Any + Send + Sync>,
}

impl std::fmt::Debug for Pinned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pinned")
            .field("entries", &self.entries.len())
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

impl Pinned {
    /// Holds no memory yet. `keeps` lives at least as long.
    pub fn new(keeps: Arc<dyn Any + Send + Sync>) -> io::Result<Self> {
        let ring = IoUring::builder().dontfork().build(1)?;
        ring.submitter().register_buffers_sparse(MAX_ENTRIES)?;
        Ok(Self {
            ring: Box::new(ring),
            entries: Vec::new(),
            keeps,
        })
    }

    /// Pins a whole region, which is never unmapped.
    pub fn of_region(region: &StaticRegion) -> io::Result<Self> {
        let mut pinned = Self::new(Arc::new(()))?;
        let mut at = 0;
        while at < region.len_bytes() {
            let len = (region.len_bytes() - at).min(MAX_ENTRY_BYTES);
            let ptr = region.at(at, len).ok_or(Errno::INVAL)?;
            // SAFETY: mapped forever, readable and writable.
            unsafe { pinned.pin(ptr, len)? };
            at += len;
        }
        Ok(pinned)
    }

    /// Pins at most [`MAX_ENTRY_BYTES`] more, which may take long and allocates missing pages.
    ///
    /// # Errors
    /// Too little memory, `RLIMIT_MEMLOCK` too low, or memory that can't be pinned.
    ///
    /// # Safety
    /// The bytes at `ptr` are mapped, readable and writable, as long as `keeps` lives.
    pub unsafe fn pin(&mut self, ptr: NonNull<u8>, len_bytes: usize) -> io::Result<()> {
        let at = self.entries.len() as u32;
        if at >= MAX_ENTRIES || len_bytes == 0 || len_bytes > MAX_ENTRY_BYTES {
            return Err(Errno::INVAL.into());
        }
        let entry = libc::iovec {
            iov_base: ptr.as_ptr().cast(),
            iov_len: len_bytes,
        };
        // SAFETY: mapped, as the caller says. The kernel holds the pages themselves.
        unsafe {
            (self.ring.submitter()).register_buffers_update(at, &[entry], None)?;
        }
        self.entries.push((ptr.addr().get(), len_bytes));
        Ok(())
    }

    /// Pinned bytes.
    pub fn bytes(&self) -> u64 {
        self.entries.iter().map(|(_, len)| *len as u64).sum()
    }

    /// Number of entries.
    pub fn entries(&self) -> usize {
        self.entries.len()
    }

    /// The object that it keeps alive.
    pub fn keeps(&self) -> &Arc<dyn Any + Send + Sync> {
        &self.keeps
    }
}

/// Names memory that is registered with a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Registration(u64);

#[derive(Debug, Clone, Copy)]
struct FixedEntry {
    start: usize,
    end: usize,
    slot: u16,
}

/// All memory that is registered with a ring; `entries` is sorted by start.
#[derive(Debug, Default)]
pub(crate) struct Fixed {
    entries: Vec<FixedEntry>,
    /// The entry found last.
    last: std::cell::Cell<usize>,
    known: Vec<FixedMemory>,
    next: u64,
    /// Whether the kernel takes lists of registered pieces, once known.
    vectored: Option<bool>,
    pub(crate) used: std::cell::Cell<u64>,
}

#[derive(Debug)]
struct FixedMemory {
    name: Registration,
    pinned: Pinned,
    first_slot: u32,
    usable: bool,
}

impl FixedMemory {
    fn entries(&self) -> impl Iterator<Item = FixedEntry> {
        let entries = self.pinned.entries.iter().zip(self.first_slot..);
        entries.map(|((start, len), slot)| FixedEntry {
            start: *start,
            end: start + len,
            slot: slot as u16,
        })
    }

    fn end_slot(&self) -> u32 {
        self.first_slot + self.pinned.entries.len() as u32
    }
}

impl Fixed {
    #[inline]
    pub(crate) fn index_of(&self, memory: &IoMemory) -> Option<u16> {
        if self.entries.is_empty() {
            return None;
        }
        let entry = match memory {
            IoMemory::One(buf) => self.find(*buf),
            IoMemory::Many(_) if self.vectored != Some(true) => None,
            IoMemory::Many(bufs) => {
                let mut bufs = bufs.iter();
                let entry = self.find(bufs.next()?)?;
                bufs.all(|buf| entry.has(buf)).then_some(entry)
            }
        }?;
        self.used.set(self.used.get() + 1);
        Some(entry.slot)
    }

    #[inline]
    fn find(&self, buf: Buf) -> Option<FixedEntry> {
        let last = self.entries.get(self.last.get());
        if let Some(last) = last.filter(|last| last.has(buf)) {
            return Some(*last);
        }
        let from = buf.ptr().addr().get();
        let at = self.entries.partition_point(|entry| entry.start <= from);
        let at = at.checked_sub(1)?;
        let entry = self.entries.get(at).filter(|entry| entry.has(buf))?;
        self.last.set(at);
        Some(*entry)
    }

    pub(crate) fn add(
        &mut self,
        ring: &Submitter<'_>,
        pinned: Pinned,
    ) -> Result<Registration, (Pinned, io::Error)> {
        let count = pinned.entries.len() as u32;
        let Some(first_slot) = self.room(count).filter(|_| count > 0) else {
            return Err((pinned, Errno::NOSPC.into()));
        };
        if self.vectored.is_none() {
            let mut probe = Probe::new();
            self.vectored = Some(
                ring.register_probe(&mut probe).is_ok()
                    && probe.is_supported(opcode::ReadvFixed::CODE)
                    && probe.is_supported(opcode::WritevFixed::CODE),
            );
        }
        let known = FixedMemory {
            name: Registration(self.next),
            pinned,
            first_slot,
            usable: true,
        };
        if let Err(error) = clone(ring, &known) {
            return Err((known.pinned, error));
        }
        self.next += 1;
        let at = self.known.partition_point(|k| k.first_slot < first_slot);
        self.known.insert(at, known);
        let mut is_as_before = true;
        for later in &mut self.known[at + 1..] {
            // The kernel may have forgotten these; entries that it rejects now aren't used.
            let usable = clone(ring, later).is_ok();
            is_as_before &= usable == std::mem::replace(&mut later.usable, usable);
        }
        if !is_as_before {
            self.entries.clear();
        }
        let new = if is_as_before {
            at..at + 1
        } else {
            0..self.known.len()
        };
        for known in self.known[new].iter().filter(|known| known.usable) {
            self.entries.extend(known.entries());
        }
        // A stable sort is quick here: it merges the sorted part.
        self.entries.sort_by_key(|entry| entry.start);
        self.last.set(0);
        Ok(self.known[at].name)
    }

    /// First of `count` free slots: behind all others, else in a gap.
    fn room(&self, count: u32) -> Option<u32> {
        let end = self.known.last().map_or(0, FixedMemory::end_slot);
        if end + count <= MAX_SLOTS {
            return Some(end);
        }
        let mut from = 0;
        for known in &self.known {
            if known.first_slot - from >= count {
                return Some(from);
            }
            from = known.end_slot();
        }
        None
    }

    /// No request in the memory may be queued or in flight. The result may take long to drop.
    pub(crate) fn remove(&mut self, ring: &Submitter<'_>, name: Registration) -> Option<Pinned> {
        self.forget(ring, name);
        let at = self.known.iter().position(|known| known.name == name)?;
        let known = self.known.remove(at);
        let slots = known.first_slot..known.end_slot();
        (self.entries).retain(|entry| !slots.contains(&u32::from(entry.slot)));
        self.last.set(0);
        Some(known.pinned)
    }

    pub(crate) fn forget(&self, ring: &Submitter<'_>, name: Registration) {
        let Some(known) = self.known.iter().find(|known| known.name == name) else {
            return;
        };
        let nothing = libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        let nothing = vec![nothing; known.pinned.entries.len()];
        // SAFETY: names no memory. On failure, the ring holds the memory until it ends or the slots
        // are reused.
        let _ = unsafe { ring.register_buffers_update(known.first_slot, &nothing, None) };
    }

    pub(crate) fn also(&self, ring: &Submitter<'_>) -> io::Result<()> {
        self.known.iter().try_for_each(|known| clone(ring, known))
    }

    /// Registers new memory with another ring that has all others, and again the memory behind it.
    pub(crate) fn also_new(&self, ring: &Submitter<'_>, name: Registration) -> io::Result<()> {
        let mut new = self.known.iter().skip_while(|known| known.name != name);
        new.try_for_each(|known| clone(ring, known))
    }
}

impl FixedEntry {
    #[inline]
    fn has(&self, buf: Buf) -> bool {
        let from = buf.ptr().addr().get();
        self.start <= from && from + buf.len_bytes() as usize <= self.end
    }
}

fn clone(ring: &Submitter<'_>, known: &FixedMemory) -> io::Result<()> {
    ring.register_buffers_clone_offset(
        known.pinned.ring.as_raw_fd(),
        0,
        known.first_slot,
        known.pinned.entries.len() as u32,
        CloneBuffersFlags::DST_REPLACE,
    )
}
