//! The health of devices: what the pool is told of it.
//!
//! Purpose: a device that is missing or fails takes down only what lives on it.
//! Design: the pool knows each device as *online*, *failing*, *missing* or *failed*; only online ones
//! are allocated from, and what is mapped on missing and failed ones can't be granted. What the engine
//! says of a device decides between online and failed; one that gives errors is failing (`watch`), one
//! that was cut short has failed for good; one that the daemon has not open is missing and stays so
//! until the pool is opened anew. The engine is told of a failed device again and again.
//! Not here: devices that hang without an error (`hang`), finding missing ones (`devices`).

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
use crate::link::session::{AskError, DeviceState, Session};
use crate::link::{Link, WelcomeItem};
use crate::model::events::EventKind;
use crate::states::hang::Hanging;

/// How the pool's devices are: what the engine, errors, sizes and hanging requests say of them.
#[derive(Debug)]
pub(crate) struct DeviceStates {
    base: Rc<Base>,
    link: Rc<Link>,
    hanging: Hanging,
    /// Failed devices that the engine is told of again.
    retrying: RefCell<BTreeSet<DeviceIndex>>,
    watched: Watched,
}

impl DeviceStates {
    pub(crate) fn new(base: &Rc<Base>, link: &Rc<Link>) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            link: link.clone(),
            hanging: Default::default(),
            retrying: Default::default(),
            watched: Default::default(),
        })
    }

    /// The open devices of which something failed: they may have gone away and come back.
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

    /// Tells which devices were lost or came back since `before`.
    pub(crate) fn tell_of_lost(&self, before: &BTreeSet<DeviceIndex>) {
        let now = self.base.lost_devices();
        for device in now.difference(before) {
            self.tell_of_health(*device, DeviceHealth::Missing);
        }
        for device in before.difference(&now) {
            self.tell_of_health(*device, DeviceHealth::Online);
        }
    }

    pub(crate) fn set_health(&self, device: DeviceIndex, health: DeviceHealth) {
        let before = {
            let pool = &mut self.base.core.borrow_mut().pool;
            let before = pool.allocator().device_health(device);
            if let Err(error) = pool.set_device_health(device, health) {
                tracing::error!(%device, %error, "a device's health");
            }
            before
        };
        if before != health {
            self.tell_of_health(device, health);
            self.base.devices_changed.raise();
            self.base.launder_wanted.raise();
        }
    }

    fn tell_of_health(&self, device: DeviceIndex, health: DeviceHealth) {
        let spec = self.base.spec_of(device);
        let what = match health {
            DeviceHealth::Online => {
                let text = format!("device {spec} is online");
                return self
                    .base
                    .tell_of_device(EventKind::DeviceReturned, device, text);
            }
            DeviceHealth::Failing => {
                tracing::warn!(%device, "the device gives errors: nothing new is placed there until it is well again");
                return;
            }
            DeviceHealth::Missing => "is missing",
            DeviceHealth::Failed => "has failed",
        };
        let text = format!(
            "device {spec} {what}: what lives there can't be reached, everything else goes on"
        );
        self.base
            .tell_of_device(EventKind::DeviceFailed, device, text);
    }

    /// How a device is that the engine can use.
    fn health_when_ready(&self, device: DeviceIndex) -> DeviceHealth {
        if self.cut_short(device).is_some() {
            return DeviceHealth::Failed;
        }
        // Something must be placed somewhere: an error then and there is better than no room.
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

    /// What was seen of a device may have changed how it is.
    pub(crate) fn judge_health(&self, device: DeviceIndex) {
        if self.base.is_served(device) {
            self.set_health(device, self.health_when_ready(device));
        }
    }

    /// The engine has its fence on a device.
    pub(crate) fn device_ready(&self, device: DeviceIndex) {
        if self.base.is_open_here(device) {
            self.set_health(device, self.health_when_ready(device));
        }
        self.base.devices_changed.raise();
    }

    /// The engine can't use a device.
    pub(crate) fn device_failed(
        self: &Rc<Self>,
        session: &Rc<Session>,
        device: DeviceIndex,
        error: String,
    ) {
        tracing::error!(%device, error, "the engine can't use a device");
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

    /// A device failed in the engine: it is told of it again after a while, for as long as it takes.
    async fn retry_device(&self, session: &Rc<Session>, device: DeviceIndex) {
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
            // If it opens, what follows is told by DeviceReady or DeviceFailed.
            if let Err(error) = pending.within(self.base.limits.request).await
                && error != AskError::Gone
            {
                tracing::warn!(%device, %error, "trying a failed device again");
                session.set_device(device, DeviceState::Failed(error.to_string()));
            }
        }
    }
}

/// What was seen.
#[derive(Debug)]
pub(crate) struct Watched {
    errors: RefCell<BTreeMap<DeviceIndex, errors::SeenErrors>>,
    /// How long a device must give no error to be well again.
    pub(crate) quiet: Cell<Duration>,
    /// Devices that were cut short, to how many bytes.
    cut: RefCell<BTreeMap<DeviceIndex, u64>>,
    /// Devices whose file was removed or renamed, with the warning about each.
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
    /// Says where `devices.json` is.
    pub(crate) fn set_record_dirs(&self, folders: Vec<PathBuf>) {
        *self.watched.record_dirs.borrow_mut() = folders;
    }

    /// Has the engine flush a device.
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

    /// Waits until everything that was asked is carried out.
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
                    tracing::error!(what, %error, "telling the engine");
                    if let (Some(device), AskError::Refused(error)) = (device, error) {
                        self.device_failed(session, device, error);
                    }
                }
            }
        }
    }
}
