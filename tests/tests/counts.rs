//! `stats`, metrics and a host's SMART log agree, and one process's death changes no count.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::{IoOp, IoQueue, Options, Session};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::exposition;
use forebay_tests::system::free_ports;
use forebay_tests::wait;
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);
const HOST: &str = "nqn.2026-01.test:host";
const BLOCK: usize = 4096;

/// Reads, writes, latencies of reads.
type Counts = [u64; 3];

struct Counted {
    daemon: Daemon,
    metrics: u16,
    session: Session,
    queue: IoQueue,
}

fn number(value: &Value) -> Result<u64> {
    value.as_u64().with_context(|| format!("{value}"))
}

impl Counted {
    fn new() -> Result<Self> {
        let metrics = free_ports(1)?[0];
        let daemon = Daemon::start(&DaemonOptions {
            config: format!("metrics = \"127.0.0.1:{metrics}\"\n"),
            ..DaemonOptions::default()
        })?;
        let device = format!("file:{}", daemon.folder().join("pool.img").display());
        daemon.create_pool(&["--device", &device, "--size", "512M"])?;
        daemon.cli(&["tenant", "create", "t"])?;
        daemon.cli(&["volume", "create", "t/v", "--size", "16M"])?;
        daemon.cli(&["export", "create", "t/v", "--any-host"])?;
        let (session, queue) = connect(&daemon)?;
        Ok(Self {
            daemon,
            metrics,
            session,
            queue,
        })
    }

    fn work(&mut self, reads: u64, writes: u64) -> Result<()> {
        let mut all = |count: u64, op: &dyn Fn(u64) -> IoOp| {
            (0..count).try_for_each(|n| {
                let done = self.queue.execute(&op(n % 64), vec![7; BLOCK], LIMIT);
                done.map(drop)
            })
        };
        all(writes, &|lba| IoOp::Write {
            lba,
            blocks: 1,
            fua: false,
        })?;
        Ok(all(reads, &|lba| IoOp::Read { lba, blocks: 1 })?)
    }

    /// Waits until metrics and SMART log agree.
    fn counts(&self) -> Result<Counts> {
        let stats = self.daemon.cli(&["stats"])?;
        let [read, write] = ["read", "write"].map(|op| &stats["lanes"][0][op]);
        let counts = [
            number(&read["ops"])?,
            number(&write["ops"])?,
            number(&read["latency"]["total"]["count"])?,
        ];
        let metrics = exposition::scrape(self.metrics)?;
        for (op, expected) in [("read", counts[0]), ("write", counts[1])] {
            let sample =
                format!("forebay_volume_commands_total{{tenant=\"t\",volume=\"v\",op=\"{op}\"}}");
            let said = metrics.get(&sample)?;
            ensure!(said == expected as f64, "{sample}: {said}, not {expected}");
        }
        let smart = self.session.host_commands()?;
        ensure!(smart == counts[..2], "SMART: {smart:?}, not {counts:?}");
        Ok(counts)
    }

    fn are(&self, expected: Counts, after: &str) -> Result<()> {
        // The log lags by some seconds.
        let mut last = None;
        let same = wait::until("the same counts everywhere", LIMIT / 4, || {
            let counts = self.counts();
            let are = counts.as_ref().is_ok_and(|counts| *counts == expected);
            last = Some(counts);
            Ok(are.then_some(()))
        });
        same.with_context(|| format!("after {after}: {expected:?} expected, {last:?}"))
    }
}

fn connect(daemon: &Daemon) -> Result<(Session, IoQueue)> {
    let address: SocketAddr = format!("127.0.0.1:{}", daemon.port()).parse()?;
    let nqn = "nqn.2026-01.io.forebay:test:t.v";
    let mut session = Session::connect(address, nqn, HOST, &Options::default())?;
    let queue = session.open_queue(1)?;
    Ok((session, queue))
}

#[test]
fn counts_do_not_change_over_a_take_over() -> Result<()> {
    let mut all = Counted::new()?;
    all.work(30, 20)?;
    let mut counts = [30, 20, 30];
    all.are(counts, "the first commands")?;
    let mut again = |all: &mut Counted, after: &str| {
        all.are(counts, after)?;
        all.work(3, 2)?;
        counts = [counts[0] + 3, counts[1] + 2, counts[2] + 3];
        all.are(counts, after)
    };
    let kill_engine = |all: &Counted| {
        let dead = all.daemon.kill_engine()?;
        all.daemon.wait_engine_after(dead.generation, LIMIT)
    };
    for _ in 0..3 {
        kill_engine(&all)?;
        again(&mut all, "an engine's death")?;
    }
    for _ in 0..3 {
        all.daemon.kill_daemon()?;
        all.daemon.start_again()?;
        again(&mut all, "a daemon's death")?;
    }
    for _ in 0..3 {
        kill_engine(&all)?;
        again(&mut all, "an engine's death")?;
        all.daemon.kill_daemon()?;
        all.daemon.start_again()?;
        again(&mut all, "a daemon's death")?;
    }
    // An engine dies without a daemon, with counts that were not saved yet.
    let saved = counts[0];
    all.work(5, 0)?;
    all.daemon.kill_all()?;
    all.daemon.start_again()?;
    all.daemon.wait_engine_after(0, LIMIT)?;
    (all.session, all.queue) = connect(&all.daemon)?;
    let least = saved - 3;
    let now = wait::until("counts", LIMIT, || Ok(all.counts().ok()))?;
    ensure!(
        (least..=saved + 5).contains(&now[0]),
        "between {least} and {} reads: {now:?}",
        saved + 5
    );
    // A regular stop loses nothing.
    all.work(5, 5)?;
    let counts = [now[0] + 5, now[1] + 5, now[2] + 5];
    all.daemon.stop()?;
    all.daemon.start_again()?;
    all.daemon.wait_engine_after(0, LIMIT)?;
    (all.session, all.queue) = connect(&all.daemon)?;
    all.are(counts, "a restart")
}
