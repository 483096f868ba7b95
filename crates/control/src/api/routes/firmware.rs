//! Handlers of firmware slots.

use std::path::PathBuf;
use std::rc::Rc;

use axum::extract::State;
use axum::routing::{get, post};
use axum::{Json, Router};
use utoipa::OpenApi;

use super::done;
use crate::api::extract::Body;
use crate::daemon::{Daemon, Handle};
use crate::model::Done;
use crate::model::error::{ApiError, ErrorBody};
use crate::model::firmware::{FirmwareActivate, FirmwareInstall, FirmwareSlots};

/// The firmware slots.
#[utoipa::path(
    get,
    path = "/v1/firmware",
    tag = "daemon",
    responses(
        (status = 200, description = "The current state", body = FirmwareSlots),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn firmware_slots(
    State(daemon): State<Handle>,
) -> Result<Json<FirmwareSlots>, ApiError> {
    Ok(Json(
        daemon
            .ask(|daemon| daemon.firmware_commands().slots())
            .await?,
    ))
}

/// Verifies a firmware image and stores it in slot 2; then replaces the running engine by one of
/// its program, unless that shall wait. Hosts and VMs keep their connections.
#[utoipa::path(
    post,
    path = "/v1/firmware/install",
    tag = "daemon",
    request_body = FirmwareInstall,
    responses(
        (status = 200, description = "Done", body = Done),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn firmware_install(
    State(daemon): State<Handle>,
    Body(body): Body<FirmwareInstall>,
) -> Result<Json<Done>, ApiError> {
    let path = PathBuf::from(body.path);
    if !path.is_absolute() {
        return Err(ApiError::invalid("the path of an image must be absolute"));
    }
    let act = async move |daemon: Rc<Daemon>| -> Result<String, ApiError> {
        Ok(daemon
            .firmware_commands()
            .install(path, body.at_next_start)
            .await?)
    };
    Ok(done(daemon.run(act).await?))
}

/// Replaces the running engine by one of another slot's program, or lets the next engine start from
/// that slot. Hosts and VMs keep their connections.
#[utoipa::path(
    post,
    path = "/v1/firmware/activate",
    tag = "daemon",
    request_body = FirmwareActivate,
    responses(
        (status = 200, description = "Done", body = Done),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn firmware_activate(
    State(daemon): State<Handle>,
    Body(body): Body<FirmwareActivate>,
) -> Result<Json<Done>, ApiError> {
    let act = async move |daemon: Rc<Daemon>| -> Result<String, ApiError> {
        Ok(daemon
            .firmware_commands()
            .activate(body.slot, body.at_next_start)
            .await?)
    };
    Ok(done(daemon.run(act).await?))
}

pub(super) fn routes() -> Router<Handle> {
    Router::new()
        .route("/v1/firmware", get(firmware_slots))
        .route("/v1/firmware/install", post(firmware_install))
        .route("/v1/firmware/activate", post(firmware_activate))
}

#[derive(OpenApi)]
#[openapi(paths(firmware_slots, firmware_install, firmware_activate))]
struct Document;

pub(super) fn document() -> utoipa::openapi::OpenApi {
    Document::openapi()
}
