//! Grants, revokes and faults with a whole engine; the test is the daemon. **Not here:** the
//! owner's choices (its own tests), and every interleaving (the model of `xlate`).
#![allow(missing_docs)]

mod common;

use common::host::{PLAIN, RawHost, WRITE, attach, rw};
use common::{EXTENT_BYTES, nqn};
use forebay_engine::{Engine, EngineConfig};
use forebay_nvme::{SglDescriptor, Status};
use forebay_xlate::boundary::message::*;
use forebay_xlate::boundary::region::Region;
use forebay_xlate::boundary::socket::{self, Channel};
use forebay_xlate::shm::SharedMemory;
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, Rights, VolumeId, Word};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

const V: VolumeId = VolumeId(1);
/// Limit of every wait.
const HANG: Duration = Duration::from_secs(120);
/// A reactor that is not woken sleeps twice as long.
const WOKEN: Duration = Duration::from_secs(5);

struct Daemon {
    engine: Option<Engine>,
    channel: Channel,
    region: Region,
    address: SocketAddr,
    reactors: usize,
    request: u64,
    _dir: tempfile::TempDir,
}

impl Daemon {
    fn start(reactors: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("engine.sock");
        let engine = Engine::start(EngineConfig {
            socket: socket.clone(),
            generation: 1,
            region: None,
            reactors,
            cpus: vec![],
            orphan_limit_s: 60,
        });
        let mut channel = Channel::new(socket::connect(&socket).unwrap()).unwrap();
        let hello = ToEngine::Hello {
            version: BOUNDARY_VERSION,
            daemon_pid: 1,
            pool: [7; 16],
        };
        channel.send(&hello, vec![]).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let (_, mut given) = hear(&mut channel);
        let memory = SharedMemory::from_fd(given.remove(0)).unwrap();
        let mut daemon = Self {
            engine: Some(engine.unwrap()),
            channel,
            region: Region::adopt(memory).unwrap(),
            address,
            reactors,
            request: 0,
            _dir: dir,
        };
        let device_bytes = 16u64 << 20;
        let path = daemon._dir.path().join("device");
        let device = DeviceConfig {
            device: DeviceIndex(0),
            uuid: [1; 16],
            spec: format!("ram:{}?size={device_bytes}", path.display()),
            data_offset_bytes: 0,
            extent_bytes: EXTENT_BYTES as u32,
            extents: device_bytes / EXTENT_BYTES,
            fence: DeviceFence::Locks,
        };
        std::fs::File::create(&path)
            .unwrap()
            .set_len(device_bytes)
            .unwrap();
        daemon.order(|request| ToEngine::SetDevice { request, device }, vec![]);
        daemon.set_volume(0);
        let export = ExportConfig {
            export: ExportId(1),
            volume: V,
            nqn: nqn(1),
            serial: "1".into(),
            hosts: Default::default(),
            any_host: true,
            frontend: Default::default(),
        };
        let set = |request| ToEngine::SetExport {
            request,
            export,
            reactor: None,
        };
        daemon.order(set, vec![]);
        let listen = |request| ToEngine::SetListener {
            request,
            address: address.to_string(),
        };
        daemon.order(listen, vec![listener.into()]);
        daemon
    }

    fn set_volume(&mut self, epoch: u16) {
        let volume = VolumeConfig {
            volume: V,
            uuid: [2; 16],
            read_only: false,
            size_bytes: 8 << 20,
            block_bytes: 4096,
            extent_bytes: EXTENT_BYTES as u32,
            epoch,
            image: None,
        };
        self.order(|request| ToEngine::SetVolume { request, volume }, vec![]);
    }

    fn say(&mut self, message: ToEngine) {
        self.channel.send(&message, vec![]).unwrap();
    }

    fn order(&mut self, order: impl FnOnce(u64) -> ToEngine, with: Vec<OwnedFd>) {
        self.request += 1;
        let request = self.request;
        self.channel.send(&order(request), with).unwrap();
        self.until(|message| match message {
            FromEngine::Done { request: r, error } if r == request => {
                assert_eq!(error, None);
                Some(())
            }
            _ => None,
        });
    }

    /// Receives messages until one fits.
    fn until<T>(&mut self, mut fits: impl FnMut(FromEngine) -> Option<T>) -> T {
        loop {
            if let Some(found) = fits(hear(&mut self.channel).0) {
                return found;
            }
        }
    }

    /// All messages until the engine answers one sent now.
    fn meanwhile(&mut self) -> Vec<FromEngine> {
        self.request += 1;
        let request = self.request;
        // Not exported, so the engine only answers.
        self.say(ToEngine::RemoveExport {
            request,
            export: ExportId(99),
        });
        let mut heard = Vec::new();
        self.until(|message| match message {
            FromEngine::Done { request: r, .. } if r == request => Some(()),
            other => {
                heard.push(other);
                None
            }
        });
        heard
    }

    fn fault(&mut self) -> FaultAsk {
        self.until(|message| match message {
            FromEngine::Faults { faults } => {
                assert_eq!(faults.len(), 1);
                Some(faults[0])
            }
            _ => None,
        })
    }

    fn grant(&mut self, extent: u64, at: u64) {
        self.grant_in(0, extent, at);
    }

    fn grant_in(&mut self, epoch: u16, extent: u64, at: u64) {
        let word = Word::new(DeviceIndex(0), ExtentIndex(at), Rights::ReadWrite).unwrap();
        let word = word.with_epoch(epoch);
        self.say(ToEngine::Grants {
            grants: vec![GrantOf {
                volume: V,
                range: ExtentRange::new(extent, 1),
                word: word.bits(),
                commit_sequence: 0,
            }],
        });
    }

    fn freeze(&mut self, revoke: u64, epoch: u16) {
        let whole = ExtentRange::new(0, (8 << 20) / EXTENT_BYTES);
        self.revoke_range(revoke, whole, Some(epoch));
    }

    /// Returns other messages received before the acknowledgement.
    fn revoke(&mut self, revoke: u64, extent: u64) -> Vec<FromEngine> {
        self.revoke_range(revoke, ExtentRange::new(extent, 1), None)
    }

    fn revoke_range(
        &mut self,
        revoke: u64,
        range: ExtentRange,
        freeze: Option<u16>,
    ) -> Vec<FromEngine> {
        self.say(ToEngine::Revoke {
            revoke,
            volume: V,
            range,
            freeze,
            release: None,
        });
        let mut heard = Vec::new();
        self.until(|message| {
            let done = message == FromEngine::RevokeDone { revoke };
            heard.push(message);
            done.then_some(())
        });
        heard
    }

    /// Waits until extents are taken back; sets `asked` if a fault came before.
    fn took_back(&mut self, wanted: u64, asked: &mut bool) -> Vec<ExtentRange> {
        self.until(|message| match message {
            FromEngine::TookBack { revoke, taken } if revoke == wanted => Some(taken),
            FromEngine::Faults { .. } => {
                *asked = true;
                None
            }
            _ => None,
        })
    }

    /// Waits until every reactor sleeps.
    fn wait_asleep(&self) {
        let begin = Instant::now();
        let reactors = &self.region.reactors()[..self.reactors];
        while !reactors.iter().all(|r| r.asleep.load(Relaxed) == 1) {
            assert!(begin.elapsed() < HANG, "the reactors don't fall asleep");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn hear(channel: &mut Channel) -> (FromEngine, Vec<OwnedFd>) {
    let begin = Instant::now();
    loop {
        if let Some(message) = channel.receive().unwrap() {
            return message;
        }
        channel.flush().unwrap();
        assert!(begin.elapsed() < HANG, "the engine does not answer");
        std::thread::sleep(Duration::from_micros(200));
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.channel.send(&ToEngine::Stop, vec![]);
        if let Some(engine) = self.engine.take() {
            engine.join();
        }
    }
}

/// Sends a write of one block without waiting for its answer.
fn send_write(io: &mut RawHost, lba: u64, data: &[u8; 4096]) {
    let cid = io.next_cid();
    let sqe = rw(WRITE, cid, lba, 1).with_sgl(SglDescriptor::in_capsule(0, 4096));
    io.capsule(&sqe, data);
}

#[test]
fn revoke_from_sleeping_reactor() {
    let mut daemon = Daemon::start(3);
    let (_admin, mut io) = attach(daemon.address, &nqn(1), PLAIN, false);
    send_write(&mut io, 0, &[1; 4096]);
    assert!(daemon.fault().write);
    daemon.grant(0, 5);
    assert_eq!(io.response().status(), Status::SUCCESS);
    // Without a wakeup each round is slow; a paused machine is slow only sometimes.
    let mut was_quick = false;
    for revoke in 1..=5 {
        daemon.wait_asleep();
        let slept: Vec<u64> = daemon.region.reactors()[..3]
            .iter()
            .map(|r| r.sleeps.load(Relaxed))
            .collect();
        let begin = Instant::now();
        daemon.revoke(revoke, 0);
        was_quick |= begin.elapsed() < WOKEN;
        daemon.wait_asleep();
        for (r, before) in slept.iter().enumerate() {
            let now = daemon.region.reactors()[r].sleeps.load(Relaxed);
            assert!(now > *before, "reactor {r} answered for itself");
        }
        // It is really revoked: a write faults, and goes to the new place.
        send_write(&mut io, 0, &[revoke as u8; 4096]);
        assert_eq!(daemon.fault().extent, 0);
        daemon.grant(0, 5 + revoke);
        assert_eq!(io.response().status(), Status::SUCCESS);
        assert_eq!(io.read(0, 1, 4096), [revoke as u8; 4096]);
        if was_quick && revoke >= 3 {
            break;
        }
    }
    assert!(was_quick, "nobody wakes a reactor that sleeps");
}

#[test]
fn a_frozen_extent_is_copied_before_it_is_written() {
    let mut daemon = Daemon::start(2);
    let (_admin, mut io) = attach(daemon.address, &nqn(1), PLAIN, false);
    let (old, new, later) = ([1; 4096], [2; 4096], [3; 4096]);
    daemon.grant(0, 5);
    assert_eq!(io.write(0, &old, 4096).status(), Status::SUCCESS);
    // A failed snapshot gives the right back.
    daemon.freeze(1, 1);
    daemon.set_volume(0);
    assert_eq!(io.write(1, &old, 4096).status(), Status::SUCCESS);
    daemon.freeze(2, 1);
    assert_eq!(io.read(0, 2, 4096), [old, old].concat());
    send_write(&mut io, 0, &new);
    assert!(daemon.fault().write);
    // Copied by the internal lane, then granted in the new epoch.
    let device = DeviceIndex(0);
    let work = Job::Copy {
        from: device,
        source: ExtentIndex(5),
        to: device,
        target: ExtentIndex(9),
        count: 1,
    };
    daemon.say(ToEngine::Job { job: 3, work });
    let done = daemon.until(|message| match message {
        FromEngine::JobDone { job: 3, errno } => Some(errno),
        _ => None,
    });
    assert_eq!(done, None);
    daemon.grant_in(1, 0, 9);
    assert_eq!(io.response().status(), Status::SUCCESS);
    assert_eq!(io.read(0, 2, 4096), [new, old].concat());
    // The frozen extent still has the old data.
    daemon.grant(20, 5);
    let frozen = 20 * EXTENT_BYTES / 4096;
    assert_eq!(io.read(frozen, 2, 4096), [old, old].concat());
    send_write(&mut io, frozen, &later);
    assert_eq!(
        daemon.fault(),
        FaultAsk {
            volume: V,
            extent: 20,
            write: true,
            whole: false
        }
    );
    daemon.grant_in(1, 20, 30);
    assert_eq!(io.response().status(), Status::SUCCESS);
}

/// Fewest rounds of [`parked_command_translates_again`]; timing decides whether the reactor runs in
/// between.
const ROUNDS: u64 = 400;

#[test]
fn parked_command_translates_again() {
    let mut daemon = Daemon::start(2);
    let (_admin, mut io) = attach(daemon.address, &nqn(1), PLAIN, false);
    let blocks = EXTENT_BYTES / 4096;
    let theirs = [0xEE; 4096];
    let mut revoke = 0;
    let mut take = |daemon: &mut Daemon, extent| {
        revoke += 1;
        daemon.revoke(revoke, extent)
    };
    let mut asked_again = 0;
    let limit = Instant::now() + HANG;
    for round in 0.. {
        // Until it has also been late once.
        if round >= ROUNDS && (asked_again > 0 || Instant::now() > limit) {
            break;
        }
        // Device extent 11 holds other data.
        daemon.grant(2, 11);
        assert_eq!(
            io.write(2 * blocks, &theirs, 4096).status(),
            Status::SUCCESS
        );
        take(&mut daemon, 2);
        // A write over two extents; the first is granted before the second faults.
        let cid = io.next_cid();
        let sqe = rw(WRITE, cid, blocks - 1, 2).with_sgl(SglDescriptor::in_capsule(0, 8192));
        let data: Vec<u8> = [[round as u8; 4096], [!(round as u8); 4096]].concat();
        io.capsule(&sqe, &data);
        assert_eq!(daemon.fault().extent, 0);
        daemon.grant(0, 10);
        assert_eq!(daemon.fault().extent, 1);
        // While parked, it loses its first extent, whose data stays. The second is granted at 11
        // and revoked at once. After the acknowledgement nothing may go to 11.
        take(&mut daemon, 0);
        daemon.grant(1, 11);
        let mut asks = take(&mut daemon, 1);
        asks.extend(daemon.meanwhile());
        let again = asks
            .iter()
            .any(|m| matches!(m, FromEngine::Faults { faults } if faults[0].extent == 1));
        let place = if again { 20 } else { 11 };
        if again {
            asked_again += 1;
            daemon.grant(1, place);
        }
        assert_eq!(io.response().status(), Status::SUCCESS);
        if again {
            daemon.grant(2, 11);
            assert_eq!(io.read(2 * blocks, 1, 4096), theirs, "round {round}");
            take(&mut daemon, 2);
            take(&mut daemon, 1);
        }
        daemon.grant(0, 10);
        daemon.grant(1, place);
        assert_eq!(io.read(blocks - 1, 2, 4096), data);
        take(&mut daemon, 0);
        take(&mut daemon, 1);
    }
    assert!(asked_again > 0, "the command always came in between");
}

/// A write races with the return of its preallocated extent: one wins.
#[test]
fn a_preallocated_extent_is_written_or_taken_back() {
    let mut daemon = Daemon::start(2);
    let (_admin, mut io) = attach(daemon.address, &nqn(1), PLAIN, false);
    let blocks = EXTENT_BYTES / 4096;
    let (mut claimed, mut taken_back) = (0, 0);
    for round in 0..ROUNDS {
        let data = [round as u8 | 1; 4096];
        let preallocated = Word::preallocated(DeviceIndex(0), ExtentIndex(10)).unwrap();
        daemon.say(ToEngine::Grants {
            grants: vec![GrantOf {
                volume: V,
                range: ExtentRange::new(0, 4),
                word: preallocated.bits(),
                commit_sequence: 0,
            }],
        });
        daemon.meanwhile();
        assert_eq!(io.read(3 * blocks, 1, 4096), [0; 4096], "a hole");
        let take_back = ToEngine::TakeBack {
            revoke: round,
            volume: V,
            range: ExtentRange::new(0, 5),
        };
        // Some rounds fix the order; the others race.
        let (mut ended, mut taken) = (false, None);
        match round % 20 {
            0 => {
                daemon.say(take_back);
                taken = Some(daemon.took_back(round, &mut false));
                send_write(&mut io, blocks, &data);
            }
            19 => {
                assert_eq!(io.write(blocks, &data, 4096).status(), Status::SUCCESS);
                ended = true;
                daemon.say(take_back);
            }
            wait => {
                send_write(&mut io, blocks, &data);
                std::thread::sleep(Duration::from_micros(wait * 5));
                daemon.say(take_back);
            }
        }
        let mut asked = false;
        let taken = taken.unwrap_or_else(|| daemon.took_back(round, &mut asked));
        let whole = taken == [ExtentRange::new(0, 4)];
        if whole {
            taken_back += 1;
            if !asked {
                assert_eq!(daemon.fault().extent, 1);
            }
            daemon.grant(1, 21);
        } else {
            claimed += 1;
            let others = [ExtentRange::new(0, 1), ExtentRange::new(2, 2)];
            assert_eq!((taken, asked), (others.to_vec(), false));
        }
        if !ended {
            assert_eq!(io.response().status(), Status::SUCCESS);
        }
        assert_eq!(io.read(blocks, 1, 4096), data, "round {round}");
        daemon.revoke(1_000_000 + round, 1);
        // An extent taken back was not written and stays clean.
        daemon.grant(2, 11);
        let there = if whole { [0; 4096] } else { data };
        assert_eq!(io.read(2 * blocks, 1, 4096), there, "round {round}");
        assert_eq!(
            io.write(2 * blocks, &[0; 4096], 4096).status(),
            Status::SUCCESS
        );
        daemon.revoke(2_000_000 + round, 2);
    }
    assert!(claimed > 0 && taken_back > 0, "{claimed}, {taken_back}");
}
