//! Requests of all kinds (4.1.1).

use super::message::{MiHeader, seal};
use super::{AdminCommand, ControlPrimitive, MiCommand, MiKind, MiRefusal};

/// Bits of the header's flags, and their places.
const BUFFER: u8 = 1 << 0;
const AUTO_PAUSE: u8 = 1 << 1;
const BUFFER_AT: MiRefusal = MiRefusal::Parameter { byte: 2, bit: 0 };
const AUTO_PAUSE_AT: MiRefusal = MiRefusal::Parameter { byte: 2, bit: 1 };
const KIND_AT: MiRefusal = MiRefusal::Parameter { byte: 1, bit: 3 };

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MiRequest<'m> {
    /// A control primitive, and the tag that its response repeats.
    Control(ControlPrimitive, u8),
    /// A command of the Management Interface.
    Command(MiCommand<'m>),
    /// An NVMe Admin command.
    Admin(AdminCommand<'m>),
}

impl<'m> MiRequest<'m> {
    /// Decodes header and body that [`super::open`] returned.
    ///
    /// # Errors
    /// The response that the request gets.
    pub fn decode(header: &MiHeader, body: &'m [u8]) -> Result<Self, MiRefusal> {
        if header.flags & BUFFER != 0 {
            return Err(BUFFER_AT);
        }
        if header.flags & AUTO_PAUSE != 0 {
            return Err(AUTO_PAUSE_AT);
        }
        match header.kind {
            MiKind::Control => {
                let (primitive, tag) = ControlPrimitive::decode(body)?;
                Ok(Self::Control(primitive, tag))
            }
            MiKind::Command => MiCommand::decode(body).map(Self::Command),
            MiKind::Admin => AdminCommand::decode(body).map(Self::Admin),
            // Each PCIe command is optional (7).
            MiKind::Pcie => Err(MiRefusal::OPCODE),
            MiKind::Reserved(_) => Err(KIND_AT),
        }
    }

    /// The message for a command slot. Data is at most [`super::MAX_DATA_BYTES`].
    #[must_use]
    pub fn encode(&self, slot: usize) -> Vec<u8> {
        let header = |kind| MiHeader {
            response: false,
            kind,
            slot,
            flags: 0,
        };
        match self {
            Self::Control(primitive, tag) => {
                seal(&header(MiKind::Control), &[&primitive.encode(*tag)])
            }
            Self::Command(command) => {
                let (body, data) = command.encode();
                seal(&header(MiKind::Command), &[&body, data])
            }
            Self::Admin(command) => {
                seal(&header(MiKind::Admin), &[&command.encode(), command.data])
            }
        }
    }
}
