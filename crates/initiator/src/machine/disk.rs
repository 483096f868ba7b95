//! A disk and its queues, as both drivers show them.
//!
//! Purpose: load and verification drive a disk without knowing its driver.
//! Not here: the drivers.

use std::time::Duration;

use forebay_nvme::Status;

use super::error::Error;

/// What the disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Its size, as it was when the driver last asked.
    pub size_bytes: u64,
    /// Its logical block.
    pub block_bytes: u32,
    /// The most that one command may move; `None`: no limit.
    pub max_transfer_bytes: Option<u64>,
    /// Queues that the target has to give.
    pub max_queues: u16,
    /// It has a volatile write cache that can be flushed.
    pub can_flush: bool,
    /// It takes [`Op::Discard`].
    pub can_discard: bool,
    /// It takes [`Op::WriteZeroes`].
    pub can_write_zeroes: bool,
    /// It takes no writes.
    pub read_only: bool,
}

/// A command. Places and lengths are in bytes, multiples of the disk's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Into the slot's data.
    Read {
        /// Where.
        offset_bytes: u64,
        /// How much.
        bytes: u32,
    },
    /// From the slot's data.
    Write {
        /// Where.
        offset_bytes: u64,
        /// How much.
        bytes: u32,
    },
    /// Makes every write that has ended durable.
    Flush,
    /// What was there need not be kept.
    Discard {
        /// Where.
        offset_bytes: u64,
        /// How much.
        bytes: u32,
    },
    /// Zeros from now on.
    WriteZeroes {
        /// Where.
        offset_bytes: u64,
        /// How much.
        bytes: u32,
    },
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskStatus {
    /// Well.
    Well,
    /// With this status (virtio 5.2.6: 1 is an error, 2 is not supported).
    Virtio(u8),
    /// With this status.
    Nvme(Status),
}

impl DiskStatus {
    /// Whether the command may be driven again as it is (Base 3.3.3.2.1).
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

/// A command that has ended.
#[derive(Clone, Copy, Debug)]
pub struct DiskCompletion {
    /// Its slot, free again.
    pub slot: u16,
    /// How.
    pub ended: DiskStatus,
}

/// A queue of a disk: one thread's.
pub trait Queue: Send {
    /// How many slots it has.
    fn depth(&self) -> u16;
    /// How many commands are in flight.
    fn in_flight(&self) -> u16;
    /// Most bytes of one slot's data.
    fn slot_bytes(&self) -> usize;
    /// Copies into a slot's data.
    fn put(&self, slot: u16, data: &[u8]);
    /// Copies out of a slot's data.
    fn get(&self, slot: u16, data: &mut [u8]);
    /// Makes a command ready in a slot that has none; it leaves with the next [`Queue::kick`].
    ///
    /// # Errors
    /// The slot is taken, or the command does not fit it.
    fn submit(&mut self, slot: u16, op: Op) -> Result<(), Error>;
    /// Shows the target what was submitted, and wakes it if it wants to be woken.
    ///
    /// # Errors
    /// The connection is gone.
    fn kick(&mut self) -> Result<(), Error>;
    /// Takes what ended, without waiting; how many.
    ///
    /// # Errors
    /// The target broke the protocol.
    fn poll(&mut self, done: &mut Vec<DiskCompletion>) -> Result<usize, Error>;
    /// Sleeps until something may have ended, or the limit. Only for queues with interrupts.
    ///
    /// # Errors
    /// The connection is gone, or there are no interrupts.
    fn wait(&mut self, limit: Duration) -> Result<(), Error>;
}

/// A disk.
pub trait Disk: Send {
    /// What it is.
    fn geometry(&self) -> Geometry;
    /// Its queues; each can be taken once.
    fn take_queues(&mut self) -> Vec<Box<dyn Queue>>;
    /// Whether the target still holds its end of the connection.
    fn is_open(&self) -> bool;
    /// Asks for the geometry again (growth).
    ///
    /// # Errors
    /// The connection is gone.
    fn refresh(&mut self) -> Result<Geometry, Error>;
    /// Stops the device in good order. The queues must be gone.
    ///
    /// # Errors
    /// The target did not confirm.
    fn close(self: Box<Self>) -> Result<(), Error>;
}
