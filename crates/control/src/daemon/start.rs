//! Starts the daemon, and starts serving a pool.
//!
//! The order makes two daemons on one pool impossible and a restart harmless. It opens the recorded
//! pool, greets a live engine, adopts its grant table and binds missing listeners. Then the
//! supervisor continues with that engine or starts one. A pool that can't be opened can be repaired
//! through the API.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinError, JoinHandle};
use tokio::time::timeout;

use super::{Daemon, DaemonError, Serving};
use crate::devices::OpenPool;
use crate::events::EventFields;
use crate::model::PoolOpen;
use crate::model::error::ApiError;
use crate::model::events::EventKind;
use crate::owner::session::Greeting;
use crate::owner::{Grants, Limits, Owner, grants_capacity};
use crate::supervisor::Supervisor;
use crate::supervisor::process::{EngineProcess, EngineRecord};
use crate::systemd;

const START_COMMIT_LIMIT: Duration = Duration::from_secs(30);

impl Daemon {
    /// Returns the task that takes devices back.
    pub(crate) fn started(
        self: &Rc<Self>,
        started: Result<Result<(), DaemonError>, JoinError>,
    ) -> Result<JoinHandle<()>, DaemonError> {
        started.map_err(|error| DaemonError::new(error.to_string()))??;
        self.keep_metrics();
        self.poll_parts();
        let checking = tokio::task::spawn_local(self.clone().take_silent_back());
        tokio::task::spawn_local(self.clone().serve_the_rest());
        tracing::info!(socket = %self.config.api_socket.display(), "the daemon serves");
        let text = format!(
            "the daemon (pid {}, version {}) has started",
            std::process::id(),
            self.config.version
        );
        let generation = self.status().generation;
        self.firmware.daemon_serves(generation);
        let firmware = self.firmware.clone();
        // Ahead of time, so that a take-over need not wait for it.
        tokio::task::spawn_local(async move { firmware.verify_next().await });
        self.events.report(
            EventKind::DaemonStarted,
            generation,
            text,
            EventFields::default(),
        );
        for exposure in self.exposures() {
            self.warn(exposure);
        }
        systemd::report("READY=1");
        Ok(checking)
    }

    pub(crate) async fn start(self: Rc<Self>) -> Result<(), DaemonError> {
        let _only_one = self.try_change_pool()?;
        let record = self.find_record()?;
        let open = match self.open_pool(PoolOpen::default()).await {
            Ok(Some(open)) => Some(open),
            // A pool with a living engine is not created anew.
            Ok(None) if self.has_embedded_file() || self.living_engine()?.is_none() => {
                self.embedded().await?
            }
            Ok(None) => None,
            Err(trouble) => {
                // Repairs need the API; a living engine serves on.
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
                // It serves on and keeps its ports; the API tells which pool is missing.
                Some(engine) => {
                    let trouble = ApiError::not_found(format!(
                        "an engine (pid {}) runs in {}, but no pool is recorded, and the engine has no pool devices",
                        engine.pid,
                        self.config.run_dir.display()
                    ))
                    .hint("name the devices of its pool: `forebay pool open --device SPEC`");
                    tracing::error!(error = %trouble, hint = trouble.hint, "the pool is not open");
                    *self.trouble.borrow_mut() = Some(trouble);
                    Ok(())
                }
                None => self.bind_listeners_at_start(false),
            },
        }
    }

    fn has_embedded_file(&self) -> bool {
        let embedded = self.config.embedded_pool.as_ref();
        embedded.is_some_and(|embedded| embedded.path.exists())
    }

    /// Continues with the previous daemon's engine if it lives.
    pub(super) async fn take_over(
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
        let pool_id = pool.info().uuid.into_bytes();
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
            DaemonError::new(format!(
                "can't use the grant table {}: {error}",
                path.display()
            ))
        })?;
        if let Some((engine, _)) = &live
            && (!grants.same_boot() || undeposited)
        {
            tracing::warn!(
                pid = engine.pid,
                "the grants of the running engine are unknown: it is replaced"
            );
            engine.kill();
            engine.ended().await;
            live = None;
        }
        if let Some((_, greeting)) = &live {
            // At once, because the engine may die.
            self.keep_listeners(greeting)?;
        }
        // A process that hangs at a silent device may have the addresses. VMs have other sockets.
        let may_wait = live.is_some()
            || missing.iter().any(|device| device.is_silent)
            || pool.exports().iter().any(|export| export.frontend.is_vm());
        self.bind_listeners_at_start(may_wait)?;
        let (catalog, limits) = (Arc::new(catalog), Limits::default());
        let (events, clusters) = (self.events.clone(), self.clusters.clone());
        let owner = Owner::new(pool, catalog, devices, grants, limits, events, clusters);
        owner.labels.set_hold(self.me.clone(), tenure);
        if live.is_none() {
            let finished = timeout(START_COMMIT_LIMIT, owner.mapping.finish_adoption(None)).await;
            if finished.is_err() {
                let trouble = owner.base.catalog_trouble().unwrap_or_default();
                owner.close();
                return Err(DaemonError::new(format!(
                    "the pool's catalog can't be written: {trouble}"
                ))
                .with_hint(
                    "make room on the device below the pool or repair that device, and start again",
                ));
            }
        }
        *owner.base.missing.borrow_mut() = missing;
        let before = self.lost_devices.replace(owner.base.lost_devices());
        owner.states.report_lost(&before);
        self.begin(owner, live);
        Ok(())
    }

    pub(super) fn begin(
        self: &Rc<Self>,
        owner: Rc<Owner>,
        mut live: Option<(EngineProcess, Greeting)>,
    ) {
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
        owner.statistics.keep_statistics(&self.config.state_dir);
        if let Some((_, greeting)) = &mut live {
            owner.vms.keep_vm_listeners(&mut greeting.held);
        }
        owner.vms.begin_vms(self.config.run_dir.join("machines"));
        let supervisor = Supervisor::new(
            self.config.engine.clone(),
            self.firmware.clone(),
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
}
