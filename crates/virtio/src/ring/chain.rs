//! A chain of descriptors as a bounded list of pieces.
//!
//! **Design.** One value is used again and again: [`Chain::clear`] costs nothing. Pieces for the device to read come
//! first. Lengths are added up in 64 bits and stay below 4 GiB together.

use super::RingError;

/// The most pieces of a chain: 126 of data, a header, a status, two to spare.
pub const MAX_PIECES: usize = 130;

/// Bytes that lie together at a guest address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Guest address. With the length it does not overflow.
    pub address: u64,
    /// Bytes, never 0.
    pub len: u32,
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Chain {
    pieces: [Piece; MAX_PIECES],
    len: usize,
    readable: usize,
    readable_bytes: u64,
    writable_bytes: u64,
}

impl Default for Chain {
    fn default() -> Self {
        Self {
            pieces: [Piece::default(); MAX_PIECES],
            len: 0,
            readable: 0,
            readable_bytes: 0,
            writable_bytes: 0,
        }
    }
}

impl Chain {
    /// Empties it.
    #[inline]
    pub fn clear(&mut self) {
        self.len = 0;
        self.readable = 0;
        self.readable_bytes = 0;
        self.writable_bytes = 0;
    }

    /// Adds a piece.
    ///
    /// # Errors
    /// Whatever makes it impossible.
    #[inline]
    pub fn push(&mut self, address: u64, len: u32, writable: bool) -> Result<(), RingError> {
        if len == 0 {
            return Err(RingError::Empty);
        }
        if address.checked_add(u64::from(len)).is_none() {
            return Err(RingError::Overflow);
        }
        if !writable && self.readable != self.len {
            return Err(RingError::Order);
        }
        let Some(place) = self.pieces.get_mut(self.len) else {
            return Err(RingError::TooManyPieces);
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
            return Err(RingError::Overflow);
        }
        Ok(())
    }

    /// Where it begins; of none it means nothing.
    #[inline]
    pub(crate) fn first_address(&self) -> u64 {
        self.pieces[0].address
    }

    /// What the device reads.
    #[inline]
    pub fn readable(&self) -> &[Piece] {
        &self.pieces[..self.readable]
    }

    /// What the device writes.
    #[inline]
    pub fn writable(&self) -> &[Piece] {
        &self.pieces[self.readable..self.len]
    }

    /// How much the device reads.
    #[inline]
    pub fn readable_bytes(&self) -> u32 {
        self.readable_bytes as u32
    }

    /// How much the device writes.
    #[inline]
    pub fn writable_bytes(&self) -> u32 {
        self.writable_bytes as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_chain_refuses() {
        let mut chain = Chain::default();
        assert_eq!(chain.push(0, 0, false), Err(RingError::Empty));
        assert_eq!(chain.push(u64::MAX, 1, false), Err(RingError::Overflow));
        chain.push(u64::MAX - 1, 1, false).expect("ends at the end");
        chain.push(8, 1, true).expect("room");
        assert_eq!(chain.push(8, 1, false), Err(RingError::Order));
        assert_eq!(chain.push(8, u32::MAX, true), Err(RingError::Overflow));
        chain.clear();
        for _ in 0..MAX_PIECES {
            chain.push(8, 1, false).expect("room");
        }
        assert_eq!(chain.push(8, 1, false), Err(RingError::TooManyPieces));
        assert_eq!(chain.readable_bytes() as usize, MAX_PIECES);
        assert_eq!(chain.readable().len(), MAX_PIECES);
        assert!(chain.writable().is_empty());
    }
}
