//! Valid commands that a host may not send now, by the port's ANA state and the namespace's
//! reservation.
//!
//! The gate is one byte per connection, normally 0, tested once per command. Every change of ports,
//! reservations or warnings must call [`NvmeTcp::refresh`], and so must a successor. **Not here:**
//! commands that were admitted before ([`crate::core`] ends those that must not go on).

use super::NvmeTcp;
use super::controllers::{Attached, Controllers};
use crate::core::{Core, IoOp};
use crate::exports::{self, Port};
use crate::io::lanes::Lanes;
use forebay_nvme::controller::AnaState;
use forebay_nvme::opcode::{self, nvm};
use forebay_nvme::{Sqe, Status, feature};
use std::sync::Arc;

/// Reservation: the host may not read.
const NO_READ: u8 = 1 << 0;
/// Reservation: the host may not write.
const NO_WRITE: u8 = 1 << 1;
const INACCESSIBLE: u8 = 1 << 2;
const MADE_HERE: u8 = NO_READ | NO_WRITE | INACCESSIBLE;

/// The status of an I/O command that these bits forbid (Base 2.0, 8.1.3.3 and 8.19.1).
#[cold]
pub(super) fn refusal(restrictions: u8, sqe: &Sqe) -> Option<Status> {
    if restrictions & INACCESSIBLE != 0 {
        // Without Do Not Retry: there may be another path.
        return Some(Status::ASYMMETRIC_ACCESS_INACCESSIBLE);
    }
    let keeps_out = match sqe.opcode() {
        nvm::READ | nvm::COMPARE => NO_READ,
        nvm::WRITE | nvm::WRITE_ZEROES | nvm::DATASET_MANAGEMENT | nvm::FLUSH => NO_WRITE,
        _ => 0,
    };
    (restrictions & keeps_out != 0).then(|| Status::RESERVATION_CONFLICT.with_dnr())
}

pub(super) fn keeps_out(restrictions: u8, op: &IoOp) -> bool {
    let bits = match op {
        IoOp::Read { .. } | IoOp::Compare { .. } => NO_READ,
        _ => NO_WRITE,
    };
    restrictions & bits != 0
}

/// The status of a forbidden admin command: an inaccessible port has no namespace features (Base
/// 2.0, 8.1.3.3).
pub(super) fn admin_refusal(restrictions: u8, sqe: &Sqe) -> Option<Status> {
    let of_namespace = matches!(
        sqe.opcode(),
        opcode::admin::GET_FEATURES | opcode::admin::SET_FEATURES
    ) && feature::is_of_namespace(sqe.cdw(10) as u8);
    (restrictions & INACCESSIBLE != 0 && of_namespace)
        .then_some(Status::ASYMMETRIC_ACCESS_INACCESSIBLE)
}

fn restrictions_of(lanes: &Lanes, attached: &Attached) -> u8 {
    let Some(lane) = attached.lane.and_then(|l| lanes.get(l)) else {
        return 0;
    };
    let access = lane
        .reservations
        .access(&attached.controller.state().hostid);
    let bit = |set: bool, bit: u8| if set { bit } else { 0 };
    bit(!access.read, NO_READ)
        | bit(!access.write, NO_WRITE)
        | bit(attached.ana.state == AnaState::Inaccessible, INACCESSIBLE)
}

pub(super) fn restrictions_of_new(core: &Core, controllers: &Controllers, controller: u32) -> u8 {
    controllers
        .get(controller)
        .map_or(0, |attached| restrictions_of(&core.lanes, attached))
}

impl Attached {
    pub(super) fn learn(&mut self, core: &Core, ports: &[Port]) {
        let Some(lane) = self.lane.and_then(|l| core.lane(l)) else {
            return;
        };
        self.ana = exports::port_of(ports, self.local).map_or_else(Default::default, |p| p.ana);
        self.controller.ana_is(self.ana.state);
        self.controller.reservations_changed(&lane.reservations);
        self.controller.warnings_are(lane.statistics.warnings);
    }
}

impl NvmeTcp {
    pub(crate) fn set_ports(&mut self, core: &mut Core, ports: Arc<Vec<Port>>) {
        self.ports = ports;
        self.refresh(core, |_| true);
    }

    /// Informs the hosts of these associations, and updates their gates.
    pub(super) fn refresh(&mut self, core: &mut Core, which: impl Fn(&Attached) -> bool) {
        let mut reported = Vec::new();
        let exports = (self.controllers.iter_mut()).filter(|(_, a)| a.export.is_some() && which(a));
        for (_, attached) in exports {
            attached.learn(core, &self.ports);
            let restrictions = restrictions_of(&core.lanes, attached);
            for index in &attached.conns {
                if let Some(Some(conn)) = self.conns.get_mut(*index as usize) {
                    conn.restrictions = conn.restrictions & !MADE_HERE | restrictions;
                }
            }
            if let Some(index) = attached.admin
                && let Some(Some(conn)) = self.conns.get_mut(index as usize)
            {
                conn.deliver_events(core, attached);
                reported.push(index);
            }
        }
        self.finish(core, &[], &reported);
    }
}
