//! `idle_engine_sleeps`: 100 exports with a host each and three with a machine, nothing to do: below 2 % of a core and 64 MiB.
//!
//! Not here: the daemon's own use, which nobody polls.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use forebay_initiator::machine::{self as driver, Doorbells, Op};
use forebay_initiator::{IoOp, Options, Session};
use forebay_tests::daemon::{Daemon, DaemonOptions, cpu_time, resident_bytes};
use forebay_tests::machine::{self, Frontend};
use forebay_tests::wait;

const HOST: &str = "nqn.2026-01.test:host";
const EXPORTS: usize = 100;
const MINUTE: Duration = Duration::from_secs(60);
/// So long it is watched at a time.
const WINDOW: Duration = Duration::from_secs(10);

#[test]
fn idle_engine_sleeps() -> Result<()> {
    let mut daemon = Daemon::start(&DaemonOptions::default())?;
    let device = format!("file:{}", daemon.folder().join("pool.img").display());
    daemon.create_pool(&["--device", &device, "--size", "4G"])?;
    daemon.cli(&["tenant", "create", "t"])?;
    let address: SocketAddr = format!("127.0.0.1:{}", daemon.port()).parse()?;
    let mut hosts = Vec::new();
    for i in 0..EXPORTS {
        let volume = format!("t/v{i}");
        daemon.cli(&["volume", "create", &volume, "--size", "1G"])?;
        daemon.cli(&["export", "create", &volume, "--any-host"])?;
        let nqn = format!("nqn.2026-01.io.forebay:t.v{i}");
        let options = Options {
            io_queues: 2,
            ..Options::default()
        };
        let mut session = Session::connect(address, &nqn, HOST, &options)?;
        let mut queues = vec![session.open_queue(1)?, session.open_queue(1)?];
        // Not merely connected: each has been used.
        for queue in &mut queues {
            let op = IoOp::Write {
                lba: 0,
                blocks: 16,
                fua: false,
            };
            queue.execute(&op, vec![1; 65536], MINUTE)?;
        }
        hosts.push((session, queues));
    }
    let mut machines = Vec::new();
    for (name, frontend, doorbells) in [
        ("shadow", Frontend::NvmePcie, Doorbells::Shadow),
        ("trapped", Frontend::NvmePcie, Doorbells::Trapped),
        ("virtio", Frontend::VhostUser, Doorbells::Shadow),
    ] {
        let target = machine::export(&daemon, name, "1G", frontend)?;
        let options = driver::Options {
            doorbells,
            depth: 4,
            queues: 2,
            ..driver::Options::default()
        };
        let mut disk = machine::connect(&target, &options)?;
        let mut queues = disk.take_queues();
        for queue in &mut queues {
            let op = Op::Write {
                offset_bytes: 0,
                bytes: 4096,
            };
            machine::execute(&mut **queue, op)?;
        }
        machines.push((disk, queues));
    }
    let engine = daemon.processes()?.engine;
    // First staging memory is given back, and background commits are made; an engine that does not sleep never comes
    // to rest.
    let mut seen = String::new();
    wait::until("the engine is at rest", 2 * MINUTE, || {
        let (before, begun) = (cpu_time(engine)?, Instant::now());
        std::thread::sleep(WINDOW);
        let used = cpu_time(engine)?.saturating_sub(before);
        let share = used.as_secs_f64() / begun.elapsed().as_secs_f64();
        let resident = resident_bytes(engine)?;
        seen = format!("{:.2} % of a core, {} KiB", share * 100.0, resident >> 10);
        Ok((share < 0.02 && resident < 64 << 20).then_some(()))
    })
    .with_context(|| seen.clone())?;
    println!("idle: {seen}");
    // It wakes up for each of them.
    for (disk, mut queues) in machines {
        for queue in &mut queues {
            machine::execute(&mut **queue, Op::Flush)?;
        }
        drop(queues);
        disk.close()?;
    }
    for (session, queues) in hosts {
        drop(queues);
        session.close()?;
    }
    daemon.stop()
}
