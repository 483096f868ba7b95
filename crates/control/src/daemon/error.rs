//! Why the daemon did not start, or did not end well. Converts from and to [`ApiError`].

use std::io;

use crate::model::error::ApiError;

/// Why the daemon did not start, or did not end well.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct DaemonError {
    message: String,
    hint: Option<String>,
}

impl DaemonError {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            hint: None,
        }
    }

    pub(crate) fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Suggests a remedy.
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

impl From<ApiError> for DaemonError {
    fn from(error: ApiError) -> Self {
        Self {
            message: error.message,
            hint: error.hint,
        }
    }
}

impl From<io::Error> for DaemonError {
    fn from(error: io::Error) -> Self {
        Self::new(error.to_string())
    }
}

impl From<DaemonError> for ApiError {
    fn from(error: DaemonError) -> Self {
        let reported = ApiError::unavailable(error.message);
        match error.hint {
            Some(hint) => reported.hint(hint),
            None => reported,
        }
    }
}
