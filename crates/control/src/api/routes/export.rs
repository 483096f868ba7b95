//! Handlers of exports.

use std::rc::Rc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use utoipa::{IntoParams, OpenApi};

use super::done;
use crate::api::extract::{Body, OfExport, Parameters};
use crate::daemon::Handle;
use crate::model::error::{ApiError, ErrorBody};
use crate::model::{Done, Export, ExportCreate, ExportUpdate, validate};
use crate::owner::Owner;

/// All exports.
#[utoipa::path(
    get,
    path = "/v1/exports",
    tag = "export",
    responses(
        (status = 200, description = "The current state", body = Vec<Export>),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn export_list(
    State(daemon): State<Handle>,
) -> Result<Json<Vec<Export>>, ApiError> {
    Ok(Json(
        daemon.read(|owner| Ok(owner.exports.export_list())).await?,
    ))
}

/// Exports a volume to hosts or to a VM. They can only read a snapshot.
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
    State(daemon): State<Handle>,
    Body(body): Body<ExportCreate>,
) -> Result<(StatusCode, Json<Export>), ApiError> {
    validate::name("tenant", &body.tenant)?;
    validate::volume(&body.volume)?;
    validate::host_list(&body.hosts)?;
    validate::frontend(&body)?;
    Ok((
        StatusCode::CREATED,
        Json(
            daemon
                .change(|owner| async move { owner.exports.export_create(body).await })
                .await?,
        ),
    ))
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
        (status = 200, description = "The current state", body = Export),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn export_show(
    State(daemon): State<Handle>,
    OfExport(tenant, volume): OfExport,
) -> Result<Json<Export>, ApiError> {
    Ok(Json(
        daemon
            .read(move |owner| owner.exports.export_show(&tenant, &volume))
            .await?,
    ))
}

/// Changes which hosts may connect. Refused if connected hosts would lose access, unless the body
/// says otherwise.
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
        (status = 200, description = "The current state", body = Export),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn export_update(
    State(daemon): State<Handle>,
    OfExport(tenant, volume): OfExport,
    Body(body): Body<ExportUpdate>,
) -> Result<Json<Export>, ApiError> {
    validate::host_list(&body.add_hosts)?;
    Ok(Json(
        daemon
            .change(|owner| async move { owner.exports.export_update(tenant, volume, body).await })
            .await?,
    ))
}

/// The query of `DELETE /v1/exports/{tenant}/{volume}`.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ExportDelete {
    /// Go on even if hosts or a VM are connected: they lose the disk.
    #[serde(default)]
    disconnect_hosts: bool,
}

/// Deletes an export. Refused while hosts or a VM are connected, unless the query says otherwise.
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
    State(daemon): State<Handle>,
    OfExport(tenant, volume): OfExport,
    Parameters(query): Parameters<ExportDelete>,
) -> Result<Json<Done>, ApiError> {
    let at_devices = {
        let (tenant, volume) = (tenant.clone(), volume.clone());
        let delete = move |owner: Rc<Owner>| async move {
            owner
                .exports
                .export_delete(tenant, volume, query.disconnect_hosts)
                .await
        };
        daemon.change(delete).await?
    };
    let left = match at_devices {
        0 => String::new(),
        n => format!("; {n} commands of its hosts are still in flight at devices"),
    };
    Ok(done(format!("export of {tenant}/{volume} deleted{left}")))
}

/// Serves a quarantined export again, whose commands had killed engines.
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
    State(daemon): State<Handle>,
    OfExport(tenant, volume): OfExport,
) -> Result<Json<Export>, ApiError> {
    Ok(Json(
        daemon
            .change(|owner| async move { owner.exports.export_resume(tenant, volume).await })
            .await?,
    ))
}

pub(super) fn routes() -> Router<Handle> {
    Router::new()
        .route("/v1/exports", get(export_list).post(export_create))
        .route(
            "/v1/exports/{tenant}/{volume}",
            get(export_show).patch(export_update).delete(export_delete),
        )
        .route("/v1/exports/{tenant}/{volume}/resume", post(export_resume))
}

#[derive(OpenApi)]
#[openapi(paths(
    export_list,
    export_create,
    export_show,
    export_update,
    export_delete,
    export_resume
))]
struct Document;

pub(super) fn document() -> utoipa::openapi::OpenApi {
    Document::openapi()
}
