//! NVMe Admin commands in messages (6.1).

use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use super::message::dword;
use super::{MAX_DATA_BYTES, MiRefusal};
use crate::Sqe;

/// The length of a command without data, after the header.
const BODY_BYTES: usize = 64;
/// Places of fields in the message.
const OFFSET_AT: MiRefusal = MiRefusal::at(28);
const LENGTH_AT: MiRefusal = MiRefusal::at(32);

/// An Admin command for a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdminCommand<'m> {
    /// CTLID.
    pub controller: u16,
    /// The submission queue entry. Command identifier and data pointer are 0.
    pub sqe: Sqe,
    /// DOFST: where the wanted part of the response data begins. A multiple of 4.
    pub offset: u32,
    /// DLEN: the length of the request data, or of the wanted response data. A multiple of 4, at
    /// most [`MAX_DATA_BYTES`].
    pub length: u32,
    /// Request data of a command to the controller, else empty.
    pub data: &'m [u8],
}

impl<'m> AdminCommand<'m> {
    /// The flags that say whether DOFST and DLEN are valid are ignored (figure 116).
    pub(super) fn decode(body: &'m [u8]) -> Result<Self, MiRefusal> {
        let (fixed, data) = body
            .split_first_chunk::<BODY_BYTES>()
            .ok_or(MiRefusal::SIZE)?;
        let field = |n| U32::new(dword(fixed, n));
        let sqe = Sqe {
            nsid: field(1),
            cdw2: field(2),
            cdw3: field(3),
            mptr: U64::new(u64::from(dword(fixed, 4)) | u64::from(dword(fixed, 5)) << 32),
            cdw10_15: std::array::from_fn(|n| field(10 + n)),
            ..Sqe::new(fixed[0], 0)
        };
        let command = Self {
            controller: u16::from_le_bytes([fixed[2], fixed[3]]),
            sqe,
            offset: dword(fixed, 6),
            length: dword(fixed, 7),
            data,
        };
        command.check()?;
        Ok(command)
    }

    fn check(&self) -> Result<(), MiRefusal> {
        let to_controller = self.sqe.opcode & 3 == 1;
        if !self.length.is_multiple_of(4) || self.length as usize > MAX_DATA_BYTES {
            return Err(LENGTH_AT);
        }
        if !self.offset.is_multiple_of(4) || to_controller && self.offset != 0 {
            return Err(OFFSET_AT);
        }
        let expected = if to_controller {
            self.length as usize
        } else {
            0
        };
        if self.data.len() == expected {
            Ok(())
        } else {
            Err(MiRefusal::INPUT_SIZE)
        }
    }

    /// The wanted part of the response data.
    ///
    /// # Errors
    /// The parameter that points beyond the data.
    pub fn part<'d>(&self, whole: &'d [u8]) -> Result<&'d [u8], MiRefusal> {
        let rest = whole.get(self.offset as usize..).ok_or(OFFSET_AT)?;
        rest.get(..self.length as usize).ok_or(LENGTH_AT)
    }

    pub(super) fn encode(&self) -> [u8; BODY_BYTES] {
        let mut body = [0; BODY_BYTES];
        let [low, high] = self.controller.to_le_bytes();
        // Both DOFST and DLEN are valid, for endpoints of version 1.1.
        body[..4].copy_from_slice(&[self.sqe.opcode, 3, low, high]);
        body[4..24].copy_from_slice(&self.sqe.as_bytes()[4..24]);
        body[24..28].copy_from_slice(&self.offset.to_le_bytes());
        body[28..32].copy_from_slice(&self.length.to_le_bytes());
        body[40..].copy_from_slice(&self.sqe.as_bytes()[40..]);
        body
    }
}
