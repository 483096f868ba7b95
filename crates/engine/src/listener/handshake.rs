//! One connection at the listener: ICReq, ICResp, Connect (TCP 3.4).
//!
//! **Design.** [`Handshake::advance`] only peeks at received bytes, from the start each time. Its
//! answers fit into a new socket's buffer, or the connection is dropped. Only a refused host's
//! bytes are consumed. **Not here:** access checks ([`super::judge`]).

use super::LEAVE_LIMIT_NS;
use super::judge::{self, Welcome};
use super::refused::RefusedHost;
use crate::associations::Associations;
use crate::exports::ExportTable;
use forebay_nvme::controller::Refusal;
use forebay_nvme::tcp::{
    self, DIGEST_BYTES, Frame, MAX_HEADER_BYTES, MAX_TERM_REQ_BYTES, Offer, Parsed, Pdu, PduError,
    Role, TcpParams,
};
use forebay_nvme::{Cqe, Sqe, Status};
use forebay_xlate::kill_point;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub(super) const IC_BYTES: usize = 128;

pub(super) enum Step {
    Wait,
    Gone,
    Welcome(Box<Welcome>),
}

pub(super) struct Handshake {
    pub socket: u64,
    pub fd: Arc<OwnedFd>,
    pub params: TcpParams,
    pub peer: SocketAddr,
    pub local: SocketAddr,
    pub generation: u32,
    pub deadline_ns: u64,
    welcomed: bool,
    /// Bytes of the ICReq.
    passed: usize,
    /// Received part of the present PDU, bounded by the codec's limits.
    bytes: Vec<u8>,
    /// The host was refused: its further bytes are dropped.
    leaving: bool,
    pub refused: Option<RefusedHost>,
}

impl Handshake {
    pub(super) fn new(
        socket: u64,
        fd: Arc<OwnedFd>,
        welcomed: bool,
        peer: SocketAddr,
        local: SocketAddr,
        generation: u32,
        deadline_ns: u64,
    ) -> Self {
        let params = TcpParams::before(Role::Controller);
        Self {
            socket,
            fd,
            welcomed,
            passed: 0,
            params,
            peer,
            local,
            generation,
            deadline_ns,
            bytes: Vec::new(),
            leaving: false,
            refused: None,
        }
    }

    pub(super) fn leaving(&self) -> bool {
        self.leaving
    }

    /// Number of bytes up to the end of the present PDU.
    pub(super) fn examined(&self) -> usize {
        self.passed + self.bytes.len()
    }

    pub(super) fn advance(
        &mut self,
        associations: &Associations,
        exports: &ExportTable,
        now_ns: u64,
    ) -> Step {
        if self.leaving {
            return self.drain();
        }
        loop {
            let frame = match tcp::parse(&self.bytes, &self.params) {
                Err(error) => return self.terminate(&error, now_ns),
                Ok(Parsed::NeedMore(bytes)) => match self.fill(bytes) {
                    Ok(()) => continue,
                    Err(step) => return step,
                },
                Ok(Parsed::Pdu(frame)) => frame,
            };
            if self.bytes.len() < frame.total_bytes()
                && let Err(step) = self.fill(frame.total_bytes())
            {
                return step;
            }
            match frame.pdu {
                Pdu::IcReq(request) => match TcpParams::accept(&request, &Offer::default()) {
                    Err(error) => return self.terminate(&error, now_ns),
                    Ok((params, response)) => {
                        let mut out = [0; MAX_HEADER_BYTES];
                        let n = tcp::put_ic_resp(&mut out, &response);
                        debug_assert_eq!(n, IC_BYTES);
                        self.params = params;
                        self.passed += self.bytes.len();
                        self.bytes.clear();
                        if !self.welcomed && !self.say(&out[..n]) {
                            return Step::Gone;
                        }
                        self.welcomed = true;
                        kill_point!("door.answered");
                    }
                },
                Pdu::CapsuleCmd(sqe) => {
                    return match self.judge(&sqe, &frame, associations, exports) {
                        Ok(welcome) => Step::Welcome(Box::new(welcome)),
                        Err(refusal) => self.refuse(&sqe, &refusal, now_ns),
                    };
                }
                // H2CTermReq, or a PDU that belongs to no command.
                Pdu::H2cTermReq(_) => return Step::Gone,
                _ => return self.terminate(&PduError::SEQUENCE, now_ns),
            }
        }
    }

    fn judge(
        &mut self,
        sqe: &Sqe,
        frame: &Frame,
        associations: &Associations,
        exports: &ExportTable,
    ) -> Result<Welcome, Refusal> {
        let data = self
            .bytes
            .get(frame.header_bytes..frame.header_bytes + frame.data_bytes)
            .unwrap_or(&[]);
        if frame.data_digest {
            let digest = self
                .bytes
                .get(frame.header_bytes + frame.data_bytes..)
                .unwrap_or(&[]);
            if digest.get(..DIGEST_BYTES) != Some(&tcp::crc32c(data).to_le_bytes()[..]) {
                return Err(Refusal {
                    status: Status::TRANSIENT_TRANSPORT_ERROR,
                    result: 0,
                });
            }
        }
        judge::judge(sqe, data, associations, exports, &mut self.refused)
    }

    fn fill(&mut self, want: usize) -> Result<(), Step> {
        loop {
            let mut all = vec![0; self.passed + want];
            let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
            match rustix::net::recv(&self.fd, &mut all[..], flags) {
                Ok((_, n)) if n >= self.passed + want => {
                    self.bytes = all.split_off(self.passed);
                    return Ok(());
                }
                // Bytes that are there hide the end of the stream.
                Ok((_, n)) if n == 0 || self.has_hung_up() => return Err(Step::Gone),
                Ok(_) | Err(Errno::AGAIN) => return Err(Step::Wait),
                Err(Errno::INTR) => {}
                Err(_) => return Err(Step::Gone),
            }
        }
    }

    fn has_hung_up(&self) -> bool {
        let mut fd = [PollFd::new(&self.fd, PollFlags::RDHUP)];
        let now = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        rustix::event::poll(&mut fd, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    fn say(&self, bytes: &[u8]) -> bool {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        rustix::net::send(&self.fd, bytes, flags).is_ok_and(|n| n == bytes.len())
    }

    /// Sends a C2HTermReq (TCP 3.6.2.5), then waits a little for the host to close.
    fn terminate(&mut self, error: &PduError, now_ns: u64) -> Step {
        let mut out = [0; MAX_TERM_REQ_BYTES];
        let n = tcp::put_term_req(&mut out, Role::Controller, error, &self.bytes);
        self.leave(&out[..n], now_ns)
    }

    /// Answers the Connect with an error (Base 2.0, 6.3), then waits a little for the host to
    /// close.
    fn refuse(&mut self, sqe: &Sqe, refusal: &Refusal, now_ns: u64) -> Step {
        let mut out = [0; MAX_HEADER_BYTES];
        let cqe = Cqe::new(refusal.result, 0, 0, sqe.cid(), refusal.status);
        let n = tcp::put_capsule_resp(&mut out, &self.params, &cqe);
        self.leave(&out[..n], now_ns)
    }

    fn leave(&mut self, words: &[u8], now_ns: u64) -> Step {
        if !self.say(words) || rustix::net::shutdown(&self.fd, Shutdown::Write).is_err() {
            return Step::Gone;
        }
        self.leaving = true;
        self.bytes = Vec::new();
        self.deadline_ns = self.deadline_ns.min(now_ns.saturating_add(LEAVE_LIMIT_NS));
        self.drain()
    }

    /// Unread bytes would turn the close into a reset, which may overtake the answer.
    fn drain(&mut self) -> Step {
        let mut scrap = [0; 4096];
        for _ in 0..4 {
            match rustix::net::recv(&self.fd, &mut scrap[..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Step::Gone,
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Step::Wait,
                Err(_) => return Step::Gone,
            }
        }
        Step::Wait
    }
}
