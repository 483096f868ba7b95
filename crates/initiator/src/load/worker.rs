//! A thread of the load generator.
//!
//! Each turn refills the queues to their depth, in one write for each. With one queue, a turn waits
//! in the queue's poll; with several, it polls each and then sleeps until one has input. Nothing
//! locks, prints or allocates buffers during the measurement.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fastrand::Rng;
use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

use super::report::Outcome;
use super::{Access, Geometry, LoadShared, LoadSpec, OpReport, Pace};
use crate::{Done, Error, IoOp, IoQueue, Wait};

/// The longest sleep before the end of the load is checked.
const TURN: Duration = Duration::from_millis(20);
/// Time for the last commands to end, beyond their own time limit.
const DRAIN: Duration = Duration::from_secs(1);

struct WorkerSlot {
    begun: Instant,
    is_read: bool,
}

struct WorkerLane {
    queue: IoQueue,
    slots: Vec<WorkerSlot>,
    idle: Vec<(u64, Vec<u8>)>,
    next: u64,
    first: u64,
    end: u64,
    /// Remaining addresses of [`Access::Once`], the next one last.
    once: Vec<u64>,
    due: Instant,
}

pub(crate) struct Worker {
    lanes: Vec<WorkerLane>,
    rng: Rng,
    read_percent: u64,
    geometry: Geometry,
    access: Access,
    pace: Option<Pace>,
    block_bytes: u64,
    bytes_limited: bool,
    duration: Option<Duration>,
    command_timeout: Duration,
    wait: Wait,
    cpu: Option<usize>,
    shared: Arc<LoadShared>,
    outcome: Outcome,
}

impl Worker {
    pub(crate) fn new(
        spec: &LoadSpec,
        geometry: Geometry,
        first_queue: usize,
        queues: Vec<IoQueue>,
        shared: Arc<LoadShared>,
    ) -> Self {
        let mut rng = Rng::with_seed(spec.seed ^ (first_queue as u64) << 48);
        let now = Instant::now();
        let lanes = queues.into_iter().enumerate().map(|(i, queue)| {
            let number = first_queue + i;
            let part = super::part(geometry.places, spec.queues, number as u64);
            let (first, mut end) = (part.start, part.end);
            let mut once = Vec::new();
            if matches!(spec.access, Access::Once { .. }) {
                if number + 1 == usize::from(spec.queues) {
                    end = geometry.places;
                }
                once = (first..end).collect();
                rng.shuffle(&mut once);
            }
            WorkerLane {
                once,
                queue,
                slots: (0..spec.queue_depth)
                    .map(|_| WorkerSlot {
                        begun: now,
                        is_read: false,
                    })
                    .collect(),
                idle: (0..u64::from(spec.queue_depth))
                    .map(|tag| (tag, random_bytes(&mut rng, spec.block_bytes as usize)))
                    .collect(),
                next: first,
                first,
                end,
                due: now,
            }
        });
        let lanes = lanes.collect();
        Self {
            lanes,
            rng,
            read_percent: u64::from(spec.read_percent),
            geometry,
            access: spec.access,
            pace: spec.pace,
            block_bytes: u64::from(spec.block_bytes),
            bytes_limited: matches!(spec.amount, super::Amount::Bytes(_)),
            duration: match spec.amount {
                super::Amount::Duration(duration) => Some(duration),
                super::Amount::Bytes(_) => None,
            },
            command_timeout: spec.options.command_timeout,
            wait: spec.wait,
            cpu: spec.cpu,
            shared,
            outcome: Outcome {
                elapsed: Duration::ZERO,
                cpu: Duration::ZERO,
                reads: OpReport::new(),
                writes: OpReport::new(),
                errors: 0,
                first_error: None,
            },
        }
    }

    pub(crate) fn run(mut self) -> Result<Outcome, Error> {
        let pinned = self.cpu.map_or(Ok(()), pin);
        if !self.shared.start.wait() {
            return Ok(self.outcome);
        }
        if pinned.is_err() {
            self.shared.stop.store(true, Ordering::Relaxed);
        }
        pinned?;
        let result = self.measure();
        if result.is_err() {
            self.shared.stop.store(true, Ordering::Relaxed);
        }
        result.map(|()| self.outcome)
    }

    fn measure(&mut self) -> Result<(), Error> {
        let cpu_before = thread_cpu();
        let begun = Instant::now();
        for lane in &mut self.lanes {
            lane.due = begun;
        }
        let end = self.duration.map(|duration| begun + duration);
        let overdue = end.map(|end| end + self.command_timeout + DRAIN);
        let mut done = Vec::with_capacity(self.lanes.iter().map(|l| l.slots.len()).sum());
        let mut now = begun;
        let mut more = true;
        loop {
            more &= !self.shared.stop.load(Ordering::Relaxed) && end.is_none_or(|end| now < end);
            let mut in_flight = 0;
            for lane in 0..self.lanes.len() {
                if more {
                    more = self.fill(lane);
                }
                in_flight += self.lanes[lane].queue.in_flight();
            }
            if in_flight == 0 && !(more && self.waits_for_its_time()) {
                break;
            }
            now = self.turn(&mut done, end)?;
            // The queues' time limit ends a hang; this one also ends a trickle of completions.
            if overdue.is_some_and(|overdue| now > overdue) {
                let what = "the last commands did not finish in time";
                return Err(Error::Argument(what.into()));
            }
        }
        // Later completions were not counted.
        self.outcome.elapsed = end.map_or(now, |end| end.min(now)) - begun;
        self.outcome.cpu = thread_cpu().saturating_sub(cpu_before);
        Ok(())
    }

    fn waits_for_its_time(&self) -> bool {
        let has_more = |lane: &WorkerLane| match self.access {
            Access::Once { .. } => !lane.once.is_empty(),
            Access::Random | Access::Sequential => true,
        };
        self.pace.is_some() && self.lanes.iter().any(has_more)
    }

    fn due(&self) -> Option<Instant> {
        self.pace
            .and_then(|_| self.lanes.iter().map(|lane| lane.due).min())
    }

    /// False: nothing is left to submit.
    fn fill(&mut self, lane: usize) -> bool {
        let lane = &mut self.lanes[lane];
        if lane.idle.is_empty() {
            return true;
        }
        let begun = Instant::now();
        let mut left = usize::MAX;
        if let Some(pace) = self.pace {
            if begun < lane.due {
                return true;
            }
            left = pace.burst.into();
            let next = lane.due + pace.every;
            lane.due = if next > begun {
                next
            } else {
                begun + pace.every
            };
        }
        while left > 0
            && let Some((tag, buf)) = lane.idle.pop()
        {
            left -= 1;
            if matches!(self.access, Access::Once { .. }) && lane.once.is_empty() {
                // Other lanes may have more; the load ends when nothing is in flight.
                lane.idle.push((tag, buf));
                return true;
            }
            if self.bytes_limited && !take(&self.shared.bytes_left, self.block_bytes) {
                lane.idle.push((tag, buf));
                return false;
            }
            let place = match self.access {
                Access::Random => self.rng.u64(..self.geometry.places),
                Access::Sequential => {
                    let place = lane.next;
                    lane.next += 1;
                    if lane.next >= lane.end {
                        lane.next = lane.first;
                    }
                    place
                }
                Access::Once { .. } => lane.once.pop().unwrap_or(lane.first),
            };
            let blocks = self.geometry.blocks;
            let lba = place * self.geometry.step_blocks;
            let is_read = self.rng.u64(..100) < self.read_percent;
            let op = if is_read {
                IoOp::Read { lba, blocks }
            } else {
                let fua = false;
                IoOp::Write { lba, blocks, fua }
            };
            if let Some(slot) = lane.slots.get_mut(tag as usize) {
                *slot = WorkerSlot { begun, is_read };
            }
            if let Err(refused) = lane.queue.submit(&op, tag, buf) {
                // Unreachable, because the queue is as deep as the load.
                lane.idle.push((tag, refused.buf));
                return true;
            }
        }
        true
    }

    /// Counts completions before `end`.
    fn turn(&mut self, done: &mut Vec<Done>, end: Option<Instant>) -> Result<Instant, Error> {
        let alone = self.lanes.len() == 1;
        let mut limit = if alone { TURN } else { Duration::ZERO };
        let until_due = self
            .due()
            .map(|due| due.saturating_duration_since(Instant::now()));
        limit = limit.min(until_due.unwrap_or(limit));
        let mut now = Instant::now();
        let mut ended = 0;
        for lane in &mut self.lanes {
            if lane.queue.in_flight() == 0 {
                continue;
            }
            ended += lane.queue.poll(done, self.wait, limit)?;
            now = Instant::now();
            let counts = end.is_none_or(|end| now < end);
            for command in done.drain(..) {
                let Some(slot) = lane.slots.get(command.tag as usize) else {
                    continue;
                };
                if !command.status.is_success() {
                    self.outcome.errors += 1;
                    let status = command.status;
                    let first = &mut self.outcome.first_error;
                    first.get_or_insert_with(|| format!("{status:?}"));
                } else if counts {
                    let latency_ns = (now - slot.begun).as_nanos() as u64;
                    if slot.is_read {
                        self.outcome.reads.record(latency_ns);
                    } else {
                        self.outcome.writes.record(latency_ns);
                    }
                }
                lane.idle.push((command.tag, command.buf));
            }
        }
        self.shared.ops.fetch_add(ended as u64, Ordering::Relaxed);
        if ended == 0 && !alone && self.wait == Wait::Block {
            let sleep = until_due.unwrap_or(TURN).min(TURN);
            IoQueue::sleep_any(self.lanes.iter().map(|lane| &lane.queue), sleep)?;
        }
        Ok(now)
    }
}

fn take(left: &AtomicU64, bytes: u64) -> bool {
    let taken = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
        (left > 0).then(|| left.saturating_sub(bytes))
    });
    taken.is_ok()
}

fn pin(cpu: usize) -> Result<(), Error> {
    if cpu >= CpuSet::MAX_CPU {
        return Err(Error::Argument(format!("there is no CPU {cpu}")));
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(|errno| Error::System {
        what: "pin the load thread to its CPU",
        source: errno.into(),
    })
}

fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn random_bytes(rng: &mut Rng, bytes: usize) -> Vec<u8> {
    let mut buf = vec![0; bytes];
    rng.fill(&mut buf);
    buf
}
