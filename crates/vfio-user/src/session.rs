//! A client's session: judges messages and writes answers. Only [`VfioSession::agreed`] changes it.

use crate::device::{Device, Region};
use crate::request::{self, Request};
use crate::version::{self, Negotiated};
use crate::wire::{
    Broken, HEADER_BYTES, Header, command, device_flags, irq_info_flags, region_flags,
};
use crate::{Errno, MAX_ANSWER_BYTES};

/// A client's session.
#[derive(Clone, Debug)]
pub struct VfioSession {
    device: Device,
    negotiated: Option<Negotiated>,
}

/// A whole message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// The header.
    pub header: Header,
    /// The request, or the error that refuses it.
    pub request: Result<Request<'a>, Errno>,
}

/// An answer to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Its length; 0 if no reply is wanted.
    pub bytes: usize,
    /// The region whose descriptor goes with the answer.
    pub with_region: Option<u32>,
}

impl Reply {
    const fn of(bytes: usize) -> Self {
        Self {
            bytes,
            with_region: None,
        }
    }
}

impl Message<'_> {
    /// Writes a successful answer; `out` has room for [`MAX_ANSWER_BYTES`]. An oversized payload
    /// becomes an error.
    pub fn answer(&self, payload: &[u8], out: &mut [u8]) -> Reply {
        self.answer_in_parts(payload, &[], out)
    }

    fn answer_in_parts(&self, first: &[u8], rest: &[u8], out: &mut [u8]) -> Reply {
        if self.header.no_reply() {
            return Reply::of(0);
        }
        let payload_bytes = first.len() + rest.len();
        let bytes = HEADER_BYTES + payload_bytes;
        if bytes > MAX_ANSWER_BYTES || bytes > out.len() {
            return self.refuse(Errno::EIO, out);
        }
        let header = self.header.reply(payload_bytes as u32).to_bytes();
        out[..HEADER_BYTES].copy_from_slice(&header);
        out[HEADER_BYTES..HEADER_BYTES + first.len()].copy_from_slice(first);
        out[HEADER_BYTES + first.len()..bytes].copy_from_slice(rest);
        Reply::of(bytes)
    }

    /// Writes an error reply.
    pub fn refuse(&self, error: Errno, out: &mut [u8]) -> Reply {
        if self.header.no_reply() || out.len() < HEADER_BYTES {
            return Reply::of(0);
        }
        out[..HEADER_BYTES].copy_from_slice(&self.header.error_reply(error).to_bytes());
        Reply::of(HEADER_BYTES)
    }

    /// Writes the answer to an executed request. `data` was read from the region.
    pub fn done(&self, data: &[u8], out: &mut [u8]) -> Reply {
        let mut fixed = [0; 24];
        match self.request {
            Ok(Request::RegionRead(access)) if data.len() == access.len_bytes as usize => {
                put_access(&mut fixed, &access);
                self.answer_in_parts(&fixed[..16], data, out)
            }
            Ok(Request::RegionRead(_)) => self.refuse(Errno::EIO, out),
            Ok(Request::RegionWrite(access, _)) => {
                put_access(&mut fixed, &access);
                self.answer(&fixed[..16], out)
            }
            Ok(Request::DmaUnmap(unmap)) => {
                // The request is echoed.
                let (flags, address, len_bytes) = match unmap {
                    crate::DmaUnmap::One { address, len_bytes } => (0, address, len_bytes),
                    crate::DmaUnmap::All => (crate::wire::dma::UNMAP_ALL, 0, 0),
                };
                fixed[0..4].copy_from_slice(&24u32.to_le_bytes());
                fixed[4..8].copy_from_slice(&flags.to_le_bytes());
                fixed[8..16].copy_from_slice(&address.to_le_bytes());
                fixed[16..24].copy_from_slice(&len_bytes.to_le_bytes());
                self.answer(&fixed, out)
            }
            Ok(_) => self.answer(&[], out),
            Err(error) => self.refuse(error, out),
        }
    }
}

fn put_access(fixed: &mut [u8; 24], access: &crate::RegionAccess) {
    fixed[0..8].copy_from_slice(&access.offset_bytes.to_le_bytes());
    fixed[8..12].copy_from_slice(&access.region.to_le_bytes());
    fixed[12..16].copy_from_slice(&access.len_bytes.to_le_bytes());
}

impl VfioSession {
    /// A new client.
    pub fn new(device: Device) -> Self {
        Self {
            device,
            negotiated: None,
        }
    }

    /// A client of a predecessor.
    pub fn resume(device: Device, negotiated: Option<Negotiated>) -> Self {
        Self { device, negotiated }
    }

    /// The negotiated version.
    pub fn negotiated(&self) -> Option<&Negotiated> {
        self.negotiated.as_ref()
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Judges a whole message (see [`crate::frame`]).
    ///
    /// # Errors
    /// Why the connection must end.
    pub fn judge<'a>(&self, bytes: &'a [u8], descriptors: usize) -> Result<Message<'a>, Broken> {
        let header = Header::read(bytes).ok_or(Broken::Short)?;
        if header.size_bytes as usize != bytes.len() {
            return Err(Broken::Short);
        }
        if !header.is_command() {
            return Err(Broken::NotACommand);
        }
        let is_version = header.command == command::VERSION;
        let payload = &bytes[HEADER_BYTES..];
        let request = match (self.negotiated.is_some(), is_version) {
            (false, false) => return Err(Broken::Version),
            // A predecessor may have died before it answered.
            (true, true) => match version::judge(payload) {
                Ok(same) if self.negotiated == Some(same) => Ok(Request::Version(same)),
                _ => Err(Errno::EINVAL),
            },
            _ => request::judge(header.command, payload, descriptors, &self.device),
        };
        Ok(Message { header, request })
    }

    /// Executes [`Request::Version`].
    pub fn agreed(&mut self, negotiated: Negotiated) {
        self.negotiated = Some(negotiated);
    }

    /// Answers a query or a refused message; `None` for a request to be executed, which
    /// [`Message::done`] answers.
    pub fn describe(&self, message: &Message<'_>, out: &mut [u8]) -> Option<Reply> {
        let mut fixed = [0u8; 32];
        let mut put = |at: usize, value: u32| {
            fixed[at..at + 4].copy_from_slice(&value.to_le_bytes());
        };
        Some(match message.request {
            Err(error) => message.refuse(error, out),
            Ok(Request::Version(negotiated)) => message.answer(&version::payload(&negotiated), out),
            Ok(Request::DeviceInfo) => {
                put(0, 16);
                put(4, device_flags::RESET | device_flags::PCI);
                put(8, self.device.regions.len() as u32);
                put(12, self.device.irqs.len() as u32);
                message.answer(&fixed[..16], out)
            }
            Ok(Request::IrqInfo { index }) => {
                let irq = self.device.irqs.get(index as usize)?;
                let mut flags = irq_info_flags::EVENTFD;
                if irq.maskable {
                    flags |= irq_info_flags::MASKABLE;
                }
                put(0, 16);
                put(4, flags);
                put(8, index);
                put(12, irq.count);
                message.answer(&fixed[..16], out)
            }
            Ok(Request::RegionInfo { index, argsz }) => {
                let region = self.device.regions.get(index as usize)?;
                self.region_info(message, index, argsz, region, out)
            }
            Ok(_) => return None,
        })
    }

    fn region_info(
        &self,
        message: &Message<'_>,
        index: u32,
        argsz: u32,
        region: &Region,
        out: &mut [u8],
    ) -> Reply {
        let takes_descriptors = self.negotiated.is_some_and(|n| n.client_descriptors > 0);
        let mappable = region.mappable.filter(|_| takes_descriptors);
        let mut info = [0u8; 32 + 32];
        let mut flags = 0;
        if region.readable {
            flags |= region_flags::READ;
        }
        if region.writable {
            flags |= region_flags::WRITE;
        }
        let mut needed = 32;
        if let Some(area) = mappable {
            needed = 64;
            flags |= region_flags::MMAP;
            // VFIO cap header: id, version, next; then nr_areas, reserved, offset, size.
            info[32..34].copy_from_slice(&region_flags::CAP_SPARSE_MMAP.to_le_bytes());
            info[34..36].copy_from_slice(&1u16.to_le_bytes());
            info[40..44].copy_from_slice(&1u32.to_le_bytes());
            info[48..56].copy_from_slice(&area.offset_bytes.to_le_bytes());
            info[56..64].copy_from_slice(&area.len_bytes.to_le_bytes());
        }
        // With a short buffer the client learns the needed length and retries. QEMU rejects CAPS
        // without an offset.
        let full = argsz >= needed;
        let mut cap_offset = 0u32;
        if full && mappable.is_some() {
            flags |= region_flags::CAPS;
            cap_offset = 32;
        }
        info[0..4].copy_from_slice(&needed.to_le_bytes());
        info[4..8].copy_from_slice(&flags.to_le_bytes());
        info[8..12].copy_from_slice(&index.to_le_bytes());
        info[12..16].copy_from_slice(&cap_offset.to_le_bytes());
        info[16..24].copy_from_slice(&region.size_bytes.to_le_bytes());
        let bytes = if full { needed as usize } else { 32 };
        let mut answer = message.answer(&info[..bytes], out);
        if full && mappable.is_some() && answer.bytes > 0 {
            answer.with_region = Some(index);
        }
        answer
    }
}
