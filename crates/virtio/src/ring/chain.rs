//! A chain of descriptors as a bounded list of pieces, the readable ones first.
//!
//! All lengths together stay below 4 GiB. A bad chain is read to its end, because its last writable
//! byte holds the status.

use super::RingError;

/// 126 data pieces, a header, a status, two to spare.
pub const MAX_PIECES: usize = 130;

/// Contiguous guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Guest address. Adding the length doesn't overflow.
    pub address: u64,
    /// Length, never 0.
    pub len: u32,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Chain {
    pieces: [Piece; MAX_PIECES],
    len: usize,
    readable: usize,
    readable_bytes: u64,
    writable_bytes: u64,
    fault: Option<RingError>,
}

impl Default for Chain {
    fn default() -> Self {
        Self {
            pieces: [Piece::default(); MAX_PIECES],
            len: 0,
            readable: 0,
            readable_bytes: 0,
            writable_bytes: 0,
            fault: None,
        }
    }
}

impl Chain {
    /// Makes it empty.
    #[inline]
    pub fn clear(&mut self) {
        self.len = 0;
        self.readable = 0;
        self.readable_bytes = 0;
        self.writable_bytes = 0;
        self.fault = None;
    }

    /// Adds a piece, or records a [`Chain::fault`].
    #[inline]
    pub fn push(&mut self, address: u64, len: u32, writable: bool) {
        if len == 0 {
            return self.spoil(RingError::Empty);
        }
        if address.checked_add(u64::from(len)).is_none() {
            return self.spoil(RingError::Overflow);
        }
        if !writable && self.readable != self.len {
            return self.spoil(RingError::Order);
        }
        let Some(place) = self.pieces.get_mut(self.len) else {
            if writable {
                // The last piece holds the status.
                self.pieces[MAX_PIECES - 1] = Piece { address, len };
                self.readable = self.readable.min(MAX_PIECES - 1);
            }
            return self.spoil(RingError::TooManyPieces);
        };
        *place = Piece { address, len };
        self.len += 1;
        if writable {
            self.writable_bytes += u64::from(len);
        } else {
            self.readable += 1;
            self.readable_bytes += u64::from(len);
        }
        if self.readable_bytes + self.writable_bytes > u64::from(u32::MAX) {
            self.spoil(RingError::Overflow);
        }
    }

    #[cold]
    fn spoil(&mut self, fault: RingError) {
        self.fault.get_or_insert(fault);
    }

    /// The first fault of its descriptors.
    #[inline]
    pub fn fault(&self) -> Option<RingError> {
        self.fault
    }

    #[inline]
    pub(crate) fn end(&self) -> Result<(), RingError> {
        match self.fault {
            Some(fault) if self.writable().is_empty() => Err(fault),
            _ => Ok(()),
        }
    }

    #[inline]
    pub(crate) fn first_address(&self) -> u64 {
        self.pieces[0].address
    }

    /// Pieces that the device reads.
    #[inline]
    pub fn readable(&self) -> &[Piece] {
        &self.pieces[..self.readable]
    }

    /// Pieces that the device writes.
    #[inline]
    pub fn writable(&self) -> &[Piece] {
        &self.pieces[self.readable..self.len]
    }

    /// Length of the readable pieces.
    #[inline]
    pub fn readable_bytes(&self) -> u32 {
        self.readable_bytes as u32
    }

    /// Length of the writable pieces.
    #[inline]
    pub fn writable_bytes(&self) -> u32 {
        self.writable_bytes as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_refuses_bad_buffers() {
        let faults = |pieces: &[(u64, u32, bool)]| {
            let mut chain = Chain::default();
            for (address, len, writable) in pieces {
                chain.push(*address, *len, *writable);
            }
            (chain.fault(), chain.end().is_ok())
        };
        let whole = [(u64::MAX - 1, 1, false), (8, 1, true)];
        assert_eq!(faults(&whole), (None, true));
        for (wrong, fault) in [
            ((0, 0, false), RingError::Empty),
            ((u64::MAX, 1, false), RingError::Overflow),
            ((8, 1, false), RingError::Order),
            ((8, u32::MAX, true), RingError::Overflow),
        ] {
            assert_eq!(faults(&[(8, 1, true), wrong]), (Some(fault), true));
            let is_order = fault == RingError::Order;
            let behind = faults(&[wrong, (8, 1, true)]);
            assert_eq!(behind, ((!is_order).then_some(fault), true));
        }
        assert_eq!(faults(&[(0, 0, true)]), (Some(RingError::Empty), false));
    }

    #[test]
    fn the_last_of_too_many_pieces_is_kept() {
        let mut chain = Chain::default();
        for _ in 0..MAX_PIECES {
            chain.push(8, 1, false);
        }
        assert_eq!((chain.fault(), chain.readable().len()), (None, MAX_PIECES));
        assert_eq!(chain.readable_bytes() as usize, MAX_PIECES);
        chain.push(8, 1, false);
        assert_eq!(chain.end(), Err(RingError::TooManyPieces));
        chain.push(16, 1, true);
        chain.push(24, 2, true);
        let last = Piece {
            address: 24,
            len: 2,
        };
        assert_eq!(
            (chain.end(), chain.writable().last()),
            (Ok(()), Some(&last))
        );
        chain.clear();
        assert_eq!(chain.fault(), None);
    }
}
