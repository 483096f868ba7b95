//! Identify data structures.
//!
//! Purpose: layouts of what Identify returns, with their sizes and the offsets that matter
//! asserted. Reserved stretches and fields of features that Forebay doesn't have are named
//! `reserved<offset>` and stay zero. Does NOT fill them: see [`crate::controller`].

use std::mem::offset_of;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// CNS values of the Identify command (Base 2.0, 5.17.1, figure 273).
pub mod cns {
    /// Identify Namespace, NVM command set.
    pub const NAMESPACE: u8 = 0x00;
    /// Identify Controller.
    pub const CONTROLLER: u8 = 0x01;
    /// Active Namespace ID list.
    pub const ACTIVE_NAMESPACES: u8 = 0x02;
    /// Namespace Identification Descriptor list.
    pub const NAMESPACE_DESCRIPTORS: u8 = 0x03;
    /// I/O Command Set specific Identify Namespace.
    pub const CSI_NAMESPACE: u8 = 0x05;
    /// I/O Command Set specific Identify Controller.
    pub const CSI_CONTROLLER: u8 = 0x06;
    /// I/O Command Set specific Active Namespace ID list.
    pub const CSI_ACTIVE_NAMESPACES: u8 = 0x07;
    /// I/O Command Set Independent Identify Namespace.
    pub const INDEPENDENT_NAMESPACE: u8 = 0x08;
    /// Controller list, of those that a namespace is attached to.
    pub const NAMESPACE_CONTROLLERS: u8 = 0x12;
    /// Controller list, of the subsystem.
    pub const CONTROLLERS: u8 = 0x13;
    /// Primary Controller Capabilities.
    pub const PRIMARY_CONTROLLER: u8 = 0x14;
    /// Secondary Controller list.
    pub const SECONDARY_CONTROLLERS: u8 = 0x15;
    /// Identify I/O Command Set.
    pub const COMMAND_SETS: u8 = 0x1C;
}

/// Bytes that every Identify command transfers (Base 2.0, 5.17.1).
pub const IDENTIFY_BYTES: usize = 4096;

/// Command Set Identifier of the NVM command set (Base 2.0, figure 274).
pub const CSI_NVM: u8 = 0x00;

/// Identify Controller (Base 2.0, 5.17.2.1, figure 275; NVM Command Set 1.0, 4.1.5.2).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct IdentifyController {
    /// PCI Vendor ID.
    pub vid: U16,
    /// PCI Subsystem Vendor ID.
    pub ssvid: U16,
    /// Serial Number, ASCII, padded with spaces.
    pub sn: [u8; 20],
    /// Model Number, ASCII, padded with spaces.
    pub mn: [u8; 40],
    /// Firmware Revision, ASCII, padded with spaces.
    pub fr: [u8; 8],
    /// Recommended Arbitration Burst.
    pub rab: u8,
    /// IEEE OUI Identifier.
    pub ieee: [u8; 3],
    /// Controller Multi-Path I/O and Namespace Sharing: bit 0 ports, bit 1 controllers, bit 3 ANA.
    pub cmic: u8,
    /// Maximum Data Transfer Size: a power of two, in units of CAP.MPSMIN pages.
    pub mdts: u8,
    /// Controller ID.
    pub cntlid: U16,
    /// Version, as in the VS property.
    pub ver: U32,
    /// RTD3 latencies.
    pub reserved84: [u8; 8],
    /// Optional Asynchronous Events Supported.
    pub oaes: U32,
    /// Controller Attributes: bit 0 128-bit Host Identifier.
    pub ctratt: U32,
    /// Read Recovery Levels; reserved.
    pub reserved100: [u8; 11],
    /// Controller Type: 1 I/O, 2 Discovery, 3 Administrative.
    pub cntrltype: u8,
    /// FRU Globally Unique Identifier.
    pub fguid: [u8; 16],
    /// Command Retry Delay Times 1 to 3, in 100 ms.
    pub crdt: [U16; 3],
    /// Reserved; NVMe-MI fields.
    pub reserved134: [u8; 122],
    /// Optional Admin Command Support.
    pub oacs: U16,
    /// Abort Command Limit, 0's based.
    pub acl: u8,
    /// Asynchronous Event Request Limit, 0's based.
    pub aerl: u8,
    /// Firmware Updates: bit 0 slot 1 read only, bits 3:1 the number of slots.
    pub frmw: u8,
    /// Log Page Attributes.
    pub lpa: u8,
    /// Error Log Page Entries, 0's based.
    pub elpe: u8,
    /// Number of Power States Support, 0's based.
    pub npss: u8,
    /// Vendor command configuration, power transitions, thermal and host memory fields.
    pub reserved264: [u8; 56],
    /// Keep Alive Support: granularity in 100 ms.
    pub kas: U16,
    /// Thermal management, sanitize, host memory, sets, groups.
    pub reserved322: [u8; 20],
    /// ANA Transition Time, seconds.
    pub anatt: u8,
    /// Asymmetric Namespace Access Capabilities.
    pub anacap: u8,
    /// ANA Group Identifier Maximum.
    pub anagrpmax: U32,
    /// Number of ANA Group Identifiers.
    pub nanagrpid: U32,
    /// Persistent event log, domains; reserved.
    pub reserved352: [u8; 160],
    /// Submission Queue Entry Size: required in bits 3:0, maximum in bits 7:4.
    pub sqes: u8,
    /// Completion Queue Entry Size: required in bits 3:0, maximum in bits 7:4.
    pub cqes: u8,
    /// Maximum Outstanding Commands; mandatory for Fabrics.
    pub maxcmd: U16,
    /// Number of Namespaces: the highest valid NSID.
    pub nn: U32,
    /// Optional NVM Command Support.
    pub oncs: U16,
    /// Fused Operation Support: bit 0 Compare and Write.
    pub fuses: U16,
    /// Format NVM Attributes.
    pub fna: u8,
    /// Volatile Write Cache: bit 0 present, bits 2:1 what Flush does with NSID FFFFFFFFh.
    pub vwc: u8,
    /// Atomic Write Unit Normal, 0's based blocks.
    pub awun: U16,
    /// Atomic Write Unit Power Fail, 0's based blocks.
    pub awupf: U16,
    /// I/O Command Set Vendor Specific Command Configuration.
    pub icsvscc: u8,
    /// Namespace Write Protection Capabilities.
    pub nwpc: u8,
    /// Atomic Compare & Write Unit, 0's based blocks.
    pub acwu: U16,
    /// Copy Descriptor Formats Supported.
    pub cdfs: U16,
    /// SGL Support.
    pub sgls: U32,
    /// Maximum Number of Allowed Namespaces.
    pub mnan: U32,
    /// Domain limits; reserved.
    pub reserved544: [u8; 224],
    /// NVM Subsystem NVMe Qualified Name, zero-terminated.
    pub subnqn: [u8; 256],
    /// Reserved.
    pub reserved1024: [u8; 768],
    /// I/O Queue Command Capsule Supported Size, in 16 bytes (Fabrics).
    pub ioccsz: U32,
    /// I/O Queue Response Capsule Supported Size, in 16 bytes (Fabrics).
    pub iorcsz: U32,
    /// In Capsule Data Offset, in 16 bytes (Fabrics).
    pub icdoff: U16,
    /// Fabrics Controller Attributes: bit 0 is 0 for the dynamic controller model.
    pub fcatt: u8,
    /// Maximum SGL Data Block Descriptors (Fabrics).
    pub msdbd: u8,
    /// Optional Fabric Commands Support: bit 0 Disconnect.
    pub ofcs: U16,
    /// Reserved.
    pub reserved1806: [u8; 242],
    /// Power State Descriptors 0 to 31; all zero says nothing about power.
    pub psd: [[u8; 32]; 32],
    /// Vendor Specific.
    pub vendor: [u8; 1024],
}
const _: () = {
    assert!(size_of::<IdentifyController>() == IDENTIFY_BYTES);
    assert!(offset_of!(IdentifyController, cmic) == 76);
    assert!(offset_of!(IdentifyController, ver) == 80);
    assert!(offset_of!(IdentifyController, oaes) == 92);
    assert!(offset_of!(IdentifyController, cntrltype) == 111);
    assert!(offset_of!(IdentifyController, crdt) == 128);
    assert!(offset_of!(IdentifyController, oacs) == 256);
    assert!(offset_of!(IdentifyController, npss) == 263);
    assert!(offset_of!(IdentifyController, kas) == 320);
    assert!(offset_of!(IdentifyController, anatt) == 342);
    assert!(offset_of!(IdentifyController, nanagrpid) == 348);
    assert!(offset_of!(IdentifyController, sqes) == 512);
    assert!(offset_of!(IdentifyController, fuses) == 522);
    assert!(offset_of!(IdentifyController, acwu) == 532);
    assert!(offset_of!(IdentifyController, nn) == 516);
    assert!(offset_of!(IdentifyController, vwc) == 525);
    assert!(offset_of!(IdentifyController, sgls) == 536);
    assert!(offset_of!(IdentifyController, subnqn) == 768);
    assert!(offset_of!(IdentifyController, ioccsz) == 1792);
    assert!(offset_of!(IdentifyController, ofcs) == 1804);
    assert!(offset_of!(IdentifyController, psd) == 2048);
};

impl IdentifyController {
    /// CNTRLTYPE: an I/O controller.
    pub const CNTRLTYPE_IO: u8 = 1;
    /// CNTRLTYPE: a Discovery controller.
    pub const CNTRLTYPE_DISCOVERY: u8 = 2;
}

/// Identify Namespace, NVM command set (NVM Command Set 1.0, 4.1.5.1).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct IdentifyNamespace {
    /// Namespace Size, blocks.
    pub nsze: U64,
    /// Namespace Capacity, blocks.
    pub ncap: U64,
    /// Namespace Utilization, blocks.
    pub nuse: U64,
    /// Namespace Features: bit 0 THINP, bit 3 UIDREUSE, bit 4 OPTPERF.
    pub nsfeat: u8,
    /// Number of LBA Formats, 0's based.
    pub nlbaf: u8,
    /// Formatted LBA Size: the format's index in bits 3:0.
    pub flbas: u8,
    /// Metadata Capabilities.
    pub mc: u8,
    /// End-to-end Data Protection Capabilities.
    pub dpc: u8,
    /// End-to-end Data Protection Type Settings.
    pub dps: u8,
    /// Namespace Multi-path I/O and Namespace Sharing: bit 0 shared.
    pub nmic: u8,
    /// Reservation Capabilities.
    pub rescap: u8,
    /// Format Progress Indicator.
    pub fpi: u8,
    /// Deallocate Logical Block Features: bits 2:0 what is read (1: zeros), bit 3 DEAC in Write
    /// Zeroes.
    pub dlfeat: u8,
    /// Namespace Atomic Write Unit Normal.
    pub nawun: U16,
    /// Namespace Atomic Write Unit Power Fail.
    pub nawupf: U16,
    /// Namespace Atomic Compare & Write Unit.
    pub nacwu: U16,
    /// Namespace Atomic Boundary Size Normal.
    pub nabsn: U16,
    /// Namespace Atomic Boundary Offset.
    pub nabo: U16,
    /// Namespace Atomic Boundary Size Power Fail.
    pub nabspf: U16,
    /// Namespace Optimal I/O Boundary, blocks; 0: none.
    pub noiob: U16,
    /// NVM Capacity, bytes; namespace management only.
    pub nvmcap: [u8; 16],
    /// Namespace Preferred Write Granularity, 0's based blocks.
    pub npwg: U16,
    /// Namespace Preferred Write Alignment, 0's based blocks.
    pub npwa: U16,
    /// Namespace Preferred Deallocate Granularity, 0's based blocks.
    pub npdg: U16,
    /// Namespace Preferred Deallocate Alignment, 0's based blocks.
    pub npda: U16,
    /// Namespace Optimal Write Size, 0's based blocks.
    pub nows: U16,
    /// Copy limits; reserved.
    pub reserved74: [u8; 18],
    /// ANA Group Identifier.
    pub anagrpid: U32,
    /// Reserved.
    pub reserved96: [u8; 3],
    /// Namespace Attributes: bit 0 write protected.
    pub nsattr: u8,
    /// NVM Set Identifier.
    pub nvmsetid: U16,
    /// Endurance Group Identifier.
    pub endgid: U16,
    /// Namespace Globally Unique Identifier, big endian.
    pub nguid: [u8; 16],
    /// IEEE Extended Unique Identifier; zero: none.
    pub eui64: [u8; 8],
    /// LBA Formats 0 to 63: metadata bytes in bits 15:0, LBADS in bits 23:16, RP in bits 25:24.
    pub lbaf: [U32; 64],
    /// Vendor Specific.
    pub vendor: [u8; 3712],
}
const _: () = {
    assert!(size_of::<IdentifyNamespace>() == IDENTIFY_BYTES);
    assert!(offset_of!(IdentifyNamespace, rescap) == 31);
    assert!(offset_of!(IdentifyNamespace, dlfeat) == 33);
    assert!(offset_of!(IdentifyNamespace, npwg) == 64);
    assert!(offset_of!(IdentifyNamespace, nows) == 72);
    assert!(offset_of!(IdentifyNamespace, anagrpid) == 92);
    assert!(offset_of!(IdentifyNamespace, nguid) == 104);
    assert!(offset_of!(IdentifyNamespace, lbaf) == 128);
};

impl IdentifyNamespace {
    /// NSFEAT bit 0: thin provisioning.
    pub const NSFEAT_THINP: u8 = 1 << 0;
    /// NSFEAT bit 3: NGUID and EUI64 are never reused.
    pub const NSFEAT_UIDREUSE: u8 = 1 << 3;
    /// NSFEAT bit 4: NPWG, NPWA, NPDG, NPDA and NOWS are defined.
    pub const NSFEAT_OPTPERF: u8 = 1 << 4;
    /// The formatted block size, or `None` if its format says less than 512 bytes or too much.
    pub fn block_bytes(&self) -> Option<u32> {
        let format = self.lbaf[usize::from(self.flbas & 0xF)].get();
        let shift = (format >> 16) & 0xFF;
        (9..32).contains(&shift).then(|| 1 << shift)
    }
}

/// Primary Controller Capabilities (Base 2.0, 5.17.2.13): VQ are queue pairs, VI interrupt vectors.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct PrimaryController {
    /// Controller Identifier.
    pub cntlid: U16,
    /// Port Identifier.
    pub portid: U16,
    /// Controller Resource Types: bit 0 VQ, bit 1 VI.
    pub crt: u8,
    /// Reserved.
    pub reserved5: [u8; 27],
    /// What there is of VQ.
    pub vq: PrimaryResources,
    /// What there is of VI.
    pub vi: PrimaryResources,
    /// Reserved.
    pub reserved96: [u8; 4000],
}

/// One type of resource in [`PrimaryController`].
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct PrimaryResources {
    /// Flexible Total: of primary and secondary controllers.
    pub flexible_total: U32,
    /// Flexible Assigned: to secondary controllers.
    pub flexible_assigned: U32,
    /// Flexible Allocated to Primary.
    pub flexible_primary: U16,
    /// Private Total: of the primary controller.
    pub private_total: U16,
    /// Flexible Secondary Maximum.
    pub secondary_maximum: U16,
    /// Flexible Preferred Granularity.
    pub granularity: U16,
    /// Reserved.
    pub reserved16: [u8; 16],
}

/// Secondary Controller list (Base 2.0, 5.17.2.14).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct SecondaryControllers {
    /// Number of Identifiers.
    pub count: u8,
    /// Reserved.
    pub reserved1: [u8; 31],
    /// Entries.
    pub entries: [SecondaryController; 127],
}

/// An entry of the Secondary Controller list.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct SecondaryController {
    /// Secondary Controller Identifier.
    pub scid: U16,
    /// Primary Controller Identifier.
    pub pcid: U16,
    /// Secondary Controller State: bit 0 online.
    pub scs: u8,
    /// Reserved.
    pub reserved5: [u8; 3],
    /// Virtual Function Number; 0: not a virtual function.
    pub vfn: U16,
    /// Number of VQ Flexible Resources Assigned.
    pub nvq: U16,
    /// Number of VI Flexible Resources Assigned.
    pub nvi: U16,
    /// Reserved.
    pub reserved14: [u8; 18],
}
const _: () = {
    assert!(size_of::<PrimaryController>() == IDENTIFY_BYTES);
    assert!(offset_of!(PrimaryController, vq) == 32);
    assert!(offset_of!(PrimaryController, vi) == 64 && size_of::<PrimaryResources>() == 32);
    assert!(size_of::<SecondaryControllers>() == IDENTIFY_BYTES);
    assert!(size_of::<SecondaryController>() == 32);
};

/// I/O Command Set specific Identify Controller of the NVM command set (NVM Command Set 1.0,
/// 4.1.5.4).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct NvmIdentifyController {
    /// Verify Size Limit.
    pub vsl: u8,
    /// Write Zeroes Size Limit: a power of two, in units of CAP.MPSMIN pages; 0: none.
    pub wzsl: u8,
    /// Write Uncorrectable Size Limit.
    pub wusl: u8,
    /// Dataset Management Ranges Limit; 0: none.
    pub dmrl: u8,
    /// Dataset Management Range Size Limit, blocks; 0: none.
    pub dmrsl: U32,
    /// Dataset Management Size Limit, blocks; 0: none.
    pub dmsl: U64,
    /// Reserved.
    pub reserved16: [u8; 4080],
}
const _: () = assert!(size_of::<NvmIdentifyController>() == IDENTIFY_BYTES);

/// I/O Command Set Independent Identify Namespace (Base 2.0, 5.17.2.8, figure 280).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct IndependentNamespace {
    /// Common Namespace Features: bit 3 UIDREUSE.
    pub nsfeat: u8,
    /// As [`IdentifyNamespace::nmic`].
    pub nmic: u8,
    /// Reservation Capabilities.
    pub rescap: u8,
    /// Format Progress Indicator.
    pub fpi: u8,
    /// ANA Group Identifier.
    pub anagrpid: U32,
    /// Namespace Attributes.
    pub nsattr: u8,
    /// Reserved.
    pub reserved9: u8,
    /// NVM Set Identifier.
    pub nvmsetid: U16,
    /// Endurance Group Identifier.
    pub endgid: U16,
    /// Namespace Status: bit 0 ready.
    pub nstat: u8,
    /// Reserved.
    pub reserved15: [u8; 4081],
}
const _: () = assert!(size_of::<IndependentNamespace>() == IDENTIFY_BYTES);

/// Namespace Identification Descriptor types, NIDT (Base 2.0, 5.17.2.3, figure 277).
pub mod nidt {
    /// NGUID, 16 bytes.
    pub const NGUID: u8 = 2;
    /// UUID, 16 bytes.
    pub const UUID: u8 = 3;
    /// Command Set Identifier, 1 byte.
    pub const CSI: u8 = 4;
}
