//! The daemon is updated, and nobody notices.
//!
//! Purpose: a daemon with `--keep-engine` ends by SIGTERM, another one is started, and hosts go on; nobody is said to
//! have died. `POST /v1/shutdown` ends both.
//! Design: the real binary, verified load, as with deaths.
//! Not here: the unit of the service manager.

use anyhow::{Context, Result, ensure};
use forebay_tests::lab::{self, Lab, LabOptions, MIB, Noticed};
use forebay_tests::wait;

#[test]
fn restart_of_the_daemon_keeps_the_engine() -> Result<()> {
    let mut lab = Lab::new(&LabOptions {
        arguments: vec!["--keep-engine".into()],
        ..LabOptions::volumes(2, 64 * MIB)
    })?;
    let before = lab.daemon.processes()?;
    lab.during_load(Noticed::Nothing, |daemon, progress| {
        for _restart in 0..4 {
            progress.more("work before the restart", 100)?;
            daemon.leave_engine()?;
            // Writes to new places wait for the next one.
            daemon.start_again()?;
        }
        progress.more("work after the last restart", 100)
    })?;
    let after = lab.daemon.processes()?;
    ensure!(before.engine == after.engine, "{before:?} {after:?}");
    ensure!(before.daemon != after.daemon);
    let status = lab.daemon.status()?;
    ensure!(status["last_death"].is_null(), "{status}");
    let events = lab::events(&lab.daemon)?;
    ensure!(!events.contains_key("daemon_died"), "{events:?}");
    ensure!(events.contains_key("daemon_started"), "{events:?}");
    // A daemon that is killed has died, also one that had taken over an engine.
    lab.daemon.kill_daemon()?;
    lab.daemon.start_again()?;
    let died = lab.daemon.status()?["last_death"].clone();
    ensure!(died["process"] == "daemon", "{died}");
    ensure!(died["pid"] == after.daemon, "{died} {after:?}");
    let events = lab::events(&lab.daemon)?;
    ensure!(events.contains_key("daemon_died"), "{events:?}");
    // Both end when somebody asks for it.
    lab.check()?;
    let engine = lab.daemon.processes()?.engine;
    lab.daemon.shut_down().context("a request to stop")?;
    wait::until("the engine's end", lab::MINUTE, || {
        Ok((!std::path::Path::new(&format!("/proc/{engine}")).exists()).then_some(()))
    })
}
