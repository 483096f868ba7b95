//! Builders of a host's commands.
//!
//! [`super::HostQueue::begin`] fills in command identifier and data pointer, as only it knows the
//! data's path. Counts are 1's based. Nothing is checked against a namespace.

use crate::fabrics::{ConnectCommand, PropertyCommand};
use crate::{Sqe, opcode};

/// Enables a controller: NVM command set, 4 KiB pages, 64- and 16-byte entries (Base 3.1.3.5).
pub const CC_ENABLE: u32 = 0x0046_0001;
/// CC.SHN: normal shutdown (Base 3.1.3.5).
pub const CC_SHN_NORMAL: u32 = 1 << 14;
/// CSTS.RDY (Base 3.1.3.6).
pub const CSTS_RDY: u32 = 1 << 0;
/// CSTS.CFS: fatal status (Base 3.1.3.6).
pub const CSTS_CFS: u32 = 1 << 1;
/// CSTS.SHST: shutdown complete (Base 3.1.3.6).
pub const CSTS_SHST_COMPLETE: u32 = 2 << 2;
/// Mask of CSTS.SHST (Base 3.1.3.6).
pub const CSTS_SHST_MASK: u32 = 3 << 2;

/// Property offsets (Base 3.1.3).
pub mod property {
    /// Controller capabilities, 8 bytes.
    pub const CAP: u32 = 0x00;
    /// Version.
    pub const VS: u32 = 0x08;
    /// Controller configuration.
    pub const CC: u32 = 0x14;
    /// Controller status.
    pub const CSTS: u32 = 0x1c;
}

/// Log page identifiers (Base 5.16.1).
pub mod log {
    /// Changed Namespace List.
    pub const CHANGED_NAMESPACES: u8 = 0x04;
    /// SMART / Health.
    pub const SMART: u8 = 0x02;
    /// Discovery.
    pub const DISCOVERY: u8 = 0x70;
}

/// CNS values of Identify (Base 5.17).
pub mod cns {
    /// A namespace.
    pub const NAMESPACE: u8 = 0x00;
    /// The controller.
    pub const CONTROLLER: u8 = 0x01;
    /// Active namespaces greater than NSID.
    pub const ACTIVE_NAMESPACES: u8 = 0x02;
    /// Namespace descriptors.
    pub const DESCRIPTORS: u8 = 0x03;
}

/// Maximum ranges (NVM Command Set 3.2.3).
pub const DSM_MAX_RANGES: usize = 256;
/// Size of a range (NVM Command Set 3.2.3).
pub const DSM_RANGE_BYTES: usize = 16;

/// Connect (Base 6.3) for 2..=65536 entries, with [`crate::fabrics::ConnectData`].
#[must_use]
pub fn connect(qid: u16, entries: u32, kato_ms: u32, disable_sq_flow_control: bool) -> Sqe {
    let mut connect = ConnectCommand::new(0, qid, entries, kato_ms);
    if disable_sq_flow_control {
        connect.cattr |= ConnectCommand::CATTR_DISABLE_SQ_FLOW_CONTROL;
    }
    connect.to_sqe()
}

/// Property Get (Base 6.5); `wide` for 8-byte properties.
#[must_use]
pub fn property_get(offset: u32, wide: bool) -> Sqe {
    PropertyCommand::get(0, offset, wide).to_sqe()
}

/// Property Set of 4 bytes (Base 6.6).
#[must_use]
pub fn property_set(offset: u32, value: u32) -> Sqe {
    PropertyCommand::set(0, offset, false, u64::from(value)).to_sqe()
}

/// Identify (Base 5.17), 4096 bytes.
#[must_use]
pub fn identify(cns: u8, nsid: u32) -> Sqe {
    Sqe::new(opcode::admin::IDENTIFY, 0)
        .with_nsid(nsid)
        .with_cdw(10, u32::from(cns))
}

/// Number of Queues (Base 5.27.1.5): 1..=65535 each way.
#[must_use]
pub fn set_number_of_queues(queues: u16) -> Sqe {
    let zero_based = u32::from(queues.max(1) - 1);
    Sqe::new(opcode::admin::SET_FEATURES, 0)
        .with_cdw(10, 0x07)
        .with_cdw(11, zero_based << 16 | zero_based)
}

/// I/O queues granted, from that result (Base 5.27.1.5).
#[must_use]
pub fn granted_queues(result: u64) -> u32 {
    let submission = result as u32 & 0xffff;
    let completion = (result as u32) >> 16;
    submission.min(completion) + 1
}

/// Asynchronous Event Configuration (Base 5.27.1.8).
#[must_use]
pub fn set_async_events(mask: u32) -> Sqe {
    Sqe::new(opcode::admin::SET_FEATURES, 0)
        .with_cdw(10, 0x0b)
        .with_cdw(11, mask)
}

/// Keep Alive (Base 5.18).
#[must_use]
pub fn keep_alive() -> Sqe {
    Sqe::new(opcode::admin::KEEP_ALIVE, 0)
}

/// Asynchronous Event Request (Base 5.2).
#[must_use]
pub fn async_event_request() -> Sqe {
    Sqe::new(opcode::admin::ASYNC_EVENT_REQUEST, 0)
}

/// Get Log Page (Base 5.16); `bytes` is a multiple of 4.
#[must_use]
pub fn get_log_page(lid: u8, nsid: u32, offset_bytes: u64, bytes: u32) -> Sqe {
    let dwords = (bytes / 4).max(1) - 1;
    Sqe::new(opcode::admin::GET_LOG_PAGE, 0)
        .with_nsid(nsid)
        .with_cdw(10, dwords << 16 | u32::from(lid))
        .with_cdw(11, dwords >> 16)
        .with_cdw64(12, offset_bytes)
}

/// Read (NVM Command Set 3.2.4), 1..=65536 blocks.
#[must_use]
pub fn read(nsid: u32, lba: u64, blocks: u32) -> Sqe {
    ranged(opcode::nvm::READ, nsid, lba, blocks)
}

/// Write (NVM Command Set 3.2.6), 1..=65536 blocks.
#[must_use]
pub fn write(nsid: u32, lba: u64, blocks: u32, fua: bool) -> Sqe {
    let sqe = ranged(opcode::nvm::WRITE, nsid, lba, blocks);
    let fua_bit = if fua { 1 << 30 } else { 0 };
    sqe.with_cdw(12, sqe.cdw(12) | fua_bit)
}

/// Flush (Base 7.1).
#[must_use]
pub fn flush(nsid: u32) -> Sqe {
    Sqe::new(opcode::nvm::FLUSH, 0).with_nsid(nsid)
}

/// Write Zeroes (NVM Command Set 3.2.8), 1..=65536 blocks, optionally DEAC.
#[must_use]
pub fn write_zeroes(nsid: u32, lba: u64, blocks: u32, deallocate: bool) -> Sqe {
    let sqe = ranged(opcode::nvm::WRITE_ZEROES, nsid, lba, blocks);
    let deac_bit = if deallocate { 1 << 25 } else { 0 };
    sqe.with_cdw(12, sqe.cdw(12) | deac_bit)
}

/// Deallocate (NVM Command Set 3.2.3) with 1..=256 ranges as data.
#[must_use]
pub fn deallocate(nsid: u32, ranges: usize) -> Sqe {
    let zero_based = ranges.clamp(1, DSM_MAX_RANGES) as u32 - 1;
    Sqe::new(opcode::nvm::DATASET_MANAGEMENT, 0)
        .with_nsid(nsid)
        .with_cdw(10, zero_based)
        .with_cdw(11, 1 << 2)
}

/// A range (NVM Command Set 3.2.3, figure 41).
#[must_use]
pub fn dsm_range(lba: u64, blocks: u32) -> [u8; DSM_RANGE_BYTES] {
    let mut range = [0; DSM_RANGE_BYTES];
    range[4..8].copy_from_slice(&blocks.to_le_bytes());
    range[8..].copy_from_slice(&lba.to_le_bytes());
    range
}

fn ranged(opcode: u8, nsid: u32, lba: u64, blocks: u32) -> Sqe {
    Sqe::new(opcode, 0)
        .with_nsid(nsid)
        .with_cdw64(10, lba)
        .with_cdw(12, blocks.clamp(1, 1 << 16) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_specification_puts_them() {
        let sqe = write(1, 0x1_0000_0002, 8, true);
        assert_eq!((sqe.opcode(), sqe.nsid()), (1, 1));
        assert_eq!((sqe.cdw(10), sqe.cdw(11)), (2, 1));
        assert_eq!(sqe.cdw(12), 1 << 30 | 7);
        assert_eq!(write_zeroes(1, 0, 1, true).cdw(12), 1 << 25);
        assert_eq!(read(1, 0, 65536).cdw(12), 65535);
        assert_eq!(deallocate(1, 3).cdw(10), 2);
        assert_eq!(dsm_range(5, 6)[4..9], [6, 0, 0, 0, 5]);
        let log = get_log_page(0x70, 0, 1024, 0x50_0000);
        assert_eq!((log.cdw(10), log.cdw(11)), (0xffff_0070, 0x13));
        assert_eq!(log.cdw(12), 1024);
        assert_eq!(set_number_of_queues(4).cdw(11), 0x0003_0003);
        assert_eq!(granted_queues(0x0001_0003), 2);
    }
}
