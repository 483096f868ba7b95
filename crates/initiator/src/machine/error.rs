//! What can go wrong between a machine's driver and its device.
//!
//! Design: one enum; [`Error::is_gone`] tells whether the device is gone, after which connecting again may help.
//! What it does *not* do: commands that end with an error; those are [`super::DiskStatus`].

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

/// An error of a machine's driver.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The socket can't be connected to.
    #[error("cannot connect to {}: {source}; is the export there, and no other client?", path.display())]
    Connect {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The socket failed.
    #[error("{}: {what}: {source}", path.display())]
    Socket {
        /// Which.
        path: PathBuf,
        /// What was done.
        what: &'static str,
        /// How.
        source: io::Error,
    },
    /// The target closed the socket.
    #[error("{}: the target closed the connection", path.display())]
    Closed {
        /// Which.
        path: PathBuf,
    },
    /// Nothing came in time.
    #[error("waited {waited:?} for {what}: the target is stuck or gone")]
    TimedOut {
        /// What was waited for.
        what: String,
        /// How long.
        waited: Duration,
    },
    /// The target broke the protocol.
    #[error("the target broke the protocol: {0}")]
    Protocol(String),
    /// The target refused what was asked.
    #[error("{what}: refused with error {errno}")]
    Refused {
        /// What was asked.
        what: String,
        /// Its number.
        errno: u32,
    },
    /// The device can't be used as asked.
    #[error("{0}")]
    Unusable(String),
    /// The operating system refused something.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
}

impl Error {
    /// Whether the connection is gone, so that connecting again may help.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        matches!(
            self,
            Self::Connect { .. } | Self::Socket { .. } | Self::Closed { .. }
        )
    }

    pub(crate) fn system(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}
