//! Layouts of Fabrics commands, Connect data and the Discovery log page.
//!
//! Each command is a view of an [`Sqe`]. The engine authorizes hosts; [`crate::controller`] handles
//! properties.

use crate::{Nqn, NqnError, Sqe, Status, opcode};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Connect command (Base 2.0, 6.3).
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
pub struct ConnectCommand {
    /// Opcode, 7Fh.
    pub opcode: u8,
    /// PSDT in bits 7:6.
    pub flags: u8,
    /// Command Identifier.
    pub cid: U16,
    /// Fabrics command type, 01h.
    pub fctype: u8,
    /// Reserved.
    pub reserved5: [u8; 19],
    /// Points to the [`ConnectData`].
    pub sgl1: [u8; 16],
    /// Record format, 0.
    pub recfmt: U16,
    /// 0 creates the admin queue and the association.
    pub qid: U16,
    /// Queue size, 0's based.
    pub sqsize: U16,
    /// Attributes: see `CATTR_*`.
    pub cattr: u8,
    /// Reserved.
    pub reserved47: u8,
    /// Keep Alive Timeout, ms; admin queue.
    pub kato: U32,
    /// Reserved.
    pub reserved52: [u8; 12],
}
const _: () = assert!(size_of::<ConnectCommand>() == 64);

impl ConnectCommand {
    /// Disable submission queue flow control.
    pub const CATTR_DISABLE_SQ_FLOW_CONTROL: u8 = 1 << 2;
    /// Single I/O queues can be deleted.
    pub const CATTR_INDIVIDUAL_QUEUE_DELETION: u8 = 1 << 3;

    /// Views an [`Sqe`].
    pub fn of(sqe: &Sqe) -> &Self {
        zerocopy::transmute_ref!(sqe)
    }
    /// Converts to [`Sqe`].
    pub fn to_sqe(&self) -> Sqe {
        zerocopy::transmute!(*self)
    }
    /// A Connect for `entries` entries (2 to 65536), without SGL.
    pub fn new(cid: u16, qid: u16, entries: u32, kato_ms: u32) -> Self {
        Self {
            opcode: opcode::FABRICS,
            cid: U16::new(cid),
            fctype: opcode::fctype::CONNECT,
            qid: U16::new(qid),
            sqsize: U16::new(entries.saturating_sub(1).min(0xFFFF) as u16),
            kato: U32::new(kato_ms),
            ..Self::default()
        }
    }
}

/// Connect command data (Base 2.0, 6.3).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct ConnectData {
    /// 128-bit identifier.
    pub hostid: [u8; 16],
    /// FFFFh: any controller (admin queue).
    pub cntlid: U16,
    /// Reserved.
    pub reserved18: [u8; 238],
    /// Subsystem NQN, zero-terminated.
    pub subnqn: [u8; 256],
    /// Host NQN, zero-terminated.
    pub hostnqn: [u8; 256],
    /// Reserved.
    pub reserved768: [u8; 256],
}
const _: () = assert!(size_of::<ConnectData>() == 1024);

impl ConnectData {
    /// Any controller, dynamic model.
    pub const CNTLID_DYNAMIC: u16 = 0xFFFF;
    /// Any controller, static model.
    pub const CNTLID_STATIC_ANY: u16 = 0xFFFE;

    /// Offset of CNTLID.
    pub const OFFSET_CNTLID: u16 = 16;
    /// Offset of SUBNQN.
    pub const OFFSET_SUBNQN: u16 = 256;
    /// Offset of HOSTNQN.
    pub const OFFSET_HOSTNQN: u16 = 512;

    /// Builds Connect data.
    pub fn new(hostid: [u8; 16], cntlid: u16, subnqn: &Nqn, hostnqn: &Nqn) -> Self {
        Self {
            hostid,
            cntlid: U16::new(cntlid),
            reserved18: [0; 238],
            subnqn: subnqn.to_field(),
            hostnqn: hostnqn.to_field(),
            reserved768: [0; 256],
        }
    }
    /// The checked subsystem NQN.
    pub fn subnqn(&self) -> Result<Nqn, NqnError> {
        Nqn::from_field(&self.subnqn)
    }
    /// The checked host NQN.
    pub fn hostnqn(&self) -> Result<Nqn, NqnError> {
        Nqn::host_from_field(&self.hostnqn)
    }
}

/// Status and result of a wrong Connect field (Base 2.0, 6.3): IPO 15:0, IATTR 23:16 (1: in data).
pub fn invalid_parameter(in_data: bool, offset_bytes: u16) -> (Status, u64) {
    let result = u64::from(offset_bytes) | u64::from(in_data) << 16;
    (Status::CONNECT_INVALID_PARAMETERS.with_dnr(), result)
}

/// Property Get and Set commands (Base 2.0, 6.5, 6.6). Get reserves VALUE.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct PropertyCommand {
    /// Opcode, 7Fh.
    pub opcode: u8,
    /// Reserved.
    pub flags: u8,
    /// Command Identifier.
    pub cid: U16,
    /// Fabrics command type: 00h Set, 04h Get.
    pub fctype: u8,
    /// Reserved.
    pub reserved5: [u8; 35],
    /// Bits 2:0: 0 for 4 bytes, 1 for 8 bytes.
    pub attrib: u8,
    /// Reserved.
    pub reserved41: [u8; 3],
    /// Offset in bytes.
    pub ofst: U32,
    /// Value (Set).
    pub value: U64,
    /// Reserved.
    pub reserved56: [u8; 8],
}
const _: () = assert!(size_of::<PropertyCommand>() == 64);

impl PropertyCommand {
    /// Views an [`Sqe`].
    pub fn of(sqe: &Sqe) -> &Self {
        zerocopy::transmute_ref!(sqe)
    }
    /// Converts to [`Sqe`].
    pub fn to_sqe(&self) -> Sqe {
        zerocopy::transmute!(*self)
    }
    /// A Property Get of 4 or 8 bytes.
    pub fn get(cid: u16, offset: u32, wide: bool) -> Self {
        Self {
            opcode: opcode::FABRICS,
            cid: U16::new(cid),
            fctype: opcode::fctype::PROPERTY_GET,
            attrib: u8::from(wide),
            ofst: U32::new(offset),
            ..Self::new_zeroed()
        }
    }
    /// A Property Set of 4 or 8 bytes.
    pub fn set(cid: u16, offset: u32, wide: bool, value: u64) -> Self {
        Self {
            fctype: opcode::fctype::PROPERTY_SET,
            value: U64::new(value),
            ..Self::get(cid, offset, wide)
        }
    }
    /// Whether 8 bytes; `None`: reserved.
    pub fn wide(&self) -> Option<bool> {
        match self.attrib & 7 {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }
}

/// Disconnect command (Base 2.0, 6.4).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct DisconnectCommand {
    /// Opcode, 7Fh.
    pub opcode: u8,
    /// Reserved.
    pub flags: u8,
    /// Command Identifier.
    pub cid: U16,
    /// Fabrics command type, 08h.
    pub fctype: u8,
    /// Reserved.
    pub reserved5: [u8; 35],
    /// Record format, 0.
    pub recfmt: U16,
    /// Reserved.
    pub reserved42: [u8; 22],
}
const _: () = assert!(size_of::<DisconnectCommand>() == 64);

impl DisconnectCommand {
    /// Views an [`Sqe`].
    pub fn of(sqe: &Sqe) -> &Self {
        zerocopy::transmute_ref!(sqe)
    }
}

/// FCTYPE of an [`opcode::FABRICS`] entry.
pub fn fctype(sqe: &Sqe) -> u8 {
    sqe.nsid() as u8
}

/// Discovery log page header (Base 2.0, 5.16.1.23).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct DiscoveryLogHeader {
    /// Changes whenever the page does.
    pub genctr: U64,
    /// Number of entries.
    pub numrec: U64,
    /// Record format, 0.
    pub recfmt: U16,
    /// Reserved.
    pub reserved18: [u8; 1006],
}
const _: () = assert!(size_of::<DiscoveryLogHeader>() == 1024);

/// Discovery log page entry (Base 2.0, 5.16.1.23).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct DiscoveryLogEntry {
    /// See [`Self::TRTYPE_TCP`].
    pub trtype: u8,
    /// See `ADRFAM_*`.
    pub adrfam: u8,
    /// See `SUBTYPE_*`.
    pub subtype: u8,
    /// Bits 1:0 secure channel, bit 2 SQ flow control optional.
    pub treq: u8,
    /// Port ID.
    pub portid: U16,
    /// FFFFh: dynamic model.
    pub cntlid: U16,
    /// Largest admin SQ, at least 32.
    pub asqsz: U16,
    /// See `EFLAGS_*`.
    pub eflags: U16,
    /// Reserved.
    pub reserved12: [u8; 20],
    /// TCP port, ASCII, padded with spaces or zeros.
    pub trsvcid: [u8; 32],
    /// Reserved.
    pub reserved64: [u8; 192],
    /// Subsystem NQN, zero-terminated.
    pub subnqn: [u8; 256],
    /// Address, ASCII.
    pub traddr: [u8; 256],
    /// For TCP, byte 0 is SECTYPE (TCP 1.0, 3.1).
    pub tsas: [u8; 256],
}
const _: () = assert!(size_of::<DiscoveryLogEntry>() == 1024);

impl DiscoveryLogEntry {
    /// NVMe/TCP.
    pub const TRTYPE_TCP: u8 = 3;
    /// IPv4.
    pub const ADRFAM_IPV4: u8 = 1;
    /// IPv6.
    pub const ADRFAM_IPV6: u8 = 2;
    /// A referral to another Discovery Service.
    pub const SUBTYPE_REFERRAL: u8 = 1;
    /// A subsystem with I/O controllers.
    pub const SUBTYPE_NVM: u8 = 2;
    /// This Discovery Service.
    pub const SUBTYPE_CURRENT_DISCOVERY: u8 = 3;
    /// All entries with this bit give the same information.
    pub const EFLAGS_DUPRETINFO: u16 = 1 << 0;
    /// Persistent connections are supported.
    pub const EFLAGS_EPCSD: u16 = 1 << 1;
    /// No secure channel required.
    pub const TREQ_NO_SECURE_CHANNEL: u8 = 2;

    /// The Discovery Service at one of its ports.
    ///
    /// All return the same list; connections may persist for change events.
    pub fn itself(address: std::net::SocketAddr, portid: u16, asqsz: u16) -> Self {
        let kind = Self::SUBTYPE_CURRENT_DISCOVERY;
        Self {
            eflags: U16::new(Self::EFLAGS_DUPRETINFO | Self::EFLAGS_EPCSD),
            ..Self::tcp(kind, &Nqn::discovery(), address, portid, asqsz)
        }
    }

    /// A subsystem at a TCP address.
    pub fn tcp(
        subtype: u8,
        subnqn: &Nqn,
        address: std::net::SocketAddr,
        portid: u16,
        asqsz: u16,
    ) -> Self {
        use std::io::Write;
        let mut entry = Self {
            trtype: Self::TRTYPE_TCP,
            adrfam: if address.is_ipv4() {
                Self::ADRFAM_IPV4
            } else {
                Self::ADRFAM_IPV6
            },
            subtype,
            treq: Self::TREQ_NO_SECURE_CHANNEL,
            portid: U16::new(portid),
            cntlid: U16::new(ConnectData::CNTLID_DYNAMIC),
            asqsz: U16::new(asqsz),
            eflags: U16::new(0),
            reserved12: [0; 20],
            trsvcid: [b' '; 32],
            reserved64: [0; 192],
            subnqn: subnqn.to_field(),
            traddr: [b' '; 256],
            tsas: [0; 256],
        };
        // The fields are large enough.
        let _ = write!(&mut entry.trsvcid[..], "{}", address.port());
        let _ = write!(&mut entry.traddr[..], "{}", address.ip());
        entry
    }
    /// The checked subsystem NQN.
    pub fn subnqn(&self) -> Result<Nqn, NqnError> {
        Nqn::from_field(&self.subnqn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connect_fields_are_where_the_specification_puts_them() {
        let mut command = ConnectCommand::new(9, 3, 128, 15_000);
        command.cattr = ConnectCommand::CATTR_DISABLE_SQ_FLOW_CONTROL;
        let sqe = command.to_sqe();
        assert_eq!((sqe.opcode(), fctype(&sqe), sqe.cid()), (0x7F, 1, 9));
        let raw = sqe.as_bytes();
        assert_eq!(raw[42..48], [3, 0, 127, 0, 4, 0]);
        assert_eq!(raw[48..52], 15_000u32.to_le_bytes());
        assert_eq!(ConnectCommand::of(&sqe), &command);
    }

    #[test]
    fn property_fields_are_where_the_specification_puts_them() {
        let sqe = PropertyCommand::set(1, 0x14, false, 0x46_0001).to_sqe();
        let raw = sqe.as_bytes();
        assert_eq!((raw[0], raw[4], raw[40]), (0x7F, 0, 0));
        assert_eq!(raw[44..52], [0x14, 0, 0, 0, 1, 0, 0x46, 0]);
        assert_eq!(PropertyCommand::of(&sqe).wide(), Some(false));
    }

    #[test]
    fn connect_data_names() {
        let host = Nqn::parse("nqn.2014-08.org.nvmexpress:uuid:x").unwrap();
        let data = ConnectData::new([7; 16], 0xFFFF, &Nqn::discovery(), &host);
        let raw = data.as_bytes();
        assert_eq!(&raw[256..260], b"nqn.");
        assert_eq!(raw[16..18], [0xFF, 0xFF]);
        assert_eq!(data.hostnqn(), Ok(host));
        assert_eq!(invalid_parameter(true, 256).1, 0x1_0100);
    }

    #[test]
    fn discovery_entry_text() {
        let nqn = Nqn::parse("nqn.2026-01.io.forebay:a.b").unwrap();
        let entry = DiscoveryLogEntry::tcp(2, &nqn, "[::1]:4420".parse().unwrap(), 1, 32);
        let raw = entry.as_bytes();
        assert_eq!(raw[..4], [3, 2, 2, 2]);
        assert_eq!(&raw[32..37], b"4420 ");
        assert_eq!(&raw[512..516], b"::1 ");
        assert_eq!(entry.subnqn(), Ok(nqn));
        let itself = DiscoveryLogEntry::itself("[::1]:4420".parse().unwrap(), 1, 32);
        let raw = itself.as_bytes();
        assert_eq!((raw[2], raw[10..12].to_vec()), (3, vec![3, 0]));
        assert_eq!(itself.subnqn(), Ok(Nqn::discovery()));
    }
}
