//! The out-of-band endpoint with `mctp-estack` as a peer, and with hostile bytes: the API answers,
//! memory is bounded, and a good client is answered afterwards.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::mctp::{self, Peer};
use forebay_tests::out_of_band;
use forebay_tests::system::resident_bytes;
use forebay_tests::wait;

const EID: u8 = 9;
/// Of any endpoint.
const ANY: u8 = 0;
/// Control commands (DSP0236, 12.3 to 12.8).
const SET_EID: u8 = 1;
const GET_EID: u8 = 2;
const GET_UUID: u8 = 3;
const GET_TYPES: u8 = 5;
/// NVM Subsystem Health Status Poll (NVMe-MI 1.2, 5.6).
const HEALTH_POLL: u8 = 1;
/// Of the NVM Subsystem Status: the drive works.
const FUNCTIONAL: u8 = 1 << 5;
/// Connections at once; more are closed.
const CONNECTIONS: usize = 32;
const MANY: usize = 40;
/// Lines with a requester of each EID: 247.
const LINES: usize = 5;
/// How much the daemon may grow: far less than is sent to it.
const GROWTH_BYTES: u64 = 16 << 20;
/// How much a peer that never reads may send: far more than the buffers of both ends.
const UNREAD_BYTES: usize = 8 << 20;
const LIMIT: Duration = Duration::from_secs(60);
/// Long enough for a daemon that still reads to make room.
const STALL: Duration = Duration::from_secs(1);

/// Flags of a packet (DSP0236, 8.1): the first, the last, and the owner of its tag.
const START: u8 = 0x80;
const END: u8 = 0x40;
const OWNER: u8 = 0x08;
/// The message type of NVMe-MI; with a check, the highest bit is set.
const NVME_MI: u8 = 0x04;
const CHECKED: u8 = 0x80;

/// The NVM Subsystem Status of a health poll.
fn health(peer: &mut Peer) -> Result<u8> {
    match peer.command(HEALTH_POLL, [0, 0])?[..] {
        // Success, three reserved bytes, and 8 bytes of data: no warnings, which are inverted.
        [0, 0, 0, 0, status, 0xFF, _, _, _, _, 0, 0] => Ok(status),
        ref other => bail!("another answer: {other:x?}"),
    }
}

/// Control messages and a health poll, through a pseudoterminal.
#[test]
fn mctp_estack_is_a_peer() -> Result<()> {
    let mut daemon = Daemon::start(&DaemonOptions {
        config: "[out_of_band]\nserial = \"pty:mctp.tty\"\n".to_owned(),
        ..DaemonOptions::default()
    })?;
    let line = daemon.folder().join("mctp.tty");
    let mut peer = Peer::open(&line, 0)?;
    // The line has no EID yet.
    ensure!(peer.control(GET_EID, &[])? == [0, 0, 0, 0]);
    ensure!(peer.control(SET_EID, &[0, EID])? == [0, 0, EID, 0]);
    drop(peer);
    let mut peer = Peer::open(&line, EID)?;
    ensure!(peer.control(GET_EID, &[])? == [0, EID, 0, 0]);
    ensure!(peer.control(GET_TYPES, &[])? == [0, 1, NVME_MI]);
    let uuid = peer.control(GET_UUID, &[])?;
    ensure!(health(&mut peer)? & FUNCTIONAL == 0, "there is no pool yet");
    let device = format!("file:{}", daemon.folder().join("pool.img").display());
    daemon.create_pool(&["--device", &device, "--size", "256M"])?;
    ensure!(health(&mut peer)? & FUNCTIONAL != 0, "the pool is served");
    drop(peer);
    daemon.stop()?;
    daemon.start_again()?;
    let mut peer = Peer::open(&line, EID)?;
    ensure!(peer.control(GET_EID, &[])? == [0, EID, 0, 0]);
    ensure!(peer.control(GET_UUID, &[])? == uuid);
    daemon.stop()
}

struct Victim {
    daemon: Daemon,
    line: PathBuf,
    pid: u32,
    resident_bytes: u64,
}

impl Victim {
    fn start() -> Result<Self> {
        let daemon = Daemon::start(&DaemonOptions {
            config: out_of_band::table("", ""),
            ..DaemonOptions::default()
        })?;
        let pid = daemon.status()?["daemon_pid"].as_u64();
        let pid = u32::try_from(pid.context("a pid")?)?;
        let line = out_of_band::socket(&daemon);
        let mut victim = Self {
            daemon,
            line,
            pid,
            resident_bytes: 0,
        };
        victim.is_well("before")?;
        victim.resident_bytes = resident_bytes(pid)?;
        Ok(victim)
    }

    fn connect(&self) -> Result<Peer> {
        Peer::connect(&self.line, ANY)
    }

    /// The API answers, and the daemon is small.
    fn lives(&self, after: &str) -> Result<()> {
        self.daemon.status().with_context(|| after.to_owned())?;
        let grown = resident_bytes(self.pid)?.saturating_sub(self.resident_bytes);
        let is_small = self.resident_bytes == 0 || grown < GROWTH_BYTES;
        ensure!(is_small, "{after}: the daemon has grown by {grown} bytes");
        Ok(())
    }

    /// Also, a new client is answered.
    fn is_well(&self, after: &str) -> Result<()> {
        self.lives(after)?;
        let mut peer = self.connect()?;
        health(&mut peer).with_context(|| after.to_owned())?;
        Ok(())
    }
}

/// A frame with a packet of a message.
fn frame(from: u8, flags: u8, payload: &[u8]) -> Result<Vec<u8>> {
    mctp::frame(&[&[1, ANY, from, flags], payload].concat())
}

#[test]
fn mctp_serial_hostile_bytes() -> Result<()> {
    let mut victim = Victim::start()?;
    overruns_a_frame(&victim)?;
    random_bytes(&victim)?;
    unfinished_messages(&victim)?;
    many_requesters(&victim)?;
    never_reads(&victim)?;
    many_connections(&victim)?;
    ensure!(
        victim.pid
            == u32::try_from(
                victim.daemon.status()?["daemon_pid"]
                    .as_u64()
                    .context("a pid")?
            )?
    );
    victim.daemon.stop()
}

/// `mctp-estack` 0.1 panics on these bytes.
fn overruns_a_frame(victim: &Victim) -> Result<()> {
    let mut peer = victim.connect()?;
    peer.write(&[0x7E, 0x01, 0x00])?;
    peer.write(&[0x55; 258])?;
    // The same line goes on.
    health(&mut peer)?;
    victim.is_well("a frame with too many bytes")
}

fn random_bytes(victim: &Victim) -> Result<()> {
    let mut dice = fastrand::Rng::with_seed(30);
    let mut peer = victim.connect()?;
    for _ in 0..64 {
        let mut bytes = vec![0; 4096];
        dice.fill(&mut bytes);
        // Mostly the bytes that mean something in a frame.
        for byte in &mut bytes {
            let meaning = [0x7E, 0x7D, 0x01, 0x00, 0x5E, 0x5D, CHECKED | NVME_MI, *byte];
            *byte = meaning[dice.usize(..meaning.len())];
        }
        peer.write(&bytes)?;
    }
    // Ends a frame that may have begun.
    peer.write(&[0x7E; 4])?;
    health(&mut peer)?;
    victim.is_well("random bytes")
}

/// Each of 1,235 requesters begins a message of every tag, and goes on until it is too long.
fn unfinished_messages(victim: &Victim) -> Result<()> {
    let payload = [CHECKED | NVME_MI; 64];
    for _ in 0..LINES {
        let mut peer = victim.connect()?;
        for from in 8..=254 {
            for tag in 0..8 {
                peer.write(&frame(from, START | OWNER | tag, &payload)?)?;
            }
            peer.write(&frame(from, 2 << 4 | OWNER, &payload)?)?;
        }
        for number in 0..200 {
            let flags = if number == 0 { START } else { 0 };
            let flags = flags | (number & 3) << 4 | OWNER;
            peer.write(&frame(254, flags, &payload)?)?;
        }
        health(&mut peer)?;
        victim.lives("unfinished messages")?;
    }
    victim.is_well("unfinished messages")
}

/// Each of 1,235 requesters sends a command.
fn many_requesters(victim: &Victim) -> Result<()> {
    let poll = mctp::command(HEALTH_POLL, [0, 0]);
    for _ in 0..LINES {
        let mut peer = victim.connect()?;
        for from in 8..=254 {
            peer.write(&frame(from, START | END | OWNER, &poll)?)?;
        }
        victim.lives("many requesters")?;
    }
    victim.is_well("many requesters")
}

/// Requests of a peer that never reads are not read either.
fn never_reads(victim: &Victim) -> Result<()> {
    // Answered at once.
    let frame = frame(8, START | END | OWNER, &[0, 0x81, GET_UUID])?;
    let frames = frame.repeat(64);
    let mut stream = UnixStream::connect(&victim.line)?;
    stream.set_write_timeout(Some(STALL))?;
    let mut sent = 0;
    loop {
        match stream.write(&frames) {
            Ok(bytes) => sent += bytes,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => bail!("after {sent} bytes: {error}"),
        }
        ensure!(sent < UNREAD_BYTES, "the daemon reads on without end");
    }
    victim.is_well("a peer that never reads")
}

/// 40 connections, each with the beginning of a frame.
fn many_connections(victim: &Victim) -> Result<()> {
    let mut streams = Vec::new();
    for _ in 0..MANY {
        let mut stream = UnixStream::connect(&victim.line)?;
        // Fails if it is closed already.
        let _ = stream.write_all(&[0x7E, 0x01, 0x40, 0x01]);
        stream.set_nonblocking(true)?;
        streams.push(stream);
    }
    victim.lives("many connections")?;
    wait::until("the end of those above the limit", LIMIT, || {
        let ended = streams.iter().filter(|stream| has_ended(stream));
        Ok((ended.count() >= MANY - CONNECTIONS).then_some(()))
    })?;
    drop(streams);
    // The daemon notices their ends in its own time.
    wait::until("a place for a connection", LIMIT, || {
        Ok(victim.is_well("many connections").ok())
    })
}

fn has_ended(mut stream: &UnixStream) -> bool {
    match stream.read(&mut [0]) {
        Ok(bytes) => bytes == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}
