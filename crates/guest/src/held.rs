//! Pins a mapping's pages in the kernel while they are used.
//!
//! Only present pages (`mincore`) are pinned: an untouched page would be allocated on our account.
//! Huge pages were reserved with the mapping.
#![allow(unsafe_code)]

use std::any::Any;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use forebay_device::Pinned;
use rustix::io::Errno;

use crate::mapping::{Mapping, PAGE_BYTES};

/// Pages per `mincore` call.
const AT_ONCE: usize = 1 << 14;

/// Whether `mincore` is truthful: processes that may not write the file see all pages as present.
pub(crate) fn tells(file: BorrowedFd<'_>) -> bool {
    let (path, flags) = (c"", libc::AT_EMPTY_PATH | libc::AT_EACCESS);
    // SAFETY: reads a descriptor and a string, which outlive the call.
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
    /// Bytes mapped: the requested range, extended to whole pages.
    pub fn whole_bytes(&self) -> usize {
        self.whole_bytes
    }

    /// The parts of a range of the whole mapping that may be pinned.
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
            // SAFETY: a range inside the mapping, which lives; there is room for one byte per page.
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

    /// Pins a part from [`Mapping::present`]; may take long. `EINVAL`: outside, or `pinned` keeps
    /// another object.
    pub fn pin(self: &Arc<Self>, range: Range<usize>, pinned: &mut Pinned) -> io::Result<()> {
        let ours: Arc<dyn Any + Send + Sync> = self.clone();
        let kept = std::ptr::addr_eq(Arc::as_ptr(&ours), Arc::as_ptr(pinned.keeps()));
        let inside = range.start < range.end && range.end <= self.whole_bytes;
        if !kept || !inside || !self.is_writable() {
            return Err(Errno::INVAL.into());
        }
        // SAFETY: inside the mapping, which is writable and which `pinned` keeps.
        unsafe { pinned.pin(self.whole.add(range.start), range.len()) }
    }
}
