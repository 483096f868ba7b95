//! Handlers of counters, metrics and events.

use std::time::Duration;

use std::sync::atomic::Ordering::Relaxed;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::Deserialize;
use utoipa::OpenApi;

use crate::api::extract::Parameters;
use crate::daemon::Handle;
use crate::metrics::{self, MetricSource};
use crate::model::error::{ApiError, ErrorBody};
use crate::model::events::EventList;
use crate::model::stats::Stats;

/// Counters of engine, pool and lanes.
#[utoipa::path(
    get,
    path = "/v1/stats",
    tag = "daemon",
    responses(
        (status = 200, description = "The current state", body = Stats),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn stats(State(daemon): State<Handle>) -> Result<Json<Stats>, ApiError> {
    Ok(Json(daemon.ask(|daemon| daemon.stats()).await?))
}

/// Events, oldest first: deaths, take-overs, hosts, devices, space, quarantines.
#[utoipa::path(
    get,
    path = "/v1/events",
    tag = "daemon",
    params(
        ("after" = Option<u64>, Query, description = "Only events after the event with this number"),
        ("wait_s" = Option<u64>, Query, description = "If there is no event yet, wait for one, at most 30 s"),
    ),
    responses(
        (status = 200, description = "The current state", body = EventList),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(super) async fn events(
    State(daemon): State<Handle>,
    Parameters(from): Parameters<EventsFrom>,
) -> Result<Json<EventList>, ApiError> {
    let wait = Duration::from_secs(from.wait_s);
    Ok(Json(
        daemon
            .wait(move |daemon| async move { daemon.events.read(from.after, wait).await })
            .await?,
    ))
}

/// Metrics for Prometheus: engine, pool, devices, volumes.
#[utoipa::path(
    get,
    path = "/v1/metrics",
    tag = "daemon",
    responses(
        (status = 200, description = "Text exposition format 0.0.4", body = String, content_type = "text/plain"),
        (status = "default", description = "Refused", body = ErrorBody),
    )
)]
pub(in crate::api) async fn metrics_text(
    State(daemon): State<Handle>,
) -> Result<Response, ApiError> {
    let (status, stats) = (
        daemon.ask(|daemon| daemon.status()).await?,
        daemon.ask(|daemon| daemon.stats()).await?,
    );
    // Without a pool, the daemon's own metrics remain.
    let pool = daemon
        .read(|owner| Ok(owner.reports.pool_show()))
        .await
        .ok();
    let volumes = daemon.read(|owner| owner.base.volume_list(None)).await;
    let volumes = volumes.unwrap_or_default();
    let drops = daemon.ask(|daemon| daemon.out_of_band_drops.load(Relaxed));
    let text = metrics::text(&MetricSource {
        status: &status,
        stats: &stats,
        pool: pool.as_ref(),
        volumes: &volumes,
        out_of_band_drops: drops.await?,
    });
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}

/// The query of `GET /v1/events`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EventsFrom {
    after: Option<u64>,
    #[serde(default)]
    wait_s: u64,
}

pub(super) fn routes() -> Router<Handle> {
    Router::new()
        .route("/v1/stats", get(stats))
        .route("/v1/metrics", get(metrics_text))
        .route("/v1/events", get(events))
}

#[derive(OpenApi)]
#[openapi(paths(stats, events, metrics_text))]
struct Document;

pub(super) fn document() -> utoipa::openapi::OpenApi {
    Document::openapi()
}
