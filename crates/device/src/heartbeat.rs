//! The heartbeat block: shows other machines, which locks don't stop, that a device is in use.
//!
//! An engine increments a counter beside the label, and a daemon watches it before it takes a pool
//! over. The content fits 512 bytes, which a device writes whole. The holder is an installation and
//! its boot, which distinguishes a cloned machine. An engine that finds another holder stops: the
//! pool was taken over.

use zerocopy::{
    FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout,
    little_endian::{U32, U64},
};

/// Offset of the block: behind what a restored partition table may cover.
pub const HEARTBEAT_OFFSET_BYTES: u64 = 576 << 10;
/// Size of the block.
pub const HEARTBEAT_BYTES: usize = 4096;
/// Time between two beats.
pub const PERIOD_MS: u64 = 1000;
/// After a longer pause, an engine checks the block before its next request.
pub const PAUSE_MS: u64 = 4000;
/// How long a daemon watches a heartbeat before it takes a pool over. No take-over of an engine is
/// that long: a stuck engine is replaced after about 2 s, and its successor beats before it waits
/// for a fence.
pub const WINDOW_MS: u64 = 10_000;
/// How long a daemon waits before it reads its claim back. Longer than [`PAUSE_MS`], so that a
/// living holder has read it, and longer than another claimant's last check and write.
pub const CLAIM_MS: u64 = 6000;
const HOST_BYTES: usize = 64;

const MAGIC: [u8; 16] = *b"Forebay beat\r\n\0\0";
const VERSION: u32 = 1;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone)]
#[repr(C)]
struct Block {
    magic: [u8; 16],
    version: U32,
    /// CRC32C of the first 512 bytes with this field zero.
    crc: U32,
    owner: [u8; 16],
    boot: [u8; 16],
    count: U64,
    stopped: U32,
    host_bytes: U32,
    host: [u8; HOST_BYTES],
    unused: [u8; 512 - 136],
}

const _: () = assert!(size_of::<Block>() == 512);

/// The holder of a pool's devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// The random id of the installation.
    pub owner: [u8; 16],
    /// The machine's boot.
    pub boot: [u8; 16],
    /// The machine's name, for messages.
    pub host: String,
}

impl Holder {
    /// Whether both are one installation in one boot.
    pub fn is(&self, other: &Self) -> bool {
        self.owner == other.owner && self.boot == other.boot
    }
}

/// The block's content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Beat {
    /// The holder.
    pub holder: Holder,
    /// Grows with each beat.
    pub count: u64,
    /// The holder ended in good order.
    pub stopped: bool,
}

impl Beat {
    /// The block's bytes.
    pub fn encode(&self) -> [u8; HEARTBEAT_BYTES] {
        let host = self.holder.host.as_bytes();
        let host = &host[..host.len().min(HOST_BYTES)];
        let mut block = Block::new_zeroed();
        block.magic = MAGIC;
        block.version = U32::new(VERSION);
        block.owner = self.holder.owner;
        block.boot = self.holder.boot;
        block.count = U64::new(self.count);
        block.stopped = U32::new(u32::from(self.stopped));
        block.host_bytes = U32::new(host.len() as u32);
        block.host[..host.len()].copy_from_slice(host);
        block.crc = U32::new(crc_fast::crc32_iscsi(block.as_bytes()));
        let mut bytes = [0; HEARTBEAT_BYTES];
        bytes[..512].copy_from_slice(block.as_bytes());
        bytes
    }

    /// Parses a block; `None` if it is damaged or no heartbeat.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (block, _) = Block::read_from_prefix(bytes).ok()?;
        let mut unsigned = block.clone();
        unsigned.crc = U32::new(0);
        let is_ours = block.magic == MAGIC
            && block.version.get() == VERSION
            && crc_fast::crc32_iscsi(unsigned.as_bytes()) == block.crc.get();
        let host = block.host.get(..block.host_bytes.get() as usize)?;
        is_ours.then(|| Self {
            holder: Holder {
                owner: block.owner,
                boot: block.boot,
                host: String::from_utf8_lossy(host).into_owned(),
            },
            count: block.count.get(),
            stopped: block.stopped.get() != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_beat_is_read_back_and_a_changed_byte_is_noticed() {
        let beat = Beat {
            holder: Holder {
                owner: [1; 16],
                boot: [2; 16],
                host: "alpha".to_owned(),
            },
            count: 7,
            stopped: false,
        };
        let bytes = beat.encode();
        assert_eq!(Beat::decode(&bytes).as_ref(), Some(&beat));
        for at in [0, 20, 30, 60, 70, 511] {
            let mut broken = bytes;
            broken[at] ^= 1;
            assert_eq!(Beat::decode(&broken), None, "byte {at}");
        }
        assert_eq!(Beat::decode(&[0; HEARTBEAT_BYTES]), None);
        assert_eq!(Beat::decode(&bytes[..100]), None);
    }
}
