//! Layouts of Identify data; [`crate::controller`] fills them.
//!
//! Reserved bytes, and fields of missing features, are named `reserved<offset>` and stay zero.

use std::mem::offset_of;
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// CNS values (Base 2.0, 5.17.1, figure 273).
pub mod cns {
    /// Identify Namespace (NVM).
    pub const NAMESPACE: u8 = 0x00;
    /// Identify Controller.
    pub const CONTROLLER: u8 = 0x01;
    /// Active Namespace ID list.
    pub const ACTIVE_NAMESPACES: u8 = 0x02;
    /// Namespace Identification Descriptors.
    pub const NAMESPACE_DESCRIPTORS: u8 = 0x03;
    /// Command-set-specific namespace.
    pub const CSI_NAMESPACE: u8 = 0x05;
    /// Command-set-specific controller.
    pub const CSI_CONTROLLER: u8 = 0x06;
    /// Command-set-specific active namespaces.
    pub const CSI_ACTIVE_NAMESPACES: u8 = 0x07;
    /// Command-set-independent namespace.
    pub const INDEPENDENT_NAMESPACE: u8 = 0x08;
    /// Allocated Namespace ID list.
    pub const ALLOCATED_NAMESPACES: u8 = 0x10;
    /// Identify Namespace of an allocated namespace.
    pub const ALLOCATED_NAMESPACE: u8 = 0x11;
    /// Controller list of a namespace.
    pub const NAMESPACE_CONTROLLERS: u8 = 0x12;
    /// Controller list of the subsystem.
    pub const CONTROLLERS: u8 = 0x13;
    /// Primary Controller Capabilities.
    pub const PRIMARY_CONTROLLER: u8 = 0x14;
    /// Secondary Controller list.
    pub const SECONDARY_CONTROLLERS: u8 = 0x15;
    /// Identify I/O Command Set.
    pub const COMMAND_SETS: u8 = 0x1C;
}

/// Size of Identify data (Base 2.0, 5.17.1).
pub const IDENTIFY_BYTES: usize = 4096;

/// CSI of the NVM command set (Base 2.0, figure 274).
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
    /// Serial number, space-padded ASCII.
    pub sn: [u8; 20],
    /// Model number, space-padded ASCII.
    pub mn: [u8; 40],
    /// Firmware revision, space-padded ASCII.
    pub fr: [u8; 8],
    /// Recommended Arbitration Burst.
    pub rab: u8,
    /// IEEE OUI Identifier.
    pub ieee: [u8; 3],
    /// Multi-path: bit 0 ports, bit 1 controllers, bit 3 ANA.
    pub cmic: u8,
    /// MDTS: log2 of CAP.MPSMIN pages.
    pub mdts: u8,
    /// Controller ID.
    pub cntlid: U16,
    /// The VS property.
    pub ver: U32,
    /// RTD3 latencies.
    pub reserved84: [u8; 8],
    /// Optional asynchronous events.
    pub oaes: U32,
    /// Attributes: bit 0 128-bit Host Identifier.
    pub ctratt: U32,
    /// Read Recovery Levels; reserved.
    pub reserved100: [u8; 11],
    /// Type: 1 I/O, 2 Discovery, 3 Administrative.
    pub cntrltype: u8,
    /// FRU GUID.
    pub fguid: [u8; 16],
    /// Retry delays 1–3, in 100 ms.
    pub crdt: [U16; 3],
    /// Reserved.
    pub reserved134: [u8; 119],
    /// NVM Subsystem Report: bit 0 storage device.
    pub nvmsr: u8,
    /// VPD writes; Management Endpoints in PCIe and SMBus.
    pub reserved254: [u8; 2],
    /// Optional admin commands.
    pub oacs: U16,
    /// Abort Command Limit, 0's based.
    pub acl: u8,
    /// Event Request Limit, 0's based.
    pub aerl: u8,
    /// Firmware: bit 0 slot 1 read-only, bits 3:1 slots, bit 4 activation without reset.
    pub frmw: u8,
    /// Log Page Attributes.
    pub lpa: u8,
    /// Error log entries, 0's based.
    pub elpe: u8,
    /// Power states, 0's based.
    pub npss: u8,
    /// Vendor, power, thermal, host memory.
    pub reserved264: [u8; 16],
    /// Total NVM capacity, bytes.
    pub tnvmcap: U128,
    /// Unallocated NVM capacity, bytes.
    pub unvmcap: U128,
    /// Replay protection, self-test.
    pub reserved312: [u8; 7],
    /// Firmware Update Granularity, 4 KiB; FFh: any.
    pub fwug: u8,
    /// Keep alive granularity, 100 ms.
    pub kas: U16,
    /// Thermal, sanitize, host memory, sets, groups.
    pub reserved322: [u8; 20],
    /// ANA transition time, seconds.
    pub anatt: u8,
    /// ANA capabilities.
    pub anacap: u8,
    /// Highest ANA group.
    pub anagrpmax: U32,
    /// ANA groups.
    pub nanagrpid: U32,
    /// Persistent event log, domains; reserved.
    pub reserved352: [u8; 160],
    /// Submission entry size, log2: 3:0 required, 7:4 maximum.
    pub sqes: u8,
    /// Completion entry size, log2: 3:0 required, 7:4 maximum.
    pub cqes: u8,
    /// Outstanding commands; mandatory in Fabrics.
    pub maxcmd: U16,
    /// Highest valid NSID.
    pub nn: U32,
    /// Optional NVM commands.
    pub oncs: U16,
    /// Fused: bit 0 Compare and Write.
    pub fuses: U16,
    /// Format NVM: bit 0 format of all namespaces, bit 1 erase of all, bit 3 NSID FFFFFFFFh
    /// unsupported.
    pub fna: u8,
    /// Write cache: bit 0 present, bits 2:1 Flush with NSID FFFFFFFFh.
    pub vwc: u8,
    /// Atomic write unit, 0's based.
    pub awun: U16,
    /// Atomic write unit, power fail, 0's based.
    pub awupf: U16,
    /// Vendor command configuration.
    pub icsvscc: u8,
    /// Namespace Write Protection.
    pub nwpc: u8,
    /// Atomic compare-and-write unit, 0's based.
    pub acwu: U16,
    /// Copy descriptor formats.
    pub cdfs: U16,
    /// SGL support.
    pub sgls: U32,
    /// Maximum namespaces allowed.
    pub mnan: U32,
    /// Domain limits; reserved.
    pub reserved544: [u8; 224],
    /// Subsystem NQN, zero-terminated.
    pub subnqn: [u8; 256],
    /// Reserved.
    pub reserved1024: [u8; 768],
    /// Fabrics: I/O command capsule, in 16 bytes.
    pub ioccsz: U32,
    /// Fabrics: I/O response capsule, in 16 bytes.
    pub iorcsz: U32,
    /// Fabrics: data offset in capsules, in 16 bytes.
    pub icdoff: U16,
    /// Fabrics attributes: bit 0 clear for dynamic controllers.
    pub fcatt: u8,
    /// Fabrics: SGL data block descriptors.
    pub msdbd: u8,
    /// Optional Fabrics commands: bit 0 Disconnect.
    pub ofcs: U16,
    /// Reserved.
    pub reserved1806: [u8; 242],
    /// Power states; all zero: unspecified.
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
    assert!(offset_of!(IdentifyController, nvmsr) == 253);
    assert!(offset_of!(IdentifyController, oacs) == 256);
    assert!(offset_of!(IdentifyController, npss) == 263);
    assert!(offset_of!(IdentifyController, tnvmcap) == 280);
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
    /// An I/O controller.
    pub const CNTRLTYPE_IO: u8 = 1;
    /// A Discovery controller.
    pub const CNTRLTYPE_DISCOVERY: u8 = 2;
    /// An Administrative controller.
    pub const CNTRLTYPE_ADMINISTRATIVE: u8 = 3;
}

/// Identify Namespace, NVM command set (NVM Command Set 1.0, 4.1.5.1).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct IdentifyNamespace {
    /// Size in blocks.
    pub nsze: U64,
    /// Capacity in blocks.
    pub ncap: U64,
    /// Utilization in blocks.
    pub nuse: U64,
    /// Features: see `NSFEAT_*`.
    pub nsfeat: u8,
    /// LBA formats, 0's based.
    pub nlbaf: u8,
    /// LBA format: bits 3:0.
    pub flbas: u8,
    /// Metadata Capabilities.
    pub mc: u8,
    /// Data protection capabilities.
    pub dpc: u8,
    /// Data protection settings.
    pub dps: u8,
    /// Bit 0: shared.
    pub nmic: u8,
    /// Reservation Capabilities.
    pub rescap: u8,
    /// Format Progress Indicator.
    pub fpi: u8,
    /// Deallocation: bits 2:0 value read afterwards (1: zeros), bit 3 DEAC.
    pub dlfeat: u8,
    /// Atomic write unit.
    pub nawun: U16,
    /// Atomic write unit, power fail.
    pub nawupf: U16,
    /// Atomic compare-and-write unit.
    pub nacwu: U16,
    /// Atomic boundary size.
    pub nabsn: U16,
    /// Atomic boundary offset.
    pub nabo: U16,
    /// Atomic boundary size, power fail.
    pub nabspf: U16,
    /// Optimal I/O boundary, blocks; 0: none.
    pub noiob: U16,
    /// NVM capacity, bytes.
    pub nvmcap: U128,
    /// Write granularity, 0's based blocks.
    pub npwg: U16,
    /// Write alignment, 0's based blocks.
    pub npwa: U16,
    /// Deallocate granularity, 0's based blocks.
    pub npdg: U16,
    /// Deallocate alignment, 0's based blocks.
    pub npda: U16,
    /// Optimal write size, 0's based blocks.
    pub nows: U16,
    /// Copy limits; reserved.
    pub reserved74: [u8; 18],
    /// ANA group.
    pub anagrpid: U32,
    /// Reserved.
    pub reserved96: [u8; 3],
    /// Bit 0: write protected.
    pub nsattr: u8,
    /// NVM set.
    pub nvmsetid: U16,
    /// Endurance group.
    pub endgid: U16,
    /// NGUID, big endian.
    pub nguid: [u8; 16],
    /// EUI-64; zero: none.
    pub eui64: [u8; 8],
    /// Formats: metadata bytes 15:0, LBADS 23:16, RP 25:24.
    pub lbaf: [U32; 64],
    /// Vendor Specific.
    pub vendor: [u8; 3712],
}
const _: () = {
    assert!(size_of::<IdentifyNamespace>() == IDENTIFY_BYTES);
    assert!(offset_of!(IdentifyNamespace, rescap) == 31);
    assert!(offset_of!(IdentifyNamespace, dlfeat) == 33);
    assert!(offset_of!(IdentifyNamespace, nvmcap) == 48);
    assert!(offset_of!(IdentifyNamespace, npwg) == 64);
    assert!(offset_of!(IdentifyNamespace, nows) == 72);
    assert!(offset_of!(IdentifyNamespace, anagrpid) == 92);
    assert!(offset_of!(IdentifyNamespace, nsattr) == 99);
    assert!(offset_of!(IdentifyNamespace, nguid) == 104);
    assert!(offset_of!(IdentifyNamespace, lbaf) == 128);
};

impl IdentifyNamespace {
    /// Thin provisioning.
    pub const NSFEAT_THINP: u8 = 1 << 0;
    /// NGUID and EUI64 are never reused.
    pub const NSFEAT_UIDREUSE: u8 = 1 << 3;
    /// NPWG, NPWA, NPDG, NPDA and NOWS are defined.
    pub const NSFEAT_OPTPERF: u8 = 1 << 4;
    /// The block size; `None` if below 512 bytes or too large.
    pub fn block_bytes(&self) -> Option<u32> {
        let format = self.lbaf[usize::from(self.flbas & 0xF)].get();
        let shift = (format >> 16) & 0xFF;
        (9..32).contains(&shift).then(|| 1 << shift)
    }
}

/// Primary Controller Capabilities (Base 2.0, 5.17.2.13): VQ queue pairs, VI vectors.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct PrimaryController {
    /// Controller ID.
    pub cntlid: U16,
    /// Port ID.
    pub portid: U16,
    /// Resource types: bit 0 VQ, bit 1 VI.
    pub crt: u8,
    /// Reserved.
    pub reserved5: [u8; 27],
    /// VQ resources.
    pub vq: PrimaryResources,
    /// VI resources.
    pub vi: PrimaryResources,
    /// Reserved.
    pub reserved96: [u8; 4000],
}

/// One resource type in [`PrimaryController`].
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct PrimaryResources {
    /// Flexible resources of all controllers.
    pub flexible_total: U32,
    /// Flexible resources assigned to secondaries.
    pub flexible_assigned: U32,
    /// Flexible resources of the primary.
    pub flexible_primary: U16,
    /// Private resources of the primary.
    pub private_total: U16,
    /// Maximum flexible resources of a secondary.
    pub secondary_maximum: U16,
    /// Preferred granularity.
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
    /// Number of entries.
    pub count: u8,
    /// Reserved.
    pub reserved1: [u8; 31],
    /// Entries.
    pub entries: [SecondaryController; 127],
}

/// Entry of [`SecondaryControllers`].
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct SecondaryController {
    /// Secondary controller ID.
    pub scid: U16,
    /// Primary controller ID.
    pub pcid: U16,
    /// State: bit 0 online.
    pub scs: u8,
    /// Reserved.
    pub reserved5: [u8; 3],
    /// Virtual function; 0: none.
    pub vfn: U16,
    /// Flexible VQ assigned.
    pub nvq: U16,
    /// Flexible VI assigned.
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

/// NVM-specific Identify Controller (NVM Command Set 1.0, 4.1.5.4).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct NvmIdentifyController {
    /// Verify size limit.
    pub vsl: u8,
    /// Write Zeroes limit: log2 of CAP.MPSMIN pages; 0: none.
    pub wzsl: u8,
    /// Write Uncorrectable limit.
    pub wusl: u8,
    /// Dataset Management ranges; 0: no limit.
    pub dmrl: u8,
    /// Dataset Management blocks per range; 0: no limit.
    pub dmrsl: U32,
    /// Dataset Management blocks; 0: no limit.
    pub dmsl: U64,
    /// Reserved.
    pub reserved16: [u8; 4080],
}
const _: () = assert!(size_of::<NvmIdentifyController>() == IDENTIFY_BYTES);

/// Command-set-independent Identify Namespace (Base 2.0, 5.17.2.8, figure 280).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct IndependentNamespace {
    /// Features: bit 3 UIDREUSE.
    pub nsfeat: u8,
    /// As [`IdentifyNamespace::nmic`].
    pub nmic: u8,
    /// Reservation Capabilities.
    pub rescap: u8,
    /// Format progress.
    pub fpi: u8,
    /// ANA group.
    pub anagrpid: U32,
    /// As [`IdentifyNamespace::nsattr`].
    pub nsattr: u8,
    /// Reserved.
    pub reserved9: u8,
    /// NVM set.
    pub nvmsetid: U16,
    /// Endurance group.
    pub endgid: U16,
    /// Status: bit 0 ready.
    pub nstat: u8,
    /// Reserved.
    pub reserved15: [u8; 4081],
}
const _: () = assert!(size_of::<IndependentNamespace>() == IDENTIFY_BYTES);

/// Namespace descriptor types (Base 2.0, 5.17.2.3, figure 277).
pub mod nidt {
    /// 16 bytes.
    pub const NGUID: u8 = 2;
    /// 16 bytes.
    pub const UUID: u8 = 3;
    /// 1 byte.
    pub const CSI: u8 = 4;
}
