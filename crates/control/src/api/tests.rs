//! Tests of the API over a real socket.

mod snapshots;

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tokio::task::LocalSet;

use super::client::{Client, ClientError};
use super::{BODY_MAX_BYTES, bind, openapi, serve};
use crate::config::{DaemonConfig, EmbeddedPool};
use crate::daemon::{DaemonRequest, Handle, channel};
use crate::model::error::{ApiError, ErrorKind};
use crate::model::*;
use crate::ownership::Installation;

struct Daemon {
    client: Client,
    handle: Option<Handle>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
    _folder: tempfile::TempDir,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        drop((self.handle.take(), self.stop.take()));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Starts the API with `owner` in place of the daemon's loop.
fn daemon<F>(owner: impl FnOnce(mpsc::Receiver<DaemonRequest>) -> F + Send + 'static) -> Daemon
where
    F: Future<Output = ()>,
{
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("api.sock");
    let path = socket.clone();
    let (stop, stopped) = oneshot::channel();
    let (ready, is_ready) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(LocalSet::new().run_until(async move {
            let listener = bind(&path).unwrap();
            let (handle, requests) = channel();
            ready.send(handle.clone()).unwrap();
            let stop = async {
                let _ = stopped.await;
            };
            tokio::join!(serve(listener, handle, stop), owner(requests));
        }));
    });
    Daemon {
        handle: Some(is_ready.recv().unwrap()),
        client: Client::new(&socket).with_time_limit(Duration::from_secs(20)),
        stop: Some(stop),
        thread: Some(thread),
        _folder: folder,
    }
}

async fn without_pool(requests: mpsc::Receiver<DaemonRequest>) {
    let folder = tempfile::tempdir().unwrap();
    serve_from(folder.path(), None, requests).await;
}

async fn with_pool(requests: mpsc::Receiver<DaemonRequest>) {
    // A pool needs direct I/O, which a tmpfs may refuse.
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let pool = EmbeddedPool {
        path: folder.path().join("pool.img"),
        size_bytes: 64 << 20,
    };
    serve_from(folder.path(), Some(pool), requests).await;
}

/// Handles requests until there are no more. Answers a shutdown, but does not stop.
async fn serve_from(
    folder: &Path,
    embedded_pool: Option<EmbeddedPool>,
    mut requests: mpsc::Receiver<DaemonRequest>,
) {
    let config = DaemonConfig {
        state_dir: folder.to_owned(),
        run_dir: folder.to_owned(),
        embedded_pool,
        ..DaemonConfig::empty()
    };
    let me = Arc::new(Installation::claim(folder).unwrap());
    let no_metrics = Box::new(|_| tokio::task::spawn_local(async {}));
    let daemon = crate::daemon::Daemon::new(config, me, Box::new(()), no_metrics);
    let daemon = Rc::new(daemon);
    daemon.clone().start().await.unwrap();
    while let Some(request) = requests.recv().await {
        match request {
            DaemonRequest::Call(call) => call(&daemon),
            DaemonRequest::Shutdown(reply) => drop(reply.send(Ok(()))),
        }
    }
    daemon.stop().await.unwrap();
}

fn refusal(result: Result<impl std::fmt::Debug, ClientError>) -> ApiError {
    match result {
        Err(ClientError::Refused(error)) => error,
        other => panic!("not refused: {other:?}"),
    }
}

fn declared(method: &str, path: &str) -> Option<Vec<String>> {
    let document = serde_json::to_value(openapi::build()).unwrap();
    let asked: Vec<&str> = path.split('?').next()?.split('/').collect();
    let is_it = |template: &str| {
        let parts: Vec<&str> = template.split('/').collect();
        parts.len() == asked.len()
            && (parts.iter().zip(&asked))
                .all(|(part, asked)| part.starts_with('{') || part == asked)
    };
    let paths = document["paths"].as_object().unwrap();
    let (_, methods) = paths.iter().find(|(template, _)| is_it(template))?;
    let answers = methods.get(method.to_lowercase())?["responses"].as_object()?;
    Some(answers.keys().cloned().collect())
}

fn exchange(daemon: &Daemon, method: &str, path: &str, body: Option<&str>) -> (u16, Value) {
    let (status, body) = daemon
        .client
        .exchange(method, path, body.map(str::as_bytes))
        .expect("an answer");
    if let Some(declared) = declared(method, path) {
        let is_one = declared.contains(&status.to_string());
        assert!(
            is_one || !(400..500).contains(&status),
            "{method} {path}: {status}"
        );
    }
    (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

#[test]
fn create_list_delete() {
    let daemon = daemon(with_pool);
    let body = TenantCreate {
        name: "acme".to_owned(),
    };
    let made: Tenant = daemon.client.post("/v1/tenants", &body).unwrap();
    assert_eq!(made.name, "acme");
    let error = refusal(daemon.client.post::<_, Tenant>("/v1/tenants", &body));
    assert_eq!(error.kind, ErrorKind::Exists);
    let all: Vec<Tenant> = daemon.client.get("/v1/tenants").unwrap();
    assert_eq!(all, [made]);
    let done: Done = daemon.client.delete("/v1/tenants/acme").unwrap();
    assert_eq!(done.done, "tenant acme deleted");
    let error = refusal(daemon.client.delete::<Done>("/v1/tenants/acme"));
    assert_eq!(error.kind, ErrorKind::NotFound);
}

#[test]
fn statuses_follow_the_kind() {
    let daemon = daemon(with_pool);
    assert_eq!(
        exchange(&daemon, "POST", "/v1/tenants", Some(r#"{"name":"a"}"#)).0,
        201
    );
    assert_eq!(
        exchange(&daemon, "POST", "/v1/tenants", Some(r#"{"name":"a"}"#)).0,
        409
    );
    assert_eq!(exchange(&daemon, "DELETE", "/v1/tenants/b", None).0, 404);
    let volume = r#"{"name":"v","size_bytes":4096}"#;
    let volumes = "/v1/tenants/a/volumes";
    assert_eq!(exchange(&daemon, "POST", volumes, Some(volume)).0, 201);
    assert_eq!(
        exchange(&daemon, "DELETE", "/v1/pool?name=pool", None).0,
        409
    );
    let destroy = "/v1/pool?name=pool&delete_volumes=true";
    assert_eq!(exchange(&daemon, "DELETE", destroy, None).0, 200);
}

#[test]
fn a_request_that_is_dropped_is_unavailable() {
    let daemon = daemon(|mut requests| async move { while requests.recv().await.is_some() {} });
    let (status, body) = exchange(&daemon, "GET", "/v1/status", None);
    assert_eq!(
        (status, &body["error"]["kind"]),
        (503, &json!("unavailable"))
    );
}

#[test]
fn unknown_field_is_named_with_the_accepted_ones() {
    let daemon = daemon(without_pool);
    let (status, body) = exchange(
        &daemon,
        "POST",
        "/v1/tenants/acme/volumes",
        Some(r#"{"name":"v","size_bytes":4096,"colour":"red"}"#),
    );
    assert_eq!(status, 400);
    assert_eq!(body["error"]["kind"], "invalid");
    let message = body["error"]["message"].as_str().unwrap();
    for part in ["`colour`", "`name`", "`size_bytes`", "`block_bytes`"] {
        assert!(message.contains(part), "{message}");
    }
    for (method, path) in [
        ("POST", "/v1/pool"),
        ("PATCH", "/v1/pool"),
        ("POST", "/v1/pool/open"),
        ("POST", "/v1/pool/check"),
        ("POST", "/v1/devices"),
        ("POST", "/v1/tenants"),
        ("PATCH", "/v1/tenants/a/volumes/b"),
        ("POST", "/v1/tenants/a/snapshots"),
        ("POST", "/v1/tenants/a/volumes/b/clone"),
        ("POST", "/v1/tenants/a/volumes/b/rollback"),
        ("POST", "/v1/exports"),
        ("PATCH", "/v1/exports/a/b"),
    ] {
        let (status, body) = exchange(&daemon, method, path, Some(r#"{"colour":1}"#));
        let message = body["error"]["message"].as_str().unwrap();
        assert_eq!(status, 400, "{message}");
        assert!(message.contains("unknown field `colour`"), "{message}");
    }
}

#[test]
fn wrong_bodies() {
    let daemon = daemon(without_pool);
    for (body, part) in [
        ("", "EOF"),
        ("{", "EOF"),
        ("[]", "missing field `name`"),
        (r#"{"name":5}"#, "`name`: invalid type"),
        (r#"{"name":"a"} x"#, "trailing"),
        (r#"{"name":"a","name":"b"}"#, "duplicate field `name`"),
        (r#"{"name":"A"}"#, "can't be a tenant's name"),
        (r#"{}"#, "missing field `name`"),
    ] {
        let (status, answer) = exchange(&daemon, "POST", "/v1/tenants", Some(body));
        let message = answer["error"]["message"].as_str().unwrap();
        assert_eq!(status, 400, "{body}: {message}");
        assert!(body == "[]" || message.contains(part), "{body}: {message}");
    }
    let (status, _) = exchange(
        &daemon,
        "POST",
        "/v1/tenants/a/volumes",
        Some(r#"{"name":"v","size_bytes":-1}"#),
    );
    assert_eq!(status, 400);
    let (status, answer) = exchange(&daemon, "POST", "/v1/pool", Some(r#"{"devices":[]}"#));
    assert_eq!(status, 400);
    assert!(
        answer["error"]["hint"]
            .as_str()
            .unwrap()
            .contains("devices")
    );
    let export = r#"{"tenant":"a","volume":"b","hosts":["iqn.x"]}"#;
    let (status, answer) = exchange(&daemon, "POST", "/v1/exports", Some(export));
    assert_eq!(status, 400);
    assert!(
        answer["error"]["message"]
            .as_str()
            .unwrap()
            .contains("iqn.x")
    );
}

#[test]
fn wrong_numbers_of_budgets_are_named_with_what_would_fit() {
    let daemon = daemon(without_pool);
    let (iops, bytes) = ("10 to 20000000", "65536 to 100000000000");
    for (body, parts) in [
        (r#"{"base":{"iops":-5}}"#, ["`base.iops`", "`-5`", iops]),
        (r#"{"base":{"iops":1.5}}"#, ["`base.iops`", "`1.5`", iops]),
        (r#"{"base":{"iops":"2000"}}"#, ["`base.iops`", "2000", iops]),
        (
            r#"{"base":{"bytes_s":1e30}}"#,
            ["`base.bytes_s`", "1e+30", bytes],
        ),
        (
            r#"{"burst":{"bytes_s":99999999999999999999}}"#,
            ["`burst.bytes_s`", "1e+20", bytes],
        ),
        (
            r#"{"base":{"iops":NaN}}"#,
            ["`base.iops`", "expected", "value"],
        ),
        (
            r#"{"base":{"iops":1e999}}"#,
            ["`base.iops`", "out of range", ""],
        ),
        (r#"{"credit_s":-1}"#, ["`credit_s`", "`-1`", "1 to 604800"]),
        (
            r#"{"credit_s":99999999999}"#,
            ["`credit_s`", "`99999999999`", "1 to 604800"],
        ),
        (r#"{"base":2000}"#, ["`base`", "2000", "or both"]),
        (
            r#"{"base":{"speed":1}}"#,
            ["`speed`", "`iops`", "`bytes_s`"],
        ),
        (r#"{"basis":{}}"#, ["`basis`", "`base`", "`credit_s`"]),
    ] {
        for path in ["/v1/tenants/a/budget", "/v1/tenants/a/volumes/b/budget"] {
            let (status, answer) = exchange(&daemon, "PUT", path, Some(body));
            let message = answer["error"]["message"].as_str().unwrap();
            assert_eq!(status, 400, "{body}: {message}");
            for part in parts {
                assert!(message.contains(part), "{body}: {message}");
            }
        }
    }
}

#[test]
fn large_body_is_refused() {
    let daemon = daemon(without_pool);
    let body = format!(r#"{{"name":"{}"}}"#, "a".repeat(BODY_MAX_BYTES));
    let (status, answer) = exchange(&daemon, "POST", "/v1/tenants", Some(&body));
    assert_eq!(status, 413);
    assert_eq!(
        answer["error"]["message"],
        "the request body is too large: at most 262144 bytes are read"
    );
}

#[test]
fn unknown_routes_methods_queries_and_paths() {
    let daemon = daemon(without_pool);
    let (status, body) = exchange(&daemon, "GET", "/v1/nothing", None);
    assert_eq!((status, &body["error"]["kind"]), (404, &json!("not_found")));
    let (status, body) = exchange(&daemon, "PUT", "/v1/tenants", None);
    assert_eq!((status, &body["error"]["kind"]), (405, &json!("invalid")));
    let (status, body) = exchange(&daemon, "DELETE", "/v1/pool?colour=red", None);
    assert_eq!(status, 400);
    assert!(
        body["error"]["message"]
            .as_str()
            .unwrap()
            .contains("`colour`")
    );
    assert_eq!(exchange(&daemon, "DELETE", "/v1/pool", None).0, 400);
    for path in [
        "/v1/tenants/A",
        "/v1/tenants/%ff",
        "/v1/exports/a/%2e%2e",
        "/v1/tenants/a%2Fb",
    ] {
        let (status, body) = exchange(&daemon, "GET", path, None);
        assert_eq!(
            (status, &body["error"]["kind"]),
            (400, &json!("invalid")),
            "{path}"
        );
    }
}

#[test]
fn bytes_that_are_not_http_only_end_their_connection() {
    use std::io::{Read, Write};
    let daemon = daemon(with_pool);
    let mut stream = std::os::unix::net::UnixStream::connect(daemon.client.socket()).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    stream
        .write_all(&[0x16, 3, 1, 0, 0xff, 0xff, b'\r', b'\n', b'\r', b'\n'])
        .unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert_eq!(daemon.client.get::<Vec<Tenant>>("/v1/tenants").unwrap(), []);
}

#[test]
fn owner_that_is_gone_is_unavailable() {
    let daemon = daemon(|requests| async move { drop(requests) });
    let error = refusal(daemon.client.get::<Status>("/v1/status"));
    assert_eq!(error.kind, ErrorKind::Unavailable);
    assert!(error.hint.is_some());
}

#[test]
fn owner_that_is_silent_ends_in_a_time_limit() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let (handle, _requests) = channel();
        let router = super::router::router(handle, Duration::from_millis(20));
        let (stream, ours) = tokio::net::UnixStream::pair().unwrap();
        let answer = tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(
            hyper_util::rt::TokioIo::new(stream),
            hyper_util::service::TowerToHyperService::new(router),
        ));
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let mut ours = ours;
        ours.write_all(b"GET /v1/status HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            .await
            .unwrap();
        let mut text = String::new();
        ours.read_to_string(&mut text).await.unwrap();
        answer.await.unwrap().unwrap();
        assert!(text.starts_with("HTTP/1.1 504"), "{text}");
        assert!(text.contains("may still complete"), "{text}");
    });
}

#[test]
fn a_second_daemon_is_refused_and_a_stale_socket_is_taken() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let _inside = runtime.enter();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("api.sock");
    let first = bind(&path).unwrap();
    let error = bind(&path).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
    let own = format!("pid {}", std::process::id());
    assert!(error.to_string().contains(&own), "{error}");
    drop(first);
    assert!(!path.exists());
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    drop(bind(&path).unwrap());
    let long = folder.path().join("x".repeat(120));
    assert_eq!(
        bind(&long).unwrap_err().kind(),
        std::io::ErrorKind::InvalidInput
    );
}

#[test]
fn openapi_has_not_drifted() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/openapi.json");
    let text = openapi::text().unwrap();
    if std::env::var_os("UPDATE_OPENAPI").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == text,
        "docs/openapi.json is not what the code says; rewrite it with \
         UPDATE_OPENAPI=1 cargo test -p forebay-control openapi_has_not_drifted"
    );
}

#[test]
fn every_documented_route_exists_and_every_error_is_json() {
    let daemon = daemon(without_pool);
    let document = serde_json::to_value(openapi::build()).unwrap();
    let mut routes = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        let path = path
            .replace("{tenant}", "a")
            .replace("{volume}", "b")
            .replace("{index}", "0");
        for method in methods.as_object().unwrap().keys() {
            let (status, body) = exchange(&daemon, &method.to_uppercase(), &path, Some("{}"));
            assert_ne!(status, 405, "{method} {path}");
            if status >= 400 {
                let message = body["error"]["message"].as_str().unwrap();
                assert!(
                    !message.contains("there is no route"),
                    "{method} {path}: {message}"
                );
            }
            routes += 1;
        }
    }
    assert!(routes > 20, "{routes}");
}

#[test]
fn other_users_are_refused() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(LocalSet::new().run_until(async {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api.sock");
        let listener = bind(&path).unwrap();
        let (handle, requests) = channel();
        let client = Client::new(&path).with_time_limit(Duration::from_secs(20));
        let call = tokio::task::spawn_blocking(move || client.get::<Vec<Tenant>>("/v1/tenants"));
        let (stop, stopped) = oneshot::channel::<()>();
        let (answer, (), ()) = tokio::join!(
            async {
                let answer = call.await.unwrap();
                drop(stop);
                answer
            },
            super::server::serve_those(listener, handle, |_| false, async {
                let _ = stopped.await;
            }),
            without_pool(requests),
        );
        let error = refusal(answer);
        assert_eq!(error.kind, ErrorKind::Forbidden);
    }));
    assert!(super::server::may_call(0, 1000) && super::server::may_call(1000, 1000));
    assert!(!super::server::may_call(1001, 1000) && !super::server::may_call(1000, 0));
}

#[test]
fn handle_is_send_and_clone() {
    fn check<T: Send + Sync + Clone + 'static>() {}
    check::<Handle>();
}
