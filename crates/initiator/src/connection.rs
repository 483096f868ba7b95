//! One NVMe/TCP queue: its socket, its stream position, its commands and their buffers.
//!
//! The socket never blocks. A buffer belongs to its command while in flight; long payloads are sent
//! and received there directly. A command that ends while its data is being sent is reported after
//! the data is out.

use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use forebay_nvme::host::{Completion, DataIn, DataOut, Event, HostQueue, HostTransfer, Violation};
use forebay_nvme::tcp::{
    DIGEST_BYTES, DataDigest, H2cData, IcReq, MAX_HEADER_BYTES, MAX_TERM_REQ_BYTES, Parsed,
    PduError, Role, TcpParams, crc32c, parse, put_capsule_cmd, put_h2c_data, put_term_req,
};
use forebay_nvme::{Sqe, Status};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::Error;
use crate::handshake::initialize;
use crate::tx::{TxItem, TxQueue};

const RX_BYTES: usize = 256 * 1024;
/// Longer payloads are received directly into their command's buffer.
const DIRECT_RX_BYTES: usize = 8 * 1024;
const TX_SLICES: usize = 192;
const OVERDUE_CHECK: Duration = Duration::from_millis(500);
/// MAXR2T, 0's based: R2Ts that one command may have open.
const MAX_R2T: u32 = 3;

/// How to wait for completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Sleep in poll(2) until the socket is ready.
    Block,
    /// Poll the socket without sleeping; for benchmarks.
    Spin,
}

/// A completed command.
#[derive(Debug)]
pub struct Done {
    /// Tag of the caller.
    pub tag: u64,
    /// Its status.
    pub status: Status,
    /// Dwords 0 and 1 of the completion.
    pub result: u64,
    /// The submitted buffer.
    pub buf: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectionOptions {
    pub(crate) header_digest: bool,
    pub(crate) data_digest: bool,
    pub(crate) connect_timeout: Duration,
    pub(crate) command_timeout: Duration,
}

struct PendingCommand {
    tag: u64,
    buf: Vec<u8>,
    /// Send queue entries that refer to `buf`.
    sending: u32,
    ended: Option<Completion>,
    /// `None`: no time limit.
    begun: Option<Instant>,
    active: bool,
}

struct Incoming {
    slot: u16,
    at: usize,
    missing: usize,
    digest: Option<DataDigest>,
}

pub(crate) struct Connection {
    stream: TcpStream,
    addr: SocketAddr,
    params: TcpParams,
    vm: HostQueue,
    commands: Vec<PendingCommand>,
    rx: Box<[u8]>,
    rx_start: usize,
    rx_end: usize,
    incoming: Option<Incoming>,
    tx: TxQueue,
    command_timeout: Duration,
    now: Instant,
    next_overdue_check: Instant,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Connection {{ {}, {} in flight }}",
            self.addr,
            self.in_flight()
        )
    }
}

impl Connection {
    /// Connects and exchanges ICReq and ICResp (TCP 3.4).
    pub(crate) fn open(
        addr: SocketAddr,
        depth: u16,
        options: &ConnectionOptions,
    ) -> Result<Self, Error> {
        let deadline = Instant::now() + options.connect_timeout;
        let connect_error = |source| Error::Connect { addr, source };
        let mut stream =
            TcpStream::connect_timeout(&addr, options.connect_timeout).map_err(connect_error)?;
        stream.set_nodelay(true).map_err(connect_error)?;
        let req = IcReq {
            pfv: 0,
            hpda: 0,
            header_digest: options.header_digest,
            data_digest: options.data_digest,
            max_r2t: MAX_R2T,
        };
        let params = initialize(&mut stream, addr, &req, deadline, options.connect_timeout)?;
        let socket_error = |source| Error::Socket { addr, source };
        stream.set_read_timeout(None).map_err(socket_error)?;
        stream.set_write_timeout(None).map_err(socket_error)?;
        stream.set_nonblocking(true).map_err(socket_error)?;
        let vm = HostQueue::new(depth, &params);
        let now = Instant::now();
        let commands = (0..vm.depth()).map(|_| PendingCommand {
            tag: 0,
            buf: Vec::new(),
            sending: 0,
            ended: None,
            begun: None,
            active: false,
        });
        Ok(Self {
            commands: commands.collect(),
            vm,
            stream,
            addr,
            params,
            rx: vec![0; RX_BYTES].into_boxed_slice(),
            rx_start: 0,
            rx_end: 0,
            incoming: None,
            tx: TxQueue::new(),
            command_timeout: options.command_timeout,
            now,
            next_overdue_check: now + OVERDUE_CHECK,
        })
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub(crate) fn depth(&self) -> usize {
        usize::from(self.vm.depth())
    }

    pub(crate) fn in_flight(&self) -> usize {
        usize::from(self.vm.in_flight())
    }

    pub(crate) fn set_in_capsule_bytes(&mut self, bytes: u32) {
        self.params.max_in_capsule_bytes = bytes;
        self.vm.set_in_capsule_bytes(bytes);
    }

    /// Begins a command, which leaves with the next [`Connection::progress`]. A full queue returns
    /// the buffer. `limited` applies the command time limit.
    pub(crate) fn submit(
        &mut self,
        sqe: Sqe,
        transfer: HostTransfer,
        tag: u64,
        buf: Vec<u8>,
        limited: bool,
    ) -> Result<(), Vec<u8>> {
        if self.in_flight() == 0 {
            // An idle queue does not update its clock.
            self.now = Instant::now();
        }
        let Some(begun) = self.vm.begin(sqe, transfer) else {
            return Err(buf);
        };
        let command = &mut self.commands[usize::from(begun.slot)];
        *command = PendingCommand {
            tag,
            buf,
            sending: 0,
            ended: None,
            begun: limited.then_some(self.now),
            active: true,
        };
        let mut header = [0; MAX_HEADER_BYTES];
        let bytes = begun.in_capsule_bytes;
        let header_bytes = put_capsule_cmd(&mut header, &self.params, &begun.sqe, bytes);
        self.push_tx(header, header_bytes, begun.slot, 0, bytes, false);
        Ok(())
    }

    /// Sends and receives without waiting. Completions are added to `out`.
    pub(crate) fn progress(&mut self, out: &mut Vec<Done>) -> Result<(), Error> {
        self.now = Instant::now();
        self.send(out)?;
        self.receive(out)?;
        // Send the data that R2Ts asked for.
        self.send(out)?;
        if self.now >= self.next_overdue_check {
            self.next_overdue_check = self.now + OVERDUE_CHECK;
            self.check_overdue()?;
        }
        Ok(())
    }

    /// Repeats [`Connection::progress`] until a command ends or `limit` is over.
    pub(crate) fn poll(
        &mut self,
        out: &mut Vec<Done>,
        wait: Wait,
        limit: Duration,
    ) -> Result<usize, Error> {
        let before = out.len();
        self.progress(out)?;
        if out.len() > before || limit.is_zero() {
            return Ok(out.len() - before);
        }
        let deadline = self.now + limit;
        while out.len() == before && self.now < deadline {
            if wait == Wait::Block {
                self.sleep(deadline - self.now)?;
            }
            self.progress(out)?;
        }
        Ok(out.len() - before)
    }

    /// Gives up the connection; returns the tags and buffers in flight.
    pub(crate) fn abandon(&mut self) -> Vec<(u64, Vec<u8>)> {
        let _ = self.stream.shutdown(Shutdown::Both);
        self.tx.clear();
        self.incoming = None;
        let active = self.commands.iter_mut().filter(|c| c.active);
        active
            .map(|command| {
                command.active = false;
                (command.tag, std::mem::take(&mut command.buf))
            })
            .collect()
    }

    fn sleep(&self, limit: Duration) -> Result<(), Error> {
        poll_sockets(&mut [self.poll_fd()], limit).map_err(|source| self.socket_error(source))
    }

    pub(crate) fn poll_fd(&self) -> PollFd<'_> {
        let mut events = PollFlags::IN;
        if !self.tx.is_empty() {
            events |= PollFlags::OUT;
        }
        PollFd::new(&self.stream, events)
    }

    fn push_tx(
        &mut self,
        header: [u8; MAX_HEADER_BYTES],
        header_bytes: usize,
        slot: u16,
        offset_bytes: u32,
        length_bytes: u32,
        answers_r2t: bool,
    ) {
        let command = &mut self.commands[usize::from(slot)];
        command.sending += 1;
        let mut digest = [0; DIGEST_BYTES];
        let mut digest_bytes = 0;
        if self.params.data_digest && length_bytes > 0 {
            let from = offset_bytes as usize;
            let data = &command.buf[from..from + length_bytes as usize];
            digest = crc32c(data).to_le_bytes();
            digest_bytes = DIGEST_BYTES as u8;
        }
        self.tx.push(TxItem {
            header,
            header_bytes: header_bytes as u8,
            slot,
            offset_bytes,
            length_bytes,
            digest,
            digest_bytes,
            answers_r2t,
        });
    }

    fn send(&mut self, out: &mut Vec<Done>) -> Result<(), Error> {
        while !self.tx.is_empty() {
            let mut slices = [IoSlice::new(&[]); TX_SLICES];
            let commands = &self.commands;
            let buffer = |slot: u16| commands[usize::from(slot)].buf.as_slice();
            let (count, offered) = self.tx.gather(&mut slices, buffer);
            match (&self.stream).write_vectored(&slices[..count]) {
                Ok(0) => return Err(self.closed()),
                Ok(sent) => {
                    self.sent(sent, out);
                    if sent < offered {
                        return Ok(());
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => {
                    // A termination request says more than a broken pipe.
                    self.receive(out)?;
                    return Err(self.socket_error(e));
                }
            }
        }
        Ok(())
    }

    fn sent(&mut self, bytes: usize, out: &mut Vec<Done>) {
        self.tx.sent(bytes);
        while let Some((slot, answers_r2t)) = self.tx.pop_sent() {
            if answers_r2t {
                self.vm.r2t_answered(slot);
            }
            let command = &mut self.commands[usize::from(slot)];
            command.sending -= 1;
            if command.sending == 0
                && let Some(completion) = command.ended.take()
            {
                self.report(completion, out);
            }
        }
    }

    fn receive(&mut self, out: &mut Vec<Done>) -> Result<(), Error> {
        loop {
            if self.rx_start == self.rx_end {
                self.rx_start = 0;
                self.rx_end = 0;
            } else if self.rx_start > 0 && self.rx.len() - self.rx_end < RX_BYTES / 4 {
                self.rx.copy_within(self.rx_start..self.rx_end, 0);
                self.rx_end -= self.rx_start;
                self.rx_start = 0;
            }
            let space = &mut self.rx[self.rx_end..];
            let mut offered = space.len();
            let received = match &mut self.incoming {
                // The receive buffer is empty here, because all its bytes were payload.
                Some(incoming) if incoming.missing >= DIRECT_RX_BYTES => {
                    let buf = &mut self.commands[usize::from(incoming.slot)].buf;
                    let direct = &mut buf[incoming.at..incoming.at + incoming.missing];
                    offered += direct.len();
                    let mut slices = [IoSliceMut::new(direct), IoSliceMut::new(space)];
                    (&self.stream).read_vectored(&mut slices)
                }
                _ => (&self.stream).read(space),
            };
            let received = match received {
                Ok(0) => return Err(self.closed()),
                Ok(received) => received,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => return Err(self.socket_error(e)),
            };
            let mut buffered = received;
            if let Some(incoming) = &mut self.incoming
                && incoming.missing >= DIRECT_RX_BYTES
            {
                let direct = received.min(incoming.missing);
                if let Some(digest) = &mut incoming.digest {
                    let buf = &self.commands[usize::from(incoming.slot)].buf;
                    digest.update(&buf[incoming.at..incoming.at + direct]);
                }
                incoming.at += direct;
                incoming.missing -= direct;
                buffered -= direct;
            }
            self.rx_end += buffered;
            self.consume(out)?;
            if received < offered {
                return Ok(());
            }
        }
    }

    fn consume(&mut self, out: &mut Vec<Done>) -> Result<(), Error> {
        loop {
            if self.incoming.is_some() && !self.consume_payload(out) {
                return Ok(());
            }
            let bytes = &self.rx[self.rx_start..self.rx_end];
            let frame = match parse(bytes, &self.params) {
                Ok(Parsed::NeedMore(_)) => return Ok(()),
                Ok(Parsed::Pdu(frame)) => frame,
                Err(error) => return Err(self.refuse_pdu(error)),
            };
            let event = match self.vm.on_pdu(&frame) {
                Ok(event) => event,
                Err(violation) => return Err(self.refuse(violation)),
            };
            self.rx_start += frame.header_bytes;
            match event {
                Event::DataIn(DataIn {
                    slot,
                    offset_bytes,
                    length_bytes,
                }) => {
                    self.incoming = Some(Incoming {
                        slot,
                        at: offset_bytes as usize,
                        missing: length_bytes as usize,
                        digest: frame.data_digest.then(DataDigest::new),
                    });
                }
                Event::DataOut(data) => self.answer(&data),
                Event::Completed(completion) => self.end(completion, out),
                Event::Terminated(term) => {
                    return Err(Error::Terminated {
                        addr: self.addr,
                        term,
                    });
                }
            }
        }
    }

    /// True: the payload is complete.
    fn consume_payload(&mut self, out: &mut Vec<Done>) -> bool {
        let Some(incoming) = &mut self.incoming else {
            return true;
        };
        let here = incoming.missing.min(self.rx_end - self.rx_start);
        if here > 0 {
            let from = &self.rx[self.rx_start..self.rx_start + here];
            let buf = &mut self.commands[usize::from(incoming.slot)].buf;
            buf[incoming.at..incoming.at + here].copy_from_slice(from);
            if let Some(digest) = &mut incoming.digest {
                digest.update(from);
            }
            incoming.at += here;
            incoming.missing -= here;
            self.rx_start += here;
        }
        if incoming.missing > 0 {
            return false;
        }
        let mut digest_ok = true;
        if let Some(digest) = &incoming.digest {
            let bytes = &self.rx[self.rx_start..self.rx_end];
            let Some(received) = bytes.first_chunk::<DIGEST_BYTES>() else {
                return false;
            };
            digest_ok = u32::from_le_bytes(*received) == digest.finish();
            self.rx_start += DIGEST_BYTES;
        }
        let slot = incoming.slot;
        self.incoming = None;
        if let Some(completion) = self.vm.data_received(slot, digest_ok) {
            self.end(completion, out);
        }
        true
    }

    fn answer(&mut self, data: &DataOut) {
        for pdu in data.pdus(self.params.max_h2c_data_bytes) {
            let mut header = [0; MAX_HEADER_BYTES];
            let header_bytes = put_h2c_data(&mut header, &self.params, &pdu);
            let H2cData {
                offset_bytes,
                length_bytes,
                last,
                ..
            } = pdu;
            self.push_tx(
                header,
                header_bytes,
                data.slot,
                offset_bytes,
                length_bytes,
                last,
            );
        }
    }

    fn end(&mut self, completion: Completion, out: &mut Vec<Done>) {
        let command = &mut self.commands[usize::from(completion.slot)];
        if command.sending > 0 {
            command.ended = Some(completion);
        } else {
            self.report(completion, out);
        }
    }

    fn report(&mut self, completion: Completion, out: &mut Vec<Done>) {
        let command = &mut self.commands[usize::from(completion.slot)];
        command.active = false;
        out.push(Done {
            tag: command.tag,
            status: completion.status,
            result: completion.result,
            buf: std::mem::take(&mut command.buf),
        });
        self.vm.release(completion.slot);
    }

    fn check_overdue(&self) -> Result<(), Error> {
        let limit = self.command_timeout;
        let active = self.commands.iter().filter(|c| c.active);
        let overdue = active
            .filter_map(|c| c.begun)
            .filter(|begun| self.now.saturating_duration_since(*begun) > limit)
            .count();
        if overdue == 0 {
            return Ok(());
        }
        Err(Error::TimedOut {
            addr: self.addr,
            what: format!("{overdue} of {} commands in flight", self.in_flight()),
            waited: limit,
        })
    }

    /// Does not wait for delivery.
    fn refuse_pdu(&mut self, error: PduError) -> Error {
        self.send_term_req(&error);
        Error::Pdu {
            addr: self.addr,
            error,
        }
    }

    fn refuse(&mut self, violation: Violation) -> Error {
        self.send_term_req(&violation.error);
        Error::Protocol {
            addr: self.addr,
            violation,
        }
    }

    fn send_term_req(&mut self, error: &PduError) {
        // Inside another PDU, the target would take it for that PDU's data.
        if self.tx.is_between_pdus() {
            let header = &self.rx[self.rx_start..self.rx_end];
            let mut pdu = [0; MAX_TERM_REQ_BYTES];
            let bytes = put_term_req(&mut pdu, Role::Host, error, header);
            let _ = (&self.stream).write(&pdu[..bytes]);
        }
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    fn closed(&self) -> Error {
        Error::Closed {
            addr: self.addr,
            in_flight: self.in_flight(),
        }
    }

    fn socket_error(&self, source: std::io::Error) -> Error {
        Error::Socket {
            addr: self.addr,
            source,
        }
    }
}

/// Sleeps at most until the next check for overdue commands.
pub(crate) fn poll_sockets(fds: &mut [PollFd<'_>], limit: Duration) -> std::io::Result<()> {
    let limit = limit.min(OVERDUE_CHECK);
    let timeout = Timespec {
        tv_sec: limit.as_secs() as i64,
        tv_nsec: i64::from(limit.subsec_nanos()),
    };
    match rustix::event::poll(fds, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
