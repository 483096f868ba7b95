//! The handlers of ports: the addresses at which hosts connect.
//!
//! Purpose: as in `routes`.
//! Design: as in `routes`.
//! Not here: listeners are made by the configuration, not by the API.

use std::net::SocketAddr;

use axum::Json;
use axum::extract::State;

use super::error::{ApiError, ErrorBody};
use super::extract::{Body, PortAt};
use super::model::{Port, PortUpdate};
use super::request::Handle;

/// The addresses at which hosts connect, and how hosts should use them.
#[utoipa::path(
    get,
    path = "/v1/ports",
    tag = "port",
    responses(
        (status = 200, description = "As it is", body = Vec<Port>),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn port_list(State(owner): State<Handle>) -> Result<Json<Vec<Port>>, ApiError> {
    Ok(Json(owner.port_list().await?))
}

/// Changes how hosts should use a port; connected hosts are told. Making the last one inaccessible needs
/// `let_hosts_wait`.
#[utoipa::path(
    patch,
    path = "/v1/ports/{address}",
    tag = "port",
    params(
        ("address" = String, Path, description = "Its address, e.g. 127.0.0.1:4420"),
    ),
    request_body = PortUpdate,
    responses(
        (status = 200, description = "As it is", body = Port),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn port_update(
    State(owner): State<Handle>,
    PortAt(address): PortAt,
    Body(body): Body<PortUpdate>,
) -> Result<Json<Port>, ApiError> {
    let address: SocketAddr = address;
    Ok(Json(owner.port_update(address, body).await?))
}
