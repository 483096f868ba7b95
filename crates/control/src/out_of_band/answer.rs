//! The outcome of a command.

use forebay_nvme::mi::{MiRefusal, MiResponse, MiStatus};
use forebay_nvme::{Cqe, Status};

/// An answer, with its data.
#[derive(Debug, Clone)]
pub(super) struct CommandAnswer {
    kind: Kind,
    /// The line's transmission unit from the next message on, if it changes.
    pub(super) unit_bytes: Option<u16>,
}

#[derive(Debug, Clone)]
enum Kind {
    Command { value: u32, data: Vec<u8> },
    Admin { cqe: Cqe, data: Vec<u8> },
    Refused(MiRefusal),
}

impl From<Kind> for CommandAnswer {
    fn from(kind: Kind) -> Self {
        Self {
            kind,
            unit_bytes: None,
        }
    }
}

impl From<MiRefusal> for CommandAnswer {
    fn from(refusal: MiRefusal) -> Self {
        Kind::Refused(refusal).into()
    }
}

impl CommandAnswer {
    /// A refusal without further fields.
    pub(super) fn status(status: MiStatus) -> Self {
        MiRefusal::Status(status).into()
    }

    /// A command of the Management Interface succeeded.
    pub(super) fn command(value: u32, data: impl Into<Vec<u8>>) -> Self {
        let data = data.into();
        Kind::Command { value, data }.into()
    }

    /// A controller completed an Admin command.
    pub(super) fn admin(status: Status, result: u64, data: Vec<u8>) -> Self {
        let cqe = Cqe::new(result, 0, 0, 0, status);
        Kind::Admin { cqe, data }.into()
    }

    /// Whether it is not a refusal or a failure.
    pub(super) fn succeeded(&self) -> bool {
        !matches!(self.kind, Kind::Refused(_)) && self.failure().is_none()
    }

    /// The status of an Admin command that failed.
    pub(super) fn failure(&self) -> Option<Status> {
        match &self.kind {
            Kind::Admin { cqe, .. } => Some(cqe.status()).filter(|s| *s != Status::SUCCESS),
            Kind::Command { .. } | Kind::Refused(_) => None,
        }
    }

    pub(super) fn response(&self) -> MiResponse<'_> {
        match &self.kind {
            Kind::Command { value, data } => MiResponse::Command {
                value: *value,
                data,
            },
            Kind::Admin { cqe, data } => MiResponse::Admin { cqe: *cqe, data },
            Kind::Refused(refusal) => MiResponse::Refused(*refusal),
        }
    }
}
