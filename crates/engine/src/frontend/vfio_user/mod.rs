//! NVMe over vfio-user: a PCI controller whose driver runs in a virtual machine, or in user space.
//!
//! **Design.** The protocol is `forebay-vfio-user`'s, the controller's rules are `forebay_nvme::pcie`'s; this ties
//! both to a client ([`crate::frontend::vm`]) and to the core. Messages are in [`messages`]; the path of a command is
//! [`bells`], [`queues`] (fetch, start) and [`completion`], [`admin`] for the Admin queue; [`quiesce`] ends all
//! commands for a reset; [`record`] is what a successor finds, and [`resume`] the successor.
//!
//! Doorbells come in one of three ways: as messages (*trapped*), by memory of the client's that its driver has
//! named (shadow doorbells), or by a page of ours that the client has mapped (*mapped*; then somebody looks at
//! it as long as the controller is enabled).
//!
//! **Not here:** sockets, descriptors, interrupts ([`crate::frontend::vm`]).

mod admin;
mod bells;
mod completion;
mod memory;
mod messages;
mod queues;
mod quiesce;
mod record;
mod remote;
mod resume;

#[cfg(test)]
mod tests;

use crate::core::{DoneIo, IoOp};
use crate::frontend::vm::client::Client;
use crate::frontend::vm::file::MachineFile;
use crate::frontend::vm::protocol::{Answer, Closing, Frame, Message, Protocol, Turn};
use crate::lane::AtOnce;
use forebay_guest::{Area, Mapping, Pieces};
use forebay_nvme::controller::ControllerConfig;
use forebay_nvme::pcie::interrupt::{Coalescing, Gathered};
use forebay_nvme::pcie::queue::{Cq, Sq};
use forebay_nvme::pcie::{DOORBELLS_AT, DOORBELLS_BYTES, Function, QUEUES, VECTORS};
use forebay_nvme::{Nqn, Sqe, Status};
use forebay_vfio_user::{self as vfio_user, MAX_ANSWER_BYTES, Session};
use forebay_xlate::boundary::message::Frontend as Kind;
use queues::{BATCH, lane_of};
use quiesce::Quiesce;
pub(crate) use record::COMMANDS as COMMANDS_IN_HAND;
use record::{COMMANDS, Records};
use remote::Remote;
pub(crate) use remote::{ASK_LIMIT_NS as ASK_NS, PLACES as ASKING};
use std::collections::VecDeque;
use std::sync::Arc;
use zerocopy::FromZeros;

/// The longest transfer.
const MDTS_BYTES: u32 = 512 << 10;
/// How long a queue's memory may be gone before the controller fails: while its machine rearranges its
/// memory, messages follow each other at once.
const LOST_LIMIT_NS: u64 = 5_000_000_000;

/// Slots for descriptors ([`Client::hold`]).
mod slot {
    /// Of a vector.
    pub(super) const fn vector(vector: u16) -> usize {
        vector as usize
    }
    /// VFIO_PCI_ERR_IRQ_INDEX.
    pub(super) const ERR: usize = 100;
    /// VFIO_PCI_REQ_IRQ_INDEX.
    pub(super) const REQ: usize = 101;
    /// The page of mapped doorbells.
    pub(super) const DOORBELLS: usize = 102;
}

/// Where doorbells are looked at.
enum Bells {
    /// Where messages put them.
    Registers,
    /// In a page of ours.
    Page(Area),
}

/// Shadow doorbells and event indexes; `None` in it: their memory isn't there now.
struct Shadow {
    bells: Option<Area>,
    event_index: Option<Area>,
}

struct SqLive {
    cursor: Sq,
    /// The event index of its tail, while nobody need ring.
    quiet: u32,
    ring: Option<Area>,
    /// Commands that were taken and have not ended.
    in_flight: u32,
}

struct CqLive {
    cursor: Cq,
    ring: Option<Area>,
    gathered: Gathered,
    coalescing: Coalescing,
}

/// What is to be done with a command.
#[derive(Clone, Copy)]
enum Work {
    /// This.
    Io(IoOp),
    /// Make everything durable, then this.
    Durable(IoOp),
}

/// A command in hand.
#[derive(Clone, Copy)]
struct Command {
    sqid: u16,
    cid: u16,
    work: Work,
    taken_ns: u64,
}

/// See the module's text.
pub(crate) struct Pcie {
    function: Function,
    session: Session,
    records: Records,
    mapped: bool,
    bells: Bells,
    shadow: Option<Shadow>,
    sqs: Box<[Option<SqLive>]>,
    cqs: Box<[Option<CqLive>]>,
    /// The I/O submission queues there are.
    active: Vec<u16>,
    commands: Box<[Command]>,
    free: Vec<u16>,
    /// Commands that a dead engine had in hand, to be begun again.
    again: VecDeque<u16>,
    /// Commands whose data only the client reaches.
    remote: Remote,
    /// Commands that ended while their completion queue's memory was away.
    held: Vec<(u16, Status)>,
    /// Since when memory of a queue is missed.
    lost_ns: Option<u64>,
    /// The Admin queue may have something to say.
    events: bool,
    /// A submission queue that is to be deleted, from which nothing more is taken.
    deleting: Option<u16>,
    quiesce: Option<Quiesce>,
    /// The message that waits for that.
    waiting: Vec<u8>,
    /// The last turn has left something in a queue that could be taken.
    more: bool,
    /// The host was asked to ring.
    armed: bool,
    /// Commands are taken.
    live: bool,
    /// No vector may be raised: the function mask.
    masks_all: bool,
    closed: bool,
    pieces: Pieces,
    batch: Box<[u8; BATCH * 64]>,
    /// Commands of the batch that is being taken that are over already: refused, or carried out at once.
    over: Vec<(u16, Status)>,
    /// Those of them that were carried out.
    at_once: AtOnce,
    /// What commands may still cost in this turn.
    budget: u32,
    /// The queue that is looked at first.
    first: usize,
    scratch: Vec<u8>,
    out: Box<[u8]>,
}

impl Pcie {
    /// The controller of a client that has just come, or is to be resumed.
    ///
    /// # Errors
    /// Why there can be none.
    pub(crate) fn new(turn: &mut Turn<'_>) -> Result<Self, Closing> {
        let client = &turn.client;
        let export = client.export();
        let failed = Closing("its machine file can't be used");
        let fd = client.file().fd().try_clone_to_owned();
        let file = fd.and_then(|fd| MachineFile::adopt(fd, export.export, export.frontend.word()));
        let records = file.and_then(Records::new).map_err(|_| failed)?;
        let mapped = matches!(
            export.frontend,
            Kind::NvmePcie {
                mapped_doorbells: true,
                ..
            }
        );
        let config = Self::config(client)?;
        let nothing = Command {
            sqid: 0,
            cid: 0,
            work: Work::Io(IoOp::Flush),
            taken_ns: 0,
        };
        let frontend = Self {
            function: Function::new(config),
            session: Session::new(messages::device(mapped)),
            records,
            mapped,
            bells: Bells::Registers,
            shadow: None,
            sqs: (0..QUEUES).map(|_| None).collect(),
            cqs: (0..QUEUES).map(|_| None).collect(),
            active: Vec::with_capacity(QUEUES),
            commands: vec![nothing; COMMANDS].into(),
            free: (0..COMMANDS as u16).rev().collect(),
            again: VecDeque::with_capacity(COMMANDS),
            remote: Remote::default(),
            held: Vec::with_capacity(COMMANDS),
            lost_ns: None,
            events: false,
            deleting: None,
            quiesce: None,
            waiting: Vec::new(),
            more: false,
            armed: false,
            live: false,
            masks_all: false,
            closed: false,
            pieces: Pieces::new(),
            batch: Box::new([0; BATCH * 64]),
            over: Vec::with_capacity(BATCH),
            at_once: AtOnce::default(),
            budget: 0,
            first: 0,
            scratch: vec![0; MDTS_BYTES as usize],
            out: vec![0; MAX_ANSWER_BYTES].into(),
        };
        if let Some(lane) = client.lane().and_then(|lane| turn.core.lane(lane))
            && !frontend.records.is_known()
        {
            frontend.records.set_blocks(lane.volume.blocks());
            frontend.records.begin();
        }
        Ok(frontend)
    }

    fn config(client: &Client) -> Result<ControllerConfig, Closing> {
        let export = client.export();
        let nqn = Nqn::parse(&export.nqn).map_err(|_| Closing("its export has no sound NQN"))?;
        let cntlid = memory::cntlid(export.export);
        Ok(ControllerConfig {
            mdts_bytes: MDTS_BYTES,
            ..ControllerConfig::pcie(cntlid, nqn, &export.serial)
        })
    }

    /// Saves the function's state.
    fn save(&mut self) {
        self.records.save(self.function.state());
    }

    /// Whether commands are taken, now that something may have changed that.
    fn look_alive(&mut self) {
        self.masks_all = self.function.masks_all();
        self.live = self.function.ready()
            && self.function.is_bus_master()
            && self.quiesce.is_none()
            && !self.closed;
    }

    /// The controller fails: its host must reset it.
    #[cold]
    fn fail(&mut self) {
        self.function.fail();
        self.save();
        self.look_alive();
    }

    /// Raises a vector, unless the client has masked it.
    #[inline]
    fn raise(&self, client: &mut Client, vector: u16) {
        if self.masks_all || self.records.is_masked(vector) {
            self.records.set_pending(vector, true);
        } else {
            client.raise(slot::vector(vector));
        }
    }

    /// Vectors may be masked no more: what they held back is raised, if the function may write at all.
    fn raise_pending(&mut self, client: &mut Client) {
        if !self.function.is_bus_master() {
            return;
        }
        let pending = self.records.pending();
        for vector in 0..VECTORS {
            if pending[usize::from(vector / 64)] & 1 << (vector % 64) != 0 {
                self.records.set_pending(vector, false);
                self.raise(client, vector);
            }
        }
    }

    /// Configuration space has been written: whether memory may be reached, and whether interrupts may be raised.
    fn space_written(&mut self, turn: &mut Turn<'_>, was_master: bool) {
        self.save();
        let is_master = self.function.is_bus_master();
        if was_master && !is_master {
            // What ends now is held until it may be told of.
            self.let_go_of_memory();
        } else if is_master && !was_master {
            self.find_shadow(turn);
        }
        self.look_alive();
        self.raise_pending(turn.client);
    }

    /// Lets go of all memory of the client's; it is looked for again when needed.
    fn let_go_of_memory(&mut self) {
        for sq in self.sqs.iter_mut().flatten() {
            sq.ring = None;
        }
        for cq in self.cqs.iter_mut().flatten() {
            cq.ring = None;
        }
        if let Some(shadow) = &mut self.shadow {
            *shadow = Shadow {
                bells: None,
                event_index: None,
            };
        }
        self.pieces.let_go();
    }

    /// The client's memory is another: shadow doorbells are where they are now, or missed.
    fn find_shadow(&mut self, turn: &Turn<'_>) {
        if self.shadow.is_some() {
            self.make_shadow(turn.client.memory());
            if self.shadow.as_ref().is_some_and(|s| s.bells.is_none()) {
                self.miss_memory(turn.core.now_ns());
            }
        }
    }

    /// Memory of a queue isn't there.
    #[cold]
    fn miss_memory(&mut self, now_ns: u64) {
        self.lost_ns.get_or_insert(now_ns);
    }

    /// Maps the page of doorbells, which the client maps too.
    fn map_doorbells(&mut self, client: &Client) -> Result<(), Closing> {
        let failed = Closing("its doorbells can't be mapped");
        let fd = client.held(slot::DOORBELLS).ok_or(failed)?;
        let page = Mapping::new(fd, DOORBELLS_AT, DOORBELLS_BYTES, true);
        let page = Area::of(&Arc::new(page.map_err(|_| failed)?)).ok_or(failed)?;
        self.bells = Bells::Page(page);
        Ok(())
    }

    /// Interrupts that were held back long enough.
    fn gathered(&mut self, client: &mut Client, now_ns: u64) {
        for qid in 1..QUEUES {
            let Some(cq) = self.cqs[qid].as_mut() else {
                continue;
            };
            if let Some(vector) = cq.cursor.vector
                && cq.gathered.tick(&cq.coalescing, now_ns)
            {
                self.raise(client, vector);
            }
        }
    }
}

impl Protocol for Pcie {
    fn frame(&self, peeked: &[u8]) -> Result<Frame, Closing> {
        match vfio_user::frame(peeked) {
            Ok(vfio_user::Frame::NeedMore(bytes)) => Ok(Frame::Need(bytes)),
            Ok(vfio_user::Frame::Whole(bytes)) => Ok(Frame::Whole(bytes)),
            Err(broken) => Err(messages::closing(broken)),
        }
    }

    fn message(&mut self, turn: &mut Turn<'_>, message: &Message<'_>) -> Answer {
        self.carry_out(turn, message)
    }

    fn later(&mut self, turn: &mut Turn<'_>) -> Answer {
        self.answer_reset(turn)
    }

    #[inline]
    fn poll(&mut self, turn: &mut Turn<'_>) -> bool {
        self.poll_queues(turn)
    }

    #[inline]
    fn has_rung(&self) -> bool {
        self.live && self.tail_has_moved()
    }

    fn queues(&self) -> usize {
        self.sqs.iter().skip(1).flatten().count()
    }

    #[inline]
    fn is_active(&self) -> bool {
        self.live || self.quiesce.is_some() || !self.held.is_empty()
    }

    fn arm(&mut self, turn: &mut Turn<'_>) -> bool {
        self.ask_to_ring(turn)
    }

    fn ready(&mut self, _turn: &mut Turn<'_>, _slot: usize) {}

    #[inline]
    fn done(&mut self, turn: &mut Turn<'_>, done: DoneIo) {
        self.ended(turn, &done);
    }

    fn resume(&mut self, turn: &mut Turn<'_>, blamed: Option<u16>) -> Result<(), Closing> {
        self.take_over(turn, blamed)
    }

    fn changed(&mut self, turn: &mut Turn<'_>) {
        let lane = turn.client.lane().and_then(|lane| turn.core.lane(lane));
        let Some(lane) = lane else { return };
        let blocks = lane.volume.blocks();
        let controller = self.function.controller_mut();
        controller.warnings_are(lane.figures.warnings);
        if blocks != self.records.blocks() {
            controller.namespace_changed(memory::NSID);
        }
        self.save();
        // Only now: until then a successor finds that it has changed.
        self.records.set_blocks(blocks);
        self.events = true;
    }

    fn removed(&mut self, turn: &mut Turn<'_>) -> bool {
        // A monitor that listens unplugs the device. QEMU 11 does not, so the host itself is told: its namespace is gone.
        let tells = turn.client.held(slot::REQ).is_some();
        turn.client.raise(slot::REQ);
        if self.live {
            let controller = self.function.controller_mut();
            controller.namespace_changed(memory::NSID);
            self.events = true;
            self.save();
        }
        tells || self.live
    }

    fn close(&mut self, _turn: &mut Turn<'_>) {
        self.closed = true;
        self.look_alive();
        self.held.clear();
        self.again.clear();
        self.remote.clear();
        self.let_go_of_memory();
        self.bells = Bells::Registers;
    }

    fn tick(&mut self, turn: &mut Turn<'_>) {
        let now_ns = turn.core.now_ns();
        if self.function.is_bus_master() {
            self.gathered(turn.client, now_ns);
        }
        self.look_at_asked(turn);
        let lost = self
            .lost_ns
            .map(|since| since.saturating_add(LOST_LIMIT_NS));
        if lost.is_some_and(|limit| now_ns >= limit) {
            self.lost_ns = None;
            self.give_up_held(turn);
            self.fail();
        }
    }

    fn deadline_ns(&self) -> Option<u64> {
        let cqs = self.cqs.iter().flatten();
        let gathered = cqs.filter_map(|cq| cq.gathered.deadline_ns(&cq.coalescing));
        let lost = self
            .lost_ns
            .map(|since| since.saturating_add(LOST_LIMIT_NS));
        gathered.chain(lost).chain(self.remote.deadline_ns()).min()
    }
}

/// An entry that was recorded in parts.
fn no_entry() -> Sqe {
    Sqe::new_zeroed()
}

const _: () = assert!(
    VECTORS as usize <= slot::ERR && slot::DOORBELLS < crate::frontend::vm::file::MAX_SLOTS
);
