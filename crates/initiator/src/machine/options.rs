//! How a driver uses its device.
//!
//! Design: one set for both kinds of disk; what concerns only one kind is ignored by the other.
//! What it does *not* do: say what the load is.

use std::path::PathBuf;
use std::time::Duration;

use super::Error;

/// Which disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A vhost-user-blk backend's socket.
    VhostUser(PathBuf),
    /// The socket of a vfio-user server that is an NVMe controller.
    VfioUser(PathBuf),
}

/// Which kind of virtqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ring {
    /// Virtio 2.7.
    Split,
    /// Virtio 2.8.
    Packed,
}

/// How an NVMe controller is told of new commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doorbells {
    /// Shadow doorbells (Doorbell Buffer Config) where the controller has them; else every doorbell is a message.
    Shadow,
    /// Every doorbell is a message.
    Trapped,
    /// The page of doorbells that the target shares; refused if it shares none.
    Mapped,
}

/// How.
#[derive(Clone, Debug)]
pub struct Options {
    /// I/O queues.
    pub queues: u16,
    /// Slots of each.
    pub depth: u16,
    /// Most bytes of a command.
    pub slot_bytes: usize,
    /// Completions raise interrupts; else they must be polled for.
    pub interrupts: bool,
    /// The memory is of huge pages.
    pub huge_pages: bool,
    /// Of a vhost-user disk.
    pub ring: Ring,
    /// Indirect descriptors, where a vhost-user disk has them.
    pub indirect: bool,
    /// Event index, where a vhost-user disk has it.
    pub event_idx: bool,
    /// Bytes of data behind one descriptor of a vhost-user disk, as a guest's pages are scattered.
    pub piece_bytes: usize,
    /// A vhost-user disk's data begin at an odd address, as no guest's do.
    pub odd: bool,
    /// Of a vfio-user disk.
    pub doorbells: Doorbells,
    /// A vfio-user disk's data are named by scatter/gather lists, else by PRPs.
    pub sgl: bool,
    /// A vfio-user disk's interrupts are gathered: Interrupt Coalescing's threshold and time (Base 2.0, 5.27.1.6); 0: each is
    /// raised.
    pub gather: u16,
    /// The most that an answer of the target may take.
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

/// The most slots that a queue may have.
pub(crate) const MAX_DEPTH: u16 = 1023;
/// The most bytes that a slot may have.
const MAX_SLOT_BYTES: usize = 1 << 20;

impl Options {
    pub(crate) fn check(&self) -> Result<(), Error> {
        let problem = if self.queues == 0 || self.queues > 64 {
            "there are 1 to 64 queues"
        } else if self.depth == 0 || self.depth > MAX_DEPTH {
            "a queue's depth is 1 to 1023"
        } else if self.slot_bytes < 512 || self.slot_bytes > MAX_SLOT_BYTES {
            "a command's data is 512 bytes to 1 MiB"
        } else if self.piece_bytes < 512 {
            "a piece of data is at least 512 bytes"
        } else {
            return Ok(());
        };
        Err(Error::Unusable(problem.into()))
    }

    /// Pieces of a slot's data.
    pub(crate) fn pieces(&self) -> usize {
        self.slot_bytes.div_ceil(self.piece_bytes)
    }
}
