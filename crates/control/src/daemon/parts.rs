//! Configured parts that can't be served; one such part does not stop the others.
//!
//! Each is reported once, stays in the warnings of `status`, and is retried with growing pauses.
//! `reopen` handles the pool and its devices.

use std::rc::Rc;
use std::time::Duration;

use rustix::fs::{Access, access};
use tokio::time::sleep;

use super::Daemon;
use super::listeners::{listener, metrics_at};
use crate::config::Reloaded;
use crate::events::EventFields;
use crate::model::EngineState;
use crate::model::events::EventKind;
use crate::supervisor::pinning;

const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(10);

impl Daemon {
    pub(crate) fn note_part(&self, part: &str, trouble: Result<(), String>) {
        let fields = match trouble {
            Ok(()) if self.parts.borrow_mut().remove(part).is_some() => {
                (EventKind::PartReturned, format!("{part} works now"))
            }
            Ok(()) => return,
            Err(text) => {
                let before = self
                    .parts
                    .borrow_mut()
                    .insert(part.to_owned(), text.clone());
                if before.as_ref() == Some(&text) {
                    return;
                }
                (EventKind::PartMissing, text)
            }
        };
        let generation = self
            .serving()
            .map_or(0, |serving| serving.supervisor.view().generation);
        self.events
            .report(fields.0, generation, fields.1, EventFields::default());
    }

    pub(super) fn part_warnings(&self) -> Vec<String> {
        self.parts.borrow().values().cloned().collect()
    }

    pub(super) fn poll_parts(&self) {
        let folder = &self.config.state_dir;
        let writable = access(folder, Access::WRITE_OK | Access::EXEC_OK).map_err(|error| {
            format!(
                "the state folder {} can't be written: {error}; new device paths, events and statistics are lost at \
                the next start",
                folder.display()
            )
        });
        self.note_part("the state folder", writable);
        self.note_part("the log", self.program.open_log());
        let Some(serving) = self.serving() else {
            return;
        };
        let view = serving.supervisor.view();
        self.note_part("the engine's log", view.log_trouble.map_or(Ok(()), Err));
        let engine = &self.config.engine;
        if let (Some(pid), EngineState::Running) = (view.pid, view.state)
            && !engine.cpus.is_empty()
        {
            for (part, pinned) in pinning::pin(pid, engine.reactors, &engine.cpus) {
                self.note_part(&part, pinned);
            }
        }
    }

    /// Reads the configuration again. Only what [`Reloaded`] has and the log's level take effect
    /// before the next start.
    pub(crate) fn reload(self: &Rc<Self>) {
        let read = self.program.reload();
        self.note_part("the log", self.program.open_log());
        let wrong = read.as_ref().err().map(|error| {
            format!(
                "the configuration was not reloaded, and the previous one stays in effect: {error}"
            )
        });
        self.note_part("the configuration", wrong.map_or(Ok(()), Err));
        let Ok(Reloaded {
            listen: new,
            clusters,
        }) = read
        else {
            return;
        };
        tracing::info!("the configuration was reloaded");
        self.clusters.configure(clusters);
        let exposed = self.exposures();
        let old = self.listen.replace(new.clone());
        let mut parts = self.parts.borrow_mut();
        for address in old.nvme_tcp.iter().filter(|a| !new.nvme_tcp.contains(a)) {
            parts.remove(&listener(*address));
        }
        for address in old.metrics.iter().filter(|a| new.metrics != Some(**a)) {
            parts.remove(&metrics_at(*address));
        }
        drop(parts);
        self.keep_metrics();
        let daemon = self.clone();
        tokio::task::spawn_local(async move {
            daemon.listen_at_the_rest().await;
            let new = daemon.exposures();
            for text in new.into_iter().filter(|text| !exposed.contains(text)) {
                daemon.warn(text);
            }
        });
    }

    pub(super) fn warn(&self, text: String) {
        let generation = self.status().generation;
        self.events
            .report(EventKind::Warning, generation, text, EventFields::default());
    }

    pub(super) async fn serve_the_rest(self: Rc<Self>) {
        let mut pause = PAUSE;
        loop {
            sleep(pause).await;
            let before = self.parts.borrow().clone();
            self.listen_at_the_rest().await;
            self.keep_metrics();
            self.poll_parts();
            pause = match *self.parts.borrow() == before {
                true => (pause * 2).min(PAUSE_MAX),
                false => PAUSE,
            };
        }
    }
}
