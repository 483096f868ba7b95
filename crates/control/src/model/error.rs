//! The API's only error type. Each kind has one HTTP status; the body is always
//! `{"error":{"kind":..,"message":..,"hint":..}}`. Errors of pool, engine and devices are converted
//! where they are known.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The kind of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The named object does not exist.
    NotFound,
    /// It exists already.
    Exists,
    /// Something else uses it, and must stop first.
    InUse,
    /// The request itself is wrong.
    Invalid,
    /// No space, or a limit is reached.
    NoSpace,
    /// Stored data is damaged.
    Damaged,
    /// Something needed is not available now; trying again may help.
    Unavailable,
    /// The caller may not do this.
    Forbidden,
    /// A defect in Forebay.
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

/// An error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// The kind, for programs.
    pub kind: ErrorKind,
    /// The problem, for people.
    pub message: String,
    /// A remedy, for people.
    pub hint: Option<String>,
}

/// The body around an [`ApiError`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// The error.
    pub error: ApiError,
}

impl ApiError {
    /// An error without a hint.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            hint: None,
        }
    }

    /// Adds a remedy.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The named object does not exist.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::NotFound, message)
    }

    /// It exists already.
    pub fn exists(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Exists, message)
    }

    /// Something else uses it.
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

    /// Stored data is damaged.
    pub fn damaged(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Damaged, message)
    }

    /// Not available now.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unavailable, message)
    }

    /// The caller may not do this.
    pub fn forbidden(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Forbidden, message)
    }

    /// A defect in Forebay.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    /// Answers with a more specific HTTP status.
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
