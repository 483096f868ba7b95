//! The handlers of budgets, and of how I/O is admitted.
//!
//! Purpose: from an HTTP request to a call on the owner's [`Handle`] and back.
//! Design: as in `routes`, which has the table of routes.
//! Not here: what a budget may be (`forebay_burst`), whether the node has it (the owner).

use axum::Json;
use axum::extract::State;

use super::error::{ApiError, ErrorBody};
use super::extract::{Body, InTenant, OfVolume};
use super::model::{Done, Volume};
use super::request::Handle;
use super::routes::done;
use super::scheduling::{
    BudgetChange, BudgetPatch, BudgetPut, CALIBRATION_TENANT, CalibrationPut, Costs, CostsPut,
    Scheduling, SchedulingUpdate, TenantBudget,
};

/// States what a tenant may use, and whether its base can be guaranteed. It holds when this is answered.
#[utoipa::path(
    put,
    path = "/v1/tenants/{tenant}/budget",
    tag = "scheduling",
    params(
        ("tenant" = String, Path, description = "Tenant"),
    ),
    request_body = BudgetPut,
    responses(
        (status = 200, description = "As it is", body = TenantBudget),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn tenant_budget_put(
    State(owner): State<Handle>,
    InTenant(tenant): InTenant,
    Body(body): Body<BudgetPut>,
) -> Result<Json<TenantBudget>, ApiError> {
    Ok(Json(
        owner.tenant_budget(tenant, BudgetChange::Put(body)).await?,
    ))
}

/// Changes what the body names of a tenant's budget, and what follows from it. It holds when this is answered.
#[utoipa::path(
    patch,
    path = "/v1/tenants/{tenant}/budget",
    tag = "scheduling",
    params(
        ("tenant" = String, Path, description = "Tenant"),
    ),
    request_body = BudgetPatch,
    responses(
        (status = 200, description = "As it is", body = TenantBudget),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn tenant_budget_patch(
    State(owner): State<Handle>,
    InTenant(tenant): InTenant,
    Body(body): Body<BudgetPatch>,
) -> Result<Json<TenantBudget>, ApiError> {
    let change = BudgetChange::Patch(body);
    Ok(Json(owner.tenant_budget(tenant, change).await?))
}

/// Takes a tenant's budget away: it has what others leave.
#[utoipa::path(
    delete,
    path = "/v1/tenants/{tenant}/budget",
    tag = "scheduling",
    params(
        ("tenant" = String, Path, description = "Tenant"),
    ),
    responses(
        (status = 200, description = "As it is", body = TenantBudget),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn tenant_budget_delete(
    State(owner): State<Handle>,
    InTenant(tenant): InTenant,
) -> Result<Json<TenantBudget>, ApiError> {
    Ok(Json(
        owner.tenant_budget(tenant, BudgetChange::Delete).await?,
    ))
}

/// States what a volume may use of its tenant's.
#[utoipa::path(
    put,
    path = "/v1/tenants/{tenant}/volumes/{volume}/budget",
    tag = "scheduling",
    params(
        ("tenant" = String, Path, description = "Tenant"),
        ("volume" = String, Path, description = "Volume"),
    ),
    request_body = BudgetPut,
    responses(
        (status = 200, description = "As it is", body = Volume),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn volume_budget_put(
    State(owner): State<Handle>,
    OfVolume(tenant, volume): OfVolume,
    Body(body): Body<BudgetPut>,
) -> Result<Json<Volume>, ApiError> {
    volume_budget(&owner, tenant, volume, BudgetChange::Put(body)).await
}

/// Changes what the body names of a volume's budget, and what follows from it.
#[utoipa::path(
    patch,
    path = "/v1/tenants/{tenant}/volumes/{volume}/budget",
    tag = "scheduling",
    params(
        ("tenant" = String, Path, description = "Tenant"),
        ("volume" = String, Path, description = "Volume"),
    ),
    request_body = BudgetPatch,
    responses(
        (status = 200, description = "As it is", body = Volume),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn volume_budget_patch(
    State(owner): State<Handle>,
    OfVolume(tenant, volume): OfVolume,
    Body(body): Body<BudgetPatch>,
) -> Result<Json<Volume>, ApiError> {
    volume_budget(&owner, tenant, volume, BudgetChange::Patch(body)).await
}

async fn volume_budget(
    owner: &Handle,
    tenant: String,
    volume: String,
    change: BudgetChange,
) -> Result<Json<Volume>, ApiError> {
    if change.has_credit() {
        return Err(ApiError::invalid("a volume has no credit of its own")
            .hint("its tenant has: `forebay tenant budget --credit`"));
    }
    Ok(Json(owner.volume_budget(tenant, volume, change).await?))
}

/// Takes a volume's budget away: it has an equal part of its tenant's.
#[utoipa::path(
    delete,
    path = "/v1/tenants/{tenant}/volumes/{volume}/budget",
    tag = "scheduling",
    params(
        ("tenant" = String, Path, description = "Tenant"),
        ("volume" = String, Path, description = "Volume"),
    ),
    responses(
        (status = 200, description = "As it is", body = Volume),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn volume_budget_delete(
    State(owner): State<Handle>,
    OfVolume(tenant, volume): OfVolume,
) -> Result<Json<Volume>, ApiError> {
    Ok(Json(
        owner
            .volume_budget(tenant, volume, BudgetChange::Delete)
            .await?,
    ))
}

/// How I/O is admitted, and what is promised.
#[utoipa::path(
    get,
    path = "/v1/scheduling",
    tag = "scheduling",
    responses(
        (status = 200, description = "As it is", body = Scheduling),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn scheduling_show(
    State(owner): State<Handle>,
) -> Result<Json<Scheduling>, ApiError> {
    Ok(Json(owner.scheduling_show().await?))
}

/// Changes how I/O is admitted on this node.
#[utoipa::path(
    patch,
    path = "/v1/scheduling",
    tag = "scheduling",
    request_body = SchedulingUpdate,
    responses(
        (status = 200, description = "As it is", body = Scheduling),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn scheduling_update(
    State(owner): State<Handle>,
    Body(body): Body<SchedulingUpdate>,
) -> Result<Json<Scheduling>, ApiError> {
    Ok(Json(owner.scheduling_update(body).await?))
}

/// What I/O costs on this machine.
#[utoipa::path(
    get,
    path = "/v1/scheduling/costs",
    tag = "scheduling",
    responses(
        (status = 200, description = "As it is", body = Costs),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn costs_show(State(owner): State<Handle>) -> Result<Json<Costs>, ApiError> {
    Ok(Json(owner.costs_show().await?))
}

/// What I/O costs on this machine from now on: `forebay calibrate` measures it.
#[utoipa::path(
    put,
    path = "/v1/scheduling/costs",
    tag = "scheduling",
    request_body = CostsPut,
    responses(
        (status = 200, description = "As it is", body = Costs),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn costs_put(
    State(owner): State<Handle>,
    Body(body): Body<CostsPut>,
) -> Result<Json<Costs>, ApiError> {
    Ok(Json(owner.costs_put(Some(body)).await?))
}

/// Forgets what was measured: the defaults count again.
#[utoipa::path(
    delete,
    path = "/v1/scheduling/costs",
    tag = "scheduling",
    responses(
        (status = 200, description = "As it is", body = Costs),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn costs_delete(State(owner): State<Handle>) -> Result<Json<Costs>, ApiError> {
    Ok(Json(owner.costs_put(None).await?))
}

/// A calibration is at work: the tenant `forebay-calibrate` can be made, and no budget of anybody keeps its volumes from what the
/// machine can do. `forebay calibrate` says so again and again.
#[utoipa::path(
    put,
    path = "/v1/scheduling/calibration",
    tag = "scheduling",
    request_body = CalibrationPut,
    responses(
        (status = 200, description = "Done", body = Done),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn calibration_put(
    State(owner): State<Handle>,
    Body(body): Body<CalibrationPut>,
) -> Result<Json<Done>, ApiError> {
    owner.calibrating(Some(body.seconds)).await?;
    Ok(done(format!(
        "for {} s, budgets do not count for the tenant {CALIBRATION_TENANT}",
        body.seconds
    )))
}

/// The calibration has ended: its tenant, should it be there, is one like any other.
#[utoipa::path(
    delete,
    path = "/v1/scheduling/calibration",
    tag = "scheduling",
    responses(
        (status = 200, description = "Done", body = Done),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn calibration_delete(
    State(owner): State<Handle>,
) -> Result<Json<Done>, ApiError> {
    owner.calibrating(None).await?;
    Ok(done("budgets count for everybody".to_owned()))
}
