//! Shared memory as words that others may change at any moment.
//!
//! **Design.** A [`Window`] is an [`Area`] whose accesses are for rings: little-endian words, each loaded or stored once.
//! Outside of it a load gives 0 and a store does nothing, which whoever checks a ring's sizes first never sees. Every
//! store is a *release*: what was stored before is there before it, whoever dies in between.

use forebay_guest::Area;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// See the module's text.
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

        /// The same; nothing that follows is read before.
        #[inline]
        pub fn $acquire(&self, offset: usize) -> $word {
            self.0.$load(offset, Acquire).unwrap_or(0)
        }

        /// Stores a word after everything stored before.
        #[inline]
        pub fn $store(&self, offset: usize, value: $word) {
            let _ = self.0.$store(offset, value, Release);
        }
    };
}

impl Window {
    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len_bytes()
    }

    /// Whether it is of no bytes.
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

    /// Has the processor fetch what is at an offset, which is about to be looked at.
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        self.0.prefetch(offset);
    }

    accesses!(u8, load_u8, load_u8_acquire, store_u8);
    accesses!(u16, load_u16, load_u16_acquire, store_u16);
    accesses!(u32, load_u32, load_u32_acquire, store_u32);
    accesses!(u64, load_u64, load_u64_acquire, store_u64);
}
