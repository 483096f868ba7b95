//! The handlers of budgets, and of how I/O is admitted.
//!
//! Purpose: from an HTTP request to a call on the owner's [`Handle`] and back.
//! Design: a table of handlers, all alike; `routes` has the table of routes.
//! Not here: what a budget may be (`forebay_qos`), whether the node has it (the owner).

use axum::Json;
use axum::extract::State;

use super::error::{ApiError, ErrorBody};
use super::extract::{Body, InTenant, OfVolume};
use super::model::{Done, Volume};
use super::request::Handle;
use super::scheduling::{
    BudgetChange, BudgetParts, CALIBRATION_TENANT, CalibrationPut, Costs, CostsPut, Scheduling,
    SchedulingUpdate, TenantBudget,
};

/// Each with its method and path, what it takes of the path and the body, the answer, and how the owner gives it.
macro_rules! handlers {
    ($(
        $(#[$doc:meta])*
        $method:ident $path:tt => $name:ident($owner:ident)
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
            State($owner): State<Handle>,
            $($of($($part),+): $of,)?
            $(Body($body): Body<$Body>,)?
        ) -> Result<Json<$answer>, ApiError> {
            Ok(Json($call.await?))
        }
    )*};
}

handlers! {
    /// States what a tenant may use, and whether its base can be guaranteed. It holds when this is answered.
    put "/v1/tenants/{tenant}/budget" => tenant_budget_put(owner)
        of InTenant(tenant) with body: BudgetParts -> TenantBudget("As it is")
        = owner.tenant_budget(tenant, BudgetChange::Put(body));

    /// Changes what the body names of a tenant's budget, and what follows from it. It holds when this is answered.
    patch "/v1/tenants/{tenant}/budget" => tenant_budget_patch(owner)
        of InTenant(tenant) with body: BudgetParts -> TenantBudget("As it is")
        = owner.tenant_budget(tenant, BudgetChange::Patch(body));

    /// Takes a tenant's budget away: it has what others leave.
    delete "/v1/tenants/{tenant}/budget" => tenant_budget_delete(owner)
        of InTenant(tenant) -> TenantBudget("As it is")
        = owner.tenant_budget(tenant, BudgetChange::Delete);

    /// States what a volume may use of its tenant's.
    put "/v1/tenants/{tenant}/volumes/{volume}/budget" => volume_budget_put(owner)
        of OfVolume(tenant, volume) with body: BudgetParts -> Volume("As it is")
        = volume_budget(&owner, tenant, volume, BudgetChange::Put(body));

    /// Changes what the body names of a volume's budget, and what follows from it.
    patch "/v1/tenants/{tenant}/volumes/{volume}/budget" => volume_budget_patch(owner)
        of OfVolume(tenant, volume) with body: BudgetParts -> Volume("As it is")
        = volume_budget(&owner, tenant, volume, BudgetChange::Patch(body));

    /// Takes a volume's budget away: it has an equal part of its tenant's.
    delete "/v1/tenants/{tenant}/volumes/{volume}/budget" => volume_budget_delete(owner)
        of OfVolume(tenant, volume) -> Volume("As it is")
        = owner.volume_budget(tenant, volume, BudgetChange::Delete);

    /// How I/O is admitted, and what is promised.
    get "/v1/scheduling" => scheduling_show(owner) -> Scheduling("As it is")
        = owner.scheduling_show();

    /// Changes how I/O is admitted on this node.
    patch "/v1/scheduling" => scheduling_update(owner)
        with body: SchedulingUpdate -> Scheduling("As it is")
        = owner.scheduling_update(body);

    /// What I/O costs on this machine.
    get "/v1/scheduling/costs" => costs_show(owner) -> Costs("As it is") = owner.costs_show();

    /// What I/O costs on this machine from now on: `forebay calibrate` measures it.
    put "/v1/scheduling/costs" => costs_put(owner) with body: CostsPut -> Costs("As it is")
        = owner.costs_put(Some(body));

    /// Forgets what was measured: the defaults count again.
    delete "/v1/scheduling/costs" => costs_delete(owner) -> Costs("As it is")
        = owner.costs_put(None);

    /// A calibration is at work: the tenant `forebay-calibrate` can be made, and no budget of anybody keeps its volumes from what the
    /// machine can do. `forebay calibrate` says so again and again.
    put "/v1/scheduling/calibration" => calibration_put(owner)
        with body: CalibrationPut -> Done("Done")
        = calibrating(&owner, Some(body.seconds));

    /// The calibration has ended: its tenant, should it be there, is one like any other.
    delete "/v1/scheduling/calibration" => calibration_delete(owner) -> Done("Done")
        = calibrating(&owner, None);
}

async fn volume_budget(
    owner: &Handle,
    tenant: String,
    volume: String,
    change: BudgetChange,
) -> Result<Volume, ApiError> {
    if change.has_credit() {
        return Err(ApiError::invalid("a volume has no credit of its own")
            .hint("its tenant has: `forebay tenant budget --credit`"));
    }
    owner.volume_budget(tenant, volume, change).await
}

async fn calibrating(owner: &Handle, seconds: Option<u64>) -> Result<Done, ApiError> {
    owner.calibrating(seconds).await?;
    let done = match seconds {
        Some(seconds) => {
            format!("for {seconds} s, budgets do not count for the tenant {CALIBRATION_TENANT}")
        }
        None => "budgets count for everybody".to_owned(),
    };
    Ok(Done { done })
}
