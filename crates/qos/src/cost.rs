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

/// A frontend, and where its data lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Route(u8);

impl Route {
    /// To this node's devices.
    #[must_use]
    pub const fn local(frontend: Transport) -> Self {
        Self(frontend as u8)
    }

    /// To a cluster, over this node's links.
    #[must_use]
    pub const fn remote(frontend: Transport) -> Self {
        Self(frontend as u8 + FRONTENDS.len() as u8)
    }

    /// The frontend.
    #[must_use]
    pub const fn frontend(self) -> Transport {
        FRONTENDS[self.0 as usize % FRONTENDS.len()]
    }

    const fn is_remote(self) -> bool {
        self.0 as usize >= FRONTENDS.len()
    }
}

impl From<Transport> for Route {
    fn from(frontend: Transport) -> Self {
        Self::local(frontend)
    }
}

const ROUTES: usize = 2 * FRONTENDS.len();

/// A set of routes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Routes(u8);

impl Routes {
    /// Every local one, if nothing is known yet.
    pub const LOCAL: Self = Self(0b111);
    /// Every one.
    pub const ALL: Self = Self(0b11_1111);

    /// These routes, or every local one if there are none.
    #[must_use]
    pub fn of(routes: impl Iterator<Item = Route>) -> Self {
        match routes.fold(0, |all, route| all | 1 << route.0) {
            0 => Self::LOCAL,
            some => Self(some),
        }
    }

    fn have(self, route: Route) -> bool {
        self.0 & 1 << route.0 != 0
    }
}

impl Default for Routes {
    fn default() -> Self {
        Self::LOCAL
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
const KINDS: usize = ROUTES * OPERATIONS.len();
/// Processor time of librbd's and the messenger's threads: per I/O, and per byte.
const CLUSTER_CPU_NS: (f64, f64) = (60_000.0, 0.3);
/// Protocol bytes of an I/O to a cluster.
const CLUSTER_HEADER_BYTES: f64 = 400.0;

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
            let route = Route((kind / OPERATIONS.len()) as u8);
            let operation = OPERATIONS[kind % OPERATIONS.len()];
            let profile = &profiles[route.frontend() as usize][operation as usize];
            *vector = self::vector(route, operation, profile, row as u32 * STEP);
        }
        Self { rows, profiles }
    }

    /// The cost of an I/O.
    #[inline]
    #[must_use]
    pub fn of(&self, route: impl Into<Route>, operation: Operation, len: u32) -> ResourceVector {
        let route = route.into();
        match self.row(route, operation, len) {
            Some(cost) => *cost,
            None => {
                // Copied, so that the usual cost stays in registers.
                let odd = self.of_odd(route, operation, len);
                let [a, b, c, d, e, f, g, h] = odd.0;
                ResourceVector([a, b, c, d, e, f, g, h])
            }
        }
    }

    /// The same by one lookup; `None` for partial blocks and sizes above 128 KiB.
    #[inline(always)]
    #[must_use]
    pub fn row(&self, route: Route, operation: Operation, len: u32) -> Option<&ResourceVector> {
        // The rotation puts partial blocks beyond all rows.
        let row = len.rotate_right(STEP.trailing_zeros()) as usize;
        let kind = route.0 as usize * OPERATIONS.len() + operation as usize;
        (self.rows).get(row * KINDS + kind)
    }

    #[cold]
    #[inline(never)]
    fn of_odd(&self, route: Route, operation: Operation, len: u32) -> ResourceVector {
        let profile = &self.profiles[route.frontend() as usize][operation as usize];
        vector(route, operation, profile, len)
    }

    fn kinds(&self, size: u32) -> &[ResourceVector] {
        &self.rows[(size / STEP) as usize * KINDS..][..KINDS]
    }

    /// The most of each shared resource, per second, that any mix of local I/Os within `rate` can
    /// use.
    #[must_use]
    pub fn most_of(&self, rate: Rate) -> [f64; SHARED] {
        self.most_by(rate, Routes::LOCAL)
    }

    /// The same by these routes only.
    #[must_use]
    pub fn most_by(&self, rate: Rate, routes: Routes) -> [f64; SHARED] {
        let kinds = |size| {
            let kinds = self.kinds(size).iter().enumerate();
            kinds.filter(move |(kind, _)| routes.have(Route((kind / OPERATIONS.len()) as u8)))
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

fn vector(route: Route, operation: Operation, profile: &Profile, len: u32) -> ResourceVector {
    let amount = |value: f64| value.round().clamp(0.0, f64::from(PLENTY)) as i32;
    let mut cost = ResourceVector::ZERO;
    let (device, link) = match operation {
        Operation::Read => (Resource::DeviceRead, Resource::LinkOut),
        Operation::Write | Operation::Other => (Resource::DeviceWrite, Resource::LinkIn),
    };
    let mut cpu_ns = at(&profile.cpu_ns, len);
    let bytes = f64::from(len);
    // A VM uses no link to this node.
    if route.frontend() == Transport::Tcp {
        cost[link] = amount(bytes + f64::from(profile.header_bytes));
    }
    if route.is_remote() {
        cpu_ns += CLUSTER_CPU_NS.0 + CLUSTER_CPU_NS.1 * bytes;
        // Read data comes in from the cluster, and written data goes out to it.
        let (with_data, without) = match operation {
            Operation::Read => (Resource::LinkIn, Resource::LinkOut),
            Operation::Write | Operation::Other => (Resource::LinkOut, Resource::LinkIn),
        };
        cost[with_data] = amount(f64::from(cost[with_data]) + bytes + CLUSTER_HEADER_BYTES);
        cost[without] = amount(f64::from(cost[without]) + CLUSTER_HEADER_BYTES);
    } else {
        cost[device] = amount(at(&profile.device_ns, len));
    }
    cost[Resource::Cpu] = amount(cpu_ns);
    cost[Resource::Software] = PARTS;
    cost[Resource::Ops] = PARTS;
    cost[Resource::Bytes] = amount(bytes);
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

    #[test]
    fn a_cluster_is_charged_to_links_and_processor() {
        let table = table();
        let (len, header) = (16 << 10, CLUSTER_HEADER_BYTES as i32);
        for frontend in FRONTENDS {
            let tcp = i32::from(frontend == Transport::Tcp);
            let local = table.of(frontend, Operation::Read, len);
            let cost = table.of(Route::remote(frontend), Operation::Read, len);
            assert_eq!(cost[Resource::LinkIn], 16384 + header);
            assert_eq!(cost[Resource::LinkOut], tcp * (16384 + 64) + header);
            assert_eq!(cost[Resource::DeviceRead], 0);
            assert!(cost[Resource::Cpu] > local[Resource::Cpu] + 60_000);
            assert_eq!(cost[Resource::Bytes], 16384);
            let cost = table.of(Route::remote(frontend), Operation::Write, len);
            assert_eq!(cost[Resource::LinkOut], 16384 + header);
            assert_eq!(cost[Resource::LinkIn], tcp * (16384 + 96) + header);
        }
        let rate = Rate {
            iops: 1000,
            bytes: 4096 * 1000,
        };
        let vms = |route: fn(Transport) -> Route| Routes::of([route(Transport::Pcie)].into_iter());
        let most = |routes| table.most_by(rate, routes)[Resource::LinkIn as usize];
        assert_eq!(most(vms(Route::local)), 0.0);
        assert!(most(vms(Route::remote)) >= 4096.0 * 1000.0);
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
