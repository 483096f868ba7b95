//! A disk and its queues, independent of the driver.

use std::time::Duration;

use forebay_nvme::Status;

use super::error::Error;

/// Size, limits and features of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size when last asked.
    pub size_bytes: u64,
    /// Bytes of a logical block.
    pub block_bytes: u32,
    /// Largest transfer; `None`: no limit.
    pub max_transfer_bytes: Option<u64>,
    /// Queues that the target offers.
    pub max_queues: u16,
    /// Has a volatile write cache.
    pub can_flush: bool,
    /// Supports [`Op::Discard`].
    pub can_discard: bool,
    /// Supports [`Op::WriteZeroes`].
    pub can_write_zeroes: bool,
    /// Accepts no writes.
    pub read_only: bool,
}

/// A command. Offsets and lengths are multiples of the disk's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Reads into the slot's data.
    Read {
        /// Start.
        offset_bytes: u64,
        /// Length.
        bytes: u32,
    },
    /// Writes the slot's data.
    Write {
        /// Start.
        offset_bytes: u64,
        /// Length.
        bytes: u32,
    },
    /// Makes every completed write durable.
    Flush,
    /// Discards data.
    Discard {
        /// Start.
        offset_bytes: u64,
        /// Length.
        bytes: u32,
    },
    /// Writes zeros.
    WriteZeroes {
        /// Start.
        offset_bytes: u64,
        /// Length.
        bytes: u32,
    },
}

/// Status of a completed command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskStatus {
    /// Success.
    Well,
    /// A virtio status (virtio 5.2.6: 1 is an error, 2 is not supported).
    Virtio(u8),
    /// An NVMe status.
    Nvme(Status),
}

impl DiskStatus {
    /// Whether the command may be retried unchanged (Base 3.3.3.2.1).
    #[must_use]
    pub fn may_retry(self) -> bool {
        let passing = [
            Status::COMMAND_INTERRUPTED,
            Status::NAMESPACE_NOT_READY,
            Status::TRANSIENT_TRANSPORT_ERROR,
        ];
        matches!(self, Self::Nvme(status) if !status.dnr() && passing.contains(&status.code()))
    }
}

/// A completed command.
#[derive(Clone, Copy, Debug)]
pub struct DiskCompletion {
    /// Its slot, now free.
    pub slot: u16,
    /// Its status.
    pub ended: DiskStatus,
}

/// A queue of a disk, used by one thread.
pub trait Queue: Send {
    /// Number of slots.
    fn depth(&self) -> u16;
    /// Commands in flight.
    fn in_flight(&self) -> u16;
    /// Data bytes of a slot.
    fn slot_bytes(&self) -> usize;
    /// Copies into a slot's data.
    fn put(&self, slot: u16, data: &[u8]);
    /// Copies from a slot's data.
    fn get(&self, slot: u16, data: &mut [u8]);
    /// Prepares a command in a free slot; it leaves with the next [`Queue::kick`].
    fn submit(&mut self, slot: u16, op: Op) -> Result<(), Error>;
    /// Publishes commands, and kicks the target if it asks for that.
    fn kick(&mut self) -> Result<(), Error>;
    /// Takes completions without waiting; returns their number.
    fn poll(&mut self, done: &mut Vec<DiskCompletion>) -> Result<usize, Error>;
    /// Sleeps until an interrupt or the limit. Only for queues with interrupts.
    fn wait(&mut self, limit: Duration) -> Result<(), Error>;
}

/// A disk.
pub trait Disk: Send {
    /// Its geometry.
    fn geometry(&self) -> Geometry;
    /// Its queues; each can be taken once.
    fn take_queues(&mut self) -> Vec<Box<dyn Queue>>;
    /// Whether the target keeps the connection open.
    fn is_open(&self) -> bool;
    /// Reads the geometry again.
    fn refresh(&mut self) -> Result<Geometry, Error>;
    /// Shuts the device down. Drop its queues first.
    fn close(self: Box<Self>) -> Result<(), Error>;
}
