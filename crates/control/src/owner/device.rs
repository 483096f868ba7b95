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

use forebay_pool::NewDevice;
use forebay_xlate::DeviceIndex;
use forebay_xlate::boundary::message::ToEngine;

use super::Owner;
use super::session::{AskError, DeviceState};
use crate::api::error::ApiError;
use crate::devices::{NewPoolDevice, PoolDevice};

impl Owner {
    /// Makes a device part of the pool.
    pub(crate) async fn device_add(
        self: Rc<Self>,
        device: NewPoolDevice,
    ) -> Result<DeviceIndex, ApiError> {
        let _one_at_a_time = self.adding.lock().await;
        let NewPoolDevice { new, store, .. } = device;
        let index = self.join_pool(&new)?;
        self.devices.borrow_mut().push(PoolDevice {
            index,
            spec: new.spec.clone(),
            store,
        });
        // From here on it is in the pool, in memory at least: it can't be taken back.
        self.commit_for_api().await?;
        tracing::info!(device = %index, spec = new.spec, "a device joined the pool");
        self.serve_device(index);
        self.tell_device(index).await;
        Ok(index)
    }

    fn join_pool(&self, new: &NewDevice) -> Result<DeviceIndex, ApiError> {
        Err(ApiError::unavailable(format!(
            "{}: devices are added to a pool when it is made",
            new.spec
        )))
    }

    /// Tells the engine of a new device; without one, the next engine is told of everything.
    async fn tell_device(self: &Rc<Self>, index: DeviceIndex) {
        let (Some(session), Some(device)) = (self.session(), self.config_of(index)) else {
            return;
        };
        if session.device(index).is_none() {
            session.set_device(index, DeviceState::Opening);
        }
        let mut pending = session.request("opening a device", |request| ToEngine::SetDevice {
            request,
            device,
        });
        if let Err(AskError::Refused(error)) = pending.within(self.limits.request).await {
            self.device_failed(&session, index, error);
        }
    }
}
