//! The daemon serves all parts of its configuration that exist.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::{IoOp, Options, Session};
use forebay_tests::daemon::{Daemon, DaemonOptions, program};
use forebay_tests::{exposition, wait};
use rustix::mount::{MountFlags, UnmountFlags, mount_bind, mount_remount, unmount};

const LIMIT: Duration = Duration::from_secs(60);
/// An address for documentation, which no node has.
const NOWHERE: &str = "192.0.2.1:4420";
const HOST: &str = "nqn.2026-01.test:host";

fn check(daemon: &Daemon) -> Result<(bool, String)> {
    let said = std::process::Command::new(program())
        .args(["serve", "--check", "--config"])
        .arg(daemon.config_path())
        .output()?;
    Ok((said.status.success(), String::from_utf8(said.stdout)?))
}

fn events(daemon: &Daemon, kind: &str) -> Result<String> {
    let events = daemon.cli(&["events", "--since", "1h"])?;
    let events = events.as_array().context("no list")?;
    let of_kind: Vec<String> = events
        .iter()
        .filter(|event| event["kind"] == kind)
        .map(|event| event["message"].to_string())
        .collect();
    Ok(of_kind.join("\n"))
}

#[test]
fn serves_without_a_missing_part() -> Result<()> {
    let mut daemon = Daemon::start(&DaemonOptions::default())?;
    let spec = format!("file:{}", daemon.folder().join("pool.img").display());
    daemon.create_pool(&["--device", &spec, "--size", "128M"])?;
    daemon.cli(&["tenant", "create", "t"])?;
    daemon.cli(&["volume", "create", "t/v", "--size", "16M"])?;
    daemon.cli(&["export", "create", "t/v", "--any-host"])?;
    daemon.cli(&["volume", "create", "t/w", "--size", "16M"])?;
    daemon.cli(&["export", "create", "t/w", "--vhost-user"])?;
    let (is_well, said) = check(&daemon)?;
    ensure!(is_well, "{said}");
    daemon.stop()?;
    let (is_well, said) = check(&daemon)?;
    ensure!(is_well, "{said}");

    let stranger = TcpListener::bind("127.0.0.1:0")?;
    let metrics = stranger.local_addr()?;
    let log_in = daemon.folder().join("in-the-way");
    let engine_log = daemon.folder().join("var/state/log/engine.log");
    fs::write(&log_in, "no folder")?;
    fs::remove_file(&engine_log)?;
    fs::create_dir(&engine_log)?;
    let vms = daemon.folder().join("var/run/machines");
    fs::remove_dir_all(&vms)?;
    fs::write(&vms, "no folder")?;
    let config = fs::read_to_string(daemon.config_path())?;
    let config = config.replace(
        "nvme_tcp = [",
        &format!("metrics = \"{metrics}\"\nnvme_tcp = [\"{NOWHERE}\", "),
    );
    let more = "[log]\nfile = \"in-the-way/forebay.log\"\n[engine]\ncpus = [1000]\n";
    fs::write(daemon.config_path(), format!("{config}{more}"))?;
    let metrics_text = metrics.to_string();
    let missing = [
        NOWHERE,
        &metrics_text,
        "in-the-way",
        "engine.log",
        "CPU 1000",
    ];

    let (is_well, said) = check(&daemon)?;
    ensure!(!is_well, "{said}");
    for part in missing {
        let line = said.lines().find(|line| line.contains(part));
        ensure!(
            line.is_some_and(|line| !line.ends_with(" ok")),
            "{part}: {said}"
        );
    }
    ensure!(!daemon.folder().join("in-the-way").is_dir());

    daemon.start_again()?;
    let missing = missing.into_iter().chain(["connect to t/w"]);
    let is_missing = |said: &str| missing.clone().all(|part| said.contains(part));
    daemon.wait_warnings(is_missing)?;
    let reported = events(&daemon, "part_missing")?;
    for part in missing.clone() {
        ensure!(reported.contains(part), "{part}: {reported}");
    }
    let address: SocketAddr = format!("127.0.0.1:{}", daemon.port()).parse()?;
    let nqn = "nqn.2026-01.io.forebay:test:t.v";
    let mut session = Session::connect(address, nqn, HOST, &Options::default())?;
    let write = IoOp::Write {
        lba: 0,
        blocks: 1,
        fua: true,
    };
    session
        .open_queue(1)?
        .execute(&write, vec![1; 4096], LIMIT)?;

    drop(stranger);
    fs::remove_file(&log_in)?;
    fs::remove_file(&vms)?;
    daemon.wait_warnings(|warnings| {
        let are_back = [&metrics_text, "in-the-way", "t/w"];
        !are_back.iter().any(|part| warnings.contains(part))
    })?;
    exposition::scrape(metrics.port())?;
    let reported = events(&daemon, "part_returned")?;
    ensure!(
        reported.contains(&metrics_text)
            && reported.contains("the log works now")
            && reported.contains("VMs can connect to t/w"),
        "{reported}"
    );
    let log = log_in.join("forebay.log");
    let log_says = |what: &str| {
        wait::until("the log", LIMIT, || {
            let log = fs::read_to_string(&log);
            Ok(log.is_ok_and(|log| log.contains(what)).then_some(()))
        })
    };
    log_says("works now")?;
    // Parts that are removed in use are made again.
    let socket = vms.join("t/w.sock");
    fs::remove_file(&socket)?;
    fs::rename(&log, log_in.join("renamed"))?;
    wait::until("the socket", LIMIT, || {
        Ok(UnixStream::connect(&socket).is_ok().then_some(()))
    })?;
    daemon.cli(&["volume", "delete", "t/w", "--force"]).ok();
    log_says("t/w")?;
    fs::remove_dir(&engine_log)?;
    let before = daemon.kill_engine()?;
    daemon.wait_engine_after(before.generation, LIMIT)?;
    daemon.wait_warnings(|warnings| !warnings.contains("engine.log"))?;
    daemon.stop()
}

/// `serve --check` reports what would fail at a start.
#[test]
fn check_knows_what_a_start_needs() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("forebay.toml");
    let port = TcpListener::bind("0.0.0.0:0")?.local_addr()?.port();
    let one = format!("127.0.0.1:{port}");
    let listen =
        format!("[listen]\nnvme_tcp = [\"0.0.0.0:{port}\", \"{one}\"]\nmetrics = \"{one}\"\n");
    for (api, log, embedded, wrong) in [
        (
            "nosuch/api.sock",
            "/proc/nope/x.log",
            "path = \"nosuch/pool.img\", size = \"1G\"",
            [
                "api.sock",
                "x.log",
                "the listener 127",
                "the metrics",
                "pool.img",
            ],
        ),
        (
            ".",
            "forebay.toml/x.log",
            "path = \"pool.img\", size = \"1KB\"",
            [
                "the API socket",
                "x.log",
                "the listener 127",
                "the metrics",
                "pool.img",
            ],
        ),
    ] {
        let config = format!(
            "state_dir = \"st\"\nrun_dir = \"run\"\n{listen}api = \"{api}\"\n[log]\nfile = \"{log}\"\n\
             [pool]\nembedded = {{ {embedded} }}\n"
        );
        fs::write(&path, config)?;
        let said = std::process::Command::new(program())
            .args(["serve", "--check", "--config"])
            .arg(&path)
            .output()?;
        let reported = String::from_utf8(said.stdout)?;
        let troubles: Vec<&str> = reported
            .lines()
            .skip(1)
            .filter(|l| !l.ends_with(" ok"))
            .collect();
        ensure!(
            !said.status.success() && troubles.len() == wrong.len(),
            "{reported}"
        );
        for part in wrong {
            ensure!(
                troubles.iter().any(|line| line.contains(part)),
                "{part}: {reported}"
            );
        }
    }
    ensure!(
        fs::read_dir(folder.path())?.count() == 1,
        "it makes nothing"
    );
    Ok(())
}

/// A folder that can't be written; needs root.
struct ReadOnly(PathBuf);

impl ReadOnly {
    fn new(folder: &Path) -> Result<Self> {
        mount_bind(folder, folder)?;
        let mounted = Self(folder.to_owned());
        mount_remount(folder, MountFlags::BIND | MountFlags::RDONLY, "")?;
        Ok(mounted)
    }
}

impl Drop for ReadOnly {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// The engine keeps serving, and its pool is found.
#[test]
fn damaged_records_are_made_anew() -> Result<()> {
    let mut daemon = Daemon::start(&DaemonOptions::default())?;
    let pool = daemon.folder().join("pool.img");
    let spec = format!("file:{}", pool.display());
    daemon.create_pool(&["--device", &spec, "--size", "128M"])?;
    let [state, run] = ["state", "run"].map(|name| daemon.folder().join("var").join(name));
    let records = [state.join("devices.json"), run.join("devices.json")];
    let engine_record = run.join("engine.json");

    let engine = daemon.processes()?.engine;
    daemon.kill_daemon()?;
    for record in &records {
        fs::remove_file(record)?;
    }
    fs::write(&engine_record, "{")?;
    daemon.start_again()?;
    ensure!(daemon.processes()?.engine == engine, "{}", daemon.status()?);
    ensure!(run.join("engine.json.damaged").exists());
    let reported = events(&daemon, "warning")?;
    ensure!(reported.contains("engine.json.damaged"), "{reported}");
    ensure!(records.iter().all(|record| record.exists()));

    // Only the copy names the pool.
    daemon.stop()?;
    fs::write(&records[0], "garbage")?;
    daemon.start_again()?;
    daemon.wait_engine_after(0, LIMIT)?;
    ensure!(state.join("devices.json.damaged").exists());
    ensure!(fs::read(&records[0])? == fs::read(&records[1])?);

    let reported = events(&daemon, "warning")?;
    ensure!(reported.contains("devices.json.damaged"), "{reported}");

    // No record can be written.
    daemon.stop()?;
    let read_only = ReadOnly::new(&state);
    daemon.start_again()?;
    if read_only.is_ok() {
        daemon.wait_warnings(|warnings| warnings.contains("the state folder"))?;
    }
    daemon.wait_engine_after(0, LIMIT)?;
    drop(read_only);
    daemon.wait_warnings(|warnings| !warnings.contains("the state folder"))?;

    // No record names the pool, and the engine lives.
    let engine = daemon.processes()?.engine;
    daemon.kill_daemon()?;
    for record in &records {
        fs::write(record, "garbage")?;
    }
    fs::remove_file(&pool)?;
    daemon.start_again()?;
    let status = daemon.status()?;
    ensure!(
        status["engine_pid"] == engine && status["engine_state"] == "running",
        "{status}"
    );
    ensure!(
        status["pool_trouble"]["message"]
            .to_string()
            .contains("devices.json"),
        "{status}"
    );
    daemon.kill_all()?;

    // The daemon's identity can't be made again.
    fs::write(state.join("owner-id"), [0xff; 20])?;
    let said = std::process::Command::new(program())
        .args(["serve", "--config"])
        .arg(daemon.config_path())
        .output()?;
    let reported = String::from_utf8_lossy(&said.stderr);
    ensure!(
        !said.status.success() && reported.contains("owner-id"),
        "{reported}"
    );
    Ok(())
}
