//! Handlers of snapshots, clones and rollback. Snapshots are volumes for all other routes.

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use utoipa::OpenApi;

use crate::api::extract::{Body, InTenant, OfVolume};
use crate::daemon::Handle;
use crate::model::error::{ApiError, ErrorBody};
use crate::model::{SnapshotSpace, SnapshotsTake, Volume, VolumeClone, VolumeRollback, validate};

/// Takes snapshots of several volumes of a tenant at one moment. If one can't be taken, none is.
#[utoipa::path(
    post,
    path = "/v1/tenants/{tenant}/snapshots",
    tag = "volume",
    params(
        ("tenant" = String, Path, description = "Tenant"),
    ),
    request_body = SnapshotsTake,
    responses(
        (status = 201, description = "Taken, in the order of the request", body = Vec<Volume>),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn snapshots_take(
    State(daemon): State<Handle>,
    InTenant(tenant): InTenant,
    Body(body): Body<SnapshotsTake>,
) -> Result<(StatusCode, Json<Vec<Volume>>), ApiError> {
    validate::snapshots(&body.snapshots)?;
    Ok((
        StatusCode::CREATED,
        Json(
            daemon
                .change(|owner| async move {
                    owner.volumes.snapshots_take(tenant, body.snapshots).await
                })
                .await?,
        ),
    ))
}

/// A tenant's snapshots, each with the space that it alone holds.
#[utoipa::path(
    get,
    path = "/v1/tenants/{tenant}/snapshots",
    tag = "volume",
    params(
        ("tenant" = String, Path, description = "Tenant"),
    ),
    responses(
        (status = 200, description = "The current state", body = Vec<SnapshotSpace>),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn snapshots_list(
    State(daemon): State<Handle>,
    InTenant(tenant): InTenant,
) -> Result<Json<Vec<SnapshotSpace>>, ApiError> {
    Ok(Json(
        daemon
            .change(|owner| async move { owner.volumes.snapshots_list(tenant).await })
            .await?,
    ))
}

/// Makes a volume with a snapshot's content, for the same or another tenant. It takes no space
/// until it is written.
#[utoipa::path(
    post,
    path = "/v1/tenants/{tenant}/volumes/{volume}/clone",
    tag = "volume",
    params(
        ("tenant" = String, Path, description = "Tenant"),
        ("volume" = String, Path, description = "Snapshot"),
    ),
    request_body = VolumeClone,
    responses(
        (status = 201, description = "Made", body = Volume),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn snapshot_clone(
    State(daemon): State<Handle>,
    OfVolume(tenant, snapshot): OfVolume,
    Body(body): Body<VolumeClone>,
) -> Result<(StatusCode, Json<Volume>), ApiError> {
    validate::name("volume", &body.name)?;
    if let Some(tenant) = &body.tenant {
        validate::name("tenant", tenant)?;
    }
    Ok((
        StatusCode::CREATED,
        Json(
            daemon
                .change(|owner| async move {
                    owner.volumes.snapshot_clone(tenant, snapshot, body).await
                })
                .await?,
        ),
    ))
}

/// Gives a volume the content of one of its snapshots; later snapshots stay. Its present content is
/// lost. Refused while hosts or VMs are connected, unless the body says otherwise.
#[utoipa::path(
    post,
    path = "/v1/tenants/{tenant}/volumes/{volume}/rollback",
    tag = "volume",
    params(
        ("tenant" = String, Path, description = "Tenant"),
        ("volume" = String, Path, description = "Volume"),
    ),
    request_body = VolumeRollback,
    responses(
        (status = 200, description = "Rolled back", body = Volume),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn volume_rollback(
    State(daemon): State<Handle>,
    OfVolume(tenant, volume): OfVolume,
    Body(body): Body<VolumeRollback>,
) -> Result<Json<Volume>, ApiError> {
    validate::snapshot(&body.snapshot)?;
    Ok(Json(
        daemon
            .change(
                |owner| async move { owner.volumes.volume_roll_back(tenant, volume, body).await },
            )
            .await?,
    ))
}

pub(super) fn routes() -> Router<Handle> {
    Router::new()
        .route(
            "/v1/tenants/{tenant}/snapshots",
            get(snapshots_list).post(snapshots_take),
        )
        .route(
            "/v1/tenants/{tenant}/volumes/{volume}/clone",
            post(snapshot_clone),
        )
        .route(
            "/v1/tenants/{tenant}/volumes/{volume}/rollback",
            post(volume_rollback),
        )
}

#[derive(OpenApi)]
#[openapi(paths(snapshots_list, snapshots_take, snapshot_clone, volume_rollback))]
struct Document;

pub(super) fn document() -> utoipa::openapi::OpenApi {
    Document::openapi()
}
