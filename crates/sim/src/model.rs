//! All that is assumed of hardware, and of load.
//!
//! The node is the paper's: processors of a DPU at 2 GHz and 100 Gbit/s. It gives two costs: a 4 KiB write takes 1.16 us of a
//! processor, one of 128 KiB 6.18 us; a line through both is what is used, for reads as well. Its backend is not described;
//! one that answers within 100 us or so is assumed.

use forebay_qos::admission::Capacity;
use forebay_qos::budget::{Budget, Burst, Rate};
use forebay_qos::cost::{CostTable, Profile};

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
    /// A device of our own before that, which takes one I/O after the other: fixed, and for a byte, ns; nothing: none.
    pub device_ns: (f64, f64),
    /// What an I/O really takes of it, of what it is said to.
    pub device_truth: f64,
    /// Backend: the least, and the mean of what is random above it, ns.
    pub backend_read_ns: (f64, f64),
    /// The same of writes.
    pub backend_write_ns: (f64, f64),
    /// Bytes of headers.
    pub header: u32,
    /// A reactor begins what waits as long as less than this stands before its processor, ns: as much as a turn of
    /// the engine. (With base it begins all that comes.)
    pub ahead_ns: u64,
    /// What a turn of a reactor takes besides its I/Os, ns: it looks at all that came since, begins so much
    /// of those above their base, and carries it out before it looks again, as the engine
    /// does. Nothing: it looks between any two I/Os, and begins so much ahead.
    pub turn_ns: u64,
    /// In each hundred windows a reactor is held up for so many, by something that is no I/O.
    pub held_windows: u64,
    /// Whoever is within its base stands before the others at the processor. (With wild and base nobody does.)
    pub base_first: bool,
    /// Lanes begin in `wild`'s rounds whatever the policy is, each as far as its budget lets it.
    pub rounds: bool,
    /// Reads and writes of a lane wait apart.
    pub apart: bool,
    /// How long links keep I/Os waiting is known, as it is of processors. The engine does not know it.
    pub links_known: bool,
    /// Every I/O is charged as if it had 4 KiB: no cost vector, but a count.
    pub counted: bool,
    /// What an I/O costs more, of its processor time, where it goes through a ring from which others may steal it: the
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
    /// All of it, for people.
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

    /// What an I/O is said to cost.
    #[must_use]
    pub fn costs(&self) -> CostTable {
        let data = Profile::line(self.cpu_ns, self.device_ns, self.header);
        let other = Profile::line((self.cpu_ns.0, 0.0), (0.0, 0.0), self.header);
        CostTable::new([[data, data, other]; 3])
    }

    /// What there is of everything. Who reads leaves writes what is left of the device only by its correction.
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
    /// How its I/Os are spread over its queues, of a hundred each. Each queue belongs to a processor of its VM.
    pub queues: Vec<f64>,
    /// The reactor of each of them; of those that are not named, in turn.
    pub homes: Vec<usize>,
    /// All of them go to one queue for so long, then to the next.
    pub moves_ns: Option<u64>,
}

impl Guest {
    /// With one queue.
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

/// The paper's spread of a VM's I/Os over its four processors, of a hundred.
pub const SKEWED: [f64; 4] = [80.51, 13.77, 3.27, 2.45];
