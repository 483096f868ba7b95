//! A client's pending interrupts: one bit per slot, so that a slot is signalled once per turn.
//! **Not here:** signalling ([`super::super::signal`]).

use super::super::file::MAX_SLOTS;

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

    #[inline]
    pub(in crate::frontend::vm) fn any(&self) -> bool {
        self.any
    }

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
