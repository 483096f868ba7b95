//! One tenant's latencies and counts.

/// Buckets per octave.
const SUB: usize = 32;
const OCTAVES: usize = 40;

/// A latency histogram, accurate to 3 %.
#[derive(Clone, Debug)]
pub struct Latency {
    buckets: Vec<u32>,
    count: u64,
    sum: u128,
}

impl Default for Latency {
    fn default() -> Self {
        Self {
            buckets: vec![0; SUB * OCTAVES],
            count: 0,
            sum: 0,
        }
    }
}

impl Latency {
    /// Adds a latency.
    pub fn add(&mut self, ns: u64) {
        self.count += 1;
        self.sum += u128::from(ns);
        let at = Self::bucket(ns.max(1));
        self.buckets[at] += 1;
    }

    /// Adds another histogram.
    pub fn add_all(&mut self, other: &Self) {
        self.count += other.count;
        self.sum += other.sum;
        for (own, other) in self.buckets.iter_mut().zip(&other.buckets) {
            *own += other;
        }
    }

    fn bucket(ns: u64) -> usize {
        let octave = ns.ilog2() as usize;
        let within = if octave >= 5 {
            (ns >> (octave - 5)) as usize - SUB
        } else {
            ((ns as usize) << (5 - octave)) - SUB
        };
        (octave * SUB + within).min(SUB * OCTAVES - 1)
    }

    /// The number of latencies.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The mean in us; 0 if empty.
    #[must_use]
    pub fn mean_us(&self) -> f64 {
        self.sum as f64 / self.count.max(1) as f64 / 1e3
    }

    /// A percentile in us.
    #[must_use]
    pub fn percentile_us(&self, percent: f64) -> f64 {
        let wanted = (self.count as f64 * percent / 100.0).ceil() as u64;
        let mut seen = 0;
        for (at, count) in self.buckets.iter().enumerate() {
            seen += u64::from(*count);
            if seen >= wanted.max(1) {
                let low = 2f64.powi((at / SUB) as i32) * (1.0 + (at % SUB) as f64 / SUB as f64);
                return low / 1e3;
            }
        }
        0.0
    }
}

/// A tenant's results after the warm-up.
#[derive(Clone, Default, Debug)]
pub struct Had {
    /// Reads and writes together.
    pub latency: Latency,
    /// Bytes.
    pub bytes: u64,
    /// I/Os that waited for their budget.
    pub throttled: u64,
    /// I/Os that ended in each window.
    pub by_window: Vec<u32>,
}

#[cfg(test)]
mod tests {
    use super::Latency;

    #[test]
    fn percentiles_are_near() {
        let mut latency = Latency::default();
        for us in 1..=1000u64 {
            latency.add(us * 1000);
        }
        assert!((latency.mean_us() - 500.5).abs() < 0.1);
        for percent in [50.0, 99.0, 99.9] {
            let us = latency.percentile_us(percent);
            let truth = percent * 10.0;
            assert!((us / truth - 1.0).abs() < 0.04, "{percent}: {us}");
        }
    }
}
