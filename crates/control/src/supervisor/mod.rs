//! Keeps an engine running.
//!
//! Purpose: starts engines, watches them, writes a report when one dies, and starts the next.
//! Design: one task. An engine's generation is durable in the catalog before its process exists. An
//! engine that an earlier daemon left running is taken over as it is. A conversation that breaks
//! while the process lives is begun again; an engine that can't be talked to is killed. Engines that
//! die young again and again are started ever later, and never given up.
//! Not here: what is said to an engine (`owner`).

pub(crate) mod process;
pub(crate) mod report;

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use forebay_xlate::boundary::message::ToEngine;
use forebay_xlate::boundary::socket;
use tokio::time::{Instant, sleep, timeout};

use self::process::EngineProcess;
use crate::api::model::{DeathReport, EngineState, Process};
use crate::config::EngineConfig;
use crate::owner::session::{GreetError, Greeting, Session};
use crate::owner::{Owner, now_unix_ms};
use crate::signal::Signal;

/// How long a fresh engine may take to open its socket.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// How long an engine may take to say what it holds.
pub(crate) const GREET_LIMIT: Duration = Duration::from_secs(5);
/// An engine that lived shorter died young.
const YOUNG: Duration = Duration::from_secs(10);
/// So many may die young before the next one has to wait.
const YOUNG_DEATHS: u32 = 3;
const DELAY_AT_MOST: Duration = Duration::from_secs(10);
/// The most of a dead engine's log that is looked at for its last line.
const LAST_WORDS_BYTES: u64 = 1024;
/// Conversations that may break within one engine's life.
const BREAKS_MAX: u32 = 3;

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

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Supervisor {
    config: EngineConfig,
    run_dir: PathBuf,
    state_dir: PathBuf,
    view: RefCell<EngineView>,
    process: RefCell<Option<Rc<EngineProcess>>>,
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

impl Supervisor {
    pub(crate) fn new(
        config: EngineConfig,
        run_dir: &Path,
        state_dir: &Path,
        last_death: Option<DeathReport>,
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
            let begin = Instant::now();
            let started = match first.take() {
                Some(started) => Ok(started),
                None => self.start(&owner).await,
            };
            match started {
                Ok((process, greeting)) => {
                    let session = greeting.session.clone();
                    let cause = self.accompany(&owner, &process, greeting).await;
                    self.bury(&process, Some(&session), &cause);
                }
                Err(error) => {
                    let process = self.process.borrow().clone();
                    if let Some(process) = process {
                        process.kill();
                        let cause = process.ended().await;
                        self.bury(&process, None, &cause);
                    }
                    if self.wanted.get() {
                        tracing::error!(%error, "starting an engine failed");
                        self.view.borrow_mut().trouble = Some(error.to_string());
                    }
                }
            }
            young_deaths = if begin.elapsed() < YOUNG {
                young_deaths + 1
            } else {
                0
            };
            // Two more than the first that has to wait.
            self.view.borrow_mut().state = if young_deaths > YOUNG_DEATHS + 1 {
                EngineState::Stopped
            } else {
                EngineState::Restarting
            };
            if young_deaths >= YOUNG_DEATHS {
                let delay = Duration::from_secs(1 << (young_deaths - YOUNG_DEATHS).min(8));
                let unwanted = self.changed.until(|| (!self.wanted.get()).then_some(()));
                let _ = timeout(delay.min(DELAY_AT_MOST), unwanted).await;
            }
        }
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
        let (generation, _) = owner.core.borrow_mut().pool.next_engine_generation();
        // A fence waits for lower generations only: no number may ever be used twice.
        owner.commit().await?;
        let log = self.state_dir.join("log/engine.log");
        let log_bytes = log.metadata().map_or(0, |there| there.len());
        let process = EngineProcess::start(&self.config, &self.run_dir, &log, generation)?;
        let process = self.note(process);
        tracing::info!(generation, pid = process.pid, "engine started");
        tokio::select! {
            cause = process.ended() => Err(StartError::Ended(with_last_words(cause, &log, log_bytes))),
            greeting = connect(owner, &process.socket, CONNECT_LIMIT) => Ok((process.clone(), greeting?)),
        }
    }

    /// Talks with the engine for as long as its process lives; says how it ended.
    async fn accompany(
        &self,
        owner: &Rc<Owner>,
        process: &EngineProcess,
        greeting: Greeting,
    ) -> String {
        let mut greeting = greeting;
        let mut breaks = 0;
        loop {
            let session = greeting.session.clone();
            let running = || {
                let mut view = self.view.borrow_mut();
                view.state = EngineState::Running;
                view.trouble = None;
                tracing::info!(generation = process.generation, "the engine serves");
            };
            let ended = tokio::select! {
                cause = process.ended() => Some(cause),
                () = owner.serve(greeting, running) => None,
            };
            owner.hang_up(&session);
            if let Some(cause) = ended {
                return cause;
            }
            if !self.wanted.get() {
                // It was told to stop; whoever did has a time limit.
                return process.ended().await;
            }
            // Mostly its death, which the kernel tells a moment later.
            if let Ok(cause) = timeout(Duration::from_secs(1), process.ended()).await {
                return cause;
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
                connect(owner, &process.socket, GREET_LIMIT).await
            };
            match again.await {
                Ok(next) => greeting = next,
                Err(error) => {
                    tracing::error!(%error, pid = process.pid, "the engine can't be talked to: it is killed");
                    process.kill();
                    return process.ended().await;
                }
            }
        }
    }

    /// An engine has ended: reports it unless that was wanted, and clears away what it left.
    fn bury(&self, process: &EngineProcess, session: Option<&Rc<Session>>, cause: &str) {
        self.process.borrow_mut().take();
        if let Err(error) = crate::files::remove(&process.socket) {
            tracing::warn!(%error, "removing the dead engine's socket");
        }
        let mut view = self.view.borrow_mut();
        view.pid = None;
        if !self.wanted.get() {
            tracing::info!(
                generation = process.generation,
                cause,
                "the engine has ended"
            );
            return;
        }
        let region = session.map(|session| &session.region);
        let (generation, pid) = (process.generation, process.pid);
        let written = report::write(&self.state_dir, region, generation, pid, cause);
        let report_path = written.path.map(|path| path.display().to_string());
        tracing::error!(
            generation,
            pid,
            cause,
            commands_in_flight = written.commands_in_flight,
            report = report_path,
            "the engine died"
        );
        view.last_death = Some(DeathReport {
            process: Process::Engine,
            pid,
            generation,
            at_unix_ms: now_unix_ms(),
            cause: cause.to_owned(),
            commands_in_flight: written.commands_in_flight,
            report_path,
        });
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

/// Adds where an engine's log is, and the last line that it has written since it had `from` bytes.
fn with_last_words(cause: String, log: &Path, from: u64) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let file = File::open(log)?;
        let end = file.metadata()?.len();
        let from = from.max(end.saturating_sub(LAST_WORDS_BYTES)).min(end);
        let mut said = vec![0; (end - from) as usize];
        file.read_exact_at(&mut said, from)?;
        Ok(said)
    };
    let said = read().unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    let last = said.lines().map(str::trim).rfind(|line| !line.is_empty());
    match last {
        Some(line) => format!("{cause}; its last words in {}: {line}", log.display()),
        None => format!("{cause}; {} has no word of it", log.display()),
    }
}

/// Connects to an engine, waiting for its socket to appear, and greets it.
async fn connect(owner: &Owner, path: &Path, limit: Duration) -> Result<Greeting, GreetError> {
    let (pool, table) = {
        let core = owner.core.borrow();
        let table = core.grants.memory().fd().as_fd().try_clone_to_owned()?;
        (core.pool.info().uuid.0, table)
    };
    let fd = connect_socket(path, limit).await?;
    Session::greet(fd, pool, Some(table), GREET_LIMIT).await
}

/// Connects to an engine's socket, for which it waits.
pub(crate) async fn connect_socket(
    path: &Path,
    limit: Duration,
) -> Result<std::os::fd::OwnedFd, GreetError> {
    let begin = Instant::now();
    loop {
        match socket::connect(path) {
            Ok(fd) => return Ok(fd),
            Err(error) => {
                let later = matches!(
                    error.kind(),
                    io::ErrorKind::NotFound
                        | io::ErrorKind::ConnectionRefused
                        | io::ErrorKind::WouldBlock
                );
                if !later {
                    return Err(error.into());
                }
                if begin.elapsed() >= limit {
                    return Err(GreetError::TimedOut(limit));
                }
            }
        }
        sleep(Duration::from_millis(5)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices;
    use crate::owner::{Grants, Limits};
    use std::os::unix::fs::PermissionsExt;
    use std::sync::Arc;

    /// Runs `test` with a supervisor whose engine is a shell script.
    fn with_engine<F: Future<Output = ()>>(
        script: &str,
        test: impl FnOnce(Rc<Supervisor>, Rc<Owner>, PathBuf) -> F,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        let program = at.join("engine.sh");
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o700)).unwrap();
        let config = EngineConfig {
            program,
            reactors: 1,
            cpus: Vec::new(),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(tokio::task::LocalSet::new().run_until(async {
            let open = devices::create(&crate::api::model::PoolCreate {
                name: "pool".to_owned(),
                devices: vec![format!("file:{}", at.join("pool.img").display())],
                size_bytes: Some(64 << 20),
                ..crate::api::model::PoolCreate::default()
            })
            .unwrap();
            let grants = Grants::fresh(&at.join("grants"), &open.pool, &[1; 16], 256).unwrap();
            let owner = Owner::new(
                open.pool,
                Arc::new(open.catalog),
                open.devices,
                grants,
                Limits::default(),
            );
            let supervisor = Supervisor::new(config, at, at, None);
            tokio::task::spawn_local(supervisor.clone().run(owner.clone(), None));
            let test = test(supervisor, owner, at.to_owned());
            timeout(Duration::from_secs(60), test)
                .await
                .expect("the test hangs");
        }));
    }

    #[test]
    fn an_engine_that_dies_at_once_is_started_again_and_reported() {
        with_engine(
            "echo no such thing; exit 3",
            |supervisor, owner, folder| async move {
                let third = || {
                    let view = supervisor.view();
                    (view.generation >= 3 && view.last_death.is_some()).then_some(view)
                };
                let view = loop {
                    match third() {
                        Some(view) => break view,
                        None => sleep(Duration::from_millis(5)).await,
                    }
                };
                assert_ne!(view.state, EngineState::Running);
                let death = view.last_death.unwrap();
                assert_eq!(death.cause, "exit code 3");
                let report = std::fs::read_to_string(death.report_path.unwrap()).unwrap();
                assert!(report.contains("exit code 3"), "{report}");
                let trouble = view.trouble.unwrap();
                assert!(trouble.contains("exit code 3"), "{trouble}");
                assert!(trouble.contains("engine.log: no such thing"), "{trouble}");
                let durable = owner.core.borrow().pool.info().engine_generation;
                assert!(durable >= 3);
                // It waits now before the next start; a stop doesn't wait for that.
                supervisor.stop(&owner, Duration::from_secs(30)).await;
                assert_eq!(supervisor.view().state, EngineState::Stopped);
                assert!(process::recorded(&folder).unwrap().is_some());
            },
        );
    }

    #[test]
    fn an_engine_that_does_not_answer_is_killed_by_a_stop() {
        with_engine("exec sleep 1000", |supervisor, owner, _| async move {
            let pid = loop {
                match supervisor.view().pid {
                    Some(pid) => break pid,
                    None => sleep(Duration::from_millis(5)).await,
                }
            };
            supervisor.stop(&owner, Duration::from_secs(30)).await;
            assert_eq!(supervisor.view().pid, None);
            assert!(!Path::new(&format!("/proc/{pid}")).exists());
        });
    }
}
