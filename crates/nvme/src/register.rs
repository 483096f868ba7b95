//! Offsets and bit layouts of controller properties; [`crate::controller`] holds the values.
//!
//! Section numbers are of Base 2.0.

use bitfield_struct::bitfield;

/// Capabilities, 8 bytes (3.1.3.1).
pub const CAP: u32 = 0x00;
/// Version, 4 bytes (3.1.3.2).
pub const VS: u32 = 0x08;
/// Configuration, 4 bytes (3.1.3.5).
pub const CC: u32 = 0x14;
/// Status, 4 bytes (3.1.3.6).
pub const CSTS: u32 = 0x1C;
/// Ready Timeouts, 4 bytes (3.1.3.21).
pub const CRTO: u32 = 0x68;

/// 2.0.0 (3.1.3.2: MJR 31:16, MNR 15:8, TER 7:0).
pub const VERSION_2_0: u32 = 0x0002_0000;

/// Controller Capabilities (3.1.3.1).
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct Cap {
    /// Maximum queue entries, 0's based.
    pub mqes: u16,
    /// Contiguous queues required; 1 for Fabrics.
    pub cqr: bool,
    /// Arbitration: 0 is round robin only.
    #[bits(2)]
    pub ams: u8,
    #[bits(5)]
    __: u8,
    /// Timeout of enable and reset, in 500 ms.
    pub to: u8,
    /// Doorbell stride; 0 for Fabrics.
    #[bits(4)]
    pub dstrd: u8,
    /// NVM subsystem reset.
    pub nssrs: bool,
    /// Command sets: bit 0 NVM, bit 6 others by CSI, bit 7 none.
    pub css: u8,
    /// Boot partitions.
    pub bps: bool,
    /// Controller power scope.
    #[bits(2)]
    pub cps: u8,
    /// Minimum page size, 2^(12 + MPSMIN); the unit of MDTS.
    #[bits(4)]
    pub mpsmin: u8,
    /// Maximum page size.
    #[bits(4)]
    pub mpsmax: u8,
    /// Persistent memory region.
    pub pmrs: bool,
    /// Controller memory buffer.
    pub cmbs: bool,
    /// NVM subsystem shutdown.
    pub nsss: bool,
    /// Ready modes: bit 0 with media (mandatory in 2.0), bit 1 independent.
    #[bits(2)]
    pub crms: u8,
    #[bits(3)]
    __: u8,
}

impl Cap {
    /// The NVM command set.
    pub const CSS_NVM: u8 = 1 << 0;
    /// Ready with media.
    pub const CRMS_WITH_MEDIA: u8 = 1 << 0;
}

/// Controller Configuration (3.1.3.5).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Cc {
    /// Enable.
    pub en: bool,
    #[bits(3)]
    __: u8,
    /// Command set: 0 NVM, 6 all supported, 7 admin only.
    #[bits(3)]
    pub css: u8,
    /// Page size, 2^(12 + MPS) bytes.
    #[bits(4)]
    pub mps: u8,
    /// Arbitration.
    #[bits(3)]
    pub ams: u8,
    /// Shutdown: 1 normal, 2 abrupt.
    #[bits(2)]
    pub shn: u8,
    /// I/O submission entry size, log2: 6.
    #[bits(4)]
    pub iosqes: u8,
    /// I/O completion entry size, log2: 4.
    #[bits(4)]
    pub iocqes: u8,
    /// Ready independent of media.
    pub crime: bool,
    #[bits(7)]
    __: u8,
}

/// Controller Status (3.1.3.6).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Csts {
    /// Ready.
    pub rdy: bool,
    /// Fatal status.
    pub cfs: bool,
    /// Shutdown: see `SHST_*`.
    #[bits(2)]
    pub shst: u8,
    /// NVM subsystem reset occurred.
    pub nssro: bool,
    /// Processing paused.
    pub pp: bool,
    /// Shutdown type.
    pub st: bool,
    #[bits(25)]
    __: u32,
}

impl Csts {
    /// No shutdown.
    pub const SHST_NORMAL: u8 = 0;
    /// Shutdown in progress.
    pub const SHST_OCCURRING: u8 = 1;
    /// Shutdown complete.
    pub const SHST_COMPLETE: u8 = 2;
}

/// Controller Ready Timeouts (3.1.3.21).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Crto {
    /// With-media timeout, in 500 ms.
    pub crwmt: u16,
    /// Independent-of-media timeout, in 500 ms.
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
        // Linux's value.
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
