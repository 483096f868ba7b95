//! Handlers of the daemon and its engine: status, replacement, stop.

use axum::extract::State;
use axum::routing::{get, post};
use axum::{Json, Router};
use utoipa::OpenApi;

use super::done;
use crate::daemon::Handle;
use crate::model::error::{ApiError, ErrorBody};
use crate::model::{Done, Status};

/// The daemon and its engine.
#[utoipa::path(
    get,
    path = "/v1/status",
    tag = "daemon",
    responses(
        (status = 200, description = "The current state", body = Status),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn status(State(daemon): State<Handle>) -> Result<Json<Status>, ApiError> {
    Ok(Json(daemon.ask(|daemon| daemon.status()).await?))
}

/// Replaces the running engine by one of the installed program; hosts and VMs keep their
/// connections. The answer comes when the new engine serves.
#[utoipa::path(
    post,
    path = "/v1/engine/replace",
    tag = "daemon",
    responses(
        (status = 200, description = "Done", body = Done),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn engine_replace(State(daemon): State<Handle>) -> Result<Json<Done>, ApiError> {
    Ok(done(
        daemon
            .change_with(|daemon, _| async move { daemon.engine_replace().await })
            .await?,
    ))
}

/// Stops engine and daemon in good order; the answer comes before the stop.
#[utoipa::path(
    post,
    path = "/v1/shutdown",
    tag = "daemon",
    responses(
        (status = 200, description = "Done", body = Done),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn shutdown(State(daemon): State<Handle>) -> Result<Json<Done>, ApiError> {
    daemon.shutdown().await?;
    Ok(done("stopping".to_owned()))
}

pub(super) fn routes() -> Router<Handle> {
    Router::new()
        .route("/v1/status", get(status))
        .route("/v1/engine/replace", post(engine_replace))
        .route("/v1/shutdown", post(shutdown))
}

#[derive(OpenApi)]
#[openapi(paths(status, engine_replace, shutdown))]
struct Document;

pub(super) fn document() -> utoipa::openapi::OpenApi {
    Document::openapi()
}
