//! What happens when a page of a client's file is gone.
//!
//! **Purpose.** A client may shrink a file that is mapped here, or a huge page may not be had: touching that page is a
//! `SIGBUS`, which would kill the engine and with it every other tenant's path. It must cost that client alone.
//!
//! **Design.** A process-wide handler knows the ranges of all mappings, in a fixed table without locks (each entry is
//! read between two looks at its sequence number). A fault inside a range maps private zeros over the whole of it, marks
//! it broken, and the access goes on with zeros. (A range of huge pages is mapped whole, or by whole huge pages: the
//! kernel cuts them nowhere else.) Whoever uses the mapping looks at [`breaks`], which changes
//! with every break. Any other `SIGBUS` goes to whoever handled it before: that one's handler is put back, and the
//! access faults again.
//!
//! **What it does not do.** The kernel's own accesses (a device's transfer) raise no signal: they end with `EFAULT`,
//! and mark nothing. It catches no `SIGSEGV`: there is none, as mappings outlive their users.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering::*, fence,
};
use std::sync::{Mutex, OnceLock, PoisonError};

use rustix::io::Errno;

/// Mappings in a process at once: of 64 clients with as many regions as they may have, and more.
pub const MAX_MAPPINGS: usize = 20_480;

/// A range in the table.
struct Entry {
    /// Odd while it is being changed.
    sequence: AtomicU32,
    broken: AtomicBool,
    start: AtomicUsize,
    /// 0: free.
    len_bytes: AtomicUsize,
    /// Of its pages.
    page_bytes: AtomicUsize,
}

/// What of an entry the handler needs.
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
/// Whoever handled the signal before; null before the handler is there.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(null_mut());
/// The free entries below `USED`; also says who may change entries.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// How many mappings broke in this process so far: when it changes, look at [`crate::Mapping::is_broken`].
#[inline]
pub fn breaks() -> u64 {
    BREAKS.load(Relaxed)
}

/// Puts the handler in place, once in a process; every later call is free. Whoever handles the signal from then on must
/// have done so before.
///
/// # Errors
/// The system's.
pub fn install() -> Result<(), Errno> {
    static INSTALLED: OnceLock<Result<(), Errno>> = OnceLock::new();
    *INSTALLED.get_or_init(|| {
        let before = Box::leak(Box::new(MaybeUninit::<libc::sigaction>::zeroed()));
        // SAFETY: all zeros is a valid sigaction; the handler has the type that is called with SA_SIGINFO, and does only
        // what a handler may. `before` lives for ever and is written before the handler is known to anybody who reads it.
        let done = unsafe {
            // Asked first: the handler may run as soon as it is there.
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

/// A range that the handler knows, until this is dropped. Drop it before the range is unmapped.
#[derive(Debug)]
pub(crate) struct Guarded(usize);

impl Guarded {
    /// Has the handler know a range that was just mapped, all of it in one call, and of whole pages of that size (a
    /// power of two).
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
    /// By the holder of [`FREE`] alone.
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

    /// The range, if `at` is in it. An entry that is being changed has no range that anybody is inside of.
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

/// Maps zeros over the range that `at` is in; false if there is none.
fn mend(at: usize) -> bool {
    let used = USED.load(Acquire).min(MAX_MAPPINGS);
    for entry in &TABLE[..used] {
        let Some(range) = entry.range_with(at) else {
            continue;
        };
        let (start, len_bytes) = (range.start, range.len_bytes);
        // All of it; or, where the system has no room for so much (no overcommit), what is around the fault.
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

/// Maps private zeros over a part of a range of the table.
fn zeros(start: usize, len_bytes: usize) -> bool {
    // SAFETY: of a range that a `Mapping` has mapped and not yet unmapped: an access to it is going on, so its owner is
    // alive. Its bytes are a client's and nobody has a reference to them, so they may become zeros at any time. mmap is a
    // plain system call, which a handler may make.
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
    // SAFETY: the kernel hands a handler with SA_SIGINFO a valid siginfo, whose address is there for a SIGBUS that the
    // kernel raised (a positive code); errno is this thread's own.
    unsafe {
        let errno = *libc::__errno_location();
        let by_kernel = (*info).si_code > 0;
        let mended = by_kernel && mend((*info).si_addr().addr());
        if !mended {
            // Whoever was there before gets it: the access faults again, or what was sent is sent again.
            libc::sigaction(signal, BEFORE.load(Acquire), null_mut());
            if !by_kernel {
                libc::raise(signal);
            }
        }
        *libc::__errno_location() = errno;
    }
}
