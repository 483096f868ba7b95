//! `forebay tenant`.

use forebay_control::api::model::{Done, Tenant, TenantCreate};
use forebay_device::size::format_bytes;

use super::{Context, segment};
use crate::cli::TenantCommand;
use crate::failure::Outcome;
use crate::output::table;

pub(crate) fn tenant(context: &Context, command: TenantCommand) -> Outcome {
    match command {
        TenantCommand::Create { name } => {
            let tenant: Tenant = context.client.post("/v1/tenants", &TenantCreate { name })?;
            context
                .output
                .show(&tenant, |tenant| format!("tenant {} created", tenant.name))
        }
        TenantCommand::List => {
            let tenants: Vec<Tenant> = context.client.get("/v1/tenants")?;
            context.output.show(&tenants, |tenants| list(tenants))
        }
        TenantCommand::Show { name } => {
            let path = format!("/v1/tenants/{}", segment(&name));
            let tenant: Tenant = context.client.get(&path)?;
            context
                .output
                .show(&tenant, |tenant| list(std::slice::from_ref(tenant)))
        }
        TenantCommand::Delete { name } => {
            let done: Done = context
                .client
                .delete(&format!("/v1/tenants/{}", segment(&name)))?;
            context.output.done(&done)
        }
    }
}

fn list(tenants: &[Tenant]) -> String {
    table(
        ["TENANT", ">VOLUMES", ">PROVISIONED", ">ALLOCATED"],
        tenants.iter().map(|tenant| {
            [
                tenant.name.clone(),
                tenant.volumes.to_string(),
                format_bytes(tenant.provisioned_bytes),
                format_bytes(tenant.allocated_bytes),
            ]
        }),
    )
}
