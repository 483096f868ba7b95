//! What a client's messages do.
//!
//! **Design.** A message that is carried out twice, because an engine died between, does the same twice: values
//! are stored, nothing is toggled. What resets the controller is not recorded before it is done
//! ([`super::Pcie::save`]). **Not here:** the protocol (`forebay-vfio-user`).

use super::quiesce::Why;
use super::{Bells, Pcie, slot};
use crate::frontend::vm::descriptor;
use crate::frontend::vm::protocol::{Answer, Closing, Deposit, Message, Turn, UNSHARED};
use forebay_nvme::pcie::queue::InvalidValue;
use forebay_nvme::pcie::{
    BAR0_BYTES, BAR4_BYTES, CONFIG_BYTES, DOORBELLS_AT, DOORBELLS_BYTES, Doorbell, RegisterEffect,
    VECTORS,
};
use forebay_vfio_user::wire::{command, pci_irq, pci_region};
use forebay_vfio_user::{
    Broken, Device, DmaMap, DmaUnmap, Errno, Header, Irq, IrqAction, IrqData, MAX_DATA_BYTES,
    Region, RegionAccess, Request, SetIrqs, SparseArea,
};
use rustix::fs::{MemfdFlags, SealFlags};
use std::sync::atomic::Ordering::Relaxed;

/// What the client may ask about.
pub(super) fn device(mapped: bool) -> Device {
    let mut device = Device {
        regions: [Region::default(); pci_region::COUNT],
        irqs: [Irq::default(); pci_irq::COUNT],
    };
    let region = |size_bytes, mappable| Region {
        size_bytes,
        readable: true,
        writable: true,
        mappable,
    };
    let doorbells = SparseArea {
        offset_bytes: DOORBELLS_AT,
        len_bytes: DOORBELLS_BYTES,
    };
    device.regions[pci_region::BAR0 as usize] = region(BAR0_BYTES, mapped.then_some(doorbells));
    device.regions[pci_region::BAR4 as usize] = region(BAR4_BYTES, None);
    device.regions[pci_region::CONFIG as usize] = region(CONFIG_BYTES, None);
    let irq = |count, maskable| Irq { count, maskable };
    device.irqs[pci_irq::MSIX as usize] = irq(u32::from(VECTORS), true);
    device.irqs[pci_irq::ERR as usize] = irq(1, false);
    device.irqs[pci_irq::REQ as usize] = irq(1, false);
    device
}

/// Why a stream can't go on.
pub(super) fn closing(broken: Broken) -> Closing {
    Closing(match broken {
        Broken::Short => "a message of its is shorter than it says",
        Broken::Long => "a message of its is too long",
        Broken::NotACommand => "it sent something that is no command",
        Broken::Version => "it agreed on no version of the protocol",
    })
}

/// The slot of an interrupt.
fn slot_of(index: u32, number: u32) -> Option<usize> {
    match index {
        pci_irq::MSIX => u16::try_from(number).ok().map(slot::vector),
        pci_irq::ERR => Some(slot::ERR),
        pci_irq::REQ => Some(slot::REQ),
        _ => None,
    }
}

/// How far a request is.
enum Outcome {
    Done,
    Failed(Errno),
    /// The function is reset, and it waits until nothing is in flight.
    Reset,
}

impl Pcie {
    pub(super) fn carry_out(&mut self, turn: &mut Turn<'_>, message: &Message<'_>) -> Answer {
        if let Some(header) = Header::read(message.bytes)
            && header.is_reply()
            && self.records.has_asked()
        {
            return self.told(turn, &header, message.bytes);
        }
        let judged = self.session.judge(message.bytes, message.descriptors.len());
        let judged = match judged {
            Ok(judged) => judged,
            Err(broken) => return Answer::Close(closing(broken)),
        };
        if let Ok(Request::Version(negotiated)) = judged.request {
            if self.mapped
                && let Err(why) = self.make_doorbells(turn)
            {
                return Answer::Close(why);
            }
            self.records.set_negotiated(&negotiated);
            self.session.agreed(negotiated);
        }
        if let Err(error) = judged.request
            && Header::read(message.bytes).is_some_and(|of| of.command == command::DMA_MAP)
        {
            let rule = "it must be whole pages, to be read or written, with one descriptor at most";
            let told = || format!("a map of its memory was refused: {rule} ({error})");
            turn.client.tell_refused(told);
        }
        if let Some(answer) = self.session.describe(&judged, &mut self.out) {
            let reply = self.out.get(..answer.bytes).unwrap_or_default();
            turn.client.reply.extend_from_slice(reply);
            if answer.with_region.is_some() {
                let page = turn.client.held_deposit(slot::DOORBELLS);
                turn.client.reply_descriptor = page.map(|page| page.fd);
            }
            return Answer::Now;
        }
        let mut data = [0u8; 256];
        let mut long = Vec::new();
        let mut read: &[u8] = &[];
        let outcome = match judged.request {
            Ok(Request::DmaMap(map)) => self.map(turn, &map, message.descriptors.first()),
            Ok(Request::DmaUnmap(unmap)) => self.unmap(turn, unmap),
            Ok(Request::SetIrqs(irqs)) => self.set_irqs(turn, &irqs, message.descriptors),
            Ok(Request::RegionRead(access)) => {
                let into = match data.get_mut(..access.len_bytes as usize) {
                    Some(into) => into,
                    None => {
                        long.resize(access.len_bytes.min(MAX_DATA_BYTES) as usize, 0);
                        &mut long[..]
                    }
                };
                self.read(&access, into);
                read = into;
                Outcome::Done
            }
            Ok(Request::RegionWrite(access, from)) => self.write(turn, &access, from),
            Ok(Request::Reset) => Outcome::Reset,
            // The others are described.
            Ok(_) => Outcome::Failed(Errno::ENOTSUP),
            Err(error) => Outcome::Failed(error),
        };
        let answer = match outcome {
            Outcome::Done => judged.done(read, &mut self.out),
            Outcome::Failed(error) => judged.refuse(error, &mut self.out),
            Outcome::Reset => {
                self.function.begin_reset();
                self.begin_quiescing(turn, Why::Reset);
                self.waiting.clear();
                self.waiting.extend_from_slice(message.bytes);
                return self.answer_reset(turn);
            }
        };
        let reply = self.out.get(..answer.bytes).unwrap_or_default();
        turn.client.reply.extend_from_slice(reply);
        Answer::Now
    }

    /// Writes the answer of the message that waited.
    pub(super) fn answer_waiting(&mut self, turn: &mut Turn<'_>, error: Option<Errno>) {
        let waiting = std::mem::take(&mut self.waiting);
        if let Ok(judged) = self.session.judge(&waiting, 0) {
            let answer = match error {
                None => judged.done(&[], &mut self.out),
                Some(error) => judged.refuse(error, &mut self.out),
            };
            let reply = self.out.get(..answer.bytes).unwrap_or_default();
            turn.client.reply.extend_from_slice(reply);
        }
    }

    fn make_doorbells(&mut self, turn: &mut Turn<'_>) -> Result<(), Closing> {
        if turn.client.held(slot::DOORBELLS).is_none() {
            let failed = Closing("its doorbells can't be made");
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let fd = rustix::fs::memfd_create("forebay-doorbells", flags).map_err(|_| failed)?;
            let bytes = DOORBELLS_AT + DOORBELLS_BYTES;
            rustix::fs::ftruncate(&fd, bytes).map_err(|_| failed)?;
            let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
            rustix::fs::fcntl_add_seals(&fd, seals).map_err(|_| failed)?;
            let deposit = turn.client.deposit_own(fd).ok_or(failed)?;
            turn.client.hold(slot::DOORBELLS, Some(&deposit));
        }
        self.map_doorbells(turn.client)
    }

    fn map(&mut self, turn: &mut Turn<'_>, map: &DmaMap, deposit: Option<&Deposit>) -> Outcome {
        let mapped = turn.client.map(
            deposit,
            map.address,
            map.len_bytes,
            map.offset_bytes,
            map.writable,
            0,
        );
        match mapped {
            Ok(()) => {
                self.find_shadow(turn);
                Outcome::Done
            }
            Err(error) => {
                let errno = Errno::of_os(error.errno().raw_os_error());
                let DmaMap {
                    address, len_bytes, ..
                } = map;
                turn.client.tell_refused(|| format!(
                    "a map of its memory ({len_bytes} bytes at {address:#x}) was refused: {error} ({errno})"
                ));
                Outcome::Failed(errno)
            }
        }
    }

    fn unmap(&mut self, turn: &mut Turn<'_>, unmap: DmaUnmap) -> Outcome {
        match unmap {
            DmaUnmap::All => {
                self.let_go_of_memory();
                turn.client.unmap_all();
            }
            DmaUnmap::One { address, len_bytes } => {
                // Exactly a region that is there (vfio-user, "VFIO_USER_DMA_UNMAP").
                let mut regions = turn.client.memory().regions().iter();
                let there =
                    regions.any(|r| r.guest_address() == address && r.len_bytes() == len_bytes);
                if !there {
                    return Outcome::Failed(Errno::ENOENT);
                }
                self.let_go_of_memory();
                if turn.client.unmap(address, len_bytes).is_none() {
                    return Outcome::Failed(Errno::ENOENT);
                }
            }
        }
        self.find_shadow(turn);
        Outcome::Done
    }

    fn set_irqs(
        &mut self,
        turn: &mut Turn<'_>,
        irqs: &SetIrqs<'_>,
        descriptors: &[Deposit],
    ) -> Outcome {
        let client = &mut turn.client;
        let (index, start) = (irqs.index, irqs.start);
        if irqs.count == 0 {
            // All of the kind.
            let count = self.session.device().irqs.get(index as usize);
            for number in 0..count.map_or(0, |irq| irq.count) {
                if let Some(slot) = slot_of(index, number) {
                    client.hold(slot, None);
                }
            }
            return Outcome::Done;
        }
        if let IrqData::Eventfd(true) = irqs.data {
            if !descriptors.iter().all(|d| descriptor::is_eventfd(&*d.fd)) {
                return Outcome::Failed(Errno::EINVAL);
            }
            for (number, deposit) in (start..).zip(descriptors) {
                if let Some(slot) = slot_of(index, number) {
                    client.hold(slot, Some(deposit));
                }
            }
            return Outcome::Done;
        }
        for (at, number) in (start..start + irqs.count).enumerate() {
            let Some(slot) = slot_of(index, number) else {
                continue;
            };
            let chosen = match irqs.data {
                IrqData::None => true,
                IrqData::Bool(bools) => bools.get(at).is_some_and(|b| *b != 0),
                IrqData::Eventfd(_) => {
                    client.hold(slot, None);
                    continue;
                }
            };
            if !chosen {
                continue;
            }
            // Only vectors can be masked.
            let vector = number as u16;
            match irqs.action {
                IrqAction::Trigger => client.raise(slot),
                IrqAction::Mask => self.records.set_masked(vector, true),
                IrqAction::Unmask => {
                    self.records.set_masked(vector, false);
                    self.raise_pending(client);
                }
            }
        }
        Outcome::Done
    }

    fn read(&mut self, access: &RegionAccess, into: &mut [u8]) {
        let at = access.offset_bytes;
        match access.region {
            pci_region::CONFIG => self.function.read_config(at, into),
            pci_region::BAR4 => self.function.read_msix(at, &self.records.pending(), into),
            pci_region::BAR0 => match (Doorbell::at(at), into.len()) {
                (Some(doorbell), 4) => into.copy_from_slice(&self.bell(doorbell).to_le_bytes()),
                _ => self.function.read_registers(at, into),
            },
            _ => into.fill(0),
        }
    }

    fn write(&mut self, turn: &mut Turn<'_>, access: &RegionAccess, from: &[u8]) -> Outcome {
        let at = access.offset_bytes;
        match access.region {
            pci_region::CONFIG => {
                let was_master = self.function.is_bus_master();
                if self.function.write_config(at, from) {
                    return Outcome::Reset;
                }
                self.space_written(turn, was_master);
            }
            pci_region::BAR4 => {
                self.function.write_msix(at, from);
                self.save();
            }
            pci_region::BAR0 if at >= DOORBELLS_AT => self.ring(at, from),
            pci_region::BAR0 => return self.write_register(turn, at, from),
            _ => {}
        }
        Outcome::Done
    }

    fn write_register(&mut self, turn: &mut Turn<'_>, at: u64, from: &[u8]) -> Outcome {
        let memory = super::memory::ClientMemory(turn.client.memory());
        let now_ns = turn.core.now_ns();
        let effect = (self.function).write_registers(at, from, &memory, now_ns);
        match effect {
            RegisterEffect::None => self.save(),
            RegisterEffect::Enabled => {
                if !self.function.ready() && self.is_unshared(turn) {
                    let why = "its controller can't be enabled: ";
                    turn.client.tell_refused(|| format!("{why}{UNSHARED}"));
                }
                self.begin_admin_queue();
                self.save();
            }
            RegisterEffect::Reset => self.begin_quiescing(turn, Why::Reset),
            RegisterEffect::Shutdown => self.begin_quiescing(turn, Why::Shutdown),
        }
        self.look_alive();
        Outcome::Done
    }

    /// Whether its Admin queue would lie in memory that came without a descriptor.
    fn is_unshared(&mut self, turn: &Turn<'_>) -> bool {
        let state = self.function.state();
        let mut regions = turn.client.memory().regions().iter();
        regions.any(|region| {
            let has = |at: u64| at.wrapping_sub(region.guest_address()) < region.len_bytes();
            region.mapping().is_none() && (has(state.asq) || has(state.acq))
        })
    }

    /// A doorbell's register is written.
    fn ring(&mut self, at: u64, from: &[u8]) {
        let value = from.first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
        let (Some(value), 4, true) = (value, from.len(), self.live) else {
            return;
        };
        let Some(doorbell) = Doorbell::at(at) else {
            return self.bad_doorbell(true, u16::MAX);
        };
        let (there, sound) = match doorbell {
            Doorbell::Tail(qid) => {
                let sq = self.sqs[usize::from(qid)].as_mut();
                let entries = sq.map(|sq| sq.cursor.entries());
                (entries.is_some(), entries.is_some_and(|n| value < n))
            }
            Doorbell::Head(qid) => match self.cqs[usize::from(qid)].as_mut() {
                Some(cq) => (true, cq.cursor.set_head(value) != Err(InvalidValue)),
                None => (false, false),
            },
        };
        let (Doorbell::Tail(qid) | Doorbell::Head(qid)) = doorbell;
        if !sound {
            // With shadow doorbells the value here says nothing.
            if !there || self.shadow.is_none() || qid == 0 {
                self.bad_doorbell(!there, qid);
            }
            return;
        }
        match &self.bells {
            Bells::Page(page) => {
                let _ = page.store_u32(doorbell.offset(), value, Relaxed);
            }
            Bells::Registers => self.records.set_doorbell(doorbell, value),
        }
    }
}
