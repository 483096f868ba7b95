//! [`crate::load`] for VM disks, with identical reports.
//!
//! A thread drives each queue, or a pinned one drives all. A fixed rate compares the costs of
//! targets that are faster than this client. A pause shows the latency of a sleeping target.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fastrand::Rng;
use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

use super::{DiskCompletion, DiskStatus, Error, Geometry, Op, Options, Queue, Target};
use crate::load::{self, Access, LoadReport, OpReport, Outcome, Progress};

/// The longest sleep before the end is checked.
const TURN: Duration = Duration::from_millis(20);
/// Time limit of a command.
const COMMAND_LIMIT: Duration = Duration::from_secs(60);

/// A load.
#[derive(Clone, Debug)]
pub struct VmLoad {
    /// The disk.
    pub target: Target,
    /// How it is driven; slots hold at least one command.
    pub options: Options,
    /// Share of reads, 0..=100; the rest are writes.
    pub read_percent: u8,
    /// Bytes of each command.
    pub block_bytes: u32,
    /// The order of addresses; [`Access::Once`] is not supported.
    pub access: Access,
    /// Duration.
    pub duration: Duration,
    /// Start of the load's part of the disk.
    pub first_bytes: u64,
    /// Bytes from there; `None`: the rest.
    pub span_bytes: Option<u64>,
    /// Seed of random numbers.
    pub seed: u64,
    /// CPU of one thread for all queues; `None`: a thread per queue.
    pub cpu: Option<usize>,
    /// Commands per second of each queue; `None`: no limit.
    pub rate: Option<u32>,
    /// Pause after each command (depth 1 only).
    pub pause: Option<Duration>,
}

impl VmLoad {
    /// Random reads of 4 KiB for 10 s.
    #[must_use]
    pub fn new(target: Target, options: Options) -> Self {
        Self {
            target,
            options,
            read_percent: 100,
            block_bytes: 4096,
            access: Access::Random,
            duration: Duration::from_secs(10),
            first_bytes: 0,
            span_bytes: None,
            seed: 1,
            cpu: None,
            rate: None,
            pause: None,
        }
    }
}

struct DriverShared {
    stop: AtomicBool,
    ops: AtomicU64,
}

/// Runs a load to its end. `progress` is called about ten times a second. Failed commands are
/// counted.
///
/// # Errors
/// The disk is not usable as asked, or the target is gone.
pub fn run(spec: &VmLoad, progress: &mut dyn FnMut(&Progress)) -> Result<LoadReport, Error> {
    let mut options = spec.options.clone();
    options.slot_bytes = options.slot_bytes.max(spec.block_bytes as usize);
    let mut disk = super::connect(&spec.target, &options)?;
    let places = places(spec, &disk.geometry())?;
    let mut queues = disk.take_queues();
    let per_thread = if spec.cpu.is_some() { queues.len() } else { 1 };
    let shared = Arc::new(DriverShared {
        stop: AtomicBool::new(false),
        ops: AtomicU64::new(0),
    });
    let mut handles = Vec::new();
    let mut number = 0;
    while !queues.is_empty() {
        let mine: Vec<_> = queues.drain(..per_thread).collect();
        let worker = Worker::new(spec, places, number, mine, Arc::clone(&shared));
        number += 1;
        let thread = std::thread::Builder::new().name(format!("fb-machine-{number}"));
        match thread.spawn(move || worker.run()) {
            Ok(handle) => handles.push(handle),
            Err(source) => {
                shared.stop.store(true, Ordering::Relaxed);
                return Err(Error::system("start a load thread")(source));
            }
        }
    }
    let begun = Instant::now();
    while !handles.iter().all(std::thread::JoinHandle::is_finished) {
        let left = spec.duration.saturating_sub(begun.elapsed());
        std::thread::sleep(left.clamp(Duration::from_millis(1), Duration::from_millis(100)));
        let elapsed = begun.elapsed();
        let ops = shared.ops.load(Ordering::Relaxed);
        let fraction = elapsed.as_secs_f64() / spec.duration.as_secs_f64().max(1e-9);
        progress(&Progress {
            elapsed,
            ops,
            bytes: ops * u64::from(spec.block_bytes),
            fraction: fraction.min(1.0),
        });
        if !disk.is_open() {
            // Otherwise the threads would wait forever.
            shared.stop.store(true, Ordering::Relaxed);
            let (Target::VhostUser(path) | Target::VfioUser(path)) = &spec.target;
            return Err(Error::Closed { path: path.clone() });
        }
    }
    let mut report = LoadReport::new(spec.block_bytes);
    for handle in handles {
        let outcome = handle.join().unwrap_or_else(|_| {
            Err(Error::Unusable(
                "a load thread panicked: this is a bug".into(),
            ))
        })?;
        report.add(&outcome);
    }
    report.finish();
    disk.close()?;
    Ok(report)
}

fn places(spec: &VmLoad, geometry: &Geometry) -> Result<u64, Error> {
    let bytes = u64::from(spec.block_bytes);
    let room = geometry.size_bytes.saturating_sub(spec.first_bytes);
    let places = spec.span_bytes.unwrap_or(room).min(room) / bytes.max(1);
    let problem = if spec.read_percent > 100 {
        "the share of reads is above 100 %"
    } else if matches!(spec.access, Access::Once { .. }) {
        "a load on a VM's disk can't use each place once"
    } else if bytes == 0 || !spec.block_bytes.is_multiple_of(geometry.block_bytes) {
        "an I/O is not a multiple of the disk's block"
    } else if !spec.first_bytes.is_multiple_of(bytes) {
        "the start of the load is not a multiple of its I/O size"
    } else if geometry.max_transfer_bytes.is_some_and(|max| bytes > max) {
        "an I/O is larger than the disk's largest transfer"
    } else if spec.read_percent < 100 && geometry.read_only {
        "the disk is read-only"
    } else if spec.pause.is_some() && spec.options.depth != 1 {
        "a pause needs a depth of 1"
    } else if spec.rate == Some(0) {
        "the rate must not be 0"
    } else if places == 0 {
        "the span is smaller than one I/O"
    } else {
        return Ok(places);
    };
    Err(Error::Unusable(problem.into()))
}

#[derive(Clone, Copy)]
struct LoadInFlight {
    at: Instant,
    is_read: bool,
}

struct LoadLane {
    queue: Box<dyn Queue>,
    begun: Vec<LoadInFlight>,
    idle: Vec<u16>,
    next: u64,
    part: Range<u64>,
    submitted: u64,
}

struct Worker {
    lanes: Vec<LoadLane>,
    rng: Rng,
    places: u64,
    spec: VmLoad,
    shared: Arc<DriverShared>,
    outcome: Outcome,
    start: Instant,
}

impl Worker {
    fn new(
        spec: &VmLoad,
        places: u64,
        number: u64,
        queues: Vec<Box<dyn Queue>>,
        shared: Arc<DriverShared>,
    ) -> Self {
        let mut rng = Rng::with_seed(spec.seed ^ number << 48);
        let now = Instant::now();
        let mut content = vec![0; spec.block_bytes as usize];
        let lanes = queues.into_iter().zip(number..).map(|(queue, number)| {
            for slot in 0..queue.depth() {
                rng.fill(&mut content);
                queue.put(slot, &content);
            }
            let begun = LoadInFlight {
                at: now,
                is_read: false,
            };
            let part = load::part(places, spec.options.queues, number);
            LoadLane {
                begun: vec![begun; usize::from(queue.depth())],
                idle: (0..queue.depth()).collect(),
                queue,
                next: part.start,
                part,
                submitted: 0,
            }
        });
        let lanes = lanes.collect();
        Self {
            lanes,
            rng,
            places,
            spec: spec.clone(),
            shared,
            outcome: Outcome {
                elapsed: Duration::ZERO,
                cpu: Duration::ZERO,
                reads: OpReport::new(),
                writes: OpReport::new(),
                errors: 0,
                first_error: None,
            },
            start: now,
        }
    }

    fn run(mut self) -> Result<Outcome, Error> {
        if let Some(cpu) = self.spec.cpu {
            pin(cpu)?;
        }
        let result = self.measure();
        if result.is_err() {
            self.shared.stop.store(true, Ordering::Relaxed);
        }
        result.map(|()| self.outcome)
    }

    fn measure(&mut self) -> Result<(), Error> {
        let cpu_before = thread_cpu();
        self.start = Instant::now();
        let end = self.start + self.spec.duration;
        let mut done = Vec::with_capacity(self.lanes.iter().map(|l| l.begun.len()).sum());
        let mut now = self.start;
        let mut last_end = now;
        loop {
            let more = now < end && !self.shared.stop.load(Ordering::Relaxed);
            let mut in_flight = 0;
            for lane in 0..self.lanes.len() {
                if more {
                    self.fill(lane, now)?;
                }
                in_flight += self.lanes[lane].queue.in_flight();
            }
            if in_flight == 0 && !more {
                break;
            }
            let ended = self.turn(&mut done, end)?;
            now = Instant::now();
            if ended > 0 || in_flight == 0 {
                last_end = now;
            }
            if ended > 0
                && let Some(pause) = self.spec.pause
            {
                std::thread::sleep(pause);
                now = Instant::now();
                last_end = now;
            }
            if now - last_end > COMMAND_LIMIT {
                return Err(Error::TimedOut {
                    what: "any command to end".into(),
                    waited: COMMAND_LIMIT,
                });
            }
        }
        self.outcome.elapsed = end.min(now) - self.start;
        self.outcome.cpu = thread_cpu().saturating_sub(cpu_before);
        Ok(())
    }

    fn fill(&mut self, lane: usize, now: Instant) -> Result<(), Error> {
        let spec = &self.spec;
        let lane = &mut self.lanes[lane];
        if lane.idle.is_empty() {
            return Ok(());
        }
        let due = spec.rate.map_or(u64::MAX, |rate| {
            let elapsed = (now - self.start).as_nanos() as u64;
            (u128::from(elapsed) * u128::from(rate) / 1_000_000_000) as u64 + 1
        });
        let begun = Instant::now();
        while lane.submitted < due {
            let Some(slot) = lane.idle.pop() else { break };
            let place = match spec.access {
                Access::Sequential => {
                    let place = lane.next;
                    lane.next = place + 1;
                    if lane.next >= lane.part.end {
                        lane.next = lane.part.start;
                    }
                    place
                }
                Access::Random | Access::Once { .. } => self.rng.u64(..self.places),
            };
            let bytes = spec.block_bytes;
            let offset_bytes = spec.first_bytes + place * u64::from(bytes);
            let is_read = match spec.read_percent {
                100 => true,
                0 => false,
                share => self.rng.u64(..100) < u64::from(share),
            };
            let op = if is_read {
                Op::Read {
                    offset_bytes,
                    bytes,
                }
            } else {
                Op::Write {
                    offset_bytes,
                    bytes,
                }
            };
            lane.begun[usize::from(slot)] = LoadInFlight { at: begun, is_read };
            lane.queue.submit(slot, op)?;
            lane.submitted += 1;
        }
        lane.queue.kick()
    }

    /// Returns the number of completions.
    fn turn(&mut self, done: &mut Vec<DiskCompletion>, end: Instant) -> Result<usize, Error> {
        let mut all = 0;
        let alone = self.lanes.len() == 1;
        for lane in &mut self.lanes {
            if lane.queue.in_flight() == 0 {
                continue;
            }
            let mut ended = lane.queue.poll(done)?;
            if ended == 0 && alone && self.spec.options.interrupts {
                lane.queue.wait(TURN)?;
                ended = lane.queue.poll(done)?;
            }
            if ended == 0 {
                std::hint::spin_loop();
                continue;
            }
            all += ended;
            let now = Instant::now();
            let counts = now < end;
            for DiskCompletion { slot, ended } in done.drain(..) {
                let begun = lane.begun[usize::from(slot)];
                if ended != DiskStatus::Well {
                    self.outcome.errors += 1;
                    let first = &mut self.outcome.first_error;
                    first.get_or_insert_with(|| format!("{ended:?}"));
                } else if counts {
                    let latency_ns = (now - begun.at).as_nanos() as u64;
                    if begun.is_read {
                        self.outcome.reads.record(latency_ns);
                    } else {
                        self.outcome.writes.record(latency_ns);
                    }
                }
                lane.idle.push(slot);
            }
        }
        if all > 0 {
            self.shared.ops.fetch_add(all as u64, Ordering::Relaxed);
        }
        Ok(all)
    }
}

fn pin(cpu: usize) -> Result<(), Error> {
    if cpu >= CpuSet::MAX_CPU {
        return Err(Error::Unusable(format!("there is no CPU {cpu}")));
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set)
        .map_err(|errno| Error::system("pin the load thread to its CPU")(errno.into()))
}

fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
