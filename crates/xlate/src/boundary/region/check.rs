//! Checks over records, and references into the engine's memory file.
//!
//! They detect accidental damage and misplaced records, not attacks. A check is a cheap fold,
//! seeded with the generation's key, the queue and the index. A [`BufferRef`] has its own: a wrong
//! one would leak another tenant's bytes.

const K: u64 = 0x9e37_79b9_7f4a_7c15;

/// The seed of one queue's records.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seed(u64);

impl Seed {
    /// For a queue's commands.
    pub const fn commands(key: u64, queue: u32) -> Self {
        Seed(key ^ (queue as u64) << 16)
    }

    /// For a queue's transmit items.
    pub const fn items(key: u64, queue: u32) -> Self {
        Seed(key.rotate_left(32) ^ (queue as u64) << 16)
    }

    /// For a record of a queue or controller.
    pub const fn whole(key: u64, table: u64, index: u32) -> Self {
        Seed(key.rotate_left(16) ^ table << 32 ^ index as u64)
    }

    #[inline]
    pub(super) const fn at(self, place: u16) -> u64 {
        self.0 ^ place as u64
    }
}

/// The check of `N` words. Even and odd places are folded apart, to detect swapped neighbours.
#[inline]
pub fn check<const N: usize>(seed: Seed, place: u16, words: [u64; N]) -> u64 {
    let (mut x, mut y) = (seed.at(place), 0u64);
    let mut i = 0;
    while i < N {
        if i % 2 == 0 {
            x ^= words[i];
        } else {
            y ^= words[i];
        }
        i += 1;
    }
    x.wrapping_mul(K) ^ y.rotate_left(32)
}

/// A check over a list of words.
pub fn check_all(seed: Seed, words: impl Iterator<Item = u64>) -> u64 {
    words.fold(seed.at(0), |h, w| {
        (h.rotate_left(5) ^ w).wrapping_mul(K).rotate_left(23)
    })
}

/// Bytes in the engine's memory file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BufferRef {
    /// Their offset: a multiple of 4096, below 64 GiB.
    pub offset_bytes: u64,
    /// Their length: below 1 MiB.
    pub len_bytes: u32,
}

const PAGE_BITS: u32 = 24;
const LEN_BITS: u32 = 20;
const PLACE_BITS: u32 = PAGE_BITS + LEN_BITS;
const PLACE_MASK: u64 = (1 << PLACE_BITS) - 1;

impl BufferRef {
    /// The lower 44 bits of its word.
    #[inline]
    pub(super) const fn place(self) -> u64 {
        (self.offset_bytes >> 12 & ((1 << PAGE_BITS) - 1)) << LEN_BITS
            | (self.len_bytes as u64 & ((1 << LEN_BITS) - 1))
    }

    pub(super) const fn of_place(place: u64) -> Self {
        Self {
            offset_bytes: (place & PLACE_MASK) >> LEN_BITS << 12,
            len_bytes: (place & ((1 << LEN_BITS) - 1)) as u32,
        }
    }

    /// As a word with a check, bound to its command.
    #[inline]
    pub fn word(self, seed: Seed, slot: u16, number: u64) -> u64 {
        let place = self.place();
        place | check(seed, slot, [place, 0, number]) >> PLACE_BITS << PLACE_BITS
    }

    /// Decodes a word other than 0; `None` if it is another command's.
    pub fn of_word(word: u64, seed: Seed, slot: u16, number: u64) -> Option<Self> {
        let buffer = Self::of_place(word);
        (buffer.word(seed, slot, number) == word).then_some(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_notices_every_bit_and_neighbours_exchanged() {
        let words = [1u64, 2, 3, 4, 5, 6, 7];
        let seed = Seed::commands(99, 5);
        let good = check(seed, 3, words);
        for i in 0..words.len() {
            for bit in 0..64 {
                let mut bad = words;
                bad[i] ^= 1 << bit;
                assert_ne!(check(seed, 3, bad), good, "word {i} bit {bit}");
            }
            if i > 0 {
                let mut bad = words;
                bad.swap(i, i - 1);
                assert_ne!(check(seed, 3, bad), good, "{i} and the one before");
            }
        }
        assert_ne!(check(seed, 4, words), good);
        assert_ne!(check(Seed::commands(99, 6), 3, words), good);
        let all = |w: &[u64]| check_all(seed, w.iter().copied());
        let good = all(&words);
        for i in 0..words.len() {
            for bit in 0..64 {
                let mut bad = words;
                bad[i] ^= 1 << bit;
                assert_ne!(all(&bad), good, "word {i} bit {bit}");
            }
        }
    }

    #[test]
    fn a_buffer_is_its_commands_alone() {
        let seed = Seed::commands(7, 4095);
        let buffer = BufferRef {
            offset_bytes: (1 << 36) - 4096,
            len_bytes: 512 << 10,
        };
        let word = buffer.word(seed, 255, 17);
        assert_eq!(BufferRef::of_word(word, seed, 255, 17), Some(buffer));
        assert_eq!(BufferRef::of_word(word, seed, 254, 17), None);
        assert_eq!(BufferRef::of_word(word, seed, 255, 18), None);
        let other = Seed::commands(7, 4094);
        assert_eq!(BufferRef::of_word(word, other, 255, 17), None);
        let noticed = (0..64)
            .filter(|bit| BufferRef::of_word(word ^ 1 << bit, seed, 255, 17).is_none())
            .count();
        assert_eq!(noticed, 64);
    }
}
