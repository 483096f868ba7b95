//! A vhost-user client with its guest's driver: messages, rings, requests.
//!
//! Functions that need the reactor's turns take the [`Rig`]. **Not here:** hot-plugged memory
//! ([`super::memory`]).

use super::rig::Rig;
use forebay_virtio::feature;
use forebay_virtio::inflight::queue_bytes;
use forebay_virtio::model::{Driver, GUEST_ADDRESS, Layout, Offered, USER_ADDRESS, Vm};
use forebay_virtio::ring::RingFeatures;
use forebay_virtio::vhost_user::message::{CALL_BYTES, request, vring_call};
use forebay_virtio::vhost_user::protocol_feature;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType,
};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

pub(super) const SIZE: u16 = 8;
/// Where headers, statuses and data of requests are.
const DATA_AT: usize = 64 << 10;
const REQUEST_BYTES: usize = 8192;
pub(super) const MEMORY_BYTES: u64 = 16 << 20;

/// A client's configuration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    pub packed: bool,
    pub event_idx: bool,
    pub queues: u16,
    /// It asks for an inflight region.
    pub inflight: bool,
    pub in_band: bool,
    /// Descriptors per ring.
    pub size: u16,
}

pub(super) const PLAIN: Way = Way {
    packed: false,
    event_idx: false,
    queues: 1,
    inflight: false,
    in_band: false,
    size: SIZE,
};

/// A region as in messages: guest address, bytes, client address, file offset.
pub(super) type Region = [u64; 4];
/// A guest's initial memory.
pub(super) const ALL: Region = [GUEST_ADDRESS, MEMORY_BYTES, USER_ADDRESS, 0];

/// SET_MEM_TABLE's payload.
pub(super) fn table(regions: &[Region]) -> Vec<u8> {
    let mut bytes = (regions.len() as u64).to_le_bytes().to_vec();
    for word in regions.iter().flatten() {
        bytes.extend(word.to_le_bytes());
    }
    bytes
}

pub(super) struct Guest {
    pub way: Way,
    pub socket: OwnedFd,
    pub vm: Vm,
    pub drivers: Vec<Driver>,
    pub kicks: Vec<OwnedFd>,
    pub calls: Vec<OwnedFd>,
    /// The backend channel, and the calls that it brought, by queue.
    pub channel: Option<OwnedFd>,
    called: RefCell<Vec<u64>>,
    requests: usize,
    /// Open requests: queue and chain number to request.
    open: BTreeMap<(usize, u64), usize>,
}

impl Rig {
    /// A client that has begun to use its disk.
    pub(super) fn guest(&mut self, way: Way) -> Guest {
        let socket = self.accept();
        let vm = Vm::new(MEMORY_BYTES);
        let mut guest = Guest {
            way,
            socket,
            vm,
            drivers: Vec::new(),
            kicks: Vec::new(),
            calls: Vec::new(),
            channel: None,
            called: RefCell::new(vec![0; usize::from(way.queues)]),
            requests: 0,
            open: BTreeMap::new(),
        };
        guest.negotiate(self);
        if way.in_band {
            guest.open_channel(self);
        }
        let mut at = 0;
        for index in 0..way.queues {
            let layout = Layout::new(at, way.size);
            at = layout.end.next_multiple_of(64);
            assert!(at <= DATA_AT);
            let features = RingFeatures {
                event_idx: way.event_idx,
                indirect: true,
            };
            let all = &guest.vm.all;
            let driver = Driver::new(all, layout, way.size, way.packed, features);
            guest.drivers.push(driver);
            guest.start_ring(self, index, &layout);
        }
        guest
    }
}

impl Guest {
    pub(super) fn send(&self, kind: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        self.send_flags(kind, payload, fds, 0);
    }

    fn send_flags(&self, kind: u32, payload: &[u8], fds: &[BorrowedFd<'_>], flags: u32) {
        let mut bytes = Vec::new();
        for word in [kind, 1 | flags, payload.len() as u32] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let slices = [IoSlice::new(&bytes)];
        let sent = rustix::net::sendmsg(&self.socket, &slices, &mut control, SendFlags::NOSIGNAL);
        assert_eq!(sent.unwrap(), bytes.len());
    }

    pub(super) fn answer(&self, rig: &mut Rig) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        let mut len = 0;
        rig.until("an answer", |_| {
            match rustix::net::recv(&self.socket, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((n, _)) => {
                    len = n;
                    true
                }
                Err(_) => false,
            }
        });
        assert!(len >= 12, "the socket was closed: {:?}", rig.left);
        bytes[12..len].to_vec()
    }

    pub(super) fn has_answer(&self) -> bool {
        let mut byte = [0];
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        rustix::net::recv(&self.socket, &mut byte[..], flags).is_ok()
    }

    pub(super) fn is_shut_out(&self) -> bool {
        let mut byte = [0];
        let received = rustix::net::recv(&self.socket, &mut byte[..], RecvFlags::DONTWAIT);
        matches!(received, Ok((0, _)))
    }

    /// Sends a message with acknowledgement; returns the answer.
    pub(super) fn report(
        &self,
        rig: &mut Rig,
        kind: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> u64 {
        self.begin(kind, payload, fds);
        self.reported(rig)
    }

    pub(super) fn begin(&self, kind: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        self.send_flags(kind, payload, fds, 1 << 3);
    }

    /// Waits for the acknowledgement: 0 on success.
    pub(super) fn reported(&self, rig: &mut Rig) -> u64 {
        let answer = self.answer(rig);
        u64::from_le_bytes(answer.try_into().unwrap())
    }

    pub(super) fn ok(&self, rig: &mut Rig, kind: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        assert_eq!(self.report(rig, kind, payload, fds), 0, "refused: {kind}");
    }

    pub(super) fn ask(&self, rig: &mut Rig, kind: u32, payload: &[u8]) -> Vec<u8> {
        self.send(kind, payload, &[]);
        self.answer(rig)
    }

    fn negotiate(&self, rig: &mut Rig) {
        let offered = self.ask(rig, request::GET_FEATURES, &[]);
        let mut bits = u64::from_le_bytes(offered.try_into().unwrap());
        if !self.way.packed {
            bits &= !feature::RING_PACKED;
        }
        if !self.way.event_idx {
            bits &= !feature::EVENT_IDX;
        }
        let mut protocol = protocol_feature::ALL;
        if !self.way.inflight {
            protocol &= !protocol_feature::INFLIGHT_SHMFD;
        }
        self.send(request::SET_PROTOCOL_FEATURES, &protocol.to_le_bytes(), &[]);
        self.ok(rig, request::SET_OWNER, &[], &[]);
        self.ok(rig, request::SET_FEATURES, &bits.to_le_bytes(), &[]);
        self.set_memory(rig);
        if self.way.inflight {
            self.get_inflight(rig);
        }
    }

    /// Asks for an inflight region, which the device keeps, too.
    pub(super) fn get_inflight(&self, rig: &mut Rig) {
        let bytes = u64::from(self.way.queues) * queue_bytes(self.way.size) as u64;
        let mut area = vec![];
        area.extend(0u64.to_le_bytes());
        area.extend(0u64.to_le_bytes());
        area.extend(self.way.queues.to_le_bytes());
        area.extend(self.way.size.to_le_bytes());
        let answer = self.ask(rig, request::GET_INFLIGHT_FD, &area);
        assert_eq!(answer[..8], bytes.to_le_bytes());
    }

    /// Gives the device a backend channel.
    pub(super) fn open_channel(&mut self, rig: &mut Rig) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (mine, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let fd = [theirs.as_fd()];
        self.ok(rig, request::SET_BACKEND_REQ_FD, &[], &fd);
        self.channel = Some(mine);
    }

    pub(super) fn set_memory(&self, rig: &mut Rig) {
        let table = table(&[ALL]);
        let fds = [self.vm.file.as_fd()];
        self.ok(rig, request::SET_MEM_TABLE, &table, &fds);
    }

    fn start_ring(&mut self, rig: &mut Rig, index: u16, layout: &Layout) {
        let base = if self.way.packed { 0x8000_8000 } else { 0 };
        self.start_ring_at(rig, index, layout, base);
    }

    /// Starts a ring at this base.
    pub(super) fn start_ring_at(&mut self, rig: &mut Rig, index: u16, layout: &Layout, base: u32) {
        let state = |value: u32| {
            let mut bytes = u32::from(index).to_le_bytes().to_vec();
            bytes.extend(value.to_le_bytes());
            bytes
        };
        self.ok(
            rig,
            request::SET_VRING_NUM,
            &state(u32::from(self.way.size)),
            &[],
        );
        self.ok(rig, request::SET_VRING_BASE, &state(base), &[]);
        self.set_addresses(
            rig,
            index,
            [layout.descriptors, layout.device, layout.driver],
        );
        if self.way.in_band {
            self.ok(rig, request::SET_VRING_ENABLE, &state(1), &[]);
            self.ok(rig, request::VRING_KICK, &state(0), &[]);
            return;
        }
        let event = || eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
        if self.kicks.len() == usize::from(index) {
            self.kicks.push(event());
            self.calls.push(event());
        }
        let queue = u64::from(index).to_le_bytes();
        let call = [self.calls[usize::from(index)].as_fd()];
        self.ok(rig, request::SET_VRING_CALL, &queue, &call);
        let kick = [self.kicks[usize::from(index)].as_fd()];
        self.ok(rig, request::SET_VRING_KICK, &queue, &kick);
        self.ok(rig, request::SET_VRING_ENABLE, &state(1), &[]);
    }

    /// SET_VRING_ADDR, with offsets from the memory's start.
    pub(super) fn set_addresses(&self, rig: &mut Rig, index: u16, parts: [usize; 3]) {
        let bytes = self.addresses(index, parts);
        self.ok(rig, request::SET_VRING_ADDR, &bytes, &[]);
    }

    pub(super) fn addresses(&self, index: u16, parts: [usize; 3]) -> Vec<u8> {
        let mut bytes = u32::from(index).to_le_bytes().to_vec();
        bytes.extend(0u32.to_le_bytes());
        for at in parts {
            bytes.extend((USER_ADDRESS + at as u64).to_le_bytes());
        }
        bytes.extend(0u64.to_le_bytes());
        bytes
    }

    pub(super) fn request_at(request: usize) -> usize {
        DATA_AT + request * REQUEST_BYTES
    }

    /// Offers a request with one piece of data; returns its number.
    pub(super) fn offer(&mut self, queue: usize, kind: u32, sector: u64, data: Data<'_>) -> usize {
        let request = self.requests;
        self.requests += 1;
        let at = Self::request_at(request);
        let mut header = kind.to_le_bytes().to_vec();
        header.extend(0u32.to_le_bytes());
        header.extend(sector.to_le_bytes());
        assert!(self.vm.all.write(at, &header));
        assert!(self.vm.all.write(at + 16, &[0xEE]));
        let piece = |from: usize, len: usize, writable| Offered {
            address: GUEST_ADDRESS + from as u64,
            len: len as u32,
            writable,
        };
        let mut pieces = vec![piece(at, 16, false)];
        match data {
            Data::Out(bytes) => {
                assert!(self.vm.all.write(at + 4096, bytes));
                pieces.push(piece(at + 4096, bytes.len(), false));
            }
            Data::In(len) => pieces.push(piece(at + 4096, len, true)),
            Data::At(address, len) => pieces.push(Offered {
                address,
                len,
                writable: kind == 0,
            }),
            Data::None => {}
        }
        pieces.push(piece(at + 16, 1, true));
        let offered = self.drivers[queue].offer(&pieces, false);
        let number = offered.expect("room in the queue");
        self.open.insert((queue, number), request);
        request
    }

    /// Offers 4 KiB by an indirect chain at a reused place; not for use with [`Guest::collect`].
    pub(super) fn offer_again(&mut self, request: usize, kind: u32, sector: u64) {
        let at = Self::request_at(request);
        let mut header = kind.to_le_bytes().to_vec();
        header.extend(0u32.to_le_bytes());
        header.extend(sector.to_le_bytes());
        assert!(self.vm.all.write(at, &header));
        let piece = |from: usize, len: u32, writable| Offered {
            address: GUEST_ADDRESS + from as u64,
            len,
            writable,
        };
        let data = piece(at + 4096, 4096, kind == 0);
        let pieces = [piece(at, 16, false), data, piece(at + 16, 1, true)];
        assert!(self.drivers[0].offer(&pieces, true).is_some());
    }

    /// Kicks if the device asked for it; returns whether it did.
    pub(super) fn kick(&mut self, queue: usize) -> bool {
        let must = self.drivers[queue].must_kick();
        if must && self.way.in_band {
            let state = (queue as u64).to_le_bytes();
            self.send(request::VRING_KICK, &state, &[]);
        } else if must {
            rustix::io::write(&self.kicks[queue], &1u64.to_ne_bytes()).unwrap();
        }
        must
    }

    /// A returned request, its status and the bytes written.
    pub(super) fn collect(&mut self, queue: usize) -> Option<(usize, u8, u32)> {
        let (number, written) = self.drivers[queue].collect()?;
        let request = self.open.remove(&(queue, number)).expect("returned once");
        let mut status = [0];
        let at = Self::request_at(request);
        assert!(self.vm.all.read(at + 16, &mut status));
        Some((request, status[0], written))
    }

    pub(super) fn end(&mut self, rig: &mut Rig, queue: usize) -> (usize, u8, u32) {
        let mut ended = None;
        rig.until("a request's end", |_| {
            ended = self.collect(queue);
            ended.is_some()
        });
        ended.expect("it ended")
    }

    pub(super) fn data(&self, request: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        assert!(
            self.vm
                .all
                .read(Self::request_at(request) + 4096, &mut bytes)
        );
        bytes
    }

    /// Calls since the last check.
    pub(super) fn calls(&self, queue: usize) -> u64 {
        if let Some(channel) = &self.channel {
            let mut message = [0; CALL_BYTES];
            while let Ok((n, _)) = rustix::net::recv(channel, &mut message[..], RecvFlags::DONTWAIT)
            {
                assert_eq!(n, message.len(), "the channel ended");
                let called = u16::from_le_bytes([message[12], message[13]]);
                assert_eq!(message, vring_call(called));
                self.called.borrow_mut()[usize::from(called)] += 1;
            }
            return std::mem::take(&mut self.called.borrow_mut()[queue]);
        }
        let mut bytes = [0; 8];
        match rustix::io::read(&self.calls[queue], &mut bytes) {
            Ok(8) => u64::from_ne_bytes(bytes),
            _ => 0,
        }
    }
}

pub(super) enum Data<'a> {
    None,
    Out(&'a [u8]),
    In(usize),
    /// Guest address and bytes, chosen by the test.
    At(u64, u32),
}
