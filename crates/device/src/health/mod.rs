//! Health of the drive below a device: SMART of NVMe and SATA drives.
//!
//! A partition, a loop device, a mapped device and a file lie on a drive; [`below`] finds it in
//! sysfs. Each command has the kernel's own time limit, because a shorter one would reset the
//! drive. So a call may take minutes, and belongs on a thread of its own.

pub mod ata;
mod below;
mod ioctl;
pub mod nvme;

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use self::below::Drive;
use crate::kind::{DeviceInfo, DeviceKind, Identity};

/// The command set that a drive answers in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriveSource {
    /// The SMART / Health log page of NVMe.
    Nvme,
    /// SMART attributes of ATA.
    Ata,
}

/// Bits of [`DriveHealth::critical_warning`], with the drive as the subject (NVMe Base 2.0, figure
/// 207).
pub const CRITICAL_WARNINGS: [(u8, &str); 6] = [
    (SPARE, "has less spare capacity than its threshold"),
    (TEMPERATURE, "is outside its temperature limits"),
    (
        RELIABILITY,
        "is degraded in its reliability, by media errors or internal errors",
    ),
    (READ_ONLY, "only reads: its media has become read-only"),
    (BACKUP, "can't save its volatile memory at a power cut"),
    (
        PERSISTENT_MEMORY,
        "has unreliable or read-only persistent memory",
    ),
];
const SPARE: u8 = 1 << 0;
const TEMPERATURE: u8 = 1 << 1;
const RELIABILITY: u8 = 1 << 2;
const READ_ONLY: u8 = 1 << 3;
const BACKUP: u8 = 1 << 4;
const PERSISTENT_MEMORY: u8 = 1 << 5;

/// The health of a drive. `None` is what its kind, or this drive, does not report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriveHealth {
    /// The command set.
    pub source: DriveSource,
    /// Model, at most 40 printable characters.
    pub model: String,
    /// Serial number, at most 20 printable characters.
    pub serial: String,
    /// Firmware revision, at most 8 printable characters.
    pub firmware: String,
    /// Bits of [`CRITICAL_WARNINGS`]. For ATA, from attributes at or below their thresholds.
    pub critical_warning: u8,
    /// Temperature, degrees Celsius.
    pub temperature_c: Option<i16>,
    /// Spare capacity left, per cent.
    pub spare_percent: Option<u8>,
    /// Spare capacity below which the drive warns, per cent.
    pub spare_threshold_percent: Option<u8>,
    /// Life used, per cent of the maker's estimate; may exceed 100.
    pub used_percent: Option<u8>,
    /// Media errors that the drive could not correct.
    pub media_errors: Option<u64>,
    /// Hours in operation.
    pub power_on_hours: Option<u64>,
    /// Power cuts without an orderly shutdown.
    pub unsafe_shutdowns: Option<u64>,
    /// Sectors replaced by spare ones.
    pub reallocated_sectors: Option<u64>,
    /// Sectors that can't be read now, and are replaced when written.
    pub pending_sectors: Option<u64>,
    /// Sectors that an offline test could not correct.
    pub uncorrectable_sectors: Option<u64>,
}

/// Why nothing is known of a drive's health.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoHealth {
    /// The device does not lie on one drive that reports its health.
    #[error("{0}")]
    NoDrive(String),
    /// The drive exists, but did not say.
    #[error("/dev/{name}: {why}")]
    Refused {
        /// The drive's name below `/dev`.
        name: String,
        /// The reason.
        why: String,
    },
}

/// Reads the health of the drive that an open device lies on; also returns the drive's path.
pub(crate) fn read(info: &DeviceInfo) -> Result<(String, DriveHealth), NoHealth> {
    let number = match info.identity {
        _ if info.kind == DeviceKind::Null => {
            return Err(NoHealth::NoDrive("its data lies on no drive".to_owned()));
        }
        Identity::Inode { dev, .. } => dev,
        Identity::Block { rdev } => rdev,
        Identity::Remote { .. } => {
            return Err(NoHealth::NoDrive("it lies on another machine".to_owned()));
        }
    };
    let drive = below::drive(Path::new("/sys"), number).map_err(NoHealth::NoDrive)?;
    match ask(&drive) {
        Ok(health) => Ok((format!("/dev/{}", drive.name), health)),
        Err(why) => Err(NoHealth::Refused {
            name: drive.name,
            why,
        }),
    }
}

fn ask(drive: &Drive) -> Result<DriveHealth, String> {
    let fd = open(drive)?;
    match drive.source {
        DriveSource::Nvme => {
            let mut identify = [0; nvme::IDENTIFY_BYTES];
            let identify_command = ioctl::NvmeAdmin {
                opcode: nvme::IDENTIFY,
                namespace: 0,
                dword_10: nvme::IDENTIFY_CONTROLLER,
            };
            let mut log = [0; nvme::LOG_BYTES];
            let log_command = ioctl::NvmeAdmin {
                opcode: nvme::GET_LOG_PAGE,
                namespace: u32::MAX,
                dword_10: nvme::SMART_LOG,
            };
            ioctl::nvme_admin(fd.as_fd(), identify_command, &mut identify)?;
            ioctl::nvme_admin(fd.as_fd(), log_command, &mut log)?;
            Ok(nvme::health(&identify, &log))
        }
        DriveSource::Ata => {
            let mut pages = [[0; ata::PAGE_BYTES]; 3];
            let [identify, data, thresholds] = &mut pages;
            ioctl::ata_read(fd.as_fd(), &ata::IDENTIFY_DEVICE, identify)?;
            ata::check_identity(identify)?;
            ioctl::ata_read(fd.as_fd(), &ata::SMART_READ_DATA, data)?;
            ioctl::ata_read(fd.as_fd(), &ata::SMART_READ_THRESHOLDS, thresholds)?;
            ata::health(identify, data, thresholds)
        }
    }
}

fn open(drive: &Drive) -> Result<OwnedFd, String> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = rustix::fs::open(format!("/dev/{}", drive.name), flags, Mode::empty());
    let fd = opened.map_err(|errno| format!("can't open it: {}", in_words(errno)))?;
    let stat = rustix::fs::fstat(&fd).map_err(in_words)?;
    let is_block = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
    if !is_block || stat.st_rdev != drive.number {
        return Err("there is something else at this path".to_owned());
    }
    Ok(fd)
}

fn in_words(errno: Errno) -> String {
    std::io::Error::from(errno).to_string()
}

/// Text of a drive: printable ASCII, without the padding.
fn text(bytes: impl Iterator<Item = u8>) -> String {
    let printable = |byte: u8| match byte {
        b' '..=b'~' => char::from(byte),
        0 => ' ',
        _ => '?',
    };
    let text: String = bytes.map(printable).collect();
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drives_text_is_printable_and_without_padding() {
        assert_eq!(
            text(b"  QEMU NVMe Ctrl  \0\0".iter().copied()),
            "QEMU NVMe Ctrl"
        );
        assert_eq!(text(b"a\x1b[2J\xffb".iter().copied()), "a?[2J?b");
        assert_eq!(text([0; 40].into_iter()), "");
    }
}
