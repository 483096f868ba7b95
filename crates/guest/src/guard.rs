//! A SIGBUS handler for missing pages of a client's file.
//!
//! A client may shrink a mapped file, or a huge page may be missing. The resulting `SIGBUS` must
//! not kill the engine. The handler finds the mapping in a lock-free table, maps private zeros over
//! it and marks it broken; the access continues. Huge pages are replaced whole, as the kernel
//! cannot split them. Any other `SIGBUS` goes to the previous handler.
//!
//! The kernel's own accesses (device transfers) end with `EFAULT` and mark no mapping.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering::*, fence,
};
use std::sync::{Mutex, OnceLock, PoisonError};

use rustix::io::Errno;

/// Enough for 64 clients with all their regions.
pub const MAX_MAPPINGS: usize = 20_480;

struct Entry {
    /// Odd while the entry changes; readers load it before and after the rest.
    sequence: AtomicU32,
    broken: AtomicBool,
    start: AtomicUsize,
    /// 0: free.
    len_bytes: AtomicUsize,
    page_bytes: AtomicUsize,
}

/// The parts of an entry that the handler needs.
#[derive(Clone, Copy)]
struct Range {
    start: usize,
    len_bytes: usize,
    page_bytes: usize,
}

static TABLE: [Entry; MAX_MAPPINGS] = [const {
    Entry {
        sequence: AtomicU32::new(0),
        broken: AtomicBool::new(false),
        start: AtomicUsize::new(0),
        len_bytes: AtomicUsize::new(0),
        page_bytes: AtomicUsize::new(0),
    }
}; MAX_MAPPINGS];

/// Entries from here on were never used.
static USED: AtomicUsize = AtomicUsize::new(0);
static BREAKS: AtomicU64 = AtomicU64::new(0);
/// The previous handler; null before `install`.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(null_mut());
/// The free entries below `USED`. The lock also protects changes of entries.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// Mappings broken so far; on a change, check [`crate::Mapping::is_broken`].
#[inline]
pub fn breaks() -> u64 {
    BREAKS.load(Relaxed)
}

/// Installs the handler once per process; other handlers must come before.
pub fn install() -> Result<(), Errno> {
    static INSTALLED: OnceLock<Result<(), Errno>> = OnceLock::new();
    *INSTALLED.get_or_init(|| {
        let before = Box::leak(Box::new(MaybeUninit::<libc::sigaction>::zeroed()));
        // SAFETY: all zeros is a valid sigaction. The handler has the SA_SIGINFO type and makes
        // only async-signal-safe calls. `before` lives for ever and is written before the handler
        // can read it.
        let done = unsafe {
            // Ask first: the handler may run as soon as it is installed.
            if libc::sigaction(libc::SIGBUS, std::ptr::null(), before.as_mut_ptr()) != 0 {
                return Err(last());
            }
            BEFORE.store(before.as_mut_ptr(), Release);
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_bus
                as extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void)
                as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(libc::SIGBUS, &action, null_mut())
        };
        if done == 0 { Ok(()) } else { Err(last()) }
    })
}

fn last() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// A range that the handler knows. Drop it before the range is unmapped.
#[derive(Debug)]
pub(crate) struct Guarded(usize);

impl Guarded {
    /// Registers a range mapped by one call, made of whole pages of `page_bytes` (a power of two).
    pub(crate) fn new(start: usize, len_bytes: usize, page_bytes: usize) -> Result<Self, Errno> {
        install()?;
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let index = match free.pop() {
            Some(index) => index,
            None if USED.load(Relaxed) < MAX_MAPPINGS => USED.fetch_add(1, AcqRel),
            None => return Err(Errno::NOMEM),
        };
        TABLE[index].set(Range {
            start,
            len_bytes,
            page_bytes,
        });
        Ok(Self(index))
    }

    #[inline]
    pub(crate) fn is_broken(&self) -> bool {
        TABLE[self.0].broken.load(Relaxed)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        TABLE[self.0].set(Range {
            start: 0,
            len_bytes: 0,
            page_bytes: 0,
        });
        free.push(self.0);
    }
}

impl Entry {
    /// Only for the holder of [`FREE`].
    fn set(&self, range: Range) {
        let sequence = self.sequence.load(Relaxed);
        self.sequence.store(sequence.wrapping_add(1), Relaxed);
        fence(Release);
        self.start.store(range.start, Relaxed);
        self.len_bytes.store(range.len_bytes, Relaxed);
        self.page_bytes.store(range.page_bytes, Relaxed);
        self.broken.store(false, Relaxed);
        self.sequence.store(sequence.wrapping_add(2), Release);
    }

    /// The range, if `at` is in it; never one that is being changed.
    fn range_with(&self, at: usize) -> Option<Range> {
        let sequence = self.sequence.load(Acquire);
        let range = Range {
            start: self.start.load(Relaxed),
            len_bytes: self.len_bytes.load(Relaxed),
            page_bytes: self.page_bytes.load(Relaxed),
        };
        fence(Acquire);
        let whole = sequence.is_multiple_of(2) && self.sequence.load(Relaxed) == sequence;
        (whole && at.wrapping_sub(range.start) < range.len_bytes).then_some(range)
    }
}

/// Maps zeros over the range around `at`; false if there is none.
fn mend(at: usize) -> bool {
    let used = USED.load(Acquire).min(MAX_MAPPINGS);
    for entry in &TABLE[..used] {
        let Some(range) = entry.range_with(at) else {
            continue;
        };
        let (start, len_bytes) = (range.start, range.len_bytes);
        // If the kernel refuses the whole range (no overcommit), a part around the fault.
        let around = |unit: usize| {
            let unit = unit.max(range.page_bytes);
            let from = start.max(at & !(unit - 1));
            zeros(from, (start + len_bytes - from).min(unit))
        };
        let mapped = zeros(start, len_bytes) || around(2 << 20) || around(4096);
        if !mapped {
            return false;
        }
        entry.broken.store(true, Relaxed);
        BREAKS.fetch_add(1, Release);
        return true;
    }
    false
}

fn zeros(start: usize, len_bytes: usize) -> bool {
    // SAFETY: a `Mapping` has mapped the range, and its owner is alive, as an access is in
    // progress. The client's bytes have no references, so they may become zeros. mmap is a plain
    // system call, which a handler may make.
    let mapped = unsafe {
        libc::mmap(
            without_provenance_mut(start),
            len_bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
            -1,
            0,
        )
    };
    mapped != libc::MAP_FAILED
}

extern "C" fn on_bus(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: an SA_SIGINFO handler gets a valid siginfo, with an address if the kernel raised the
    // SIGBUS (a positive code). errno is this thread's own.
    unsafe {
        let errno = *libc::__errno_location();
        let by_kernel = (*info).si_code > 0;
        let mended = by_kernel && mend((*info).si_addr().addr());
        if !mended {
            // The previous handler gets the repeated access, or the signal raised again.
            libc::sigaction(signal, BEFORE.load(Acquire), null_mut());
            if !by_kernel {
                libc::raise(signal);
            }
        }
        *libc::__errno_location() = errno;
    }
}
