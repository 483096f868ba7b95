//! One line: bytes to packets to messages, and back. Commands run beside it.
//!
//! While the peer does not read, nothing more is read from it, so memory is bounded.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use forebay_mctp::serial::{Decoder, encode};
use forebay_mctp::{
    Address, DropReason, EID_BROADCAST, EID_NULL, Endpoint, EndpointConfig, Message, MessageType,
    NVME_MI, Received,
};
use forebay_nvme::mi::{MiResponse, MiStatus, MiTicket};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, sleep_until};

use super::answer::CommandAnswer;
use super::node::{Caller, ManagedNode};
use super::requesters::{REQUESTERS, Requesters};
use super::wire::SerialWire;
use super::{COMMAND_LIMIT, WRITE_LIMIT};

static TYPES: &[MessageType] = &[NVME_MI];

const READ_BYTES: usize = 4096;
/// Unsent bytes above which nothing is read.
const UNSENT_BYTES: usize = 32 << 10;
/// The transmission unit until the peer sets another one.
const UNIT_BYTES: usize = forebay_mctp::BASELINE_UNIT_BYTES;

/// A command that was carried out.
struct Executed {
    /// The requester's number.
    requester: u64,
    ticket: MiTicket,
    answer: CommandAnswer,
}

struct LineTask {
    name: Rc<str>,
    node: Rc<ManagedNode>,
    began: Instant,
    decoder: Decoder,
    endpoint: Endpoint,
    requesters: Requesters,
    corrupt: u64,
    dropped_messages: u64,
    /// All drops that the node has counted.
    counted_drops: u64,
    outgoing: Vec<u8>,
    /// Set while `outgoing` is not empty: its next byte must be written by then.
    stalls_at: Option<Instant>,
    /// Commands that it may have at once; an aborted one counts until it has ended.
    permits: Arc<Semaphore>,
    /// The largest transmission unit that it may have.
    max_unit_bytes: u16,
    done: mpsc::Sender<Executed>,
}

/// Serves a line until its end. `Ok` is the end of a connection. `used` is the time of the last
/// received bytes.
///
/// # Errors
/// The line fails, or its peer does not read.
pub(super) async fn serve(
    wire: SerialWire,
    name: Rc<str>,
    node: Rc<ManagedNode>,
    used: Rc<Cell<Instant>>,
) -> io::Result<()> {
    // Every command slot of every requester.
    let (done, mut ended) = mpsc::channel(2 * REQUESTERS);
    let config = EndpointConfig {
        uuid: node.identity.uuid.into_bytes(),
        eid: node.identity.eid(),
        static_eid: EID_NULL,
        types: TYPES,
        unit_bytes: UNIT_BYTES,
    };
    let mut line = LineTask {
        name,
        node,
        began: Instant::now(),
        decoder: Decoder::new(),
        endpoint: Endpoint::new(config),
        requesters: Requesters::default(),
        corrupt: 0,
        dropped_messages: 0,
        counted_drops: 0,
        outgoing: Vec::new(),
        stalls_at: None,
        permits: Arc::new(Semaphore::new(2 * REQUESTERS)),
        max_unit_bytes: wire.max_unit_bytes(),
        done,
    };
    let mut bytes = [0; READ_BYTES];
    // Bytes that were read and not yet taken.
    let mut rest = 0..0;
    loop {
        let due = line.next_due();
        let due = async {
            match due {
                Some(due) => sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        let has_room = line.outgoing.len() < UNSENT_BYTES;
        if has_room && !rest.is_empty() {
            rest.start += line.take(&bytes[rest.clone()]).await;
            // A line that never pauses must not delay other tasks.
            tokio::task::yield_now().await;
            continue;
        }
        tokio::select! {
            read = wire.read(&mut bytes), if has_room => match read? {
                0 => return Ok(()),
                read => {
                    rest = 0..read;
                    used.set(Instant::now());
                }
            },
            written = wire.write(&line.outgoing), if !line.outgoing.is_empty() => {
                line.wrote(written?);
            }
            Some(done) = ended.recv() => line.ended(&done),
            () = due => line.time_passed()?,
        }
    }
}

impl LineTask {
    fn next_due(&self) -> Option<Instant> {
        let due = self.requesters.next_due();
        due.into_iter().chain(self.stalls_at).min()
    }

    /// Takes packets while there is room for answers; returns how many bytes it took.
    async fn take(&mut self, bytes: &[u8]) -> usize {
        let mut rest = bytes;
        while self.outgoing.len() < UNSENT_BYTES
            && let Some(packet) = self.decoder.next_packet(&mut rest)
        {
            let now_ns = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
            match self.endpoint.receive(&packet, now_ns) {
                Received::Fragment => {}
                Received::Dropped(reason) => {
                    tracing::debug!(line = &*self.name, ?reason, "dropped an MCTP packet");
                }
                Received::Message(message) => self.command(message),
                Received::Control(answer) => {
                    if let Some(eid) = answer.new_eid {
                        let caller = self.caller(answer.to.eid);
                        self.node.set_eid(eid, &caller).await;
                    }
                    self.send(answer.to, &answer.bytes);
                }
            }
        }
        self.requesters.note_drops(self.endpoint.drops());
        let corrupt = self.decoder.faults().corrupt;
        if corrupt != std::mem::replace(&mut self.corrupt, corrupt) {
            self.requesters.note_corrupt();
        }
        self.count_drops();
        bytes.len() - rest.len()
    }

    fn count_drops(&mut self) {
        let faults = self.decoder.faults();
        let packets = self.endpoint.drops();
        let packets = DropReason::ALL.iter().map(|reason| packets.count(*reason));
        let all = packets.sum::<u64>() + faults.malformed + faults.corrupt + self.dropped_messages;
        let before = std::mem::replace(&mut self.counted_drops, all);
        self.node.drops.fetch_add(all - before, Relaxed);
    }

    fn caller(&self, eid: u8) -> Caller {
        Caller {
            line: self.name.clone(),
            eid,
            unit_bytes: self.endpoint.unit_bytes() as u16,
            max_unit_bytes: self.max_unit_bytes,
        }
    }

    fn command(&mut self, message: Message) {
        let now = Instant::now();
        // An answer comes from the EID that the peer used.
        let local_eid = match message.from.local_eid {
            EID_NULL | EID_BROADCAST => self.endpoint.eid(),
            used => used,
        };
        let from = Address {
            local_eid,
            ..message.from
        };
        if !from.owner {
            // A response: this endpoint sends no requests.
            self.dropped_messages += 1;
            return;
        }
        let permits = match message.bytes.get(1) {
            // Control primitives end at once.
            Some(parameters) if parameters >> 3 & 0xF == 0 => None,
            _ => {
                let own = self.permits.clone().try_acquire_owned();
                let shared = self.node.permits.clone().try_acquire_owned();
                let (Ok(own), Ok(shared)) = (own, shared) else {
                    tracing::debug!(line = &*self.name, "too many commands at once");
                    self.dropped_messages += 1;
                    return;
                };
                Some([own, shared])
            }
        };
        let Some(requester) = self.requesters.get(from.eid, now) else {
            tracing::debug!(
                line = &*self.name,
                eid = from.eid,
                "too many requesters have commands"
            );
            self.dropped_messages += 1;
            return;
        };
        let step = requester.responder.receive(from, &message.bytes);
        if let Some(reason) = step.dropped {
            tracing::debug!(line = &*self.name, ?reason, "dropped an NVMe-MI message");
            self.dropped_messages += 1;
        }
        if let Some(ticket) = step.abandoned {
            requester.ended(ticket);
        }
        let begun = step.execute.map(|(ticket, _)| (requester.number, ticket));
        let send = step.send;
        if let Some((_, ticket)) = begun {
            requester.began(ticket, now);
        }
        for (to, answer) in send {
            self.send(to, &answer);
        }
        if let (Some((requester, ticket)), Some(permits)) = (begun, permits) {
            let caller = self.caller(from.eid);
            self.spawn(requester, ticket, message.bytes, caller, permits);
        }
    }

    fn spawn(
        &self,
        requester: u64,
        ticket: MiTicket,
        message: Vec<u8>,
        caller: Caller,
        permits: [OwnedSemaphorePermit; 2],
    ) {
        let (node, done) = (self.node.clone(), self.done.clone());
        // A command goes on after its limit, and after its line's end.
        let execution = tokio::task::spawn_local(async move {
            let answer = node.execute(&message, &caller).await;
            drop(permits);
            answer
        });
        tokio::task::spawn_local(async move {
            let answer = tokio::time::timeout(COMMAND_LIMIT, execution).await;
            let answer = match answer {
                Ok(Ok(answer)) => answer,
                _ => CommandAnswer::status(MiStatus::INTERNAL_ERROR),
            };
            // Fails if the line is gone.
            let _ = done
                .send(Executed {
                    requester,
                    ticket,
                    answer,
                })
                .await;
        });
    }

    fn ended(&mut self, done: &Executed) {
        let Some(requester) = self.requesters.by_number(done.requester) else {
            return;
        };
        requester.ended(done.ticket);
        let response: MiResponse<'_> = done.answer.response();
        if let Some((to, message)) = requester.responder.complete(done.ticket, &response) {
            self.send(to, &message);
        }
        // The answer still has the earlier transmission unit.
        if let Some(bytes) = done.answer.unit_bytes {
            self.endpoint.set_unit_bytes(usize::from(bytes));
        }
    }

    fn send(&mut self, to: Address, message: &[u8]) {
        if self.outgoing.is_empty() {
            self.stalls_at = Some(Instant::now() + WRITE_LIMIT);
        }
        for packet in self.endpoint.answer(to, message) {
            encode(&packet, &mut self.outgoing);
        }
    }

    fn wrote(&mut self, bytes: usize) {
        self.outgoing.drain(..bytes.min(self.outgoing.len()));
        self.stalls_at = match self.outgoing.is_empty() {
            true => None,
            false => Some(Instant::now() + WRITE_LIMIT),
        };
    }

    fn time_passed(&mut self) -> io::Result<()> {
        let now = Instant::now();
        if self.stalls_at.is_some_and(|at| at <= now) {
            let why = format!("the peer has read nothing for {} s", WRITE_LIMIT.as_secs());
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        // In units of 100 ms.
        let units = (COMMAND_LIMIT.as_millis() / 100) as u16;
        for (to, message) in self.requesters.due(now, units) {
            self.send(to, &message);
        }
        Ok(())
    }
}
