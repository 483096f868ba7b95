//! Handlers of volumes.

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use axum::{Json, Router};
use utoipa::OpenApi;

use super::done;
use crate::api::extract::{Body, InTenant, OfVolume, Parameters};
use crate::daemon::Handle;
use crate::model::error::{ApiError, ErrorBody};
use crate::model::rbd::{ImageState, VolumeDelete};
use crate::model::{Done, Volume, VolumeCreate, VolumeUpdate, validate};

/// The volumes of all tenants.
#[utoipa::path(
    get,
    path = "/v1/volumes",
    tag = "volume",
    responses(
        (status = 200, description = "The current state", body = Vec<Volume>),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn volume_list_all(
    State(daemon): State<Handle>,
) -> Result<Json<Vec<Volume>>, ApiError> {
    Ok(Json(
        daemon.read(|owner| owner.base.volume_list(None)).await?,
    ))
}

/// A tenant's volumes.
#[utoipa::path(
    get,
    path = "/v1/tenants/{tenant}/volumes",
    tag = "volume",
    params(
        ("tenant" = String, Path, description = "Tenant"),
    ),
    responses(
        (status = 200, description = "The current state", body = Vec<Volume>),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn volume_list(
    State(daemon): State<Handle>,
    InTenant(tenant): InTenant,
) -> Result<Json<Vec<Volume>>, ApiError> {
    Ok(Json(
        daemon
            .read(move |owner| owner.base.volume_list(Some(&tenant)))
            .await?,
    ))
}

/// Creates a volume. It takes no space until it is written. With `rbd`, it shows an image in Ceph.
#[utoipa::path(
    post,
    path = "/v1/tenants/{tenant}/volumes",
    tag = "volume",
    params(
        ("tenant" = String, Path, description = "Tenant"),
    ),
    request_body = VolumeCreate,
    responses(
        (status = 201, description = "Made", body = Volume),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn volume_create(
    State(daemon): State<Handle>,
    InTenant(tenant): InTenant,
    Body(body): Body<VolumeCreate>,
) -> Result<(StatusCode, Json<Volume>), ApiError> {
    validate::name("volume", &body.name)?;
    Ok((
        StatusCode::CREATED,
        Json(
            daemon
                .change(|owner| async move { owner.volumes.volume_create(tenant, body).await })
                .await?,
        ),
    ))
}

/// One volume.
#[utoipa::path(
    get,
    path = "/v1/tenants/{tenant}/volumes/{volume}",
    tag = "volume",
    params(
        ("tenant" = String, Path, description = "Tenant"),
        ("volume" = String, Path, description = "Volume"),
    ),
    responses(
        (status = 200, description = "The current state", body = Volume),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn volume_show(
    State(daemon): State<Handle>,
    OfVolume(tenant, volume): OfVolume,
) -> Result<Json<Volume>, ApiError> {
    Ok(Json(
        daemon
            .read(move |owner| owner.base.volume_show(&tenant, &volume))
            .await?,
    ))
}

/// The image of a volume in Ceph, as its cluster describes it now.
#[utoipa::path(
    get,
    path = "/v1/tenants/{tenant}/volumes/{volume}/image",
    tag = "volume",
    params(
        ("tenant" = String, Path, description = "Tenant"),
        ("volume" = String, Path, description = "Volume"),
    ),
    responses(
        (status = 200, description = "The current state", body = ImageState),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn volume_image(
    State(daemon): State<Handle>,
    OfVolume(tenant, volume): OfVolume,
) -> Result<Json<ImageState>, ApiError> {
    Ok(Json(
        daemon
            .change(|owner| async move { owner.volumes.image_state(tenant, volume).await })
            .await?,
    ))
}

/// Changes a volume's size or its reservation, exported or not; connected hosts learn a new size.
#[utoipa::path(
    patch,
    path = "/v1/tenants/{tenant}/volumes/{volume}",
    tag = "volume",
    params(
        ("tenant" = String, Path, description = "Tenant"),
        ("volume" = String, Path, description = "Volume"),
    ),
    request_body = VolumeUpdate,
    responses(
        (status = 200, description = "The current state", body = Volume),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn volume_update(
    State(daemon): State<Handle>,
    OfVolume(tenant, volume): OfVolume,
    Body(body): Body<VolumeUpdate>,
) -> Result<Json<Volume>, ApiError> {
    if body.size_bytes.is_some() == body.reserved_bytes.is_some() {
        return Err(ApiError::invalid(
            "give either `size_bytes` or `reserved_bytes`, and only one of them",
        ));
    }
    Ok(Json(
        daemon
            .change(|owner| async move { owner.volumes.volume_update(tenant, volume, body).await })
            .await?,
    ))
}

/// Deletes a volume or a snapshot, and frees the space that nothing else needs. A volume's snapshots
/// stay. Of a volume in Ceph, the image stays unless the query says otherwise. Refused while it is
/// exported.
#[utoipa::path(
    delete,
    path = "/v1/tenants/{tenant}/volumes/{volume}",
    tag = "volume",
    params(
        ("tenant" = String, Path, description = "Tenant"),
        ("volume" = String, Path, description = "Volume"),
        VolumeDelete,
    ),
    responses(
        (status = 200, description = "Done", body = Done),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn volume_delete(
    State(daemon): State<Handle>,
    OfVolume(tenant, volume): OfVolume,
    Parameters(query): Parameters<VolumeDelete>,
) -> Result<Json<Done>, ApiError> {
    let deleted = format!("volume {tenant}/{volume} deleted");
    let stays = daemon
        .change(move |owner| async move {
            let volumes = &owner.volumes;
            volumes.volume_delete_as(tenant, volume, None, query).await
        })
        .await?;
    Ok(done(deleted + &stays))
}

pub(super) fn routes() -> Router<Handle> {
    Router::new()
        .route("/v1/volumes", get(volume_list_all))
        .route(
            "/v1/tenants/{tenant}/volumes",
            get(volume_list).post(volume_create),
        )
        .route(
            "/v1/tenants/{tenant}/volumes/{volume}",
            get(volume_show).patch(volume_update).delete(volume_delete),
        )
        .route(
            "/v1/tenants/{tenant}/volumes/{volume}/image",
            get(volume_image),
        )
}

#[derive(OpenApi)]
#[openapi(paths(
    volume_list_all,
    volume_list,
    volume_create,
    volume_show,
    volume_image,
    volume_update,
    volume_delete
))]
struct Document;

pub(super) fn document() -> utoipa::openapi::OpenApi {
    Document::openapi()
}
