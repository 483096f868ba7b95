//! The commands in hand, each in its place.
//!
//! **Purpose.** A command keeps its place from its begin to its end, so that 4 bytes name it in lists, slices and answers.
//! **Design.** The places are made once. Who takes a free one gives it back with the command's [`Token`].
//! **Not here:** what a command waits for ([`crate::io::waits`]).

use crate::io::command::{Io, Token};
use std::ops::{Deref, DerefMut};

/// Commands that a reactor has in hand at once.
pub const MAX_IOS: usize = 4096;

/// See the module's text.
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
    pub(crate) fn take_free(&mut self) -> Option<u32> {
        self.free.pop()
    }

    #[inline]
    pub(crate) fn give_back(&mut self, token: Token) {
        self.free.push(token.entrust());
    }

    /// Places that are free.
    #[inline]
    pub(crate) fn left(&self) -> usize {
        self.free.len()
    }

    /// Places that are not.
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
