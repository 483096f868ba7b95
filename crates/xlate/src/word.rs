//! One translation in 64 bits, so that a hit is one atomic load.
//!
//! Bits 0..40 are the device's extent, 40..48 the device, 48..61 the epoch, 62..64 the rights; 0 is
//! a miss. Bit 61 marks a preallocated extent, which the first write claims ([`Word::claimed`]).
//!
//! A snapshot advances its volume's epoch, which revokes the write right of every word at once: a
//! word of another epoch is only for reading ([`Word::as_of`]).

use crate::types::{DeviceIndex, ExtentIndex, Rights};

const EXTENT_BITS: u32 = 40;
const EXTENT_MASK: u64 = (1 << EXTENT_BITS) - 1;
const DEVICE_SHIFT: u32 = EXTENT_BITS;
const EPOCH_SHIFT: u32 = 48;
const PLACE_MASK: u64 = (1 << EPOCH_SHIFT) - 1;
const PREALLOCATED: u64 = 1 << 61;
const RIGHTS_SHIFT: u32 = 62;

/// Epochs wrap here. A word must not outlive this many snapshots.
pub const EPOCHS: u16 = 1 << 13;
const EPOCH_MASK: u64 = (EPOCHS as u64 - 1) << EPOCH_SHIFT;

/// A packed translation; [`Word::MISS`] is none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Word(u64);

impl Word {
    /// No translation: ask the owner.
    pub const MISS: Word = Word(0);
    /// Nothing stored: reads return zeros.
    pub const HOLE: Word = Word(1 << RIGHTS_SHIFT);
    /// The largest device extent that fits.
    pub const MAX_DEVICE_EXTENT: u64 = EXTENT_MASK;

    /// A translation; `Rights::Hole` gives [`Word::HOLE`]. `None`: the extent is above
    /// [`Word::MAX_DEVICE_EXTENT`].
    pub fn new(device: DeviceIndex, extent: ExtentIndex, rights: Rights) -> Option<Word> {
        if extent.0 > EXTENT_MASK {
            return None;
        }
        let code = match rights {
            Rights::Hole => return Some(Word::HOLE),
            Rights::Read => 2u64,
            Rights::ReadWrite => 3,
        };
        Some(Word(
            extent.0 | u64::from(device.0) << DEVICE_SHIFT | code << RIGHTS_SHIFT,
        ))
    }

    /// A preallocated extent: a hole until its first write there. The device's extent must read as
    /// zeros. `None`: see [`Word::new`].
    pub fn preallocated(device: DeviceIndex, extent: ExtentIndex) -> Option<Word> {
        let place = Word::new(device, extent, Rights::ReadWrite)?.0 & !(3 << RIGHTS_SHIFT);
        Some(Word(place | PREALLOCATED | Word::HOLE.0))
    }

    /// Whether it is preallocated and unclaimed.
    pub const fn is_preallocated(self) -> bool {
        self.0 & (PREALLOCATED | 3 << RIGHTS_SHIFT) == PREALLOCATED | Word::HOLE.0
    }

    /// The word after a first write; other words stay.
    pub const fn claimed(self) -> Word {
        if self.is_preallocated() {
            Word(self.0 & !PREALLOCATED | 3 << RIGHTS_SHIFT)
        } else {
            self
        }
    }

    /// The word of an epoch, of which 13 bits count. Plain holes and misses have none.
    pub const fn with_epoch(self, epoch: u16) -> Word {
        if self.place().is_none() {
            return self;
        }
        Word(self.0 & !EPOCH_MASK | (epoch as u64) << EPOCH_SHIFT & EPOCH_MASK)
    }

    /// The epoch of its grant.
    pub const fn epoch(self) -> u16 {
        ((self.0 & EPOCH_MASK) >> EPOCH_SHIFT) as u16
    }

    /// The effective word in the volume's present epoch, without an epoch. A word of another epoch
    /// loses the write right; a preallocated one becomes a plain hole.
    #[inline]
    pub const fn as_of(self, epoch: u16) -> Word {
        let bare = Word(self.0 & !EPOCH_MASK);
        if self.epoch() == epoch {
            bare
        } else if bare.is_preallocated() {
            Word::HOLE
        } else {
            bare.read_only()
        }
    }

    const fn place(self) -> Option<u64> {
        if self.0 >> RIGHTS_SHIFT >= 2 || self.is_preallocated() {
            Some(self.0 & PLACE_MASK)
        } else {
            None
        }
    }

    /// Whether both name a device's extent, and the same.
    pub fn same_place(self, other: Word) -> bool {
        self.place().is_some() && self.place() == other.place()
    }

    /// Any 64 bits are valid: unknown bits are ignored.
    pub const fn from_bits(bits: u64) -> Word {
        Word(bits)
    }

    /// The word for storing.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Its rights; `None` is a miss.
    pub const fn rights(self) -> Option<Rights> {
        match self.0 >> RIGHTS_SHIFT {
            1 => Some(Rights::Hole),
            2 => Some(Rights::Read),
            3 => Some(Rights::ReadWrite),
            _ => None,
        }
    }

    /// The device; meaningless for plain holes and misses.
    pub const fn device(self) -> DeviceIndex {
        DeviceIndex((self.0 >> DEVICE_SHIFT) as u8)
    }

    /// The device's extent; meaningless for plain holes and misses.
    pub const fn extent(self) -> ExtentIndex {
        ExtentIndex(self.0 & EXTENT_MASK)
    }

    /// Whether a write may use it.
    pub const fn writable(self) -> bool {
        self.0 >> RIGHTS_SHIFT == 3
    }

    /// The translation of the `n`th extent after it in a run.
    pub fn advance(self, n: u64) -> Word {
        match self.rights() {
            None => self,
            Some(Rights::Hole) if !self.is_preallocated() => self,
            Some(_) => {
                Word(self.0 & !EXTENT_MASK | (self.extent().0.saturating_add(n)) & EXTENT_MASK)
            }
        }
    }

    /// The same location without the right to write.
    pub const fn read_only(self) -> Word {
        if self.writable() {
            Word(self.0 & !(1 << RIGHTS_SHIFT))
        } else {
            self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip() {
        let w = Word::new(
            DeviceIndex(200),
            ExtentIndex(0x12_3456_789a),
            Rights::ReadWrite,
        )
        .unwrap();
        assert_eq!(w.device(), DeviceIndex(200));
        assert_eq!(w.extent(), ExtentIndex(0x12_3456_789a));
        assert!(w.writable());
        let r = w.read_only();
        assert_eq!(r.rights(), Some(Rights::Read));
        assert_eq!(r.extent(), w.extent());
        assert_eq!(w.advance(3).extent().0, w.extent().0 + 3);
        assert_eq!(Word::MISS.rights(), None);
        assert_eq!(Word::HOLE.rights(), Some(Rights::Hole));
        assert_eq!(Word::HOLE.advance(9), Word::HOLE);
        assert!(Word::new(DeviceIndex(0), ExtentIndex(1 << 40), Rights::Read).is_none());
        assert_eq!(Word::HOLE.read_only(), Word::HOLE);
    }

    #[test]
    fn a_preallocated_extent_is_a_hole_until_claimed() {
        let (device, extent) = (DeviceIndex(200), ExtentIndex(0x12_3456_789a));
        let preallocated = Word::preallocated(device, extent).unwrap();
        let stored = Word::new(device, extent, Rights::ReadWrite).unwrap();
        assert!(preallocated.is_preallocated() && !preallocated.writable());
        assert_eq!(preallocated.rights(), Some(Rights::Hole));
        assert_eq!(
            (preallocated.device(), preallocated.extent()),
            (device, extent)
        );
        assert_eq!(preallocated.claimed(), stored);
        assert_eq!(preallocated.advance(3).claimed(), stored.advance(3));
        for word in [stored, stored.read_only(), Word::HOLE, Word::MISS] {
            assert!(!word.is_preallocated());
            assert_eq!(word.claimed(), word);
        }
        assert_eq!(Word::preallocated(device, ExtentIndex(1 << 40)), None);
    }

    #[test]
    fn another_epoch_takes_the_write_right() {
        let (device, extent) = (DeviceIndex(255), ExtentIndex(Word::MAX_DEVICE_EXTENT));
        let stored = Word::new(device, extent, Rights::ReadWrite).unwrap();
        let preallocated = Word::preallocated(device, extent).unwrap();
        for epoch in [0, 1, 77, EPOCHS - 1] {
            let other = (epoch + 1) % EPOCHS;
            let word = stored.with_epoch(epoch);
            assert_eq!((word.epoch(), word.as_of(epoch)), (epoch, stored));
            assert_eq!(word.as_of(other), stored.read_only());
            assert_eq!(word.read_only().as_of(other), stored.read_only());
            let ahead = preallocated.with_epoch(epoch);
            assert_eq!((ahead.epoch(), ahead.as_of(epoch)), (epoch, preallocated));
            assert_eq!(ahead.as_of(other), Word::HOLE);
            assert_eq!(ahead.claimed(), word);
            for none in [Word::HOLE, Word::MISS] {
                assert_eq!(none.with_epoch(epoch), none);
                assert_eq!((none.as_of(epoch), none.as_of(other)), (none, none));
            }
        }
        assert_eq!(stored.with_epoch(EPOCHS + 3), stored.with_epoch(3));
        let first = Word::new(device, ExtentIndex(4), Rights::Read).unwrap();
        assert_eq!(first.with_epoch(9).advance(2).epoch(), 9);
    }

    #[test]
    fn places_are_compared_without_rights_and_epochs() {
        let at =
            |extent| Word::new(DeviceIndex(1), ExtentIndex(extent), Rights::ReadWrite).unwrap();
        let ahead = Word::preallocated(DeviceIndex(1), ExtentIndex(5)).unwrap();
        assert!(
            at(5)
                .with_epoch(3)
                .same_place(at(5).read_only().with_epoch(4))
        );
        assert!(at(5).same_place(ahead));
        assert!(!at(5).same_place(at(6)));
        assert!(!Word::HOLE.same_place(Word::HOLE) && !Word::MISS.same_place(Word::HOLE));
    }
}
