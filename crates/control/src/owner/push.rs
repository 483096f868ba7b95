//! Telling the engine what there is.
//!
//! Purpose: a conversation begins with everything (devices, volumes, exports, listeners), and each
//! later change is told as it happens.
//! Design: everything is said in one step without a wait in it, and from the same step on changes
//! are told; so nothing falls between. All of it is idempotent. What is listed is granted again
//! unasked, where the pool maps it, because a fresh engine must know which mappings a FLUSH has to
//! wait for and which devices it has to flush. Missing devices are not told. What
//! the engine holds and the catalog doesn't know is taken away.
//! Not here: what there is (the pool).

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use forebay_pool::{DeviceRecord, ExportRecord, Pool, VolumeRecord};
use forebay_xlate::boundary::message::{
    DeviceConfig, ExportConfig, ExportId, GrantOf, Held, ToEngine, VolumeConfig,
};
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, Rights, VolumeId, Word};

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
        DeviceConfig {
            device: record.index,
            uuid: record.uuid.0,
            spec: self.device_spec(record),
            data_offset_bytes: record.data_offset_bytes,
            // The pool allows at most 4 MiB.
            extent_bytes: extent_bytes as u32,
            extents: record.extents,
        }
    }

    /// A volume as the engine is told of it: as large as it durably is.
    pub(super) fn volume_config(&self, pool: &Pool, record: &VolumeRecord) -> VolumeConfig {
        VolumeConfig {
            volume: record.id,
            uuid: record.uuid.0,
            size_bytes: self.durable_size(pool, record),
            block_bytes: record.block_bytes,
            // The pool allows at most 4 MiB.
            extent_bytes: pool.info().extent_bytes as u32,
        }
    }

    /// A device as the engine is told of it, if it is here.
    pub(super) fn config_of(&self, device: DeviceIndex) -> Option<DeviceConfig> {
        let core = self.core.borrow();
        let devices = core.pool.devices();
        let record = devices.iter().find(|record| record.index == device)?;
        self.is_open_here(device)
            .then(|| self.device_config(record, core.pool.info().extent_bytes))
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
                        self.device_failed(session, device, error);
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
                _ => {}
            }
        }
        let core = self.core.borrow();
        let pool = &core.pool;
        let extent_bytes = pool.info().extent_bytes;
        for record in pool.devices() {
            if !self.is_open_here(record.index) {
                continue;
            }
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
            let volume = self.volume_config(pool, record);
            ask(
                record.id.to_string(),
                None,
                session.request("a volume", |request| ToEngine::SetVolume {
                    request,
                    volume,
                }),
            );
        }
        let listed = self.locks.side.borrow().tell_again(&core.grants);
        drop(core);
        for grant in listed {
            self.tell_grant(session, grant);
        }
        for (device, volume) in self.may_hold_unflushed() {
            tell_device(session, volume, device);
        }
        let core = self.core.borrow();
        let pool = &core.pool;
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

    /// Grants again, of what is listed, what the pool maps there and not elsewhere.
    fn tell_grant(&self, session: &Session, mut listed: GrantOf) {
        if listed.commit_sequence <= self.core.borrow().pool.durable_seq(listed.volume) {
            listed.commit_sequence = 0;
        }
        let part = |at: u64, count: u64| {
            let word = Word::from_bits(listed.word).advance(at - listed.range.first);
            GrantOf {
                range: ExtentRange::new(at, count),
                word: word.bits(),
                ..listed
            }
        };
        if listed.range.count == 0 {
            session.grant(listed);
        }
        let mut at = listed.range.first;
        while at < listed.range.end() {
            let word = Word::from_bits(part(at, 1).word);
            let left = listed.range.end() - at;
            // On a device that is away nothing can be done, but a FLUSH must know of it.
            let (is_there, count) = self.core.borrow().pool.maps_at(
                listed.volume,
                ExtentIndex(at),
                word.device(),
                word.extent(),
                left,
            );
            // Its device counts for FLUSH all the same.
            session.grant(part(at, if is_there { count } else { 0 }));
            at += count;
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

/// Has a volume's FLUSH cover a device.
fn tell_device(session: &Session, volume: VolumeId, device: DeviceIndex) {
    if let Some(word) = Word::new(device, ExtentIndex(0), Rights::ReadWrite) {
        session.grant(GrantOf {
            volume,
            range: ExtentRange::new(0, 0),
            word: word.bits(),
            commit_sequence: 0,
        });
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
