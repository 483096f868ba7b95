//! Opening a device and learning what it is.
//!
//! **Purpose.** From a spec to a descriptor, with everything that the layers above must know: capacity, block size,
//! alignment, identity, whether space can be given back.
//!
//! **Design.** Files and block devices are opened with `O_DIRECT`; the alignment is what the kernel reports
//! (`STATX_DIOALIGN`), else the logical block or 4 KiB, and then a note says so. Where direct I/O is impossible the
//! device is opened buffered and says that too. The result is shared by the engine's [`crate::Device`] and the daemon's
//! [`crate::sync_io::SyncDevice`].
//!
//! **What it does not do.** It takes no lock: see [`crate::fence`]. It doesn't notice two nodes of one block device
//! in the fence; [`Identity`] does.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags};
use rustix::io::Errno;

use crate::error::DeviceError;
use crate::file_limit;
use crate::size::format_bytes;
use crate::spec::{DeviceSpec, MAX_CAPACITY_BYTES, type_name};

/// The smallest logical block that anything here has.
pub(crate) const MIN_BLOCK_BYTES: u32 = 512;
const FALLBACK_ALIGN_BYTES: u32 = 4096;

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

/// The kinds of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// A regular file.
    File,
    /// A block device.
    Block,
    /// A mapped file.
    Ram,
    /// Nothing but a label.
    Null,
    /// For tests: a file with a volatile write cache.
    #[cfg(feature = "test-device")]
    Volatile,
    /// For tests: a file that fails as told.
    #[cfg(feature = "test-device")]
    Faulty,
}

impl DeviceKind {
    /// Whether the engine's I/O goes past the page cache where that is possible.
    fn wants_direct(self) -> bool {
        match self {
            Self::File | Self::Block => true,
            #[cfg(feature = "test-device")]
            Self::Faulty => true,
            _ => false,
        }
    }
}

impl std::fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::File => "file",
            Self::Block => "block",
            Self::Ram => "ram",
            Self::Null => "null",
            #[cfg(feature = "test-device")]
            Self::Volatile => "volatile",
            #[cfg(feature = "test-device")]
            Self::Faulty => "faulty",
        })
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
}

/// What is known about an open device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The spec, resolved: never [`DeviceSpec::Path`].
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

pub(crate) struct Opened {
    pub(crate) fd: OwnedFd,
    pub(crate) info: DeviceInfo,
}

/// Which way the descriptor shall work.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// For a ring: past the page cache.
    Direct,
    /// For the daemon's small reads and writes.
    Buffered,
}

pub(crate) fn open(
    spec: &DeviceSpec,
    options: &OpenOptions,
    access: Access,
) -> Result<Opened, DeviceError> {
    let spec = spec.clone().resolve()?;
    let kind = match spec {
        DeviceSpec::Block { .. } => DeviceKind::Block,
        DeviceSpec::Ram { .. } => DeviceKind::Ram,
        DeviceSpec::Null { .. } => DeviceKind::Null,
        #[cfg(feature = "test-device")]
        DeviceSpec::Volatile { .. } => DeviceKind::Volatile,
        #[cfg(feature = "test-device")]
        DeviceSpec::Faulty { .. } => {
            crate::faulty::refuse_unless_allowed(&spec)?;
            DeviceKind::Faulty
        }
        DeviceSpec::File { .. } | DeviceSpec::Path { .. } => DeviceKind::File,
    };
    let path = spec.path().to_owned();
    let failed = |doing| move |errno| (doing, errno);
    let error = |(doing, errno)| DeviceError::from_errno(&path, doing, errno);

    if let (true, Some(size_bytes)) = (options.create_missing, own_size(&spec)) {
        match create_file(&path, size_bytes) {
            Ok(()) | Err(DeviceError::Exists { .. }) => {}
            Err(other) => return Err(other),
        }
        #[cfg(feature = "test-device")]
        if kind == DeviceKind::Volatile {
            crate::volatile::create(&path, size_bytes)?;
        }
    }

    // The type is looked at before opening: opening a pipe or a tape has effects. (O_NONBLOCK is no help: io_uring would
    // then answer EAGAIN where it should wait.)
    check_type(&path, kind)?;
    let mut flags = OFlags::RDWR | OFlags::CLOEXEC;
    if options.exclusive && kind == DeviceKind::Block {
        flags |= OFlags::EXCL;
    }
    let mut notes = Vec::new();
    // Even for buffered access, so that daemon and engine learn the same about a device.
    let wants_direct = kind.wants_direct();
    let mut direct = wants_direct;
    let fd = match wants_direct {
        true => match rustix::fs::open(&path, flags | OFlags::DIRECT, Mode::empty()) {
            Err(Errno::INVAL) => {
                direct = false;
                rustix::fs::open(&path, flags, Mode::empty())
            }
            other => other,
        },
        false => rustix::fs::open(&path, flags, Mode::empty()),
    }
    .map_err(failed("opening it"))
    .map_err(error)?;

    let stat = rustix::fs::statx(
        &fd,
        c"",
        AtFlags::EMPTY_PATH,
        StatxFlags::BASIC_STATS | StatxFlags::DIOALIGN,
    )
    .map_err(failed("looking at it"))
    .map_err(error)?;
    let found = FileType::from_raw_mode(u32::from(stat.stx_mode));
    refuse_type(&path, kind, found)?;

    if kind == DeviceKind::File && is_in_memory(&fd) {
        notes.push(
            "it is a file in memory (tmpfs): what it holds is lost when this machine restarts"
                .to_owned(),
        );
    }
    let reported = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::DIOALIGN);
    let (mut block_bytes, mut physical_block_bytes) = (MIN_BLOCK_BYTES, FALLBACK_ALIGN_BYTES);
    if kind == DeviceKind::Block {
        // Such a device opens for writing all the same, and then refuses each write.
        if is_read_only(stat.stx_rdev_major, stat.stx_rdev_minor) {
            return Err(DeviceError::ReadOnly { path });
        }
        block_bytes = rustix::fs::ioctl_blksszget(&fd)
            .map_err(failed("asking its block size"))
            .map_err(error)?;
        physical_block_bytes = rustix::fs::ioctl_blkpbszget(&fd)
            .map_err(failed("asking its physical block size"))
            .map_err(error)?;
    }
    let mut memory_align_bytes = 1;
    if direct && reported && stat.stx_dio_offset_align == 0 {
        // The file system says that this file has no direct I/O (it is encrypted, for example).
        direct = false;
    }
    if direct {
        if reported {
            memory_align_bytes = stat.stx_dio_mem_align;
            block_bytes = block_bytes.max(stat.stx_dio_offset_align);
        } else {
            memory_align_bytes = FALLBACK_ALIGN_BYTES;
            if kind != DeviceKind::Block {
                block_bytes = FALLBACK_ALIGN_BYTES;
            }
            notes.push(format!(
                "the kernel does not report the alignment for direct I/O here; {} is assumed",
                format_bytes(u64::from(FALLBACK_ALIGN_BYTES))
            ));
        }
    } else if wants_direct {
        notes.push(
            "direct I/O is not possible here; data goes through the page cache, which costs memory and time".to_owned(),
        );
    }
    if wants_direct && (!direct || access == Access::Buffered) {
        let now = rustix::fs::fcntl_getfl(&fd)
            .map_err(failed("reading its flags"))
            .map_err(error)?;
        rustix::fs::fcntl_setfl(&fd, now - OFlags::DIRECT)
            .map_err(failed("setting its flags"))
            .map_err(error)?;
    }
    physical_block_bytes = physical_block_bytes.max(block_bytes);
    for (what, value) in [
        ("block size", block_bytes),
        ("physical block size", physical_block_bytes),
        ("memory alignment", memory_align_bytes),
    ] {
        if !value.is_power_of_two() || value > 1 << 20 {
            return Err(DeviceError::Unusable {
                path,
                what: format!("its {what} is {value}, which cannot be used; use another device"),
            });
        }
    }

    let found_bytes = match kind {
        DeviceKind::Block => rustix::fs::seek(&fd, rustix::fs::SeekFrom::End(0))
            .map_err(failed("asking its size"))
            .map_err(error)?,
        _ => {
            file_limit::check(&path, stat.stx_size)?;
            stat.stx_size
        }
    };
    let (found_bytes, expected_bytes) = match own_size(&spec) {
        Some(size_bytes) => (
            found_bytes.min(size_bytes),
            size_bytes.max(options.min_capacity_bytes),
        ),
        None => (found_bytes, options.min_capacity_bytes),
    };
    let capacity_bytes = found_bytes - found_bytes % u64::from(block_bytes);
    if capacity_bytes < expected_bytes {
        return Err(DeviceError::TooSmall {
            path,
            found_bytes,
            expected_bytes,
        });
    }
    if capacity_bytes == 0 || capacity_bytes > MAX_CAPACITY_BYTES {
        return Err(DeviceError::Unusable {
            path,
            what: format!(
                "it holds {}; a device needs at least a block and at most 2 EiB",
                format_bytes(found_bytes)
            ),
        });
    }
    let identity = match kind {
        DeviceKind::Block => Identity::Block {
            rdev: rustix::fs::makedev(stat.stx_rdev_major, stat.stx_rdev_minor),
        },
        _ => Identity::Inode {
            dev: rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor),
            ino: stat.stx_ino,
        },
    };
    let can_punch = can_punch(&fd, kind, stat.stx_size, &identity);
    if !can_punch && kind != DeviceKind::Null {
        notes.push("space cannot be given back to who is below this device".to_owned());
    }
    if kind == DeviceKind::Null {
        notes.push("it keeps no data: what volumes place there is lost, on purpose".to_owned());
    }
    Ok(Opened {
        fd,
        info: DeviceInfo {
            spec,
            kind,
            capacity_bytes,
            block_bytes,
            physical_block_bytes,
            memory_align_bytes,
            offset_align_bytes: block_bytes,
            identity,
            can_punch,
            direct,
            notes,
        },
    })
}

fn is_in_memory(fd: &OwnedFd) -> bool {
    const RAMFS_MAGIC: i64 = 0x8584_58f6;
    rustix::fs::fstatfs(fd)
        .is_ok_and(|below| [libc::TMPFS_MAGIC, RAMFS_MAGIC].contains(&below.f_type))
}

/// The size that the spec itself gives.
fn own_size(spec: &DeviceSpec) -> Option<u64> {
    match spec {
        DeviceSpec::Ram { size_bytes, .. } | DeviceSpec::Null { size_bytes, .. } => {
            Some(*size_bytes)
        }
        #[cfg(feature = "test-device")]
        DeviceSpec::Volatile { size_bytes, .. } | DeviceSpec::Faulty { size_bytes, .. } => {
            Some(*size_bytes)
        }
        _ => None,
    }
}

fn can_punch(fd: impl AsFd, kind: DeviceKind, size_bytes: u64, identity: &Identity) -> bool {
    use rustix::fs::FallocateFlags;
    match (kind, identity) {
        (DeviceKind::Null, _) => true,
        (DeviceKind::Block, Identity::Block { rdev }) => {
            // A punch on a block device is a zeroing that the device does by itself.
            let (major, minor) = (rustix::fs::major(*rdev), rustix::fs::minor(*rdev));
            // A partition has no queue of its own.
            ["queue", "../queue"].iter().any(|queue| {
                let limit =
                    format!("/sys/dev/block/{major}:{minor}/{queue}/write_zeroes_max_bytes");
                std::fs::read_to_string(limit).is_ok_and(|text| text.trim() != "0")
            })
        }
        // Past the end there is nothing to punch, so this only asks whether the file system knows how.
        _ => rustix::fs::fallocate(
            fd,
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            size_bytes.next_multiple_of(u64::from(FALLBACK_ALIGN_BYTES)),
            u64::from(FALLBACK_ALIGN_BYTES),
        )
        .is_ok(),
    }
}

fn is_read_only(major: u32, minor: u32) -> bool {
    std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/ro"))
        .is_ok_and(|text| text.trim() == "1")
}

fn check_type(path: &Path, kind: DeviceKind) -> Result<(), DeviceError> {
    refuse_type(path, kind, crate::spec::file_type(path)?)
}

fn refuse_type(path: &Path, kind: DeviceKind, found: FileType) -> Result<(), DeviceError> {
    let (wanted, wanted_name) = match kind {
        DeviceKind::Block => (FileType::BlockDevice, "a block device"),
        _ => (FileType::RegularFile, "a regular file"),
    };
    if found == wanted {
        return Ok(());
    }
    Err(DeviceError::WrongType {
        path: path.to_owned(),
        found: type_name(found),
        wanted: wanted_name,
    })
}

/// Makes a new sparse file, readable and writable by its owner alone.
pub(crate) fn create_file(path: &Path, size_bytes: u64) -> Result<(), DeviceError> {
    let error = |doing| move |errno| DeviceError::from_errno(path, doing, errno);
    if !path.exists() {
        file_limit::check(path, size_bytes)?;
    }
    let fd = rustix::fs::open(
        path,
        OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC,
        Mode::RUSR | Mode::WUSR,
    )
    .map_err(error("creating it"))?;
    rustix::fs::ftruncate(&fd, size_bytes).map_err(|errno| {
        // Half a device is worse than none; if even that fails, the first error is the one to tell.
        let _ = rustix::fs::unlink(path);
        match errno {
            Errno::FBIG | Errno::INVAL => DeviceError::Unusable {
                path: path.to_owned(),
                what: format!(
                    "its file system allows no file of {}; choose a smaller size",
                    format_bytes(size_bytes)
                ),
            },
            errno => DeviceError::from_errno(path, "setting its size", errno),
        }
    })
}
