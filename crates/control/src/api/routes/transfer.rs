//! The handlers of images that go into volumes and come out of them.
//!
//! Purpose: announce them, and say where a volume may hold data.
//! Design: as in `routes`.
//! Not here: moving bytes (the program), permission (the owner).

use axum::extract::State;
use axum::routing::{get, put};
use axum::{Json, Router};
use utoipa::OpenApi;

use super::done;
use crate::api::extract::{Body, OfVolume, Parameters};
use crate::daemon::Handle;
use crate::model::error::{ApiError, ErrorBody};
use crate::model::{
    Done, ExtentsFrom, Transfer, TransferEnd, TransferPut, VolumeExtents, validate,
};
use crate::owner::Owner;

/// Announces that an image goes into a volume or comes out of it, over NVMe/TCP. Refused while the volume is in use, or
/// holds data that the body does not allow to overwrite. The host is let in, through an export of the daemon's own if there is
/// none, until the transfer ends. Runs out after 30 s, unless it is renewed.
#[utoipa::path(
    put,
    path = "/v1/tenants/{tenant}/volumes/{volume}/transfer",
    tag = "volume",
    params(
        ("tenant" = String, Path, description = "Tenant"),
        ("volume" = String, Path, description = "Volume"),
    ),
    request_body = TransferPut,
    responses(
        (status = 200, description = "How the host gets to the volume", body = Transfer),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn transfer_put(
    State(daemon): State<Handle>,
    OfVolume(tenant, volume): OfVolume,
    Body(body): Body<TransferPut>,
) -> Result<Json<Transfer>, ApiError> {
    validate::host_nqn(&body.host)?;
    Ok(Json(
        daemon
            .change(|owner| async move { owner.transfers.transfer_put(tenant, volume, body).await })
            .await?,
    ))
}

/// Where the volume may hold data, a page at a time. What a connected host writes meanwhile may be missing.
#[utoipa::path(
    get,
    path = "/v1/tenants/{tenant}/volumes/{volume}/extents",
    tag = "volume",
    params(
        ExtentsFrom,
        ("tenant" = String, Path, description = "Tenant"),
        ("volume" = String, Path, description = "Volume"),
    ),
    responses(
        (status = 200, description = "As it is", body = VolumeExtents),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn volume_extents(
    State(daemon): State<Handle>,
    OfVolume(tenant, volume): OfVolume,
    Parameters(from): Parameters<ExtentsFrom>,
) -> Result<Json<VolumeExtents>, ApiError> {
    let extents = move |owner: &Owner| owner.base.volume_extents(&tenant, &volume, from.from_bytes);
    Ok(Json(daemon.read(extents).await?))
}

/// The image is in or out, or will not be.
#[utoipa::path(
    delete,
    path = "/v1/tenants/{tenant}/volumes/{volume}/transfer",
    tag = "volume",
    params(
        TransferEnd,
        ("tenant" = String, Path, description = "Tenant"),
        ("volume" = String, Path, description = "Volume"),
    ),
    responses(
        (status = 200, description = "Done", body = Done),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn transfer_end(
    State(daemon): State<Handle>,
    OfVolume(tenant, volume): OfVolume,
    Parameters(query): Parameters<TransferEnd>,
) -> Result<Json<Done>, ApiError> {
    let ended = format!("the transfer of {tenant}/{volume} has ended");
    daemon
        .change(|owner| async move {
            owner
                .transfers
                .transfer_end(&tenant, &volume, &query.host)
                .await
        })
        .await?;
    Ok(done(ended))
}

pub(super) fn routes() -> Router<Handle> {
    Router::new()
        .route(
            "/v1/tenants/{tenant}/volumes/{volume}/extents",
            get(volume_extents),
        )
        .route(
            "/v1/tenants/{tenant}/volumes/{volume}/transfer",
            put(transfer_put).delete(transfer_end),
        )
}

#[derive(OpenApi)]
#[openapi(paths(transfer_put, volume_extents, transfer_end))]
struct Document;

pub(super) fn document() -> utoipa::openapi::OpenApi {
    Document::openapi()
}
