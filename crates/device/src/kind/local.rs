//! Opens a local file or block device, and learns capacity, block size, alignment and identity.
//!
//! Devices open with `O_DIRECT`. The alignment is what the kernel reports (`STATX_DIOALIGN`), else
//! the logical block or 4 KiB. Engine and daemon learn the same.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Statx, StatxFlags};
use rustix::io::Errno;

use super::info::{DeviceInfo, DeviceKind, Identity, OpenOptions};
use super::spec::{DeviceSpec, MAX_CAPACITY_BYTES};
use crate::error::DeviceError;
use crate::file_limit;
use crate::size::format_bytes;

const MIN_BLOCK_BYTES: u32 = 512;
const FALLBACK_ALIGN_BYTES: u32 = 4096;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum CacheUse {
    /// For a ring: past the page cache.
    Direct,
    /// For the daemon's small reads and writes.
    Buffered,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Node {
    File,
    Block,
}

pub(crate) struct Local {
    pub(crate) kind: DeviceKind,
    pub(crate) node: Node,
    /// Use direct I/O where possible.
    pub(crate) wants_direct: bool,
    /// The file holds all data, so space in it can be freed.
    pub(crate) keeps: bool,
}

struct LocalOpening<'a> {
    local: &'a Local,
    path: PathBuf,
    fd: OwnedFd,
    stat: Statx,
    direct: bool,
    notes: Vec<String>,
}

struct Alignment {
    block_bytes: u32,
    physical_block_bytes: u32,
    memory_align_bytes: u32,
}

impl Local {
    pub(crate) fn open(
        &self,
        spec: &DeviceSpec,
        options: &OpenOptions,
        access: CacheUse,
    ) -> Result<(OwnedFd, DeviceInfo), DeviceError> {
        if let (true, Some(size_bytes)) = (options.create_missing, spec.size_bytes()) {
            create_missing(spec.path(), size_bytes)?;
        }
        let mut opening = LocalOpening::open(self, spec.path(), options.exclusive)?;
        let alignment = opening.alignment()?;
        if self.wants_direct && (!opening.direct || access == CacheUse::Buffered) {
            opening.clear_direct()?;
        }
        alignment.check(&opening.path)?;
        let capacity_bytes = opening.capacity(spec, options, alignment.block_bytes)?;
        let identity = opening.identity();
        let can_punch = !self.keeps || opening.can_punch(&identity);
        if !can_punch {
            let note = "freed space cannot be returned to the storage below this device";
            opening.notes.push(note.to_owned());
        }
        let info = DeviceInfo {
            spec: spec.clone(),
            kind: self.kind,
            capacity_bytes,
            block_bytes: alignment.block_bytes,
            physical_block_bytes: alignment.physical_block_bytes,
            memory_align_bytes: alignment.memory_align_bytes,
            offset_align_bytes: alignment.block_bytes,
            identity,
            can_punch,
            direct: opening.direct,
            notes: opening.notes,
        };
        Ok((opening.fd, info))
    }
}

impl<'a> LocalOpening<'a> {
    fn open(local: &'a Local, path: &Path, exclusive: bool) -> Result<Self, DeviceError> {
        let failed = |doing| move |errno| DeviceError::from_errno(path, doing, errno);
        // Check the type before opening: opening a pipe or a tape has effects. (O_NONBLOCK is no
        // help: io_uring would return EAGAIN where it should wait.)
        refuse_type(path, local.node, file_type(path)?)?;
        let mut flags = OFlags::RDWR | OFlags::CLOEXEC;
        if exclusive && local.node == Node::Block {
            flags |= OFlags::EXCL;
        }
        // Even for buffered access, so that daemon and engine learn the same.
        let mut direct = local.wants_direct;
        let opened = match direct {
            true => match rustix::fs::open(path, flags | OFlags::DIRECT, Mode::empty()) {
                Err(Errno::INVAL) => {
                    direct = false;
                    rustix::fs::open(path, flags, Mode::empty())
                }
                other => other,
            },
            false => rustix::fs::open(path, flags, Mode::empty()),
        };
        let fd = opened.map_err(failed("opening it"))?;
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::DIOALIGN;
        let stat = rustix::fs::statx(&fd, c"", AtFlags::EMPTY_PATH, wanted)
            .map_err(failed("inspecting it"))?;
        let found = FileType::from_raw_mode(u32::from(stat.stx_mode));
        refuse_type(path, local.node, found)?;
        let mut notes = Vec::new();
        if local.kind == DeviceKind::File && is_in_memory(&fd) {
            let note =
                "it is a file in memory (tmpfs): its data is lost when this machine restarts";
            notes.push(note.to_owned());
        }
        Ok(Self {
            local,
            path: path.to_owned(),
            fd,
            stat,
            direct,
            notes,
        })
    }

    fn failed(&self, doing: &'static str) -> impl FnOnce(Errno) -> DeviceError + use<'_> {
        move |errno| DeviceError::from_errno(&self.path, doing, errno)
    }

    fn alignment(&mut self) -> Result<Alignment, DeviceError> {
        let mut found = Alignment {
            block_bytes: MIN_BLOCK_BYTES,
            physical_block_bytes: FALLBACK_ALIGN_BYTES,
            memory_align_bytes: 1,
        };
        if self.local.node == Node::Block {
            // Such a device opens for writing, and then refuses each write.
            if is_read_only(self.stat.stx_rdev_major, self.stat.stx_rdev_minor) {
                let path = self.path.clone();
                return Err(DeviceError::ReadOnly { path });
            }
            found.block_bytes = rustix::fs::ioctl_blksszget(&self.fd)
                .map_err(self.failed("reading its block size"))?;
            found.physical_block_bytes = rustix::fs::ioctl_blkpbszget(&self.fd)
                .map_err(self.failed("reading its physical block size"))?;
        }
        let mask = StatxFlags::from_bits_retain(self.stat.stx_mask);
        let reported = mask.contains(StatxFlags::DIOALIGN);
        if self.direct && reported && self.stat.stx_dio_offset_align == 0 {
            // The file has no direct I/O, for example because it is encrypted.
            self.direct = false;
        }
        if self.direct && reported {
            found.memory_align_bytes = self.stat.stx_dio_mem_align;
            found.block_bytes = found.block_bytes.max(self.stat.stx_dio_offset_align);
        } else if self.direct {
            found.memory_align_bytes = FALLBACK_ALIGN_BYTES;
            if self.local.node != Node::Block {
                found.block_bytes = FALLBACK_ALIGN_BYTES;
            }
            self.notes.push(format!(
                "the kernel does not report the alignment for direct I/O here; {} is assumed",
                format_bytes(u64::from(FALLBACK_ALIGN_BYTES))
            ));
        } else if self.local.wants_direct {
            let note = "direct I/O is not possible here; data goes through the page cache, which costs memory and time";
            self.notes.push(note.to_owned());
        }
        found.physical_block_bytes = found.physical_block_bytes.max(found.block_bytes);
        Ok(found)
    }

    fn clear_direct(&self) -> Result<(), DeviceError> {
        let now = rustix::fs::fcntl_getfl(&self.fd).map_err(self.failed("reading its flags"))?;
        rustix::fs::fcntl_setfl(&self.fd, now - OFlags::DIRECT)
            .map_err(self.failed("setting its flags"))
    }

    fn capacity(
        &self,
        spec: &DeviceSpec,
        options: &OpenOptions,
        block_bytes: u32,
    ) -> Result<u64, DeviceError> {
        let path = || self.path.clone();
        let found_bytes = match self.local.node {
            Node::Block => rustix::fs::seek(&self.fd, rustix::fs::SeekFrom::End(0))
                .map_err(self.failed("reading its size"))?,
            Node::File => {
                file_limit::check(&self.path, self.stat.stx_size)?;
                self.stat.stx_size
            }
        };
        let (found_bytes, expected_bytes) = match spec.size_bytes() {
            Some(size_bytes) => (
                found_bytes.min(size_bytes),
                size_bytes.max(options.min_capacity_bytes),
            ),
            None => (found_bytes, options.min_capacity_bytes),
        };
        let capacity_bytes = found_bytes - found_bytes % u64::from(block_bytes);
        if capacity_bytes < expected_bytes {
            return Err(DeviceError::TooSmall {
                path: path(),
                found_bytes,
                expected_bytes,
            });
        }
        if capacity_bytes == 0 || capacity_bytes > MAX_CAPACITY_BYTES {
            return Err(DeviceError::Unusable {
                path: path(),
                what: format!(
                    "it holds {}; a device must hold at least a block and at most 2 EiB",
                    format_bytes(found_bytes)
                ),
            });
        }
        Ok(capacity_bytes)
    }

    fn identity(&self) -> Identity {
        let stat = &self.stat;
        match self.local.node {
            Node::Block => Identity::Block {
                rdev: rustix::fs::makedev(stat.stx_rdev_major, stat.stx_rdev_minor),
            },
            Node::File => Identity::Inode {
                dev: rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor),
                ino: stat.stx_ino,
            },
        }
    }

    fn can_punch(&self, identity: &Identity) -> bool {
        use rustix::fs::FallocateFlags;
        if let Identity::Block { rdev } = identity {
            // On a block device, a punch means that the device zeroes by itself.
            let (major, minor) = (rustix::fs::major(*rdev), rustix::fs::minor(*rdev));
            // A partition has no queue of its own.
            return ["queue", "../queue"].iter().any(|queue| {
                let limit =
                    format!("/sys/dev/block/{major}:{minor}/{queue}/write_zeroes_max_bytes");
                std::fs::read_to_string(limit).is_ok_and(|text| text.trim() != "0")
            });
        }
        // Past the end there is nothing to punch; this only probes the file system.
        let align = u64::from(FALLBACK_ALIGN_BYTES);
        let end = self.stat.stx_size.next_multiple_of(align);
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(self.fd.as_fd(), mode, end, align).is_ok()
    }
}

impl Alignment {
    fn check(&self, path: &Path) -> Result<(), DeviceError> {
        for (what, value) in [
            ("block size", self.block_bytes),
            ("physical block size", self.physical_block_bytes),
            ("memory alignment", self.memory_align_bytes),
        ] {
            if !value.is_power_of_two() || value > 1 << 20 {
                return Err(DeviceError::Unusable {
                    path: path.to_owned(),
                    what: format!(
                        "its {what} is {value}, which cannot be used; use another device"
                    ),
                });
            }
        }
        Ok(())
    }
}

fn is_in_memory(fd: &OwnedFd) -> bool {
    const RAMFS_MAGIC: i64 = 0x8584_58f6;
    rustix::fs::fstatfs(fd)
        .is_ok_and(|below| [libc::TMPFS_MAGIC, RAMFS_MAGIC].contains(&below.f_type))
}

fn is_read_only(major: u32, minor: u32) -> bool {
    std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/ro"))
        .is_ok_and(|text| text.trim() == "1")
}

pub(crate) fn file_type(path: &Path) -> Result<FileType, DeviceError> {
    let stat = rustix::fs::stat(path)
        .map_err(|errno| DeviceError::from_errno(path, "inspecting it", errno))?;
    Ok(FileType::from_raw_mode(stat.st_mode))
}

pub(crate) fn type_name(kind: FileType) -> &'static str {
    match kind {
        FileType::RegularFile => "a regular file",
        FileType::BlockDevice => "a block device",
        FileType::Directory => "a directory",
        FileType::CharacterDevice => "a character device",
        FileType::Fifo => "a pipe",
        FileType::Socket => "a socket",
        _ => "something else",
    }
}

fn refuse_type(path: &Path, node: Node, found: FileType) -> Result<(), DeviceError> {
    let (wanted, wanted_name) = match node {
        Node::Block => (FileType::BlockDevice, "a block device"),
        Node::File => (FileType::RegularFile, "a regular file"),
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

pub(crate) fn create_missing(path: &Path, size_bytes: u64) -> Result<(), DeviceError> {
    match create_file(path, size_bytes) {
        Ok(()) | Err(DeviceError::Exists { .. }) => Ok(()),
        Err(other) => Err(other),
    }
}

/// Creates a sparse file, accessible to its owner only.
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
        // Half a device is worse than none. If this fails too, the first error matters more.
        let _ = rustix::fs::unlink(path);
        match errno {
            Errno::FBIG | Errno::INVAL => DeviceError::Unusable {
                path: path.to_owned(),
                what: format!(
                    "its file system does not allow a file of {}; choose a smaller size",
                    format_bytes(size_bytes)
                ),
            },
            errno => DeviceError::from_errno(path, "setting its size", errno),
        }
    })
}
