//! NVMe over vfio-user: a PCI controller whose driver runs in a VM or in user space.
//!
//! The protocol is in `forebay-vfio-user`, the controller's rules in `forebay_nvme::pcie`. A
//! command's path is [`bells`], [`queues`] (fetch, start) and [`completion`]. Doorbells come as
//! messages (*trapped*), in client memory that the driver has named (*shadow*), or in a page of
//! ours that the client maps (*mapped*). Mapped ones are polled while the controller is enabled.
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
use crate::frontend::vm::file::VmFile;
use crate::frontend::vm::protocol::{Closing, Turn};
use commands::Commands;
use forebay_guest::Pieces;
use forebay_nvme::controller::ControllerConfig;
use forebay_nvme::pcie::{Function, VECTORS};
use forebay_nvme::{Nqn, Sqe};
use forebay_vfio_user::{MAX_ANSWER_BYTES, VfioSession};
use forebay_xlate::boundary::message::FrontendKind as Kind;
use queues::{BATCH, lane_of};
use quiesce::Quiesce;
pub(crate) use record::COMMANDS as COMMANDS_IN_HAND;
use record::{COMMANDS, CommandRecords};
use remote::Remote;
pub(crate) use remote::{ASK_LIMIT_NS as ASK_NS, PLACES as ASKING};
use rings::Rings;
use vectors::Vectors;
use zerocopy::FromZeros;

const MDTS_BYTES: u32 = 512 << 10;
/// How long a queue's memory may be missing before the controller fails. A VM that rearranges
/// memory sends its messages in quick succession.
const LOST_LIMIT_NS: u64 = 5_000_000_000;

/// Descriptor slots ([`Client::hold`]).
mod slot {
    pub(super) const fn vector(vector: u16) -> usize {
        vector as usize
    }
    /// VFIO_PCI_ERR_IRQ_INDEX.
    pub(super) const ERR: usize = 100;
    /// VFIO_PCI_REQ_IRQ_INDEX.
    pub(super) const REQ: usize = 101;
    pub(super) const DOORBELLS: usize = 102;
}

pub(crate) struct Pcie {
    function: Function,
    session: VfioSession,
    records: CommandRecords,
    mapped: bool,
    rings: Rings,
    commands: Commands,
    /// Commands with data that only the client can access.
    remote: Remote,
    /// The Admin queue may have events to send.
    events: bool,
    /// A submission queue being deleted; no more commands are taken.
    deleting: Option<u16>,
    quiesce: Option<Quiesce>,
    waiting: Vec<u8>,
    /// The last turn left commands in a queue.
    more: bool,
    /// Commands are taken.
    live: bool,
    vectors: Vectors,
    closed: bool,
    pieces: Pieces,
    batch: Box<[u8; BATCH * 64]>,
    /// The cost that commands may still have in this turn.
    budget: u32,
    first: usize,
    scratch: Vec<u8>,
    out: Box<[u8]>,
}

impl Pcie {
    pub(crate) fn new(turn: &mut Turn<'_>) -> Result<Self, Closing> {
        let client = &turn.client;
        let export = client.export();
        let failed = Closing("its saved state can't be used");
        let fd = client.file().fd().try_clone_to_owned();
        let file = fd.and_then(|fd| VmFile::adopt(fd, export.export, export.frontend.word()));
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

    fn save(&mut self) {
        self.records.save(self.function.state());
    }

    fn renew_liveness(&mut self) {
        self.vectors.masks_all = self.function.masks_all();
        self.live = self.function.ready()
            && self.function.is_bus_master()
            && self.quiesce.is_none()
            && !self.closed;
    }

    #[cold]
    fn fail(&mut self) {
        self.function.fail();
        self.save();
        self.renew_liveness();
    }

    /// A doorbell of a missing queue was written, or an invalid value.
    #[cold]
    pub(super) fn bad_doorbell(&mut self, register: bool, qid: u16) {
        let controller = self.function.controller_mut();
        controller.invalid_doorbell(register, qid);
        self.events = true;
        self.save();
    }

    fn space_written(&mut self, turn: &mut Turn<'_>, was_master: bool) {
        self.save();
        let is_master = self.function.is_bus_master();
        if was_master && !is_master {
            // Completions are held from here on.
            self.let_go_of_memory();
        } else if is_master && !was_master {
            self.find_shadow(turn);
        }
        self.renew_liveness();
        if is_master {
            self.vectors.raise_pending(&self.records, turn.client);
        }
    }

    /// Releases all client memory; it is looked up again when needed.
    fn let_go_of_memory(&mut self) {
        self.rings.let_go();
        self.pieces.let_go();
    }

    /// The client's memory changed: looks up the shadow doorbells.
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

fn config(client: &Client) -> Result<ControllerConfig, Closing> {
    let export = client.export();
    let nqn = Nqn::parse(&export.nqn).map_err(|_| Closing("its export's NQN is invalid"))?;
    let cntlid = memory::cntlid(export.export);
    Ok(ControllerConfig {
        mdts_bytes: MDTS_BYTES,
        ..ControllerConfig::pcie(cntlid, nqn, &export.serial)
    })
}

/// A blank for entries that are recorded in parts.
fn no_entry() -> Sqe {
    Sqe::new_zeroed()
}

const _: () = assert!(
    VECTORS as usize <= slot::ERR && slot::DOORBELLS < crate::frontend::vm::file::MAX_SLOTS
);
