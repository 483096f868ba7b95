//! The commands of the Management Interface (5).

use super::MiRefusal;
use super::message::dword;

const READ_DATA_STRUCTURE: u8 = 0x00;
const SUBSYSTEM_HEALTH: u8 = 0x01;
const CONTROLLER_HEALTH: u8 = 0x02;
const SET_CONFIGURATION: u8 = 0x03;
const GET_CONFIGURATION: u8 = 0x04;
const READ_VPD: u8 = 0x05;
const WRITE_VPD: u8 = 0x06;
const RESET: u8 = 0x07;

const SMBUS_FREQUENCY: u8 = 1;
const HEALTH_STATUS_CHANGE: u8 = 2;
const TRANSMISSION_UNIT: u8 = 3;

/// The length of a command without data, after the header.
const BODY_BYTES: usize = 12;
/// Bit 31 of a dword.
const TOP: u32 = 1 << 31;
/// Places of fields in the message: NMD0 is at byte 8.
const CONFIGURATION_AT: MiRefusal = MiRefusal::at(8);
const ENTRIES_AT: MiRefusal = MiRefusal::at(10);
const STRUCTURE_AT: MiRefusal = MiRefusal::at(11);
const RESET_AT: MiRefusal = MiRefusal::at(11);

/// A command of the Management Interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MiCommand<'m> {
    /// Read NVMe-MI Data Structure (5.7). The response's NMRESP is the data's length.
    ReadDataStructure(DataStructure),
    /// NVM Subsystem Health Status Poll (5.6).
    SubsystemHealth {
        /// Clears the Composite Controller Status after it is read.
        clear: bool,
    },
    /// Controller Health Status Poll (5.3). The response's NMRESP has the number of entries in
    /// bits 23:16.
    ControllerHealth(ControllerHealthPoll),
    /// Configuration Set (5.2).
    SetConfiguration(SetConfiguration),
    /// Configuration Get (5.1). The response's NMRESP is the value.
    GetConfiguration(GetConfiguration),
    /// VPD Read (5.12).
    ReadVpd {
        /// The first byte.
        offset: u16,
        /// How many.
        bytes: u16,
    },
    /// VPD Write (5.13).
    WriteVpd {
        /// The first byte.
        offset: u16,
        /// At most [`super::MAX_DATA_BYTES`].
        data: &'m [u8],
    },
    /// Reset of the NVM subsystem (5.8).
    Reset,
}

/// The structure of Read NVMe-MI Data Structure (5.7, DTYP).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataStructure {
    /// NVM Subsystem Information (5.7.1).
    Subsystem,
    /// Port Information (5.7.2) of a port.
    Port(u8),
    /// The list of controllers (5.7.3) from this CNTLID on.
    Controllers {
        /// The lowest CNTLID of the list.
        from: u16,
    },
    /// Controller Information (5.7.4) of a CNTLID.
    Controller(u16),
    /// Optionally Supported Command List (5.7.5).
    OptionalCommands {
        /// The CNTLID whose Admin commands are listed.
        controller: u16,
        /// The I/O command set of these.
        command_set: u8,
    },
    /// Management Endpoint Buffer Command Support List (5.7.6).
    BufferCommands,
}

/// Controller Health Status Poll (5.3, figures 69 and 70).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ControllerHealthPoll {
    /// SCTLID: the lowest CNTLID.
    pub first: u16,
    /// The most entries: 1 to 255.
    pub entries: u8,
    /// INCF, INCPF, INCVF in bits 0 to 2: PCI functions, physical and virtual ones of SR-IOV.
    pub functions: u8,
    /// Whether controllers without a change are reported, too.
    pub all: bool,
    /// Changes that select a controller: status, temperature, life used, spare, critical warning
    /// in bits 0 to 4.
    pub changes: u8,
    /// CCF: clears the changed flags of reported controllers.
    pub clear: bool,
}

/// Configuration Set (5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetConfiguration {
    /// SMBus/I2C Frequency of a port: 1 is 100 kHz, 2 is 400 kHz, 3 is 1 MHz.
    SmbusFrequency {
        /// The port.
        port: u8,
        /// Bits 11:8 of NMD0.
        frequency: u8,
    },
    /// Health Status Change.
    HealthStatusChange {
        /// The bits of the Composite Controller Status to clear: see
        /// [`super::data::status_change`].
        clear: u16,
    },
    /// MCTP Transmission Unit Size of a port.
    TransmissionUnit {
        /// The port.
        port: u8,
        /// Bytes of payload.
        bytes: u16,
    },
}

/// Configuration Get (5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GetConfiguration {
    /// SMBus/I2C Frequency of a port.
    SmbusFrequency {
        /// The port.
        port: u8,
    },
    /// Health Status Change: a success without a value.
    HealthStatusChange,
    /// MCTP Transmission Unit Size of a port.
    TransmissionUnit {
        /// The port.
        port: u8,
    },
}

impl<'m> MiCommand<'m> {
    pub(super) fn decode(body: &'m [u8]) -> Result<Self, MiRefusal> {
        let (fixed, data) = body
            .split_first_chunk::<BODY_BYTES>()
            .ok_or(MiRefusal::SIZE)?;
        let (nmd0, nmd1) = (dword(fixed, 1), dword(fixed, 2));
        let command = match fixed[0] {
            READ_DATA_STRUCTURE => Self::ReadDataStructure(DataStructure::decode(nmd0, nmd1)?),
            SUBSYSTEM_HEALTH => Self::SubsystemHealth {
                clear: nmd1 & TOP != 0,
            },
            CONTROLLER_HEALTH => Self::ControllerHealth(ControllerHealthPoll::decode(nmd0, nmd1)?),
            SET_CONFIGURATION => Self::SetConfiguration(SetConfiguration::decode(nmd0, nmd1)?),
            GET_CONFIGURATION => Self::GetConfiguration(GetConfiguration::decode(nmd0)?),
            READ_VPD => Self::ReadVpd {
                offset: nmd0 as u16,
                bytes: nmd1 as u16,
            },
            WRITE_VPD if data.len() == usize::from(nmd1 as u16) => {
                let offset = nmd0 as u16;
                return Ok(Self::WriteVpd { offset, data });
            }
            WRITE_VPD => return Err(MiRefusal::INPUT_SIZE),
            RESET if nmd0 >> 24 == 0 => Self::Reset,
            RESET => return Err(RESET_AT),
            _ => return Err(MiRefusal::OPCODE),
        };
        if data.is_empty() {
            Ok(command)
        } else {
            Err(MiRefusal::INPUT_SIZE)
        }
    }

    /// The body before the data, and the data.
    pub(super) fn encode(&self) -> ([u8; BODY_BYTES], &'m [u8]) {
        let mut request_data: &[u8] = &[];
        let (opcode, nmd0, nmd1) = match *self {
            Self::ReadDataStructure(structure) => {
                let (nmd0, nmd1) = structure.encode();
                (READ_DATA_STRUCTURE, nmd0, nmd1)
            }
            Self::SubsystemHealth { clear } => (SUBSYSTEM_HEALTH, 0, u32::from(clear) << 31),
            Self::ControllerHealth(poll) => {
                let (nmd0, nmd1) = poll.encode();
                (CONTROLLER_HEALTH, nmd0, nmd1)
            }
            Self::SetConfiguration(configuration) => {
                let (nmd0, nmd1) = configuration.encode();
                (SET_CONFIGURATION, nmd0, nmd1)
            }
            Self::GetConfiguration(configuration) => (GET_CONFIGURATION, configuration.encode(), 0),
            Self::ReadVpd { offset, bytes } => (READ_VPD, u32::from(offset), u32::from(bytes)),
            Self::WriteVpd { offset, data } => {
                request_data = data;
                (WRITE_VPD, u32::from(offset), data.len() as u32)
            }
            Self::Reset => (RESET, 0, 0),
        };
        let mut body = [0; BODY_BYTES];
        body[0] = opcode;
        body[4..8].copy_from_slice(&nmd0.to_le_bytes());
        body[8..].copy_from_slice(&nmd1.to_le_bytes());
        (body, request_data)
    }
}

impl DataStructure {
    fn decode(nmd0: u32, nmd1: u32) -> Result<Self, MiRefusal> {
        let controller = nmd0 as u16;
        match nmd0 >> 24 {
            0 => Ok(Self::Subsystem),
            1 => Ok(Self::Port((nmd0 >> 16) as u8)),
            2 => Ok(Self::Controllers { from: controller }),
            3 => Ok(Self::Controller(controller)),
            4 => Ok(Self::OptionalCommands {
                controller,
                command_set: nmd1 as u8,
            }),
            5 => Ok(Self::BufferCommands),
            _ => Err(STRUCTURE_AT),
        }
    }

    fn encode(self) -> (u32, u32) {
        match self {
            Self::Subsystem => (0, 0),
            Self::Port(port) => (1 << 24 | u32::from(port) << 16, 0),
            Self::Controllers { from } => (2 << 24 | u32::from(from), 0),
            Self::Controller(controller) => (3 << 24 | u32::from(controller), 0),
            Self::OptionalCommands {
                controller,
                command_set,
            } => (4 << 24 | u32::from(controller), u32::from(command_set)),
            Self::BufferCommands => (5 << 24, 0),
        }
    }
}

impl ControllerHealthPoll {
    /// MAXRENT counts from 0, and 256 entries are invalid.
    fn decode(nmd0: u32, nmd1: u32) -> Result<Self, MiRefusal> {
        let entries = ((nmd0 >> 16) as u8).checked_add(1).ok_or(ENTRIES_AT)?;
        Ok(Self {
            first: nmd0 as u16,
            entries,
            functions: (nmd0 >> 24) as u8 & 7,
            all: nmd0 & TOP != 0,
            changes: nmd1 as u8 & 0x1F,
            clear: nmd1 & TOP != 0,
        })
    }

    fn encode(&self) -> (u32, u32) {
        let entries = u32::from(self.entries.saturating_sub(1)) << 16;
        let functions = u32::from(self.functions & 7) << 24;
        let all = u32::from(self.all) << 31;
        let clear = u32::from(self.clear) << 31;
        (
            u32::from(self.first) | entries | functions | all,
            u32::from(self.changes & 0x1F) | clear,
        )
    }
}

impl SetConfiguration {
    fn decode(nmd0: u32, nmd1: u32) -> Result<Self, MiRefusal> {
        let port = (nmd0 >> 24) as u8;
        match nmd0 as u8 {
            SMBUS_FREQUENCY => Ok(Self::SmbusFrequency {
                port,
                frequency: (nmd0 >> 8) as u8 & 0xF,
            }),
            HEALTH_STATUS_CHANGE => Ok(Self::HealthStatusChange {
                // NMD1 leaves out bit 3, which is reserved in the status.
                clear: (nmd1 & 7 | (nmd1 & !7) << 1) as u16,
            }),
            TRANSMISSION_UNIT => Ok(Self::TransmissionUnit {
                port,
                bytes: nmd1 as u16,
            }),
            _ => Err(CONFIGURATION_AT),
        }
    }

    fn encode(self) -> (u32, u32) {
        match self {
            Self::SmbusFrequency { port, frequency } => {
                let frequency = u32::from(frequency & 0xF) << 8;
                (
                    u32::from(port) << 24 | frequency | u32::from(SMBUS_FREQUENCY),
                    0,
                )
            }
            Self::HealthStatusChange { clear } => {
                let clear = u32::from(clear);
                (
                    u32::from(HEALTH_STATUS_CHANGE),
                    clear & 7 | (clear & !0xF) >> 1,
                )
            }
            Self::TransmissionUnit { port, bytes } => (
                u32::from(port) << 24 | u32::from(TRANSMISSION_UNIT),
                u32::from(bytes),
            ),
        }
    }
}

impl GetConfiguration {
    fn decode(nmd0: u32) -> Result<Self, MiRefusal> {
        let port = (nmd0 >> 24) as u8;
        match nmd0 as u8 {
            SMBUS_FREQUENCY => Ok(Self::SmbusFrequency { port }),
            HEALTH_STATUS_CHANGE => Ok(Self::HealthStatusChange),
            TRANSMISSION_UNIT => Ok(Self::TransmissionUnit { port }),
            _ => Err(CONFIGURATION_AT),
        }
    }

    fn encode(self) -> u32 {
        match self {
            Self::SmbusFrequency { port } => u32::from(port) << 24 | u32::from(SMBUS_FREQUENCY),
            Self::HealthStatusChange => u32::from(HEALTH_STATUS_CHANGE),
            Self::TransmissionUnit { port } => u32::from(port) << 24 | u32::from(TRANSMISSION_UNIT),
        }
    }
}
