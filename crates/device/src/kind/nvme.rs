//! Sends reads and writes to a drive as NVMe commands, past the kernel's block layer.
//!
//! A namespace has a character device (`/dev/ngXnY`) that takes NVMe commands through io_uring. Its
//! descriptor carries a fence lock too. A command that is too long, has pieces that don't fit
//! pages, or fails goes through the block device; there the kernel splits, retries and judges.
//! Flushes and zeroing always do: they reach the same drive. Partitions, metadata and zones rule
//! out native use, and so does a missing or forbidden character device. That must be equal for all
//! engines of a pool, so don't withdraw the permission while one runs.
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
/// The namespace's number (`linux/nvme_ioctl.h`).
const NVME_IOCTL_ID: u64 = 0x4e40;
/// NVM Command Set 1.0, 3.2.4 and 3.2.6.
const OPCODE_WRITE: u8 = 0x01;
const OPCODE_READ: u8 = 0x02;
const FUA: u32 = 1 << 30;

#[derive(Debug)]
pub(crate) struct Native {
    fd: OwnedFd,
    namespace: u32,
    block_shift: u32,
    max_bytes: u64,
    refused: AtomicBool,
    done: AtomicU64,
}

impl Native {
    /// Finds the character device of a block device, if usable. If that can't be determined, the
    /// result must be an error: an earlier engine's commands lock only this descriptor, so a
    /// successor without it would not wait for them.
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
        // Data that begins within a page touches one page more.
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

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(crate) fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// `None`: use the block device.
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
        // The layout of `struct nvme_uring_cmd` (`linux/nvme_ioctl.h`): the command's first dwords
        // without its id, then addresses and lengths in place of its pointers, then dwords 10 to
        // 15.
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

    /// Whether the operation succeeded.
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

/// `ng0n1` for `nvme0n1`; `None` for partitions, multipath paths and others.
fn generic_name(name: &str) -> Option<String> {
    let rest = name.strip_prefix("nvme")?;
    let (controller, namespace) = rest.split_once('n')?;
    let is_number = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    (is_number(controller) && is_number(namespace)).then(|| format!("ng{rest}"))
}

/// `None` if it doesn't exist or may not be opened.
fn known<T>(found: std::io::Result<T>) -> Result<Option<T>, Errno> {
    use std::io::ErrorKind::{NotFound, PermissionDenied};
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if matches!(error.kind(), NotFound | PermissionDenied) => Ok(None),
        Err(error) => Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
    }
}

fn namespace(fd: BorrowedFd<'_>) -> Result<u32, Errno> {
    // SAFETY: this request takes no argument and returns a number, or an error on another device.
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
