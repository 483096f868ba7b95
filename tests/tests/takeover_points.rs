//! Deaths at each named point of the take-over's specification, singly and in pairs. Connected
//! hosts notice nothing while one process lives, and lose nothing when both die.
//!
//! Engines of one daemon die in a chain, each at its own point ([`forebay_xlate::kill`]); every
//! second one dies at work. Hosts, a visitor and partial PDUs make every point reachable.
//! `FOREBAY_PAIRS` is the number of pairs, `FOREBAY_TEST_SEED` selects them.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::{Error, IoOp, Options, Session};
use forebay_nvme::SglDescriptor;
use forebay_nvme::fabrics::ConnectCommand;
use forebay_tests::daemon::Daemon;
use forebay_tests::host::{Dice, HOST_NQN};
use forebay_tests::lab::{self, Lab, LabOptions, MIB, MINUTE, Noticed};
use forebay_tests::wait;
use forebay_xlate::kill::POINTS;
use raw::{PLAIN, RawHost, WRITE, connect_data, io_queue, rw};

#[allow(missing_docs, dead_code)]
#[path = "../../crates/engine/tests/common/host.rs"]
mod raw;

const HOST: &str = "nqn.2026-01.test:parts";
const VISITED: &str = "nqn.2026-01.io.forebay:test:t.visited";

fn points(of: impl Fn(&str) -> bool) -> Vec<&'static str> {
    POINTS.iter().copied().filter(|point| of(point)).collect()
}

fn at_work() -> Vec<&'static str> {
    let others = ["over.", "daemon.", "reserve.", "vm.", "pcie.", "vhost."];
    points(|point| !others.iter().any(|part| point.starts_with(part)))
}

fn taking_over() -> Vec<&'static str> {
    points(|point| point.starts_with("over."))
}

/// False if a connection was lost during connect.
fn visit(lab_address: SocketAddr, grow: &dyn Fn() -> Result<()>) -> Result<bool, Error> {
    let options = Options {
        command_timeout: MINUTE,
        connect_timeout: MINUTE,
        ..Options::default()
    };
    let connected = Session::connect(lab_address, VISITED, HOST_NQN, &options)
        .and_then(|mut session| Ok((session.open_queue(1)?, session)));
    let (mut queue, session) = match connected {
        Err(error) if error.is_connection_lost() => return Ok(false),
        connected => connected?,
    };
    let write = IoOp::Write {
        lba: 1,
        blocks: 32,
        fua: true,
    };
    queue.execute(&write, vec![5; 32 * 4096], MINUTE)?;
    let _ = grow();
    session.wait_events(Duration::from_millis(100))?;
    let read = IoOp::Read { lba: 1, blocks: 32 };
    let found = queue.execute(&read, vec![0; 32 * 4096], MINUTE)?;
    assert!(found == vec![5; 32 * 4096], "the visitor's own write");
    let (was, is) = (vec![5; 4096], vec![6; 4096]);
    let swapped = queue.compare_and_write(1, was, is.clone(), true, MINUTE)?;
    assert!(swapped, "nobody else writes here");
    let again = queue.compare_and_write(1, vec![5; 4096], vec![7; 4096], false, MINUTE)?;
    assert!(!again, "it has been written");
    let read = IoOp::Read { lba: 1, blocks: 1 };
    let found = queue.execute(&read, vec![0; 4096], MINUTE)?;
    assert!(found == is, "what the pair wrote");
    drop(queue);
    session.close()?;
    Ok(true)
}

/// Sends PDUs in parts, one for each receive.
struct Parts {
    _admin: RawHost,
    io: RawHost,
    dice: Dice,
}

impl Parts {
    /// Blocks that no other host writes.
    const PLACE: u64 = 3000;
    const BLOCKS: u32 = 16;

    fn new(address: SocketAddr) -> Result<Self> {
        let mut admin = RawHost::open(address, PLAIN);
        // No keep-alive time, because this host sends none.
        let connect = ConnectCommand::new(0, 0, 32, 0);
        let connected = admin.connect(connect, &connect_data(0xffff, VISITED, HOST));
        ensure!(connected.status().is_success(), "{connected:?}");
        admin.enable();
        let cntlid = connected.result() as u16;
        let io = io_queue(address, VISITED, cntlid, 1, 128, PLAIN, true);
        io.socket.set_read_timeout(Some(MINUTE))?;
        Ok(Self {
            _admin: admin,
            io,
            dice: Dice::with_seed(7),
        })
    }

    /// Sends a capsule header in two parts, and data in parts.
    fn turn(&mut self) -> Result<()> {
        let Self { io, dice, .. } = self;
        let byte = dice.u8(..255);
        let data = vec![byte; Self::BLOCKS as usize * 4096];
        let sqe = rw(WRITE, io.next_cid(), Self::PLACE, Self::BLOCKS)
            .with_sgl(SglDescriptor::transport(data.len() as u32));
        let capsule = io.capsule_bytes(&sqe, &[]);
        let (first, second) = capsule.split_at(1 + dice.usize(..capsule.len() - 1));
        io.say(first);
        std::thread::sleep(Duration::from_millis(2));
        io.say(second);
        let r2t = io.r2t();
        io.answer_r2t(&r2t, &data, 4096 + 512 * dice.usize(..32));
        let written = io.response();
        ensure!(written.status().is_success(), "{written:?}");
        let found = io.read(Self::PLACE, Self::BLOCKS, 4096);
        ensure!(found == data, "not what was written");
        Ok(())
    }
}

/// Deaths between two engines that serve until the test kills them. An engine may die before it
/// serves, and more such deaths in a row would delay the next start beyond the hosts' time limits.
const DEATHS_IN_A_ROW: usize = 3;

/// Engines die at these points, in this order; the last one lives.
fn chain_of_deaths(chain: &[(&str, u64)]) -> Result<()> {
    let mut kills = Vec::new();
    let mut serving = Vec::new();
    let mut number = 0;
    for (i, (point, count)) in chain.iter().enumerate() {
        if i > 0 && i % DEATHS_IN_A_ROW == 0 {
            number += 1;
            serving.push(number);
        }
        number += 1;
        kills.push(format!("engine{number}:{point}:{count}"));
    }
    let mut lab = Lab::new(&LabOptions::volumes(2, 32 * MIB))?;
    lab.daemon
        .cli(&["volume", "create", "t/visited", "--size", "16M"])?;
    lab.daemon
        .cli(&["export", "create", "t/visited", "--any-host"])?;
    let address = lab.address;
    let mut cli = Vec::new();
    for mib in 0..2000 {
        let size = format!("{}M", 20 + 4 * mib);
        cli.push(
            lab.daemon
                .cli_command(&["volume", "resize", "t/visited", "--size", &size]),
        );
    }
    let cli = std::sync::Mutex::new(cli.into_iter());
    let mut parts = Parts::new(address)?;
    let over = AtomicBool::new(false);
    let visits = AtomicU64::new(0);
    lab.during_load(Noticed::Nothing, |daemon, progress| {
        // A second daemon's engines have the kill points, so that all hosts connect first.
        progress.more("hosts are connected", 1)?;
        daemon.kill_daemon()?;
        daemon.environment = vec![("FOREBAY_KILL".into(), kills.join(","))];
        daemon.start_again()?;
        daemon.kill_engine()?;
        std::thread::scope(|scope| {
            let visitor = scope.spawn(|| {
                let (mut turned_away, mut failed) = (0, Vec::new());
                while !over.load(SeqCst) {
                    let grow = || -> Result<()> {
                        let next = cli.lock().expect("no panic").next();
                        let mut command = next.context("grown enough")?;
                        ensure!(command.output()?.status.success());
                        Ok(())
                    };
                    match visit(address, &grow) {
                        Ok(true) => drop(visits.fetch_add(1, SeqCst)),
                        Ok(false) => turned_away += 1,
                        Err(error) => failed.push(error.to_string()),
                    }
                }
                (turned_away, failed)
            });
            let in_parts = scope.spawn(|| -> Result<u64> {
                let mut turns = 0;
                while !over.load(SeqCst) {
                    parts.turn()?;
                    turns += 1;
                }
                Ok(turns)
            });
            let waited = (|| -> Result<()> {
                let mut died = 0;
                while died < number {
                    if serving.contains(&(died + 1)) {
                        progress.more("work between the deaths", 20)?;
                        daemon.kill_engine()?;
                    }
                    wait::until("a death", MINUTE, || {
                        progress.alive()?;
                        let next = daemon.engine_number().ok().filter(|n| *n > died + 1);
                        died = next.map_or(died, |n| n - 1);
                        Ok(next)
                    })
                    .with_context(|| format!("engine {} never died; {kills:?}", died + 1))?;
                }
                progress.more("work after the last death", 100)
            })();
            over.store(true, SeqCst);
            let (turned_away, failed) = visitor.join().expect("the visitor does not panic");
            let in_parts = in_parts.join().expect("its connection is not lost");
            println!(
                "{} visits; turned away: {turned_away}; failed: {failed:?}; {in_parts:?} turns of PDUs in parts",
                visits.load(SeqCst)
            );
            waited?;
            in_parts?;
            ensure!(failed.is_empty(), "{failed:?}");
            // Between accept(2) and the daemon's receipt of the socket, a connection dies with its
            // engine: always at one point, by chance at others.
            let unlucky = chain
                .iter()
                .filter(|(p, _)| *p == "accept.accepted")
                .count();
            let most = unlucky + chain.len() / 4;
            ensure!(turned_away <= most, "{turned_away} turned away");
            Ok(())
        })
    })?;
    let takeover = &lab.daemon.cli(&["stats"])?["takeover"];
    println!("{} deaths; {takeover}", chain.len());
    lab.finish()
}

#[test]
fn kill_at_each_point() -> Result<()> {
    let mut dice = Dice::with_seed(lab::count_from("FOREBAY_TEST_SEED", 1));
    let mut over = taking_over().into_iter();
    let mut chain = Vec::new();
    for point in at_work() {
        chain.push((point, 1 + dice.u64(..20)));
        chain.extend(over.next().map(|point| (point, 1)));
    }
    ensure!(over.next().is_none(), "every point has its turn");
    chain_of_deaths(&chain)
}

#[test]
fn kill_at_pairs() -> Result<()> {
    let pairs = lab::count_from("FOREBAY_PAIRS", 24);
    let mut dice = Dice::with_seed(lab::count_from("FOREBAY_TEST_SEED", 2));
    let (first, second) = (at_work(), taking_over());
    let mut chain = Vec::new();
    for _ in 0..pairs {
        let at = dice.usize(..first.len());
        chain.push((first[at], 1 + dice.u64(..30)));
        let at = dice.usize(..second.len());
        chain.push((second[at], 1));
    }
    chain_of_deaths(&chain)
}

/// A first engine dies at one point, and its daemon at a later one.
fn both_die(daemon: &mut Daemon, engine: (&str, u64), point: &str) -> Result<()> {
    daemon.kill_daemon()?;
    // The daemon's point is in the take-over in which the first engine dies, or in the next.
    let converting = [
        "over.greeted",
        "over.adopted",
        "over.counted",
        "over.half",
        "over.converted",
    ];
    let after = ["daemon.converted", "daemon.flip", "daemon.report"];
    let same = converting.contains(&engine.0) && after.contains(&point);
    // A daemon that finds an engine also sends it everything.
    let at_start = u64::from(point == "daemon.told");
    let count = at_start + if same { 1 } else { 2 };
    let kills = format!("engine1:{}:{},daemon:{point}:{count}", engine.0, engine.1);
    daemon.environment = vec![("FOREBAY_KILL".into(), kills)];
    daemon.start_again()?;
    daemon.kill_engine()?;
    let mut polls = 0;
    wait::until("the daemon's death", MINUTE, || {
        if daemon.has_died()? {
            return Ok(Some(()));
        }
        // If the first engine died too early, one more death is needed.
        polls += 1;
        let patience = if daemon.engine_number().unwrap_or(1) > 1 {
            20
        } else {
            200
        };
        if polls > patience {
            polls = 0;
            let _ = daemon.kill_engine();
        }
        Ok(None)
    })?;
    daemon.environment.clear();
    daemon.start_again()
}

#[test]
fn both_die_at_pairs() -> Result<()> {
    let pairs = lab::count_from("FOREBAY_PAIRS", 24) / 2;
    let mut dice = Dice::with_seed(lab::count_from("FOREBAY_TEST_SEED", 3));
    let under_load = ["rx.", "core.", "tx.", "over."];
    let engine = points(|point| under_load.iter().any(|part| point.starts_with(part)));
    let daemons = points(|point| point.starts_with("daemon."));
    let mut lab = Lab::new(&LabOptions::volumes(2, 32 * MIB))?;
    lab.during_load(Noticed::Reconnects, |daemon, progress| {
        for _ in 0..pairs {
            progress.more("work before the deaths", 50)?;
            let first = engine[dice.usize(..engine.len())];
            let count = if first.starts_with("over.") {
                1
            } else {
                1 + dice.u64(..30)
            };
            let second = daemons[dice.usize(..daemons.len())];
            let pair = format!("{first}:{count} and {second}");
            both_die(daemon, (first, count), second).with_context(|| pair.clone())?;
            progress.more(&pair, 50)?;
        }
        Ok(())
    })?;
    lab.finish()
}

#[test]
fn a_found_engine_dies_at_once() -> Result<()> {
    let kill = "engine1:over.greeted:2";
    let mut lab = Lab::new(&LabOptions {
        environment: vec![("FOREBAY_KILL".into(), kill.into())],
        ..LabOptions::volumes(2, 32 * MIB)
    })?;
    lab.during_load(Noticed::Nothing, |daemon, progress| {
        progress.more("work before the deaths", 50)?;
        let before = daemon.processes()?;
        daemon.kill_daemon()?;
        daemon.environment.clear();
        daemon.start_again()?;
        daemon.wait_engine_after(before.generation, MINUTE)?;
        progress.more("work after the deaths", 50)
    })?;
    lab.finish()
}

#[test]
fn the_daemon_dies_at_each_point() -> Result<()> {
    let mut lab = Lab::new(&LabOptions::volumes(2, 32 * MIB))?;
    lab.during_load(Noticed::Reconnects, |daemon, progress| {
        for point in points(|point| point.starts_with("daemon.")) {
            progress.more("work before the deaths", 50)?;
            // The daemon adopts an engine, so that the point is reached after that engine's death.
            daemon.kill_daemon()?;
            for count in 1.. {
                let kill = format!("daemon:{point}:{count}");
                daemon.environment = vec![("FOREBAY_KILL".into(), kill)];
                let begun = daemon.start_again();
                // Adoption reaches some points too; then the next occurrence is meant.
                if begun.is_ok() {
                    daemon.kill_engine()?;
                    break;
                }
                ensure!(count < 4, "{point}: {begun:?}");
            }
            daemon
                .wait_daemon_death()
                .with_context(|| format!("the daemon never died at {point}"))?;
            daemon.environment.clear();
            daemon.start_again()?;
            progress.more(point, 50)?;
        }
        Ok(())
    })?;
    lab.finish()
}
