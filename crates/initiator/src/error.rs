//! Errors of the host side: what failed, where, and what to do.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use forebay_nvme::Status;
use forebay_nvme::host::Violation;
use forebay_nvme::tcp::{PduError, TermReq};
use thiserror::Error;

/// An error of the initiator.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// No TCP connection could be made.
    #[error("cannot connect to {addr}: {source}; is the target running and listening there?")]
    Connect {
        /// Target.
        addr: SocketAddr,
        /// Cause.
        source: io::Error,
    },
    /// The socket failed.
    #[error("connection to {addr} failed: {source}; reconnect")]
    Socket {
        /// Target.
        addr: SocketAddr,
        /// Cause.
        source: io::Error,
    },
    /// The target closed the connection.
    #[error("{addr} closed the connection with {in_flight} commands in flight; reconnect")]
    Closed {
        /// Target.
        addr: SocketAddr,
        /// Commands in flight.
        in_flight: usize,
    },
    /// No answer came in time.
    #[error("waited {waited:?} for {what} from {addr}; the target is stuck or gone, reconnect")]
    TimedOut {
        /// Target.
        addr: SocketAddr,
        /// Missing answer.
        what: String,
        /// Time waited.
        waited: Duration,
    },
    /// The target sent a PDU that no host can accept.
    #[error("{addr} sent a malformed PDU: {error}")]
    Pdu {
        /// Target.
        addr: SocketAddr,
        /// Fault.
        error: PduError,
    },
    /// The target broke the protocol.
    #[error("{addr} broke the protocol: {violation}")]
    Protocol {
        /// Target.
        addr: SocketAddr,
        /// Violation.
        violation: Violation,
    },
    /// The target terminated the connection.
    #[error("{addr} terminated the connection: {}", PduError { status: term.status, info: term.info })]
    Terminated {
        /// Target.
        addr: SocketAddr,
        /// Termination request.
        term: TermReq,
    },
    /// A command ended with an error status.
    #[error("{what}: {addr} answered {status:?}{hint}", hint = hint(*status))]
    Status {
        /// Target.
        addr: SocketAddr,
        /// Command.
        what: String,
        /// Status.
        status: Status,
    },
    /// The controller can't be used.
    #[error("{addr}: {what}")]
    Unusable {
        /// Target.
        addr: SocketAddr,
        /// The problem.
        what: String,
    },
    /// The caller asked for something impossible.
    #[error("invalid argument: {0}")]
    Argument(String),
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
    /// Whether reconnecting may help.
    #[must_use]
    pub fn is_connection_lost(&self) -> bool {
        match self {
            Self::Connect { .. }
            | Self::Socket { .. }
            | Self::Closed { .. }
            | Self::TimedOut { .. }
            | Self::Pdu { .. }
            | Self::Protocol { .. }
            | Self::Terminated { .. } => true,
            Self::Status { .. }
            | Self::Unusable { .. }
            | Self::Argument(_)
            | Self::System { .. } => false,
        }
    }

    /// The failed command's status.
    #[must_use]
    pub fn status(&self) -> Option<Status> {
        match self {
            Self::Status { status, .. } => Some(*status),
            _ => None,
        }
    }
}

fn hint(status: Status) -> &'static str {
    match status.code() {
        Status::CONNECT_INVALID_HOST => {
            "; this host's NQN is not on the export's list: allow it there"
        }
        Status::CONNECT_INVALID_PARAMETERS => {
            "; is the subsystem NQN right? `discover` lists those that this host may use"
        }
        Status::CAPACITY_EXCEEDED => "; the pool is full",
        Status::LBA_OUT_OF_RANGE => "; past the end of the namespace",
        _ => "",
    }
}
