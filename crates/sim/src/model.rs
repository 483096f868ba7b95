//! The assumptions about hardware and load.
//!
//! The node is the paper's: a DPU with 2 GHz processors and 100 Gbit/s. The paper has two costs:
//! 1.16 us of a processor for a 4 KiB write, 6.18 us for 128 KiB. The model takes the line through
//! both, for reads too, and assumes a backend latency of about 100 us.

use forebay_qos::admission::Capacity;
use forebay_qos::budget::{Budget, Burst, Rate};
use forebay_qos::cost::{CostTable, Profile};

/// A simulated node.
#[derive(Clone, Debug)]
pub struct Model {
    /// Reactors (the paper's control threads).
    pub reactors: usize,
    /// Bytes per second in each direction.
    pub link: f64,
    /// Processor time of an I/O: fixed, and per byte, ns.
    pub cpu_ns: (f64, f64),
    /// Real processor time, relative to the calibrated one.
    pub cpu_truth: f64,
    /// A local device before the backend with one I/O at a time: fixed, and per byte, ns; zeros for
    /// none.
    pub device_ns: (f64, f64),
    /// Real device time, relative to the calibrated one.
    pub device_truth: f64,
    /// Backend reads: minimum, and mean of the random part, ns.
    pub backend_read_ns: (f64, f64),
    /// Backend writes: minimum, and mean of the random part, ns.
    pub backend_write_ns: (f64, f64),
    /// Bytes of headers.
    pub header: u32,
    /// A reactor begins I/Os while its processor's queue is shorter, ns: a turn of the engine.
    /// (With base it begins all.)
    pub ahead_ns: u64,
    /// The fixed time of a reactor's turn, ns. A turn takes all new I/Os, begins a quantum above
    /// base, and executes it, as in the engine. 0: no turns; it polls between any two I/Os.
    pub turn_ns: u64,
    /// In each hundred windows, other work blocks a reactor for this many.
    pub held_windows: u64,
    /// I/Os within their base go first at the processor. (Not with wild and base.)
    pub base_first: bool,
    /// Lanes begin in `wild`'s rounds under any policy.
    pub rounds: bool,
    /// Separate queues for a lane's reads and writes.
    pub apart: bool,
    /// Whether queueing times of links are known. The engine does not know them.
    pub links_known: bool,
    /// Every I/O is charged as 4 KiB: a count, not a cost vector.
    pub counted: bool,
    /// Extra processor time if other reactors may steal I/Os from the ring, as a factor: the
    /// paper's 35 % less throughput.
    pub steal_cost: f64,
}

impl Default for Model {
    fn default() -> Self {
        // (6.18 - 1.16) us over 124 KiB.
        let byte = 5020.0 / f64::from((128 - 4) << 10);
        Self {
            reactors: 1,
            link: 12.5e9,
            cpu_ns: (1160.0 - 4096.0 * byte, byte),
            cpu_truth: 1.0,
            device_ns: (0.0, 0.0),
            device_truth: 1.0,
            backend_read_ns: (70_000.0, 15_000.0),
            backend_write_ns: (55_000.0, 10_000.0),
            header: 64,
            ahead_ns: 12_000,
            turn_ns: 0,
            held_windows: 0,
            base_first: true,
            rounds: false,
            apart: false,
            links_known: false,
            counted: false,
            steal_cost: 0.54,
        }
    }
}

impl Model {
    /// The parameters as text.
    #[must_use]
    pub fn described(&self) -> Vec<String> {
        let ns = |(first, second): (f64, f64)| format!("{:.0} + {:.0} ns", first, second);
        vec![
            format!("reactors {}", self.reactors),
            format!("link {} GB/s", self.link / 1e9),
            format!(
                "cpu {:.0} ns + {:.4} ns a byte",
                self.cpu_ns.0, self.cpu_ns.1
            ),
            format!("truth of that {}", self.cpu_truth),
            format!(
                "device {} ns + {} ns a byte",
                self.device_ns.0, self.device_ns.1
            ),
            format!("truth of that {}", self.device_truth),
            format!("backend reads {}", ns(self.backend_read_ns)),
            format!("writes {}", ns(self.backend_write_ns)),
            format!("header {} bytes", self.header),
            match self.ahead_ns {
                u64::MAX => "all begins at once".into(),
                ahead_ns => format!("begun ahead {ahead_ns} ns"),
            },
            format!("a turn {} ns", self.turn_ns),
            format!("held up windows {}", self.held_windows),
            format!("base first {}", self.base_first),
            format!("rounds {}", self.rounds),
            format!("reads and writes apart {}", self.apart),
            format!("links told {}", self.links_known),
            format!("counted, not weighed {}", self.counted),
            format!("stealing costs {}", self.steal_cost),
        ]
    }

    /// Calibrated costs.
    #[must_use]
    pub fn costs(&self) -> CostTable {
        let data = Profile::line(self.cpu_ns, self.device_ns, self.header);
        let other = Profile::line((self.cpu_ns.0, 0.0), (0.0, 0.0), self.header);
        CostTable::new([[data, data, other]; 3])
    }

    /// The node's capacity. Reads and writes both have the whole device; only the correction
    /// accounts for their contention.
    #[must_use]
    pub fn capacity(&self) -> Capacity {
        Capacity {
            reactors: self.reactors as u32,
            device_reads: 1.0,
            device_writes: 1.0,
            link_in: self.link,
            link_out: self.link,
            operations: 2e6 * self.reactors as f64,
        }
    }
}

/// A tenant's load.
#[derive(Clone, Debug)]
pub struct Load {
    /// Most I/Os in flight.
    pub depth: u32,
    /// I/O sizes in bytes, equally likely.
    pub sizes: Vec<u32>,
    /// Percentage of reads.
    pub reads: u32,
    /// Limit of I/Os per second.
    pub rate: Option<f64>,
    /// Start, ns.
    pub start_ns: u64,
    /// It asks only in the first `on` ns of each `of` ns: `(on, of)`.
    pub pulse: Option<(u64, u64)>,
}

impl Load {
    /// 4 KiB at this depth, half of it reads.
    #[must_use]
    pub fn small(depth: u32) -> Self {
        Self {
            depth,
            sizes: vec![4 << 10],
            reads: 50,
            rate: None,
            start_ns: 0,
            pulse: None,
        }
    }

    /// The paper's load of many I/Os: 4 to 16 KiB.
    #[must_use]
    pub fn iops(depth: u32) -> Self {
        Self {
            sizes: vec![4 << 10, 8 << 10, 16 << 10],
            ..Self::small(depth)
        }
    }

    /// The paper's load of many bytes: 4 to 128 KiB.
    #[must_use]
    pub fn bytes(depth: u32) -> Self {
        Self {
            sizes: vec![4 << 10, 16 << 10, 64 << 10, 128 << 10],
            ..Self::small(depth)
        }
    }
}

/// A tenant of a simulation.
#[derive(Clone, Debug)]
pub struct Guest {
    /// The budget.
    pub budget: Budget,
    /// The load.
    pub load: Load,
    /// Percentage of I/Os on each queue; each belongs to a processor of its VM.
    pub queues: Vec<f64>,
    /// Reactors of queues; the others get them in turn.
    pub homes: Vec<usize>,
    /// Time on one queue before all I/Os move to the next, ns.
    pub moves_ns: Option<u64>,
}

impl Guest {
    /// A tenant with one queue.
    #[must_use]
    pub fn new(budget: Budget, load: Load) -> Self {
        Self {
            budget,
            load,
            queues: vec![100.0],
            homes: Vec::new(),
            moves_ns: None,
        }
    }
}

/// A metered budget in IOPS and bytes per second.
#[must_use]
pub fn metered(base: (u64, u64), burst: (u64, u64)) -> Budget {
    let rate = |(iops, bytes)| Rate { iops, bytes };
    Budget {
        base: rate(base),
        burst: rate(burst),
        how: Burst::Metered,
    }
}

/// The paper's spread of a VM's I/Os over its processors, in percent.
pub const SKEWED: [f64; 4] = [80.51, 13.77, 3.27, 2.45];
