//! vhost-user-blk: a VM's virtio disk.
//!
//! Takes chains from the client's rings, has the core carry them out directly in guest memory, and
//! returns them. If the core has no room for a request, it waits and no other is taken. A turn
//! publishes all completions with one store and at most one call per queue, then takes new chains.
//! When idle, it asks for kicks, by descriptor or by message. A request longer than the core's
//! longest transfer is split.
//!
//! **Not supported:** migration of guest memory (no dirty log), memory behind an IOMMU.

mod area;
mod calls;
mod control;
mod inflight;
mod queue;
mod request;
mod resume;
#[cfg(test)]
mod tests;

use crate::core::{DoneIo, IoOp};
use crate::frontend::vm::file::AREA_BYTES;
use crate::frontend::vm::protocol::{Answer, Closing, Message, Protocol, StreamFrame, Turn};
use crate::frontend::vm::talk::HUNG_UP;
use crate::lane::{AtOnce, Lane};
use area::InflightRegion;
use calls::Notices;
use control::PendingMessage;
use forebay_guest::Pieces;
use forebay_nvme::Status as NvmeStatus;
use forebay_virtio::blk::{Disk, SECTOR_BYTES};
use forebay_virtio::ring::{Chain, MAX_QUEUE_SIZE};
use forebay_virtio::vhost_user::MAX_QUEUES;
use forebay_virtio::vhost_user::message;
use forebay_virtio::vhost_user::session::{Offer, VhostSession};
use forebay_xlate::boundary::region::Blame;
use inflight::Inflight;
use queue::ServedRing;
use request::{BegunRequest, Over};
use std::sync::atomic::Ordering::Relaxed;

/// Requests that one queue may begin per turn.
const REQUESTS_AT_ONCE: u32 = 64;
/// Requests, and approximate bytes, that all queues of a client may begin per turn.
const CLIENT_AT_ONCE: u32 = 256;
const BYTES_AT_ONCE: u32 = 4 << 20;
const SHOWN_AT_ONCE: usize = 8;

/// Descriptor slots of rings, by number.
const KICK: usize = 0;
const CALL: usize = MAX_QUEUES;
const ERR: usize = 2 * MAX_QUEUES;
/// Slots of the inflight region and of the backend channel.
const INFLIGHT: usize = 3 * MAX_QUEUES;
const BACKEND: usize = INFLIGHT + 1;

const _: () = assert!(BACKEND < crate::frontend::vm::file::MAX_SLOTS && area::BYTES <= AREA_BYTES);

pub(crate) struct Vhost {
    session: VhostSession,
    disk: Disk,
    lines: Vec<Option<Box<ServedRing>>>,
    inflight: Option<Inflight>,
    /// The current chain; kept while a request waits.
    chain: Chain,
    pieces: Pieces,
    /// Requests that completed at once, to be returned.
    over: Vec<Over>,
    at_once: AtOnce,
    /// A request for which, or for the rest of which, the core had no room.
    waiting: Option<BegunRequest>,
    pending: PendingMessage,
    armed: bool,
    notices: Notices,
    /// Which queue is polled first.
    first: usize,
    /// A command that a dead engine crashed over; counted until it ends.
    blamed: Option<u16>,
    /// The client's last question was the number of queues.
    heard_queues: bool,
    closed: bool,
}

/// QEMU wants a queue for each virtual processor, unless configured otherwise.
const FEW_QUEUES: Closing = Closing(
    "it hung up when it learned how many queues its export has: give its disk no more (num-queues=), or the export \
    more (--queues)",
);

/// A request's number among all of its client's.
const fn slot_of(queue: u16, tag: u16) -> u16 {
    queue * MAX_QUEUE_SIZE + tag
}
const _: () = assert!(MAX_QUEUES * MAX_QUEUE_SIZE as usize == 1 << 16);

fn disk_of(turn: &Turn<'_>, queues: u16) -> Result<Disk, Closing> {
    let lane = turn.client.lane().and_then(|lane| turn.core.lane(lane));
    let volume = &lane.ok_or(Closing("its export is not served"))?.volume;
    Ok(Disk {
        sectors: volume.config.size_bytes / SECTOR_BYTES,
        block_bytes: volume.config.block_bytes,
        read_only: volume.config.read_only,
        queues,
        granule_bytes: volume.config.extent_bytes,
    })
}

impl Vhost {
    /// For a dead engine's client, [`Protocol::resume`] follows.
    pub(crate) fn new(turn: &mut Turn<'_>, queues: u16) -> Result<Self, Closing> {
        let queues = queues.clamp(1, MAX_QUEUES as u16);
        let disk = disk_of(turn, queues)?;
        Ok(Self {
            session: VhostSession::new(offer(&disk)),
            disk,
            lines: (0..queues).map(|_| None).collect(),
            inflight: None,
            chain: Chain::default(),
            pieces: Pieces::new(),
            over: Vec::with_capacity(CLIENT_AT_ONCE as usize + 1),
            at_once: AtOnce::default(),
            waiting: None,
            pending: PendingMessage::None,
            armed: false,
            notices: Notices::default(),
            first: 0,
            blamed: None,
            heard_queues: false,
            closed: false,
        })
    }

    fn publish(&mut self, turn: &mut Turn<'_>) -> bool {
        let mut any = false;
        for index in 0..self.lines.len() {
            let Some(line) = &mut self.lines[index] else {
                continue;
            };
            if line.ended {
                line.ended = false;
                any = true;
                line.queue.publish();
                if line.queue.wants_call() {
                    self.call(turn, index);
                }
            }
        }
        self.notices.send_calls(turn);
        any
    }

    /// Publishes small groups, so that the driver works in parallel.
    #[inline]
    fn show_some(&mut self, turn: &mut Turn<'_>, index: usize) {
        if self.over.len() >= SHOWN_AT_ONCE {
            self.finish_over(turn);
            if let Some(Some(line)) = self.lines.get_mut(index) {
                line.queue.publish();
            }
        }
    }

    fn may_take(&self, index: usize) -> bool {
        self.session.is_served(index as u16)
            && !matches!(self.pending, PendingMessage::Reset(_))
            && !matches!(self.pending, PendingMessage::Stop(stop, _) if usize::from(stop) == index)
    }

    /// Takes and begins a queue's chains, within the turn's budget (requests, bytes).
    fn fetch(&mut self, turn: &mut Turn<'_>, index: usize, budget: &mut (u32, u32)) -> bool {
        let may_take = self.may_take(index);
        let is_left = |line: &ServedRing| line.queue.left() > 0;
        let redoes = self.lines[index].as_deref().is_some_and(is_left) && self.may_redo(turn);
        // An empty queue must not request a quantum: many of them would keep the reactor awake.
        let is_empty = |line: &ServedRing| !redoes && line.queue.is_empty();
        if self.lines[index].as_deref().is_none_or(is_empty) {
            return false;
        }
        let lane = turn.client.lane();
        let may_fetch = |turn: &mut Turn<'_>| lane.is_none_or(|lane| turn.core.qos.may_fetch(lane));
        let mut any = false;
        for _ in 0..REQUESTS_AT_ONCE {
            if self.waiting.is_some() || budget.0 == 0 || budget.1 == 0 || !may_fetch(turn) {
                break;
            }
            let Some(Some(line)) = self.lines.get_mut(index) else {
                break;
            };
            let memory = turn.client.memory();
            let again = redoes && line.queue.left() > 0;
            let taken = if again {
                line.queue.next_left(memory, &mut self.chain)
            } else if may_take {
                line.queue.pop(memory, &mut self.chain)
            } else {
                Ok(None)
            };
            match taken {
                Ok(Some(tag)) => {
                    any = true;
                    budget.0 -= 1;
                    blame(turn, Some(slot_of(index as u16, tag)));
                    let bytes = self.begin(turn, index as u16, tag, again);
                    blame(turn, None);
                    budget.1 = budget.1.saturating_sub(bytes);
                    self.show_some(turn, index);
                }
                Ok(None) => break,
                Err(error) => {
                    turn.client.fail(Closing(error.text()));
                    break;
                }
            }
        }
        self.finish_over(turn);
        any
    }
}

fn offer(disk: &Disk) -> Offer {
    Offer {
        features: disk.features(),
        queues: disk.queues,
    }
}

impl Protocol for Vhost {
    fn frame(&self, peeked: &[u8]) -> Result<StreamFrame, Closing> {
        match message::frame(peeked) {
            Ok(message::Frame::Need(bytes)) => Ok(StreamFrame::Need(bytes)),
            Ok(message::Frame::Whole(bytes)) => Ok(StreamFrame::Whole(bytes)),
            Err(error) => Err(Closing(error.text())),
        }
    }

    fn takes_socket(&self, bytes: &[u8]) -> bool {
        bytes.starts_with(&message::request::SET_BACKEND_REQ_FD.to_le_bytes())
    }

    fn message(&mut self, turn: &mut Turn<'_>, message: &Message<'_>) -> Answer {
        self.handle(turn, message)
    }

    fn later(&mut self, turn: &mut Turn<'_>) -> Answer {
        self.go_on(turn)
    }

    fn poll(&mut self, turn: &mut Turn<'_>) -> bool {
        if self.armed {
            self.armed = false;
            for line in self.lines.iter_mut().flatten() {
                line.queue.disarm();
            }
        }
        let mut any = self.publish(turn);
        if let Some(begun) = self.waiting.take() {
            self.start(turn, begun, false);
            self.finish_over(turn);
            any |= self.waiting.is_none();
        }
        let count = self.lines.len();
        self.first = (self.first + 1) % count.max(1);
        let mut budget = (CLIENT_AT_ONCE, BYTES_AT_ONCE);
        for i in 0..count {
            let index = (self.first + i) % count;
            any |= self.fetch(turn, index, &mut budget);
        }
        any | self.publish(turn)
    }

    fn has_rung(&self) -> bool {
        let mut lines = self.lines.iter().enumerate();
        lines.any(|(index, line)| {
            (line.as_deref()).is_some_and(|line| !line.queue.is_empty() && self.may_take(index))
        })
    }

    fn is_active(&self) -> bool {
        self.lines.iter().any(Option::is_some)
    }

    fn hung_up(&self) -> Closing {
        match self.heard_queues {
            true => FEW_QUEUES,
            false => HUNG_UP,
        }
    }

    fn queues(&self) -> usize {
        self.lines.iter().flatten().count()
    }

    fn arm(&mut self, turn: &mut Turn<'_>) -> bool {
        self.armed = true;
        // Room for a waiting request wakes us.
        let mut may = true;
        let left = self.lines.iter().flatten();
        let is_left = left.into_iter().any(|line| line.queue.left() > 0);
        if is_left && self.waiting.is_none() && self.may_redo(turn) {
            may = false;
        }
        // A throttled lane needs no kicks: the window's end wakes us.
        let lane = turn.client.lane();
        let held_back = lane.is_some_and(|lane| turn.core.qos.is_held_back(lane));
        for index in 0..self.lines.len() {
            let takes = self.may_take(index);
            let polled = self.session.vrings()[index].polled;
            let Some(line) = &mut self.lines[index] else {
                continue;
            };
            may &= !line.ended;
            if !takes {
                continue;
            }
            match line.queue.arm() {
                Ok(more) => may &= (!more || held_back) && !polled,
                Err(error) => {
                    turn.client.fail(Closing(error.text()));
                    may = false;
                }
            }
        }
        may
    }

    fn ready(&mut self, _: &mut Turn<'_>, _: usize) {
        // A turn polls every ring anyway.
    }

    fn done(&mut self, turn: &mut Turn<'_>, done: DoneIo) {
        self.ended(turn, done);
    }

    fn resume(&mut self, turn: &mut Turn<'_>, blamed: Option<u16>) -> Result<(), Closing> {
        self.resume_client(turn, blamed)
    }

    fn changed(&mut self, turn: &mut Turn<'_>) {
        let Ok(disk) = disk_of(turn, self.disk.queues) else {
            return;
        };
        if disk != self.disk {
            self.disk = disk;
            self.notices.report_growth(turn);
        }
    }

    fn removed(&mut self, _: &mut Turn<'_>) -> bool {
        // The protocol has no message for it.
        false
    }

    fn close(&mut self, turn: &mut Turn<'_>) {
        self.closed = true;
        if let Some(lane) = turn.client.lane() {
            turn.core.recovered.orphan_vm(lane);
        }
        self.lines.fill_with(|| None);
        self.waiting = None;
    }

    fn tick(&mut self, turn: &mut Turn<'_>) {
        if self.notices.must_report_growth(turn.core.now_ns()) {
            self.notices.report_growth(turn);
        }
        self.notices.send_calls(turn);
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.notices.deadline_ns()
    }
}

/// Sets the blame for a crash from here on.
#[inline]
fn blame(turn: &Turn<'_>, slot: Option<u16>) {
    if let Some(lane) = turn.client.lane() {
        let word = match slot {
            Some(slot) => turn.client.command_ref(lane, slot).blame(),
            None => Blame::vm_itself(lane.0),
        };
        turn.core.record().blame.store(word, Relaxed);
    }
}

fn is_good(status: NvmeStatus) -> bool {
    status == NvmeStatus::SUCCESS
}

/// A client's area; made on each call, as it borrows the file.
fn area<'a>(turn: &'a Turn<'_>) -> InflightRegion<'a> {
    InflightRegion::of(turn.client.file())
}

#[inline]
fn count(lane: &Lane, op: &IoOp, good: bool, ns: u64) {
    let bytes = match *op {
        IoOp::Read { len_bytes, .. } | IoOp::Write { len_bytes, .. } if good => {
            u64::from(len_bytes)
        }
        IoOp::WriteZeroes { len_bytes, .. } if good => len_bytes,
        _ => 0,
    };
    lane.record().ops[op.kind() as usize].record(bytes, ns, !good);
}
