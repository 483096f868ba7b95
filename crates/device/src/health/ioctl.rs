//! The two ioctls that carry a command to a drive, and its answer into a buffer.
//!
//! Both end with an error when the kernel's time limit has passed, and the kernel then resets the
//! drive. So the limits are the kernel's own.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

use super::ata::{PAGE_BYTES, ReadCommand};
use super::in_words;

/// `linux/nvme_ioctl.h`.
const NVME_IOCTL_ADMIN_CMD: u64 = 0xC048_4E41;
/// `scsi/sg.h`.
const SG_IO: u64 = 0x2285;
const SG_DXFER_FROM_DEV: i32 = -3;
/// The kernel's own limit for disks.
const SG_LIMIT_MS: u32 = 30_000;
/// ATA PASS-THROUGH(16) (SAT-3, 12.2.2.3).
const ATA_PASS_THROUGH_16: u8 = 0x85;
const PROTOCOL_PIO_DATA_IN: u8 = 4 << 1;
/// From the device, in blocks, as many as COUNT says.
const READS_COUNTED_BLOCKS: u8 = 1 << 3 | 1 << 2 | 2;

#[derive(Debug, Clone, Copy)]
pub(super) struct NvmeAdmin {
    pub(super) opcode: u8,
    pub(super) namespace: u32,
    pub(super) dword_10: u32,
}

/// `struct nvme_passthru_cmd` (`linux/nvme_ioctl.h`).
#[repr(C)]
#[derive(Default)]
struct NvmePassthrough {
    opcode: u8,
    flags: u8,
    reserved: u16,
    namespace: u32,
    dwords_2: [u32; 2],
    metadata: u64,
    address: u64,
    metadata_bytes: u32,
    data_bytes: u32,
    dwords_10: [u32; 6],
    /// 0: the kernel's limit.
    limit_ms: u32,
    result: u32,
}
const _: () = assert!(size_of::<NvmePassthrough>() == 72);

/// `struct sg_io_hdr` (`scsi/sg.h`).
#[repr(C)]
struct SgHeader {
    interface: i32,
    direction: i32,
    command_bytes: u8,
    sense_bytes: u8,
    pieces: u16,
    data_bytes: u32,
    data: *mut u8,
    command: *const u8,
    sense: *mut u8,
    limit_ms: u32,
    flags: u32,
    id: i32,
    user: *mut u8,
    status: u8,
    masked_status: u8,
    message_status: u8,
    sense_written: u8,
    host_status: u16,
    driver_status: u16,
    residual: i32,
    duration_ms: u32,
    info: u32,
}
#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<SgHeader>() == 88);

/// Sends an admin command that fills `into`.
pub(super) fn nvme_admin<const N: usize>(
    fd: BorrowedFd<'_>,
    command: NvmeAdmin,
    into: &mut [u8; N],
) -> Result<(), String> {
    let mut request = NvmePassthrough {
        opcode: command.opcode,
        namespace: command.namespace,
        address: into.as_mut_ptr().expose_provenance() as u64,
        data_bytes: N as u32,
        dwords_10: [command.dword_10, 0, 0, 0, 0, 0],
        ..NvmePassthrough::default()
    };
    // SAFETY: the request has the layout that this ioctl expects, or the descriptor's driver does
    // not know the ioctl. The kernel writes at most `data_bytes` to `address`, which is `into`, and
    // only during the call.
    let answer = unsafe {
        libc::ioctl(
            fd.as_raw_fd(),
            NVME_IOCTL_ADMIN_CMD as libc::Ioctl,
            &raw mut request,
        )
    };
    let what = match command.opcode {
        super::nvme::IDENTIFY => "Identify",
        _ => "Get Log Page",
    };
    match answer {
        0 => Ok(()),
        1.. => Err(format!("it answers {what} with status {answer:#x}")),
        _ => Err(refusal(what, "CAP_SYS_ADMIN")),
    }
}

/// Sends an ATA command that reads a page.
pub(super) fn ata_read(
    fd: BorrowedFd<'_>,
    command: &ReadCommand,
    into: &mut [u8; PAGE_BYTES],
) -> Result<(), String> {
    let [low, mid, high] = command.lba;
    let cdb: [u8; 16] = [
        ATA_PASS_THROUGH_16,
        PROTOCOL_PIO_DATA_IN,
        READS_COUNTED_BLOCKS,
        0,
        command.feature,
        0,
        1,
        0,
        low,
        0,
        mid,
        0,
        high,
        0,
        command.command,
        0,
    ];
    let mut sense = [0; 32];
    let mut header = SgHeader {
        interface: i32::from(b'S'),
        direction: SG_DXFER_FROM_DEV,
        command_bytes: cdb.len() as u8,
        sense_bytes: sense.len() as u8,
        pieces: 0,
        data_bytes: PAGE_BYTES as u32,
        data: into.as_mut_ptr(),
        command: cdb.as_ptr(),
        sense: sense.as_mut_ptr(),
        limit_ms: SG_LIMIT_MS,
        flags: 0,
        id: 0,
        user: std::ptr::null_mut(),
        status: 0,
        masked_status: 0,
        message_status: 0,
        sense_written: 0,
        host_status: 0,
        driver_status: 0,
        residual: 0,
        duration_ms: 0,
        info: 0,
    };
    // SAFETY: the header has the layout that this ioctl expects, or the descriptor's driver does
    // not know the ioctl. Its pointers and lengths are those of `cdb`, `sense` and `into`, which
    // outlive the call; the kernel writes to the last two, and only during the call.
    let answer = unsafe { libc::ioctl(fd.as_raw_fd(), SG_IO as libc::Ioctl, &raw mut header) };
    if answer < 0 {
        return Err(refusal(command.name, "CAP_SYS_RAWIO"));
    }
    let statuses = [
        header.host_status,
        header.driver_status,
        header.status.into(),
    ];
    if statuses != [0; 3] {
        let [host, driver, status] = statuses;
        return Err(format!(
            "it refuses {}: host status {host:#x}, driver status {driver:#x}, SCSI status {status:#x}",
            command.name
        ));
    }
    if header.residual != 0 {
        return Err(format!("its answer to {} is too short", command.name));
    }
    Ok(())
}

/// The words for the last error of this thread.
fn refusal(what: &str, capability: &str) -> String {
    let error = std::io::Error::last_os_error();
    let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
    match errno {
        Errno::ACCESS | Errno::PERM => {
            format!("the kernel lets only a process with {capability} ask it ({what})")
        }
        errno => format!("{what} failed: {}", in_words(errno)),
    }
}
