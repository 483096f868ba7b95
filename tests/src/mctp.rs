//! `mctp-estack`, an independent MCTP implementation, as a management controller.

use std::fs::{File, OpenOptions};
use std::future::Future;
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use anyhow::{Result, bail, ensure};
use embedded_io_async::{ErrorKind, ErrorType, Read, Write};
use mctp::{Eid, MsgIC, MsgType};
use mctp_estack::Stack;
use mctp_estack::fragment::SendOutput;
use mctp_estack::serial::MctpSerialHandler;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// This side's EID.
pub const OWN_EID: u8 = 8;
/// A transport header and the transmission unit.
const PACKET_BYTES: usize = 4 + 64;
/// How long an answer may take.
const LIMIT: Timespec = Timespec {
    tv_sec: 60,
    tv_nsec: 0,
};
/// The message type and kind of a command of the Management Interface (NVMe-MI 1.2, 3.1).
const NVME_MI: u8 = 4;
const COMMAND: u8 = 1 << 3;
const RESPONSE: u8 = 1 << 7;

/// A line to an endpoint, and an MCTP stack.
pub struct Peer {
    stack: Stack,
    serial: MctpSerialHandler,
    line: Line,
    /// The endpoint's EID; 0 is that of any endpoint.
    pub eid: u8,
}

impl Peer {
    /// Connects to a Unix socket.
    pub fn connect(path: &Path, eid: u8) -> Result<Self> {
        Ok(Self::new(UnixStream::connect(path)?.into(), eid))
    }

    /// Opens a terminal.
    pub fn open(path: &Path, eid: u8) -> Result<Self> {
        let no_tty = rustix::fs::OFlags::NOCTTY.bits().cast_signed();
        let mut options: OpenOptions = File::options();
        let file = options.read(true).write(true).custom_flags(no_tty);
        Ok(Self::new(file.open(path)?.into(), eid))
    }

    fn new(line: OwnedFd, eid: u8) -> Self {
        Self {
            stack: Stack::new(Eid(OWN_EID), PACKET_BYTES, 0),
            serial: MctpSerialHandler::new(),
            line: Line(line.into()),
            eid,
        }
    }

    /// Writes bytes as they are.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.line.0.write_all(bytes)?)
    }

    /// Sends a control message (DSP0236, 12). Returns the response's completion code and data.
    pub fn control(&mut self, command: u8, data: &[u8]) -> Result<Vec<u8>> {
        // Instance 1; the highest bit marks a request.
        let request = [&[0x81, command], data].concat();
        self.send(MsgType(0), MsgIC(false), &request)?;
        let (kind, check, response) = self.receive()?;
        ensure!((kind, check) == (MsgType(0), MsgIC(false)), "{kind:?}");
        match response.strip_prefix(&[0x01, command]) {
            Some(rest) => Ok(rest.to_vec()),
            None => bail!("an answer to another command: {response:?}"),
        }
    }

    /// Sends a command of NVMe-MI. Returns the response from its status on, without its check.
    pub fn command(&mut self, opcode: u8, dwords: [u32; 2]) -> Result<Vec<u8>> {
        let request = command(opcode, dwords);
        self.send(MsgType(NVME_MI), MsgIC(true), &request[1..])?;
        let (kind, check, response) = self.receive()?;
        ensure!((kind, check) == (MsgType(NVME_MI), MsgIC(true)), "{kind:?}");
        let response = [&request[..1], &response].concat();
        let Some((response, check)) = response.split_last_chunk() else {
            bail!("a short response: {response:?}");
        };
        ensure!(*check == crc32c(response), "a wrong check: {response:?}");
        match response {
            [_, kind, _, _, rest @ ..] if *kind == RESPONSE | COMMAND => Ok(rest.to_vec()),
            _ => bail!("no response: {response:?}"),
        }
    }

    fn send(&mut self, kind: MsgType, check: MsgIC, payload: &[u8]) -> Result<()> {
        let to = Eid(self.eid);
        let mut fragments = self
            .stack
            .start_send(to, kind, None, true, check, None, None)
            .map_err(failed)?;
        let mut buffer = [0; PACKET_BYTES];
        while let SendOutput::Packet(packet) = fragments.fragment(payload, &mut buffer) {
            let frame = frame(packet)?;
            self.write(&frame)?;
        }
        Ok(())
    }

    /// The next message's type and payload.
    fn receive(&mut self) -> Result<(MsgType, MsgIC, Vec<u8>)> {
        loop {
            let packet = ready(self.serial.recv_async(&mut self.line)).map_err(failed)?;
            let mut packet = packet.to_vec();
            // Any endpoint may answer at EID 0, which this stack does not know.
            if let (0, Some(source)) = (self.eid, packet.get_mut(2)) {
                *source = 0;
            }
            if let Some((message, handle)) = self.stack.receive(&packet).map_err(failed)? {
                let received = (message.typ, message.ic, message.payload.to_vec());
                self.stack.finished_receive(handle);
                return Ok(received);
            }
        }
    }
}

/// The message of a command of the Management Interface, with its check.
#[must_use]
pub fn command(opcode: u8, dwords: [u32; 2]) -> Vec<u8> {
    let mut message = vec![1 << 7 | NVME_MI, COMMAND, 0, 0, opcode, 0, 0, 0];
    message.extend(dwords.map(u32::to_le_bytes).as_flattened());
    message.extend(crc32c(&message));
    message
}

fn crc32c(bytes: &[u8]) -> [u8; 4] {
    let sum = bytes.iter().fold(u32::MAX, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
            sum >> 1 ^ if sum & 1 != 0 { 0x82F6_3B78 } else { 0 }
        })
    });
    (!sum).to_le_bytes()
}

fn failed(error: impl std::fmt::Debug) -> anyhow::Error {
    anyhow::anyhow!("the line: {error:?}")
}

/// A packet in its frame.
pub fn frame(packet: &[u8]) -> Result<Vec<u8>> {
    let mut frame = Bytes(Vec::new());
    ready(MctpSerialHandler::new().send_async(packet, &mut frame)).map_err(failed)?;
    Ok(frame.0)
}

/// A file that blocks, so that nothing waits.
fn ready<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => unreachable!("reads and writes block"),
    }
}

struct Bytes(Vec<u8>);

impl ErrorType for Bytes {
    type Error = ErrorKind;
}

impl Write for Bytes {
    async fn write(&mut self, bytes: &[u8]) -> Result<usize, ErrorKind> {
        self.0.extend(bytes);
        Ok(bytes.len())
    }
}

struct Line(File);

impl ErrorType for Line {
    type Error = ErrorKind;
}

impl Read for Line {
    async fn read(&mut self, bytes: &mut [u8]) -> Result<usize, ErrorKind> {
        let mut wanted = [PollFd::new(&self.0, PollFlags::IN)];
        match poll(&mut wanted, Some(&LIMIT)) {
            Ok(0) => Err(ErrorKind::TimedOut),
            Ok(_) => rustix::io::read(&self.0, bytes).map_err(|_| ErrorKind::Other),
            Err(_) => Err(ErrorKind::Other),
        }
    }
}
