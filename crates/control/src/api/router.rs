//! The router, with limits on size and time; a timed-out request may still complete. The metrics
//! listener has a router of its own.

use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::get;

use super::{openapi, routes};
use crate::daemon::Handle;
use crate::model::error::ApiError;

/// The largest request body.
pub const BODY_MAX_BYTES: usize = 256 * 1024;
/// How long a caller waits. Long, because creating a pool may wait for a dead engine's last
/// request.
pub const TIME_LIMIT: Duration = Duration::from_secs(60);

pub(super) fn router(daemon: Handle, time_limit: Duration) -> Router {
    let router = routes::routes()
        .route("/v1/openapi.json", get(openapi::document))
        .fallback(unknown_route)
        .method_not_allowed_fallback(unknown_method);
    limited(router, time_limit).with_state(daemon)
}

pub(super) fn metrics_router(daemon: Handle, time_limit: Duration) -> Router {
    let router = Router::new()
        .route("/metrics", get(routes::metrics_text))
        .fallback(only_metrics)
        .method_not_allowed_fallback(only_metrics);
    limited(router, time_limit).with_state(daemon)
}

fn limited(router: Router<Handle>, time_limit: Duration) -> Router<Handle> {
    router
        .layer(DefaultBodyLimit::max(BODY_MAX_BYTES))
        .layer(middleware::from_fn_with_state(time_limit, limit_time))
}

async fn only_metrics() -> ApiError {
    ApiError::not_found("this address serves only GET /metrics")
}

async fn limit_time(State(limit): State<Duration>, request: Request, next: Next) -> Response {
    match tokio::time::timeout(limit, next.run(request)).await {
        Ok(response) => response,
        Err(_) => ApiError::unavailable(format!(
            "the daemon did not answer within {} s",
            limit.as_secs_f64()
        ))
        .hint("the operation may still complete: check before you repeat it")
        .with_status(StatusCode::GATEWAY_TIMEOUT),
    }
}

async fn unknown_route(request: Request) -> ApiError {
    ApiError::not_found(format!("there is no route `{}`", request.uri().path()))
        .hint("GET /v1/openapi.json lists the routes")
}

async fn unknown_method(request: Request) -> Response {
    ApiError::invalid(format!(
        "method `{}` is not allowed on `{}`",
        request.method(),
        request.uri().path()
    ))
    .hint("GET /v1/openapi.json lists the routes and their methods")
    .with_status(StatusCode::METHOD_NOT_ALLOWED)
}
