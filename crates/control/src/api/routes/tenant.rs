//! Handlers of tenants.

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use axum::{Json, Router};
use utoipa::OpenApi;

use super::done;
use crate::api::extract::{Body, InTenant};
use crate::daemon::Handle;
use crate::model::error::{ApiError, ErrorBody};
use crate::model::{Done, Tenant, TenantCreate, validate};

/// All tenants.
#[utoipa::path(
    get,
    path = "/v1/tenants",
    tag = "tenant",
    responses(
        (status = 200, description = "The current state", body = Vec<Tenant>),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn tenant_list(
    State(daemon): State<Handle>,
) -> Result<Json<Vec<Tenant>>, ApiError> {
    Ok(Json(
        daemon.read(|owner| Ok(owner.base.tenant_list())).await?,
    ))
}

/// Creates a tenant.
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
    State(daemon): State<Handle>,
    Body(body): Body<TenantCreate>,
) -> Result<(StatusCode, Json<Tenant>), ApiError> {
    validate::name("tenant", &body.name)?;
    Ok((
        StatusCode::CREATED,
        Json(
            daemon
                .change(|owner| async move { owner.volumes.tenant_create(body.name).await })
                .await?,
        ),
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
        (status = 200, description = "The current state", body = Tenant),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn tenant_show(
    State(daemon): State<Handle>,
    InTenant(tenant): InTenant,
) -> Result<Json<Tenant>, ApiError> {
    Ok(Json(
        daemon
            .read(move |owner| owner.volumes.tenant_show(&tenant))
            .await?,
    ))
}

/// Deletes a tenant. Refused while it has volumes.
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
    State(daemon): State<Handle>,
    InTenant(tenant): InTenant,
) -> Result<Json<Done>, ApiError> {
    let done_text = format!("tenant {tenant} deleted");
    daemon
        .change(|owner| async move { owner.volumes.tenant_delete(tenant).await })
        .await?;
    Ok(done(done_text))
}

pub(super) fn routes() -> Router<Handle> {
    Router::new()
        .route("/v1/tenants", get(tenant_list).post(tenant_create))
        .route(
            "/v1/tenants/{tenant}",
            get(tenant_show).delete(tenant_delete),
        )
}

#[derive(OpenApi)]
#[openapi(paths(tenant_list, tenant_create, tenant_show, tenant_delete))]
struct Document;

pub(super) fn document() -> utoipa::openapi::OpenApi {
    Document::openapi()
}
