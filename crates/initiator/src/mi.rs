//! A management controller's side of NVMe-MI over MCTP over a serial line.
//!
//! One request at a time, in command slot 0.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use forebay_mctp::serial::{Decoder, encode};
use forebay_mctp::{
    BASELINE_UNIT_BYTES, EID_NULL, Endpoint, EndpointConfig, MAX_UNIT_BYTES, MessageType, NVME_MI,
    Received,
};
use forebay_nvme::mi::{
    AdminCommand, BrokenMessage, DataStructure, MAX_DATA_BYTES, MiCommand, MiRefusal, MiRequest,
    MiResponse, MiStatus, SetConfiguration,
};
use forebay_nvme::{Sqe, Status};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use thiserror::Error;

/// How long an answer, or a provisional one, may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// The requester's EID.
const OWN_EID: u8 = 8;
/// MCTP control commands.
const SET_ENDPOINT_ID: u8 = 0x01;
const GET_ENDPOINT_ID: u8 = 0x02;
const GET_ENDPOINT_UUID: u8 = 0x03;
static TYPES: &[MessageType] = &[NVME_MI];

/// Why a request failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MiError {
    /// The line failed.
    #[error("the line to the management endpoint failed: {0}")]
    Line(#[from] io::Error),
    /// No answer came in time.
    #[error("the management endpoint did not answer within {0:?}")]
    TimedOut(Duration),
    /// The answer is malformed.
    #[error("the management endpoint sent a malformed answer: {0:?}")]
    Broken(BrokenMessage),
    /// The answer belongs to another command.
    #[error("the management endpoint sent the answer to another command")]
    Unexpected,
    /// The endpoint refused the request.
    #[error("the management endpoint refused the request: {}", refusal(.0))]
    Refused(MiRefusal),
    /// The controller completed the Admin command with an error.
    #[error("the command failed: {}", status_name(*.0))]
    Failed(Status),
}

fn refusal(refusal: &MiRefusal) -> String {
    match refusal {
        MiRefusal::Parameter { byte, bit } => {
            format!("invalid parameter at byte {byte}, bit {bit} of the message")
        }
        MiRefusal::Status(MiStatus::ACCESS_DENIED) => {
            "access denied; `[out_of_band] allow` in the node's configuration has the rights"
                .to_owned()
        }
        MiRefusal::Status(MiStatus::INVALID_OPCODE) => "unknown command".to_owned(),
        MiRefusal::Status(MiStatus::INTERNAL_ERROR) => "internal error".to_owned(),
        MiRefusal::Status(status) => format!("status {:#04x}", status.0),
    }
}

fn status_name(status: Status) -> String {
    let name = status.name().unwrap_or("unknown status");
    format!(
        "{} ({:#x})",
        name.to_lowercase().replace('_', " "),
        status.0
    )
}

/// A line to a management endpoint.
#[derive(Debug)]
pub struct MiClient {
    line: File,
    decoder: Decoder,
    endpoint: Endpoint,
    began: Instant,
    /// Received bytes that are not decoded yet.
    received: VecDeque<u8>,
}

/// A line that is open, at its present speed.
impl From<File> for MiClient {
    fn from(line: File) -> Self {
        let config = EndpointConfig {
            uuid: [0; 16],
            eid: OWN_EID,
            static_eid: EID_NULL,
            types: TYPES,
            unit_bytes: BASELINE_UNIT_BYTES,
        };
        Self {
            line,
            decoder: Decoder::new(),
            endpoint: Endpoint::new(config),
            began: Instant::now(),
            received: VecDeque::new(),
        }
    }
}

impl MiClient {
    /// Connects to a Unix socket, or opens a terminal, at its present speed.
    ///
    /// # Errors
    /// The system's error.
    pub fn open(path: &Path) -> io::Result<Self> {
        let line = match std::fs::metadata(path)?.file_type().is_socket() {
            true => File::from(OwnedFd::from(UnixStream::connect(path)?)),
            false => File::options().read(true).write(true).open(path)?,
        };
        if rustix::termios::isatty(&line) {
            let mut settings = rustix::termios::tcgetattr(&line)?;
            settings.make_raw();
            let now = rustix::termios::OptionalActions::Now;
            rustix::termios::tcsetattr(&line, now, &settings)?;
        }
        Ok(line.into())
    }

    /// Get Endpoint UUID (DSP0236, 12.5).
    ///
    /// # Errors
    /// [`MiError::Line`], [`MiError::TimedOut`], [`MiError::Unexpected`].
    pub fn endpoint_uuid(&mut self) -> Result<[u8; 16], MiError> {
        let data = self.control(GET_ENDPOINT_UUID, &[])?;
        data.try_into().map_err(|_| MiError::Unexpected)
    }

    /// Get Endpoint ID (DSP0236, 12.4).
    ///
    /// # Errors
    /// As [`Self::endpoint_uuid`].
    pub fn endpoint_id(&mut self) -> Result<u8, MiError> {
        let data = self.control(GET_ENDPOINT_ID, &[])?;
        data.first().copied().ok_or(MiError::Unexpected)
    }

    /// Set Endpoint ID (DSP0236, 12.3).
    ///
    /// # Errors
    /// As [`Self::endpoint_uuid`].
    pub fn set_endpoint_id(&mut self, eid: u8) -> Result<(), MiError> {
        self.control(SET_ENDPOINT_ID, &[0, eid]).map(|_| ())
    }

    fn control(&mut self, command: u8, data: &[u8]) -> Result<Vec<u8>, MiError> {
        let request = [&[0, 0x80, command], data].concat();
        let answer = self.exchange(&request)?;
        match &answer[..] {
            [_, _, same, 0, data @ ..] if *same == command => Ok(data.to_vec()),
            _ => Err(MiError::Unexpected),
        }
    }

    /// Uses the largest transmission unit in both directions, if the endpoint allows that.
    ///
    /// # Errors
    /// As [`Self::command`], except for a refusal.
    pub fn use_large_packets(&mut self) -> Result<(), MiError> {
        let largest = SetConfiguration::TransmissionUnit {
            port: 0,
            bytes: MAX_UNIT_BYTES as u16,
        };
        match self.command(MiCommand::SetConfiguration(largest)) {
            Ok(_) => {
                self.endpoint.set_unit_bytes(MAX_UNIT_BYTES);
                Ok(())
            }
            Err(MiError::Refused(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Sends a message and returns the answer to it. Provisional answers extend the time limit.
    ///
    /// # Errors
    /// [`MiError::Line`], [`MiError::TimedOut`].
    pub fn exchange(&mut self, message: &[u8]) -> Result<Vec<u8>, MiError> {
        let mut frames = Vec::new();
        let (tag, packets) = self.endpoint.request(EID_NULL, message);
        for packet in packets {
            encode(&packet, &mut frames);
        }
        self.line.write_all(&frames)?;
        let mut deadline = Instant::now() + ANSWER_LIMIT;
        loop {
            let answer = self.receive(tag, deadline)?;
            if message.first() != answer.first() {
                continue;
            }
            match MiResponse::decode(&answer) {
                Ok((_, MiResponse::MoreProcessing { time })) => {
                    let more = Duration::from_millis(100 * u64::from(time.max(1)));
                    deadline = Instant::now() + more + ANSWER_LIMIT;
                }
                _ => return Ok(answer),
            }
        }
    }

    fn receive(&mut self, tag: u8, deadline: Instant) -> Result<Vec<u8>, MiError> {
        let mut bytes = [0; 4096];
        loop {
            let (mut rest, _) = self.received.as_slices();
            let before = rest.len();
            let packet = self.decoder.next_packet(&mut rest);
            let used = before - rest.len();
            self.received.drain(..used);
            if let Some(packet) = packet {
                let now_ns = self.began.elapsed().as_nanos() as u64;
                if let Received::Message(message) = self.endpoint.receive(&packet, now_ns)
                    && message.from.tag == tag
                {
                    return Ok(message.bytes);
                }
                continue;
            }
            if !self.received.is_empty() {
                continue;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let limit = Timespec::try_from(left).map_err(io::Error::other)?;
            let mut polled = [PollFd::from_borrowed_fd(self.line.as_fd(), PollFlags::IN)];
            if left.is_zero() || poll(&mut polled, Some(&limit)).map_err(io::Error::from)? == 0 {
                return Err(MiError::TimedOut(ANSWER_LIMIT));
            }
            match self.line.read(&mut bytes)? {
                0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                read => self.received.extend(&bytes[..read]),
            }
        }
    }

    /// A command of the Management Interface; returns NMRESP and the data.
    ///
    /// # Errors
    /// Any but [`MiError::Failed`].
    pub fn command(&mut self, command: MiCommand<'_>) -> Result<(u32, Vec<u8>), MiError> {
        let answer = self.exchange(&MiRequest::Command(command).encode(0))?;
        match MiResponse::decode(&answer).map_err(MiError::Broken)?.1 {
            MiResponse::Command { value, data } => Ok((value, data.to_vec())),
            MiResponse::Refused(refusal) => Err(MiError::Refused(refusal)),
            _ => Err(MiError::Unexpected),
        }
    }

    /// Read NVMe-MI Data Structure.
    ///
    /// # Errors
    /// As [`Self::command`].
    pub fn data_structure(&mut self, structure: DataStructure) -> Result<Vec<u8>, MiError> {
        let command = MiCommand::ReadDataStructure(structure);
        self.command(command).map(|(_, data)| data)
    }

    /// An Admin command that reads `bytes` of data; returns dwords 0 and 1 of its completion, and
    /// the data.
    ///
    /// # Errors
    /// Any.
    pub fn admin_read(
        &mut self,
        controller: u16,
        sqe: Sqe,
        bytes: usize,
    ) -> Result<(u64, Vec<u8>), MiError> {
        let mut data = Vec::new();
        loop {
            let length = (bytes - data.len()).min(MAX_DATA_BYTES);
            let command = AdminCommand {
                controller,
                sqe,
                offset: data.len() as u32,
                length: length as u32,
                data: &[],
            };
            let (result, part) = self.admin(&command)?;
            data.extend_from_slice(&part);
            if data.len() >= bytes || part.is_empty() {
                return Ok((result, data));
            }
        }
    }

    /// An Admin command with data for the controller, or without data; returns dwords 0 and 1 of
    /// its completion.
    ///
    /// # Errors
    /// Any.
    pub fn admin_write(&mut self, controller: u16, sqe: Sqe, data: &[u8]) -> Result<u64, MiError> {
        let command = AdminCommand {
            controller,
            sqe,
            offset: 0,
            length: data.len() as u32,
            data,
        };
        self.admin(&command).map(|(result, _)| result)
    }

    fn admin(&mut self, command: &AdminCommand<'_>) -> Result<(u64, Vec<u8>), MiError> {
        let answer = self.exchange(&MiRequest::Admin(*command).encode(0))?;
        match MiResponse::decode(&answer).map_err(MiError::Broken)?.1 {
            MiResponse::Admin { cqe, data } if cqe.status() == Status::SUCCESS => {
                Ok((cqe.result(), data.to_vec()))
            }
            MiResponse::Admin { cqe, .. } => Err(MiError::Failed(cqe.status())),
            MiResponse::Refused(refusal) => Err(MiError::Refused(refusal)),
            _ => Err(MiError::Unexpected),
        }
    }
}
