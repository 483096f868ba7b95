//! A daemon with `--keep-engine` is restarted under verified load, and hosts notice nothing.
//! `POST /v1/shutdown` ends both processes.

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
            // First writes wait for the next daemon.
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
    // A killed daemon has died, also if it had adopted an engine.
    lab.daemon.kill_daemon()?;
    lab.daemon.start_again()?;
    let died = lab.daemon.status()?["last_death"].clone();
    ensure!(died["process"] == "daemon", "{died}");
    ensure!(died["pid"] == after.daemon, "{died} {after:?}");
    let events = lab::events(&lab.daemon)?;
    ensure!(events.contains_key("daemon_died"), "{events:?}");
    lab.check()?;
    let engine = lab.daemon.processes()?.engine;
    lab.daemon.shut_down().context("a request to stop")?;
    wait::until("the engine's end", lab::MINUTE, || {
        Ok((!std::path::Path::new(&format!("/proc/{engine}")).exists()).then_some(()))
    })
}
