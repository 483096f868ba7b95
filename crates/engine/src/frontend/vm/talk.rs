//! A client's messages, in two phases.
//!
//! **Design.** A message is *peeked* whole, and its descriptors with it; they are deposited with the daemon,
//! and that is waited for. Then ([`MessageStage`]) its intent is noted in the machine file, the frontend carries
//! it out, and what it took away is waited for; it is answered; and only then it is consumed. A successor
//! reads the file and, of the socket, the peek offset ([`super::peek`]), and knows ([`Talk::resume`]):
//!
//! - *intent*: nothing was answered. What the message did to the memory's regions is taken back, and it is
//!   peeked and carried out again.
//! - *answering*: the kernel has noted in the file whether it took the answer ([`super::answer`]). If it did, it is as
//!   answered; if not, as intent. Only of an answer of which the socket took a part (no room; longer than 32 KiB) the
//!   rest is lost, and with it the client.
//! - *answered*: the peek offset says how much is consumed; the rest is.
//!
//! A message of the frontend's own is sent the same way, with a note of its own: a successor knows whether the client has it.
//!
//! Descriptors belong to a piece of the stream, as it was sent. A peek with room to spare ends with the first
//! piece that has some, and hands them out (a peek without hands out those of later pieces too, so it does not
//! count); they are those of the last message that begins within that piece or before. Whatever else is needed of
//! it is then peeked at alone.
//!
//! **Not here:** what messages mean ([`super::protocol`]).

use super::client::{Client, MAX_DESCRIPTORS, MAX_MESSAGE_BYTES, MESSAGE_LIMIT_NS};
use super::closer::Closer;
use super::file::MessageStage;
use super::protocol::{Answer, Closing, Deposit, Message, Protocol, StreamFrame, Turn};
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

/// Bytes that are peeked at when it is not known yet how many will come.
const GLANCE_BYTES: usize = 4096;
/// Who has been served for so long is not what the engine before this one crashed over.
pub(super) const CALM_NS: u64 = 60_000_000_000;
/// Messages carried out in one turn: others are to have theirs.
const MESSAGES_AT_ONCE: usize = 8;

/// Why a client ends that just went.
pub(crate) const HUNG_UP: Closing = Closing("it hung up");
const CUT_OFF: Closing = Closing("the engine died in the middle of an answer");
const CUT_OFF_ASKING: Closing = Closing("the engine died in the middle of a message to it");

/// How far the message at the stream's begin is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TalkPhase {
    /// It comes.
    Reading,
    /// The daemon is asked to keep its descriptors, up to this deposit.
    Depositing(Option<u32>),
    /// The frontend has left it for later.
    Applying,
    /// It is carried out; what it took away is still used, or what it made is not deposited.
    Settling,
    /// So much of its answer is sent.
    Sending(usize),
}

/// See the module's text.
pub(super) struct Talk {
    fd: Arc<OwnedFd>,
    /// What was peeked, from the stream's begin on.
    bytes: Vec<u8>,
    /// The message's length, once it is whole.
    len: usize,
    descriptors: Vec<Deposit>,
    /// Came with bytes that are being peeked at.
    fresh: Vec<OwnedFd>,
    /// Where in `bytes` the piece ends that they came with.
    fresh_end: usize,
    /// There may be something to peek at.
    readable: bool,
    /// There may be another whole message.
    more: bool,
    /// The socket has no room: epoll says when it has.
    pub(super) blocked: bool,
    phase: TalkPhase,
    deadline_ns: u64,
    /// The daemon has the deposits up to this one.
    deposited: Option<u32>,
    /// When its first message here was over.
    begun_ns: Option<u64>,
    closer: Closer,
}

impl Talk {
    /// With a client that has said nothing yet.
    ///
    /// # Errors
    /// The socket is no stream socket of this machine.
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

    /// With a client of a dead engine, of which nothing was consumed that its machine file doesn't say: settles what
    /// was under way. From here on the file's message is over, or it begins anew; which goes with it.
    ///
    /// # Errors
    /// Why the client can't go on.
    pub(super) fn resume(
        fd: Arc<OwnedFd>,
        client: &Client,
        closer: Closer,
    ) -> Result<(Self, bool), Closing> {
        let damaged = Closing("its machine file is damaged");
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
        // What is undone is no part of it, what is answered is.
        file.settle();
        file.set_message(number, MessageStage::Idle);
        Ok((Self::new(fd, closer)?, stage == MessageStage::Intent))
    }

    /// The socket has something to say, or room.
    pub(super) fn ready(&mut self) {
        self.readable = true;
        self.blocked = false;
    }

    /// The daemon keeps the deposits up to this one.
    pub(super) fn deposited(&mut self, last: u32) {
        self.deposited = self.deposited.max(Some(last));
    }

    /// Whether [`Talk::step`] has something to do now.
    pub(super) fn is_active(&self) -> bool {
        // Nothing is said while the socket has no room.
        !self.blocked
            && match self.phase {
                TalkPhase::Reading => self.readable || self.more,
                TalkPhase::Depositing(last) => self.deposited >= last,
                TalkPhase::Applying | TalkPhase::Settling => true,
                TalkPhase::Sending(_) => !self.blocked,
            }
    }

    /// Whether it waits for what nobody tells of.
    pub(super) fn must_retry(&self) -> bool {
        matches!(self.phase, TalkPhase::Applying | TalkPhase::Settling)
    }

    /// Whether the stream is looked at.
    pub(super) fn hears(&self) -> bool {
        self.phase == TalkPhase::Reading
    }

    /// When it has waited too long.
    pub(super) fn deadline_ns(&self) -> Option<u64> {
        // Without a daemon it waits, as long as that takes.
        let waits = matches!(self.phase, TalkPhase::Reading | TalkPhase::Depositing(_));
        (!waits).then_some(self.deadline_ns)
    }

    /// What it waited for too long.
    pub(super) fn overdue(&self) -> Closing {
        Closing(match self.phase {
            TalkPhase::Reading | TalkPhase::Depositing(_) => "a message of its did not come",
            TalkPhase::Applying => "a message of its could not be carried out in time",
            TalkPhase::Settling => "memory that it took away was used for too long",
            TalkPhase::Sending(_) => "it did not take an answer in time",
        })
    }

    /// What must be let go of elsewhere.
    pub(super) fn remains(self) -> impl std::any::Any + Send {
        (self.fd, self.fresh, self.descriptors)
    }

    /// Goes on as far as possible; whether anything was done.
    ///
    /// # Errors
    /// Why the client is to be closed.
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
                    self.take(answer)?;
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

    /// Peeks until a message is whole; false if it isn't yet.
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
                // The rest of the message that they belong to, and no more: the next one's would be lost.
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
            // They may belong to bytes behind these.
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

    /// Peeks at up to `want` bytes more; how many came.
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
                            _ => Closing("this engine had no descriptors left"),
                        });
                    }
                }
                if received.bytes == 0 {
                    return Err(HUNG_UP);
                }
                // However few they are: an end that came with them is told of once, so it is looked for.
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

    /// The message is whole: has the daemon keep its descriptors.
    fn keep_descriptors(
        &mut self,
        client: &mut Client,
        frontend: &dyn Protocol,
    ) -> Result<(), Closing> {
        self.descriptors.clear();
        // Those that were found belong to the last message that begins before where they end.
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
        // Without any there is nothing to wait for.
        self.phase = TalkPhase::Depositing(last);
        Ok(())
    }

    /// Has the frontend carry the message out.
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
        self.take(answer)
    }

    fn take(&mut self, answer: Answer) -> Result<(), Closing> {
        match answer {
            Answer::Now => self.phase = TalkPhase::Settling,
            Answer::Later => {}
            Answer::Close(why) => return Err(why),
        }
        Ok(())
    }

    /// Sends the answer from `sent` on, if there is one; true when all of it is.
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
                        // A part of an answer can't be gone on with by another engine.
                        client.file().set_consuming(u64::MAX, 0);
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    if sent == 0 {
                        // Nothing was: it can be done again.
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

    /// Sends a message of the frontend's own; true when all of it is.
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

    /// The message is answered: consumes it.
    fn finish(&mut self, client: &mut Client) -> Result<(), Closing> {
        kill_point!("vm.sent");
        let (len, peeked) = (self.len as u64, self.bytes.len() as u64);
        client.file().set_consuming(len, peeked);
        // Only now: until then whatever is there may be answered again, or not at all.
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

/// Consumes so many bytes, which are there. Descriptors come out with them, and perhaps such as nobody has
/// looked at: were they not taken, the kernel would close them here.
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

/// Descriptors in one piece of a stream: the kernel's limit (SCM_MAX_FD).
const MOST_AT_ONCE: usize = 253;

/// More than a client's socket ever holds.
const MOST_QUEUED: usize = 2 << 20;
const TOO_LONG: Closing = Closing("a message of its is too long");
const TOO_MANY: Closing = Closing("it sent more descriptors than it may");
const NOT_TAKEN: Closing = Closing(
    "it sent a descriptor that is neither memory (memfd, tmpfs, huge pages; not a file on a disk) nor an eventfd, nor a socket where one belongs",
);
const FAILED: Closing = Closing("its socket failed");
