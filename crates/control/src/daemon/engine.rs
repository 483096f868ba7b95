//! Finds the engine that an earlier daemon left, greets it, or reports its death.
//!
//! An engine of another pool or with other formats is an error. One that can't be talked to is
//! killed.

use std::io;
use std::time::Duration;

use super::{Daemon, DaemonError};
use crate::clock::now_unix_ms;
use crate::events::EventFields;
use crate::files;
use crate::model::events::EventKind;
use crate::model::{DeathReport, Process};
use crate::owner::session::{GreetError, Greeting, Session};
use crate::supervisor::process::{self, EngineProcess, EngineRecord};
use crate::supervisor::{GREET_LIMIT, connect_socket, found, report};

impl Daemon {
    /// The engine's record; a lost one is made anew if the engine lives.
    pub(super) fn find_record(&self) -> io::Result<Option<EngineRecord>> {
        if let Err(error) = process::recorded(&self.config.run_dir) {
            self.warn(format!(
                "{error}: the file is damaged; it is kept as engine.json.damaged, and the daemon looks for a live \
                engine"
            ));
        }
        found::engine(&self.config.run_dir)
    }

    pub(super) fn living_engine(&self) -> io::Result<Option<EngineProcess>> {
        let record = process::recorded(&self.config.run_dir)?;
        record.map_or(Ok(None), |record| EngineProcess::find(&record))
    }

    pub(super) async fn find_engine(
        &self,
        record: Option<EngineRecord>,
        pool_id: [u8; 16],
    ) -> Result<Option<(EngineProcess, Greeting)>, DaemonError> {
        let Some(record) = record else {
            return Ok(None);
        };
        let found = if record.pid.is_none() {
            // The previous daemon died while it started this engine.
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
                        tracing::warn!(%error, "can't remove the dead engine's socket");
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
                "the running engine (pid {}) uses formats {}, but this daemon uses {ours}",
                engine.pid, record.formats
            ))
            .with_hint("run `forebay shutdown` with the version that started the engine, then start this version"));
        }
        let limit = Duration::from_secs(if found.is_some() { 5 } else { 1 });
        let greeted = match connect_socket(&record.socket, limit).await {
            Ok(fd) => Session::greet(fd, pool_id, None, GREET_LIMIT).await,
            Err(error) => Err(error),
        };
        match (greeted, found) {
            (Ok(greeting), Some(engine)) => {
                tracing::info!(pid = engine.pid, generation = engine.generation, "adopted a running engine");
                // A daemon that leaves its engine in good order writes 0.
                if record.daemon_pid != std::process::id() && record.daemon_pid != 0 {
                    self.note_death(&record, Process::Daemon);
                }
                process::set_daemon(&self.config.run_dir, std::process::id());
                Ok(Some((engine, greeting)))
            }
            (Ok(greeting), None) => {
                let engine = EngineProcess::reported(&record, greeting.session.pid)?;
                self.note_death(&record, Process::Daemon);
                Ok(Some((engine, greeting)))
            }
            (Err(error @ (GreetError::OtherPool { .. } | GreetError::Version { .. })), _) => {
                Err(DaemonError::new(error.to_string()).with_hint(format!(
                    "the engine was started in {}; stop that process, or give this daemon another run folder",
                    self.config.run_dir.display()
                )))
            }
            (Err(error), Some(engine)) => {
                tracing::error!(pid = engine.pid, %error, "can't communicate with a running engine: it is killed");
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
            Process::Daemon => (record.daemon_pid, "unknown: the next daemon noticed it"),
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
        let found = report::DeathReport {
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
        self.events
            .report(kind, generation, text, EventFields::default());
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
}
