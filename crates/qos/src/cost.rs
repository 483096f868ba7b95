//! What an I/O costs: of each resource, by operation, size and frontend.
//!
//! **Design.** A [`Profile`] is what was measured (or is said to have been): time at six sizes. A [`CostTable`] is made of
//! profiles once, a row for every 512 bytes up to 128 KiB, so that a cost is one look-up; longer I/Os go on along the last
//! two sizes. **Not here:** how far off it is today ([`crate::estimator`]).

use crate::budget::Rate;
use crate::resources::{PARTS, PLENTY, Resource, ResourceVector, SHARED};
use std::sync::Arc;

/// Where it came in.
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

/// All of them.
pub const FRONTENDS: [Transport; 3] = [Transport::Tcp, Transport::Pcie, Transport::Vhost];

/// Some of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Frontends(u8);

impl Frontends {
    /// Any: where nothing is known yet.
    pub const ALL: Self = Self(0b111);

    /// These; if there are none, any.
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

/// What it does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Operation {
    /// Reads.
    Read = 0,
    /// Writes, zeroes too.
    Write = 1,
    /// Flushes, deallocates: no bytes.
    Other = 2,
}

/// All of them.
pub const OPERATIONS: [Operation; 3] = [Operation::Read, Operation::Write, Operation::Other];

/// The sizes that are measured.
pub const SIZES: [u32; 6] = [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10];
/// A row for every so many bytes: no disk has smaller blocks.
const STEP: u32 = 512;
const ROWS: usize = 257;
/// Frontends and operations together.
const KINDS: usize = 9;

/// What was measured of one operation of one frontend.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Profile {
    /// Time of the reactor's processor at each of [`SIZES`], ns.
    pub cpu_ns: [f64; 6],
    /// Time of the devices at each of [`SIZES`], ns, if one came after the other.
    pub device_ns: [f64; 6],
    /// Bytes on the link besides the data. Machines' I/O uses no link.
    pub header_bytes: u32,
}

impl Profile {
    /// A straight line for each.
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

/// What is taken for costs where nothing was measured: of a plain server processor, and of so fast drives that
/// nobody is held back for them: what is taken for too dear would lie idle. By frontend and operation.
#[must_use]
pub fn default_profiles() -> [[Profile; 3]; 3] {
    let of = |fixed_ns: f64, header_bytes: u32| {
        [
            Profile::line((fixed_ns, 0.05), (150.0, 0.015), header_bytes),
            Profile::line((fixed_ns * 1.15, 0.05), (200.0, 0.03), header_bytes),
            Profile::line((fixed_ns, 0.0), (500.0, 0.0), header_bytes),
        ]
    };
    // A machine's data is not copied; over TCP each byte is.
    let mut profiles = [of(4000.0, 96), of(800.0, 0), of(900.0, 0)];
    for profile in &mut profiles[Transport::Tcp as usize] {
        for (cpu, size) in profile.cpu_ns.iter_mut().zip(SIZES) {
            *cpu += 0.15 * f64::from(size);
        }
    }
    profiles
}

/// At `len` bytes, of what was measured at [`SIZES`].
fn at(measured: &[f64; 6], len: u32) -> f64 {
    if len <= SIZES[0] {
        return measured[0];
    }
    let upper = SIZES.iter().position(|size| len <= *size).unwrap_or(5);
    let (low, high) = (f64::from(SIZES[upper - 1]), f64::from(SIZES[upper]));
    let part = (f64::from(len) - low) / (high - low);
    measured[upper - 1] + part * (measured[upper] - measured[upper - 1])
}

/// See the module's text. Copies share the rows.
#[derive(Clone, Debug)]
pub struct CostTable {
    /// By size, and in that by kind: so one comparison says whether there is such a row.
    rows: Arc<[ResourceVector; ROWS * KINDS]>,
    profiles: [[Profile; 3]; 3],
}

impl CostTable {
    /// Of profiles, by frontend and operation. Numbers that are none, or below 0, count as 0.
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

    /// What such an I/O costs.
    #[inline]
    #[must_use]
    pub fn of(&self, frontend: Transport, operation: Operation, len: u32) -> ResourceVector {
        match self.row(frontend, operation, len) {
            Some(cost) => *cost,
            None => {
                // A copy, so that the usual cost need not go through memory.
                let odd = self.of_odd(frontend, operation, len);
                let [a, b, c, d, e, f, g, h] = odd.0;
                ResourceVector([a, b, c, d, e, f, g, h])
            }
        }
    }

    /// The same where it can be looked up: a whole number of blocks, up to the longest row.
    #[inline(always)]
    #[must_use]
    pub fn row(
        &self,
        frontend: Transport,
        operation: Operation,
        len: u32,
    ) -> Option<&ResourceVector> {
        // Far beyond all rows if it is no whole number of blocks.
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

    /// Of one of [`SIZES`], or of nothing: what each kind costs.
    fn kinds(&self, size: u32) -> &[ResourceVector] {
        &self.rows[(size / STEP) as usize * KINDS..][..KINDS]
    }

    /// At most so much a second of each shared resource uses whoever stays within `rate`, whatever the sizes and kinds, mixed
    /// as they like: no I/O costs more than a line above all of them says, and of all such lines the lowest counts.
    #[must_use]
    pub fn most_of(&self, rate: Rate) -> [f64; SHARED] {
        self.most_by(rate, Frontends::ALL)
    }

    /// The same of who comes by these frontends alone.
    #[must_use]
    pub fn most_by(&self, rate: Rate, frontends: Frontends) -> [f64; SHARED] {
        let kinds = |size| {
            let kinds = self.kinds(size).iter().enumerate();
            kinds.filter(move |(kind, _)| frontends.have(FRONTENDS[kind / OPERATIONS.len()]))
        };
        let mut most = [0f64; SHARED];
        let mean = rate.bytes as f64 / (rate.iops as f64).max(1.0);
        for (resource, most) in most.iter_mut().enumerate() {
            // Between these costs are straight lines, and beyond the last too.
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
                // Some of this size, and as many longer ones as there are bytes.
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
    // A machine on this node needs no link.
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

    /// A table with round figures: 1 us and 0.05 ns a byte of the processor, reads as the paper's 4 KiB I/O.
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
        // Longer than the longest measured: along the same line.
        let cost = table.of(Transport::Pcie, Operation::Write, 1 << 20);
        assert_eq!(cost[Resource::Cpu], 1200 + 41943);
        // The longest there is doesn't overflow.
        let cost = table.of(Transport::Vhost, Operation::Write, u32::MAX);
        assert_eq!(cost[Resource::Bytes], PLENTY);
        assert_eq!(cost[Resource::LinkIn], 0);
        let cost = table.of(Transport::Tcp, Operation::Write, u32::MAX);
        assert_eq!(cost[Resource::LinkIn], PLENTY);
    }

    proptest! {
        #![proptest_config(ProptestConfig { rng_seed: RngSeed::Fixed(11), ..ProptestConfig::default() })]

        /// Nobody within a rate costs more than is set aside for it: costs that grow the faster the longer, those that
        /// grow slower, and mixed ones.
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
            // Less than one for each I/O is rounding.
            let rounding = rate.iops as f64;
            for (most, sum) in table.most_of(rate).into_iter().zip(sum) {
                prop_assert!(sum <= most + rounding, "{sum} of {most}");
            }
        }
    }
}
