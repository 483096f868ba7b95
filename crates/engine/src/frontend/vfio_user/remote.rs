//! Commands whose data lies in memory that was mapped without a descriptor: only the client can
//! access it.
//!
//! Such a command gets memory of ours ([`Remote::memory`]). Write data is fetched first
//! (VFIO_USER_DMA_READ), read data sent afterwards (VFIO_USER_DMA_WRITE). One message is open at a
//! time; a client that does not answer within [`ASK_LIMIT_NS`] is closed. This path is slow, and
//! may allocate. Queues, address lists and Admin data must be in accessible memory.
//!
//! A successor repeats these commands once the client has answered the dead engine's last message,
//! which the VM file records (`vm::talk`). A reset waits for the answer to a DMA_WRITE, since
//! the client may still write.
//!
//! QEMU (10.1 to 11.1) deviates from the specification: `count` has 4 bytes, and data follows at
//! once. It also answers a DMA_WRITE without a payload. So the first message is an empty write,
//! which tells both apart before any data.

use super::commands::CommandWork;
use super::memory::ClientMemory;
use super::queues::{BeginResult, LIST_COST};
use super::record::CommandRecords;
use super::{COMMANDS, MDTS_BYTES, Pcie};
use crate::core::IoOp;
use crate::frontend::vm::protocol::{Answer, Closing, Turn};
use forebay_guest::{GuestMemory, NewRegion};
use forebay_nvme::Status;
use forebay_nvme::pcie::data;
use forebay_vfio_user::wire::{HEADER_BYTES, command};
use forebay_vfio_user::{Header, MAX_DATA_BYTES};
use rustix::fs::MemfdFlags;
use std::os::fd::AsFd;

/// Commands at once; others wait in their queues.
pub(crate) const PLACES: usize = 2;
/// Time limit for a client's answer.
pub(crate) const ASK_LIMIT_NS: u64 = 20_000_000_000;
const LATE: Closing = Closing("it did not answer a request for memory that only it can access");

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RemoteStep {
    /// Its data is being fetched.
    In,
    Ready,
    Begun,
    /// Its data is being sent.
    Out,
}

struct RemoteJob {
    slot: u16,
    work: CommandWork,
    to_host: bool,
    pieces: Vec<(u64, u32)>,
    bytes: u32,
    moved: u32,
    step: RemoteStep,
}

impl RemoteJob {
    /// The next byte's address, and how many follow there.
    fn next(&self) -> Option<(u64, u32)> {
        let mut skip = self.moved;
        for (address, len) in &self.pieces {
            match len.checked_sub(skip) {
                Some(left @ 1..) => return Some((address + u64::from(skip), left)),
                _ => skip -= len,
            }
        }
        None
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ask {
    Nothing,
    /// Address and bytes.
    Read(u64, u32),
    /// Bytes.
    Write(u32),
    /// For a command that a reset or an engine's death has ended.
    Forgotten,
}

struct RemoteRequest {
    number: u64,
    place: usize,
    ask: Ask,
    /// Until the answer, the client may write its memory.
    may_write: bool,
    until_ns: u64,
}

#[derive(Default)]
pub(super) struct Remote {
    memory: Option<GuestMemory>,
    jobs: [Option<RemoteJob>; PLACES],
    asked: Option<RemoteRequest>,
    /// QEMU's structure: data follows a count of 4 bytes. `None`: not known yet.
    is_short: Option<bool>,
    pub(super) busy: bool,
}

impl Remote {
    pub(super) fn deadline_ns(&self) -> Option<u64> {
        self.asked.as_ref().map(|asked| asked.until_ns)
    }

    /// Whether the client may still write its memory for us.
    pub(super) fn may_write(&self) -> bool {
        self.asked.as_ref().is_some_and(|asked| asked.may_write)
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    fn remove(&mut self, place: usize) -> Option<RemoteJob> {
        let job = self.jobs.get_mut(place)?.take();
        self.busy = self.jobs.iter().any(Option::is_some);
        job
    }

    pub(super) fn has_moved(&mut self, turn: &mut Turn<'_>, place: usize, bytes: u32) {
        if let Some(job) = &mut self.jobs[place] {
            job.moved += bytes;
        }
        if let Some(lane) = turn.client.lane() {
            turn.core.lanes.count_copied(lane, bytes);
        }
    }

    /// A dead engine's message must be answered before another is sent.
    pub(super) fn inherit_asked(&mut self, records: &CommandRecords, now_ns: u64) {
        self.asked = records.unanswered().map(|number| RemoteRequest {
            number,
            place: 0,
            ask: Ask::Forgotten,
            may_write: true,
            until_ns: now_ns.saturating_add(ASK_LIMIT_NS),
        });
    }

    /// The flush before a command is done. True: it is one of these, and continues.
    pub(super) fn goes_on(&mut self, slot: u16, op: IoOp) -> bool {
        let mut jobs = self.jobs.iter_mut().flatten();
        let Some(job) = jobs.find(|job| job.slot == slot && job.step == RemoteStep::Begun) else {
            return false;
        };
        job.work = CommandWork::Io(op);
        job.step = RemoteStep::Ready;
        true
    }

    /// True: the command is one of these, and its data must be sent first.
    #[cold]
    pub(super) fn goes_out(&mut self, slot: u16, status: Status, nobody: bool) -> bool {
        let is_it = |job: &Option<RemoteJob>| {
            let job = job.as_ref();
            job.is_some_and(|job| job.slot == slot && job.step == RemoteStep::Begun)
        };
        let Some(place) = self.jobs.iter().position(is_it) else {
            return false;
        };
        if let Some(job) = &mut self.jobs[place]
            && job.to_host
            && status.is_success()
            && !nobody
        {
            job.step = RemoteStep::Out;
            return true;
        }
        self.remove(place);
        false
    }

    /// Closes a client that does not answer.
    pub(super) fn poll_asked(&mut self, turn: &mut Turn<'_>) {
        let now_ns = turn.core.now_ns();
        let Some(asked) = &mut self.asked else {
            return;
        };
        if !turn.client.is_heard {
            // Its answer may be unread while another message is handled, which has a time limit of
            // its own.
            asked.until_ns = now_ns.saturating_add(ASK_LIMIT_NS);
        } else if now_ns >= asked.until_ns {
            turn.client.fail(LATE);
        }
    }

    fn ask(
        &mut self,
        turn: &mut Turn<'_>,
        records: &CommandRecords,
        most_bytes: u32,
        place: usize,
        (address, len): (u64, u32),
    ) -> Result<(), Status> {
        let Some(job) = &self.jobs[place] else {
            return Ok(());
        };
        let len = len.min(most_bytes);
        if len == 0 {
            return Err(FAILED.with_dnr());
        }
        let (code, ask) = match (self.is_short, job.step) {
            (None, _) => (command::DMA_WRITE, Ask::Nothing),
            (_, RemoteStep::Out) => (command::DMA_WRITE, Ask::Write(len)),
            _ => (command::DMA_READ, Ask::Read(address, len)),
        };
        let count = if ask == Ask::Nothing { 0 } else { len };
        let data_bytes = if let Ask::Write(len) = ask { len } else { 0 };
        let number = records.next_ask();
        let size = HEADER_BYTES as u32 + 16 + data_bytes;
        let message = &mut turn.client.request.bytes;
        message.clear();
        message.extend(Header::command(number as u16, code, size, false).to_bytes());
        message.extend(address.to_le_bytes());
        message.extend(u64::from(count).to_le_bytes());
        if data_bytes > 0 {
            let at = base_of(place) + u64::from(job.moved);
            let from = match self.is_short {
                Some(true) => HEADER_BYTES + 12,
                _ => HEADER_BYTES + 16,
            };
            message.resize(size as usize, 0);
            let into = &mut message[from..from + data_bytes as usize];
            let ours = self.memory.as_ref();
            if !ours.is_some_and(|ours| ours.read(at, into)) {
                message.clear();
                return Err(Status::INTERNAL_ERROR);
            }
        }
        turn.client.request.number = number;
        self.asked = Some(RemoteRequest {
            number,
            place,
            ask,
            may_write: data_bytes > 0,
            until_ns: turn.core.now_ns().saturating_add(ASK_LIMIT_NS),
        });
        Ok(())
    }

    /// Copies the accessible bytes of a command, and asks the client for the rest.
    fn move_bytes(
        &mut self,
        turn: &mut Turn<'_>,
        records: &CommandRecords,
        most_bytes: u32,
        scratch: &mut [u8],
        place: usize,
    ) -> Result<Moved, Status> {
        loop {
            let Some(job) = &self.jobs[place] else {
                return Ok(Moved::Some);
            };
            let (step, moved) = (job.step, job.moved);
            let Some((address, left)) = job.next() else {
                if let Some(job) = &mut self.jobs[place]
                    && step == RemoteStep::In
                {
                    job.step = RemoteStep::Ready;
                }
                return Ok(Moved::All(step));
            };
            let to_host = step == RemoteStep::Out;
            let reached = run(turn.client.memory(), address, left, to_host);
            let (reached, len) = reached.ok_or(FAILED.with_dnr())?;
            let len = len.min(MAX_DATA_BYTES);
            if !reached {
                self.ask(turn, records, most_bytes, place, (address, len))?;
                return Ok(Moved::Some);
            }
            let at = base_of(place) + u64::from(moved);
            let bytes = &mut scratch[..len as usize];
            let Some(ours) = &self.memory else {
                return Ok(Moved::Some);
            };
            let theirs = turn.client.memory();
            let good = match step {
                RemoteStep::Out => ours.read(at, bytes) && theirs.write(address, bytes),
                _ => theirs.read(address, bytes) && ours.write(at, bytes),
            };
            if !good {
                return Err(FAILED.with_dnr());
            }
            self.has_moved(turn, place, len);
        }
    }

    /// A reset: returns the slots of commands that are not in the core.
    pub(super) fn drop_all(&mut self) -> impl Iterator<Item = u16> + use<> {
        if let Some(asked) = &mut self.asked {
            asked.ask = Ask::Forgotten;
        }
        let mut dropped = [None; PLACES];
        for (place, dropped) in dropped.iter_mut().enumerate() {
            let job = self.jobs[place].as_ref();
            if job.is_some_and(|job| job.step != RemoteStep::Begun) {
                *dropped = self.remove(place).map(|job| job.slot);
            }
        }
        dropped.into_iter().flatten()
    }

    fn make_memory(&mut self) -> Option<&GuestMemory> {
        if self.memory.is_none() {
            let bytes = PLACES as u64 * u64::from(MDTS_BYTES);
            let fd = rustix::fs::memfd_create("forebay-remote", MemfdFlags::CLOEXEC).ok()?;
            rustix::fs::ftruncate(&fd, bytes).ok()?;
            let mut memory = GuestMemory::default();
            let all = NewRegion {
                guest_address: 0,
                user_address: 0,
                len_bytes: bytes,
                writable: true,
                file: Some((fd.as_fd(), 0)),
            };
            memory.map(&all).ok()?;
            self.memory = Some(memory);
        }
        self.memory.as_ref()
    }
}

enum Moved {
    Some,
    All(RemoteStep),
}

const fn base_of(place: usize) -> u64 {
    place as u64 * MDTS_BYTES as u64
}

/// Whether we can access an address, and the length for which that holds; `None`: invalid or
/// forbidden.
fn run(memory: &GuestMemory, address: u64, len: u32, to_host: bool) -> Option<(bool, u32)> {
    let mut regions = memory.regions().iter();
    let region = regions.find(|r| address.wrapping_sub(r.guest_address()) < r.len_bytes())?;
    if to_host && !region.is_writable() {
        return None;
    }
    let left = region.len_bytes() - (address - region.guest_address());
    let run = u64::from(len).min(left) as u32;
    Some((region.mapping().is_some(), run))
}

const FAILED: Status = Status::DATA_TRANSFER_ERROR;

impl Pcie {
    /// Begins a command here, or ends it if its client cannot help.
    #[cold]
    pub(super) fn begin_remote(
        &mut self,
        turn: &mut Turn<'_>,
        slot: u16,
        work: CommandWork,
        bytes: u32,
        to_host: bool,
    ) -> BeginResult {
        self.pieces.clear();
        // Commands that found no place earlier come first.
        let waits = self
            .commands
            .again
            .front()
            .is_some_and(|first| *first != slot);
        let place = self.remote.jobs.iter().position(Option::is_none);
        let Some(place) = place.filter(|_| !waits) else {
            return BeginResult::NoRoom;
        };
        self.budget = self.budget.saturating_sub(LIST_COST);
        let memory = turn.client.memory();
        let mut pieces = Vec::new();
        let mut is_remote = false;
        let sqe = self.records.sqe(slot);
        let found = data::pieces(
            &sqe,
            bytes,
            &ClientMemory(memory),
            |mut address, mut len| {
                while len > 0 {
                    let (reached, bytes) = run(memory, address, len, to_host).ok_or(FAILED)?;
                    is_remote |= !reached;
                    pieces.push((address, bytes));
                    address = address.checked_add(bytes.into()).ok_or(FAILED)?;
                    len -= bytes;
                }
                Ok(())
            },
        );
        if let Err(status) = found {
            return BeginResult::Ended(status.with_dnr());
        }
        if !is_remote {
            return BeginResult::Ended(FAILED.with_dnr());
        }
        if self.remote.make_memory().is_none() {
            return BeginResult::Ended(Status::INTERNAL_ERROR);
        }
        self.remote.jobs[place] = Some(RemoteJob {
            slot,
            work,
            to_host,
            pieces,
            bytes,
            moved: 0,
            step: if to_host {
                RemoteStep::Ready
            } else {
                RemoteStep::In
            },
        });
        self.remote.busy = true;
        // Continue in the next turn: this one has not registered the command yet.
        self.more = true;
        BeginResult::Yes
    }

    fn move_bytes(&mut self, turn: &mut Turn<'_>, place: usize) {
        let takes = self.session.negotiated();
        let most_bytes = takes.map_or(0, |n| n.client_data_bytes);
        let (records, scratch) = (&self.records, &mut self.scratch);
        match (self.remote).move_bytes(turn, records, most_bytes, scratch, place) {
            Ok(Moved::Some) => {}
            Ok(Moved::All(RemoteStep::Out)) => self.end_remote(turn, place, Status::SUCCESS),
            Ok(Moved::All(_)) => _ = self.start_remote(turn, place),
            Err(status) => self.end_remote(turn, place, status),
        }
    }

    #[cold]
    pub(super) fn move_remote(&mut self, turn: &mut Turn<'_>) -> bool {
        let mut any = false;
        for place in 0..PLACES {
            let step = self.remote.jobs[place].as_ref().map(|job| job.step);
            any |= match step {
                Some(RemoteStep::In | RemoteStep::Out) if self.remote.asked.is_none() => {
                    self.move_bytes(turn, place);
                    true
                }
                Some(RemoteStep::Ready) => self.start_remote(turn, place),
                _ => false,
            };
        }
        any
    }

    pub(super) fn reported(
        &mut self,
        turn: &mut Turn<'_>,
        header: &Header,
        bytes: &[u8],
    ) -> Answer {
        let is_it = |asked: &mut RemoteRequest| asked.number as u16 == header.id;
        let Some(RemoteRequest {
            number, place, ask, ..
        }) = self.remote.asked.take_if(is_it)
        else {
            return Answer::Now;
        };
        self.records.set_answered(number);
        let payload = bytes.get(HEADER_BYTES..).unwrap_or_default();
        self.more = true;
        let Some(job) = &self.remote.jobs[place] else {
            return Answer::Now;
        };
        if ask == Ask::Forgotten {
            return Answer::Now;
        }
        if header.is_error() {
            self.end_remote(turn, place, FAILED.with_dnr());
            return Answer::Now;
        }
        match ask {
            Ask::Forgotten => {}
            Ask::Nothing => self.remote.is_short = Some(payload.is_empty()),
            Ask::Write(len) => self.remote.has_moved(turn, place, len),
            Ask::Read(address, len) => {
                let at = base_of(place) + u64::from(job.moved);
                let ours = self.remote.memory.as_ref();
                let good = came(payload, address, len, self.remote.is_short == Some(true))
                    .is_some_and(|data| ours.is_some_and(|ours| ours.write(at, data)));
                if good {
                    self.remote.has_moved(turn, place, len);
                } else {
                    self.end_remote(turn, place, FAILED.with_dnr());
                }
            }
        }
        Answer::Now
    }

    fn start_remote(&mut self, turn: &mut Turn<'_>, place: usize) -> bool {
        let Some(job) = &self.remote.jobs[place] else {
            return false;
        };
        let (slot, work, bytes, to_host) = (job.slot, job.work, job.bytes, job.to_host);
        self.pieces.clear();
        let ours = self.remote.memory.as_ref();
        let pushed = ours.map(|ours| self.pieces.push(ours, base_of(place), bytes, to_host));
        if pushed.is_none_or(|pushed| pushed.is_err()) {
            self.end_remote(turn, place, Status::INTERNAL_ERROR);
            return true;
        }
        let lane = turn.client.lane().and_then(|lane| turn.core.lane(lane));
        let geometry = lane.map(crate::lane::Lane::geometry);
        let begun = match (work, geometry) {
            (CommandWork::Io(IoOp::Deallocate { ranges }), Some(geometry)) => {
                self.begin_deallocating(turn, slot, ranges, &geometry)
            }
            _ => self.start(turn, slot, work, None),
        };
        match begun {
            BeginResult::Yes => {
                if let Some(job) = &mut self.remote.jobs[place] {
                    job.step = RemoteStep::Begun;
                }
            }
            BeginResult::Ended(status) => self.end_remote(turn, place, status),
            BeginResult::NoRoom => return false,
        }
        true
    }

    fn end_remote(&mut self, turn: &mut Turn<'_>, place: usize, status: Status) {
        let Some(job) = self.remote.remove(place) else {
            return;
        };
        if let (RemoteStep::In | RemoteStep::Ready, Some(lane)) = (job.step, turn.client.lane()) {
            // A recovered command ends here without beginning again.
            let record = turn.client.command_ref(lane, job.slot);
            turn.core.recovered.refused(record);
        }
        self.complete(turn, job.slot % COMMANDS as u16, status);
    }
}

/// The data in the answer to a DMA_READ; `None`: a wrong answer.
fn came(payload: &[u8], address: u64, len: u32, is_short: bool) -> Option<&[u8]> {
    let (of, rest) = payload.split_first_chunk::<8>()?;
    let len = len as usize;
    let (count, data) = match is_short {
        true => {
            let (count, data) = rest.split_first_chunk::<4>()?;
            (u64::from(u32::from_le_bytes(*count)), data)
        }
        false => {
            let (count, data) = rest.split_first_chunk::<8>()?;
            (u64::from_le_bytes(*count), data)
        }
    };
    let sound = u64::from_le_bytes(*of) == address && count == len as u64;
    data.get(..len).filter(|_| sound)
}
