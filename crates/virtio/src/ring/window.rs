//! Shared memory as little-endian words, each loaded or stored once.
//!
//! Outside its bounds, a load gives 0 and a store does nothing. Every store is a *release*: stores
//! become visible in order, even if the device dies.

use forebay_guest::Area;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// An [`Area`] for rings.
#[derive(Clone, Debug)]
pub struct Window(Area);

impl From<Area> for Window {
    fn from(area: Area) -> Self {
        Self(area)
    }
}

macro_rules! accesses {
    ($word:ty, $load:ident, $acquire:ident, $store:ident) => {
        /// Loads a word.
        #[inline]
        pub fn $load(&self, offset: usize) -> $word {
            self.0.$load(offset, Relaxed).unwrap_or(0)
        }

        /// Loads a word before all later loads.
        #[inline]
        pub fn $acquire(&self, offset: usize) -> $word {
            self.0.$load(offset, Acquire).unwrap_or(0)
        }

        /// Stores a word after all earlier stores.
        #[inline]
        pub fn $store(&self, offset: usize, value: $word) {
            let _ = self.0.$store(offset, value, Release);
        }
    };
}

impl Window {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len_bytes()
    }

    /// Whether its length is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether it begins at a multiple of `bytes`.
    #[must_use]
    pub fn is_aligned(&self, bytes: usize) -> bool {
        self.0.ptr().addr().get().is_multiple_of(bytes)
    }

    /// Whether it may be written.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.0.is_writable()
    }

    /// Prefetches the data at an offset.
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        self.0.prefetch(offset);
    }

    accesses!(u8, load_u8, load_u8_acquire, store_u8);
    accesses!(u16, load_u16, load_u16_acquire, store_u16);
    accesses!(u32, load_u32, load_u32_acquire, store_u32);
    accesses!(u64, load_u64, load_u64_acquire, store_u64);
}
