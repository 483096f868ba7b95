//! Admin commands that change the NVM subsystem: its namespaces and its firmware.
//!
//! [`crate::controller`] declares them for management controllers, and their owner carries them
//! out. Each `decode` checks what concerns no state, and its error is the status without Do Not
//! Retry. The NSID is valid then, but perhaps unallocated.

#[cfg(test)]
mod tests;

use crate::identify::{CSI_NVM, IdentifyNamespace};
use crate::{NSID_ALL, Sqe, Status};
use zerocopy::FromBytes;

/// Block sizes of the LBA formats, in their order. The default comes first: clients that cannot see
/// a detached namespace ask for format 0.
pub(crate) const BLOCK_BYTES: [u32; 2] = [4096, 512];
/// The slot with the installed program.
const READ_ONLY_SLOT: u8 = 1;
/// The slot for downloads, which the host may also call 0: any.
const WRITABLE_SLOT: u8 = 2;
/// Most entries of a controller list.
const MOST_CONTROLLERS: usize = 2047;

/// NSIDs of one namespace. A change of all would concern every tenant.
fn one_namespace(sqe: &Sqe) -> Result<u32, Status> {
    match sqe.nsid() {
        0 => Err(Status::INVALID_NAMESPACE_OR_FORMAT),
        NSID_ALL => Err(Status::INVALID_FIELD),
        nsid => Ok(nsid),
    }
}

/// The block size of a format whose index has its upper bits apart.
fn block_bytes(low: u8, high: u8) -> Result<u32, Status> {
    let index = usize::from(low & 0xF | (high & 3) << 4);
    let block_bytes = BLOCK_BYTES.get(index).copied();
    block_bytes.ok_or(Status::INVALID_FORMAT)
}

/// Namespace Management (Base 2.0, 5.23).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamespaceManagement {
    /// Creates a namespace; dword 0 of the completion is its NSID.
    Create(NewNamespace),
    /// Deletes a namespace.
    Delete {
        /// The namespace.
        nsid: u32,
    },
}

/// A namespace to create (NVM Command Set 1.0, 4.1.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewNamespace {
    /// NSZE in bytes.
    pub size_bytes: u64,
    /// Block size: 512 or 4096.
    pub block_bytes: u32,
    /// NMIC bit 0: several controllers may have it.
    pub shared: bool,
}

impl NamespaceManagement {
    /// Decodes the command and its data, which only Create has: 4096 bytes.
    ///
    /// # Errors
    /// Invalid Field in Command, Invalid Namespace or Format, Invalid Format, Thin Provisioning Not
    /// Supported, Namespace Insufficient Capacity, I/O Command Set Not Supported.
    pub fn decode(sqe: &Sqe, data: &[u8]) -> Result<Self, Status> {
        match sqe.cdw(10) & 0xF {
            0 if (sqe.cdw(11) >> 24) as u8 != CSI_NVM => Err(Status::IO_COMMAND_SET_NOT_SUPPORTED),
            0 => NewNamespace::decode(data).map(Self::Create),
            1 => one_namespace(sqe).map(|nsid| Self::Delete { nsid }),
            _ => Err(Status::INVALID_FIELD),
        }
    }
}

impl NewNamespace {
    fn decode(data: &[u8]) -> Result<Self, Status> {
        let id = IdentifyNamespace::ref_from_bytes(data).map_err(|_| Status::INVALID_FIELD)?;
        let block_bytes = block_bytes(id.flbas, id.flbas >> 5)?;
        // Protection information needs metadata.
        if id.dps & 7 != 0 {
            return Err(Status::INVALID_FORMAT);
        }
        let places = [
            id.anagrpid.get(),
            id.nvmsetid.get().into(),
            id.endgid.get().into(),
        ];
        let (blocks, capacity) = (id.nsze.get(), id.ncap.get());
        if blocks == 0 || capacity > blocks || places != [0; 3] {
            return Err(Status::INVALID_FIELD);
        }
        // All blocks can be written at once.
        if capacity < blocks {
            return Err(Status::THIN_PROVISIONING_NOT_SUPPORTED);
        }
        let size_bytes = blocks.checked_mul(block_bytes.into());
        Ok(Self {
            size_bytes: size_bytes.ok_or(Status::NAMESPACE_INSUFFICIENT_CAPACITY)?,
            block_bytes,
            shared: id.nmic & 1 != 0,
        })
    }
}

/// Namespace Attachment (Base 2.0, 5.22).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceAttachment {
    /// Attach; else detach.
    pub attach: bool,
    /// The namespace.
    pub nsid: u32,
    /// The controllers, ascending: 1 to 2047.
    pub controllers: Vec<u16>,
}

impl NamespaceAttachment {
    /// Decodes the command and its controller list.
    ///
    /// # Errors
    /// Invalid Field in Command, Invalid Namespace or Format, Controller List Invalid.
    pub fn decode(sqe: &Sqe, data: &[u8]) -> Result<Self, Status> {
        let attach = match sqe.cdw(10) & 0xF {
            0 => true,
            1 => false,
            _ => return Err(Status::INVALID_FIELD),
        };
        let nsid = one_namespace(sqe)?;
        let mut ids = data.as_chunks().0.iter().map(|id| u16::from_le_bytes(*id));
        let count = usize::from(ids.next().ok_or(Status::INVALID_FIELD)?);
        let controllers: Vec<u16> = ids.take(count.min(MOST_CONTROLLERS)).collect();
        let ascending = controllers.is_sorted_by(|a, b| a < b);
        if count == 0 || controllers.len() != count || !ascending {
            return Err(Status::CONTROLLER_LIST_INVALID);
        }
        Ok(Self {
            attach,
            nsid,
            controllers,
        })
    }
}

/// Firmware Image Download (Base 2.0, 5.13): the place of its data in the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirmwareDownload {
    /// OFST, less than 16 GiB.
    pub offset_bytes: u64,
    /// NUMD, which is the length of the data.
    pub length_bytes: usize,
}

impl FirmwareDownload {
    /// Decodes the command.
    ///
    /// # Errors
    /// Invalid Field in Command: NUMD differs from the data's length.
    pub fn decode(sqe: &Sqe, data: &[u8]) -> Result<Self, Status> {
        let length_bytes = (u64::from(sqe.cdw(10)) + 1) * 4;
        if length_bytes != data.len() as u64 {
            return Err(Status::INVALID_FIELD);
        }
        Ok(Self {
            offset_bytes: u64::from(sqe.cdw(11)) * 4,
            length_bytes: data.len(),
        })
    }
}

/// Firmware Commit (Base 2.0, 5.12).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirmwareCommit {
    /// FS: 1 or 2. Slot 1 is never to be replaced.
    pub slot: u8,
    /// CA.
    pub action: CommitAction,
}

/// What becomes of a slot's image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitAction {
    /// The downloaded image replaces it.
    Replace,
    /// The downloaded image replaces it, and runs from the next reset on.
    ReplaceAndSelect,
    /// It runs from the next reset on.
    Select,
    /// The downloaded image, if any, replaces it; then it runs at once.
    Activate,
}

impl FirmwareCommit {
    /// Decodes the command.
    ///
    /// # Errors
    /// Invalid Field in Command, Invalid Firmware Slot.
    pub fn decode(sqe: &Sqe) -> Result<Self, Status> {
        let action = match sqe.cdw(10) >> 3 & 7 {
            0 => CommitAction::Replace,
            1 => CommitAction::ReplaceAndSelect,
            2 => CommitAction::Select,
            3 => CommitAction::Activate,
            // Boot partitions.
            _ => return Err(Status::INVALID_FIELD),
        };
        let replaces = matches!(
            action,
            CommitAction::Replace | CommitAction::ReplaceAndSelect
        );
        let slot = match sqe.cdw(10) as u8 & 7 {
            READ_ONLY_SLOT if !replaces => READ_ONLY_SLOT,
            0 | WRITABLE_SLOT => WRITABLE_SLOT,
            _ => return Err(Status::INVALID_FIRMWARE_SLOT),
        };
        Ok(Self { slot, action })
    }
}

/// Format NVM (Base 2.0, 5.14).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormatNvm {
    /// The namespace.
    pub nsid: u32,
    /// The block size that it shall have: 512 or 4096.
    pub block_bytes: u32,
    /// SES 1: the data shall be erased.
    pub erase: bool,
}

impl FormatNvm {
    /// Decodes the command. The place of metadata is ignored, as there are none.
    ///
    /// # Errors
    /// Invalid Field in Command, Invalid Namespace or Format, Invalid Format.
    pub fn decode(sqe: &Sqe) -> Result<Self, Status> {
        let nsid = one_namespace(sqe)?;
        let cdw10 = sqe.cdw(10);
        let erase = match cdw10 >> 9 & 7 {
            0 => false,
            1 => true,
            // Cryptographic erase, and reserved values.
            _ => return Err(Status::INVALID_FIELD),
        };
        // Protection information needs metadata.
        if cdw10 >> 5 & 7 != 0 {
            return Err(Status::INVALID_FORMAT);
        }
        Ok(Self {
            nsid,
            block_bytes: block_bytes(cdw10 as u8, (cdw10 >> 12) as u8)?,
            erase,
        })
    }
}
