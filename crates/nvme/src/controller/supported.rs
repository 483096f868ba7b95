//! The commands, features, log pages and CNS values that each kind of controller supports.
//!
//! Log pages and Identify advertise from these tables, and dispatch refuses by them.

use super::{AdminEnv, ControllerConfig, ControllerKind};
use crate::identify::cns;
use crate::log_page::{self, EFFECT_LBCC, SCOPE_CONTROLLER, SCOPE_NAMESPACE};
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
}

impl Face {
    const fn has_io(self) -> bool {
        !matches!(self, Self::Discovery)
    }

    const fn is_pcie(self) -> bool {
        matches!(self, Self::Primary | Self::Secondary)
    }
}

impl ControllerConfig {
    pub(super) fn face(&self, env: &dyn AdminEnv) -> Face {
        match self.kind {
            ControllerKind::Io => Face::Io,
            ControllerKind::Discovery => Face::Discovery,
            ControllerKind::Pcie if self.is_primary(env) => Face::Primary,
            ControllerKind::Pcie => Face::Secondary,
        }
    }
}

/// Effects of an admin command for log page 05h; `None`: unsupported. Fabrics commands are not in
/// that page.
pub(super) fn admin_effects(face: Face, opcode: u8) -> Option<u32> {
    let supported = match opcode {
        admin::GET_LOG_PAGE
        | admin::IDENTIFY
        | admin::SET_FEATURES
        | admin::GET_FEATURES
        | admin::ASYNC_EVENT_REQUEST => true,
        admin::ABORT => face.has_io(),
        admin::KEEP_ALIVE => !face.is_pcie(),
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
        Face::Primary | Face::Secondary => io::is_supported(opcode, false),
        Face::Discovery => false,
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
        feature::ASYNC_EVENT_CONFIGURATION => true,
        feature::KEEP_ALIVE_TIMER => !face.is_pcie(),
        feature::INTERRUPT_VECTOR_CONFIGURATION => face.is_pcie(),
        feature::ARBITRATION
        | feature::POWER_MANAGEMENT
        | feature::TEMPERATURE_THRESHOLD
        | feature::ERROR_RECOVERY
        | feature::VOLATILE_WRITE_CACHE
        | feature::NUMBER_OF_QUEUES
        | feature::WRITE_ATOMICITY
        | feature::INTERRUPT_COALESCING
        | feature::HOST_BEHAVIOR_SUPPORT => face.has_io(),
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
        | log_page::CHANGED_NAMESPACE_LIST => face.has_io(),
        log_page::ASYMMETRIC_NAMESPACE_ACCESS | log_page::RESERVATION_NOTIFICATION => {
            face == Face::Io
        }
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
        | cns::COMMAND_SETS
        | cns::NAMESPACE_CONTROLLERS
        | cns::CONTROLLERS => face.has_io(),
        cns::PRIMARY_CONTROLLER | cns::SECONDARY_CONTROLLERS => face == Face::Primary,
        _ => false,
    }
}
