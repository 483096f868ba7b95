//! Records every change through the API: its user, and the object before and after.
//!
//! One layer wraps all routes. A change runs in a task, so a caller that disconnects loses no
//! record. `GET` gives the object's states. A failed request is recorded only if the object differs
//! afterwards or is unknown.

use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use serde_json::Value;
use tokio::time::timeout;

use super::router::{BODY_MAX_BYTES, TIME_LIMIT};
use crate::daemon::Handle;
use crate::model::error::ApiError;
use crate::model::events::Audit;

mod caller;
mod changes;
mod objects;

pub(super) use caller::Caller;
use caller::Names;
use changes::{AuditedRoute, Object, SHUTDOWN, find};
use objects::{differences, name_of};

/// The limit for each of: the object before, the object after, the record.
const POLL_LIMIT: Duration = Duration::from_secs(2);

#[derive(Debug, PartialEq, Eq)]
struct Unknown;

#[derive(Clone)]
struct Audited {
    routes: TowerToHyperService<Router>,
    daemon: Handle,
    caller: Caller,
}

pub(super) fn router(routes: Router, daemon: Handle, caller: Caller) -> Router {
    Router::new().fallback(answer).with_state(Audited {
        routes: TowerToHyperService::new(routes),
        daemon,
        caller,
    })
}

async fn answer(State(audited): State<Audited>, request: Request) -> Response {
    let Some(change) = find(request.method(), request.uri().path()) else {
        return audited.ask(request).await;
    };
    // A task, which outlives the caller's connection.
    let carried_out = tokio::spawn(audited.carry_out(change, request));
    carried_out.await.unwrap_or_else(|error| {
        ApiError::internal(format!("the request was aborted: {error}")).into_response()
    })
}

impl Audited {
    async fn ask(&self, request: Request) -> Response {
        match self.routes.call(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }

    async fn carry_out(self, change: &'static AuditedRoute, request: Request) -> Response {
        let (parts, body) = request.into_parts();
        let body = match read_body(body).await {
            Ok(body) => body,
            Err(refusal) => return refusal,
        };
        let asked: Value = serde_json::from_slice(&body).unwrap_or_default();
        let uri = parts.uri.clone();
        let request = Request::from_parts(parts, Body::from(body));
        if !change.is_made_by(&asked) {
            return self.ask(request).await;
        }
        let mut audit = self.begin(change, &uri, &asked).await;
        if *change.route == *SHUTDOWN.route {
            "asked for".clone_into(&mut audit.result);
            self.record(audit).await;
            return self.ask(request).await;
        }
        let object = change.object_path(uri.path(), &asked);
        let before = self.check(object.as_deref()).await;
        let response = self.ask(request).await;
        let status = response.status();
        if !status.is_success() && !status.is_server_error() {
            return response;
        }
        let (parts, body) = response.into_parts();
        let body = to_bytes(body, usize::MAX).await.unwrap_or_default();
        let answered = serde_json::from_slice(&body).ok();
        let (is_made, before, after) = match change.object {
            Object::Made | Object::Answered if status.is_success() => {
                (true, None, answered.clone())
            }
            of => {
                let after = self.check(object.as_deref()).await;
                // After a time-out, the change may still happen.
                let is_over = status != StatusCode::GATEWAY_TIMEOUT && object.is_some();
                let is_known = before.is_ok() && before == after;
                if !status.is_success() && is_over && is_known {
                    return Response::from_parts(parts, Body::from(body));
                }
                let (before, after) = (before.ok().flatten(), after.ok().flatten());
                let is_made = matches!(of, Object::Made | Object::Answered);
                (is_made, before, after)
            }
        };
        if let (true, Some(name)) = (is_made, after.as_ref().and_then(name_of)) {
            audit.action = format!("{} {name}", change.action);
        }
        (audit.before, audit.after) = differences(before, after);
        if !status.is_success() {
            let message = answered.as_ref();
            let message = message.and_then(|body| body["error"]["message"].as_str());
            audit.result = format!("{status}: {}", message.unwrap_or("no answer"));
        }
        self.record(audit).await;
        Response::from_parts(parts, Body::from(body))
    }

    async fn begin(&self, change: &AuditedRoute, uri: &Uri, asked: &Value) -> Audit {
        let caller = self.caller;
        let names = tokio::task::spawn_blocking(move || caller.names());
        let names = match timeout(POLL_LIMIT, names).await {
            Ok(Ok(names)) => names,
            _ => Names {
                user: format!("uid {}", caller.uid),
                login: None,
                program: String::new(),
            },
        };
        Audit {
            uid: caller.uid,
            user: names.user,
            login: names.login,
            pid: caller.pid,
            program: names.program,
            action: change.action.to_owned(),
            request: format!("{} {}", change.method, shown(uri)),
            destructive: change.is_destructive(asked),
            result: "done".to_owned(),
            before: None,
            after: None,
        }
    }

    async fn check(&self, path: Option<&str>) -> Result<Option<Value>, Unknown> {
        let Some(path) = path else {
            return Ok(None);
        };
        let request = Request::get(path).body(Body::empty());
        let request = request.map_err(|_| Unknown)?;
        let answer = async {
            let response = self.ask(request).await;
            let status = response.status();
            if status == StatusCode::GATEWAY_TIMEOUT {
                return Err(Unknown);
            }
            let body = to_bytes(response.into_body(), usize::MAX).await;
            let body = body.map_err(|_| Unknown)?;
            let object = || serde_json::from_slice(&body).ok();
            Ok(status.is_success().then(object).flatten())
        };
        timeout(POLL_LIMIT, answer).await.unwrap_or(Err(Unknown))
    }

    async fn record(&self, audit: Audit) {
        let entry = audit.clone();
        let reported = self.daemon.run(move |daemon| async move {
            let generation = daemon.status().generation;
            daemon.events.audit(generation, entry).await;
            Ok(())
        });
        let reported = timeout(POLL_LIMIT, reported).await;
        if !matches!(reported, Ok(Ok(()))) {
            tracing::warn!(?audit, "a change could not be recorded");
        }
    }
}

async fn read_body(body: Body) -> Result<Bytes, Response> {
    match timeout(TIME_LIMIT, to_bytes(body, BODY_MAX_BYTES)).await {
        Ok(Ok(body)) => Ok(body),
        // If the body ends early, its caller is gone and needs no error.
        Ok(Err(_)) => Err(ApiError::invalid("the request body is too large")
            .with_status(StatusCode::PAYLOAD_TOO_LARGE)),
        Err(_) => Err(
            ApiError::unavailable("the request body did not arrive in time")
                .with_status(StatusCode::REQUEST_TIMEOUT),
        ),
    }
}

fn shown(uri: &Uri) -> String {
    let path = uri.path_and_query().map_or("", |path| path.as_str());
    path.chars().take(1024).collect()
}
