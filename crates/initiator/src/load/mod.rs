//! The load generator: measures rates, latency distributions and its own cost under a known load.
//!
//! Latency runs from submission to the queue until the completion is seen. Workers start together,
//! measure for the same interval, and ignore later completions.

mod report;
mod worker;

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

pub(crate) use report::Outcome;
pub use report::{LoadReport, OpReport};

use crate::{Error, Options, Session, Wait};

/// The order of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Random, aligned to the I/O size.
    Random,
    /// Sequential; each queue has its own part of the span.
    Sequential,
    /// Multiples of the stride, each once, in seeded order; each queue has its own part of the
    /// span.
    Once {
        /// The stride.
        stride_bytes: u64,
    },
}

/// When the load ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// After this time.
    Duration(Duration),
    /// After this many bytes.
    Bytes(u64),
}

/// Limits the rate of a queue's new commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Commands that begin together.
    pub burst: u16,
    /// Interval of bursts; missed bursts are not made up for.
    pub every: Duration,
}

/// A load.
#[derive(Clone, Debug)]
pub struct LoadSpec {
    /// The target.
    pub addr: SocketAddr,
    /// The subsystem.
    pub subnqn: String,
    /// The host's NQN.
    pub hostnqn: String,
    /// The namespace.
    pub nsid: u32,
    /// Share of reads, 0..=100; the rest are writes.
    pub read_percent: u8,
    /// Bytes of each command, in whole blocks.
    pub block_bytes: u32,
    /// Commands in flight per queue.
    pub queue_depth: u16,
    /// Number of I/O queues.
    pub queues: u16,
    /// When it ends.
    pub amount: Amount,
    /// Bytes from the beginning; `None`: all.
    pub span_bytes: Option<u64>,
    /// Rate of new commands; `None`: no limit.
    pub pace: Option<Pace>,
    /// The order of addresses.
    pub access: Access,
    /// Seed of random numbers.
    pub seed: u64,
    /// CPU of one thread for all queues; `None`: an unpinned thread per queue.
    pub cpu: Option<usize>,
    /// How to wait for completions.
    pub wait: Wait,
    /// Other options; the load sets `io_queues` and `queue_entries`.
    pub options: Options,
}

impl LoadSpec {
    /// 4-KiB random reads and writes at depth 32 for 10 s.
    #[must_use]
    pub fn new(addr: SocketAddr, subnqn: &str, hostnqn: &str) -> Self {
        Self {
            addr,
            subnqn: subnqn.into(),
            hostnqn: hostnqn.into(),
            nsid: 1,
            read_percent: 70,
            block_bytes: 4096,
            queue_depth: 32,
            queues: 1,
            amount: Amount::Duration(Duration::from_secs(10)),
            span_bytes: None,
            pace: None,
            access: Access::Random,
            seed: 1,
            cpu: None,
            wait: Wait::Block,
            options: Options::default(),
        }
    }
}

/// Progress of a load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Time since the load began.
    pub elapsed: Duration,
    /// Completed commands.
    pub ops: u64,
    /// Their bytes.
    pub bytes: u64,
    /// 0.0..=1.0.
    pub fraction: f64,
}

#[derive(Debug)]
pub(crate) struct LoadShared {
    /// Whether to begin; false if not all workers started.
    pub(crate) start: OnceLock<bool>,
    pub(crate) stop: AtomicBool,
    pub(crate) ops: AtomicU64,
    /// Bytes still to submit.
    pub(crate) bytes_left: AtomicU64,
}

fn watch<T>(
    spec: &LoadSpec,
    shared: &LoadShared,
    progress: &mut dyn FnMut(&Progress),
    handles: &[std::thread::JoinHandle<T>],
) {
    let begun = Instant::now();
    let limit = match spec.amount {
        Amount::Duration(duration) => Some(duration),
        Amount::Bytes(_) => None,
    };
    while !handles.iter().all(std::thread::JoinHandle::is_finished) {
        std::thread::sleep(limit.map_or(Duration::from_millis(100), |limit| {
            let left = limit.saturating_sub(begun.elapsed());
            left.clamp(Duration::from_millis(1), Duration::from_millis(100))
        }));
        let elapsed = begun.elapsed();
        let ops = shared.ops.load(Ordering::Relaxed);
        let bytes = ops * u64::from(spec.block_bytes);
        let fraction = match spec.amount {
            Amount::Duration(all) => elapsed.as_secs_f64() / all.as_secs_f64().max(1e-9),
            Amount::Bytes(all) => bytes as f64 / all.max(1) as f64,
        };
        progress(&Progress {
            elapsed,
            ops,
            bytes,
            fraction: fraction.min(1.0),
        });
        if limit.is_some_and(|limit| elapsed >= limit) {
            shared.stop.store(true, Ordering::Relaxed);
        }
    }
}

/// Runs a load to its end. `progress` is called about ten times a second. Error statuses are
/// counted in the report.
///
/// # Errors
/// The target is not usable as asked, or a connection was lost.
pub fn run(spec: &LoadSpec, progress: &mut dyn FnMut(&Progress)) -> Result<LoadReport, Error> {
    check(spec)?;
    let options = Options {
        io_queues: spec.queues,
        queue_entries: u32::from(spec.queue_depth) + 1,
        ..spec.options.clone()
    };
    let mut session = Session::connect(spec.addr, &spec.subnqn, &spec.hostnqn, &options)?;
    let geometry = geometry(spec, &session)?;
    let mut queues = Vec::new();
    for _ in 0..spec.queues {
        queues.push(session.open_queue(spec.nsid)?);
    }
    let per_thread = if spec.cpu.is_some() { queues.len() } else { 1 };
    let threads = queues.len() / per_thread;
    let shared = Arc::new(LoadShared {
        start: OnceLock::new(),
        stop: AtomicBool::new(false),
        ops: AtomicU64::new(0),
        bytes_left: AtomicU64::new(match spec.amount {
            Amount::Bytes(bytes) => bytes,
            Amount::Duration(_) => u64::MAX,
        }),
    });
    let mut handles = Vec::new();
    for first in 0..threads {
        let mine: Vec<_> = queues.drain(..per_thread).collect();
        let worker = worker::Worker::new(spec, geometry, first, mine, Arc::clone(&shared));
        let thread = std::thread::Builder::new().name(format!("fb-load-{first}"));
        match thread.spawn(move || worker.run()) {
            Ok(handle) => handles.push(handle),
            Err(source) => {
                let _ = shared.start.set(false);
                return Err(Error::System {
                    what: "start a load thread",
                    source,
                });
            }
        }
    }
    let _ = shared.start.set(true);
    watch(spec, &shared, progress, &handles);
    let mut report = LoadReport::new(spec.block_bytes);
    for handle in handles {
        let outcome = handle.join().unwrap_or_else(|_| {
            Err(Error::Argument(
                "a load thread panicked: this is a bug".into(),
            ))
        })?;
        report.add(&outcome);
    }
    report.finish();
    session.close()?;
    Ok(report)
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    pub(crate) blocks: u32,
    pub(crate) step_blocks: u64,
    /// Addresses in the span.
    pub(crate) places: u64,
}

fn check(spec: &LoadSpec) -> Result<(), Error> {
    let problem = if spec.read_percent > 100 {
        "read_percent is above 100"
    } else if spec.queue_depth == 0 || spec.queues == 0 {
        "queue depth and number of queues must be at least 1"
    } else if spec
        .pace
        .is_some_and(|pace| pace.burst == 0 || pace.every.is_zero())
    {
        "a pace needs at least one command and a time above 0"
    } else if spec.block_bytes == 0 {
        "the I/O size must not be 0"
    } else {
        return Ok(());
    };
    Err(Error::Argument(problem.into()))
}

/// A queue's own part of the places, for [`Access::Sequential`].
pub(crate) fn part(places: u64, queues: u16, number: u64) -> Range<u64> {
    let count = (places / u64::from(queues.max(1))).max(1);
    let first = number * count % places.max(1);
    first..(first + count).min(places)
}

fn geometry(spec: &LoadSpec, session: &Session) -> Result<Geometry, Error> {
    let addr = spec.addr;
    let unusable = |what: String| Error::Unusable { addr, what };
    let namespaces = session.namespaces();
    let namespace = namespaces.iter().find(|ns| ns.nsid == spec.nsid);
    let namespace = namespace.ok_or_else(|| {
        unusable(format!(
            "{} has no usable namespace {}",
            spec.subnqn, spec.nsid
        ))
    })?;
    if namespace.write_protected && spec.read_percent < 100 {
        return Err(unusable("the namespace is write-protected".into()));
    }
    let granted = session.granted_queues();
    if granted < spec.queues {
        return Err(unusable(format!(
            "the controller grants {granted} I/O queues, not {}",
            spec.queues
        )));
    }
    if session.queue_depth() < usize::from(spec.queue_depth) {
        return Err(unusable(format!(
            "the controller's queues hold {} commands at a time, not {}",
            session.queue_depth(),
            spec.queue_depth
        )));
    }
    if !spec.block_bytes.is_multiple_of(namespace.block_bytes) {
        return Err(unusable(format!(
            "an I/O of {} bytes is not a multiple of the namespace's block of {} bytes",
            spec.block_bytes, namespace.block_bytes
        )));
    }
    if let Access::Once { stride_bytes } = spec.access
        && (stride_bytes < u64::from(spec.block_bytes)
            || !stride_bytes.is_multiple_of(u64::from(namespace.block_bytes)))
    {
        return Err(unusable(format!(
            "a stride of {stride_bytes} bytes is not a multiple of the namespace's block of {} bytes, or is below the \
            I/O size",
            namespace.block_bytes
        )));
    }
    let limit = session.controller().max_transfer_bytes;
    if limit.is_some_and(|limit| u64::from(spec.block_bytes) > limit) {
        return Err(unusable(format!(
            "an I/O of {} bytes is above the controller's limit (MDTS) of {}",
            spec.block_bytes,
            limit.unwrap_or(0)
        )));
    }
    let size_bytes = namespace.size_bytes();
    let span_bytes = spec.span_bytes.unwrap_or(size_bytes).min(size_bytes);
    let step_bytes = match spec.access {
        Access::Once { stride_bytes } => stride_bytes,
        Access::Random | Access::Sequential => u64::from(spec.block_bytes),
    };
    let places = span_bytes / step_bytes;
    if places == 0 {
        return Err(unusable("the span is smaller than one I/O".into()));
    }
    Ok(Geometry {
        blocks: spec.block_bytes / namespace.block_bytes,
        step_blocks: step_bytes / u64::from(namespace.block_bytes),
        places,
    })
}

#[cfg(test)]
mod tests {
    use super::part;

    #[test]
    fn queues_have_parts_of_their_own() {
        let parts = |places| [0, 1, 2].map(|number| part(places, 3, number));
        assert_eq!(parts(10), [0..3, 3..6, 6..9]);
        // Fewer places than queues.
        assert_eq!(parts(2), [0..1, 1..2, 0..1]);
    }
}
