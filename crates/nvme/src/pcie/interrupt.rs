//! Interrupt Coalescing (Base 2.0, 5.27.1.6): gathers I/O completions by number and time.
//!
//! The caller raises interrupts and applies masks.

/// The host's settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coalescing {
    /// Completions per interrupt, at least 1.
    pub threshold: u32,
    /// Maximum delay; 0: none.
    pub time_ns: u64,
}

impl Coalescing {
    /// Decodes the feature: THR (0's based), TIME in 100 us.
    pub fn of(feature: u16) -> Self {
        Self {
            threshold: u32::from(feature as u8) + 1,
            time_ns: u64::from(feature >> 8) * 100_000,
        }
    }

    /// Whether interrupts may be delayed.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.threshold > 1 && self.time_ns > 0
    }
}

/// Completions gathered for a vector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gathered {
    count: u32,
    since_ns: u64,
}

impl Gathered {
    /// Counts a completion. Returns whether to raise the vector now.
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

    /// Checks the time limit. Returns whether to raise the vector now.
    pub fn tick(&mut self, coalescing: &Coalescing, now_ns: u64) -> bool {
        let due = self.count > 0 && self.is_due(coalescing, now_ns);
        if due {
            self.count = 0;
        }
        due
    }

    /// Time of the next interrupt at the latest.
    pub fn deadline_ns(&self, coalescing: &Coalescing) -> Option<u64> {
        (self.count > 0).then(|| self.since_ns.saturating_add(coalescing.time_ns))
    }

    fn is_due(&self, coalescing: &Coalescing, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.since_ns) >= coalescing.time_ns
    }
}
