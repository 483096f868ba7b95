//! What crosses from the API's handlers to the owner loop.
//!
//! Purpose: handlers never touch the pool; they send a [`Request`] and await its reply. The owner
//! takes requests from the receiving end one by one, in its own loop.
//! Design: one variant per operation, each with its typed one-shot reply; [`Handle`] is the sending
//! end with one async method per variant, so nobody else builds replies. The channel is bounded: when
//! the owner falls behind, callers wait, and their time limit ends the wait. A reply whose receiver
//! is gone (the caller gave up) is dropped; the operation still happened.
//! Not here: HTTP, and what the operations mean.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use super::error::ApiError;
use super::events::{Audit, EventList};
use super::model::{
    CheckResult, DeviceAdd, DeviceDetails, DeviceInfo, Export, ExportCreate, ExportUpdate,
    PoolCheck, PoolCreate, PoolDestroy, PoolInfo, PoolOpen, PoolUpdate, Port, PortUpdate, Status,
    Tenant, Transfer, TransferPut, Volume, VolumeCreate, VolumeExtents, VolumeUpdate,
};
use super::scheduling::{
    BudgetChange, Costs, CostsPut, Scheduling, SchedulingUpdate, TenantBudget,
};
use super::stats::Stats;

/// What the owner answers.
pub type Reply<T> = oneshot::Sender<Result<T, ApiError>>;

/// An operation for the owner. Names and host NQNs have been checked for their syntax.
#[derive(Debug)]
#[allow(missing_docs)] // each is the route of its name
pub enum Request {
    Status(Reply<Status>),
    PoolCreate {
        body: PoolCreate,
        reply: Reply<PoolInfo>,
    },
    /// Opens the pool, or takes devices back that it misses.
    PoolOpen {
        body: PoolOpen,
        reply: Reply<PoolInfo>,
    },
    PoolShow(Reply<PoolInfo>),
    PoolUpgrade(Reply<PoolInfo>),
    /// The answer says what was done.
    PoolDestroy {
        query: PoolDestroy,
        reply: Reply<String>,
    },
    PoolUpdate {
        body: PoolUpdate,
        reply: Reply<PoolInfo>,
    },
    PoolCheck {
        body: PoolCheck,
        reply: Reply<CheckResult>,
    },
    DeviceList(Reply<Vec<DeviceInfo>>),
    DeviceShow {
        index: u8,
        reply: Reply<DeviceDetails>,
    },
    DeviceAdd {
        body: DeviceAdd,
        reply: Reply<DeviceInfo>,
    },
    TenantCreate {
        name: String,
        reply: Reply<Tenant>,
    },
    TenantList(Reply<Vec<Tenant>>),
    TenantShow {
        name: String,
        reply: Reply<Tenant>,
    },
    /// Refused while the tenant has volumes.
    TenantDelete {
        name: String,
        reply: Reply<()>,
    },
    /// Without a budget, none is stated from now on.
    TenantBudget {
        name: String,
        budget: BudgetChange,
        reply: Reply<TenantBudget>,
    },
    /// The same of a volume.
    VolumeBudget {
        tenant: String,
        volume: String,
        budget: BudgetChange,
        reply: Reply<Volume>,
    },
    SchedulingShow(Reply<Scheduling>),
    SchedulingUpdate {
        body: SchedulingUpdate,
        reply: Reply<Scheduling>,
    },
    /// A calibration is at work for so many seconds, or no more.
    Calibrating {
        seconds: Option<u64>,
        reply: Reply<()>,
    },
    CostsShow(Reply<Costs>),
    /// Without any, the defaults count from now on.
    CostsPut {
        body: Option<CostsPut>,
        reply: Reply<Costs>,
    },
    VolumeCreate {
        tenant: String,
        body: VolumeCreate,
        reply: Reply<Volume>,
    },
    /// Of one tenant, or of all.
    VolumeList {
        tenant: Option<String>,
        reply: Reply<Vec<Volume>>,
    },
    VolumeShow {
        tenant: String,
        volume: String,
        reply: Reply<Volume>,
    },
    VolumeExtents {
        tenant: String,
        volume: String,
        from_bytes: u64,
        reply: Reply<VolumeExtents>,
    },
    /// Its size, only upwards; or its reservation.
    VolumeUpdate {
        tenant: String,
        volume: String,
        body: VolumeUpdate,
        reply: Reply<Volume>,
    },
    /// Refused while exported.
    VolumeDelete {
        tenant: String,
        volume: String,
        reply: Reply<()>,
    },
    /// An image goes into the volume or comes out of it.
    TransferPut {
        tenant: String,
        volume: String,
        body: TransferPut,
        reply: Reply<Transfer>,
    },
    TransferEnd {
        tenant: String,
        volume: String,
        host: String,
        reply: Reply<()>,
    },
    ExportCreate {
        body: ExportCreate,
        reply: Reply<Export>,
    },
    ExportList(Reply<Vec<Export>>),
    ExportShow {
        tenant: String,
        volume: String,
        reply: Reply<Export>,
    },
    ExportUpdate {
        tenant: String,
        volume: String,
        body: ExportUpdate,
        reply: Reply<Export>,
    },
    /// The answer: how many commands of its hosts are still at devices.
    ExportDelete {
        tenant: String,
        volume: String,
        disconnect_hosts: bool,
        reply: Reply<u64>,
    },
    /// Serves a quarantined export again.
    ExportResume {
        tenant: String,
        volume: String,
        reply: Reply<Export>,
    },
    PortList(Reply<Vec<Port>>),
    /// Refused, unless forced, if no port is left that hosts can use.
    PortUpdate {
        address: SocketAddr,
        body: PortUpdate,
        reply: Reply<Port>,
    },
    Stats(Reply<Stats>),
    /// What happened after this event, or all that is kept. If there is nothing, waits so long for it.
    Events {
        after: Option<u64>,
        wait: Duration,
        reply: Reply<EventList>,
    },
    /// Somebody changed something.
    Audit {
        audit: Box<Audit>,
        reply: Reply<()>,
    },
    /// Another engine, of the installed program, goes on where the running one is. The answer says which.
    EngineReplace(Reply<String>),
    /// Stop engine and daemon in good order; the reply comes before the stop.
    Shutdown(Reply<()>),
}

/// The sending end: what the API's handlers hold.
#[derive(Debug, Clone)]
pub struct Handle {
    requests: mpsc::Sender<Request>,
}

/// Requests that may wait for the owner before callers have to.
const QUEUE_DEPTH: usize = 64;

/// A handle, and the receiving end for the owner.
#[must_use]
pub fn channel() -> (Handle, mpsc::Receiver<Request>) {
    let (sender, receiver) = mpsc::channel(QUEUE_DEPTH);
    (Handle { requests: sender }, receiver)
}

impl Handle {
    async fn ask<T>(&self, build: impl FnOnce(Reply<T>) -> Request) -> Result<T, ApiError> {
        let (reply, answer) = oneshot::channel();
        self.requests
            .send(build(reply))
            .await
            .map_err(|_| stopping())?;
        answer.await.map_err(|_| stopping())?
    }
}

fn stopping() -> ApiError {
    ApiError::unavailable("the daemon is stopping")
        .hint("start it again with `forebay serve` and repeat the command")
}

macro_rules! handle_methods {
    ($($(#[$doc:meta])* $method:ident($($arg:ident: $ty:ty),*) -> $out:ty = $variant:expr;)*) => {
        impl Handle {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// What the owner answers, or `unavailable` when it is gone.
                pub async fn $method(&self, $($arg: $ty),*) -> Result<$out, ApiError> {
                    self.ask($variant).await
                }
            )*
        }
    };
}

handle_methods! {
    /// The daemon and its engine.
    status() -> Status = Request::Status;
    /// Makes a pool of devices.
    pool_create(body: PoolCreate) -> PoolInfo = |reply| Request::PoolCreate { body, reply };
    /// Opens the pool, or takes devices back that it misses.
    pool_open(body: PoolOpen) -> PoolInfo = |reply| Request::PoolOpen { body, reply };
    /// The pool.
    pool_show() -> PoolInfo = Request::PoolShow;
    /// Ends the pool and wipes its labels.
    pool_destroy(query: PoolDestroy) -> String = |reply| Request::PoolDestroy { query, reply };
    /// Changes what is set for the pool.
    pool_update(body: PoolUpdate) -> PoolInfo = |reply| Request::PoolUpdate { body, reply };
    /// Gives the pool's labels the current format.
    pool_upgrade() -> PoolInfo = Request::PoolUpgrade;
    /// Checks the pool while it is used.
    pool_check(body: PoolCheck) -> CheckResult = |reply| Request::PoolCheck { body, reply };
    /// One device, and who has something there.
    device_show(index: u8) -> DeviceDetails = |reply| Request::DeviceShow { index, reply };
    /// Makes a device part of the pool.
    device_add(body: DeviceAdd) -> DeviceInfo = |reply| Request::DeviceAdd { body, reply };
    /// The pool's devices.
    device_list() -> Vec<DeviceInfo> = Request::DeviceList;
    /// Makes a tenant.
    tenant_create(name: String) -> Tenant = |reply| Request::TenantCreate { name, reply };
    /// All tenants.
    tenant_list() -> Vec<Tenant> = Request::TenantList;
    /// One tenant.
    tenant_show(name: String) -> Tenant = |reply| Request::TenantShow { name, reply };
    /// Ends a tenant that has no volumes.
    tenant_delete(name: String) -> () = |reply| Request::TenantDelete { name, reply };
    /// States what a tenant may use, or takes that back.
    tenant_budget(name: String, budget: BudgetChange) -> TenantBudget =
        |reply| Request::TenantBudget { name, budget, reply };
    /// States what a volume may use of its tenant's, or takes that back.
    volume_budget(tenant: String, volume: String, budget: BudgetChange) -> Volume =
        |reply| Request::VolumeBudget { tenant, volume, budget, reply };
    /// How I/O is admitted.
    scheduling_show() -> Scheduling = Request::SchedulingShow;
    /// Changes how I/O is admitted.
    scheduling_update(body: SchedulingUpdate) -> Scheduling =
        |reply| Request::SchedulingUpdate { body, reply };
    /// A calibration is at work for so many seconds, or no more.
    calibrating(seconds: Option<u64>) -> () = |reply| Request::Calibrating { seconds, reply };
    /// What I/O costs.
    costs_show() -> Costs = Request::CostsShow;
    /// What I/O costs from now on; nothing: the defaults.
    costs_put(body: Option<CostsPut>) -> Costs = |reply| Request::CostsPut { body, reply };
    /// Makes a volume.
    volume_create(tenant: String, body: VolumeCreate) -> Volume =
        |reply| Request::VolumeCreate { tenant, body, reply };
    /// Volumes of one tenant, or of all.
    volume_list(tenant: Option<String>) -> Vec<Volume> =
        |reply| Request::VolumeList { tenant, reply };
    /// One volume.
    volume_show(tenant: String, volume: String) -> Volume =
        |reply| Request::VolumeShow { tenant, volume, reply };
    /// Where a volume may hold data, from a byte on.
    volume_extents(tenant: String, volume: String, from_bytes: u64) -> VolumeExtents =
        |reply| Request::VolumeExtents { tenant, volume, from_bytes, reply };
    /// Grows a volume, or changes its reservation.
    volume_update(tenant: String, volume: String, body: VolumeUpdate) -> Volume =
        |reply| Request::VolumeUpdate { tenant, volume, body, reply };
    /// Ends a volume that is not exported.
    volume_delete(tenant: String, volume: String) -> () =
        |reply| Request::VolumeDelete { tenant, volume, reply };
    /// An image goes into the volume or comes out of it.
    transfer_put(tenant: String, volume: String, body: TransferPut) -> Transfer =
        |reply| Request::TransferPut { tenant, volume, body, reply };
    /// It has.
    transfer_end(tenant: String, volume: String, host: String) -> () =
        |reply| Request::TransferEnd { tenant, volume, host, reply };
    /// Exports a volume.
    export_create(body: ExportCreate) -> Export = |reply| Request::ExportCreate { body, reply };
    /// All exports.
    export_list() -> Vec<Export> = Request::ExportList;
    /// One export.
    export_show(tenant: String, volume: String) -> Export =
        |reply| Request::ExportShow { tenant, volume, reply };
    /// Changes who may connect.
    export_update(tenant: String, volume: String, body: ExportUpdate) -> Export =
        |reply| Request::ExportUpdate { tenant, volume, body, reply };
    /// Ends an export; refused while it is in use, unless its hosts are to be disconnected.
    export_delete(tenant: String, volume: String, disconnect_hosts: bool) -> u64 =
        |reply| Request::ExportDelete { tenant, volume, disconnect_hosts, reply };
    /// Serves a quarantined export again.
    export_resume(tenant: String, volume: String) -> Export =
        |reply| Request::ExportResume { tenant, volume, reply };
    /// The ports.
    port_list() -> Vec<Port> = Request::PortList;
    /// Changes how hosts should use a port.
    port_update(address: SocketAddr, body: PortUpdate) -> Port =
        |reply| Request::PortUpdate { address, body, reply };
    /// What happened.
    events(after: Option<u64>, wait: Duration) -> EventList =
        |reply| Request::Events { after, wait, reply };
    /// Somebody changed something.
    audit(audit: Box<Audit>) -> () = |reply| Request::Audit { audit, reply };
    /// Counters.
    stats() -> Stats = Request::Stats;
    /// Has another engine go on.
    engine_replace() -> String = Request::EngineReplace;
    /// Stops engine and daemon.
    shutdown() -> () = Request::Shutdown;
}
