//! Sizes as people write them: `64G`, `1T`, `512`, `4 KiB`.
//!
//! **Purpose.** One parser and one printer for device specs, configuration and the command line.
//!
//! **Design.** Binary units only (K = 1024): storage is cut in powers of two, and a second meaning of `G` would make
//! two sizes of one text. Integers only, so that nothing is rounded behind anybody's back.
//!
//! **What it does not do.** No fractions, no decimal units, no signs.

use std::fmt::Write as _;

/// Why a text is not a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// It does not begin with digits, or holds something that is no unit.
    #[error(
        "`{0}` is not a size: write a whole number and a unit, for example 512, 64K, 10G or 1T"
    )]
    NotASize(String),
    /// It is larger than 2^64 - 1.
    #[error("`{0}` is too large: the largest size is 16777215T")]
    TooLarge(String),
}

const UNITS: [(char, u32); 6] = [
    ('K', 10),
    ('M', 20),
    ('G', 30),
    ('T', 40),
    ('P', 50),
    ('E', 60),
];

/// Parses `64G`, `64GiB`, `64 GiB`, `64g`, `512`, `512B` into bytes. All units are binary.
pub fn parse_bytes(text: &str) -> Result<u64, SizeError> {
    let not_a_size = || SizeError::NotASize(text.to_owned());
    let trimmed = text.trim();
    let digits_end = trimmed
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(trimmed.len());
    let (digits, unit) = trimmed.split_at(digits_end);
    if digits.is_empty() {
        return Err(not_a_size());
    }
    let unit = unit.trim_start().to_ascii_uppercase();
    let shift = match unit.as_str() {
        "" | "B" => 0,
        _ => {
            let mut letters = unit.chars();
            let first = letters.next();
            if !matches!(letters.as_str(), "" | "B" | "IB") {
                return Err(not_a_size());
            }
            UNITS
                .iter()
                .find(|(letter, _)| Some(*letter) == first)
                .map(|(_, shift)| *shift)
                .ok_or_else(not_a_size)?
        }
    };
    let too_large = || SizeError::TooLarge(text.to_owned());
    let number: u64 = digits.parse().map_err(|_| too_large())?;
    number.checked_mul(1u64 << shift).ok_or_else(too_large)
}

/// The shortest exact text that [`parse_bytes`] reads back: `64G`, `1536M`, `513`.
pub fn format_exact(bytes: u64) -> String {
    for (letter, shift) in UNITS.iter().rev() {
        if bytes != 0 && bytes.trailing_zeros() >= *shift {
            return format!("{}{letter}", bytes >> shift);
        }
    }
    bytes.to_string()
}

/// A text for people, rounded to at most one decimal: `64 GiB`, `1.5 GiB`, `513 B`.
pub fn format_bytes(bytes: u64) -> String {
    for (letter, shift) in UNITS.iter().rev() {
        let unit = 1u64 << shift;
        if bytes >= unit {
            let whole = bytes >> shift;
            let tenths = u128::from(bytes & (unit - 1)) * 10 / u128::from(unit);
            let mut text = whole.to_string();
            if tenths != 0 {
                let _ = write!(text, ".{tenths}");
            }
            let _ = write!(text, " {letter}iB");
            return text;
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_what_people_write() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("512B", 512),
            ("64K", 65536),
            ("64k", 65536),
            ("64 KiB", 65536),
            (" 1G ", 1 << 30),
            ("1TB", 1 << 40),
            ("15E", 15 << 60),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "G", "-1", "1.5G", "1X", "1GG", "1KiBs", "0x10", "1 0"] {
            assert!(
                matches!(parse_bytes(text), Err(SizeError::NotASize(_))),
                "{text}"
            );
        }
        for text in ["16E", "99999999999999999999", "18446744073709551616"] {
            assert!(
                matches!(parse_bytes(text), Err(SizeError::TooLarge(_))),
                "{text}"
            );
        }
    }

    #[test]
    fn prints_for_people() {
        assert_eq!(format_bytes(513), "513 B");
        assert_eq!(format_bytes(64 << 30), "64 GiB");
        assert_eq!(format_bytes(3 << 29), "1.5 GiB");
        assert_eq!(format_exact(3 << 29), "1536M");
        assert_eq!(format_exact(0), "0");
    }

    proptest! {
        #[test]
        fn exact_text_reads_back(bytes: u64) {
            prop_assert_eq!(parse_bytes(&format_exact(bytes)), Ok(bytes));
        }
        #[test]
        fn never_panics(text in ".{0,40}") {
            let _ = parse_bytes(&text);
        }
    }
}
