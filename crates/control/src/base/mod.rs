//! The base of all other modules: the pool, its grant table, catalog and open devices; tasks,
//! commits, events and locks on volumes.
//!
//! [`Core`] is in a `RefCell` that is never borrowed over an await. Tasks end when the owner is
//! closed.

pub(crate) mod commit;
pub(crate) mod show;
pub(crate) mod volume_locks;
pub(crate) mod waits;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use forebay_device::fence::Holder;
use forebay_pool::{
    BatchId, Catalog, ClientRecord, DeviceHealth, DeviceRecord, IMAGE_EXTENT_BYTES, ImageRecord,
    Pool, VolumeRecord,
};
use forebay_xlate::boundary::message::{DeviceConfig, DeviceFence, ImageConfig, VolumeConfig};
use forebay_xlate::grants::GrantTable;
use forebay_xlate::{DeviceIndex, VolumeId};
use tokio::time::timeout;

use crate::base::commit::Committer;
use crate::base::volume_locks::Turns;
use crate::base::waits::Waits;
use crate::changed::Signal;
use crate::clusters::Clusters;
use crate::config::ClusterConfig;
use crate::devices::{MissingDevice, PoolDevice, api_error};
use crate::events::{EventFields, Events};
use crate::model::error::ApiError;
use crate::model::events::EventKind;

/// The addresses of a Ceph client, in extents.
const CLIENT_EXTENTS: u64 = 1 << 36;

/// The engine's specification of a Ceph client.
fn client_spec(cluster: &ClusterConfig, id: u128) -> String {
    let keyring = cluster.keyring.as_ref();
    let keyring = keyring.map_or(String::new(), |path| format!("&keyring={}", path.display()));
    format!(
        "rbd:{}?cluster={}&user={}{keyring}&client={id:032x}",
        cluster.config.display(),
        cluster.cluster,
        cluster.user
    )
}

fn image_config(image: &ImageRecord) -> ImageConfig {
    ImageConfig {
        device: image.client,
        span: image.span,
        pool: image.pool.clone(),
        namespace: image.namespace.clone(),
        image: image.image.clone(),
        snapshot: image.snapshot.clone(),
    }
}

/// The owner's time limits.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    /// The engine's answer to a request.
    pub(crate) request: Duration,
    /// A revoke, until nothing uses the range, including deaths of engines.
    pub(crate) revoke: Duration,
    /// The freeze of volumes for a snapshot, below the engine's limit for commands that wait for it.
    pub(crate) freeze: Duration,
    /// The end of requests in flight at a device where a revoke did not drain; then it counts as
    /// hanging.
    pub(crate) settle: Duration,
    /// A job of the internal lane.
    pub(crate) job: Duration,
    /// A fault's wait for zero-fill without progress; then it fails with "no space" if none is
    /// coming.
    pub(crate) zero_fill: Duration,
    /// Work that an earlier daemon left unfinished in the engine. A fault waits at most for this
    /// and twice `adoption`; the engine waits 20 s for its answer.
    pub(crate) inherited: Duration,
    /// An engine's conversion of an estate, and then its start to act.
    pub(crate) convert: Duration,
    /// The first commit after adoption; then faults are answered anyway.
    pub(crate) adoption: Duration,
    /// The period of syncs of uncommitted mappings.
    pub(crate) sync_every: Duration,
    /// The delay before a failed device is tried again.
    pub(crate) device_retry: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            request: Duration::from_secs(10),
            revoke: Duration::from_secs(30),
            freeze: Duration::from_secs(5),
            settle: Duration::from_secs(2),
            job: Duration::from_secs(60),
            zero_fill: Duration::from_secs(15),
            inherited: Duration::from_secs(5),
            convert: Duration::from_secs(5),
            adoption: Duration::from_secs(5),
            sync_every: Duration::from_secs(2),
            device_retry: Duration::from_secs(5),
        }
    }
}

/// The state behind all decisions. Never borrowed over an await.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) pool: Pool,
    pub(crate) grants: GrantTable,
}

/// Counts since the daemon started.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) faults: Cell<u64>,
    pub(crate) revokes: Cell<u64>,
}

pub(crate) fn count(counter: &Cell<u64>) {
    count_by(counter, 1);
}

pub(crate) fn count_by(counter: &Cell<u64>, by: u64) {
    counter.set(counter.get().wrapping_add(by));
}

#[derive(Debug)]
pub(crate) struct Base {
    pub(crate) core: RefCell<Core>,
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) devices: RefCell<Vec<PoolDevice>>,
    pub(crate) missing: RefCell<Vec<MissingDevice>>,
    pub(crate) limits: Limits,
    pub(crate) counters: Counters,
    pub(crate) events: Rc<Events>,
    pub(crate) clusters: Rc<Clusters>,
    pub(crate) committer: Committer,
    pub(crate) waits: Waits,
    pub(crate) turns: Turns,
    /// The newest engine that was told everything.
    pub(crate) newest_generation: Cell<u64>,
    /// Growing volumes: their durable sizes, until this batch is durable.
    pub(crate) growing: RefCell<BTreeMap<VolumeId, (u64, BatchId)>>,
    /// Volumes whose write right is revoked for a snapshot, and their next epoch.
    pub(crate) frozen: RefCell<BTreeMap<VolumeId, u16>>,
    /// Raised when extents may have become dirty.
    pub(crate) zero_fill_wanted: Signal,
    /// Raised when a device's health, suspicion or quarantine changes.
    pub(crate) devices_changed: Signal,
    /// Set after adoption: faults, releases and changes of extents may go on.
    open: Cell<bool>,
    opened: Signal,
    closed: Cell<bool>,
    closing: Signal,
}

impl Base {
    pub(crate) fn new(
        core: Core,
        catalog: Arc<Catalog>,
        devices: Vec<PoolDevice>,
        limits: Limits,
        events: Rc<Events>,
        clusters: Rc<Clusters>,
    ) -> Rc<Self> {
        Rc::new(Self {
            core: RefCell::new(core),
            catalog,
            devices: RefCell::new(devices),
            missing: RefCell::default(),
            limits,
            counters: Counters::default(),
            events,
            clusters,
            committer: Committer::new(),
            waits: Waits::default(),
            turns: Turns::default(),
            newest_generation: Cell::new(0),
            growing: RefCell::default(),
            frozen: RefCell::default(),
            zero_fill_wanted: Signal::new(),
            devices_changed: Signal::new(),
            open: Cell::new(false),
            opened: Signal::new(),
            closed: Cell::new(false),
            closing: Signal::new(),
        })
    }

    /// Ends every task; nothing is committed afterwards.
    pub(crate) fn close(&self) {
        self.closed.set(true);
        self.closing.raise();
    }

    /// Marks adoption as finished.
    pub(crate) fn set_open(&self) {
        self.open.set(true);
        self.opened.raise();
    }

    /// Runs a task until the owner is closed.
    pub(crate) fn spawn(self: &Rc<Self>, task: impl Future<Output = ()> + 'static) {
        self.spawn_boxed(Box::pin(task));
    }

    /// Boxed, so that tokio's task code is compiled only once.
    fn spawn_boxed(self: &Rc<Self>, task: Pin<Box<dyn Future<Output = ()>>>) {
        let owner = self.clone();
        tokio::task::spawn_local(async move {
            tokio::select! {
                biased;
                () = owner.closing.until(|| owner.closed.get().then_some(())) => {}
                () = task => {}
            }
        });
    }

    pub(crate) fn report(&self, kind: EventKind, text: String, fields: EventFields) {
        self.events
            .report(kind, self.newest_generation.get(), text, fields);
    }

    pub(crate) async fn wait_open(&self) {
        self.opened.until(|| self.open.get().then_some(())).await;
    }

    pub(crate) fn is_open(&self) -> bool {
        self.open.get()
    }

    /// Waits until no engine has a lock on any device.
    pub(crate) async fn wait_unfenced(&self, limit: Duration) -> Result<(), ApiError> {
        let begin = tokio::time::Instant::now();
        loop {
            let mut holder = None;
            for device in &*self.devices.borrow() {
                let holders = device.store.0.holders();
                let holders = holders.map_err(|error| ApiError::unavailable(error.to_string()))?;
                let engine = holders
                    .into_iter()
                    .find(|h| matches!(h, Holder::Engine { .. }));
                holder = holder.or(engine.map(|engine| (device.spec.clone(), engine)));
            }
            match holder {
                None => return Ok(()),
                Some((spec, engine)) if begin.elapsed() >= limit => {
                    return Err(ApiError::in_use(format!(
                        "{spec}: {engine} still has requests in flight there"
                    ))
                    .hint("wait until the device answers, and try again"));
                }
                Some(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    }

    pub(crate) fn device_indexes(&self) -> Vec<DeviceIndex> {
        self.core
            .borrow()
            .pool
            .devices()
            .iter()
            .map(|device| device.index)
            .collect()
    }

    pub(crate) fn report_device(&self, kind: EventKind, device: DeviceIndex, text: String) {
        let fields = EventFields {
            device: Some(device.0),
            ..EventFields::default()
        };
        self.report(kind, text, fields);
    }

    /// A device's current specification; the catalog's may be older.
    pub(crate) fn device_spec(&self, record: &DeviceRecord) -> String {
        let devices = self.devices.borrow();
        let open = devices.iter().find(|device| device.index == record.index);
        open.map_or_else(|| record.spec.clone(), |device| device.spec.clone())
    }

    pub(crate) fn is_open_here(&self, device: DeviceIndex) -> bool {
        let devices = self.devices.borrow();
        devices.iter().any(|open| open.index == device)
    }

    pub(crate) fn spec_of(&self, device: DeviceIndex) -> String {
        let core = self.core.borrow();
        if let Some(client) = core.pool.images().client(device) {
            return format!("the client of Ceph cluster {}", client.cluster);
        }
        let record = core.pool.devices().iter().find(|r| r.index == device);
        record.map_or_else(|| device.to_string(), |record| self.device_spec(record))
    }

    /// Whether mappings on the device may be used.
    pub(crate) fn is_served(&self, device: DeviceIndex) -> bool {
        let health = self.core.borrow().pool.allocator().device_health(device);
        matches!(health, DeviceHealth::Online | DeviceHealth::Failing)
    }

    /// Whether the device may be used for anything.
    pub(crate) fn is_online(&self, device: DeviceIndex) -> bool {
        self.core.borrow().pool.allocator().device_health(device) == DeviceHealth::Online
    }

    pub(crate) fn lost_devices(&self) -> BTreeSet<DeviceIndex> {
        let pool = &self.core.borrow().pool;
        let all = pool.devices().iter().map(|record| record.index);
        all.filter(|index| {
            matches!(
                pool.allocator().device_health(*index),
                DeviceHealth::Missing | DeviceHealth::Failed
            )
        })
        .collect()
    }

    pub(crate) fn device_specs(&self) -> Vec<(DeviceIndex, String)> {
        let devices = self.devices.borrow();
        devices
            .iter()
            .map(|own| (own.index, own.spec.clone()))
            .collect()
    }

    pub(crate) async fn commit_for_api(&self) -> Result<(), ApiError> {
        self.commit().await.map_err(|error| {
            ApiError::unavailable(error.to_string())
                .hint("the change is kept in memory and tried again; see the daemon's log")
        })
    }

    /// The size that a crash can't take back.
    pub(crate) fn durable_size(&self, pool: &Pool, record: &VolumeRecord) -> u64 {
        match self.growing.borrow().get(&record.id) {
            Some((size_bytes, batch)) if *batch > pool.journal().committed_id() => *size_bytes,
            _ => record.size_bytes,
        }
    }

    pub(crate) fn volume_id(&self, tenant: &str, name: &str) -> Result<VolumeId, ApiError> {
        let core = self.core.borrow();
        core.pool
            .volume_by_name(tenant, name)
            .map(|record| record.id)
            .map_err(api_error)
    }

    /// Refuses a volume that got the name of another one.
    pub(crate) fn refuse_other(
        &self,
        tenant: &str,
        name: &str,
        id: VolumeId,
    ) -> Result<(), ApiError> {
        match self.volume_id(tenant, name)? {
            known if known == id => Ok(()),
            _ => Err(ApiError::not_found(format!(
                "{id} is no longer {tenant}/{name}"
            ))),
        }
    }

    /// For changes that a snapshot does not allow.
    pub(crate) fn refuse_snapshot(
        &self,
        id: VolumeId,
        tenant: &str,
        name: &str,
    ) -> Result<(), ApiError> {
        let core = self.core.borrow();
        if !core.pool.volume(id).map_err(api_error)?.is_snapshot() {
            return Ok(());
        }
        Err(ApiError::invalid(format!(
            "{tenant}/{name} is a snapshot, which can't be changed"
        ))
        .hint(format!(
            "clone it, and change the clone: `forebay volume clone {tenant}/{name} {tenant}/NAME`"
        )))
    }

    pub(crate) async fn wait_open_for_api(&self) -> Result<(), ApiError> {
        timeout(self.limits.request, self.wait_open())
            .await
            .map_err(|_| {
                ApiError::unavailable(
                    "the daemon is still taking over the grants of an earlier daemon",
                )
                .hint("try again in a moment; see `forebay status`")
            })
    }

    /// A Ceph client's configuration for the engine; `None` if its cluster is not configured.
    pub(crate) fn client_config(
        &self,
        client: &ClientRecord,
        fence: DeviceFence,
    ) -> Option<DeviceConfig> {
        let cluster = self.clusters.config(&client.cluster).ok()?;
        Some(DeviceConfig {
            device: client.index,
            uuid: client.uuid.into_bytes(),
            spec: client_spec(&cluster, client.uuid.as_u128()),
            data_offset_bytes: 0,
            extent_bytes: IMAGE_EXTENT_BYTES as u32,
            extents: CLIENT_EXTENTS,
            fence,
        })
    }

    pub(crate) fn device_config(&self, record: &DeviceRecord, extent_bytes: u64) -> DeviceConfig {
        DeviceConfig {
            device: record.index,
            uuid: record.uuid.into_bytes(),
            spec: self.device_spec(record),
            data_offset_bytes: record.data_offset_bytes,
            // The pool allows at most 4 MiB.
            extent_bytes: extent_bytes as u32,
            extents: record.extents,
            fence: DeviceFence::Locks,
        }
    }

    /// The volume's configuration for the engine, with its durable size.
    pub(crate) fn volume_config(&self, pool: &Pool, record: &VolumeRecord) -> VolumeConfig {
        let extent_bytes = pool.volumes().extent_bytes_of(record.id);
        let extent_bytes = extent_bytes.unwrap_or(pool.info().extent_bytes);
        VolumeConfig {
            volume: record.id,
            uuid: record.uuid.into_bytes(),
            read_only: record.is_snapshot(),
            size_bytes: self.durable_size(pool, record),
            block_bytes: record.block_bytes,
            // The pool allows at most 4 MiB.
            extent_bytes: extent_bytes as u32,
            epoch: self.epoch_of(record),
            image: pool.images().of(record.id).map(image_config),
        }
    }

    /// The volume's epoch in the engine.
    pub(crate) fn epoch_of(&self, record: &VolumeRecord) -> u16 {
        let frozen = self.frozen.borrow().get(&record.id).copied();
        frozen.unwrap_or(record.epoch())
    }

    /// The device's configuration for the engine, if the daemon has it open.
    pub(crate) fn config_of(&self, device: DeviceIndex) -> Option<DeviceConfig> {
        let core = self.core.borrow();
        if let Some(client) = core.pool.images().client(device) {
            return self.client_config(client, DeviceFence::Unnoted);
        }
        let devices = core.pool.devices();
        let record = devices.iter().find(|record| record.index == device)?;
        self.is_open_here(device)
            .then(|| self.device_config(record, core.pool.info().extent_bytes))
    }

    /// Whether any tenant or volume has a budget.
    pub(crate) fn has_budgets(&self) -> bool {
        let pool = &self.core.borrow().pool;
        pool.budgets().tenants().next().is_some() || pool.budgets().volumes().next().is_some()
    }

    /// Whether any volume has unwritten preallocated extents.
    pub(crate) fn has_preallocated(&self) -> bool {
        self.core.borrow().pool.volumes().preallocated() > 0
    }
}
