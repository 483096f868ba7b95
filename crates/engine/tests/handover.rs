//! Connections across engines, with the test as the daemon: deposits, and the steps of a take-over.
//! **Not here:** continued queues and commands (tests of the take-over and the whole system).

use forebay_device::{Device, OpenOptions};
use forebay_engine::{Engine, EngineConfig};
use forebay_xlate::DeviceIndex;
use forebay_xlate::boundary::message::{
    BOUNDARY_VERSION, DeviceConfig, DeviceFence, FromEngine, Held, ToEngine,
};
use forebay_xlate::boundary::region::{Region, device_mark};
use forebay_xlate::boundary::socket::{self, Channel};
use forebay_xlate::shm::SharedMemory;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Acquire;
use std::time::{Duration, Instant};

/// Limit of every wait.
const HANG: Duration = Duration::from_secs(120);

/// An engine with the test as its daemon.
struct Lab {
    engine: Engine,
    channel: Channel,
    socket: PathBuf,
    /// Received with the last welcome.
    region: Option<OwnedFd>,
    memory: Option<OwnedFd>,
    sockets: Vec<(u64, OwnedFd)>,
    _folder: tempfile::TempDir,
}

impl Lab {
    fn start(generation: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("engine.sock");
        let engine = Engine::start(EngineConfig {
            socket: socket.clone(),
            generation,
            region: None,
            reactors: 1,
            cpus: vec![],
            orphan_limit_s: 60,
        })
        .unwrap();
        let mut lab = Self {
            engine,
            channel: Channel::new(socket::connect(&socket).unwrap()).unwrap(),
            socket,
            region: None,
            memory: None,
            sockets: Vec::new(),
            _folder: folder,
        };
        lab.greet();
        lab
    }

    /// Connects as another daemon.
    fn reconnect(&mut self) {
        self.channel = Channel::new(socket::connect(&self.socket).unwrap()).unwrap();
        self.greet();
    }

    fn greet(&mut self) {
        self.sockets.clear();
        let hello = ToEngine::Hello {
            version: BOUNDARY_VERSION,
            daemon_pid: 1,
            pool: [7; 16],
        };
        self.channel.send(&hello, vec![]).unwrap();
        loop {
            match self.hear() {
                (FromEngine::Welcome { .. }, fds) => self.region = fds.into_iter().next(),
                (FromEngine::Held(Held::Memory), mut fds) => self.memory = fds.pop(),
                (FromEngine::Held(Held::Socket(socket)), mut fds) => {
                    self.sockets.push((socket, fds.pop().unwrap()));
                }
                (FromEngine::HeldEnd, _) => return,
                _ => {}
            }
        }
    }

    fn hear(&mut self) -> (FromEngine, Vec<OwnedFd>) {
        let limit = Instant::now() + HANG;
        while Instant::now() < limit {
            match self.channel.receive().unwrap() {
                Some(message) => return message,
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        panic!("the engine says nothing");
    }

    fn say(&mut self, message: &ToEngine, descriptors: Vec<OwnedFd>) {
        self.channel.send(message, descriptors).unwrap();
    }

    fn done(&mut self, wanted: u64) -> Option<String> {
        match self.hear() {
            (FromEngine::Done { request, error }, _) if request == wanted => error,
            other => panic!("{other:?}"),
        }
    }

    fn listen(&mut self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let message = ToEngine::SetListener {
            request: 1,
            address: address.to_string(),
        };
        self.say(&message, vec![listener.into()]);
        assert_eq!(self.done(1), None);
        address
    }

    fn stop(mut self) -> (OwnedFd, OwnedFd) {
        self.say(&ToEngine::Stop, vec![]);
        self.engine.join();
        (self.region.unwrap(), self.memory.unwrap())
    }
}

/// A connection accepted by the test: the host's end, and the engine's.
fn connection() -> (TcpStream, OwnedFd) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    host.set_read_timeout(Some(HANG)).unwrap();
    let (accepted, _) = listener.accept().unwrap();
    accepted.set_nonblocking(true).unwrap();
    (host, accepted.into())
}

/// ICReq (NVMe/TCP 3.6.2.2): 128 bytes, no digests.
fn icreq() -> [u8; 128] {
    let mut pdu = [0; 128];
    (pdu[2], pdu[4]) = (128, 128);
    pdu
}

#[test]
fn a_connection_is_deposited_and_its_end_is_reported() {
    let mut lab = Lab::start(3);
    assert!(lab.memory.is_some());
    let address = lab.listen();
    let host = TcpStream::connect(address).unwrap();
    let (message, mut fds) = lab.hear();
    let number = 3 << 32 | 1;
    assert_eq!(message, FromEngine::Socket { socket: number });
    let deposited = TcpStream::from(fds.pop().unwrap());
    assert_eq!(deposited.peer_addr().unwrap(), host.local_addr().unwrap());
    // The next daemon gets it too.
    lab.reconnect();
    assert_eq!(lab.sockets.len(), 1);
    assert_eq!(lab.sockets[0].0, number);
    drop(host);
    let gone = FromEngine::SocketGone { socket: number };
    assert_eq!(lab.hear().0, gone);
    lab.reconnect();
    assert_eq!(lab.sockets.len(), 0);
    lab.stop();
}

#[test]
fn a_successor_acts_only_after_resume() {
    let (region, memory) = Lab::start(1).stop();
    let mut lab = Lab::start(2);
    let (mut host, ours) = connection();
    let (ended, ended_ours) = connection();
    ended.shutdown(std::net::Shutdown::Both).unwrap();
    // The other end has noticed it.
    let seen = rustix::net::recv(&ended_ours, &mut [0; 1][..], rustix::net::RecvFlags::PEEK);
    if seen == Err(rustix::io::Errno::AGAIN) {
        let flags = rustix::event::PollFlags::RDHUP;
        let mut wait = [rustix::event::PollFd::new(&ended_ours, flags)];
        rustix::event::poll(&mut wait, None).unwrap();
    }
    let take_over = ToEngine::TakeOver {
        request: 5,
        generation: 1,
        blamed: None,
    };
    lab.say(&take_over, vec![region, memory]);
    let sockets = vec![1 << 32 | 8, 1 << 32 | 9];
    // There was no room for a third descriptor.
    let message = ToEngine::Sockets {
        sockets: [sockets.clone(), vec![1 << 32 | 10]].concat(),
    };
    lab.say(&message, vec![ours, ended_ours]);
    let no_room = FromEngine::SocketGone {
        socket: 1 << 32 | 10,
    };
    assert_eq!(lab.is_alive(), None);
    host.write_all(&icreq()).unwrap();
    lab.say(&ToEngine::SocketsEnd, vec![]);
    let converted = FromEngine::Converted {
        request: 5,
        vms: 0,
        queues: 0,
        commands: 0,
        closed: vec![
            ("ended before".to_owned(), 1),
            ("this engine ran out of file descriptors".to_owned(), 1),
        ],
    };
    assert_eq!(lab.hear().0, converted);
    host.set_nonblocking(true).unwrap();
    let nothing = host.read(&mut [0; 128]).unwrap_err();
    assert_eq!(nothing.kind(), ErrorKind::WouldBlock);
    host.set_nonblocking(false).unwrap();
    lab.say(&ToEngine::Resume { request: 6 }, vec![]);
    let gone = FromEngine::SocketGone { socket: sockets[1] };
    assert_eq!(lab.hear().0, gone);
    // Only now may the daemon close it.
    assert_eq!(lab.hear().0, no_room);
    assert_eq!(lab.done(6), None);
    let mut icresp = [0; 128];
    host.read_exact(&mut icresp).unwrap();
    assert_eq!((icresp[0], icresp[2]), (1, 128), "ICResp");
    lab.reconnect();
    assert_eq!(lab.sockets[0].0, sockets[0]);
    lab.stop();
}

impl Lab {
    /// Expects no other message of the engine.
    fn is_alive(&mut self) -> Option<String> {
        let message = ToEngine::RemoveExport {
            request: 2,
            export: forebay_xlate::boundary::message::ExportId(1),
        };
        self.say(&message, vec![]);
        let error = self.done(2);
        if error.is_none() {
            let settled = FromEngine::ExportSettled {
                request: 2,
                at_devices: 0,
            };
            assert_eq!(self.hear().0, settled);
        }
        error
    }
}

#[test]
fn an_unreadable_estate_is_refused() {
    let (region, memory) = Lab::start(1).stop();
    let mut lab = Lab::start(3);
    let take_over = |generation| ToEngine::TakeOver {
        request: 5,
        generation,
        blamed: None,
    };
    let copy = |fd: &OwnedFd| fd.try_clone().unwrap();
    let empty = || OwnedFd::from(tempfile::tempfile().unwrap());
    for (generation, files) in [
        (1, vec![]),
        (1, vec![copy(&region)]),
        (1, vec![empty(), copy(&memory)]),
        (2, vec![copy(&region), copy(&memory)]),
    ] {
        lab.say(&take_over(generation), files);
        let (message, _) = lab.hear();
        assert!(
            matches!(message, FromEngine::Refused { request: 5, .. }),
            "{message:?}"
        );
    }
    // It has taken over nothing, and serves new hosts.
    lab.say(&ToEngine::Resume { request: 6 }, vec![]);
    assert!(lab.done(6).is_some());
    let address = lab.listen();
    let _host = TcpStream::connect(address).unwrap();
    assert!(matches!(lab.hear().0, FromEngine::Socket { .. }));
    lab.say(&take_over(1), vec![region, memory]);
    assert!(
        matches!(lab.hear().0, FromEngine::Refused { .. }),
        "too late"
    );
    lab.stop();
}

#[test]
fn a_successor_that_loses_its_daemon_before_it_acts_ends() {
    let (region, memory) = Lab::start(1).stop();
    for converted in [false, true] {
        let mut lab = Lab::start(2);
        let take_over = ToEngine::TakeOver {
            request: 5,
            generation: 1,
            blamed: None,
        };
        let files = vec![region.try_clone().unwrap(), memory.try_clone().unwrap()];
        lab.say(&take_over, files);
        if converted {
            lab.say(&ToEngine::SocketsEnd, vec![]);
            assert!(matches!(lab.hear().0, FromEngine::Converted { .. }));
        }
        drop(lab.channel);
        lab.engine.join();
    }
}

const MARKED: [u8; 16] = [5; 16];

/// A file as a device, with an earlier engine's lock on it.
fn held_device(folder: &Path) -> (DeviceConfig, Device) {
    let path = folder.join("device");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(8 << 20).unwrap();
    let spec = format!("file:{}", path.display());
    let held = Device::open(&spec.parse().unwrap(), &OpenOptions::default()).unwrap();
    held.take_fence(0).unwrap();
    (config(3, MARKED, spec), held)
}

fn config(device: u8, uuid: [u8; 16], spec: String) -> DeviceConfig {
    DeviceConfig {
        device: DeviceIndex(device),
        uuid,
        spec,
        data_offset_bytes: 1 << 20,
        extent_bytes: 64 << 10,
        extents: 16,
        fence: DeviceFence::Locks,
    }
}

impl Lab {
    fn set_device(&mut self, request: u64, device: &DeviceConfig) {
        let device = device.clone();
        self.say(&ToEngine::SetDevice { request, device }, vec![]);
    }

    /// Takes over from the engine that left these.
    fn take_over(&mut self, generation: u64, left: (OwnedFd, OwnedFd)) {
        let message = ToEngine::TakeOver {
            request: 50,
            generation,
            blamed: None,
        };
        self.say(&message, vec![left.0, left.1]);
        self.say(&ToEngine::SocketsEnd, vec![]);
        assert!(matches!(self.hear().0, FromEngine::Converted { .. }));
        self.say(&ToEngine::Resume { request: 51 }, vec![]);
        assert_eq!(self.done(51), None);
    }

    /// The mark of the device served at this index.
    fn served(&self, index: usize) -> u64 {
        let fd = self.region.as_ref().unwrap().try_clone().unwrap();
        let region = Region::adopt(SharedMemory::from_fd(fd).unwrap()).unwrap();
        region.devices()[index].served.load(Acquire)
    }

    fn ready(&mut self, index: u8) {
        let device = DeviceIndex(index);
        assert_eq!(self.hear().0, FromEngine::DeviceReady { device });
    }
}

#[test]
fn only_a_device_that_the_dead_engine_served_is_served_before_its_fence() {
    let folder = tempfile::tempdir().unwrap();
    let (device, held) = held_device(folder.path());
    // The first engine does not know the operations in flight there, so it waits; neither does any
    // successor before the fence.
    let mut lab = Lab::start(1);
    lab.set_device(7, &device);
    assert_eq!(lab.done(7), None);
    assert_eq!(lab.served(3), 0);
    let mut left = lab.stop();
    for generation in [2, 3] {
        let mut lab = Lab::start(generation);
        lab.set_device(7, &device);
        assert_eq!(lab.done(7), None);
        lab.take_over(generation - 1, left);
        assert_eq!(lab.served(3), 0, "engine {generation} serves too early");
        left = lab.stop();
    }
    let mut lab = Lab::start(4);
    lab.set_device(7, &device);
    assert_eq!(lab.done(7), None);
    lab.take_over(3, left);
    drop(held);
    lab.ready(3);
    assert_eq!(lab.served(3), device_mark(&MARKED));
    left = lab.stop();
    // Its own commands are recorded: a successor waits for nothing else.
    let (device, _held) = held_device(folder.path());
    let mut lab = Lab::start(5);
    lab.set_device(7, &device);
    assert_eq!(lab.done(7), None);
    lab.take_over(4, left);
    assert_eq!(lab.served(3), device_mark(&MARKED));
    left = lab.stop();
    // Another device with its index.
    let mut lab = Lab::start(6);
    let device = config(3, [6; 16], device.spec);
    lab.set_device(7, &device);
    assert_eq!(lab.done(7), None);
    lab.take_over(5, left);
    assert_eq!(lab.served(3), 0);
    lab.stop();
}

#[test]
fn a_device_that_hangs_while_opening_delays_no_other_device() {
    let folder = tempfile::tempdir().unwrap();
    let (ready, held) = held_device(folder.path());
    drop(held);
    let path = folder.path().join("slow");
    let spec = format!("volatile:{}?size=8M", path.display());
    let options = OpenOptions {
        create_missing: true,
        ..OpenOptions::default()
    };
    drop(Device::open(&spec.parse().unwrap(), &options).unwrap());
    let slow = config(4, [4; 16], spec);
    let mut lab = Lab::start(1);
    for (request, device) in [(7, &slow), (8, &ready)] {
        lab.set_device(request, device);
        assert_eq!(lab.done(request), None);
        lab.ready(device.device.0);
    }
    let left = lab.stop();
    let mut lab = Lab::start(2);
    // Opening the device waits for this lock.
    let journal = std::fs::File::open(path.with_file_name("slow.journal")).unwrap();
    rustix::fs::flock(&journal, rustix::fs::FlockOperation::LockExclusive).unwrap();
    lab.set_device(7, &slow);
    lab.set_device(8, &ready);
    assert_eq!(lab.done(8), None);
    lab.ready(3);
    lab.take_over(1, left);
    assert_eq!(lab.served(4), 0);
    // A new daemon asks again, and gets no answer to the first request.
    lab.reconnect();
    lab.set_device(9, &slow);
    assert_eq!(lab.is_alive(), None);
    drop(journal);
    assert_eq!(lab.done(9), None);
    assert_eq!(
        lab.served(4),
        device_mark(&[4; 16]),
        "as the dead engine did"
    );
    lab.ready(4);
    lab.stop();
}
