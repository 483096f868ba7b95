//! Errors between a VM's driver and its device. Commands that fail are [`super::DiskStatus`].

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

/// An error of a VM's driver.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The socket can't be connected to.
    #[error("cannot connect to {}: {source}; does the export exist, and is no other client connected?", path.display())]
    Connect {
        /// Socket.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The socket failed.
    #[error("{}: {what}: {source}", path.display())]
    Socket {
        /// Socket.
        path: PathBuf,
        /// Failed step.
        what: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// The target closed the socket.
    #[error("{}: the target closed the connection", path.display())]
    Closed {
        /// Socket.
        path: PathBuf,
    },
    /// No answer came in time.
    #[error("waited {waited:?} for {what}: the target is stuck or gone")]
    TimedOut {
        /// Missing answer.
        what: String,
        /// Time waited.
        waited: Duration,
    },
    /// The target broke the protocol.
    #[error("the target broke the protocol: {0}")]
    Protocol(String),
    /// The target refused a request.
    #[error("{what}: refused with error {errno}")]
    Refused {
        /// Request.
        what: String,
        /// Error number.
        errno: u32,
    },
    /// The device can't be used as asked.
    #[error("{0}")]
    Unusable(String),
    /// The operating system refused something.
    #[error("cannot {what}: {source}")]
    System {
        /// Failed step.
        what: &'static str,
        /// Cause.
        source: io::Error,
    },
}

impl Error {
    /// Whether connecting again may help.
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
