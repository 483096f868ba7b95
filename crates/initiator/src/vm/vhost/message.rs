//! vhost-user messages of the frontend, from QEMU's "Vhost-user Protocol" document.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use super::super::Error;
use super::super::socket::Socket;

pub(super) mod request {
    pub(crate) const GET_FEATURES: u32 = 1;
    pub(crate) const SET_FEATURES: u32 = 2;
    pub(crate) const SET_OWNER: u32 = 3;
    pub(crate) const SET_MEM_TABLE: u32 = 5;
    pub(crate) const SET_VRING_NUM: u32 = 8;
    pub(crate) const SET_VRING_ADDR: u32 = 9;
    pub(crate) const SET_VRING_BASE: u32 = 10;
    pub(crate) const GET_VRING_BASE: u32 = 11;
    pub(crate) const SET_VRING_KICK: u32 = 12;
    pub(crate) const SET_VRING_CALL: u32 = 13;
    pub(crate) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(crate) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(crate) const GET_QUEUE_NUM: u32 = 17;
    pub(crate) const SET_VRING_ENABLE: u32 = 18;
    pub(crate) const SET_BACKEND_REQ_FD: u32 = 21;
    pub(crate) const GET_CONFIG: u32 = 24;
    pub(crate) const GET_INFLIGHT_FD: u32 = 31;
    pub(crate) const SET_INFLIGHT_FD: u32 = 32;
    pub(crate) const SET_STATUS: u32 = 39;
}

pub(super) mod protocol {
    pub(crate) const MQ: u64 = 1 << 0;
    pub(crate) const REPLY_ACK: u64 = 1 << 3;
    pub(crate) const BACKEND_REQ: u64 = 1 << 5;
    pub(crate) const CONFIG: u64 = 1 << 9;
    pub(crate) const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub(crate) const STATUS: u64 = 1 << 16;
}

/// A request of the backend, on its own channel.
pub(super) const BACKEND_CONFIG_CHANGE: u32 = 2;

const HEADER_BYTES: usize = 12;
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// A sanity limit.
const MAX_PAYLOAD: usize = 4096;

#[derive(Debug)]
pub(super) struct VhostFrontend {
    pub(super) socket: Socket,
    /// REPLY_ACK was negotiated.
    pub(super) acknowledged: bool,
}

impl VhostFrontend {
    pub(super) fn connect(path: &Path, limit: Duration) -> Result<Self, Error> {
        Ok(Self {
            socket: Socket::connect(path, limit)?,
            acknowledged: false,
        })
    }

    fn write(
        &self,
        request: u32,
        flags: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), Error> {
        let mut message = Vec::with_capacity(HEADER_BYTES + payload.len());
        for word in [request, VERSION | flags, payload.len() as u32] {
            message.extend(word.to_le_bytes());
        }
        message.extend(payload);
        self.socket.send(&message, fds)
    }

    fn answer(&self, request: u32, fds: &mut Vec<OwnedFd>) -> Result<Vec<u8>, Error> {
        let (answered, flags, payload) = receive(&self.socket, fds)?;
        if answered != request || flags & REPLY == 0 {
            return Err(Error::Protocol(format!(
                "message {answered} with flags {flags:#x} instead of an answer to {request}"
            )));
        }
        Ok(payload)
    }

    /// Without a reply, except for REPLY_ACK.
    pub(super) fn tell(
        &self,
        request: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), Error> {
        let need = if self.acknowledged { NEED_REPLY } else { 0 };
        self.write(request, need, payload, fds)?;
        if self.acknowledged {
            let answer = self.answer(request, &mut Vec::new())?;
            let code = u64_at(&answer, 0)?;
            if code != 0 {
                return Err(Error::Refused {
                    what: format!("vhost-user request {request}"),
                    errno: code as u32,
                });
            }
        }
        Ok(())
    }

    pub(super) fn ask(
        &self,
        request: u32,
        payload: &[u8],
        fds: &mut Vec<OwnedFd>,
    ) -> Result<Vec<u8>, Error> {
        self.write(request, 0, payload, &[])?;
        self.answer(request, fds)
    }

    pub(super) fn ask_u64(&self, request: u32) -> Result<u64, Error> {
        let answer = self.ask(request, &[], &mut Vec::new())?;
        u64_at(&answer, 0)
    }

    /// Most ring requests have this payload.
    pub(super) fn notify_ring(&self, request: u32, index: u16, number: u32) -> Result<(), Error> {
        self.tell(request, &words(&[index.into(), number]), &[])
    }
}

/// Its number, flags, payload.
pub(super) fn receive(
    socket: &Socket,
    fds: &mut Vec<OwnedFd>,
) -> Result<(u32, u32, Vec<u8>), Error> {
    let mut header = [0; HEADER_BYTES];
    socket.receive(&mut header, fds)?;
    let word = |at: usize| u32_at(&header, at);
    let bytes = word(8)? as usize;
    if bytes > MAX_PAYLOAD {
        return Err(Error::Protocol(format!("a message of {bytes} bytes")));
    }
    let mut payload = vec![0; bytes];
    socket.receive(&mut payload, fds)?;
    Ok((word(0)?, word(4)?, payload))
}

pub(super) fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(super) fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_le_bytes()).collect()
}

fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], Error> {
    let found = bytes
        .get(at..at + N)
        .and_then(|found| found.try_into().ok());
    found.ok_or_else(|| Error::Protocol(format!("an answer of only {} bytes", bytes.len())))
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> Result<u16, Error> {
    bytes_at(bytes, at).map(u16::from_le_bytes)
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Result<u32, Error> {
    bytes_at(bytes, at).map(u32::from_le_bytes)
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> Result<u64, Error> {
    bytes_at(bytes, at).map(u64::from_le_bytes)
}
