//! The health of devices, as the pool learns it: *online*, *failing*, *missing* or *failed*.
//!
//! New extents come only from online devices; those on missing and failed ones are not granted. The
//! engine reports online or failed. A device with errors is failing, and a truncated one stays
//! failed. A device that the daemon has not open is missing until the pool is reopened. The engine
//! is told of failed devices again and again.

pub(crate) mod clients;
pub(crate) mod drives;
pub(crate) mod errors;
pub(crate) mod hang;
pub(crate) mod size;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use forebay_pool::DeviceHealth;
use forebay_xlate::DeviceIndex;
use forebay_xlate::boundary::message::{Job, ToEngine};
use tokio::time::{sleep, timeout};

use crate::base::Base;
use crate::devices::PoolDevice;
use crate::link::session::{AskError, DeviceState, PendingAnswer, Session};
use crate::link::{Link, WelcomeItem};
use crate::model::events::EventKind;
use crate::states::drives::AskedDrive;
use crate::states::hang::Hanging;

#[derive(Debug)]
pub(crate) struct DeviceStates {
    base: Rc<Base>,
    link: Rc<Link>,
    hanging: Hanging,
    /// Failed devices that the engine will be told of again.
    retrying: RefCell<BTreeSet<DeviceIndex>>,
    /// Why Ceph clients can't be used.
    client_troubles: RefCell<BTreeMap<DeviceIndex, String>>,
    watched: Watched,
    drives: RefCell<BTreeMap<DeviceIndex, AskedDrive>>,
}

impl DeviceStates {
    pub(crate) fn new(base: &Rc<Base>, link: &Rc<Link>) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            link: link.clone(),
            hanging: Default::default(),
            retrying: Default::default(),
            client_troubles: Default::default(),
            watched: Default::default(),
            drives: Default::default(),
        })
    }

    /// Open devices with a failure: they may have gone away and returned.
    pub(crate) fn troubled_devices(&self) -> Vec<PoolDevice> {
        let is_catalog = self.base.catalog_trouble().is_some();
        let devices = self.base.devices.borrow();
        let is_troubled = |device: &&PoolDevice| {
            let index = device.index;
            let fails =
                is_catalog || self.error_trouble(index).is_some() || !self.base.is_online(index);
            fails && self.cut_short(index).is_none()
        };
        devices.iter().filter(is_troubled).cloned().collect()
    }

    pub(crate) fn report_lost(&self, before: &BTreeSet<DeviceIndex>) {
        let now = self.base.lost_devices();
        for device in now.difference(before) {
            self.report_health(*device, DeviceHealth::Missing);
        }
        for device in before.difference(&now) {
            self.report_health(*device, DeviceHealth::Online);
        }
    }

    pub(crate) fn set_health(&self, device: DeviceIndex, health: DeviceHealth) {
        let before = {
            let pool = &mut self.base.core.borrow_mut().pool;
            let before = pool.allocator().device_health(device);
            if let Err(error) = pool.set_device_health(device, health) {
                tracing::error!(%device, %error, "can't record a device's health");
            }
            before
        };
        if before != health {
            self.report_health(device, health);
            self.base.devices_changed.raise();
            self.base.zero_fill_wanted.raise();
        }
    }

    fn report_health(&self, device: DeviceIndex, health: DeviceHealth) {
        let spec = self.base.spec_of(device);
        let what = match health {
            DeviceHealth::Online => {
                let text = format!("device {spec} is online");
                return self
                    .base
                    .report_device(EventKind::DeviceReturned, device, text);
            }
            DeviceHealth::Failing => {
                tracing::warn!(%device, "the device gives errors: no new extents are placed there until it recovers");
                return;
            }
            DeviceHealth::Missing => "is missing",
            DeviceHealth::Failed => "has failed",
        };
        let text =
            format!("device {spec} {what}: data there can't be reached; everything else continues");
        self.base
            .report_device(EventKind::DeviceFailed, device, text);
    }

    fn health_when_ready(&self, device: DeviceIndex) -> DeviceHealth {
        if self.cut_short(device).is_some() {
            return DeviceHealth::Failed;
        }
        // If no other device is online, occasional errors are better than no space.
        let pool = &self.base.core.borrow().pool;
        let others = || pool.devices().iter().filter(|other| other.index != device);
        let is_shut = self.is_shut(device)
            && others()
                .any(|other| pool.allocator().device_health(other.index) == DeviceHealth::Online);
        if is_shut {
            DeviceHealth::Failing
        } else {
            DeviceHealth::Online
        }
    }

    pub(crate) fn judge_health(&self, device: DeviceIndex) {
        if self.base.is_served(device) {
            self.set_health(device, self.health_when_ready(device));
        }
    }

    pub(crate) fn device_ready(&self, device: DeviceIndex) {
        if self.base.is_open_here(device) {
            self.set_health(device, self.health_when_ready(device));
        }
        if self.client_troubles.borrow_mut().remove(&device).is_some() {
            let text = format!("{} is connected again", self.base.spec_of(device));
            (self.base).report_device(EventKind::DeviceReturned, device, text);
        }
        self.base.devices_changed.raise();
    }

    fn client_failed(&self, device: DeviceIndex, error: &str) {
        if self
            .base
            .core
            .borrow()
            .pool
            .images()
            .client(device)
            .is_none()
        {
            return;
        }
        let mut troubles = self.client_troubles.borrow_mut();
        if troubles.get(&device).is_some_and(|known| known == error) {
            return;
        }
        troubles.insert(device, error.to_owned());
        let client = self.base.spec_of(device);
        let text = format!("{client} can't be used: {error}: its volumes' commands wait");
        (self.base).report_device(EventKind::DeviceFailed, device, text);
    }

    pub(crate) fn device_failed(
        self: &Rc<Self>,
        session: &Rc<Session>,
        device: DeviceIndex,
        error: String,
    ) {
        tracing::error!(%device, error, "the engine can't use a device");
        self.client_failed(device, &error);
        session.set_device(device, DeviceState::Failed(error));
        if self.base.is_open_here(device) {
            self.set_health(device, DeviceHealth::Failed);
        }
        if self.retrying.borrow_mut().insert(device) {
            let (owner, session) = (self.clone(), session.clone());
            self.base.spawn(async move {
                owner.retry_device(&session, device).await;
                owner.retrying.borrow_mut().remove(&device);
            });
        }
    }

    async fn retry_device(self: &Rc<Self>, session: &Rc<Session>, device: DeviceIndex) {
        loop {
            sleep(self.base.limits.device_retry).await;
            if session.is_over() {
                // The next engine is told of everything.
                return;
            }
            match session.device(device) {
                Some(DeviceState::Failed(_)) => {}
                Some(DeviceState::Opening) => continue,
                Some(DeviceState::Ready) | None => return,
            }
            let Some(config) = self.base.config_of(device) else {
                return;
            };
            session.set_device(device, DeviceState::Opening);
            let mut pending = session.request("opening a device", |request| ToEngine::SetDevice {
                request,
                device: config,
            });
            // If it opens, DeviceReady or DeviceFailed follows.
            if let Err(error) = pending.ended().await
                && error != AskError::Gone
            {
                tracing::warn!(%device, %error, "can't open a failed device again");
                session.set_device(device, DeviceState::Failed(error.to_string()));
            }
        }
    }
}

#[derive(Debug)]
pub(crate) struct Watched {
    errors: RefCell<BTreeMap<DeviceIndex, errors::SeenErrors>>,
    /// How long a device must give no error to be healthy again.
    pub(crate) quiet: Cell<Duration>,
    /// Truncated devices, with their sizes in bytes.
    cut: RefCell<BTreeMap<DeviceIndex, u64>>,
    /// Devices whose file was removed or renamed, with a warning for each.
    nameless: RefCell<BTreeMap<DeviceIndex, String>>,
    /// The folders of `devices.json`.
    record_dirs: RefCell<Vec<PathBuf>>,
}

impl Default for Watched {
    fn default() -> Self {
        Self {
            errors: RefCell::default(),
            quiet: Cell::new(errors::QUIET),
            cut: RefCell::default(),
            nameless: RefCell::default(),
            record_dirs: RefCell::default(),
        }
    }
}

impl DeviceStates {
    pub(crate) fn set_record_dirs(&self, folders: Vec<PathBuf>) {
        *self.watched.record_dirs.borrow_mut() = folders;
    }

    pub(crate) async fn flush_device(&self, device: DeviceIndex) -> Result<(), AskError> {
        let session = self.link.session().ok_or(AskError::Gone)?;
        if self.is_hanging(device) {
            return Err(AskError::TimedOut(self.base.limits.job, "earlier requests"));
        }
        if !self.base.is_served(device) {
            return Err(AskError::Errno(rustix::io::Errno::NODEV.raw_os_error()));
        }
        timeout(self.base.limits.job, session.devices_ready(&[device]))
            .await
            .unwrap_or(Err(AskError::TimedOut(
                self.base.limits.job,
                "a device's fence",
            )))?;
        let flush = session.job(Job::Flush { device });
        self.job_within(&session, device, flush).await
    }

    pub(crate) async fn carried_out(
        self: &Rc<Self>,
        session: &Rc<Session>,
        asked: Vec<WelcomeItem>,
    ) {
        for WelcomeItem {
            what,
            device,
            mut pending,
        } in asked
        {
            match pending.within(self.base.limits.request).await {
                Ok(()) => {}
                Err(AskError::Gone) => return,
                Err(error) => {
                    tracing::error!(what, %error, "can't send a change to the engine");
                    match (device, error) {
                        (Some(device), AskError::Refused(error)) => {
                            self.device_failed(session, device, error);
                        }
                        (Some(device), AskError::TimedOut(..)) => {
                            self.await_device(session, device, pending);
                        }
                        _ => {}
                    }
                }
            }
        }
    }

    /// Opening a device takes long: a cluster may not answer.
    fn await_device(
        self: &Rc<Self>,
        session: &Rc<Session>,
        device: DeviceIndex,
        mut pending: PendingAnswer,
    ) {
        let (owner, session) = (self.clone(), session.clone());
        self.base.spawn(async move {
            if let Err(AskError::Refused(error)) = pending.ended().await {
                owner.device_failed(&session, device, error);
            }
        });
    }
}
