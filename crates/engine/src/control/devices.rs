//! Opening and fencing devices.
//!
//! **Design.** A helper thread opens each device, so that a hung one blocks nothing. It takes this
//! generation's lock on the descriptor for I/O before the first request, then waits until all
//! earlier generations' locks are released: the fence. A device is served
//! after its fence. After a take-over, devices that the dead engine served are served before it
//! ([`Control::serve_devices`]), and only recovered and overlapping commands wait. If the fence
//! then fails, the device stays, since reactors use it; the daemon may retry. One device under two
//! names is refused, as no lock would separate them. **Not here:** the locks (the device crate).

use super::Control;
use super::images::Images;
use crate::bell::ring_bell;
use crate::core::ServedDevice;
use crate::reactor::mailbox::Post;
use forebay_device::{Device, DeviceSpec, Identity, OpenOptions};
use forebay_xlate::boundary::message::{DeviceConfig, DeviceFence, FromEngine};
use forebay_xlate::boundary::region::device_mark;
use forebay_xlate::{DeviceIndex, kill_point};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Release;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

/// After this wait the device counts as failed. The daemon reports the cause of the wait.
const FENCE_LIMIT: Duration = Duration::from_secs(3600);

enum DeviceEvent {
    /// The device is open, and this engine's lock taken.
    Opened(DeviceIndex, Arc<Device>),
    /// Opening failed and left nothing open.
    NotOpened(DeviceIndex, String),
    /// Its fence has passed.
    Ready(DeviceIndex),
    Failed(DeviceIndex, String),
}

struct Opening {
    config: DeviceConfig,
    /// Requests to answer, without those of an earlier daemon.
    requests: Vec<u64>,
}

/// Devices that are open, or nearly so.
type Identities = Arc<Mutex<BTreeMap<DeviceIndex, (Identity, String)>>>;

fn lock(identities: &Identities) -> MutexGuard<'_, BTreeMap<DeviceIndex, (Identity, String)>> {
    identities.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open(
    config: &DeviceConfig,
    generation: u64,
    identities: &Identities,
) -> Result<Arc<Device>, String> {
    let spec: DeviceSpec = config
        .spec
        .parse()
        .map_err(|e| format!("{}: {e}", config.spec))?;
    let data_bytes = config.extents.checked_mul(u64::from(config.extent_bytes));
    let needs = data_bytes.and_then(|b| b.checked_add(config.data_offset_bytes));
    let Some(min_capacity_bytes) = needs else {
        return Err(format!("{}: invalid geometry", config.spec));
    };
    let options = OpenOptions {
        data_offset_bytes: config.data_offset_bytes,
        min_capacity_bytes,
        ..OpenOptions::default()
    };
    let device = Device::open(&spec, &options).map_err(|e| e.to_string())?;
    let identity = device.info().identity;
    let mut others = lock(identities);
    if let Some((_, twin)) = others.values().find(|(other, _)| *other == identity) {
        return Err(format!("{} is the same device as {twin}", config.spec));
    }
    others.insert(config.device, (identity, config.spec.clone()));
    drop(others);
    if let Err(error) = device.take_fence(generation) {
        lock(identities).remove(&config.device);
        return Err(error.to_string());
    }
    Ok(Arc::new(device))
}

fn wait(index: DeviceIndex, device: &Device, generation: u64, report: impl Fn(DeviceEvent)) {
    match device.wait_for_predecessors(generation, FENCE_LIMIT) {
        Ok(_) => report(DeviceEvent::Ready(index)),
        Err(error) => report(DeviceEvent::Failed(index, error.to_string())),
    }
}

pub(super) struct KnownDevice {
    pub served: ServedDevice,
    posted: bool,
    /// A helper waits for its fence.
    waiting: bool,
    pub fenced: bool,
}

pub(super) struct Devices {
    generation: u64,
    pub known: BTreeMap<DeviceIndex, KnownDevice>,
    pub(super) images: Images,
    opening: BTreeMap<DeviceIndex, Opening>,
    /// Devices of `opening` to be served before their fence.
    early: BTreeSet<DeviceIndex>,
    expected: BTreeSet<DeviceIndex>,
    identities: Identities,
    events: mpsc::Receiver<DeviceEvent>,
    sender: mpsc::Sender<DeviceEvent>,
    bell: Arc<OwnedFd>,
}

impl Devices {
    pub(super) fn new(generation: u64, bell: Arc<OwnedFd>) -> Self {
        let (sender, events) = mpsc::channel();
        Self {
            generation,
            known: BTreeMap::new(),
            images: Images::new(bell.clone()),
            opening: BTreeMap::new(),
            early: BTreeSet::new(),
            expected: BTreeSet::new(),
            identities: Identities::default(),
            events,
            sender,
            bell,
        }
    }

    fn wait_for(&self, index: DeviceIndex, device: Arc<Device>) {
        let generation = self.generation;
        let work = move |report: &dyn Fn(DeviceEvent)| wait(index, &device, generation, report);
        self.help(index, work, DeviceEvent::Failed);
    }

    /// A device may hang at the first access.
    fn open_and_wait(&self, config: DeviceConfig) {
        let (index, generation) = (config.device, self.generation);
        let identities = self.identities.clone();
        let work = move |report: &dyn Fn(DeviceEvent)| match open(&config, generation, &identities)
        {
            Ok(device) => {
                report(DeviceEvent::Opened(index, device.clone()));
                if device.client_address().is_none() {
                    wait(index, &device, generation, report);
                }
            }
            Err(error) => report(DeviceEvent::NotOpened(index, error)),
        };
        self.help(index, work, DeviceEvent::NotOpened);
    }

    fn help(
        &self,
        index: DeviceIndex,
        work: impl FnOnce(&dyn Fn(DeviceEvent)) + Send + 'static,
        failed: impl FnOnce(DeviceIndex, String) -> DeviceEvent,
    ) {
        let (events, bell) = (self.sender.clone(), self.bell.clone());
        let work = move || {
            work(&|what| {
                let _ = events.send(what);
                ring_bell(&*bell);
            });
        };
        let spawned = std::thread::Builder::new()
            .name(format!("fence-{}", index.0))
            .spawn(work);
        if let Err(e) = spawned {
            let why = format!("cannot start a thread for the device: {e}");
            let _ = self.sender.send(failed(index, why));
            ring_bell(&*self.bell);
        }
    }

    fn client_message(&self, device: DeviceIndex) -> Option<FromEngine> {
        let address = self.known.get(&device)?.served.device.client_address()?;
        let address = address.to_owned();
        Some(FromEngine::Client { device, address })
    }

    /// A client that its cluster has blocklisted, and what to say of it.
    fn blocklisted(&self) -> Option<(DeviceIndex, String)> {
        let mut known = self.known.iter();
        let (index, known) = known.find(|(_, known)| known.served.device.is_blocklisted())?;
        let address = known.served.device.client_address().unwrap_or_default();
        let error = format!("the cluster has blocklisted this client, {address}");
        Some((*index, error))
    }

    pub(super) fn forget_requests(&mut self) {
        for opening in self.opening.values_mut() {
            opening.requests.clear();
        }
    }

    fn were_served(&self, served: &[u64]) -> Vec<DeviceIndex> {
        let opening = self.opening.values().map(|opening| &opening.config);
        let known = self.known.values().map(|known| &*known.served.config);
        let was_served = |config: &&DeviceConfig| {
            served.get(usize::from(config.device.0)) == Some(&device_mark(&config.uuid))
        };
        (opening.chain(known))
            .filter(was_served)
            .map(|config| config.device)
            .collect()
    }
}

impl Control {
    pub(super) fn set_device(&mut self, request: u64, config: DeviceConfig) {
        let index = config.device;
        let another = || Err(format!("{index} is another device in this engine"));
        if let Some(opening) = self.devices.opening.get_mut(&index) {
            if opening.config.uuid == config.uuid && opening.config.extents == config.extents {
                opening.requests.push(request);
            } else {
                self.done(request, another());
            }
            return;
        }
        let Some(known) = self.devices.known.get_mut(&index) else {
            let opening = Opening {
                config: config.clone(),
                requests: vec![request],
            };
            self.devices.opening.insert(index, opening);
            self.devices.open_and_wait(config);
            return;
        };
        let here = &known.served.config;
        if here.uuid != config.uuid || here.extents != config.extents {
            self.done(request, another());
            return;
        }
        let fenced = known.fenced;
        let device = known.served.device.clone();
        let is_noted = match config.fence {
            DeviceFence::Locks => true,
            DeviceFence::Unnoted => false,
            DeviceFence::Blocklist(predecessors) => {
                device.set_predecessors(predecessors);
                true
            }
        };
        let wait_again = is_noted && !fenced && !std::mem::replace(&mut known.waiting, true);
        self.done(request, Ok(()));
        if let Some(client) = self.devices.client_message(index).filter(|_| !is_noted) {
            self.say(&client);
        }
        if fenced {
            self.say(&FromEngine::DeviceReady { device: index });
        }
        if wait_again {
            self.devices.wait_for(index, device);
        }
    }

    /// Serves a dead engine's devices, by their marks, before their fence. Call it before any
    /// reactor gets recovered commands. Devices whose fence the dead engine awaited itself must
    /// wait again: older operations are not recorded.
    pub(super) fn serve_devices(&mut self, served: &[u64]) {
        for index in self.devices.were_served(served) {
            if self.devices.opening.contains_key(&index) {
                self.devices.early.insert(index);
                self.devices.expected.insert(index);
                self.post_all(|| Post::Expect(index, true));
            } else {
                self.serve_device(index);
            }
        }
    }

    /// Serves no device before its fence, but recovered commands wait for the fences of these.
    pub(super) fn expect_devices(&mut self, served: &[u64]) {
        for index in self.devices.were_served(served) {
            self.devices.expected.insert(index);
            self.post_all(|| Post::Expect(index, true));
        }
    }

    fn serve_device(&mut self, index: DeviceIndex) {
        if let Some(known) = self.devices.known.get_mut(&index)
            && !std::mem::replace(&mut known.posted, true)
        {
            let served = known.served.clone();
            let mark = device_mark(&served.config.uuid);
            self.region.devices()[usize::from(index.0)]
                .served
                .store(mark, Release);
            self.post_all(|| Post::Device(served.clone()));
        }
    }

    fn opened(&mut self, index: DeviceIndex, device: Arc<Device>) {
        let Some(opening) = self.devices.opening.remove(&index) else {
            return;
        };
        // A Ceph client's fence needs the daemon first.
        let waiting = device.client_address().is_none();
        let served = ServedDevice {
            config: Arc::new(opening.config),
            device,
        };
        let known = KnownDevice {
            served,
            posted: false,
            waiting,
            fenced: false,
        };
        if let Some(heart) = &self.heart {
            heart.device(index, known.served.device.clone());
        }
        self.devices.known.insert(index, known);
        if self.devices.early.remove(&index) {
            self.serve_device(index);
        }
        for request in opening.requests {
            self.done(request, Ok(()));
        }
        if let Some(client) = self.devices.client_message(index) {
            self.say(&client);
        }
        let Devices { images, known, .. } = &mut self.devices;
        images.advance_all(known, index);
    }

    fn not_opened(&mut self, index: DeviceIndex, error: &str) {
        self.devices.early.remove(&index);
        if self.devices.expected.remove(&index) {
            // The device is served after its fence, if ever.
            self.post_all(|| Post::Expect(index, false));
        }
        let opening = self.devices.opening.remove(&index);
        for request in opening.map_or_else(Vec::new, |opening| opening.requests) {
            self.done(request, Err(error.to_owned()));
        }
    }

    fn forget_device(&mut self, index: DeviceIndex) {
        self.devices.known.remove(&index);
        self.devices.images.lose(index);
        if let Some(heart) = &self.heart {
            heart.forget(index);
        }
        lock(&self.devices.identities).remove(&index);
    }

    pub(super) fn handle_device_events(&mut self) {
        // The daemon decides whether such a client reconnects.
        while let Some((device, error)) = self.devices.blocklisted() {
            self.forget_device(device);
            self.say(&FromEngine::DeviceFailed { device, error });
        }
        while let Ok(events) = self.devices.events.try_recv() {
            match events {
                DeviceEvent::Opened(index, device) => self.opened(index, device),
                DeviceEvent::NotOpened(index, error) => self.not_opened(index, &error),
                DeviceEvent::Ready(index) => {
                    let Some(known) = self.devices.known.get_mut(&index) else {
                        continue;
                    };
                    known.fenced = true;
                    self.serve_device(index);
                    self.post_all(|| Post::Fenced(index));
                    kill_point!("over.fenced");
                    self.say(&FromEngine::DeviceReady { device: index });
                    let Devices { images, known, .. } = &mut self.devices;
                    images.advance_all(known, index);
                }
                DeviceEvent::Failed(index, error) => {
                    // The daemon may ask again.
                    let known = self.devices.known.get_mut(&index);
                    if known.is_some_and(|known| {
                        known.waiting = false;
                        !known.posted
                    }) {
                        self.forget_device(index);
                    }
                    self.say(&FromEngine::DeviceFailed {
                        device: index,
                        error,
                    });
                }
            }
        }
    }
}
