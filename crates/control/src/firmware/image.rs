//! A firmware image: a program, and a signed description at its end.
//!
//! The description is at the end so that an image can be executed as it is. Numbers are
//! little-endian; other bytes of the description are zero.
//!
//! | offset | bytes | |
//! | --- | --- | --- |
//! | 0 | n | the program |
//! | n | 0 to 4095 | zeros, so that the description begins at a multiple of 4096 |
//! | end - 4096 | 4096 | the description |
//!
//! | offset in the description | bytes | |
//! | --- | --- | --- |
//! | 0 | 10 | `FOREBAY-FW` |
//! | 10 | 2 | the version of this format: 1 |
//! | 16 | 8 | n |
//! | 24 | 64 | the program's version: printable ASCII without spaces, then zeros |
//! | 88 | 64 | its formats, which `forebay formats` prints; likewise |
//! | 4032 | 64 | the Ed25519 signature (RFC 8032) of all bytes before it |

use std::fmt::Display;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use ed25519_compact::{KeyPair, PublicKey, Seed, Signature};

/// The granularity of an image's length, in bytes.
pub const GRANULE_BYTES: u64 = 4096;
/// The longest program in bytes.
pub const PROGRAM_MAX_BYTES: u64 = 256 << 20;
/// The longest image in bytes.
pub const IMAGE_MAX_BYTES: u64 = PROGRAM_MAX_BYTES + GRANULE_BYTES;
/// The longest version or list of formats in bytes.
pub const TEXT_MAX_BYTES: usize = 64;

const MAGIC: &[u8; 10] = b"FOREBAY-FW";
const FORMAT_VERSION: u16 = 1;
const VERSION_AT: usize = 24;
const FORMATS_AT: usize = VERSION_AT + TEXT_MAX_BYTES;
const RESERVED_AT: usize = FORMATS_AT + TEXT_MAX_BYTES;
const SIGNATURE_AT: usize = GRANULE_BYTES as usize - Signature::BYTES;
/// The longest file of a key in bytes.
const KEY_FILE_MAX_BYTES: u64 = 4096;
const CHUNK_BYTES: usize = 64 << 10;

type Block = [u8; GRANULE_BYTES as usize];

/// Why an image is refused.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// No image has this length.
    #[error("an image has 8 KiB to 256 MiB and 4 KiB, in units of 4 KiB, but this has {0} bytes")]
    Length(u64),
    /// The description is missing.
    #[error(
        "it does not end with a description: it is not a firmware image, or its end is missing"
    )]
    NoDescription,
    /// The format's version is unknown.
    #[error("its format has version {0}, but this program reads version {FORMAT_VERSION}")]
    Format(u16),
    /// The program's length does not fit the image's.
    #[error("its program has {program} bytes by its description, but the image has {image}")]
    ProgramLength {
        /// The described length.
        program: u64,
        /// The image's length.
        image: u64,
    },
    /// A text of the description is malformed.
    #[error("its {0} is not 1 to {TEXT_MAX_BYTES} printable ASCII characters")]
    Text(&'static str),
    /// This byte must be zero.
    #[error("its byte {0} is not zero")]
    NotZero(u64),
    /// The signature is missing.
    #[error("it is not signed")]
    Unsigned,
    /// The image was changed, or signed by another key.
    #[error("its signature is wrong: another key signed it, or it was changed afterwards")]
    Signature,
    /// The image can't be read.
    #[error("it can't be read: {0}")]
    Io(#[from] io::Error),
}

/// An image's description, without its signature.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// The program's version.
    pub version: String,
    /// The formats of the program's engine.
    pub formats: String,
    /// The program's length in bytes.
    pub program_bytes: u64,
}

/// A public key that verifies images.
#[derive(Debug, Clone, Copy)]
pub struct VerifyingKey(PublicKey);

/// A private key that signs images.
#[derive(Debug)]
pub struct SigningKey(KeyPair);

fn invalid(why: impl Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.to_string())
}

fn read_pem(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let read = File::open(path)?
        .take(KEY_FILE_MAX_BYTES + 1)
        .read_to_string(&mut text)?;
    match read as u64 > KEY_FILE_MAX_BYTES {
        true => Err(invalid("it is too long for a key")),
        false => Ok(text),
    }
}

impl VerifyingKey {
    /// Reads a public key in PEM (SubjectPublicKeyInfo, RFC 8410), as `openssl pkey -pubout` writes.
    ///
    /// # Errors
    /// The file can't be read, or is no such key.
    pub fn read(path: &Path) -> io::Result<Self> {
        let key = PublicKey::from_pem(&read_pem(path)?);
        let key = key.map_err(|_| invalid("it is not an Ed25519 public key in PEM"))?;
        Ok(Self(key))
    }

    /// The key in PEM (SubjectPublicKeyInfo, RFC 8410).
    #[must_use]
    pub fn to_pem(self) -> String {
        self.0.to_pem()
    }
}

impl SigningKey {
    /// Reads a private key in PEM (PKCS #8, RFC 8410), as `openssl genpkey` writes.
    ///
    /// # Errors
    /// The file can't be read, or is no such key.
    pub fn read(path: &Path) -> io::Result<Self> {
        let key = KeyPair::from_pem(&read_pem(path)?);
        let key =
            key.map_err(|_| invalid("it is not an unencrypted Ed25519 private key in PEM"))?;
        Ok(Self(key))
    }

    /// A new key, of the kernel's random numbers.
    ///
    /// # Errors
    /// The kernel has none.
    pub fn generate() -> io::Result<Self> {
        let mut seed = [0; Seed::BYTES];
        File::open("/dev/urandom")?.read_exact(&mut seed)?;
        Ok(Self(KeyPair::from_seed(Seed::new(seed))))
    }

    /// The key in PEM (PKCS #8, RFC 8410), without a password.
    #[must_use]
    pub fn to_pem(&self) -> String {
        self.0.sk.to_pem()
    }

    /// The key that verifies its signatures.
    #[must_use]
    pub fn public(&self) -> VerifyingKey {
        VerifyingKey(self.0.pk)
    }
}

fn is_text(text: &[u8]) -> bool {
    (1..=TEXT_MAX_BYTES).contains(&text.len()) && text.iter().all(u8::is_ascii_graphic)
}

/// Reads a text that zeros fill up.
fn text(block: &Block, at: usize, what: &'static str) -> Result<String, ImageError> {
    let field = &block[at..at + TEXT_MAX_BYTES];
    let end = field.iter().position(|byte| *byte == 0);
    let (text, rest) = field.split_at(end.unwrap_or(TEXT_MAX_BYTES));
    match is_text(text) && rest.iter().all(|byte| *byte == 0) {
        true => Ok(String::from_utf8_lossy(text).into_owned()),
        false => Err(ImageError::Text(what)),
    }
}

fn description_at(program_bytes: u64) -> Option<u64> {
    let is_valid = (1..=PROGRAM_MAX_BYTES).contains(&program_bytes);
    is_valid.then(|| program_bytes.next_multiple_of(GRANULE_BYTES))
}

impl Description {
    fn parse(block: &Block, image_bytes: u64) -> Result<Self, ImageError> {
        if !block.starts_with(MAGIC) {
            return Err(ImageError::NoDescription);
        }
        let format = u16::from_le_bytes([block[10], block[11]]);
        if format != FORMAT_VERSION {
            return Err(ImageError::Format(format));
        }
        let mut number = [0; 8];
        number.copy_from_slice(&block[16..24]);
        let program_bytes = u64::from_le_bytes(number);
        if description_at(program_bytes) != image_bytes.checked_sub(GRANULE_BYTES) {
            return Err(ImageError::ProgramLength {
                program: program_bytes,
                image: image_bytes,
            });
        }
        let is_set = |at: &usize| block[*at] != 0;
        if let Some(at) = (12..16).chain(RESERVED_AT..SIGNATURE_AT).find(is_set) {
            return Err(ImageError::NotZero(image_bytes - GRANULE_BYTES + at as u64));
        }
        Ok(Self {
            version: text(block, VERSION_AT, "version")?,
            formats: text(block, FORMATS_AT, "list of formats")?,
            program_bytes,
        })
    }

    fn block(&self) -> Result<Block, ImageError> {
        let mut block = [0; GRANULE_BYTES as usize];
        block[..MAGIC.len()].copy_from_slice(MAGIC);
        block[10..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        block[16..24].copy_from_slice(&self.program_bytes.to_le_bytes());
        for (at, text, what) in [
            (VERSION_AT, &self.version, "version"),
            (FORMATS_AT, &self.formats, "list of formats"),
        ] {
            if !is_text(text.as_bytes()) {
                return Err(ImageError::Text(what));
            }
            block[at..at + text.len()].copy_from_slice(text.as_bytes());
        }
        Ok(block)
    }

    /// Reads the description of an image, without verifying the signature.
    ///
    /// # Errors
    /// It can't be read or is malformed.
    pub fn read<R: Read + Seek>(image: &mut R) -> Result<Self, ImageError> {
        Ok(read_end(image)?.0)
    }
}

/// Returns the signature and the image's length, too.
fn read_end<R: Read + Seek>(image: &mut R) -> Result<(Description, Signature, u64), ImageError> {
    let bytes = image.seek(SeekFrom::End(0))?;
    let lengths = 2 * GRANULE_BYTES..=IMAGE_MAX_BYTES;
    if !lengths.contains(&bytes) || !bytes.is_multiple_of(GRANULE_BYTES) {
        return Err(ImageError::Length(bytes));
    }
    let mut block = [0; GRANULE_BYTES as usize];
    image.seek(SeekFrom::Start(bytes - GRANULE_BYTES))?;
    image.read_exact(&mut block)?;
    let mut signature = [0; Signature::BYTES];
    signature.copy_from_slice(&block[SIGNATURE_AT..]);
    Ok((
        Description::parse(&block, bytes)?,
        Signature::new(signature),
        bytes,
    ))
}

/// Verifies that one of the keys signed the image. Reads it once, with little memory.
///
/// # Errors
/// The image is malformed or can't be read, or none of the keys signed it.
pub fn verify<R: Read + Seek>(
    image: &mut R,
    keys: &[VerifyingKey],
) -> Result<Description, ImageError> {
    let (description, signature, bytes) = read_end(image)?;
    if signature.iter().all(|byte| *byte == 0) {
        return Err(ImageError::Unsigned);
    }
    // A key that can't have made the signature has no state.
    let states = keys
        .iter()
        .flat_map(|key| key.0.verify_incremental(&signature));
    let mut states: Vec<_> = states.collect();
    let padding = description.program_bytes..bytes - GRANULE_BYTES;
    let signed_bytes = bytes - Signature::BYTES as u64;
    image.seek(SeekFrom::Start(0))?;
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut at = 0;
    while at < signed_bytes {
        let length = (signed_bytes - at).min(CHUNK_BYTES as u64);
        let part = &mut chunk[..length as usize];
        image.read_exact(part)?;
        let mut places = at..at + length;
        if let Some(place) =
            places.find(|place| padding.contains(place) && part[(place - at) as usize] != 0)
        {
            return Err(ImageError::NotZero(place));
        }
        states.iter_mut().for_each(|state| state.absorb(&*part));
        at += length;
    }
    match states.iter().any(|state| state.verify().is_ok()) {
        true => Ok(description),
        false => Err(ImageError::Signature),
    }
}

/// Makes a signed image of a program.
///
/// # Errors
/// The program is empty or too long, or a text is malformed.
pub fn seal(
    program: Vec<u8>,
    version: &str,
    formats: &str,
    key: &SigningKey,
) -> Result<Vec<u8>, ImageError> {
    let program_bytes = program.len() as u64;
    let at = description_at(program_bytes).ok_or(ImageError::Length(program_bytes))?;
    let description = Description {
        version: version.to_owned(),
        formats: formats.to_owned(),
        program_bytes,
    };
    let block = description.block()?;
    let mut image = program;
    image.resize(at as usize, 0);
    image.extend(&block[..SIGNATURE_AT]);
    let signature = key.0.sk.sign(&image, None);
    image.extend(&*signature);
    Ok(image)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Cursor;

    pub(crate) fn key(number: u8) -> SigningKey {
        SigningKey(KeyPair::from_seed(Seed::new([number; 32])))
    }

    fn checked(image: &[u8], keys: &[VerifyingKey]) -> Result<Description, ImageError> {
        verify(&mut Cursor::new(image), keys)
    }

    #[test]
    fn one_of_the_keys_must_have_signed_the_image() {
        let image = seal(b"program".to_vec(), "1.2.3", "1.2", &key(1)).unwrap();
        assert_eq!(image.len(), 8192);
        let description = Description {
            version: "1.2.3".to_owned(),
            formats: "1.2".to_owned(),
            program_bytes: 7,
        };
        let (ours, other) = (key(1).public(), key(2).public());
        assert_eq!(checked(&image, &[other, ours]).unwrap(), description);
        assert_eq!(
            Description::read(&mut Cursor::new(&image)).unwrap(),
            description
        );
        for keys in [&[other][..], &[]] {
            assert!(matches!(checked(&image, keys), Err(ImageError::Signature)));
        }
        let mut unsigned = image.clone();
        unsigned[8192 - 64..].fill(0);
        assert!(matches!(
            checked(&unsigned, &[ours]),
            Err(ImageError::Unsigned)
        ));
    }

    #[test]
    fn openssl_keys_are_read_and_other_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key.pem");
        let write = |text: &str| std::fs::write(&path, text).unwrap();
        // RFC 8410, sections 10.1 and 10.3.
        write(
            "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n-----END PUBLIC KEY-----\n",
        );
        let public = VerifyingKey::read(&path).unwrap();
        assert!(SigningKey::read(&path).is_err());
        write(
            "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC\n-----END PRIVATE KEY-----\n",
        );
        let private = SigningKey::read(&path).unwrap();
        assert_eq!(*private.public().0, *public.0);
        assert!(VerifyingKey::read(&path).is_err());
        write(&"x".repeat(5000));
        let error = VerifyingKey::read(&path).unwrap_err();
        assert!(error.to_string().contains("too long"), "{error}");
        assert!(VerifyingKey::read(folder.path()).is_err());
    }

    #[test]
    fn malformed_descriptions_are_refused() {
        let image = seal(vec![7; 4000], "1", "1", &key(1)).unwrap();
        let with = |at: usize, byte: u8| {
            let mut image = image.clone();
            image[at] = byte;
            checked(&image, &[key(1).public()]).unwrap_err().to_string()
        };
        for (at, byte, part) in [
            (4096, b'f', "not a firmware image"),
            (4096 + 10, 2, "version 2"),
            (4096 + 12, 1, "byte 4108"),
            (4096 + 17, 0, "byte 160"),
            (4096 + 18, 1, "69536 bytes"),
            (4096 + 23, 255, "by its description"),
            (4096 + 24, 0, "its version"),
            (4096 + 26, b'2', "its version"),
            (4096 + 88, b' ', "its list of formats"),
            (4096 + 152, 1, "byte 4248"),
            (4000, 1, "byte 4000"),
            (3999, 8, "another key signed it"),
        ] {
            let error = with(at, byte);
            assert!(error.contains(part), "{at}: {error}");
        }
        for length in [0, 4096, 4100, 8191] {
            let error = checked(&image[..length], &[]).unwrap_err();
            assert!(matches!(error, ImageError::Length(_)), "{error}");
        }
        let long = "9".repeat(TEXT_MAX_BYTES + 1);
        for (program, version, formats) in [
            (0, "1", "1"),
            (1, "", "1"),
            (1, "1", "a b"),
            (1, &long, "1"),
        ] {
            assert!(seal(vec![0; program], version, formats, &key(1)).is_err());
        }
    }

    proptest! {
        #[test]
        fn any_program_survives_and_any_change_is_noticed(
            program in proptest::collection::vec(any::<u8>(), 1..20_000),
            version in "[!-~]{1,64}",
            formats in "[!-~]{1,64}",
            at: prop::sample::Index,
            bit in 0..8u8,
        ) {
            let mut image = seal(program.clone(), &version, &formats, &key(3)).unwrap();
            prop_assert!(image.starts_with(&program) && image.len().is_multiple_of(4096));
            let keys = [key(3).public()];
            let description = checked(&image, &keys).unwrap();
            prop_assert_eq!((description.version, description.formats), (version, formats));
            let at = at.index(image.len());
            image[at] ^= 1 << bit;
            prop_assert!(checked(&image, &keys).is_err(), "byte {} is changed", at);
        }

        #[test]
        fn any_bytes_are_survived(mut end in proptest::collection::vec(any::<u8>(), 0..4096), granules in 0..4usize) {
            let mut image = vec![0; granules * 4096];
            let begin = image.len().saturating_sub(4096);
            if granules > 0 {
                end.truncate(4096 - 16);
                image[begin..begin + 10].copy_from_slice(MAGIC);
                image[begin + 10] = 1;
                image[begin + 16..begin + 16 + end.len()].copy_from_slice(&end);
            }
            prop_assert!(checked(&image, &[key(1).public()]).is_err());
        }
    }
}
