//! Why firmware is refused.

use std::io;
use std::path::PathBuf;

use super::Slot;
use super::image::ImageError;
use crate::model::error::{ApiError, ErrorKind};

#[derive(Debug, thiserror::Error)]
pub(crate) enum FirmwareError {
    #[error("no firmware key is configured")]
    NotConfigured,
    #[error("the firmware key {} can't be used: {why}", .path.display())]
    Key { path: PathBuf, why: io::Error },
    #[error("the image is refused: {0}")]
    InvalidImage(#[from] ImageError),
    #[error(
        "the image's program (version {version}) uses formats {theirs}, but the running engine (version {running}) \
        uses {ours}"
    )]
    OtherFormats {
        version: String,
        theirs: String,
        running: String,
        ours: String,
    },
    #[error("slot {0} {1}")]
    InvalidSlot(u8, &'static str),
    #[error(
        "a piece begins at a multiple of 4 KiB, has a multiple of 4 KiB, and ends within 256 MiB and 4 KiB"
    )]
    InvalidPiece,
    #[error("{bytes} bytes from byte {offset} on overlap what is downloaded")]
    OverlappingRange { offset: u64, bytes: u64 },
    #[error("nothing is downloaded")]
    NoDownload,
    #[error("the download is incomplete: byte {0} is missing")]
    Incomplete(u64),
    #[error("another firmware command runs")]
    Busy,
    #[error("can't keep the image: {0}")]
    Io(#[from] io::Error),
    /// It is stored, but the engine was not replaced by it.
    #[error("{0}")]
    NotActivated(ApiError),
}

impl FirmwareError {
    pub(super) fn no_image() -> Self {
        Self::InvalidSlot(Slot::Downloaded.into(), "is empty")
    }
}

impl From<FirmwareError> for ApiError {
    fn from(error: FirmwareError) -> Self {
        let kind = match &error {
            FirmwareError::NotActivated(why) => return why.clone(),
            FirmwareError::Busy => ErrorKind::InUse,
            FirmwareError::Io(why) if why.kind() == io::ErrorKind::StorageFull => {
                ErrorKind::NoSpace
            }
            FirmwareError::Io(_) => ErrorKind::Unavailable,
            FirmwareError::NotConfigured => {
                return Self::new(ErrorKind::Forbidden, error.to_string())
                    .hint("name public keys in the configuration: [firmware] keys");
            }
            FirmwareError::Key { .. } => ErrorKind::Forbidden,
            FirmwareError::OtherFormats { .. } => {
                return Self::invalid(error.to_string()).hint(
                    "`forebay shutdown` ends daemon and engine in good order; then install and start the new version",
                );
            }
            _ => ErrorKind::Invalid,
        };
        Self::new(kind, error.to_string())
    }
}
