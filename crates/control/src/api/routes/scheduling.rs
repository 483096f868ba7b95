//! Handlers of budgets, costs and scheduling. They are all alike, so a macro writes them.

use axum::extract::State;
use axum::routing::{get, put};
use axum::{Json, Router};
use utoipa::OpenApi;

use crate::api::extract::{Body, InTenant, OfVolume};
use crate::daemon::Handle;
use crate::model::error::{ApiError, ErrorBody};
use crate::model::scheduling::{
    BudgetChange, BudgetParts, CALIBRATION_TENANT, CalibrationPut, Costs, CostsPut, Scheduling,
    SchedulingUpdate, TenantBudget,
};
use crate::model::{Done, Volume};

/// For each handler: method and path, parts of the path, body, answer, and the call.
macro_rules! handlers {
    ($(
        $(#[$doc:meta])*
        $method:ident $path:tt => $name:ident($daemon:ident)
            $(of $of:ident($($part:ident),+))? $(with $body:ident: $Body:ident)?
            -> $answer:ident($says:tt) = $call:expr;
    )*) => {$(
        $(#[$doc])*
        #[utoipa::path(
            $method,
            path = $path,
            tag = "scheduling",
            params($($of)?),
            $(request_body = $Body,)?
            responses(
                (status = 200, description = $says, body = $answer),
                (status = "default", description = "Refused", body = ErrorBody),
            )
        )]
        pub(super) async fn $name(
            State($daemon): State<Handle>,
            $($of($($part),+): $of,)?
            $(Body($body): Body<$Body>,)?
        ) -> Result<Json<$answer>, ApiError> {
            Ok(Json($call.await?))
        }
    )*};
}

handlers! {
    /// Sets what a tenant may use, and tells whether its base can be guaranteed. It takes effect
    /// before the answer.
    put "/v1/tenants/{tenant}/budget" => tenant_budget_put(daemon)
        of InTenant(tenant) with body: BudgetParts -> TenantBudget("The current state")
        = tenant_budget(&daemon, tenant, BudgetChange::Put(body));

    /// Changes the parts of a tenant's budget that the body names, and values derived from them. It
    /// takes effect before the answer.
    patch "/v1/tenants/{tenant}/budget" => tenant_budget_patch(daemon)
        of InTenant(tenant) with body: BudgetParts -> TenantBudget("The current state")
        = tenant_budget(&daemon, tenant, BudgetChange::Patch(body));

    /// Removes a tenant's budget: it may use the capacity that others leave.
    delete "/v1/tenants/{tenant}/budget" => tenant_budget_delete(daemon)
        of InTenant(tenant) -> TenantBudget("The current state")
        = tenant_budget(&daemon, tenant, BudgetChange::Delete);

    /// Sets which part of its tenant's budget a volume may use.
    put "/v1/tenants/{tenant}/volumes/{volume}/budget" => volume_budget_put(daemon)
        of OfVolume(tenant, volume) with body: BudgetParts -> Volume("The current state")
        = volume_budget(&daemon, tenant, volume, BudgetChange::Put(body));

    /// Changes the parts of a volume's budget that the body names, and values derived from them.
    patch "/v1/tenants/{tenant}/volumes/{volume}/budget" => volume_budget_patch(daemon)
        of OfVolume(tenant, volume) with body: BudgetParts -> Volume("The current state")
        = volume_budget(&daemon, tenant, volume, BudgetChange::Patch(body));

    /// Removes a volume's budget: the volume gets an equal part of its tenant's.
    delete "/v1/tenants/{tenant}/volumes/{volume}/budget" => volume_budget_delete(daemon)
        of OfVolume(tenant, volume) -> Volume("The current state")
        = volume_budget(&daemon, tenant, volume, BudgetChange::Delete);

    /// How I/O is scheduled, and which bases are promised.
    get "/v1/scheduling" => scheduling_show(daemon) -> Scheduling("The current state")
        = daemon.read(|owner| Ok(owner.budgets.scheduling_show()));

    /// Changes how I/O is scheduled on this node.
    patch "/v1/scheduling" => scheduling_update(daemon)
        with body: SchedulingUpdate -> Scheduling("The current state")
        = daemon.change(|owner| async move { owner.budgets.scheduling_update(body).await });

    /// The cost of I/O on this node.
    get "/v1/scheduling/costs" => costs_show(daemon) -> Costs("The current state")
        = daemon.read(|owner| Ok(owner.node.costs_show()));

    /// Sets the cost of I/O on this node: `forebay calibrate` measures it.
    put "/v1/scheduling/costs" => costs_put(daemon) with body: CostsPut -> Costs("The current state")
        = daemon.change(|owner| async move { owner.budgets.costs_put(Some(body)).await });

    /// Removes measured costs: the defaults apply again.
    delete "/v1/scheduling/costs" => costs_delete(daemon) -> Costs("The current state")
        = daemon.change(|owner| async move { owner.budgets.costs_put(None).await });

    /// Announces a calibration. The tenant `forebay-calibrate` can be created, and no budget limits
    /// its volumes. `forebay calibrate` renews this regularly.
    put "/v1/scheduling/calibration" => calibration_put(daemon)
        with body: CalibrationPut -> Done("Done")
        = calibrating(&daemon, Some(body.seconds));

    /// Ends the calibration: its tenant, if it exists, is an ordinary one.
    delete "/v1/scheduling/calibration" => calibration_delete(daemon) -> Done("Done")
        = calibrating(&daemon, None);
}

async fn tenant_budget(
    daemon: &Handle,
    tenant: String,
    change: BudgetChange,
) -> Result<TenantBudget, ApiError> {
    daemon
        .change(move |owner| async move { owner.budgets.tenant_budget(&tenant, change).await })
        .await
}

async fn volume_budget(
    daemon: &Handle,
    tenant: String,
    volume: String,
    change: BudgetChange,
) -> Result<Volume, ApiError> {
    if change.has_credit() {
        return Err(ApiError::invalid("a volume has no credit of its own")
            .hint("its tenant has credit: `forebay tenant budget --credit` sets it"));
    }
    daemon
        .change(
            move |owner| async move { owner.budgets.volume_budget(&tenant, &volume, change).await },
        )
        .await
}

async fn calibrating(daemon: &Handle, seconds: Option<u64>) -> Result<Done, ApiError> {
    daemon
        .change(move |owner| async move { owner.budgets.calibrating(seconds).await })
        .await?;
    let done = match seconds {
        Some(seconds) => {
            format!("budgets do not apply to tenant {CALIBRATION_TENANT} for {seconds} s")
        }
        None => "budgets apply to all tenants".to_owned(),
    };
    Ok(Done { done })
}

pub(super) fn routes() -> Router<Handle> {
    Router::new()
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
}

#[derive(OpenApi)]
#[openapi(paths(
    tenant_budget_put,
    tenant_budget_patch,
    tenant_budget_delete,
    volume_budget_put,
    volume_budget_patch,
    volume_budget_delete,
    scheduling_show,
    scheduling_update,
    costs_show,
    costs_put,
    costs_delete,
    calibration_put,
    calibration_delete
))]
struct Document;

pub(super) fn document() -> utoipa::openapi::OpenApi {
    Document::openapi()
}
