//! Opens the pool: at the start, after a repair, and to take devices back.
//!
//! Taking a device back reopens the pool, because labels and catalog copies are compared there. The
//! engine lives through that as through a restart of the daemon. Every few seconds the daemon
//! retries silent, failed and missing devices, and a pool that could not be opened.

use std::io;
use std::path::Path;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use forebay_pool::Pool;
use tokio::time::{sleep, timeout};

use super::pool::other_pool;
use super::{Daemon, DaemonError, Serving, blocking};
use crate::devices::{self, Back, OPEN_HINT, OpenPool, Opening, Places, Recorded};
use crate::events::EventFields;
use crate::files;
use crate::model::error::{ApiError, ErrorKind};
use crate::model::events::EventKind;
use crate::model::{PoolDestroy, PoolInfo, PoolOpen};
use crate::owner::Owner;
use crate::supervisor::{found, process};

/// How long an opening takes before an event reports it.
const REPORT_AFTER: Duration = Duration::from_secs(4);
pub(super) const POLL_AGAIN: Duration = Duration::from_secs(3);
/// The bounds of the pause after failed attempts, which each leave the engine for a while.
const TRY_AGAIN: Duration = Duration::from_secs(30);
const TRY_AGAIN_MAX: Duration = Duration::from_secs(300);
/// The longest pause while no pool is open, as hosts wait.
const OPEN_AGAIN_MAX: Duration = Duration::from_secs(10);
/// How long preallocated extents are taken back before an engine is left.
pub(super) const PLACES_LIMIT: Duration = Duration::from_secs(3);
const COMMIT_LIMIT: Duration = Duration::from_secs(10);

impl Daemon {
    /// `None` if no pool is recorded, configured or given.
    pub(super) async fn open_pool(&self, body: PoolOpen) -> Result<Option<OpenPool>, ApiError> {
        let PoolOpen {
            devices: given,
            force: forced,
            take_over,
        } = body;
        let (recorded, damaged) = match self.recorded() {
            Ok(recorded) => (recorded, None),
            Err(error) => (None, Some(error)),
        };
        let is_damaged = damaged.is_some();
        let lost = |damaged: Option<io::Error>| {
            match damaged {
            Some(error) => Err(ApiError::damaged(error.to_string()).hint(
                "this file lists the devices of the pool; name them again with `forebay pool open --device SPEC`",
            )),
            None => Ok(None),
        }
        };
        // An unknown format is a newer release's, not damage.
        let is_newer = |error: &io::Error| error.kind() == io::ErrorKind::Unsupported;
        if given.is_empty() && damaged.as_ref().is_some_and(is_newer) {
            return lost(damaged);
        }
        // Labels are more reliable than a damaged record.
        let mut configured = Vec::new();
        if recorded.is_none() {
            configured.extend(self.engines_devices());
        }
        configured.extend(self.config.pool_devices.clone());
        if let Some(embedded) = self.config.embedded_pool.as_ref().filter(|_| is_damaged) {
            configured.push(embedded.path.display().to_string());
        }
        let name = recorded.as_ref().map(|recorded| recorded.name.clone());
        let opening = Arc::new(Opening::of(name));
        let places = Places {
            opening: opening.clone(),
            recorded,
            given,
            forced,
            configured,
            me: Some(self.me.clone()),
            take_over,
        };
        if places.is_empty() {
            return lost(damaged);
        }
        let only_configured = places.recorded.is_none() && places.given.is_empty();
        let opened = self.open_given(opening, move || devices::open_at(&places));
        match opened.await {
            Err(error) if only_configured && error.kind == ErrorKind::NotFound => {
                tracing::warn!(%error, "no pool was found on the configured devices");
                lost(damaged)
            }
            opened => {
                let open = opened?;
                if let Some(error) = damaged {
                    self.set_record_aside(&error);
                }
                if forced {
                    self.forgive_cut_short(&open);
                }
                Ok(Some(open))
            }
        }
    }

    pub(super) async fn open_given(
        &self,
        opening: Arc<Opening>,
        open: impl FnOnce() -> Result<OpenPool, ApiError> + Send + 'static,
    ) -> Result<OpenPool, ApiError> {
        *self.opening.borrow_mut() = Some(opening.clone());
        let mut opened = pin!(blocking(open));
        tokio::select! {
            opened = &mut opened => return opened,
            () = sleep(REPORT_AFTER) => {}
        }
        if self.now_opening().is_some() {
            self.warn(opening.to_string());
        }
        opened.await
    }

    /// Truncated devices that `--force` accepted count as complete from here on.
    fn forgive_cut_short(&self, open: &OpenPool) {
        let is_here = |index| open.devices.iter().any(|device| device.index == index);
        let records = open.pool.devices().iter().filter(|r| is_here(r.index));
        let uuids: Vec<_> = records.map(|record| record.uuid).collect();
        for folder in self.record_dirs() {
            if let Err(error) = devices::forgive_cut_short(folder, &uuids) {
                tracing::warn!(%error, "can't record that devices are accepted as they are");
            }
        }
    }

    /// The folders of `devices.json`; the first takes precedence.
    pub(super) fn record_dirs(&self) -> [&Path; 2] {
        [&self.config.state_dir, &self.config.run_dir]
    }

    /// If the record is damaged, or lost while an engine lives, the run folder's copy counts.
    fn recorded(&self) -> io::Result<Option<Recorded>> {
        let recorded = devices::recorded(&self.config.state_dir);
        let is_lost = match &recorded {
            Ok(Some(_)) => false,
            Ok(None) => self.living_engine()?.is_some(),
            Err(error) => error.kind() != io::ErrorKind::Unsupported,
        };
        match devices::recorded(&self.config.run_dir) {
            Ok(Some(copy)) if is_lost => {
                match &recorded {
                    Err(error) => self.set_record_aside(error),
                    Ok(_) => self.warn(
                        "devices.json in the state folder was lost: the daemon uses its copy in the run folder"
                            .to_owned(),
                    ),
                }
                // At once, because the pool may not open for a long time.
                if let Err(error) = devices::restore(&self.config.state_dir, &copy) {
                    tracing::warn!(%error, "can't record the pool's devices");
                }
                Ok(Some(copy))
            }
            _ => recorded,
        }
    }

    fn set_record_aside(&self, damage: &io::Error) {
        let path = devices::record_path(&self.config.state_dir);
        self.warn(format!(
            "{damage}: the file is damaged; it is kept as devices.json.damaged, and the daemon writes a new one"
        ));
        if let Err(error) = files::set_aside(&path) {
            tracing::warn!(%error, "can't rename a damaged file");
        }
    }

    /// Candidate devices of an unrecorded pool: the living engine's open files.
    fn engines_devices(&self) -> Vec<String> {
        let Ok(Some(engine)) = self.living_engine() else {
            return Vec::new();
        };
        let open = found::open_files(engine.pid);
        let (logs, run_dir) = (self.config.state_dir.join("log"), &self.config.run_dir);
        let is_ours = |path: &Path| path.starts_with(&logs) || path.starts_with(run_dir);
        let open = open.iter().filter(|path| !is_ours(path));
        open.filter_map(|path| path.to_str().map(str::to_owned))
            .collect()
    }

    pub(super) fn record_devices(&self, pool: &Pool) {
        for folder in self.record_dirs() {
            if let Err(error) = devices::record(folder, pool) {
                // The pool was found without it; on a full disk, serving is what makes room.
                tracing::warn!(%error, "can't record the pool's devices");
            }
        }
    }

    pub(crate) async fn pool_open(self: Rc<Self>, body: PoolOpen) -> Result<PoolInfo, ApiError> {
        let _only_one = self.change_pool().await?;
        self.open_or_take_back(body).await?;
        let serving = self.serving().ok_or_else(|| self.no_pool())?;
        Ok(serving.owner.reports.pool_show())
    }

    async fn open_or_take_back(self: &Rc<Self>, body: PoolOpen) -> Result<(), ApiError> {
        match self.serving() {
            Some(serving) => self.take_back(serving, body).await,
            None => self.open_and_serve(body).await,
        }
    }

    async fn poll_again(self: &Rc<Self>) -> Result<(), ApiError> {
        let _only_one = self.try_change_pool()?;
        self.polls_again.set(true);
        self.open_or_take_back(PoolOpen::default()).await
    }

    async fn open_and_serve(self: &Rc<Self>, body: PoolOpen) -> Result<(), ApiError> {
        let Some(open) = self.open_pool(body).await? else {
            return Err(self.no_pool().hint(
                "name the devices of a pool with `forebay pool open --device SPEC`, or create one with \
                `forebay pool create`",
            ));
        };
        let engine = self.find_record().map_err(DaemonError::from)?;
        self.take_over(open, engine).await?;
        self.trouble.borrow_mut().take();
        Ok(())
    }

    async fn take_back(
        self: &Rc<Self>,
        serving: Rc<Serving>,
        body: PoolOpen,
    ) -> Result<(), ApiError> {
        let PoolOpen {
            devices: given,
            force,
            take_over,
        } = body;
        let missing = serving.owner.base.missing.borrow().clone();
        let pool = serving.owner.base.core.borrow().pool.info().uuid;
        let reasons: Vec<String> = missing.iter().map(|m| m.why.clone()).collect();
        let open = serving.owner.base.devices.borrow().clone();
        let troubled = serving.owner.states.troubled_devices();
        let all_here = missing.is_empty();
        // Given devices may be open, and have failed because they are truncated.
        let takes_failed = force && serving.owner.states.is_any_cut_short();
        let mut devices = if takes_failed {
            given.clone()
        } else {
            Vec::new()
        };
        let recorded = devices::recorded(&self.config.state_dir).unwrap_or_default();
        let found = blocking(move || {
            let recorded = recorded.as_ref();
            let mut found = devices::find_missing(&pool, recorded, &open, &missing, &given, force)?;
            found
                .returned
                .extend(devices::find_returned(&pool, &troubled));
            Ok(found)
        });
        let Back { missing, returned } = found.await?;
        if !returned.is_empty() {
            let generation = serving.supervisor.view().generation;
            self.stale_engine.set(Some(generation));
        }
        let has_returned = self.is_engine_stale(&serving);
        if all_here && !has_returned && !takes_failed {
            return serving.owner.reports.refuse_failed();
        }
        devices.extend(missing);
        devices.extend(returned);
        if devices.is_empty() && !has_returned {
            return Err(ApiError::not_found(format!(
                "no missing device was found: {}",
                reasons.join("; ")
            ))
            .hint(OPEN_HINT));
        }
        self.leave(serving).await;
        let body = PoolOpen {
            devices,
            force,
            take_over,
        };
        match self.open_and_serve(body).await {
            Ok(()) if has_returned => self.replace_stale_engine().await,
            Ok(()) => Ok(()),
            Err(error) => {
                tracing::error!(%error, "can't take devices back: the pool is opened as before");
                if let Err(trouble) = self.open_and_serve(PoolOpen::default()).await {
                    tracing::error!(error = %trouble, "the pool is not open");
                    *self.trouble.borrow_mut() = Some(trouble);
                }
                Err(error)
            }
        }
    }

    fn is_engine_stale(&self, serving: &Serving) -> bool {
        self.stale_engine.get() == Some(serving.supervisor.view().generation)
    }

    /// The engine's descriptor of a device that went away only fails; the next engine opens the
    /// device anew.
    async fn replace_stale_engine(&self) -> Result<(), ApiError> {
        let replaced = self.engine_replace().await?;
        tracing::info!("a missing device is back: {replaced}");
        Ok(())
    }

    pub(crate) async fn engine_replace(&self) -> Result<String, ApiError> {
        let serving = self.serving().ok_or_else(|| self.no_pool())?;
        let slot = self.firmware.next();
        serving.supervisor.replace(&serving.owner, slot).await
    }

    pub(super) async fn take_silent_back(self: Rc<Self>) {
        let mut pause = POLL_AGAIN;
        let mut reported = String::new();
        loop {
            sleep(pause).await;
            let (least, most) = match self.serving() {
                Some(serving) => {
                    let missing = serving.owner.base.missing.borrow().clone();
                    let silent: Vec<_> = missing.into_iter().filter(|m| m.is_silent).collect();
                    let troubled = serving.owner.states.troubled_devices();
                    let is_stale = self.is_engine_stale(&serving);
                    if silent.is_empty() && troubled.is_empty() && !is_stale {
                        pause = POLL_AGAIN;
                        continue;
                    }
                    let pool = serving.owner.base.core.borrow().pool.info().uuid;
                    let any = move || {
                        Ok(is_stale
                            || silent.iter().any(|m| devices::may_answer(&m.spec))
                            || !devices::find_returned(&pool, &troubled).is_empty())
                    };
                    if !matches!(blocking(any).await, Ok(true)) {
                        continue;
                    }
                    (TRY_AGAIN, TRY_AGAIN_MAX)
                }
                None if self.may_open_later() => (POLL_AGAIN, OPEN_AGAIN_MAX),
                None => {
                    pause = POLL_AGAIN;
                    continue;
                }
            };
            match self.poll_again().await {
                Ok(()) => {
                    pause = POLL_AGAIN;
                    reported.clear();
                }
                Err(error) => {
                    if reported != error.message {
                        tracing::warn!(%error, "can't take back devices that did not answer");
                        reported.clone_from(&error.message);
                    }
                    pause = (pause * 2).clamp(least, most);
                }
            }
        }
    }

    /// Whether a pool could not be opened for a reason that may pass.
    pub(super) fn may_open_later(&self) -> bool {
        let trouble = self.trouble.borrow();
        trouble.as_ref().is_some_and(|trouble| {
            matches!(
                trouble.kind,
                ErrorKind::NotFound | ErrorKind::InUse | ErrorKind::Unavailable
            )
        })
    }

    /// Stops serving the pool; its engine goes on.
    pub(super) async fn leave(&self, serving: Rc<Serving>) {
        self.serving.borrow_mut().take();
        let owner = &serving.owner;
        owner.mapping.give_up_preallocated(PLACES_LIMIT).await;
        match timeout(COMMIT_LIMIT, owner.base.commit()).await {
            Ok(Ok(())) => {}
            // The grant table has what the catalog lacks.
            Ok(Err(error)) => {
                tracing::warn!(%error, "can't commit before the daemon leaves the engine")
            }
            Err(_) => {
                tracing::warn!("the daemon leaves the engine before the last commit has ended")
            }
        }
        owner.statistics.save_statistics(true).await;
        self.lost_devices.replace(owner.base.lost_devices());
        let supervising = serving.supervising.borrow_mut().take();
        if let Some(task) = supervising {
            task.abort();
            let _ = task.await;
        }
        *self.left_engine.borrow_mut() = serving.supervisor.take_process();
        if let Some(death) = serving.supervisor.view().last_death {
            *self.last_death.borrow_mut() = Some(death);
        }
        owner.close();
        self.spare_listeners
            .borrow_mut()
            .append(&mut owner.ports.listeners.borrow_mut());
    }

    pub(super) fn watch_tenure(self: &Rc<Self>, owner: &Rc<Owner>) {
        let Some(tenure) = owner.labels.tenure() else {
            return;
        };
        let daemon = self.clone();
        owner.base.spawn(async move {
            let taker = tenure.lost().await;
            // A separate task, because this one ends with the owner.
            tokio::task::spawn_local(daemon.lose(taker));
        });
    }

    async fn lose(self: Rc<Self>, taker: String) {
        let _only_one = self.change_pool().await;
        let Some(serving) = self.serving.borrow_mut().take() else {
            return;
        };
        let owner = &serving.owner;
        let text = format!(
            "pool {} is no longer served: {taker}",
            owner.base.pool_name()
        );
        tracing::error!("{text}");
        owner
            .base
            .report(EventKind::Warning, text.clone(), EventFields::default());
        if let Some(task) = serving.supervising.borrow_mut().take() {
            task.abort();
        }
        if let Some(engine) = serving.supervisor.take_process() {
            engine.kill();
        }
        owner.close();
        self.spare_listeners
            .borrow_mut()
            .append(&mut owner.ports.listeners.borrow_mut());
        let trouble = ApiError::in_use(text)
            .hint("if the pool belongs to this machine, run `forebay pool open --take-over` after the other Forebay \
            has ended");
        *self.trouble.borrow_mut() = Some(trouble);
    }

    /// Upgrades the labels of the served pool and reopens it. Hosts stay connected.
    pub(crate) async fn pool_upgrade(self: Rc<Self>) -> Result<PoolInfo, ApiError> {
        let _only_one = self.change_pool().await?;
        let serving = self.serving().ok_or_else(|| self.no_pool())?;
        if !serving.owner.base.missing.borrow().is_empty() {
            return Err(ApiError::unavailable(
                "a device of the pool is missing and can't be upgraded",
            )
            .hint("bring it back first; `forebay device list` shows it"));
        }
        let catalog = serving.owner.base.catalog.clone();
        let upgraded =
            blocking(move || catalog.upgrade_labels().map_err(devices::api_error)).await?;
        if upgraded > 0 {
            tracing::info!(
                devices = upgraded,
                "upgraded the pool's labels to the current format"
            );
            self.leave(serving).await;
            self.open_and_serve(PoolOpen::default()).await?;
        }
        let serving = self.serving().ok_or_else(|| self.no_pool())?;
        Ok(serving.owner.reports.pool_show())
    }

    /// Forgets a pool that can't be opened; its devices stay as they are.
    pub(super) async fn forget(&self, query: &PoolDestroy) -> Result<String, ApiError> {
        let Some(trouble) = self.trouble.borrow().clone() else {
            return Err(self.no_pool());
        };
        // If the record is damaged too, its file must be named.
        let (name, uuid) = match devices::recorded(&self.config.state_dir) {
            Ok(Some(recorded)) => (recorded.name, recorded.pool.to_string()),
            Ok(None) => ("pool".to_owned(), "unknown".to_owned()),
            Err(_) => ("devices.json".to_owned(), "unknown".to_owned()),
        };
        if query.name != name && query.name != uuid {
            return Err(other_pool(&query.name, &name, &uuid));
        }
        if !query.forget {
            return Err(trouble.hint(
                "repair it and open it (`forebay pool open`), or use --forget, which does not change its devices",
            ));
        }
        let gone = |error: std::io::Error| ApiError::unavailable(error.to_string());
        if let Some(engine) = self.living_engine().map_err(gone)? {
            if !query.disconnect_hosts {
                return Err(ApiError::in_use(format!(
                    "an engine (pid {}) still serves pool {name}",
                    engine.pid
                ))
                .hint("use --disconnect-hosts to end it: hosts and VMs lose their disks"));
            }
            engine.kill();
            engine.ended().await;
        }
        for folder in self.record_dirs() {
            files::remove(&devices::record_path(folder)).map_err(gone)?;
        }
        files::remove(&process::record_path(&self.config.run_dir)).map_err(gone)?;
        files::remove(&self.grants_path()).map_err(gone)?;
        self.trouble.borrow_mut().take();
        self.bind_listeners();
        Ok("the pool is forgotten; its devices were not changed".to_owned())
    }
}
