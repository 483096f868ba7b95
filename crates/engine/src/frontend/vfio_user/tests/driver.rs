//! A test driver of a controller: messages, memory, queues, all kinds of doorbells.

use super::rig::Rig;
use crate::patience::patiently;
use forebay_guest::{GuestMemory, NewRegion};
use forebay_nvme::opcode::admin;
use forebay_nvme::{Cqe, Sqe, Status};
use forebay_vfio_user::Header;
use forebay_vfio_user::wire::{command, dma, irq_set_flags, pci_irq, pci_region};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::MemfdFlags;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use zerocopy::{FromBytes, IntoBytes};

#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    pub qid: u16,
    pub sq: u64,
    pub cq: u64,
    pub entries: u32,
    pub tail: u32,
    pub head: u32,
    pub phase: bool,
}

impl Pair {
    pub(super) fn new(qid: u16, sq: u64, cq: u64, entries: u32) -> Self {
        Self {
            qid,
            sq,
            cq,
            entries,
            tail: 0,
            head: 0,
            phase: true,
        }
    }
}

pub(super) struct Reply {
    pub header: Header,
    pub payload: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

pub(super) const MEMORY: u64 = 4 << 20;
/// The device address of the driver's memory.
pub(super) const BASE: u64 = 0x10_0000;

pub(super) struct Driver {
    pub fd: OwnedFd,
    pub memfd: OwnedFd,
    pub memory: GuestMemory,
    input: Vec<u8>,
    fds: Vec<OwnedFd>,
    pub(super) next_id: u16,
    pub admin: Pair,
    pub eventfds: Vec<OwnedFd>,
    /// The shadow doorbells' address.
    pub shadow: Option<u64>,
    /// The mapped doorbell page.
    pub page: Option<GuestMemory>,
}

impl Driver {
    pub(super) fn new(fd: OwnedFd) -> Self {
        let memfd = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memfd, MEMORY).unwrap();
        let mut memory = GuestMemory::default();
        let all = NewRegion {
            guest_address: BASE,
            user_address: 0,
            len_bytes: MEMORY,
            writable: true,
            file: Some((memfd.as_fd(), 0)),
        };
        memory.map(&all).unwrap();
        Self {
            fd,
            memfd,
            memory,
            input: Vec::new(),
            fds: Vec::new(),
            next_id: 1,
            admin: Pair::new(0, BASE, BASE + 0x1000, 32),
            eventfds: Vec::new(),
            shadow: None,
            page: None,
        }
    }

    pub(super) fn put(&self, at: u64, bytes: &[u8]) {
        assert!(self.memory.write(at, bytes));
    }

    pub(super) fn get(&self, at: u64, bytes: usize) -> Vec<u8> {
        let mut into = vec![0; bytes];
        assert!(self.memory.read(at, &mut into));
        into
    }

    /// Sends a message; returns its number.
    pub(super) fn send(&mut self, code: u16, payload: &[u8], fds: &[&OwnedFd]) -> u16 {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        let header = Header::command(id, code, 16 + payload.len() as u32, false);
        self.send_raw(&[&header.to_bytes(), payload].concat(), fds);
        id
    }

    pub(super) fn send_raw(&mut self, bytes: &[u8], fds: &[&OwnedFd]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let borrowed: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        if !borrowed.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
        }
        let sent = rustix::net::sendmsg(
            &self.fd,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        );
        assert_eq!(sent.unwrap(), bytes.len());
    }

    pub(super) fn reply(&mut self) -> Option<Reply> {
        let mut bytes = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut bytes)];
        if let Ok(got) =
            rustix::net::recvmsg(&self.fd, &mut into, &mut control, RecvFlags::DONTWAIT)
        {
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    self.fds.extend(fds);
                }
            }
            self.input.extend_from_slice(&bytes[..got.bytes]);
        }
        let header = Header::read(&self.input)?;
        let size = header.size_bytes as usize;
        if self.input.len() < size {
            return None;
        }
        let payload = self.input[16..size].to_vec();
        self.input.drain(..size);
        Some(Reply {
            header,
            payload,
            fds: std::mem::take(&mut self.fds),
        })
    }

    pub(super) fn is_closed(&mut self) -> bool {
        let mut bytes = [0; 4096];
        matches!(
            rustix::net::recv(&self.fd, &mut bytes, RecvFlags::DONTWAIT | RecvFlags::PEEK),
            Ok((0, _)) | Err(rustix::io::Errno::CONNRESET)
        )
    }

    pub(super) fn call(
        &mut self,
        rig: &mut Rig,
        code: u16,
        payload: &[u8],
        fds: &[&OwnedFd],
    ) -> Reply {
        let id = self.send(code, payload, fds);
        self.answered(rig, id)
    }

    pub(super) fn answered(&mut self, rig: &mut Rig, id: u16) -> Reply {
        let mut reply = None;
        rig.until("the answer to a message", |_| {
            reply = self.reply();
            reply.is_some()
        });
        let reply = reply.unwrap();
        assert_eq!(reply.header.id, id);
        reply
    }

    pub(super) fn map_message(address: u64, len: u64, offset: u64) -> Vec<u8> {
        let mut payload = words(&[32, dma::READABLE | dma::WRITABLE]);
        payload.extend([offset, address, len].iter().flat_map(|w| w.to_le_bytes()));
        payload
    }

    pub(super) fn unmap_message(address: u64, len: u64) -> Vec<u8> {
        let mut payload = words(&[24, 0]);
        payload.extend([address, len].iter().flat_map(|w| w.to_le_bytes()));
        payload
    }

    pub(super) fn map(&mut self, rig: &mut Rig) {
        let memfd = self.memfd.try_clone().unwrap();
        let payload = Self::map_message(BASE, MEMORY, 0);
        let reply = self.call(rig, command::DMA_MAP, &payload, &[&memfd]);
        assert!(!reply.header.is_error(), "{:?}", reply.header);
    }

    pub(super) fn access(region: u32, at: u64, len: u32) -> Vec<u8> {
        let mut payload = at.to_le_bytes().to_vec();
        payload.extend(words(&[region, len]));
        payload
    }

    pub(super) fn write(&mut self, rig: &mut Rig, region: u32, at: u64, from: &[u8]) -> Reply {
        let mut payload = Self::access(region, at, from.len() as u32);
        payload.extend_from_slice(from);
        self.call(rig, command::REGION_WRITE, &payload, &[])
    }

    pub(super) fn read(&mut self, rig: &mut Rig, region: u32, at: u64, len: u32) -> Vec<u8> {
        let payload = Self::access(region, at, len);
        let reply = self.call(rig, command::REGION_READ, &payload, &[]);
        assert!(!reply.header.is_error());
        reply.payload[16..].to_vec()
    }

    pub(super) fn register(&mut self, rig: &mut Rig, at: u64) -> u32 {
        let bytes = self.read(rig, pci_region::BAR0, at, 4);
        u32::from_le_bytes(bytes.try_into().unwrap())
    }

    #[track_caller]
    pub(super) fn wait_register(&mut self, rig: &mut Rig, at: u64, wanted: u32) {
        for () in patiently() {
            if self.register(rig, at) == wanted {
                return;
            }
            rig.turn();
        }
        panic!("register {at:#x} is {:#x}", self.register(rig, at));
    }

    pub(super) fn set_master(&mut self, rig: &mut Rig, is_master: bool) {
        let command: u16 = 2 | if is_master { 4 } else { 0 };
        self.write(rig, pci_region::CONFIG, 4, &command.to_le_bytes());
    }

    /// Negotiates, maps memory, sets all vectors, and enables the controller.
    pub(super) fn begin(&mut self, rig: &mut Rig) {
        let reply = self.call(
            rig,
            command::VERSION,
            b"\0\0\0\0{\"capabilities\":{}}\0",
            &[],
        );
        assert!(!reply.header.is_error());
        self.map(rig);
        self.take_vectors(rig);
        self.enable(rig);
    }

    pub(super) fn take_vectors(&mut self, rig: &mut Rig) {
        let new = |_| eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
        self.eventfds = (0..4).map(new).collect();
        let fds: Vec<OwnedFd> = (self.eventfds.iter())
            .map(|fd| fd.try_clone().unwrap())
            .collect();
        let flags = irq_set_flags::DATA_EVENTFD | irq_set_flags::ACTION_TRIGGER;
        let payload = words(&[20, flags, pci_irq::MSIX, 0, 4]);
        let fds: Vec<&OwnedFd> = fds.iter().collect();
        let reply = self.call(rig, command::DEVICE_SET_IRQS, &payload, &fds);
        assert!(!reply.header.is_error());
    }

    /// How often a vector was raised since the last call.
    pub(super) fn raised(&self, vector: usize) -> u64 {
        let mut bytes = [0; 8];
        match rustix::io::read(&self.eventfds[vector], &mut bytes) {
            Ok(8) => u64::from_ne_bytes(bytes),
            _ => 0,
        }
    }

    pub(super) fn enable(&mut self, rig: &mut Rig) {
        self.set_master(rig, true);
        self.admin = Pair::new(0, self.admin.sq, self.admin.cq, self.admin.entries);
        self.put(self.admin.cq, &[0; 512]);
        let size = self.admin.entries - 1;
        self.write(
            rig,
            pci_region::BAR0,
            0x24,
            &(size | size << 16).to_le_bytes(),
        );
        let (sq, cq) = (self.admin.sq, self.admin.cq);
        self.write(rig, pci_region::BAR0, 0x28, &sq.to_le_bytes());
        self.write(rig, pci_region::BAR0, 0x30, &cq.to_le_bytes());
        self.write(rig, pci_region::BAR0, 0x14, &0x0046_0001u32.to_le_bytes());
        assert_eq!(self.register(rig, 0x1C), 1);
    }

    /// Rings a doorbell by whichever way is set up.
    pub(super) fn ring(&mut self, offset: usize, value: u32) {
        let qid = offset / 8;
        if let Some(page) = &self.page {
            assert!(page.write(0x1000 + offset as u64, &value.to_le_bytes()));
            return;
        }
        if let Some(shadow) = self.shadow
            && qid > 0
        {
            let at = shadow + offset as u64;
            let old = u32::from_le_bytes(self.get(at, 4).try_into().unwrap());
            self.put(at, &value.to_le_bytes());
            let index = self.get(at + 4096, 4);
            let index = u32::from_le_bytes(index.try_into().unwrap());
            if !forebay_nvme::pcie::shadow::rings(index as u16, value as u16, old as u16) {
                return;
            }
        }
        let mut payload = Self::access(pci_region::BAR0, 0x1000 + offset as u64, 4);
        payload.extend(value.to_le_bytes());
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        let size = 16 + payload.len() as u32;
        let header = Header::command(id, command::REGION_WRITE, size, true);
        self.send_raw(&[&header.to_bytes()[..], &payload].concat(), &[]);
    }

    pub(super) fn queue(&mut self, pair: &mut Pair, sqe: &Sqe) {
        self.put(pair.sq + u64::from(pair.tail) * 64, sqe.as_bytes());
        pair.tail = (pair.tail + 1) % pair.entries;
    }

    pub(super) fn submit(&mut self, pair: &mut Pair, sqe: &Sqe) {
        self.queue(pair, sqe);
        self.ring(usize::from(pair.qid) * 8, pair.tail);
    }

    pub(super) fn next(&mut self, pair: &mut Pair) -> Option<Cqe> {
        let bytes = self.get(pair.cq + u64::from(pair.head) * 16, 16);
        let cqe = Cqe::read_from_bytes(&bytes).unwrap();
        if cqe.phase() != pair.phase {
            return None;
        }
        pair.head += 1;
        if pair.head == pair.entries {
            pair.head = 0;
            pair.phase = !pair.phase;
        }
        self.ring(usize::from(pair.qid) * 8 + 4, pair.head);
        Some(cqe)
    }

    #[track_caller]
    pub(super) fn completion(&mut self, rig: &mut Rig, pair: &mut Pair) -> Cqe {
        let mut cqe = None;
        rig.until("a completion", |_| {
            cqe = self.next(pair);
            cqe.is_some()
        });
        cqe.unwrap()
    }

    #[track_caller]
    pub(super) fn run(&mut self, rig: &mut Rig, pair: &mut Pair, sqe: &Sqe) -> Status {
        self.submit(pair, sqe);
        let cqe = self.completion(rig, pair);
        assert_eq!((cqe.cid(), cqe.sqid()), (sqe.cid(), pair.qid));
        cqe.status()
    }

    pub(super) fn admin(&mut self, rig: &mut Rig, sqe: &Sqe) -> Status {
        let mut pair = self.admin;
        let status = self.run(rig, &mut pair, sqe);
        self.admin = pair;
        status
    }

    pub(super) fn make_pair(&mut self, rig: &mut Rig, qid: u16, entries: u32) -> Pair {
        let at = BASE + 0x1_0000 + u64::from(qid) * 0x8000;
        let pair = Pair::new(qid, at, at + 0x4000, entries);
        self.put(pair.cq, &vec![0; entries as usize * 16]);
        let size = u32::from(qid) | (entries - 1) << 16;
        let vector = u32::from(qid).min(3);
        let cq = Sqe::new(admin::CREATE_IO_CQ, 1)
            .with_cdw(10, size)
            .with_cdw(11, 3 | vector << 16);
        assert_eq!(self.admin(rig, &prps(cq, pair.cq, 0)), Status::SUCCESS);
        let sq = Sqe::new(admin::CREATE_IO_SQ, 2)
            .with_cdw(10, size)
            .with_cdw(11, 1 | u32::from(qid) << 16);
        assert_eq!(self.admin(rig, &prps(sq, pair.sq, 0)), Status::SUCCESS);
        pair
    }

    /// Configures shadow doorbells.
    pub(super) fn use_shadow(&mut self, rig: &mut Rig) {
        let at = BASE + 0x8000;
        self.put(at, &[0; 8192]);
        let sqe = prps(Sqe::new(admin::DOORBELL_BUFFER_CONFIG, 3), at, at + 4096);
        assert_eq!(self.admin(rig, &sqe), Status::SUCCESS);
        self.shadow = Some(at);
    }

    /// Maps the doorbell page.
    pub(super) fn map_page(&mut self, rig: &mut Rig) {
        let payload = words(&[64, 0, pci_region::BAR0, 0, 0, 0, 0, 0]);
        let reply = self.call(rig, command::DEVICE_GET_REGION_INFO, &payload, &[]);
        let [fd] = &reply.fds[..] else {
            panic!("one descriptor");
        };
        let mut page = GuestMemory::default();
        let all = NewRegion {
            guest_address: 0x1000,
            user_address: 0,
            len_bytes: 0x1000,
            writable: true,
            file: Some((fd.as_fd(), 0x1000)),
        };
        page.map(&all).unwrap();
        self.page = Some(page);
    }
}

pub(super) fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

pub(super) fn prps(mut sqe: Sqe, prp1: u64, prp2: u64) -> Sqe {
    sqe.dptr[..8].copy_from_slice(&prp1.to_le_bytes());
    sqe.dptr[8..].copy_from_slice(&prp2.to_le_bytes());
    sqe
}

/// Reads or writes one block.
pub(super) fn io(opcode: u8, cid: u16, lba: u64, at: u64) -> Sqe {
    prps(
        Sqe::new(opcode, cid).with_nsid(1).with_cdw64(10, lba),
        at,
        0,
    )
}
