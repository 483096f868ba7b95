//! Memory that the kernel looks up once, not at each request.
//!
//! **Purpose.** A request names memory by its address, and for direct I/O the kernel finds, holds and lets go of each of
//! its pages, every time. Memory that is registered with a ring is held once, and a request in it says so.
//!
//! **Design.** To hold gigabytes takes long, and a ring can do nothing else meanwhile. So a [`Pinned`] holds them, by a
//! small ring of its own, on any thread; then [`crate::ring::Ring::register`] has the kernel take over what it holds
//! (`IORING_REGISTER_CLONE_BUFFERS`, Linux 6.13), which costs a counter for each entry. Of a request whose memory lies in
//! one entry the ring says so ([`Fixed::index_of`]); any other goes as ever. An entry keeps something of its
//! maker's alive (the mapping), so that no address means something else while it is known here.
//!
//! New entries are put behind all others while there is room: a kernel without a later mend forgets those behind.
//!
//! **What it does not do.** It chooses no memory. What is held stays in memory, whatever becomes of its file: whoever
//! may give pages back must not have them registered.
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
/// Entries of a ring (`IORING_MAX_REG_BUFFERS`).
const MAX_SLOTS: u32 = 1 << 14;

/// Memory that the kernel holds for this process, for as long as this lives or a ring knows it.
pub struct Pinned {
    ring: Box<IoUring>,
    /// Where each entry begins, and its length.
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
    /// Nothing yet. `keeps` is dropped with it, and never before.
    ///
    /// # Errors
    /// The system's.
    pub fn new(keeps: Arc<dyn Any + Send + Sync>) -> io::Result<Self> {
        let ring = IoUring::builder().dontfork().build(1)?;
        ring.submitter().register_buffers_sparse(MAX_ENTRIES)?;
        Ok(Self {
            ring: Box::new(ring),
            entries: Vec::new(),
            keeps,
        })
    }

    /// All of a region that is never unmapped.
    ///
    /// # Errors
    /// As [`Pinned::new`] and [`Pinned::pin`] say.
    pub fn of_region(region: &StaticRegion) -> io::Result<Self> {
        let mut pinned = Self::new(Arc::new(()))?;
        let mut at = 0;
        while at < region.len_bytes() {
            let len = (region.len_bytes() - at).min(MAX_ENTRY_BYTES);
            let ptr = region.at(at, len).ok_or(Errno::INVAL)?;
            // SAFETY: mapped for ever, to be read and written.
            unsafe { pinned.pin(ptr, len)? };
            at += len;
        }
        Ok(pinned)
    }

    /// Has the kernel hold so many bytes more, at most [`MAX_ENTRY_BYTES`]: it may take long, and makes memory of what
    /// is none yet.
    ///
    /// # Errors
    /// The system's: there is too little memory, too little may be held (`RLIMIT_MEMLOCK`), or it can't be held.
    ///
    /// # Safety
    /// They are mapped at `ptr`, to be read and written, for as long as what this keeps lives.
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

    /// What it holds.
    pub fn bytes(&self) -> u64 {
        self.entries.iter().map(|(_, len)| *len as u64).sum()
    }

    /// How many entries it has.
    pub fn entries(&self) -> usize {
        self.entries.len()
    }

    /// What it keeps alive.
    pub fn keeps(&self) -> &Arc<dyn Any + Send + Sync> {
        &self.keeps
    }
}

/// Something that a ring knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Registration(u64);

/// A part of memory that a ring knows: sorted by where it begins.
#[derive(Debug, Clone, Copy)]
struct FixedEntry {
    start: usize,
    end: usize,
    slot: u16,
}

/// What of memory a ring knows.
#[derive(Debug, Default)]
pub(crate) struct Fixed {
    entries: Vec<FixedEntry>,
    /// Which of them was found last.
    last: std::cell::Cell<usize>,
    known: Vec<FixedMemory>,
    next: u64,
    /// Whether lists of pieces can be in it, once that was asked.
    vectored: Option<bool>,
    /// Requests that were.
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
    /// The number of the entry in which all of it lies.
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

    /// Has a ring know something. It is given back if that can't be.
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
            // A kernel may have forgotten them; what it doesn't take again is not used.
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
        // It finds what is sorted already, and merges that.
        self.entries.sort_by_key(|entry| entry.start);
        self.last.set(0);
        Ok(self.known[at].name)
    }

    /// So many entries behind all that are there, or between them.
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

    /// Has the ring forget something, of which nothing is queued or in flight. What held it is given back: to let go of
    /// it may take long.
    pub(crate) fn remove(&mut self, ring: &Submitter<'_>, name: Registration) -> Option<Pinned> {
        self.forget(ring, name);
        let at = self.known.iter().position(|known| known.name == name)?;
        let known = self.known.remove(at);
        let slots = known.first_slot..known.end_slot();
        (self.entries).retain(|entry| !slots.contains(&u32::from(entry.slot)));
        self.last.set(0);
        Some(known.pinned)
    }

    /// Empties what a ring has of something.
    pub(crate) fn forget(&self, ring: &Submitter<'_>, name: Registration) {
        let Some(known) = self.known.iter().find(|known| known.name == name) else {
            return;
        };
        let nothing = libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        let nothing = vec![nothing; known.pinned.entries.len()];
        // Should it fail, the ring holds it until it ends or the entries are used again.
        // SAFETY: names no memory.
        let _ = unsafe { ring.register_buffers_update(known.first_slot, &nothing, None) };
    }

    /// Has another ring know the same.
    pub(crate) fn also(&self, ring: &Submitter<'_>) -> io::Result<()> {
        self.known.iter().try_for_each(|known| clone(ring, known))
    }

    /// Has another ring, which knows all others, know this too; and again what is behind it.
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
