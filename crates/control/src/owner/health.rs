//! The health of devices: what the pool is told of it.
//!
//! Purpose: a device that is missing or fails takes down only what lives on it.
//! Design: the pool knows each device as *online*, *failing*, *missing* or *failed*; only online ones
//! are allocated from, and what is mapped on missing and failed ones can't be granted. What the engine
//! says of a device decides between online and failed; one that gives errors is failing (`watch`), one
//! that was cut short has failed for good; one that the daemon has not open is missing and stays so
//! until the pool is opened anew. The engine is told of a failed device again and again.
//! Not here: devices that hang without an error (`hang`), finding missing ones (`devices`).

use std::collections::BTreeSet;
use std::rc::Rc;

use forebay_pool::{DeviceRecord, Health};
use forebay_xlate::DeviceIndex;
use forebay_xlate::boundary::message::ToEngine;
use tokio::time::sleep;

use super::Owner;
use super::session::{AskError, DeviceState, Session};
use crate::api::events::EventKind;
use crate::devices::PoolDevice;
use crate::events::News;

impl Owner {
    /// Something happened to a device.
    pub(super) fn tell_of_device(&self, kind: EventKind, device: DeviceIndex, text: String) {
        let news = News {
            device: Some(device.0),
            ..News::default()
        };
        self.tell(kind, text, news);
    }

    /// Where a device is now, whatever the catalog last heard.
    pub(super) fn device_spec(&self, record: &DeviceRecord) -> String {
        let devices = self.devices.borrow();
        let open = devices.iter().find(|device| device.index == record.index);
        open.map_or_else(|| record.spec.clone(), |device| device.spec.clone())
    }

    /// Whether the daemon has the device open.
    pub(super) fn is_open_here(&self, device: DeviceIndex) -> bool {
        let devices = self.devices.borrow();
        devices.iter().any(|open| open.index == device)
    }

    /// The open devices of which something failed: they may have gone away and come back.
    pub(crate) fn troubled_devices(&self) -> Vec<PoolDevice> {
        let is_catalog = self.catalog_trouble().is_some();
        let devices = self.devices.borrow();
        let is_troubled = |device: &&PoolDevice| {
            let index = device.index;
            let fails = is_catalog || self.error_trouble(index).is_some() || !self.is_online(index);
            fails && self.cut_short(index).is_none()
        };
        devices.iter().filter(is_troubled).cloned().collect()
    }

    /// A device's specification string.
    pub(super) fn spec_of(&self, device: DeviceIndex) -> String {
        let core = self.core.borrow();
        let record = core.pool.devices().iter().find(|r| r.index == device);
        record.map_or_else(|| device.to_string(), |record| self.device_spec(record))
    }

    /// Whether what is mapped on the device may be used.
    pub(super) fn is_served(&self, device: DeviceIndex) -> bool {
        let health = self.core.borrow().pool.device_health(device);
        matches!(health, Health::Online | Health::Failing)
    }

    /// Whether the device may be used for anything.
    pub(super) fn is_online(&self, device: DeviceIndex) -> bool {
        self.core.borrow().pool.device_health(device) == Health::Online
    }

    /// The devices that are missing or have failed.
    pub(crate) fn lost_devices(&self) -> BTreeSet<DeviceIndex> {
        let pool = &self.core.borrow().pool;
        let all = pool.devices().iter().map(|record| record.index);
        all.filter(|index| matches!(pool.device_health(*index), Health::Missing | Health::Failed))
            .collect()
    }

    /// Tells which devices were lost or came back since `before`.
    pub(crate) fn tell_of_lost(&self, before: &BTreeSet<DeviceIndex>) {
        let now = self.lost_devices();
        for device in now.difference(before) {
            self.tell_of_health(*device, Health::Missing);
        }
        for device in before.difference(&now) {
            self.tell_of_health(*device, Health::Online);
        }
    }

    pub(super) fn set_health(&self, device: DeviceIndex, health: Health) {
        let before = {
            let pool = &mut self.core.borrow_mut().pool;
            let before = pool.device_health(device);
            if let Err(error) = pool.set_device_health(device, health) {
                tracing::error!(%device, %error, "a device's health");
            }
            before
        };
        if before != health {
            self.tell_of_health(device, health);
            self.devices_changed.raise();
            self.launder_wanted.raise();
        }
    }

    fn tell_of_health(&self, device: DeviceIndex, health: Health) {
        let spec = self.spec_of(device);
        let what = match health {
            Health::Online => {
                let text = format!("device {spec} is online");
                return self.tell_of_device(EventKind::DeviceReturned, device, text);
            }
            Health::Failing => {
                tracing::warn!(%device, "the device gives errors: nothing new is placed there until it is well again");
                return;
            }
            Health::Missing => "is missing",
            Health::Failed => "has failed",
        };
        let text = format!(
            "device {spec} {what}: what lives there can't be reached, everything else goes on"
        );
        self.tell_of_device(EventKind::DeviceFailed, device, text);
    }

    /// How a device is that the engine can use.
    fn health_when_ready(&self, device: DeviceIndex) -> Health {
        if self.cut_short(device).is_some() {
            return Health::Failed;
        }
        // Something must be placed somewhere: an error then and there is better than no room.
        let pool = &self.core.borrow().pool;
        let others = || pool.devices().iter().filter(|other| other.index != device);
        let is_shut = self.is_shut(device)
            && others().any(|other| pool.device_health(other.index) == Health::Online);
        if is_shut {
            Health::Failing
        } else {
            Health::Online
        }
    }

    /// What was seen of a device may have changed how it is.
    pub(super) fn judge_health(&self, device: DeviceIndex) {
        if self.is_served(device) {
            self.set_health(device, self.health_when_ready(device));
        }
    }

    /// The engine has its fence on a device.
    pub(super) fn device_ready(&self, device: DeviceIndex) {
        if self.is_open_here(device) {
            self.set_health(device, self.health_when_ready(device));
        }
        self.devices_changed.raise();
    }

    /// The engine can't use a device.
    pub(super) fn device_failed(
        self: &Rc<Self>,
        session: &Rc<Session>,
        device: DeviceIndex,
        error: String,
    ) {
        tracing::error!(%device, error, "the engine can't use a device");
        session.set_device(device, DeviceState::Failed(error));
        if self.is_open_here(device) {
            self.set_health(device, Health::Failed);
        }
        if self.retrying.borrow_mut().insert(device) {
            let (owner, session) = (self.clone(), session.clone());
            self.spawn(async move {
                owner.retry_device(&session, device).await;
                owner.retrying.borrow_mut().remove(&device);
            });
        }
    }

    /// A device failed in the engine: it is told of it again after a while, for as long as it takes.
    async fn retry_device(&self, session: &Rc<Session>, device: DeviceIndex) {
        loop {
            sleep(self.limits.device_retry).await;
            if session.is_over() {
                // The next engine is told of everything.
                return;
            }
            match session.device(device) {
                Some(DeviceState::Failed(_)) => {}
                Some(DeviceState::Opening) => continue,
                Some(DeviceState::Ready) | None => return,
            }
            let Some(config) = self.config_of(device) else {
                return;
            };
            session.set_device(device, DeviceState::Opening);
            let mut pending = session.request("opening a device", |request| ToEngine::SetDevice {
                request,
                device: config,
            });
            // If it opens, what follows is told by DeviceReady or DeviceFailed.
            if let Err(error) = pending.within(self.limits.request).await
                && error != AskError::Gone
            {
                tracing::warn!(%device, %error, "trying a failed device again");
                session.set_device(device, DeviceState::Failed(error.to_string()));
            }
        }
    }
}
