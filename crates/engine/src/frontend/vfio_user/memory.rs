//! A client's memory and its export, as the controller's state machine needs them.

use crate::core::Core;
use crate::lane::{Lane, LaneIndex};
use forebay_guest::GuestMemory;
use forebay_nvme::controller::{AdminEnv, Health, NamespaceInfo, SubsystemController};
use forebay_nvme::pcie::Memory;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::{ExportId, FrontendKind as Kind};
use std::sync::atomic::Ordering::Relaxed;

pub(super) const NSID: u32 = 1;

pub(super) struct ClientMemory<'a>(pub &'a GuestMemory);

impl Memory for ClientMemory<'_> {
    #[inline]
    fn read(&self, address: u64, into: &mut [u8]) -> bool {
        self.0.read(address, into)
    }

    fn write(&self, address: u64, from: &[u8]) -> bool {
        self.0.write(address, from)
    }

    fn holds(&self, address: u64, bytes: u64, write: bool) -> bool {
        let area = usize::try_from(bytes).ok();
        let area = area.and_then(|bytes| self.0.area(address, bytes));
        area.is_some_and(|area| !write || area.mapping().is_writable())
    }
}

pub(super) struct Env {
    namespace: Option<NamespaceInfo>,
    health: Health,
    controllers: Vec<SubsystemController>,
}

/// It must not depend on the engine.
pub(super) fn cntlid(export: ExportId) -> u16 {
    (export.0 % 0xFFE0) as u16 + 1
}

/// The controllers of a volume's VMs; each volume is one NVM subsystem.
fn controllers(core: &Core, volume: VolumeId) -> Vec<SubsystemController> {
    let exports = core.lanes.exports_of(volume).into_iter();
    let lanes = exports.filter_map(|export| core.lane(core.lanes.of_export(export)?));
    lanes
        .filter(|lane| matches!(lane.export.frontend, Kind::NvmePcie { .. }))
        .map(|lane| SubsystemController {
            cntlid: cntlid(lane.export.export),
            online: lane.record().connections.load(Relaxed) > 0,
        })
        .collect()
}

impl Env {
    pub(super) fn new(core: &Core, lane: Option<LaneIndex>) -> Self {
        let lane = lane.and_then(|lane| core.lane(lane));
        Self {
            namespace: lane.map(Lane::namespace_info),
            health: lane.map_or_else(Health::default, Lane::health),
            controllers: lane.map_or_else(Vec::new, |lane| controllers(core, lane.volume.id())),
        }
    }
}

impl AdminEnv for Env {
    fn namespace(&self, nsid: u32) -> Option<NamespaceInfo> {
        self.namespace.filter(|_| nsid == NSID)
    }

    fn health(&self) -> Health {
        self.health
    }

    fn controllers(&self) -> Vec<SubsystemController> {
        self.controllers.clone()
    }
}
