//! TCP streams that are cut anywhere continue at a successor: no byte repeated or lost, no command
//! answered twice or executed after a later one.
//!
//! Hosts send raw PDUs in drips, pieces or bursts, with and without digests. Engines die at named
//! points, then at random times. A read must show its place's last answered write, or one in
//! flight. `FOREBAY_TEST_SEED` sets the times, `FOREBAY_KILLS` the number of random deaths.

#[allow(dead_code)]
#[path = "../../crates/engine/tests/common/host.rs"]
mod raw;

use std::collections::{HashMap, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use forebay_nvme::tcp::{self, C2hData, H2cData, Parsed, Pdu, R2t, TcpParams};
use forebay_nvme::{SglDescriptor, Status};
use forebay_tests::host::Dice;
use forebay_tests::lab::{self, Lab, LabOptions, MIB, MINUTE};
use forebay_tests::wait;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The raw hosts' NQN.
const HOST: &str = "nqn.2026-01.test:raw";
const NQN: &str = "nqn.2026-01.io.forebay:test:t.a";
const BLOCK: usize = 4096;
/// Distance between two places.
const PLACE_BLOCKS: u64 = 6;
const IN_CAPSULE: usize = 8192;
const DEPTH: usize = 32;

#[derive(Debug, Clone, Copy)]
enum Manner {
    Drips,
    Pieces,
    Bursts,
}

/// A command in flight.
struct Running {
    place: usize,
    /// For a write: its version, and its data until an R2T.
    write: Option<u32>,
    data: Vec<u8>,
    /// For a read: the last answered version at submission.
    answered: u32,
    got: usize,
}

#[derive(Clone, Default)]
struct Place {
    issued: u32,
    answered: u32,
    writing: bool,
}

struct Streamer {
    socket: TcpStream,
    params: TcpParams,
    _admin: raw::RawHost,
    first_place: u64,
    manner: Manner,
    dice: Dice,
    places: Vec<Place>,
    running: HashMap<u16, Running>,
    next_cid: u16,
    out: VecDeque<u8>,
    input: Vec<u8>,
    completed: u64,
}

/// They either fit a capsule or need an R2T.
fn blocks(place: usize) -> u64 {
    if place.is_multiple_of(2) { 2 } else { 6 }
}

/// Version 0 is zeros.
fn content(place: u64, block: u64, version: u32) -> Vec<u8> {
    let mut data = vec![0; BLOCK];
    if version > 0 {
        let mut dice = Dice::with_seed(place << 40 | block << 32 | u64::from(version));
        for word in data.chunks_exact_mut(8) {
            word.copy_from_slice(&dice.u64(..).to_le_bytes());
        }
    }
    data
}

impl Streamer {
    fn new(
        address: SocketAddr,
        number: u64,
        places: u64,
        manner: Manner,
        digests: bool,
    ) -> Result<Self> {
        let ask = raw::Ask {
            header_digest: digests,
            data_digest: digests,
            hpda: 0,
        };
        let (admin, io) = raw::attach(address, NQN, ask, number.is_multiple_of(2));
        io.socket.set_nonblocking(true)?;
        Ok(Self {
            socket: io.socket.try_clone()?,
            params: io.params,
            _admin: admin,
            first_place: number * places,
            manner,
            dice: Dice::with_seed(number + 77),
            places: vec![Place::default(); places as usize],
            running: HashMap::new(),
            next_cid: 0,
            out: VecDeque::new(),
            input: Vec::new(),
            completed: 0,
        })
    }

    fn work(&mut self, over: &AtomicBool, completed: &AtomicU64) -> Result<()> {
        while !over.load(SeqCst) {
            while self.running.len() < DEPTH && self.out.len() < 1 << 18 {
                self.begin();
                if self.dice.u64(..8) == 0 {
                    break;
                }
            }
            self.turn()?;
            completed.store(self.completed, SeqCst);
        }
        let limit = Instant::now() + MINUTE;
        while !self.running.is_empty() {
            ensure!(Instant::now() < limit, "{} never ended", self.running.len());
            self.turn()?;
        }
        for place in 0..self.places.len() {
            self.begin_read(place);
            while !self.running.is_empty() {
                ensure!(Instant::now() < limit, "reading back takes too long");
                self.turn()?;
            }
        }
        Ok(())
    }

    fn begin(&mut self) {
        let place = self.dice.usize(..self.places.len());
        if self.places[place].writing || self.dice.u64(..2) == 0 {
            self.begin_read(place);
        } else {
            self.begin_write(place);
        }
    }

    fn cid(&mut self) -> u16 {
        loop {
            self.next_cid = self.next_cid.wrapping_add(1);
            if !self.running.contains_key(&self.next_cid) {
                return self.next_cid;
            }
        }
    }

    fn begin_read(&mut self, place: usize) {
        let cid = self.cid();
        let blocks = blocks(place);
        let bytes = blocks as usize * BLOCK;
        let lba = (self.first_place + place as u64) * PLACE_BLOCKS;
        let sqe = raw::rw(raw::READ, cid, lba, blocks as u32)
            .with_sgl(SglDescriptor::transport(bytes as u32));
        self.put_capsule(&sqe, &[]);
        let running = Running {
            place,
            write: None,
            data: vec![0; bytes],
            answered: self.places[place].answered,
            got: 0,
        };
        self.running.insert(cid, running);
    }

    fn begin_write(&mut self, place: usize) {
        let cid = self.cid();
        let at = self.first_place + place as u64;
        let state = &mut self.places[place];
        state.issued += 1;
        state.writing = true;
        let version = state.issued;
        let blocks = blocks(place);
        let data: Vec<u8> = (0..blocks).flat_map(|b| content(at, b, version)).collect();
        let sqe = raw::rw(raw::WRITE, cid, at * PLACE_BLOCKS, blocks as u32);
        if data.len() <= IN_CAPSULE {
            let sqe = sqe.with_sgl(SglDescriptor::in_capsule(0, data.len() as u32));
            self.put_capsule(&sqe, &data);
        } else {
            let sqe = sqe.with_sgl(SglDescriptor::transport(data.len() as u32));
            self.put_capsule(&sqe, &[]);
        }
        let running = Running {
            place,
            write: Some(version),
            data,
            answered: 0,
            got: 0,
        };
        self.running.insert(cid, running);
    }

    fn put_capsule(&mut self, sqe: &forebay_nvme::Sqe, data: &[u8]) {
        let mut header = [0; tcp::MAX_HEADER_BYTES];
        let n = tcp::put_capsule_cmd(&mut header, &self.params, sqe, data.len() as u32);
        self.put(&header[..n], data);
    }

    fn put(&mut self, header: &[u8], data: &[u8]) {
        self.out.extend(header);
        self.out.extend(data);
        if self.params.data_digest && !data.is_empty() {
            self.out.extend(tcp::crc32c(data).to_le_bytes());
        }
    }

    fn turn(&mut self) -> Result<()> {
        let sent = self.send()?;
        let received = self.receive()?;
        if !sent && !received {
            let mut events = PollFlags::IN;
            if !self.out.is_empty() {
                events |= PollFlags::OUT;
            }
            let limit = Timespec {
                tv_sec: 0,
                tv_nsec: 5_000_000,
            };
            let _ = poll(&mut [PollFd::new(&self.socket, events)], Some(&limit));
        }
        Ok(())
    }

    fn send(&mut self) -> Result<bool> {
        if self.out.is_empty() {
            return Ok(false);
        }
        let most = match self.manner {
            Manner::Drips => 1 + self.dice.u64(..48),
            Manner::Pieces => 1 + self.dice.u64(..6000),
            Manner::Bursts => 1 << 18,
        };
        let piece = self.out.make_contiguous();
        let piece = &piece[..piece.len().min(most as usize)];
        match (&self.socket).write(piece) {
            Ok(0) => bail!("the connection takes nothing"),
            Ok(n) => {
                self.out.drain(..n);
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error).context("sending"),
        }
    }

    fn receive(&mut self) -> Result<bool> {
        // A slow host, so that answers stay in the target.
        if self.dice.u64(..64) == 0 {
            std::thread::sleep(Duration::from_micros(self.dice.u64(..3000)));
        }
        let mut more = vec![0; 1 + self.dice.u64(..1 << 16) as usize];
        match (&self.socket).read(&mut more) {
            Ok(0) => bail!("the connection has ended"),
            Ok(n) => self.input.extend_from_slice(&more[..n]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error).context("receiving"),
        }
        let input = std::mem::take(&mut self.input);
        let mut rest = &input[..];
        loop {
            match tcp::parse(rest, &self.params).map_err(|e| anyhow::anyhow!("{e:?}"))? {
                Parsed::Pdu(frame) if rest.len() >= frame.total_bytes() => {
                    let data = &rest[frame.header_bytes..frame.header_bytes + frame.data_bytes];
                    if frame.data_digest {
                        let digest = &rest[frame.header_bytes + frame.data_bytes..];
                        ensure!(digest[..4] == tcp::crc32c(data).to_le_bytes(), "a digest");
                    }
                    self.take(&frame.pdu, data)?;
                    rest = &rest[frame.total_bytes()..];
                }
                _ => break,
            }
        }
        self.input = rest.to_vec();
        Ok(true)
    }

    fn take(&mut self, pdu: &Pdu, data: &[u8]) -> Result<()> {
        match pdu {
            Pdu::R2t(r2t) => self.answer(r2t),
            Pdu::C2hData(header) => self.read_data(header, data),
            Pdu::CapsuleResp(cqe) => self.end(cqe.cid(), cqe.status()),
            other => bail!("not to be expected: {other:?}"),
        }
    }

    fn answer(&mut self, r2t: &R2t) -> Result<()> {
        let running = self.running.get(&r2t.cid);
        let running = running.context("an R2T for what has ended")?;
        ensure!(running.write.is_some(), "an R2T for a read");
        let from = r2t.offset_bytes as usize;
        let all = running.data[from..from + r2t.length_bytes as usize].to_vec();
        let half = 1 + self.dice.usize(..all.len());
        let half = half.next_multiple_of(4);
        let limit = half.min(self.params.max_h2c_data_bytes as usize);
        let mut at = 0;
        for part in all.chunks(limit) {
            let header = H2cData {
                cid: r2t.cid,
                ttag: r2t.ttag,
                offset_bytes: (from + at) as u32,
                length_bytes: part.len() as u32,
                last: at + part.len() == all.len(),
            };
            at += part.len();
            let mut bytes = [0; tcp::MAX_HEADER_BYTES];
            let n = tcp::put_h2c_data(&mut bytes, &self.params, &header);
            self.put(&bytes[..n], part);
        }
        Ok(())
    }

    fn read_data(&mut self, header: &C2hData, data: &[u8]) -> Result<()> {
        let running = self.running.get_mut(&header.cid);
        let running = running.context("data for what has ended")?;
        ensure!(running.write.is_none(), "data for a write");
        let from = header.offset_bytes as usize;
        ensure!(from == running.got, "data out of order or twice");
        running.data[from..from + data.len()].copy_from_slice(data);
        running.got += data.len();
        if header.success {
            self.end(header.cid, Status::SUCCESS)?;
        }
        Ok(())
    }

    fn end(&mut self, cid: u16, status: Status) -> Result<()> {
        let running = self.running.remove(&cid);
        let running = running.with_context(|| format!("command {cid} ended twice"))?;
        ensure!(status.is_success(), "{status:?}");
        self.completed += 1;
        let at = self.first_place + running.place as u64;
        let place = &mut self.places[running.place];
        if let Some(version) = running.write {
            place.answered = version;
            place.writing = false;
            return Ok(());
        }
        ensure!(running.got == running.data.len(), "a short read");
        for (block, found) in running.data.chunks_exact(BLOCK).enumerate() {
            let mut allowed = running.answered..=place.issued;
            ensure!(
                allowed.any(|version| found == content(at, block as u64, version)),
                "place {at}, block {block}: neither version {} nor a later one up to {}; {}",
                running.answered,
                place.issued,
                match (0..running.answered).find(|v| found == content(at, block as u64, *v)) {
                    Some(old) => format!("it is version {old}"),
                    None => "it is none of its versions".to_owned(),
                }
            );
        }
        Ok(())
    }
}

/// Each engine dies after a count from the seed; the first lives longer, because hosts connect to
/// it. A socket that its daemon does not yet hold dies with its engine.
fn chain(points: &[&str], rounds: usize, most: u64, seed: u64) -> (String, usize) {
    let mut dice = Dice::with_seed(seed);
    let all = (0..rounds).flat_map(|_| points.iter().copied());
    let kills: Vec<String> = all
        .enumerate()
        .map(|(i, point)| {
            let first = if i == 0 { 1000 } else { 1 };
            format!("engine{}:{point}:{}", i + 1, first + dice.u64(..most))
        })
        .collect();
    (kills.join(","), kills.len())
}

fn streams_survive(points: &[&str], rounds: usize, places: u64) -> Result<()> {
    let seed = lab::count_from("FOREBAY_TEST_SEED", 1);
    let (kills, count) = chain(points, rounds, 60, seed);
    let mut options = LabOptions::volumes(1, 64 * MIB);
    options.environment = vec![("FOREBAY_KILL".into(), kills.clone())];
    let mut lab = Lab::new(&options)?;
    let manners = [Manner::Drips, Manner::Pieces, Manner::Bursts];
    let mut streamers = (0..6)
        .map(|number| {
            let manner = manners[number as usize / 2];
            Streamer::new(lab.address, number, places, manner, number % 2 == 1)
        })
        .collect::<Result<Vec<_>>>()?;
    let over = AtomicBool::new(false);
    let completed: Vec<AtomicU64> = (0..6).map(|_| AtomicU64::new(0)).collect();
    std::thread::scope(|scope| -> Result<()> {
        let threads: Vec<_> = streamers
            .iter_mut()
            .zip(&completed)
            .map(|(streamer, completed)| {
                let over = &over;
                scope.spawn(move || {
                    let worked = streamer.work(over, completed);
                    over.store(over.load(SeqCst) || worked.is_err(), SeqCst);
                    worked
                })
            })
            .collect();
        let scenario = || -> Result<()> {
            wait::until("every armed engine has died", 2 * MINUTE, || {
                let died = lab.daemon.engine_number().is_ok_and(|n| n > count);
                Ok((died || over.load(SeqCst)).then_some(()))
            })
            .with_context(|| format!("engine {:?} of {kills}", lab.daemon.engine_number()))?;
            let mut dice = Dice::with_seed(seed);
            for _ in 0..lab::count_from("FOREBAY_KILLS", 10) {
                let now = lab.daemon.processes();
                let Ok(now) = now else { continue };
                std::thread::sleep(Duration::from_millis(dice.u64(..80)));
                lab.daemon.kill_engine()?;
                lab.daemon.wait_engine_after(now.generation, MINUTE)?;
            }
            let goals: Vec<u64> = completed.iter().map(|c| c.load(SeqCst) + 50).collect();
            wait::until("all streams go on", MINUTE, || {
                let reached = |(c, goal): (&AtomicU64, &u64)| c.load(SeqCst) >= *goal;
                let all = completed.iter().zip(&goals).all(reached);
                Ok((all || over.load(SeqCst)).then_some(()))
            })
        };
        let ran = scenario();
        over.store(true, SeqCst);
        for (number, thread) in threads.into_iter().enumerate() {
            let worked = thread.join().expect("no panic");
            worked.with_context(|| format!("stream {number}; the scenario: {ran:?}"))?;
        }
        ran
    })?;
    drop(streamers);
    println!("{count} deaths at points: {kills}");
    // The streams have read their places themselves.
    lab.hosts.clear();
    lab.finish()
}

#[test]
fn tcp_stream_resumes_after_kill9() -> Result<()> {
    let points = [
        "rx.base",
        "rx.intent",
        "rx.received",
        "rx.record",
        "rx.state",
        "rx.taken",
        "rx.kept",
        "rx.cleared",
        "data.header",
        "data.placed",
        "data.state",
        "r2t.recorded",
        "r2t.published",
    ];
    streams_survive(&points, 2, 40)
}

#[test]
fn no_double_completion() -> Result<()> {
    let points = [
        "tx.item",
        "tx.published",
        "tx.sent",
        "tx.freed",
        "tx.first",
        "tx.reset",
    ];
    streams_survive(&points, 3, 40)
}

#[test]
fn no_write_after_later_write() -> Result<()> {
    let points = [
        "core.put",
        "core.entered",
        "core.completed",
        "tx.item",
        "tx.published",
        "tx.sent",
    ];
    streams_survive(&points, 3, 6)
}
