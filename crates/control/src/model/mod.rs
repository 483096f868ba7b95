//! What the API says and accepts, as types.
//!
//! Purpose: the one definition of every body on the wire, shared by the routes, the owner that
//! fills them, the client in the command line, and the OpenAPI document.
//! Design: plain data; sizes are bytes and say so in their names; request bodies refuse unknown
//! fields, answers tolerate them (an old client may read a newer daemon).
//! Exports are in a file of their own.
//! Not here: validation (`validate`), statistics (`stats`), and any meaning: the owner has that.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

pub mod error;
pub mod events;
mod export;
mod hosts;
pub mod scheduling;
pub mod stats;
mod transfer;
pub mod validate;

use error::ApiError;
pub use export::{Export, ExportCreate, ExportFrontend, ExportUpdate, MachineClient};
pub use hosts::{
    AnaState, Port, PortUpdate, ReservationKind, ReservationRegistrant, VolumeReservation,
};
use scheduling::{Budget, Credit};
pub use transfer::{
    ExtentsFrom, TRANSFER_HOST_PREFIX, Transfer, TransferEnd, TransferKind, TransferPut,
    VolumeExtent, VolumeExtents,
};

/// How the engine is doing, as its supervisor sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EngineState {
    /// The daemon is opening the pool and has no engine yet. The warnings name the devices that have not answered.
    Opening,
    /// A process exists but has not said hello yet.
    Starting,
    /// It serves.
    Running,
    /// The last one died; the next one is on its way.
    Restarting,
    /// None is wanted, or starting one keeps failing.
    Stopped,
}

/// A daemon, its engine, and what it has in hand.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// Process id of the daemon.
    pub daemon_pid: u32,
    /// Process id of the engine, if there is one.
    pub engine_pid: Option<u32>,
    /// Engine generation: goes up with each engine ever started on this pool.
    pub generation: u64,
    /// Version of the daemon.
    pub version: String,
    /// How the engine is doing.
    pub engine_state: EngineState,
    /// Seconds since the daemon started.
    pub uptime_s: u64,
    /// Addresses the NVMe/TCP listeners are bound to, e.g. `127.0.0.1:4420`.
    pub nvme_tcp: Vec<String>,
    /// Where the daemon keeps its state.
    pub state_dir: String,
    /// Name of the pool, if one is open or being opened.
    pub pool: Option<String>,
    /// Why the pool that is recorded here is not open, and what to do about it.
    pub pool_trouble: Option<ApiError>,
    /// The last death of an engine or a daemon that this daemon knows of.
    pub last_death: Option<DeathReport>,
    /// What all hosts and machines share, and how much of it is in use.
    #[serde(default)]
    pub limits: Vec<LimitUse>,
    /// Things an operator should know, in sentences.
    pub warnings: Vec<String>,
    /// The daemon's health.
    #[serde(default)]
    pub health: Health,
    /// Space in the pool; null: no pool is open.
    #[serde(default)]
    pub capacity: Option<Capacity>,
}

/// The health of a daemon. Warnings about the configuration itself do not count: a listener beyond loopback, or a null
/// device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Health {
    /// Everything is served.
    #[default]
    Well,
    /// Everything is served, and there are warnings.
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
    /// Space that is reserved for volumes beyond that.
    #[serde(default)]
    pub promised_bytes: u64,
    /// Space that can be allocated.
    pub free_bytes: u64,
}

/// How much of something that is limited is in use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LimitUse {
    /// `exports`, `controllers` (a host has one for each connect) or `queues` (connections of NVMe/TCP).
    pub what: String,
    /// How many there are.
    pub used: u64,
    /// How many there may be.
    pub most: u64,
}

/// Which of the two processes died.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Process {
    /// The daemon.
    Daemon,
    /// The engine.
    Engine,
}

/// What was known after a process died.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeathReport {
    /// Which process.
    pub process: Process,
    /// Its process id.
    pub pid: u32,
    /// Engine generation at that time.
    pub generation: u64,
    /// When it was noticed, milliseconds since the Unix epoch.
    pub at_unix_ms: u64,
    /// Why, as far as known: `signal 9 (SIGKILL)`, `exit code 1`, `unknown`.
    pub cause: String,
    /// Commands that were in flight, as the state region shows them; absent if nobody has it: it was gone with its
    /// engine, or it was a daemon that died.
    pub commands_in_flight: Option<u64>,
    /// File with the full report, if one was written.
    pub report_path: Option<String>,
}

/// Whether a pool can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PoolState {
    /// All is well.
    Online,
    /// Usable, but something is lost (see the daemon's warnings).
    Degraded,
    /// Not usable.
    Failed,
}

/// Where a volume's extents come from when the pool has several devices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// From all devices in turn.
    #[default]
    Stripe,
    /// From the first device that has space.
    Fill,
}

/// How full a pool is, by its own percentages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SpaceLevel {
    /// Below both.
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
    /// What volumes use, and what is quarantined.
    pub used_bytes: u64,
    /// What volumes have been promised beyond what they use (their reservations).
    pub promised_bytes: u64,
    /// What any volume may still have, now or as soon as it is laundered.
    pub free_bytes: u64,
    /// Used and promised, in percent of the capacity.
    pub used_percent: u8,
    /// How full that is.
    pub level: SpaceLevel,
    /// Extents that read as zeros and belong to nobody.
    pub clean_bytes: u64,
    /// Extents set aside for a volume, not yet mapped.
    pub reserved_bytes: u64,
    /// Extents mapped by a volume.
    pub owned_bytes: u64,
    /// Freed extents that still hold someone's bytes, waiting to be laundered.
    pub dirty_bytes: u64,
    /// Extents that can't be reused because a device hung.
    pub quarantined_bytes: u64,
    /// Sum of the sizes of all volumes (thin: may exceed the capacity).
    pub provisioned_bytes: u64,
    /// Number of tenants.
    pub tenants: u64,
    /// Number of volumes.
    pub volumes: u64,
    /// Where extents come from.
    pub placement: Placement,
    /// From this much used on there is a warning, in percent.
    pub warn_percent: u8,
    /// From this much used on there is a louder one, in percent.
    pub critical_percent: u8,
    /// The pool's own records.
    pub catalog: CatalogInfo,
    /// The devices, in the pool's order.
    pub devices: Vec<DeviceInfo>,
    /// What an operator should know about it, in sentences.
    pub warnings: Vec<String>,
}

/// The pool's catalog: who owns which extent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CatalogInfo {
    /// What its records take.
    pub used_bytes: u64,
    /// What they may take.
    pub limit_bytes: u64,
    /// The size of the database, of which each copy has all.
    pub metadata_bytes: u64,
    /// The copies; two, if all is well.
    pub copies: Vec<CatalogCopyInfo>,
    /// Blocks that were bad on one copy and were repaired from the other, since the pool was opened.
    pub repaired_blocks: u64,
    /// What happened to the copies since then, in sentences.
    pub notes: Vec<String>,
}

/// A copy of the catalog.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CatalogCopyInfo {
    /// The index of the device that it is on.
    pub device: u8,
    /// Whether it has everything.
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
    /// The engine waits until what an earlier one asked of it has ended.
    Opening,
    /// It gives errors: what lies there is served, nothing new is placed there.
    Failing,
    /// It is here and can't be used.
    Failed,
    /// It is not here.
    Missing,
}

/// What failed on a device, since its engine or the daemon started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceErrors {
    /// Reads that failed.
    pub reads: u64,
    /// Writes and zeroings that failed.
    pub writes: u64,
    /// Flushes that failed.
    pub flushes: u64,
    /// The last error in words.
    pub last: Option<String>,
    /// Where on the device it was.
    pub last_offset_bytes: Option<u64>,
}

/// One device of the pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceInfo {
    /// Its place in the pool.
    pub index: u8,
    /// Its identity, as its label says.
    pub uuid: String,
    /// Its specification string, e.g. `file:/var/lib/forebay/pool.img`; where it was last found, if
    /// it is missing.
    pub spec: String,
    /// `file`, `block`, `ram` or `null`; empty if it is missing.
    pub kind: String,
    /// Size of the whole device; 0 if it is missing.
    pub capacity_bytes: u64,
    /// All of its extents together.
    pub data_bytes: u64,
    /// Of those, what volumes use, and what is quarantined.
    pub used_bytes: u64,
    /// Of those, what belongs to nobody, now or once laundered.
    pub free_bytes: u64,
    /// Of those, what can't be reused because the device hung.
    pub quarantined_bytes: u64,
    /// Where its extents begin.
    pub data_offset_bytes: u64,
    /// Logical block size.
    pub block_bytes: u32,
    /// Whether freed space can be given back to what is below it.
    pub can_punch: bool,
    /// What failed there.
    pub errors: DeviceErrors,
    /// Whether it can be used.
    pub state: DeviceState,
    /// Why not, if it can't.
    pub why: Option<String>,
    /// What else should be known of it.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// One device, and who has something there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceDetails {
    /// The device.
    #[serde(flatten)]
    pub device: DeviceInfo,
    /// The volumes with something there, as `tenant/volume`.
    pub volumes: Vec<String>,
}

/// Body of `POST /v1/devices`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceAdd {
    /// Device specification: `file:/path`, `/path`, `ram:/path?size=1G`, `null:/path?size=64G`.
    pub spec: String,
    /// Use it even if it holds something else; what it holds is lost.
    #[serde(default)]
    pub force: bool,
    /// Make a file that does not exist, sparse, of `size_bytes`; without it, that is an error.
    #[serde(default)]
    pub create: bool,
    /// The size of a file that is made.
    #[serde(default)]
    pub size_bytes: Option<u64>,
}

/// What `DELETE /v1/pool` is told.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct PoolDestroy {
    /// The pool's name or UUID: of the one that is open, or of the one that can't be opened.
    pub name: String,
    /// Destroy its volumes too.
    #[serde(default)]
    pub delete_volumes: bool,
    /// Go on even if hosts or machines are connected: they lose their disks.
    #[serde(default)]
    pub disconnect_hosts: bool,
    /// Give up a pool that can't be opened: its devices stay as they are.
    #[serde(default)]
    pub forget: bool,
}

/// Body of `POST /v1/pool`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolCreate {
    /// Name; `pool` if not given.
    #[serde(default = "default_pool_name")]
    pub name: String,
    /// Device specifications: `file:/path`, `/path`, `ram:/path?size=1G`, `null:/path?size=64G`.
    pub devices: Vec<String>,
    /// Use devices that hold something else; what they hold is lost.
    #[serde(default)]
    pub force: bool,
    /// Extent size, a power of two between 64 KiB and 4 MiB; 64 KiB if not given.
    #[serde(default)]
    pub extent_bytes: Option<u64>,
    /// Make device files that do not exist, sparse, of `size_bytes` each; without it, a missing file is an error.
    #[serde(default)]
    pub create: bool,
    /// The size of files that are made.
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// Where extents come from; `stripe` if not given.
    #[serde(default)]
    pub placement: Option<Placement>,
    /// From this much used on there is a warning, in percent; 80 if not given.
    #[serde(default)]
    pub warn_percent: Option<u8>,
    /// From this much used on there is a louder one, in percent; 95 if not given.
    #[serde(default)]
    pub critical_percent: Option<u8>,
}

/// Body of `PATCH /v1/pool`: what is given is changed, for what is allocated from now on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolUpdate {
    /// Where extents come from.
    #[serde(default)]
    pub placement: Option<Placement>,
    /// From this much used on there is a warning, in percent.
    #[serde(default)]
    pub warn_percent: Option<u8>,
    /// From this much used on there is a louder one, in percent.
    #[serde(default)]
    pub critical_percent: Option<u8>,
}

/// Body of `POST /v1/pool/check`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolCheck {
    /// Give back what has leaked.
    #[serde(default)]
    pub repair: bool,
}

/// Something that is wrong with a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CheckProblem {
    /// What it is.
    pub what: String,
    /// Whether a repair mends it.
    pub repairable: bool,
}

/// What a check of the pool has found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CheckResult {
    /// Whether all is well now: nothing was wrong, or all of it was repaired.
    pub clean: bool,
    /// Extents looked at.
    pub extents_checked: u64,
    /// Mappings looked at.
    pub mappings_checked: u64,
    /// Volumes looked at.
    pub volumes_checked: u64,
    /// Extents that nobody has and nobody could get.
    pub leaked_extents: u64,
    /// Of those, given back by this check.
    pub repaired_extents: u64,
    /// Blocks of the catalog that were bad on one copy and were repaired from the other, since the
    /// pool was opened.
    pub repaired_catalog_blocks: u64,
    /// What is wrong.
    pub problems: Vec<CheckProblem>,
    /// How many more problems there are than are listed.
    pub problems_left_out: u64,
}

fn default_pool_name() -> String {
    "pool".to_owned()
}

/// Body of `POST /v1/pool/open`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolOpen {
    /// Where devices are now. Those that are not named are looked for where they were last found,
    /// and beside it.
    #[serde(default)]
    pub devices: Vec<String>,
    /// Take those that are named even if they were cut short while in use: what was cut off reads as
    /// zeros. Also take an older copy of a device: space that no volume maps there is zeroed before its next use.
    #[serde(default)]
    pub force: bool,
    /// Make the pool this installation's if it is another one's. Refused while that one's heartbeat goes on.
    #[serde(default)]
    pub take_over: bool,
}

/// A tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Tenant {
    /// Name.
    pub name: String,
    /// Number of its volumes.
    pub volumes: u64,
    /// Sum of the sizes of its volumes.
    pub provisioned_bytes: u64,
    /// Extents its volumes own or have reserved.
    pub allocated_bytes: u64,
    /// What it may use, if that is stated.
    #[serde(default)]
    pub budget: Option<Budget>,
    /// What it has saved of its base, if it can.
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

/// A volume: a logical disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Volume {
    /// Tenant it belongs to.
    pub tenant: String,
    /// Name, unique within its tenant.
    pub name: String,
    /// Number, unique within the pool and never reused.
    pub id: u64,
    /// UUID; hosts see it as the namespace's NGUID and UUID.
    pub uuid: String,
    /// Serial number that hosts see.
    pub serial: String,
    /// Size.
    pub size_bytes: u64,
    /// Block size that hosts see: 512 or 4096.
    pub block_bytes: u32,
    /// Extents it owns or has set aside for its next writes.
    pub allocated_bytes: u64,
    /// Of those, what it has written.
    pub mapped_bytes: u64,
    /// How much of it finds space whatever other volumes do; 0: nothing is promised.
    pub reserved_bytes: u64,
    /// Whether an export of it exists.
    pub exported: bool,
    /// Who among its hosts has reserved it (NVMe reservations); nobody has registered if it is not there.
    pub reservation: Option<VolumeReservation>,
    /// What it may use of its tenant's, if that is stated.
    #[serde(default)]
    pub budget: Option<Budget>,
}

/// Body of `POST /v1/tenants/{tenant}/volumes`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeCreate {
    /// Name: `[a-z0-9-]`, 1 to 63 characters.
    pub name: String,
    /// Size, a multiple of the block size.
    pub size_bytes: u64,
    /// Block size, 512 or 4096; if not given, 4096.
    #[serde(default)]
    pub block_bytes: Option<u32>,
    /// How much of it shall find space whatever other volumes do, at most its size; 0 if not given.
    #[serde(default)]
    pub reserved_bytes: u64,
}

/// Body of `PATCH /v1/tenants/{tenant}/volumes/{volume}`: one of the two.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeUpdate {
    /// New size; a volume can grow, never shrink.
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// How much of it shall find space whatever other volumes do, at most its size.
    #[serde(default)]
    pub reserved_bytes: Option<u64>,
}

/// Answer to requests that have nothing to tell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Done {
    /// What was done, in a sentence.
    pub done: String,
}
