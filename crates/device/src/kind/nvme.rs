//! An NVMe namespace, asked in its own language.
//!
//! **Purpose.** A read or write becomes an NVMe command that goes to the drive past the kernel's block layer: less work
//! for each.
//!
//! **Design.** Beside a namespace's block device the kernel has a character device (`/dev/ngXnY`) that takes NVMe
//! commands through io_uring. Its descriptor is a second one of the same device, and carries a lock of the fence as the
//! first does. A command that it can't take as it is (too long, pieces that don't fit pages), or that ends with
//! anything but success, goes the usual way through the block device: there the kernel splits, tries again, and judges.
//! Flushes and zeroing always go that way: they reach the same drive. Whatever is unusual about a namespace (a
//! partition, metadata, zones, no such character device, no right to open it) means that it isn't used natively. That
//! must be the same for each engine of a pool: the right to it is not to be taken away while one runs.
//!
//! **What it does not do.** No polling of the drive's queues, no admin commands.
#![allow(unsafe_code)]

use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::mem::IoMemory;
use crate::op::{Op, OpKind};
use crate::ring::{CommandBytes, RingIo};

const PAGE_BYTES: u32 = 4096;
/// `NVME_IOCTL_ID`: the namespace's number (`linux/nvme_ioctl.h`).
const NVME_IOCTL_ID: u64 = 0x4e40;
/// NVM Command Set 1.0, 3.2.4 and 3.2.6.
const OPCODE_WRITE: u8 = 0x01;
const OPCODE_READ: u8 = 0x02;
/// Force Unit Access, in command dword 12.
const FUA: u32 = 1 << 30;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Native {
    fd: OwnedFd,
    namespace: u32,
    block_shift: u32,
    max_bytes: u64,
    /// It was refused by the kernel: never again.
    refused: AtomicBool,
    done: AtomicU64,
}

impl Native {
    /// That of the block device with this number; `None`: it is none, or not to be used.
    ///
    /// # Errors
    /// The system's, where it can't be told. It must be told: an earlier engine's commands hold the lock of this
    /// descriptor alone, so a successor that went without would not wait for them.
    pub(crate) fn find(
        major: u32,
        minor: u32,
        block: BorrowedFd<'_>,
    ) -> Result<Option<Self>, Errno> {
        let link = format!("/sys/dev/block/{major}:{minor}");
        let Some(link) = known(fs::read_link(link))? else {
            return Ok(None);
        };
        let name = link.file_name().and_then(|name| name.to_str());
        let Some((name, generic)) = name.and_then(|name| Some((name, generic_name(name)?))) else {
            return Ok(None);
        };
        let sys = Path::new("/sys/block").join(name);
        let text = |path: &str| known(fs::read_to_string(sys.join(path)));
        let number = |path: &str| -> Result<u64, Errno> {
            Ok(text(path)?
                .and_then(|text| text.trim().parse().ok())
                .unwrap_or(0))
        };
        let has_no_metadata = text("metadata_bytes")?.is_some_and(|text| text.trim() == "0");
        let has_no_zones = text("queue/zoned")?.is_some_and(|text| text.trim() == "none");
        let block_bytes = number("queue/logical_block_size")?;
        // A page more than it has, if it begins within one.
        let segments = number("queue/max_segments")?.saturating_sub(1);
        let max_bytes = (number("queue/max_hw_sectors_kb")?.saturating_mul(1024))
            .min(segments * u64::from(PAGE_BYTES))
            .min(1 << 30);
        let is_usual = block_bytes.is_power_of_two() && (512..=max_bytes).contains(&block_bytes);
        let device = known(fs::read_to_string(format!(
            "/sys/class/nvme-generic/{generic}/dev"
        )))?;
        let Some(device) = device.filter(|_| has_no_metadata && has_no_zones && is_usual) else {
            return Ok(None);
        };
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let opened = rustix::fs::open(format!("/dev/{generic}"), flags, Mode::empty());
        let Some(fd) = known(opened.map_err(std::io::Error::from))? else {
            return Ok(None);
        };
        let stat = rustix::fs::fstat(&fd)?;
        let (major, minor) = (
            rustix::fs::major(stat.st_rdev),
            rustix::fs::minor(stat.st_rdev),
        );
        let is_it = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
            && device.trim() == format!("{major}:{minor}");
        let namespace = namespace(fd.as_fd())?;
        if !is_it || namespace != self::namespace(block)? {
            return Ok(None);
        }
        Ok(Some(Self {
            fd,
            namespace,
            block_shift: block_bytes.trailing_zeros(),
            max_bytes,
            refused: AtomicBool::new(false),
            done: AtomicU64::new(0),
        }))
    }

    /// What carries a lock of the fence besides the block device's.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Commands that ended well.
    pub(crate) fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// The command for an operation that was checked; `None`: it goes the usual way.
    pub(crate) fn io(&self, op: &Op) -> Option<RingIo<'_>> {
        let (opcode, fua) = match op.kind {
            OpKind::Read => (OPCODE_READ, false),
            OpKind::Write => (OPCODE_WRITE, op.dsync),
            _ => return None,
        };
        let memory = op.memory()?;
        let fits = match memory {
            IoMemory::One(_) => true,
            IoMemory::Many(bufs) => bufs.are_of_pages(PAGE_BYTES as usize),
        };
        let blocks = op.len_bytes >> self.block_shift;
        let whole = blocks << self.block_shift == op.len_bytes && (1..=1 << 16).contains(&blocks);
        let refused = self.refused.load(Ordering::Relaxed);
        if refused || !fits || !whole || op.len_bytes > self.max_bytes {
            return None;
        }
        let (address, len) = match memory {
            IoMemory::One(buf) => (buf.ptr().addr().get(), buf.len_bytes()),
            IoMemory::Many(bufs) => (bufs.ptr().addr().get(), bufs.count()),
        };
        let lba = op.offset_bytes >> self.block_shift;
        // As `struct nvme_uring_cmd` (`linux/nvme_ioctl.h`) has it: the first dwords of the command but its number,
        // then addresses and lengths in place of its pointers, then dwords 10 to 15.
        let mut bytes: CommandBytes = [0; 80];
        bytes[0] = opcode;
        bytes[4..8].copy_from_slice(&self.namespace.to_ne_bytes());
        bytes[24..32].copy_from_slice(&(address as u64).to_ne_bytes());
        bytes[36..40].copy_from_slice(&len.to_ne_bytes());
        bytes[40..48].copy_from_slice(&lba.to_ne_bytes());
        // At most 2^16, and 0's based.
        let dword_12 = (blocks - 1) as u32 | if fua { FUA } else { 0 };
        bytes[48..52].copy_from_slice(&dword_12.to_ne_bytes());
        Some(RingIo::Native {
            fd: self.fd.as_fd(),
            memory,
            bytes,
        })
    }

    /// Judges a result: whether the operation is done. Otherwise it goes the usual way.
    pub(crate) fn is_done(&self, result: i32) -> bool {
        if result == 0 {
            self.done.fetch_add(1, Ordering::Relaxed);
            return true;
        }
        let refusals = [
            Errno::OPNOTSUPP,
            Errno::NOTTY,
            Errno::ACCESS,
            Errno::PERM,
            Errno::NOSYS,
        ];
        if refusals.iter().any(|errno| errno.raw_os_error() == -result) {
            self.refused.store(true, Ordering::Relaxed);
        }
        false
    }
}

/// `ng0n1` for `nvme0n1`; `None` for partitions, paths of multipath, and what else there is.
fn generic_name(name: &str) -> Option<String> {
    let rest = name.strip_prefix("nvme")?;
    let (controller, namespace) = rest.split_once('n')?;
    let is_number = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    (is_number(controller) && is_number(namespace)).then(|| format!("ng{rest}"))
}

/// What is there; `None` where there is nothing, or no right to it.
fn known<T>(found: std::io::Result<T>) -> Result<Option<T>, Errno> {
    use std::io::ErrorKind::{NotFound, PermissionDenied};
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if matches!(error.kind(), NotFound | PermissionDenied) => Ok(None),
        Err(error) => Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
    }
}

fn namespace(fd: BorrowedFd<'_>) -> Result<u32, Errno> {
    // SAFETY: this request takes no argument and answers with a number; a device that doesn't know it says so.
    let answer = unsafe { libc::ioctl(fd.as_raw_fd(), NVME_IOCTL_ID as libc::Ioctl) };
    u32::try_from(answer).map_err(|_| {
        let error = std::io::Error::last_os_error();
        Errno::from_io_error(&error).unwrap_or(Errno::IO)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_namespaces_have_a_native_name() {
        assert_eq!(generic_name("nvme0n1").as_deref(), Some("ng0n1"));
        assert_eq!(generic_name("nvme12n34").as_deref(), Some("ng12n34"));
        for other in [
            "nvme0n1p1",
            "nvme0c0n1",
            "sda",
            "loop0",
            "nvme0",
            "nvmen1",
            "nvme0n",
        ] {
            assert_eq!(generic_name(other), None, "{other}");
        }
    }
}
