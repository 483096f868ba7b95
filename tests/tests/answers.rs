//! Exit codes, errors as JSON, and answers to conflicting requests.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_tests::api::Api;
use forebay_tests::daemon::{Daemon, DaemonOptions, program};
use serde_json::Value;

fn start() -> Result<Daemon> {
    let daemon = Daemon::start(&DaemonOptions::default())?;
    let device = format!("file:{}", daemon.folder().join("pool.img").display());
    daemon.create_pool(&["--device", &device, "--size", "256M"])?;
    daemon.cli(&["tenant", "create", "acme"])?;
    daemon.cli(&["volume", "create", "acme/db", "--size", "16M"])?;
    Ok(daemon)
}

/// The exit code, and stderr.
fn run(daemon: &Daemon, args: &[&str]) -> Result<(i32, String)> {
    let output = daemon.cli_command(args).output()?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    Ok((output.status.code().context("a signal")?, text))
}

#[test]
fn exit_codes() -> Result<()> {
    let mut daemon = start()?;
    daemon.cli(&["export", "create", "acme/db", "--any-host"])?;
    daemon.cli(&["volume", "create", "acme/empty", "--size", "1M"])?;
    let image = daemon.folder().join("pool.img").display().to_string();
    let missing = daemon.folder().join("missing").display().to_string();
    let below = format!("{missing}/below");
    let status = daemon.cli(&["status"])?;
    ensure!(status["health"] == "well", "{status}");
    ensure!(
        status["capacity"]["free_bytes"].as_u64() > Some(0),
        "{status}"
    );
    for (args, code, kind) in [
        (&["status"][..], 0, ""),
        (&["status", "--check"], 0, ""),
        (&["volume", "delete", "acme/db"], 1, "in_use"),
        (&["volume", "delete"], 2, "usage"),
        (&["tenant", "show", "nobody"], 4, "not_found"),
        (&["volume", "show", "acme/nothing"], 4, "not_found"),
        (&["tenant", "create", "acme"], 5, "exists"),
        (
            &[
                "export",
                "set",
                "acme/db",
                "--remove-host",
                "nqn.2026-01.org:typo",
            ],
            4,
            "not_found",
        ),
        (
            &["export", "set", "acme/db", "--add-host", "nqn.typo"],
            1,
            "invalid",
        ),
        (&["export", "create", "acme/empty"], 1, "invalid"),
        (
            &["volume", "import", &missing, "acme/empty"],
            4,
            "not_found",
        ),
        (&["volume", "export", "acme/empty", &below], 4, "not_found"),
        (&["volume", "export", "acme/empty", &image], 5, "exists"),
        (&["device", "add", &missing], 4, "not_found"),
        (
            &["device", "add", &below, "--create", "--size", "64M"],
            4,
            "not_found",
        ),
        (&["device", "add", &image], 5, "exists"),
        (&["pool", "open", "--device", &missing], 4, "not_found"),
        (&["serve", "--config", &missing], 4, "not_found"),
    ] {
        let (is, text) = run(&daemon, args)?;
        ensure!(is == code, "{args:?}: {is} {text}");
        if code > 0 {
            let error: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
            ensure!(error["error"]["kind"] == kind, "{args:?}: {text}");
            ensure!(error["error"]["message"].is_string(), "{args:?}: {text}");
        }
    }
    let nowhere = [
        "--json",
        "--socket",
        "/nowhere/api.sock",
        "status",
        "--check",
    ];
    let output = Command::new(program()).args(nowhere).output()?;
    ensure!(output.status.code() == Some(3), "{output:?}");
    let error: Value = serde_json::from_slice(&output.stderr)?;
    ensure!(error["error"]["kind"] == "unreachable", "{error}");
    daemon.cli(&["scheduling", "set", "--oversubscription", "100"])?;
    daemon.cli(&["tenant", "budget", "acme", "--base-iops", "10M"])?;
    daemon.cli(&["scheduling", "set", "--oversubscription", "1"])?;
    let (is, text) = run(&daemon, &["status", "--check"])?;
    ensure!(is == 1, "{is} {text} {}", daemon.status()?);
    daemon.shut_down()?;
    let away = daemon.folder().join("away");
    std::fs::create_dir(&away)?;
    std::fs::rename(daemon.folder().join("pool.img"), away.join("pool.img"))?;
    daemon.start_again()?;
    let (is, text) = run(&daemon, &["status", "--check"])?;
    ensure!(is == 2, "{is} {text}");
    ensure!(run(&daemon, &["status"])?.0 == 0, "packages rely on it");
    daemon.stop()
}

/// A slow client can read the refusal.
#[test]
fn api_refusal_is_read() -> Result<()> {
    let mut daemon = start()?;
    let part = vec![b' '; 100_000];
    for (request, status) in [
        ("POST /v1/tenants", "400"),
        ("POST /v1/nowhere", "404"),
        ("DELETE /v1/events", "405"),
        ("PUT /v1/tenants/Bad/budget", "400"),
        ("PATCH /v1/pool", "400"),
    ] {
        let mut stream = UnixStream::connect(daemon.socket())?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        let length = 2 * part.len() + 11;
        write!(
            stream,
            "{request} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
        )?;
        for _ in 0..2 {
            stream.write_all(&part)?;
            std::thread::sleep(Duration::from_millis(30));
        }
        stream.write_all(b"[null,null]")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        ensure!(
            answer.starts_with(&format!("HTTP/1.1 {status}")),
            "{request}: {answer}"
        );
        ensure!(answer.contains(r#""message""#), "{request}: {answer}");
    }
    // A body that is too large is read, up to a limit.
    let mut api = Api::connect(&daemon.socket())?;
    let large = " ".repeat(4 << 20);
    let (status, _) = api.call("POST", "/v1/tenants", &large)?;
    ensure!(status == 413, "{status}");
    for (method, path, body) in [
        ("PATCH", "/v1/pool", "[null,null]"),
        ("PATCH", "/v1/pool", r#"{"placement":{"fill":null}}"#),
        ("POST", "/v1/tenants", r#"["x"]"#),
        ("PUT", "/v1/tenants/acme/budget", r#"{"base":[100,65536]}"#),
    ] {
        let (status, answer) = api.call(method, path, body)?;
        let answer = answer.to_string();
        ensure!(
            status == 400 && answer.contains("object"),
            "{path}: {status} {answer}"
        );
    }
    daemon.stop()
}

/// One client creates while another deletes.
#[test]
fn conflicting_requests_are_named() -> Result<()> {
    const ROUNDS: usize = 150;
    let mut daemon = start()?;
    let socket = daemon.socket().to_owned();
    let deleter = std::thread::spawn(move || -> Result<()> {
        let mut api = Api::connect(&socket)?;
        for _ in 0..2 * ROUNDS {
            for path in [
                "/v1/exports/acme/v?disconnect_hosts=true",
                "/v1/tenants/acme/volumes/v",
                "/v1/tenants/t",
            ] {
                let (status, answer) = api.call("DELETE", path, "")?;
                ensure!(
                    matches!(status, 200 | 404 | 409),
                    "{path}: {status} {answer}"
                );
            }
        }
        Ok(())
    });
    let mut api = Api::connect(&daemon.socket())?;
    let mut made = [0; 3];
    for _ in 0..ROUNDS {
        for (at, (path, body, names)) in [
            ("/v1/tenants", r#"{"name":"t"}"#, r#"\"t\""#),
            (
                "/v1/tenants/acme/volumes",
                r#"{"name":"v","size_bytes":1048576}"#,
                r#"\"v\""#,
            ),
            (
                "/v1/exports",
                r#"{"tenant":"acme","volume":"v","any_host":true}"#,
                "v",
            ),
        ]
        .into_iter()
        .enumerate()
        {
            let (status, answer) = api.call("POST", path, body)?;
            let answer = answer.to_string();
            // Only an export depends on something that may be deleted.
            let may_miss = path == "/v1/exports";
            match status {
                201 => made[at] += 1,
                404 if may_miss => ensure!(answer.contains(names), "{path}: {answer}"),
                409 => ensure!(answer.contains(names), "{path}: {answer}"),
                _ => anyhow::bail!("{path}: {status} {answer}"),
            }
        }
    }
    let deleted = deleter.join().map_err(|_| anyhow::anyhow!("a panic"))?;
    deleted?;
    ensure!(made.iter().all(|made| *made > 0), "{made:?}");
    daemon.stop()
}

/// Method, path, body.
type Asked = (&'static str, &'static str, &'static str);

const MAKE_VOLUME: Asked = (
    "POST",
    "/v1/tenants/acme/volumes",
    r#"{"name":"w","size_bytes":1048576}"#,
);
const MAKE_EXPORT: Asked = (
    "POST",
    "/v1/exports",
    r#"{"tenant":"acme","volume":"w","any_host":true}"#,
);
const END_VOLUME: Asked = ("DELETE", "/v1/tenants/acme/volumes/w", "");
const END_EXPORT: Asked = ("DELETE", "/v1/exports/acme/w", "");

/// Concurrent requests see the state before or after each other, and name the conflicting object.
#[test]
fn requests_at_once_have_turns() -> Result<()> {
    let mut daemon = start()?;
    let mut api = Api::connect(&daemon.socket())?;
    // With budgets, the engine also gets an export's tenant.
    let budget = (
        "PUT",
        "/v1/tenants/acme/budget",
        r#"{"burst":{"iops":100000}}"#,
    );
    api.must(budget.0, budget.1, budget.2)?;
    let both = &[MAKE_VOLUME, MAKE_EXPORT][..];
    let resize: Asked = (
        "PATCH",
        "/v1/tenants/acme/volumes/w",
        r#"{"size_bytes":2097152}"#,
    );
    let limit: Asked = (
        "PUT",
        "/v1/tenants/acme/volumes/w/budget",
        r#"{"burst":{"iops":1000}}"#,
    );
    let hosts: Asked = ("PATCH", "/v1/exports/acme/w", r#"{"any_host":false}"#);
    let tenant: Asked = ("POST", "/v1/tenants", r#"{"name":"t"}"#);
    let of_tenant: Asked = ("PUT", "/v1/tenants/t/budget", r#"{"burst":{"iops":1000}}"#);
    let in_tenant: Asked = (
        "POST",
        "/v1/tenants/t/volumes",
        r#"{"name":"w","size_bytes":1048576}"#,
    );
    let end_tenant: Asked = ("DELETE", "/v1/tenants/t", "");
    let pairs: [(usize, &[Asked], Asked, Asked); 12] = [
        (120, &[], MAKE_VOLUME, MAKE_EXPORT),
        (120, both, END_EXPORT, END_VOLUME),
        (40, &both[..1], resize, END_VOLUME),
        (40, &both[..1], limit, END_VOLUME),
        (40, &both[..1], MAKE_EXPORT, END_VOLUME),
        (20, &[], MAKE_VOLUME, MAKE_VOLUME),
        (20, &both[..1], END_VOLUME, END_VOLUME),
        (20, &both[..1], MAKE_EXPORT, MAKE_EXPORT),
        (20, both, hosts, END_EXPORT),
        (20, both, END_EXPORT, END_EXPORT),
        (20, &[tenant], of_tenant, end_tenant),
        (20, &[tenant], in_tenant, end_tenant),
    ];
    let (ask, asked) = std::sync::mpsc::channel::<Asked>();
    let (say, said) = std::sync::mpsc::channel();
    let mut other = Api::connect(&daemon.socket())?;
    let worker = std::thread::spawn(move || -> Result<()> {
        for (method, path, body) in asked {
            say.send(other.call(method, path, body)?)?;
        }
        Ok(())
    });
    for (rounds, before, one, two) in pairs {
        for round in 0..rounds {
            for (method, path, body) in before {
                api.must(method, path, body)?;
            }
            let (first, second) = if round % 2 == 0 {
                (one, two)
            } else {
                (two, one)
            };
            ask.send(first)?;
            let answer = api.call(second.0, second.1, second.2)?;
            for (asked, (status, answer)) in [(first, said.recv()?), (second, answer)] {
                let text = answer["error"]["message"].as_str().unwrap_or_default();
                let is_numbered = text
                    .split("volume ")
                    .skip(1)
                    .any(|rest| rest.starts_with(|first: char| first.is_ascii_digit()));
                ensure!(
                    matches!(status, 200 | 201 | 404 | 409) && !is_numbered,
                    "{first:?} and {second:?}: {asked:?}: {status} {answer}"
                );
            }
            for path in [
                END_EXPORT.1,
                END_VOLUME.1,
                "/v1/tenants/t/volumes/w",
                end_tenant.1,
            ] {
                let (status, answer) = api.call("DELETE", path, "")?;
                ensure!(matches!(status, 200 | 404), "{path}: {status} {answer}");
            }
        }
    }
    drop(ask);
    worker.join().map_err(|_| anyhow::anyhow!("a panic"))??;
    daemon.stop()
}

#[test]
fn completion_knows_names() -> Result<()> {
    let mut daemon = start()?;
    daemon.cli(&["tenant", "create", "acorn"])?;
    daemon.cli(&["export", "create", "acme/db", "--any-host"])?;
    let socket = daemon.socket().display().to_string();
    for (words, has) in [
        (&["tenant", "show", "ac"][..], &["acme", "acorn"][..]),
        (&["volume", "show", "acme/"], &["acme/db"]),
        (&["volume", "create", "a"], &["acme/", "acorn/"]),
        (&["export", "delete", ""], &["acme/db"]),
        (&["volume", "sh"], &["show"]),
        (&["e"], &["events", "export"]),
        // Hidden commands are not offered.
        (&["en"], &[]),
        (&["form"], &[]),
    ] {
        let output = Command::new(program())
            .env("COMPLETE", "bash")
            .env("_CLAP_COMPLETE_INDEX", words.len().to_string())
            .env("_CLAP_COMPLETE_COMP_TYPE", "9")
            .env("_CLAP_IFS", "\n")
            .env("FOREBAY_SOCKET", daemon.socket())
            .args(["--", "forebay"])
            .args(words)
            .output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let found: Vec<&str> = text.lines().collect();
        for name in has {
            ensure!(found.contains(name), "{words:?}: {text}");
        }
        ensure!(!has.is_empty() || found.is_empty(), "{words:?}: {text}");
    }
    // As bash calls it: `@` ends a word, and the line names the socket.
    daemon.cli(&["volume", "create", "acme/vm", "--size", "1M"])?;
    for _ in 0..2 {
        daemon.cli(&["export", "create", "acme/vm", "--nvme-pcie", "--shared"])?;
    }
    let folder = program()
        .parent()
        .context("a folder")?
        .display()
        .to_string();
    for (line, part, wanted) in [
        ("export show acme/v", "acme/v", "acme/vm@"),
        ("export show acme/vm@", "", ""),
        ("export show acme/vm@", "@", ""),
        ("volume show acme/v", "acme/v", "acme/vm"),
    ] {
        let script = format!(
            "PATH={folder}:$PATH; eval \"$(forebay completion bash)\"; COMP_TYPE=9; COMP_LINE='forebay --socket={socket} {line}'; \
             COMP_POINT=${{#COMP_LINE}}; _forebay forebay '{part}' show; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        );
        let output = Command::new("bash")
            .args(["--norc", "-c", &script])
            .env_remove("FOREBAY_SOCKET")
            .current_dir("/")
            .output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let found: Vec<&str> = text.lines().collect();
        let fits = match wanted {
            // Only the numbers: bash has the rest already.
            "" => found.len() == 2 && found.iter().all(|one| one.parse::<u32>().is_ok()),
            wanted => !found.is_empty() && found.iter().all(|one| one.starts_with(wanted)),
        };
        ensure!(fits, "{line}: {output:?}");
    }
    daemon.stop()
}
