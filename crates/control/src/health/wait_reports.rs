//! Reports waits longer than [`REPORT_AFTER`] with their causes, and their ends.
//!
//! A task checks once a second the announced waits ([`begin`](crate::base::waits::Waits::begin))
//! and those visible in the owner's state. It renews causes, because they may change. A thread
//! searches `/proc` for processes.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use forebay_pool::DeviceRecord;
use forebay_xlate::DeviceIndex;
use tokio::time::{Instant, sleep, timeout};

use crate::base::Base;
use crate::base::waits::{ReportedWait, Wait};
use crate::events::EventFields;
use crate::health::copies::Copies;
use crate::health::reports::concerned;
use crate::link::Link;
use crate::link::session::DeviceState;
use crate::mapping::MapOwner;
use crate::model::events::EventKind;
use crate::store::SyncStore;

/// How long a wait may take before it is reported.
const REPORT_AFTER: Duration = Duration::from_secs(5);
const BEAT: Duration = Duration::from_secs(1);
/// The period of searches for one cause: each may read all of `/proc`.
const POLL_AGAIN: Duration = Duration::from_secs(5);
/// The limit of a search for a process.
const POLL_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct WaitReports {
    base: Rc<Base>,
    link: Rc<Link>,
    copies: Rc<Copies>,
    mapping: Rc<dyn MapOwner>,
}

impl WaitReports {
    pub(crate) fn new(
        base: &Rc<Base>,
        link: &Rc<Link>,
        copies: &Rc<Copies>,
        mapping: &Rc<dyn MapOwner>,
    ) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            link: link.clone(),
            copies: copies.clone(),
            mapping: mapping.clone(),
        })
    }

    pub(crate) async fn run_waits(self: Rc<Self>) {
        loop {
            self.poll_waits().await;
            sleep(BEAT).await;
        }
    }

    async fn poll_waits(&self) {
        let now = self.waits_now();
        let mut over = Vec::new();
        self.base.waits.seen.borrow_mut().retain(|wait, seen| {
            let goes_on = now.contains(wait);
            if !goes_on {
                over.extend(seen.text.take());
            }
            goes_on
        });
        for text in over {
            let text = format!("resolved: {text}");
            self.base
                .report(EventKind::Warning, text, EventFields::default());
        }
        let mut due = Vec::new();
        for wait in now {
            let mut seen = self.base.waits.seen.borrow_mut();
            let one = seen.entry(wait).or_insert_with(|| ReportedWait {
                since: Instant::now(),
                checked: None,
                text: None,
            });
            let is_fresh = one.checked.is_some_and(|at| at.elapsed() < POLL_AGAIN);
            if one.since.elapsed() >= REPORT_AFTER && !is_fresh {
                one.checked = Some(Instant::now());
                due.push(wait);
            }
        }
        for wait in due {
            let Some(text) = self.cause(wait.0).await else {
                continue;
            };
            let before = match self.base.waits.seen.borrow_mut().get_mut(&wait) {
                Some(seen) => seen.text.replace(text.clone()),
                None => continue,
            };
            if before.as_ref() == Some(&text) {
                continue;
            }
            let device = match wait.0 {
                Wait::Device(device) | Wait::Job(device, _) => Some(device.0),
                _ => None,
            };
            let fields = EventFields {
                device,
                ..EventFields::default()
            };
            self.base.report(EventKind::Warning, text, fields);
        }
    }

    /// All current waits, with the number of the announcement.
    fn waits_now(&self) -> BTreeSet<(Wait, u64)> {
        let begun = self.base.waits.begun.borrow();
        let mut now: BTreeSet<_> = begun
            .iter()
            .map(|(number, wait)| (*wait, *number))
            .collect();
        drop(begun);
        if self.mapping.adoption().is_unfinished() || !self.mapping.adoption().is_recorded() {
            now.insert((Wait::Adoption, 0));
        }
        if self.base.committer.trouble().is_some() {
            // That is reported already.
            now.retain(|(wait, _)| *wait != Wait::Commit);
        }
        if let Some(session) = self.link.session() {
            let devices = self.base.device_indexes().into_iter();
            let opening = devices.filter(|d| session.device(*d) == Some(DeviceState::Opening));
            now.extend(opening.map(|device| (Wait::Device(device), 0)));
        }
        now
    }

    /// The cause of a wait, in a sentence.
    async fn cause(&self, wait: Wait) -> Option<String> {
        Some(match wait {
            Wait::Device(device) => {
                let blocker = self.blocker(device).await?;
                let concerned = concerned(&self.base.volumes_on(&self.base.core.borrow(), device));
                format!(
                    "device {} is not free for this engine: {blocker}; {concerned}, and requests to it fail or wait \
                    until then",
                    self.base.spec_of(device)
                )
            }
            Wait::Adoption => {
                let what = "taking over the grants of an earlier daemon has not finished";
                format!("{what}: it waits for {}", self.adoption_waits_for())
            }
            Wait::Commit => {
                let core = self.base.core.borrow();
                let has_copy = |r: &&DeviceRecord| self.copies.has_catalog_copy(r.index);
                let records = core.pool.devices().iter().filter(has_copy);
                let specs: Vec<String> = records.map(|r| self.base.device_spec(r)).collect();
                format!(
                    "a change of the pool is not durable yet: writing the catalog to {} has not ended",
                    specs.join(", ")
                )
            }
            Wait::Revoke(id, volume) => {
                let devices = self.mapping.devices_of(id);
                let name = self.base.volume_name(&self.base.core.borrow(), volume);
                let what = format!("revoking grants of volume {name} has not ended");
                match self.link.session() {
                    None => format!("{what}: no engine serves"),
                    Some(session) => {
                        let is_ready = |d: &&DeviceIndex| session.device_ready(**d);
                        let unready: Vec<String> = (devices.iter())
                            .filter(|d| !is_ready(d))
                            .map(|d| self.base.spec_of(*d))
                            .collect();
                        let ready: Vec<String> = (devices.iter().filter(is_ready))
                            .map(|d| self.base.spec_of(*d))
                            .collect();
                        if !unready.is_empty() {
                            let list = unready.join(", ");
                            format!("{what}: the engine waits until device {list} is free")
                        } else if !ready.is_empty() {
                            let list = ready.join(", ");
                            format!("{what}: requests to device {list} have not ended")
                        } else {
                            let pid = session.pid;
                            format!("{what}: the engine (pid {pid}) has not answered")
                        }
                    }
                }
            }
            Wait::Job(device, what) => {
                let spec = self.base.spec_of(device);
                format!("device {spec}: {what}, which the daemon requested, has not ended there")
            }
        })
    }

    /// Why the engine has no fence on a device; `None` if it has.
    async fn blocker(&self, device: DeviceIndex) -> Option<String> {
        let (generation, pid) = {
            let session = self.link.session()?;
            (session.generation, session.pid)
        };
        let store = {
            let devices = self.base.devices.borrow();
            let open = devices.iter().find(|open| open.index == device)?;
            open.store.clone()
        };
        let found = timeout(POLL_LIMIT, predecessor(store, generation)).await;
        // It may have got its fence meanwhile.
        let session = self.link.session()?;
        if session.device(device) != Some(DeviceState::Opening) {
            return None;
        }
        Some(match found {
            Ok(Ok(Some(blocker))) => blocker,
            Ok(Ok(None)) => {
                format!("the engine (pid {pid}) has not opened it yet; no earlier engine holds it")
            }
            Ok(Err(error)) => format!("can't find out which process holds it: {error}"),
            Err(_) => "finding out which process holds it takes too long".to_owned(),
        })
    }

    fn adoption_waits_for(&self) -> String {
        if !self.mapping.adoption().is_recorded() {
            return match self.base.committer.trouble() {
                Some(trouble) => format!("the catalog, which can't be written: {trouble}"),
                None => "the engine and the catalog".to_owned(),
            };
        }
        let mut devices = self.mapping.adoption().stale_devices();
        {
            let core = self.base.core.borrow();
            for volume in self.mapping.adoption().uncommitted_volumes() {
                let on =
                    |device: &DeviceIndex| core.pool.volumes().on_device(*device).contains(&volume);
                devices.extend(core.pool.devices().iter().map(|r| r.index).filter(on));
            }
        }
        let specs: Vec<String> = devices.into_iter().map(|d| self.base.spec_of(d)).collect();
        match specs.is_empty() {
            true => "the catalog".to_owned(),
            false => format!("flushes and requests at device {}", specs.join(", ")),
        }
    }
}

async fn predecessor(store: Arc<SyncStore>, generation: u64) -> Result<Option<String>, String> {
    let check = move || store.0.predecessor(generation);
    match tokio::task::spawn_blocking(check).await {
        Ok(Ok(found)) => Ok(found.map(|found| found.to_string())),
        Ok(Err(error)) => Err(error.to_string()),
        Err(error) => Err(error.to_string()),
    }
}
