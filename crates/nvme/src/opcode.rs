//! Opcodes and Fabrics command types.

/// Admin commands (Base 2.0, 5, figure 138). Queue, virtualization and doorbell commands are for
/// memory-based transports.
pub mod admin {
    /// Delete I/O Submission Queue.
    pub const DELETE_IO_SQ: u8 = 0x00;
    /// Create I/O Submission Queue.
    pub const CREATE_IO_SQ: u8 = 0x01;
    /// Get Log Page.
    pub const GET_LOG_PAGE: u8 = 0x02;
    /// Delete I/O Completion Queue.
    pub const DELETE_IO_CQ: u8 = 0x04;
    /// Create I/O Completion Queue.
    pub const CREATE_IO_CQ: u8 = 0x05;
    /// Identify.
    pub const IDENTIFY: u8 = 0x06;
    /// Abort.
    pub const ABORT: u8 = 0x08;
    /// Set Features.
    pub const SET_FEATURES: u8 = 0x09;
    /// Get Features.
    pub const GET_FEATURES: u8 = 0x0A;
    /// Asynchronous Event Request.
    pub const ASYNC_EVENT_REQUEST: u8 = 0x0C;
    /// Namespace Management.
    pub const NAMESPACE_MANAGEMENT: u8 = 0x0D;
    /// Firmware Commit.
    pub const FIRMWARE_COMMIT: u8 = 0x10;
    /// Firmware Image Download.
    pub const FIRMWARE_DOWNLOAD: u8 = 0x11;
    /// Namespace Attachment.
    pub const NAMESPACE_ATTACHMENT: u8 = 0x15;
    /// Keep Alive.
    pub const KEEP_ALIVE: u8 = 0x18;
    /// Virtualization Management.
    pub const VIRTUALIZATION_MANAGEMENT: u8 = 0x1C;
    /// Doorbell Buffer Config.
    pub const DOORBELL_BUFFER_CONFIG: u8 = 0x7C;
    /// Format NVM.
    pub const FORMAT_NVM: u8 = 0x80;
}

/// NVM command set (NVM Command Set 1.0, 3.2).
pub mod nvm {
    /// Flush (Base 2.0, 7.1).
    pub const FLUSH: u8 = 0x00;
    /// Write.
    pub const WRITE: u8 = 0x01;
    /// Read.
    pub const READ: u8 = 0x02;
    /// Write Uncorrectable.
    pub const WRITE_UNCORRECTABLE: u8 = 0x04;
    /// Compare.
    pub const COMPARE: u8 = 0x05;
    /// Write Zeroes.
    pub const WRITE_ZEROES: u8 = 0x08;
    /// Dataset Management.
    pub const DATASET_MANAGEMENT: u8 = 0x09;
    /// Verify.
    pub const VERIFY: u8 = 0x0C;
    /// Reservation Register (Base 2.0, 7.3).
    pub const RESERVATION_REGISTER: u8 = 0x0D;
    /// Reservation Report (Base 2.0, 7.5).
    pub const RESERVATION_REPORT: u8 = 0x0E;
    /// Reservation Acquire (Base 2.0, 7.2).
    pub const RESERVATION_ACQUIRE: u8 = 0x11;
    /// Reservation Release (Base 2.0, 7.4).
    pub const RESERVATION_RELEASE: u8 = 0x15;
    /// Copy.
    pub const COPY: u8 = 0x19;
}

/// Opcode of Fabrics commands (Base 2.0, 6).
pub const FABRICS: u8 = 0x7F;

/// Fabrics command types, byte 4 (Base 2.0, 6).
pub mod fctype {
    /// Property Set.
    pub const PROPERTY_SET: u8 = 0x00;
    /// Connect.
    pub const CONNECT: u8 = 0x01;
    /// Property Get.
    pub const PROPERTY_GET: u8 = 0x04;
    /// Authentication Send.
    pub const AUTHENTICATION_SEND: u8 = 0x05;
    /// Authentication Receive.
    pub const AUTHENTICATION_RECEIVE: u8 = 0x06;
    /// Disconnect.
    pub const DISCONNECT: u8 = 0x08;
}

/// Whether bits 1:0 mean data to the controller (Base 2.0, 3.3.3.1). In Fabrics, FCTYPE has these
/// bits.
pub const fn host_to_controller(opcode: u8) -> bool {
    opcode & 0b11 == 0b01
}

/// Whether bits 1:0 mean data to the host.
pub const fn controller_to_host(opcode: u8) -> bool {
    opcode & 0b11 == 0b10
}
