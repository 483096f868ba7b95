//! Handlers of image transfers, and of the ranges where a volume may hold data.

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

/// Announces that an image is written to a volume or read from it, over NVMe/TCP. Refused while the
/// volume is in use, or if it holds data that the body does not allow to overwrite. The host gets
/// access until the transfer ends, through an internal export if the volume has none. Expires after
/// 30 s unless renewed.
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
        (status = 200, description = "How the host reaches the volume", body = Transfer),
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

/// The ranges where the volume may hold data, in pages. Concurrent writes by a connected host may
/// be missing.
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
        (status = 200, description = "The current state", body = VolumeExtents),
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

/// Ends a transfer, complete or not.
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
