//! An idle engine sleeps: 100 exports with hosts and three with VMs use less than 2 % of a core and
//! 64 MiB. It also sleeps while all commands are throttled.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use forebay_initiator::vm::{self as driver, DiskStatus, Doorbells, Op};
use forebay_initiator::{IoOp, IoQueue, Options, Session, Wait};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::system::{cpu_time, resident_bytes};
use forebay_tests::vm::{self, Frontend};
use forebay_tests::wait;

const HOST: &str = "nqn.2026-01.test:host";
const EXPORTS: usize = 100;
const MINUTE: Duration = Duration::from_secs(60);
/// Duration of a measurement.
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
        let nqn = format!("nqn.2026-01.io.forebay:test:t.v{i}");
        let options = Options {
            io_queues: 2,
            ..Options::default()
        };
        let mut session = Session::connect(address, &nqn, HOST, &options)?;
        let mut queues = vec![session.open_queue(1)?, session.open_queue(1)?];
        // Each queue has been used, not only connected.
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
    let mut vms = Vec::new();
    for (name, frontend, doorbells) in [
        ("shadow", Frontend::NvmePcie, Doorbells::Shadow),
        ("trapped", Frontend::NvmePcie, Doorbells::Trapped),
        ("virtio", Frontend::VhostUser, Doorbells::Shadow),
    ] {
        let target = vm::export(&daemon, name, "1G", frontend)?;
        let options = driver::Options {
            doorbells,
            depth: 4,
            queues: 2,
            ..driver::Options::default()
        };
        let mut disk = vm::connect(&target, &options)?;
        let mut queues = disk.take_queues();
        for queue in &mut queues {
            let op = Op::Write {
                offset_bytes: 0,
                bytes: 4096,
            };
            vm::execute(&mut **queue, op)?;
        }
        vms.push((disk, queues));
    }
    let engine = daemon.processes()?.engine;
    // First, staging buffers are freed and background commits end.
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
    // It wakes up for each VM.
    for (disk, mut queues) in vms {
        for queue in &mut queues {
            vm::execute(&mut **queue, Op::Flush)?;
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

/// Commands that each queue sends at once.
const DEPTH: u16 = 128;

/// Reads, writes with in-capsule data, and writes that need R2Ts.
fn flood(queue: &mut IoQueue) -> Result<()> {
    for n in 0..u64::from(DEPTH) {
        let (lba, blocks) = (n * 8, if n % 8 == 7 { 8 } else { 1 });
        let op = match n % 2 {
            0 => IoOp::Read { lba, blocks },
            _ => IoOp::Write {
                lba,
                blocks,
                fua: false,
            },
        };
        let buffer = vec![3; blocks as usize * 4096];
        ensure!(queue.submit(&op, n, buffer).is_ok(), "{n} is not taken");
    }
    Ok(())
}

/// Between windows, the engine has nothing to do, whatever waits in sockets and rings. A spinning
/// reactor would use a whole processor.
#[test]
fn an_engine_whose_hosts_are_over_budget_sleeps() -> Result<()> {
    let mut daemon = vm::serve(
        &DaemonOptions {
            config: "[engine]\nreactors = 1\n".into(),
            ..DaemonOptions::default()
        },
        "1G",
    )?;
    daemon.cli(&["tenant", "budget", "t", "--base-iops", "10"])?;
    daemon.cli(&["volume", "create", "t/tcp", "--size", "64M"])?;
    daemon.cli(&["export", "create", "t/tcp", "--any-host"])?;
    let address: SocketAddr = format!("127.0.0.1:{}", daemon.port()).parse()?;
    let options = Options {
        io_queues: 2,
        command_timeout: 2 * MINUTE,
        ..Options::default()
    };
    let nqn = "nqn.2026-01.io.forebay:test:t.tcp";
    let mut session = Session::connect(address, nqn, HOST, &options)?;
    let mut hosts = [session.open_queue(1)?, session.open_queue(1)?];
    let mut vms = Vec::new();
    for (name, frontend, doorbells) in [
        ("shadow", Frontend::NvmePcie, Doorbells::Shadow),
        ("trapped", Frontend::NvmePcie, Doorbells::Trapped),
        ("virtio", Frontend::VhostUser, Doorbells::Shadow),
    ] {
        let target = vm::export(&daemon, name, "64M", frontend)?;
        let options = driver::Options {
            doorbells,
            depth: DEPTH,
            ..driver::Options::default()
        };
        let mut disk = vm::connect(&target, &options)?;
        let queue = disk.take_queues().remove(0);
        vms.push((disk, queue));
    }
    for (_, queue) in &mut vms {
        for slot in 0..DEPTH {
            let (offset_bytes, bytes) = (u64::from(slot) * 4096, 4096);
            let op = match slot % 2 {
                0 => Op::Read {
                    offset_bytes,
                    bytes,
                },
                _ => Op::Write {
                    offset_bytes,
                    bytes,
                },
            };
            queue.submit(slot, op)?;
        }
        queue.kick()?;
    }
    for queue in &mut hosts {
        flood(queue)?;
    }
    let mut answered = Vec::new();
    for death in [false, true] {
        if death {
            let dead = daemon.kill_engine()?;
            daemon.wait_engine_after(dead.generation, MINUTE)?;
        }
        let engine = daemon.processes()?.engine;
        let mut seen = String::new();
        wait::until("the engine sleeps", MINUTE, || {
            let (before, begun) = (cpu_time(engine)?, Instant::now());
            while begun.elapsed() < Duration::from_secs(2) {
                for queue in &mut hosts {
                    queue.poll(&mut answered, Wait::Block, Duration::from_millis(50))?;
                }
            }
            let used = cpu_time(engine)?.saturating_sub(before);
            let share = used.as_secs_f64() / begun.elapsed().as_secs_f64();
            let stats = daemon.cli(&["stats"])?;
            let lanes = stats["lanes"].as_array().context("no lanes")?;
            let wait = lanes.iter().all(|lane| lane["throttled"] != 0);
            seen = format!(
                "{:.1} % of a core, {} lanes, all over budget: {wait}",
                share * 100.0,
                lanes.len()
            );
            println!("over budget: {seen}");
            Ok((lanes.len() == 4 && wait && share < 0.25).then_some(()))
        })
        .with_context(|| seen.clone())?;
    }
    // No command is lost.
    daemon.cli(&["tenant", "budget", "t", "--none"])?;
    wait::until("all commands end", MINUTE, || {
        for queue in &mut hosts {
            queue.poll(&mut answered, Wait::Block, Duration::from_millis(10))?;
        }
        Ok((answered.len() == 2 * usize::from(DEPTH)).then_some(()))
    })?;
    ensure!(
        answered.iter().all(|done| done.status.is_success()),
        "failed"
    );
    for (disk, mut queue) in vms {
        let mut done = Vec::new();
        wait::until("a machine's commands end", MINUTE, || {
            queue.poll(&mut done)?;
            Ok((done.len() == usize::from(DEPTH)).then_some(()))
        })?;
        ensure!(
            done.iter().all(|done| done.ended == DiskStatus::Well),
            "failed"
        );
        drop(queue);
        disk.close()?;
    }
    drop(hosts);
    session.close()?;
    daemon.stop()
}
