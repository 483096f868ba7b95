//! A contiguous part of guest memory for repeated use: a ring, a doorbell page.
//!
//! Words are accessed as atomics, once each, so the checked value is the used value. Longer data is
//! copied first. Words are little-endian.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use crate::mapping::Mapping;
use crate::memory::GuestMemory;

/// A part of a mapping.
#[derive(Debug, Clone)]
pub struct Area {
    ptr: NonNull<u8>,
    len_bytes: usize,
    writable: bool,
    mapping: Arc<Mapping>,
}

// SAFETY: the address is inside the mapping that the area holds.
unsafe impl Send for Area {}
// SAFETY: as for Send: atomics and copies only.
unsafe impl Sync for Area {}

macro_rules! words {
    ($($load:ident $store:ident $word:ty, $atomic:ty;)*) => { $(
        /// The word at an offset, in one load; `None` if outside or misaligned.
        #[inline]
        pub fn $load(&self, at: usize, order: Ordering) -> Option<$word> {
            Some(<$word>::from_le(self.word::<$atomic>(at)?.load(order)))
        }

        /// Stores the word at an offset, in one store; false if outside, misaligned or read-only.
        #[inline]
        #[must_use]
        pub fn $store(&self, at: usize, value: $word, order: Ordering) -> bool {
            match self.word::<$atomic>(at) {
                Some(word) if self.writable => word.store(value.to_le(), order),
                _ => return false,
            }
            true
        }
    )* };
}

impl Area {
    pub(crate) fn new(mapping: &Arc<Mapping>, from_bytes: u64, len_bytes: usize) -> Option<Self> {
        Some(Self {
            ptr: mapping.at(from_bytes, len_bytes as u64)?,
            len_bytes,
            writable: mapping.is_writable(),
            mapping: mapping.clone(),
        })
    }

    /// A whole mapping.
    pub fn of(mapping: &Arc<Mapping>) -> Option<Self> {
        Self::new(mapping, 0, usize::try_from(mapping.len_bytes()).ok()?)
    }

    /// Its length.
    #[inline]
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Its address, valid while this area lives.
    #[inline]
    pub fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Whether it is writable.
    #[inline]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Its mapping.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    #[inline]
    fn word<T>(&self, at: usize) -> Option<&T> {
        let inside = at.checked_add(size_of::<T>())? <= self.len_bytes;
        let ptr = self.ptr.as_ptr().wrapping_add(at).cast::<T>();
        if !inside || !ptr.is_aligned() {
            return None;
        }
        // SAFETY: only atomics, for which any bytes are valid and may change. Inside the mapping,
        // which lives as long as `self`, and aligned. Read-only mappings are only loaded from.
        Some(unsafe { &*ptr })
    }

    words! {
        load_u8 store_u8 u8, AtomicU8;
        load_u16 store_u16 u16, AtomicU16;
        load_u32 store_u32 u32, AtomicU32;
        load_u64 store_u64 u64, AtomicU64;
    }

    /// Prefetches the line at an offset.
    #[inline]
    pub fn prefetch(&self, at: usize) {
        if at < self.len_bytes {
            prefetch(self.ptr.as_ptr().wrapping_add(at));
        }
    }

    /// Copies bytes out, each once. False, without effect, if some are outside.
    #[inline]
    #[must_use]
    pub fn read(&self, at: usize, into: &mut [u8]) -> bool {
        let Some(ptr) = self.inside(at, into.len()) else {
            return false;
        };
        // SAFETY: inside a mapping that is held.
        unsafe { copy_out(ptr, into) };
        true
    }

    /// Copies bytes in. False, without effect, if some are outside or read-only.
    #[inline]
    #[must_use]
    pub fn write(&self, at: usize, from: &[u8]) -> bool {
        let Some(ptr) = self.inside(at, from.len()).filter(|_| self.writable) else {
            return false;
        };
        // SAFETY: inside a mapping that is held and writable.
        unsafe { copy_in(from, ptr) };
        true
    }

    #[inline]
    fn inside(&self, at: usize, len: usize) -> Option<NonNull<u8>> {
        if at.checked_add(len)? > self.len_bytes {
            return None;
        }
        // SAFETY: inside the area, or one past its end.
        Some(unsafe { self.ptr.add(at) })
    }
}

/// Prefetches a line from another core's cache.
#[inline]
pub(crate) fn prefetch(ptr: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, valid for any address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(ptr.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = ptr;
}

/// Adjacent bytes of guest memory for a single use.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    ptr: NonNull<u8>,
    len_bytes: usize,
    _memory: PhantomData<&'a GuestMemory>,
}

impl<'a> View<'a> {
    /// # Safety
    /// `len_bytes` from `ptr` on stay mapped while the memory is unchanged.
    #[inline]
    pub(crate) unsafe fn new(ptr: NonNull<u8>, len_bytes: usize, _: &'a GuestMemory) -> Self {
        Self {
            ptr,
            len_bytes,
            _memory: PhantomData,
        }
    }

    /// Its length.
    #[inline]
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Two words, each in one load; `None` if outside or misaligned.
    #[inline]
    pub fn load_two(&self, at: usize) -> Option<[u64; 2]> {
        let ptr = self.ptr.as_ptr().wrapping_add(at).cast::<[AtomicU64; 2]>();
        if at.checked_add(16)? > self.len_bytes || !ptr.is_aligned() {
            return None;
        }
        // SAFETY: inside the mapping and aligned; any bytes are valid atomics, and others may
        // change them.
        let words = unsafe { &*ptr };
        Some([0, 1].map(|at| u64::from_le(words[at].load(Ordering::Relaxed))))
    }
}

/// Copies out of guest memory. Not inlined, so that the compiler cannot read the guest's bytes
/// twice.
///
/// # Safety
/// `into.len()` bytes from `from` on are mapped.
#[inline(never)]
pub(crate) unsafe fn copy_out(from: NonNull<u8>, into: &mut [u8]) {
    // SAFETY: mapped, as the caller says. `into` is another object, as guest memory has no
    // references.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into.as_mut_ptr(), into.len()) }
}

/// Copies into guest memory.
///
/// # Safety
/// `from.len()` bytes from `to` on are mapped and writable.
#[inline(never)]
pub(crate) unsafe fn copy_in(from: &[u8], to: NonNull<u8>) {
    // SAFETY: as in `copy_out`, in the other direction.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), from.len()) }
}
