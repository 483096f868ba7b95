//! I/O commands of the NVM command set: from a submission queue entry to a checked command.
//!
//! # Purpose
//! What comes out of [`decode`] is within the namespace and within MDTS, so the engine need not
//! check it again. Nothing allocates.
//!
//! # What it does not do
//! It does not look at the data pointer (PSDT and SGL types are the transport's), does not check
//! identifiers against commands in flight, does not find the other half of a fused operation, and does
//! no metadata or protection information: bits that ask for them are refused. Limited Retry, access hints and the DSM
//! attributes other than Deallocate are hints, and ignored.

use crate::command::FLAGS_FUSE_MASK;
use crate::reservation::{self, ReservationCommand};
use crate::{NSID_ALL, Sqe, Status, opcode::nvm};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The shape of a namespace at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceGeometry {
    /// Block size: a power of two, at least 512.
    pub block_bytes: u32,
    /// Size in blocks. It may grow between two commands.
    pub block_count: u64,
}

impl NamespaceGeometry {
    /// Whether `blocks` blocks at `lba` lie inside the namespace.
    #[inline]
    pub fn contains(&self, lba: u64, blocks: u32) -> bool {
        lba.checked_add(u64::from(blocks))
            .is_some_and(|end| end <= self.block_count)
    }
}

/// Which way a command's data goes, and how much of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// No data.
    None,
    /// This many bytes from the controller to the host.
    ToHost(u32),
    /// This many bytes from the host to the controller.
    FromHost(u32),
}

impl Transfer {
    /// The bytes that move, either way.
    #[inline]
    pub fn bytes(self) -> u32 {
        match self {
            Self::None => 0,
            Self::ToHost(bytes) | Self::FromHost(bytes) => bytes,
        }
    }
}

/// A checked I/O command. Blocks are counted from 1, and every range is inside the namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoCommand {
    /// Read (NVM Command Set 1.0, 3.2.4). With `fua`, what is read must be durable first.
    Read {
        /// First block.
        lba: u64,
        /// Number of blocks, 1 to 65536.
        blocks: u32,
        /// Force Unit Access.
        fua: bool,
    },
    /// Write (NVM Command Set 1.0, 3.2.6). With `fua`, durable before its completion.
    Write {
        /// First block.
        lba: u64,
        /// Number of blocks, 1 to 65536.
        blocks: u32,
        /// Force Unit Access.
        fua: bool,
    },
    /// Flush (Base 2.0, 7.1): everything completed before is durable at its completion.
    Flush,
    /// Write Zeroes (NVM Command Set 1.0, 3.2.8).
    WriteZeroes {
        /// First block.
        lba: u64,
        /// Number of blocks, 1 to 65536. MDTS does not bound it, and WZSL is 0.
        blocks: u32,
        /// Force Unit Access.
        fua: bool,
        /// DEAC: the host would like the blocks deallocated. They read as zeros either way.
        deallocate: bool,
    },
    /// Dataset Management with Deallocate (NVM Command Set 1.0, 3.2.3): `ranges` descriptors of
    /// 16 bytes follow as data, for [`dsm_ranges`].
    Deallocate {
        /// Number of ranges, 1 to 256.
        ranges: u16,
    },
    /// Dataset Management of hints only: its data is received and dropped.
    Hint {
        /// Number of ranges, 1 to 256.
        ranges: u16,
    },
    /// Compare (NVM Command Set 1.0, 3.2.1): the command's data with what is stored. With `fua`, what
    /// is compared must be durable first.
    Compare {
        /// First block.
        lba: u64,
        /// Number of blocks, 1 to 65536.
        blocks: u32,
        /// Force Unit Access.
        fua: bool,
    },
    /// Reservation Register, Acquire or Release (Base 2.0, 7.2 to 7.4); its data are the keys.
    Reserve {
        /// For [`reservation::ReservationCommand::new`], which knows it.
        action: u32,
    },
    /// Reservation Report (Base 2.0, 7.5).
    ReservationReport {
        /// EDS: hosts have identifiers of 128 bits.
        extended: bool,
        /// NUMD: the bytes asked for.
        len_bytes: u32,
    },
}

impl IoCommand {
    /// The data that the command moves.
    #[inline]
    pub fn transfer(&self, geometry: &NamespaceGeometry) -> Transfer {
        // In range: `decode` bounded blocks by MDTS, and ranges by 256.
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

// Bits of CDW12 (NVM Command Set 1.0, 3.2.4, 3.2.6 and 3.2.8).
const CDW12_FUA: u32 = 1 << 30;
const CDW12_PRINFO: u32 = 0xF << 26;
const CDW12_DEAC: u32 = 1 << 25;
const CDW12_STC: u32 = 1 << 24;
const CDW12_DTYPE: u32 = 0xF << 20;
/// Dataset Management CDW11 bit 2: Attribute - Deallocate (NVM Command Set 1.0, 3.2.3).
const DSM_AD: u32 = 1 << 2;

/// FUSE of the first command of a fused operation (Base 2.0, 3.3.3.1, figure 86).
pub const FUSE_FIRST: u8 = 1;
/// FUSE of the second command of a fused operation.
pub const FUSE_SECOND: u8 = 2;

/// Checks an I/O command for the namespace `nsid` of the geometry given. One that is part of a fused
/// operation is refused: see [`decode_fused`].
///
/// `mdts_bytes` is the controller's maximum data transfer. Every status has Do Not Retry set,
/// because the same command would fail again.
#[inline]
pub fn decode(
    sqe: &Sqe,
    nsid: u32,
    geometry: &NamespaceGeometry,
    mdts_bytes: u32,
) -> Result<IoCommand, Status> {
    decode_single::<true>(sqe, nsid, geometry, mdts_bytes)
}

/// As [`decode`], for a controller without reservations: to it their opcodes are unknown.
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

/// As [`decode`], for a command with FUSE set: one half of Compare and Write, the only fused operation
/// there is (Base 2.0, 3.4.2; FUSES bit 0). Which half is in [`Sqe::fuse`]; whether both name the same
/// blocks, [`fuses_with`] says.
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
        // ACWU is 0: a block at a time.
        IoCommand::Compare { blocks: 2.., .. } | IoCommand::Write { blocks: 2.., .. } => {
            Err(Status::ATOMIC_WRITE_UNIT_EXCEEDED.with_dnr())
        }
        command => Ok(command),
    }
}

/// Whether two halves of a fused operation name the same blocks.
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
    // VWC says that Flush takes FFFFFFFFh for every namespace; no other command does.
    if sqe.nsid() != nsid && !(op == nvm::FLUSH && sqe.nsid() == NSID_ALL) {
        return Err(Status::INVALID_NAMESPACE_OR_FORMAT);
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

/// Whether [`decode`], or without `reservations` [`decode_without_reservations`], knows a command.
pub(crate) fn is_supported(op: u8, reservations: bool) -> bool {
    names_blocks(op) || is_other(op, reservations)
}

/// Commands that name blocks in their entry.
#[inline]
fn names_blocks(op: u8) -> bool {
    matches!(
        op,
        nvm::WRITE | nvm::READ | nvm::COMPARE | nvm::WRITE_ZEROES
    )
}

/// Commands that name no blocks in their entry.
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
            // NUMD is a 0's based number of dwords.
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
    /// Context Attributes: hints.
    pub context_attributes: U32,
    /// Length in logical blocks; 0 is a range that does nothing.
    pub length_blocks: U32,
    /// Starting LBA.
    pub starting_lba: U64,
}

/// Bytes of one [`DsmRange`].
pub const DSM_RANGE_BYTES: usize = 16;
const _: () = assert!(size_of::<DsmRange>() == DSM_RANGE_BYTES);

/// The most data that Dataset Management carries: 256 ranges.
pub const DSM_MAX_BYTES: usize = 256 * DSM_RANGE_BYTES;

/// Checks every range of a Dataset Management command before any is acted upon, and yields the
/// `(lba, blocks)` of those that are not empty.
///
/// `data` is the command's data; it must hold the `ranges` that [`decode`] reported.
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
