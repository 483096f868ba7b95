//! The health of devices: what the pool is told of it.
//!
//! Purpose: a device that is missing or fails takes down only what lives on it.
//! Design: the pool knows each device as *online*, *missing* or *failed*; only online ones are
//! allocated from, and what is mapped elsewhere can't be granted. What the engine says of a device
//! decides between online and failed; one that the daemon has not open is missing and stays so until
//! the pool is opened anew. The engine is told of a failed device again and again.
//! Not here: devices that hang without an error (`hang`), finding missing ones (`devices`).

use std::rc::Rc;

use forebay_pool::{DeviceRecord, Health};
use forebay_xlate::DeviceIndex;
use forebay_xlate::boundary::message::ToEngine;
use tokio::time::sleep;

use super::Owner;
use super::session::{AskError, DeviceState, Session};

impl Owner {
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

    /// Whether the device may be used.
    pub(super) fn is_online(&self, device: DeviceIndex) -> bool {
        self.core.borrow().pool.device_health(device) == Health::Online
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
            match health {
                Health::Online => tracing::info!(%device, "the device is online"),
                _ => {
                    tracing::error!(%device, ?health, "the device is not online: what lives there can't be reached, everything else goes on")
                }
            }
            self.devices_changed.raise();
            self.launder_wanted.raise();
        }
    }

    /// The engine has its fence on a device.
    pub(super) fn device_ready(&self, device: DeviceIndex) {
        if self.is_open_here(device) {
            self.set_health(device, Health::Online);
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
