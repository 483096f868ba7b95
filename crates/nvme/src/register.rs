//! Controller properties (registers).
//!
//! Purpose: offsets and bit layouts of the properties that Forebay's controllers have, the same
//! for Fabrics (Property Get/Set) and for memory-mapped transports. Does NOT hold values or react
//! to writes: that is [`crate::controller`].

use bitfield_struct::bitfield;

/// Offset of Controller Capabilities, 8 bytes (Base 2.0, 3.1.3.1).
pub const CAP: u32 = 0x00;
/// Offset of Version, 4 bytes (Base 2.0, 3.1.3.2).
pub const VS: u32 = 0x08;
/// Offset of Controller Configuration, 4 bytes (Base 2.0, 3.1.3.5).
pub const CC: u32 = 0x14;
/// Offset of Controller Status, 4 bytes (Base 2.0, 3.1.3.6).
pub const CSTS: u32 = 0x1C;
/// Offset of Controller Ready Timeouts, 4 bytes (Base 2.0, 3.1.3.21).
pub const CRTO: u32 = 0x68;

/// The version that Forebay's controllers report, in VS and in Identify: 2.0.0 (Base 2.0,
/// 3.1.3.2: MJR in bits 31:16, MNR in bits 15:8, TER in bits 7:0).
pub const VERSION_2_0: u32 = 0x0002_0000;

/// Controller Capabilities (Base 2.0, 3.1.3.1).
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct Cap {
    /// Maximum Queue Entries Supported, 0's based.
    pub mqes: u16,
    /// Contiguous Queues Required; 1 for Fabrics.
    pub cqr: bool,
    /// Arbitration Mechanism Supported: 0 is round robin alone.
    #[bits(2)]
    pub ams: u8,
    #[bits(5)]
    __: u8,
    /// Timeout for CSTS.RDY to follow CC.EN, in 500 ms.
    pub to: u8,
    /// Doorbell Stride; 0 for Fabrics.
    #[bits(4)]
    pub dstrd: u8,
    /// NVM Subsystem Reset Supported.
    pub nssrs: bool,
    /// Command Sets Supported: bit 0 NVM, bit 6 others by CSI, bit 7 none.
    pub css: u8,
    /// Boot Partition Support.
    pub bps: bool,
    /// Controller Power Scope.
    #[bits(2)]
    pub cps: u8,
    /// Memory Page Size Minimum, 2^(12 + MPSMIN) bytes: the unit of MDTS.
    #[bits(4)]
    pub mpsmin: u8,
    /// Memory Page Size Maximum.
    #[bits(4)]
    pub mpsmax: u8,
    /// Persistent Memory Region Supported.
    pub pmrs: bool,
    /// Controller Memory Buffer Supported.
    pub cmbs: bool,
    /// NVM Subsystem Shutdown Supported.
    pub nsss: bool,
    /// Controller Ready Modes Supported: bit 0 with media (mandatory in 2.0), bit 1 independent.
    #[bits(2)]
    pub crms: u8,
    #[bits(3)]
    __: u8,
}

impl Cap {
    /// CSS bit 0: the NVM command set.
    pub const CSS_NVM: u8 = 1 << 0;
    /// CRMS bit 0: Controller Ready With Media Support.
    pub const CRMS_WITH_MEDIA: u8 = 1 << 0;
}

/// Controller Configuration (Base 2.0, 3.1.3.5).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Cc {
    /// Enable.
    pub en: bool,
    #[bits(3)]
    __: u8,
    /// I/O Command Set Selected: 0 NVM, 6 all supported, 7 Admin only.
    #[bits(3)]
    pub css: u8,
    /// Memory Page Size, 2^(12 + MPS) bytes.
    #[bits(4)]
    pub mps: u8,
    /// Arbitration Mechanism Selected.
    #[bits(3)]
    pub ams: u8,
    /// Shutdown Notification: 1 normal, 2 abrupt.
    #[bits(2)]
    pub shn: u8,
    /// I/O Submission Queue Entry Size, a power of two: 6.
    #[bits(4)]
    pub iosqes: u8,
    /// I/O Completion Queue Entry Size, a power of two: 4.
    #[bits(4)]
    pub iocqes: u8,
    /// Controller Ready Independent of Media Enable.
    pub crime: bool,
    #[bits(7)]
    __: u8,
}

/// Controller Status (Base 2.0, 3.1.3.6).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Csts {
    /// Ready.
    pub rdy: bool,
    /// Controller Fatal Status.
    pub cfs: bool,
    /// Shutdown Status: see `SHST_*`.
    #[bits(2)]
    pub shst: u8,
    /// NVM Subsystem Reset Occurred.
    pub nssro: bool,
    /// Processing Paused.
    pub pp: bool,
    /// Shutdown Type.
    pub st: bool,
    #[bits(25)]
    __: u32,
}

impl Csts {
    /// SHST: no shutdown has been requested.
    pub const SHST_NORMAL: u8 = 0;
    /// SHST: shutdown processing is occurring.
    pub const SHST_OCCURRING: u8 = 1;
    /// SHST: shutdown processing is complete.
    pub const SHST_COMPLETE: u8 = 2;
}

/// Controller Ready Timeouts (Base 2.0, 3.1.3.21).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Crto {
    /// Controller Ready With Media Timeout, in 500 ms.
    pub crwmt: u16,
    /// Controller Ready Independent of Media Timeout, in 500 ms.
    pub crimt: u16,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_where_the_specification_puts_them() {
        let cap = Cap::new()
            .with_mqes(127)
            .with_cqr(true)
            .with_to(60)
            .with_css(1)
            .with_crms(1);
        assert_eq!(
            cap.into_bits(),
            127 | 1 << 16 | 60 << 24 | 1 << 37 | 1 << 59
        );
        // What Linux writes to enable a controller.
        let cc = Cc::from_bits(0x0046_0001);
        assert_eq!(
            (cc.en(), cc.iosqes(), cc.iocqes(), cc.shn(), cc.mps()),
            (true, 6, 4, 0, 0)
        );
        assert_eq!(Cc::from_bits(0x0046_4001).shn(), 1);
        assert_eq!(
            Csts::new()
                .with_shst(Csts::SHST_COMPLETE)
                .with_cfs(true)
                .into_bits(),
            0xA
        );
    }
}
