//! Adds a device to a pool that is served, one at a time.
//!
//! The order is: label, durable record, engine, the device's tasks; once the engine has its fence,
//! it is online. After a crash between these steps, the device is either in the pool or can be
//! added again. If one device has both catalog copies, one copy moves. `devices` opens and checks
//! the device.

use std::rc::Rc;

use forebay_xlate::DeviceIndex;
use forebay_xlate::boundary::message::ToEngine;

use crate::devices::{NewPoolDevice, PoolDevice, api_error};
use crate::link::session::{AskError, DeviceState};
use crate::model::error::ApiError;
use crate::owner::Owner;

impl Owner {
    pub(crate) async fn device_add(
        self: Rc<Self>,
        device: NewPoolDevice,
    ) -> Result<DeviceIndex, ApiError> {
        let NewPoolDevice {
            new, store, force, ..
        } = device;
        let index = {
            let pool = &mut self.base.core.borrow_mut().pool;
            forebay_pool::add_device(pool, &self.base.catalog, &new, force).map_err(api_error)?
        };
        if let Err(error) = self.labels.hold_device(&store) {
            tracing::warn!(%error, "can't start the heartbeat of a new device");
        }
        // From here on it is in the pool, at least in memory, and can't be taken back.
        self.base.commit_through().await;
        tracing::info!(device = %index, spec = new.spec, "a device joined the pool");
        self.base.devices.borrow_mut().push(PoolDevice {
            index,
            spec: new.spec.clone(),
            store,
        });
        let (catalog, store) = (self.base.catalog.clone(), new.store.clone());
        match tokio::task::spawn_blocking(move || catalog.spread(index, &store)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(%error, "can't put a copy of the catalog on the new device")
            }
            Err(error) => {
                tracing::error!(%error, "can't put a copy of the catalog on the new device")
            }
        }
        self.mapping.serve_device(index);
        self.publish_device(index).await;
        Ok(index)
    }

    /// The next engine is told of all devices.
    async fn publish_device(self: &Rc<Self>, index: DeviceIndex) {
        let (Some(session), Some(device)) = (self.link.session(), self.base.config_of(index))
        else {
            return;
        };
        if let Some(hold) = self.labels.hold_message() {
            session.say(&hold);
        }
        if session.device(index).is_none() {
            session.set_device(index, DeviceState::Opening);
        }
        let mut pending = session.request("opening a device", |request| ToEngine::SetDevice {
            request,
            device,
        });
        if let Err(AskError::Refused(error)) = pending.within(self.base.limits.request).await {
            self.states.device_failed(&session, index, error);
        }
    }
}
