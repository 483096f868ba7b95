//! Control primitives (4.2.1).

use super::MiRefusal;

/// A request to a command slot, or to both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ControlPrimitive {
    /// Holds back responses of both slots (4.2.1.1).
    Pause,
    /// Ends a pause of both slots (4.2.1.2).
    Resume,
    /// Makes the slot idle (4.2.1.3).
    Abort,
    /// Reads the slot's state (4.2.1.4).
    GetState {
        /// CESF: clears the error flags after they are read.
        clear_errors: bool,
    },
    /// Sends the slot's last response again (4.2.1.5).
    Replay {
        /// RRO: the first packet of it.
        first_packet: u8,
    },
}

impl ControlPrimitive {
    /// Primitive and tag.
    pub(super) fn decode(body: &[u8]) -> Result<(Self, u8), MiRefusal> {
        let &[opcode, tag, low, high] = body else {
            return Err(MiRefusal::SIZE);
        };
        let parameter = u16::from_le_bytes([low, high]);
        let primitive = match opcode {
            0 => Self::Pause,
            1 => Self::Resume,
            2 => Self::Abort,
            3 => Self::GetState {
                clear_errors: parameter & 1 != 0,
            },
            4 => Self::Replay { first_packet: low },
            _ => return Err(MiRefusal::OPCODE),
        };
        Ok((primitive, tag))
    }

    pub(super) fn encode(self, tag: u8) -> [u8; 4] {
        let (opcode, parameter) = match self {
            Self::Pause => (0, 0),
            Self::Resume => (1, 0),
            Self::Abort => (2, 0),
            Self::GetState { clear_errors } => (3, u8::from(clear_errors)),
            Self::Replay { first_packet } => (4, first_packet),
        };
        [opcode, tag, parameter, 0]
    }
}

/// Bits of Get State's response (4.2.1.4).
pub mod endpoint_state {
    /// Bits 1:0 of a slot without a command.
    pub const IDLE: u16 = 0;
    /// Bits 1:0 while a command is carried out.
    pub const PROCESS: u16 = 2;
    /// Bits 1:0 while a response is sent, or held back.
    pub const TRANSMIT: u16 = 3;
    /// A command came to a slot that was not idle.
    pub const SLOT_BUSY: u16 = 1 << 3;
    /// A message had a wrong integrity check.
    pub const BAD_CHECK: u16 = 1 << 4;
    /// The next packet of a message did not come in time.
    pub const TIMEOUT: u16 = 1 << 5;
    /// A transmission unit is not supported.
    pub const UNSUPPORTED_UNIT: u16 = 1 << 6;
    /// Another header version.
    pub const BAD_HEADER_VERSION: u16 = 1 << 7;
    /// A packet was for another endpoint.
    pub const UNKNOWN_DESTINATION: u16 = 1 << 8;
    /// Packets of a message had different sizes.
    pub const INCORRECT_UNIT: u16 = 1 << 9;
    /// A middle or last packet without a first one.
    pub const UNEXPECTED_MIDDLE: u16 = 1 << 10;
    /// A packet out of sequence.
    pub const OUT_OF_SEQUENCE: u16 = 1 << 11;
    /// A tag that the endpoint does not expect.
    pub const BAD_TAG: u16 = 1 << 12;
    /// A packet with a wrong check of its frame.
    pub const BAD_PACKET: u16 = 1 << 13;
    /// The NVM subsystem was reset.
    pub const SUBSYSTEM_RESET: u16 = 1 << 14;
    /// The slot is paused.
    pub const PAUSED: u16 = 1 << 15;
    /// The bits that Clear Error State Flags clears.
    pub const ERRORS: u16 = 0x7FF8;
}
