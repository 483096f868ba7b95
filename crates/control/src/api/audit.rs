//! Who changed what through the API.
//!
//! Purpose: every change leaves a record of its user, and of the object before and after it.
//! Design: one layer around all routes. A table lists the requests that change something. Each runs in a task of its own,
//! so a caller that disconnects loses no record. `GET` of the object gives its state before and after. Refused requests
//! are not recorded. One that failed is, if the object differs afterwards, or if that can't be known.
//! Not here: keeping the records (`events`, `journal`).

use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use serde_json::{Map, Value};
use tokio::time::timeout;

use super::error::ApiError;
use super::events::Audit;
use super::request::Handle;
use super::routes::{BODY_MAX_BYTES, TIME_LIMIT};

/// Time limit for each of: the object before, the object after, the record.
const LOOK_LIMIT: Duration = Duration::from_secs(2);
/// More JSON than this of an object is cut.
const OBJECT_MAX_BYTES: usize = 8 * 1024;
/// Flags in a body that allow data loss.
const DESTRUCTIVE_FLAGS: [&str; 4] = ["force", "overwrite", "disconnect_hosts", "repair"];

/// Which object a change is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Object {
    /// What `GET` shows at the change's own path.
    Itself,
    /// The same one segment higher.
    Parent,
    /// The same elsewhere.
    At(&'static str),
    /// What the change answers.
    Made,
    /// None.
    Process,
}

/// A route that changes something.
#[derive(Debug)]
struct Change {
    method: Method,
    route: &'static str,
    action: &'static str,
    object: Object,
    destroys: bool,
}

const fn change(
    method: Method,
    route: &'static str,
    action: &'static str,
    object: Object,
) -> Change {
    Change {
        method,
        route,
        action,
        object,
        destroys: false,
    }
}

const fn destruction(route: &'static str, action: &'static str) -> Change {
    Change {
        method: Method::DELETE,
        route,
        action,
        object: Object::Itself,
        destroys: true,
    }
}

const TENANT: &str = "/v1/tenants/{tenant}";
const TENANT_BUDGET: &str = "/v1/tenants/{tenant}/budget";
const VOLUMES: &str = "/v1/tenants/{tenant}/volumes";
const VOLUME: &str = "/v1/tenants/{tenant}/volumes/{volume}";
const VOLUME_BUDGET: &str = "/v1/tenants/{tenant}/volumes/{volume}/budget";
const TRANSFER: &str = "/v1/tenants/{tenant}/volumes/{volume}/transfer";
const EXPORT: &str = "/v1/exports/{tenant}/{volume}";
const RESUME: &str = "/v1/exports/{tenant}/{volume}/resume";
const COSTS: &str = "/v1/scheduling/costs";
const CALIBRATION: &str = "/v1/scheduling/calibration";
const SCHEDULING: &str = "/v1/scheduling";
const POOL: &str = "/v1/pool";
const CHECK: &str = "/v1/pool/check";

/// All of them; a test compares with the OpenAPI document.
static CHANGES: [Change; 31] = [
    change(Method::POST, POOL, "make the pool", Object::Itself),
    change(Method::PATCH, POOL, "change the pool", Object::Itself),
    destruction(POOL, "destroy the pool"),
    change(
        Method::POST,
        "/v1/pool/open",
        "open the pool",
        Object::Parent,
    ),
    change(
        Method::POST,
        "/v1/pool/upgrade",
        "upgrade the pool",
        Object::Parent,
    ),
    change(Method::POST, CHECK, "repair the pool", Object::Parent),
    change(Method::POST, "/v1/devices", "add a device", Object::Itself),
    change(
        Method::PATCH,
        "/v1/ports/{address}",
        "change a port",
        Object::Parent,
    ),
    change(Method::POST, "/v1/tenants", "make a tenant", Object::Made),
    destruction(TENANT, "delete a tenant"),
    change(
        Method::PUT,
        TENANT_BUDGET,
        "set a tenant's budget",
        Object::Parent,
    ),
    change(
        Method::PATCH,
        TENANT_BUDGET,
        "change a tenant's budget",
        Object::Parent,
    ),
    change(
        Method::DELETE,
        TENANT_BUDGET,
        "remove a tenant's budget",
        Object::Parent,
    ),
    change(Method::POST, VOLUMES, "make a volume", Object::Made),
    change(Method::PATCH, VOLUME, "change a volume", Object::Itself),
    destruction(VOLUME, "delete a volume"),
    change(
        Method::PUT,
        VOLUME_BUDGET,
        "set a volume's budget",
        Object::Parent,
    ),
    change(
        Method::PATCH,
        VOLUME_BUDGET,
        "change a volume's budget",
        Object::Parent,
    ),
    change(
        Method::DELETE,
        VOLUME_BUDGET,
        "remove a volume's budget",
        Object::Parent,
    ),
    change(Method::PUT, TRANSFER, "move an image", Object::Parent),
    change(
        Method::DELETE,
        TRANSFER,
        "end moving an image",
        Object::Parent,
    ),
    change(Method::POST, "/v1/exports", "export a volume", Object::Made),
    change(Method::PATCH, EXPORT, "change an export", Object::Itself),
    destruction(EXPORT, "delete an export"),
    change(Method::POST, RESUME, "resume an export", Object::Parent),
    change(
        Method::PATCH,
        SCHEDULING,
        "change the scheduling",
        Object::Itself,
    ),
    change(Method::PUT, COSTS, "set the costs", Object::Itself),
    change(Method::DELETE, COSTS, "reset the costs", Object::Itself),
    change(
        Method::PUT,
        CALIBRATION,
        "begin a calibration",
        Object::At(SCHEDULING),
    ),
    change(
        Method::DELETE,
        CALIBRATION,
        "end a calibration",
        Object::At(SCHEDULING),
    ),
    change(
        Method::POST,
        "/v1/engine/replace",
        "replace the engine",
        Object::Process,
    ),
];
/// Recorded before it runs: a daemon that stops records nothing more.
static SHUTDOWN: Change = change(Method::POST, "/v1/shutdown", "shut down", Object::Process);

fn is_of(route: &str, path: &str) -> bool {
    let (mut route, mut path) = (route.split('/'), path.split('/'));
    loop {
        match (route.next(), path.next()) {
            (None, None) => return true,
            (Some(wanted), Some(part)) if wanted == part => {}
            (Some(wanted), Some(part)) if wanted.starts_with('{') && !part.is_empty() => {}
            _ => return false,
        }
    }
}

fn find(method: &Method, path: &str) -> Option<&'static Change> {
    (CHANGES.iter())
        .chain([&SHUTDOWN])
        .find(|change| change.method == *method && is_of(change.route, path))
}

/// Who calls.
#[derive(Debug, Clone, Copy)]
pub(super) struct Caller {
    pub(super) uid: u32,
    pub(super) pid: Option<i32>,
}

/// A caller's names, as far as the system knows them.
struct Names {
    user: String,
    login: Option<String>,
    program: String,
}

impl Caller {
    fn names(self) -> Names {
        let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        let of_process = |file: &str| {
            let text = self
                .pid
                .map(|pid| std::fs::read_to_string(format!("/proc/{pid}/{file}")));
            text.and_then(Result::ok)
                .unwrap_or_default()
                .trim()
                .to_owned()
        };
        // Who logged in, if that was another user: `sudo` and `su` keep it.
        let login = of_process("loginuid").parse().ok();
        let login = login.filter(|uid| *uid != u32::MAX && *uid != self.uid);
        Names {
            user: user_name(&users, self.uid),
            login: login.map(|uid| user_name(&users, uid)),
            program: of_process("comm"),
        }
    }
}

/// By passwd(5): `name:password:uid:...`.
fn user_name(users: &str, uid: u32) -> String {
    let name = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then(|| name.to_owned())
    });
    name.unwrap_or_else(|| format!("uid {uid}"))
}

/// How an object is can't be seen now.
#[derive(Debug, PartialEq, Eq)]
struct Unknown;

/// What the recording needs.
#[derive(Clone)]
struct Audited {
    routes: TowerToHyperService<Router>,
    owner: Handle,
    caller: Caller,
}

/// The routes for one caller; records its changes.
pub(super) fn router(routes: Router, owner: Handle, caller: Caller) -> Router {
    Router::new().fallback(answer).with_state(Audited {
        routes: TowerToHyperService::new(routes),
        owner,
        caller,
    })
}

async fn answer(State(audited): State<Audited>, request: Request) -> Response {
    let Some(change) = find(request.method(), request.uri().path()) else {
        return audited.ask(request).await;
    };
    // Not ended with the caller's connection.
    let carried_out = tokio::spawn(audited.carry_out(change, request));
    carried_out.await.unwrap_or_else(|error| {
        ApiError::internal(format!("a request was given up: {error}")).into_response()
    })
}

impl Audited {
    async fn ask(&self, request: Request) -> Response {
        match self.routes.call(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }

    async fn carry_out(self, change: &'static Change, request: Request) -> Response {
        let (parts, body) = request.into_parts();
        let body = match timeout(TIME_LIMIT, to_bytes(body, BODY_MAX_BYTES)).await {
            Ok(Ok(body)) => body,
            // A body that ends early needs no error of its own: its caller is gone.
            Ok(Err(_)) => {
                return ApiError::invalid("the request body is too large")
                    .with_status(StatusCode::PAYLOAD_TOO_LARGE);
            }
            Err(_) => {
                return ApiError::unavailable("the request body did not arrive in time")
                    .with_status(StatusCode::REQUEST_TIMEOUT);
            }
        };
        let asked: Value = serde_json::from_slice(&body).unwrap_or_default();
        let is_set = |flag: &str| asked.get(flag) == Some(&Value::Bool(true));
        let uri = parts.uri.clone();
        let request = Request::from_parts(parts, Body::from(body));
        if !change.is_made_by(&asked) {
            return self.ask(request).await;
        }
        let names = tokio::task::spawn_blocking(move || self.caller.names());
        let Names {
            user,
            login,
            program,
        } = match timeout(LOOK_LIMIT, names).await {
            Ok(Ok(names)) => names,
            _ => Names {
                user: format!("uid {}", self.caller.uid),
                login: None,
                program: String::new(),
            },
        };
        let mut audit = Audit {
            uid: self.caller.uid,
            user,
            login,
            pid: self.caller.pid,
            program,
            action: change.action.to_owned(),
            request: format!("{} {}", change.method, shown(&uri)),
            destructive: change.destroys || DESTRUCTIVE_FLAGS.into_iter().any(is_set),
            result: "done".to_owned(),
            before: None,
            after: None,
        };
        if *change.route == *SHUTDOWN.route {
            "asked for".clone_into(&mut audit.result);
            self.record(audit).await;
            return self.ask(request).await;
        }
        let object = change.object_path(uri.path(), &asked);
        let before = self.look(object.as_deref()).await;
        let response = self.ask(request).await;
        let status = response.status();
        if !status.is_success() && !status.is_server_error() {
            return response;
        }
        let (parts, body) = response.into_parts();
        let body = to_bytes(body, usize::MAX).await.unwrap_or_default();
        let answered = serde_json::from_slice(&body).ok();
        let (is_made, before, after) = match change.object {
            Object::Made if status.is_success() => (true, None, answered.clone()),
            of => {
                let after = self.look(object.as_deref()).await;
                // After a time-out, the change may still happen.
                let is_over = status != StatusCode::GATEWAY_TIMEOUT && object.is_some();
                let is_known = before.is_ok() && before == after;
                if !status.is_success() && is_over && is_known {
                    return Response::from_parts(parts, Body::from(body));
                }
                (
                    of == Object::Made,
                    before.ok().flatten(),
                    after.ok().flatten(),
                )
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

    /// The object as `GET` shows it, if there is one.
    async fn look(&self, path: Option<&str>) -> Result<Option<Value>, Unknown> {
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
        timeout(LOOK_LIMIT, answer).await.unwrap_or(Err(Unknown))
    }

    async fn record(&self, audit: Audit) {
        let told = timeout(LOOK_LIMIT, self.owner.audit(Box::new(audit.clone()))).await;
        if !matches!(told, Ok(Ok(()))) {
            tracing::warn!(?audit, "a change could not be recorded");
        }
    }
}

impl Change {
    /// Whether this body changes something: some routes also look, or renew. Other routes ignore such flags.
    fn is_made_by(&self, body: &Value) -> bool {
        let is_set = |flag: &str| body.get(flag) == Some(&Value::Bool(true));
        match (&self.method, self.route) {
            (&Method::POST, CHECK) => is_set("repair"),
            (&Method::PUT, TRANSFER) => !is_set("renew"),
            _ => true,
        }
    }

    fn object_path(&self, path: &str, body: &Value) -> Option<String> {
        let text = |key: &str| body.get(key).and_then(Value::as_str);
        match self.object {
            Object::Itself => Some(path.to_owned()),
            Object::Parent => path.rsplit_once('/').map(|(parent, _)| parent.to_owned()),
            Object::At(path) => Some(path.to_owned()),
            Object::Made => match (text("name"), text("tenant"), text("volume")) {
                (Some(name), ..) => Some(format!("{path}/{name}")),
                (None, Some(tenant), Some(volume)) => Some(format!("{path}/{tenant}/{volume}")),
                _ => None,
            },
            Object::Process => None,
        }
    }
}

/// The new object's name, which the request's path lacks.
fn name_of(made: &Value) -> Option<String> {
    let text = |key: &str| made.get(key).and_then(Value::as_str);
    match (text("name"), text("tenant"), text("volume")) {
        (Some(name), ..) => Some(name.to_owned()),
        (None, Some(tenant), Some(volume)) => Some(format!("{tenant}/{volume}")),
        _ => None,
    }
}

fn shown(uri: &Uri) -> String {
    let path = uri.path_and_query().map_or("", |path| path.as_str());
    path.chars().take(1024).collect()
}

/// Of an object that was changed, what differs.
fn differences(before: Option<Value>, after: Option<Value>) -> (Option<Value>, Option<Value>) {
    let (before, after) = match (before, after) {
        (Some(Value::Object(before)), Some(Value::Object(after))) => {
            let only = |one: &Map<String, Value>, other: &Map<String, Value>| {
                let differs = |(key, value): &(&String, &Value)| other.get(*key) != Some(value);
                let some = one.iter().filter(differs);
                Value::Object(
                    some.map(|(key, value)| (key.clone(), value.clone()))
                        .collect(),
                )
            };
            (Some(only(&before, &after)), Some(only(&after, &before)))
        }
        (Some(Value::Array(before)), Some(Value::Array(after))) => {
            let only = |one: &[Value], other: &[Value]| {
                let some = one.iter().filter(|value| !other.contains(value));
                Value::Array(some.cloned().collect())
            };
            (Some(only(&before, &after)), Some(only(&after, &before)))
        }
        other => other,
    };
    (before.map(cut), after.map(cut))
}

fn cut(value: Value) -> Value {
    let text = value.to_string();
    if text.len() <= OBJECT_MAX_BYTES {
        return value;
    }
    let end = text.floor_char_boundary(OBJECT_MAX_BYTES);
    Value::String(format!("{}...", &text[..end]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_route_that_changes_something_is_audited() {
        let document = serde_json::to_value(crate::api::openapi::document()).unwrap();
        let mut routes = 0;
        for (path, methods) in document["paths"].as_object().unwrap() {
            for method in methods.as_object().unwrap().keys() {
                let method: Method = method.to_uppercase().parse().unwrap();
                if method == Method::GET || method.as_str() == "PARAMETERS" {
                    continue;
                }
                let found = find(&method, path);
                assert_eq!(
                    found.map(|change| change.route),
                    Some(path.as_str()),
                    "{method}"
                );
                routes += 1;
            }
        }
        assert_eq!(routes, CHANGES.len() + 1, "a route is gone");
    }

    #[test]
    fn what_is_only_read_is_no_change() {
        assert!(find(&Method::GET, "/v1/pool").is_none());
        assert!(find(&Method::DELETE, "/v1/tenants").is_none());
        assert!(find(&Method::DELETE, "/v1/tenants/").is_none());
        let volume = find(&Method::DELETE, "/v1/tenants/a/volumes/b").unwrap();
        assert!(volume.destroys);
        assert_eq!(
            volume
                .object_path("/v1/tenants/a/volumes/b", &Value::Null)
                .as_deref(),
            Some("/v1/tenants/a/volumes/b")
        );
        let budget = find(&Method::PUT, "/v1/tenants/a/budget").unwrap();
        assert_eq!(
            budget
                .object_path("/v1/tenants/a/budget", &Value::Null)
                .as_deref(),
            Some("/v1/tenants/a")
        );
        let made = |path: &str, body: Value| {
            let change = find(&Method::POST, path).unwrap();
            change.object_path(path, &body).unwrap_or_default()
        };
        let export = json!({"tenant": "a", "volume": "b"});
        assert_eq!(made("/v1/exports", export), "/v1/exports/a/b");
        let volume = json!({"name": "b"});
        let volumes = "/v1/tenants/a/volumes";
        assert_eq!(made(volumes, volume), "/v1/tenants/a/volumes/b");
    }

    #[test]
    fn of_what_changed_the_difference_is_kept() {
        let (before, after) = differences(
            Some(json!({"name": "a", "size": 1, "hosts": ["x"]})),
            Some(json!({"name": "a", "size": 2, "hosts": ["x"]})),
        );
        assert_eq!(
            (before, after),
            (Some(json!({"size": 1})), Some(json!({"size": 2})))
        );
        let gone = differences(Some(json!({"name": "a"})), None);
        assert_eq!(gone, (Some(json!({"name": "a"})), None));
        let list = differences(Some(json!([1, 2])), Some(json!([1, 3])));
        assert_eq!(list, (Some(json!([2])), Some(json!([3]))));
        let long = differences(
            None,
            Some(json!({"text": "\u{e4}".repeat(OBJECT_MAX_BYTES)})),
        );
        assert!(long.1.unwrap().as_str().unwrap().len() <= OBJECT_MAX_BYTES + 3);
    }

    #[test]
    fn no_body_hides_a_change() {
        let all = json!({"renew": true, "repair": false});
        for change in CHANGES.iter().chain([&SHUTDOWN]) {
            let is_other =
                change.route != CHECK && (change.method != Method::PUT || change.route != TRANSFER);
            assert_eq!(change.is_made_by(&all), is_other, "{change:?}");
        }
        let import = find(&Method::PUT, "/v1/tenants/a/volumes/b/transfer").unwrap();
        assert!(import.is_made_by(&json!({"renew": false})));
        let check = find(&Method::POST, CHECK).unwrap();
        assert!(check.is_made_by(&json!({"repair": true})));
    }

    #[test]
    fn what_is_made_has_a_name() {
        let name = |made: Value| name_of(&made).unwrap_or_default();
        assert_eq!(name(json!({"tenant": "acme", "name": "db"})), "db");
        assert_eq!(name(json!({"tenant": "acme", "volume": "db"})), "acme/db");
        assert_eq!(name(json!([])), "");
    }

    #[test]
    fn users_have_names() {
        let users = "root:x:0:0:root:/root:/bin/bash\nann:x:1000:1000::/home/ann:/bin/sh\nbad\n";
        assert_eq!(user_name(users, 1000), "ann");
        assert_eq!(user_name(users, 7), "uid 7");
    }
}
