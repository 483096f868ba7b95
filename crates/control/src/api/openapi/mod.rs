//! The API's OpenAPI document.
//!
//! Purpose: the machine-readable description of every route and body; the same text is committed as
//! `docs/openapi.json`, so that a change of the API shows in review.
//! Design: generated from the handlers' and types' own attributes. A test compares it with the
//! committed file (`UPDATE_OPENAPI=1` rewrites that), another asks the router for each route in it.
//! Not here: the descriptions themselves; they are the doc comments of what they describe.

mod limits;

use utoipa::OpenApi;

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
        transfer_routes::volume_extents,
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
    limits::add(&mut document);
    document
}

/// The document as it is committed: pretty JSON with a final newline.
///
/// # Errors
/// If it can't be written as JSON, which would be a defect of ours.
pub fn text() -> Result<String, serde_json::Error> {
    document().to_pretty_json().map(|text| text + "\n")
}
