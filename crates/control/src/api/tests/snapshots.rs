//! Snapshots without an engine: the pool takes them at once.

use forebay_pool::NewSnapshot;

use super::*;

struct Snapshots(Daemon);

impl Snapshots {
    /// Tenants `a` and `b`; `a` has the volumes `v` and `w`.
    fn new() -> Self {
        let this = Self(daemon(with_pool));
        for tenant in ["a", "b"] {
            let body = format!(r#"{{"name":"{tenant}"}}"#);
            assert_eq!(this.post("/v1/tenants", &body).0, 201);
        }
        for volume in ["v", "w"] {
            let body = format!(r#"{{"name":"{volume}","size_bytes":1048576}}"#);
            assert_eq!(this.post("/v1/tenants/a/volumes", &body).0, 201);
        }
        this
    }

    fn post(&self, path: &str, body: &str) -> (u16, Value) {
        exchange(&self.0, "POST", path, Some(body))
    }

    fn get(&self, path: &str) -> (u16, Value) {
        exchange(&self.0, "GET", path, None)
    }

    fn take(&self, volume: &'static str, name: String) {
        let handle = self.0.handle.clone().unwrap();
        let taken = handle.change(move |owner| async move {
            let new = NewSnapshot {
                volume: owner.base.volume_id("a", volume)?,
                name,
            };
            let mut core = owner.base.core.borrow_mut();
            core.pool.snapshots().take(&[new], 1_000).unwrap();
            Ok(())
        });
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.unwrap().block_on(taken).unwrap();
    }

    /// The error's message and hint.
    fn refused(&self, method: &str, path: &str, body: &str, status: u16) -> String {
        let (got, answer) = exchange(&self.0, method, path, Some(body));
        assert_eq!(got, status, "{method} {path} {body}: {answer}");
        let error = &answer["error"];
        format!("{} {}", error["message"], error["hint"])
    }

    fn export(&self, volume: &str, shared: bool) -> Value {
        let body = json!({"tenant": "a", "volume": volume, "any_host": true, "shared": shared})
            .to_string();
        let (status, made) = self.post("/v1/exports", &body);
        assert_eq!(status, 201, "{made}");
        made
    }
}

#[test]
fn wrong_requests_for_snapshots_are_refused() {
    let pool = Snapshots::new();
    let take = |body: &str, status| pool.refused("POST", "/v1/tenants/a/snapshots", body, status);
    take(r#"{"snapshots":[]}"#, 400);
    let hint = take(r#"{"snapshots":["v"]}"#, 400);
    assert!(hint.contains("VOLUME@NAME"), "{hint}");
    take(r#"{"snapshots":["v@Monday"]}"#, 400);
    take(r#"{"snapshots":["x@monday"]}"#, 404);
    let twice = take(r#"{"snapshots":["v@m","v@n"]}"#, 400);
    assert!(twice.contains("twice"), "{twice}");
    let volume = r#"{"name":"v@monday","size_bytes":4096}"#;
    pool.refused("POST", "/v1/tenants/a/volumes", volume, 400);
    let clone = "/v1/tenants/a/volumes/v/clone";
    let hint = pool.refused("POST", clone, r#"{"name":"c"}"#, 400);
    assert!(hint.contains("forebay volume snapshot a/v@NAME"), "{hint}");
    pool.refused("POST", clone, r#"{"name":"c@d"}"#, 400);
    pool.refused("POST", clone, r#"{"name":"c","tenant":"A"}"#, 400);
    let rollback = "/v1/tenants/a/volumes/v/rollback";
    pool.refused("POST", rollback, r#"{"snapshot":"v@monday"}"#, 404);
    pool.refused("POST", rollback, r#"{"snapshot":"v"}"#, 400);
}

#[test]
fn a_snapshot_is_shown_and_cloned_but_not_changed() {
    let pool = Snapshots::new();
    pool.take("v", "monday".to_owned());
    let snapshot = "/v1/tenants/a/volumes/v@monday";
    let (_, shown) = pool.get(snapshot);
    let of = json!({"of": "v", "created_unix_s": 1_000});
    assert_eq!(
        (&shown["name"], &shown["snapshot"]),
        (&json!("v@monday"), &of)
    );
    assert_eq!(
        pool.get("/v1/tenants/a/volumes/v").1["snapshot"],
        Value::Null
    );
    let tenant = pool.get("/v1/tenants/a").1;
    assert_eq!(tenant["volumes"], 3);
    assert_eq!(tenant["provisioned_bytes"], 2 << 20);

    let names = r#"{"snapshots":["w@monday","v@monday"]}"#;
    pool.refused("POST", "/v1/tenants/a/snapshots", names, 409);
    let host = r#"{"host":"nqn.2026-01.io.forebay:transfer:a","kind":"import"}"#;
    for (method, path, body) in [
        ("PATCH", "", r#"{"size_bytes":2097152}"#),
        ("PATCH", "", r#"{"reserved_bytes":4096}"#),
        ("PUT", "/budget", r#"{"burst":{"iops":1000}}"#),
        ("PUT", "/transfer", host),
    ] {
        let error = pool.refused(method, &format!("{snapshot}{path}"), body, 400);
        assert!(error.contains("forebay volume clone a/v@monday"), "{error}");
    }
    let rollback = "/v1/tenants/a/volumes/w/rollback";
    let error = pool.refused("POST", rollback, r#"{"snapshot":"v@monday"}"#, 400);
    assert!(
        error.contains("is not a snapshot of this volume"),
        "{error}"
    );

    let clone = format!("{snapshot}/clone");
    let (status, made) = pool.post(&clone, r#"{"name":"c","tenant":"b"}"#);
    assert_eq!((status, &made["tenant"]), (201, &json!("b")), "{made}");
    assert_eq!(pool.get("/v1/tenants/b/volumes/c").1["size_bytes"], 1 << 20);
    pool.refused("POST", &clone, r#"{"name":"c","tenant":"b"}"#, 409);
    pool.refused("POST", &clone, r#"{"name":"c","tenant":"x"}"#, 404);
    let hint = pool.refused(
        "POST",
        &clone,
        r#"{"name":"d","reserved_bytes":2097152}"#,
        400,
    );
    assert!(hint.contains("reserve less"), "{hint}");
    let hint = pool.refused("DELETE", "/v1/tenants/a", "", 409);
    assert!(hint.contains("snapshots"), "{hint}");
}

#[test]
fn an_export_is_named_by_its_volume_or_snapshot() {
    let pool = Snapshots::new();
    let of_volume = pool.export("v", true);
    assert_eq!(of_volume["read_only"], false);
    let number = of_volume["id"].to_string();
    pool.take("v", number.clone());
    let named = format!("/v1/exports/a/v@{number}");
    // The snapshot has no export yet.
    assert_eq!(pool.get(&named).1["id"], of_volume["id"]);

    let of_snapshot = pool.export(&format!("v@{number}"), false);
    assert_eq!(of_snapshot["read_only"], true);
    let hint = pool.refused("GET", &named, "", 400);
    assert!(hint.contains(&format!("a/v@{number}@NUMBER")), "{hint}");
    let other = format!("{named}@{}", of_snapshot["id"]);
    assert_eq!(pool.get(&other).1["id"], of_snapshot["id"]);
    assert_eq!(pool.get("/v1/exports/a/v").1["id"], of_volume["id"]);
    pool.refused("GET", &format!("{named}@{number}"), "", 404);
    pool.refused("GET", "/v1/exports/a/w@1", "", 404);
    pool.refused("GET", "/v1/exports/a/v@monday", "", 404);
    let hint = pool.refused(
        "DELETE",
        &format!("/v1/tenants/a/volumes/v@{number}"),
        "",
        409,
    );
    assert!(hint.contains("is exported"), "{hint}");
}
