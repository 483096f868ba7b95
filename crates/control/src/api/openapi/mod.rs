//! The OpenAPI document, generated from the attributes and doc comments of handlers and types.
//!
//! It is committed as `docs/openapi.json`, so that API changes show in review. A test compares both
//! (`UPDATE_OPENAPI=1` rewrites the file), and another asks the router for each route.

mod limits;

use axum::Json;
use utoipa::OpenApi;

use super::routes;

#[derive(OpenApi)]
#[openapi(paths(document))]
#[openapi(
    info(
        title = "Forebay",
        description = "The control API of a Forebay daemon, on its Unix socket. Only root and the daemon's user may \
        call it; others get status 403.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
    ),
    tags(
        (name = "daemon", description = "The daemon itself"),
        (name = "pool", description = "The pool and its devices"),
        (name = "port", description = "Addresses at which hosts connect"),
        (name = "tenant", description = "Owners of volumes"),
        (name = "volume", description = "Logical disks"),
        (name = "scheduling", description = "Budgets and I/O scheduling"),
        (name = "export", description = "Volumes served to hosts and VMs"),
    ),
)]
struct Document;

/// This document.
#[utoipa::path(
    get,
    path = "/v1/openapi.json",
    tag = "daemon",
    responses((status = 200, description = "OpenAPI", body = Object, content_type = "application/json"))
)]
pub(super) async fn document() -> Json<utoipa::openapi::OpenApi> {
    Json(build())
}

pub(super) fn build() -> utoipa::openapi::OpenApi {
    let mut document = Document::openapi();
    for part in routes::documents() {
        document.merge(part);
    }
    limits::add(&mut document);
    document
}

#[cfg(test)]
pub(super) fn text() -> Result<String, serde_json::Error> {
    build().to_pretty_json().map(|text| text + "\n")
}
