//! What a client's messages do.
//!
//! A successor may repeat a message, so each is idempotent: it stores values and toggles nothing. A
//! reset is done before it is recorded ([`super::Pcie::save`]). **Not here:** the protocol
//! (`forebay-vfio-user`).

use super::quiesce::Why;
use super::rings::Bells;
use super::{Pcie, slot};
use crate::frontend::vm::client::Client;
use crate::frontend::vm::protocol::{Closing, DepositedFd, Turn, UNSHARED};
use forebay_guest::GuestMemory;
use forebay_nvme::pcie::FunctionState;
use forebay_nvme::pcie::queue::InvalidValue;
use forebay_nvme::pcie::{
    BAR0_BYTES, BAR4_BYTES, CONFIG_BYTES, DOORBELLS_AT, DOORBELLS_BYTES, Doorbell, RegisterEffect,
    VECTORS,
};
use forebay_vfio_user::wire::{pci_irq, pci_region};
use forebay_vfio_user::{
    Broken, Device, DmaMap, DmaUnmap, Errno, Irq, Negotiated, Region, RegionAccess, SparseArea,
};
use rustix::fs::{MemfdFlags, SealFlags};
use std::sync::atomic::Ordering::Relaxed;

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

pub(super) fn closing(broken: Broken) -> Closing {
    Closing(match broken {
        Broken::Short => "its message is shorter than it says",
        Broken::Long => "its message is too long",
        Broken::NotACommand => "it sent a message that is not a command",
        Broken::Version => "it agreed on no protocol version",
    })
}

pub(super) enum RequestOutcome {
    Done,
    Failed(Errno),
    /// A reset began; the answer waits for it.
    Reset,
}

impl Pcie {
    pub(super) fn agree(
        &mut self,
        client: &mut Client,
        negotiated: Negotiated,
    ) -> Result<(), Closing> {
        if self.mapped {
            make_doorbells(client)?;
            self.rings.map_page(client)?;
        }
        self.records.set_negotiated(&negotiated);
        self.session.agreed(negotiated);
        Ok(())
    }

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

    pub(super) fn map(
        &mut self,
        turn: &mut Turn<'_>,
        map: &DmaMap,
        deposit: Option<&DepositedFd>,
    ) -> RequestOutcome {
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
                RequestOutcome::Done
            }
            Err(error) => {
                let errno = Errno::of_os(error.errno().raw_os_error());
                let DmaMap {
                    address, len_bytes, ..
                } = map;
                turn.client.report_refused(|| format!(
                    "its request to map memory ({len_bytes} bytes at {address:#x}) was refused: {error} ({errno})"
                ));
                RequestOutcome::Failed(errno)
            }
        }
    }

    pub(super) fn unmap(&mut self, turn: &mut Turn<'_>, unmap: DmaUnmap) -> RequestOutcome {
        match unmap {
            DmaUnmap::All => {
                self.let_go_of_memory();
                turn.client.unmap_all();
            }
            DmaUnmap::One { address, len_bytes } => {
                // It must be exactly an existing region (vfio-user, "VFIO_USER_DMA_UNMAP").
                let mut regions = turn.client.memory().regions().iter();
                let there =
                    regions.any(|r| r.guest_address() == address && r.len_bytes() == len_bytes);
                if !there {
                    return RequestOutcome::Failed(Errno::ENOENT);
                }
                self.let_go_of_memory();
                if turn.client.unmap(address, len_bytes).is_none() {
                    return RequestOutcome::Failed(Errno::ENOENT);
                }
            }
        }
        self.find_shadow(turn);
        RequestOutcome::Done
    }

    pub(super) fn read(&mut self, access: &RegionAccess, into: &mut [u8]) {
        let at = access.offset_bytes;
        match access.region {
            pci_region::CONFIG => self.function.read_config(at, into),
            pci_region::BAR4 => self.function.read_msix(at, &self.records.pending(), into),
            pci_region::BAR0 => match (Doorbell::at(at), into.len()) {
                (Some(doorbell), 4) => {
                    into.copy_from_slice(&self.rings.bell(&self.records, doorbell).to_le_bytes())
                }
                _ => self.function.read_registers(at, into),
            },
            _ => into.fill(0),
        }
    }

    pub(super) fn write(
        &mut self,
        turn: &mut Turn<'_>,
        access: &RegionAccess,
        from: &[u8],
    ) -> RequestOutcome {
        let at = access.offset_bytes;
        match access.region {
            pci_region::CONFIG => {
                let was_master = self.function.is_bus_master();
                if self.function.write_config(at, from) {
                    return RequestOutcome::Reset;
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
        RequestOutcome::Done
    }

    fn write_register(&mut self, turn: &mut Turn<'_>, at: u64, from: &[u8]) -> RequestOutcome {
        let memory = super::memory::ClientMemory(turn.client.memory());
        let now_ns = turn.core.now_ns();
        let effect = (self.function).write_registers(at, from, &memory, now_ns);
        match effect {
            RegisterEffect::None => self.save(),
            RegisterEffect::Enabled => {
                if !self.function.ready()
                    && is_unshared(self.function.state(), turn.client.memory())
                {
                    let why = "its controller can't be enabled: ";
                    turn.client.report_refused(|| format!("{why}{UNSHARED}"));
                }
                self.begin_admin_queue();
                self.save();
            }
            RegisterEffect::Reset => self.begin_quiescing(turn, Why::Reset),
            RegisterEffect::Shutdown => self.begin_quiescing(turn, Why::Shutdown),
        }
        self.renew_liveness();
        RequestOutcome::Done
    }

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
                let sq = self.rings.sqs[usize::from(qid)].as_mut();
                let entries = sq.map(|sq| sq.cursor.entries());
                (entries.is_some(), entries.is_some_and(|n| value < n))
            }
            Doorbell::Head(qid) => match self.rings.cqs[usize::from(qid)].as_mut() {
                Some(cq) => (true, cq.cursor.set_head(value) != Err(InvalidValue)),
                None => (false, false),
            },
        };
        let (Doorbell::Tail(qid) | Doorbell::Head(qid)) = doorbell;
        if !sound {
            // With shadow doorbells the register's value is unused.
            if !there || self.rings.shadow.is_none() || qid == 0 {
                self.bad_doorbell(!there, qid);
            }
            return;
        }
        match &self.rings.bells {
            Bells::Page(page) => {
                let _ = page.store_u32(doorbell.offset(), value, Relaxed);
            }
            Bells::Registers => self.records.set_doorbell(doorbell, value),
        }
    }
}

/// Reports a memory map that broke the protocol's rules.
pub(super) fn report_bad_map(client: &mut Client, error: Errno) {
    let rule = "a mapping must be whole pages, readable or writable, with at most one descriptor";
    client.report_refused(|| format!("its request to map memory was refused: {rule} ({error})"));
}

fn make_doorbells(client: &mut Client) -> Result<(), Closing> {
    if client.held(slot::DOORBELLS).is_none() {
        let failed = Closing("its doorbells can't be created");
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("forebay-doorbells", flags).map_err(|_| failed)?;
        let bytes = DOORBELLS_AT + DOORBELLS_BYTES;
        rustix::fs::ftruncate(&fd, bytes).map_err(|_| failed)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals).map_err(|_| failed)?;
        let deposit = client.deposit_own(fd).ok_or(failed)?;
        client.hold(slot::DOORBELLS, Some(&deposit));
    }
    Ok(())
}

/// Whether the Admin queue lies in memory without a descriptor.
fn is_unshared(state: &FunctionState, memory: &GuestMemory) -> bool {
    let mut regions = memory.regions().iter();
    regions.any(|region| {
        let has = |at: u64| at.wrapping_sub(region.guest_address()) < region.len_bytes();
        region.mapping().is_none() && (has(state.asq) || has(state.acq))
    })
}
