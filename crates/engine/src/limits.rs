//! What one machine may have at most, for whoever tells people of it.
//!
//! **Purpose.** The book's page of limits is compared with these. **Design.** Each is the constant that is enforced, by another
//! name. **Not here:** the enforcing.

/// Commands in hand of one NVMe controller, over all its queues.
pub const NVME_COMMANDS: usize = crate::frontend::vfio_user::COMMANDS_IN_HAND;
/// Entries of a machine's queue.
pub const QUEUE_ENTRIES: u16 = forebay_virtio::ring::MAX_QUEUE_SIZE;
/// Queue pairs of an NVMe disk, without the Admin queue's.
pub const NVME_QUEUES: u16 = forebay_nvme::pcie::MAX_IO_QUEUES;
/// Pieces that the data of one command lies in.
pub const PIECES: usize = forebay_guest::MAX_PIECES;
/// Ranges of a machine's memory.
pub const MEMORY_REGIONS: usize = crate::frontend::vm::client::LIMITS.regions;
/// Bytes of a machine's memory.
pub const MEMORY_BYTES: u64 = crate::frontend::vm::client::LIMITS.bytes;
/// Descriptors that a client has handed over.
pub const DESCRIPTORS: usize = crate::frontend::vm::client::MAX_DEPOSITS;
/// Descriptors that come with one message.
pub const DESCRIPTORS_AT_ONCE: usize = crate::frontend::vm::client::MAX_DESCRIPTORS;
/// What one message may take, in nanoseconds.
pub const MESSAGE_NS: u64 = crate::frontend::vm::client::MESSAGE_LIMIT_NS;
/// How long a client may take to answer a question of ours, in nanoseconds.
pub const ASK_NS: u64 = crate::frontend::vfio_user::ASK_NS;
/// Commands at once whose data lie in memory that came without a descriptor.
pub const ASKING: usize = crate::frontend::vfio_user::ASKING;
/// Parts of a client's held memory that its reactor's ring knows.
pub const HELD_PARTS: usize = crate::frontend::vm::client::MAX_REGISTERED;
/// Entries of the ring that they may take.
pub const HELD_ENTRIES: usize = crate::frontend::vm::client::MAX_REGISTERED_ENTRIES;
