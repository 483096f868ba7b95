//! The cost of an I/O, by operation, size and frontend.
//!
//! A [`Profile`] holds calibrated costs. A [`CostTable`] has a row for every 512 bytes up to 128
//! KiB; costs of larger I/Os are extrapolated. The [`crate::estimator`] corrects costs at run time.

use crate::budget::Rate;
use crate::resources::{PARTS, PLENTY, Resource, ResourceVector, SHARED};
use std::sync::Arc;

/// Where an I/O came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Transport {
    /// NVMe/TCP.
    Tcp = 0,
    /// NVMe over vfio-user.
    Pcie = 1,
    /// virtio-blk over vhost-user.
    Vhost = 2,
}

/// All frontends.
pub const FRONTENDS: [Transport; 3] = [Transport::Tcp, Transport::Pcie, Transport::Vhost];

/// A set of frontends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Frontends(u8);

impl Frontends {
    /// All frontends, if nothing is known yet.
    pub const ALL: Self = Self(0b111);

    /// These frontends, or all if there are none.
    #[must_use]
    pub fn of(frontends: impl Iterator<Item = Transport>) -> Self {
        match frontends.fold(0, |all, frontend| all | 1 << frontend as u8) {
            0 => Self::ALL,
            some => Self(some),
        }
    }

    fn have(self, frontend: Transport) -> bool {
        self.0 & 1 << frontend as u8 != 0
    }
}

impl Default for Frontends {
    fn default() -> Self {
        Self::ALL
    }
}

/// A kind of operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Operation {
    /// Reads.
    Read = 0,
    /// Writes and zeroing.
    Write = 1,
    /// Flushes and deallocations: no data.
    Other = 2,
}

/// All kinds of operations.
pub const OPERATIONS: [Operation; 3] = [Operation::Read, Operation::Write, Operation::Other];

/// Calibrated sizes.
pub const SIZES: [u32; 6] = [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10];
/// Bytes per row: no disk has smaller blocks.
const STEP: u32 = 512;
const ROWS: usize = 257;
const KINDS: usize = 9;

/// Calibrated costs of one kind of I/O.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Profile {
    /// Reactor time at each of [`SIZES`].
    pub cpu_ns: [f64; 6],
    /// Device time per I/O at each of [`SIZES`], as if the device did one at a time.
    pub device_ns: [f64; 6],
    /// Protocol bytes on the link; 0 for a VM.
    pub header_bytes: u32,
}

impl Profile {
    /// Costs with a fixed part and a part per byte.
    #[must_use]
    pub fn line(cpu: (f64, f64), device: (f64, f64), header_bytes: u32) -> Self {
        let at = |(fixed, byte): (f64, f64)| SIZES.map(|size| fixed + byte * f64::from(size));
        Self {
            cpu_ns: at(cpu),
            device_ns: at(device),
            header_bytes,
        }
    }
}

/// Costs without a calibration: a plain server processor, and drives so fast that they limit no
/// tenant. Estimates that are too high would leave devices idle.
#[must_use]
pub fn default_profiles() -> [[Profile; 3]; 3] {
    let of = |fixed_ns: f64, header_bytes: u32| {
        [
            Profile::line((fixed_ns, 0.05), (150.0, 0.015), header_bytes),
            Profile::line((fixed_ns * 1.15, 0.05), (200.0, 0.03), header_bytes),
            Profile::line((fixed_ns, 0.0), (500.0, 0.0), header_bytes),
        ]
    };
    // Only TCP copies the data.
    let mut profiles = [of(4000.0, 96), of(800.0, 0), of(900.0, 0)];
    for profile in &mut profiles[Transport::Tcp as usize] {
        for (cpu, size) in profile.cpu_ns.iter_mut().zip(SIZES) {
            *cpu += 0.15 * f64::from(size);
        }
    }
    profiles
}

/// Interpolates the values at [`SIZES`].
fn at(measured: &[f64; 6], len: u32) -> f64 {
    if len <= SIZES[0] {
        return measured[0];
    }
    let upper = SIZES.iter().position(|size| len <= *size).unwrap_or(5);
    let (low, high) = (f64::from(SIZES[upper - 1]), f64::from(SIZES[upper]));
    let part = (f64::from(len) - low) / (high - low);
    measured[upper - 1] + part * (measured[upper] - measured[upper - 1])
}

/// All costs, calculated once. Clones share the rows.
#[derive(Clone, Debug)]
pub struct CostTable {
    /// By size, then kind: one bounds check covers both.
    rows: Arc<[ResourceVector; ROWS * KINDS]>,
    profiles: [[Profile; 3]; 3],
}

impl CostTable {
    /// Builds the table; `profiles` is by frontend, then operation. NaN and negative numbers count
    /// as 0.
    #[must_use]
    pub fn new(profiles: [[Profile; 3]; 3]) -> Self {
        let mut rows = Arc::new([ResourceVector::ZERO; ROWS * KINDS]);
        for (at, vector) in Arc::make_mut(&mut rows).iter_mut().enumerate() {
            let (row, kind) = (at / KINDS, at % KINDS);
            *vector = self::vector(
                FRONTENDS[kind / 3],
                OPERATIONS[kind % 3],
                &profiles[kind / 3][kind % 3],
                row as u32 * STEP,
            );
        }
        Self { rows, profiles }
    }

    /// The cost of an I/O.
    #[inline]
    #[must_use]
    pub fn of(&self, frontend: Transport, operation: Operation, len: u32) -> ResourceVector {
        match self.row(frontend, operation, len) {
            Some(cost) => *cost,
            None => {
                // Copied, so that the usual cost stays in registers.
                let odd = self.of_odd(frontend, operation, len);
                let [a, b, c, d, e, f, g, h] = odd.0;
                ResourceVector([a, b, c, d, e, f, g, h])
            }
        }
    }

    /// The same by one lookup; `None` for partial blocks and sizes above 128 KiB.
    #[inline(always)]
    #[must_use]
    pub fn row(
        &self,
        frontend: Transport,
        operation: Operation,
        len: u32,
    ) -> Option<&ResourceVector> {
        // The rotation puts partial blocks beyond all rows.
        let row = len.rotate_right(STEP.trailing_zeros()) as usize;
        let kind = frontend as usize * OPERATIONS.len() + operation as usize;
        (self.rows).get(row * KINDS + kind)
    }

    #[cold]
    #[inline(never)]
    fn of_odd(&self, frontend: Transport, operation: Operation, len: u32) -> ResourceVector {
        let profile = &self.profiles[frontend as usize][operation as usize];
        vector(frontend, operation, profile, len)
    }

    fn kinds(&self, size: u32) -> &[ResourceVector] {
        &self.rows[(size / STEP) as usize * KINDS..][..KINDS]
    }

    /// The most of each shared resource, per second, that any mix of I/Os within `rate` can use.
    #[must_use]
    pub fn most_of(&self, rate: Rate) -> [f64; SHARED] {
        self.most_by(rate, Frontends::ALL)
    }

    /// The same through these frontends only.
    #[must_use]
    pub fn most_by(&self, rate: Rate, frontends: Frontends) -> [f64; SHARED] {
        let kinds = |size| {
            let kinds = self.kinds(size).iter().enumerate();
            kinds.filter(move |(kind, _)| frontends.have(FRONTENDS[kind / OPERATIONS.len()]))
        };
        let mut most = [0f64; SHARED];
        let mean = rate.bytes as f64 / (rate.iops as f64).max(1.0);
        for (resource, most) in most.iter_mut().enumerate() {
            let points = [
                0, SIZES[0], SIZES[1], SIZES[2], SIZES[3], SIZES[4], SIZES[5],
            ]
            .map(|size| {
                let costs = kinds(size).map(|(_, cost)| cost.0[resource]);
                (f64::from(size), f64::from(costs.max().unwrap_or(0)))
            });
            let last = kinds(SIZES[4]).zip(kinds(SIZES[5]));
            let slopes = last.map(|((_, shorter), (_, longer))| {
                f64::from(longer.0[resource] - shorter.0[resource]) / f64::from(SIZES[5] - SIZES[4])
            });
            let slope = slopes.fold(0.0, f64::max);
            let mut each = 0f64;
            for (size, cost) in points.iter().filter(|(size, _)| *size <= mean) {
                // The worst mix: some of this size, and larger ones with the remaining bytes.
                each = each.max(cost + (mean - size) * slope);
                for (larger, more) in points.iter().filter(|(larger, _)| *larger > mean) {
                    let part = (mean - size) / (larger - size);
                    each = each.max(cost + part * (more - cost));
                }
            }
            *most = each * rate.iops as f64;
        }
        most
    }
}

fn vector(
    frontend: Transport,
    operation: Operation,
    profile: &Profile,
    len: u32,
) -> ResourceVector {
    let amount = |value: f64| value.round().clamp(0.0, f64::from(PLENTY)) as i32;
    let mut cost = ResourceVector::ZERO;
    let (device, link) = match operation {
        Operation::Read => (Resource::DeviceRead, Resource::LinkOut),
        Operation::Write | Operation::Other => (Resource::DeviceWrite, Resource::LinkIn),
    };
    cost[Resource::Cpu] = amount(at(&profile.cpu_ns, len));
    cost[device] = amount(at(&profile.device_ns, len));
    // A VM uses no link.
    if frontend == Transport::Tcp {
        cost[link] = amount(f64::from(len) + f64::from(profile.header_bytes));
    }
    cost[Resource::Software] = PARTS;
    cost[Resource::Ops] = PARTS;
    cost[Resource::Bytes] = amount(f64::from(len));
    cost
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;
    use proptest::test_runner::RngSeed;

    /// Round figures, and the paper's 4 KiB read.
    pub(crate) fn table() -> CostTable {
        let read = Profile::line((1000.0, 0.05), (500.0, 0.1), 64);
        let write = Profile::line((1200.0, 0.04), (900.0, 0.15), 96);
        let other = Profile::line((800.0, 0.0), (2000.0, 0.0), 64);
        CostTable::new([[read, write, other]; 3])
    }

    #[test]
    fn costs_follow_what_was_measured() {
        let table = table();
        let cost = table.of(Transport::Tcp, Operation::Read, 16 << 10);
        assert_eq!(cost[Resource::Cpu], 1819);
        assert_eq!(cost[Resource::DeviceRead], 2138);
        assert_eq!(cost[Resource::DeviceWrite], 0);
        assert_eq!(cost[Resource::LinkOut], 16448);
        assert_eq!(cost[Resource::LinkIn], 0);
        assert_eq!(cost[Resource::Ops], PARTS);
        assert_eq!(cost[Resource::Bytes], 16384);
        let cost = table.of(Transport::Pcie, Operation::Write, 1 << 20);
        assert_eq!(cost[Resource::Cpu], 1200 + 41943);
        let cost = table.of(Transport::Vhost, Operation::Write, u32::MAX);
        assert_eq!(cost[Resource::Bytes], PLENTY);
        assert_eq!(cost[Resource::LinkIn], 0);
        let cost = table.of(Transport::Tcp, Operation::Write, u32::MAX);
        assert_eq!(cost[Resource::LinkIn], PLENTY);
    }

    proptest! {
        #![proptest_config(ProptestConfig { rng_seed: RngSeed::Fixed(11), ..ProptestConfig::default() })]

        #[test]
        fn a_rate_is_never_more_than_its_most(
            sizes in proptest::collection::vec((0u32..2_000_000, 0usize..3, 0usize..3), 1..60),
            costs in proptest::array::uniform6(0f64..50_000.0),
        ) {
            let mut profiles = [[Profile::line((1000.0, 0.05), (500.0, 0.1), 64); 3]; 3];
            profiles[0][0].cpu_ns = [1e3, 1e3, 2e3, 3e3, 10e3, 90e3];
            profiles[1][0].cpu_ns = [9e3, 9.5e3, 10e3, 10e3, 10e3, 10e3];
            profiles[2][0].cpu_ns = costs;
            profiles[1][1].device_ns = costs;
            let table = CostTable::new(profiles);
            let mut rate = Rate { iops: 0, bytes: 0 };
            let mut sum = [0f64; crate::resources::SHARED];
            for (len, operation, frontend) in sizes {
                rate.iops += 1;
                rate.bytes += u64::from(len);
                let cost = table.of(FRONTENDS[frontend], OPERATIONS[operation], len);
                for (sum, cost) in sum.iter_mut().zip(&cost.0) {
                    *sum += f64::from(*cost);
                }
            }
            // Rounding: less than one per I/O.
            let rounding = rate.iops as f64;
            for (most, sum) in table.most_of(rate).into_iter().zip(sum) {
                prop_assert!(sum <= most + rounding, "{sum} of {most}");
            }
        }
    }
}
