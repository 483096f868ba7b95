//! The verifier: writes through one queue and reads back, across lost connections.
//!
//! A command's tag is its block number, because a block has at most one command in flight.
//! Unanswered commands and those with a retryable status are repeated before new ones.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use fastrand::Rng;
use forebay_nvme::Status;

use super::check::check_block;
use super::link::VerifyLink;
use super::model::Model;
use super::pattern::{self, SECTOR_BYTES};
use super::{Initial, VerifyReport, VerifySpec};
use crate::{ControllerInfo, Done, Error, IoOp};

const TAG_FLUSH: u64 = u64::MAX;
const PROGRESS: Duration = Duration::from_millis(100);
const RETRY_PAUSE: Duration = Duration::from_millis(20);
/// Tries to find a block that isn't in flight.
const PICKS: u32 = 16;

/// The end of writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteGoal {
    /// After this many bytes.
    Bytes(u64),
    /// After this time.
    Duration(Duration),
    /// When the progress callback breaks.
    UntilReported,
}

/// Progress of the verifier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Time since this phase began.
    pub elapsed: Duration,
    /// Bytes acknowledged, or read.
    pub bytes: u64,
    /// Reconnects in this phase.
    pub reconnects: u64,
    /// Successful flushes.
    pub flushes: u64,
    /// 0.0..=1.0; 0.0 if the end is not known.
    pub fraction: f64,
}

/// The result of writing.
#[derive(Clone, Debug, Default)]
pub struct WriteReport {
    /// Acknowledged writes.
    pub writes: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Successful flushes.
    pub flushes: u64,
    /// Reconnects.
    pub reconnects: u64,
    /// Commands that were repeated.
    pub redriven: u64,
    /// The longest time without a completion, reconnects included, while commands were in flight.
    pub longest_pause: Duration,
    /// Commands that failed for good.
    pub errors: u64,
    /// The first such status.
    pub first_error: Option<String>,
    /// Duration.
    pub elapsed: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Write,
    Read,
}

/// Writes a namespace and reads it back.
#[derive(Debug)]
pub struct Verifier {
    spec: VerifySpec,
    controller: ControllerInfo,
    link: Option<VerifyLink>,
    model: Model,
    rng: Rng,
    blocks_per_io: u32,
    idle: Vec<Vec<u8>>,
    /// Block, buffer, attempts.
    backlog: VecDeque<(u32, Vec<u8>, u32)>,
    attempts: Vec<(u32, u32)>,
    flush_in_flight: bool,
    since_flush: u64,
    done: Vec<Done>,
    phase: Phase,
    stats: WriteReport,
    report: VerifyReport,
    last_end: Instant,
}

impl Verifier {
    /// Connects and reads the namespace's geometry.
    pub fn connect(spec: VerifySpec) -> Result<Self, Error> {
        let link = VerifyLink::reconnect(&spec)?;
        let addr = spec.addr;
        let unusable = |what: String| Error::Unusable { addr, what };
        let namespaces = link.session.namespaces();
        let namespace = namespaces.iter().find(|ns| ns.nsid == spec.nsid);
        let Some(namespace) = namespace else {
            return Err(unusable(format!("no usable namespace {}", spec.nsid)));
        };
        let block_bytes = spec.block_bytes;
        let lba_bytes = namespace.block_bytes;
        if block_bytes == 0 || !block_bytes.is_multiple_of(lba_bytes) {
            return Err(unusable(format!(
                "an I/O of {block_bytes} bytes is not a multiple of the namespace's block of \
                 {lba_bytes} bytes"
            )));
        }
        if block_bytes / lba_bytes > 1 << 16 {
            return Err(Error::Argument("an I/O has at most 65536 blocks".into()));
        }
        let size = namespace.size_bytes();
        let span = spec.span_bytes.unwrap_or(size).min(size);
        let blocks = u32::try_from(span / u64::from(block_bytes))
            .ok()
            .filter(|&blocks| blocks > 0)
            .ok_or_else(|| unusable(format!("cannot keep track of a span of {span} bytes")))?;
        let depth = usize::from(spec.queue_depth.max(1)).min(link.queue.depth());
        Ok(Self {
            controller: link.session.controller().clone(),
            model: Model::new(blocks, spec.promise),
            rng: Rng::with_seed(spec.seed),
            blocks_per_io: block_bytes / lba_bytes,
            idle: (0..depth).map(|_| vec![0; block_bytes as usize]).collect(),
            link: Some(link),
            backlog: VecDeque::new(),
            attempts: Vec::new(),
            flush_in_flight: false,
            since_flush: 0,
            done: Vec::with_capacity(depth),
            phase: Phase::Write,
            stats: WriteReport::default(),
            report: VerifyReport::default(),
            last_end: Instant::now(),
            spec,
        })
    }

    /// The controller, as first identified.
    #[must_use]
    pub fn controller(&self) -> &ControllerInfo {
        &self.controller
    }

    /// Blocks that were ever written.
    #[must_use]
    pub fn blocks_written(&self) -> u64 {
        self.model.touched()
    }

    /// Writes at random places until the goal is reached or `progress` breaks, then waits for all
    /// acknowledgements.
    ///
    /// # Errors
    /// Reconnecting took too long. Call again when the target is back.
    pub fn write(
        &mut self,
        goal: WriteGoal,
        progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
    ) -> Result<WriteReport, Error> {
        self.begin(Phase::Write)?;
        let begun = Instant::now();
        let mut reported = begun;
        let mut left = match goal {
            WriteGoal::Bytes(bytes) => bytes.div_ceil(u64::from(self.spec.block_bytes)),
            _ => u64::MAX,
        };
        let all = left;
        loop {
            let elapsed = begun.elapsed();
            if matches!(goal, WriteGoal::Duration(limit) if elapsed >= limit) {
                left = 0;
            }
            if reported.elapsed() >= PROGRESS {
                reported = Instant::now();
                let fraction = match goal {
                    WriteGoal::Bytes(_) => self.stats.writes as f64 / all.max(1) as f64,
                    WriteGoal::Duration(d) => elapsed.as_secs_f64() / d.as_secs_f64().max(1e-9),
                    WriteGoal::UntilReported => 0.0,
                };
                if progress(&self.progress(elapsed, self.stats.bytes, fraction)).is_break() {
                    left = 0;
                }
            }
            let flush_every = self.spec.flush_every_writes;
            if flush_every > 0 && self.since_flush >= flush_every {
                self.submit_flush();
            }
            while left > 0 && self.backlog.is_empty() {
                let Some(block) = self.pick() else { break };
                let Some(mut buf) = self.idle.pop() else {
                    break;
                };
                let version = self.model.issue(block);
                pattern::fill(&mut buf, self.spec.seed, self.first_sector(block), version);
                self.backlog.push_back((block, buf, 0));
                self.drive();
                left -= 1;
            }
            if !self.turn()? {
                break;
            }
        }
        self.stats.elapsed = begun.elapsed();
        Ok(std::mem::take(&mut self.stats))
    }

    /// Flushes, so that all acknowledged writes must survive.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.begin(Phase::Write)?;
        for _ in 0..=self.spec.retries {
            // A lost connection may have taken the flush.
            self.submit_flush();
            while self.turn()? {}
            if self.stats.flushes > 0 {
                return Ok(());
            }
            std::thread::sleep(RETRY_PAUSE);
        }
        let error = self.stats.first_error.take();
        Err(Error::Unusable {
            addr: self.spec.addr,
            what: format!("flush failed: {}", error.unwrap_or_default()),
        })
    }

    /// Reads back and judges the whole span, or only written blocks with [`Initial::Any`]. Wrong
    /// data is no error: see [`VerifyReport::is_clean`].
    pub fn read_back(
        &mut self,
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<VerifyReport, Error> {
        self.begin(Phase::Read)?;
        let begun = Instant::now();
        let mut reported = begun;
        let blocks = self.model.blocks();
        let mut next = 0;
        loop {
            if reported.elapsed() >= PROGRESS {
                reported = Instant::now();
                let fraction = f64::from(next) / f64::from(blocks);
                progress(&self.progress(begun.elapsed(), self.report.bytes, fraction));
            }
            while next < blocks && self.backlog.is_empty() {
                if self.spec.initial == Initial::Any && self.model.issued(next) == 0 {
                    next += 1;
                    continue;
                }
                let Some(buf) = self.idle.pop() else { break };
                self.backlog.push_back((next, buf, 0));
                self.drive();
                next += 1;
            }
            if !self.turn()? && next >= blocks {
                break;
            }
        }
        self.report.reconnects = self.stats.reconnects;
        self.report.elapsed = begun.elapsed();
        Ok(std::mem::take(&mut self.report))
    }

    /// Closes the session.
    pub fn close(mut self) -> Result<(), Error> {
        match self.link.take() {
            None => Ok(()),
            Some(VerifyLink { queue, session }) => {
                drop(queue);
                session.close()
            }
        }
    }

    /// Writes that a failed phase left are completed first; its reads are dropped.
    fn begin(&mut self, phase: Phase) -> Result<(), Error> {
        self.last_end = Instant::now();
        if self.phase == Phase::Read {
            self.idle
                .extend(self.backlog.drain(..).map(|(_, buf, _)| buf));
        }
        self.ensure_link()?;
        if phase == Phase::Read {
            while self.turn()? {}
        }
        self.phase = phase;
        self.stats = WriteReport::default();
        self.report = VerifyReport::default();
        Ok(())
    }

    fn ensure_link(&mut self) -> Result<(), Error> {
        if self.link.is_none() {
            self.link = Some(VerifyLink::reconnect(&self.spec)?);
            self.stats.reconnects += 1;
        }
        Ok(())
    }

    fn progress(&self, elapsed: Duration, bytes: u64, fraction: f64) -> Progress {
        Progress {
            elapsed,
            bytes,
            reconnects: self.stats.reconnects,
            flushes: self.stats.flushes,
            fraction: fraction.min(1.0),
        }
    }

    fn first_sector(&self, block: u32) -> u64 {
        u64::from(block) * u64::from(self.spec.block_bytes) / SECTOR_BYTES as u64
    }

    fn pick(&mut self) -> Option<u32> {
        (0..PICKS)
            .map(|_| self.rng.u32(..self.model.blocks()))
            .find(|&block| !self.model.is_in_flight(block))
    }

    fn submit_flush(&mut self) {
        if self.flush_in_flight {
            return;
        }
        if let Some(link) = &mut self.link
            && link
                .queue
                .submit(&IoOp::Flush, TAG_FLUSH, Vec::new())
                .is_ok()
        {
            self.model.flush_begins();
            self.flush_in_flight = true;
            self.since_flush = 0;
        }
    }

    fn drive(&mut self) {
        let Some(link) = &mut self.link else { return };
        while let Some((block, buf, attempts)) = self.backlog.pop_front() {
            let lba = u64::from(block) * u64::from(self.blocks_per_io);
            let blocks = self.blocks_per_io;
            let op = match self.phase {
                Phase::Write => IoOp::Write {
                    lba,
                    blocks,
                    fua: false,
                },
                Phase::Read => IoOp::Read { lba, blocks },
            };
            if let Err(refused) = link.queue.submit(&op, u64::from(block), buf) {
                self.backlog.push_front((block, refused.buf, attempts));
                return;
            }
            if attempts > 0 {
                self.attempts.push((block, attempts));
            }
        }
    }

    /// False: nothing is in flight or queued.
    fn turn(&mut self) -> Result<bool, Error> {
        self.drive();
        let in_flight = self.link.as_ref().map_or(0, |link| link.queue.in_flight());
        if in_flight == 0 && self.backlog.is_empty() {
            self.last_end = Instant::now();
            return Ok(false);
        }
        let mut done = std::mem::take(&mut self.done);
        let polled = match &mut self.link {
            Some(link) => link.queue.poll(&mut done, self.spec.wait, PROGRESS),
            None => Ok(0),
        };
        if !done.is_empty() {
            let pause = self.last_end.elapsed();
            self.stats.longest_pause = self.stats.longest_pause.max(pause);
            self.last_end = Instant::now();
        }
        let mut refused = false;
        for end in done.drain(..) {
            refused |= self.end(end);
        }
        self.done = done;
        if refused {
            std::thread::sleep(RETRY_PAUSE);
        }
        match polled {
            Err(error) if !error.is_connection_lost() => return Err(error),
            Err(_) => self.lost(),
            Ok(_) => {}
        }
        // The target accepts connections but completes nothing.
        let silence = self.last_end.elapsed();
        if silence > 2 * self.spec.options.command_timeout + self.spec.reconnect_limit {
            self.lost();
            return Err(Error::TimedOut {
                addr: self.spec.addr,
                what: "any command to end".into(),
                waited: silence,
            });
        }
        self.ensure_link()?;
        Ok(true)
    }

    /// True: repeat the command.
    fn end(&mut self, end: Done) -> bool {
        let well = end.status.is_success();
        if end.tag == TAG_FLUSH {
            self.flush_in_flight = false;
            self.model.flush_ends(well);
            if well {
                self.stats.flushes += 1;
            } else if may_retry(end.status) {
                self.stats.redriven += 1;
                self.since_flush = self.spec.flush_every_writes;
            } else {
                self.count_error("flush", end.status);
            }
            return !well;
        }
        let block = end.tag as u32;
        let at = self.attempts.iter().position(|&(other, _)| other == block);
        let attempts = at.map_or(0, |at| self.attempts.swap_remove(at).1);
        if !well && may_retry(end.status) && attempts < self.spec.retries {
            self.stats.redriven += 1;
            self.backlog.push_back((block, end.buf, attempts + 1));
            return true;
        }
        match self.phase {
            Phase::Write => {
                self.model.end(block, well);
                if well {
                    self.since_flush += 1;
                    self.stats.writes += 1;
                    self.stats.bytes += end.buf.len() as u64;
                } else {
                    self.count_error(&format!("write of block {block}"), end.status);
                }
            }
            Phase::Read if well => {
                let (seed, initial) = (self.spec.seed, self.spec.initial);
                let (report, model) = (&mut self.report, &mut self.model);
                check_block(report, model, seed, initial, block, &end.buf);
            }
            Phase::Read => {
                let text = format!("read of block {block}: {:?}", end.status);
                self.report.read_errors.push(text);
            }
        }
        self.idle.push(end.buf);
        false
    }

    fn count_error(&mut self, what: &str, status: Status) {
        self.stats.errors += 1;
        let first = &mut self.stats.first_error;
        first.get_or_insert_with(|| format!("{what}: {status:?}"));
    }

    fn lost(&mut self) {
        let Some(link) = self.link.take() else { return };
        self.attempts.clear();
        self.flush_in_flight = false;
        self.model.connection_lost();
        for (tag, buf) in link.queue.abandon() {
            if tag != TAG_FLUSH {
                self.stats.redriven += 1;
                self.backlog.push_back((tag as u32, buf, 0));
            }
        }
    }
}

/// Transient statuses (Base 3.3.3.2.1).
fn may_retry(status: Status) -> bool {
    let passing = [
        Status::COMMAND_INTERRUPTED,
        Status::NAMESPACE_NOT_READY,
        Status::TRANSIENT_TRANSPORT_ERROR,
        Status::COMMAND_ABORT_REQUESTED,
        Status::ABORTED_SQ_DELETION,
    ];
    !status.dnr() && passing.contains(&status.code())
}
