//! How a command fails.
//!
//! Purpose: every failure that reaches the user is one sentence of what went wrong and, where there
//! is something to do, one of what to do.
//! Design: a pair of texts; errors of other layers are turned into it where the command knows what it
//! was doing. `main` prints it as `error:` and `hint:`, or as JSON. The exit status is 1 for a refusal, 3 for a daemon
//! that does not answer, 4 for what is not found, 5 for what exists already; usage errors are clap's, 2.
//! Not here: which hint belongs to which error of the daemon; the daemon sends those.

use std::any::Any;
use std::fmt::{self, Display};
use std::io::{self, Write as _};

use forebay_control::api::client::ClientError;
use forebay_control::model::error::ErrorKind;

use crate::word::word;

/// What sort of failure it is: the exit status, and a word for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The command itself failed.
    Failed,
    /// The daemon refused.
    Refused(ErrorKind),
    /// No daemon answers.
    Unreachable,
    /// `status --check` has found something, and has shown it.
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

/// A failure, as the user sees it.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    hint: Option<String>,
    kind: Kind,
}

/// What a command returns.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// A failure without a hint.
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            hint: None,
            kind: Kind::Failed,
        }
    }

    /// What the daemon would refuse too, in the same words for programs.
    pub(crate) fn refused(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind: Kind::Refused(kind),
            ..Self::new(message)
        }
    }

    /// An argument or a file that can't be used.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::refused(ErrorKind::Invalid, message)
    }

    /// A check that has shown what is wrong, for programs to see by the exit status.
    pub(crate) fn unwell(code: u8) -> Self {
        Self {
            kind: Kind::Unwell(code),
            ..Self::new("")
        }
    }

    /// The same, as one that says nothing of the daemon's health.
    pub(crate) fn unreachable(self) -> Self {
        Self {
            kind: Kind::Unreachable,
            ..self
        }
    }

    pub(crate) fn exit_code(&self) -> u8 {
        self.kind.exit_code()
    }

    /// Adds what to do about it.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds what to do about it, if nobody knew better.
    pub(crate) fn or_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint.get_or_insert_with(|| hint.into());
        self
    }

    /// Adds one thing more to do about it.
    pub(crate) fn also_hint(mut self, hint: impl Display) -> Self {
        self.hint = Some(match self.hint {
            Some(first) => format!("{first}; {hint}"),
            None => hint.to_string(),
        });
        self
    }

    /// Prints it to stderr, as the API writes errors if `json`.
    pub(crate) fn print(&self, json: bool) {
        if matches!(self.kind, Kind::Unwell(_)) {
            return;
        }
        let mut stderr = std::io::stderr().lock();
        // Nothing can be done when stderr is closed.
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

/// What sort of failure an error of the system is: a file that is missing, or there already, is that everywhere.
fn kind_of(error: &dyn Any) -> Kind {
    let io = error.downcast_ref::<io::Error>().map(io::Error::kind);
    match io {
        Some(io::ErrorKind::NotFound) => Kind::Refused(ErrorKind::NotFound),
        Some(io::ErrorKind::AlreadyExists) => Kind::Refused(ErrorKind::Exists),
        _ => Kind::Failed,
    }
}

/// Says what was being done when something else went wrong.
pub(crate) trait While<T> {
    /// Prefixes the error with `doing`: `can't <doing>: <error>`.
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
