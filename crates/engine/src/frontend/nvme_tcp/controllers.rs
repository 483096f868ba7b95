//! A reactor's controllers: each associates a host with an export, or with discovery.
//!
//! The rules are in `nvme::controller`. This is the link to this engine: connections, lane, record
//! in the state region, progress of a reset or shutdown. It may allocate. **Not here:** when an
//! association ends ([`super::lifecycle`]).

use super::conn::Conn;
use crate::associations::Association;
use crate::core::{Core, DoneIo};
use crate::exports::{ExportTable, Subsystems, fnv};
use crate::lane::{Lane, LaneIndex};
use forebay_nvme::controller::{
    AdminEnv, Ana, Controller, Effect, ErrorReport, Health, NamespaceInfo, SubsystemController,
};
use forebay_nvme::fabrics::DiscoveryLogEntry;
use forebay_nvme::{Nqn, Status};
use forebay_xlate::boundary::message::ExportId;
use forebay_xlate::boundary::region::{
    ControllerConstants, ControllerContent, ControllerRecord, Region,
};
use forebay_xlate::kill_point;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// Progress of a reset or shutdown that the host asked for (CC.EN, CC.SHN).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Quiesce {
    No,
    /// I/O queues are closed; the core still has their commands. A shutdown flushes afterwards.
    Draining {
        flush: bool,
    },
    Flushing,
}

pub(super) struct Attached {
    pub controller: Controller,
    /// Holds the controller ID and queues.
    pub association: Association,
    pub lane: Option<LaneIndex>,
    pub export: Option<ExportId>,
    pub exports: Option<ExportTable>,
    pub slot: u32,
    pub admin: Option<u32>,
    /// All connections, including the admin queue's, until their last command has ended.
    pub conns: Vec<u32>,
    pub quiesce: Quiesce,
    /// The namespace size that the host was last informed of.
    pub blocks: u64,
    /// The engine's address that the host reached.
    pub local: SocketAddr,
    pub ana: Ana,
}

impl Attached {
    pub(super) fn join(&mut self, conn: u32, qid: u16) -> Option<LaneIndex> {
        self.conns.push(conn);
        if qid == 0 {
            self.admin = Some(conn);
        }
        self.lane
    }

    /// Applies a command's effect; true if the controller's I/O must end.
    pub(super) fn begin_quiescing(&mut self, effect: Effect) -> bool {
        let flush = match effect {
            Effect::None | Effect::Enabled => return false,
            Effect::Reset => false,
            Effect::Shutdown => true,
        };
        let before = matches!(self.quiesce, Quiesce::Draining { flush: true });
        self.quiesce = Quiesce::Draining {
            flush: flush || before,
        };
        kill_point!("quiesce.draining");
        true
    }

    /// Records the controller's state, valid from the admin queue's last answer on, and publishes
    /// that answer. So at most one state is pending.
    pub(super) fn publish(&self, admin: &mut Conn) {
        let region = admin.shared.region;
        self.record_state(region, admin.tx.at());
        kill_point!("admin.sequence");
        admin.tx.publish(&admin.records);
        kill_point!("admin.answered");
    }

    pub(super) fn io_queues(&self) -> u16 {
        let queues = self.controller.state().io_queues;
        queues.iter().map(|word| word.count_ones() as u16).sum()
    }

    fn record_state(&self, region: &Region, valid_from: u64) {
        let Some(record) = region.controllers().get(self.slot as usize) else {
            return;
        };
        let content = ControllerContent {
            sequence: record.sequence() + 1,
            valid_from,
            blocks: self.blocks,
            state: zerocopy::transmute!(*self.controller.state()),
        };
        record.put_state(region.header().key.load(Relaxed), self.slot, &content);
    }

    pub(super) fn record(&self, region: &Region) {
        let Some(record) = region.controllers().get(self.slot as usize) else {
            return;
        };
        let constants = ControllerConstants {
            lane: self.lane.map(|l| l.0),
            cntlid: self.controller.cntlid(),
            export: self.export.map(|e| e.0),
            local: self.local,
        };
        record.put_constants(region.header().key.load(Relaxed), self.slot, &constants);
        self.record_state(region, 0);
        record.used.store(1, Release);
    }

    pub(super) fn env(&self, core: &Core, subsystem: Vec<SubsystemController>) -> Env {
        let lane = self.lane.and_then(|l| core.lane(l));
        let namespace = lane.map(Lane::namespace_info);
        let health = lane.map_or_else(Health::default, Lane::health);
        Env {
            namespace,
            health,
            subsystem,
            ana: self.ana,
            io_queues: u16::MAX,
            persistent: lane.is_some_and(|lane| lane.reservations.ptpl()),
            list: self.discovery_list(),
        }
    }

    fn discovery_list(&self) -> DiscoveryList {
        let Some(exports) = &self.exports else {
            return DiscoveryList::default();
        };
        DiscoveryList {
            subsystems: exports.list_of(&self.controller.hostnqn()),
            ports: self.addresses(exports),
        }
    }

    /// Informs the host if its discovery list changed.
    pub(super) fn poll_list(&mut self) {
        if self.exports.is_some() {
            let generation = self.discovery_list().generation();
            self.controller.discovery_is(generation);
        }
    }

    /// Addresses of exports; a wildcard address becomes the one that this host reached.
    fn addresses(&self, exports: &ExportTable) -> Vec<(SocketAddr, u16)> {
        // Ports are known before their listeners exist, so that a successor lists them from the
        // start.
        let mut listed: Vec<(SocketAddr, u16)> = Vec::new();
        listed.extend(exports.ports().iter().map(|p| (p.address, p.id)));
        listed.sort_by_key(|(_, id)| *id);
        let listened = exports.addresses();
        for address in listened.iter().filter_map(|a| a.parse().ok()) {
            if listed.iter().all(|(known, _)| *known != address) {
                let id = listed.iter().map(|(_, id)| *id).max().unwrap_or(0);
                listed.push((address, id.saturating_add(1)));
            }
        }
        let mut all: Vec<(SocketAddr, u16)> = Vec::new();
        for (address, id) in listed {
            let address = match address.ip().is_unspecified() {
                true => SocketAddr::new(self.local.ip().to_canonical(), address.port()),
                false => address,
            };
            if all.iter().all(|(other, _)| *other != address) {
                all.push((address, id));
            }
        }
        all
    }
}

#[derive(Default)]
struct DiscoveryList {
    subsystems: Arc<Subsystems>,
    ports: Vec<(SocketAddr, u16)>,
}

impl DiscoveryList {
    /// A hash of the list ([`fnv`]). A successor computes an equal one.
    fn generation(&self) -> u64 {
        self.ports
            .iter()
            .fold(self.subsystems.hash, |hash, (address, id)| {
                fnv(hash, &format!("{address} {id}\n"))
            })
    }
}

pub(super) struct Env {
    namespace: Option<NamespaceInfo>,
    health: Health,
    subsystem: Vec<SubsystemController>,
    ana: Ana,
    pub io_queues: u16,
    persistent: bool,
    list: DiscoveryList,
}

impl AdminEnv for Env {
    fn namespace(&self, nsid: u32) -> Option<NamespaceInfo> {
        self.namespace.filter(|_| nsid == super::command::NSID)
    }

    fn health(&self) -> Health {
        self.health
    }

    fn ana(&self) -> Ana {
        self.ana
    }

    fn controllers(&self) -> Vec<SubsystemController> {
        self.subsystem.clone()
    }

    fn io_queues_left(&self) -> u16 {
        self.io_queues
    }

    fn persistent_reservations(&self) -> bool {
        self.persistent
    }

    fn discovery_generation(&self, _host: &Nqn) -> u64 {
        self.list.generation()
    }

    fn discovery_count(&self, _host: &Nqn) -> u64 {
        ((self.list.subsystems.nqns.len() + 1) * self.list.ports.len()) as u64
    }

    fn discovery_entry(&self, _host: &Nqn, index: u64) -> Option<DiscoveryLogEntry> {
        let ports = self.list.ports.len() as u64;
        let subsystem = usize::try_from(index.checked_div(ports)?).ok()?;
        let port = index.checked_rem(ports)? as usize;
        let entries = super::MAX_ADMIN_ENTRIES as u16;
        let (address, id) = *self.list.ports.get(port)?;
        Some(match self.list.subsystems.nqns.get(subsystem) {
            Some(nqn) => {
                DiscoveryLogEntry::tcp(DiscoveryLogEntry::SUBTYPE_NVM, nqn, address, id, entries)
            }
            None => DiscoveryLogEntry::itself(address, id, entries),
        })
    }
}

#[derive(Default)]
pub(super) struct Controllers {
    all: Vec<Option<Box<Attached>>>,
}

impl Controllers {
    pub(super) fn get_mut(&mut self, index: u32) -> Option<&mut Attached> {
        self.all.get_mut(index as usize)?.as_deref_mut()
    }

    pub(super) fn get(&self, index: u32) -> Option<&Attached> {
        self.all.get(index as usize)?.as_deref()
    }

    pub(super) fn places(&self) -> u32 {
        self.all.len() as u32
    }

    /// An export belongs to one reactor, so these are all.
    pub(super) fn of_same_export(&self, index: u32) -> Vec<SubsystemController> {
        let export = self.get(index).and_then(|attached| attached.export);
        let all = self.iter().map(|(_, attached)| attached);
        let of_it = all.filter(|a| export.is_some() && a.export == export);
        let mut found: Vec<SubsystemController> = of_it
            .map(|attached| SubsystemController {
                cntlid: attached.controller.cntlid(),
                online: attached.admin.is_some(),
            })
            .collect();
        found.sort_unstable_by_key(|controller| controller.cntlid);
        found
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Attached)> {
        (0..)
            .zip(&self.all)
            .filter_map(|(i, a)| Some((i, a.as_deref()?)))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut Attached)> {
        (0..)
            .zip(&mut self.all)
            .filter_map(|(i, a)| Some((i, a.as_deref_mut()?)))
    }

    /// Logs a device's failure in the error log. Returns the status for an interrupted command.
    #[cold]
    pub(super) fn note_failure(&mut self, conn: &Conn, core: &Core, done: &DoneIo) -> Status {
        let Some(attached) = self.get_mut(conn.controller) else {
            return Status::COMMAND_INTERRUPTED;
        };
        if done.status.is_media_error() || done.status.code() == Status::INTERNAL_ERROR {
            let lane = core.lane(done.lane);
            let block_bytes = lane.map_or(1, |l| u64::from(l.volume.config.block_bytes));
            attached.controller.record_error(ErrorReport {
                sqid: conn.qid,
                cid: conn.slots.get(done.owner.slot).map_or(0xFFFF, |s| s.cid),
                status: done.status,
                lba: done.op.offset_bytes() / block_bytes.max(1),
                nsid: super::command::NSID,
            });
        }
        attached.controller.interrupted_status()
    }

    pub(super) fn add(&mut self, attached: Attached) -> u32 {
        let at = self
            .all
            .iter()
            .position(Option::is_none)
            .unwrap_or(self.all.len());
        let attached = Some(Box::new(attached));
        match self.all.get_mut(at) {
            Some(free) => *free = attached,
            None => self.all.push(attached),
        }
        at as u32
    }

    pub(super) fn remove(&mut self, index: u32, region: &Region) {
        if let Some(attached) = self.all.get_mut(index as usize).and_then(Option::take)
            && let Some(record) = region.controllers().get(attached.slot as usize)
        {
            record.used.store(0, Release);
        }
    }
}

pub(super) fn claim_controller_slot(region: &Region) -> Option<u32> {
    let free = |r: &ControllerRecord| r.used.compare_exchange(0, 1, AcqRel, Acquire).is_ok();
    region.controllers().iter().position(free).map(|i| i as u32)
}

pub(super) fn claim_queue_slot(region: &Region) -> Option<u32> {
    region
        .queues()
        .iter()
        .position(|r| r.used.compare_exchange(0, 1, AcqRel, Acquire).is_ok())
        .map(|i| i as u32)
}
