//! A device that joins the pool while it is served.
//!
//! Purpose: more room without a restart.
//! Design: in this order, so that a cut between leaves either a device that is not in the pool and can
//! be added again, or one that is: the device's label (the pool writes it), its record, durably; then
//! the engine is told of it, and its own tasks begin; when the engine has its fence on it, it is
//! online and allocated from. Where both copies of the catalog are on one device, one moves to it. One
//! device at a time.
//! Not here: opening and judging the device (`devices`).

use std::rc::Rc;

use forebay_xlate::DeviceIndex;
use forebay_xlate::boundary::message::ToEngine;

use crate::devices::{NewPoolDevice, PoolDevice, api_error};
use crate::link::session::{AskError, DeviceState};
use crate::model::error::ApiError;
use crate::owner::Owner;

impl Owner {
    /// Makes a device part of the pool. Who asks for it holds `adding`.
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
            tracing::warn!(%error, "the heartbeat of a new device");
        }
        // From here on it is in the pool, in memory at least: it can't be taken back.
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
            Ok(Err(error)) => tracing::warn!(%error, "a copy of the catalog on the new device"),
            Err(error) => tracing::error!(%error, "a copy of the catalog on the new device"),
        }
        self.mapping.serve_device(index);
        self.tell_device(index).await;
        Ok(index)
    }

    /// Tells the engine of a new device; without one, the next engine is told of everything.
    async fn tell_device(self: &Rc<Self>, index: DeviceIndex) {
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
