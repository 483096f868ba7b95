//! When a vector is raised: Interrupt Coalescing (Base 2.0, 5.27.1.6).
//!
//! Purpose: completions of I/O queues may be gathered before one interrupt tells of them, by number and by
//! time. Does NOT raise anything, and does NOT know masks.

/// What a host asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coalescing {
    /// Completions that are gathered before an interrupt, at least 1.
    pub threshold: u32,
    /// How long the first of them may wait; 0: no completion waits.
    pub time_ns: u64,
}

impl Coalescing {
    /// The feature's value: THR (0's based) and TIME in 100 us.
    pub fn of(feature: u16) -> Self {
        Self {
            threshold: u32::from(feature as u8) + 1,
            time_ns: u64::from(feature >> 8) * 100_000,
        }
    }

    /// Whether it holds anything back.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.threshold > 1 && self.time_ns > 0
    }
}

/// What is gathered for one vector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gathered {
    count: u32,
    since_ns: u64,
}

impl Gathered {
    /// A completion was posted. True: the vector is to be raised now.
    #[inline]
    pub fn posted(&mut self, coalescing: &Coalescing, now_ns: u64) -> bool {
        if self.count == 0 {
            self.since_ns = now_ns;
        }
        self.count += 1;
        if self.count < coalescing.threshold && !self.is_due(coalescing, now_ns) {
            return false;
        }
        self.count = 0;
        true
    }

    /// The time has come for what was held back. True: the vector is to be raised now.
    pub fn tick(&mut self, coalescing: &Coalescing, now_ns: u64) -> bool {
        let due = self.count > 0 && self.is_due(coalescing, now_ns);
        if due {
            self.count = 0;
        }
        due
    }

    /// When that is, at the latest.
    pub fn deadline_ns(&self, coalescing: &Coalescing) -> Option<u64> {
        (self.count > 0).then(|| self.since_ns.saturating_add(coalescing.time_ns))
    }

    fn is_due(&self, coalescing: &Coalescing, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.since_ns) >= coalescing.time_ns
    }
}
