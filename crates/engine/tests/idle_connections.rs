//! Memory and processor time of idle connections. It measures its own process, so it runs alone.
//! **Not here:** the whole idle daemon (`idle_engine_sleeps`, a system test).
#![allow(missing_docs)]

mod common;

use common::host::{PLAIN, RawHost, admin, io_queue};
use common::{HANG, TestEngine};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const CONNECTIONS: u64 = 300;

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size() as u64
}

/// Processor time of the engine's threads.
fn engine_ns() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let of_engine = tasks.filter(|t| {
        let name = std::fs::read_to_string(t.path().join("comm")).unwrap_or_default();
        name.starts_with("reactor-") || name.trim() == "control"
    });
    let ran = |t: std::fs::DirEntry| {
        let text = std::fs::read_to_string(t.path().join("schedstat")).unwrap_or_default();
        text.split_whitespace()
            .next()
            .and_then(|n| n.parse::<u64>().ok())
            .unwrap_or(0)
    };
    of_engine.map(ran).sum()
}

#[test]
fn three_hundred_idle_connections_cost_little() {
    let mut engine = TestEngine::start("ram", 64 * MIB, 1);
    engine.volume(1, 16 * MIB, 4096);
    let nqn = engine.export(1, &[]);
    let attach = |queues: u16| -> Vec<RawHost> {
        let (mut host, cntlid) = admin(engine.address, &nqn, PLAIN);
        host.number_of_queues(64);
        let mut all: Vec<RawHost> = (1..=queues)
            .map(|qid| io_queue(engine.address, &nqn, cntlid, qid, 128, PLAIN, true))
            .collect();
        all.push(host);
        all
    };
    // One-time costs do not count.
    let first = attach(4);
    std::thread::sleep(Duration::from_millis(300));
    let before = resident_bytes();
    let all: Vec<Vec<RawHost>> = (0..6).map(|_| attach(49)).collect();
    std::thread::sleep(Duration::from_millis(300));
    let each = resident_bytes().saturating_sub(before) / CONNECTIONS;
    println!("{each} bytes a connection, both ends together");
    assert!(each < 8192, "{each} bytes a connection");
    // Earlier work may take its time; an engine that does not sleep never comes to rest.
    let limit = std::time::Instant::now() + HANG;
    loop {
        let (cpu, time) = (engine_ns(), std::time::Instant::now());
        std::thread::sleep(Duration::from_secs(1));
        let share = (engine_ns() - cpu) as f64 / time.elapsed().as_nanos() as f64;
        println!("{:.2} % of a processor", share * 100.0);
        if cpu > 0 && share < 0.02 {
            break;
        }
        assert!(
            time < limit,
            "{share} of a processor while nobody asks for anything"
        );
    }
    drop((first, all));
}
