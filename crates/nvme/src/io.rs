//! I/O commands of the NVM command set: from a submission queue entry to a checked command.
//!
//! # Purpose
//! What comes out of [`decode`] is within the namespace and within MDTS, so the engine need not
//! check it again. Nothing allocates.
//!
//! # What it does not do
//! It does not look at the data pointer (PSDT and SGL types are the transport's), does not check
//! identifiers against commands in flight, and does no fused operation, metadata or protection
//! information: bits that ask for them are refused. Limited Retry, access hints and the DSM
//! attributes other than Deallocate are hints, and ignored.

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
}

impl IoCommand {
    /// The data that the command moves.
    pub fn transfer(&self, geometry: &NamespaceGeometry) -> Transfer {
        // In range: `decode` bounded blocks by MDTS, and ranges by 256.
        match *self {
            Self::Read { blocks, .. } => {
                Transfer::ToHost(blocks.saturating_mul(geometry.block_bytes))
            }
            Self::Write { blocks, .. } => {
                Transfer::FromHost(blocks.saturating_mul(geometry.block_bytes))
            }
            Self::Flush | Self::WriteZeroes { .. } => Transfer::None,
            Self::Deallocate { ranges } | Self::Hint { ranges } => {
                Transfer::FromHost(u32::from(ranges) * DSM_RANGE_BYTES as u32)
            }
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

/// Checks an I/O command for the namespace `nsid` of the geometry given.
///
/// `mdts_bytes` is the controller's maximum data transfer. Every status has Do Not Retry set,
/// because the same command would fail again.
pub fn decode(
    sqe: &Sqe,
    nsid: u32,
    geometry: &NamespaceGeometry,
    mdts_bytes: u32,
) -> Result<IoCommand, Status> {
    decode_inner(sqe, nsid, geometry, mdts_bytes).map_err(Status::with_dnr)
}

fn decode_inner(
    sqe: &Sqe,
    nsid: u32,
    geometry: &NamespaceGeometry,
    mdts_bytes: u32,
) -> Result<IoCommand, Status> {
    let op = sqe.opcode();
    let known = matches!(
        op,
        nvm::FLUSH | nvm::WRITE | nvm::READ | nvm::WRITE_ZEROES | nvm::DATASET_MANAGEMENT
    );
    if !known {
        return Err(Status::INVALID_OPCODE);
    }
    // FUSES is 0 (Base 2.0, 3.3.3.1, figure 86).
    if sqe.fuse() != 0 {
        return Err(Status::INVALID_FIELD);
    }
    // VWC says that Flush takes FFFFFFFFh for every namespace; no other command does.
    if sqe.nsid() != nsid && !(op == nvm::FLUSH && sqe.nsid() == NSID_ALL) {
        return Err(Status::INVALID_NAMESPACE_OR_FORMAT);
    }
    match op {
        nvm::FLUSH => Ok(IoCommand::Flush),
        nvm::DATASET_MANAGEMENT => {
            let ranges = (sqe.cdw(10) & 0xFF) as u16 + 1;
            match sqe.cdw(11) & DSM_AD {
                0 => Ok(IoCommand::Hint { ranges }),
                _ => Ok(IoCommand::Deallocate { ranges }),
            }
        }
        _ => {
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
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GEOMETRY: NamespaceGeometry = NamespaceGeometry {
        block_bytes: 4096,
        block_count: 1000,
    };
    const MDTS: u32 = 128 * 1024;

    fn rw(op: u8, lba: u64, blocks: u32) -> Sqe {
        Sqe::new(op, 1)
            .with_nsid(1)
            .with_cdw64(10, lba)
            .with_cdw(12, blocks - 1)
    }
    fn run(sqe: Sqe) -> Result<IoCommand, Status> {
        decode(&sqe, 1, &GEOMETRY, MDTS)
    }

    #[test]
    fn ranges_end_where_the_namespace_ends() {
        assert_eq!(
            run(rw(nvm::READ, 999, 1)),
            Ok(IoCommand::Read {
                lba: 999,
                blocks: 1,
                fua: false
            })
        );
        for (lba, blocks) in [(999, 2), (1000, 1), (u64::MAX, 1), (u64::MAX - 7, 16)] {
            for op in [nvm::READ, nvm::WRITE, nvm::WRITE_ZEROES] {
                assert_eq!(
                    run(rw(op, lba, blocks)),
                    Err(Status::LBA_OUT_OF_RANGE.with_dnr()),
                    "{op} {lba} {blocks}"
                );
            }
        }
    }

    #[test]
    fn mdts_bounds_data_but_not_zeroes() {
        assert!(run(rw(nvm::WRITE, 0, 32)).is_ok());
        assert_eq!(
            run(rw(nvm::WRITE, 0, 33)),
            Err(Status::INVALID_FIELD.with_dnr())
        );
        let large = NamespaceGeometry {
            block_bytes: 512,
            block_count: 1 << 20,
        };
        assert_eq!(
            decode(&rw(nvm::WRITE_ZEROES, 0, 65536), 1, &large, 4096),
            Ok(IoCommand::WriteZeroes {
                lba: 0,
                blocks: 65536,
                fua: false,
                deallocate: false
            })
        );
    }

    #[test]
    fn flags() {
        let write = rw(nvm::WRITE, 5, 3);
        let with = |bits: u32| write.with_cdw(12, 2 | bits);
        assert_eq!(
            run(with(CDW12_FUA | 1 << 31)),
            Ok(IoCommand::Write {
                lba: 5,
                blocks: 3,
                fua: true
            })
        );
        assert_eq!(
            run(with(1 << 29)),
            Err(Status::INVALID_PROTECTION_INFORMATION.with_dnr())
        );
        assert_eq!(run(with(1 << 20)), Err(Status::INVALID_FIELD.with_dnr()));
        let zeroes = rw(nvm::WRITE_ZEROES, 5, 3).with_cdw(12, 2 | CDW12_DEAC | CDW12_FUA);
        assert_eq!(
            run(zeroes),
            Ok(IoCommand::WriteZeroes {
                lba: 5,
                blocks: 3,
                fua: true,
                deallocate: true
            })
        );
        let mut fused = write;
        fused.flags = 1;
        assert_eq!(run(fused), Err(Status::INVALID_FIELD.with_dnr()));
    }

    #[test]
    fn namespaces() {
        let invalid = Err(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr());
        assert_eq!(
            run(Sqe::new(nvm::FLUSH, 1).with_nsid(1)),
            Ok(IoCommand::Flush)
        );
        assert_eq!(
            run(Sqe::new(nvm::FLUSH, 1).with_nsid(NSID_ALL)),
            Ok(IoCommand::Flush)
        );
        assert_eq!(run(Sqe::new(nvm::FLUSH, 1)), invalid);
        for op in [
            nvm::READ,
            nvm::WRITE,
            nvm::WRITE_ZEROES,
            nvm::DATASET_MANAGEMENT,
        ] {
            assert_eq!(run(rw(op, 0, 1).with_nsid(NSID_ALL)), invalid);
        }
        assert_eq!(run(rw(nvm::READ, 0, 1).with_nsid(2)), invalid);
        for op in [nvm::COMPARE, nvm::COPY, nvm::VERIFY, 0x7F, 0xFF] {
            assert_eq!(run(rw(op, 0, 1)), Err(Status::INVALID_OPCODE.with_dnr()));
        }
    }

    fn range(lba: u64, blocks: u32) -> DsmRange {
        DsmRange {
            starting_lba: U64::new(lba),
            length_blocks: U32::new(blocks),
            ..DsmRange::default()
        }
    }

    #[test]
    fn deallocate_ranges() {
        let dsm = Sqe::new(nvm::DATASET_MANAGEMENT, 1)
            .with_nsid(1)
            .with_cdw(10, 2);
        assert_eq!(run(dsm), Ok(IoCommand::Hint { ranges: 3 }));
        let command = run(dsm.with_cdw(11, DSM_AD)).unwrap();
        assert_eq!(command, IoCommand::Deallocate { ranges: 3 });
        assert_eq!(command.transfer(&GEOMETRY), Transfer::FromHost(48));

        let list = [range(10, 5), range(1000, 0), range(999, 1)];
        let got: Vec<_> = dsm_ranges(list.as_bytes(), 3, &GEOMETRY).unwrap().collect();
        assert_eq!(got, [(10, 5), (999, 1)]);
        // The last is bad, so none is yielded.
        let list = [range(10, 5), range(0, 1), range(999, 2)];
        assert_eq!(
            dsm_ranges(list.as_bytes(), 3, &GEOMETRY).err(),
            Some(Status::LBA_OUT_OF_RANGE.with_dnr())
        );
        assert_eq!(
            dsm_ranges(&list.as_bytes()[..47], 3, &GEOMETRY).err(),
            Some(Status::DATA_SGL_LENGTH_INVALID.with_dnr())
        );
    }

    proptest! {
        #[test]
        fn whatever_decodes_is_in_bounds(
            raw in any::<[[u8; 32]; 2]>(),
            op in prop_oneof![any::<u8>(), 0u8..10],
            plain in any::<bool>(),
            shift in 9u32..17,
            block_count in any::<u64>(),
            mdts in any::<u32>(),
        ) {
            let mut sqe = Sqe::read_from_bytes(raw.as_flattened()).unwrap();
            sqe.opcode = op;
            if plain {
                sqe.flags = 0x40;
                sqe = sqe.with_nsid(1).with_cdw(12, sqe.cdw(12) & 0xF00F_FFFF & !(0xF << 26));
            }
            let geometry = NamespaceGeometry { block_bytes: 1 << shift, block_count };
            if let Ok(command) = decode(&sqe, 1, &geometry, mdts) {
                match command {
                    IoCommand::Read { lba, blocks, .. } | IoCommand::Write { lba, blocks, .. } => {
                        prop_assert!(u128::from(lba) + u128::from(blocks) <= u128::from(block_count));
                        let bytes = u64::from(blocks) << shift;
                        prop_assert!(bytes <= u64::from(mdts));
                        prop_assert_eq!(u64::from(command.transfer(&geometry).bytes()), bytes);
                    }
                    IoCommand::WriteZeroes { lba, blocks, .. } => {
                        prop_assert!(u128::from(lba) + u128::from(blocks) <= u128::from(block_count));
                    }
                    IoCommand::Deallocate { ranges } | IoCommand::Hint { ranges } => {
                        prop_assert!((1..=256).contains(&ranges));
                    }
                    IoCommand::Flush => {}
                }
            }
        }

        #[test]
        fn dsm_data_of_any_kind(data in proptest::collection::vec(any::<u8>(), 0..4200), ranges in 1u16..=256) {
            if let Ok(list) = dsm_ranges(&data, ranges, &GEOMETRY) {
                for (lba, blocks) in list {
                    prop_assert!(blocks > 0 && lba + u64::from(blocks) <= 1000);
                }
            }
        }
    }
}
