//! The daemon: joins owner and supervisor, and keeps what outlives a pool (listeners, events,
//! configuration).
//!
//! It runs on one thread. API requests arrive as closures (`requests`) and become tasks. One change
//! of the whole pool runs at a time (`pool`).

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use forebay_xlate::DeviceIndex;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::clusters::Clusters;
use crate::config::{DaemonConfig, Listen, Program};
use crate::devices::Opening;
use crate::events::Events;
use crate::firmware::Firmware;
use crate::model::DeathReport;
use crate::model::error::{ApiError, ErrorKind};
use crate::owner::Owner;
use crate::ownership::Installation;
use crate::supervisor::Supervisor;
use crate::supervisor::process::EngineProcess;

mod engine;
mod error;
mod firmware;
mod listeners;
mod parts;
mod pool;
mod reopen;
mod requests;
mod start;
mod status;
mod stop;

pub use error::DaemonError;
pub(crate) use firmware::CommitAction;
pub(crate) use requests::{DaemonRequest, Handle, channel};
pub(crate) use status::Condition;

/// Names the folder of librados and librbd, if the system does not find them.
const CEPH_LIBRARIES: &str = "FOREBAY_CEPH_LIBRARIES";

pub(crate) type ServeMetrics = Box<dyn Fn(TcpListener) -> JoinHandle<()>>;

struct Serving {
    owner: Rc<Owner>,
    supervisor: Rc<Supervisor>,
    supervising: RefCell<Option<JoinHandle<()>>>,
}

pub(crate) struct Daemon {
    pub(crate) config: DaemonConfig,
    /// This daemon's identity in the pool's labels.
    me: Arc<Installation>,
    started: Instant,
    serving: RefCell<Option<Rc<Serving>>>,
    /// Listeners while no pool is served.
    spare_listeners: RefCell<BTreeMap<String, OwnedFd>>,
    /// The addresses of the last valid configuration.
    listen: RefCell<Listen>,
    /// False while an engine that this daemon can't talk to may have the addresses.
    listens: Cell<bool>,
    program: Box<dyn Program>,
    /// Parts that can't be served, and why.
    parts: RefCell<BTreeMap<String, String>>,
    /// The metrics listener's address and task.
    metrics: RefCell<Option<(SocketAddr, JoinHandle<()>)>>,
    serve_metrics: ServeMetrics,
    /// A pool is being created, opened or destroyed.
    changing_pool: Cell<bool>,
    /// The daemon itself tries to open the pool: devices may answer now.
    polls_again: Cell<bool>,
    opening: RefCell<Option<Arc<Opening>>>,
    /// Why the recorded pool is not open.
    trouble: RefCell<Option<ApiError>>,
    /// The generation of an engine whose descriptor of a device is outdated.
    stale_engine: Cell<Option<u64>>,
    /// Devices that were missing or failed when the pool was opened or left.
    lost_devices: RefCell<BTreeSet<DeviceIndex>>,
    /// This daemon's engine, while the pool is reopened beside it.
    left_engine: RefCell<Option<EngineProcess>>,
    last_death: RefCell<Option<DeathReport>>,
    pub(crate) events: Rc<Events>,
    /// Frames, packets and messages that the out-of-band endpoint has dropped.
    pub(crate) out_of_band_drops: Arc<AtomicU64>,
    pub(crate) firmware: Rc<Firmware>,
    pub(crate) clusters: Rc<Clusters>,
}

impl Daemon {
    pub(crate) fn new(
        config: DaemonConfig,
        me: Arc<Installation>,
        program: Box<dyn Program>,
        serve_metrics: ServeMetrics,
    ) -> Self {
        let events = Rc::new(Events::kept_in(&config.state_dir));
        let listen = RefCell::new(config.listen.clone());
        let firmware = Firmware::new(
            &config.state_dir,
            config.engine.program.clone(),
            config.firmware.keys.clone(),
            events.clone(),
        );
        if let Some(version) = &config.firmware.installed_version {
            firmware.note_installed(version);
        }
        let clusters = Clusters::new(std::env::var_os(CEPH_LIBRARIES).map(PathBuf::from));
        clusters.configure(config.clusters.clone());
        Self {
            config,
            me,
            started: Instant::now(),
            serving: RefCell::new(None),
            spare_listeners: RefCell::default(),
            listen,
            listens: Cell::new(false),
            program,
            parts: RefCell::default(),
            metrics: RefCell::default(),
            serve_metrics,
            changing_pool: Cell::new(false),
            polls_again: Cell::new(false),
            opening: RefCell::new(None),
            trouble: RefCell::new(None),
            stale_engine: Cell::new(None),
            lost_devices: RefCell::default(),
            left_engine: RefCell::new(None),
            out_of_band_drops: Arc::default(),
            last_death: RefCell::new(None),
            events,
            firmware,
            clusters: Rc::new(clusters),
        }
    }

    fn grants_path(&self) -> PathBuf {
        self.config.run_dir.join("grants")
    }

    fn serving(&self) -> Option<Rc<Serving>> {
        self.serving.borrow().clone()
    }

    fn no_pool(&self) -> ApiError {
        match self.trouble.borrow().clone() {
            // The requested volume may well exist.
            Some(trouble) if trouble.kind == ErrorKind::NotFound => ApiError {
                kind: ErrorKind::Unavailable,
                ..trouble
            },
            Some(trouble) => trouble,
            None => ApiError::not_found("there is no pool")
                .hint("create one with `forebay pool create`"),
        }
    }

    fn addresses(&self) -> Vec<String> {
        let mut addresses: Vec<String> = self.spare_listeners.borrow().keys().cloned().collect();
        if let Some(serving) = self.serving() {
            addresses.extend(serving.owner.ports.addresses());
        }
        addresses
    }

    fn exposures(&self) -> Vec<String> {
        let held = self.addresses();
        let held: Vec<SocketAddr> = held.iter().flat_map(|held| held.parse()).collect();
        self.listen.borrow().exposures(&held)
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| {
        Err(ApiError::internal(
            "a thread of the daemon failed; see its log",
        ))
    })
}
