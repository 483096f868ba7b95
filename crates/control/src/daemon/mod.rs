//! The daemon, from its start to its end.
//!
//! Purpose: puts API, owner and supervisor together, in the order that makes two daemons on one pool
//! impossible and a restart harmless.
//! Design: the API's socket is claimed first. Then the recorded pool is opened (each device claimed) while the API says
//! so; a pool that can't be opened is told of and can be repaired through the API. After that a live engine of an earlier daemon is greeted, its grant table adopted, the missing listeners
//! bound, and the supervisor goes on with that engine or starts one. Requests become tasks of their
//! own, so a slow one holds nobody up. A stop commits everything, ends the engine, and leaves nothing
//! behind that a restart would have to take over; a kill leaves the engine running.
//! Not here: what the operations do (`owner`), processes (`supervisor`).

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use forebay_xlate::DeviceIndex;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinHandle, LocalSet};
use tokio::time::{Instant, timeout};

use crate::api;
use crate::api::error::{ApiError, ErrorKind};
use crate::api::events::EventKind;
use crate::api::model::{DeathReport, EngineState, Health, PoolOpen, Process, Status};
use crate::api::request::Handle;
use crate::api::stats::Stats;
use crate::config::{DaemonConfig, Listen, Program};
use crate::devices::{OpenPool, Opening};
use crate::events::{Events, News};
use crate::files;
use crate::owner::session::{GreetError, Greeting, Session};
use crate::owner::{Grants, Limits, Owner, grants_capacity, now_unix_ms};
use crate::ownership::Installation;
use crate::supervisor::found;
use crate::supervisor::process::{self, EngineProcess, EngineRecord};
use crate::supervisor::report;
use crate::supervisor::{GREET_LIMIT, Supervisor, connect_socket};
use crate::systemd;

mod listeners;
mod parts;
mod pool;
mod reopen;
mod requests;
mod stop;

/// How long the first requests wait for the pool before the answer is that it is being opened.
const START_HOLD: Duration = Duration::from_secs(2);
/// How long a start waits for the catalog.
const START_COMMIT_LIMIT: Duration = Duration::from_secs(30);

/// Why the daemon did not start, or did not end well.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct DaemonError {
    message: String,
    hint: Option<String>,
}

impl DaemonError {
    fn new(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            hint: None,
        }
    }

    fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// What to do about it.
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

impl From<ApiError> for DaemonError {
    fn from(error: ApiError) -> Self {
        Self {
            message: error.message,
            hint: error.hint,
        }
    }
}

impl From<io::Error> for DaemonError {
    fn from(error: io::Error) -> Self {
        Self::new(error.to_string())
    }
}

/// A pool with its owner and its engines.
struct Serving {
    owner: Rc<Owner>,
    supervisor: Rc<Supervisor>,
    /// The supervisor's task.
    supervising: RefCell<Option<JoinHandle<()>>>,
}

struct Daemon {
    config: DaemonConfig,
    /// Who this daemon is to the pool's labels.
    me: Arc<Installation>,
    started: Instant,
    serving: RefCell<Option<Rc<Serving>>>,
    /// Listeners while there is no pool to serve.
    spare_listeners: RefCell<BTreeMap<String, OwnedFd>>,
    /// The addresses of the last valid configuration.
    listen: RefCell<Listen>,
    /// The addresses are this daemon's to bind, and no engine's that it can't talk to.
    listens: Cell<bool>,
    program: Box<dyn Program>,
    /// Parts that can't be served, and why.
    parts: RefCell<BTreeMap<String, String>>,
    /// Where metrics are served besides, and by which task.
    metrics: RefCell<Option<(SocketAddr, JoinHandle<()>)>>,
    /// The way of requests to this daemon.
    handle: OnceCell<Handle>,
    /// A pool is being made, opened or destroyed.
    changing_pool: Cell<bool>,
    /// By the daemon itself, because devices may answer now.
    looks_again: Cell<bool>,
    /// How far the opening of the pool is that is under way.
    opening: RefCell<Option<Arc<Opening>>>,
    /// Why the recorded pool is not open.
    trouble: RefCell<Option<ApiError>>,
    /// The generation of an engine that has a device open which went away and came back.
    stale_engine: Cell<Option<u64>>,
    /// Devices of the pool that were missing or had failed when it was opened or left.
    lost_devices: RefCell<BTreeSet<DeviceIndex>>,
    /// This daemon's own engine, while the pool is opened anew beside it.
    left_engine: RefCell<Option<EngineProcess>>,
    last_death: RefCell<Option<DeathReport>>,
    events: Rc<Events>,
}

/// What ended a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndedBy {
    /// SIGTERM or SIGINT.
    Signal,
    /// A request through the API.
    Request,
}

/// Runs the daemon until SIGTERM, SIGINT, or a request to stop. A signal leaves the engine running if the
/// configuration says so; a request never does. SIGHUP has it read the configuration again.
///
/// # Errors
/// When it can't start, or when it could not commit everything at its end.
pub async fn run(config: DaemonConfig, program: Box<dyn Program>) -> Result<EndedBy, DaemonError> {
    LocalSet::new().run_until(run_here(config, program)).await
}

async fn run_here(config: DaemonConfig, program: Box<dyn Program>) -> Result<EndedBy, DaemonError> {
    let listener = api::bind(&config.api_socket).map_err(|error| {
        let in_use = error.kind() == io::ErrorKind::AddrInUse;
        let error = DaemonError::from(error);
        if in_use {
            error.with_hint("use that daemon, or end it first (SIGTERM)")
        } else {
            error
        }
    })?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let me = Installation::claim(&config.state_dir).map_err(|error| {
        let in_use = error.kind() == io::ErrorKind::AddrInUse;
        let error = DaemonError::from(error);
        if in_use {
            error.with_hint(
                "give each daemon a state folder of its own (`state_dir` in its configuration)",
            )
        } else {
            error
        }
    })?;
    let daemon = Rc::new(Daemon::new(config, Arc::new(me), program));
    let (handle, mut requests) = api::request::channel();
    let _ = daemon.handle.set(handle.clone());
    let (stop_api, stopped) = oneshot::channel::<()>();
    let stopped = async {
        let _ = stopped.await;
    };
    let server = tokio::task::spawn_local(api::serve(listener, handle, stopped));
    let mut starting = tokio::task::spawn_local(daemon.clone().start());
    let held = timeout(START_HOLD, &mut starting).await;
    let mut looking = match held {
        Ok(started) => Some(daemon.started(started)?),
        Err(_) => None,
    };
    let ended_by = loop {
        tokio::select! {
            started = &mut starting, if looking.is_none() => {
                looking = Some(daemon.started(started)?);
            }
            request = requests.recv() => match request {
                Some(api::request::Request::Shutdown(reply)) => {
                    let _ = reply.send(Ok(()));
                    break EndedBy::Request;
                }
                Some(request) => daemon.dispatch(request),
                None => break EndedBy::Request,
            },
            _ = terminate.recv() => break EndedBy::Signal,
            _ = interrupt.recv() => break EndedBy::Signal,
            _ = hangup.recv() => daemon.reload(),
        }
    };
    tracing::info!("the daemon stops");
    if daemon.is_settled().await {
        looking.iter().for_each(JoinHandle::abort);
    }
    systemd::tell("STOPPING=1");
    daemon.events.close_down();
    let _ = stop_api.send(());
    // What is asked from here on gets no answer, which callers read as "stopping".
    drop(requests);
    let result = if ended_by == EndedBy::Signal && daemon.config.keep_engine {
        daemon.leave_engine().await
    } else {
        daemon.stop().await
    };
    // It bounds itself.
    let _ = server.await;
    result.map(|()| ended_by)
}

impl Daemon {
    fn new(config: DaemonConfig, me: Arc<Installation>, program: Box<dyn Program>) -> Self {
        let events = Rc::new(Events::kept_in(&config.state_dir));
        let listen = RefCell::new(config.listen.clone());
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
            handle: OnceCell::new(),
            changing_pool: Cell::new(false),
            looks_again: Cell::new(false),
            opening: RefCell::new(None),
            trouble: RefCell::new(None),
            stale_engine: Cell::new(None),
            lost_devices: RefCell::default(),
            left_engine: RefCell::new(None),
            last_death: RefCell::new(None),
            events,
        }
    }

    fn grants_path(&self) -> PathBuf {
        self.config.run_dir.join("grants")
    }

    /// The start is through: the rest begins. Returns the task that takes devices back.
    fn started(
        self: &Rc<Self>,
        started: Result<Result<(), DaemonError>, JoinError>,
    ) -> Result<JoinHandle<()>, DaemonError> {
        started.map_err(|error| DaemonError::new(error.to_string()))??;
        self.keep_metrics();
        self.look_at_parts();
        let looking = tokio::task::spawn_local(self.clone().take_silent_back());
        tokio::task::spawn_local(self.clone().serve_the_rest());
        tracing::info!(socket = %self.config.api_socket.display(), "the daemon serves");
        let text = format!(
            "the daemon (pid {}, version {}) has started",
            std::process::id(),
            self.config.version
        );
        let generation = self.status().generation;
        self.events
            .tell(EventKind::DaemonStarted, generation, text, News::default());
        for exposure in self.exposures() {
            self.warn(exposure);
        }
        systemd::tell("READY=1");
        Ok(looking)
    }

    async fn start(self: Rc<Self>) -> Result<(), DaemonError> {
        let _only_one = self.try_change_pool()?;
        let record = self.find_record()?;
        let open = match self.open_pool(PoolOpen::default()).await {
            Ok(Some(open)) => Some(open),
            // The pool of an engine that lives is not one that is still to be made.
            Ok(None) if self.has_embedded_file() || self.living_engine()?.is_none() => {
                self.embedded().await?
            }
            Ok(None) => None,
            Err(trouble) => {
                // Whoever can repair it needs the API; an engine that lives serves on.
                tracing::error!(error = %trouble, hint = trouble.hint, "the pool is not open");
                *self.trouble.borrow_mut() = Some(trouble);
                if self.living_engine()?.is_none() {
                    let may_wait = self.may_open_later();
                    self.bind_listeners_at_start(may_wait)?;
                }
                return Ok(());
            }
        };
        match open {
            Some(open) => self.take_over(open, record).await,
            None => match self.living_engine()? {
                // It serves on, with the ports; the API is there to say which pool is its.
                Some(engine) => {
                    let trouble = ApiError::not_found(format!(
                        "an engine (pid {}) runs in {}, but no pool is recorded, and it has no device of one",
                        engine.pid,
                        self.config.run_dir.display()
                    ))
                    .hint("say which devices form its pool: `forebay pool open --device SPEC`");
                    tracing::error!(error = %trouble, hint = trouble.hint, "the pool is not open");
                    *self.trouble.borrow_mut() = Some(trouble);
                    Ok(())
                }
                None => self.bind_listeners_at_start(false),
            },
        }
    }

    /// The record of the engine; a lost one is made anew if the engine lives.
    fn find_record(&self) -> io::Result<Option<EngineRecord>> {
        if let Err(error) = process::recorded(&self.config.run_dir) {
            self.warn(format!(
                "{error}: the file is damaged; it is kept as engine.json.damaged, and a living engine is looked for"
            ));
        }
        found::engine(&self.config.run_dir)
    }

    fn has_embedded_file(&self) -> bool {
        let embedded = self.config.embedded_pool.as_ref();
        embedded.is_some_and(|embedded| embedded.path.exists())
    }

    /// The recorded engine, if it lives.
    fn living_engine(&self) -> io::Result<Option<EngineProcess>> {
        let record = process::recorded(&self.config.run_dir)?;
        record.map_or(Ok(None), |record| EngineProcess::find(&record))
    }

    /// Goes on with an opened pool, and with the engine of the daemon before this one if it lives.
    async fn take_over(
        self: &Rc<Self>,
        open: OpenPool,
        record: Option<EngineRecord>,
    ) -> Result<(), DaemonError> {
        let OpenPool {
            mut pool,
            catalog,
            devices,
            missing,
            tenure,
            is_new,
        } = open;
        self.record_devices(&pool);
        let pool_id = pool.info().uuid.0;
        let mut live = self.find_engine(record, pool_id).await?;
        let deposited = live
            .as_mut()
            .and_then(|(_, greeting)| greeting.table.take());
        let undeposited = live.is_some() && deposited.is_none();
        let boot_id = forebay_xlate::shm::boot_id()?;
        let path = self.grants_path();
        let grants = if is_new {
            Grants::fresh(&path, &pool, &boot_id, grants_capacity())
        } else {
            Grants::adopt(&path, &mut pool, deposited, &boot_id, grants_capacity())
        };
        let grants = grants.map_err(|error| {
            DaemonError::new(format!("the grant table {}: {error}", path.display()))
        })?;
        if let Some((engine, _)) = &live
            && (!grants.same_boot() || undeposited)
        {
            tracing::warn!(
                pid = engine.pid,
                "a running engine's grants are not known: it is replaced"
            );
            engine.kill();
            engine.ended().await;
            live = None;
        }
        if let Some((_, greeting)) = &live {
            // At once: it may die before anything else is done with it.
            self.keep_listeners(greeting)?;
        }
        // Who hangs at a silent device may still have the addresses, and machines have sockets of their own.
        let may_wait = live.is_some()
            || missing.iter().any(|device| device.is_silent)
            || pool.exports().any(|export| export.frontend.is_machine());
        self.bind_listeners_at_start(may_wait)?;
        let (catalog, limits) = (Arc::new(catalog), Limits::default());
        let owner = Owner::new(pool, catalog, devices, grants, limits, self.events.clone());
        owner.labels.set_hold(self.me.clone(), tenure);
        if live.is_none() {
            let finished = timeout(
                START_COMMIT_LIMIT,
                owner.mapping.adopter.finish_adoption(None),
            )
            .await;
            if finished.is_err() {
                let trouble = owner.base.catalog_trouble().unwrap_or_default();
                owner.close();
                return Err(DaemonError::new(format!(
                    "the pool's catalog can't be written: {trouble}"
                ))
                .with_hint("make room or repair the device below the pool, and start again"));
            }
        }
        *owner.base.missing.borrow_mut() = missing;
        let before = self.lost_devices.replace(owner.base.lost_devices());
        owner.states.tell_of_lost(&before);
        self.begin(owner, live);
        Ok(())
    }

    /// Starts to serve a pool.
    fn begin(self: &Rc<Self>, owner: Rc<Owner>, mut live: Option<(EngineProcess, Greeting)>) {
        owner.labels.begin_stamp();
        self.watch_tenure(&owner);
        owner
            .ports
            .listeners
            .borrow_mut()
            .append(&mut self.spare_listeners.borrow_mut());
        owner.ports.note_ports();
        owner
            .states
            .set_record_dirs(self.record_dirs().map(ToOwned::to_owned).to_vec());
        owner
            .budgets
            .set_node(&self.config.state_dir, self.config.engine.reactors);
        owner
            .exports
            .node_name
            .replace(self.config.node_name.clone());
        owner.statistics.keep_figures(&self.config.state_dir);
        if let Some((_, greeting)) = &mut live {
            // What the engine listens on already is not missing.
            owner.vms.keep_machine_listeners(&mut greeting.held);
        }
        owner
            .vms
            .begin_machines(self.config.run_dir.join("machines"));
        let supervisor = Supervisor::new(
            self.config.engine.clone(),
            &self.config.run_dir,
            &self.config.state_dir,
            self.last_death.borrow().clone(),
            self.events.clone(),
        );
        let supervising = tokio::task::spawn_local(supervisor.clone().run(owner.clone(), live));
        *self.serving.borrow_mut() = Some(Rc::new(Serving {
            owner,
            supervisor,
            supervising: RefCell::new(Some(supervising)),
        }));
    }

    /// The recorded engine, greeted, if it lives and is this pool's.
    async fn find_engine(
        &self,
        record: Option<EngineRecord>,
        pool_id: [u8; 16],
    ) -> Result<Option<(EngineProcess, Greeting)>, DaemonError> {
        let Some(record) = record else {
            return Ok(None);
        };
        let found = if record.pid.is_none() {
            // The daemon before died while it started this engine: it says who it is, if it is.
            None
        } else {
            let own = self
                .left_engine
                .take()
                .filter(|engine| Some(engine.pid) == record.pid);
            match own.map_or_else(|| EngineProcess::find(&record), |own| Ok(Some(own)))? {
                Some(engine) => Some(engine),
                None => {
                    if let Err(error) = files::remove(&record.socket) {
                        tracing::warn!(%error, "removing the dead engine's socket");
                    }
                    self.note_death(&record, Process::Engine);
                    return Ok(None);
                }
            }
        };
        let ours = forebay_xlate::boundary::formats();
        if let Some(engine) = &found
            && !record.formats.is_empty()
            && record.formats != ours
        {
            return Err(DaemonError::new(format!(
                "the running engine (pid {}) speaks formats {}, this daemon {ours}",
                engine.pid, record.formats
            ))
            .with_hint("end both in good order (`forebay shutdown`) with the version that started it, then start this one"));
        }
        let limit = Duration::from_secs(if found.is_some() { 5 } else { 1 });
        let greeted = match connect_socket(&record.socket, limit).await {
            Ok(fd) => Session::greet(fd, pool_id, None, GREET_LIMIT).await,
            Err(error) => Err(error),
        };
        match (greeted, found) {
            (Ok(greeting), Some(engine)) => {
                tracing::info!(pid = engine.pid, generation = engine.generation, "took over a running engine");
                // One that left it to the next has written no pid.
                if record.daemon_pid != std::process::id() && record.daemon_pid != 0 {
                    self.note_death(&record, Process::Daemon);
                }
                process::set_daemon(&self.config.run_dir, std::process::id());
                Ok(Some((engine, greeting)))
            }
            (Ok(greeting), None) => {
                let engine = EngineProcess::told(&record, greeting.session.pid)?;
                self.note_death(&record, Process::Daemon);
                Ok(Some((engine, greeting)))
            }
            (Err(error @ (GreetError::OtherPool { .. } | GreetError::Version { .. })), _) => {
                Err(DaemonError::new(error.to_string()).with_hint(format!(
                    "it was started in {}; stop that process, or give this daemon another run folder",
                    self.config.run_dir.display()
                )))
            }
            (Err(error), Some(engine)) => {
                tracing::error!(pid = engine.pid, %error, "a running engine can't be talked to: it is killed");
                engine.kill();
                engine.ended().await;
                self.note_death(&record, Process::Engine);
                Ok(None)
            }
            (Err(_), None) => Ok(None),
        }
    }

    fn note_death(&self, record: &EngineRecord, process: Process) {
        let (pid, cause) = match process {
            Process::Daemon => (record.daemon_pid, "unknown: noticed by the daemon after it"),
            Process::Engine => (
                record.pid.unwrap_or(0),
                "unknown: it was gone when this daemon started",
            ),
        };
        let at_unix_ms = now_unix_ms();
        let (name, log) = match process {
            Process::Daemon => ("daemon", "forebay.log"),
            Process::Engine => ("engine", "engine.log"),
        };
        let found = report::Found {
            process: name,
            pid,
            generation: record.generation,
            noticed_at_unix_ms: at_unix_ms,
            cause,
            log: report::log_tail(&self.config.state_dir, log),
        };
        let path = report::write_found(&self.config.state_dir, &found);
        let (kind, generation) = match process {
            Process::Daemon => (EventKind::DaemonDied, record.generation),
            Process::Engine => (EventKind::EngineDied, record.generation),
        };
        let text = format!("the {name} (pid {pid}, generation {generation}) died: {cause}");
        self.events.tell(kind, generation, text, News::default());
        *self.last_death.borrow_mut() = Some(DeathReport {
            process,
            pid,
            generation: record.generation,
            at_unix_ms,
            cause: cause.to_owned(),
            commands_in_flight: None,
            report_path: path.map(|path| path.display().to_string()),
        });
    }

    fn serving(&self) -> Option<Rc<Serving>> {
        self.serving.borrow().clone()
    }

    /// What is said to whoever needs a pool when there is none.
    fn no_pool(&self) -> ApiError {
        match self.trouble.borrow().clone() {
            // A volume that is asked for may well exist.
            Some(trouble) if trouble.kind == ErrorKind::NotFound => ApiError {
                kind: ErrorKind::Unavailable,
                ..trouble
            },
            Some(trouble) => trouble,
            None => {
                ApiError::not_found("there is no pool").hint("make one with `forebay pool create`")
            }
        }
    }

    /// Where hosts can connect.
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

    fn status(&self) -> Status {
        let serving = self.serving();
        let view = serving.as_ref().map(|serving| serving.supervisor.view());
        let state = view.as_ref().map(|view| view.state);
        let mut configured = self.exposures();
        let mut warnings = self.part_warnings();
        let mut is_trouble = self.trouble.borrow().is_some() || state == Some(EngineState::Stopped);
        let mut capacity = None;
        let nvme_tcp = self.addresses();
        let (mut pool, mut limits) = (None, Vec::new());
        if let Some(serving) = &serving {
            configured.extend(serving.owner.reports.notes());
            warnings.extend(serving.owner.reports.warnings());
            warnings.extend(serving.owner.exports.quarantine_warnings());
            is_trouble |= serving.owner.reports.has_trouble();
            pool = Some(serving.owner.base.pool_name());
            capacity = Some(serving.owner.reports.capacity());
            limits = serving.owner.reports.limits();
        }
        let opening = self.now_opening();
        if let Some(opening) = &opening {
            pool.clone_from(&opening.pool);
            warnings.push(opening.to_string());
            is_trouble = true;
        }
        if let Some(trouble) = view.as_ref().and_then(|view| view.trouble.as_ref()) {
            warnings.push(format!("the last start of an engine failed: {trouble}"));
        }
        // Without a pool it serves on.
        let left = match view {
            None => self.living_engine().ok().flatten(),
            Some(_) => None,
        };
        let is_running = state.is_none_or(|state| state == EngineState::Running);
        let health = match (is_trouble, warnings.is_empty() && is_running) {
            (true, _) => Health::Trouble,
            (false, true) => Health::Well,
            (false, false) => Health::Warning,
        };
        configured.extend(warnings);
        Status {
            daemon_pid: std::process::id(),
            engine_pid: match &view {
                Some(view) => view.pid,
                None => left.as_ref().map(|left| left.pid),
            },
            generation: match &view {
                Some(view) => view.generation,
                None => left.as_ref().map_or(0, |left| left.generation),
            },
            version: self.config.version.clone(),
            engine_state: match (&view, opening) {
                (Some(view), _) => view.state,
                (None, Some(_)) => EngineState::Opening,
                (None, None) if left.is_some() => EngineState::Running,
                (None, None) => EngineState::Stopped,
            },
            uptime_s: self.started.elapsed().as_secs(),
            nvme_tcp,
            state_dir: self.config.state_dir.display().to_string(),
            pool,
            pool_trouble: self.trouble.borrow().clone(),
            last_death: view
                .and_then(|view| view.last_death)
                .or_else(|| self.last_death.borrow().clone()),
            warnings: configured,
            health,
            capacity,
            limits,
        }
    }

    /// The opening that is under way, of a pool that was not found in trouble before.
    fn now_opening(&self) -> Option<Arc<Opening>> {
        let is_news = self.serving.borrow().is_none() && self.trouble.borrow().is_none();
        self.opening.borrow().clone().filter(|_| is_news)
    }

    fn stats(&self) -> Stats {
        self.serving().map_or_else(
            || Stats {
                at_unix_ms: now_unix_ms(),
                generation: 0,
                engine: None,
                pool: None,
                takeover: self.events.stats(),
                lanes: Vec::new(),
                tenants: Vec::new(),
                reactors: Vec::new(),
            },
            |serving| serving.owner.statistics.stats(self.events.stats()),
        )
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
