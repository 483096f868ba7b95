//! `idle_engine_sleeps`: 100 exports with a host each, nothing to do: below 2 % of a core and 64 MiB.
//!
//! Not here: the daemon's own use, which nobody polls.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Result, ensure};
use forebay_initiator::{IoOp, Options, Session};
use forebay_tests::daemon::{Daemon, DaemonOptions, cpu_time, resident_bytes};

const HOST: &str = "nqn.2026-01.test:host";
const EXPORTS: usize = 100;
const LIMIT: Duration = Duration::from_secs(30);

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
            queue.execute(&op, vec![1; 65536], LIMIT)?;
        }
        hosts.push((session, queues));
    }
    let engine = daemon.processes()?.engine;
    // Staging memory is given back, and background commits are over.
    std::thread::sleep(Duration::from_secs(6));
    let (before, window) = (cpu_time(engine)?, Duration::from_secs(15));
    std::thread::sleep(window);
    let used = cpu_time(engine)?.saturating_sub(before);
    let share = used.as_secs_f64() / window.as_secs_f64();
    let resident = resident_bytes(engine)?;
    println!(
        "idle: {:.2} % of a core, {} KiB resident",
        share * 100.0,
        resident >> 10
    );
    ensure!(
        share < 0.02,
        "an idle engine uses {:.2} % of a core",
        share * 100.0
    );
    ensure!(resident < 64 << 20, "an idle engine holds {resident} bytes");
    for (session, queues) in hosts {
        drop(queues);
        session.close()?;
    }
    daemon.stop()
}
