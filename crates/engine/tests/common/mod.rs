//! An engine inside the test. The test is its daemon: an owner with a simple allocator and no
//! catalog. **Not here:** durability (tests of the pool and the whole system).
#![allow(dead_code, missing_docs, unreachable_pub)]

pub mod host;

use forebay_engine::{Engine, EngineConfig};
use forebay_xlate::boundary::message::{
    BOUNDARY_VERSION, DeviceConfig, DeviceFence, ExportConfig, ExportId, FaultAsk, FromEngine,
    GrantOf, Spread, ToEngine, VolumeConfig,
};
use forebay_xlate::boundary::region::{Region, TenantRecord};
use forebay_xlate::boundary::socket::{self, Channel};
use forebay_xlate::shm::SharedMemory;
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, Rights, VolumeId, Word};
use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub const EXTENT_BYTES: u64 = 64 << 10;
pub const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555";

/// Limit of every wait.
pub const HANG: Duration = Duration::from_secs(120);

/// The owner's log, for assertions.
#[derive(Default, Debug)]
pub struct Log {
    pub faults: u64,
    pub commits: u64,
    pub releases: Vec<ExtentRange>,
    pub ready: Vec<DeviceIndex>,
    /// Settled requests, and their commands at devices.
    pub settled: Vec<(u64, u32)>,
    /// Refused hosts.
    pub refused: Vec<String>,
    pub region: Option<std::os::fd::OwnedFd>,
}

/// A message and its descriptors.
type Order = (ToEngine, Vec<std::os::fd::OwnedFd>);
/// Messages sent together, with nothing received between.
type Orders = Vec<Order>;

pub struct TestEngine {
    pub address: SocketAddr,
    pub log: Arc<Mutex<Log>>,
    /// While true, faults are not answered.
    pub deaf: Arc<AtomicBool>,
    orders: Sender<Orders>,
    done: Receiver<(u64, Option<String>)>,
    next_request: u64,
    owner: Option<JoinHandle<()>>,
    engine: Option<Engine>,
    dir: tempfile::TempDir,
}

pub fn nqn(volume: u64) -> String {
    format!("nqn.2026-01.io.forebay:t.v{volume}")
}

struct Owner {
    channel: Channel,
    maps: BTreeMap<(VolumeId, u64), u64>,
    next_extent: u64,
    releases: BTreeMap<u64, (u64, VolumeId, ExtentRange)>,
    deferred: Vec<FromEngine>,
    log: Arc<Mutex<Log>>,
    deaf: Arc<AtomicBool>,
    done: Sender<(u64, Option<String>)>,
}

impl Owner {
    fn say(&mut self, message: ToEngine) {
        let _ = self.channel.send(&message, vec![]);
    }

    fn answer(&mut self, fault: FaultAsk) -> GrantOf {
        let FaultAsk {
            volume,
            extent,
            write,
            ..
        } = fault;
        self.log.lock().unwrap().faults += 1;
        let at = match (self.maps.get(&(volume, extent)), write) {
            (Some(at), _) => Some(*at),
            (None, true) => {
                self.next_extent += 1;
                self.maps.insert((volume, extent), self.next_extent);
                Some(self.next_extent)
            }
            (None, false) => None,
        };
        let word = at.map_or(Some(Word::HOLE), |at| {
            Word::new(DeviceIndex(0), ExtentIndex(at), Rights::ReadWrite)
        });
        GrantOf {
            volume,
            range: ExtentRange::new(extent, 1),
            word: word.unwrap().bits(),
            commit_sequence: at.unwrap_or(0),
        }
    }

    fn hear(&mut self, message: FromEngine) {
        match message {
            FromEngine::Faults { .. } if self.deaf.load(Ordering::SeqCst) => {
                self.deferred.push(message)
            }
            FromEngine::Faults { faults } => {
                let grants = faults.into_iter().map(|fault| self.answer(fault)).collect();
                self.say(ToEngine::Grants { grants });
            }
            FromEngine::CommitWanted { volume, sequence } => {
                self.log.lock().unwrap().commits += 1;
                self.say(ToEngine::Committed { volume, sequence });
            }
            FromEngine::Release {
                release,
                volume,
                range,
            } => {
                self.log.lock().unwrap().releases.push(range);
                self.releases.insert(release, (release, volume, range));
                self.say(ToEngine::Revoke {
                    revoke: release,
                    volume,
                    range,
                    freeze: None,
                    release: Some(release),
                });
            }
            FromEngine::RevokeDone { revoke } => {
                if let Some((release, volume, range)) = self.releases.remove(&revoke) {
                    for extent in range.first..range.end() {
                        self.maps.remove(&(volume, extent));
                    }
                    self.say(ToEngine::ReleaseDone { release });
                }
            }
            FromEngine::DeviceReady { device } => self.log.lock().unwrap().ready.push(device),
            FromEngine::Done { request, error } => {
                let _ = self.done.send((request, error));
            }
            FromEngine::ExportSettled {
                request,
                at_devices,
            } => self.log.lock().unwrap().settled.push((request, at_devices)),
            FromEngine::HostRefused { host, .. } => self.log.lock().unwrap().refused.push(host),
            _ => {}
        }
    }

    fn run(mut self, orders: Receiver<Orders>) {
        loop {
            match orders.try_recv() {
                Ok(orders) => {
                    for (order, fds) in orders {
                        let stop = order == ToEngine::Stop;
                        let _ = self.channel.send(&order, fds);
                        if stop {
                            return;
                        }
                    }
                }
                Err(std::sync::mpsc::TryRecvError::Disconnected) => return,
                Err(std::sync::mpsc::TryRecvError::Empty) => {}
            }
            if !self.deaf.load(Ordering::SeqCst) {
                for message in std::mem::take(&mut self.deferred) {
                    self.hear(message);
                }
            }
            match self.channel.receive::<FromEngine>() {
                Ok(Some((FromEngine::Welcome { .. }, descriptors))) => {
                    self.log.lock().unwrap().region = descriptors.into_iter().next();
                }
                Ok(Some((message, _))) => self.hear(message),
                Ok(None) => {
                    let _ = self.channel.flush();
                    std::thread::sleep(Duration::from_micros(200));
                }
                Err(_) => return,
            }
        }
    }
}

impl TestEngine {
    /// An engine with one device of `device_bytes` (`kind`: "ram" or "file").
    pub fn start(kind: &str, device_bytes: u64, reactors: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("device");
        std::fs::File::create(&path)
            .unwrap()
            .set_len(device_bytes)
            .unwrap();
        let spec = match kind {
            "ram" => format!("ram:{}?size={device_bytes}", path.display()),
            _ => format!("file:{}", path.display()),
        };
        let socket = dir.path().join("engine.sock");
        let config = EngineConfig {
            socket: socket.clone(),
            generation: 1,
            region: None,
            reactors,
            cpus: vec![],
            orphan_limit_s: 60,
        };
        let engine = Engine::start(config).unwrap();
        let mut channel = Channel::new(socket::connect(&socket).unwrap()).unwrap();
        channel
            .send(
                &ToEngine::Hello {
                    version: BOUNDARY_VERSION,
                    daemon_pid: 1,
                    pool: [7; 16],
                },
                vec![],
            )
            .unwrap();
        let (orders, order_queue) = std::sync::mpsc::channel();
        let (done_in, done) = std::sync::mpsc::channel();
        let log = Arc::new(Mutex::new(Log::default()));
        let deaf = Arc::new(AtomicBool::new(false));
        let owner = Owner {
            channel,
            maps: BTreeMap::new(),
            next_extent: 0,
            releases: BTreeMap::new(),
            deferred: vec![],
            log: log.clone(),
            deaf: deaf.clone(),
            done: done_in,
        };
        let owner = std::thread::spawn(move || owner.run(order_queue));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut this = Self {
            address,
            log,
            deaf,
            orders,
            done,
            next_request: 0,
            owner: Some(owner),
            engine: Some(engine),
            dir,
        };
        let device = DeviceConfig {
            device: DeviceIndex(0),
            uuid: [1; 16],
            spec,
            data_offset_bytes: 1 << 20,
            extent_bytes: EXTENT_BYTES as u32,
            extents: (device_bytes - (1 << 20)) / EXTENT_BYTES,
            fence: DeviceFence::Locks,
        };
        this.order(|request| ToEngine::SetDevice { request, device });
        listener.set_nonblocking(true).unwrap();
        let request = this.number();
        let message = ToEngine::SetListener {
            request,
            address: address.to_string(),
        };
        let order = (message, vec![listener.into()]);
        this.orders.send(vec![order]).unwrap();
        this.wait(request);
        this
    }

    fn number(&mut self) -> u64 {
        self.next_request += 1;
        self.next_request
    }

    fn wait(&mut self, request: u64) {
        assert_eq!(self.answer(request), None);
    }

    /// Why a request was refused; `None` if it was carried out.
    fn answer(&mut self, request: u64) -> Option<String> {
        let limit = Instant::now() + HANG;
        while Instant::now() < limit {
            let (done, error) = self.done.recv_timeout(HANG).unwrap();
            if done == request {
                return error;
            }
        }
        panic!("request {request} was not answered");
    }

    /// Sends an order and waits until it is done; returns its number.
    pub fn order(&mut self, order: impl FnOnce(u64) -> ToEngine) -> u64 {
        let request = self.number();
        self.orders.send(vec![(order(request), vec![])]).unwrap();
        self.wait(request);
        request
    }

    /// Sends an order; returns the reason if it was refused.
    pub fn refusal(&mut self, order: impl FnOnce(u64) -> ToEngine) -> Option<String> {
        let request = self.number();
        self.say(order(request));
        self.answer(request)
    }

    /// Configures another device; returns the reason if it was refused.
    pub fn device(&mut self, index: u8, spec: String) -> Option<String> {
        let request = self.number();
        let device = DeviceConfig {
            device: DeviceIndex(index),
            uuid: [index; 16],
            spec,
            data_offset_bytes: 1 << 20,
            extent_bytes: EXTENT_BYTES as u32,
            extents: 4,
            fence: DeviceFence::Locks,
        };
        self.say(ToEngine::SetDevice { request, device });
        self.answer(request)
    }

    pub fn device_path(&self) -> std::path::PathBuf {
        self.dir.path().join("device")
    }

    /// Sends a message that `Done` does not answer.
    pub fn say(&self, message: ToEngine) {
        self.say_together([message]);
    }

    /// Sends several; no fault is answered between them.
    pub fn say_together(&self, messages: impl IntoIterator<Item = ToEngine>) {
        let orders = messages.into_iter().map(|message| (message, vec![]));
        self.orders.send(orders.collect()).unwrap();
    }

    pub fn spread(&mut self, spread: Spread) {
        self.order(|request| ToEngine::SetSpread { request, spread });
    }

    /// A tenant's credit in the state region: operations, bytes.
    pub fn credit(&self, tenant: u64) -> Option<[u64; 2]> {
        let region = self.region();
        let record = |at: &&TenantRecord| at.tenant.load(Ordering::Relaxed) == tenant + 1;
        let record = region.tenants().iter().find(record)?;
        Some([&record.credit_ops, &record.credit_bytes].map(|n| n.load(Ordering::Relaxed)))
    }

    pub fn region(&self) -> Region {
        let log = self.log.lock().unwrap();
        let fd = log.region.as_ref().unwrap().try_clone().unwrap();
        Region::adopt(SharedMemory::from_fd(fd).unwrap()).unwrap()
    }

    /// Operations that a reactor has handed over, and carried out for others.
    pub fn handed_over(&self, reactor: usize) -> [u64; 2] {
        let region = self.region();
        let record = &region.reactors()[reactor];
        [&record.handed_over, &record.carried_out].map(|n| n.load(Ordering::Relaxed))
    }

    /// Serves (or grows) volume `volume` of `size_bytes`.
    pub fn volume(&mut self, volume: u64, size_bytes: u64, block_bytes: u32) {
        let config = VolumeConfig {
            volume: VolumeId(volume),
            uuid: [volume as u8; 16],
            read_only: false,
            size_bytes,
            block_bytes,
            extent_bytes: EXTENT_BYTES as u32,
            epoch: 0,
            image: None,
        };
        self.order(|request| ToEngine::SetVolume {
            request,
            volume: config,
        });
    }

    /// Exports a volume to every host, or to those named.
    pub fn export(&mut self, volume: u64, hosts: &[&str]) -> String {
        self.export_at(volume, hosts, None)
    }

    /// Exports it on this reactor.
    pub fn export_at(&mut self, volume: u64, hosts: &[&str], reactor: Option<u32>) -> String {
        let export = ExportConfig {
            export: ExportId(volume),
            volume: VolumeId(volume),
            nqn: nqn(volume),
            serial: format!("serial{volume}"),
            hosts: hosts.iter().map(|h| (*h).to_string()).collect(),
            any_host: hosts.is_empty(),
            frontend: Default::default(),
        };
        self.order(|request| ToEngine::SetExport {
            request,
            export,
            reactor,
        });
        nqn(volume)
    }

    pub fn unexport(&mut self, volume: u64) {
        self.order(|request| ToEngine::RemoveExport {
            request,
            export: ExportId(volume),
        });
    }
}

impl Drop for TestEngine {
    fn drop(&mut self) {
        let _ = self.orders.send(vec![(ToEngine::Stop, vec![])]);
        if let Some(owner) = self.owner.take() {
            let _ = owner.join();
        }
        if let Some(engine) = self.engine.take() {
            engine.join();
        }
    }
}
