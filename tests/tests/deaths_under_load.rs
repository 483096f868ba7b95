//! SIGKILL of daemon and engine while hosts write. Acknowledged data survives.
//!
//! Without a daemon, commands with cached translations continue; faults and flushes resume when it
//! is back. Hosts do not notice an engine's death.

use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::load::{self, Access, Amount, LoadSpec};
use forebay_initiator::verify::{Initial, Promise, Verifier, VerifySpec, WriteGoal, WriteReport};
use forebay_initiator::{IoOp, Options, Session, dsm_ranges};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::wait;

const HOST: &str = "nqn.2026-01.test:host";
const MINUTE: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

struct Lab {
    daemon: Daemon,
    address: SocketAddr,
}

fn lab(volumes: &[(&str, u64)]) -> Result<Lab> {
    let options = DaemonOptions {
        config: "[engine]\nreactors = 2\n".into(),
        ..DaemonOptions::default()
    };
    let daemon = Daemon::start(&options)?;
    let device = format!("file:{}", daemon.folder().join("pool.img").display());
    daemon.create_pool(&["--device", &device, "--size", "2G"])?;
    daemon.cli(&["tenant", "create", "t"])?;
    for (name, size_bytes) in volumes {
        let volume = format!("t/{name}");
        daemon.cli(&[
            "volume",
            "create",
            &volume,
            "--size",
            &size_bytes.to_string(),
        ])?;
        daemon.cli(&["export", "create", &volume, "--any-host"])?;
    }
    let address = format!("127.0.0.1:{}", daemon.port()).parse()?;
    Ok(Lab { daemon, address })
}

impl Lab {
    fn writer(&self, volume: &str) -> Result<Verifier> {
        self.writer_of(&format!("t.{volume}"), 4096)
    }

    fn writer_of(&self, volume: &str, block_bytes: u32) -> Result<Verifier> {
        let nqn = format!("nqn.2026-01.io.forebay:test:{volume}");
        let spec = VerifySpec {
            block_bytes,
            promise: Promise::Acknowledged,
            flush_every_writes: 200,
            reconnect_limit: MINUTE,
            ..VerifySpec::new(self.address, &nqn, HOST)
        };
        Ok(Verifier::connect(spec)?)
    }

    /// A writer far above its tenant's budget, with some R2Ts.
    fn writer_over_budget(&self) -> Result<Verifier> {
        self.daemon
            .cli(&["volume", "create", "u/c", "--size", "16M"])?;
        self.daemon
            .cli(&["export", "create", "u/c", "--any-host"])?;
        self.writer_of("u.c", 16384)
    }

    fn waits_until_commands_wait_for_a_budget(&self) -> Result<()> {
        wait::until("a command that waits for a budget", MINUTE, || {
            let stats = self.daemon.cli(&["stats"])?;
            let lanes = stats["lanes"].as_array().context("no lanes")?;
            let waits = lanes.iter().any(|lane| lane["throttled"] != 0);
            Ok(waits.then_some(()))
        })
    }

    /// Lets idle reactors help others, which needs a tenant with a budget.
    fn spread(&self) -> Result<()> {
        self.daemon.cli(&["tenant", "create", "u"])?;
        let base = ["--base-iops", "100", "--base-bandwidth", "4M"];
        let budget = [&["tenant", "budget", "u"][..], &base].concat();
        self.daemon.cli(&budget)?;
        self.daemon
            .cli(&["scheduling", "set", "--spread", "one-to-n"])?;
        Ok(())
    }

    fn waits_until_reactors_help_each_other(&self) -> Result<()> {
        let handed_over = || -> Result<u64> {
            let stats = self.daemon.cli(&["stats"])?;
            let reactors = stats["reactors"].as_array().context("no reactors")?;
            let each = reactors.iter().map(|r| r["handed_over"].as_u64());
            Ok(each.flatten().sum())
        };
        let before = handed_over()?;
        wait::until("a command that is handed over", MINUTE, || {
            Ok((handed_over()? > before).then_some(()))
        })
    }

    /// Writes every block, so that later commands do not fault.
    fn fill(&self, volume: &str, size_bytes: u64) -> Result<()> {
        let nqn = format!("nqn.2026-01.io.forebay:test:t.{volume}");
        let spec = LoadSpec {
            read_percent: 0,
            block_bytes: 65536,
            queue_depth: 8,
            access: Access::Sequential,
            amount: Amount::Bytes(size_bytes),
            ..LoadSpec::new(self.address, &nqn, HOST)
        };
        let report = load::run(&spec, &mut |_| {})?;
        ensure!(report.errors == 0, "filling: {:?}", report.first_error);
        Ok(())
    }
}

fn read_back_clean(verifier: &mut Verifier) -> Result<()> {
    let report = verifier.read_back(&mut |_| ())?;
    ensure!(report.is_clean(), "{report}");
    Ok(())
}

struct Running<'a> {
    over: &'a AtomicBool,
    bytes: &'a AtomicU64,
}

impl Running<'_> {
    fn write(&self, verifier: &mut Verifier) -> Result<WriteReport> {
        Ok(verifier.write(WriteGoal::UntilReported, &mut |at| {
            self.bytes.store(at.bytes, SeqCst);
            if self.over.load(SeqCst) {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })?)
    }

    fn writes_more(&self, what: &str, more: u64) -> Result<()> {
        let goal = self.bytes.load(SeqCst) + more;
        wait::until(what, MINUTE, || {
            Ok((self.bytes.load(SeqCst) >= goal).then_some(()))
        })
    }
}

#[test]
fn kill9_daemon_under_load() -> Result<()> {
    let full_bytes = 64 * MIB;
    let mut lab = lab(&[("full", full_bytes), ("thin", 512 * MIB)])?;
    lab.fill("full", full_bytes)?;
    let mut full = lab.writer("full")?;
    // Commits the new mappings.
    full.flush()?;
    drop(full);
    let nqn = "nqn.2026-01.io.forebay:test:t.full";
    let mut full = Verifier::connect(VerifySpec {
        initial: Initial::Any,
        flush_every_writes: 200,
        ..VerifySpec::new(lab.address, nqn, HOST)
    })?;
    let mut thin = lab.writer("thin")?;
    let (over, bytes) = (AtomicBool::new(false), AtomicU64::new(0));
    let running = Running {
        over: &over,
        bytes: &bytes,
    };
    let engine = lab.daemon.processes()?.engine;
    std::thread::scope(|scope| -> Result<()> {
        let writer = scope.spawn(|| running.write(&mut thin));
        let result = (|| -> Result<()> {
            for _ in 0..2 {
                running.writes_more("first writes to the thin volume", 2 * MIB)?;
                lab.daemon.kill_daemon()?;
                // Granted and committed extents need no daemon.
                let report =
                    full.write(
                        WriteGoal::Bytes(8 * MIB),
                        &mut |_| ControlFlow::Continue(()),
                    )?;
                ensure!(
                    report.errors == 0,
                    "without a daemon: {:?}",
                    report.first_error
                );
                ensure!(report.flushes > 0 && report.reconnects == 0, "{report:?}");
                lab.daemon.start_again()?;
                running.writes_more("first writes after the daemon's return", 2 * MIB)?;
            }
            Ok(())
        })();
        over.store(true, SeqCst);
        let report = writer.join().expect("the writer does not panic")?;
        result?;
        ensure!(
            report.errors == 0,
            "the thin volume: {:?}",
            report.first_error
        );
        ensure!(
            report.reconnects == 0,
            "the engine lived, but connections were lost: {report:?}"
        );
        Ok(())
    })?;
    ensure!(
        lab.daemon.processes()?.engine == engine,
        "the engine outlives its daemon"
    );
    read_back_clean(&mut full)?;
    read_back_clean(&mut thin)?;
    lab.daemon.stop()
}

#[test]
fn kill9_engine_under_load() -> Result<()> {
    let mut lab = lab(&[("a", 256 * MIB), ("b", 256 * MIB)])?;
    lab.spread()?;
    let mut a = lab.writer("a")?;
    let mut b = lab.writer("b")?;
    let mut c = lab.writer_over_budget()?;
    let over = AtomicBool::new(false);
    let bytes = [const { AtomicU64::new(0) }; 3];
    let [running, running_b, running_c] =
        bytes.each_ref().map(|bytes| Running { over: &over, bytes });
    let reports = std::thread::scope(|scope| -> Result<[WriteReport; 3]> {
        let write_a = scope.spawn(|| running.write(&mut a));
        let write_b = scope.spawn(|| running_b.write(&mut b));
        let write_c = scope.spawn(|| running_c.write(&mut c));
        let result = (|| -> Result<()> {
            for _ in 0..3 {
                running.writes_more("writes before a death", 2 * MIB)?;
                lab.waits_until_reactors_help_each_other()?;
                lab.waits_until_commands_wait_for_a_budget()?;
                let dead = lab.daemon.kill_engine()?;
                lab.daemon.wait_engine_after(dead.generation, MINUTE)?;
                running.writes_more("writes after a death", 2 * MIB)?;
                running_b.writes_more("the other tenant's writes after a death", 2 * MIB)?;
                // More than the commands in flight, so some had no room in the engine.
                running_c.writes_more("what waited for a budget", MIB)?;
            }
            Ok(())
        })();
        over.store(true, SeqCst);
        let reports = [
            write_a.join().expect("a writer does not panic")?,
            write_b.join().expect("a writer does not panic")?,
            write_c.join().expect("a writer does not panic")?,
        ];
        result?;
        Ok(reports)
    })?;
    for report in reports {
        ensure!(report.errors == 0, "{:?}", report.first_error);
        ensure!(report.reconnects == 0, "a death was noticed: {report:?}");
    }
    lab.daemon.cli(&["tenant", "budget", "u", "--none"])?;
    for verifier in [&mut a, &mut b, &mut c] {
        read_back_clean(verifier)?;
    }
    let folder = lab.daemon.folder().join("var/state/reports");
    let reports = std::fs::read_dir(&folder).with_context(|| folder.display().to_string())?;
    ensure!(
        reports.count() == 3,
        "each death leaves a report of what was known"
    );
    lab.daemon.stop()
}

/// A deallocation that timed out must not be executed later, over newer data.
#[test]
fn an_abandoned_deallocation_stays_abandoned() -> Result<()> {
    const BLOCKS: u32 = 128;
    const BYTES: usize = 512 << 10;
    let mut lab = lab(&[("a", 64 * MIB)])?;
    let nqn = "nqn.2026-01.io.forebay:test:t.a";
    let mut session = Session::connect(lab.address, nqn, HOST, &Options::default())?;
    let mut queue = session.open_queue(1)?;
    let write = IoOp::Write {
        lba: 0,
        blocks: BLOCKS,
        fua: false,
    };
    queue.execute(&write, vec![1; BYTES], MINUTE)?;
    queue.execute(&IoOp::Flush, vec![], MINUTE)?;
    lab.daemon.kill_daemon()?;
    let ranges = dsm_ranges(&[(0, BLOCKS)]);
    let ended = queue.execute(&IoOp::Deallocate { ranges: 1 }, ranges, MINUTE);
    ensure!(ended.is_err(), "nobody can have carried it out");
    // Cached translations need no daemon.
    queue.execute(&write, vec![2; BYTES], MINUTE)?;
    queue.execute(&IoOp::Flush, vec![], MINUTE)?;
    lab.daemon.start_again()?;
    // It answers a fault, so it has handled all earlier messages of the engine.
    let elsewhere = IoOp::Write {
        lba: 8192,
        blocks: BLOCKS,
        fua: true,
    };
    queue.execute(&elsewhere, vec![3; BYTES], MINUTE)?;
    let read = IoOp::Read {
        lba: 0,
        blocks: BLOCKS,
    };
    let got = queue.execute(&read, vec![0; BYTES], MINUTE)?;
    ensure!(
        got.iter().all(|byte| *byte == 2),
        "flushed data was deallocated afterwards"
    );
    drop(queue);
    session.close()?;
    lab.daemon.stop()
}
