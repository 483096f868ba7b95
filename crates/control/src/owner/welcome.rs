//! Tells an engine, at the start of a session, everything that it needs to serve.
//!
//! That is sent in one step without an await, from which on changes are sent too, so nothing is
//! missed. Take-over follows, and then the listeners, so no new host comes before the dead
//! engine's. Missing devices and quarantined exports are left out. Volumes and exports that the
//! engine has but the catalog lacks are removed. All messages are idempotent.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use forebay_pool::{ExportRecord, VolumeRecord};
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::{ExportId, Held, ToEngine};

use crate::exports::export::export_config;
use crate::link::WelcomeItem;
use crate::link::session::{DeviceState, PendingAnswer, Session};
use crate::owner::Owner;

/// The configuration of an engine that served before this daemon.
#[derive(Debug, Default)]
struct KnownToEngine {
    volumes: HashSet<VolumeId>,
    exports: HashSet<ExportId>,
    /// The engine's listeners.
    addresses: HashSet<String>,
}

fn without_device(
    all: impl IntoIterator<Item = (String, PendingAnswer)>,
) -> impl Iterator<Item = WelcomeItem> {
    all.into_iter().map(|(what, pending)| WelcomeItem {
        what,
        device: None,
        pending,
    })
}

impl Owner {
    /// The session is in use from here on. Returns the requests, and the addresses where the engine
    /// listens.
    pub(crate) fn send_configuration(
        &self,
        session: &Rc<Session>,
        held: Vec<(Held, Vec<OwnedFd>)>,
    ) -> (Vec<WelcomeItem>, HashSet<String>) {
        let is_known = !held.is_empty();
        let known = self.take_listeners(held);
        self.ports.note_ports();
        if let Some(hold) = self.labels.hold_message() {
            session.say(&hold);
        }
        let mut asked = self.say_devices(session);
        asked.extend(self.clients.say_clients(session));
        asked.extend(self.say_volumes(session));
        asked.extend(without_device(self.reservations.say_reservations(session)));
        asked.extend(without_device(
            self.budgets.say_all_budgets(session, is_known),
        ));
        asked.extend(without_device(self.ports.say_ports(session)));
        self.mapping.send_flush_state(session);
        asked.extend(self.say_exports(session));
        asked.extend(self.send_removals(session, &known));
        self.use_session(session);
        // The engine knows a dead engine's counts from here on.
        self.statistics.publish_statistics(session);
        (asked, known.addresses)
    }

    /// Returns the engine's other objects, to compare with the catalog.
    fn take_listeners(&self, held: Vec<(Held, Vec<OwnedFd>)>) -> KnownToEngine {
        let mut known = KnownToEngine::default();
        for (one, descriptors) in held {
            match one {
                Held::Volume(config) => _ = known.volumes.insert(config.volume),
                Held::Export(config) => _ = known.exports.insert(config.export),
                Held::Listener(address) => {
                    if let Some(descriptor) = descriptors.into_iter().next() {
                        self.ports
                            .listeners
                            .borrow_mut()
                            .entry(address.clone())
                            .or_insert(descriptor);
                    }
                    known.addresses.insert(address);
                }
                Held::VmListener(export) => {
                    let fd = descriptors.into_iter().next();
                    self.vms.keep_vm_listener(export, fd);
                }
                // The session has noted them.
                Held::Device(..)
                | Held::Revoke(_)
                | Held::Job(..)
                | Held::Socket(_)
                | Held::Vm(..)
                | Held::Deposits(_)
                | Held::Memory => {}
            }
        }
        known
    }

    fn say_devices(&self, session: &Session) -> Vec<WelcomeItem> {
        let core = self.base.core.borrow();
        let extent_bytes = core.pool.info().extent_bytes;
        let devices = core.pool.devices().iter();
        let open = devices.filter(|record| self.base.is_open_here(record.index));
        open.map(|record| {
            if session.device(record.index) != Some(DeviceState::Ready) {
                session.set_device(record.index, DeviceState::Opening);
            }
            let device = self.base.device_config(record, extent_bytes);
            WelcomeItem {
                what: format!("device {}", device.spec),
                device: Some(record.index),
                pending: session.request("opening a device", |request| ToEngine::SetDevice {
                    request,
                    device,
                }),
            }
        })
        .collect()
    }

    fn say_volumes(&self, session: &Session) -> Vec<WelcomeItem> {
        let core = self.base.core.borrow();
        let say = |record| {
            let volume = self.base.volume_config(&core.pool, record);
            let message = |request| ToEngine::SetVolume { request, volume };
            (record.id.to_string(), session.request("a volume", message))
        };
        // A snapshot without exports is not used.
        let is_used = |record: &&VolumeRecord| {
            !record.is_snapshot() || core.pool.exports().first_of(record.id).is_some()
        };
        let volumes = core.pool.volumes().records().filter(is_used);
        without_device(volumes.map(say)).collect()
    }

    fn say_exports(&self, session: &Session) -> Vec<WelcomeItem> {
        let core = self.base.core.borrow();
        let exports = core.pool.exports().iter();
        let served = exports.filter(|record| !self.quarantine.has(record.id));
        let say = |record: &ExportRecord| {
            let volume = core.pool.volume(record.volume).ok()?;
            let export = export_config(record, volume);
            let reactor = self.placement.reactor_for(record.id);
            let message = |request| ToEngine::SetExport {
                request,
                export,
                reactor,
            };
            let pending = session.request("an export", message);
            Some((record.nqn.clone(), pending))
        };
        without_device(served.filter_map(say)).collect()
    }

    fn send_removals(&self, session: &Session, known: &KnownToEngine) -> Vec<WelcomeItem> {
        let core = self.base.core.borrow();
        let is_served = |export: &ExportId| {
            let record = core.pool.exports().get(forebay_pool::ExportId(export.0));
            record.is_ok_and(|record| {
                core.pool.volume(record.volume).is_ok() && !self.quarantine.has(record.id)
            })
        };
        let exports = known.exports.iter().filter(|export| !is_served(export));
        let exports = exports.map(|export| {
            let export = *export;
            let message = |request| ToEngine::RemoveExport { request, export };
            let pending = session.request("removing an export", message);
            (format!("removing export {}", export.0), pending)
        });
        let volumes = known.volumes.iter();
        let volumes = volumes.filter(|volume| core.pool.volume(**volume).is_err());
        let volumes = volumes.map(|volume| {
            let volume = *volume;
            let message = |request| ToEngine::RemoveVolume { request, volume };
            let pending = session.request("removing a volume", message);
            (format!("removing {volume}"), pending)
        });
        without_device(exports.chain(volumes)).collect()
    }

    pub(crate) fn say_listeners(
        &self,
        session: &Session,
        addresses: &HashSet<String>,
    ) -> Vec<WelcomeItem> {
        let mut asked = self.ports.say_hosts_listeners(session, addresses);
        asked.extend(without_device(self.vms.say_vm_listeners(session)));
        asked
    }
}
