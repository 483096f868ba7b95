//! How a command fails.
//!
//! Purpose: every failure that reaches the user is one sentence of what went wrong and, where there
//! is something to do, one of what to do.
//! Design: a pair of texts; errors of other layers are turned into it where the command knows what it
//! was doing. `main` prints it as `error:` and `hint:` and exits with 1 (usage errors are clap's, 2).
//! Not here: which hint belongs to which error of the daemon; the daemon sends those.

use std::fmt::{self, Display};
use std::io::Write as _;

use forebay_control::api::client::ClientError;

/// A failure, as the user sees it.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    hint: Option<String>,
}

/// What a command returns.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// A failure without a hint.
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            hint: None,
        }
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

    /// Prints it to stderr.
    pub(crate) fn print(&self) {
        let mut stderr = std::io::stderr().lock();
        // Nothing can be done when stderr is closed.
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
        }
    }
}

/// Says what was being done when something else went wrong.
pub(crate) trait While<T> {
    /// Prefixes the error with `doing`: `can't <doing>: <error>`.
    fn while_doing(self, doing: impl Display) -> Outcome<T>;
}

impl<T, E: Display> While<T> for Result<T, E> {
    fn while_doing(self, doing: impl Display) -> Outcome<T> {
        self.map_err(|error| Failure::new(format!("can't {doing}: {error}")))
    }
}
