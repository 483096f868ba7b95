//! Handlers of ports. The configuration creates their listeners.

use axum::extract::State;
use axum::routing::{get, patch};
use axum::{Json, Router};
use utoipa::OpenApi;

use crate::api::extract::{Body, PortAt};
use crate::daemon::Handle;
use crate::model::error::{ApiError, ErrorBody};
use crate::model::{Port, PortUpdate};

/// The addresses at which hosts connect, with their ANA states.
#[utoipa::path(
    get,
    path = "/v1/ports",
    tag = "port",
    responses(
        (status = 200, description = "The current state", body = Vec<Port>),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn port_list(State(daemon): State<Handle>) -> Result<Json<Vec<Port>>, ApiError> {
    Ok(Json(daemon.ask(|daemon| daemon.port_list()).await?))
}

/// Changes a port's ANA state; connected hosts are told. Making the last port inaccessible needs
/// `let_hosts_wait`.
#[utoipa::path(
    patch,
    path = "/v1/ports/{address}",
    tag = "port",
    params(
        ("address" = String, Path, description = "The port's address, e.g. 127.0.0.1:4420"),
    ),
    request_body = PortUpdate,
    responses(
        (status = 200, description = "The current state", body = Port),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn port_update(
    State(daemon): State<Handle>,
    PortAt(address): PortAt,
    Body(body): Body<PortUpdate>,
) -> Result<Json<Port>, ApiError> {
    let address = address.to_string();
    Ok(Json(
        daemon
            .change(|owner| async move { owner.ports.port_update(&address, body).await })
            .await?,
    ))
}

pub(super) fn routes() -> Router<Handle> {
    Router::new()
        .route("/v1/ports", get(port_list))
        .route("/v1/ports/{address}", patch(port_update))
}

#[derive(OpenApi)]
#[openapi(paths(port_list, port_update))]
struct Document;

pub(super) fn document() -> utoipa::openapi::OpenApi {
    Document::openapi()
}
