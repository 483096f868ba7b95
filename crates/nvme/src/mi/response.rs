//! Responses of all kinds (4.1.2).

use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U64};

use super::message::{MiHeader, open, seal};
use super::{BrokenMessage, MiKind, MiRefusal, MiStatus};
use crate::Cqe;

/// A response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MiResponse<'m> {
    /// A control primitive succeeded (figure 33).
    Control {
        /// The request's tag.
        tag: u8,
        /// CPSR.
        value: u16,
    },
    /// A command of the Management Interface succeeded (figure 61).
    Command {
        /// NMRESP: 24 bits.
        value: u32,
        /// Response data.
        data: &'m [u8],
    },
    /// A controller completed an Admin command, successfully or not (figure 118).
    Admin {
        /// The completion queue entry; its queue and command identifiers are 0.
        cqe: Cqe,
        /// The wanted part of the response data.
        data: &'m [u8],
    },
    /// The response follows later, at most after this time (figure 30).
    MoreProcessing {
        /// In units of 100 ms; 0 if unknown.
        time: u16,
    },
    /// The request was refused.
    Refused(MiRefusal),
}

impl From<MiRefusal> for MiResponse<'_> {
    fn from(refusal: MiRefusal) -> Self {
        Self::Refused(refusal)
    }
}

impl<'m> MiResponse<'m> {
    /// The message for the request's kind and slot.
    #[must_use]
    pub fn encode(&self, kind: MiKind, slot: usize) -> Vec<u8> {
        let header = MiHeader {
            response: true,
            kind,
            slot,
            flags: 0,
        };
        match *self {
            Self::Control { tag, value } => {
                let [low, high] = value.to_le_bytes();
                seal(&header, &[&[MiStatus::SUCCESS.0, tag, low, high]])
            }
            Self::Command { value, data } => {
                let [low, middle, high, _] = value.to_le_bytes();
                seal(&header, &[&[MiStatus::SUCCESS.0, low, middle, high], data])
            }
            Self::Admin { cqe, data } => {
                let head = [MiStatus::SUCCESS.0, 0, 0, 0];
                let cqe = cqe.as_bytes();
                // Dword 3 without the command identifier.
                let parts = [&head[..], &cqe[..8], &[0, 0], &cqe[14..], data];
                seal(&header, &parts)
            }
            Self::MoreProcessing { time } => {
                let [low, high] = time.to_le_bytes();
                let status = MiStatus::MORE_PROCESSING_REQUIRED;
                seal(&header, &[&[status.0, 0, low, high]])
            }
            Self::Refused(MiRefusal::Parameter { byte, bit }) => {
                let [low, high] = byte.to_le_bytes();
                let status = MiStatus::INVALID_PARAMETER;
                seal(&header, &[&[status.0, bit & 7, low, high]])
            }
            Self::Refused(MiRefusal::Status(status)) => seal(&header, &[&[status.0, 0, 0, 0]]),
        }
    }

    /// Decodes a response message.
    pub fn decode(message: &'m [u8]) -> Result<(MiHeader, Self), BrokenMessage> {
        let (header, body) = open(message)?;
        let [status, first, low, high, data @ ..] = body else {
            return Err(BrokenMessage::Body);
        };
        let value = u16::from_le_bytes([*low, *high]);
        let response = match (MiStatus(*status), header.kind) {
            _ if !header.response => return Err(BrokenMessage::Body),
            (MiStatus::MORE_PROCESSING_REQUIRED, _) => Self::MoreProcessing { time: value },
            (MiStatus::INVALID_PARAMETER, _) => Self::Refused(MiRefusal::Parameter {
                byte: value,
                bit: first & 7,
            }),
            (MiStatus::SUCCESS, MiKind::Control) => Self::Control { tag: *first, value },
            (MiStatus::SUCCESS, MiKind::Command) => Self::Command {
                value: u32::from_le_bytes([*first, *low, *high, 0]),
                data,
            },
            (MiStatus::SUCCESS, MiKind::Admin) => {
                let (entry, data) = data.split_first_chunk::<12>().ok_or(BrokenMessage::Body)?;
                let [r0, r1, r2, r3, r4, r5, r6, r7, _, _, s0, s1] = *entry;
                let cqe = Cqe {
                    result: U64::from_bytes([r0, r1, r2, r3, r4, r5, r6, r7]),
                    status: U16::from_bytes([s0, s1]),
                    ..Cqe::default()
                };
                Self::Admin { cqe, data }
            }
            (MiStatus::SUCCESS, _) => return Err(BrokenMessage::Body),
            (status, _) => Self::Refused(MiRefusal::Status(status)),
        };
        Ok((header, response))
    }
}
