//! [`crate::verify`] through VM disks: one disk, all its queues, one thread.
//!
//! A VM's connection must survive the target's death, so a closed connection is an error. The time
//! without a completion is limited.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use fastrand::Rng;

use super::{Disk, DiskCompletion, DiskStatus, Error, Geometry, Op, Options, Queue, Target};
use crate::verify::check::check_block;
use crate::verify::model::Model;
use crate::verify::pattern::{self, SECTOR_BYTES};
use crate::verify::{Initial, Promise, VerifyReport, WriteReport};

/// Tries to find a block that isn't in flight.
const PICKS: u32 = 16;
const PROGRESS: Duration = Duration::from_millis(20);
const TURN: Duration = Duration::from_millis(5);
const RETRY_PAUSE: Duration = Duration::from_millis(20);
const RETRIES: u32 = 1000;

/// Parameters of a verification.
#[derive(Clone, Debug)]
pub struct VmVerify {
    /// The disk.
    pub target: Target,
    /// How it is driven; slots are as large as the commands.
    pub options: Options,
    /// Bytes of each write and read.
    pub block_bytes: u32,
    /// Bytes from the beginning; `None`: all.
    pub span_bytes: Option<u64>,
    /// Seed of random numbers, and part of every sector.
    pub seed: u64,
    /// Acknowledged writes between flushes; 0: no automatic flushes.
    pub flush_every_writes: u64,
    /// The initial content.
    pub initial: Initial,
    /// Time limit without a completion.
    pub patience: Duration,
}

impl VmVerify {
    /// 4-KiB writes over a whole zeroed disk, with a flush every 1000 writes.
    #[must_use]
    pub fn new(target: Target, options: Options) -> Self {
        Self {
            target,
            options,
            block_bytes: 4096,
            span_bytes: None,
            seed: 1,
            flush_every_writes: 1000,
            initial: Initial::Zeros,
            patience: Duration::from_secs(60),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    Nothing,
    Flush,
    Write { block: u32, attempts: u32 },
    Read { block: u32, attempts: u32 },
}

struct VerifyLane {
    queue: Box<dyn Queue>,
    doing: Vec<Doing>,
    idle: Vec<u16>,
    /// Slots to submit again; their data is still in place.
    again: Vec<u16>,
}

/// Writes a disk and reads it back.
pub struct VmVerifier {
    spec: VmVerify,
    disk: Box<dyn Disk>,
    lanes: Vec<VerifyLane>,
    model: Model,
    rng: Rng,
    buf: Vec<u8>,
    flush_in_flight: bool,
    since_flush: u64,
    done: Vec<DiskCompletion>,
    stats: WriteReport,
    report: VerifyReport,
    last_end: Instant,
}

impl VmVerifier {
    /// Connects to the disk.
    pub fn connect(mut spec: VmVerify) -> Result<Self, Error> {
        spec.options.slot_bytes = spec.block_bytes as usize;
        let mut disk = super::connect(&spec.target, &spec.options)?;
        let Geometry {
            size_bytes,
            block_bytes,
            ..
        } = disk.geometry();
        if spec.block_bytes == 0 || !spec.block_bytes.is_multiple_of(block_bytes) {
            return Err(Error::Unusable(format!(
                "an I/O of {} bytes is not a multiple of the disk's block",
                spec.block_bytes
            )));
        }
        let span = spec.span_bytes.unwrap_or(size_bytes).min(size_bytes);
        let blocks = u32::try_from(span / u64::from(spec.block_bytes))
            .ok()
            .filter(|&blocks| blocks > 0)
            .ok_or_else(|| Error::Unusable(format!("cannot keep track of {span} bytes")))?;
        let lanes = disk.take_queues().into_iter().map(|queue| VerifyLane {
            doing: vec![Doing::Nothing; usize::from(queue.depth())],
            idle: (0..queue.depth()).collect(),
            again: Vec::new(),
            queue,
        });
        Ok(Self {
            lanes: lanes.collect(),
            disk,
            model: Model::new(blocks, Promise::Acknowledged),
            rng: Rng::with_seed(spec.seed),
            buf: vec![0; spec.block_bytes as usize],
            flush_in_flight: false,
            since_flush: 0,
            done: Vec::new(),
            stats: WriteReport::default(),
            report: VerifyReport::default(),
            last_end: Instant::now(),
            spec,
        })
    }

    /// The disk.
    pub fn disk(&mut self) -> &mut dyn Disk {
        &mut *self.disk
    }

    /// Blocks that were ever written.
    #[must_use]
    pub fn blocks_written(&self) -> u64 {
        self.model.touched()
    }

    /// Writes at random places until `progress` breaks, then waits for all acknowledgements.
    /// `progress` gets the number acknowledged.
    ///
    /// # Errors
    /// The connection is lost, or nothing ended within the patience.
    pub fn write(
        &mut self,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<WriteReport, Error> {
        self.stats = WriteReport::default();
        let begun = Instant::now();
        self.last_end = begun;
        let mut reported = begun;
        let mut more = true;
        loop {
            if more && reported.elapsed() >= PROGRESS {
                reported = Instant::now();
                more = progress(self.stats.writes).is_continue();
            }
            for lane in 0..self.lanes.len() {
                while more && self.write_one(lane)? {}
            }
            let every = self.spec.flush_every_writes;
            if every > 0 && self.since_flush >= every {
                self.submit_flush()?;
            }
            if !self.turn()? && !more {
                break;
            }
        }
        self.stats.elapsed = begun.elapsed();
        Ok(std::mem::take(&mut self.stats))
    }

    /// Flushes the disk.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.stats = WriteReport::default();
        self.last_end = Instant::now();
        self.submit_flush()?;
        while self.turn()? {}
        if self.stats.flushes == 0 {
            let why = self.stats.first_error.take().unwrap_or_default();
            return Err(Error::Unusable(format!("flush failed: {why}")));
        }
        Ok(())
    }

    /// Reads back and judges the whole span, or only written blocks with [`Initial::Any`]. Wrong
    /// data is no error: see [`VerifyReport::is_clean`].
    pub fn read_back(&mut self) -> Result<VerifyReport, Error> {
        self.report = VerifyReport::default();
        let begun = Instant::now();
        self.last_end = begun;
        let mut next = 0;
        loop {
            for lane in 0..self.lanes.len() {
                while next < self.model.blocks() {
                    if self.spec.initial == Initial::Any && self.model.issued(next) == 0 {
                        next += 1;
                        continue;
                    }
                    let Some(slot) = self.lanes[lane].idle.pop() else {
                        break;
                    };
                    let doing = Doing::Read {
                        block: next,
                        attempts: 0,
                    };
                    self.begin(lane, slot, doing)?;
                    next += 1;
                }
            }
            if !self.turn()? && next >= self.model.blocks() {
                break;
            }
        }
        self.report.elapsed = begun.elapsed();
        Ok(std::mem::take(&mut self.report))
    }

    /// Shuts the device down.
    pub fn close(mut self) -> Result<(), Error> {
        self.lanes.clear();
        self.disk.close()
    }

    /// False: no slot or block was free.
    fn write_one(&mut self, lane: usize) -> Result<bool, Error> {
        let blocks = u64::from(self.model.blocks());
        let block = (0..PICKS)
            .map(|_| self.rng.u64(..blocks) as u32)
            .find(|&block| !self.model.is_in_flight(block));
        let Some(block) = block else { return Ok(false) };
        let Some(slot) = self.lanes[lane].idle.pop() else {
            return Ok(false);
        };
        let version = self.model.issue(block);
        let sector = self.offset(block) / SECTOR_BYTES as u64;
        pattern::fill(&mut self.buf, self.spec.seed, sector, version);
        self.lanes[lane].queue.put(slot, &self.buf);
        let doing = Doing::Write { block, attempts: 0 };
        self.begin(lane, slot, doing)?;
        Ok(true)
    }

    fn offset(&self, block: u32) -> u64 {
        u64::from(block) * u64::from(self.spec.block_bytes)
    }

    fn begin(&mut self, lane: usize, slot: u16, doing: Doing) -> Result<(), Error> {
        let bytes = self.spec.block_bytes;
        let op = match doing {
            Doing::Nothing => return Ok(()),
            Doing::Flush => Op::Flush,
            Doing::Write { block, .. } => Op::Write {
                offset_bytes: self.offset(block),
                bytes,
            },
            Doing::Read { block, .. } => Op::Read {
                offset_bytes: self.offset(block),
                bytes,
            },
        };
        let lane = &mut self.lanes[lane];
        lane.doing[usize::from(slot)] = doing;
        lane.queue.submit(slot, op)
    }

    fn submit_flush(&mut self) -> Result<(), Error> {
        if self.flush_in_flight {
            return Ok(());
        }
        let Some(slot) = self.lanes[0].idle.pop() else {
            return Ok(());
        };
        self.model.flush_begins();
        self.flush_in_flight = true;
        self.since_flush = 0;
        self.begin(0, slot, Doing::Flush)
    }

    /// False: nothing is in flight or queued.
    fn turn(&mut self) -> Result<bool, Error> {
        let mut busy = false;
        let mut ended = 0;
        for lane in 0..self.lanes.len() {
            while let Some(slot) = self.lanes[lane].again.pop() {
                let doing = self.lanes[lane].doing[usize::from(slot)];
                self.begin(lane, slot, doing)?;
            }
            let queue = &mut self.lanes[lane].queue;
            queue.kick()?;
            busy |= queue.in_flight() > 0;
            let mut done = std::mem::take(&mut self.done);
            ended += queue.poll(&mut done)?;
            for end in done.drain(..) {
                self.end(lane, end);
            }
            self.done = done;
        }
        let now = Instant::now();
        if ended > 0 || !busy {
            let pause = now - self.last_end;
            self.stats.longest_pause = self.stats.longest_pause.max(pause);
            self.last_end = now;
            return Ok(busy);
        }
        if now - self.last_end > self.spec.patience {
            return Err(Error::TimedOut {
                what: "any command to end".into(),
                waited: self.spec.patience,
            });
        }
        if !self.disk.is_open() {
            let (Target::VhostUser(path) | Target::VfioUser(path)) = &self.spec.target;
            return Err(Error::Closed { path: path.clone() });
        }
        if self.spec.options.interrupts {
            let lane = self.lanes.iter_mut().find(|l| l.queue.in_flight() > 0);
            if let Some(lane) = lane {
                lane.queue.wait(TURN)?;
            }
        } else {
            // The target may need this CPU.
            std::thread::yield_now();
        }
        Ok(true)
    }

    fn end(&mut self, lane: usize, DiskCompletion { slot, ended }: DiskCompletion) {
        let well = ended == DiskStatus::Well;
        let at = &mut self.lanes[lane].doing[usize::from(slot)];
        let doing = *at;
        if let Doing::Write { attempts, .. } | Doing::Read { attempts, .. } = at
            && !well
            && ended.may_retry()
            && *attempts < RETRIES
        {
            *attempts += 1;
            self.stats.redriven += 1;
            self.lanes[lane].again.push(slot);
            std::thread::sleep(RETRY_PAUSE);
            return;
        }
        *at = Doing::Nothing;
        match doing {
            Doing::Nothing => {}
            Doing::Flush => {
                self.flush_in_flight = false;
                self.model.flush_ends(well);
                if well {
                    self.stats.flushes += 1;
                } else if ended.may_retry() {
                    self.stats.redriven += 1;
                    self.since_flush = self.spec.flush_every_writes;
                } else {
                    self.count_error(&format!("flush: {ended:?}"));
                }
            }
            Doing::Write { block, .. } => {
                self.model.end(block, well);
                if well {
                    self.since_flush += 1;
                    self.stats.writes += 1;
                    self.stats.bytes += u64::from(self.spec.block_bytes);
                } else {
                    self.count_error(&format!("write of block {block}: {ended:?}"));
                }
            }
            Doing::Read { block, .. } if well => {
                self.lanes[lane].queue.get(slot, &mut self.buf);
                let (seed, initial) = (self.spec.seed, self.spec.initial);
                let (report, model) = (&mut self.report, &mut self.model);
                check_block(report, model, seed, initial, block, &self.buf);
            }
            Doing::Read { block, .. } => {
                let text = format!("read of block {block}: {ended:?}");
                self.report.read_errors.push(text);
            }
        }
        self.lanes[lane].idle.push(slot);
    }

    fn count_error(&mut self, what: &str) {
        self.stats.errors += 1;
        self.stats.first_error.get_or_insert_with(|| what.into());
    }
}

impl std::fmt::Debug for VmVerifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MachineVerifier")
            .field("spec", &self.spec)
            .finish_non_exhaustive()
    }
}
