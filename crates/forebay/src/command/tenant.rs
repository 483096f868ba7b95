//! `forebay tenant`.

use forebay_control::model::scheduling::TenantBudget;
use forebay_control::model::{Done, Tenant, TenantCreate};
use forebay_device::size::format_bytes;

use super::scheduling::{admission_text, assumed_text, budget_cells, budget_line, patch_of};
use crate::api_paths::segment;
use crate::cli::TenantCommand;
use crate::context::Context;
use crate::failure::Outcome;
use crate::output::{pairs, table};

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
            context.output.show(&tenant, show)
        }
        TenantCommand::Budget {
            name,
            budget,
            credit,
            metered,
        } => {
            let path = format!("/v1/tenants/{}/budget", segment(&name));
            let credit = match (credit, metered) {
                (Some(seconds), _) => Some(Some(seconds)),
                (None, true) => Some(None),
                (None, false) => None,
            };
            let set: TenantBudget = match patch_of(&budget, credit) {
                Some(patch) => context.client.patch(&path, &patch)?,
                None => context.client.delete(&path)?,
            };
            context.output.show(&set, budget_text)
        }
        TenantCommand::Delete { name } => {
            context.confirm(&format!("Delete tenant {name}?"))?;
            let done: Done = context
                .client
                .delete(&format!("/v1/tenants/{}", segment(&name)))?;
            context.output.done(&done)
        }
    }
}

fn budget_text(set: &TenantBudget) -> String {
    let name = &set.tenant;
    let mut text = match &set.budget {
        Some(budget) => format!(
            "tenant {name} has {}\n{}",
            budget_line(budget),
            assumed_text(budget)
        ),
        None => format!("tenant {name} has no budget: it gets what other tenants leave\n"),
    };
    // If not all bases are guaranteed: whether this one is.
    let all = set.admission.guaranteed && set.clusters.is_empty();
    if let (Some(guaranteed), false) = (set.guaranteed, all) {
        let is = if guaranteed { "is" } else { "is not" };
        text.push_str(&format!("its base {is} guaranteed\n"));
    }
    for cluster in &set.clusters {
        text.push_str(&format!("{}\n", cluster.text()));
    }
    text.push_str(&admission_text(&set.admission));
    text
}

fn show(tenant: &Tenant) -> String {
    let mut rows = vec![
        ("tenant", tenant.name.clone()),
        ("volumes", tenant.volumes.to_string()),
        ("provisioned", format_bytes(tenant.provisioned_bytes)),
        ("allocated", format_bytes(tenant.allocated_bytes)),
        (
            "budget",
            tenant
                .budget
                .as_ref()
                .map_or_else(|| "none".to_owned(), budget_line),
        ),
    ];
    if let Some(credit) = &tenant.credit {
        rows.push((
            "credit",
            format!(
                "{} of {} operations, {} of {}",
                credit.ops,
                credit.most_ops,
                format_bytes(credit.bytes),
                format_bytes(credit.most_bytes)
            ),
        ));
    }
    pairs(rows)
}

fn list(tenants: &[Tenant]) -> String {
    table(
        [
            "TENANT",
            ">VOLUMES",
            ">PROVISIONED",
            ">ALLOCATED",
            ">BASE",
            ">BURST",
            "CREDIT",
        ],
        tenants.iter().map(|tenant| {
            let [base, burst, credit] = budget_cells(tenant.budget.as_ref());
            [
                tenant.name.clone(),
                tenant.volumes.to_string(),
                format_bytes(tenant.provisioned_bytes),
                format_bytes(tenant.allocated_bytes),
                base,
                burst,
                credit,
            ]
        }),
    )
}
