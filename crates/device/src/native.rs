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
//! partition, metadata, zones, no such character device, no right to open it) means that it isn't used natively.
//!
//! **What it does not do.** No polling of the drive's queues, no admin commands.
#![allow(unsafe_code)]

use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::mem::Memory;
use crate::op::{Op, OpKind};
use crate::ring::Io;

const PAGE_BYTES: u32 = 4096;
/// `NVME_IOCTL_ID`: the namespace's number (`linux/nvme_ioctl.h`).
const NVME_IOCTL_ID: u64 = 0x4e40;
/// NVM Command Set 1.0, 3.2.4 and 3.2.6.
const OPCODE_WRITE: u8 = 0x01;
const OPCODE_READ: u8 = 0x02;
/// Force Unit Access, in command dword 12.
const FUA: u32 = 1 << 30;

/// `struct nvme_uring_cmd`, as bytes of an entry.
pub(crate) type CommandBytes = [u8; 80];

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
    pub(crate) fn find(major: u32, minor: u32, block: BorrowedFd<'_>) -> Option<Self> {
        let link = fs::read_link(format!("/sys/dev/block/{major}:{minor}")).ok()?;
        let name = link.file_name()?.to_str()?;
        let generic = generic_name(name)?;
        let sys = Path::new("/sys/block").join(name);
        let text = |path: &str| fs::read_to_string(sys.join(path)).ok();
        let number = |path: &str| text(path)?.trim().parse::<u64>().ok();
        let plain = number("metadata_bytes")? == 0 && text("queue/zoned")?.trim() == "none";
        let block_bytes = number("queue/logical_block_size")?;
        if !plain || !block_bytes.is_power_of_two() || block_bytes < 512 {
            return None;
        }
        // A page more than it has, if it begins within one.
        let segments = number("queue/max_segments")?.saturating_sub(1);
        let max_bytes = (number("queue/max_hw_sectors_kb")?.checked_mul(1024)?)
            .min(segments * u64::from(PAGE_BYTES))
            .min(1 << 30);
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let device = fs::read_to_string(format!("/sys/class/nvme-generic/{generic}/dev")).ok()?;
        let fd = rustix::fs::open(format!("/dev/{generic}"), flags, Mode::empty()).ok()?;
        let stat = rustix::fs::fstat(&fd).ok()?;
        let (major, minor) = (
            rustix::fs::major(stat.st_rdev),
            rustix::fs::minor(stat.st_rdev),
        );
        let is_it = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
            && device.trim() == format!("{major}:{minor}");
        let namespace = namespace(fd.as_fd())?;
        if !is_it || namespace != self::namespace(block)? || max_bytes < block_bytes {
            return None;
        }
        Some(Self {
            fd,
            namespace,
            block_shift: block_bytes.trailing_zeros(),
            max_bytes,
            refused: AtomicBool::new(false),
            done: AtomicU64::new(0),
        })
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
    pub(crate) fn io(&self, op: &Op) -> Option<Io<'_>> {
        let (opcode, fua) = match op.kind {
            OpKind::Read => (OPCODE_READ, false),
            OpKind::Write => (OPCODE_WRITE, op.dsync),
            _ => return None,
        };
        let memory = op.memory()?;
        let fits = match memory {
            Memory::One(_) => true,
            Memory::Many(bufs) => bufs.are_of_pages(PAGE_BYTES as usize),
        };
        let blocks = op.len_bytes >> self.block_shift;
        let whole = blocks << self.block_shift == op.len_bytes && (1..=1 << 16).contains(&blocks);
        let refused = self.refused.load(Ordering::Relaxed);
        if refused || !fits || !whole || op.len_bytes > self.max_bytes {
            return None;
        }
        let (address, len, vector) = match memory {
            Memory::One(buf) => (buf.ptr().addr().get(), buf.len_bytes(), false),
            Memory::Many(bufs) => (bufs.ptr().addr().get(), bufs.count(), true),
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
        Some(Io::Native {
            fd: self.fd.as_fd(),
            vector,
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

fn namespace(fd: BorrowedFd<'_>) -> Option<u32> {
    // SAFETY: this request takes no argument and answers with a number; a device that doesn't know it says so.
    let answer = unsafe { libc::ioctl(fd.as_raw_fd(), NVME_IOCTL_ID as libc::Ioctl) };
    u32::try_from(answer).ok().filter(|n| *n > 0)
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
