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
mod base;
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
mod link;
mod locks;
mod machines;
mod mapping;
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

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use forebay_pool::{Catalog, Pool};
use forebay_xlate::boundary::message::{FaultAsk, FromEngine};
use forebay_xlate::{DeviceIndex, kill_point};

use self::base::{Base, Core, count_by};
use self::budgets::Budgets;
use self::copies::Copies;
use self::export::Exports;
use self::health::DeviceStates;
use self::hosts::Hosts;
use self::link::Link;
use self::machines::VmSockets;
use self::mapping::PoolOwner;
use self::places::Placement;
use self::ports::Ports;
use self::quarantine::Quarantine;
use self::reserve::Registrations;
use self::scheduling::NodeSettings;
use self::session::{Estate, Greeting, Session};
use self::stats::Statistics;
use self::tenure::Labels;
use self::transfers::Transfers;
use self::volume::Volumes;
use self::waits::WaitReports;
use self::warn::Reports;
use self::watch::Watch;
use crate::api::events::EventKind;
use crate::devices::PoolDevice;
use crate::events::{Events, News};

pub(crate) use self::adopt::{Grants, grants_capacity};
pub(crate) use self::base::Limits;
pub(crate) use self::commit::CommitError;
pub(crate) use self::link::Progress;
pub(crate) use self::ports::unserved_ports;
pub(crate) use self::stats::now_unix_ms;

/// The rooms, and what spans them.
#[derive(Debug)]
pub(crate) struct Owner {
    pub(crate) base: Rc<Base>,
    pub(crate) link: Rc<Link>,
    pub(crate) labels: Rc<Labels>,
    pub(crate) copies: Rc<Copies>,
    pub(crate) states: Rc<DeviceStates>,
    pub(crate) mapping: Rc<PoolOwner>,
    pub(crate) statistics: Rc<Statistics>,
    pub(crate) node: Rc<NodeSettings>,
    pub(crate) placement: Rc<Placement>,
    pub(crate) budgets: Rc<Budgets>,
    pub(crate) hosts: Rc<Hosts>,
    pub(crate) vms: Rc<VmSockets>,
    pub(crate) ports: Rc<Ports>,
    pub(crate) reservations: Rc<Registrations>,
    pub(crate) quarantine: Rc<Quarantine>,
    pub(crate) exports: Rc<Exports>,
    pub(crate) transfers: Rc<Transfers>,
    pub(crate) volumes: Rc<Volumes>,
    pub(crate) reports: Rc<Reports>,
    /// One device joins at a time, from the first look at it.
    pub(crate) adding: tokio::sync::Mutex<()>,
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
        let base = Base::new(Core { pool, grants }, catalog, devices, limits, events);
        let link = Link::new(&base);
        let labels = Labels::new(&base);
        let copies = Copies::new(&base);
        let states = DeviceStates::new(&base, &link);
        let mapping = PoolOwner::new(&base, &link, &states, &Rc::new(adoption));
        let statistics = Statistics::new(&base, &link);
        let node = NodeSettings::new(&base);
        let placement = Placement::new(&base, &link, &node);
        let budgets = Budgets::new(&base, &link, &node, &placement, &statistics);
        let hosts = Hosts::new(&base, &link);
        let quarantine = Rc::default();
        let vms = VmSockets::new(&base, &link, &hosts, &quarantine);
        let ports = Ports::new(&base, &link, &states);
        let reservations = Registrations::new(&base, &link, &hosts);
        let announced = Rc::default();
        let exports = Exports::new(
            &base,
            &link,
            &hosts,
            &vms,
            &ports,
            &budgets,
            &announced,
            &quarantine,
        );
        let transfers = Transfers::new(&base, &hosts, &exports, &mapping);
        let volumes = Volumes::new(&base, &link, &mapping, &budgets, &transfers);
        let reports = Reports::new(&base, &link, &states, &labels, &copies, &exports);
        let owner = Rc::new(Self {
            base,
            link,
            labels,
            copies,
            states,
            mapping,
            statistics,
            node,
            placement,
            budgets,
            hosts,
            vms,
            ports,
            reservations,
            quarantine,
            exports,
            transfers,
            volumes,
            reports,
            adding: tokio::sync::Mutex::new(()),
        });
        owner.begin();
        owner
    }

    /// Starts the tasks that run for as long as the owner is not closed.
    fn begin(&self) {
        let (base, mapping) = (&self.base, &self.mapping);
        base.spawn(base.clone().run_committer());
        base.spawn(mapping.faults.clone().run_awaiting_commit());
        base.spawn(mapping.revoker.clone().run_ahead());
        let watch = Watch::new(base, mapping, &self.statistics, &self.hosts, &self.reports);
        base.spawn(watch.run_watch());
        let waits = WaitReports::new(base, &self.link, &self.copies, mapping);
        base.spawn(waits.run_waits());
        base.spawn(mapping.releaser.clone().run_deleter());
        base.spawn(self.copies.clone().run_copies());
        base.spawn(self.reports.clone().run_warnings());
        base.spawn(self.transfers.clone().run_transfers());
        for device in base.device_indexes() {
            self.serve_device(device);
        }
    }

    /// Starts a device's own tasks.
    fn serve_device(&self, device: DeviceIndex) {
        let syncer = self.mapping.flusher.add_syncer(device);
        self.base
            .spawn(self.mapping.flusher.clone().run_syncer(device, syncer));
        self.base
            .spawn(self.mapping.zero_fill.clone().run_launderer(device));
        let (adoption, states) = (self.mapping.adopter.adoption.clone(), self.states.clone());
        self.base.spawn(async move {
            // Before that the pool does not change.
            adoption.wait_adopted().await;
            states.run_settler(device).await;
        });
    }

    /// Ends every task. Nothing is committed or said any more.
    pub(crate) fn close(&self) {
        self.base.close();
        self.link.close();
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
            self.mapping.adopter.finish_adoption(Some(&session)).await;
            let (mut asked, addresses) = self.say_what_is(&session, held);
            // At once, as this daemon may die next.
            let statistics = self.statistics.clone();
            self.base
                .spawn(async move { statistics.save_figures(false).await });
            kill_point!("daemon.told");
            if !self.link.hand_over(&session, estate, &progress).await {
                // Whoever listens to the progress ends it.
                return std::future::pending().await;
            }
            self.link.acting.set(session.generation);
            asked.extend(self.say_listeners(&session, &addresses));
            self.states.carried_out(&session, asked).await;
            progress(Progress::Running);
            tokio::join!(
                self.mapping.revoker.tell_all_grants(&session),
                self.mapping.adopter.open_after_adoption()
            );
            // The reader ends the conversation, not this.
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = reader => {}
            () = told => {}
        }
        self.link.hang_up(&session);
    }

    fn attach(&self, session: &Rc<Session>) {
        let before = self.base.newest_generation.get();
        if before != 0 && session.generation > before {
            let mark = self.base.core.borrow().pool.quarantine_mark();
            session.quarantined_before.set(Some(mark));
        }
        self.statistics.count_on(session);
        self.mapping
            .revoker
            .ahead
            .forget(&mut self.base.core.borrow_mut().pool);
        self.link.begin(session);
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
                count_by(&self.base.counters.faults, faults.len() as u64);
                if together.is_empty() {
                    together = faults;
                } else {
                    together.append(&mut faults);
                }
            } else {
                self.mapping
                    .faults
                    .answer_faults(&std::mem::take(&mut together));
                self.act(session, message);
            }
        }
        self.mapping.faults.answer_faults(&together);
    }

    fn act(self: &Rc<Self>, session: &Rc<Session>, message: FromEngine) {
        match message {
            FromEngine::CommitWanted { volume, sequence } => {
                let session = session.clone();
                self.base.spawn(
                    self.mapping
                        .flusher
                        .clone()
                        .commit_wanted(session, volume, sequence),
                );
            }
            FromEngine::Release {
                release,
                volume,
                range,
            } => {
                self.mapping
                    .releaser
                    .on_release(session.generation, release, volume, range);
            }
            FromEngine::Reserve(ask) => self.reservations.on_reserve(session, ask),
            FromEngine::HostRefused {
                host,
                subsystem,
                why,
                count,
            } => self
                .hosts
                .host_refused(session, &host, &subsystem, &why, count),
            FromEngine::Machine { .. } | FromEngine::MachineLeft { .. } => {
                self.vms.machine_news(session, &message);
            }
            FromEngine::DeviceReady { device } => self.states.device_ready(device),
            FromEngine::DeviceFailed { device, error } => {
                self.states.device_failed(session, device, error);
            }
            FromEngine::Notice { text } => {
                let text = format!("the engine says: {text}");
                self.base.tell(EventKind::Warning, text, News::default());
            }
            other => tracing::warn!(?other, "the engine said something out of place"),
        }
    }
}
