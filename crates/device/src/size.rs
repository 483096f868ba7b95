//! One parser and printer of sizes for specs, configuration and command line: `64G`, `1T`, `512`,
//! `4 KiB`.
//!
//! Units are binary (`G`, `Gi`, `GiB`); only those that end in a plain `B` (`KB` to `EB`) are
//! decimal. Decimal sizes and fractions are rounded up to whole blocks.

use std::fmt::Write as _;

/// Why a text is not a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// It doesn't begin with digits, or its unit is unknown.
    #[error(
        "`{0}` is not a size: write a number and a unit, for example 512, 64K, 1.5G (binary) or 10GB (decimal)"
    )]
    NotASize(String),
    /// It has a sign.
    #[error("`{0}` is not a size: a size has no sign; write for example 512, 64K or 1.5G")]
    Negative(String),
    /// It is larger than 2^64 - 1.
    #[error("`{0}` is too large: the largest size is 16777215T")]
    TooLarge(String),
}

/// The capacity of a device is a multiple of this.
pub const CAPACITY_BLOCK_BYTES: u64 = 4096;

const UNITS: [(char, u32); 6] = [
    ('K', 10),
    ('M', 20),
    ('G', 30),
    ('T', 40),
    ('P', 50),
    ('E', 60),
];

/// A parsed size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Bytes, rounded up.
    pub bytes: u64,
    /// Written with a decimal unit or a fraction.
    pub is_rounded: bool,
}

impl Size {
    /// Rounded up to blocks if a decimal unit or a fraction was written.
    #[must_use]
    pub fn to_blocks(self, block_bytes: u64) -> u64 {
        let rounded = self.bytes.checked_next_multiple_of(block_bytes);
        match rounded {
            Some(rounded) if self.is_rounded => rounded,
            _ => self.bytes,
        }
    }
}

/// Parses a size below 2^64: `64G`, `64Gi`, `64GiB`, `1.5G` and `512` are binary, `64GB` is
/// decimal. Case does not matter.
pub fn parse_size(text: &str) -> Result<Size, SizeError> {
    let not_a_size = || SizeError::NotASize(text.to_owned());
    let too_large = || SizeError::TooLarge(text.to_owned());
    let trimmed = text.trim();
    if trimmed.starts_with('-') {
        return Err(SizeError::Negative(text.to_owned()));
    }
    let number_end = trimmed
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(number_end);
    let (unit, is_decimal) = unit_bytes(unit.trim_start()).ok_or_else(not_a_size)?;
    let (whole, fraction) = match number.split_once('.') {
        Some((whole, fraction)) if unit > 1 => (whole, Some(fraction)),
        Some(_) => return Err(not_a_size()),
        None => (number, None),
    };
    let is_digits = |digits: &str| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    if !is_digits(whole) || !fraction.is_none_or(is_digits) {
        return Err(not_a_size());
    }
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let mut bytes = u128::from(whole) * u128::from(unit);
    if let Some(digits) = fraction {
        let digits = digits.trim_end_matches('0');
        let places = u32::try_from(digits.len()).ok().filter(|n| *n <= 18);
        let scale = 10u128.pow(places.ok_or_else(not_a_size)?);
        let part: u64 = match digits {
            "" => 0,
            digits => digits.parse().map_err(|_| not_a_size())?,
        };
        bytes += (u128::from(part) * u128::from(unit)).div_ceil(scale);
    }
    Ok(Size {
        bytes: u64::try_from(bytes).map_err(|_| too_large())?,
        is_rounded: is_decimal || fraction.is_some(),
    })
}

fn unit_bytes(unit: &str) -> Option<(u64, bool)> {
    let unit = unit.to_ascii_uppercase();
    if matches!(unit.as_str(), "" | "B") {
        return Some((1, false));
    }
    let mut letters = unit.chars();
    let first = letters.next()?;
    let shift = UNITS.iter().find(|(letter, _)| *letter == first)?.1;
    match letters.as_str() {
        "" | "I" | "IB" => Some((1 << shift, false)),
        "B" => Some((1000u64.pow(shift / 10), true)),
        _ => None,
    }
}

/// Like [`parse_size`], rounded up to 512 bytes for a decimal unit or a fraction.
pub fn parse_bytes(text: &str) -> Result<u64, SizeError> {
    parse_size(text).map(|size| size.to_blocks(512))
}

/// Like [`parse_bytes`], in blocks of 4 KiB.
pub fn parse_capacity(text: &str) -> Result<u64, SizeError> {
    parse_size(text).map(|size| size.to_blocks(CAPACITY_BLOCK_BYTES))
}

/// The shortest exact text that [`parse_bytes`] accepts: `64G`, `1536M`, `513`.
pub fn format_exact(bytes: u64) -> String {
    for (letter, shift) in UNITS.iter().rev() {
        if bytes != 0 && bytes.trailing_zeros() >= *shift {
            return format!("{}{letter}", bytes >> shift);
        }
    }
    bytes.to_string()
}

/// A text for people, rounded to one decimal: `64 GiB`, `1.5 GiB`, `513 B`.
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
    fn sizes_are_what_they_say() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("512B", 512),
            ("4K", 4096),
            ("64k", 65536),
            ("64 KiB", 65536),
            (" 1G ", 1 << 30),
            ("1Gi", 1 << 30),
            ("1GiB", 1 << 30),
            ("1gib", 1 << 30),
            ("1.5G", 3 << 29),
            ("0.5Ki", 512),
            ("1.000GiB", 1 << 30),
            ("15E", 15 << 60),
            ("1KB", 1024),
            ("4kB", 4096),
            ("1MB", 1_000_448),
            ("1GB", 1_000_000_000),
            ("1.5GB", 1_500_000_256),
            ("1TB", 1_000_000_000_000),
            ("1PB", 1_000_000_000_000_000),
            ("0.3G", 322_122_752),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn decimals_and_fractions_are_rounded_up_to_blocks() {
        for (text, exact, blocks) in [
            ("1GB", 1_000_000_000, 1_000_001_536),
            ("1.1Ki", 1127, 4096),
            ("1Gi", 1 << 30, 1 << 30),
            ("1000", 1000, 1000),
        ] {
            let size = parse_size(text).unwrap();
            assert_eq!(
                (size.bytes, size.to_blocks(4096)),
                (exact, blocks),
                "{text}"
            );
        }
        assert_eq!(parse_capacity("10MB"), Ok(10_002_432));
        assert_eq!(parse_capacity("5000"), Ok(5000));
    }

    #[test]
    fn an_invalid_size_is_refused() {
        for text in [
            "",
            "G",
            "1.5",
            "1.5B",
            "1.G",
            ".5G",
            "1..5G",
            "1.5.5G",
            "1X",
            "1GG",
            "1KiBs",
            "1bi",
            "0x10",
            "1 0",
            "1,5G",
            "1e3",
            "0.1234567890123456789G",
        ] {
            assert!(
                matches!(parse_size(text), Err(SizeError::NotASize(_))),
                "{text}"
            );
        }
        for text in ["-1", "-1G", " -5MB"] {
            assert!(
                matches!(parse_size(text), Err(SizeError::Negative(_))),
                "{text}"
            );
        }
        for text in [
            "16E",
            "16EiB",
            "19EB",
            "99999999999999999999",
            "18446744073709551616",
        ] {
            assert!(
                matches!(parse_size(text), Err(SizeError::TooLarge(_))),
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
