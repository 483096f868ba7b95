//! Budgets, scheduling and costs, as the API shows them. Rates are per second, and say so. Limits
//! that do not exist are absent. `forebay_qos` defines valid budgets.

use std::collections::BTreeMap;

use forebay_qos::budget::{LEAST, MOST, MOST_CREDIT_SECONDS};
use forebay_qos::stated_budget::Stated;
pub use forebay_qos::stated_budget::{LARGE_BYTES, SMALL_BYTES};
use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use super::ExportFrontend;

/// Operations and bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rate {
    /// Operations per second.
    pub iops: u64,
    /// Bytes per second.
    pub bytes_s: u64,
}

/// A limit of operations and bytes per second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    /// Operations per second; null: no limit.
    pub iops: Option<u64>,
    /// Bytes per second; null: no limit.
    pub bytes_s: Option<u64>,
}

/// The budget of a tenant or a volume.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Budget {
    /// Guaranteed at any time; for a volume, out of its tenant's. Null: none.
    pub base: Option<Rate>,
    /// The limit, out of capacity that others leave.
    pub burst: Limit,
    /// Unused base is saved, up to this many seconds of it, and pays for use above the base.
    /// Absent: use above the base is counted (metered).
    pub credit_s: Option<u32>,
    /// The parts that were stated; the others follow from them.
    #[serde(default)]
    pub stated: BudgetParts,
}

/// Absent: unchanged. Null: no longer stated.
pub type Change<T> = Option<Option<T>>;

/// Operations, bytes, or both. An absent part stays as stated. A null part is dropped, and follows
/// from the other parts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, expecting = "`iops`, `bytes_s`, or both")]
pub struct RateParts {
    /// Operations per second: 10 to 20,000,000.
    #[serde(default)]
    #[serde(deserialize_with = "iops", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub iops: Change<u64>,
    /// Bytes per second: 65,536 to 100,000,000,000.
    #[serde(default)]
    #[serde(deserialize_with = "bytes_s", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub bytes_s: Change<u64>,
}

/// Parts of a budget: all in a `PUT`, the changed ones in a `PATCH`, each in operations, bytes, or
/// both. Derived values change with them. A budget without parts is removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BudgetParts {
    /// Guaranteed at any time; if not stated, next to nothing, so that there is only a limit. A
    /// base of operations alone has 4 KiB for each; a base of bytes alone has an operation for
    /// every 128 KiB. Null drops it and the credit.
    #[serde(default)]
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<RateParts>)]
    pub base: Change<RateParts>,
    /// The limit; a part not stated here equals the base, and a part in neither has no limit. Null
    /// drops both parts.
    #[serde(default)]
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<RateParts>)]
    pub burst: Change<RateParts>,
    /// Seconds of unused base that can be saved for bursts, 1 to 604,800. Null, or not stated:
    /// metered. For tenants only.
    #[serde(default)]
    #[serde(deserialize_with = "credit_s", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>)]
    pub credit_s: Change<u32>,
}

/// A change of a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BudgetChange {
    /// Replaces all parts.
    Put(BudgetParts),
    /// Changes the named parts.
    Patch(BudgetParts),
    /// Removes the budget.
    Delete,
}

impl BudgetChange {
    /// Whether it states a credit.
    #[must_use]
    pub fn has_credit(&self) -> bool {
        match self {
            Self::Put(parts) | Self::Patch(parts) => parts.credit_s.flatten().is_some(),
            Self::Delete => false,
        }
    }

    /// Applies the change to the stated parts. `None`: no budget remains.
    #[must_use]
    pub fn apply(&self, before: Stated) -> Option<Stated> {
        match self {
            Self::Delete => None,
            Self::Put(parts) => Some(parts.over(Stated::default())),
            Self::Patch(parts) => {
                let stated = parts.over(before);
                let drops_all = stated == Stated::default() && *parts != BudgetParts::default();
                (!drops_all).then_some(stated)
            }
        }
    }
}

impl BudgetParts {
    fn over(&self, mut stated: Stated) -> Stated {
        let dropped = RateParts {
            iops: Some(None),
            bytes_s: Some(None),
        };
        if let Some(base) = self.base {
            let base = base.unwrap_or(dropped);
            stated.base_iops = base.iops.unwrap_or(stated.base_iops);
            stated.base_bytes = base.bytes_s.unwrap_or(stated.base_bytes);
            if !stated.has_base() {
                stated.credit_seconds = None;
            }
        }
        if let Some(burst) = self.burst {
            let burst = burst.unwrap_or(dropped);
            stated.burst_iops = burst.iops.unwrap_or(stated.burst_iops);
            stated.burst_bytes = burst.bytes_s.unwrap_or(stated.burst_bytes);
        }
        stated.credit_seconds = self.credit_s.unwrap_or(stated.credit_seconds);
        stated
    }
}

/// Reads a number. Errors name the valid range, but the budget itself checks it.
#[derive(Clone, Copy)]
struct Whole {
    least: u64,
    most: u64,
}

impl Visitor<'_> for Whole {
    type Value = Option<u64>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a whole number, {} to {}", self.least, self.most)
    }

    fn visit_unit<E: Error>(self) -> Result<Option<u64>, E> {
        Ok(None)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Option<u64>, E> {
        Ok(Some(value))
    }
}

fn whole<'de, T: TryFrom<u64>, D: Deserializer<'de>>(
    from: D,
    least: u64,
    most: u64,
) -> Result<Change<T>, D::Error> {
    let fits = Whole { least, most };
    // A number that does not fit its type is reported as written.
    let refused = |value| D::Error::invalid_value(Unexpected::Unsigned(value), &fits);
    let number = |value| T::try_from(value).map_err(|_| refused(value));
    let read = from.deserialize_any(fits)?;
    read.map(number).transpose().map(Some)
}

fn iops<'de, D: Deserializer<'de>>(from: D) -> Result<Change<u64>, D::Error> {
    whole(from, LEAST.iops, MOST.iops)
}

fn bytes_s<'de, D: Deserializer<'de>>(from: D) -> Result<Change<u64>, D::Error> {
    whole(from, LEAST.bytes, MOST.bytes)
}

fn credit_s<'de, D: Deserializer<'de>>(from: D) -> Result<Change<u32>, D::Error> {
    whole(from, 1, MOST_CREDIT_SECONDS.into())
}

fn given<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Change<T>, D::Error> {
    Option::deserialize(from).map(Some)
}

/// Base that was saved for bursts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Credit {
    /// Operations.
    pub ops: u64,
    /// Bytes.
    pub bytes: u64,
    /// The most operations that can be saved.
    pub most_ops: u64,
    /// The most bytes that can be saved.
    pub most_bytes: u64,
}

/// Whether all bases are guaranteed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Admission {
    /// Whether all bases are available at once.
    pub guaranteed: bool,
    /// Whether only costs measured on this node were used. Otherwise defaults were, except for
    /// `measured`.
    pub calibrated: bool,
    /// The frontends that were measured.
    #[serde(default)]
    pub measured: Vec<ExportFrontend>,
    /// Tenants with a budget.
    pub tenants: u32,
    /// How many tenants of the mean base can have it at once.
    pub at_once: u32,
    /// The probability that not all tenants that want their base can have it, if each wants it with
    /// the configured probability.
    pub interference: f64,
    /// The promised part of each resource, in percent of the permitted part.
    pub promised: Vec<Promised>,
    /// For each reactor, the sum of the bases of tenants with exports there.
    #[serde(default)]
    pub reactors: Vec<ReactorPromised>,
    /// Tenants whose base is not guaranteed, because their reactors have too little beside other
    /// guarantees. After a change of a budget, its tenant comes first.
    #[serde(default)]
    pub lacking: Vec<LackingBase>,
}

/// The promised part of a reactor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ReactorPromised {
    /// The reactor.
    pub reactor: u32,
    /// Processor time, in percent of the permitted part without oversubscription. The whole base of
    /// each tenant with an export there counts. A tenant without exports counts where its first
    /// would be served.
    pub percent: f64,
}

/// A base that is not guaranteed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LackingBase {
    /// The tenant.
    pub tenant: String,
    /// The reactor that has too little beside other guarantees. Absent: all the tenant's reactors
    /// together have less than the base.
    pub reactor: Option<u32>,
    /// The base scaled down until it fits there; absent if none does.
    pub fits: Option<Rate>,
}

impl LackingBase {
    /// The problem in a sentence.
    pub fn text(&self) -> String {
        let why: &str = match self.reactor {
            Some(reactor) => &format!(
                "reactor {reactor}, which serves its exports, has too little left beside other guaranteed bases"
            ),
            None => "it is more than the reactors of its exports have",
        };
        let fits: &str = match self.fits {
            Some(fits) => &format!("{} IOPS and {} bytes/s of it fit", fits.iops, fits.bytes_s),
            None => "none of it fits",
        };
        let tenant = &self.tenant;
        format!("tenant {tenant}'s base is not guaranteed: {why}; {fits}")
    }
}

/// The promised part of a resource.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Promised {
    /// The resource.
    pub resource: String,
    /// In percent of the permitted part without oversubscription.
    pub percent: f64,
}

/// Answer to a change of a tenant's budget.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TenantBudget {
    /// The tenant.
    pub tenant: String,
    /// Its budget from now on; absent if none is set.
    pub budget: Option<Budget>,
    /// Whether this tenant's base is available at any time; absent without a base.
    pub guaranteed: Option<bool>,
    /// The Ceph clusters of the tenant's volumes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub clusters: Vec<ClusterPromise>,
    /// Whether all bases are guaranteed.
    pub admission: Admission,
}

/// What a Ceph cluster must give to this node's tenants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterPromise {
    /// The cluster.
    pub cluster: String,
    /// The capacity that the daemon's configuration states; absent if it states none.
    pub stated: Option<Rate>,
    /// The bases of all tenants with volumes there.
    pub promised: Rate,
    /// Whether the stated capacity suffices.
    pub guaranteed: bool,
}

impl ClusterPromise {
    /// In a sentence.
    pub fn text(&self) -> String {
        let (cluster, promised) = (&self.cluster, &self.promised);
        let promised = format!("{} IOPS and {} bytes/s", promised.iops, promised.bytes_s);
        let Some(stated) = &self.stated else {
            return format!(
                "Ceph cluster {cluster} guarantees no base: state what it can give this node, as `iops` and \
                `bandwidth` of [ceph.{cluster}]; {promised} are promised there"
            );
        };
        let stated = format!("{} IOPS and {} bytes/s", stated.iops, stated.bytes_s);
        match self.guaranteed {
            true => {
                format!("Ceph cluster {cluster}: {promised} of the stated {stated} are promised")
            }
            false => format!(
                "Ceph cluster {cluster} can't guarantee all bases: {promised} are promised, but {stated} are stated"
            ),
        }
    }
}

/// Which reactors serve a queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Spread {
    /// One reactor.
    OneToOne,
    /// One reactor, and all reactors without work of their own.
    #[default]
    OneToN,
}

/// The node's capacity besides processors.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeCapacity {
    /// Devices that can be read at full speed concurrently, in the terms of the costs: 1 if those
    /// are of all devices.
    pub device_reads: f64,
    /// Likewise for writes.
    pub device_writes: f64,
    /// Incoming bytes per second; absent: no limit.
    pub link_in_bytes_s: Option<u64>,
    /// Outgoing bytes per second; absent: no limit.
    pub link_out_bytes_s: Option<u64>,
    /// Whether `forebay calibrate` measured the links, and will measure them again; otherwise an
    /// operator set them.
    #[serde(default)]
    pub link_found: bool,
    /// Operations per second that the software may carry; absent: no limit.
    pub operations_s: Option<u64>,
}

/// How I/O is scheduled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Scheduling {
    /// Whether scheduling is active: some tenant or volume has a budget.
    pub on: bool,
    /// Which reactors serve a queue.
    pub spread: Spread,
    /// The factor by which promises may exceed capacity.
    pub oversubscription: f64,
    /// The probability that a tenant wants its base at a given time, for `interference`.
    pub wants_base: f64,
    /// The node's capacity besides processors.
    pub capacity: NodeCapacity,
    /// Number of the engine's reactors.
    pub reactors: u32,
    /// All parameters, by name.
    pub params: BTreeMap<String, f64>,
    /// Whether all bases are guaranteed.
    pub admission: Admission,
}

/// Body of `PATCH /v1/scheduling`: changes the given settings.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SchedulingUpdate {
    /// Which reactors serve a queue.
    pub spread: Option<Spread>,
    /// The factor by which promises may exceed capacity: 1 to 100.
    pub oversubscription: Option<f64>,
    /// The probability that a tenant wants its base at a given time.
    pub wants_base: Option<f64>,
    /// The node's whole capacity besides processors.
    pub capacity: Option<NodeCapacity>,
    /// Parameters by name; null: the default.
    #[serde(default)]
    pub params: BTreeMap<String, Option<f64>>,
}

/// A class of commands in cost measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CostOperation {
    /// Reads.
    Read,
    /// Writes, including zeroes.
    Write,
    /// Commands that move no bytes: flushes, deallocations.
    Other,
}

/// The cost of one operation of one frontend, at 4, 8, 16, 32, 64 and 128 KiB.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CostProfile {
    /// The frontend.
    pub frontend: ExportFrontend,
    /// The operation.
    pub operation: CostOperation,
    /// Processor time of a reactor, ns.
    pub cpu_ns: [f64; 6],
    /// Device time, ns, as if devices worked one after the other.
    pub device_ns: [f64; 6],
    /// Bytes on the link besides the data.
    pub header_bytes: u32,
}

/// The cost of I/O on this node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Costs {
    /// Whether it was measured here; otherwise these are defaults.
    pub calibrated: bool,
    /// When it was measured, in seconds since the Unix epoch.
    pub measured_at_s: Option<u64>,
    /// A note about the measurement.
    pub note: Option<String>,
    /// For each frontend and operation.
    pub profiles: Vec<CostProfile>,
}

/// The tenant whose volumes `forebay calibrate` measures.
pub const CALIBRATION_TENANT: &str = "forebay-calibrate";
/// The longest lease of a calibration, in seconds.
pub const MOST_CALIBRATION_SECONDS: u64 = 600;

/// Body of `PUT /v1/scheduling/calibration`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CalibrationPut {
    /// The lease from now on, 1 to 600 seconds; it must be renewed before that.
    pub seconds: u64,
}

/// Body of `PUT /v1/scheduling/costs`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CostsPut {
    /// Measured costs. Frontends and operations that are not named keep theirs.
    pub profiles: Vec<CostProfile>,
    /// A note about the measurement, at most 1000 bytes.
    pub note: Option<String>,
}
