//! What every room stands on.
//!
//! Purpose: the pool with its grant table, its catalog, its open devices, and the means to work with them: tasks, durable
//! commits, events, one change of a volume at a time.
//! Design: [`Core`] is behind a `RefCell` that nobody borrows over a wait. Tasks end when the owner is closed.
//! Not here: the engine (`link`), what is done with the pool (the rooms above).

pub(crate) mod commit;
pub(crate) mod show;
pub(crate) mod together;
pub(crate) mod turns;
pub(crate) mod waits;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use forebay_device::fence::Holder;
use forebay_pool::{BatchId, Catalog, DeviceHealth, DeviceRecord, Pool, VolumeRecord};
use forebay_xlate::boundary::message::{DeviceConfig, VolumeConfig};
use forebay_xlate::grants::GrantTable;
use forebay_xlate::{DeviceIndex, VolumeId};
use tokio::time::timeout;

use crate::base::commit::Committer;
use crate::base::turns::Turns;
use crate::base::waits::Waits;
use crate::devices::{MissingDevice, PoolDevice, api_error};
use crate::events::{Events, News};
use crate::model::error::ApiError;
use crate::model::events::EventKind;
use crate::signal::Signal;

/// How long the owner waits for what.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    /// An engine's answer to a request.
    pub(crate) request: Duration,
    /// A revoke, from asking until nothing uses the range, over engines' deaths.
    pub(crate) revoke: Duration,
    /// Whether a device that a revoke did not drain on hangs: until what is in flight there has ended.
    pub(crate) settle: Duration,
    /// A job of the internal lane.
    pub(crate) job: Duration,
    /// A fault that waits for laundering without anything becoming clean, before it is answered "no
    /// space" if none is coming.
    pub(crate) launder: Duration,
    /// What an earlier daemon left unfinished in the engine, before the rest goes on. A fault waits for
    /// this and twice for `adoption` at most, and the engine waits 20 s for its answer.
    pub(crate) inherited: Duration,
    /// An engine that converts what a dead one left, and then that it acts.
    pub(crate) convert: Duration,
    /// The first commit after adoption, before faults are answered all the same.
    pub(crate) adoption: Duration,
    /// Between two looks at uncommitted mappings.
    pub(crate) sync_every: Duration,
    /// Before a device that failed is tried again.
    pub(crate) device_retry: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            request: Duration::from_secs(10),
            revoke: Duration::from_secs(30),
            settle: Duration::from_secs(2),
            job: Duration::from_secs(60),
            launder: Duration::from_secs(15),
            inherited: Duration::from_secs(5),
            convert: Duration::from_secs(5),
            adoption: Duration::from_secs(5),
            sync_every: Duration::from_secs(2),
            device_retry: Duration::from_secs(5),
        }
    }
}

/// What the owner decides by. Never borrowed over a wait.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) pool: Pool,
    pub(crate) grants: GrantTable,
}

/// Events since the daemon started.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) faults: Cell<u64>,
    pub(crate) revokes: Cell<u64>,
}

/// Adds one.
pub(crate) fn count(counter: &Cell<u64>) {
    count_by(counter, 1);
}

pub(crate) fn count_by(counter: &Cell<u64>, by: u64) {
    counter.set(counter.get().wrapping_add(by));
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Base {
    pub(crate) core: RefCell<Core>,
    pub(crate) catalog: Arc<Catalog>,
    /// The devices that the daemon has open.
    pub(crate) devices: RefCell<Vec<PoolDevice>>,
    /// Those that it has not.
    pub(crate) missing: RefCell<Vec<MissingDevice>>,
    pub(crate) limits: Limits,
    pub(crate) counters: Counters,
    pub(crate) events: Rc<Events>,
    pub(crate) committer: Committer,
    /// The waits that calls announce.
    pub(crate) waits: Waits,
    /// Who changes which volume.
    pub(crate) turns: Turns,
    /// The newest engine that was told everything.
    pub(crate) newest_generation: Cell<u64>,
    /// Volumes that grow: how large each durably is until this batch is durable.
    pub(crate) growing: RefCell<BTreeMap<VolumeId, (u64, BatchId)>>,
    /// Raised when something may have become dirty.
    pub(crate) launder_wanted: Signal,
    /// Raised when a device's health, suspicion or quarantine changes.
    pub(crate) devices_changed: Signal,
    /// Whether faults, releases and changes of extents go on: adoption is through.
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
    ) -> Rc<Self> {
        Rc::new(Self {
            core: RefCell::new(core),
            catalog,
            devices: RefCell::new(devices),
            missing: RefCell::default(),
            limits,
            counters: Counters::default(),
            events,
            committer: Committer::new(),
            waits: Waits::default(),
            turns: Turns::default(),
            newest_generation: Cell::new(0),
            growing: RefCell::default(),
            launder_wanted: Signal::new(),
            devices_changed: Signal::new(),
            open: Cell::new(false),
            opened: Signal::new(),
            closed: Cell::new(false),
            closing: Signal::new(),
        })
    }

    /// Ends every task. Nothing is committed any more.
    pub(crate) fn close(&self) {
        self.closed.set(true);
        self.closing.raise();
    }

    /// Adoption is through.
    pub(crate) fn set_open(&self) {
        self.open.set(true);
        self.opened.raise();
    }

    /// Runs a task for as long as the owner is not closed.
    pub(crate) fn spawn(self: &Rc<Self>, task: impl Future<Output = ()> + 'static) {
        self.spawn_boxed(Box::pin(task));
    }

    /// Boxed, so that tokio's tasks are compiled once and not for each caller.
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

    /// Something happened.
    pub(crate) fn tell(&self, kind: EventKind, text: String, news: News) {
        self.events
            .tell(kind, self.newest_generation.get(), text, news);
    }

    /// Waits until adoption is through.
    pub(crate) async fn wait_open(&self) {
        self.opened.until(|| self.open.get().then_some(())).await;
    }

    /// Whether adoption is through.
    pub(crate) fn is_open(&self) -> bool {
        self.open.get()
    }

    /// Waits until no engine's lock is left on any device.
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

    /// All devices of the pool.
    pub(crate) fn device_indexes(&self) -> Vec<DeviceIndex> {
        self.core
            .borrow()
            .pool
            .devices()
            .iter()
            .map(|device| device.index)
            .collect()
    }

    /// Something happened to a device.
    pub(crate) fn tell_of_device(&self, kind: EventKind, device: DeviceIndex, text: String) {
        let news = News {
            device: Some(device.0),
            ..News::default()
        };
        self.tell(kind, text, news);
    }

    /// Where a device is now, whatever the catalog last heard.
    pub(crate) fn device_spec(&self, record: &DeviceRecord) -> String {
        let devices = self.devices.borrow();
        let open = devices.iter().find(|device| device.index == record.index);
        open.map_or_else(|| record.spec.clone(), |device| device.spec.clone())
    }

    /// Whether the daemon has the device open.
    pub(crate) fn is_open_here(&self, device: DeviceIndex) -> bool {
        let devices = self.devices.borrow();
        devices.iter().any(|open| open.index == device)
    }

    /// A device's specification string.
    pub(crate) fn spec_of(&self, device: DeviceIndex) -> String {
        let core = self.core.borrow();
        let record = core.pool.devices().iter().find(|r| r.index == device);
        record.map_or_else(|| device.to_string(), |record| self.device_spec(record))
    }

    /// Whether what is mapped on the device may be used.
    pub(crate) fn is_served(&self, device: DeviceIndex) -> bool {
        let health = self.core.borrow().pool.allocator().device_health(device);
        matches!(health, DeviceHealth::Online | DeviceHealth::Failing)
    }

    /// Whether the device may be used for anything.
    pub(crate) fn is_online(&self, device: DeviceIndex) -> bool {
        self.core.borrow().pool.allocator().device_health(device) == DeviceHealth::Online
    }

    /// The devices that are missing or have failed.
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

    /// The pool's devices that are open: index and specification.
    pub(crate) fn device_specs(&self) -> Vec<(DeviceIndex, String)> {
        let devices = self.devices.borrow();
        devices
            .iter()
            .map(|own| (own.index, own.spec.clone()))
            .collect()
    }

    /// Makes everything changed so far durable, for the API.
    pub(crate) async fn commit_for_api(&self) -> Result<(), ApiError> {
        self.commit().await.map_err(|error| {
            ApiError::unavailable(error.to_string())
                .hint("the change is kept in memory and tried again; see the daemon's log")
        })
    }

    /// How large a volume is for as long as no crash takes it back.
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

    /// Waits until adoption is through, for the API.
    pub(crate) async fn wait_open_for_api(&self) -> Result<(), ApiError> {
        timeout(self.limits.request, self.wait_open())
            .await
            .map_err(|_| {
                ApiError::unavailable("the daemon is still taking over what an earlier one granted")
                    .hint("try again in a moment; see `forebay status`")
            })
    }

    pub(crate) fn device_config(&self, record: &DeviceRecord, extent_bytes: u64) -> DeviceConfig {
        DeviceConfig {
            device: record.index,
            uuid: record.uuid.0,
            spec: self.device_spec(record),
            data_offset_bytes: record.data_offset_bytes,
            // The pool allows at most 4 MiB.
            extent_bytes: extent_bytes as u32,
            extents: record.extents,
        }
    }

    /// A volume as the engine is told of it: as large as it durably is.
    pub(crate) fn volume_config(&self, pool: &Pool, record: &VolumeRecord) -> VolumeConfig {
        VolumeConfig {
            volume: record.id,
            uuid: record.uuid.0,
            size_bytes: self.durable_size(pool, record),
            block_bytes: record.block_bytes,
            // The pool allows at most 4 MiB.
            extent_bytes: pool.info().extent_bytes as u32,
        }
    }

    /// A device as the engine is told of it, if it is here.
    pub(crate) fn config_of(&self, device: DeviceIndex) -> Option<DeviceConfig> {
        let core = self.core.borrow();
        let devices = core.pool.devices();
        let record = devices.iter().find(|record| record.index == device)?;
        self.is_open_here(device)
            .then(|| self.device_config(record, core.pool.info().extent_bytes))
    }

    /// Whether anybody has a budget.
    pub(crate) fn has_budgets(&self) -> bool {
        let pool = &self.core.borrow().pool;
        pool.budgets().tenants().next().is_some() || pool.budgets().volumes().next().is_some()
    }

    /// Whether some volume has places ahead of its writes.
    pub(crate) fn has_places_ahead(&self) -> bool {
        self.core.borrow().pool.volumes().ahead() > 0
    }
}
