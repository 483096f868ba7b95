//! vhost-user, the backend's side: [`message`]s as bytes, and the state of a [`session`].
//!
//! **Design.** No I/O: whoever has the socket gives whole messages and a number of descriptors, does what the session
//! says must be done ([`session::SessionEffect`]), and sends what it says must be answered. Every message is idempotent, so it
//! may be handled again from its start by a successor. **Not here:** memory, eventfds, rings.

pub mod message;
pub mod session;

/// VHOST_USER_PROTOCOL_F_*: bits of protocol features.
pub mod protocol_feature {
    /// More than one queue.
    pub const MQ: u64 = 1 << 0;
    /// Messages are acknowledged when asked.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// A channel for requests of the backend's.
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// GET_CONFIG and SET_CONFIG.
    pub const CONFIG: u64 = 1 << 9;
    /// The inflight region.
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    /// RESET_DEVICE.
    pub const RESET_DEVICE: u64 = 1 << 13;
    /// Kicks and calls may be messages.
    pub const INBAND_NOTIFICATIONS: u64 = 1 << 14;
    /// ADD_MEM_REG and REM_MEM_REG.
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    /// SET_STATUS and GET_STATUS.
    pub const STATUS: u64 = 1 << 16;
    /// All that are served.
    pub const ALL: u64 = MQ
        | REPLY_ACK
        | BACKEND_REQ
        | CONFIG
        | INFLIGHT_SHMFD
        | RESET_DEVICE
        | INBAND_NOTIFICATIONS
        | CONFIGURE_MEM_SLOTS
        | STATUS;
}

/// Queues that a device may have.
pub const MAX_QUEUES: usize = 64;
/// Memory regions that a front-end may add.
pub const MAX_MEM_SLOTS: u64 = 256;
/// Bytes of the largest configuration space (VHOST_USER_MAX_CONFIG_SIZE).
pub const MAX_CONFIG_BYTES: usize = 256;

#[cfg(test)]
mod tests;
