//! How a driver uses its device. Each kind of disk ignores the other kind's options.

use std::path::PathBuf;
use std::time::Duration;

use super::Error;

/// A disk's socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Of a vhost-user-blk backend.
    VhostUser(PathBuf),
    /// Of a vfio-user server with an NVMe controller.
    VfioUser(PathBuf),
}

/// The layout of virtqueues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ring {
    /// Virtio 2.7.
    Split,
    /// Virtio 2.8.
    Packed,
}

/// How new commands are signalled to an NVMe controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doorbells {
    /// Shadow doorbells (Doorbell Buffer Config) if supported, else messages.
    Shadow,
    /// A message for every doorbell.
    Trapped,
    /// The page that the target shares; otherwise an error.
    Mapped,
}

/// Options of a driver.
#[derive(Clone, Debug)]
pub struct Options {
    /// I/O queues.
    pub queues: u16,
    /// Slots of each queue.
    pub depth: u16,
    /// Largest transfer of a command.
    pub slot_bytes: usize,
    /// Completions raise interrupts.
    pub interrupts: bool,
    /// Memory in huge pages.
    pub huge_pages: bool,
    /// Layout of virtqueues (vhost-user).
    pub ring: Ring,
    /// Indirect descriptors, if offered (vhost-user).
    pub indirect: bool,
    /// Event index, if offered (vhost-user).
    pub event_idx: bool,
    /// Data bytes per descriptor, as scattered as a guest's pages (vhost-user).
    pub piece_bytes: usize,
    /// Data at an odd address, unlike any guest's (vhost-user).
    pub odd: bool,
    /// How doorbells are rung (vfio-user).
    pub doorbells: Doorbells,
    /// Scatter/gather lists instead of PRPs (vfio-user).
    pub sgl: bool,
    /// Interrupt Coalescing (Base 2.0, 5.27.1.6); 0 disables it (vfio-user).
    pub gather: u16,
    /// Time limit for the target's answers.
    pub limit: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            queues: 1,
            depth: 32,
            slot_bytes: 4096,
            interrupts: false,
            huge_pages: false,
            ring: Ring::Split,
            indirect: true,
            event_idx: true,
            piece_bytes: usize::MAX,
            odd: false,
            doorbells: Doorbells::Shadow,
            sgl: false,
            gather: 0,
            limit: Duration::from_secs(30),
        }
    }
}

pub(crate) const MAX_DEPTH: u16 = 1023;
const MAX_SLOT_BYTES: usize = 1 << 20;

impl Options {
    pub(crate) fn check(&self) -> Result<(), Error> {
        let problem = if self.queues == 0 || self.queues > 64 {
            "the number of queues must be 1 to 64"
        } else if self.depth == 0 || self.depth > MAX_DEPTH {
            "a queue's depth must be 1 to 1023"
        } else if self.slot_bytes < 512 || self.slot_bytes > MAX_SLOT_BYTES {
            "a command's data must be 512 bytes to 1 MiB"
        } else if self.piece_bytes < 512 {
            "a piece of data must be at least 512 bytes"
        } else {
            return Ok(());
        };
        Err(Error::Unusable(problem.into()))
    }

    /// Descriptors for a slot's data.
    pub(crate) fn pieces(&self) -> usize {
        self.slot_bytes.div_ceil(self.piece_bytes)
    }
}
