//! Audit records survive the daemon's death. `api::audit` tests which routes are audited.

use anyhow::{Context, Result, ensure};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use serde_json::{Value, json};

fn audits(daemon: &Daemon) -> Result<Vec<Value>> {
    let events = daemon.cli(&["events", "--audit", "--since", "2h"])?;
    let events = events.as_array().context("a list")?;
    Ok(events.iter().map(|event| event["audit"].clone()).collect())
}

fn find<'a>(audits: &'a [Value], request: &str) -> Result<&'a Value> {
    let found = audits.iter().rfind(|audit| audit["request"] == request);
    found.with_context(|| format!("no {request} in {audits:#?}"))
}

#[test]
fn audit_survives_restart() -> Result<()> {
    let mut daemon = Daemon::start(&DaemonOptions::default())?;
    let device = format!("file:{}", daemon.folder().join("pool.img").display());
    daemon.create_pool(&["--device", &device, "--size", "256M"])?;
    daemon.cli(&["tenant", "create", "t"])?;
    daemon.cli(&["volume", "create", "t/v", "--size", "16M"])?;
    daemon.cli(&["volume", "resize", "t/v", "--size", "32M"])?;
    daemon.cli(&["export", "create", "t/v", "--any-host"])?;
    daemon.cli(&["export", "set", "t/v", "--listed-hosts"])?;
    daemon.cli(&["export", "delete", "t/v"])?;
    daemon.cli(&["volume", "delete", "t/v"])?;
    for iops in ["1000", "2000", "3000"] {
        daemon.cli(&["tenant", "budget", "t", "--base-iops", iops])?;
    }
    // Refused requests are not recorded.
    ensure!(daemon.cli(&["tenant", "delete", "none"]).is_err());
    let taken = daemon.folder().join("taken");
    std::fs::create_dir(&taken)?;
    let taken = taken.to_str().context("UTF-8")?;
    let vm = [
        "export",
        "create",
        "t/v",
        "--vhost-user",
        "--vm-socket",
        taken,
    ];
    ensure!(
        daemon
            .cli(&["volume", "create", "t/v", "--size", "16M"])
            .is_ok()
    );
    ensure!(daemon.cli(&vm).is_err());
    ensure!(daemon.cli(&["volume", "list"]).is_ok());
    let before = audits(&daemon)?;
    ensure!(before.len() == 12, "{before:#?}");
    daemon.kill_daemon()?;
    daemon.start_again()?;
    let audits = audits(&daemon)?;
    ensure!(audits == before, "before: {before:#?}\nafter: {audits:#?}");

    let deleted = find(&audits, "DELETE /v1/tenants/t/volumes/v")?;
    ensure!(deleted["destructive"] == true, "{deleted}");
    let uid = rustix::process::geteuid().as_raw();
    ensure!(
        deleted["uid"] == uid && deleted["program"] == "forebay",
        "{deleted}"
    );
    ensure!(deleted["before"]["size_bytes"] == 32 << 20, "{deleted}");
    ensure!(deleted["after"].is_null(), "{deleted}");
    let resized = find(&audits, "PATCH /v1/tenants/t/volumes/v")?;
    ensure!(
        resized["before"] == json!({"size_bytes": 16 << 20}),
        "{resized}"
    );
    ensure!(
        resized["after"] == json!({"size_bytes": 32 << 20}),
        "{resized}"
    );
    let closed = find(&audits, "PATCH /v1/exports/t/v")?;
    ensure!(closed["before"]["any_host"] == true && closed["after"]["any_host"] == false);
    let made = find(&audits, "POST /v1/tenants")?;
    ensure!(
        made["before"].is_null() && made["after"]["name"] == "t",
        "{made}"
    );
    let budget = find(&audits, "PATCH /v1/tenants/t/budget")?;
    ensure!(budget["after"].to_string().contains("3000"), "{budget}");
    let table = daemon.cli_text(&["events", "--audit"])?;
    ensure!(
        table.contains("delete a volume")
            && table.contains("make a volume v")
            && table.contains("DELETE /v1/exports/t/v"),
        "{table}"
    );

    daemon.shut_down()?;
    daemon.start_again()?;
    let audits = self::audits(&daemon)?;
    find(&audits, "POST /v1/shutdown")?;
    daemon.stop()
}
