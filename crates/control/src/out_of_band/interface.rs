//! The commands of the Management Interface (NVMe-MI 1.2, 5).

use forebay_mctp::BASELINE_UNIT_BYTES;
use forebay_nvme::controller::management_opcodes;
use forebay_nvme::mi::data::{ControllerInformation, PortInformation, SubsystemInformation};
use forebay_nvme::mi::{
    DataStructure, GetConfiguration, MiCommand, MiRefusal, MiStatus, SetConfiguration, vendor,
};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromZeros, IntoBytes};

use super::MANAGEMENT;
use super::answer::CommandAnswer;
use super::health::NodeHealth;
use super::node::{Caller, ManagedNode};
use super::vpd::{self, VPD_BYTES};
use crate::config::Right;

/// The only port, and its type: a bus that is not PCI Express.
const PORT: u8 = 0;
const PORT_SMBUS: u8 = 2;
/// The version of the specification.
const VERSION: (u8, u8) = (2, 0);
/// 100 kHz. A serial line has no such frequency, so it can't be changed.
const FREQUENCY: u8 = 1;
/// Places of parameters in the message.
const CONTROLLER_AT: MiRefusal = MiRefusal::at(8);
const PORT_OF_STRUCTURE_AT: MiRefusal = MiRefusal::at(10);
const VALUE_AT: MiRefusal = MiRefusal::at(9);
const PORT_AT: MiRefusal = MiRefusal::at(11);
const UNIT_AT: MiRefusal = MiRefusal::at(12);
const OFFSET_AT: MiRefusal = MiRefusal::at(8);
const LENGTH_AT: MiRefusal = MiRefusal::at(12);

/// The supported commands by message type (NMIMT) and opcode: those of the Management Interface.
const COMMANDS: [u8; 6] = [0x00, 0x01, 0x02, 0x03, 0x04, 0x05];
const MANAGEMENT_INTERFACE: u8 = 1;
const ADMIN: u8 = 2;

impl ManagedNode {
    /// Carries out a command of the Management Interface.
    pub(super) async fn command(&self, command: MiCommand<'_>, caller: &Caller) -> CommandAnswer {
        match command {
            MiCommand::ReadDataStructure(structure) => self.data_structure(structure, caller),
            MiCommand::SubsystemHealth { clear } => match self.health().await {
                Some(node) => {
                    let health = self.changes.borrow_mut().subsystem(&node, clear);
                    CommandAnswer::command(0, health.as_bytes())
                }
                None => CommandAnswer::status(MiStatus::INTERNAL_ERROR),
            },
            MiCommand::ControllerHealth(poll) => match self.health().await {
                Some(node) => {
                    let entries = self.changes.borrow_mut().controllers(&node, &poll);
                    let count = entries.len() as u32;
                    CommandAnswer::command(count << 16, entries.as_bytes())
                }
                None => CommandAnswer::status(MiStatus::INTERNAL_ERROR),
            },
            MiCommand::SetConfiguration(settings) => self.set_configuration(settings, caller).await,
            MiCommand::GetConfiguration(which) => get_configuration(which, caller),
            MiCommand::ReadVpd { offset, bytes } => self.read_vpd(offset, bytes),
            // The data describes this program.
            MiCommand::WriteVpd { .. } => CommandAnswer::status(MiStatus::ACCESS_DENIED),
            // A reset would take the disks away from every tenant.
            MiCommand::Reset => CommandAnswer::status(MiStatus::ACCESS_DENIED),
        }
    }

    async fn health(&self) -> Option<NodeHealth> {
        let functions = self.function_numbers();
        let health = self
            .daemon
            .ask(move |daemon| NodeHealth::of(daemon, &functions));
        // Fails while the daemon stops.
        health.await.ok()
    }

    /// The CNTLIDs of the functions, ascending.
    pub(super) fn function_numbers(&self) -> Vec<u16> {
        self.config
            .functions
            .iter()
            .map(|function| function.number)
            .collect()
    }

    fn data_structure(&self, structure: DataStructure, caller: &Caller) -> CommandAnswer {
        let data = match structure {
            DataStructure::Subsystem => {
                let mut subsystem = SubsystemInformation::new_zeroed();
                // Ports, less one.
                subsystem.last_port = 0;
                (subsystem.major, subsystem.minor) = VERSION;
                subsystem.as_bytes().to_vec()
            }
            DataStructure::Port(PORT) => {
                let mut port = PortInformation::new_zeroed();
                port.kind = PORT_SMBUS;
                port.max_unit_bytes = U16::new(caller.max_unit_bytes);
                port.buffer_bytes = U32::new(0);
                port.as_bytes().to_vec()
            }
            DataStructure::Port(_) => return PORT_OF_STRUCTURE_AT.into(),
            DataStructure::Controllers { from } => {
                let all = [MANAGEMENT].into_iter().chain(self.function_numbers());
                let all: Vec<u16> = all.filter(|cntlid| *cntlid >= from).collect();
                let list = [all.len() as u16].into_iter().chain(all);
                list.flat_map(u16::to_le_bytes).collect()
            }
            DataStructure::Controller(cntlid) => {
                if !self.has_controller(cntlid) {
                    return CONTROLLER_AT.into();
                }
                let mut controller = ControllerInformation::new_zeroed();
                controller.port = PORT;
                controller.as_bytes().to_vec()
            }
            DataStructure::OptionalCommands { controller, .. } => {
                if !self.has_controller(controller) {
                    return CONTROLLER_AT.into();
                }
                optional_commands(controller)
            }
            // There is no such buffer.
            DataStructure::BufferCommands => 0u16.to_le_bytes().to_vec(),
        };
        // A list of all possible controllers or commands is much shorter.
        CommandAnswer::command(data.len() as u32 & 0xFFFF, data)
    }

    pub(super) fn has_controller(&self, cntlid: u16) -> bool {
        cntlid == MANAGEMENT || self.function(cntlid).is_some()
    }

    async fn set_configuration(
        &self,
        settings: SetConfiguration,
        caller: &Caller,
    ) -> CommandAnswer {
        let text = match settings {
            SetConfiguration::SmbusFrequency { port, .. }
            | SetConfiguration::TransmissionUnit { port, .. }
                if port != PORT =>
            {
                return PORT_AT.into();
            }
            SetConfiguration::SmbusFrequency { frequency, .. } => match frequency {
                FREQUENCY => "SMBus frequency".to_owned(),
                _ => return VALUE_AT.into(),
            },
            SetConfiguration::HealthStatusChange { clear } => {
                format!("Health Status Change, clear {clear:#x}")
            }
            SetConfiguration::TransmissionUnit { bytes, .. } => {
                if !(BASELINE_UNIT_BYTES as u16..=caller.max_unit_bytes).contains(&bytes) {
                    return UNIT_AT.into();
                }
                format!("MCTP Transmission Unit Size, {bytes} bytes")
            }
        };
        if !self.may(Right::Configuration) {
            return CommandAnswer::status(MiStatus::ACCESS_DENIED);
        }
        let mut answer = CommandAnswer::command(0, []);
        match settings {
            SetConfiguration::HealthStatusChange { clear } => {
                self.changes.borrow_mut().clear(clear);
            }
            SetConfiguration::TransmissionUnit { bytes, .. } => answer.unit_bytes = Some(bytes),
            SetConfiguration::SmbusFrequency { .. } => {}
        }
        let request = format!("Configuration Set: {text}");
        self.audit(
            caller,
            "change the management endpoint",
            request,
            false,
            "done",
        )
        .await;
        answer
    }

    fn read_vpd(&self, offset: u16, bytes: u16) -> CommandAnswer {
        let image = vpd::image(&self.version, self.identity.uuid);
        let (from, bytes) = (usize::from(offset), usize::from(bytes));
        if from > VPD_BYTES {
            return OFFSET_AT.into();
        }
        match image.get(from..from + bytes) {
            Some(part) => CommandAnswer::command(0, part),
            None => LENGTH_AT.into(),
        }
    }
}

fn optional_commands(cntlid: u16) -> Vec<u8> {
    let own = COMMANDS.map(|opcode| [MANAGEMENT_INTERFACE << 3, opcode]);
    let admin = management_opcodes(cntlid).chain(vendor::COMMANDS);
    let admin = admin.map(|opcode| [ADMIN << 3, opcode]);
    let all: Vec<[u8; 2]> = own.into_iter().chain(admin).collect();
    let mut list = (all.len() as u16).to_le_bytes().to_vec();
    list.extend(all.as_flattened());
    list
}

fn get_configuration(which: GetConfiguration, caller: &Caller) -> CommandAnswer {
    match which {
        GetConfiguration::SmbusFrequency { port } | GetConfiguration::TransmissionUnit { port }
            if port != PORT =>
        {
            PORT_AT.into()
        }
        GetConfiguration::SmbusFrequency { .. } => CommandAnswer::command(FREQUENCY.into(), []),
        GetConfiguration::HealthStatusChange => CommandAnswer::command(0, []),
        GetConfiguration::TransmissionUnit { .. } => {
            CommandAnswer::command(caller.unit_bytes.into(), [])
        }
    }
}
