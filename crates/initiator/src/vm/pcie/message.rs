//! vfio-user messages of the client, from the "vfio-user Protocol Specification" (version 0.1, as
//! QEMU speaks it).
//!
//! A doorbell write asks for no reply, like QEMU's posted writes.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use super::super::Error;
use super::super::socket::Socket;

mod command {
    pub(super) const VERSION: u16 = 1;
    pub(super) const DMA_MAP: u16 = 2;
    pub(super) const DMA_UNMAP: u16 = 3;
    pub(super) const DEVICE_GET_INFO: u16 = 4;
    pub(super) const DEVICE_GET_REGION_INFO: u16 = 5;
    pub(super) const DEVICE_GET_IRQ_INFO: u16 = 7;
    pub(super) const DEVICE_SET_IRQS: u16 = 8;
    pub(super) const REGION_READ: u16 = 9;
    pub(super) const REGION_WRITE: u16 = 10;
    pub(super) const DEVICE_RESET: u16 = 13;
}

pub(super) mod region {
    pub(crate) const BAR0: u32 = 0;
    pub(crate) const CONFIG: u32 = 7;
}

pub(super) mod irq {
    pub(crate) const MSIX: u32 = 2;
    pub(crate) const REQ: u32 = 4;
}

const HEADER_BYTES: usize = 16;
const REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;
/// A sanity limit.
const MAX_PAYLOAD: usize = 1 << 16;
/// Descriptors per message that every server accepts.
const MAX_FDS: usize = 8;
const CAPABILITIES: &str =
    "{\"capabilities\":{\"max_msg_fds\":8,\"max_data_xfer_size\":1048576}}\0";
/// Flags of SET_IRQS: the data are eventfds, used as triggers.
const EVENTFD_TRIGGER: u32 = 1 << 2 | 1 << 5;
/// Flags of DMA_MAP: the device may read and write.
const READ_WRITE: u32 = 3;
const REGION_INFO_BYTES: u32 = 1024;
const REGION_INFO_FIXED: usize = 32;
const SPARSE_MMAP: u16 = 1;

#[derive(Debug)]
pub(super) struct RegionInfo {
    pub(super) size: u64,
    /// Start of the region in `fd`.
    pub(super) offset: u64,
    /// Mappable parts: offset in the region, length.
    pub(super) areas: Vec<(u64, u64)>,
    pub(super) fd: Option<OwnedFd>,
}

#[derive(Debug)]
pub(super) struct VfioClient {
    pub(super) socket: Socket,
    next_id: u16,
}

impl VfioClient {
    pub(super) fn connect(path: &Path, limit: Duration) -> Result<Self, Error> {
        let mut this = Self {
            socket: Socket::connect(path, limit)?,
            next_id: 0,
        };
        let mut payload = vec![0, 0, 1, 0];
        payload.extend(CAPABILITIES.as_bytes());
        let answer = this.ask(command::VERSION, &payload, &[], &mut Vec::new())?;
        let (major, minor) = (u16_at(&answer, 0)?, u16_at(&answer, 2)?);
        if major != 0 {
            return Err(Error::Unusable(format!(
                "the server speaks vfio-user {major}.{minor}, not 0.1"
            )));
        }
        Ok(this)
    }

    fn write(
        &mut self,
        command: u16,
        flags: u32,
        payload: &[&[u8]],
        fds: &[BorrowedFd<'_>],
    ) -> Result<u16, Error> {
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        let bytes = HEADER_BYTES + payload.iter().map(|part| part.len()).sum::<usize>();
        let mut message = Vec::with_capacity(bytes);
        message.extend(id.to_le_bytes());
        message.extend(command.to_le_bytes());
        for word in [bytes as u32, flags, 0] {
            message.extend(word.to_le_bytes());
        }
        for part in payload {
            message.extend(*part);
        }
        self.socket.send(&message, fds)?;
        Ok(id)
    }

    fn ask(
        &mut self,
        command: u16,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
        received: &mut Vec<OwnedFd>,
    ) -> Result<Vec<u8>, Error> {
        let id = self.write(command, 0, &[payload], fds)?;
        let mut header = [0; HEADER_BYTES];
        self.socket.receive(&mut header, received)?;
        let bytes = u32_at(&header, 4)? as usize;
        let bytes = bytes.checked_sub(HEADER_BYTES);
        let bytes = bytes.filter(|&bytes| bytes <= MAX_PAYLOAD);
        let bytes = bytes.ok_or_else(|| Error::Protocol("an answer without a size".into()))?;
        let mut answer = vec![0; bytes];
        self.socket.receive(&mut answer, received)?;
        let flags = u32_at(&header, 8)?;
        if u16_at(&header, 0)? != id || u16_at(&header, 2)? != command || flags & 0xf != REPLY {
            return Err(Error::Protocol(format!(
                "message {header:02x?} instead of an answer to {command}"
            )));
        }
        if flags & ERROR != 0 {
            return Err(Error::Refused {
                what: format!("vfio-user command {command}"),
                errno: u32_at(&header, 12)?,
            });
        }
        Ok(answer)
    }

    /// The numbers of regions and of kinds of interrupts.
    pub(super) fn device_info(&mut self) -> Result<(u32, u32), Error> {
        let payload = words(&[16, 0, 0, 0]);
        let answer = self.ask(command::DEVICE_GET_INFO, &payload, &[], &mut Vec::new())?;
        Ok((u32_at(&answer, 8)?, u32_at(&answer, 12)?))
    }

    pub(super) fn region_info(&mut self, index: u32) -> Result<RegionInfo, Error> {
        let mut payload = words(&[REGION_INFO_BYTES, 0, index, 0]);
        payload.extend([0; 16]);
        let mut fds = Vec::new();
        let answer = self.ask(command::DEVICE_GET_REGION_INFO, &payload, &[], &mut fds)?;
        let mut areas = Vec::new();
        let mut at = u32_at(&answer, 12)? as usize;
        // Offsets of capabilities only grow.
        while at >= REGION_INFO_FIXED {
            if u16_at(&answer, at)? == SPARSE_MMAP {
                for area in 0..u32_at(&answer, at + 8)? as usize {
                    let area = at + 16 + 16 * area;
                    areas.push((u64_at(&answer, area)?, u64_at(&answer, area + 8)?));
                }
            }
            let next = u32_at(&answer, at + 4)? as usize;
            at = if next > at { next } else { 0 };
        }
        Ok(RegionInfo {
            size: u64_at(&answer, 16)?,
            offset: u64_at(&answer, 24)?,
            areas,
            fd: fds.pop(),
        })
    }

    pub(super) fn irq_count(&mut self, index: u32) -> Result<u32, Error> {
        let payload = words(&[16, 0, index, 0]);
        let answer = self.ask(command::DEVICE_GET_IRQ_INFO, &payload, &[], &mut Vec::new())?;
        u32_at(&answer, 12)
    }

    pub(super) fn set_irqs(&mut self, index: u32, events: &[BorrowedFd<'_>]) -> Result<(), Error> {
        let mut start = 0;
        for some in events.chunks(MAX_FDS) {
            let count = some.len() as u32;
            let payload = words(&[20, EVENTFD_TRIGGER, index, start, count]);
            self.ask(command::DEVICE_SET_IRQS, &payload, some, &mut Vec::new())?;
            start += count;
        }
        Ok(())
    }

    pub(super) fn dma_map(
        &mut self,
        address: u64,
        bytes: u64,
        fd: BorrowedFd<'_>,
    ) -> Result<(), Error> {
        let mut payload = words(&[32, READ_WRITE]);
        payload.extend(longs(&[0, address, bytes]));
        let answer = self.ask(command::DMA_MAP, &payload, &[fd], &mut Vec::new());
        answer.map(drop)
    }

    pub(super) fn dma_unmap(&mut self, address: u64, bytes: u64) -> Result<(), Error> {
        let mut payload = words(&[24, 0]);
        payload.extend(longs(&[address, bytes]));
        let answer = self.ask(command::DMA_UNMAP, &payload, &[], &mut Vec::new());
        answer.map(drop)
    }

    pub(super) fn reset(&mut self) -> Result<(), Error> {
        let answer = self.ask(command::DEVICE_RESET, &[], &[], &mut Vec::new());
        answer.map(drop)
    }

    pub(super) fn read<const N: usize>(
        &mut self,
        region: u32,
        offset: u64,
    ) -> Result<[u8; N], Error> {
        let mut payload = longs(&[offset]);
        payload.extend(words(&[region, N as u32]));
        let answer = self.ask(command::REGION_READ, &payload, &[], &mut Vec::new())?;
        bytes_at(&answer, 16)
    }

    pub(super) fn write_region(
        &mut self,
        region: u32,
        offset: u64,
        data: &[u8],
    ) -> Result<(), Error> {
        let mut payload = longs(&[offset]);
        payload.extend(words(&[region, data.len() as u32]));
        payload.extend(data);
        let answer = self.ask(command::REGION_WRITE, &payload, &[], &mut Vec::new());
        answer.map(drop)
    }

    /// Does not wait for a reply.
    pub(super) fn post(&mut self, region: u32, offset: u64, value: u32) -> Result<(), Error> {
        let mut payload = [0; 20];
        payload[..8].copy_from_slice(&offset.to_le_bytes());
        payload[8..12].copy_from_slice(&region.to_le_bytes());
        payload[12..16].copy_from_slice(&4u32.to_le_bytes());
        payload[16..].copy_from_slice(&value.to_le_bytes());
        self.write(command::REGION_WRITE, NO_REPLY, &[&payload], &[])
            .map(drop)
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_le_bytes()).collect()
}

fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], Error> {
    let end = at.checked_add(N);
    let found = end.and_then(|end| bytes.get(at..end));
    let found = found.and_then(|found| found.try_into().ok());
    found.ok_or_else(|| Error::Protocol(format!("an answer of only {} bytes", bytes.len())))
}

fn u16_at(bytes: &[u8], at: usize) -> Result<u16, Error> {
    bytes_at(bytes, at).map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32, Error> {
    bytes_at(bytes, at).map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Result<u64, Error> {
    bytes_at(bytes, at).map(u64::from_le_bytes)
}
