//! A device in memory: a file, best on tmpfs, copied by the CPU through a mapping, without a system
//! call.
//!
//! Touching a page that a full tmpfs lacks kills the process (SIGBUS). So a bit per page says that
//! the page exists; other pages go through a system call, which returns an error instead. A punch
//! clears bits. It shuts the region and waits for the copies counted inside, so that no copy is
//! between its check of the bit and its touch. A copy that finds a region shut uses the system
//! call.
//!
//! The kernel maps one page at a first write, but also its neighbours at a first read. So the first
//! copy into a complete chunk reads a byte of it. If someone shortens the file, this process dies.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::mem::Buf;

const PAGE_BYTES: u64 = 4096;
/// The unit in which copies and punches exclude each other.
const REGION_BYTES: u64 = 2 << 20;
const REGION_COUNTERS: usize = 256;
/// Pages that are learned together, and that the kernel maps together. Divides a word of the
/// bitmap.
const CHUNK_PAGES: u64 = 16;
const ALL_OF_CHUNK: u64 = (1 << CHUNK_PAGES) - 1;
const SHUT: u32 = 1 << 31;

#[repr(align(64))]
#[derive(Default)]
struct PunchRegion {
    inside: AtomicU32,
}

pub(crate) struct RamMap {
    ptr: NonNull<u8>,
    len_bytes: u64,
    /// One bit per page: it exists, and touching it is safe.
    present: Box<[AtomicU64]>,
    /// One bit per chunk: probably mapped. A hint only.
    touched: Box<[AtomicU64]>,
    /// On tmpfs, `mincore` reports exactly the pages that exist.
    is_tmpfs: bool,
    regions: Box<[PunchRegion]>,
}

// SAFETY: the mapping is shared memory that lives as long as `self`, used through raw pointers
// only; bits and counters are atomics. Wrong if a reference into the mapping were made.
unsafe impl Send for RamMap {}
// SAFETY: as for Send. Two threads that copy to one place at once leave a mixture, as on a disk.
unsafe impl Sync for RamMap {}

impl RamMap {
    pub(crate) fn map(fd: BorrowedFd<'_>, len_bytes: u64) -> Result<Self, Errno> {
        let len = usize::try_from(len_bytes).map_err(|_| Errno::NOMEM)?;
        // SAFETY: a new mapping at an address that the kernel chooses. Wrong with MAP_FIXED.
        let ptr = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                fd,
                0,
            )
        }?;
        let bits = |count: u64| (0..count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        let ram = Self {
            ptr: NonNull::new(ptr.cast()).ok_or(Errno::NOMEM)?,
            len_bytes,
            present: bits(len_bytes.div_ceil(PAGE_BYTES)),
            touched: bits(len_bytes.div_ceil(CHUNK_PAGES * PAGE_BYTES)),
            is_tmpfs: rustix::fs::fstatfs(fd).is_ok_and(|stat| stat.f_type == libc::TMPFS_MAGIC),
            regions: (0..REGION_COUNTERS)
                .map(|_| PunchRegion::default())
                .collect(),
        };
        // SAFETY: names exactly the new mapping; the advice doesn't change its content.
        unsafe { rustix::mm::madvise(ptr, len, Advice::LinuxDontDump) }?;
        Ok(ram)
    }

    pub(crate) fn read(
        &self,
        fd: BorrowedFd<'_>,
        offset_bytes: u64,
        buf: Buf,
    ) -> Result<(), Errno> {
        self.each_region(offset_bytes, buf, |at, part| {
            let Some(_inside) = self.enter(at) else {
                return read_by_call(fd, at, part);
            };
            if !self.all_present(at, part.len_bytes()) {
                let (from, to) = pages(at, part.len_bytes());
                self.learn(fd, from, to);
                if !self.all_present(at, part.len_bytes()) {
                    return read_by_call(fd, at, part);
                }
            }
            // SAFETY: `device` checked that the range is inside the mapping. Its pages exist (bits,
            // and no punch while we are counted inside), so the access can't fault. `part` is
            // writable by `Buf::new`'s contract and outside this mapping. Wrong if the file were
            // shortened meanwhile.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    self.at(at),
                    part.ptr().as_ptr(),
                    part.len_bytes() as usize,
                );
            }
            Ok(())
        })
    }

    pub(crate) fn write(
        &self,
        fd: BorrowedFd<'_>,
        offset_bytes: u64,
        buf: Buf,
    ) -> Result<(), Errno> {
        self.each_region(offset_bytes, buf, |at, part| {
            let Some(_inside) = self.enter(at) else {
                return write_by_call(fd, at, part);
            };
            if !self.all_present(at, part.len_bytes()) && !self.is_found(fd, at, part.len_bytes()) {
                // The call creates and fills the pages, or returns an error.
                write_by_call(fd, at, part)?;
                let (from, to) = pages(at, part.len_bytes());
                self.mark(from, to, true);
                return Ok(());
            }
            self.touch(at, part.len_bytes());
            // SAFETY: as in `read`, with the directions exchanged.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    part.ptr().as_ptr(),
                    self.at(at),
                    part.len_bytes() as usize,
                );
            }
            Ok(())
        })
    }

    pub(crate) fn punch(
        &self,
        fd: BorrowedFd<'_>,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<(), Errno> {
        let end = offset_bytes + len_bytes;
        let mut at = offset_bytes;
        while at < end {
            let next = end.min((at / REGION_BYTES + 1) * REGION_BYTES);
            let _shut = self.shut(at);
            // Only whole pages are freed. An extra cleared bit costs a later system call; a missed
            // one costs a SIGBUS.
            self.mark(at / PAGE_BYTES, next.div_ceil(PAGE_BYTES), false);
            let (from, to) = (
                at / PAGE_BYTES / CHUNK_PAGES,
                next.div_ceil(CHUNK_PAGES * PAGE_BYTES),
            );
            for (word, mask) in words(from, to) {
                self.touched[word].fetch_and(!mask, Ordering::Relaxed);
            }
            rustix::fs::fallocate(
                fd,
                FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                at,
                next - at,
            )?;
            at = next;
        }
        Ok(())
    }

    fn each_region(
        &self,
        offset_bytes: u64,
        buf: Buf,
        mut f: impl FnMut(u64, Buf) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let len = u64::from(buf.len_bytes());
        debug_assert!(offset_bytes + len <= self.len_bytes);
        let mut done = 0;
        while done < len {
            let at = offset_bytes + done;
            let n = (len - done).min(REGION_BYTES - at % REGION_BYTES);
            // Both fit: they are at most the length of the buffer.
            let part = buf.slice(done as u32, n as u32).ok_or(Errno::INVAL)?;
            f(at, part)?;
            done += n;
        }
        Ok(())
    }

    fn region(&self, at: u64) -> &PunchRegion {
        &self.regions[(at / REGION_BYTES) as usize % REGION_COUNTERS]
    }

    fn enter(&self, at: u64) -> Option<Inside<'_>> {
        let inside = Inside(self.region(at));
        let before = inside.0.inside.fetch_add(1, Ordering::SeqCst);
        (before & SHUT == 0).then_some(inside)
    }

    fn shut(&self, at: u64) -> Shut<'_> {
        let region = self.region(at);
        while region.inside.fetch_or(SHUT, Ordering::SeqCst) & SHUT != 0 {
            std::thread::yield_now();
        }
        let shut = Shut(region);
        while region.inside.load(Ordering::SeqCst) != SHUT {
            std::hint::spin_loop();
        }
        shut
    }

    fn all_present(&self, at: u64, len_bytes: u32) -> bool {
        let (from, to) = pages(at, len_bytes);
        words(from, to)
            .all(|(word, mask)| self.present[word].load(Ordering::Acquire) & mask == mask)
    }

    fn mark(&self, from_page: u64, to_page: u64, present: bool) {
        for (word, mask) in words(from_page, to_page) {
            if present {
                self.present[word].fetch_or(mask, Ordering::AcqRel);
            } else {
                self.present[word].fetch_and(!mask, Ordering::AcqRel);
            }
        }
    }

    /// Marks pages that already exist (from an earlier process, for example), up to the first gap
    /// or the end of the last chunk. The caller must be counted inside.
    fn learn(&self, fd: BorrowedFd<'_>, from_page: u64, to_page: u64) {
        let device_end = self.len_bytes.div_ceil(PAGE_BYTES);
        let end = to_page.next_multiple_of(CHUNK_PAGES).min(device_end);
        let there = if self.is_tmpfs {
            self.resident_end(from_page, end)
        } else {
            // Seeking is harmless: nothing uses the file's position.
            match rustix::fs::seek(fd, SeekFrom::Hole(from_page * PAGE_BYTES)) {
                Ok(hole) if hole >= self.len_bytes => device_end,
                Ok(hole) => hole / PAGE_BYTES,
                Err(_) => from_page,
            }
        };
        if there > from_page {
            self.mark(from_page, there.min(end), true);
        }
    }

    /// The end of the existing pages on tmpfs. SEEK_HOLE would walk to the next hole, however far.
    /// A page that is swapped out, or allocated and never written, counts as a gap.
    fn resident_end(&self, from_page: u64, to_page: u64) -> u64 {
        let mut at = from_page;
        while at < to_page {
            let mut resident = [0u8; 256];
            let count = (to_page - at).min(resident.len() as u64);
            // SAFETY: names pages of the mapping (the last may be partial) and an array with a byte
            // for each; nothing is touched. Wrong if `to_page` were past the mapping's end.
            let answer = unsafe {
                libc::mincore(
                    self.at(at * PAGE_BYTES).cast(),
                    (count * PAGE_BYTES) as usize,
                    resident.as_mut_ptr(),
                )
            };
            let known = &resident[..if answer == 0 { count as usize } else { 0 }];
            let there = known.iter().take_while(|byte| **byte & 1 == 1).count() as u64;
            at += there;
            if there < count {
                break;
            }
        }
        at
    }

    /// Makes the kernel map complete chunks in one step. The caller must be counted inside.
    fn touch(&self, at: u64, len_bytes: u32) {
        let (from, to) = pages(at, len_bytes);
        for chunk in from / CHUNK_PAGES..to.div_ceil(CHUNK_PAGES) {
            let (touched, bit) = (&self.touched[(chunk / 64) as usize], 1 << (chunk % 64));
            let is_whole = || self.known_of(chunk) == ALL_OF_CHUNK;
            if touched.load(Ordering::Relaxed) & bit != 0 || !is_whole() {
                continue;
            }
            touched.fetch_or(bit, Ordering::Relaxed);
            // Both ends: the kernel's unit is aligned in memory, and the mapping may not be.
            for page in [chunk * CHUNK_PAGES, (chunk + 1) * CHUNK_PAGES - 1] {
                // SAFETY: as in `read`, a byte of an existing page. Volatile, because only the
                // effect of the read matters.
                unsafe { self.at(page * PAGE_BYTES).read_volatile() };
            }
        }
    }

    fn known_of(&self, chunk: u64) -> u64 {
        let first = chunk * CHUNK_PAGES;
        self.present[(first / 64) as usize].load(Ordering::Acquire) >> (first % 64) & ALL_OF_CHUNK
    }

    /// Whether pages without a bit exist. Asked at a write of a whole chunk, which costs far more by
    /// a call, and at about the second write to a chunk: earlier it wastes a system call for sparse
    /// writes, later it costs one for each write into a gap.
    fn is_found(&self, fd: BorrowedFd<'_>, at: u64, len_bytes: u32) -> bool {
        let (from, to) = pages(at, len_bytes);
        for chunk in from / CHUNK_PAGES..to.div_ceil(CHUNK_PAGES) {
            let first = chunk * CHUNK_PAGES;
            let is_whole = from <= first && first + CHUNK_PAGES <= to;
            let known = u64::from(self.known_of(chunk).count_ones());
            if known < CHUNK_PAGES && (is_whole || (1..=to - from).contains(&known)) {
                self.learn(fd, first, first + 1);
            }
        }
        self.all_present(at, len_bytes)
    }

    fn at(&self, offset_bytes: u64) -> *mut u8 {
        self.ptr.as_ptr().wrapping_add(offset_bytes as usize)
    }
}

impl std::fmt::Debug for RamMap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RamMap")
            .field("len_bytes", &self.len_bytes)
            .finish_non_exhaustive()
    }
}

impl Drop for RamMap {
    fn drop(&mut self) {
        // SAFETY: exactly the mapped range. Copies borrow `self`, so none is running. Wrong if a
        // pointer into the mapping were given out.
        let _ = unsafe { rustix::mm::munmap(self.ptr.as_ptr().cast(), self.len_bytes as usize) };
    }
}

struct Inside<'a>(&'a PunchRegion);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

struct Shut<'a>(&'a PunchRegion);

impl Drop for Shut<'_> {
    fn drop(&mut self) {
        self.0.inside.fetch_and(!SHUT, Ordering::SeqCst);
    }
}

fn pages(at: u64, len_bytes: u32) -> (u64, u64) {
    (
        at / PAGE_BYTES,
        (at + u64::from(len_bytes)).div_ceil(PAGE_BYTES),
    )
}

/// The words of the bitmap for a range of pages, each with a mask.
fn words(from_page: u64, to_page: u64) -> impl Iterator<Item = (usize, u64)> {
    let last = to_page.max(from_page + 1) - 1;
    (from_page / 64..=last / 64).map(move |word| {
        let low = from_page.saturating_sub(word * 64).min(63);
        let high = (last - word * 64).min(63);
        let mask = (u64::MAX << low) & (u64::MAX >> (63 - high));
        (word as usize, mask)
    })
}

pub(super) fn read_by_call(fd: BorrowedFd<'_>, at: u64, buf: Buf) -> Result<(), Errno> {
    by_call(at, buf, |ptr, len, offset| {
        // SAFETY: by `Buf::new`'s contract the buffer is mapped, writable for its length and
        // unreferenced.
        unsafe { libc::pread(fd.as_raw_fd(), ptr.cast(), len, offset) }
    })
}

pub(super) fn write_by_call(fd: BorrowedFd<'_>, at: u64, buf: Buf) -> Result<(), Errno> {
    by_call(at, buf, |ptr, len, offset| {
        // SAFETY: by `Buf::new`'s contract the buffer is mapped and readable for its length.
        unsafe { libc::pwrite(fd.as_raw_fd(), ptr.cast(), len, offset) }
    })
}

fn by_call(
    at: u64,
    buf: Buf,
    call: impl Fn(*mut u8, usize, libc::off_t) -> isize,
) -> Result<(), Errno> {
    let mut rest = Some(buf);
    while let Some(part) = rest.filter(|part| part.len_bytes() > 0) {
        let done = buf.len_bytes() - part.len_bytes();
        // Offsets are below 2^61, checked at open.
        let offset = (at + u64::from(done)) as libc::off_t;
        match call(part.ptr().as_ptr(), part.len_bytes() as usize, offset) {
            0 => return Err(Errno::IO),
            n if n > 0 => rest = part.slice(n as u32, part.len_bytes() - n as u32),
            _ => match Errno::from_io_error(&std::io::Error::last_os_error()) {
                Some(Errno::INTR) => {}
                other => return Err(other.unwrap_or(Errno::IO)),
            },
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bitmap_words_cover_exactly_the_pages(from in 0u64..300, count in 1u64..300) {
            let mut bits = [0u64; 16];
            for (word, mask) in words(from, from + count) {
                prop_assert_eq!(bits[word] & mask, 0);
                bits[word] |= mask;
            }
            for page in 0..1024 {
                let is_set = bits[page as usize / 64] >> (page % 64) & 1 == 1;
                prop_assert_eq!(is_set, (from..from + count).contains(&page), "page {}", page);
            }
        }
    }

    #[test]
    fn pages_written_by_an_earlier_process_are_found() -> std::io::Result<()> {
        use std::os::fd::AsFd;
        use std::os::unix::fs::FileExt;
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = std::fs::File::from(rustix::fs::memfd_create("ram", flags)?);
        let len_bytes = 40 * PAGE_BYTES + 512;
        file.set_len(len_bytes)?;
        file.write_all_at(&[1; 20 * 4096], 0)?;
        file.write_all_at(&[2; 4096], 30 * PAGE_BYTES)?;
        file.write_all_at(&[3; 512], 40 * PAGE_BYTES)?;
        // Allocated but not written: the kernel would map it page by page.
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 32 * PAGE_BYTES, PAGE_BYTES)?;
        let (fd, ram) = (file.as_fd(), RamMap::map(file.as_fd(), len_bytes)?);
        let known = |ram: &RamMap| {
            let is_known = |page: &u64| ram.all_present(page * PAGE_BYTES, 1);
            (0..41).filter(is_known).collect::<Vec<_>>()
        };
        let mut memory = vec![7u8; 8192];
        let ptr = NonNull::from(&mut memory[..]).cast();
        // SAFETY: `memory` lives until the end, and is only read between the calls.
        let buf = unsafe { Buf::new(ptr, 8192) };

        // A write of a whole chunk asks at once.
        let whole = RamMap::map(fd, len_bytes)?;
        assert!(!whole.is_found(fd, 0, 15 * 4096));
        assert!(whole.is_found(fd, 0, 16 * 4096));
        // The first write to a chunk marks its own pages; the second finds the others.
        ram.write(fd, 3 * PAGE_BYTES, buf)?;
        assert_eq!(known(&ram), [3, 4]);
        ram.write(fd, 8 * PAGE_BYTES, buf)?;
        assert_eq!(known(&ram), (0..16).collect::<Vec<_>>());
        ram.write(fd, 17 * PAGE_BYTES, buf)?;
        assert!(!ram.is_found(fd, 19 * PAGE_BYTES, 8192));
        assert_eq!(known(&ram), (0..20).collect::<Vec<_>>());
        ram.write(fd, 21 * PAGE_BYTES, buf)?;
        ram.write(fd, 32 * PAGE_BYTES, buf)?;
        let mut pages: Vec<u64> = (0..20).chain([21, 22, 32, 33]).collect();
        assert_eq!(known(&ram), pages);
        // A read marks the pages that it found, to the end of the device at most.
        ram.read(fd, 30 * PAGE_BYTES, buf.slice(0, 4096).expect("inside"))?;
        ram.read(fd, 40 * PAGE_BYTES, buf.slice(0, 512).expect("inside"))?;
        pages.extend([30, 40]);
        pages.sort_unstable();
        assert_eq!(known(&ram), pages);
        assert_eq!(memory[0], 3);

        ram.punch(fd, 0, 16 * PAGE_BYTES)?;
        assert!(!ram.is_found(fd, 0, 4096));
        let mut read = vec![9u8; 8192];
        file.read_exact_at(&mut read, 21 * PAGE_BYTES)?;
        assert_eq!(read, vec![7; 8192]);
        file.read_exact_at(&mut read, 3 * PAGE_BYTES)?;
        assert_eq!(read, vec![0; 8192]);
        Ok(())
    }
}
