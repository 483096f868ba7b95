//! Clients, their messages and their engine's deaths, with a test protocol.
//!
//! All runs in one thread, which plays client, daemon and reactor, so nothing depends on time.

mod clients;
mod deaths;
mod registered;

use super::file::{MAX_SLOTS, VmFile};
use super::protocol::{Answer, Message, StreamFrame};
use super::*;
use crate::core::DoneIo;
use crate::core::staging::Staging;
use crate::upcall::Upcall;
use forebay_device::ring::{Ring, RingOptions};
use forebay_guest::Area;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::{ExportConfig, ExportId, FrontendKind as Kind};
use forebay_xlate::boundary::region::Region;
use forebay_xlate::kill::{Killed, arm_here};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType,
};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;

const HEADER: usize = 12;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ask {
    /// No answer.
    Post = 1,
    /// Returns its payload.
    Echo = 2,
    /// Maps its descriptor as a page.
    Map = 3,
    /// Unmaps that page.
    Unmap = 4,
    /// Keeps its descriptor in a slot.
    Hold = 5,
    /// Signals the eventfd in a slot.
    Raise = 6,
    /// Answers with a descriptor of the engine's.
    Own = 7,
    /// Pins a page until the test lets go of it.
    Use = 8,
}
use Ask::*;

thread_local! {
    static USED: RefCell<Option<Area>> = const { RefCell::new(None) };
}

struct Toy;

fn word(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..at + 4).and_then(|b| b.try_into().ok());
    u32::from_le_bytes(word.unwrap_or_default())
}

impl Protocol for Toy {
    fn frame(&self, peeked: &[u8]) -> Result<StreamFrame, Closing> {
        match peeked.len() {
            ..HEADER => Ok(StreamFrame::Need(HEADER)),
            _ => Ok(StreamFrame::Whole(HEADER + word(peeked, 8) as usize)),
        }
    }

    fn message(&mut self, turn: &mut Turn<'_>, message: &Message<'_>) -> Answer {
        let (ask, what) = (word(message.bytes, 0), word(message.bytes, 4));
        let client = &mut *turn.client;
        // Counts the handled messages.
        if let Some([count]) = client.file().area::<AtomicU64>(0, 1) {
            count.store(count.load(Relaxed) + 1, Relaxed);
        }
        let first = message.descriptors.first();
        let page = u64::from(what) * 4096;
        let ok = match ask {
            1 => return Answer::Now,
            2 => {
                client.reply.extend_from_slice(message.bytes);
                return Answer::Now;
            }
            3 => client.map(first, page, 4096, 0, true, 0).is_ok(),
            4 => client.unmap(page, 4096) == Some(1),
            5 => client.hold(what as usize, first),
            6 => {
                client.raise(what as usize);
                true
            }
            7 => {
                let own = rustix::fs::memfd_create("own", rustix::fs::MemfdFlags::CLOEXEC);
                match own.ok().and_then(|own| client.deposit_own(own)) {
                    Some(own) => {
                        client.hold(what as usize, Some(&own));
                        client.reply_descriptor = Some(own.fd);
                        true
                    }
                    None => false,
                }
            }
            8 => {
                let area = client.memory().area(page, 4096);
                let found = area.is_some();
                USED.set(area);
                found
            }
            _ => return Answer::Close(Closing("it asks for what there is not")),
        };
        client.reply.extend_from_slice(&u32::from(ok).to_le_bytes());
        Answer::Now
    }

    fn later(&mut self, _: &mut Turn<'_>) -> Answer {
        Answer::Now
    }

    fn poll(&mut self, _: &mut Turn<'_>) -> bool {
        false
    }

    fn has_rung(&self) -> bool {
        false
    }

    fn is_active(&self) -> bool {
        false
    }

    fn arm(&mut self, _: &mut Turn<'_>) -> bool {
        true
    }

    fn ready(&mut self, _: &mut Turn<'_>, _: usize) {}

    fn done(&mut self, _: &mut Turn<'_>, _: DoneIo) {}

    fn resume(&mut self, _: &mut Turn<'_>, _: Option<u16>) -> Result<(), Closing> {
        Ok(())
    }

    fn changed(&mut self, _: &mut Turn<'_>) {}

    fn removed(&mut self, _: &mut Turn<'_>) -> bool {
        false
    }

    fn close(&mut self, _: &mut Turn<'_>) {}

    fn tick(&mut self, _: &mut Turn<'_>) {}

    fn deadline_ns(&self) -> Option<u64> {
        None
    }
}

struct Rig {
    core: Core,
    vms: Vms,
    epoll: Arc<OwnedFd>,
    export: Arc<ExportConfig>,
    client: OwnedFd,
    ours: Arc<OwnedFd>,
    file: OwnedFd,
    deposits: BTreeMap<u32, Arc<OwnedFd>>,
    keeps: bool,
    left: Vec<&'static str>,
}

fn engine() -> (Core, Vms, Arc<OwnedFd>) {
    let region = Arc::new(Region::anonymous(1).unwrap());
    let ring = Ring::new(&RingOptions::default()).unwrap();
    let core = Core::new(0, region, Staging::new().unwrap(), ring);
    let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap());
    let vms = Vms::new(
        FrontendIndex(1),
        epoll.clone(),
        Closer::start().unwrap(),
        |_| Ok(Box::new(Toy)),
    );
    (core, vms, epoll)
}

fn message(ask: Ask, what: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in [ask as u32, what, payload.len() as u32] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.extend_from_slice(payload);
    bytes
}

fn memory() -> OwnedFd {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let fd = rustix::fs::memfd_create("memory", flags).unwrap();
    rustix::fs::ftruncate(&fd, 4096).unwrap();
    fd
}

fn bell() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK).unwrap()
}

impl Rig {
    fn new() -> Self {
        Self::of(Kind::VhostUser {
            queues: 1,
            pinned_memory: false,
        })
    }

    fn of(frontend: Kind) -> Self {
        let (core, vms, epoll) = engine();
        let export = Arc::new(ExportConfig {
            export: ExportId(4),
            volume: VolumeId(9),
            nqn: "nqn.x".into(),
            serial: "s".into(),
            hosts: Default::default(),
            any_host: false,
            frontend,
        });
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, client) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let file = VmFile::create(export.export, export.frontend.word()).unwrap();
        let mut rig = Self {
            core,
            vms,
            epoll,
            export,
            client,
            ours: Arc::new(ours),
            file: file.fd().try_clone_to_owned().unwrap(),
            deposits: BTreeMap::new(),
            keeps: true,
            left: Vec::new(),
        };
        rig.adopt(file, None, None);
        rig
    }

    fn adopt(
        &mut self,
        file: VmFile,
        inherited: Option<BTreeMap<u32, Arc<OwnedFd>>>,
        blamed: Option<Option<u16>>,
    ) {
        let new = NewVm {
            socket: 1,
            fd: self.ours.clone(),
            export: self.export.clone(),
            file,
            inherited,
            blamed,
        };
        self.core.begin_turn();
        self.vms.adopt(&mut self.core, new);
    }

    fn succeed(&mut self, blamed: Option<Option<u16>>) {
        let (core, vms, epoll) = engine();
        // As after a kill: no destructor runs.
        std::mem::forget(std::mem::replace(&mut self.core, core));
        std::mem::replace(&mut self.vms, vms).die();
        self.epoll = epoll;
        let file = self.vm_file();
        let deposits = self.deposits.clone();
        self.adopt(file, Some(deposits), blamed);
    }

    fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let flags = SendFlags::NOSIGNAL;
        let sent = rustix::net::sendmsg(&self.client, &[IoSlice::new(bytes)], &mut control, flags);
        assert_eq!(sent, Ok(bytes.len()));
    }

    /// All unread answers.
    fn answers(&self) -> Vec<u8> {
        let mut all = Vec::new();
        let mut bytes = [0u8; 4096];
        loop {
            match rustix::net::recv(&self.client, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((n, _)) if n > 0 => all.extend_from_slice(&bytes[..n]),
                Ok(_) | Err(Errno::AGAIN) => return all,
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn turn(&mut self) -> bool {
        self.core.begin_turn();
        let mut events = Vec::with_capacity(16);
        let none = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let spare = rustix::buffer::spare_capacity(&mut events);
        let _ = epoll::wait(&*self.epoll, spare, Some(&none));
        let keys: Vec<u64> = events.iter().map(|e: &epoll::Event| e.data.u64()).collect();
        self.vms.sockets_ready(&mut self.core, &keys);
        let mut any = self.vms.poll_all(&mut self.core) || !keys.is_empty();
        while let Some(upcall) = self.core.upcalls.pop_front() {
            any = true;
            match upcall {
                Upcall::Deposits(socket, deposits) => {
                    let last = deposits.last().unwrap().number;
                    if self.keeps {
                        let kept = deposits.into_iter().map(|d| (d.number, d.fd));
                        self.deposits.extend(kept);
                    }
                    self.vms.deposited(socket, last, self.keeps);
                }
                Upcall::Withdrawn(_, numbers) => {
                    self.deposits.retain(|number, _| !numbers.contains(number));
                }
                Upcall::VmDetached(_, _, why) => self.left.push(why.0),
                _ => {}
            }
        }
        any
    }

    fn run(&mut self) {
        for _ in crate::patience::patiently() {
            if !self.turn() && self.vms.is_idle() {
                return;
            }
        }
        panic!("it never comes to rest");
    }

    /// Runs until idle; true if the engine died instead.
    fn dies(&mut self) -> bool {
        match catch_unwind(AssertUnwindSafe(|| self.run())) {
            Ok(()) => false,
            Err(payload) if payload.is::<Killed>() => true,
            Err(payload) => std::panic::resume_unwind(payload),
        }
    }

    fn vm_file(&self) -> VmFile {
        let file = self.file.try_clone().unwrap();
        let word = self.export.frontend.word();
        VmFile::adopt(file, self.export.export, word).unwrap()
    }

    fn client(&mut self) -> &mut Client {
        let vm = self.vms.all.iter_mut().flatten().next();
        &mut vm.expect("it is served").client
    }

    fn pages(&mut self) -> Vec<u64> {
        let client = self.client();
        let mapped = client.memory().regions().iter();
        let mapped: Vec<u64> = mapped.map(|r| r.guest_address() / 4096).collect();
        let mut recorded: Vec<u64> = (client.file().regions())
            .map(|(_, r)| r.address / 4096)
            .collect();
        recorded.sort_unstable();
        assert_eq!(mapped, recorded);
        mapped
    }

    fn slots(&mut self) -> Vec<usize> {
        let client = self.client();
        (0..MAX_SLOTS)
            .filter(|slot| client.held(*slot).is_some())
            .collect()
    }
}
