//! The API's OpenAPI document.
//!
//! Purpose: the machine-readable description of every route and body; the same text is committed as
//! `docs/openapi.json`, so that a change of the API shows in review.
//! Design: each file of `routes` says its part, generated from the handlers' and types' own attributes. A test compares it with the
//! committed file (`UPDATE_OPENAPI=1` rewrites that), another asks the router for each route in it.
//! Not here: the descriptions themselves; they are the doc comments of what they describe.

mod limits;

use axum::Json;
use utoipa::OpenApi;

use super::routes;

#[derive(OpenApi)]
#[openapi(paths(document))]
#[openapi(
    info(
        title = "Forebay",
        description = "The control API of a Forebay daemon, on its Unix socket. Callers are root or \
                       the user the daemon runs as; everybody else is answered 403.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
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

/// The document as it is committed: pretty JSON with a final newline.
#[cfg(test)]
pub(super) fn text() -> Result<String, serde_json::Error> {
    build().to_pretty_json().map(|text| text + "\n")
}
