//! The controllers of a reactor: each an association of a host with an export, or with discovery.
//!
//! **Design.** The controller's rules are `nvme::controller`'s. Around it, here, is what ties it to this
//! engine: its connections, its lane, its record in the state region, and how far a reset or a shutdown
//! that the host asked for has come. All of this is the admin path, which may allocate.
//!
//! **Not here:** connections ([`super::conn`]), and when an association ends ([`super::lifecycle`]).

use super::conn::Conn;
use crate::associations::Association;
use crate::core::Core;
use crate::exports::{Exports, Served};
use crate::lane::LaneIndex;
use forebay_nvme::Nqn;
use forebay_nvme::controller::{AdminEnv, Controller, Health, NamespaceInfo};
use forebay_nvme::fabrics::DiscoveryLogEntry;
use forebay_nvme::io::NamespaceGeometry;
use forebay_xlate::boundary::message::ExportId;
use forebay_xlate::boundary::region::{
    ControllerConstants, ControllerContent, ControllerRecord, OpKind, Region,
};
use forebay_xlate::kill_point;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// How far a reset or shutdown is that the host asked for (CC.EN, CC.SHN).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Quiesce {
    /// None is.
    No,
    /// I/O queues are closed; their commands are still with the core. A shutdown flushes afterwards.
    Draining { flush: bool },
    /// The volume is being flushed.
    Flushing,
}

/// See the module's text.
pub(super) struct Attached {
    pub controller: Controller,
    /// Held for its id; freed with this.
    pub _association: Association,
    pub lane: Option<LaneIndex>,
    pub export: Option<ExportId>,
    /// What a discovery controller tells of.
    pub exports: Option<Exports>,
    /// Its slot among the region's controllers.
    pub slot: u32,
    /// The admin queue's connection, while it is open.
    pub admin: Option<u32>,
    /// All connections, the admin queue's too, until their last command has ended.
    pub conns: Vec<u32>,
    pub quiesce: Quiesce,
    /// The namespace's size that the host was told of last.
    pub blocks: u64,
    /// Our address as the host sees it.
    pub local: SocketAddr,
}

impl Attached {
    /// Records the controller's state, which is true from the admin queue's last answer on, and publishes
    /// that: so no more than one state waits to become true.
    pub(super) fn publish(&self, admin: &mut Conn) {
        let region = admin.shared.region;
        self.record_state(region, admin.tx.at());
        kill_point!("admin.sequence");
        admin.tx.publish(&admin.records);
        kill_point!("admin.answered");
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

    /// Makes its record.
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

    /// What it may ask about the world.
    pub(super) fn env(&self, core: &Core) -> Env {
        let lane = self.lane.and_then(|l| core.lane(l));
        let namespace = lane.map(|lane| {
            let volume = &lane.volume.config;
            NamespaceInfo {
                geometry: NamespaceGeometry {
                    block_bytes: volume.block_bytes,
                    block_count: lane.volume.blocks(),
                },
                // Only the owner knows how much is allocated.
                used_blocks: lane.volume.blocks(),
                extent_bytes: volume.extent_bytes,
                nguid: volume.uuid,
                uuid: volume.uuid,
            }
        });
        let health = lane.map_or_else(Health::default, |lane| {
            let of = |kind: OpKind| &lane.record().ops[kind as usize];
            let figure = |cell: &std::sync::atomic::AtomicU64| u128::from(cell.load(Relaxed));
            Health {
                bytes_read: figure(&of(OpKind::Read).bytes),
                bytes_written: figure(&of(OpKind::Write).bytes),
                host_reads: figure(&of(OpKind::Read).ops),
                host_writes: figure(&of(OpKind::Write).ops),
                ..Health::default()
            }
        });
        let (served, addresses, generation) = match &self.exports {
            None => (Arc::default(), Vec::new(), 0),
            Some(exports) => (exports.all(), self.addresses(exports), exports.generation()),
        };
        Env {
            namespace,
            health,
            served,
            addresses,
            generation,
        }
    }

    /// Where exports can be reached: a wildcard address is, for this host, the one that it reached.
    fn addresses(&self, exports: &Exports) -> Vec<SocketAddr> {
        let mut all: Vec<SocketAddr> = Vec::new();
        for address in exports
            .addresses()
            .iter()
            .filter_map(|a| a.parse::<SocketAddr>().ok())
        {
            let address = match address.ip().is_unspecified() {
                true => SocketAddr::new(self.local.ip().to_canonical(), address.port()),
                false => address,
            };
            if !all.contains(&address) {
                all.push(address);
            }
        }
        all
    }
}

/// The world as it was when a command came.
pub(super) struct Env {
    namespace: Option<NamespaceInfo>,
    health: Health,
    served: Arc<Vec<Served>>,
    addresses: Vec<SocketAddr>,
    generation: u64,
}

impl Env {
    fn visible<'a>(&'a self, host: &'a Nqn) -> impl Iterator<Item = &'a Served> {
        self.served.iter().filter(|s| s.allows(host.as_str()))
    }
}

impl AdminEnv for Env {
    fn namespace(&self, nsid: u32) -> Option<NamespaceInfo> {
        self.namespace.filter(|_| nsid == super::command::NSID)
    }

    fn health(&self) -> Health {
        self.health
    }

    fn discovery_generation(&self, _host: &Nqn) -> u64 {
        self.generation
    }

    fn discovery_count(&self, host: &Nqn) -> u64 {
        (self.visible(host).count() * self.addresses.len()) as u64
    }

    fn discovery_entry(&self, host: &Nqn, index: u64) -> Option<DiscoveryLogEntry> {
        let addresses = self.addresses.len() as u64;
        let export = usize::try_from(index.checked_div(addresses)?).ok()?;
        let port = index.checked_rem(addresses)? as usize;
        let served = self.visible(host).nth(export)?;
        let nqn = Nqn::parse(&served.config.nqn).ok()?;
        let entries = super::MAX_ADMIN_ENTRIES as u16;
        let address = *self.addresses.get(port)?;
        Some(DiscoveryLogEntry::tcp(
            DiscoveryLogEntry::SUBTYPE_NVM,
            &nqn,
            address,
            port as u16 + 1,
            entries,
        ))
    }
}

/// See the module's text.
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

    /// All, with their places.
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

/// Takes a slot among the region's controllers; other reactors do the same.
pub(super) fn take_controller_slot(region: &Region) -> Option<u32> {
    let free = |r: &ControllerRecord| r.used.compare_exchange(0, 1, AcqRel, Acquire).is_ok();
    region.controllers().iter().position(free).map(|i| i as u32)
}

/// Takes a slot among the region's queues; other reactors do the same.
pub(super) fn take_queue_slot(region: &Region) -> Option<u32> {
    region
        .queues()
        .iter()
        .position(|r| r.used.compare_exchange(0, 1, AcqRel, Acquire).is_ok())
        .map(|i| i as u32)
}
