//! How a command fails: a message and perhaps a hint.
//!
//! The exit status is 1 for a refusal, 3 if the daemon does not answer, 4 for not found and 5 for
//! an existing object; clap exits with 2 on usage errors.

use std::any::Any;
use std::fmt::{self, Display};
use std::io::{self, Write as _};

use forebay_control::api::client::ClientError;
use forebay_control::model::error::ErrorKind;

use crate::word::word;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Failed,
    Refused(ErrorKind),
    Unreachable,
    Unwell(u8),
}

impl Kind {
    pub(crate) fn exit_code(self) -> u8 {
        match self {
            Self::Refused(ErrorKind::NotFound) => 4,
            Self::Refused(ErrorKind::Exists) => 5,
            Self::Failed | Self::Refused(_) => 1,
            Self::Unreachable => 3,
            Self::Unwell(code) => code,
        }
    }

    fn word(self) -> String {
        match self {
            Self::Refused(kind) => word(&kind),
            Self::Unreachable => "unreachable".to_owned(),
            Self::Failed | Self::Unwell(_) => "failed".to_owned(),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    hint: Option<String>,
    kind: Kind,
}

pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            hint: None,
            kind: Kind::Failed,
        }
    }

    /// As the daemon would refuse it.
    pub(crate) fn refused(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind: Kind::Refused(kind),
            ..Self::new(message)
        }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::refused(ErrorKind::Invalid, message)
    }

    /// A failed check, reported only by the exit status.
    pub(crate) fn unwell(code: u8) -> Self {
        Self {
            kind: Kind::Unwell(code),
            ..Self::new("")
        }
    }

    pub(crate) fn unreachable(self) -> Self {
        Self {
            kind: Kind::Unreachable,
            ..self
        }
    }

    pub(crate) fn exit_code(&self) -> u8 {
        self.kind.exit_code()
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    pub(crate) fn or_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint.get_or_insert_with(|| hint.into());
        self
    }

    pub(crate) fn also_hint(mut self, hint: impl Display) -> Self {
        self.hint = Some(match self.hint {
            Some(first) => format!("{first}; {hint}"),
            None => hint.to_string(),
        });
        self
    }

    /// With `json`, as the API formats errors.
    pub(crate) fn print(&self, json: bool) {
        if matches!(self.kind, Kind::Unwell(_)) {
            return;
        }
        let mut stderr = std::io::stderr().lock();
        if json {
            let _ = writeln!(
                stderr,
                "{}",
                error_json(&self.kind.word(), &self.message, self.hint.as_deref())
            );
            return;
        }
        let _ = writeln!(stderr, "error: {}", self.message);
        if let Some(hint) = &self.hint {
            let _ = writeln!(stderr, "hint: {hint}");
        }
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        Self {
            hint: error.hint(),
            message: error.to_string(),
            kind: match &error {
                ClientError::Refused(refused) => Kind::Refused(refused.kind),
                ClientError::NoDaemon { .. } | ClientError::Answer { .. } => Kind::Unreachable,
            },
        }
    }
}

/// An error in the API's form: `{"error":{"kind":..,"message":..,"hint":..}}`.
pub(crate) fn error_json(kind: &str, message: &str, hint: Option<&str>) -> String {
    serde_json::json!({"error": {"kind": kind, "message": message, "hint": hint}}).to_string()
}

/// A missing or existing file has one kind everywhere.
fn kind_of(error: &dyn Any) -> Kind {
    let io = error.downcast_ref::<io::Error>().map(io::Error::kind);
    match io {
        Some(io::ErrorKind::NotFound) => Kind::Refused(ErrorKind::NotFound),
        Some(io::ErrorKind::AlreadyExists) => Kind::Refused(ErrorKind::Exists),
        _ => Kind::Failed,
    }
}

pub(crate) trait While<T> {
    /// Turns the error into `can't <doing>: <error>`.
    fn while_doing(self, doing: impl Display) -> Outcome<T>;
}

impl<T, E: Display + 'static> While<T> for Result<T, E> {
    fn while_doing(self, doing: impl Display) -> Outcome<T> {
        self.map_err(|error| Failure {
            kind: kind_of(&error),
            ..Failure::new(format!("can't {doing}: {error}"))
        })
    }
}
