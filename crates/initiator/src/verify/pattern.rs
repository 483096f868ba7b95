//! Sectors that prove their origin.
//!
//! Each 512 bytes hold a mark, the seed, the sector number, the version and a check word, then
//! words derived from these. A misplaced sector names its origin, and any changed bit shows.

use std::fmt;

/// The unit of the pattern; every logical block is a multiple.
pub const SECTOR_BYTES: usize = 512;
const WORDS: usize = SECTOR_BYTES / 8;
const MARK: u64 = u64::from_le_bytes(*b"forebayV");

/// The content of a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Zeros.
    Zeros,
    /// A complete pattern.
    Written {
        /// Seed of its run.
        seed: u64,
        /// The sector that it was written for.
        sector: u64,
        /// The version of that sector's block.
        version: u32,
    },
    /// A pattern's header with a wrong body: torn within the sector, or changed bits.
    Damaged {
        /// The sector that it was written for.
        sector: u64,
        /// Its version.
        version: u32,
        /// The first wrong byte.
        byte: usize,
    },
    /// Data that is not of this pattern.
    Foreign {
        /// Its first 8 bytes.
        first: [u8; 8],
    },
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zeros => f.write_str("zeros"),
            Self::Written {
                seed,
                sector,
                version,
            } => write!(f, "version {version} of sector {sector} (seed {seed:#x})"),
            Self::Damaged {
                sector,
                version,
                byte,
            } => write!(
                f,
                "version {version} of sector {sector}, damaged from byte {byte}"
            ),
            Self::Foreign { first } => write!(f, "foreign data beginning with {first:02x?}"),
        }
    }
}

/// Fills `buf`, in whole sectors, with a version of the sectors from `sector`.
pub fn fill(buf: &mut [u8], seed: u64, sector: u64, version: u32) {
    for (at, chunk) in (sector..).zip(buf.chunks_exact_mut(SECTOR_BYTES)) {
        for (word, out) in words(seed, at, version).zip(chunk.chunks_exact_mut(8)) {
            out.copy_from_slice(&word.to_le_bytes());
        }
    }
}

/// Whether a sector holds exactly this version; faster than [`read`].
#[must_use]
pub fn holds(sector_bytes: &[u8], seed: u64, sector: u64, version: u32) -> bool {
    sector_bytes.len() == SECTOR_BYTES
        && words(seed, sector, version)
            .zip(sector_bytes.chunks_exact(8))
            .all(|(word, bytes)| word.to_le_bytes() == bytes)
}

/// Parses a sector's content.
#[must_use]
pub fn read(sector_bytes: &[u8]) -> Content {
    let word = |i: usize| {
        let bytes = sector_bytes.get(8 * i..8 * i + 8);
        bytes.map_or(0, |b| {
            u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]])
        })
    };
    if sector_bytes.iter().all(|&byte| byte == 0) {
        return Content::Zeros;
    }
    let (seed, sector, version) = (word(1), word(2), word(3));
    if word(0) != MARK || word(4) != check_word(seed, sector, version) || version >> 32 != 0 {
        return Content::Foreign {
            first: word(0).to_le_bytes(),
        };
    }
    let version = version as u32;
    let expected = words(seed, sector, version).flat_map(u64::to_le_bytes);
    match expected.zip(sector_bytes).position(|(a, &b)| a != b) {
        None => Content::Written {
            seed,
            sector,
            version,
        },
        Some(byte) => Content::Damaged {
            sector,
            version,
            byte,
        },
    }
}

fn check_word(seed: u64, sector: u64, version: u64) -> u64 {
    mix(mix(mix(seed ^ MARK) ^ sector) ^ version)
}

fn words(seed: u64, sector: u64, version: u32) -> impl Iterator<Item = u64> {
    let version = u64::from(version);
    let check = check_word(seed, sector, version);
    let mut state = check;
    (0..WORDS).map(move |i| match i {
        0 => MARK,
        1 => seed,
        2 => sector,
        3 => version,
        4 => check,
        _ => {
            // A step of xorshift: cheap, and without repetition within a sector.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        }
    })
}

/// The finalizer of SplitMix64: a bijection that spreads every bit.
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sector_tells_its_origin_wherever_it_is() {
        let mut buf = vec![0; 4096];
        assert_eq!(read(&buf[..512]), Content::Zeros);
        fill(&mut buf, 7, 1000, 3);
        for (i, sector) in buf.chunks(512).enumerate() {
            let at = 1000 + i as u64;
            assert!(holds(sector, 7, at, 3));
            assert!(!holds(sector, 7, at, 4));
            assert!(!holds(sector, 7, at + 1, 3));
            let written = Content::Written {
                seed: 7,
                sector: at,
                version: 3,
            };
            assert_eq!(read(sector), written);
        }
    }

    #[test]
    fn every_changed_bit_shows() {
        let mut buf = vec![0; 512];
        fill(&mut buf, 1, 2, 3);
        for bit in 0..512 * 8 {
            buf[bit / 8] ^= 1 << (bit % 8);
            match read(&buf) {
                Content::Damaged { byte, .. } => assert_eq!(byte, bit / 8),
                Content::Foreign { .. } => assert!(bit < 40 * 8),
                other => panic!("bit {bit}: {other:?}"),
            }
            buf[bit / 8] ^= 1 << (bit % 8);
        }
    }
}
