//! The commands, features, log pages and CNS values that each kind of controller supports.
//!
//! Log pages and Identify advertise from these tables, and dispatch refuses by them.

use super::{AdminEnv, ControllerConfig, ControllerKind};
use crate::identify::cns;
use crate::log_page::{
    self, EFFECT_LBCC, EFFECT_NCC, EFFECT_NIC, SCOPE_CONTROLLER, SCOPE_NAMESPACE, SCOPE_SUBSYSTEM,
};
use crate::opcode::{admin, nvm};
use crate::{feature, io};

/// A controller's kind, and on PCIe its role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Face {
    Io,
    Discovery,
    /// The PCIe controller that manages its subsystem's others.
    Primary,
    /// Another PCIe controller.
    Secondary,
    /// The Administrative controller of a management endpoint.
    Management,
    /// An I/O controller of a management endpoint, which sees it out of band.
    Function,
}

impl Face {
    const fn has_queues(self) -> bool {
        matches!(self, Self::Io | Self::Primary | Self::Secondary)
    }

    const fn has_namespaces(self) -> bool {
        !matches!(self, Self::Discovery)
    }

    pub(super) const fn is_managed(self) -> bool {
        matches!(self, Self::Management | Self::Function)
    }

    const fn is_pcie(self) -> bool {
        matches!(self, Self::Primary | Self::Secondary)
    }
}

/// Admin opcodes of a controller of [`ControllerKind::Management`], ascending.
pub fn management_opcodes(cntlid: u16) -> impl Iterator<Item = u8> {
    let face = match cntlid {
        0 => Face::Management,
        _ => Face::Function,
    };
    (0..=u8::MAX).filter(move |opcode| admin_effects(face, *opcode).is_some())
}

impl ControllerConfig {
    pub(super) fn face(&self, env: &dyn AdminEnv) -> Face {
        match self.kind {
            ControllerKind::Io => Face::Io,
            ControllerKind::Discovery => Face::Discovery,
            ControllerKind::Pcie if self.is_primary(env) => Face::Primary,
            ControllerKind::Pcie => Face::Secondary,
            ControllerKind::Management if self.cntlid == 0 => Face::Management,
            ControllerKind::Management => Face::Function,
        }
    }
}

/// Effects of an admin command for log page 05h; `None`: unsupported. Fabrics commands are not in
/// that page.
pub(super) fn admin_effects(face: Face, opcode: u8) -> Option<u32> {
    let supported = match opcode {
        admin::GET_LOG_PAGE | admin::IDENTIFY | admin::SET_FEATURES | admin::GET_FEATURES => true,
        // Its owner intercepts them; `crate::management` decodes them.
        admin::NAMESPACE_MANAGEMENT | admin::NAMESPACE_ATTACHMENT if face.is_managed() => {
            return Some(EFFECT_NIC | SCOPE_SUBSYSTEM);
        }
        admin::FIRMWARE_DOWNLOAD | admin::FIRMWARE_COMMIT if face.is_managed() => {
            return Some(SCOPE_SUBSYSTEM);
        }
        admin::FORMAT_NVM if face.is_managed() => {
            return Some(EFFECT_LBCC | EFFECT_NCC | SCOPE_NAMESPACE);
        }
        // NVMe-MI 1.2, figure 114 prohibits these out of band, as they concern a host.
        admin::ASYNC_EVENT_REQUEST => !face.is_managed(),
        admin::ABORT => face.has_queues(),
        admin::KEEP_ALIVE => matches!(face, Face::Io | Face::Discovery),
        admin::DELETE_IO_SQ
        | admin::CREATE_IO_SQ
        | admin::DELETE_IO_CQ
        | admin::CREATE_IO_CQ
        | admin::DOORBELL_BUFFER_CONFIG => face.is_pcie(),
        admin::VIRTUALIZATION_MANAGEMENT => face == Face::Primary,
        _ => false,
    };
    supported.then_some(SCOPE_CONTROLLER)
}

/// Effects of an I/O command for log page 05h; `None`: unsupported.
///
/// No scope is given despite LPA bit 5, because Linux warns of unexpected effects, and I/O commands
/// always have namespace scope.
pub(super) fn io_effects(face: Face, opcode: u8) -> Option<u32> {
    let supported = match face {
        Face::Io => io::is_supported(opcode, true),
        Face::Primary | Face::Secondary | Face::Function => io::is_supported(opcode, false),
        Face::Discovery | Face::Management => false,
    };
    let changes = matches!(
        opcode,
        nvm::WRITE | nvm::WRITE_ZEROES | nvm::DATASET_MANAGEMENT
    );
    supported.then_some(if changes { EFFECT_LBCC } else { 0 })
}

/// Scope of a feature for log page 12h; `None`: unsupported.
pub(super) fn feature_scope(face: Face, fid: u8) -> Option<u32> {
    let supported = match fid {
        feature::ASYNC_EVENT_CONFIGURATION => !face.is_managed(),
        feature::KEEP_ALIVE_TIMER => matches!(face, Face::Io | Face::Discovery),
        feature::INTERRUPT_VECTOR_CONFIGURATION => face.is_pcie(),
        feature::POWER_MANAGEMENT | feature::TEMPERATURE_THRESHOLD => face.has_namespaces(),
        // NVMe-MI 1.2, figure 125 prohibits them out of band.
        feature::ARBITRATION
        | feature::VOLATILE_WRITE_CACHE
        | feature::ERROR_RECOVERY
        | feature::NUMBER_OF_QUEUES
        | feature::WRITE_ATOMICITY
        | feature::INTERRUPT_COALESCING
        | feature::HOST_BEHAVIOR_SUPPORT => face.has_queues(),
        feature::HOST_IDENTIFIER
        | feature::RESERVATION_NOTIFICATION_MASK
        | feature::RESERVATION_PERSISTENCE => face == Face::Io,
        _ => false,
    };
    supported.then_some(match feature::is_of_namespace(fid) {
        true => SCOPE_NAMESPACE,
        false => SCOPE_CONTROLLER,
    })
}

pub(super) fn supports_log(face: Face, lid: u8) -> bool {
    match lid {
        log_page::SUPPORTED_LOG_PAGES
        | log_page::COMMANDS_SUPPORTED_AND_EFFECTS
        | log_page::FEATURES_SUPPORTED_AND_EFFECTS
        | log_page::MI_COMMANDS_SUPPORTED_AND_EFFECTS => true,
        log_page::ERROR_INFORMATION
        | log_page::SMART_HEALTH
        | log_page::FIRMWARE_SLOT
        | log_page::CHANGED_NAMESPACE_LIST => face.has_namespaces(),
        log_page::ASYMMETRIC_NAMESPACE_ACCESS => face == Face::Io,
        // Out of band it is empty: notifications are for hosts.
        log_page::RESERVATION_NOTIFICATION => face == Face::Io || face.is_managed(),
        log_page::DISCOVERY => face == Face::Discovery,
        _ => false,
    }
}

pub(super) fn supports_cns(face: Face, what: u8) -> bool {
    match what {
        cns::CONTROLLER => true,
        cns::NAMESPACE
        | cns::ACTIVE_NAMESPACES
        | cns::NAMESPACE_DESCRIPTORS
        | cns::CSI_NAMESPACE
        | cns::CSI_CONTROLLER
        | cns::CSI_ACTIVE_NAMESPACES
        | cns::INDEPENDENT_NAMESPACE
        | cns::NAMESPACE_CONTROLLERS
        | cns::CONTROLLERS => face.has_namespaces(),
        cns::COMMAND_SETS => face.has_queues(),
        cns::ALLOCATED_NAMESPACES | cns::ALLOCATED_NAMESPACE => face.is_managed(),
        cns::PRIMARY_CONTROLLER | cns::SECONDARY_CONTROLLERS => {
            matches!(face, Face::Primary | Face::Management)
        }
        _ => false,
    }
}
