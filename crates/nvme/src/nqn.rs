//! NVMe Qualified Names: checked, and copied without allocation.
//!
//! Nothing is resolved or authorized.

use std::fmt;

/// Maximum length without terminator (Base 2.0, 4.5).
pub const NQN_MAX_BYTES: usize = 223;

/// Discovery Service NQN (Base 2.0, 3.1.2.3).
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";

/// Reasons to refuse a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NqnError {
    /// Empty.
    Empty,
    /// Longer than 223 bytes.
    TooLong,
    /// No terminating zero.
    NotTerminated,
    /// Not UTF-8, or control characters.
    BadCharacter,
    /// Not `nqn.yyyy-mm.domain`.
    BadForm,
}

impl fmt::Display for NqnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Empty => "the NQN is empty",
            Self::TooLong => "the NQN is longer than 223 bytes",
            Self::NotTerminated => "the NQN field has no terminating zero",
            Self::BadCharacter => "the NQN contains a character that is not printable UTF-8",
            Self::BadForm => "the NQN is not of the form nqn.yyyy-mm.domain",
        })
    }
}

impl std::error::Error for NqnError {}

/// An NVMe Qualified Name (Base 2.0, 4.5): `nqn.yyyy-mm.` and more, UTF-8, at most 223 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Nqn {
    // Zero after `len`, for the derived equality.
    bytes: [u8; NQN_MAX_BYTES],
    len: u8,
}

impl Nqn {
    /// Checks a name.
    pub fn parse(name: &str) -> Result<Self, NqnError> {
        let raw = name.as_bytes();
        if raw.is_empty() {
            return Err(NqnError::Empty);
        }
        if raw.len() > NQN_MAX_BYTES {
            return Err(NqnError::TooLong);
        }
        if name.chars().any(char::is_control) {
            return Err(NqnError::BadCharacter);
        }
        let date = raw.strip_prefix(b"nqn.").ok_or(NqnError::BadForm)?;
        let formed = matches!(date, [y @ .., _] if y.len() > 8)
            && date[..4].iter().all(u8::is_ascii_digit)
            && date[4] == b'-'
            && date[5..7].iter().all(u8::is_ascii_digit)
            && date[7] == b'.';
        if !formed {
            return Err(NqnError::BadForm);
        }
        let mut bytes = [0; NQN_MAX_BYTES];
        bytes[..raw.len()].copy_from_slice(raw);
        Ok(Self {
            bytes,
            len: raw.len() as u8,
        })
    }

    /// Checks a name in a zero-terminated field.
    pub fn from_field(field: &[u8; 256]) -> Result<Self, NqnError> {
        let end = field
            .iter()
            .position(|&b| b == 0)
            .ok_or(NqnError::NotTerminated)?;
        Self::parse(std::str::from_utf8(&field[..end]).map_err(|_| NqnError::BadCharacter)?)
    }

    /// Checks a host's name in a zero-terminated field.
    ///
    /// Real hosts send malformed or empty names (SPDK's tools do). They get access only where every
    /// host has it, so only unprintable names are refused.
    pub fn host_from_field(field: &[u8; 256]) -> Result<Self, NqnError> {
        let end = field
            .iter()
            .position(|&b| b == 0)
            .ok_or(NqnError::NotTerminated)?;
        let name = std::str::from_utf8(&field[..end]).map_err(|_| NqnError::BadCharacter)?;
        if name.len() > NQN_MAX_BYTES {
            return Err(NqnError::TooLong);
        }
        if name.chars().any(char::is_control) {
            return Err(NqnError::BadCharacter);
        }
        let mut bytes = [0; NQN_MAX_BYTES];
        bytes[..end].copy_from_slice(name.as_bytes());
        Ok(Self {
            bytes,
            len: end as u8,
        })
    }

    /// The Discovery Service NQN.
    pub fn discovery() -> Self {
        Self::parse(DISCOVERY_NQN).expect("the constant is a valid name")
    }

    /// Whether this is the Discovery Service NQN.
    pub fn is_discovery(&self) -> bool {
        self.as_str() == DISCOVERY_NQN
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        // Valid UTF-8: `parse` took it from a str.
        std::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or_default()
    }

    /// The name, zero-padded.
    pub fn to_field(&self) -> [u8; 256] {
        let mut field = [0; 256];
        field[..NQN_MAX_BYTES].copy_from_slice(&self.bytes);
        field
    }
}

impl fmt::Debug for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl fmt::Display for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for Nqn {
    type Err = NqnError;
    fn from_str(name: &str) -> Result<Self, NqnError> {
        Self::parse(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_call_themselves_what_they_like() {
        let field = |name: &[u8]| {
            let mut field = [0u8; 256];
            field[..name.len()].copy_from_slice(name);
            field
        };
        for name in ["", "rack7", "nqn.2014-08.org.x:y"] {
            let host = Nqn::host_from_field(&field(name.as_bytes())).unwrap();
            assert_eq!(host.as_str(), name);
        }
        assert_eq!(
            Nqn::host_from_field(&[b'a'; 256]),
            Err(NqnError::NotTerminated)
        );
        assert_eq!(
            Nqn::host_from_field(&field(&[b'a'; 224])),
            Err(NqnError::TooLong)
        );
        assert_eq!(
            Nqn::host_from_field(&field(b"a\nb")),
            Err(NqnError::BadCharacter)
        );
        assert_eq!(
            Nqn::host_from_field(&field(&[0xff])),
            Err(NqnError::BadCharacter)
        );
    }

    #[test]
    fn forms() {
        for good in [
            DISCOVERY_NQN,
            "nqn.2014-08.org.nvmexpress:uuid:0c4f5a43-5f4a-4f6e-b0d0-2a6fe4a8b7f1",
            "nqn.2026-01.io.forebay:alice.db",
            "nqn.2014-08.com.vmware:nvme:h\u{e4}st",
        ] {
            let nqn = Nqn::parse(good).unwrap();
            assert_eq!(nqn.as_str(), good);
            assert_eq!(Nqn::from_field(&nqn.to_field()), Ok(nqn));
        }
        assert!(Nqn::discovery().is_discovery());
        assert_eq!(Nqn::parse(""), Err(NqnError::Empty));
        assert_eq!(Nqn::parse("iqn.2014-08.org.x"), Err(NqnError::BadForm));
        assert_eq!(Nqn::parse("nqn.2014-08."), Err(NqnError::BadForm));
        assert_eq!(Nqn::parse("nqn."), Err(NqnError::BadForm));
        assert_eq!(Nqn::parse("nqn.2014x08.org.x"), Err(NqnError::BadForm));
        assert_eq!(Nqn::parse("nqn.2014-08.org\n"), Err(NqnError::BadCharacter));
        let longest = format!("nqn.2014-08.{}", "x".repeat(223 - 12));
        assert!(Nqn::parse(&longest).is_ok());
        assert_eq!(Nqn::parse(&format!("{longest}x")), Err(NqnError::TooLong));
    }

    #[test]
    fn fields_that_lie() {
        assert_eq!(Nqn::from_field(&[b'n'; 256]), Err(NqnError::NotTerminated));
        let mut field = Nqn::discovery().to_field();
        field[20] = 0xFF;
        assert_eq!(Nqn::from_field(&field), Err(NqnError::BadCharacter));
        assert_eq!(Nqn::from_field(&[0; 256]), Err(NqnError::Empty));
    }
}
