//! The API's one error type.
//!
//! Purpose: each refusal says what is wrong (`message`) and, where there is something to do, what
//! (`hint`); `kind` is for programs.
//! Design: the kinds are few and map one to one on an HTTP status; the body is always
//! `{"error":{"kind":..,"message":..,"hint":..}}`.
//! Not here: the errors of pool, engine and devices; whoever owns those words turns them into these.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What sort of refusal it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// What was named does not exist.
    NotFound,
    /// It exists already.
    Exists,
    /// It is used by something else, which has to go first.
    InUse,
    /// The request itself is wrong.
    Invalid,
    /// No space, or a limit is reached.
    NoSpace,
    /// Stored data is not what it must be.
    Damaged,
    /// Not now: something that is needed isn't there; trying again may help.
    Unavailable,
    /// The caller may not do this.
    Forbidden,
    /// A defect of ours.
    Internal,
}

impl ErrorKind {
    /// The HTTP status for this kind.
    #[must_use]
    pub fn status(self) -> StatusCode {
        match self {
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::Exists | Self::InUse => StatusCode::CONFLICT,
            Self::Invalid => StatusCode::BAD_REQUEST,
            Self::NoSpace => StatusCode::INSUFFICIENT_STORAGE,
            Self::Damaged | Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Self::Forbidden => StatusCode::FORBIDDEN,
        }
    }
}

/// A refusal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// What sort of refusal it is.
    pub kind: ErrorKind,
    /// What is wrong, for people.
    pub message: String,
    /// What to do about it, for people.
    pub hint: Option<String>,
}

/// The body around an [`ApiError`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// The refusal.
    pub error: ApiError,
}

impl ApiError {
    /// A refusal without a hint.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            hint: None,
        }
    }

    /// Adds what to do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// What was named does not exist.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::NotFound, message)
    }

    /// It exists already.
    pub fn exists(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Exists, message)
    }

    /// It is used by something else.
    pub fn in_use(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InUse, message)
    }

    /// The request itself is wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    /// No space, or a limit is reached.
    pub fn no_space(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::NoSpace, message)
    }

    /// Stored data is not what it must be.
    pub fn damaged(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Damaged, message)
    }

    /// Not now.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unavailable, message)
    }

    /// The caller may not do this.
    pub fn forbidden(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Forbidden, message)
    }

    /// A defect of ours.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    /// The same refusal under a more particular HTTP status.
    pub(crate) fn with_status(self, status: StatusCode) -> Response {
        (status, Json(ErrorBody { error: self })).into_response()
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = self.kind.status();
        self.with_status(status)
    }
}
