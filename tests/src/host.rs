//! A host that issues every kind of command at random and remembers the results in a [`Shadow`].
//!
//! It uses one queue and a seeded sequence, and judges reads at once. A lost connection ends the
//! load; its commands are not retried. Then [`Host::verify`] must read everything before the next
//! load.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::SeqCst};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use forebay_initiator::{Done, Error, IoOp, IoQueue, Options, Session, Wait, dsm_ranges};

use crate::shadow::{Change, Cover, Promise, Shadow};
use crate::wait;

/// The hosts' NQN.
pub const HOST_NQN: &str = "nqn.2026-01.test:host";
const LIMIT: Duration = Duration::from_secs(60);
const DEPTH: usize = 16;
const LONGEST_BYTES: u64 = 128 << 10;
const LONGEST_HOLE_BYTES: u64 = 1 << 20;
const NO_SPACE: (u8, u8) = (0, 0x81);
/// [`Host::tolerates`]: statuses that ask for a retry.
pub const LATER: u8 = 1;
/// [`Host::tolerates`]: errors of a failing device.
pub const DEVICE: u8 = 2;
/// The status code type "media and data integrity errors".
const MEDIA: u8 = 2;
const POLL: Duration = Duration::from_millis(20);

/// A generator whose seed replays a run.
pub use fastrand::Rng as Dice;

/// The mix and the rate of commands.
#[derive(Debug, Clone, Copy)]
pub struct Habits {
    /// Percentage of reads.
    pub reads: u64,
    /// Percentage of deallocations or zeroings.
    pub holes: u64,
    /// Percentage of flushes; the rest are writes.
    pub flushes: u64,
    /// Percentage of FUA among writes.
    pub fua: u64,
    /// Longest write or read.
    pub longest_bytes: u64,
    /// Commands in flight.
    pub depth: usize,
    /// Commands per second, evenly spread; `None`: no limit.
    pub per_second: Option<u32>,
}

impl Default for Habits {
    fn default() -> Self {
        Self {
            reads: 12,
            holes: 12,
            flushes: 4,
            fua: 8,
            longest_bytes: LONGEST_BYTES,
            depth: DEPTH,
            per_second: None,
        }
    }
}

/// Result of a load.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Load {
    /// Successful commands.
    pub commands: u64,
    /// Flushes among them.
    pub flushes: u64,
    /// Commands whose status asks for a retry.
    pub interrupted: u64,
    /// Writes that failed for lack of space.
    pub no_space: u64,
    /// Tolerated device errors.
    pub device_errors: u64,
    /// Whether the connection was lost.
    pub lost: bool,
}

/// Whether a write ended with Capacity Exceeded (NVMe Base 2.1, figure "Generic Command Status
/// Values").
#[must_use]
pub fn is_no_space(written: &Result<()>) -> bool {
    let error = written
        .as_ref()
        .err()
        .and_then(|error| error.downcast_ref());
    matches!(error, Some(Error::Status { status, .. }) if (status.sct(), status.sc()) == NO_SPACE)
}

#[derive(Debug)]
enum Running {
    Read(u64, u32),
    Change(Change, bool),
    Flush(Cover),
    Holes(Vec<Change>),
}

/// A host with its volume.
#[derive(Debug)]
pub struct Host {
    /// The target's address.
    pub address: SocketAddr,
    nqn: String,
    block_bytes: u32,
    /// Its mix of commands.
    pub habits: Habits,
    /// Its memory of the volume.
    pub shadow: Shadow,
    /// Completion times, if the load has a rate.
    pub ends: Vec<Instant>,
    /// Errors that are counted and not fatal: [`LATER`], [`DEVICE`].
    pub tolerates: Arc<AtomicU8>,
    /// Set to cut the connection once, with commands in flight.
    pub cut: Arc<AtomicBool>,
    dice: Dice,
}

impl Host {
    /// The host of a new volume `tenant/name` with a unique `number`.
    #[must_use]
    pub fn new(
        address: SocketAddr,
        volume: &str,
        size_bytes: u64,
        block: u32,
        number: u64,
    ) -> Self {
        let volume = volume.replace('/', ".");
        Self {
            address,
            nqn: format!("nqn.2026-01.io.forebay:test:{volume}"),
            block_bytes: block,
            habits: Habits::default(),
            shadow: Shadow::new(number, size_bytes, block),
            ends: Vec::new(),
            tolerates: Arc::new(AtomicU8::new(LATER)),
            cut: Arc::default(),
            dice: Dice::with_seed(number),
        }
    }

    /// Connects to the volume.
    pub fn connect(&self) -> Result<(Session, IoQueue)> {
        let options = Options {
            io_queues: 1,
            queue_entries: self.habits.depth as u32 * 2,
            command_timeout: LIMIT,
            ..Options::default()
        };
        let mut session = Session::connect(self.address, &self.nqn, HOST_NQN, &options)?;
        let queue = session.open_queue(1)?;
        ensure!(
            queue.block_bytes() == self.block_bytes,
            "{}: its block size is {}",
            self.nqn,
            queue.block_bytes()
        );
        Ok((session, queue))
    }

    /// Connects as soon as possible.
    pub fn connect_soon(&self) -> Result<(Session, IoQueue)> {
        let mut last = None;
        let connected = wait::until("a connection", LIMIT, || {
            Ok(self.connect().map_err(|error| last = Some(error)).ok())
        });
        connected.with_context(|| format!("{}: {last:?}", self.nqn))
    }

    /// Loads the volume until `go_on`, called with the number of completions, returns false or the
    /// connection is lost.
    pub fn load(&mut self, mut go_on: impl FnMut(u64) -> bool) -> Result<Load> {
        let (session, mut queue) = match self.connect() {
            Ok(both) => both,
            // The connection was lost during connect.
            Err(error)
                if error
                    .downcast_ref::<Error>()
                    .is_some_and(Error::is_connection_lost) =>
            {
                return Ok(Load {
                    lost: true,
                    ..Load::default()
                });
            }
            Err(error) => return Err(error),
        };
        let mut load = Load::default();
        let mut running: HashMap<u64, Running> = HashMap::new();
        let mut done = Vec::new();
        let mut tag = 0;
        let mut goes = true;
        let mut due = Instant::now();
        loop {
            goes = goes && go_on(load.commands);
            if self.cut.swap(false, SeqCst) {
                load.lost = true;
                break;
            }
            if goes {
                self.submit(&mut queue, &mut running, &mut tag, &mut due)?;
            }
            let mut limit = POLL;
            if goes && self.habits.per_second.is_some() && queue.in_flight() < self.habits.depth {
                limit = due.saturating_duration_since(Instant::now()).min(POLL);
            }
            if running.is_empty() {
                if !goes {
                    break;
                }
                std::thread::sleep(limit);
            }
            let polled = queue.poll(&mut done, Wait::Block, limit);
            if self.habits.per_second.is_some() {
                self.ends.extend(done.iter().map(|_| Instant::now()));
            }
            for end in done.drain(..) {
                let what = running.remove(&end.tag).context("a command ended twice")?;
                self.end(what, &end, &mut load)?;
            }
            match polled {
                Ok(_) => {}
                Err(error) if error.is_connection_lost() => {
                    println!("{}: {error}", self.nqn);
                    load.lost = true;
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
        for what in running.into_values() {
            if let Running::Flush(cover) = what {
                self.shadow.flush_ends(cover, false);
            }
        }
        self.shadow.connection_lost();
        drop(queue);
        drop(session);
        Ok(load)
    }

    fn submit(
        &mut self,
        queue: &mut IoQueue,
        running: &mut HashMap<u64, Running>,
        tag: &mut u64,
        due: &mut Instant,
    ) -> Result<()> {
        while queue.in_flight() < self.habits.depth {
            if let Some(rate) = self.habits.per_second {
                if Instant::now() < *due {
                    break;
                }
                *due += Duration::from_secs(1) / rate;
            }
            *tag += 1;
            let Some((op, buf, what)) = self.next() else {
                break;
            };
            if queue.submit(&op, *tag, buf).is_err() {
                bail!("a command was not accepted");
            }
            running.insert(*tag, what);
        }
        Ok(())
    }

    /// Reads and judges the whole volume, whose content is settled from now on.
    pub fn verify(&mut self, promise: Promise) -> Result<()> {
        let nqn = self.nqn.clone();
        self.read_all(Some(promise))
            .with_context(|| format!("reading back {nqn}"))
    }

    /// Reads and judges the whole volume, without a preceding death or power cut.
    pub fn check(&mut self) -> Result<()> {
        let nqn = self.nqn.clone();
        self.read_all(None)
            .with_context(|| format!("reading {nqn}"))
    }

    /// Flushes once.
    pub fn flush(&mut self) -> Result<()> {
        let (_session, mut queue) = self.connect_soon()?;
        let cover = self.shadow.flush_begins();
        let flushed = queue.execute(&IoOp::Flush, Vec::new(), LIMIT);
        self.shadow.flush_ends(cover, flushed.is_ok());
        flushed?;
        Ok(())
    }

    /// Writes every block, and flushes.
    pub fn fill(&mut self) -> Result<()> {
        let (session, mut queue) = self.connect_soon()?;
        let blocks = LONGEST_BYTES / u64::from(self.block_bytes);
        let mut lba = 0;
        while lba < self.shadow.blocks() {
            let blocks = blocks.min(self.shadow.blocks() - lba);
            self.write_with(&mut queue, lba, blocks as u32)?;
            lba += blocks;
        }
        drop((queue, session));
        self.flush()
    }

    /// Writes a range on an open queue. See [`is_no_space`] for its errors.
    pub fn write_with(&mut self, queue: &mut IoQueue, lba: u64, blocks: u32) -> Result<()> {
        let mut data = self.buffer(blocks);
        let change = self.shadow.begin(lba, blocks, Some(&mut data));
        let op = IoOp::Write {
            lba,
            blocks,
            fua: false,
        };
        let written = queue.execute(&op, data, LIMIT);
        self.shadow.end(&change, written.is_ok(), false);
        written?;
        Ok(())
    }

    fn read_all(&mut self, promise: Option<Promise>) -> Result<()> {
        if promise == Some(Promise::Flushed) {
            self.shadow.power_lost();
        }
        let (_session, mut queue) = self.connect_soon()?;
        let blocks = (LONGEST_BYTES / u64::from(self.block_bytes)) as u32;
        let mut next = 0;
        let mut done: Vec<Done> = Vec::new();
        let begin = Instant::now();
        let mut again = Vec::new();
        loop {
            while queue.in_flight() < DEPTH && (next < self.shadow.blocks() || !again.is_empty()) {
                let lba = again.pop().unwrap_or(next);
                if lba == next {
                    next += u64::from(blocks);
                }
                let blocks = blocks.min((self.shadow.blocks() - lba) as u32);
                let op = IoOp::Read { lba, blocks };
                if queue.submit(&op, lba, self.buffer(blocks)).is_err() {
                    bail!("a read was not accepted");
                }
            }
            if queue.in_flight() == 0 {
                return Ok(());
            }
            queue.poll(&mut done, Wait::Block, POLL)?;
            for end in done.drain(..) {
                if !end.status.is_success() {
                    let late = begin.elapsed() > LIMIT;
                    ensure!(
                        !end.status.dnr() && !late,
                        "read of block {}: {:?}",
                        end.tag,
                        end.status
                    );
                    again.push(end.tag);
                    continue;
                }
                let left = (self.shadow.blocks() - end.tag).min(u64::from(blocks)) as usize;
                let data = &end.buf[..left * self.block_bytes as usize];
                match promise {
                    Some(promise) => self.shadow.settle(end.tag, data, promise)?,
                    None => self.shadow.judge(end.tag, data)?,
                }
            }
        }
    }

    fn buffer(&self, blocks: u32) -> Vec<u8> {
        vec![0; blocks as usize * self.block_bytes as usize]
    }

    /// A range without commands in flight.
    fn pick(&mut self, longest_bytes: u64) -> Option<(u64, u32)> {
        let all = self.shadow.blocks();
        for _ in 0..8 {
            let most = (longest_bytes / u64::from(self.block_bytes)).min(all);
            let blocks = match self.dice.u64(..4) {
                0 => 1 + self.dice.u64(..most),
                1 => 1 + self.dice.u64(..most.min(32)),
                _ => 1 + self.dice.u64(..most.min(8)),
            };
            let mut lba = self.dice.u64(..all - blocks + 1);
            if self.dice.u64(..3) == 0 {
                lba -= lba % most.min(64);
            }
            if self.shadow.is_quiet(lba, blocks as u32) {
                return Some((lba, blocks as u32));
            }
        }
        None
    }

    fn next(&mut self) -> Option<(IoOp, Vec<u8>, Running)> {
        let die = self.dice.u64(..100);
        let Habits {
            reads,
            holes,
            flushes,
            fua,
            ..
        } = self.habits;
        if die < flushes {
            let cover = self.shadow.flush_begins();
            return Some((IoOp::Flush, Vec::new(), Running::Flush(cover)));
        }
        let die = die - flushes;
        if die < reads {
            let (lba, blocks) = self.pick(self.habits.longest_bytes)?;
            let op = IoOp::Read { lba, blocks };
            self.shadow.hold(lba, blocks, true);
            return Some((op, self.buffer(blocks), Running::Read(lba, blocks)));
        }
        if die < reads + holes {
            return self.next_hole();
        }
        let (lba, blocks) = self.pick(self.habits.longest_bytes)?;
        let fua = self.dice.u64(..100) < fua;
        let mut data = self.buffer(blocks);
        let change = self.shadow.begin(lba, blocks, Some(&mut data));
        Some((
            IoOp::Write { lba, blocks, fua },
            data,
            Running::Change(change, fua),
        ))
    }

    fn next_hole(&mut self) -> Option<(IoOp, Vec<u8>, Running)> {
        if self.dice.u64(..3) == 0 {
            let (lba, blocks) = self.pick(self.habits.longest_bytes)?;
            let change = self.shadow.begin(lba, blocks, None);
            let deallocate = self.dice.u64(..2) == 0;
            let op = IoOp::WriteZeroes {
                lba,
                blocks,
                deallocate,
            };
            return Some((op, Vec::new(), Running::Change(change, false)));
        }
        let mut changes = Vec::new();
        let mut ranges = Vec::new();
        for _ in 0..=self.dice.u64(..3) {
            if let Some((lba, blocks)) = self.pick(LONGEST_HOLE_BYTES) {
                changes.push(self.shadow.begin(lba, blocks, None));
                ranges.push((lba, blocks));
            }
        }
        if ranges.is_empty() {
            return None;
        }
        let op = IoOp::Deallocate {
            ranges: ranges.len() as u32,
        };
        Some((op, dsm_ranges(&ranges), Running::Holes(changes)))
    }

    fn end(&mut self, what: Running, end: &Done, load: &mut Load) -> Result<()> {
        let well = end.status.is_success();
        let no_space = (end.status.sct(), end.status.sc()) == NO_SPACE;
        let tolerates = self.tolerates.load(SeqCst);
        match well {
            true => load.commands += 1,
            false if no_space => load.no_space += 1,
            false if tolerates & DEVICE != 0 && end.status.sct() == MEDIA => {
                load.device_errors += 1;
            }
            false if tolerates & LATER != 0 && !end.status.dnr() => load.interrupted += 1,
            false => {
                let what: String = format!("{what:?}").chars().take(80).collect();
                bail!("{}: {:?} of {what}", self.nqn, end.status);
            }
        }
        match what {
            Running::Read(lba, blocks) => {
                self.shadow.hold(lba, blocks, false);
                if well {
                    let data = &end.buf[..blocks as usize * self.block_bytes as usize];
                    self.shadow.judge(lba, data)?;
                }
            }
            Running::Change(change, fua) => self.shadow.end(&change, well, fua),
            Running::Holes(changes) => {
                for change in changes {
                    self.shadow.end(&change, well, false);
                }
            }
            Running::Flush(cover) => {
                load.flushes += u64::from(well);
                self.shadow.flush_ends(cover, well);
            }
        }
        Ok(())
    }
}
