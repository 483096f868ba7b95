//! Clients, their messages and their deaths, with a frontend of our own.
//!
//! **Design.** All in one thread: the test is the client at the other end of the socket, the daemon that keeps
//! deposits, and whoever gives the reactor its turns; so nothing depends on time. **Not here:** real
//! protocols.

use super::file::MAX_SLOTS;
use super::frontend::{Answer, Frame, Message};
use super::*;
use crate::core::DoneIo;
use crate::core::staging::Staging;
use forebay_device::ring::{Ring, RingOptions};
use forebay_guest::Area;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::region::Region;
use forebay_xlate::kill::{Killed, arm_here};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType,
};
use std::cell::RefCell;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;

const HEADER: usize = 12;

/// What a message of the test's asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ask {
    /// Nothing, and no answer.
    Post = 1,
    /// Its own bytes back.
    Echo = 2,
    /// Its descriptor as a page of memory.
    Map = 3,
    /// No such page any more.
    Unmap = 4,
    /// Its descriptor kept in a slot.
    Hold = 5,
    /// The eventfd in a slot rung.
    Raise = 6,
    /// A descriptor of our own.
    Own = 7,
    /// A page used until the test lets go of it.
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

impl Frontend for Toy {
    fn frame(&self, peeked: &[u8]) -> Result<Frame, Closing> {
        match peeked.len() {
            ..HEADER => Ok(Frame::Need(HEADER)),
            _ => Ok(Frame::Whole(HEADER + word(peeked, 8) as usize)),
        }
    }

    fn message(&mut self, turn: &mut Turn<'_>, message: &Message<'_>) -> Answer {
        let (ask, what) = (word(message.bytes, 0), word(message.bytes, 4));
        let client = &mut *turn.client;
        // Which were carried out, and how often.
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
    machines: Machines,
    epoll: Arc<OwnedFd>,
    export: Arc<ExportConfig>,
    client: OwnedFd,
    ours: Arc<OwnedFd>,
    file: OwnedFd,
    deposits: BTreeMap<u32, Arc<OwnedFd>>,
    /// The daemon takes deposits, or has no room for them.
    keeps: bool,
    left: Vec<&'static str>,
}

fn engine() -> (Core, Machines, Arc<OwnedFd>) {
    let region = Arc::new(Region::anonymous(1).unwrap());
    let ring = Ring::new(&RingOptions::default()).unwrap();
    let core = Core::new(0, region, Staging::new().unwrap(), ring);
    let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap());
    let machines = Machines::with(epoll.clone(), Closer::start().unwrap(), |_| {
        Ok(Box::new(Toy))
    });
    (core, machines, epoll)
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
        let (core, machines, epoll) = engine();
        let export = Arc::new(ExportConfig {
            export: ExportId(4),
            volume: VolumeId(9),
            nqn: "nqn.x".into(),
            serial: "s".into(),
            hosts: vec![],
            any_host: false,
            frontend,
        });
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, client) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let file = MachineFile::create(export.export, export.frontend.word()).unwrap();
        let mut rig = Self {
            core,
            machines,
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
        file: MachineFile,
        inherited: Option<BTreeMap<u32, Arc<OwnedFd>>>,
        blamed: Option<Option<u16>>,
    ) {
        let new = NewMachine {
            socket: 1,
            fd: self.ours.clone(),
            export: self.export.clone(),
            file,
            inherited,
            blamed,
        };
        self.core.begin_turn();
        self.machines.adopt(&mut self.core, new);
    }

    /// The engine is dead: another goes on.
    fn succeed(&mut self, blamed: Option<Option<u16>>) {
        let (core, machines, epoll) = engine();
        // Nothing of a dead one is put in order.
        std::mem::forget(std::mem::replace(&mut self.core, core));
        std::mem::replace(&mut self.machines, machines).die();
        self.epoll = epoll;
        let file = self.file.try_clone().unwrap();
        let word = self.export.frontend.word();
        let file = MachineFile::adopt(file, self.export.export, word).unwrap();
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

    /// Everything that was answered and not read yet.
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
        self.machines.ready(&mut self.core, &keys);
        let mut any = self.machines.poll(&mut self.core) || !keys.is_empty();
        while let Some(upcall) = self.core.next_upcall() {
            any = true;
            match upcall {
                Upcall::Deposits(socket, deposits) => {
                    let last = deposits.last().unwrap().number;
                    if self.keeps {
                        let kept = deposits.into_iter().map(|d| (d.number, d.fd));
                        self.deposits.extend(kept);
                    }
                    self.machines.deposited(socket, last, self.keeps);
                }
                Upcall::Withdrawn(_, numbers) => {
                    self.deposits.retain(|number, _| !numbers.contains(number));
                }
                Upcall::MachineLeft(_, _, why) => self.left.push(why.0),
                _ => {}
            }
        }
        any
    }

    /// Turns until there is nothing to do.
    fn run(&mut self) {
        for _ in crate::patience::patiently() {
            if !self.turn() && self.machines.is_idle() {
                return;
            }
        }
        panic!("it never comes to rest");
    }

    /// Turns until there is nothing to do; true if it died instead.
    fn dies(&mut self) -> bool {
        match catch_unwind(AssertUnwindSafe(|| self.run())) {
            Ok(()) => false,
            Err(payload) if payload.is::<Killed>() => true,
            Err(payload) => std::panic::resume_unwind(payload),
        }
    }

    fn client(&mut self) -> &mut Client {
        let machine = self.machines.all.iter_mut().flatten().next();
        &mut machine.expect("it is served").client
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

/// What the client of [`wherever_it_dies`] says, and what it is answered.
fn script() -> Vec<(Vec<u8>, Option<OwnedFd>, Vec<u8>)> {
    let yes = 1u32.to_le_bytes().to_vec();
    let echo = message(Echo, 0, b"whatever");
    vec![
        (message(Post, 0, b"x"), None, vec![]),
        (message(Map, 1, b""), Some(memory()), yes.clone()),
        (echo.clone(), None, echo),
        (message(Hold, 3, b""), Some(bell()), yes.clone()),
        (message(Map, 2, b""), Some(memory()), yes.clone()),
        (message(Unmap, 1, b""), None, yes.clone()),
        (message(Own, 5, b""), None, yes.clone()),
        (message(Post, 0, b""), Some(bell()), vec![]),
        (message(Hold, 3, b""), Some(bell()), yes.clone()),
        (message(Map, 1, b""), Some(memory()), yes),
    ]
}

fn wherever_it_dies(point: &str, at_once: bool) {
    let all = script().len();
    for at in 1..=all as u32 {
        // Whether an answer with a descriptor was sent is known only if the client had nothing unread before.
        if at_once && point == "vm.sent" && script()[at as usize - 1].0[0] == Own as u8 {
            continue;
        }
        let mut rig = Rig::new();
        let mut deaths = 0;
        arm_here(point, at);
        let mut expected = Vec::new();
        let mut answers = Vec::new();
        for (bytes, fd, answer) in script() {
            let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
            rig.send(&bytes, &fds);
            expected.extend_from_slice(&answer);
            if at_once {
                continue;
            }
            while rig.dies() {
                deaths += 1;
                rig.succeed(None);
            }
            answers.extend(rig.answers());
        }
        while rig.dies() {
            deaths += 1;
            rig.succeed(None);
        }
        answers.extend(rig.answers());
        arm_here("over.adopted", 0);
        assert_eq!(rig.left, [""; 0], "{point} {at}");
        assert_eq!(deaths, 1, "{point} {at}");
        assert_eq!(answers, expected, "{point} {at}");
        assert_eq!(rig.pages(), [1, 2], "{point} {at}");
        assert_eq!(rig.slots(), [3, 5], "{point} {at}");
        // What is in use is with the daemon, and nothing else.
        assert_eq!(rig.deposits.len(), 4, "{point} {at}");
        assert_eq!(rig.client().deposits.len(), 4, "{point} {at}");
        // Rings what the last message gave.
        rig.send(&message(Raise, 3, b""), &[]);
        rig.run();
        assert_eq!(rig.answers(), 1u32.to_le_bytes());
    }
}

#[test]
fn a_message_is_answered_once_wherever_the_engine_dies() {
    for point in [
        "vm.deposited",
        "vm.intent",
        "vm.applied",
        "vm.sent",
        "vm.answered",
        "vm.consumed",
    ] {
        wherever_it_dies(point, false);
        wherever_it_dies(point, true);
    }
}

impl Rig {
    /// Turns until so many bytes of its client's memory are registered; false where the kernel can't.
    fn registers(&mut self, bytes: u64) {
        for _ in crate::patience::patiently() {
            self.turn();
            if self
                .machines
                .all
                .iter()
                .flatten()
                .next()
                .map(|m| m.client.registered_bytes())
                == Some(bytes)
            {
                return;
            }
        }
        panic!("{bytes} bytes are not registered");
    }
}

fn touched() -> OwnedFd {
    let memory = memory();
    rustix::io::pwrite(&memory, &[1; 4096], 0).unwrap();
    memory
}

#[test]
fn memory_is_registered_behind_the_clients_back_and_forgotten_with_it() {
    let mut rig = Rig::of(Kind::NvmePcie {
        mapped_doorbells: false,
    });
    let yes = 1u32.to_le_bytes();
    for page in [1, 2] {
        rig.send(&message(Map, page, b""), &[touched().as_fd()]);
    }
    // One that its client has not touched is left alone.
    rig.send(&message(Map, 3, b""), &[memory().as_fd()]);
    rig.run();
    assert_eq!(rig.answers(), [yes, yes, yes].concat(), "at once");
    if !can_register() {
        println!("skipped: registered memory needs Linux 6.13");
        return;
    }
    rig.registers(2 * 4096);
    // A successor serves, and registers again meanwhile.
    rig.succeed(None);
    assert_eq!(rig.client().registered_bytes(), 0);
    rig.send(&message(Echo, 0, b"x"), &[]);
    rig.run();
    assert_eq!(rig.answers(), message(Echo, 0, b"x"));
    rig.registers(2 * 4096);
    // What is unmapped is forgotten before the answer; what is used is waited for.
    rig.send(&message(Use, 2, b""), &[]);
    rig.run();
    rig.answers();
    rig.send(&message(Unmap, 2, b""), &[]);
    for _ in 0..10 {
        rig.turn();
        assert!(rig.answers().is_empty());
        assert_eq!(rig.client().registered_bytes(), 2 * 4096);
    }
    USED.set(None);
    let mut answered = Vec::new();
    for _ in crate::patience::patiently() {
        rig.turn();
        answered = rig.answers();
        if !answered.is_empty() {
            break;
        }
    }
    assert_eq!(answered, yes);
    assert_eq!(rig.client().registered_bytes(), 4096);
    // And with the client all of it.
    drop(std::mem::replace(&mut rig.client, bell()));
    for _ in crate::patience::patiently() {
        rig.turn();
        if !rig.left.is_empty() {
            break;
        }
    }
    assert_eq!(rig.left.len(), 1);
}

#[test]
fn memory_that_its_client_may_take_pages_out_of_is_not_registered() {
    let mut rig = Rig::new();
    rig.send(&message(Map, 1, b""), &[touched().as_fd()]);
    rig.run();
    rig.answers();
    assert!(!rig.client().has_memory_registered());
    let mut promised = Rig::of(Kind::VhostUser {
        queues: 1,
        pinned_memory: true,
    });
    assert!(promised.client().has_memory_registered());
}

fn can_register() -> bool {
    let memory = forebay_device::mem::StaticRegion::anonymous(4096).unwrap();
    let pinned = forebay_device::Pinned::of_region(&memory).unwrap();
    let mut ring = Ring::new(&RingOptions::default()).unwrap();
    ring.register(pinned).is_ok()
}

#[test]
fn an_answer_that_was_read_is_not_sent_again() {
    let mut rig = Rig::new();
    for round in 0..200u32 {
        let echo = message(Echo, round, &vec![round as u8; 1000 + round as usize]);
        arm_here("vm.sent", 1);
        rig.send(&echo, &[]);
        assert!(rig.dies());
        assert_eq!(rig.answers(), echo, "read before anybody looks");
        rig.succeed(None);
        rig.run();
        assert_eq!(rig.answers(), [0; 0]);
    }
    assert_eq!(rig.left, [""; 0]);
}

#[test]
fn an_answer_with_a_descriptor_that_may_have_been_read_ends_the_client() {
    let mut rig = Rig::new();
    arm_here("vm.sent", 1);
    rig.send(&message(Own, 5, b""), &[]);
    assert!(rig.dies());
    assert!(
        !rig.answers().is_empty(),
        "it was sent, and is read before anybody looks"
    );
    rig.succeed(None);
    rig.run();
    assert_eq!(rig.left.len(), 1);
    assert!(rig.left[0].contains("not known"), "{}", rig.left[0]);
    assert_eq!(rig.machines.count(), 0);
}

#[test]
fn who_crashes_engines_by_a_message_is_closed() {
    let mut rig = Rig::new();
    arm_here("vm.intent", 1);
    rig.send(&message(Echo, 0, b"x"), &[]);
    assert!(rig.dies());
    arm_here("vm.intent", 1);
    rig.succeed(Some(None));
    assert!(rig.dies(), "once more");
    rig.succeed(Some(None));
    rig.run();
    assert_eq!(rig.left.len(), 1);
    assert!(rig.left[0].contains("crashed"), "{}", rig.left[0]);
    // A death that is not its fault changes nothing.
    let mut rig = Rig::new();
    for _ in 0..5 {
        arm_here("vm.intent", 1);
        rig.send(&message(Post, 0, b""), &[]);
        assert!(rig.dies());
        rig.succeed(None);
    }
    arm_here("vm.intent", 0);
    rig.run();
    assert_eq!(rig.left, [""; 0]);
}

#[test]
fn messages_come_in_any_pieces() {
    // Each byte by itself, the descriptor with the first.
    let mut rig = Rig::new();
    let fd = memory();
    let bytes = message(Map, 1, b"more");
    for (at, byte) in bytes.iter().enumerate() {
        let fds = [fd.as_fd()];
        rig.send(&[*byte], if at == 0 { &fds } else { &[] });
        rig.run();
    }
    assert_eq!(rig.answers(), 1u32.to_le_bytes());
    // Many at once, with descriptors among them that are each its own message's.
    let mut expected = Vec::new();
    for page in 2..9 {
        let many: Vec<u8> = (0..30).flat_map(|_| message(Post, 0, b"abc")).collect();
        rig.send(&many, &[]);
        rig.send(&message(Map, page, b"zz"), &[memory().as_fd()]);
        rig.send(&message(Map, 20 + page, b""), &[memory().as_fd()]);
        rig.send(&message(Map, 100, b""), &[]);
        // Without a descriptor it is known, and can't be reached; twice it can't be.
        let known = u32::from(page == 2);
        for answer in [1, 1, known] {
            expected.extend_from_slice(&answer.to_le_bytes());
        }
    }
    rig.run();
    assert_eq!(rig.answers(), expected);
    let pages = rig.pages();
    assert_eq!(pages.len(), 16, "{pages:?}");
    for (at, region) in rig.client().memory().regions().iter().enumerate() {
        assert_eq!(region.mapping().is_some(), at != 15);
    }
    // More than one glance takes, and a descriptor behind it.
    let many: Vec<u8> = (0..1000).flat_map(|_| message(Post, 0, b"abc")).collect();
    rig.send(&many, &[]);
    rig.send(&message(Map, 150, b""), &[memory().as_fd()]);
    rig.send(&message(Map, 151, b""), &[]);
    rig.run();
    assert_eq!(rig.answers(), [1u32.to_le_bytes(); 2].concat());
    let regions = rig.client().memory().regions();
    let reached = |page: u64| {
        let region = regions.iter().find(|r| r.guest_address() == page * 4096);
        region.unwrap().mapping().is_some()
    };
    assert!(reached(150) && !reached(151));
    // A header in one piece and its descriptor with the rest.
    rig.send(&message(Map, 200, b"rest")[..HEADER], &[]);
    rig.run();
    rig.send(b"rest", &[memory().as_fd()]);
    rig.run();
    assert_eq!(rig.answers(), 1u32.to_le_bytes());
    let reached = rig
        .client()
        .memory()
        .regions()
        .last()
        .unwrap()
        .mapping()
        .is_some();
    assert!(reached && rig.left.is_empty());
}

#[test]
fn more_messages_than_a_turn_takes_are_all_taken() {
    let mut rig = Rig::new();
    let many: Vec<u8> = (0..200).flat_map(|_| message(Post, 0, b"")).collect();
    rig.send(&many, &[]);
    rig.run();
    let [count] = rig.client().file().area::<AtomicU64>(0, 1).unwrap() else {
        panic!("one");
    };
    assert_eq!(count.load(Relaxed), 200);
}

#[test]
fn hostile_descriptors_end_their_client() {
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    let inet = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let on_disk: OwnedFd = std::fs::File::open("/proc/self/status").unwrap().into();
    let flags = rustix::fs::OFlags::PATH;
    let path = rustix::fs::open("/dev/shm", flags, rustix::fs::Mode::empty()).unwrap();
    for fd in [pipe, inet, set, on_disk, path] {
        let mut rig = Rig::new();
        rig.send(&message(Hold, 1, b""), &[fd.as_fd()]);
        rig.run();
        assert_eq!(rig.left.len(), 1, "{fd:?}");
        assert!(rig.left[0].contains("descriptor"), "{}", rig.left[0]);
        assert!(rig.deposits.is_empty());
    }
    // A blocking eventfd that is full is rung all the same; memory without a seal is memory.
    let mut rig = Rig::new();
    let full = eventfd(0, EventfdFlags::empty()).unwrap();
    rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    rig.send(&message(Hold, 1, b""), &[full.as_fd()]);
    rig.send(&message(Raise, 1, b""), &[]);
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(4096).unwrap();
    rig.send(&message(Map, 1, b""), &[file.as_fd()]);
    rig.run();
    assert_eq!(rig.answers(), [1u32.to_le_bytes(); 3].concat());
    // It is shrunk: what is read there is zeros, and the client is closed.
    rig.send(&message(Use, 1, b""), &[]);
    rig.run();
    file.set_len(0).unwrap();
    let mut bytes = [1u8; 8];
    assert!(USED.take().unwrap().read(0, &mut bytes));
    assert_eq!(bytes, [0; 8]);
    rig.run();
    assert_eq!(rig.left, ["its memory's file was cut off"]);
}

#[test]
fn deposits_are_bounded() {
    let mut rig = Rig::new();
    let bells: Vec<OwnedFd> = (0..client::MAX_DESCRIPTORS + 1).map(|_| bell()).collect();
    let fds: Vec<_> = bells.iter().map(AsFd::as_fd).collect();
    rig.send(&message(Post, 0, b""), &fds[1..]);
    rig.run();
    assert!(
        rig.left.is_empty() && rig.deposits.is_empty(),
        "nothing holds them"
    );
    assert!(rig.client().deposits.is_empty());
    for _ in 0..client::MAX_DEPOSITS {
        assert!(rig.client().deposit(Arc::new(bell())).is_some());
    }
    assert!(rig.client().deposit(Arc::new(bell())).is_none());
    rig.send(&message(Post, 0, b""), &fds);
    rig.run();
    assert_eq!(rig.left, ["it sent more descriptors than it may"]);
    // The daemon has none left.
    let mut rig = Rig::new();
    rig.keeps = false;
    rig.send(&message(Hold, 0, b""), &fds[..1]);
    rig.run();
    assert_eq!(rig.left, ["the daemon has no room for its descriptors"]);
}

#[test]
fn memory_is_given_back_when_nothing_uses_it() {
    let mut rig = Rig::new();
    rig.send(&message(Map, 1, b""), &[memory().as_fd()]);
    rig.send(&message(Use, 1, b""), &[]);
    rig.send(&message(Unmap, 1, b""), &[]);
    rig.send(&message(Echo, 1, b""), &[]);
    for _ in 0..100 {
        rig.turn();
    }
    assert_eq!(rig.answers(), [1u32.to_le_bytes(); 2].concat());
    assert!(rig.machines.must_retry(), "nobody tells when it is free");
    USED.take();
    for _ in 0..100 {
        rig.turn();
    }
    let mut expected = 1u32.to_le_bytes().to_vec();
    expected.extend(message(Echo, 1, b""));
    assert_eq!(rig.answers(), expected);
    // It isn't given back for too long.
    rig.send(&message(Map, 1, b""), &[memory().as_fd()]);
    rig.send(&message(Use, 1, b""), &[]);
    rig.send(&message(Unmap, 1, b""), &[]);
    for _ in 0..100 {
        rig.turn();
    }
    let late = rig.core.now_ns() + client::MESSAGE_LIMIT_NS;
    rig.core.set_now_ns(late);
    rig.machines.tick(&mut rig.core);
    rig.turn();
    assert_eq!(rig.left, ["memory that it took away was used for too long"]);
    USED.take();
}

#[test]
fn who_takes_no_answer_is_closed_after_a_while() {
    let mut rig = Rig::new();
    let big = message(Echo, 0, &[7; 30_000]);
    for _ in 0..20 {
        let sent = rustix::net::send(&rig.client, &big, SendFlags::NOSIGNAL);
        for _ in 0..20 {
            rig.turn();
        }
        if sent != Ok(big.len()) {
            break;
        }
    }
    assert!(rig.left.is_empty() && rig.machines.is_idle(), "it waits");
    assert!(rig.machines.next_deadline_ns().is_some());
    let late = rig.core.now_ns() + client::MESSAGE_LIMIT_NS;
    rig.core.set_now_ns(late);
    rig.machines.tick(&mut rig.core);
    rig.turn();
    assert_eq!(rig.left, ["it did not take an answer in time"]);
}

#[test]
fn who_goes_is_put_away() {
    let mut rig = Rig::new();
    rig.send(&message(Hold, 1, b""), &[bell().as_fd()]);
    rig.run();
    let (gone, _) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    drop(std::mem::replace(&mut rig.client, gone));
    rig.run();
    assert_eq!(
        (rig.left.as_slice(), rig.machines.count()),
        (&["it hung up"][..], 0)
    );
}

#[test]
fn a_damaged_machine_file_ends_its_client_alone() {
    // Every word of the header and of the first region and slot, by turns.
    let places = (4..10u64).chain(512..520).chain(4608..4612);
    for (place, value) in places.flat_map(|p| [(p, u64::MAX), (p, 3), (p, 0), (p, 1 << 40)]) {
        let mut rig = Rig::new();
        rig.send(&message(Map, 1, b""), &[memory().as_fd()]);
        rig.send(&message(Hold, 0, b""), &[bell().as_fd()]);
        rig.run();
        rustix::io::pwrite(&rig.file, &value.to_ne_bytes(), place * 8).unwrap();
        rig.succeed(None);
        // It may be closed already.
        let _ = rustix::net::send(&rig.client, &message(Echo, 0, b"x"), SendFlags::NOSIGNAL);
        rig.run();
        assert!(rig.left.len() <= 1, "{place} {value}");
    }
}
