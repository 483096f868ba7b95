//! All that is assumed of hardware, and of load.
//!
//! The node is the paper's: processors of a DPU at 2 GHz and 100 Gbit/s. It gives two costs: a 4 KiB write takes 1.16 us of a
//! processor, one of 128 KiB 6.18 us; a line through both is what is used, for reads as well. Its backend is not described;
//! one that answers within 100 us or so is assumed.

use crate::admission::Capacity;
use crate::budget::{Budget, Burst, Rate};
use crate::cost::{CostTable, Profile};

/// A node.
#[derive(Clone, Debug)]
pub struct Model {
    /// Reactors (the paper's control threads).
    pub reactors: usize,
    /// Bytes a second in either direction.
    pub link: f64,
    /// The processor's time for an I/O: fixed, and for a byte, ns.
    pub cpu_ns: (f64, f64),
    /// What an I/O really takes of the processor, of what it is said to.
    pub cpu_truth: f64,
    /// Backend: the least, and the mean of what is random above it, ns.
    pub backend_read_ns: (f64, f64),
    /// The same of writes.
    pub backend_write_ns: (f64, f64),
    /// Bytes of headers.
    pub header: u32,
    /// A reactor begins what waits as long as less than this stands before its processor, ns. (With wild and base it begins
    /// all that comes.)
    pub ahead_ns: u64,
    /// Whoever is within its base stands before the others at the processor. (With wild and base nobody does.)
    pub base_first: bool,
    /// Reads and writes of a lane wait apart.
    pub apart: bool,
    /// How long links keep I/Os waiting is known, as it is of processors.
    pub links_told: bool,
    /// Every I/O is charged as if it had 4 KiB: no cost vector, but a count.
    pub counted: bool,
    /// What a stolen I/O costs more, of its processor time: the paper's 35 % less throughput.
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
            backend_read_ns: (70_000.0, 15_000.0),
            backend_write_ns: (55_000.0, 10_000.0),
            header: 64,
            ahead_ns: 50_000,
            base_first: true,
            apart: false,
            links_told: true,
            counted: false,
            steal_cost: 0.54,
        }
    }
}

impl Model {
    /// What an I/O is said to cost. Devices are the backend's, and not limited here.
    #[must_use]
    pub fn costs(&self) -> CostTable {
        let data = Profile::line(self.cpu_ns, (0.0, 0.0), self.header);
        let other = Profile::line((self.cpu_ns.0, 0.0), (0.0, 0.0), self.header);
        CostTable::new([[data, data, other]; 3])
    }

    /// What there is of everything.
    #[must_use]
    pub fn capacity(&self) -> Capacity {
        Capacity {
            reactors: self.reactors as u32,
            device_reads: 1000.0,
            device_writes: 1000.0,
            link_in: self.link,
            link_out: self.link,
            operations: 2e6 * self.reactors as f64,
        }
    }
}

/// What a tenant asks for.
#[derive(Clone, Debug)]
pub struct Load {
    /// I/Os that it has under way at most.
    pub depth: u32,
    /// Sizes, one as likely as the other, bytes.
    pub sizes: Vec<u32>,
    /// Reads of a hundred.
    pub reads: u32,
    /// It asks for so many a second at most.
    pub rate: Option<f64>,
    /// From when on, ns.
    pub start_ns: u64,
    /// It asks in the first so many ns of each so many: `(on, of)`.
    pub pulse: Option<(u64, u64)>,
}

impl Load {
    /// 4 KiB at this depth, half reads, from the beginning.
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
    /// What it may.
    pub budget: Budget,
    /// What it does.
    pub load: Load,
    /// How its I/Os are spread over its queues, of a hundred each; each queue is a processor's of its machine.
    pub queues: Vec<f64>,
}

impl Guest {
    /// With one queue.
    #[must_use]
    pub fn new(budget: Budget, load: Load) -> Self {
        Self {
            budget,
            load,
            queues: vec![100.0],
        }
    }
}

/// A budget of so many IOPS and bytes a second, metered.
#[must_use]
pub fn metered(base: (u64, u64), burst: (u64, u64)) -> Budget {
    let rate = |(iops, bytes)| Rate { iops, bytes };
    Budget {
        base: rate(base),
        burst: rate(burst),
        how: Burst::Metered,
    }
}

/// The paper's spread of a machine's I/Os over its four processors, of a hundred.
pub const SKEWED: [f64; 4] = [80.51, 13.77, 3.27, 2.45];
