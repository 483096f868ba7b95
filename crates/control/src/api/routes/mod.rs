//! The handlers, in one file per subject, with their part of the OpenAPI document. A handler checks
//! syntax, sends a closure to the daemon's thread ([`Handle`]), and wraps the answer.

use axum::{Json, Router};

use crate::daemon::Handle;
use crate::model::Done;

mod daemon;
mod export;
mod firmware;
mod pool;
mod port;
mod scheduling;
mod snapshot;
mod statistics;
mod tenant;
mod transfer;
mod volume;

pub(super) use statistics::metrics_text;

pub(super) fn routes() -> Router<Handle> {
    Router::new()
        .merge(daemon::routes())
        .merge(firmware::routes())
        .merge(statistics::routes())
        .merge(pool::routes())
        .merge(port::routes())
        .merge(tenant::routes())
        .merge(scheduling::routes())
        .merge(volume::routes())
        .merge(snapshot::routes())
        .merge(transfer::routes())
        .merge(export::routes())
}

pub(super) fn documents() -> [utoipa::openapi::OpenApi; 11] {
    [
        daemon::document(),
        firmware::document(),
        statistics::document(),
        pool::document(),
        port::document(),
        tenant::document(),
        scheduling::document(),
        volume::document(),
        snapshot::document(),
        transfer::document(),
        export::document(),
    ]
}

fn done(what: String) -> Json<Done> {
    Json(Done { done: what })
}
