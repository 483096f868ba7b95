//! VM disks keep their connections at every death, as long as engine or daemon lives. Connections
//! made meanwhile are served later.
//!
//! Engines of one daemon die in a chain, each at its own point ([`forebay_xlate::kill`]). Disks of
//! both kinds are loaded, and visitors connect and leave, so that every point is reached.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::vm::verify::VmVerify;
use forebay_initiator::vm::{self as driver, Doorbells, Op, Options, Ring, Target};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::host::Dice;
use forebay_tests::lab;
use forebay_tests::system::hold_by_pid;
use forebay_tests::vm::{self, Frontend, Work};
use forebay_tests::wait;
use forebay_xlate::kill::POINTS;

const MINUTE: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

fn served() -> Result<(Daemon, Vec<VmVerify>)> {
    let daemon = vm::serve(&DaemonOptions::default(), "2G")?;
    let kinds = [
        ("p", Frontend::NvmePcie, Doorbells::Shadow, Ring::Split),
        ("m", Frontend::MappedPcie, Doorbells::Mapped, Ring::Split),
        ("v", Frontend::VhostUser, Doorbells::Shadow, Ring::Packed),
    ];
    let mut specs = Vec::new();
    for (name, frontend, doorbells, ring) in kinds {
        let target = vm::export(&daemon, name, "64M", frontend)?;
        let options = Options {
            doorbells,
            ring,
            interrupts: frontend != Frontend::MappedPcie,
            depth: 8,
            ..Options::default()
        };
        specs.push(VmVerify {
            flush_every_writes: 100,
            span_bytes: Some(8 * MIB),
            ..VmVerify::new(target, options)
        });
    }
    Ok((daemon, specs))
}

/// False if the connection was lost during connect.
fn visit(target: &Target, byte: u8) -> Result<bool> {
    let options = Options {
        depth: 1,
        limit: MINUTE,
        ..Options::default()
    };
    let Ok(mut disk) = driver::connect(target, &options) else {
        return Ok(false);
    };
    let mut queues = disk.take_queues();
    let (offset_bytes, bytes) = (MIB, 4096);
    queues[0].put(0, &[byte; 4096]);
    let write = Op::Write {
        offset_bytes,
        bytes,
    };
    vm::execute(&mut *queues[0], write)?;
    queues[0].put(0, &[0; 4096]);
    let read = Op::Read {
        offset_bytes,
        bytes,
    };
    vm::execute(&mut *queues[0], read)?;
    let mut found = [0; 4096];
    queues[0].get(0, &mut found);
    ensure!(found == [byte; 4096], "the visitor's own write");
    drop(queues);
    disk.close()?;
    Ok(true)
}

/// Engines die at these points, in this order; the last one lives.
fn chain_of_deaths(chain: &[(&str, u64)]) -> Result<()> {
    let kills: Vec<String> = chain
        .iter()
        .enumerate()
        .map(|(i, (point, count))| format!("engine{}:{point}:{count}", i + 1))
        .collect();
    let (mut daemon, specs) = served()?;
    let visited = [
        vm::export(&daemon, "a", "16M", Frontend::NvmePcie)?,
        vm::export(&daemon, "b", "16M", Frontend::VhostUser)?,
    ];
    let over = AtomicBool::new(false);
    let visits = AtomicU64::new(0);
    vm::during_loads(&mut daemon, specs, |daemon, work| {
        work.more("the first writes")?;
        // A second daemon's engines have the kill points, so that all disks connect first.
        daemon.kill_daemon()?;
        daemon.environment = vec![("FOREBAY_KILL".into(), kills.join(","))];
        daemon.start_again()?;
        daemon.kill_engine()?;
        std::thread::scope(|scope| {
            let visitors = visited.each_ref().map(|target| {
                let (over, visits) = (&over, &visits);
                scope.spawn(move || -> Result<u64> {
                    let mut turned_away = 0;
                    for turn in 1u64.. {
                        if over.load(SeqCst) {
                            break;
                        }
                        match visit(target, turn as u8).context("a visitor")? {
                            true => _ = visits.fetch_add(1, SeqCst),
                            false => turned_away += 1,
                        }
                    }
                    Ok(turned_away)
                })
            });
            let waited = (|| -> Result<()> {
                let mut armed = 0;
                while armed < chain.len() {
                    wait::until("a death", MINUTE, || {
                        work.alive()?;
                        let next = daemon.engine_number().ok().filter(|n| *n > armed + 1);
                        armed = next.map_or(armed, |n| n - 1);
                        Ok(next)
                    })
                    .with_context(|| format!("it never died at {:?}", chain[armed]))?;
                }
                let before = visits.load(SeqCst);
                wait::until("visits after the last death", MINUTE, || {
                    Ok((visits.load(SeqCst) >= before + 4).then_some(()))
                })?;
                work.more("work after the last death")
            })();
            over.store(true, SeqCst);
            let visitors = visitors.map(|v| v.join().expect("a visitor does not panic"));
            waited?;
            for turned_away in visitors {
                // Between accept(2) and the daemon's receipt of the socket, a connection dies with
                // its engine. Busy processors make that likelier.
                let turned_away = turned_away?;
                ensure!(
                    turned_away <= chain.len() as u64 / 3,
                    "{turned_away} turned away"
                );
            }
            Ok(())
        })
    })
    .map_err(|error| daemon.with_logs(error))?;
    println!("{} deaths, {} visits", chain.len(), visits.load(SeqCst));
    daemon.pool_check()?;
    daemon.stop()
}

#[test]
fn kill_at_each_point_of_vms() -> Result<()> {
    let mut dice = Dice::with_seed(lab::count_from("FOREBAY_TEST_SEED", 4));
    let parts = ["vm.", "pcie."];
    // Only clients whose memory has no descriptor are asked (`frontend::vfio_user::tests::remote`
    // in the engine's crate).
    let asks = ["vm.asking", "vm.asked"];
    let mut over = ["over.adopted", "over.converted", "over.resumed"]
        .iter()
        .cycle();
    let mut chain = Vec::new();
    for point in POINTS
        .iter()
        .filter(|p| parts.iter().any(|part| p.starts_with(part)) && !asks.contains(p))
    {
        // Some points are reached once per connection or take-over, others at every command.
        let often = ["taken", "fetched", "completing", "posted", "freed"];
        let is_often = point.starts_with("pcie.") && often.iter().any(|end| point.ends_with(end));
        let most = match point.starts_with("vm.") {
            _ if is_often => 30,
            true if !["vm.accepted", "vm.resumed"].contains(point) => 12,
            _ => 1,
        };
        chain.push((*point, 1 + dice.u64(..most)));
        if chain.len().is_multiple_of(4) {
            chain.extend(over.next().map(|point| (*point, 1)));
        }
    }
    chain_of_deaths(&chain)
}

/// Deaths of an engine, of a daemon, of an adopted engine, of two engines in a row, and an upgrade.
#[test]
fn engines_and_daemons_die_in_turns() -> Result<()> {
    let (mut daemon, specs) = served()?;
    let engine_dies = |daemon: &Daemon, work: &Work, what: &str| -> Result<()> {
        let dead = daemon.kill_engine()?;
        daemon.wait_engine_after(dead.generation, MINUTE)?;
        work.more(what)
    };
    vm::during_loads(&mut daemon, specs, |daemon, work| {
        work.more("the first writes")?;
        for round in 0..3 {
            engine_dies(daemon, work, "writes after an engine's death")?;
            daemon.kill_daemon()?;
            daemon.start_again()?;
            work.more("writes after a daemon's death")?;
            engine_dies(
                daemon,
                work,
                "writes after the death of an engine that was found",
            )?;
            let before = daemon.processes()?;
            daemon.cli(&["upgrade"])?;
            let after = daemon.processes()?;
            ensure!(after.engine != before.engine && after.daemon == before.daemon);
            ensure!(lab::events(daemon)?.contains_key("engine_replaced"));
            work.more("writes after an upgrade")?;
            // The next engine dies when it takes over, or when another daemon adopts it.
            let before = daemon.processes()?;
            daemon.kill_daemon()?;
            let (point, found) = [
                ("over.adopted:1", false),
                ("over.resumed:1", false),
                ("over.greeted:2", true),
            ][round];
            daemon.environment = vec![("FOREBAY_KILL".into(), format!("engine1:{point}"))];
            daemon.start_again()?;
            daemon.kill_engine()?;
            if found {
                daemon.wait_engine_after(before.generation, MINUTE)?;
                work.more("writes before it is found")?;
                daemon.kill_daemon()?;
                daemon.environment.clear();
                daemon.start_again()?;
            }
            daemon.wait_engine_after(before.generation + 1, MINUTE)?;
            work.more("writes after two deaths in a row")?;
            daemon.environment.clear();
        }
        Ok(())
    })?;
    daemon.pool_check()?;
    daemon.stop()
}

#[test]
fn vms_reconnect_after_both_processes_die() -> Result<()> {
    const BYTES: u64 = 4 * MIB;
    let mut daemon = vm::serve(&DaemonOptions::default(), "1G")?;
    let mut disks = Vec::new();
    for (name, frontend) in [("p", Frontend::NvmePcie), ("v", Frontend::VhostUser)] {
        let target = vm::export(&daemon, name, "64M", frontend)?;
        vm::fill(&target, BYTES, 3)?;
        let options = Options::default();
        let disk = vm::connect(&target, &options)?;
        disks.push((target, disk));
    }
    for (point, count) in [
        (None, 1),
        (Some("daemon.death"), 1),
        (Some("daemon.told"), 2),
    ] {
        match point {
            None => daemon.kill_all()?,
            // The daemon dies from its engine's death; then the new engine ends too.
            Some(point) => {
                daemon.kill_daemon()?;
                daemon.environment =
                    vec![("FOREBAY_KILL".into(), format!("daemon:{point}:{count}"))];
                daemon.start_again()?;
                daemon.kill_engine()?;
                daemon.wait_daemon_death()?;
                daemon.environment.clear();
            }
        }
        for (_, disk) in &disks {
            wait::until("the end of a connection", MINUTE, || {
                Ok((!disk.is_open()).then_some(()))
            })?;
        }
        daemon.start_again()?;
        for (target, disk) in &mut disks {
            vm::poll(target, BYTES, 3).with_context(|| format!("{target:?}, {point:?}"))?;
            *disk = vm::connect(target, &Options::default())?;
        }
    }
    drop(disks);
    daemon.pool_check()?;
    daemon.stop()
}

/// Listening, connected and connecting sockets.
fn sockets_at(path: &Path) -> Result<usize> {
    let path = path.display().to_string();
    let all = std::fs::read_to_string("/proc/net/unix")?;
    Ok(all.lines().filter(|line| line.ends_with(&path)).count())
}

#[test]
fn a_client_that_connects_without_an_engine_is_served_later() -> Result<()> {
    let mut daemon = vm::serve(&DaemonOptions::default(), "1G")?;
    for (name, frontend) in [("p", Frontend::NvmePcie), ("v", Frontend::VhostUser)] {
        let target = vm::export(&daemon, name, "64M", frontend)?;
        // There is no engine, and its stopped daemon can't know yet.
        let processes = daemon.processes()?;
        hold_by_pid(processes.daemon, true)?;
        forebay_tests::system::kill_by_pid(processes.engine)?;
        let before = sockets_at(vm::socket(&target))?;
        std::thread::scope(|scope| -> Result<()> {
            let visitor = scope.spawn(|| visit(&target, 1));
            let waiting = wait::until("a client in the queue", MINUTE, || {
                let now = sockets_at(vm::socket(&target))?;
                Ok((now > before).then_some(()))
            });
            // In any case, or the visitor never ends.
            hold_by_pid(processes.daemon, false)?;
            waiting?;
            let served = visitor.join().expect("it does not panic")?;
            ensure!(served, "{frontend:?}: it was turned away");
            Ok(())
        })?;
        // The engine accepts the VM, but its memory waits until a daemon holds it too.
        daemon.kill_daemon()?;
        std::thread::scope(|scope| -> Result<()> {
            let visitor = scope.spawn(|| visit(&target, 2));
            daemon.start_again()?;
            let served = visitor.join().expect("it does not panic")?;
            ensure!(served, "{frontend:?}: it was turned away without a daemon");
            Ok(())
        })?;
    }
    daemon.pool_check()?;
    daemon.stop()
}
