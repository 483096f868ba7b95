//! Daemon, engine or both die during first writes. Acknowledged data survives, no extent has two
//! owners, and a new daemon knows the engine's grants.
//!
//! Two thin volumes are written and deallocated without pause, on a plain file, so that requests
//! are in flight. At the end the run folder is lost too; flushed data survives.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::host::{Dice, Habits, Host, Load};
use forebay_tests::lab::count_from;
use forebay_tests::shadow::Promise;
use forebay_tests::system::kill_by_pid;
use forebay_tests::wait;

const MINUTE: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
const SIZE: u64 = 32 * MIB;

fn lab() -> Result<(Daemon, Vec<Host>)> {
    let daemon = Daemon::start(&DaemonOptions {
        config: "[engine]\nreactors = 2\n".into(),
        ..DaemonOptions::default()
    })?;
    let device = format!("file:{}", daemon.folder().join("pool.img").display());
    daemon.create_pool(&["--device", &device, "--size", "512M"])?;
    daemon.cli(&["tenant", "create", "t"])?;
    let address = format!("127.0.0.1:{}", daemon.port()).parse()?;
    let mut hosts = Vec::new();
    for (name, number) in [("t/a", 0xa), ("t/b", 0xb)] {
        let size = SIZE.to_string();
        daemon.cli(&["volume", "create", name, "--size", &size])?;
        daemon.cli(&["export", "create", name, "--any-host"])?;
        let mut host = Host::new(address, name, SIZE, 4096, number);
        host.habits = Habits {
            reads: 5,
            holes: 30,
            flushes: 2,
            fua: 3,
            ..Habits::default()
        };
        hosts.push(host);
    }
    Ok((daemon, hosts))
}

/// Loads all volumes during `dies`.
fn loaded(
    hosts: &mut [Host],
    dies: impl FnOnce(&dyn Fn(&str, u64) -> Result<()>) -> Result<()>,
) -> Result<Vec<Load>> {
    let over = AtomicBool::new(false);
    let counts: Vec<AtomicU64> = hosts.iter().map(|_| AtomicU64::new(0)).collect();
    std::thread::scope(|scope| {
        let over = &over;
        let loads: Vec<_> = hosts
            .iter_mut()
            .zip(&counts)
            .map(|(host, count)| {
                scope.spawn(move || {
                    host.load(|commands| {
                        count.store(commands, SeqCst);
                        !over.load(SeqCst)
                    })
                })
            })
            .collect();
        // Waits for further commands of each host.
        let more = |what: &str, commands: u64| {
            let goals: Vec<u64> = counts
                .iter()
                .map(|count| count.load(SeqCst) + commands)
                .collect();
            wait::until(what, MINUTE, || {
                let mut all = counts.iter().zip(&goals);
                Ok(all
                    .all(|(count, goal)| count.load(SeqCst) >= *goal)
                    .then_some(()))
            })
        };
        let result = dies(&more);
        over.store(true, SeqCst);
        let loads = loads
            .into_iter()
            .map(|load| load.join().expect("a load does not panic"))
            .collect::<Result<Vec<Load>>>();
        result?;
        loads
    })
}

#[test]
fn kill9_during_allocation() -> Result<()> {
    let (mut daemon, mut hosts) = lab()?;
    let mut dice = Dice::with_seed(count_from("FOREBAY_TEST_SEED", 9));
    for round in 0..count_from("FOREBAY_TEST_ROUNDS", 9) {
        let before = daemon.processes()?;
        let delay = Duration::from_millis(dice.u64(..150));
        let loads = loaded(&mut hosts, |more| {
            more("commands before a death", 100)?;
            std::thread::sleep(delay);
            match round % 3 {
                0 => {
                    daemon.kill_daemon()?;
                    daemon.start_again()?;
                    more("commands after the daemon's return", 100)
                }
                1 => {
                    kill_by_pid(before.engine)?;
                    daemon.wait_engine_after(before.generation, MINUTE)?;
                    more("commands after the take-over", 100)
                }
                _ => {
                    kill_by_pid(before.engine)?;
                    daemon.kill_all()
                }
            }
        })
        .with_context(|| format!("round {round}"))?;
        match round % 3 {
            0 => {
                ensure!(
                    !loads.iter().any(|load| load.lost),
                    "the engine lives: {loads:?}"
                );
                ensure!(
                    daemon.processes()?.engine == before.engine,
                    "the engine lives"
                );
            }
            1 => ensure!(
                !loads.iter().any(|load| load.lost),
                "the connections go on: {loads:?}"
            ),
            _ => daemon.start_again()?,
        }
        daemon
            .pool_check()
            .with_context(|| format!("round {round}"))?;
        for host in &mut hosts {
            host.verify(Promise::Acknowledged)
                .with_context(|| format!("round {round}, {loads:?}"))?;
        }
    }
    daemon.power_cut(&[], 0)?;
    daemon.start_again()?;
    for host in &mut hosts {
        host.verify(Promise::Flushed)
            .context("without the grant table")?;
    }
    daemon.stop()
}
