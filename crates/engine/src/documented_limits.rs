//! Limits, for comparison with the documentation.

/// Address space that the engine maps once for its buffers, in bytes.
pub const BUFFER_BYTES: usize = crate::memory::MEMORY_BYTES;
/// Time limit for the owner's answer to a command's fault, in nanoseconds.
pub const OWNER_WAIT_NS: u64 = crate::io::clock::OWNER_WAIT_LIMIT_NS;
/// Bytes of one command's data.
pub const TRANSFER_BYTES: u32 = crate::io::staging::MAX_TRANSFER_BYTES;

/// Commands in flight of one NVMe controller.
pub const NVME_COMMANDS: usize = crate::frontend::vfio_user::COMMANDS_IN_HAND;
/// Entries of a VM's queue.
pub const QUEUE_ENTRIES: u16 = forebay_virtio::ring::MAX_QUEUE_SIZE;
/// Queue pairs of an NVMe disk, without the Admin queue's.
pub const NVME_QUEUES: u16 = forebay_nvme::pcie::MAX_IO_QUEUES;
/// Memory pieces of one command's data.
pub const PIECES: usize = forebay_guest::MAX_PIECES;
/// Ranges of a VM's memory.
pub const MEMORY_REGIONS: usize = crate::frontend::vm::client::LIMITS.regions;
/// Bytes of a VM's memory.
pub const MEMORY_BYTES: u64 = crate::frontend::vm::client::LIMITS.bytes;
/// Descriptors of a client.
pub const DESCRIPTORS: usize = crate::frontend::vm::client::MAX_DEPOSITS;
/// Descriptors in one message.
pub const DESCRIPTORS_AT_ONCE: usize = crate::frontend::vm::client::MAX_DESCRIPTORS;
/// Time limit for one message, in nanoseconds.
pub const MESSAGE_NS: u64 = crate::frontend::vm::client::MESSAGE_LIMIT_NS;
/// Time limit for a client's answer, in nanoseconds.
pub const ASK_NS: u64 = crate::frontend::vfio_user::ASK_NS;
/// Concurrent commands on memory without a descriptor.
pub const ASKING: usize = crate::frontend::vfio_user::ASKING;
/// Pinned memory parts registered with the ring.
pub const HELD_PARTS: usize = crate::frontend::vm::client::MAX_REGISTERED;
/// Ring entries of these parts.
pub const HELD_ENTRIES: usize = crate::frontend::vm::client::MAX_REGISTERED_ENTRIES;
