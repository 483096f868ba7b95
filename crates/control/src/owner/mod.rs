//! The owner of a pool: the one place that decides where bytes lie and who may use them.
//!
//! Purpose: answers the engine's faults, releases and commits, carries out what the API asks, and
//! keeps pool, grant table and engine in agreement whichever of the processes dies.
//!
//! Design: one thread. The pool and the grant table sit in one [`Core`] behind a `RefCell`; an
//! operation is a local task that changes the core in steps without a wait in them, and awaits what
//! lies between: a catalog commit ([`commit`]), an answer of the engine ([`session`]), a range
//! ([`locks`]) or a volume ([`turns`]) that is being changed. What must never happen out of order is
//! said where it is done:
//! - [`fault`]: the grant table's entry, then the grant;
//! - [`revoke`], [`release`]: revoke and drain, then the pool's change, its commit, then the entry's
//!   removal; what does not drain is quarantined ([`hang`]);
//! - [`flush`]: a device's flush, then the commit of the mappings on it, then `Committed`;
//! - [`launder`]: zeroing, flush, then *clean*;
//! - [`reserve`]: a host's reservation, its commit, then the answer;
//! - [`adopt`]: what an earlier daemon granted is taken over and committed before anything is granted.
//!
//! Each device has its own tasks for flushing, laundering and settling, so that one which fails or
//! hangs delays only what lives on it.
//!
//! Not here: processes ([`crate::supervisor`]), the pool's rules (`forebay_pool`), HTTP.

mod adopt;
mod ahead;
mod budgets;
mod calibration;
mod check;
mod commit;
mod copies;
mod device;
mod evict;
mod export;
mod fault;
mod figures;
mod flush;
mod hang;
mod health;
mod hosts;
mod in_use;
mod launder;
mod limits;
mod locks;
mod machines;
mod places;
mod ports;
mod promises;
mod push;
mod quarantine;
mod release;
mod reserve;
mod revoke;
mod scheduling;
pub(crate) mod session;
mod show;
mod stats;
mod tenure;
#[cfg(test)]
mod tests;
mod together;
mod transfers;
mod turns;
mod used;
mod volume;
mod waits;
mod warn;
mod watch;
mod wire;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::future::Future;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use forebay_device::fence::Holder;
use forebay_pool::{BatchId, Catalog, Pool};
use forebay_xlate::boundary::message::{FaultAsk, FromEngine, PortConfig, ToEngine};
use forebay_xlate::grants::GrantTable;
use forebay_xlate::{DeviceIndex, VolumeId, kill_point};

use self::commit::Committer;
use self::locks::Locks;
use self::session::{AskError, Conversion, Estate, Greeting, Session};
use crate::api::error::ApiError;
use crate::api::events::EventKind;
use crate::devices::{MissingDevice, PoolDevice};
use crate::events::{Events, News};
use crate::signal::Signal;

pub(crate) use self::adopt::{Grants, grants_capacity};
pub(crate) use self::commit::CommitError;
pub(crate) use self::ports::unserved_ports;
pub(crate) use self::stats::now_unix_ms;

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

/// How a new engine's conversation goes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Progress {
    /// What a dead engine left is this one's; it was told to act.
    Converted(Conversion),
    /// It acts.
    Resumed,
    /// It can't read what the dead engine left: that is dropped, and hosts connect again.
    Refused(String),
    /// It does not answer: it is of no use.
    Failed(String),
    /// It knows everything that it needs to serve.
    Running,
}

/// Adds one.
pub(crate) fn count(counter: &Cell<u64>) {
    count_by(counter, 1);
}

fn count_by(counter: &Cell<u64>, by: u64) {
    counter.set(counter.get().wrapping_add(by));
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Owner {
    pub(crate) core: RefCell<Core>,
    pub(crate) catalog: Arc<Catalog>,
    /// The devices that the daemon has open.
    pub(crate) devices: RefCell<Vec<PoolDevice>>,
    /// Those that it has not.
    pub(crate) missing: RefCell<Vec<MissingDevice>>,
    copies: copies::Copies,
    pub(crate) limits: Limits,
    pub(crate) counters: Counters,
    /// NVMe/TCP listeners by address: the daemon's own descriptors of them.
    pub(crate) listeners: RefCell<BTreeMap<String, OwnedFd>>,
    committer: Committer,
    locks: Locks,
    /// The engine's conversation, from when it was told everything until it ends.
    session: RefCell<Option<Rc<Session>>>,
    session_changed: Signal,
    /// The conversation that is told everything, which may be about to begin.
    told: RefCell<Weak<Session>>,
    /// Faults that a task is busy with.
    faulting: RefCell<HashSet<(VolumeId, u64, bool)>>,
    awaiting_commit: fault::AwaitingCommit,
    ahead: ahead::Ahead,
    /// Deallocations that are under way.
    releasing: RefCell<HashSet<revoke::Deallocation>>,
    /// The newest engine that was told everything.
    newest_generation: Cell<u64>,
    /// The newest engine that has what a dead one left, if there was something.
    acting: Cell<u64>,
    adoption: Rc<adopt::Adoption>,
    /// Whether faults, releases and changes of extents go on: adoption is through.
    open: Cell<bool>,
    opened: Signal,
    evicting: tokio::sync::Mutex<()>,
    syncers: RefCell<flush::Syncers>,
    /// Raised after each round of a syncer.
    synced: Signal,
    /// Raised when something may have become dirty.
    launder_wanted: Signal,
    /// Raised after each round of laundering.
    laundered: Signal,
    laundering: launder::Laundering,
    hanging: hang::Hanging,
    /// Ports that change: as they durably are until this batch is durable.
    changing_ports: RefCell<BTreeMap<String, (PortConfig, BatchId)>>,
    pub(crate) events: Rc<Events>,
    /// Volumes that grow: how large each durably is until this batch is durable.
    growing: RefCell<BTreeMap<VolumeId, (u64, BatchId)>>,
    /// Failed devices that the engine is told of again.
    retrying: RefCell<BTreeSet<DeviceIndex>>,
    /// Raised when a device's health, suspicion or quarantine changes.
    devices_changed: Signal,
    watched: watch::Watched,
    /// What was warned of.
    warned: RefCell<BTreeSet<String>>,
    waits: waits::Waits,
    hosts: hosts::Hosts,
    machines: machines::Machines,
    /// Exports that are being made.
    making: RefCell<BTreeSet<forebay_pool::ExportId>>,
    added: RefCell<stats::Added>,
    figures: RefCell<figures::Told>,
    told_budgets: budgets::Told,
    promises: places::Promises,
    node: scheduling::NodeState,
    /// What NQNs of new exports say of this node, if it is configured.
    pub(crate) node_name: RefCell<Option<String>>,
    calibrating: calibration::Calibrating,
    pub(crate) quarantine: Rc<quarantine::Quarantine>,
    /// One device joins at a time, from the first look at it.
    pub(crate) adding: tokio::sync::Mutex<()>,
    transfers: Rc<transfers::Transfers>,
    turns: turns::Turns,
    hold: RefCell<tenure::Hold>,
    closed: Cell<bool>,
    closing: Signal,
}

impl Owner {
    /// Takes a pool with the grant table that belongs to it; what is listed there must have been
    /// adopted ([`adopt`]).
    pub(crate) fn new(
        pool: Pool,
        catalog: Arc<Catalog>,
        devices: Vec<PoolDevice>,
        grants: adopt::Grants,
        limits: Limits,
        events: Rc<Events>,
    ) -> Rc<Self> {
        let (grants, adoption) = grants.into_parts();
        let adoption = Rc::new(adoption);
        let copies = copies::Copies::new(&catalog);
        let owner = Rc::new(Self {
            core: RefCell::new(Core { pool, grants }),
            catalog,
            devices: RefCell::new(devices),
            missing: RefCell::default(),
            copies,
            limits,
            counters: Counters::default(),
            listeners: RefCell::default(),
            committer: Committer::new(),
            locks: Locks::new(),
            session: RefCell::new(None),
            session_changed: Signal::new(),
            told: RefCell::default(),
            faulting: RefCell::default(),
            awaiting_commit: fault::AwaitingCommit::default(),
            ahead: ahead::Ahead::default(),
            releasing: RefCell::default(),
            newest_generation: Cell::new(0),
            acting: Cell::new(0),
            adoption,
            open: Cell::new(false),
            opened: Signal::new(),
            evicting: tokio::sync::Mutex::new(()),
            syncers: RefCell::default(),
            synced: Signal::new(),
            launder_wanted: Signal::new(),
            laundered: Signal::new(),
            laundering: launder::Laundering::default(),
            hanging: hang::Hanging::default(),
            changing_ports: RefCell::default(),
            events,
            growing: RefCell::default(),
            retrying: RefCell::default(),
            devices_changed: Signal::new(),
            watched: watch::Watched::default(),
            warned: RefCell::default(),
            waits: waits::Waits::default(),
            hosts: hosts::Hosts::default(),
            machines: machines::Machines::default(),
            making: RefCell::default(),
            added: RefCell::default(),
            figures: RefCell::default(),
            told_budgets: budgets::Told::default(),
            promises: places::Promises::default(),
            node: scheduling::NodeState::default(),
            node_name: RefCell::new(None),
            calibrating: calibration::Calibrating::default(),
            quarantine: Rc::default(),
            adding: tokio::sync::Mutex::new(()),
            transfers: Rc::default(),
            turns: turns::Turns::default(),
            hold: RefCell::default(),
            closed: Cell::new(false),
            closing: Signal::new(),
        });
        owner.spawn(owner.clone().run_committer());
        owner.spawn(owner.clone().run_awaiting_commit());
        owner.spawn(owner.clone().run_ahead());
        owner.spawn(owner.clone().run_watch());
        owner.spawn(owner.clone().run_waits());
        owner.spawn(owner.clone().run_deleter());
        owner.spawn(owner.clone().run_copies());
        owner.spawn(owner.clone().run_warnings());
        owner.spawn(owner.clone().run_transfers());
        for device in owner.device_indexes() {
            owner.serve_device(device);
        }
        owner
    }

    /// Starts a device's own tasks.
    fn serve_device(self: &Rc<Self>, device: DeviceIndex) {
        let syncer = self.add_syncer(device);
        self.spawn(self.clone().run_syncer(device, syncer));
        self.spawn(self.clone().run_launderer(device));
        let owner = self.clone();
        self.spawn(async move {
            // Before that the pool does not change.
            owner.adoption.wait_adopted().await;
            owner.run_settler(device).await;
        });
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

    /// Ends every task. Nothing is committed or said any more.
    pub(crate) fn close(&self) {
        self.closed.set(true);
        self.closing.raise();
        if let Some(session) = self.session.take() {
            session.end();
        }
    }

    /// The engine's conversation, if there is one now.
    pub(crate) fn session(&self) -> Option<Rc<Session>> {
        self.session.borrow().clone()
    }

    /// The engine's conversation, once there is one.
    pub(crate) async fn wait_session(&self) -> Rc<Session> {
        self.session_changed.until(|| self.session()).await
    }

    /// Something happened.
    pub(super) fn tell(&self, kind: EventKind, text: String, news: News) {
        self.events
            .tell(kind, self.newest_generation.get(), text, news);
    }

    /// Says something to the engine, if there is one.
    pub(crate) fn say(&self, message: &ToEngine) {
        if let Some(session) = self.session() {
            session.say(message);
        }
    }

    /// Waits until adoption is through.
    pub(crate) async fn wait_open(&self) {
        self.opened.until(|| self.open.get().then_some(())).await;
    }

    /// Whether adoption is through.
    pub(crate) fn is_open(&self) -> bool {
        self.open.get()
    }

    /// Goes on with an engine until the conversation ends, and first with what a dead one left, if there
    /// is something: it is taken from `estate` when the engine has it.
    pub(crate) async fn serve(
        self: &Rc<Self>,
        greeting: Greeting,
        estate: &RefCell<Option<Estate>>,
        progress: impl Fn(Progress),
    ) {
        let Greeting {
            session,
            held,
            early,
            table: _,
        } = greeting;
        if !held.is_empty() {
            self.hosts.found.set(true);
        }
        // Messages are taken in from here on: an inherited job's end is one of them.
        let reader = self.clone().converse(session.clone(), early);
        let told = async {
            self.finish_adoption(Some(&session)).await;
            let (mut asked, addresses) = self.say_what_is(&session, held);
            // At once, as this daemon may die next.
            let owner = self.clone();
            self.spawn(async move { owner.save_figures(false).await });
            kill_point!("daemon.told");
            if !self.hand_over(&session, estate, &progress).await {
                // Whoever listens to the progress ends it.
                return std::future::pending().await;
            }
            self.acting.set(session.generation);
            asked.extend(self.say_listeners(&session, &addresses));
            self.carried_out(&session, asked).await;
            progress(Progress::Running);
            tokio::join!(self.tell_all_grants(&session), self.open_after_adoption());
            // The reader ends the conversation, not this.
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = reader => {}
            () = told => {}
        }
        self.hang_up(&session);
    }

    /// Hands over what a dead engine left, if there is something. False if the engine is of no use.
    async fn hand_over(
        &self,
        session: &Rc<Session>,
        estate: &RefCell<Option<Estate>>,
        progress: &impl Fn(Progress),
    ) -> bool {
        if estate.borrow().is_none() {
            return true;
        }
        let limit = self.limits.convert;
        let failed = match session.convert(estate, limit).await {
            Ok(conversion) => {
                kill_point!("daemon.converted");
                let mut resumed = session.resume(estate);
                kill_point!("daemon.flip");
                progress(Progress::Converted(conversion));
                match resumed.within(limit).await {
                    Ok(()) => {
                        progress(Progress::Resumed);
                        return true;
                    }
                    Err(error) => error,
                }
            }
            Err(AskError::Refused(error)) => {
                estate.take();
                progress(Progress::Refused(error));
                return true;
            }
            Err(error) => error,
        };
        if failed != AskError::Gone {
            progress(Progress::Failed(failed.to_string()));
        }
        false
    }

    /// The conversation is over. Whoever drops [`Owner::serve`] half-way says it himself.
    pub(crate) fn hang_up(&self, session: &Rc<Session>) {
        session.end();
        let mut current = self.session.borrow_mut();
        if current.as_ref().is_some_and(|now| Rc::ptr_eq(now, session)) {
            *current = None;
        }
        drop(current);
        self.session_changed.raise();
    }

    fn attach(&self, session: &Rc<Session>) {
        let before = self.newest_generation.get();
        if before != 0 && session.generation > before {
            let mark = self.core.borrow().pool.quarantine_mark();
            session.quarantined_before.set(Some(mark));
        }
        self.count_on(session);
        self.ahead.forget(&mut self.core.borrow_mut().pool);
        *self.session.borrow_mut() = Some(session.clone());
        self.newest_generation.set(session.generation);
        self.session_changed.raise();
    }

    async fn converse(
        self: Rc<Self>,
        session: Rc<Session>,
        early: Vec<(FromEngine, Vec<OwnedFd>)>,
    ) {
        let early = early
            .into_iter()
            .filter_map(|(message, fds)| session.absorb(message, fds));
        self.act_on(&session, &mut early.collect());
        let receive = async {
            let mut messages = Vec::new();
            loop {
                if let Err(error) = session.next_some(&mut messages).await {
                    return error;
                }
                self.act_on(&session, &mut messages);
                // A busy engine must not keep the other tasks from running.
                tokio::task::yield_now().await;
            }
        };
        let error = tokio::select! {
            error = receive => error,
            Err(error) = session.write() => error,
        };
        tracing::info!(generation = session.generation, %error, "the engine's conversation ended");
    }

    /// Acts on messages in their order; faults that came in a row are answered together.
    fn act_on(self: &Rc<Self>, session: &Rc<Session>, messages: &mut Vec<FromEngine>) {
        let mut together: Vec<FaultAsk> = Vec::new();
        for message in messages.drain(..) {
            if let FromEngine::Faults { mut faults } = message {
                count_by(&self.counters.faults, faults.len() as u64);
                if together.is_empty() {
                    together = faults;
                } else {
                    together.append(&mut faults);
                }
            } else {
                self.answer_faults(&std::mem::take(&mut together));
                self.act(session, message);
            }
        }
        self.answer_faults(&together);
    }

    fn act(self: &Rc<Self>, session: &Rc<Session>, message: FromEngine) {
        match message {
            FromEngine::CommitWanted { volume, sequence } => {
                let session = session.clone();
                self.spawn(self.clone().commit_wanted(session, volume, sequence));
            }
            FromEngine::Release {
                release,
                volume,
                range,
            } => {
                self.on_release(session.generation, release, volume, range);
            }
            FromEngine::Reserve(ask) => self.on_reserve(session, ask),
            FromEngine::HostRefused {
                host,
                subsystem,
                why,
                count,
            } => self.host_refused(session, &host, &subsystem, &why, count),
            FromEngine::Machine { .. } | FromEngine::MachineLeft { .. } => {
                self.machine_news(session, &message);
            }
            FromEngine::DeviceReady { device } => self.device_ready(device),
            FromEngine::DeviceFailed { device, error } => {
                self.device_failed(session, device, error);
            }
            FromEngine::Notice { text } => {
                let text = format!("the engine says: {text}");
                self.tell(EventKind::Warning, text, News::default());
            }
            other => tracing::warn!(?other, "the engine said something out of place"),
        }
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
}
