//! Budgets, and how I/O is admitted, as the API says them.
//!
//! Purpose: the bodies of `/v1/scheduling`, of the budgets of tenants and volumes, and of costs.
//! Design: plain data, as in `model`; rates are a second's, and say so. What is not limited is absent.
//! Not here: what a budget may be (`forebay_qos`), keeping anybody to it (the engine).

use std::collections::BTreeMap;

use forebay_qos::budget::{LEAST, MOST, MOST_CREDIT_SECONDS};
use forebay_qos::stated::Stated;
pub use forebay_qos::stated::{LARGE_BYTES, SMALL_BYTES};
use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use super::ExportFrontend;

/// Operations and bytes a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rate {
    /// Operations a second.
    pub iops: u64,
    /// Bytes a second.
    pub bytes_s: u64,
}

/// The most operations and bytes a second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    /// Operations a second; null: no limit.
    pub iops: Option<u64>,
    /// Bytes a second; null: no limit.
    pub bytes_s: Option<u64>,
}

/// What a tenant or a volume may use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Budget {
    /// Theirs at any time. Of a volume, out of its tenant's. Null: they have none.
    pub base: Option<Rate>,
    /// Never more than this, out of what others leave.
    pub burst: Limit,
    /// What is not used of the base is saved, for as long as so many seconds of it at most, and being above the base
    /// spends that. Absent: what is above the base is counted (metered).
    pub credit_s: Option<u32>,
    /// The parts that were stated; the others follow from them.
    #[serde(default)]
    pub stated: BudgetParts,
}

/// Absent: it stays as it is. Null: it is no longer stated.
pub type Change<T> = Option<Option<T>>;

/// Operations, bytes, or both. A part that is absent stays as it was stated. A part that is null is dropped, and follows from
/// the other parts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, expecting = "`iops`, `bytes_s`, or both")]
pub struct RateParts {
    /// Operations a second: 10 to 20,000,000.
    #[serde(default)]
    #[serde(deserialize_with = "iops", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub iops: Change<u64>,
    /// Bytes a second: 65,536 to 100,000,000,000.
    #[serde(default)]
    #[serde(deserialize_with = "bytes_s", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub bytes_s: Change<u64>,
}

/// Parts of a budget: all of them in a `PUT`, those that change in a `PATCH`, each in operations, in bytes, or in both. What
/// follows from the parts changes with them. A budget whose last part is dropped is gone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BudgetParts {
    /// Theirs at any time; if not stated, next to nothing: there is a limit only. A base of operations alone has 4 KiB for
    /// each; a base of bytes alone has an operation for every 128 KiB. Null drops it, and the credit with it.
    #[serde(default)]
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<RateParts>)]
    pub base: Change<RateParts>,
    /// Never more than this; what is not stated of it is as in the base, and what is in neither has no limit. Null drops both
    /// parts of it.
    #[serde(default)]
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<RateParts>)]
    pub burst: Change<RateParts>,
    /// So many seconds of unused base can be saved for bursts, 1 to 604,800. Null, or not stated: metered. Of tenants only.
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
    /// Changes the parts that it names.
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

    /// Applies the change to the parts that were stated before. `None`: there is no budget, also where a patch drops
    /// the last part.
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

/// A number; what is none is refused with what would fit. Whether it does is the budget's own to say.
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
    // What has no room in its number is refused as it was written.
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

/// What was saved for bursts.
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

/// Whether what is promised can be had.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Admission {
    /// Whether all bases can be had at once.
    pub guaranteed: bool,
    /// Whether that is calculated from what was measured on this machine alone; else from defaults, but for `measured`.
    pub calibrated: bool,
    /// The frontends that were measured.
    #[serde(default)]
    pub measured: Vec<ExportFrontend>,
    /// Tenants with a budget.
    pub tenants: u32,
    /// So many of them, of the mean base, can have it at once.
    pub at_once: u32,
    /// The probability that not all who want their base can have it, if each wants it with the probability that is set.
    pub interference: f64,
    /// What of each resource is promised, in percent of what may be.
    pub promised: Vec<Promised>,
    /// What the bases of the tenants come to that each reactor serves exports of.
    #[serde(default)]
    pub reactors: Vec<ReactorPromised>,
    /// Tenants whose base is not guaranteed: the reactors that serve them have too little beside what others are guaranteed.
    /// Of a tenant's budget that was just stated, that tenant comes first.
    #[serde(default)]
    pub lacking: Vec<LackingBase>,
}

/// How much of a reactor is promised.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ReactorPromised {
    /// Which.
    pub reactor: u32,
    /// How much of its processor time, in percent of what may be promised without oversubscription: all of the base of each
    /// tenant with an export there. A tenant that has no exports counts where the first would be served.
    pub percent: f64,
}

/// A base that is not guaranteed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LackingBase {
    /// Whose.
    pub tenant: String,
    /// The reactor that has too little beside what others are guaranteed; absent: all that serve the tenant have less than this
    /// base together.
    pub reactor: Option<u32>,
    /// The same base, smaller, that would fit there; absent: none.
    pub fits: Option<Rate>,
}

impl LackingBase {
    /// In a sentence.
    pub fn text(&self) -> String {
        let why: &str = match self.reactor {
            Some(reactor) => &format!(
                "reactor {reactor}, which serves exports of it, has too little beside what others are guaranteed"
            ),
            None => "it is more than the reactors have that serve its exports",
        };
        let fits: &str = match self.fits {
            Some(fits) => &format!("{} IOPS and {} bytes/s fit", fits.iops, fits.bytes_s),
            None => "none fits",
        };
        let tenant = &self.tenant;
        format!("tenant {tenant}'s base is not guaranteed: {why}; of it, {fits}")
    }
}

/// How much of a resource is promised.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Promised {
    /// Which.
    pub resource: String,
    /// How much of what may be promised without oversubscription, in percent.
    pub percent: f64,
}

/// Answer to `PUT` and `DELETE` of a tenant's budget.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TenantBudget {
    /// The tenant.
    pub tenant: String,
    /// Its budget from now on; absent: none is stated.
    pub budget: Option<Budget>,
    /// Whether this tenant can have its base at any time; absent: it has none.
    pub guaranteed: Option<bool>,
    /// Whether all that is promised can be had.
    pub admission: Admission,
}

/// Which reactors serve what of a queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Spread {
    /// A queue is one reactor's.
    OneToOne,
    /// A queue is one reactor's, and all reactors with nothing of their own to do serve it as well.
    #[default]
    OneToN,
}

/// What a node has besides processors.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeCapacity {
    /// Devices that can be read at once at their whole speed, in the terms of costs: 1 if those are of all devices.
    pub device_reads: f64,
    /// The same of writes.
    pub device_writes: f64,
    /// Bytes a second that can come in; no limit if absent.
    pub link_in_bytes_s: Option<u64>,
    /// Bytes a second that can go out; no limit if absent.
    pub link_out_bytes_s: Option<u64>,
    /// Whether what the links can do was found by `forebay calibrate`, which looks again each time; else somebody has said it.
    #[serde(default)]
    pub link_found: bool,
    /// Operations a second that the software is to carry at most; no limit if absent.
    pub operations_s: Option<u64>,
}

/// How I/O is admitted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Scheduling {
    /// Whether it is: some tenant or volume has a budget.
    pub on: bool,
    /// Which reactors serve what of a queue.
    pub spread: Spread,
    /// So many times what there is may be promised.
    pub oversubscription: f64,
    /// With this probability a tenant wants its base at any time: what interference is calculated with.
    pub wants_base: f64,
    /// What the node has besides processors.
    pub capacity: NodeCapacity,
    /// Processors: reactors of the engine.
    pub reactors: u32,
    /// All parameters, by name.
    pub params: BTreeMap<String, f64>,
    /// Whether all that is promised can be had.
    pub admission: Admission,
}

/// Body of `PATCH /v1/scheduling`: what is given is changed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SchedulingUpdate {
    /// Which reactors serve what of a queue.
    pub spread: Option<Spread>,
    /// So many times what there is may be promised: 1 to 100.
    pub oversubscription: Option<f64>,
    /// With this probability a tenant wants its base at any time.
    pub wants_base: Option<f64>,
    /// What the node has besides processors, all of it.
    pub capacity: Option<NodeCapacity>,
    /// Parameters by name; null: the default.
    #[serde(default)]
    pub params: BTreeMap<String, Option<f64>>,
}

/// What a command does, as its cost is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CostOperation {
    /// Reads.
    Read,
    /// Writes, and zeroes.
    Write,
    /// What moves no bytes: flushes, deallocations.
    Other,
}

/// What one operation of one frontend costs, at 4, 8, 16, 32, 64 and 128 KiB.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CostProfile {
    /// How it comes in.
    pub frontend: ExportFrontend,
    /// What it does.
    pub operation: CostOperation,
    /// Time of a reactor's processor, ns.
    pub cpu_ns: [f64; 6],
    /// Time of the devices, ns, if one came after the other.
    pub device_ns: [f64; 6],
    /// Bytes on the link besides the data.
    pub header_bytes: u32,
}

/// What I/O costs on this machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Costs {
    /// Whether it was measured here; these are defaults otherwise.
    pub calibrated: bool,
    /// When, in seconds since the epoch.
    pub measured_at_s: Option<u64>,
    /// What was said of the measurement.
    pub note: Option<String>,
    /// Of each frontend and operation.
    pub profiles: Vec<CostProfile>,
}

/// The tenant whose volumes `forebay calibrate` measures on.
pub const CALIBRATION_TENANT: &str = "forebay-calibrate";
/// The longest time for which a calibration can say that it is at work, in seconds.
pub const MOST_CALIBRATION_SECONDS: u64 = 600;

/// Body of `PUT /v1/scheduling/calibration`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CalibrationPut {
    /// From now on, so many seconds, 1 to 600: it is to be said again before they are over.
    pub seconds: u64,
}

/// Body of `PUT /v1/scheduling/costs`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CostsPut {
    /// What was measured. Frontends and operations that are not named stay as they are.
    pub profiles: Vec<CostProfile>,
    /// Something about the measurement, at most 1000 bytes.
    pub note: Option<String>,
}
