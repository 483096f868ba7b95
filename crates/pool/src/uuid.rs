//! Identities of 16 random bytes (RFC 9562, version 4), also NGUIDs of volumes. Randomness comes
//! from the kernel.

use crate::error::{PoolError, Result};
use serde::{Deserialize, Serialize};
use std::{fmt, fs::File, io::Read, str::FromStr};

/// A universally unique identifier.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// A new random UUID.
    pub fn random() -> Result<Self> {
        let mut bytes = [0; 16];
        File::open("/dev/urandom")
            .and_then(|mut file| file.read_exact(&mut bytes))
            .map_err(|error| PoolError::io("reading /dev/urandom for a new uuid", &error))?;
        // RFC 9562, 5.4: version 4, variant 10.
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Ok(Self(bytes))
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            if matches!(at, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl FromStr for Uuid {
    type Err = PoolError;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || PoolError::invalid(format!("{text:?} is not a uuid"));
        let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'-').collect();
        if digits.len() != 32 || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(wrong());
        }
        let mut bytes = [0; 16];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| wrong())?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| wrong())?;
        }
        Ok(Self(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_there_and_back() {
        let uuid = Uuid::random().unwrap();
        assert_eq!(uuid.to_string().parse::<Uuid>().unwrap(), uuid);
        assert_eq!(uuid.to_string().len(), 36);
        assert_eq!(&uuid.to_string()[14..15], "4");
        assert_ne!(uuid, Uuid::random().unwrap());
        assert!("not-a-uuid".parse::<Uuid>().is_err());
        assert!("é".repeat(16).parse::<Uuid>().is_err());
    }
}
