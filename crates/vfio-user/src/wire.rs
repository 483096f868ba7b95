//! The protocol's numbers, headers and lengths. Integers have the host's byte order; Forebay only
//! runs on little-endian hosts.

use crate::MAX_MESSAGE_BYTES;
use std::fmt;

/// Commands (vfio-user, "Commands").
pub mod command {
    /// VFIO_USER_VERSION.
    pub const VERSION: u16 = 1;
    /// VFIO_USER_DMA_MAP.
    pub const DMA_MAP: u16 = 2;
    /// VFIO_USER_DMA_UNMAP.
    pub const DMA_UNMAP: u16 = 3;
    /// VFIO_USER_DEVICE_GET_INFO.
    pub const DEVICE_GET_INFO: u16 = 4;
    /// VFIO_USER_DEVICE_GET_REGION_INFO.
    pub const DEVICE_GET_REGION_INFO: u16 = 5;
    /// VFIO_USER_DEVICE_GET_REGION_IO_FDS.
    pub const DEVICE_GET_REGION_IO_FDS: u16 = 6;
    /// VFIO_USER_DEVICE_GET_IRQ_INFO.
    pub const DEVICE_GET_IRQ_INFO: u16 = 7;
    /// VFIO_USER_DEVICE_SET_IRQS.
    pub const DEVICE_SET_IRQS: u16 = 8;
    /// VFIO_USER_REGION_READ.
    pub const REGION_READ: u16 = 9;
    /// VFIO_USER_REGION_WRITE.
    pub const REGION_WRITE: u16 = 10;
    /// VFIO_USER_DMA_READ, which a server sends.
    pub const DMA_READ: u16 = 11;
    /// VFIO_USER_DMA_WRITE, which a server sends.
    pub const DMA_WRITE: u16 = 12;
    /// VFIO_USER_DEVICE_RESET.
    pub const DEVICE_RESET: u16 = 13;
    /// VFIO_USER_REGION_WRITE_MULTI.
    pub const REGION_WRITE_MULTI: u16 = 15;
    /// VFIO_USER_DEVICE_FEATURE.
    pub const DEVICE_FEATURE: u16 = 16;
}

/// Major version of the protocol.
pub const VERSION_MAJOR: u16 = 0;
/// The highest supported minor version.
pub const VERSION_MINOR: u16 = 1;

/// Size of the header.
pub const HEADER_BYTES: usize = 16;

/// Header flags bits 3:0, the type; 0 is a command.
const FLAGS_TYPE: u32 = 0xF;
const TYPE_REPLY: u32 = 1;
/// Header flags bit 4: no reply wanted.
const FLAGS_NO_REPLY: u32 = 1 << 4;
/// Header flags bit 5: the reply is an error.
const FLAGS_ERROR: u32 = 1 << 5;

/// DMA_MAP and DMA_UNMAP flags (vfio-user, "VFIO_USER_DMA_MAP"; `linux/vfio.h`).
pub mod dma {
    /// Map: the region may be read.
    pub const READABLE: u32 = 1 << 0;
    /// Map: the region may be written.
    pub const WRITABLE: u32 = 1 << 1;
    /// Unmap: VFIO_DMA_UNMAP_FLAG_ALL, with address and size 0. QEMU sends it.
    pub const UNMAP_ALL: u32 = 1 << 1;
}

/// DEVICE_GET_INFO flags.
pub mod device_flags {
    /// VFIO_DEVICE_FLAGS_RESET.
    pub const RESET: u32 = 1 << 0;
    /// VFIO_DEVICE_FLAGS_PCI.
    pub const PCI: u32 = 1 << 1;
}

/// DEVICE_GET_REGION_INFO flags.
pub mod region_flags {
    /// VFIO_REGION_INFO_FLAG_READ.
    pub const READ: u32 = 1 << 0;
    /// VFIO_REGION_INFO_FLAG_WRITE.
    pub const WRITE: u32 = 1 << 1;
    /// VFIO_REGION_INFO_FLAG_MMAP.
    pub const MMAP: u32 = 1 << 2;
    /// VFIO_REGION_INFO_FLAG_CAPS.
    pub const CAPS: u32 = 1 << 3;
    /// VFIO_REGION_INFO_CAP_SPARSE_MMAP, a capability's id.
    pub const CAP_SPARSE_MMAP: u16 = 1;
}

/// DEVICE_GET_IRQ_INFO flags.
pub mod irq_info_flags {
    /// VFIO_IRQ_INFO_EVENTFD.
    pub const EVENTFD: u32 = 1 << 0;
    /// VFIO_IRQ_INFO_MASKABLE.
    pub const MASKABLE: u32 = 1 << 1;
}

/// DEVICE_SET_IRQS flags.
pub mod irq_set_flags {
    /// VFIO_IRQ_SET_DATA_NONE.
    pub const DATA_NONE: u32 = 1 << 0;
    /// VFIO_IRQ_SET_DATA_BOOL.
    pub const DATA_BOOL: u32 = 1 << 1;
    /// VFIO_IRQ_SET_DATA_EVENTFD.
    pub const DATA_EVENTFD: u32 = 1 << 2;
    /// VFIO_IRQ_SET_ACTION_MASK.
    pub const ACTION_MASK: u32 = 1 << 3;
    /// VFIO_IRQ_SET_ACTION_UNMASK.
    pub const ACTION_UNMASK: u32 = 1 << 4;
    /// VFIO_IRQ_SET_ACTION_TRIGGER.
    pub const ACTION_TRIGGER: u32 = 1 << 5;
    /// All data bits.
    pub const DATA_MASK: u32 = DATA_NONE | DATA_BOOL | DATA_EVENTFD;
    /// All action bits.
    pub const ACTION_MASK_ALL: u32 = ACTION_MASK | ACTION_UNMASK | ACTION_TRIGGER;
}

/// Regions of a PCI device (`linux/vfio.h`).
pub mod pci_region {
    /// VFIO_PCI_BAR0_REGION_INDEX; BAR n is n.
    pub const BAR0: u32 = 0;
    /// VFIO_PCI_BAR4_REGION_INDEX.
    pub const BAR4: u32 = 4;
    /// VFIO_PCI_CONFIG_REGION_INDEX.
    pub const CONFIG: u32 = 7;
    /// VFIO_PCI_NUM_REGIONS.
    pub const COUNT: usize = 9;
}

/// Interrupts of a PCI device (`linux/vfio.h`).
pub mod pci_irq {
    /// VFIO_PCI_INTX_IRQ_INDEX.
    pub const INTX: u32 = 0;
    /// VFIO_PCI_MSI_IRQ_INDEX.
    pub const MSI: u32 = 1;
    /// VFIO_PCI_MSIX_IRQ_INDEX.
    pub const MSIX: u32 = 2;
    /// VFIO_PCI_ERR_IRQ_INDEX.
    pub const ERR: u32 = 3;
    /// VFIO_PCI_REQ_IRQ_INDEX: the device asks to be released.
    pub const REQ: u32 = 4;
    /// VFIO_PCI_NUM_IRQS.
    pub const COUNT: usize = 5;
}

pub(crate) fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes_at(bytes, at).map(u16::from_le_bytes)
}
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes_at(bytes, at).map(u32::from_le_bytes)
}
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes_at(bytes, at).map(u64::from_le_bytes)
}

/// The header of a message (vfio-user, "Header").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Message ID, echoed in the reply.
    pub id: u16,
    /// Command.
    pub command: u16,
    /// Message size with the header.
    pub size_bytes: u32,
    /// Flags.
    pub flags: u32,
    /// Error of a reply.
    pub error: u32,
}

impl Header {
    /// A command's header.
    pub fn command(id: u16, command: u16, size_bytes: u32, no_reply: bool) -> Self {
        Self {
            id,
            command,
            size_bytes,
            flags: if no_reply { FLAGS_NO_REPLY } else { 0 },
            error: 0,
        }
    }

    /// Reads a header, if complete.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        Some(Self {
            id: u16_at(bytes, 0)?,
            command: u16_at(bytes, 2)?,
            size_bytes: u32_at(bytes, 4)?,
            flags: u32_at(bytes, 8)?,
            error: u32_at(bytes, 12)?,
        })
    }

    /// The header as bytes.
    pub fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..2].copy_from_slice(&self.id.to_le_bytes());
        bytes[2..4].copy_from_slice(&self.command.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.size_bytes.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.flags.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.error.to_le_bytes());
        bytes
    }

    /// A reply's header for this payload size.
    pub fn reply(&self, payload_bytes: u32) -> Self {
        Self {
            size_bytes: HEADER_BYTES as u32 + payload_bytes,
            flags: TYPE_REPLY,
            error: 0,
            ..*self
        }
    }

    /// An error reply's header.
    pub fn error_reply(&self, error: crate::Errno) -> Self {
        Self {
            flags: TYPE_REPLY | FLAGS_ERROR,
            error: error.get(),
            ..self.reply(0)
        }
    }

    /// Whether this is a command.
    pub fn is_command(&self) -> bool {
        self.flags & FLAGS_TYPE == 0
    }

    /// Whether this is a reply.
    pub fn is_reply(&self) -> bool {
        self.flags & FLAGS_TYPE == TYPE_REPLY
    }

    /// Whether this is an error reply.
    pub fn is_error(&self) -> bool {
        self.is_reply() && self.flags & FLAGS_ERROR != 0
    }

    /// Whether no reply is wanted.
    pub fn no_reply(&self) -> bool {
        self.flags & FLAGS_NO_REPLY != 0
    }
}

/// The start of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageFrame {
    /// This many bytes are needed first.
    NeedMore(usize),
    /// A whole message of this many bytes.
    Whole(usize),
}

/// Why a stream can't go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// A message shorter than its header.
    Short,
    /// A message longer than [`MAX_MESSAGE_BYTES`].
    Long,
    /// Neither a command nor answerable.
    NotACommand,
    /// A message before the version is agreed, or no common version.
    Version,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Short => "a message shorter than its header",
            Self::Long => "a message that is too long",
            Self::NotACommand => "a message that is not a command",
            Self::Version => "no protocol version was agreed on",
        })
    }
}

impl std::error::Error for Broken {}

/// The length of the first message.
///
/// # Errors
/// Why the stream can't go on.
pub fn frame(bytes: &[u8]) -> Result<MessageFrame, Broken> {
    let Some(header) = Header::read(bytes) else {
        return Ok(MessageFrame::NeedMore(HEADER_BYTES));
    };
    let size = header.size_bytes as usize;
    if size < HEADER_BYTES {
        return Err(Broken::Short);
    }
    if size > MAX_MESSAGE_BYTES {
        return Err(Broken::Long);
    }
    if bytes.len() < size {
        return Ok(MessageFrame::NeedMore(size));
    }
    Ok(MessageFrame::Whole(size))
}
