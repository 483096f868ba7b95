//! The handlers for images that go into volumes and come out of them.
//!
//! Purpose: from an HTTP request to a call on the owner's [`Handle`] and back.
//! Design: as in `routes`, which has the table of routes.
//! Not here: moving bytes (the program), permission (the owner).

use axum::Json;
use axum::extract::State;

use super::error::{ApiError, ErrorBody};
use super::extract::{Body, OfVolume, Parameters};
use super::model::{Done, ExtentsFrom, Transfer, TransferEnd, TransferPut, VolumeExtents};
use super::request::Handle;
use super::routes::done;
use super::validate;

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
    State(owner): State<Handle>,
    OfVolume(tenant, volume): OfVolume,
    Body(body): Body<TransferPut>,
) -> Result<Json<Transfer>, ApiError> {
    validate::host_nqn(&body.host)?;
    Ok(Json(owner.transfer_put(tenant, volume, body).await?))
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
    State(owner): State<Handle>,
    OfVolume(tenant, volume): OfVolume,
    Parameters(from): Parameters<ExtentsFrom>,
) -> Result<Json<VolumeExtents>, ApiError> {
    let extents = owner.volume_extents(tenant, volume, from.from_bytes);
    Ok(Json(extents.await?))
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
    State(owner): State<Handle>,
    OfVolume(tenant, volume): OfVolume,
    Parameters(query): Parameters<TransferEnd>,
) -> Result<Json<Done>, ApiError> {
    (owner)
        .transfer_end(tenant.clone(), volume.clone(), query.host)
        .await?;
    Ok(done(format!("the transfer of {tenant}/{volume} has ended")))
}
