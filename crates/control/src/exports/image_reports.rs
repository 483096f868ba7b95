//! The Ceph images of volumes, as the engine reports them.
//!
//! An image may grow or shrink elsewhere: its volume follows. An image that can't be opened is
//! tried again and again.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_xlate::VolumeId;
use tokio::time::sleep;

use crate::base::Base;
use crate::base::show::image_path;
use crate::events::EventFields;
use crate::exports::volumes::Volumes;
use crate::link::session::Session;
use crate::model::events::EventKind;

#[derive(Debug)]
pub(crate) struct ImageReports {
    base: Rc<Base>,
    volumes: Rc<Volumes>,
    /// Images that the engine can't use, and why.
    troubles: RefCell<BTreeMap<VolumeId, String>>,
}

impl ImageReports {
    pub(crate) fn new(base: &Rc<Base>, volumes: &Rc<Volumes>) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            volumes: volumes.clone(),
            troubles: RefCell::default(),
        })
    }

    /// A volume's name, and its image.
    fn name_of(&self, volume: VolumeId) -> Option<(String, String)> {
        let core = self.base.core.borrow();
        let image = image_path(core.pool.images().of(volume)?);
        Some((self.base.volume_name(&core, volume), image.to_string()))
    }

    pub(crate) fn opened(self: &Rc<Self>, volume: VolumeId, size_bytes: u64) {
        let Some((name, image)) = self.name_of(volume) else {
            return;
        };
        if self.troubles.borrow_mut().remove(&volume).is_some() {
            let text = format!("volume {name}: image {image} is open again");
            self.report(EventKind::DeviceReturned, text);
        }
        let new_bytes = {
            let pool = &self.base.core.borrow().pool;
            let Ok(record) = pool.volume(volume) else {
                return;
            };
            let size_bytes = size_bytes - size_bytes % u64::from(record.block_bytes);
            (record.size_bytes != size_bytes).then_some(size_bytes)
        };
        let Some(size_bytes) = new_bytes else {
            return;
        };
        let owner = self.clone();
        self.base.spawn(async move {
            let set = owner.volumes.set_image_size(volume, size_bytes, Vec::new());
            if let Err(error) = set.await {
                let text =
                    format!("volume {name} does not get the new size of image {image}: {error}");
                owner.report(EventKind::Warning, text);
            }
        });
    }

    pub(crate) fn failed(self: &Rc<Self>, session: &Rc<Session>, volume: VolumeId, error: &str) {
        let Some((name, _)) = self.name_of(volume) else {
            return;
        };
        let before = self.troubles.borrow_mut().insert(volume, error.to_owned());
        if before.as_deref() != Some(error) {
            let text = format!("volume {name}: {error}: its commands fail until the image is back");
            self.report(EventKind::DeviceFailed, text);
        }
        let (owner, session) = (self.clone(), session.clone());
        self.base.spawn(async move {
            sleep(owner.base.limits.device_retry).await;
            // A new engine is told of every volume anyway.
            if session.is_over() || !owner.troubles.borrow().contains_key(&volume) {
                return;
            }
            if let Err(error) = owner.volumes.push_volume(volume).await {
                tracing::debug!(%volume, %error, "can't have an image opened again");
            }
        });
    }

    fn report(&self, kind: EventKind, text: String) {
        self.base.report(kind, text, EventFields::default());
    }
}
