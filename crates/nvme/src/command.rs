//! Submission and completion queue entries, and SGL descriptors.
//!
//! Fields are byte-aligned, so any 64 bytes are a valid [`Sqe`]. [`crate::controller`] and
//! [`crate::io`] check the contents.

use crate::Status;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Submission Queue Entry (Base 2.0, 3.3.3.1, figures 86 and 87).
#[derive(
    Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Sqe {
    /// CDW0 bits 7:0.
    pub opcode: u8,
    /// CDW0 bits 15:8: FUSE in bits 1:0, PSDT in bits 7:6.
    pub flags: u8,
    /// CDW0 bits 31:16, command identifier.
    pub cid: U16,
    /// Namespace identifier. Byte 4 is FCTYPE in Fabrics commands.
    pub nsid: U32,
    /// Dword 2.
    pub cdw2: U32,
    /// Dword 3.
    pub cdw3: U32,
    /// Metadata pointer.
    pub mptr: U64,
    /// Data pointer: PRP entries or an SGL descriptor.
    pub dptr: [u8; 16],
    /// Dwords 10 to 15.
    pub cdw10_15: [U32; 6],
}
const _: () = assert!(size_of::<Sqe>() == 64 && align_of::<Sqe>() == 1);

/// PSDT 01b: SGL for data, contiguous metadata.
pub const FLAGS_PSDT_SGL: u8 = 0x40;
/// PSDT bits of [`Sqe::flags`].
pub const FLAGS_PSDT_MASK: u8 = 0xC0;
/// FUSE bits of [`Sqe::flags`].
pub const FLAGS_FUSE_MASK: u8 = 0x03;

impl Sqe {
    /// An otherwise zero entry.
    pub fn new(opcode: u8, cid: u16) -> Self {
        Self {
            opcode,
            cid: U16::new(cid),
            ..Self::default()
        }
    }
    /// Opcode.
    pub fn opcode(&self) -> u8 {
        self.opcode
    }
    /// Command identifier.
    pub fn cid(&self) -> u16 {
        self.cid.get()
    }
    /// Namespace identifier.
    pub fn nsid(&self) -> u32 {
        self.nsid.get()
    }
    /// FUSE: 0 if not fused.
    pub fn fuse(&self) -> u8 {
        self.flags & FLAGS_FUSE_MASK
    }
    /// PSDT: 0 PRP, 1 SGL, 2 SGL with metadata SGL, 3 reserved.
    pub fn psdt(&self) -> u8 {
        self.flags >> 6
    }
    /// Dword `n`, 0 to 15. The caller must choose `n`, never a peer.
    pub fn cdw(&self, n: usize) -> u32 {
        let dwords: &[U32; 16] = zerocopy::transmute_ref!(self);
        dwords[n].get()
    }
    /// Dwords `n` (low) and `n + 1` (high).
    pub fn cdw64(&self, n: usize) -> u64 {
        u64::from(self.cdw(n)) | u64::from(self.cdw(n + 1)) << 32
    }
    /// The data pointer as an SGL descriptor.
    pub fn sgl(&self) -> SglDescriptor {
        zerocopy::transmute!(self.dptr)
    }
    /// Sets the namespace.
    pub fn with_nsid(mut self, nsid: u32) -> Self {
        self.nsid = U32::new(nsid);
        self
    }
    /// Sets dword `n`, 10 to 15.
    pub fn with_cdw(mut self, n: usize, value: u32) -> Self {
        self.cdw10_15[n - 10] = U32::new(value);
        self
    }
    /// Sets dwords `n` and `n + 1`; `n` is 10 to 14.
    pub fn with_cdw64(self, n: usize, value: u64) -> Self {
        self.with_cdw(n, value as u32)
            .with_cdw(n + 1, (value >> 32) as u32)
    }
    /// Sets the data pointer and PSDT.
    pub fn with_sgl(mut self, sgl: SglDescriptor) -> Self {
        self.flags = (self.flags & !FLAGS_PSDT_MASK) | FLAGS_PSDT_SGL;
        self.dptr = zerocopy::transmute!(sgl);
        self
    }
}

impl std::fmt::Debug for Sqe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Sqe {{ opcode: {:#04x}, flags: {:#04x}, cid: {:#06x}, nsid: {:#x}, cdw10..15: {:x?} }}",
            self.opcode,
            self.flags,
            self.cid(),
            self.nsid(),
            self.cdw10_15.map(|d| d.get()),
        )
    }
}

/// Completion Queue Entry (Base 2.0, 3.3.3.2).
#[derive(
    Clone,
    Copy,
    Default,
    Debug,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct Cqe {
    /// Dwords 0 and 1; Fabrics responses use all 8 bytes.
    pub result: U64,
    /// SQ head pointer.
    pub sqhd: U16,
    /// SQ identifier; reserved in Fabrics.
    pub sqid: U16,
    /// Command identifier.
    pub cid: U16,
    /// Bit 0: phase tag (zero in Fabrics); bits 15:1: status (Base 2.0, 3.3.3.2.1).
    pub status: U16,
}
const _: () = assert!(size_of::<Cqe>() == 16 && align_of::<Cqe>() == 1);

impl Cqe {
    /// Phase tag zero, as in Fabrics.
    pub fn new(result: u64, sqhd: u16, sqid: u16, cid: u16, status: Status) -> Self {
        Self {
            result: U64::new(result),
            sqhd: U16::new(sqhd),
            sqid: U16::new(sqid),
            cid: U16::new(cid),
            status: U16::new(status.0 << 1),
        }
    }
    /// Dwords 0 and 1.
    pub fn result(&self) -> u64 {
        self.result.get()
    }
    /// SQ head pointer.
    pub fn sqhd(&self) -> u16 {
        self.sqhd.get()
    }
    /// SQ identifier.
    pub fn sqid(&self) -> u16 {
        self.sqid.get()
    }
    /// Command identifier.
    pub fn cid(&self) -> u16 {
        self.cid.get()
    }
    /// Status without the phase tag.
    pub fn status(&self) -> Status {
        Status(self.status.get() >> 1)
    }
    /// Phase tag.
    pub fn phase(&self) -> bool {
        self.status.get() & 1 != 0
    }
    /// Sets the phase tag (memory-based transports).
    pub fn with_phase(mut self, phase: bool) -> Self {
        self.status = U16::new((self.status.get() & !1) | u16::from(phase));
        self
    }
}

/// SGL Descriptor (Base 2.0, 4.1.2).
#[derive(
    Clone,
    Copy,
    Default,
    Debug,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct SglDescriptor {
    /// Address; capsule offset (subtype 1h); reserved for transport data blocks.
    pub address: U64,
    /// Length in bytes.
    pub length: U32,
    /// Reserved in the types used here.
    pub reserved: [u8; 3],
    /// Type in bits 7:4, subtype in bits 3:0.
    pub kind: u8,
}
const _: () = assert!(size_of::<SglDescriptor>() == 16 && align_of::<SglDescriptor>() == 1);

impl SglDescriptor {
    /// Data block at an address (type 0h, subtype 0h).
    pub const DATA_BLOCK_ADDRESS: u8 = 0x00;
    /// In-capsule data at an offset (type 0h, subtype 1h).
    pub const DATA_BLOCK_OFFSET: u8 = 0x01;
    /// Segment (type 2h, subtype 0h).
    pub const SEGMENT: u8 = 0x20;
    /// Last segment (type 3h, subtype 0h).
    pub const LAST_SEGMENT: u8 = 0x30;
    /// Data in transport PDUs (type 5h, subtype Ah).
    pub const TRANSPORT_DATA_BLOCK: u8 = 0x5A;

    /// A transport data block of `length_bytes`.
    pub fn transport(length_bytes: u32) -> Self {
        Self {
            length: U32::new(length_bytes),
            kind: Self::TRANSPORT_DATA_BLOCK,
            ..Self::default()
        }
    }
    /// In-capsule data; the offset counts from ICDOFF.
    pub fn in_capsule(offset_bytes: u64, length_bytes: u32) -> Self {
        Self {
            address: U64::new(offset_bytes),
            length: U32::new(length_bytes),
            kind: Self::DATA_BLOCK_OFFSET,
            ..Self::default()
        }
    }
    /// Address, or capsule offset.
    pub fn address(&self) -> u64 {
        self.address.get()
    }
    /// Length in bytes.
    pub fn length_bytes(&self) -> u32 {
        self.length.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sqe_fields_are_where_the_specification_puts_them() {
        let mut raw = [0u8; 64];
        raw[0] = 0x01;
        raw[1] = 0x41;
        raw[2..4].copy_from_slice(&0x1234u16.to_le_bytes());
        raw[4..8].copy_from_slice(&7u32.to_le_bytes());
        raw[24 + 8..24 + 12].copy_from_slice(&4096u32.to_le_bytes());
        raw[39] = 0x5A;
        raw[40..48].copy_from_slice(&0x1122_3344_5566_7788u64.to_le_bytes());
        raw[60..64].copy_from_slice(&0xAABB_CCDDu32.to_le_bytes());
        let sqe = Sqe::read_from_bytes(&raw).unwrap();
        assert_eq!((sqe.opcode(), sqe.cid(), sqe.nsid()), (1, 0x1234, 7));
        assert_eq!((sqe.fuse(), sqe.psdt()), (1, 1));
        assert_eq!(sqe.cdw64(10), 0x1122_3344_5566_7788);
        assert_eq!((sqe.cdw(0), sqe.cdw(15)), (0x1234_4101, 0xAABB_CCDD));
        assert_eq!(sqe.sgl(), SglDescriptor::transport(4096));
        assert_eq!(sqe.with_cdw(15, 3).cdw(15), 3);
    }

    #[test]
    fn cqe_status_shifts_past_the_phase_tag() {
        let cqe = Cqe::new(5, 6, 7, 8, Status::INVALID_FIELD.with_dnr());
        assert_eq!(cqe.status.get(), 0x8004);
        assert_eq!(cqe.as_bytes()[14..], [0x04, 0x80]);
        assert!(cqe.with_phase(true).phase() && !cqe.phase());
        assert_eq!(
            cqe.with_phase(true).status(),
            Status::INVALID_FIELD.with_dnr()
        );
    }
}
