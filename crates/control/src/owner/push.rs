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

use crate::owner::Owner;
use std::collections::{BTreeSet, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use forebay_pool::{ExportRecord, VolumeRecord};
use forebay_xlate::boundary::message::{
    ExportConfig, ExportId, GrantOf, Held, MAX_BATCH, ToEngine,
};
use forebay_xlate::grants::Grant;
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, Rights, VolumeId, Word};

use crate::owner::health::DeviceStates;
use crate::owner::ports::Ports;
use crate::owner::revoke::Revoker;
use crate::owner::session::{AskError, DeviceState, Pending, Session};

/// Something that the engine was told of in the beginning.
pub(crate) struct Asked {
    pub(crate) what: String,
    /// If it is a device.
    pub(crate) device: Option<DeviceIndex>,
    pub(crate) pending: Pending,
}

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

impl Revoker {
    /// Has a new engine know, before it serves, which devices each volume's FLUSH must cover and which
    /// mappings it must wait for.
    fn say_what_a_flush_must_know(&self, session: &Session) {
        let (mut covered, mut uncommitted) = (BTreeSet::new(), Vec::new());
        let core = self.base.core.borrow();
        let side = self.locks.side.borrow();
        for grant in core.grants.iter() {
            if grant.word.rights() == Some(Rights::Hole) {
                continue;
            }
            covered.insert((grant.volume, grant.word.device()));
            if grant.commit_sequence > core.pool.durable_seq(grant.volume) {
                side.tell_one_again(grant, &mut uncommitted);
            }
        }
        drop((core, side));
        covered.extend(
            self.flusher
                .may_hold_unflushed()
                .into_iter()
                .map(|(d, v)| (v, d)),
        );
        for (volume, device) in covered {
            tell_device(session, volume, device);
        }
        for grant in uncommitted {
            self.tell_grant(session, grant);
        }
    }

    /// Grants everything listed again, in parts, so that faults are answered in between. Each part is
    /// as the table is at that moment: what is taken back meanwhile is not told.
    pub(crate) async fn tell_all_grants(&self, session: &Session) {
        let mut place = None;
        loop {
            let mut listed = Vec::new();
            {
                let core = self.base.core.borrow();
                let side = self.locks.side.borrow();
                let mut next: Box<dyn Iterator<Item = &Grant>> = match place {
                    Some(place) => Box::new(core.grants.iter_after(place)),
                    None => Box::new(core.grants.iter()),
                };
                place = None;
                for grant in next.by_ref().take(MAX_BATCH) {
                    side.tell_one_again(grant, &mut listed);
                    place = Some((grant.volume, grant.range.first));
                }
            }
            for grant in listed {
                self.tell_grant(session, grant);
            }
            if place.is_none() || session.is_over() {
                return;
            }
            tokio::task::yield_now().await;
        }
    }

    /// Grants again, of what is listed, what the pool maps there and not elsewhere.
    fn tell_grant(&self, session: &Session, mut listed: GrantOf) {
        if listed.commit_sequence <= self.base.core.borrow().pool.durable_seq(listed.volume) {
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
            let (is_there, count) = self.base.core.borrow().pool.maps_at(
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
}

impl Ports {
    /// Those of hosts alone, but for these.
    pub(crate) fn say_hosts_listeners(
        &self,
        session: &Session,
        addresses: &HashSet<String>,
    ) -> Vec<Asked> {
        let mut asked = Vec::new();
        for (address, descriptor) in &*self.listeners.borrow() {
            if addresses.contains(address) {
                continue;
            }
            match descriptor.as_fd().try_clone_to_owned() {
                Ok(descriptor) => asked.push(Asked {
                    what: format!("listener {address}"),
                    device: None,
                    pending: session.request_with("a listener", descriptor, |request| {
                        ToEngine::SetListener {
                            request,
                            address: address.clone(),
                        }
                    }),
                }),
                Err(error) => tracing::error!(address, %error, "a descriptor for the listener"),
            }
        }
        asked
    }
}

impl DeviceStates {
    /// Waits until everything that was asked is carried out.
    pub(crate) async fn carried_out(self: &Rc<Self>, session: &Rc<Session>, asked: Vec<Asked>) {
        for Asked {
            what,
            device,
            mut pending,
        } in asked
        {
            match pending.within(self.base.limits.request).await {
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
pub(crate) fn export_config(record: &ExportRecord, volume: &VolumeRecord) -> ExportConfig {
    ExportConfig {
        export: ExportId(record.id.0),
        volume: record.volume,
        nqn: record.nqn.clone(),
        serial: serial(volume),
        hosts: record.hosts.iter().cloned().collect(),
        any_host: record.any_host,
        frontend: record.frontend,
    }
}

/// The serial number that hosts see: the first 20 digits of the volume's uuid.
pub(crate) fn serial(volume: &VolumeRecord) -> String {
    volume
        .uuid
        .0
        .iter()
        .take(10)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// All of a volume's extents, grown or not.
pub(crate) const ALL_EXTENTS: ExtentRange = ExtentRange::new(0, u64::MAX);
