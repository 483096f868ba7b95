//! The handlers of what can be watched: counters, metrics, events.
//!
//! Purpose: as in `routes`. The metrics have a router of their own besides, for their own listener.
//! Design: metrics are made of the answers to three questions; without a pool, of the daemon's own.
//! Not here: what is counted (the owner), the exposition's text (`metrics`).

use std::time::Duration;

use axum::extract::{DefaultBodyLimit, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router, middleware};
use serde::Deserialize;

use super::error::{ApiError, ErrorBody};
use super::events::EventList;
use super::extract::Parameters;
use super::request::Handle;
use super::routes::{BODY_MAX_BYTES, limit_time};
use super::stats::Stats;
use crate::metrics::{self, Source};

/// The one route of the metrics' own listener.
pub(super) fn metrics_router(owner: Handle, time_limit: Duration) -> Router {
    Router::new()
        .route("/metrics", get(metrics_text))
        .fallback(only_metrics)
        .method_not_allowed_fallback(only_metrics)
        .layer(DefaultBodyLimit::max(BODY_MAX_BYTES))
        .layer(middleware::from_fn_with_state(time_limit, limit_time))
        .with_state(owner)
}

async fn only_metrics() -> ApiError {
    ApiError::not_found("there is only GET /metrics here")
}

/// Counters of engine, pool and lanes.
#[utoipa::path(
    get,
    path = "/v1/stats",
    tag = "daemon",
    responses(
        (status = 200, description = "As it is", body = Stats),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn stats(State(owner): State<Handle>) -> Result<Json<Stats>, ApiError> {
    Ok(Json(owner.stats().await?))
}

/// What happened, oldest first: deaths, take-overs, hosts, devices, space, quarantines.
#[utoipa::path(
    get,
    path = "/v1/events",
    tag = "daemon",
    params(
        ("after" = Option<u64>, Query, description = "Only what came after the event of this number"),
        ("wait_s" = Option<u64>, Query, description = "If there is nothing yet, wait for it, at most 30 s"),
    ),
    responses(
        (status = 200, description = "As it is", body = EventList),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn events(
    State(owner): State<Handle>,
    Parameters(from): Parameters<EventsFrom>,
) -> Result<Json<EventList>, ApiError> {
    let wait = Duration::from_secs(from.wait_s);
    Ok(Json(owner.events(from.after, wait).await?))
}

/// The query of `GET /v1/events`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EventsFrom {
    after: Option<u64>,
    #[serde(default)]
    wait_s: u64,
}

/// Figures for Prometheus: engine, pool, devices, volumes.
#[utoipa::path(
    get,
    path = "/v1/metrics",
    tag = "daemon",
    responses(
        (status = 200, description = "Text exposition format 0.0.4", body = String, content_type = "text/plain"),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn metrics_text(State(owner): State<Handle>) -> Result<Response, ApiError> {
    let (status, stats) = (owner.status().await?, owner.stats().await?);
    // Without a pool there are the daemon's own figures.
    let pool = owner.pool_show().await.ok();
    let volumes = owner.volume_list(None).await.unwrap_or_default();
    let text = metrics::text(&Source {
        status: &status,
        stats: &stats,
        pool: pool.as_ref(),
        volumes: &volumes,
    });
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}
