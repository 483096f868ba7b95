//! What is known about a device, and how it is to be opened.
//!
//! **Purpose.** Plain values that all kinds fill in and the layers above read.
//!
//! **Design.** A kind is known by its name. Kinds that the layers above tell apart have a constant, in the kind's file.
//!
//! **Not here:** finding these things out.

use std::ffi::CString;
use std::fmt;

use super::spec::DeviceSpec;

/// How to open a device.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// Where a null device's nothing begins; label and catalog are below. Others ignore it.
    pub data_offset_bytes: u64,
    /// Refuse a device with less capacity.
    pub min_capacity_bytes: u64,
    /// Make the file of a ram or null device if it isn't there.
    pub create_missing: bool,
    /// Hold a block device exclusively, so that a mounted one is refused and nobody can mount it. For the daemon: the
    /// engines of two generations have a device open at once, so they can't.
    pub exclusive: bool,
}

/// A kind of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceKind(pub(super) &'static str);

impl DeviceKind {
    /// What stands before the colon of a spec.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.0
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// What makes two devices one, whatever their paths are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Identity {
    /// A file.
    Inode {
        /// The file system's device number.
        dev: u64,
        /// The inode number.
        ino: u64,
    },
    /// A block device.
    Block {
        /// Its device number.
        rdev: u64,
    },
    /// A device that is elsewhere.
    Remote {
        /// What tells it there from all others: a namespace's globally unique identifier, for example.
        id: [u8; 16],
    },
}

impl Identity {
    /// What threads that are inside a request to a device are called: at most 15 bytes. Two devices with
    /// one name would only be told from each other less well.
    pub(crate) fn thread_name(&self) -> CString {
        let (kind, a, b) = match *self {
            Self::Inode { dev, ino } => (b'i', dev, ino),
            Self::Block { rdev } => (b'b', rdev, 0),
            Self::Remote { id } => {
                let id = u128::from_le_bytes(id);
                (b'r', id as u64, (id >> 64) as u64)
            }
        };
        let bytes = a.to_le_bytes().into_iter().chain(b.to_le_bytes());
        // FNV-1a, of which 44 bits are taken.
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64 ^ u64::from(kind), |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        CString::new(format!("dev-{:011x}", hash >> 20)).unwrap_or_default()
    }
}

/// What is known about an open device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The spec, resolved: its kind is known.
    pub spec: DeviceSpec,
    /// Its kind.
    pub kind: DeviceKind,
    /// Bytes that can be addressed.
    pub capacity_bytes: u64,
    /// Logical block: a volume's block is never smaller. A power of two.
    pub block_bytes: u32,
    /// Physical block, for advice to hosts. A power of two, at least `block_bytes`.
    pub physical_block_bytes: u32,
    /// Addresses of buffers must be multiples of this. A power of two.
    pub memory_align_bytes: u32,
    /// Offsets and lengths must be multiples of this. A power of two, equal to `block_bytes`.
    pub offset_align_bytes: u32,
    /// Which device this is.
    pub identity: Identity,
    /// Whether punching gives space back to who is below.
    pub can_punch: bool,
    /// Whether the engine's I/O bypasses the page cache.
    pub direct: bool,
    /// What an operator should know.
    pub notes: Vec<String>,
}

/// How a device is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceNow {
    /// Bytes that it holds.
    pub size_bytes: u64,
    /// Whether it can be opened again: a removed file can't.
    pub has_name: bool,
    /// Whether it is what its path names.
    pub is_at_path: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_inside_two_devices_have_two_names() {
        let inode = |dev, ino| Identity::Inode { dev, ino }.thread_name();
        assert_ne!(inode(3, 5), inode(5, 3));
        assert_ne!(inode(3, 0), Identity::Block { rdev: 3 }.thread_name());
        assert_eq!(inode(3, 5).to_bytes().len(), 15, "as long as may be");
    }
}
