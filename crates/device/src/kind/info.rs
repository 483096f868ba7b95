//! Plain values that describe a device and how to open it. Kinds with special treatment above have
//! a constant.

use std::ffi::CString;
use std::fmt;
use std::sync::Arc;

use super::spec::DeviceSpec;

/// Options for opening a device.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// A null device discards data from here on.
    pub data_offset_bytes: u64,
    /// Refuse a device with less capacity.
    pub min_capacity_bytes: u64,
    /// Create the missing file of a ram or null device.
    pub create_missing: bool,
    /// Hold a block device exclusively, against mounts. For the daemon only: two engines may have a
    /// device open.
    pub exclusive: bool,
}

/// Called from any thread when an image's size may have changed. It must not call the device.
pub type ImageChanged = Arc<dyn Fn() + Send + Sync>;

/// An image of a remote device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageName {
    /// The pool.
    pub pool: String,
    /// The pool's namespace; empty for the default one.
    pub namespace: String,
    /// The image.
    pub image: String,
    /// The snapshot of it, which is read only.
    pub snapshot: Option<String>,
}

/// A kind of device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceKind(pub(super) &'static str);

impl DeviceKind {
    /// The name before the colon of a spec.
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

/// Equal for two paths of one device.
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
    /// A remote device.
    Remote {
        /// Its globally unique identifier.
        id: [u8; 16],
    },
}

impl Identity {
    /// The name of threads inside a request to the device, at most 15 bytes. Collisions are rare.
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
        // 44 bits of FNV-1a.
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64 ^ u64::from(kind), |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        CString::new(format!("dev-{:011x}", hash >> 20)).unwrap_or_default()
    }
}

/// The properties of an open device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The spec, with its kind resolved.
    pub spec: DeviceSpec,
    /// Its kind.
    pub kind: DeviceKind,
    /// Addressable bytes.
    pub capacity_bytes: u64,
    /// Logical block, a power of two: the least block size of a volume.
    pub block_bytes: u32,
    /// Physical block, a power of two, at least `block_bytes`: advice to hosts.
    pub physical_block_bytes: u32,
    /// Alignment of buffer addresses, a power of two.
    pub memory_align_bytes: u32,
    /// Alignment of offsets and lengths, a power of two, equal to `block_bytes`.
    pub offset_align_bytes: u32,
    /// Its identity.
    pub identity: Identity,
    /// Whether punching frees space below.
    pub can_punch: bool,
    /// Whether the engine's I/O bypasses the page cache.
    pub direct: bool,
    /// Notes for an operator.
    pub notes: Vec<String>,
}

/// A device's present state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceNow {
    /// Its size.
    pub size_bytes: u64,
    /// Whether it can be opened again: a removed file can't.
    pub has_name: bool,
    /// Whether its path still names it.
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
