//! The commands in flight, in fixed places, named by 4 bytes. **Not here:** waits
//! ([`crate::io::waits`]).

use crate::io::command::{Io, Token};
use std::ops::{Deref, DerefMut};

/// Most commands that a reactor has at a time.
pub(crate) const MAX_IOS: usize = 4096;

#[derive(Debug)]
pub(crate) struct Slab {
    ios: Vec<Io>,
    free: Vec<u32>,
}

impl Slab {
    pub(crate) fn new() -> Self {
        Self {
            ios: (0..MAX_IOS).map(|_| Io::empty()).collect(),
            free: (0..MAX_IOS as u32).rev().collect(),
        }
    }

    #[inline]
    pub(crate) fn allocate(&mut self) -> Option<u32> {
        self.free.pop()
    }

    #[inline]
    pub(crate) fn give_back(&mut self, token: Token) {
        self.free.push(token.entrust());
    }

    #[inline]
    pub(crate) fn left(&self) -> usize {
        self.free.len()
    }

    pub(crate) fn busy(&self) -> usize {
        MAX_IOS - self.free.len()
    }
}

impl Deref for Slab {
    type Target = [Io];

    #[inline]
    fn deref(&self) -> &[Io] {
        &self.ios
    }
}

impl DerefMut for Slab {
    #[inline]
    fn deref_mut(&mut self) -> &mut [Io] {
        &mut self.ios
    }
}
