//! Handlers of the pool and its devices.

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use utoipa::OpenApi;

use super::done;
use crate::api::extract::{Body, DeviceAt, Parameters};
use crate::daemon::{Daemon, Handle};
use crate::model::error::{ApiError, ErrorBody};
use crate::model::{
    CheckResult, DeviceAdd, DeviceDetails, DeviceInfo, Done, PoolCheck, PoolCreate, PoolDestroy,
    PoolInfo, PoolOpen, PoolUpdate, validate,
};

/// Creates the pool from devices.
#[utoipa::path(
    post,
    path = "/v1/pool",
    tag = "pool",
    request_body = PoolCreate,
    responses(
        (status = 201, description = "Made", body = PoolInfo),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn pool_create(
    State(daemon): State<Handle>,
    Body(body): Body<PoolCreate>,
) -> Result<(StatusCode, Json<PoolInfo>), ApiError> {
    validate::name("pool", &body.name)?;
    validate::device_specs(body.devices.iter())?;
    if body.devices.is_empty() {
        return Err(ApiError::invalid("a pool needs at least one device").hint(
            "list device specifications in `devices`, e.g. \"file:/var/lib/forebay/pool.img\"",
        ));
    }
    Ok((
        StatusCode::CREATED,
        Json(daemon.run(|daemon| daemon.pool_create(body)).await?),
    ))
}

/// Opens the recorded pool or the pool of the given devices; takes back devices that an open pool
/// misses. Hosts stay connected.
#[utoipa::path(
    post,
    path = "/v1/pool/open",
    tag = "pool",
    request_body = PoolOpen,
    responses(
        (status = 200, description = "Open", body = PoolInfo),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn pool_open(
    State(daemon): State<Handle>,
    Body(body): Body<PoolOpen>,
) -> Result<Json<PoolInfo>, ApiError> {
    validate::device_specs(body.devices.iter())?;
    Ok(Json(daemon.run(|daemon| daemon.pool_open(body)).await?))
}

/// Upgrades the labels of a pool of an older version to the current format. Hosts stay connected.
/// Older versions refuse the pool afterwards.
#[utoipa::path(
    post,
    path = "/v1/pool/upgrade",
    tag = "pool",
    responses(
        (status = 200, description = "The pool, with labels in the current format", body = PoolInfo),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn pool_upgrade(State(daemon): State<Handle>) -> Result<Json<PoolInfo>, ApiError> {
    Ok(Json(daemon.run(Daemon::pool_upgrade).await?))
}

/// The pool.
#[utoipa::path(
    get,
    path = "/v1/pool",
    tag = "pool",
    responses(
        (status = 200, description = "The current state", body = PoolInfo),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn pool_show(State(daemon): State<Handle>) -> Result<Json<PoolInfo>, ApiError> {
    Ok(Json(
        daemon.read(|owner| Ok(owner.reports.pool_show())).await?,
    ))
}

/// Changes the pool's settings.
#[utoipa::path(
    patch,
    path = "/v1/pool",
    tag = "pool",
    request_body = PoolUpdate,
    responses(
        (status = 200, description = "The current state", body = PoolInfo),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn pool_update(
    State(daemon): State<Handle>,
    Body(body): Body<PoolUpdate>,
) -> Result<Json<PoolInfo>, ApiError> {
    Ok(Json(
        daemon
            .change(|owner| async move { owner.reports.pool_update(body).await })
            .await?,
    ))
}

/// Checks the maps against the extents while the pool is in use, and frees leaked extents on
/// request.
#[utoipa::path(
    post,
    path = "/v1/pool/check",
    tag = "pool",
    request_body = PoolCheck,
    responses(
        (status = 200, description = "The result of the check", body = CheckResult),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn pool_check(
    State(daemon): State<Handle>,
    Body(body): Body<PoolCheck>,
) -> Result<Json<CheckResult>, ApiError> {
    Ok(Json(
        daemon
            .change(|owner| async move { owner.reports.check(body).await })
            .await?,
    ))
}

/// Destroys the named pool and wipes its labels. Refused while it has volumes or is in use, unless
/// the query says otherwise. A pool that can't be opened is only forgotten, if the query says so.
#[utoipa::path(
    delete,
    path = "/v1/pool",
    tag = "pool",
    params(
        PoolDestroy,
    ),
    responses(
        (status = 200, description = "Done", body = Done),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn pool_destroy(
    State(daemon): State<Handle>,
    Parameters(query): Parameters<PoolDestroy>,
) -> Result<Json<Done>, ApiError> {
    Ok(done(daemon.run(|daemon| daemon.pool_destroy(query)).await?))
}

/// The pool's devices.
#[utoipa::path(
    get,
    path = "/v1/devices",
    tag = "pool",
    responses(
        (status = 200, description = "The current state", body = Vec<DeviceInfo>),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn device_list(
    State(daemon): State<Handle>,
) -> Result<Json<Vec<DeviceInfo>>, ApiError> {
    Ok(Json(
        daemon.read(|owner| Ok(owner.reports.device_list())).await?,
    ))
}

/// One device, and the volumes with data there.
#[utoipa::path(
    get,
    path = "/v1/devices/{index}",
    tag = "pool",
    params(
        ("index" = u8, Path, description = "The device's index in the pool"),
    ),
    responses(
        (status = 200, description = "The current state", body = DeviceDetails),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn device_show(
    State(daemon): State<Handle>,
    DeviceAt(index): DeviceAt,
) -> Result<Json<DeviceDetails>, ApiError> {
    Ok(Json(
        daemon
            .read(move |owner| owner.reports.device_show(index))
            .await?,
    ))
}

/// Adds a device to the pool while it is in use.
#[utoipa::path(
    post,
    path = "/v1/devices",
    tag = "pool",
    request_body = DeviceAdd,
    responses(
        (status = 201, description = "Added", body = DeviceInfo),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn device_add(
    State(daemon): State<Handle>,
    Body(body): Body<DeviceAdd>,
) -> Result<(StatusCode, Json<DeviceInfo>), ApiError> {
    validate::device_specs([&body.spec].into_iter())?;
    Ok((
        StatusCode::CREATED,
        Json(
            daemon
                .change_with(|daemon, owner| async move { daemon.device_add(owner, body).await })
                .await?,
        ),
    ))
}

pub(super) fn routes() -> Router<Handle> {
    Router::new()
        .route(
            "/v1/pool",
            get(pool_show)
                .post(pool_create)
                .patch(pool_update)
                .delete(pool_destroy),
        )
        .route("/v1/pool/open", post(pool_open))
        .route("/v1/pool/upgrade", post(pool_upgrade))
        .route("/v1/pool/check", post(pool_check))
        .route("/v1/devices", get(device_list).post(device_add))
        .route("/v1/devices/{index}", get(device_show))
}

#[derive(OpenApi)]
#[openapi(paths(
    pool_create,
    pool_open,
    pool_upgrade,
    pool_show,
    pool_update,
    pool_check,
    pool_destroy,
    device_list,
    device_show,
    device_add
))]
struct Document;

pub(super) fn document() -> utoipa::openapi::OpenApi {
    Document::openapi()
}
