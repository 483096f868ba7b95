//! Types of all bodies of the API, shared by routes, owner, command line and OpenAPI document.
//!
//! Plain data. Sizes are in bytes, as their names say. Requests refuse unknown fields; answers
//! tolerate them, because an old client may read a newer daemon. Syntax checks are in `validate`.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

mod drive;
pub mod error;
pub mod events;
mod export;
pub mod firmware;
mod hosts;
pub mod rbd;
pub mod scheduling;
mod snapshot;
pub mod stats;
mod transfer;
pub mod validate;
mod volume;

pub use drive::{DriveHealth, DriveSource};
use error::ApiError;
pub use export::{Export, ExportCreate, ExportFrontend, ExportUpdate, MachineClient};
pub use hosts::{
    AnaState, Port, PortUpdate, ReservationKind, ReservationRegistrant, VolumeReservation,
};
use scheduling::{Budget, Credit};
pub use snapshot::{SnapshotInfo, SnapshotSpace, SnapshotsTake, VolumeClone, VolumeRollback};
pub use transfer::{
    ExtentsFrom, TRANSFER_HOST_PREFIX, Transfer, TransferEnd, TransferKind, TransferPut,
    VolumeExtent, VolumeExtents,
};
pub use volume::{Volume, VolumeCreate, VolumeUpdate};

/// The engine's state, as its supervisor sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EngineState {
    /// The daemon is opening the pool and has no engine yet. The warnings name the devices that
    /// have not answered.
    Opening,
    /// The process exists but has not sent a greeting.
    Starting,
    /// It serves.
    Running,
    /// The last one died, and the next one is starting.
    Restarting,
    /// None is wanted, or starts keep failing.
    Stopped,
}

/// The state of a daemon, its engine and its pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// Process id of the daemon.
    pub daemon_pid: u32,
    /// Process id of the engine, if there is one.
    pub engine_pid: Option<u32>,
    /// Engine generation: rises with each engine started on this pool.
    pub generation: u64,
    /// Version of the daemon.
    pub version: String,
    /// Version of the engine, if there is one.
    #[serde(default)]
    pub engine_version: Option<String>,
    /// The engine's state.
    pub engine_state: EngineState,
    /// Seconds since the daemon started.
    pub uptime_s: u64,
    /// Addresses of the NVMe/TCP listeners, e.g. `127.0.0.1:4420`.
    pub nvme_tcp: Vec<String>,
    /// The daemon's state folder.
    pub state_dir: String,
    /// Name of the pool, if one is open or being opened.
    pub pool: Option<String>,
    /// Why the recorded pool is not open, and a remedy.
    pub pool_trouble: Option<ApiError>,
    /// The last known death of an engine or a daemon.
    pub last_death: Option<DeathReport>,
    /// Limits shared by all hosts and VMs, with their use.
    #[serde(default)]
    pub limits: Vec<LimitUse>,
    /// Warnings for the operator, in sentences.
    pub warnings: Vec<String>,
    /// The daemon's health.
    #[serde(default)]
    pub health: Health,
    /// Space in the pool; null if no pool is open.
    #[serde(default)]
    pub capacity: Option<Capacity>,
}

/// The health of a daemon. Warnings about the configuration itself do not count: a listener beyond
/// loopback, or a null device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Health {
    /// Everything is served.
    #[default]
    Well,
    /// Everything is served, but there are warnings.
    Warning,
    /// Something is not served.
    Trouble,
}

/// Space in the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Capacity {
    /// Capacity for data.
    pub total_bytes: u64,
    /// Space that volumes use.
    pub used_bytes: u64,
    /// Space reserved for volumes beyond that.
    #[serde(default)]
    pub promised_bytes: u64,
    /// Space that can be allocated.
    pub free_bytes: u64,
}

/// The use of a limited resource.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LimitUse {
    /// `exports`, `controllers` (a host has one for each connect) or `queues` (connections of
    /// NVMe/TCP).
    pub what: String,
    /// The number in use.
    pub used: u64,
    /// The limit.
    pub most: u64,
}

/// A process of Forebay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Process {
    /// The daemon.
    Daemon,
    /// The engine.
    Engine,
}

/// A report of a process's death.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeathReport {
    /// The process.
    pub process: Process,
    /// Its process id.
    pub pid: u32,
    /// The engine generation at that time.
    pub generation: u64,
    /// When it was detected, milliseconds since the Unix epoch.
    pub at_unix_ms: u64,
    /// The cause, as far as known: `signal 9 (SIGKILL)`, `exit code 1`, `unknown`.
    pub cause: String,
    /// Commands in flight, from the state region. Absent if that was lost with the engine, or if a
    /// daemon died.
    pub commands_in_flight: Option<u64>,
    /// The file of the full report, if one was written.
    pub report_path: Option<String>,
}

/// Whether a pool can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PoolState {
    /// Everything works.
    Online,
    /// Usable, but something is lost (see the daemon's warnings).
    Degraded,
    /// Not usable.
    Failed,
}

/// Which device new extents come from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// All devices in turn.
    #[default]
    Stripe,
    /// The first device that has space.
    Fill,
}

/// How full a pool is, by its own thresholds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SpaceLevel {
    /// Below both thresholds.
    Normal,
    /// `warn_percent` is reached.
    Warn,
    /// `critical_percent` is reached.
    Critical,
}

/// A pool: devices whose extents hold volumes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolInfo {
    /// Name.
    pub name: String,
    /// UUID, stable for the pool's life.
    pub uuid: String,
    /// Whether it can be used.
    pub state: PoolState,
    /// Size of one extent.
    pub extent_bytes: u64,
    /// All extents together.
    pub capacity_bytes: u64,
    /// Space that volumes use, and quarantined space.
    pub used_bytes: u64,
    /// Space reserved for volumes beyond their use.
    pub promised_bytes: u64,
    /// Space available to any volume, now or after zero-fill.
    pub free_bytes: u64,
    /// Used and promised, in percent of the capacity.
    pub used_percent: u8,
    /// The level of that percentage.
    pub level: SpaceLevel,
    /// Free extents that read as zeros.
    pub clean_bytes: u64,
    /// Extents set aside for a volume, not yet mapped.
    pub reserved_bytes: u64,
    /// Extents mapped by a volume.
    pub owned_bytes: u64,
    /// Freed extents with old data, waiting for zero-fill.
    pub dirty_bytes: u64,
    /// Extents that can't be reused because a device hung.
    pub quarantined_bytes: u64,
    /// Sum of all volumes' sizes, without snapshots and volumes in Ceph (thin: may exceed the
    /// capacity).
    pub provisioned_bytes: u64,
    /// Number of tenants.
    pub tenants: u64,
    /// Number of volumes and snapshots.
    pub volumes: u64,
    /// Which device new extents come from.
    pub placement: Placement,
    /// Threshold of the warning, in percent.
    pub warn_percent: u8,
    /// Threshold of the critical warning, in percent.
    pub critical_percent: u8,
    /// The pool's catalog.
    pub catalog: CatalogInfo,
    /// The devices, in the pool's order.
    pub devices: Vec<DeviceInfo>,
    /// Warnings for the operator, in sentences.
    pub warnings: Vec<String>,
}

/// The pool's catalog, which records the owner of each extent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CatalogInfo {
    /// Size of its records.
    pub used_bytes: u64,
    /// The limit of that size.
    pub limit_bytes: u64,
    /// Size of the whole database, which each copy contains.
    pub metadata_bytes: u64,
    /// The copies; normally two.
    pub copies: Vec<CatalogCopyInfo>,
    /// Bad blocks of one copy that were repaired from the other, since the pool was opened.
    pub repaired_blocks: u64,
    /// Events of the copies since then, in sentences.
    pub notes: Vec<String>,
}

/// A copy of the catalog.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CatalogCopyInfo {
    /// The index of its device.
    pub device: u8,
    /// Whether it is complete.
    pub is_good: bool,
    /// Why not, if not.
    pub why: Option<String>,
}

/// Whether a device can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeviceState {
    /// It is used.
    Online,
    /// The engine waits for the end of an earlier engine's requests.
    Opening,
    /// It gives errors: existing data is served, new extents come from other devices.
    Failing,
    /// It is present but can't be used.
    Failed,
    /// It is not present.
    Missing,
}

/// Errors of a device, since its engine or the daemon started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceErrors {
    /// Failed reads.
    pub reads: u64,
    /// Failed writes and zeroings.
    pub writes: u64,
    /// Failed flushes.
    pub flushes: u64,
    /// The last error, as text.
    pub last: Option<String>,
    /// Its offset on the device.
    pub last_offset_bytes: Option<u64>,
}

/// One device of the pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceInfo {
    /// Its index in the pool.
    pub index: u8,
    /// Its UUID, from its label.
    pub uuid: String,
    /// Its specification, e.g. `file:/var/lib/forebay/pool.img`; the last known one if it is
    /// missing.
    pub spec: String,
    /// `file`, `block`, `ram` or `null`; empty if it is missing.
    pub kind: String,
    /// Size of the whole device; 0 if it is missing.
    pub capacity_bytes: u64,
    /// All of its extents together.
    pub data_bytes: u64,
    /// Part that volumes use, and quarantined extents.
    pub used_bytes: u64,
    /// Free part, now or after zero-fill.
    pub free_bytes: u64,
    /// Part that can't be reused because the device hung.
    pub quarantined_bytes: u64,
    /// Offset of its first extent.
    pub data_offset_bytes: u64,
    /// Logical block size.
    pub block_bytes: u32,
    /// Whether freed space can be returned to the underlying storage.
    pub can_punch: bool,
    /// Its errors.
    pub errors: DeviceErrors,
    /// Whether it can be used.
    pub state: DeviceState,
    /// Why not, if it can't.
    pub why: Option<String>,
    /// Further remarks.
    #[serde(default)]
    pub notes: Vec<String>,
    /// The drive below, if it is one that reports its health.
    #[serde(default)]
    pub drive: Option<DriveHealth>,
    /// Why there is no answer of a drive, or no newer one.
    #[serde(default)]
    pub drive_note: Option<String>,
}

/// One device, and the volumes with data there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceDetails {
    /// The device.
    #[serde(flatten)]
    pub device: DeviceInfo,
    /// The volumes with data there, as `tenant/volume`.
    pub volumes: Vec<String>,
}

/// Body of `POST /v1/devices`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceAdd {
    /// Device specification: `file:/path`, `/path`, `ram:/path?size=1G`, `null:/path?size=64G`.
    pub spec: String,
    /// Use it even if it holds other data, which is lost.
    #[serde(default)]
    pub force: bool,
    /// Create a missing file, sparse, of `size_bytes`; by default a missing file is an error.
    #[serde(default)]
    pub create: bool,
    /// The size of a created file.
    #[serde(default)]
    pub size_bytes: Option<u64>,
}

/// The query of `DELETE /v1/pool`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct PoolDestroy {
    /// The name or UUID of the pool that is open, or that can't be opened.
    pub name: String,
    /// Destroy its volumes too.
    #[serde(default)]
    pub delete_volumes: bool,
    /// Go on even if hosts or VMs are connected: they lose their disks.
    #[serde(default)]
    pub disconnect_hosts: bool,
    /// Forget a pool that can't be opened; its devices stay as they are.
    #[serde(default)]
    pub forget: bool,
}

/// Body of `POST /v1/pool`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolCreate {
    /// Name; default `pool`.
    #[serde(default = "default_pool_name")]
    pub name: String,
    /// Device specifications: `file:/path`, `/path`, `ram:/path?size=1G`, `null:/path?size=64G`.
    pub devices: Vec<String>,
    /// Use devices that hold other data, which is lost.
    #[serde(default)]
    pub force: bool,
    /// Extent size, a power of two from 64 KiB to 4 MiB; default 64 KiB.
    #[serde(default)]
    pub extent_bytes: Option<u64>,
    /// Create missing device files, sparse, of `size_bytes` each; by default a missing file is an
    /// error.
    #[serde(default)]
    pub create: bool,
    /// The size of created files.
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// Which device new extents come from; default `stripe`.
    #[serde(default)]
    pub placement: Option<Placement>,
    /// Threshold of the warning, in percent; default 80.
    #[serde(default)]
    pub warn_percent: Option<u8>,
    /// Threshold of the critical warning, in percent; default 95.
    #[serde(default)]
    pub critical_percent: Option<u8>,
}

/// Body of `PATCH /v1/pool`: changes the given settings, for allocations from now on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolUpdate {
    /// Which device new extents come from.
    #[serde(default)]
    pub placement: Option<Placement>,
    /// Threshold of the warning, in percent.
    #[serde(default)]
    pub warn_percent: Option<u8>,
    /// Threshold of the critical warning, in percent.
    #[serde(default)]
    pub critical_percent: Option<u8>,
}

/// Body of `POST /v1/pool/check`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolCheck {
    /// Free leaked extents.
    #[serde(default)]
    pub repair: bool,
}

/// A problem of a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CheckProblem {
    /// The problem.
    pub what: String,
    /// Whether a repair fixes it.
    pub repairable: bool,
}

/// The result of a pool check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CheckResult {
    /// Whether the pool is clean now: no problem was found, or all were repaired.
    pub clean: bool,
    /// Extents checked.
    pub extents_checked: u64,
    /// Mappings checked.
    pub mappings_checked: u64,
    /// Volumes checked.
    pub volumes_checked: u64,
    /// Leaked extents, which are neither used nor free.
    pub leaked_extents: u64,
    /// Leaked extents that this check freed.
    pub repaired_extents: u64,
    /// Bad blocks of one catalog copy that were repaired from the other, since the pool was opened.
    pub repaired_catalog_blocks: u64,
    /// The problems.
    pub problems: Vec<CheckProblem>,
    /// How many problems are not listed.
    pub problems_left_out: u64,
}

fn default_pool_name() -> String {
    "pool".to_owned()
}

/// Body of `POST /v1/pool/open`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolOpen {
    /// Current specifications of devices. Others are searched for at their last known places and
    /// beside them.
    #[serde(default)]
    pub devices: Vec<String>,
    /// Take the named devices even if they were truncated while in use: the lost part reads as
    /// zeros. Also take an older copy of a device: its unmapped space is zeroed before its next
    /// use.
    #[serde(default)]
    pub force: bool,
    /// Make this installation the pool's owner. Refused while the heartbeat of another one goes on.
    #[serde(default)]
    pub take_over: bool,
}

/// A tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Tenant {
    /// Name.
    pub name: String,
    /// Number of its volumes and snapshots.
    pub volumes: u64,
    /// Sum of its volumes' sizes, without snapshots.
    pub provisioned_bytes: u64,
    /// Extents its volumes own or have reserved.
    pub allocated_bytes: u64,
    /// Its budget, if one is set.
    #[serde(default)]
    pub budget: Option<Budget>,
    /// Its saved base, if it can save.
    #[serde(default)]
    pub credit: Option<Credit>,
}

/// Body of `POST /v1/tenants`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TenantCreate {
    /// Name: `[a-z0-9-]`, 1 to 63 characters.
    pub name: String,
}

/// Answer to requests that return no data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Done {
    /// The completed action, in a sentence.
    pub done: String,
}
