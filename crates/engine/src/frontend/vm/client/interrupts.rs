//! Interrupts of a client that are due.
//!
//! **Purpose.** However often one is raised in a turn, it is rung once.
//! **Design.** A bit for each slot.
//! **Not here:** ringing ([`super::super::signal`]).

use super::super::file::MAX_SLOTS;

/// Eventfds that are to be rung at the turn's end, each once, by their slots.
#[derive(Default)]
pub(in crate::frontend::vm) struct Interrupts {
    slots: [u64; MAX_SLOTS / 64],
    any: bool,
}

impl Interrupts {
    #[inline]
    pub(super) fn raise(&mut self, slot: usize) {
        if let Some(word) = self.slots.get_mut(slot / 64) {
            *word |= 1 << (slot % 64);
            self.any = true;
        }
    }

    /// Whether there are any.
    #[inline]
    pub(in crate::frontend::vm) fn any(&self) -> bool {
        self.any
    }

    /// Takes all of them.
    #[inline]
    pub(super) fn drain(&mut self, mut ring: impl FnMut(usize)) {
        self.any = false;
        for (at, word) in self.slots.iter_mut().enumerate() {
            let mut bits = std::mem::take(word);
            while bits != 0 {
                ring(at * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
    }
}
