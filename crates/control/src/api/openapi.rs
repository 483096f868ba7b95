//! The API's OpenAPI document.
//!
//! Purpose: the machine-readable description of every route and body; the same text is committed as
//! `docs/openapi.json`, so that a change of the API shows in review.
//! Design: generated from the handlers' and types' own attributes. A test compares it with the
//! committed file (`UPDATE_OPENAPI=1` rewrites that), another asks the router for each route in it.
//! Not here: the descriptions themselves; they are the doc comments of what they describe.

use utoipa::OpenApi;
use utoipa::openapi::{RefOr, Schema};

use super::validate::HOSTS_MAX;
use super::{figure_routes, pool_routes, port_routes, routes, scheduling_routes, transfer_routes};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Forebay",
        description = "The control API of a Forebay daemon, on its Unix socket. Callers are root or \
                       the user the daemon runs as; everybody else is answered 403.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
    ),
    paths(
        routes::document,
        routes::status,
        figure_routes::stats,
        figure_routes::metrics_text,
        figure_routes::events,
        routes::engine_replace,
        routes::shutdown,
        pool_routes::pool_create,
        pool_routes::pool_open,
        pool_routes::pool_show,
        pool_routes::pool_update,
        pool_routes::pool_upgrade,
        pool_routes::pool_check,
        pool_routes::pool_destroy,
        pool_routes::device_list,
        pool_routes::device_show,
        pool_routes::device_add,
        port_routes::port_list,
        port_routes::port_update,
        routes::tenant_list,
        routes::tenant_create,
        routes::tenant_show,
        routes::tenant_delete,
        routes::volume_list_all,
        routes::volume_list,
        routes::volume_create,
        routes::volume_show,
        routes::volume_update,
        routes::volume_delete,
        transfer_routes::transfer_put,
        transfer_routes::transfer_end,
        scheduling_routes::tenant_budget_put,
        scheduling_routes::tenant_budget_patch,
        scheduling_routes::tenant_budget_delete,
        scheduling_routes::volume_budget_put,
        scheduling_routes::volume_budget_patch,
        scheduling_routes::volume_budget_delete,
        scheduling_routes::scheduling_show,
        scheduling_routes::scheduling_update,
        scheduling_routes::costs_show,
        scheduling_routes::costs_put,
        scheduling_routes::costs_delete,
        scheduling_routes::calibration_put,
        scheduling_routes::calibration_delete,
        routes::export_list,
        routes::export_create,
        routes::export_show,
        routes::export_update,
        routes::export_delete,
        routes::export_resume,
    ),
    tags(
        (name = "daemon", description = "The daemon itself"),
        (name = "pool", description = "The pool and its devices"),
        (name = "port", description = "Addresses at which hosts connect"),
        (name = "tenant", description = "Who is served"),
        (name = "volume", description = "Logical disks"),
        (name = "scheduling", description = "Who may use how much"),
        (name = "export", description = "Volumes shown to hosts"),
    ),
)]
struct Document;

/// The document.
#[must_use]
pub fn document() -> utoipa::openapi::OpenApi {
    let mut document = Document::openapi();
    for (model, field) in [
        ("Export", "hosts"),
        ("ExportCreate", "hosts"),
        ("ExportUpdate", "add_hosts"),
        ("ExportUpdate", "remove_hosts"),
    ] {
        limit_hosts(&mut document, model, field);
    }
    document
}

/// Says how long a list of hosts may be.
fn limit_hosts(document: &mut utoipa::openapi::OpenApi, model: &str, field: &str) {
    let models = document.components.as_mut();
    let model = models.and_then(|all| all.schemas.get_mut(model));
    if let Some(RefOr::T(Schema::Object(model))) = model
        && let Some(RefOr::T(Schema::Array(list))) = model.properties.get_mut(field)
    {
        list.max_items = Some(HOSTS_MAX);
    }
}

/// The document as it is committed: pretty JSON with a final newline.
///
/// # Errors
/// If it can't be written as JSON, which would be a defect of ours.
pub fn text() -> Result<String, serde_json::Error> {
    document().to_pretty_json().map(|text| text + "\n")
}
