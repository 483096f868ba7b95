//! Reservations are enforced and reported across deaths of engine and daemon, and across a reboot
//! if they persist. A command during the daemon's death counts once.
//!
//! Only the reboot is simulated: the run folder is removed, and the next daemon gets another boot
//! id.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::{Done, IoQueue, Options, Session, Wait};
use forebay_nvme::host::{HostTransfer, command};
use forebay_nvme::opcode::nvm;
use forebay_nvme::{Sqe, Status};
use forebay_tests::daemon::Daemon;
use forebay_tests::lab::{Lab, LabOptions, MINUTE};
use forebay_tests::system::kill_by_pid;
use forebay_tests::wait;
use forebay_xlate::shm::BOOT_VARIABLE;

const NQN: &str = "nqn.2026-01.io.forebay:test:t.shared";
const BLOCK: usize = 4096;
const KEY_A: u64 = 0xa1;
const KEY_B: u64 = 0xb1;

// Bits of CDW10 of reservation commands (Base 2.0, 7.2 to 7.4).
const PERSIST: u32 = 3 << 30;
const REPLACE: u32 = 2;
const WRITE_EXCLUSIVE: u32 = 1 << 8;
/// The extended Reservation Status (7.5) has a header and registrants of this length.
const ENTRY_BYTES: usize = 64;

struct Peer {
    _session: Session,
    queue: IoQueue,
}

impl Peer {
    fn new(address: SocketAddr, name: &str) -> Result<Self> {
        let options = Options {
            command_timeout: MINUTE,
            connect_timeout: MINUTE,
            ..Options::default()
        };
        // After a restart, the export is served with a delay.
        let connected = wait::until("a host connects", MINUTE, || {
            let nqn = format!("nqn.2026-01.test:{name}");
            let session = Session::connect(address, NQN, &nqn, &options);
            Ok(session.ok())
        });
        let mut session = connected?;
        let queue = session.open_queue(1)?;
        Ok(Self {
            _session: session,
            queue,
        })
    }

    fn say(&mut self, sqe: Sqe, transfer: HostTransfer, data: Vec<u8>) -> Result<()> {
        let said = self.queue.submit_command(sqe, transfer, 0, data);
        said.map_err(|refused| anyhow::anyhow!("{refused:?}"))?;
        let mut none = Vec::new();
        self.queue.poll(&mut none, Wait::Spin, Duration::ZERO)?;
        ensure!(none.is_empty(), "answered at once: {none:?}");
        Ok(())
    }

    fn answer(&mut self) -> Result<Done> {
        let mut done = Vec::new();
        wait::until("an answer", MINUTE, || {
            let pause = Duration::from_millis(5);
            self.queue.poll(&mut done, Wait::Block, pause)?;
            Ok(done.pop())
        })
    }

    fn status_of(&mut self, sqe: Sqe, transfer: HostTransfer, data: Vec<u8>) -> Result<Status> {
        let said = self.queue.submit_command(sqe, transfer, 0, data);
        said.map_err(|refused| anyhow::anyhow!("{refused:?}"))?;
        Ok(self.answer()?.status.code())
    }

    fn write(&mut self) -> Result<Status> {
        let bytes = HostTransfer::ToController(BLOCK as u32);
        self.status_of(command::write(1, 3, 1, false), bytes, vec![7; BLOCK])
    }

    fn read(&mut self) -> Result<Status> {
        let bytes = HostTransfer::ToHost(BLOCK as u32);
        self.status_of(command::read(1, 3, 1), bytes, vec![0; BLOCK])
    }

    fn reserve(&mut self, opcode: u8, cdw10: u32, keys: [u64; 2]) -> Result<()> {
        let (sqe, transfer, data) = reserve(opcode, cdw10, keys);
        let status = self.status_of(sqe, transfer, data)?;
        ensure!(status == Status::SUCCESS, "{opcode:#x}: {status:?}");
        Ok(())
    }

    /// Without controller identifiers, which change with each connection.
    fn report(&mut self) -> Result<Vec<u8>> {
        let bytes = 3 * ENTRY_BYTES as u32;
        let sqe = Sqe::new(nvm::RESERVATION_REPORT, 0)
            .with_nsid(1)
            .with_cdw(10, bytes / 4 - 1)
            .with_cdw(11, 1);
        let said = (self.queue).submit_command(
            sqe,
            HostTransfer::ToHost(bytes),
            0,
            vec![0; bytes as usize],
        );
        said.map_err(|refused| anyhow::anyhow!("{refused:?}"))?;
        let done = self.answer()?;
        ensure!(done.status.is_success(), "{:?}", done.status);
        let mut report = done.buf;
        for entry in report.chunks_mut(ENTRY_BYTES).skip(1) {
            entry[..2].fill(0);
        }
        Ok(report)
    }
}

fn reserve(opcode: u8, cdw10: u32, keys: [u64; 2]) -> (Sqe, HostTransfer, Vec<u8>) {
    let data = keys.into_iter().flat_map(u64::to_le_bytes).collect();
    let sqe = Sqe::new(opcode, 0).with_nsid(1).with_cdw(10, cdw10);
    (sqe, HostTransfer::ToController(16), data)
}

/// Host `a` reserves, host `b` does not register. Returns the report.
fn reserved(a: &mut Peer, b: &mut Peer, persist: u32) -> Result<Vec<u8>> {
    a.reserve(nvm::RESERVATION_REGISTER, persist, [0, KEY_A])?;
    a.reserve(nvm::RESERVATION_ACQUIRE, WRITE_EXCLUSIVE, [KEY_A, 0])?;
    let report = a.report()?;
    let (header, entry) = report.split_at(ENTRY_BYTES);
    ensure!(header[4] == 1 && header[5] == 1, "{header:?}");
    ensure!(header[9] == u8::from(persist == PERSIST), "{header:?}");
    ensure!(entry[2] == 1 && entry[8..16] == KEY_A.to_le_bytes());
    ensure!(b.report()? == report);
    Ok(report)
}

fn holds(daemon: &Daemon, a: &mut Peer, b: &mut Peer, report: &[u8]) -> Result<()> {
    let status = b.write()?;
    ensure!(
        status == Status::RESERVATION_CONFLICT,
        "b wrote: {status:?}"
    );
    let status = b.read()?;
    ensure!(status == Status::SUCCESS, "b reads: {status:?}");
    let status = a.write()?;
    ensure!(status == Status::SUCCESS, "a writes: {status:?}");
    for peer in [a, b] {
        let now = peer.report()?;
        ensure!(now == report, "reported {now:?}, was {report:?}");
    }
    let shown = &daemon.cli(&["volume", "show", "t/shared"])?["reservation"];
    ensure!(shown["kind"] == "write_exclusive", "{shown}");
    let registrants = shown["registrants"].as_array().context("registrants")?;
    ensure!(registrants.len() == 1, "{shown}");
    ensure!(registrants[0]["is_holder"] == true, "{shown}");
    ensure!(registrants[0]["key"] == format!("{KEY_A:#x}"), "{shown}");
    Ok(())
}

fn lab() -> Result<Lab> {
    let lab = Lab::new(&LabOptions::volumes(0, 0))?;
    lab.daemon
        .cli(&["volume", "create", "t/shared", "--size", "16M"])?;
    lab.daemon
        .cli(&["export", "create", "t/shared", "--any-host"])?;
    Ok(lab)
}

/// Simulates a reboot.
fn restart_vm(daemon: &mut Daemon, number: u8) -> Result<()> {
    daemon.kill_all()?;
    std::fs::remove_dir_all(daemon.folder().join("var/run"))?;
    let boot = format!("{number:02x}").repeat(16);
    daemon.environment = vec![(BOOT_VARIABLE.into(), boot)];
    daemon.start_again()
}

#[test]
fn reservations_survive_takeover() -> Result<()> {
    let mut lab = lab()?;
    let (address, daemon) = (lab.address, &mut lab.daemon);
    let mut a = Peer::new(address, "a")?;
    let mut b = Peer::new(address, "b")?;
    let report = reserved(&mut a, &mut b, 0)?;
    holds(daemon, &mut a, &mut b, &report)?;

    // Hosts keep their connections.
    let dead = daemon.kill_engine()?;
    holds(daemon, &mut a, &mut b, &report).context("while the engine is replaced")?;
    daemon.wait_engine_after(dead.generation, MINUTE)?;
    holds(daemon, &mut a, &mut b, &report).context("after an engine's death")?;
    daemon.kill_daemon()?;
    let status = b.write()?;
    ensure!(status == Status::RESERVATION_CONFLICT, "{status:?}");
    daemon.start_again()?;
    holds(daemon, &mut a, &mut b, &report).context("after a daemon's death")?;
    let dead = daemon.kill_engine()?;
    daemon.wait_engine_after(dead.generation, MINUTE)?;
    holds(daemon, &mut a, &mut b, &report).context("after an engine's death, another daemon")?;

    // Both processes die. The host that may not write connects first.
    daemon.kill_all()?;
    daemon.start_again()?;
    let mut b = Peer::new(address, "b")?;
    let status = b.write()?;
    ensure!(status == Status::RESERVATION_CONFLICT, "{status:?}");
    let mut a = Peer::new(address, "a")?;
    holds(daemon, &mut a, &mut b, &report).context("after both died")?;
    lab.finish()
}

#[test]
fn reservations_that_persist_survive_a_restart() -> Result<()> {
    for persist in [PERSIST, 0] {
        let mut lab = lab()?;
        let (address, daemon) = (lab.address, &mut lab.daemon);
        let mut a = Peer::new(address, "a")?;
        let mut b = Peer::new(address, "b")?;
        let report = reserved(&mut a, &mut b, persist)?;
        restart_vm(daemon, 1)?;
        let mut b = Peer::new(address, "b")?;
        let status = b.write()?;
        let mut a = Peer::new(address, "a")?;
        if persist == PERSIST {
            ensure!(status == Status::RESERVATION_CONFLICT, "{status:?}");
            holds(daemon, &mut a, &mut b, &report).context("after a restart")?;
        } else {
            ensure!(status == Status::SUCCESS, "{status:?}");
            let header = &a.report()?[..ENTRY_BYTES];
            ensure!(header[4] == 0 && header[5] == 0, "{header:?}");
            let shown = &daemon.cli(&["volume", "show", "t/shared"])?["reservation"];
            ensure!(shown.is_null(), "{shown}");
            // The first host gets the reservation.
            b.reserve(nvm::RESERVATION_REGISTER, 0, [0, KEY_B])?;
            b.reserve(nvm::RESERVATION_ACQUIRE, WRITE_EXCLUSIVE, [KEY_B, 0])?;
            let status = a.write()?;
            ensure!(status == Status::RESERVATION_CONFLICT, "{status:?}");
        }
        lab.finish()?;
    }
    Ok(())
}

/// A daemon dies before a command is durable, or before its answer. If its engine dies too, a
/// durable command counts. If not, the next daemon answers; a second execution would be refused.
#[test]
fn reservations_count_once_whenever_the_daemon_dies() -> Result<()> {
    let mut lab = lab()?;
    let (address, daemon) = (lab.address, &mut lab.daemon);
    let mut a = Peer::new(address, "a")?;
    a.reserve(nvm::RESERVATION_REGISTER, 0, [0, KEY_A])?;
    let mut key = KEY_A;
    for (point, with_engine) in [
        ("reserve.applied", false),
        ("reserve.durable", false),
        ("reserve.applied", true),
        ("reserve.durable", true),
    ] {
        let before = a.report()?;
        let generation = |report: &[u8]| report[0];
        daemon.kill_daemon()?;
        daemon.environment = vec![("FOREBAY_KILL".into(), format!("daemon:{point}:1"))];
        daemon.start_again()?;
        let engine = daemon.processes()?.engine;
        let (sqe, transfer, keys) = reserve(nvm::RESERVATION_REGISTER, REPLACE, [key, key + 1]);
        a.say(sqe, transfer, keys)?;
        daemon.wait_daemon_death().context(point)?;
        if with_engine {
            kill_by_pid(engine)?;
        }
        daemon.environment.clear();
        daemon.start_again()?;
        if with_engine {
            a = Peer::new(address, "a")?;
        } else {
            let status = a.answer()?.status;
            ensure!(status.is_success(), "{point}: {status:?}");
        }
        let counts = u8::from(point == "reserve.durable" || !with_engine);
        key += u64::from(counts);
        let now = a.report()?;
        ensure!(generation(&now) == generation(&before) + counts, "{point}");
        let entry = &now[ENTRY_BYTES..];
        ensure!(entry[8..16] == key.to_le_bytes(), "{point}: {entry:?}");
    }
    lab.finish()
}
