//! What Identify and log pages report of the pool.

use forebay_nvme::controller::{AdminEnv, Firmware, Health, NamespaceInfo, SubsystemController};
use forebay_nvme::io::NamespaceGeometry;
use forebay_nvme::mi::vendor;
use forebay_pool::VolumeRecord;
use forebay_xlate::VolumeId;

use super::MANAGEMENT;
use crate::daemon::Condition;
use crate::model::EngineState;

/// Entries of a namespace list.
const LISTED: usize = 1024;
const EXTENT_BYTES_MAX: u32 = 4 << 20;

/// The pool at one moment, as a controller shows it.
pub(super) struct Environment<'a> {
    pub(super) condition: &'a Condition,
    /// The controller that is asked.
    pub(super) cntlid: u16,
    /// The numbers of all functions, ascending.
    pub(super) functions: &'a [u16],
    pub(super) firmware: Firmware,
}

/// A volume's NSID. Snapshots and volumes with larger ids are no namespaces.
pub(super) fn nsid_of(volume: &VolumeRecord) -> Option<u32> {
    let nsid = u32::try_from(volume.id.0).ok()?;
    (!volume.is_snapshot() && !volume.name.is_empty() && (1..u32::MAX).contains(&nsid))
        .then_some(nsid)
}

impl Environment<'_> {
    fn attached(&self) -> Vec<(u16, u32)> {
        let Some(owner) = &self.condition.owner else {
            return Vec::new();
        };
        let pool = &owner.base.core.borrow().pool;
        let functions = pool.exports().functions();
        functions
            .filter(|(number, _)| self.functions.contains(number))
            .filter_map(|(number, export)| Some((number, u32::try_from(export.volume.0).ok()?)))
            .collect()
    }
}

impl AdminEnv for Environment<'_> {
    fn namespace(&self, nsid: u32) -> Option<NamespaceInfo> {
        let owner = self.condition.owner.as_ref()?;
        let core = owner.base.core.borrow();
        let volume = core.pool.volume(VolumeId(nsid.into())).ok()?;
        nsid_of(volume)?;
        let (mapped_bytes, _) = crate::base::show::volume_bytes(&core, volume);
        let block_bytes = volume.block_bytes;
        let size_bytes = owner.base.durable_size(&core.pool, volume);
        Some(NamespaceInfo {
            geometry: NamespaceGeometry {
                block_bytes,
                block_count: size_bytes / u64::from(block_bytes.max(1)),
                write_protected: false,
            },
            used_blocks: mapped_bytes / u64::from(block_bytes.max(1)),
            extent_bytes: u32::try_from(core.pool.info().extent_bytes).unwrap_or(EXTENT_BYTES_MAX),
            nguid: volume.uuid.into_bytes(),
            uuid: volume.uuid.into_bytes(),
        })
    }

    fn health(&self) -> Health {
        let Some(owner) = &self.condition.owner else {
            return Health::default();
        };
        let node = owner.statistics.node_health();
        let drives = owner.states.drives();
        Health {
            critical_warning: node.critical_warning | drives.critical_warning,
            temperature_kelvin: drives.temperature_k.unwrap_or(0),
            percentage_used: drives.used_percent,
            available_spare_percent: drives
                .spare_percent
                .map_or(node.available_spare_percent, |spare| {
                    spare.min(node.available_spare_percent)
                }),
            ..node
        }
    }

    fn controllers(&self) -> Vec<SubsystemController> {
        let attached = self.attached();
        let serves = self.condition.engine == EngineState::Running;
        let functions = self.functions.iter().map(|number| SubsystemController {
            cntlid: *number,
            online: serves && attached.iter().any(|(of, _)| of == number),
        });
        let management = SubsystemController {
            cntlid: MANAGEMENT,
            online: true,
        };
        [management].into_iter().chain(functions).collect()
    }

    fn persistent_reservations(&self) -> bool {
        true
    }

    fn allocated_after(&self, nsid: u32) -> Vec<u32> {
        let Some(owner) = &self.condition.owner else {
            return Vec::new();
        };
        let pool = &owner.base.core.borrow().pool;
        let all = pool.volumes().records().filter_map(nsid_of);
        all.filter(|other| *other > nsid).take(LISTED).collect()
    }

    fn attached_after(&self, nsid: u32) -> Vec<u32> {
        let own = self
            .attached()
            .into_iter()
            .filter(|(of, _)| *of == self.cntlid);
        own.map(|(_, nsid)| nsid)
            .filter(|other| *other > nsid)
            .collect()
    }

    fn controllers_of(&self, nsid: u32) -> Vec<u16> {
        let attached = self.attached().into_iter().filter(|(_, of)| *of == nsid);
        attached.map(|(number, _)| number).collect()
    }

    fn capacity(&self) -> (u128, u128) {
        let owner = self.condition.owner.as_ref();
        let capacity = owner.map(|owner| owner.reports.capacity());
        capacity.map_or((0, 0), |capacity| {
            (capacity.total_bytes.into(), capacity.free_bytes.into())
        })
    }

    fn firmware(&self) -> Option<Firmware> {
        Some(self.firmware)
    }

    fn vendor_logs(&self) -> &[u8] {
        &vendor::LOGS
    }

    fn vendor_commands(&self) -> &[u8] {
        &vendor::COMMANDS
    }
}
