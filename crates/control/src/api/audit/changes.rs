//! The routes that change something, and the objects that they change. A test compares this with
//! the OpenAPI document.

use axum::http::Method;
use serde_json::Value;

const DESTRUCTIVE_FLAGS: [&str; 5] = ["force", "overwrite", "disconnect_hosts", "repair", "shrink"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Object {
    /// `GET` of the change's path shows it.
    Itself,
    /// `GET` of the path without its last segment shows it.
    Parent,
    /// `GET` of this path shows it.
    At(&'static str),
    /// The answer contains it; before, `GET` of the path and its name shows it.
    Made,
    /// Only the answer contains it.
    Answered,
    Process,
}

#[derive(Debug)]
pub(super) struct AuditedRoute {
    pub(super) method: Method,
    pub(super) route: &'static str,
    pub(super) action: &'static str,
    pub(super) object: Object,
    destroys: bool,
}

const fn change(
    method: Method,
    route: &'static str,
    action: &'static str,
    object: Object,
) -> AuditedRoute {
    AuditedRoute {
        method,
        route,
        action,
        object,
        destroys: false,
    }
}

const fn destruction(route: &'static str, action: &'static str) -> AuditedRoute {
    AuditedRoute {
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
const SNAPSHOTS: &str = "/v1/tenants/{tenant}/snapshots";
const CLONE: &str = "/v1/tenants/{tenant}/volumes/{volume}/clone";
const ROLLBACK: &str = "/v1/tenants/{tenant}/volumes/{volume}/rollback";
const TRANSFER: &str = "/v1/tenants/{tenant}/volumes/{volume}/transfer";
const EXPORT: &str = "/v1/exports/{tenant}/{volume}";
const RESUME: &str = "/v1/exports/{tenant}/{volume}/resume";
const COSTS: &str = "/v1/scheduling/costs";
const CALIBRATION: &str = "/v1/scheduling/calibration";
const SCHEDULING: &str = "/v1/scheduling";
const POOL: &str = "/v1/pool";
const CHECK: &str = "/v1/pool/check";

static CHANGES: [AuditedRoute; 36] = [
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
    change(Method::POST, SNAPSHOTS, "take snapshots", Object::Answered),
    change(Method::POST, CLONE, "clone a snapshot", Object::Answered),
    AuditedRoute {
        method: Method::POST,
        route: ROLLBACK,
        action: "roll a volume back",
        object: Object::Parent,
        destroys: true,
    },
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
    change(
        Method::POST,
        "/v1/firmware/install",
        "install firmware",
        Object::Parent,
    ),
    change(
        Method::POST,
        "/v1/firmware/activate",
        "activate firmware",
        Object::Parent,
    ),
];
/// Recorded before it runs, because a stopped daemon records nothing.
pub(super) static SHUTDOWN: AuditedRoute =
    change(Method::POST, "/v1/shutdown", "shut down", Object::Process);

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

pub(super) fn find(method: &Method, path: &str) -> Option<&'static AuditedRoute> {
    (CHANGES.iter())
        .chain([&SHUTDOWN])
        .find(|change| change.method == *method && is_of(change.route, path))
}

impl AuditedRoute {
    /// Some routes may also only check or renew.
    pub(super) fn is_made_by(&self, body: &Value) -> bool {
        let is_set = |flag: &str| body.get(flag) == Some(&Value::Bool(true));
        match (&self.method, self.route) {
            (&Method::POST, CHECK) => is_set("repair"),
            (&Method::PUT, TRANSFER) => !is_set("renew"),
            _ => true,
        }
    }

    /// Whether this destroys data or disconnects hosts, or may do so.
    pub(super) fn is_destructive(&self, body: &Value) -> bool {
        let is_set = |flag: &str| body.get(flag) == Some(&Value::Bool(true));
        self.destroys || DESTRUCTIVE_FLAGS.into_iter().any(is_set)
    }

    pub(super) fn object_path(&self, path: &str, body: &Value) -> Option<String> {
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
            Object::Answered | Object::Process => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_route_that_changes_something_is_audited() {
        let document = serde_json::to_value(crate::api::openapi::build()).unwrap();
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
    fn read_only_requests_are_not_audited() {
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
        let clone = json!({"name": "b"});
        assert_eq!(made("/v1/tenants/a/volumes/b@c/clone", clone), "");
        let rollback = "/v1/tenants/a/volumes/b/rollback";
        assert!(find(&Method::POST, rollback).unwrap().destroys);
        assert_eq!(made(rollback, json!({})), "/v1/tenants/a/volumes/b");
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
}
