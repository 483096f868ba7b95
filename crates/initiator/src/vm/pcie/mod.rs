//! A vfio-user client with an NVMe driver.
//!
//! Initialisation follows Base 3.5.1. All memory is one DMA mapping. MSI-X vector *n* is queue
//! *n*'s; the admin queue, with vector 0, is also polled. Only namespace 1 is used. There are no
//! asynchronous events, and no reset with commands in flight.

mod message;
mod queue;

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forebay_nvme::host::command::{self, cns, property};
use forebay_nvme::host::identify::{ControllerInfo, NamespaceInfo};
use forebay_nvme::opcode::admin;
use forebay_nvme::register::{Cap, Cc, Csts};
use forebay_nvme::{Sqe, Status, feature};
use zerocopy::little_endian::U16;

use super::event::{EventFd, is_open};
use super::memory::{Allotment, MappedMemory, PAGE_BYTES};
use super::{Disk, Doorbells, Error, Geometry, Options, Queue};
use message::{VfioClient, irq, region};
pub use queue::PcieQueue;
use queue::{Bell, DOORBELLS, Pair, QueuePlan, Wire, data_pointer};

const AQA: u64 = 0x24;
const ASQ: u64 = 0x28;
const ACQ: u64 = 0x30;
const ADMIN_ENTRIES: u16 = 32;
const NSID: u32 = 1;
/// Bit of OACS (Identify Controller, byte 256).
const OACS_DOORBELL_BUFFER: u16 = 1 << 8;
/// Bits of ONCS.
const ONCS_DATASET: u16 = 1 << 2;
const ONCS_WRITE_ZEROES: u16 = 1 << 3;
/// PCI configuration space: command register, its memory and bus master bits, capability list,
/// MSI-X and its enable bit.
const PCI_COMMAND: u64 = 0x04;
const PCI_ENABLE: u16 = 0x0006;
const PCI_CAPABILITIES: u64 = 0x34;
const PCI_MSIX: u8 = 0x11;
const PCI_MSIX_ENABLE: u16 = 1 << 15;
const MAX_CAPABILITIES: usize = 48;
/// Poll interval of registers and admin completions.
const POLL: Duration = Duration::from_micros(100);

/// An NVMe disk behind a vfio-user socket.
#[derive(Debug)]
pub struct Pcie {
    wire: Wire,
    options: Options,
    admin: Pair,
    admin_cid: u16,
    identify: usize,
    controller: ControllerInfo,
    geometry: Geometry,
    queues: Vec<PcieQueue>,
    /// Events of I/O queues that are not created yet.
    events: Vec<EventFd>,
    /// Raised when the device requests its unplug.
    removal: Option<EventFd>,
}

impl Pcie {
    /// Connects, enables the controller, and creates all queues.
    pub fn connect(path: &Path, options: &Options) -> Result<Self, Error> {
        let mut client = VfioClient::connect(path, options.limit)?;
        let (regions, irqs) = client.device_info()?;
        if regions <= region::CONFIG || irqs <= irq::MSIX {
            let what = format!("not a PCI device: {regions} regions, {irqs} kinds of interrupts");
            return Err(Error::Unusable(what));
        }
        let cap = Cap::from_bits(u64::from_le_bytes(
            client.read(region::BAR0, property::CAP.into())?,
        ));
        let stride = 4usize << cap.dstrd();
        let mut layout = Allotment::default();
        let admin_places = (
            layout.take(PAGE_BYTES, PAGE_BYTES),
            layout.take(PAGE_BYTES, PAGE_BYTES),
        );
        let identify = layout.take(PAGE_BYTES, PAGE_BYTES);
        let doorbells = layout.take(PAGE_BYTES, PAGE_BYTES);
        let events = layout.take(PAGE_BYTES, PAGE_BYTES);
        let plans: Vec<_> = (0..options.queues)
            .map(|_| QueuePlan::new(options, &mut layout))
            .collect();
        let memory = MappedMemory::new(layout.bytes(), options.huge_pages)
            .map_err(Error::system("create the VM's memory"))?;
        let memory = Arc::new(memory);
        client.dma_map(memory.guest(0), memory.len() as u64, memory.fd())?;
        let bell = if options.doorbells == Doorbells::Mapped {
            map_doorbells(&mut client)?
        } else {
            Bell::Message
        };
        let removal = if irqs > irq::REQ && client.irq_count(irq::REQ)? > 0 {
            let removal = EventFd::new()?;
            client.set_irqs(irq::REQ, &[removal.fd()])?;
            Some(removal)
        } else {
            None
        };
        let wire = Wire {
            client: Arc::new(Mutex::new(client)),
            memory,
            bell,
            stride,
        };
        let mut this = Self {
            admin: Pair::new(wire.clone(), 0, ADMIN_ENTRIES, admin_places),
            wire,
            options: options.clone(),
            admin_cid: 0,
            identify,
            controller: ControllerInfo::parse(&[0; 4096]),
            geometry: Geometry {
                size_bytes: 0,
                block_bytes: 512,
                max_transfer_bytes: None,
                max_queues: 0,
                can_flush: true,
                can_discard: false,
                can_write_zeroes: false,
                read_only: false,
            },
            queues: Vec::new(),
            events: Vec::new(),
            removal,
        };
        if u32::from(cap.mqes()) + 1 < u32::from(options.depth) + 1 {
            return Err(Error::Unusable(format!(
                "the controller's queues have {} entries",
                u32::from(cap.mqes()) + 1
            )));
        }
        this.enable(admin_places)?;
        this.identify()?;
        if options.doorbells == Doorbells::Shadow {
            this.shadow(doorbells, events)?;
        }
        this.create_queues(plans)?;
        Ok(this)
    }

    /// The controller's identity.
    #[must_use]
    pub fn controller(&self) -> &ControllerInfo {
        &self.controller
    }

    /// Whether shadow doorbells are in use.
    #[must_use]
    pub fn has_shadow_doorbells(&self) -> bool {
        matches!(self.wire.bell, Bell::Shadow { .. })
    }

    /// Waits until the device requests its unplug. False: the limit came first.
    pub fn wait_removal(&self, limit: Duration) -> Result<bool, Error> {
        match &self.removal {
            Some(removal) => removal.wait(limit),
            None => Err(Error::Unusable("the device has no REQ interrupt".into())),
        }
    }

    /// Its queues with their concrete type; each can be taken once.
    pub fn take_pcie_queues(&mut self) -> Vec<PcieQueue> {
        std::mem::take(&mut self.queues)
    }

    /// Resets the device (DEVICE_RESET); its queues are gone.
    pub fn reset(&mut self) -> Result<(), Error> {
        self.queues.clear();
        self.wire.client().reset()
    }

    fn register32(&self, offset: u32) -> Result<u32, Error> {
        let bytes = self.wire.client().read(region::BAR0, offset.into())?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn set_register(&self, offset: u64, value: &[u8]) -> Result<(), Error> {
        let mut client = self.wire.client();
        client.write_region(region::BAR0, offset, value)
    }

    fn wait_csts(&self, what: &str, is_so: impl Fn(Csts) -> bool) -> Result<(), Error> {
        let begun = Instant::now();
        loop {
            let csts = Csts::from_bits(self.register32(property::CSTS)?);
            if is_so(csts) {
                return Ok(());
            }
            if csts.cfs() {
                let what = format!("fatal status while waiting for {what}");
                return Err(Error::Unusable(what));
            }
            if begun.elapsed() > self.options.limit {
                return Err(Error::TimedOut {
                    what: what.into(),
                    waited: self.options.limit,
                });
            }
            std::thread::sleep(POLL);
        }
    }

    fn enable(&mut self, admin: (usize, usize)) -> Result<(), Error> {
        self.set_register(property::CC.into(), &0u32.to_le_bytes())?;
        self.wait_csts("the controller's reset", |csts| !csts.rdy())?;
        let entries = u32::from(ADMIN_ENTRIES) - 1;
        let memory = Arc::clone(&self.wire.memory);
        self.set_register(AQA, &(entries << 16 | entries).to_le_bytes())?;
        self.set_register(ASQ, &memory.guest(admin.0).to_le_bytes())?;
        self.set_register(ACQ, &memory.guest(admin.1).to_le_bytes())?;
        {
            let mut client = self.wire.client();
            let config = region::CONFIG;
            client.write_region(config, PCI_COMMAND, &PCI_ENABLE.to_le_bytes())?;
        }
        self.give_events()?;
        self.enable_interrupts()?;
        let cc = command::CC_ENABLE.to_le_bytes();
        self.set_register(property::CC.into(), &cc)?;
        self.wait_csts("the controller to be ready", |csts| csts.rdy())
    }

    fn enable_interrupts(&self) -> Result<(), Error> {
        let mut client = self.wire.client();
        let [mut at] = client.read(region::CONFIG, PCI_CAPABILITIES)?;
        for _ in 0..MAX_CAPABILITIES {
            let [id, next] = client.read(region::CONFIG, (at & !3).into())?;
            if id == PCI_MSIX {
                let control = u64::from(at & !3) + 2;
                let now = u16::from_le_bytes(client.read(region::CONFIG, control)?);
                let now = (now | PCI_MSIX_ENABLE).to_le_bytes();
                return client.write_region(region::CONFIG, control, &now);
            }
            if next == 0 {
                break;
            }
            at = next;
        }
        Err(Error::Unusable("the device has no MSI-X".into()))
    }

    /// Its data, if any, are at `identify`.
    fn command(&mut self, what: &str, mut sqe: Sqe) -> Result<u64, Error> {
        self.admin_cid = self.admin_cid.wrapping_add(1) & 0x7fff;
        sqe.cid = U16::new(self.admin_cid);
        self.admin.push(&sqe);
        self.admin.ring()?;
        let begun = Instant::now();
        loop {
            let before = self.admin.head();
            if let Some(cqe) = self.admin.pop() {
                self.admin.ring_completions(before)?;
                if cqe.cid() != self.admin_cid {
                    let what = format!("admin command {:#x} ended instead of {what}", cqe.cid());
                    return Err(Error::Protocol(what));
                }
                let status: Status = cqe.status();
                return if status.is_success() {
                    Ok(cqe.result())
                } else {
                    Err(Error::Unusable(format!("{what}: {status:?}")))
                };
            }
            if begun.elapsed() > self.options.limit {
                return Err(Error::TimedOut {
                    what: what.into(),
                    waited: self.options.limit,
                });
            }
            std::thread::sleep(POLL);
        }
    }

    fn identified(&mut self, what: &str, cns: u8, nsid: u32) -> Result<[u8; 4096], Error> {
        let mut sqe = command::identify(cns, nsid);
        sqe.dptr = data_pointer([self.wire.memory.guest(self.identify), 0]);
        self.command(what, sqe)?;
        let mut data = [0; 4096];
        self.wire.memory.read(self.identify, &mut data);
        Ok(data)
    }

    fn identify(&mut self) -> Result<(), Error> {
        let data = self.identified("Identify Controller", cns::CONTROLLER, 0)?;
        let oacs = u16::from_le_bytes([data[256], data[257]]);
        self.controller = ControllerInfo::parse(&data);
        if self.options.doorbells == Doorbells::Shadow && oacs & OACS_DOORBELL_BUFFER == 0 {
            self.options.doorbells = Doorbells::Trapped;
        }
        let data = self.identified("Identify Namespace", cns::NAMESPACE, NSID)?;
        let namespace = NamespaceInfo::parse(NSID, &data)
            .ok_or_else(|| Error::Unusable("no usable namespace 1".into()))?;
        let controller = &self.controller;
        self.geometry = Geometry {
            size_bytes: namespace.size_bytes(),
            block_bytes: namespace.block_bytes,
            max_transfer_bytes: controller.max_transfer_bytes,
            max_queues: self.geometry.max_queues,
            can_flush: true,
            can_discard: controller.oncs & ONCS_DATASET != 0,
            can_write_zeroes: controller.oncs & ONCS_WRITE_ZEROES != 0,
            read_only: namespace.write_protected,
        };
        let limit = self.geometry.max_transfer_bytes;
        if limit.is_some_and(|limit| self.options.slot_bytes as u64 > limit) {
            return Err(Error::Unusable(format!(
                "commands of {} bytes exceed the controller's limit (MDTS)",
                self.options.slot_bytes
            )));
        }
        Ok(())
    }

    /// Doorbell Buffer Config (Base 5.8), if supported.
    fn shadow(&mut self, doorbells: usize, events: usize) -> Result<(), Error> {
        if self.options.doorbells != Doorbells::Shadow {
            return Ok(());
        }
        let memory = Arc::clone(&self.wire.memory);
        let mut sqe = Sqe::new(admin::DOORBELL_BUFFER_CONFIG, 0);
        sqe.dptr = data_pointer([memory.guest(doorbells), memory.guest(events)]);
        self.command("Doorbell Buffer Config", sqe)?;
        self.wire.bell = Bell::Shadow { doorbells, events };
        Ok(())
    }

    fn create_queues(&mut self, plans: Vec<QueuePlan>) -> Result<(), Error> {
        let asked = self.options.queues;
        let granted = self.command("Number of Queues", command::set_number_of_queues(asked))?;
        let granted = command::granted_queues(granted);
        self.geometry.max_queues = u16::try_from(granted).unwrap_or(u16::MAX);
        if granted < asked.into() {
            let what = format!("the controller grants {granted} queues, not {asked}");
            return Err(Error::Unusable(what));
        }
        let interrupts = self.options.interrupts;
        if self.options.gather != 0 {
            let gather = Sqe::new(admin::SET_FEATURES, 0)
                .with_cdw(10, feature::INTERRUPT_COALESCING.into())
                .with_cdw(11, self.options.gather.into());
            self.command("Interrupt Coalescing", gather)?;
        }
        let events = std::mem::take(&mut self.events);
        for ((qid, plan), event) in (1u16..).zip(plans).zip(events) {
            let memory = Arc::clone(&self.wire.memory);
            let size = u32::from(plan.entries) - 1;
            let named = size << 16 | u32::from(qid);
            // Contiguous; with interrupts, vector `qid`.
            let how = if interrupts {
                u32::from(qid) << 16 | 3
            } else {
                1
            };
            let mut sqe = Sqe::new(admin::CREATE_IO_CQ, 0)
                .with_cdw(10, named)
                .with_cdw(11, how);
            sqe.dptr = data_pointer([memory.guest(plan.completion), 0]);
            self.command("Create I/O Completion Queue", sqe)?;
            let mut sqe = Sqe::new(admin::CREATE_IO_SQ, 0)
                .with_cdw(10, named)
                .with_cdw(11, u32::from(qid) << 16 | 1);
            sqe.dptr = data_pointer([memory.guest(plan.submission), 0]);
            self.command("Create I/O Submission Queue", sqe)?;
            let (wire, options) = (self.wire.clone(), &self.options);
            let block_bytes = self.geometry.block_bytes;
            let event = interrupts.then_some(event);
            self.queues
                .push(PcieQueue::new(wire, qid, plan, block_bytes, options, event));
        }
        Ok(())
    }

    /// The admin queue's completions always interrupt.
    fn give_events(&mut self) -> Result<(), Error> {
        let mut events = Vec::new();
        for _ in 0..=self.options.queues {
            events.push(EventFd::new()?);
        }
        {
            let mut client = self.wire.client();
            let vectors = client.irq_count(irq::MSIX)?;
            if (vectors as usize) < events.len() {
                let what = format!("the device has only {vectors} MSI-X vectors");
                return Err(Error::Unusable(what));
            }
            let fds: Vec<BorrowedFd<'_>> = events.iter().map(EventFd::fd).collect();
            client.set_irqs(irq::MSIX, &fds)?;
        }
        // The admin queue's event is not used.
        events.remove(0);
        self.events = events;
        Ok(())
    }
}

fn map_doorbells(client: &mut VfioClient) -> Result<Bell, Error> {
    let info = client.region_info(region::BAR0)?;
    let area = info
        .areas
        .iter()
        .find(|&&(offset, bytes)| offset == DOORBELLS && bytes >= PAGE_BYTES as u64);
    let (Some(&(offset, bytes)), Some(fd)) = (area, info.fd) else {
        return Err(Error::Unusable(
            "the device's doorbells can't be mapped".into(),
        ));
    };
    if bytes > info.size {
        return Err(Error::Protocol("an area larger than its region".into()));
    }
    let page = MappedMemory::map(fd, info.offset.saturating_add(offset), PAGE_BYTES)
        .map_err(Error::system("map the doorbells"))?;
    Ok(Bell::Mapped(Arc::new(page)))
}

impl Disk for Pcie {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn take_queues(&mut self) -> Vec<Box<dyn Queue>> {
        let queues = self.take_pcie_queues().into_iter();
        queues
            .map(|queue| Box::new(queue) as Box<dyn Queue>)
            .collect()
    }

    fn is_open(&self) -> bool {
        is_open(self.wire.client().socket.stream())
    }

    fn refresh(&mut self) -> Result<Geometry, Error> {
        self.identify()?;
        Ok(self.geometry)
    }

    fn close(self: Box<Self>) -> Result<(), Error> {
        let cc = Cc::from_bits(command::CC_ENABLE | command::CC_SHN_NORMAL);
        self.set_register(property::CC.into(), &cc.into_bits().to_le_bytes())?;
        self.wait_csts("the controller's shutdown", |csts| {
            csts.shst() == Csts::SHST_COMPLETE
        })?;
        self.set_register(property::CC.into(), &0u32.to_le_bytes())?;
        self.wait_csts("the controller's reset", |csts| !csts.rdy())?;
        let memory = &self.wire.memory;
        let mut client = self.wire.client();
        client.dma_unmap(memory.guest(0), memory.len() as u64)
    }
}
