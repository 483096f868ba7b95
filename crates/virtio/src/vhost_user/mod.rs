//! The backend's side of vhost-user, without I/O: [`message`]s as bytes, and the state of a
//! [`session`].
//!
//! The socket's owner passes messages, performs [`session::SessionEffect`]s, and sends replies.
//! Messages are idempotent, so a successor may repeat one.

pub mod message;
pub mod session;

/// VHOST_USER_PROTOCOL_F_* bits.
pub mod protocol_feature {
    /// Several queues.
    pub const MQ: u64 = 1 << 0;
    /// Acknowledgements on request.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// A channel for backend requests.
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// GET_CONFIG and SET_CONFIG.
    pub const CONFIG: u64 = 1 << 9;
    /// The inflight region.
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    /// RESET_DEVICE.
    pub const RESET_DEVICE: u64 = 1 << 13;
    /// Kicks and calls as messages.
    pub const INBAND_NOTIFICATIONS: u64 = 1 << 14;
    /// ADD_MEM_REG and REM_MEM_REG.
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    /// SET_STATUS and GET_STATUS.
    pub const STATUS: u64 = 1 << 16;
    /// All supported features.
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

/// Most queues of a device.
pub const MAX_QUEUES: usize = 64;
/// Most memory regions.
pub const MAX_MEM_SLOTS: u64 = 256;
/// VHOST_USER_MAX_CONFIG_SIZE.
pub const MAX_CONFIG_BYTES: usize = 256;

#[cfg(test)]
mod tests;
