//! Starts engines, watches them, and has a successor take over when one dies.
//!
//! A generation is durable before its engine exists, the next one ahead of time. The *estate* is a
//! dead engine's state region, memory and connections. It is kept until a successor has converted
//! it and is told to act. A broken session is begun again while the process lives; an engine that
//! can't be talked to is killed. Repeated failures delay starts but never end them.

mod blame;
mod connect;
mod estate_limit;
mod firmware;
pub(crate) mod found;
pub(crate) mod pinning;
pub(crate) mod process;
mod replace;
pub(crate) mod report;
mod takeover;
#[cfg(test)]
mod tests;
mod watchdog;

use std::cell::{Cell, RefCell};
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use forebay_pool::ExportId;
use forebay_xlate::boundary::message::ToEngine;
use forebay_xlate::boundary::region::Region;
use forebay_xlate::kill_point;
use tokio::time::{Instant, timeout};

use self::blame::Verdict;
pub(crate) use self::connect::connect_socket;
use self::process::{EngineProcess, with_last_words};
use crate::changed::Signal;
use crate::clock::now_unix_ms;
use crate::config::EngineConfig;
use crate::events::{EventFields, Events};
use crate::firmware::{Firmware, Slot};
use crate::model::events::EventKind;
use crate::model::{DeathReport, EngineState, Process};
use crate::owner::session::{Conversion, Estate, GreetError, Greeting, Session};
use crate::owner::{EngineProgress, Owner};

/// How long a greeting may take.
pub(crate) const GREET_LIMIT: Duration = Duration::from_secs(10);
/// An engine that lived shorter died young.
const YOUNG: Duration = Duration::from_secs(10);
/// Consecutive young deaths before the next start is delayed.
const YOUNG_DEATHS: u32 = 3;
const DELAY_AT_MOST: Duration = Duration::from_secs(10);
/// Sessions that may break within one engine's life.
const BREAKS_MAX: u32 = 3;
#[derive(Debug, Clone)]
pub(crate) struct EngineView {
    pub(crate) state: EngineState,
    pub(crate) pid: Option<u32>,
    pub(crate) generation: u64,
    /// The version and firmware slot of its program.
    pub(crate) version: Option<String>,
    pub(crate) slot: Slot,
    pub(crate) last_death: Option<DeathReport>,
    pub(crate) trouble: Option<String>,
    /// Why the engine's log is lost.
    pub(crate) log_trouble: Option<String>,
}

#[derive(Debug)]
struct Death {
    pid: u32,
    generation: u64,
    at_unix_ms: u64,
    cause: String,
    region: Option<Rc<Region>>,
}

#[derive(Debug)]
pub(crate) struct Supervisor {
    config: EngineConfig,
    firmware: Rc<Firmware>,
    run_dir: PathBuf,
    state_dir: PathBuf,
    view: RefCell<EngineView>,
    process: RefCell<Option<Rc<EngineProcess>>>,
    events: Rc<Events>,
    /// A dead engine's estate that waits for a successor.
    estate: RefCell<Option<Estate>>,
    line: estate_limit::Counts,
    /// Why the engine was killed before it served.
    given_up: RefCell<Option<String>>,
    /// When the last engine died, until a successor serves.
    died_at: Cell<Option<Instant>>,
    death: RefCell<Option<Death>>,
    /// The next engine's generation, once durable.
    next_generation: Cell<Option<u64>>,
    replacing: Cell<bool>,
    wanted: Cell<bool>,
    over: Cell<bool>,
    changed: Signal,
}

#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error("{0}")]
    Commit(#[from] crate::owner::CommitError),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Greet(#[from] GreetError),
    #[error("it ended at once: {0}")]
    Ended(String),
}

struct LifeEnd {
    how: String,
    /// Since when it served, if it did.
    running: Option<Instant>,
    /// The last session with it.
    session: Rc<Session>,
}

fn about(owner: &Owner, export: Option<ExportId>) -> (String, EventFields) {
    let name = export.map(|export| owner.hosts.export_name(export));
    let of = name.as_ref().map(|name| format!(", of export {name}"));
    let fields = EventFields {
        export: name,
        ..EventFields::default()
    };
    (of.unwrap_or_default(), fields)
}

impl Supervisor {
    pub(crate) fn new(
        config: EngineConfig,
        firmware: Rc<Firmware>,
        run_dir: &Path,
        state_dir: &Path,
        last_death: Option<DeathReport>,
        events: Rc<Events>,
    ) -> Rc<Self> {
        Rc::new(Self {
            config,
            firmware,
            run_dir: run_dir.to_owned(),
            state_dir: state_dir.to_owned(),
            view: RefCell::new(EngineView {
                state: EngineState::Starting,
                pid: None,
                generation: 0,
                version: None,
                slot: Slot::Installed,
                last_death,
                trouble: None,
                log_trouble: None,
            }),
            process: RefCell::new(None),
            events,
            estate: RefCell::new(None),
            line: estate_limit::Counts::default(),
            given_up: RefCell::default(),
            died_at: Cell::new(None),
            death: RefCell::new(None),
            next_generation: Cell::new(None),
            replacing: Cell::new(false),
            wanted: Cell::new(true),
            over: Cell::new(false),
            changed: Signal::new(),
        })
    }

    pub(crate) fn view(&self) -> EngineView {
        self.view.borrow().clone()
    }

    pub(crate) async fn run(
        self: Rc<Self>,
        owner: Rc<Owner>,
        first: Option<(EngineProcess, Greeting)>,
    ) {
        let mut first = first.map(|(process, greeting)| (self.note(process), greeting));
        let mut young_deaths = 0u32;
        while self.wanted.get() {
            let started = match first.take() {
                Some(started) => Ok(started),
                None => self.start(&owner).await,
            };
            let died_young = match started {
                Ok((process, greeting)) => {
                    self.line.started();
                    self.note_version(&process, &greeting.session.version);
                    let ended = self.run_sessions(&owner, &process, greeting).await;
                    let verdict = blame::judge(Some(&ended.session.region), &ended.how);
                    let young = ended.running.is_none_or(|since| since.elapsed() < YOUNG);
                    let served = ended.running.map(|since| since.elapsed());
                    let fell_back = self.fell_back(&process, served, &verdict);
                    let died_young = verdict.delays(young, served.is_some()) && !fell_back;
                    self.note_death(&owner, &process, Some((&ended.session, young)), verdict);
                    // It may have ended because another node took the pool.
                    let of = owner.clone();
                    owner
                        .base
                        .spawn(async move { _ = of.labels.find_taker().await });
                    died_young
                }
                Err(error) => {
                    let process = self.process.borrow().clone();
                    let mut fell_back = false;
                    if let Some(process) = process {
                        process.kill();
                        let verdict = blame::judge(None, &process.ended().await);
                        if let StartError::Greet(error) = &error {
                            self.given_up.replace(Some(error.to_string()));
                        }
                        fell_back = self.fell_back(&process, None, &verdict);
                        self.note_death(&owner, &process, None, verdict);
                    }
                    if self.wanted.get() {
                        tracing::error!(%error, "can't start an engine");
                        self.view.borrow_mut().trouble = Some(error.to_string());
                        self.report_death();
                        self.start_failed();
                    }
                    !fell_back
                }
            };
            young_deaths = if died_young { young_deaths + 1 } else { 0 };
            // Two more than the first delayed start.
            self.view.borrow_mut().state = if young_deaths > YOUNG_DEATHS + 1 {
                EngineState::Stopped
            } else {
                EngineState::Restarting
            };
            if young_deaths >= YOUNG_DEATHS {
                self.report_death();
                let delay = Duration::from_secs(1 << (young_deaths - YOUNG_DEATHS).min(8));
                let unwanted = self.changed.until(|| (!self.wanted.get()).then_some(()));
                let _ = timeout(delay.min(DELAY_AT_MOST), unwanted).await;
            }
        }
        self.estate.take();
        self.view.borrow_mut().state = EngineState::Stopped;
        self.over.set(true);
        self.changed.raise();
    }

    fn note(&self, process: EngineProcess) -> Rc<EngineProcess> {
        let process = Rc::new(process);
        let mut view = self.view.borrow_mut();
        view.pid = Some(process.pid);
        view.generation = process.generation;
        view.slot = process.slot;
        view.log_trouble.clone_from(&process.log_trouble);
        if view.state != EngineState::Restarting {
            view.state = EngineState::Starting;
        }
        *self.process.borrow_mut() = Some(process.clone());
        process
    }

    async fn start(&self, owner: &Owner) -> Result<(Rc<EngineProcess>, Greeting), StartError> {
        let last = self.view.borrow().generation;
        let ahead = self.next_generation.take().filter(|next| *next > last);
        let generation = match ahead {
            Some(generation) => generation,
            None => {
                let (generation, _) = owner.base.core.borrow_mut().pool.next_engine_generation();
                // A fence waits for lower generations only: no number may ever be reused.
                owner.base.commit().await?;
                generation
            }
        };
        let log = self.state_dir.join("log/engine.log");
        let log_bytes = log.metadata().map_or(0, |there| there.len());
        let (slot, program) = self.firmware.next_program(last).await;
        let config = EngineConfig {
            program,
            ..self.config.clone()
        };
        let (process, channel) =
            EngineProcess::start(&config, slot, &self.run_dir, &log, generation)
                .inspect_err(|error| self.could_not_start(slot, generation, error))?;
        let process = self.note(process);
        kill_point!("daemon.spawned");
        tracing::info!(generation, pid = process.pid, "engine started");
        let ended = |how| StartError::Ended(with_last_words(how, &log, log_bytes));
        let greeted = tokio::select! {
            how = process.ended() => return Err(ended(how)),
            greeted = connect::greet(owner, channel) => greeted,
        };
        match greeted {
            Ok(greeting) => Ok((process, greeting)),
            // Mostly its death, which the kernel reports a moment later.
            Err(error) => Err(
                match timeout(Duration::from_secs(1), process.ended()).await {
                    Ok(how) => ended(how),
                    Err(_) => error.into(),
                },
            ),
        }
    }

    /// Ahead of time, so that the next start need not wait for the commit.
    fn prepare_next(self: &Rc<Self>, owner: &Rc<Owner>) {
        if self.next_generation.get().is_some() {
            return;
        }
        let (supervisor, of) = (self.clone(), owner.clone());
        owner.base.spawn(async move {
            let (generation, _) = of.base.core.borrow_mut().pool.next_engine_generation();
            if of.base.commit().await.is_ok() {
                supervisor.next_generation.set(Some(generation));
            }
        });
    }

    async fn run_sessions(
        self: &Rc<Self>,
        owner: &Rc<Owner>,
        process: &EngineProcess,
        greeting: Greeting,
    ) -> LifeEnd {
        let mut greeting = greeting;
        let mut breaks = 0;
        let begin = Instant::now();
        let running = Cell::new(None);
        let converted = RefCell::new(Conversion::default());
        let successor_of = self
            .estate
            .borrow()
            .as_ref()
            .map(|estate| estate.generation);
        let mut died_at = self.died_at.get();
        let progress = |progress| match progress {
            EngineProgress::Converted(conversion) => _ = converted.replace(conversion),
            EngineProgress::Resumed => {
                self.took_over(process.generation, successor_of, &converted.take());
            }
            EngineProgress::Refused(error) => self.dropped(process.generation, &error),
            EngineProgress::Failed(error) => self.give_up(process, &error),
            EngineProgress::Running => {
                running.set(running.get().or(Some(Instant::now())));
                self.note_running(owner, process);
            }
        };
        let (how, session) = loop {
            let session = greeting.session.clone();
            let ended = tokio::select! {
                how = process.ended() => Some(how),
                () = owner.serve(greeting, &self.estate, progress) => None,
                stuck = watchdog::stuck(&session.region, self.config.stuck_after) => {
                    self.kill_stuck(owner, process, &session, &stuck);
                    Some(process.ended().await)
                }
                how = self.overdue(process, begin, &running) => Some(how),
                never = self.note_fences(&session, died_at) => match never {},
            };
            owner.link.hang_up(&session);
            if let Some(how) = ended {
                break (how, session);
            }
            if !self.wanted.get() {
                // It was told to stop; the caller has a time limit.
                break (process.ended().await, session);
            }
            // Mostly its death, which the kernel reports a moment later.
            if let Ok(how) = timeout(Duration::from_secs(1), process.ended()).await {
                break (how, session);
            }
            breaks += 1;
            match self.connect_again(owner, process, breaks).await {
                Ok(next) => {
                    // The engine was told everything in the previous session.
                    session.forget_deposit();
                    greeting = next;
                    died_at = None;
                }
                Err(error) => {
                    tracing::error!(%error, pid = process.pid, "can't communicate with the engine: it is killed");
                    process.kill();
                    break (process.ended().await, session);
                }
            }
        };
        LifeEnd {
            how,
            running: running.get(),
            session,
        }
    }

    fn note_running(self: &Rc<Self>, owner: &Rc<Owner>, process: &EngineProcess) {
        let mut view = self.view.borrow_mut();
        view.state = EngineState::Running;
        view.trouble = None;
        drop(view);
        tracing::info!(generation = process.generation, "the engine serves");
        self.died_at.set(None);
        self.report_death();
        self.prepare_next(owner);
    }

    async fn connect_again(
        &self,
        owner: &Owner,
        process: &EngineProcess,
        breaks: u32,
    ) -> Result<Greeting, GreetError> {
        tracing::warn!(
            breaks,
            pid = process.pid,
            "the connection to a live engine broke"
        );
        if breaks > BREAKS_MAX {
            return Err(io::Error::other("the connection to it broke too often").into());
        }
        if self.estate.borrow().is_some() {
            return Err(io::Error::other("the connection to it broke during a take-over").into());
        }
        connect::connect(owner, &process.socket).await
    }

    fn kill_stuck(
        &self,
        owner: &Owner,
        process: &EngineProcess,
        session: &Session,
        stuck: &watchdog::Stuck,
    ) {
        let doing = blame::working_on(&session.region, stuck.thread);
        let export = blame::export_in_work(&session.region, stuck.thread);
        let (of, fields) = about(owner, export);
        let text = format!(
            "{} of the engine (pid {}) has made no progress for {:.1} s, {doing}{of}; the engine is killed",
            watchdog::name(stuck.thread),
            process.pid,
            stuck.since.as_secs_f64()
        );
        self.events
            .report(EventKind::EngineStuck, process.generation, text, fields);
        watchdog::note(&session.region, stuck.thread);
        process.kill();
    }

    /// Keeps the estate, unless the engine's end was wanted. `session` includes whether it died
    /// young.
    fn note_death(
        &self,
        owner: &Rc<Owner>,
        process: &EngineProcess,
        session: Option<(&Rc<Session>, bool)>,
        verdict: Verdict,
    ) {
        self.process.borrow_mut().take();
        if let Err(error) = crate::files::remove(&process.socket) {
            tracing::warn!(%error, "can't remove the dead engine's socket");
        }
        let mut view = self.view.borrow_mut();
        (view.pid, view.version) = (None, None);
        drop(view);
        let (generation, pid) = (process.generation, process.pid);
        if !self.wanted.get() {
            tracing::info!(generation, cause = verdict.cause, "the engine has ended");
            return;
        }
        kill_point!("daemon.death");
        if self.died_at.get().is_none() {
            self.died_at.set(Some(Instant::now()));
        }
        if self.replacing.take() && !verdict.crashed {
            let text = format!(
                "the engine (pid {pid}, generation {generation}) is being replaced, as an operator requested"
            );
            let fields = EventFields::default();
            self.events
                .report(EventKind::EngineReplaced, generation, text, fields);
            self.keep_estate(session, &verdict);
            return;
        }
        let (of, fields) = about(owner, verdict.export);
        let text = format!(
            "the engine (pid {pid}, generation {generation}) died: {}{of}",
            verdict.cause
        );
        self.events
            .report(EventKind::EngineDied, generation, text, fields);
        if let Some(export) = verdict.export {
            owner
                .exports
                .blame_export(export, &verdict.cause, generation);
        }
        self.keep_estate(session, &verdict);
        self.report_death();
        *self.death.borrow_mut() = Some(Death {
            pid,
            generation,
            at_unix_ms: now_unix_ms(),
            cause: verdict.cause,
            region: session.map(|(session, _)| session.region.clone()),
        });
    }

    fn report_death(&self) {
        let Some(death) = self.death.take() else {
            return;
        };
        let Death {
            pid,
            generation,
            at_unix_ms,
            cause,
            region,
        } = death;
        let written = report::write(&self.state_dir, region.as_deref(), generation, pid, &cause);
        let report_path = written.path.map(|path| path.display().to_string());
        // The death itself was logged before.
        tracing::info!(
            generation,
            pid,
            commands_in_flight = written.commands_in_flight,
            report = report_path,
            "wrote the report of the engine's death"
        );
        self.view.borrow_mut().last_death = Some(DeathReport {
            process: Process::Engine,
            pid,
            generation,
            at_unix_ms,
            cause,
            commands_in_flight: written.commands_in_flight,
            report_path,
        });
        kill_point!("daemon.report");
    }

    /// Kills the engine after `limit`. Ends this supervisor, too.
    pub(crate) async fn stop(&self, owner: &Owner, limit: Duration) {
        self.wanted.set(false);
        self.changed.raise();
        match owner.link.session() {
            Some(session) => session.say(&ToEngine::Stop),
            None => self.kill(),
        }
        let over = || self.over.get().then_some(());
        if timeout(limit, self.changed.until(over)).await.is_err() {
            tracing::error!(?limit, "the engine did not end in time: it is killed");
            loop {
                self.kill();
                if timeout(Duration::from_secs(1), self.changed.until(over))
                    .await
                    .is_ok()
                {
                    break;
                }
            }
        }
    }

    pub(crate) fn take_process(&self) -> Option<EngineProcess> {
        Rc::try_unwrap(self.process.borrow_mut().take()?).ok()
    }

    fn kill(&self) {
        if let Some(process) = &*self.process.borrow() {
            process.kill();
        }
    }
}
