//! Staging buffers: memory for a command's bytes between the network and the device.
//!
//! **Design.** Size classes with last-in-first-out free lists, so that a quiet engine touches few
//! pages. As in BurstCBS there are two tiers: some buffers stay ready for each lane; bursts borrow
//! more. After a burst its pages go back to the system ([`Staging::settle`]); [`Staging::trim`]
//! returns those of an idle reactor. Both work in small steps, to keep pauses short.
//!
//! Two kinds have no class: inherited buffers, whose pages are freed with them, and read-only
//! zeros, which need no zeroing. **Not here:** ring registration (pinned memory cannot be
//! returned), huge pages.

#![allow(unsafe_code)]

use crate::memory::{self, Memory, StagingMemory, Zeros};
use forebay_device::Buf;
use forebay_qos::spare_buffers::{self, Used, returned_at_once};
use forebay_xlate::boundary::region::check::BufferRef;
use std::ptr::NonNull;

/// Longest transfer of one command (MDTS), in bytes.
pub(crate) const MAX_TRANSFER_BYTES: u32 = 512 * 1024;

const CLASSES: [(u32, u32); 5] = [
    (4 << 10, 2048),
    (16 << 10, 1024),
    (64 << 10, 512),
    (128 << 10, 256),
    (MAX_TRANSFER_BYTES, 64),
];
pub(crate) const SIZE_CLASSES: usize = CLASSES.len();
const INHERITED: u8 = CLASSES.len() as u8;
const ZEROS: u8 = INHERITED + 1;

const fn sum(of_bytes: bool) -> usize {
    let mut sum = 0;
    let mut class = 0;
    while class < CLASSES.len() {
        let (bytes, count) = CLASSES[class];
        sum += count as usize * if of_bytes { bytes as usize } else { 1 };
        class += 1;
    }
    sum
}

const ALL: usize = sum(false);
/// Bytes of a reactor's staging memory.
pub(crate) const STAGING_BYTES: usize = sum(true);

/// A buffer, aligned to 4 KiB. Only its owner may touch its bytes, and must give it back. Buffers
/// of zeros share read-only bytes.
#[must_use = "give it back to the staging memory"]
#[derive(Debug)]
pub(crate) struct StagingBuffer {
    ptr: NonNull<u8>,
    len: u32,
    /// Page in the file (24 bits), class counted as (4), own class (4).
    place: u32,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    /// [`SIZE_CLASSES`] and above: none.
    pub class: usize,
    pub bytes: u64,
}

// SAFETY: the memory is reached only through this value, or only by readers, and is never unmapped.
unsafe impl Send for StagingBuffer {}

impl StagingBuffer {
    fn new(ptr: NonNull<u8>, len: u32, offset_bytes: u64, class: u8) -> Self {
        Self {
            ptr,
            len,
            place: (offset_bytes >> 12 << 8) as u32 | u32::from(class << 4 | class),
        }
    }

    pub(crate) fn inherited(memory: &'static Memory, len_bytes: u32) -> Option<Self> {
        let room = memory.inherit(len_bytes)?;
        Some(Self::new(room.ptr, len_bytes, room.offset_bytes, INHERITED))
    }

    /// Requested length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    #[inline]
    pub(crate) fn taken(&self) -> Taken {
        let class = self.place as usize >> 4 & 15;
        let bytes = match CLASSES.get(class) {
            Some((size_bytes, _)) => u64::from(*size_bytes),
            None => u64::from(self.len).next_multiple_of(4096),
        };
        Taken { class, bytes }
    }

    /// Counts this buffer as `other`, which it replaces.
    #[inline]
    pub(crate) fn counts_as(&mut self, other: &Self) {
        self.place = self.place & !0xF0 | other.place & 0xF0;
    }

    #[inline]
    fn class(&self) -> u8 {
        self.place as u8 & 15
    }

    /// Its place in the memory's file.
    #[inline]
    pub(crate) fn reference(&self) -> BufferRef {
        BufferRef {
            offset_bytes: u64::from(self.place >> 8) << 12,
            len_bytes: self.len,
        }
    }

    /// Place in short form: the page in the upper 24 bits.
    #[inline]
    pub(crate) fn place(&self) -> u32 {
        self.place
    }

    #[inline]
    pub(crate) fn is_zeros(&self) -> bool {
        self.class() == ZEROS
    }

    /// The bytes.
    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: `len` bytes at `ptr` stay mapped, and `self` is their only holder, or they are
        // never written.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len()) }
    }

    /// The bytes for writing; empty for a buffer of zeros.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        if self.is_zeros() {
            return &mut [];
        }
        // SAFETY: as above, and `&mut self` excludes other borrows.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len()) }
    }

    pub(crate) fn part(&self, from: u32, len: u32) -> Option<Buf> {
        if self.is_zeros() {
            return None;
        }
        // SAFETY: never unmapped. Only the core calls this, on buffers of its commands, and it
        // hands a buffer on only when no operation on it is in flight.
        let whole = unsafe { Buf::new(self.ptr, self.len) };
        whole.slice(from, len)
    }
}

#[derive(Debug)]
struct Class {
    size_bytes: u32,
    base: NonNull<u8>,
    offset_bytes: u64,
    /// Free buffers with pages, the last one used at the end.
    warm: Vec<u32>,
    /// Free buffers without pages.
    cold: Vec<u32>,
    used: Used,
}

impl Class {
    #[inline]
    fn allocate(&mut self) -> Option<u32> {
        let index = self.warm.pop().or_else(|| self.cold.pop())?;
        self.used.acquire();
        Some(index)
    }

    fn free(&self) -> usize {
        self.warm.len() + self.cold.len()
    }

    /// Returns pages of some free buffers beyond `keep` to the system; true if more remain.
    fn cool(&mut self, keep: usize) -> bool {
        let extra = self.warm.len().saturating_sub(keep);
        if extra == 0 {
            return false;
        }
        let count = extra.min(returned_at_once(self.size_bytes) as usize);
        // Sorted, so that one call frees adjacent buffers.
        self.warm.sort_unstable();
        let from = self.warm.len() - count;
        let mut next = None;
        let mut run = 0;
        for &index in self.warm[from..].iter().chain([&u32::MAX]) {
            if run > 0 && next != Some(index) {
                let first = next.unwrap_or_default() - run;
                let at = first as usize * self.size_bytes as usize;
                // SAFETY: within the class, since these indexes were handed out once. The buffers
                // are free, so their bytes do not matter.
                unsafe { memory::remove(self.base.add(at), (run * self.size_bytes) as usize) };
                run = 0;
            }
            run += 1;
            next = index.checked_add(1);
        }
        self.cold.extend(self.warm.drain(from..).rev());
        extra > count
    }
}

/// System memory held by a reactor's staging buffers.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Held {
    /// Bytes of buffers that stay ready.
    pub own_bytes: u64,
    /// Bytes borrowed for a burst, until it ends.
    pub borrowed_bytes: u64,
}

/// A reactor's staging buffers.
#[derive(Debug)]
pub(crate) struct Staging {
    classes: [Class; CLASSES.len()],
    out: usize,
    zeros: Zeros,
}

// SAFETY: the pointers are into memory that only this value hands out.
unsafe impl Send for Staging {}

impl Staging {
    /// Divides a reactor's part into size classes.
    pub(crate) fn over(memory: StagingMemory) -> Self {
        let mut at = 0usize;
        let classes = CLASSES.map(|(size_bytes, count)| {
            let class = Class {
                size_bytes,
                // SAFETY: within the part, whose size is the sum over the classes.
                base: unsafe { memory.base.add(at) },
                offset_bytes: memory.offset_bytes + at as u64,
                // Full capacity: nothing is allocated later.
                warm: Vec::with_capacity(count as usize),
                cold: (0..count).rev().collect(),
                used: Used::new(),
            };
            at += size_bytes as usize * count as usize;
            class
        });
        Self {
            classes,
            out: 0,
            zeros: memory.zeros,
        }
    }

    #[cfg(test)]
    /// Maps the memory for the first buffers. Errors: the kernel refuses it.
    pub(crate) fn new() -> std::io::Result<Self> {
        let reactor = Memory::create()?.reactor(0);
        let reactor = reactor.ok_or_else(|| std::io::Error::other("taken"))?;
        Ok(Self::over(reactor.staging))
    }

    /// A buffer with undefined contents; `None` if none is free, or above [`MAX_TRANSFER_BYTES`].
    #[inline]
    pub(crate) fn allocate(&mut self, len_bytes: u32) -> Option<StagingBuffer> {
        for (number, class) in (0u8..).zip(&mut self.classes) {
            if class.size_bytes >= len_bytes
                && let Some(index) = class.allocate()
            {
                self.out += 1;
                let at = index as usize * class.size_bytes as usize;
                // SAFETY: `index` is below the class's count.
                let ptr = unsafe { class.base.add(at) };
                let offset_bytes = class.offset_bytes + at as u64;
                return Some(StagingBuffer::new(ptr, len_bytes, offset_bytes, number));
            }
        }
        None
    }

    #[inline]
    pub(crate) fn zeros(&self, len_bytes: u32) -> Option<StagingBuffer> {
        let Zeros { ptr, offset_bytes } = self.zeros;
        (len_bytes <= MAX_TRANSFER_BYTES)
            .then(|| StagingBuffer::new(ptr, len_bytes, offset_bytes, ZEROS))
    }

    /// Takes a buffer back.
    #[inline]
    pub(crate) fn release(&mut self, buffer: StagingBuffer) {
        match self.classes.get_mut(usize::from(buffer.class())) {
            Some(class) => {
                self.out -= 1;
                let at = buffer.reference().offset_bytes - class.offset_bytes;
                class.used.release();
                class
                    .warm
                    .push((at >> class.size_bytes.trailing_zeros()) as u32);
            }
            None if buffer.is_zeros() => {}
            None => {
                let bytes = buffer.len().next_multiple_of(4096);
                // SAFETY: its own pages, whose life ends with it.
                unsafe { memory::remove(buffer.ptr, bytes) };
            }
        }
    }

    /// Buffers in use, without inherited ones.
    #[cfg(test)]
    pub(crate) fn out(&self) -> usize {
        self.out
    }

    /// Free buffers of all sizes.
    #[inline]
    pub(crate) fn left(&self) -> usize {
        ALL - self.out
    }

    pub(crate) fn left_for(&self, len_bytes: u32) -> usize {
        let fit = self.classes.iter().filter(|c| c.size_bytes >= len_bytes);
        fit.map(Class::free).sum()
    }

    #[inline]
    pub(crate) fn left_of(&self, class: usize) -> usize {
        self.classes.get(class).map_or(0, Class::free)
    }

    /// The memory of the next buffer, and how many such are free.
    #[inline]
    pub(crate) fn next_for(&self, len_bytes: u32) -> Option<(Taken, usize)> {
        let mut classes = self.classes.iter().enumerate();
        let fits = |class: &Class| class.size_bytes >= len_bytes && class.free() > 0;
        let (class, of) = classes.find(|(_, class)| fits(class))?;
        let bytes = u64::from(of.size_bytes);
        Some((Taken { class, bytes }, of.free()))
    }

    pub(crate) fn is_half_left_for(&self, len_bytes: u32) -> bool {
        let fit = CLASSES.iter().filter(|(size, _)| *size >= len_bytes);
        2 * self.left_for(len_bytes) >= fit.map(|(_, count)| *count as usize).sum()
    }

    /// Returns some memory of an idle reactor to the system; true if more remains.
    pub(crate) fn trim(&mut self) -> bool {
        let class = self.classes.iter_mut().find(|c| !c.warm.is_empty());
        class.is_some_and(|class| class.cool(0)) || self.classes.iter().any(|c| !c.warm.is_empty())
    }

    /// Checks whether bursts have ended, and returns some borrowed memory to the system. Returns
    /// the memory kept.
    pub(crate) fn settle(&mut self, lanes: u32) -> Held {
        let mut held = Held::default();
        for (at, class) in self.classes.iter_mut().enumerate() {
            let own = spare_buffers::own(at, lanes);
            if let Some(keep) = class.used.poll(own) {
                class.cool(keep as usize);
            }
            let present = class.warm.len() as u64 + u64::from(class.used.out());
            let size = u64::from(class.size_bytes);
            let stays = present.min(own.into());
            held.own_bytes += stays * size;
            held.borrowed_bytes += (present - stays) * size;
        }
        held
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::OldMemory;

    #[test]
    fn buffers_are_distinct_and_come_back() {
        let mut s = Staging::new().unwrap();
        let mut all = Vec::new();
        while let Some(mut b) = s.allocate(MAX_TRANSFER_BYTES) {
            b.as_mut_slice()[0] = all.len() as u8;
            all.push(b);
        }
        assert_eq!(all.len(), 64);
        assert!(s.allocate(MAX_TRANSFER_BYTES + 1).is_none());
        assert!(
            all.iter()
                .enumerate()
                .all(|(i, b)| b.as_slice()[0] == i as u8)
        );
        assert!(all[0].part(MAX_TRANSFER_BYTES - 4096, 4096).is_some());
        assert!(all[0].part(MAX_TRANSFER_BYTES - 4096, 4097).is_none());
        let small = s.allocate(1).unwrap();
        assert_eq!(small.ptr.as_ptr() as usize % 4096, 0);
        s.release(small);
        for b in all {
            s.release(b);
        }
        assert_eq!(s.out(), 0);
        let mut steps = 1;
        while s.trim() {
            steps += 1;
        }
        assert_eq!(steps, 33, "one of 4 KiB, 32 MiB by 1 MiB");
        let b = s.allocate(MAX_TRANSFER_BYTES).unwrap();
        assert_eq!(b.as_slice()[0], 0, "trimmed memory comes back empty");
        s.release(b);
    }

    #[test]
    fn burst_buffers_return() {
        let memory = Memory::create().unwrap();
        let used_bytes = || rustix::fs::fstat(memory.fd()).unwrap().st_blocks as u64 * 512;
        let mut s = Staging::over(memory.reactor(0).unwrap().staging);
        let touch = |s: &mut Staging, len: u32| {
            let mut buffer = s.allocate(len).unwrap();
            buffer.as_mut_slice().fill(7);
            buffer
        };
        let lanes = 2;
        let steady: Vec<_> = (0..16).map(|_| touch(&mut s, 4096)).collect();
        let before = used_bytes();
        for _ in 0..100 {
            let tiers = s.settle(lanes);
            assert_eq!((tiers.own_bytes, tiers.borrowed_bytes), (16 << 12, 0));
        }
        for round in 0..50 {
            let count = if round == 0 { 500 } else { 20 };
            let mut burst: Vec<_> = (0..count).map(|_| touch(&mut s, 4096)).collect();
            burst.extend((0..count / 5).map(|_| touch(&mut s, 128 << 10)));
            for buffer in burst {
                s.release(buffer);
            }
            let tiers = s.settle(lanes);
            assert_eq!(
                tiers.borrowed_bytes,
                (500 << 12) + (98 << 17),
                "round {round}"
            );
        }
        assert!(used_bytes() >= before + (500 << 12) + (100 << 17));
        let mut polls = 0;
        while s.settle(lanes).borrowed_bytes > 0 {
            polls += 1;
            assert!(polls < 200, "what was borrowed doesn't return");
        }
        assert!(
            polls as u32 >= spare_buffers::BURST_OVER,
            "a pause is no end"
        );
        assert_eq!(s.settle(lanes).own_bytes, (16 << 12) + (2 << 17));
        assert!(used_bytes() <= before + (2 << 17), "{}", used_bytes());
        assert!(steady.iter().all(|b| b.as_slice() == [7; 4096]));
        let again: Vec<_> = (0..500).map(|_| s.allocate(4096).unwrap()).collect();
        assert!(again.iter().all(|b| b.as_slice() == [0; 4096]));
        for buffer in again.into_iter().chain(steady) {
            s.release(buffer);
        }
        while s.trim() {}
        assert_eq!((s.settle(lanes), s.left()), (Held::default(), ALL));
    }

    #[test]
    fn a_reference_finds_the_bytes_in_the_file() {
        let memory = Memory::create().unwrap();
        let old = OldMemory::adopt(memory.fd().try_clone_to_owned().unwrap()).unwrap();
        let mut s = Staging::over(memory.reactor(5).unwrap().staging);
        let mut inherited = StagingBuffer::inherited(memory, 5000).unwrap();
        let mut all: Vec<StagingBuffer> = [1, 4096, 5000, 100_000, MAX_TRANSFER_BYTES]
            .iter()
            .flat_map(|len| [s.allocate(*len).unwrap(), s.allocate(*len).unwrap()])
            .collect();
        for (i, buffer) in (1..).zip(all.iter_mut().chain([&mut inherited])) {
            buffer.as_mut_slice().fill(i);
        }
        for (i, buffer) in (1u8..).zip(all.iter().chain([&inherited])) {
            let reference = buffer.reference();
            let mut bytes = vec![0; reference.len_bytes as usize];
            old.read(reference.offset_bytes, &mut bytes).unwrap();
            assert!(!bytes.is_empty() && bytes.iter().all(|b| *b == i));
        }
        let at = inherited.reference().offset_bytes;
        for buffer in all {
            s.release(buffer);
        }
        s.release(inherited);
        let mut first = [1];
        old.read(at, &mut first).unwrap();
        assert_eq!((first, s.out(), s.left()), ([0], 0, ALL));
    }

    #[test]
    fn the_zero_buffer_is_shared_and_read_only() {
        let memory = Memory::create().unwrap();
        let old = OldMemory::adopt(memory.fd().try_clone_to_owned().unwrap()).unwrap();
        let mut s = Staging::over(memory.reactor(5).unwrap().staging);
        let mut zeros = s.zeros(MAX_TRANSFER_BYTES).unwrap();
        let more = s.zeros(4096).unwrap();
        assert!(s.zeros(MAX_TRANSFER_BYTES + 1).is_none());
        assert!(zeros.as_mut_slice().is_empty() && zeros.part(0, 4096).is_none());
        assert_eq!((zeros.len(), more.len(), s.left()), (512 << 10, 4096, ALL));
        let mut bytes = vec![1; zeros.len()];
        (old.read(zeros.reference().offset_bytes, &mut bytes)).unwrap();
        assert!(bytes == zeros.as_slice() && bytes.iter().all(|b| *b == 0));
        s.release(zeros);
        assert_eq!(more.as_slice(), [0; 4096]);
        s.release(more);
        assert_eq!((s.out(), s.left()), (0, ALL));
    }
}
