//! Telling the engine what there is.
//!
//! Purpose: a conversation begins with everything (devices, volumes, what hosts have reserved of them,
//! who may use how much, exports, ports, listeners), and each
//! later change is told as it happens.
//! Design: what is needed to serve is said in one step without a wait in it, and from the same step
//! on changes are told; so nothing falls between. All of it is idempotent. With it goes what a FLUSH
//! has to cover and to wait for. If there is something to take over, that is next. Listeners come
//! last, so that nobody new is served before what a dead engine left; then everything listed is granted
//! again unasked, where the pool maps it, in parts: a fault would be answered the same. Missing
//! devices and quarantined exports are not told. What the engine holds and the catalog doesn't know is
//! taken away.
//! Not here: what there is (the pool).

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use forebay_xlate::boundary::message::{ExportId, Held, ToEngine};

use crate::owner::Owner;
use crate::owner::exports::export::export_config;
use crate::owner::link::Asked;
use crate::owner::link::session::{DeviceState, Session};

impl Owner {
    /// Tells a new conversation what there is: with it, an engine can convert what a dead one left. The
    /// conversation is in use from here on. Gives back what was asked, and the listeners' addresses
    /// that the engine has.
    pub(crate) fn say_what_is(
        &self,
        session: &Rc<Session>,
        held: Vec<(Held, Vec<OwnedFd>)>,
    ) -> (Vec<Asked>, HashSet<String>) {
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
        let is_known = !held.is_empty();
        for (one, descriptors) in held {
            match one {
                Held::Volume(config) => _ = volumes.insert(config.volume),
                Held::Export(config) => _ = exports.insert(config.export),
                Held::Listener(address) => {
                    if let Some(descriptor) = descriptors.into_iter().next() {
                        self.ports
                            .listeners
                            .borrow_mut()
                            .entry(address.clone())
                            .or_insert(descriptor);
                    }
                    addresses.insert(address);
                }
                Held::MachineListener(export) => {
                    let fd = descriptors.into_iter().next();
                    self.vms.keep_machine_listener(export, fd);
                }
                // The session has noted them.
                Held::Device(..)
                | Held::Revoke(_)
                | Held::Job(..)
                | Held::Socket(_)
                | Held::Machine(..)
                | Held::Deposits(_)
                | Held::Memory => {}
            }
        }
        self.ports.note_ports();
        let core = self.base.core.borrow();
        let pool = &core.pool;
        let extent_bytes = pool.info().extent_bytes;
        if let Some(hold) = self.labels.hold_message() {
            session.say(&hold);
        }
        for record in pool.devices() {
            if !self.base.is_open_here(record.index) {
                continue;
            }
            if session.device(record.index) != Some(DeviceState::Ready) {
                session.set_device(record.index, DeviceState::Opening);
            }
            let device = self.base.device_config(record, extent_bytes);
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
            let volume = self.base.volume_config(pool, record);
            ask(
                record.id.to_string(),
                None,
                session.request("a volume", |request| ToEngine::SetVolume {
                    request,
                    volume,
                }),
            );
        }
        drop(core);
        for (what, pending) in self.reservations.say_reservations(session) {
            ask(what, None, pending);
        }
        for (what, pending) in self.budgets.say_all_budgets(session, is_known) {
            ask(what, None, pending);
        }
        for (what, pending) in self.ports.say_ports(session) {
            ask(what, None, pending);
        }
        self.mapping.revoker.say_what_a_flush_must_know(session);
        let core = self.base.core.borrow();
        let pool = &core.pool;
        for record in pool.exports() {
            let Ok(volume) = pool.volume(record.volume) else {
                continue;
            };
            if self.quarantine.has(record.id) {
                continue;
            }
            exports.remove(&ExportId(record.id.0));
            let export = export_config(record, volume);
            let reactor = self.placement.reactor_for(record.id);
            ask(
                record.nqn.clone(),
                None,
                session.request("an export", |request| ToEngine::SetExport {
                    request,
                    export,
                    reactor,
                }),
            );
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
        drop(core);
        self.attach(session);
        // What a dead engine counted is known from here on.
        self.statistics.say_figures(session);
        (asked, addresses)
    }

    /// Tells it where to listen, which it does at once.
    pub(crate) fn say_listeners(
        &self,
        session: &Session,
        addresses: &HashSet<String>,
    ) -> Vec<Asked> {
        let mut asked = self.ports.say_hosts_listeners(session, addresses);
        for (what, pending) in self.vms.say_machine_listeners(session) {
            asked.push(Asked {
                what,
                device: None,
                pending,
            });
        }
        asked
    }
}
