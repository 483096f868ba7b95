//! A client's messages, handled so that a successor can continue at any point.
//!
//! A message is *peeked*, and its descriptors are deposited with the daemon. Then
//! ([`MessageStage`]) the intent is recorded in the VM file, the message carried out,
//! answered, and consumed. A successor reads the stage and the socket's peek offset
//! ([`super::peek`]):
//!
//! - *intent*: it undoes changes to memory regions, and handles the message again.
//! - *answering*: the file tells whether the socket took the answer ([`super::answer`]). If it did,
//!   continue as answered, else as intent. If it took only part (no room, or longer than 32 KiB),
//!   the client is closed.
//! - *answered*: the peek offset shows how much is consumed; the rest is consumed now.
//!
//! Requests of the frontend's own are sent alike, with their own note.
//!
//! The kernel ties descriptors to one `sendmsg` segment of the stream. A peek that leaves room in
//! its buffer ends at the first segment with descriptors, and returns them. A peek that fills its
//! buffer may return those of later segments, so it does not count. Descriptors belong to the last
//! message that begins in or before their segment.

use super::client::{Client, MAX_DESCRIPTORS, MAX_MESSAGE_BYTES, MESSAGE_LIMIT_NS};
use super::closer::Closer;
use super::file::MessageStage;
use super::protocol::{Answer, Closing, DepositedFd, Message, Protocol, StreamFrame, Turn};
use super::{answer, descriptor, peek};
use crate::core::Core;
use crate::upcall::Upcall;
use forebay_xlate::kill_point;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Bytes to peek when the message's length is not known yet.
const GLANCE_BYTES: usize = 4096;
/// A client that was served for so long is not blamed for the previous engine's crash.
pub(super) const CALM_NS: u64 = 60_000_000_000;
/// Messages per client and turn, so that other clients get theirs.
const MESSAGES_AT_ONCE: usize = 8;

pub(crate) const HUNG_UP: Closing = Closing("it hung up");
const CUT_OFF: Closing = Closing("the engine died in the middle of an answer");
const CUT_OFF_ASKING: Closing = Closing("the engine died in the middle of a message to it");

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TalkPhase {
    Reading,
    /// Waiting until the daemon has stored the descriptors up to this deposit.
    Depositing(Option<u32>),
    /// [`Answer::Later`]: the frontend tries again each turn.
    Applying,
    /// Carried out, but removed memory is still in use or own deposits are not acknowledged.
    Settling,
    Sending(usize),
}

pub(super) struct Talk {
    fd: Arc<OwnedFd>,
    /// Peeked bytes, from the stream's start.
    bytes: Vec<u8>,
    len: usize,
    descriptors: Vec<DepositedFd>,
    fresh: Vec<OwnedFd>,
    /// Where in `bytes` the segment of `fresh` ends.
    fresh_end: usize,
    /// The socket may have data to peek at.
    readable: bool,
    /// `bytes` may hold another whole message.
    more: bool,
    /// The socket's send buffer is full.
    pub(super) blocked: bool,
    phase: TalkPhase,
    deadline_ns: u64,
    /// The last deposit that the daemon acknowledged.
    deposited: Option<u32>,
    /// When the first message in this engine ended.
    begun_ns: Option<u64>,
    closer: Closer,
}

impl Talk {
    pub(super) fn new(fd: Arc<OwnedFd>, closer: Closer) -> Result<Self, Closing> {
        rustix::io::ioctl_fionbio(&fd, true).map_err(|_| Closing("its socket failed"))?;
        peek::set_offset(&fd, 0).map_err(|_| Closing("its socket can't be peeked at"))?;
        Ok(Self {
            fd,
            bytes: Vec::new(),
            len: 0,
            descriptors: Vec::new(),
            fresh: Vec::new(),
            fresh_end: 0,
            readable: true,
            more: false,
            blocked: false,
            phase: TalkPhase::Reading,
            deadline_ns: 0,
            deposited: None,
            begun_ns: None,
            closer,
        })
    }

    /// Continues with a dead engine's client, and settles the message in flight. True: it will be
    /// handled again.
    pub(super) fn resume(
        fd: Arc<OwnedFd>,
        client: &Client,
        closer: Closer,
    ) -> Result<(Self, bool), Closing> {
        let damaged = Closing("its saved state is damaged");
        let file = client.file();
        if !file.settle_ask() {
            return Err(CUT_OFF_ASKING);
        }
        let (number, mut stage) = file.message();
        let (bytes, peeked) = file.consuming();
        if stage == MessageStage::Answering {
            stage = match file.sent() {
                _ if bytes == u64::MAX => return Err(CUT_OFF),
                (0, _) => MessageStage::Intent,
                (sent, all) if sent == all => MessageStage::Answered,
                _ => return Err(CUT_OFF),
            };
        }
        match stage {
            MessageStage::Idle | MessageStage::Answering => {}
            MessageStage::Intent => file.undo(number),
            MessageStage::Answered => {
                if bytes > peeked || bytes > MAX_MESSAGE_BYTES as u64 {
                    return Err(damaged);
                }
                let now = peek::offset(&fd).map_err(|_| damaged)?;
                let left = now.checked_sub(peeked - bytes).ok_or(damaged)?;
                if left > bytes {
                    return Err(damaged);
                }
                consume(&fd, left as usize, &closer)?;
            }
        }
        // Region changes of an undone message are already gone; those of an answered message become
        // final.
        file.settle();
        file.set_message(number, MessageStage::Idle);
        Ok((Self::new(fd, closer)?, stage == MessageStage::Intent))
    }

    pub(super) fn ready(&mut self) {
        self.readable = true;
        self.blocked = false;
    }

    pub(super) fn deposited(&mut self, last: u32) {
        self.deposited = self.deposited.max(Some(last));
    }

    pub(super) fn is_active(&self) -> bool {
        !self.blocked
            && match self.phase {
                TalkPhase::Reading => self.readable || self.more,
                TalkPhase::Depositing(last) => self.deposited >= last,
                TalkPhase::Applying | TalkPhase::Settling => true,
                TalkPhase::Sending(_) => !self.blocked,
            }
    }

    /// Whether it waits for something that no event announces.
    pub(super) fn must_retry(&self) -> bool {
        matches!(self.phase, TalkPhase::Applying | TalkPhase::Settling)
    }

    pub(super) fn hears(&self) -> bool {
        self.phase == TalkPhase::Reading
    }

    pub(super) fn deadline_ns(&self) -> Option<u64> {
        // Without a daemon it waits without limit.
        let waits = matches!(self.phase, TalkPhase::Reading | TalkPhase::Depositing(_));
        (!waits).then_some(self.deadline_ns)
    }

    pub(super) fn overdue(&self) -> Closing {
        Closing(match self.phase {
            TalkPhase::Reading | TalkPhase::Depositing(_) => "its message did not arrive",
            TalkPhase::Applying => "its message could not be processed in time",
            TalkPhase::Settling => "memory that it removed stayed in use for too long",
            TalkPhase::Sending(_) => "it did not read an answer in time",
        })
    }

    /// For another thread to drop.
    pub(super) fn remains(self) -> impl std::any::Any + Send {
        (self.fd, self.fresh, self.descriptors)
    }

    pub(super) fn step(
        &mut self,
        core: &mut Core,
        client: &mut Client,
        frontend: &mut dyn Protocol,
    ) -> Result<bool, Closing> {
        let mut messages = 0;
        let mut any = false;
        loop {
            if !client.request.bytes.is_empty() && !matches!(self.phase, TalkPhase::Sending(1..)) {
                if !self.send_request(client)? {
                    return Ok(any);
                }
                any = true;
            }
            match self.phase {
                TalkPhase::Reading => {
                    self.more = messages == MESSAGES_AT_ONCE;
                    if self.more || !self.read(frontend)? {
                        return Ok(any);
                    }
                    self.keep_descriptors(client, frontend)?;
                }
                TalkPhase::Depositing(last) => {
                    if self.deposited < last {
                        return Ok(any);
                    }
                    kill_point!("vm.deposited");
                    self.deadline_ns = core.now_ns().saturating_add(MESSAGE_LIMIT_NS);
                    self.begin(core, client, frontend)?;
                }
                TalkPhase::Applying => {
                    let answer = frontend.later(&mut Turn { core, client });
                    self.handle_answer(answer)?;
                    if self.phase == TalkPhase::Applying {
                        return Ok(any);
                    }
                }
                TalkPhase::Settling => {
                    let own = client.awaits_deposit;
                    if !client.is_settled(core) || self.deposited < own {
                        return Ok(any);
                    }
                    client.awaits_deposit = None;
                    kill_point!("vm.applied");
                    self.phase = TalkPhase::Sending(0);
                }
                TalkPhase::Sending(sent) => {
                    if !self.send(client, sent)? {
                        return Ok(any);
                    }
                    self.finish(client)?;
                    let begun_ns = *self.begun_ns.get_or_insert(core.now_ns());
                    if core.now_ns() >= begun_ns.saturating_add(CALM_NS) {
                        client.file().set_tries(0);
                    }
                    messages += 1;
                }
            }
            any = true;
        }
    }

    /// Peeks until a message is whole; false: more bytes must come.
    fn read(&mut self, frontend: &mut dyn Protocol) -> Result<bool, Closing> {
        loop {
            let need = match self.bytes.len() {
                0 => 1,
                _ => match frontend.frame(&self.bytes)? {
                    StreamFrame::Whole(len) if len == 0 || len > MAX_MESSAGE_BYTES => {
                        return Err(TOO_LONG);
                    }
                    StreamFrame::Whole(len) if len <= self.bytes.len() => {
                        self.len = len;
                        return Ok(true);
                    }
                    StreamFrame::Whole(len) => len,
                    StreamFrame::Need(need) => need.max(self.bytes.len() + 1),
                },
            };
            if need > MAX_MESSAGE_BYTES {
                return Err(TOO_LONG);
            }
            if !self.readable {
                return Ok(false);
            }
            let want = need - self.bytes.len();
            let peeked = match self.fresh.is_empty() {
                true => self.glance(want)?,
                // Only the rest of this message: a longer peek would lose the next one's
                // descriptors.
                false => self.peek(want, false)?,
            };
            if peeked == 0 {
                return Ok(false);
            }
        }
    }

    /// Peeks at more than is needed, and takes descriptors.
    fn glance(&mut self, need: usize) -> Result<usize, Closing> {
        let had = self.bytes.len();
        let mut want = need.max(GLANCE_BYTES);
        loop {
            let count = self.peek(want, true)?;
            if self.fresh.is_empty() {
                return Ok(count);
            }
            if count < want {
                self.fresh_end = self.bytes.len();
                return Ok(count);
            }
            // They may belong to later bytes: try again with a larger buffer.
            let fresh = std::mem::take(&mut self.fresh);
            if !fresh.iter().all(descriptor::is_taken) {
                self.closer.close_suspect(fresh);
                return Err(NOT_TAKEN);
            }
            self.closer.close_all(fresh.into_iter().map(Arc::new));
            self.bytes.truncate(had);
            let offset = u32::try_from(had).map_err(|_| TOO_LONG)?;
            peek::set_offset(&self.fd, offset).map_err(|_| FAILED)?;
            if want >= MOST_QUEUED {
                return Err(TOO_LONG);
            }
            want = MOST_QUEUED;
        }
    }

    /// Peeks at up to `want` more bytes; returns how many came.
    fn peek(&mut self, want: usize, with_descriptors: bool) -> Result<usize, Closing> {
        let had = self.bytes.len();
        self.bytes.resize(had + want, 0);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let room = if with_descriptors { space.len() } else { 0 };
        let mut control = RecvAncillaryBuffer::new(&mut space[..room]);
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = loop {
            let mut into = [IoSliceMut::new(&mut self.bytes[had..])];
            match rustix::net::recvmsg(&self.fd, &mut into, &mut control, flags) {
                Err(Errno::INTR) => {}
                other => break other,
            }
        };
        let count = match received {
            Ok(received) => {
                if with_descriptors {
                    for message in control.drain() {
                        if let RecvAncillaryMessage::ScmRights(fds) = message {
                            self.fresh.extend(fds);
                        }
                    }
                    if received.flags.contains(ReturnFlags::CTRUNC) {
                        self.bytes.truncate(had);
                        return Err(match self.fresh.len() {
                            MAX_DESCRIPTORS => TOO_MANY,
                            _ => Closing("this engine ran out of file descriptors"),
                        });
                    }
                }
                if received.bytes == 0 {
                    return Err(HUNG_UP);
                }
                // Even if the peek was short: epoll reports a hang-up only once, so look for it.
                received.bytes
            }
            Err(Errno::AGAIN) => {
                self.readable = false;
                0
            }
            Err(_) => return Err(HUNG_UP),
        };
        self.bytes.truncate(had + count);
        Ok(count)
    }

    fn keep_descriptors(
        &mut self,
        client: &mut Client,
        frontend: &dyn Protocol,
    ) -> Result<(), Closing> {
        self.descriptors.clear();
        let fresh = match self.len >= self.fresh_end {
            true => std::mem::take(&mut self.fresh),
            false => Vec::new(),
        };
        let message = self.bytes.get(..self.len).unwrap_or_default();
        let is_taken = |fd: &OwnedFd| {
            descriptor::is_taken(fd)
                && (!descriptor::is_unix_stream(fd) || frontend.takes_socket(message))
        };
        if !fresh.iter().all(is_taken) {
            self.closer.close_suspect(fresh);
            return Err(NOT_TAKEN);
        }
        for fd in fresh {
            let deposit = client.deposit(Arc::new(fd)).ok_or(TOO_MANY)?;
            self.descriptors.push(deposit);
        }
        let last = self.descriptors.last().map(|deposit| deposit.number);
        if last.is_some() {
            let deposits = Upcall::Deposits(client.socket, self.descriptors.clone());
            client.upcalls.push(deposits);
        }
        self.phase = TalkPhase::Depositing(last);
        Ok(())
    }

    fn begin(
        &mut self,
        core: &mut Core,
        client: &mut Client,
        frontend: &mut dyn Protocol,
    ) -> Result<(), Closing> {
        let (number, _) = client.file().message();
        client.file().set_message(number + 1, MessageStage::Intent);
        kill_point!("vm.intent");
        client.reply.clear();
        client.reply_descriptor = None;
        let message = Message {
            bytes: self.bytes.get(..self.len).unwrap_or_default(),
            descriptors: &self.descriptors,
        };
        let answer = frontend.message(&mut Turn { core, client }, &message);
        self.phase = TalkPhase::Applying;
        self.handle_answer(answer)
    }

    fn handle_answer(&mut self, answer: Answer) -> Result<(), Closing> {
        match answer {
            Answer::Now => self.phase = TalkPhase::Settling,
            Answer::Later => {}
            Answer::Close(why) => return Err(why),
        }
        Ok(())
    }

    fn send(&mut self, client: &mut Client, mut sent: usize) -> Result<bool, Closing> {
        if sent == 0 {
            let (len, peeked) = (self.len as u64, self.bytes.len() as u64);
            client.file().set_consuming(len, peeked);
            client.file().begin_answer(client.reply.len() as u64);
        }
        while let Some(bytes) = client.reply.get(sent..).filter(|bytes| !bytes.is_empty()) {
            client.stage(MessageStage::Answering);
            kill_point!("vm.answering");
            let fd = client.reply_descriptor.as_ref().filter(|_| sent == 0);
            let fd = fd.map(|fd| fd.as_fd());
            match answer::send(&self.fd, bytes, fd, client.file().note()) {
                Ok(count) => {
                    sent += count;
                    if sent < client.reply.len() {
                        // Another engine cannot continue a partly sent answer.
                        client.file().set_consuming(u64::MAX, 0);
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    if sent == 0 {
                        // Nothing was sent, so the message can be handled again.
                        client.stage(MessageStage::Intent);
                    }
                    self.blocked = true;
                    self.phase = TalkPhase::Sending(sent);
                    return Ok(false);
                }
                Err(_) => return Err(HUNG_UP),
            }
        }
        Ok(true)
    }

    fn send_request(&mut self, client: &mut Client) -> Result<bool, Closing> {
        if client.request.sent == 0 {
            let bytes = client.request.bytes.len() as u64;
            client.file().begin_ask(client.request.number, bytes);
            kill_point!("vm.asking");
        }
        while let Some(rest) =
            (client.request.bytes.get(client.request.sent..)).filter(|r| !r.is_empty())
        {
            match answer::send(&self.fd, rest, None, client.file().ask_note()) {
                Ok(count) => {
                    client.request.sent += count;
                    if client.request.sent < client.request.bytes.len() {
                        client.file().tear_ask();
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    self.blocked = true;
                    return Ok(false);
                }
                Err(_) => return Err(HUNG_UP),
            }
        }
        kill_point!("vm.asked");
        client.file().end_ask();
        client.request.bytes.clear();
        client.request.sent = 0;
        Ok(true)
    }

    /// Consumes the answered message.
    fn finish(&mut self, client: &mut Client) -> Result<(), Closing> {
        kill_point!("vm.sent");
        let (len, peeked) = (self.len as u64, self.bytes.len() as u64);
        client.file().set_consuming(len, peeked);
        // A successor knows from the note whether it must answer again; from here on it must not.
        client.stage(MessageStage::Answered);
        kill_point!("vm.answered");
        consume(&self.fd, self.len, &self.closer)?;
        kill_point!("vm.consumed");
        client.file().settle();
        client.stage(MessageStage::Idle);
        self.bytes.drain(..self.len);
        self.fresh_end = self.fresh_end.saturating_sub(self.len);
        self.len = 0;
        self.phase = TalkPhase::Reading;
        self.closer.close_all(client.reply_descriptor.take());
        if !self.descriptors.is_empty() {
            let descriptors = std::mem::take(&mut self.descriptors);
            self.closer.close_all(descriptors.into_iter().map(|d| d.fd));
        }
        client.withdraw_unused();
        Ok(())
    }
}

/// Consumes `left` bytes. It accepts their descriptors, since the kernel would close refused ones
/// on this thread.
fn consume(fd: &OwnedFd, mut left: usize, closer: &Closer) -> Result<(), Closing> {
    let mut scratch = [0u8; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_AT_ONCE))];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    while left > 0 {
        let want = left.min(scratch.len());
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut scratch[..want])];
        match rustix::net::recvmsg(fd, &mut into, &mut control, flags) {
            Ok(received) => {
                for message in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(fds) = message {
                        let (taken, others): (Vec<_>, Vec<_>) =
                            fds.partition(|fd: &OwnedFd| descriptor::is_taken(fd));
                        closer.close_all(taken.into_iter().map(Arc::new));
                        if !others.is_empty() {
                            closer.close_suspect(others);
                        }
                    }
                }
                if received.bytes == 0 {
                    return Err(HUNG_UP);
                }
                left -= received.bytes;
            }
            Err(Errno::INTR) => {}
            Err(_) => return Err(HUNG_UP),
        }
    }
    Ok(())
}

/// Descriptors per segment: the kernel's SCM_MAX_FD.
const MOST_AT_ONCE: usize = 253;

/// More bytes than a client's socket can hold.
const MOST_QUEUED: usize = 2 << 20;
const TOO_LONG: Closing = Closing("its message is too long");
const TOO_MANY: Closing = Closing("it sent too many descriptors");
const NOT_TAKEN: Closing = Closing(
    "it sent a descriptor that is neither memory (memfd, tmpfs, huge pages; not a file on a disk) nor an eventfd, nor \
    a socket where one is expected",
);
const FAILED: Closing = Closing("its socket failed");
