//! Checks I/O commands of the NVM command set.
//!
//! The engine need not check namespace bounds and MDTS again. Metadata and protection information
//! are refused; Limited Retry, access hints and other DSM attributes are ignored. Transports check
//! the data pointer, callers command identifiers and fused pairs.

use crate::command::FLAGS_FUSE_MASK;
use crate::reservation::{self, ReservationCommand};
use crate::{NSID_ALL, Sqe, Status, opcode::nvm};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The current size of a namespace, and whether hosts may write to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceGeometry {
    /// Block size: a power of two, at least 512.
    pub block_bytes: u32,
    /// Blocks; may grow between commands.
    pub block_count: u64,
    /// NSATTR bit 0: commands that would change data fail (NVM Command Set 1.0, 4.1.5.1).
    pub write_protected: bool,
}

impl NamespaceGeometry {
    /// Whether the range is inside the namespace.
    #[inline]
    pub fn contains(&self, lba: u64, blocks: u32) -> bool {
        lba.checked_add(u64::from(blocks))
            .is_some_and(|end| end <= self.block_count)
    }
}

/// Direction and size of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// No data.
    None,
    /// Bytes to the host.
    ToHost(u32),
    /// Bytes from the host.
    FromHost(u32),
}

impl Transfer {
    /// Bytes in either direction.
    #[inline]
    pub fn bytes(self) -> u32 {
        match self {
            Self::None => 0,
            Self::ToHost(bytes) | Self::FromHost(bytes) => bytes,
        }
    }
}

/// A checked I/O command, inside the namespace. Block counts are 1-based.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoCommand {
    /// Read (NVM Command Set 1.0, 3.2.4).
    Read {
        /// First block.
        lba: u64,
        /// 1 to 65536.
        blocks: u32,
        /// The data must be durable first.
        fua: bool,
    },
    /// Write (NVM Command Set 1.0, 3.2.6).
    Write {
        /// First block.
        lba: u64,
        /// 1 to 65536.
        blocks: u32,
        /// Durable before completion.
        fua: bool,
    },
    /// Flush (Base 2.0, 7.1): completed writes become durable.
    Flush,
    /// Write Zeroes (NVM Command Set 1.0, 3.2.8).
    WriteZeroes {
        /// First block.
        lba: u64,
        /// 1 to 65536; MDTS does not apply, and WZSL is 0.
        blocks: u32,
        /// Durable before completion.
        fua: bool,
        /// DEAC: deallocate if possible; reads return zeros anyway.
        deallocate: bool,
    },
    /// Deallocate (NVM Command Set 1.0, 3.2.3); [`dsm_ranges`] decodes the data.
    Deallocate {
        /// 1 to 256.
        ranges: u16,
    },
    /// Dataset Management hints; the data is dropped.
    Hint {
        /// 1 to 256.
        ranges: u16,
    },
    /// Compare (NVM Command Set 1.0, 3.2.1).
    Compare {
        /// First block.
        lba: u64,
        /// 1 to 65536.
        blocks: u32,
        /// Stored data must be durable first.
        fua: bool,
    },
    /// Reservation Register, Acquire or Release (Base 2.0, 7.2–7.4), with keys as data.
    Reserve {
        /// For [`reservation::ReservationCommand::new`].
        action: u32,
    },
    /// Reservation Report (Base 2.0, 7.5).
    ReservationReport {
        /// EDS: 128-bit host identifiers.
        extended: bool,
        /// NUMD in bytes.
        len_bytes: u32,
    },
}

impl IoCommand {
    /// The command's data transfer.
    #[inline]
    pub fn transfer(&self, geometry: &NamespaceGeometry) -> Transfer {
        // In range by `decode`.
        match *self {
            Self::Read { blocks, .. } => {
                Transfer::ToHost(blocks.saturating_mul(geometry.block_bytes))
            }
            Self::Write { blocks, .. } | Self::Compare { blocks, .. } => {
                Transfer::FromHost(blocks.saturating_mul(geometry.block_bytes))
            }
            Self::Flush | Self::WriteZeroes { .. } => Transfer::None,
            Self::Deallocate { ranges } | Self::Hint { ranges } => {
                Transfer::FromHost(u32::from(ranges) * DSM_RANGE_BYTES as u32)
            }
            Self::Reserve { action } => Transfer::FromHost(reservation::key_bytes(action)),
            Self::ReservationReport { len_bytes, .. } => Transfer::ToHost(len_bytes),
        }
    }
}

// CDW12 (NVM Command Set 1.0, 3.2.4, 3.2.6, 3.2.8).
const CDW12_FUA: u32 = 1 << 30;
const CDW12_PRINFO: u32 = 0xF << 26;
const CDW12_DEAC: u32 = 1 << 25;
const CDW12_STC: u32 = 1 << 24;
const CDW12_DTYPE: u32 = 0xF << 20;
/// CDW11: Deallocate (NVM Command Set 1.0, 3.2.3).
const DSM_AD: u32 = 1 << 2;

/// FUSE: first command (Base 2.0, 3.3.3.1, figure 86).
pub const FUSE_FIRST: u8 = 1;
/// FUSE: second command.
pub const FUSE_SECOND: u8 = 2;

/// Checks a command for namespace `nsid`. Errors have Do Not Retry.
///
/// Fused halves are refused: see [`decode_fused`].
#[inline]
pub fn decode(
    sqe: &Sqe,
    nsid: u32,
    geometry: &NamespaceGeometry,
    mdts_bytes: u32,
) -> Result<IoCommand, Status> {
    decode_single::<true>(sqe, nsid, geometry, mdts_bytes)
}

/// As [`decode`], but reservation opcodes are unknown.
#[inline]
pub fn decode_without_reservations(
    sqe: &Sqe,
    nsid: u32,
    geometry: &NamespaceGeometry,
    mdts_bytes: u32,
) -> Result<IoCommand, Status> {
    decode_single::<false>(sqe, nsid, geometry, mdts_bytes)
}

#[inline]
fn decode_single<const RESERVATIONS: bool>(
    sqe: &Sqe,
    nsid: u32,
    geometry: &NamespaceGeometry,
    mdts_bytes: u32,
) -> Result<IoCommand, Status> {
    if sqe.fuse() != 0 {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    decode_inner::<RESERVATIONS>(sqe, nsid, geometry, mdts_bytes).map_err(Status::with_dnr)
}

/// As [`decode`], for half of a Compare and Write (Base 2.0, 3.4.2; FUSES bit 0).
///
/// See [`Sqe::fuse`] and [`fuses_with`].
pub fn decode_fused(
    sqe: &Sqe,
    nsid: u32,
    geometry: &NamespaceGeometry,
    mdts_bytes: u32,
) -> Result<IoCommand, Status> {
    let half = (sqe.fuse(), sqe.opcode());
    if half != (FUSE_FIRST, nvm::COMPARE) && half != (FUSE_SECOND, nvm::WRITE) {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    let mut plain = *sqe;
    plain.flags &= !FLAGS_FUSE_MASK;
    match decode_inner::<true>(&plain, nsid, geometry, mdts_bytes).map_err(Status::with_dnr)? {
        // ACWU is 0: one block.
        IoCommand::Compare { blocks: 2.., .. } | IoCommand::Write { blocks: 2.., .. } => {
            Err(Status::ATOMIC_WRITE_UNIT_EXCEEDED.with_dnr())
        }
        command => Ok(command),
    }
}

/// Whether both halves have equal ranges.
pub fn fuses_with(first: &IoCommand, second: &IoCommand) -> bool {
    match (first, second) {
        (
            IoCommand::Compare { lba, blocks, .. },
            IoCommand::Write {
                lba: at,
                blocks: count,
                ..
            },
        ) => (lba, blocks) == (at, count),
        _ => false,
    }
}

#[inline]
fn decode_inner<const RESERVATIONS: bool>(
    sqe: &Sqe,
    nsid: u32,
    geometry: &NamespaceGeometry,
    mdts_bytes: u32,
) -> Result<IoCommand, Status> {
    let op = sqe.opcode();
    let blocks = names_blocks(op);
    if !blocks && !is_other(op, RESERVATIONS) {
        return Err(Status::INVALID_OPCODE);
    }
    // VWC: only Flush accepts FFFFFFFFh.
    if sqe.nsid() != nsid && !(op == nvm::FLUSH && sqe.nsid() == NSID_ALL) {
        return Err(Status::INVALID_NAMESPACE_OR_FORMAT);
    }
    // Before all other fields, as Linux's target does.
    if geometry.write_protected && changes_data(sqe) {
        return Err(Status::NAMESPACE_IS_WRITE_PROTECTED);
    }
    if !blocks {
        return decode_other(sqe, mdts_bytes);
    }
    let cdw12 = sqe.cdw(12);
    if cdw12 & (CDW12_PRINFO | CDW12_STC) != 0 {
        return Err(Status::INVALID_PROTECTION_INFORMATION);
    }
    let lba = sqe.cdw64(10);
    let blocks = (cdw12 & 0xFFFF) + 1;
    let fua = cdw12 & CDW12_FUA != 0;
    if op == nvm::WRITE && cdw12 & CDW12_DTYPE != 0 {
        return Err(Status::INVALID_FIELD);
    }
    let bytes = u64::from(blocks) * u64::from(geometry.block_bytes);
    if op != nvm::WRITE_ZEROES && bytes > u64::from(mdts_bytes) {
        return Err(Status::INVALID_FIELD);
    }
    if !geometry.contains(lba, blocks) {
        return Err(Status::LBA_OUT_OF_RANGE);
    }
    Ok(match op {
        nvm::READ => IoCommand::Read { lba, blocks, fua },
        nvm::WRITE => IoCommand::Write { lba, blocks, fua },
        nvm::COMPARE => IoCommand::Compare { lba, blocks, fua },
        _ => {
            let deallocate = cdw12 & CDW12_DEAC != 0;
            IoCommand::WriteZeroes {
                lba,
                blocks,
                fua,
                deallocate,
            }
        }
    })
}

/// Commands that fail on a write-protected namespace (Base 2.0, 8.12).
#[cold]
fn changes_data(sqe: &Sqe) -> bool {
    match sqe.opcode() {
        nvm::WRITE | nvm::WRITE_ZEROES => true,
        nvm::DATASET_MANAGEMENT => sqe.cdw(11) & DSM_AD != 0,
        _ => false,
    }
}

pub(crate) fn is_supported(op: u8, reservations: bool) -> bool {
    names_blocks(op) || is_other(op, reservations)
}

#[inline]
fn names_blocks(op: u8) -> bool {
    matches!(
        op,
        nvm::WRITE | nvm::READ | nvm::COMPARE | nvm::WRITE_ZEROES
    )
}

#[inline]
fn is_other(op: u8, reservations: bool) -> bool {
    match op {
        nvm::FLUSH | nvm::DATASET_MANAGEMENT => true,
        nvm::RESERVATION_REGISTER
        | nvm::RESERVATION_REPORT
        | nvm::RESERVATION_ACQUIRE
        | nvm::RESERVATION_RELEASE => reservations,
        _ => false,
    }
}

fn decode_other(sqe: &Sqe, mdts_bytes: u32) -> Result<IoCommand, Status> {
    match sqe.opcode() {
        nvm::FLUSH => Ok(IoCommand::Flush),
        nvm::DATASET_MANAGEMENT => {
            let ranges = (sqe.cdw(10) & 0xFF) as u16 + 1;
            match sqe.cdw(11) & DSM_AD {
                0 => Ok(IoCommand::Hint { ranges }),
                _ => Ok(IoCommand::Deallocate { ranges }),
            }
        }
        nvm::RESERVATION_REPORT => {
            // 0's based.
            let bytes = (u64::from(sqe.cdw(10)) + 1) * 4;
            let len_bytes = u32::try_from(bytes)
                .ok()
                .filter(|&bytes| bytes <= mdts_bytes);
            Ok(IoCommand::ReservationReport {
                extended: reservation::is_extended(sqe),
                len_bytes: len_bytes.ok_or(Status::INVALID_FIELD)?,
            })
        }
        _ => {
            let action = reservation::action_of(sqe);
            ReservationCommand::new(action, [0; 2])?;
            Ok(IoCommand::Reserve { action })
        }
    }
}

/// Dataset Management range (NVM Command Set 1.0, 3.2.3).
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct DsmRange {
    /// Context attributes: hints.
    pub context_attributes: U32,
    /// Length in blocks; 0 does nothing.
    pub length_blocks: U32,
    /// First block.
    pub starting_lba: U64,
}

/// Bytes of one [`DsmRange`].
pub const DSM_RANGE_BYTES: usize = 16;
const _: () = assert!(size_of::<DsmRange>() == DSM_RANGE_BYTES);

/// Maximum Dataset Management data: 256 ranges.
pub const DSM_MAX_BYTES: usize = 256 * DSM_RANGE_BYTES;

/// Checks all ranges, then yields nonempty `(lba, blocks)`.
///
/// `data` must hold `ranges`, as [`decode`] reported.
pub fn dsm_ranges<'a>(
    data: &'a [u8],
    ranges: u16,
    geometry: &NamespaceGeometry,
) -> Result<impl Iterator<Item = (u64, u32)> + use<'a>, Status> {
    let bytes = data
        .get(..usize::from(ranges) * DSM_RANGE_BYTES)
        .ok_or(Status::DATA_SGL_LENGTH_INVALID.with_dnr())?;
    let list = <[DsmRange]>::ref_from_bytes(bytes).map_err(|_| Status::INTERNAL_ERROR)?;
    if !list
        .iter()
        .all(|r| geometry.contains(r.starting_lba.get(), r.length_blocks.get()))
    {
        return Err(Status::LBA_OUT_OF_RANGE.with_dnr());
    }
    Ok(list
        .iter()
        .map(|r| (r.starting_lba.get(), r.length_blocks.get()))
        .filter(|&(_, blocks)| blocks != 0))
}

#[cfg(test)]
mod tests;
