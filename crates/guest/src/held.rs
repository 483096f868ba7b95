//! A mapping's pages are held by the kernel, for as long as it is used.
//!
//! **Design.** Only what is there already: to hold what its client has not touched yet would make memory of all of
//! it, on our account. So the kernel is asked which pages are there (`mincore`), where it says so truly. Huge pages were
//! set aside for this file when it was mapped: they are there, or cost nobody anything.
//!
//! **What it does not do.** It knows no ring ([`forebay_device::Pinned`]), and doesn't say when.
#![allow(unsafe_code)]

use std::any::Any;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use forebay_device::Pinned;
use rustix::io::Errno;

use crate::mapping::{Mapping, PAGE_BYTES};

/// Pages that are asked about at once.
const AT_ONCE: usize = 1 << 14;

/// Whether the kernel says which pages of a file are there: to those who might write it. Others hear that all are.
pub(crate) fn tells(file: BorrowedFd<'_>) -> bool {
    let (path, flags) = (c"", libc::AT_EMPTY_PATH | libc::AT_EACCESS);
    // SAFETY: looks at a descriptor and a string, which outlive the call.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_faccessat2,
            file.as_raw_fd(),
            path.as_ptr(),
            libc::W_OK,
            flags,
        )
    };
    answer == 0
}

impl Mapping {
    /// How much is mapped: the range that was asked for, and what its first and last pages have around it.
    pub fn whole_bytes(&self) -> usize {
        self.whole_bytes
    }

    /// The parts of a range (of what is mapped) that are memory now, and may be held.
    pub fn present(&self, range: Range<usize>) -> Vec<Range<usize>> {
        let page = PAGE_BYTES as usize;
        let mut parts: Vec<Range<usize>> = Vec::new();
        let to = range.end.min(self.whole_bytes);
        let mut from = range.start.next_multiple_of(page);
        if !self.is_writable() || !self.tells || from >= to {
            return parts;
        }
        if self.page_bytes > page {
            parts.push(from..to);
            return parts;
        }
        let mut there = vec![0u8; AT_ONCE.min((to - from).div_ceil(page))];
        while from < to {
            let bytes = (to - from).min(there.len() * page);
            // SAFETY: a range inside the mapping, which lives; a byte is written for each page, and there are so many.
            let done = unsafe {
                let at = self.whole.as_ptr().wrapping_add(from);
                libc::mincore(at.cast(), bytes, there.as_mut_ptr())
            };
            if done != 0 {
                break;
            }
            for (number, _) in (0..bytes.div_ceil(page))
                .zip(&there)
                .filter(|(_, t)| *t & 1 != 0)
            {
                let at = from + number * page;
                match parts.last_mut() {
                    Some(last) if last.end == at => last.end += page,
                    _ => parts.push(at..at + page),
                }
            }
            from += bytes;
        }
        parts
    }

    /// Has the kernel hold a part of it, which [`Mapping::present`] gave: that may take long.
    ///
    /// # Errors
    /// The system's; `EINVAL` for what isn't inside, or if `pinned` keeps something else.
    pub fn pin(self: &Arc<Self>, range: Range<usize>, pinned: &mut Pinned) -> io::Result<()> {
        let ours: Arc<dyn Any + Send + Sync> = self.clone();
        let kept = std::ptr::addr_eq(Arc::as_ptr(&ours), Arc::as_ptr(pinned.keeps()));
        let inside = range.start < range.end && range.end <= self.whole_bytes;
        if !kept || !inside || !self.is_writable() {
            return Err(Errno::INVAL.into());
        }
        // SAFETY: inside the mapping, which may be written, and which `pinned` keeps.
        unsafe { pinned.pin(self.whole.add(range.start), range.len()) }
    }
}
