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
mod commands;
mod completion;
mod memory;
mod messages;
mod protocol;
mod queues;
mod quiesce;
mod record;
mod remote;
mod resume;
mod rings;
mod vectors;

#[cfg(test)]
mod tests;

use crate::frontend::vm::client::Client;
use crate::frontend::vm::file::MachineFile;
use crate::frontend::vm::protocol::{Closing, Turn};
use commands::Commands;
use forebay_guest::Pieces;
use forebay_nvme::controller::ControllerConfig;
use forebay_nvme::pcie::{Function, VECTORS};
use forebay_nvme::{Nqn, Sqe};
use forebay_vfio_user::{MAX_ANSWER_BYTES, VfioSession};
use forebay_xlate::boundary::message::Frontend as Kind;
use queues::{BATCH, lane_of};
use quiesce::Quiesce;
pub(crate) use record::COMMANDS as COMMANDS_IN_HAND;
use record::{COMMANDS, CommandRecords};
use remote::Remote;
pub(crate) use remote::{ASK_LIMIT_NS as ASK_NS, PLACES as ASKING};
use rings::Rings;
use vectors::Vectors;
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

/// See the module's text.
pub(crate) struct Pcie {
    function: Function,
    session: VfioSession,
    records: CommandRecords,
    mapped: bool,
    rings: Rings,
    commands: Commands,
    /// Commands whose data only the client reaches.
    remote: Remote,
    /// The Admin queue may have something to say.
    events: bool,
    /// A submission queue that is to be deleted, from which nothing more is taken.
    deleting: Option<u16>,
    quiesce: Option<Quiesce>,
    /// The message that waits for that.
    waiting: Vec<u8>,
    /// The last turn has left something in a queue that could be taken.
    more: bool,
    /// Commands are taken.
    live: bool,
    vectors: Vectors,
    closed: bool,
    pieces: Pieces,
    batch: Box<[u8; BATCH * 64]>,
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
        let records = file.and_then(CommandRecords::new).map_err(|_| failed)?;
        let mapped = matches!(
            export.frontend,
            Kind::NvmePcie {
                mapped_doorbells: true,
                ..
            }
        );
        let config = config(client)?;
        let frontend = Self {
            function: Function::new(config),
            session: VfioSession::new(messages::device(mapped)),
            records,
            mapped,
            rings: Rings::new(),
            commands: Commands::new(),
            remote: Remote::default(),
            events: false,
            deleting: None,
            quiesce: None,
            waiting: Vec::new(),
            more: false,
            live: false,
            vectors: Vectors::default(),
            closed: false,
            pieces: Pieces::new(),
            batch: Box::new([0; BATCH * 64]),
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

    /// Saves the function's state.
    fn save(&mut self) {
        self.records.save(self.function.state());
    }

    /// Whether commands are taken, now that something may have changed that.
    fn look_alive(&mut self) {
        self.vectors.masks_all = self.function.masks_all();
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

    /// A doorbell was written that belongs to no queue, or with a value that it can't have.
    #[cold]
    pub(super) fn bad_doorbell(&mut self, register: bool, qid: u16) {
        let controller = self.function.controller_mut();
        controller.invalid_doorbell(register, qid);
        self.events = true;
        self.save();
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
        // What was held back is raised, if the function may write at all.
        if is_master {
            self.vectors.raise_pending(&self.records, turn.client);
        }
    }

    /// Lets go of all memory of the client's; it is looked for again when needed.
    fn let_go_of_memory(&mut self) {
        self.rings.let_go();
        self.pieces.let_go();
    }

    /// The client's memory is another: shadow doorbells are where they are now, or missed.
    fn find_shadow(&mut self, turn: &Turn<'_>) {
        if self.rings.shadow.is_some() {
            self.rings
                .place_shadow(self.function.shadow(), turn.client.memory());
            if self.rings.misses_shadow() {
                self.rings.miss_memory(turn.core.now_ns());
            }
        }
    }
}

/// What the controller of a client's export is made with.
fn config(client: &Client) -> Result<ControllerConfig, Closing> {
    let export = client.export();
    let nqn = Nqn::parse(&export.nqn).map_err(|_| Closing("its export has no sound NQN"))?;
    let cntlid = memory::cntlid(export.export);
    Ok(ControllerConfig {
        mdts_bytes: MDTS_BYTES,
        ..ControllerConfig::pcie(cntlid, nqn, &export.serial)
    })
}

/// An entry that was recorded in parts.
fn no_entry() -> Sqe {
    Sqe::new_zeroed()
}

const _: () = assert!(
    VECTORS as usize <= slot::ERR && slot::DOORBELLS < crate::frontend::vm::file::MAX_SLOTS
);
