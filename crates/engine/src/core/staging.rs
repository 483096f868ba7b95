//! Staging memory: where a command's bytes stay between the network and the device.
//!
//! **Design.** One sparse mapping a reactor, cut into size classes with a free list each, last in
//! first out, so that a quiet engine touches little. The mapping is never unmapped: the kernel may
//! still move data of commands in flight when the reactor is gone. [`Staging::trim`] gives pages
//! back to the system when the reactor has been idle.
//!
//! **Not here:** registration with the ring, huge pages.

#![allow(unsafe_code)]

use forebay_device::Buf;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::io;
use std::ptr::NonNull;

/// The longest transfer of one command (MDTS).
pub const MAX_TRANSFER_BYTES: u32 = 512 * 1024;

/// (bytes of a buffer, how many).
const CLASSES: [(u32, u32); 5] = [
    (4 << 10, 2048),
    (16 << 10, 1024),
    (64 << 10, 512),
    (128 << 10, 256),
    (MAX_TRANSFER_BYTES, 64),
];

const ALL: usize = {
    let mut sum = 0;
    let mut class = 0;
    while class < CLASSES.len() {
        sum += CLASSES[class].1 as usize;
        class += 1;
    }
    sum
};

/// A buffer, aligned to 4 KiB. Whoever holds it alone may touch its bytes; it must be given back.
#[must_use = "give it back to the staging memory"]
#[derive(Debug)]
pub struct StagingBuffer {
    ptr: NonNull<u8>,
    len: u32,
    class: u8,
}

// SAFETY: the memory is reached through this value alone, and is never unmapped.
unsafe impl Send for StagingBuffer {}

impl StagingBuffer {
    /// Bytes asked for.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether none were asked for.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `len` bytes at `ptr` are mapped for ever, and `self` is their only holder.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len()) }
    }

    /// The bytes, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` excludes other borrows.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len()) }
    }

    /// The bytes `from .. from + len` for a device operation; `None` out of range.
    pub(super) fn part(&self, from: u32, len: u32) -> Option<Buf> {
        // SAFETY: mapped for ever. The core alone calls this, on buffers of commands that it holds, and
        // hands the buffer on only when no operation on it is in flight.
        let whole = unsafe { Buf::new(self.ptr, self.len) };
        whole.slice(from, len)
    }
}

/// See the module's text.
#[derive(Debug)]
pub struct Staging {
    base: NonNull<u8>,
    bytes: usize,
    free: [Vec<NonNull<u8>>; CLASSES.len()],
    out: usize,
    touched: bool,
}

// SAFETY: the pointers are into memory that this value alone hands out.
unsafe impl Send for Staging {}

impl Staging {
    /// Reserves the address space.
    pub fn new() -> io::Result<Self> {
        let bytes: usize = CLASSES
            .iter()
            .map(|(size, count)| *size as usize * *count as usize)
            .sum();
        // SAFETY: a new private mapping, wherever the kernel likes.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        let base =
            NonNull::new(base.cast::<u8>()).ok_or_else(|| io::Error::other("mmap gave null"))?;
        let mut at = 0usize;
        let free = CLASSES.map(|(size, count)| {
            let mut list = Vec::with_capacity(count as usize);
            for i in (0..count as usize).rev() {
                // SAFETY: within the mapping, whose size is the sum over the classes.
                list.push(unsafe { base.add(at + i * size as usize) });
            }
            at += size as usize * count as usize;
            list
        });
        Ok(Self {
            base,
            bytes,
            free,
            out: 0,
            touched: false,
        })
    }

    /// A buffer of `len_bytes`; `None` when there is none now, or for more than
    /// [`MAX_TRANSFER_BYTES`]. Its bytes are whatever they were.
    #[inline]
    pub fn take(&mut self, len_bytes: u32) -> Option<StagingBuffer> {
        for (class, (size, _)) in CLASSES.iter().enumerate() {
            if *size >= len_bytes
                && let Some(ptr) = self.free[class].pop()
            {
                self.out += 1;
                self.touched = true;
                return Some(StagingBuffer {
                    ptr,
                    len: len_bytes,
                    class: class as u8,
                });
            }
        }
        None
    }

    /// Takes a buffer back.
    #[inline]
    pub fn give(&mut self, buffer: StagingBuffer) {
        self.out -= 1;
        self.free[buffer.class as usize].push(buffer.ptr);
    }

    /// Buffers that are out.
    pub fn out(&self) -> usize {
        self.out
    }

    /// Buffers that are there, of whatever size.
    #[inline]
    pub fn left(&self) -> usize {
        ALL - self.out
    }

    /// Gives the memory back to the system if no buffer is out and any was used.
    pub fn trim(&mut self) {
        if self.out == 0 && self.touched {
            self.touched = false;
            // SAFETY: our own mapping; no buffer is out, so no byte of it matters.
            let _ = unsafe {
                rustix::mm::madvise(self.base.as_ptr().cast(), self.bytes, Advice::LinuxDontNeed)
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_distinct_and_come_back() {
        let mut s = Staging::new().unwrap();
        let mut all = Vec::new();
        while let Some(mut b) = s.take(MAX_TRANSFER_BYTES) {
            b.as_mut_slice()[0] = all.len() as u8;
            all.push(b);
        }
        assert_eq!(all.len(), 64);
        assert!(s.take(MAX_TRANSFER_BYTES + 1).is_none());
        assert!(
            all.iter()
                .enumerate()
                .all(|(i, b)| b.as_slice()[0] == i as u8)
        );
        assert!(all[0].part(MAX_TRANSFER_BYTES - 4096, 4096).is_some());
        assert!(all[0].part(MAX_TRANSFER_BYTES - 4096, 4097).is_none());
        let small = s.take(1).unwrap();
        assert_eq!(small.ptr.as_ptr() as usize % 4096, 0);
        s.give(small);
        for b in all {
            s.give(b);
        }
        assert_eq!(s.out(), 0);
        s.trim();
        let b = s.take(MAX_TRANSFER_BYTES).unwrap();
        assert_eq!(b.as_slice()[0], 0, "trimmed memory comes back empty");
        s.give(b);
    }
}
