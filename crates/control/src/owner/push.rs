//! Telling the engine what there is.
//!
//! Purpose: a conversation begins with everything (devices, volumes, exports, listeners), and each
//! later change is told as it happens.
//! Design: everything is said in one step without a wait in it, and from the same step on changes
//! are told; so nothing falls between. All of it is idempotent. Mappings that are not durable are
//! granted again unasked, because a fresh engine must know that a FLUSH has to wait for them. What
//! the engine holds and the catalog doesn't know is taken away.
//! Not here: what there is (the pool).

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use forebay_pool::{DeviceRecord, ExportRecord, VolumeRecord};
use forebay_xlate::boundary::message::{
    DeviceConfig, ExportConfig, ExportId, GrantOf, Held, ToEngine, VolumeConfig,
};
use forebay_xlate::{DeviceIndex, ExtentRange, Rights};
use tokio::time::sleep;

use super::Owner;
use super::session::{AskError, DeviceState, Pending, Session};

/// Something that the engine was told of in the beginning.
struct Asked {
    what: String,
    /// If it is a device.
    device: Option<DeviceIndex>,
    pending: Pending,
}

impl Owner {
    fn device_config(&self, record: &DeviceRecord, extent_bytes: u64) -> DeviceConfig {
        // Where it is now, whatever the catalog last heard.
        let open = self
            .devices
            .iter()
            .find(|device| device.index == record.index);
        DeviceConfig {
            device: record.index,
            uuid: record.uuid.0,
            spec: open.map_or_else(|| record.spec.clone(), |device| device.spec.clone()),
            data_offset_bytes: record.data_offset_bytes,
            // The pool allows at most 4 MiB.
            extent_bytes: extent_bytes as u32,
            extents: record.extents,
        }
    }

    /// Tells a new conversation everything, waits until it is carried out, and takes the
    /// conversation into use.
    pub(super) async fn tell_everything(
        self: &Rc<Self>,
        session: &Rc<Session>,
        held: Vec<(Held, Vec<OwnedFd>)>,
    ) {
        let asked = self.say_everything(session, held);
        for Asked {
            what,
            device,
            mut pending,
        } in asked
        {
            match pending.within(self.limits.request).await {
                Ok(()) => {}
                Err(AskError::Gone) => return,
                Err(error) => {
                    tracing::error!(what, %error, "telling the engine");
                    if let (Some(device), AskError::Refused(error)) = (device, error) {
                        session.set_device(device, DeviceState::Failed(error));
                        self.spawn(self.clone().retry_device(session.clone(), device));
                    }
                }
            }
        }
    }

    fn say_everything(&self, session: &Rc<Session>, held: Vec<(Held, Vec<OwnedFd>)>) -> Vec<Asked> {
        let mut asked = Vec::new();
        let mut ask = |what: String, device, pending| {
            asked.push(Asked {
                what,
                device,
                pending,
            })
        };
        let (mut volumes, mut exports) = (HashSet::new(), HashSet::new());
        let mut addresses = HashSet::new();
        for (one, descriptors) in held {
            match one {
                Held::Volume(config) => _ = volumes.insert(config.volume),
                Held::Export(config) => _ = exports.insert(config.export),
                Held::Listener(address) => {
                    if let Some(descriptor) = descriptors.into_iter().next() {
                        self.listeners
                            .borrow_mut()
                            .entry(address.clone())
                            .or_insert(descriptor);
                    }
                    addresses.insert(address);
                }
                Held::Device(..) | Held::Revoke(_) | Held::Job(..) => {}
            }
        }
        let core = self.core.borrow();
        let pool = &core.pool;
        let extent_bytes = pool.info().extent_bytes;
        for record in pool.devices() {
            if session.device(record.index) != Some(DeviceState::Ready) {
                session.set_device(record.index, DeviceState::Opening);
            }
            let device = self.device_config(record, extent_bytes);
            ask(
                format!("device {}", device.spec),
                Some(record.index),
                session.request("opening a device", |request| ToEngine::SetDevice {
                    request,
                    device,
                }),
            );
        }
        for record in pool.volumes() {
            volumes.remove(&record.id);
            let volume = volume_config(record, extent_bytes);
            ask(
                record.id.to_string(),
                None,
                session.request("a volume", |request| ToEngine::SetVolume {
                    request,
                    volume,
                }),
            );
        }
        for grant in core.grants.iter() {
            let durable = pool.durable_seq(grant.volume);
            if grant.word.rights() == Some(Rights::Hole) || grant.commit_sequence <= durable {
                continue;
            }
            // Not what somebody is giving up at this moment.
            for range in self.locks.free_parts(grant.volume, grant.range) {
                session.say(&ToEngine::Grants {
                    grants: vec![GrantOf {
                        volume: grant.volume,
                        range,
                        word: grant.word.advance(range.first - grant.range.first).bits(),
                        commit_sequence: grant.commit_sequence,
                    }],
                });
            }
        }
        for record in pool.exports() {
            exports.remove(&ExportId(record.id.0));
            let Ok(volume) = pool.volume(record.volume) else {
                continue;
            };
            let export = export_config(record, volume);
            ask(
                record.nqn.clone(),
                None,
                session.request("an export", |request| ToEngine::SetExport {
                    request,
                    export,
                }),
            );
        }
        for (address, descriptor) in &*self.listeners.borrow() {
            if addresses.contains(address) {
                continue;
            }
            match descriptor.as_fd().try_clone_to_owned() {
                Ok(descriptor) => {
                    let address = address.clone();
                    ask(
                        format!("listener {address}"),
                        None,
                        session.request_with("a listener", descriptor, |request| {
                            ToEngine::SetListener { request, address }
                        }),
                    );
                }
                Err(error) => tracing::error!(address, %error, "a descriptor for the listener"),
            }
        }
        for export in exports {
            ask(
                format!("removing export {}", export.0),
                None,
                session.request("removing an export", |request| ToEngine::RemoveExport {
                    request,
                    export,
                }),
            );
        }
        for volume in volumes {
            ask(
                format!("removing {volume}"),
                None,
                session.request("removing a volume", |request| ToEngine::RemoveVolume {
                    request,
                    volume,
                }),
            );
        }
        self.attach(session);
        asked
    }

    /// A device failed in the engine: it is told of it again after a while.
    pub(super) async fn retry_device(self: Rc<Self>, session: Rc<Session>, device: DeviceIndex) {
        loop {
            sleep(self.limits.device_retry).await;
            let config = {
                let core = self.core.borrow();
                let extent_bytes = core.pool.info().extent_bytes;
                let record = core
                    .pool
                    .devices()
                    .iter()
                    .find(|record| record.index == device);
                record.map(|record| self.device_config(record, extent_bytes))
            };
            let Some(config) = config.filter(|_| !session.is_over()) else {
                return;
            };
            session.set_device(device, DeviceState::Opening);
            let mut pending = session.request("opening a device", |request| ToEngine::SetDevice {
                request,
                device: config,
            });
            match pending.within(self.limits.request).await {
                Err(AskError::Refused(error)) => {
                    tracing::warn!(device = device.0, error, "trying a failed device again");
                    session.set_device(device, DeviceState::Failed(error));
                }
                // It is open: what follows is told by DeviceReady or DeviceFailed.
                _ => return,
            }
        }
    }

    /// Tells the engine one thing, if there is an engine, and waits for its answer. Without an
    /// engine the next one is told everything anyway.
    pub(super) async fn push(
        &self,
        what: &'static str,
        message: impl FnOnce(u64) -> ToEngine,
    ) -> Result<(), AskError> {
        let Some(session) = self.session() else {
            return Ok(());
        };
        match session
            .request(what, message)
            .within(self.limits.request)
            .await
        {
            Err(AskError::Gone) => Ok(()),
            answer => answer,
        }
    }
}

/// A volume as the engine is told of it.
pub(super) fn volume_config(record: &VolumeRecord, extent_bytes: u64) -> VolumeConfig {
    VolumeConfig {
        volume: record.id,
        uuid: record.uuid.0,
        size_bytes: record.size_bytes,
        block_bytes: record.block_bytes,
        // The pool allows at most 4 MiB.
        extent_bytes: extent_bytes as u32,
    }
}

/// An export as the engine is told of it.
pub(super) fn export_config(record: &ExportRecord, volume: &VolumeRecord) -> ExportConfig {
    ExportConfig {
        export: ExportId(record.id.0),
        volume: record.volume,
        nqn: record.nqn.clone(),
        serial: serial(volume),
        hosts: record.hosts.clone(),
        any_host: record.any_host,
    }
}

/// The serial number that hosts see: the first 20 digits of the volume's uuid.
pub(super) fn serial(volume: &VolumeRecord) -> String {
    volume
        .uuid
        .0
        .iter()
        .take(10)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// All of a volume's extents, grown or not.
pub(super) const ALL_EXTENTS: ExtentRange = ExtentRange::new(0, u64::MAX);
