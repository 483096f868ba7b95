//! Status, counters and ports, with or without a pool: collected from owner, supervisor and daemon.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;
use std::sync::Arc;

use super::Daemon;
use crate::clock::now_unix_ms;
use crate::devices::Opening;
use crate::model::stats::Stats;
use crate::model::{EngineState, Health, Port, Status};
use crate::owner::{Owner, unserved_ports};

/// A short form of [`Status`].
pub(crate) struct Condition {
    /// The owner of the open pool.
    pub(crate) owner: Option<Rc<Owner>>,
    /// Everything that is configured is served.
    pub(crate) is_sound: bool,
    pub(crate) engine: EngineState,
    /// The engine's number, 0 for none.
    pub(crate) generation: u64,
    /// Changes with the engine's version.
    pub(crate) firmware: u64,
}

impl Daemon {
    pub(crate) fn condition(&self) -> Condition {
        let Some(serving) = self.serving() else {
            return Condition {
                owner: None,
                is_sound: false,
                engine: EngineState::Stopped,
                generation: 0,
                firmware: 0,
            };
        };
        let view = serving.supervisor.view();
        Condition {
            // A replacement takes milliseconds, and hosts see only a pause.
            is_sound: matches!(view.state, EngineState::Running | EngineState::Restarting)
                && !serving.owner.reports.has_trouble(),
            owner: Some(serving.owner.clone()),
            engine: view.state,
            generation: view.generation,
            firmware: {
                let mut version = DefaultHasher::new();
                view.version.hash(&mut version);
                version.finish()
            },
        }
    }

    pub(crate) fn status(&self) -> Status {
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
        // The engine serves on although no pool is open.
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
            engine_version: view.as_ref().and_then(|view| view.version.clone()),
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

    /// The opening in progress, unless the pool already was in trouble.
    pub(super) fn now_opening(&self) -> Option<Arc<Opening>> {
        let is_change = self.serving.borrow().is_none() && self.trouble.borrow().is_none();
        self.opening.borrow().clone().filter(|_| is_change)
    }

    pub(crate) fn stats(&self) -> Stats {
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

    pub(crate) fn port_list(&self) -> Vec<Port> {
        match self.serving() {
            Some(serving) => serving.owner.ports.port_list(),
            None => unserved_ports(self.spare_listeners.borrow().keys()),
        }
    }
}
