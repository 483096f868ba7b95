//! The handlers, one per route, and the router.
//!
//! Purpose: from an HTTP request to a call on the owner's [`Handle`] and back.
//! Design: a handler checks syntax, asks the owner, wraps the answer; it holds no state. Limits are
//! on the router: body size, and a time limit after which the caller is told that the operation may
//! still complete. Unknown routes and methods answer as JSON like everything else.
//! Not here: pool and devices (`pool_routes`), ports (`port_routes`), figures and events (`figure_routes`), who may call (`server`), what operations mean (the owner).

use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{get, patch, post, put};
use axum::{Json, Router};
use serde::Deserialize;
use utoipa::IntoParams;

use super::error::{ApiError, ErrorBody};
use super::extract::{Body, InTenant, OfExport, OfVolume, Parameters};
use super::figure_routes::{events, metrics_text, stats};
use super::model::{
    Done, Export, ExportCreate, ExportUpdate, Status, Tenant, TenantCreate, Volume, VolumeCreate,
    VolumeUpdate,
};
use super::pool_routes::{
    device_add, device_list, device_show, pool_check, pool_create, pool_destroy, pool_open,
    pool_show, pool_update, pool_upgrade,
};
use super::port_routes::{port_list, port_update};
use super::request::Handle;
use super::scheduling_routes::{
    calibration_delete, calibration_put, costs_delete, costs_put, costs_show, scheduling_show,
    scheduling_update, tenant_budget_delete, tenant_budget_patch, tenant_budget_put,
    volume_budget_delete, volume_budget_patch, volume_budget_put,
};
use super::transfer_routes::{transfer_end, transfer_put, volume_extents};
use super::{openapi, validate};

/// The largest request body.
pub const BODY_MAX_BYTES: usize = 256 * 1024;
/// How long a caller waits for the owner. Making a pool may have to wait for a dead engine's last
/// request, which is why it is generous.
pub const TIME_LIMIT: Duration = Duration::from_secs(60);

/// All routes.
pub(super) fn router(owner: Handle, time_limit: Duration) -> Router {
    Router::new()
        .route("/v1/openapi.json", get(document))
        .route("/v1/status", get(status))
        .route("/v1/stats", get(stats))
        .route("/v1/metrics", get(metrics_text))
        .route("/v1/events", get(events))
        .route("/v1/engine/replace", post(engine_replace))
        .route("/v1/shutdown", post(shutdown))
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
        .route("/v1/ports", get(port_list))
        .route("/v1/ports/{address}", patch(port_update))
        .route("/v1/tenants", get(tenant_list).post(tenant_create))
        .route(
            "/v1/tenants/{tenant}",
            get(tenant_show).delete(tenant_delete),
        )
        .route(
            "/v1/tenants/{tenant}/budget",
            put(tenant_budget_put)
                .patch(tenant_budget_patch)
                .delete(tenant_budget_delete),
        )
        .route(
            "/v1/tenants/{tenant}/volumes/{volume}/budget",
            put(volume_budget_put)
                .patch(volume_budget_patch)
                .delete(volume_budget_delete),
        )
        .route(
            "/v1/scheduling",
            get(scheduling_show).patch(scheduling_update),
        )
        .route(
            "/v1/scheduling/costs",
            get(costs_show).put(costs_put).delete(costs_delete),
        )
        .route(
            "/v1/scheduling/calibration",
            put(calibration_put).delete(calibration_delete),
        )
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
            "/v1/tenants/{tenant}/volumes/{volume}/extents",
            get(volume_extents),
        )
        .route(
            "/v1/tenants/{tenant}/volumes/{volume}/transfer",
            put(transfer_put).delete(transfer_end),
        )
        .route("/v1/exports", get(export_list).post(export_create))
        .route(
            "/v1/exports/{tenant}/{volume}",
            get(export_show).patch(export_update).delete(export_delete),
        )
        .route("/v1/exports/{tenant}/{volume}/resume", post(export_resume))
        .fallback(unknown_route)
        .method_not_allowed_fallback(unknown_method)
        .layer(DefaultBodyLimit::max(BODY_MAX_BYTES))
        .layer(middleware::from_fn_with_state(time_limit, limit_time))
        .with_state(owner)
}

pub(super) async fn limit_time(
    State(limit): State<Duration>,
    request: Request,
    next: Next,
) -> Response {
    match tokio::time::timeout(limit, next.run(request)).await {
        Ok(response) => response,
        Err(_) => ApiError::unavailable(format!(
            "the daemon did not answer within {} s",
            limit.as_secs_f64()
        ))
        .hint("the operation may still complete: look before repeating it")
        .with_status(StatusCode::GATEWAY_TIMEOUT),
    }
}

async fn unknown_route(request: Request) -> ApiError {
    ApiError::not_found(format!("there is no route `{}`", request.uri().path()))
        .hint("GET /v1/openapi.json lists the routes")
}

async fn unknown_method(request: Request) -> Response {
    ApiError::invalid(format!(
        "`{}` is not possible on `{}`",
        request.method(),
        request.uri().path()
    ))
    .hint("GET /v1/openapi.json lists the routes and their methods")
    .with_status(StatusCode::METHOD_NOT_ALLOWED)
}

pub(super) fn done(what: String) -> Json<Done> {
    Json(Done { done: what })
}

/// This document.
#[utoipa::path(
    get,
    path = "/v1/openapi.json",
    tag = "daemon",
    responses((status = 200, description = "OpenAPI", body = Object, content_type = "application/json"))
)]
pub(super) async fn document() -> Json<utoipa::openapi::OpenApi> {
    Json(openapi::document())
}

/// The daemon and its engine.
#[utoipa::path(
    get,
    path = "/v1/status",
    tag = "daemon",
    responses(
        (status = 200, description = "As it is", body = Status),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn status(State(owner): State<Handle>) -> Result<Json<Status>, ApiError> {
    Ok(Json(owner.status().await?))
}

/// Has another engine, of the program as it is installed now, go on where the running one is; hosts and machines keep their
/// connections. The answer comes when it serves.
#[utoipa::path(
    post,
    path = "/v1/engine/replace",
    tag = "daemon",
    responses(
        (status = 200, description = "Done", body = Done),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn engine_replace(State(owner): State<Handle>) -> Result<Json<Done>, ApiError> {
    Ok(done(owner.engine_replace().await?))
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
pub(super) async fn shutdown(State(owner): State<Handle>) -> Result<Json<Done>, ApiError> {
    owner.shutdown().await?;
    Ok(done("stopping".to_owned()))
}

/// All tenants.
#[utoipa::path(
    get,
    path = "/v1/tenants",
    tag = "tenant",
    responses(
        (status = 200, description = "As it is", body = Vec<Tenant>),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn tenant_list(
    State(owner): State<Handle>,
) -> Result<Json<Vec<Tenant>>, ApiError> {
    Ok(Json(owner.tenant_list().await?))
}

/// Makes a tenant.
#[utoipa::path(
    post,
    path = "/v1/tenants",
    tag = "tenant",
    request_body = TenantCreate,
    responses(
        (status = 201, description = "Made", body = Tenant),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn tenant_create(
    State(owner): State<Handle>,
    Body(body): Body<TenantCreate>,
) -> Result<(StatusCode, Json<Tenant>), ApiError> {
    validate::name("tenant", &body.name)?;
    Ok((
        StatusCode::CREATED,
        Json(owner.tenant_create(body.name).await?),
    ))
}

/// One tenant.
#[utoipa::path(
    get,
    path = "/v1/tenants/{tenant}",
    tag = "tenant",
    params(
        ("tenant" = String, Path, description = "Tenant"),
    ),
    responses(
        (status = 200, description = "As it is", body = Tenant),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn tenant_show(
    State(owner): State<Handle>,
    InTenant(tenant): InTenant,
) -> Result<Json<Tenant>, ApiError> {
    Ok(Json(owner.tenant_show(tenant).await?))
}

/// Ends a tenant. Refused while it has volumes.
#[utoipa::path(
    delete,
    path = "/v1/tenants/{tenant}",
    tag = "tenant",
    params(
        ("tenant" = String, Path, description = "Tenant"),
    ),
    responses(
        (status = 200, description = "Done", body = Done),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn tenant_delete(
    State(owner): State<Handle>,
    InTenant(tenant): InTenant,
) -> Result<Json<Done>, ApiError> {
    owner.tenant_delete(tenant.clone()).await?;
    Ok(done(format!("tenant {tenant} deleted")))
}

/// The volumes of all tenants.
#[utoipa::path(
    get,
    path = "/v1/volumes",
    tag = "volume",
    responses(
        (status = 200, description = "As it is", body = Vec<Volume>),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn volume_list_all(
    State(owner): State<Handle>,
) -> Result<Json<Vec<Volume>>, ApiError> {
    Ok(Json(owner.volume_list(None).await?))
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
        (status = 200, description = "As it is", body = Vec<Volume>),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn volume_list(
    State(owner): State<Handle>,
    InTenant(tenant): InTenant,
) -> Result<Json<Vec<Volume>>, ApiError> {
    Ok(Json(owner.volume_list(Some(tenant)).await?))
}

/// Makes a volume. It takes no space until it is written.
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
    State(owner): State<Handle>,
    InTenant(tenant): InTenant,
    Body(body): Body<VolumeCreate>,
) -> Result<(StatusCode, Json<Volume>), ApiError> {
    validate::name("volume", &body.name)?;
    Ok((
        StatusCode::CREATED,
        Json(owner.volume_create(tenant, body).await?),
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
        (status = 200, description = "As it is", body = Volume),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn volume_show(
    State(owner): State<Handle>,
    OfVolume(tenant, volume): OfVolume,
) -> Result<Json<Volume>, ApiError> {
    Ok(Json(owner.volume_show(tenant, volume).await?))
}

/// Grows a volume, exported or not (connected hosts are told), or changes its reservation.
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
        (status = 200, description = "As it is", body = Volume),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn volume_update(
    State(owner): State<Handle>,
    OfVolume(tenant, volume): OfVolume,
    Body(body): Body<VolumeUpdate>,
) -> Result<Json<Volume>, ApiError> {
    if body.size_bytes.is_some() == body.reserved_bytes.is_some() {
        return Err(ApiError::invalid(
            "give either `size_bytes` or `reserved_bytes`, one at a time",
        ));
    }
    Ok(Json(owner.volume_update(tenant, volume, body).await?))
}

/// Ends a volume and gives its space back. Refused while it is exported.
#[utoipa::path(
    delete,
    path = "/v1/tenants/{tenant}/volumes/{volume}",
    tag = "volume",
    params(
        ("tenant" = String, Path, description = "Tenant"),
        ("volume" = String, Path, description = "Volume"),
    ),
    responses(
        (status = 200, description = "Done", body = Done),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn volume_delete(
    State(owner): State<Handle>,
    OfVolume(tenant, volume): OfVolume,
) -> Result<Json<Done>, ApiError> {
    owner.volume_delete(tenant.clone(), volume.clone()).await?;
    Ok(done(format!("volume {tenant}/{volume} deleted")))
}

/// All exports.
#[utoipa::path(
    get,
    path = "/v1/exports",
    tag = "export",
    responses(
        (status = 200, description = "As it is", body = Vec<Export>),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn export_list(
    State(owner): State<Handle>,
) -> Result<Json<Vec<Export>>, ApiError> {
    Ok(Json(owner.export_list().await?))
}

/// Exports a volume over NVMe/TCP.
#[utoipa::path(
    post,
    path = "/v1/exports",
    tag = "export",
    request_body = ExportCreate,
    responses(
        (status = 201, description = "Made", body = Export),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn export_create(
    State(owner): State<Handle>,
    Body(body): Body<ExportCreate>,
) -> Result<(StatusCode, Json<Export>), ApiError> {
    validate::name("tenant", &body.tenant)?;
    validate::name("volume", &body.volume)?;
    validate::host_list(&body.hosts)?;
    validate::frontend(&body)?;
    Ok((StatusCode::CREATED, Json(owner.export_create(body).await?)))
}

/// One export.
#[utoipa::path(
    get,
    path = "/v1/exports/{tenant}/{volume}",
    tag = "export",
    params(
        ("tenant" = String, Path, description = "Tenant"),
        ("volume" = String, Path, description = "Volume"),
    ),
    responses(
        (status = 200, description = "As it is", body = Export),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn export_show(
    State(owner): State<Handle>,
    OfExport(tenant, volume): OfExport,
) -> Result<Json<Export>, ApiError> {
    Ok(Json(owner.export_show(tenant, volume).await?))
}

/// Changes who may connect. Refused while hosts are connected that may no longer connect, unless the body says otherwise.
#[utoipa::path(
    patch,
    path = "/v1/exports/{tenant}/{volume}",
    tag = "export",
    params(
        ("tenant" = String, Path, description = "Tenant"),
        ("volume" = String, Path, description = "Volume"),
    ),
    request_body = ExportUpdate,
    responses(
        (status = 200, description = "As it is", body = Export),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn export_update(
    State(owner): State<Handle>,
    OfExport(tenant, volume): OfExport,
    Body(body): Body<ExportUpdate>,
) -> Result<Json<Export>, ApiError> {
    validate::host_list(&body.add_hosts)?;
    Ok(Json(owner.export_update(tenant, volume, body).await?))
}

/// What `DELETE /v1/exports/{tenant}/{volume}` may be told.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ExportDelete {
    /// Go on even if hosts or a machine are connected: they lose the disk.
    #[serde(default)]
    disconnect_hosts: bool,
}

/// Ends an export. Refused while hosts or a machine are connected, unless the query says otherwise.
#[utoipa::path(
    delete,
    path = "/v1/exports/{tenant}/{volume}",
    tag = "export",
    params(
        ExportDelete,
        ("tenant" = String, Path, description = "Tenant"),
        ("volume" = String, Path, description = "Volume"),
    ),
    responses(
        (status = 200, description = "Done", body = Done),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn export_delete(
    State(owner): State<Handle>,
    OfExport(tenant, volume): OfExport,
    Parameters(query): Parameters<ExportDelete>,
) -> Result<Json<Done>, ApiError> {
    let at_devices = (owner)
        .export_delete(tenant.clone(), volume.clone(), query.disconnect_hosts)
        .await?;
    let left = match at_devices {
        0 => String::new(),
        n => format!("; {n} commands of its hosts are still at devices"),
    };
    Ok(done(format!("export of {tenant}/{volume} deleted{left}")))
}

/// Serves an export again that was quarantined because engines died of it.
#[utoipa::path(
    post,
    path = "/v1/exports/{tenant}/{volume}/resume",
    tag = "export",
    params(
        ("tenant" = String, Path, description = "Tenant"),
        ("volume" = String, Path, description = "Volume"),
    ),
    responses(
        (status = 200, description = "Served", body = Export),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn export_resume(
    State(owner): State<Handle>,
    OfExport(tenant, volume): OfExport,
) -> Result<Json<Export>, ApiError> {
    Ok(Json(owner.export_resume(tenant, volume).await?))
}
