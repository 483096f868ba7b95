//! Hosts that come in crowds, say nothing, stop in the middle, or take nothing, beside a load that is verified.
//!
//! Purpose: whoever can reach the listener can do all this without a name; it costs others nothing that lasts.
//! Design: each test counts descriptors and memory of both processes before and after, and asks that the load beside
//! it has gone on without an error, a reconnect, or a wrong byte. Rates are paced and printed, never asserted.
//! Not here: single malformed PDUs (`crates/engine`), which are judged one by one there.

use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use forebay_initiator::Host as Discovery;
use forebay_nvme::SglDescriptor;
use forebay_nvme::fabrics::ConnectCommand;
use forebay_nvme::tcp::{self, Pdu};
use forebay_tests::daemon::resident_bytes;
use forebay_tests::host::Dice;
use forebay_tests::lab::{Lab, LabOptions, MIB, MINUTE, Noticed, count_from};
use forebay_tests::wait;
use raw::{PLAIN, READ, RawHost, WRITE, attach, connect_data, ic_req, rw};
use zerocopy::IntoBytes;

#[allow(missing_docs, dead_code)]
#[path = "../../crates/engine/tests/common/host.rs"]
mod raw;

const HOST: &str = "nqn.2026-01.test:storm";
/// What a test may leave behind in a process that allocates from heaps: no more than this, whatever the crowd.
const SLACK_BYTES: u64 = 48 << 20;

/// What is held for hosts.
#[derive(Debug, Clone, Copy)]
struct Held {
    engine_descriptors: usize,
    daemon_descriptors: usize,
    engine_bytes: u64,
}

fn descriptors(pid: u32) -> Result<usize> {
    Ok(std::fs::read_dir(format!("/proc/{pid}/fd"))
        .with_context(|| format!("descriptors of process {pid}"))?
        .count())
}

fn held(lab: &Lab) -> Result<Held> {
    let processes = lab.daemon.processes()?;
    Ok(Held {
        engine_descriptors: descriptors(processes.engine)?,
        daemon_descriptors: descriptors(processes.daemon)?,
        engine_bytes: resident_bytes(processes.engine)?,
    })
}

/// Waits until no more is held than before. A descriptor or two come and go with the daemon's own work.
fn wait_given_back(lab: &Lab, before: Held) -> Result<()> {
    let mut now = before;
    wait::until("everything is given back", MINUTE, || {
        now = held(lab)?;
        let back = now.engine_descriptors <= before.engine_descriptors + 2
            && now.daemon_descriptors <= before.daemon_descriptors + 2;
        Ok(back.then_some(()))
    })
    .with_context(|| format!("before {before:?}, now {now:?}"))?;
    ensure!(
        now.engine_bytes <= before.engine_bytes + SLACK_BYTES,
        "before {before:?}, now {now:?}"
    );
    Ok(())
}

fn subsystem(volume: &str) -> String {
    format!("nqn.2026-01.io.forebay:t.{volume}")
}

/// Ends a connection with a reset, as a host does that dies: it leaves no port behind in TIME_WAIT.
fn reset(socket: &TcpStream) {
    rustix::net::sockopt::set_socket_linger(socket, Some(Duration::ZERO)).expect("SO_LINGER");
}

/// One visit; which of the kinds, and where it is cut, the dice say.
fn visit(address: SocketAddr, nqn: &str, kind: u64, dice: &mut Dice) -> Result<()> {
    let cut = |host: &mut RawHost, bytes: &[u8], dice: &mut Dice| {
        let end = dice.below(bytes.len() as u64 + 1) as usize;
        // Who is cut off first may fail to say the rest.
        let _ = std::io::Write::write_all(&mut host.socket, &bytes[..end]);
    };
    let ic_req_bytes = || {
        let mut out = vec![0; tcp::MAX_HEADER_BYTES];
        let n = tcp::put_ic_req(&mut out, &ic_req(PLAIN));
        out.truncate(n);
        out
    };
    match kind {
        0 => {
            Discovery::discover(address, HOST)?;
        }
        1 => {
            let host = RawHost::dial(address);
            if dice.below(2) == 0 {
                reset(&host.socket);
            }
        }
        2 => {
            let mut host = RawHost::dial(address);
            cut(&mut host, &ic_req_bytes(), dice);
            reset(&host.socket);
        }
        3 => {
            let mut host = RawHost::open(address, PLAIN);
            let sqe = ConnectCommand::new(0, 0, 32, 60_000)
                .to_sqe()
                .with_sgl(SglDescriptor::in_capsule(0, 1024));
            let bytes = host.capsule_bytes(&sqe, connect_data(0xffff, nqn, HOST).as_bytes());
            cut(&mut host, &bytes, dice);
            reset(&host.socket);
        }
        _ => {
            // A whole association, which ends without a word, with a read and a write on their way.
            let (admin, mut io) = attach(address, nqn, PLAIN, true);
            let (read, write) = (io.next_cid(), io.next_cid());
            let read = rw(READ, read, 0, 8).with_sgl(SglDescriptor::transport(8 * 4096));
            io.capsule(&read, &[]);
            let write = rw(WRITE, write, 8, 1).with_sgl(SglDescriptor::in_capsule(0, 4096));
            let bytes = io.capsule_bytes(&write, &[7; 4096]);
            cut(&mut io, &bytes, dice);
            reset(&io.socket);
            reset(&admin.socket);
        }
    }
    Ok(())
}

#[test]
fn connect_discover_storm() -> Result<()> {
    let seconds = count_from("FOREBAY_STORM_SECONDS", 10);
    let mut lab = Lab::new(&LabOptions::volumes(2, 64 * MIB))?;
    // The second one's host is the crowd's victim; only the first works.
    lab.hosts.truncate(1);
    let (address, nqn) = (lab.address, subsystem("b"));
    Discovery::discover(address, HOST)?;
    let mut before = None;
    let visits = AtomicU64::new(0);
    let begun = Instant::now();
    let mut took = Duration::ZERO;
    lab.during_load(Noticed::Nothing, |daemon, progress| {
        progress.more("the load has begun", 100)?;
        let processes = daemon.processes()?;
        before = Some(Held {
            engine_descriptors: descriptors(processes.engine)?,
            daemon_descriptors: descriptors(processes.daemon)?,
            engine_bytes: resident_bytes(processes.engine)?,
        });
        std::thread::scope(|scope| {
            let crowd: Vec<_> = (0..4u64)
                .map(|number| {
                    let (nqn, visits) = (&nqn, &visits);
                    scope.spawn(move || -> Result<()> {
                        let mut dice = Dice(number + 1);
                        // 250 a second each, or as many as the machine can.
                        let start = Instant::now();
                        for i in 0..seconds * 250 {
                            let due = start + Duration::from_millis(4 * i);
                            std::thread::sleep(due.saturating_duration_since(Instant::now()));
                            visit(address, nqn, dice.below(5), &mut dice)
                                .with_context(|| format!("visit {i} of {number}"))?;
                            visits.fetch_add(1, Relaxed);
                        }
                        Ok(())
                    })
                })
                .collect();
            crowd
                .into_iter()
                .try_for_each(|thread| thread.join().expect("a visitor is not refused"))
        })?;
        took = begun.elapsed();
        progress.more("the load goes on", 100)
    })?;
    println!(
        "{} visits in {:.1} s",
        visits.load(Relaxed),
        took.as_secs_f64()
    );
    wait_given_back(&lab, before.context("counted")?)?;
    lab.finish()
}

#[test]
fn half_open_thousands_keep_nobody_out() -> Result<()> {
    let mut lab = Lab::new(&LabOptions::volumes(1, 64 * MIB))?;
    let before = held(&lab)?;
    let address = lab.address;
    lab.during_load(Noticed::Nothing, |_, progress| {
        progress.more("the load has begun", 100)?;
        let mut crowd = Vec::new();
        for i in 0..5000u64 {
            // The crowd's oldest are shut out; who tries later may be refused for a moment.
            if let Ok(socket) = TcpStream::connect(address) {
                if i % 2 == 0 {
                    let mut out = [0; tcp::MAX_HEADER_BYTES];
                    let n = tcp::put_ic_req(&mut out, &ic_req(PLAIN));
                    let _ = std::io::Write::write(&mut &socket, &out[..n - 1]);
                }
                crowd.push(socket);
            }
        }
        progress.more("the load goes on beside them", 100)?;
        // A host that knows what it wants gets in while they all are there.
        let found = Discovery::discover(address, HOST)?;
        let found = found.iter().filter(|found| found.is_nvm_tcp()).count();
        ensure!(found == 1, "{found}");
        crowd.iter().for_each(reset);
        Ok(())
    })?;
    wait_given_back(&lab, before)?;
    lab.finish()
}

#[test]
fn slow_reader_does_not_stall_others() -> Result<()> {
    let mut lab = Lab::new(&LabOptions {
        // One reactor: they share everything that there is.
        config: "[engine]\nreactors = 1\n".into(),
        ..LabOptions::volumes(2, 64 * MIB)
    })?;
    lab.hosts.truncate(1);
    let (address, nqn) = (lab.address, subsystem("b"));
    let before = held(&lab)?;
    lab.during_load(Noticed::Nothing, |daemon, progress| {
        progress.more("the load has begun", 100)?;
        let (admin, mut io) = attach(address, &nqn, PLAIN, true);
        let asked = 127u64;
        for i in 0..asked {
            let cid = io.next_cid();
            let sqe = rw(READ, cid, i % 64 * 32, 32).with_sgl(SglDescriptor::transport(32 * 4096));
            io.capsule(&sqe, &[]);
        }
        // It reads nothing: what it asked for fills its socket and its share, and no more.
        progress.more("the load goes on beside a host that reads nothing", 2000)?;
        let engine = daemon.processes()?.engine;
        let resident = resident_bytes(engine)?;
        ensure!(
            resident < before.engine_bytes + SLACK_BYTES,
            "a host that reads nothing holds {} bytes",
            resident - before.engine_bytes
        );
        // It comes to its senses: everything is there.
        let mut bytes = 0;
        let mut ended = 0;
        while ended < asked {
            match io.hear() {
                (Pdu::C2hData(data), got) => {
                    bytes += got.len() as u64;
                    ended += u64::from(data.last && data.success);
                }
                (Pdu::CapsuleResp(cqe), _) => {
                    ensure!(cqe.status().is_success(), "{cqe:?}");
                    ended += 1;
                }
                other => anyhow::bail!("unexpected: {other:?}"),
            }
        }
        ensure!(bytes == asked * 32 * 4096, "{bytes} bytes came");
        drop(admin);
        Ok(())
    })?;
    wait_given_back(&lab, before)?;
    lab.finish()
}

#[test]
fn silent_writers_are_ended_and_hold_up_nobody() -> Result<()> {
    let mut lab = Lab::new(&LabOptions {
        config: "[engine]\nreactors = 1\n".into(),
        ..LabOptions::volumes(2, 64 * MIB)
    })?;
    lab.hosts.truncate(1);
    let (address, nqn) = (lab.address, subsystem("b"));
    let before = held(&lab)?;
    let over = AtomicBool::new(false);
    lab.during_load(Noticed::Nothing, |_, progress| {
        progress.more("the load has begun", 100)?;
        let mut crowd: Vec<(RawHost, RawHost)> =
            (0..4).map(|_| attach(address, &nqn, PLAIN, true)).collect();
        for (_, io) in &mut crowd {
            for i in 0..64u64 {
                let cid = io.next_cid();
                let sqe =
                    rw(WRITE, cid, i * 128, 128).with_sgl(SglDescriptor::transport(128 * 4096));
                io.capsule(&sqe, &[]);
            }
        }
        progress.more(
            "the load goes on beside hosts that never send their data",
            2000,
        )?;
        // Each is asked for some of it, and cut off when it does not come (30 s after it was asked).
        for (admin, mut io) in crowd {
            io.socket.set_read_timeout(Some(MINUTE))?;
            let mut asked = 0;
            while let Some((pdu, _)) = io.try_hear() {
                match pdu {
                    Pdu::R2t(_) => asked += 1,
                    Pdu::C2hTermReq(_) => {}
                    other => anyhow::bail!("unexpected: {other:?}"),
                }
            }
            ensure!(asked > 0, "asked for nothing");
            drop(admin);
        }
        over.store(true, Relaxed);
        progress.more("the load goes on when they are gone", 100)
    })?;
    wait_given_back(&lab, before)?;
    lab.finish()
}
