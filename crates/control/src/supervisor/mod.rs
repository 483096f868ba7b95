//! Keeps an engine running.
//!
//! Purpose: starts engines, watches them, and when one dies starts the next at once and hands it what
//! the dead one left, so that hosts notice nothing but a pause.
//! Design: one task. An engine's generation is durable in the catalog before its process exists; the
//! next one's is made so ahead of time. The *estate* is what a dead engine left: its state region, its
//! memory, its connections. It stays the truth until a successor has converted it and is told to
//! act; a successor that dies before that leaves it as it was, one that dies later leaves its own. An
//! estate that kills whoever converts it is dropped: hosts connect again. The report of a death is
//! written once the successor serves. An engine that an earlier daemon left running is taken over as
//! it is. A conversation that breaks while the process lives is begun again; an engine that can't be
//! talked to is killed. Engines that fail again and again are started ever later, and never given up.
//! Not here: what is said to an engine (`owner`), who is to blame for a death ([`blame`]), which
//! reactors are stuck ([`watchdog`]).

mod blame;
mod connect;
pub(crate) mod process;
pub(crate) mod report;
#[cfg(test)]
mod tests;
mod watchdog;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use forebay_xlate::boundary::message::ToEngine;
use forebay_xlate::boundary::region::Region;
use forebay_xlate::kill_point;
use tokio::time::{Instant, timeout};

use self::blame::Verdict;
pub(crate) use self::connect::connect_socket;
use self::process::{EngineProcess, with_last_words};
use crate::api::events::EventKind;
use crate::api::model::{DeathReport, EngineState, Process};
use crate::config::EngineConfig;
use crate::events::{Events, News};
use crate::owner::session::{Conversion, Estate, GreetError, Greeting, Session};
use crate::owner::{Owner, Progress, now_unix_ms};
use crate::signal::Signal;

/// How long an engine may take to say what it holds.
pub(crate) const GREET_LIMIT: Duration = Duration::from_secs(10);
/// An engine that lived shorter died young.
const YOUNG: Duration = Duration::from_secs(10);
/// So many may die young before the next one has to wait.
const YOUNG_DEATHS: u32 = 3;
const DELAY_AT_MOST: Duration = Duration::from_secs(10);
/// Conversations that may break within one engine's life.
const BREAKS_MAX: u32 = 3;
/// So many successors may crash over an estate before it is dropped ...
const CRASHES_OVER_ESTATE: u32 = 2;
/// ... and so many may be killed.
const DEATHS_OVER_ESTATE: u32 = 5;

/// How the engine is doing.
#[derive(Debug, Clone)]
pub(crate) struct EngineView {
    pub(crate) state: EngineState,
    pub(crate) pid: Option<u32>,
    pub(crate) generation: u64,
    pub(crate) last_death: Option<DeathReport>,
    /// Why the last start failed.
    pub(crate) trouble: Option<String>,
}

/// A death whose report is not written yet.
#[derive(Debug)]
struct Death {
    pid: u32,
    generation: u64,
    at_unix_ms: u64,
    cause: String,
    region: Option<Rc<Region>>,
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Supervisor {
    config: EngineConfig,
    run_dir: PathBuf,
    state_dir: PathBuf,
    view: RefCell<EngineView>,
    process: RefCell<Option<Rc<EngineProcess>>>,
    events: Rc<Events>,
    /// What a dead engine left and no successor has yet.
    estate: RefCell<Option<Estate>>,
    /// Successors that crashed over it.
    estate_crashes: Cell<u32>,
    /// When the engine died whose estate waits, or that has no running successor yet.
    died_at: Cell<Option<Instant>>,
    death: RefCell<Option<Death>>,
    /// A generation that is durable and not used yet.
    next_generation: Cell<Option<u64>>,
    wanted: Cell<bool>,
    over: Cell<bool>,
    changed: Signal,
}

/// An engine did not start.
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

/// How an engine's life went on once it was greeted.
struct Ended {
    /// As the kernel says.
    how: String,
    /// Since when it served; never, if it did not come to that.
    running: Option<Instant>,
}

impl Supervisor {
    pub(crate) fn new(
        config: EngineConfig,
        run_dir: &Path,
        state_dir: &Path,
        last_death: Option<DeathReport>,
        events: Rc<Events>,
    ) -> Rc<Self> {
        Rc::new(Self {
            config,
            run_dir: run_dir.to_owned(),
            state_dir: state_dir.to_owned(),
            view: RefCell::new(EngineView {
                state: EngineState::Starting,
                pid: None,
                generation: 0,
                last_death,
                trouble: None,
            }),
            process: RefCell::new(None),
            events,
            estate: RefCell::new(None),
            estate_crashes: Cell::new(0),
            died_at: Cell::new(None),
            death: RefCell::new(None),
            next_generation: Cell::new(None),
            wanted: Cell::new(true),
            over: Cell::new(false),
            changed: Signal::new(),
        })
    }

    /// How the engine is doing.
    pub(crate) fn view(&self) -> EngineView {
        self.view.borrow().clone()
    }

    /// Runs engines, beginning with `first` if there is one, until [`Supervisor::stop`].
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
                    let session = greeting.session.clone();
                    let ended = self.accompany(&owner, &process, greeting).await;
                    let verdict = blame::judge(Some(&session.region), &ended.how);
                    let died_young = match ended.running {
                        // Whoever killed it says nothing about it.
                        Some(since) => verdict.crashed && since.elapsed() < YOUNG,
                        None => true,
                    };
                    self.bury(&owner, &process, Some(&session), verdict);
                    died_young
                }
                Err(error) => {
                    let process = self.process.borrow().clone();
                    if let Some(process) = process {
                        process.kill();
                        let verdict = blame::judge(None, &process.ended().await);
                        self.bury(&owner, &process, None, verdict);
                    }
                    if self.wanted.get() {
                        tracing::error!(%error, "starting an engine failed");
                        self.view.borrow_mut().trouble = Some(error.to_string());
                        self.report_death();
                    }
                    true
                }
            };
            young_deaths = if died_young { young_deaths + 1 } else { 0 };
            // Two more than the first that has to wait.
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
                let (generation, _) = owner.core.borrow_mut().pool.next_engine_generation();
                // A fence waits for lower generations only: no number may ever be used twice.
                owner.commit().await?;
                generation
            }
        };
        let log = self.state_dir.join("log/engine.log");
        let log_bytes = log.metadata().map_or(0, |there| there.len());
        let (process, channel) =
            EngineProcess::start(&self.config, &self.run_dir, &log, generation)?;
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
            // Mostly its death, which the kernel tells a moment later.
            Err(error) => Err(
                match timeout(Duration::from_secs(1), process.ended()).await {
                    Ok(how) => ended(how),
                    Err(_) => error.into(),
                },
            ),
        }
    }

    /// Makes the number of the engine after this one durable, so that its start need not wait for that.
    fn prepare_next(self: &Rc<Self>, owner: &Rc<Owner>) {
        if self.next_generation.get().is_some() {
            return;
        }
        let (supervisor, of) = (self.clone(), owner.clone());
        owner.spawn(async move {
            let (generation, _) = of.core.borrow_mut().pool.next_engine_generation();
            if of.commit().await.is_ok() {
                supervisor.next_generation.set(Some(generation));
            }
        });
    }

    /// Talks with the engine for as long as its process lives.
    async fn accompany(
        self: &Rc<Self>,
        owner: &Rc<Owner>,
        process: &EngineProcess,
        greeting: Greeting,
    ) -> Ended {
        let mut greeting = greeting;
        let mut breaks = 0;
        let running = Cell::new(None);
        let converted = RefCell::new(Conversion::default());
        let successor_of = self
            .estate
            .borrow()
            .as_ref()
            .map(|estate| estate.generation);
        let died_at = self.died_at.get();
        let progress = |progress| match progress {
            Progress::Converted(conversion) => _ = converted.replace(conversion),
            Progress::Resumed => {
                self.took_over(process.generation, successor_of, &converted.take());
            }
            Progress::Refused(error) => self.dropped(process.generation, &error),
            Progress::Failed(error) => {
                tracing::error!(
                    error,
                    pid = process.pid,
                    "the engine does not take over: it is killed"
                );
                process.kill();
            }
            Progress::Running => {
                let mut view = self.view.borrow_mut();
                view.state = EngineState::Running;
                view.trouble = None;
                drop(view);
                tracing::info!(generation = process.generation, "the engine serves");
                running.set(running.get().or(Some(Instant::now())));
                self.died_at.set(None);
                self.report_death();
                self.prepare_next(owner);
            }
        };
        let how = loop {
            let session = greeting.session.clone();
            let ended = tokio::select! {
                how = process.ended() => Some(how),
                () = owner.serve(greeting, &self.estate, progress) => None,
                stuck = watchdog::stuck(&session.region, self.config.stuck_after) => {
                    self.kill_stuck(process, &session, &stuck);
                    Some(process.ended().await)
                }
                never = self.note_fences(&session, died_at) => match never {},
            };
            owner.hang_up(&session);
            if let Some(how) = ended {
                break how;
            }
            if !self.wanted.get() {
                // It was told to stop; whoever did has a time limit.
                break process.ended().await;
            }
            // Mostly its death, which the kernel tells a moment later.
            if let Ok(how) = timeout(Duration::from_secs(1), process.ended()).await {
                break how;
            }
            breaks += 1;
            tracing::warn!(
                breaks,
                pid = process.pid,
                "the conversation with a living engine broke"
            );
            let again = async {
                if breaks > BREAKS_MAX {
                    return Err(io::Error::other("it broke too often").into());
                }
                if self.estate.borrow().is_some() {
                    return Err(io::Error::other("it broke during a take-over").into());
                }
                connect::connect(owner, &process.socket).await
            };
            match again.await {
                Ok(next) => greeting = next,
                Err(error) => {
                    tracing::error!(%error, pid = process.pid, "the engine can't be talked to: it is killed");
                    process.kill();
                    break process.ended().await;
                }
            }
        };
        Ended {
            how,
            running: running.get(),
        }
    }

    fn kill_stuck(&self, process: &EngineProcess, session: &Session, stuck: &watchdog::Stuck) {
        let doing = blame::working_on(&session.region, stuck.reactor);
        let text = format!(
            "reactor {} of the engine (pid {}) has not taken a turn for {:.1} s, {doing}; it is killed",
            stuck.reactor,
            process.pid,
            stuck.since.as_secs_f64()
        );
        self.events.tell(
            EventKind::EngineStuck,
            process.generation,
            text,
            News::default(),
        );
        watchdog::note(&session.region, stuck.reactor);
        process.kill();
    }

    fn took_over(&self, generation: u64, from: Option<u64>, conversion: &Conversion) {
        let pause = self.died_at.take().map(|at| at.elapsed());
        self.estate_crashes.set(0);
        let closed: u32 = conversion.closed.iter().map(|(_, count)| count).sum();
        let text = format!(
            "generation {generation} goes on where generation {} stopped, after {:.1} ms: {} queues with {} commands; {closed} connections closed",
            from.unwrap_or(0),
            pause.unwrap_or_default().as_secs_f64() * 1e3,
            conversion.queues,
            conversion.commands,
        );
        let news = News {
            pause,
            closed: conversion.closed.clone(),
            ..News::default()
        };
        self.events
            .tell(EventKind::TookOver, generation, text, news);
    }

    /// An estate is of no use.
    fn dropped(&self, generation: u64, why: &str) {
        self.estate_crashes.set(0);
        let text = format!("what the dead engine left is dropped, its hosts connect again: {why}");
        self.events
            .tell(EventKind::NotTakenOver, generation, text, News::default());
    }

    /// Tells how long after a death the engine got each device to itself.
    async fn note_fences(&self, session: &Session, died_at: Option<Instant>) -> Infallible {
        let Some(died_at) = died_at else {
            return std::future::pending().await;
        };
        let mut known = BTreeSet::new();
        loop {
            let device = session.next_ready(&mut known).await;
            let fence = died_at.elapsed();
            let text = format!(
                "the dead engine's last request on {device} had ended after {:.1} ms",
                fence.as_secs_f64() * 1e3
            );
            let news = News {
                fence: Some((device.0, fence)),
                ..News::default()
            };
            self.events
                .tell(EventKind::FencePassed, session.generation, text, news);
        }
    }

    /// An engine has ended: keeps what it left, unless its end was wanted.
    fn bury(
        &self,
        owner: &Rc<Owner>,
        process: &EngineProcess,
        session: Option<&Rc<Session>>,
        verdict: Verdict,
    ) {
        self.process.borrow_mut().take();
        if let Err(error) = crate::files::remove(&process.socket) {
            tracing::warn!(%error, "removing the dead engine's socket");
        }
        self.view.borrow_mut().pid = None;
        let (generation, pid) = (process.generation, process.pid);
        if !self.wanted.get() {
            tracing::info!(generation, cause = verdict.cause, "the engine has ended");
            return;
        }
        kill_point!("daemon.death");
        if self.died_at.get().is_none() {
            self.died_at.set(Some(Instant::now()));
        }
        let text = format!(
            "the engine (pid {pid}, generation {generation}) died: {}",
            verdict.cause
        );
        self.events
            .tell(EventKind::EngineDied, generation, text, News::default());
        if let Some(export) = verdict.export {
            owner.blame_export(export, &verdict.cause, generation, &self.events);
        }
        self.keep_estate(session, &verdict);
        self.report_death();
        *self.death.borrow_mut() = Some(Death {
            pid,
            generation,
            at_unix_ms: now_unix_ms(),
            cause: verdict.cause,
            region: session.map(|session| session.region.clone()),
        });
    }

    /// What there is to take over now: still what the engine before the dead one left, if the dead one
    /// had not got it yet, else what the dead one left.
    fn keep_estate(&self, session: Option<&Rc<Session>>, verdict: &Verdict) {
        let mut estate = self.estate.borrow_mut();
        if let Some(waiting) = &*estate {
            if waiting.tries > 0 && verdict.crashed {
                self.estate_crashes.set(self.estate_crashes.get() + 1);
            }
            if self.estate_crashes.get() >= CRASHES_OVER_ESTATE
                || waiting.tries >= DEATHS_OVER_ESTATE
            {
                let (generation, tries) = (waiting.generation, waiting.tries);
                *estate = None;
                self.dropped(generation, &format!("{tries} successors died over it"));
            }
            return;
        }
        let left = session.and_then(|session| session.leave(verdict.blamed));
        if let Some(left) = &left {
            tracing::info!(
                generation = left.generation,
                connections = left.sockets(),
                "kept what the engine left"
            );
        }
        *estate = left;
    }

    /// Writes the report of the last death, if that is not done yet.
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
        tracing::error!(
            generation,
            pid,
            cause,
            commands_in_flight = written.commands_in_flight,
            report = report_path,
            "the engine died"
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

    /// Ends the engine in good order, or, after `limit`, not so good; and then this supervisor.
    pub(crate) async fn stop(&self, owner: &Owner, limit: Duration) {
        self.wanted.set(false);
        self.changed.raise();
        match owner.session() {
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

    /// The engine's process, once this supervisor's task has ended: it is somebody else's to watch.
    pub(crate) fn take_process(&self) -> Option<EngineProcess> {
        Rc::try_unwrap(self.process.borrow_mut().take()?).ok()
    }

    fn kill(&self) {
        if let Some(process) = &*self.process.borrow() {
            process.kill();
        }
    }
}
