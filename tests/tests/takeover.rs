//! An engine dies under verified load, and hosts notice nothing.
//!
//! Random kills, both processes, commands that kill or hang, a hanging control thread, a damaged
//! state region, a broken conversation. `FOREBAY_KILLS` is the number of kills, `FOREBAY_TEST_SEED`
//! their timing. `takeover_fence` has late device I/O, `takeover_points` single points of death.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_device::faulty::{self, Faults};
use forebay_initiator::{Error, IoOp, IoQueue, Options, Session};
use forebay_tests::daemon::Daemon;
use forebay_tests::hold::find_block;
use forebay_tests::host::{Dice, HOST_NQN};
use forebay_tests::lab::{self, Lab, LabOptions, MIB, MINUTE, Noticed};
use forebay_tests::wait;
use forebay_xlate::boundary::region::Region;
use forebay_xlate::shm::SharedMemory;
use rustix::process::{Pid, Signal, kill_process};

#[test]
fn kill9_engine_verified() -> Result<()> {
    let kills = lab::count_from("FOREBAY_KILLS", 50);
    let mut dice = Dice::with_seed(lab::count_from("FOREBAY_TEST_SEED", 1));
    let mut lab = Lab::new(&LabOptions {
        // One device may be free of the dead engine's requests before the other.
        devices: vec!["file:FOLDER/a.img".into(), "file:FOLDER/b.img".into()],
        ..LabOptions::volumes(4, 64 * MIB)
    })?;
    lab.during_load(Noticed::Nothing, |daemon, progress| {
        progress.more("work before the first death", 50)?;
        for kill in 0..kills {
            std::thread::sleep(Duration::from_millis(20 + dice.u64(..180)));
            let dead = daemon.kill_engine()?;
            daemon.wait_engine_after(dead.generation, MINUTE)?;
            if kill % 10 == 0 {
                progress.more("work between deaths", 20)?;
            }
        }
        progress.more("work after the last death", 100)
    })?;
    let stats = lab.daemon.cli(&["stats"])?;
    let takeover = &stats["takeover"];
    ensure!(takeover["takeovers"] == kills, "{takeover}");
    let closed = takeover["connections_closed"].as_array();
    ensure!(closed.is_some_and(Vec::is_empty), "{takeover}");
    println!("{kills} kills: {takeover}");
    lab.finish()
}

#[test]
fn kill9_daemon_and_engine_together() -> Result<()> {
    let mut lab = Lab::new(&LabOptions::volumes(2, 64 * MIB))?;
    lab.during_load(Noticed::Reconnects, |daemon, progress| {
        for engine_first in [true, false, true, false] {
            progress.more("work before the deaths", 100)?;
            let both = daemon.processes()?;
            if engine_first {
                kill(both.engine, Signal::KILL)?;
                daemon.kill_daemon()?;
            } else {
                daemon.kill_daemon()?;
                kill(both.engine, Signal::KILL)?;
            }
            daemon.start_again()?;
        }
        progress.more("work after the deaths", 100)
    })?;
    lab.finish()
}

/// One block's place on the device is known.
struct Victim {
    session: Session,
    queue: IoQueue,
    place: u64,
}

const TRAP_LBA: u64 = 3;
const NQN: &str = "nqn.2026-01.io.forebay:test:t.victim";

impl Victim {
    fn new(lab: &Lab) -> Result<Self> {
        let size = (16 * MIB).to_string();
        lab.daemon
            .cli(&["volume", "create", "t/victim", "--size", &size])?;
        lab.daemon
            .cli(&["export", "create", "t/victim", "--any-host"])?;
        let (session, mut queue) = connect(lab)?;
        let block: Vec<u8> = b"here it is, once".repeat(256);
        write(&mut queue, TRAP_LBA, block.clone())?;
        queue.execute(&IoOp::Flush, vec![], MINUTE)?;
        Ok(Self {
            session,
            queue,
            place: find_block(&lab.pool_file(), &block)?,
        })
    }

    fn read_trap(&mut self) -> Result<Vec<u8>, Error> {
        let read = IoOp::Read {
            lba: TRAP_LBA,
            blocks: 1,
        };
        self.queue.execute(&read, vec![0; 4096], MINUTE)
    }
}

fn connect(lab: &Lab) -> Result<(Session, IoQueue)> {
    let options = Options {
        command_timeout: MINUTE,
        ..Options::default()
    };
    let mut session = Session::connect(lab.address, NQN, HOST_NQN, &options)?;
    let queue = session.open_queue(1)?;
    Ok((session, queue))
}

fn write(queue: &mut IoQueue, lba: u64, data: Vec<u8>) -> Result<(), Error> {
    let write = IoOp::Write {
        lba,
        blocks: 1,
        fua: false,
    };
    queue.execute(&write, data, MINUTE).map(|_| ())
}

fn faulty_lab(more_config: &str) -> Result<Lab> {
    Lab::new(&LabOptions {
        config: format!("[engine]\nreactors = 2\n{more_config}\n[devices]\nallow_faulty = true\n"),
        devices: vec!["faulty:FOLDER/pool.img?size=2G&seed=1".into()],
        ..LabOptions::volumes(2, 32 * MIB)
    })
}

/// Internal Error (Base 2.1, figure "Generic Command Status Values") with DNR set.
fn is_internal_error(ended: &Result<Vec<u8>, Error>) -> bool {
    matches!(ended, Err(Error::Status { status, .. })
        if (status.sct(), status.sc()) == (0, 6) && status.dnr())
}

fn count(daemon: &Daemon, kind: &str) -> Result<usize> {
    Ok(lab::events(daemon)?.get(kind).map_or(0, Vec::len))
}

#[test]
fn poison_command_hurts_one_lane() -> Result<()> {
    let mut lab = faulty_lab("")?;
    let mut victim = Victim::new(&lab)?;
    let poison = Faults {
        poison: Some(victim.place),
        ..Faults::default()
    };
    faulty::set(&lab.pool_file(), &poison)?;
    lab.during_load(Noticed::Nothing, |daemon, progress| {
        for deaths in [2, 4] {
            progress.more("others work", 50)?;
            let ended = victim.read_trap();
            ensure!(is_internal_error(&ended), "the poison ended with {ended:?}");
            ensure!(
                count(daemon, "engine_died")? == deaths,
                "two deaths a poison"
            );
            write(&mut victim.queue, 9, vec![9; 4096]).context("its lane goes on")?;
        }
        // The fifth death of an export quarantines it.
        let ended = victim.read_trap();
        ensure!(
            ended.as_ref().is_err_and(Error::is_connection_lost),
            "{ended:?}"
        );
        progress.more("others work on", 50)?;
        ensure!(count(daemon, "engine_died")? == 5);
        let events = lab::events(daemon)?;
        let reported = &events.get("export_quarantined").context("an event")?[0];
        ensure!(reported["export"] == "t/victim", "{reported}");
        let message = reported["message"].as_str().unwrap_or_default();
        for word in ["t/victim", "opcode 0x02", "block 3"] {
            ensure!(message.contains(word), "no `{word}` in: {message}");
        }
        Ok(())
    })?;
    ensure!(connect(&lab).is_err(), "a quarantined export serves nobody");
    faulty::set(&lab.pool_file(), &Faults::default())?;
    lab.daemon.cli(&["export", "resume", "t/victim"])?;
    let (session, queue) = wait::until("it is served again", MINUTE, || Ok(connect(&lab).ok()))?;
    (victim.session, victim.queue) = (session, queue);
    ensure!(victim.read_trap()?.starts_with(b"here it is"));
    drop(victim);
    lab.finish()
}

#[test]
fn stuck_reactor_is_replaced() -> Result<()> {
    let mut lab = faulty_lab("stuck_s = 3")?;
    let mut victim = Victim::new(&lab)?;
    let spin = Faults {
        spin: Some(victim.place),
        ..Faults::default()
    };
    faulty::set(&lab.pool_file(), &spin)?;
    lab.during_load(Noticed::Nothing, |daemon, progress| {
        progress.more("others work", 50)?;
        let ended = victim.read_trap();
        ensure!(is_internal_error(&ended), "it ended with {ended:?}");
        progress.more("others work on", 50)?;
        let events = lab::events(daemon)?;
        let stuck = events.get("engine_stuck").context("an event")?;
        ensure!(stuck.len() == 2, "{stuck:?}");
        let message = stuck[0]["message"].as_str().unwrap_or_default();
        for word in ["queue 1", "opcode 0x02", "block 3"] {
            ensure!(message.contains(word), "no `{word}` in: {message}");
        }
        Ok(())
    })?;
    drop(victim);
    lab.finish()
}

/// No host's I/O needs the control thread, but without it no host can connect.
#[test]
fn stuck_control_thread_is_replaced() -> Result<()> {
    let mut lab = Lab::new(&LabOptions {
        config: "[engine]\nreactors = 2\nstuck_s = 3\n".into(),
        environment: vec![("FOREBAY_KILL".into(), "engine2:door.answered:hang:1".into())],
        ..LabOptions::volumes(2, 32 * MIB)
    })?;
    lab.daemon
        .cli(&["volume", "create", "t/victim", "--size", "16M"])?;
    lab.daemon
        .cli(&["export", "create", "t/victim", "--any-host"])?;
    let address = lab.address;
    lab.during_load(Noticed::Nothing, |daemon, progress| {
        progress.more("work before the death", 50)?;
        let dead = daemon.kill_engine()?;
        let stuck = daemon.wait_engine_after(dead.generation, MINUTE)?;
        let options = Options {
            command_timeout: MINUTE,
            connect_timeout: MINUTE,
            ..Options::default()
        };
        let ended = Session::connect(address, NQN, HOST_NQN, &options);
        ensure!(
            ended.is_err_and(|error| error.is_connection_lost()),
            "the newcomer over whom the thread was stuck goes"
        );
        daemon.wait_engine_after(stuck.generation, MINUTE)?;
        Session::connect(address, NQN, HOST_NQN, &options)?;
        progress.more("work after the death", 50)?;
        let events = lab::events(daemon)?;
        let reported = events.get("engine_stuck").context("an event")?;
        ensure!(reported.len() == 1, "{reported:?}");
        let message = reported[0]["message"].as_str().unwrap_or_default();
        for word in ["the control thread", "handling a new connection"] {
            ensure!(message.contains(word), "no `{word}` in: {message}");
        }
        Ok(())
    })?;
    lab.finish()
}

/// Connections after the break are also kept.
#[test]
fn a_conversation_that_broke_is_gone_on_with() -> Result<()> {
    let mut lab = Lab::new(&LabOptions::volumes(2, 32 * MIB))?;
    lab.daemon
        .cli(&["volume", "create", "t/victim", "--size", "16M"])?;
    lab.daemon
        .cli(&["export", "create", "t/victim", "--any-host"])?;
    let (_early, mut before) = connect(&lab)?;
    let folder = lab.daemon.folder().join("var/run");
    let address = lab.address;
    lab.during_load(Noticed::Nothing, |daemon, progress| {
        progress.more("work before the break", 50)?;
        let engine = daemon.processes()?;
        // The engine treats any client as the newest daemon.
        let socket = folder.join(format!("engine-{}.sock", engine.generation));
        drop(forebay_xlate::boundary::socket::connect(&socket)?);
        let volume = ["volume", "create", "t/later", "--size", "8M"];
        daemon.cli(&volume).context("the conversation goes on")?;
        daemon.cli(&["export", "create", "t/later", "--any-host"])?;
        let nqn = "nqn.2026-01.io.forebay:test:t.later";
        // Without a conversation, the engine learns nothing.
        let mut session = wait::until("the new export is served", MINUTE, || {
            Ok(Session::connect(address, nqn, HOST_NQN, &Options::default()).ok())
        })?;
        let mut after = session.open_queue(1)?;
        write(&mut after, 1, vec![1; 4096])?;
        daemon.kill_engine()?;
        let now = daemon.wait_engine_after(engine.generation, MINUTE)?;
        ensure!(now.daemon == engine.daemon && now.generation == engine.generation + 1);
        write(&mut before, 2, vec![2; 4096]).context("a connection from before the break")?;
        write(&mut after, 2, vec![2; 4096]).context("a connection from after it")?;
        progress.more("work after the death", 50)
    })?;
    lab.finish()
}

fn kill(pid: u32, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(pid.cast_signed()).context("a pid")?;
    Ok(kill_process(pid, signal)?)
}

const DAMAGES: u64 = 12;

/// Each death damages one host's records. Only that host may reconnect.
#[test]
fn damaged_state_region_resets_one_lane() -> Result<()> {
    let mut dice = Dice::with_seed(lab::count_from("FOREBAY_TEST_SEED", 1));
    let mut lab = Lab::new(&LabOptions::volumes(3, 32 * MIB))?;
    lab.hurt = vec![0];
    let mut reported = Vec::new();
    let ran = lab.during_load(Noticed::Nothing, |daemon, progress| {
        for _ in 0..DAMAGES {
            progress.more("work before the damage", 50)?;
            let engine = daemon.processes()?;
            kill(engine.engine, Signal::STOP)?;
            reported.push(damage_first_lane(engine.engine, &mut dice)?);
            kill(engine.engine, Signal::KILL)?;
            daemon.wait_engine_after(engine.generation, MINUTE)?;
        }
        progress.more("work after the damage", 50)
    });
    ran.with_context(|| format!("damaged: {reported:#?}"))?;
    println!(
        "damaged: {reported:#?}\n{}",
        lab.daemon.cli(&["stats"])?["takeover"]
    );
    lab.finish()
}

/// Damages one to three words in a stopped engine's records of the first volume's hosts.
fn damage_first_lane(engine: u32, dice: &mut Dice) -> Result<Vec<String>> {
    let mut regions = std::fs::read_dir(format!("/proc/{engine}/fd"))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let target = std::fs::read_link(path).unwrap_or_default();
            target.to_string_lossy().contains("forebay-region")
        });
    let region = regions.next().context("no state region is open")?;
    let region = Region::adopt(SharedMemory::open(&region)?)?;
    let lanes = region.lanes().iter().enumerate();
    let used = lanes.filter(|(_, lane)| lane.export.load(Relaxed) != 0);
    let (lane, _) = used
        .min_by_key(|(_, lane)| lane.volume.load(Relaxed))
        .context("no lane")?;
    let mut words: Vec<(String, &AtomicU64)> = Vec::new();
    // Addresses of commands in flight.
    let mut places: Vec<(String, &AtomicU64)> = Vec::new();
    for (number, queue) in region.queues().iter().enumerate() {
        let controller = queue.controller.load(Relaxed) as usize;
        let Some(controller) = region.controllers().get(controller) else {
            continue;
        };
        if queue.used.load(Relaxed) != 2 || controller.lane.load(Relaxed) != lane as u64 {
            continue;
        }
        for (name, word) in [
            ("used", &queue.used),
            ("controller", &queue.controller),
            ("identity", &queue.identity),
            ("params", &queue.params),
            ("socket", &queue.socket),
            ("reactor", &queue.reactor),
            ("number", &queue.number),
            ("taken", &queue.taken),
            ("kept", &queue.kept),
            ("tx_at", &queue.tx_at),
            ("tx_span", &queue.tx_span),
            ("data_begin", &queue.data_begin),
            ("data_end", &queue.data_end),
            ("data_slot", &queue.data_slot),
        ] {
            words.push((format!("queue {number} {name}"), word));
        }
        for (slot, command) in region.commands(number).iter().enumerate() {
            if command.state.load(Relaxed) != 0 {
                words.push((format!("queue {number} slot {slot} state"), &command.state));
                words.push((
                    format!("queue {number} slot {slot} number"),
                    &command.number,
                ));
                words.push((
                    format!("queue {number} slot {slot} buffer"),
                    &command.buffer,
                ));
                words.push((format!("queue {number} slot {slot} end"), &command.end));
                for word in [0, 5, 6] {
                    let name = format!("queue {number} slot {slot} sqe[{word}]");
                    words.push((name, &command.sqe[word]));
                }
                places.push((format!("queue {number} slot {slot} place"), &command.sqe[5]));
            }
        }
        for (copy, words_of) in controller.copies.iter().enumerate() {
            let name = format!("controller of queue {number} copy {copy}");
            words.push((format!("{name} sequence"), &words_of.sequence));
            words.push((format!("{name} state"), &words_of.state[dice.usize(..8)]));
        }
    }
    ensure!(!words.is_empty(), "the first lane has no queue");
    let mut reported = Vec::new();
    // The command remains valid, but for another block.
    if !places.is_empty() && dice.u64(..2) == 0 {
        let (name, word) = &places[dice.usize(..places.len())];
        let flip = 1 + dice.u64(..255);
        word.fetch_xor(flip, Relaxed);
        reported.push(format!("{name} ^ {flip:#x}"));
    }
    let hurt = (0..dice.u64(..3) + u64::from(reported.is_empty())).map(|_| {
        let (name, word) = &words[dice.usize(..words.len())];
        let flip = match dice.u64(..3) {
            0 => 1 << dice.u64(..64),
            1 => dice.u64(..1 << 12),
            _ => dice.u64(..),
        };
        word.fetch_xor(flip, Relaxed);
        format!("{name} ^ {flip:#x}")
    });
    reported.extend(hurt);
    Ok(reported)
}
