//! # The device's side of virtio
//!
//! Virtqueues are in [`ring`]; [`inflight`] holds what a successor needs, and [`queue`] combines
//! both. [`blk`] parses block requests; [`vhost_user`] handles messages and sessions. The crate
//! does no I/O, and an I/O allocates nothing. Guest memory is read once and then checked, so no
//! byte can cause a panic.
//!
//! Legacy devices, big-endian guests, in-order use, an IOMMU and dirty logging are not supported.

#![deny(unsafe_code)]

pub mod blk;
pub mod inflight;
#[cfg(any(test, fuzzing, feature = "model"))]
pub mod model;
mod named;
pub mod queue;
pub mod ring;
pub mod vhost_user;

/// Feature bits of virtio (VIRTIO 1.2, 5.2.3 and 6) and vhost-user.
pub mod feature {
    /// VIRTIO_BLK_F_SIZE_MAX.
    pub const BLK_SIZE_MAX: u64 = 1 << 1;
    /// VIRTIO_BLK_F_SEG_MAX.
    pub const BLK_SEG_MAX: u64 = 1 << 2;
    /// VIRTIO_BLK_F_RO.
    pub const BLK_RO: u64 = 1 << 5;
    /// VIRTIO_BLK_F_BLK_SIZE.
    pub const BLK_BLK_SIZE: u64 = 1 << 6;
    /// VIRTIO_BLK_F_FLUSH.
    pub const BLK_FLUSH: u64 = 1 << 9;
    /// VIRTIO_BLK_F_TOPOLOGY.
    pub const BLK_TOPOLOGY: u64 = 1 << 10;
    /// VIRTIO_BLK_F_CONFIG_WCE.
    pub const BLK_CONFIG_WCE: u64 = 1 << 11;
    /// VIRTIO_BLK_F_MQ.
    pub const BLK_MQ: u64 = 1 << 12;
    /// VIRTIO_BLK_F_DISCARD.
    pub const BLK_DISCARD: u64 = 1 << 13;
    /// VIRTIO_BLK_F_WRITE_ZEROES.
    pub const BLK_WRITE_ZEROES: u64 = 1 << 14;
    /// VIRTIO_F_INDIRECT_DESC.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// VIRTIO_F_EVENT_IDX.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// VHOST_USER_F_PROTOCOL_FEATURES.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    /// VIRTIO_F_VERSION_1.
    pub const VERSION_1: u64 = 1 << 32;
    /// VIRTIO_F_RING_PACKED.
    pub const RING_PACKED: u64 = 1 << 34;
}
