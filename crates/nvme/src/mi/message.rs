//! The header and the integrity check of all messages (3.1.1).

use crate::tcp::crc32c;

/// Of NVMe-MI over MCTP, with an integrity check.
pub const MESSAGE_TYPE: u8 = 0x84;
/// The most data of a command or of a response (6.1, DLEN).
pub const MAX_DATA_BYTES: usize = 4096;
/// A tunnelled Admin command with data and integrity check.
pub const MAX_MESSAGE_BYTES: usize = 68 + MAX_DATA_BYTES + CHECK_BYTES;
/// Command slots of an endpoint.
pub const SLOTS: usize = 2;

pub(super) const HEADER_BYTES: usize = 4;
const CHECK_BYTES: usize = 4;

/// NMIMT, the message's kind (figure 18).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MiKind {
    /// A control primitive.
    Control,
    /// A command of the Management Interface.
    Command,
    /// An NVMe Admin command.
    Admin,
    /// A PCIe command.
    Pcie,
    /// Another value: 3, or 5 to 15.
    Reserved(u8),
}

impl MiKind {
    fn from_bits(bits: u8) -> Self {
        match bits {
            0 => Self::Control,
            1 => Self::Command,
            2 => Self::Admin,
            4 => Self::Pcie,
            other => Self::Reserved(other),
        }
    }

    fn bits(self) -> u8 {
        match self {
            Self::Control => 0,
            Self::Command => 1,
            Self::Admin => 2,
            Self::Pcie => 4,
            Self::Reserved(other) => other & 0xF,
        }
    }
}

/// A message's header after its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MiHeader {
    /// ROR.
    pub response: bool,
    /// NMIMT.
    pub kind: MiKind,
    /// CSI: the command slot, 0 or 1.
    pub slot: usize,
    /// Byte 2: MEB in bit 0, CIAP in bit 1.
    pub flags: u8,
}

/// Why a message is dropped without an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BrokenMessage {
    /// It has no header and integrity check.
    Short,
    /// Another message type, or no integrity check.
    Type,
    /// A wrong integrity check (3.1.1.1).
    Check,
    /// A response without the fields of its status.
    Body,
}

/// Header and body, after a check of the message's integrity.
pub fn open(message: &[u8]) -> Result<(MiHeader, &[u8]), BrokenMessage> {
    let (checked, check) = message.split_last_chunk().ok_or(BrokenMessage::Short)?;
    let [kind, parameters, flags, _, body @ ..] = checked else {
        return Err(BrokenMessage::Short);
    };
    if *kind != MESSAGE_TYPE {
        return Err(BrokenMessage::Type);
    }
    if crc32c(checked) != u32::from_le_bytes(*check) {
        return Err(BrokenMessage::Check);
    }
    let header = MiHeader {
        response: parameters & 0x80 != 0,
        kind: MiKind::from_bits(parameters >> 3 & 0xF),
        slot: usize::from(parameters & 1),
        flags: *flags,
    };
    Ok((header, body))
}

/// A message of the header and the parts of its body.
pub(super) fn seal(header: &MiHeader, body: &[&[u8]]) -> Vec<u8> {
    let body_bytes: usize = body.iter().map(|part| part.len()).sum();
    let mut message = Vec::with_capacity(HEADER_BYTES + body_bytes + CHECK_BYTES);
    let parameters =
        u8::from(header.response) << 7 | header.kind.bits() << 3 | (header.slot & 1) as u8;
    message.extend([MESSAGE_TYPE, parameters, header.flags, 0]);
    for part in body {
        message.extend_from_slice(part);
    }
    let check = crc32c(&message);
    message.extend(check.to_le_bytes());
    message
}

/// Dword `n` of the fixed part of a body. The caller must choose `n`, never a peer.
pub(super) fn dword<const BYTES: usize>(fixed: &[u8; BYTES], n: usize) -> u32 {
    u32::from_le_bytes(fixed.as_chunks().0[n])
}
