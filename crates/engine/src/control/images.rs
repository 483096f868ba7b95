//! Opening the Ceph images of volumes.
//!
//! **Design.** Helper threads open images, as a cluster may be slow. An image is read once it is
//! open, and written once its client's fence has passed and its exclusive lock is ours. Commands
//! that come before wait, as for a device that is not served. A failed image stays so until the
//! daemon sends its volume again. **Not here:** operations (the device crate).

use super::Control;
use super::devices::{Devices, KnownDevice};
use crate::bell::ring_bell;
use crate::reactor::mailbox::Post;
use forebay_device::{Device, ImageName};
use forebay_xlate::boundary::message::{FromEngine, ImageConfig};
use forebay_xlate::{DeviceIndex, VolumeId};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};

/// Images of a client that open at the same time.
const HELPERS: u32 = 8;

enum Work {
    Open,
    Lock,
    Measure,
    Close,
}

struct Task {
    volume: VolumeId,
    image: ImageConfig,
    device: Arc<Device>,
    work: Work,
}

enum ImageEvent {
    Opened(Result<u64, String>),
    Locked(Result<(), String>),
    /// Its size may have changed.
    Changed,
    Measured(Result<u64, String>),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ImageState {
    /// Its client is not connected yet.
    Wanted,
    Opening,
    Readable,
    Locking,
    Writable,
    Failed,
}

struct KnownImage {
    config: ImageConfig,
    state: ImageState,
}

type Events = (mpsc::Sender<(VolumeId, ImageEvent)>, Arc<OwnedFd>);

pub(super) struct Images {
    known: BTreeMap<VolumeId, KnownImage>,
    /// The helpers' work, by client and number.
    work: BTreeMap<(DeviceIndex, u32), mpsc::Sender<Task>>,
    events: mpsc::Receiver<(VolumeId, ImageEvent)>,
    sender: Events,
}

fn report((events, bell): &Events, volume: VolumeId, event: ImageEvent) {
    let _ = events.send((volume, event));
    ring_bell(&**bell);
}

fn carry_out(task: Task, events: &Events) {
    let Task {
        volume,
        image,
        device,
        work,
    } = task;
    let event = match work {
        Work::Open => {
            let name = ImageName {
                pool: image.pool,
                namespace: image.namespace,
                image: image.image,
                snapshot: image.snapshot,
            };
            let changed = {
                let events = events.clone();
                Arc::new(move || report(&events, volume, ImageEvent::Changed))
            };
            ImageEvent::Opened(device.open_image(image.span, &name, changed))
        }
        Work::Lock => ImageEvent::Locked(device.lock_image(image.span)),
        Work::Measure => ImageEvent::Measured(device.image_size(image.span)),
        Work::Close => return device.close_image(image.span),
    };
    report(events, volume, event);
}

impl Images {
    pub(super) fn new(bell: Arc<OwnedFd>) -> Self {
        let (sender, events) = mpsc::channel();
        Self {
            known: BTreeMap::new(),
            work: BTreeMap::new(),
            events,
            sender: (sender, bell),
        }
    }

    /// One helper does all work of an image, so that its order stays.
    fn begin(&mut self, task: Task) {
        let key = (task.image.device, task.image.span % HELPERS);
        let work = self.work.entry(key).or_insert_with(|| {
            let (work, tasks) = mpsc::channel();
            let events = self.sender.clone();
            // Without a helper, the image's commands end by their time limit.
            let _ = std::thread::Builder::new()
                .name(format!("image-{}-{}", key.0.0, key.1))
                .spawn(move || tasks.iter().for_each(|task| carry_out(task, &events)));
            work
        });
        let _ = work.send(task);
    }
}

/// The clients that the engine has, by device.
pub(super) type Clients = BTreeMap<DeviceIndex, KnownDevice>;

impl Images {
    /// Opens a volume's image, or tries again.
    pub(super) fn want(&mut self, clients: &Clients, volume: VolumeId, config: ImageConfig) {
        match self.known.get_mut(&volume) {
            Some(known) if known.state == ImageState::Failed => known.state = ImageState::Wanted,
            Some(_) => return,
            None => {
                let state = ImageState::Wanted;
                self.known.insert(volume, KnownImage { config, state });
            }
        }
        self.advance(clients, volume);
    }

    pub(super) fn forget(&mut self, clients: &Clients, volume: VolumeId) {
        if let Some(image) = self.known.remove(&volume) {
            self.ask(clients, volume, &image.config, Work::Close);
        }
    }

    /// After a change of a client's state.
    pub(super) fn advance_all(&mut self, clients: &Clients, device: DeviceIndex) {
        let images = self.known.iter();
        let images = images.filter(|(_, image)| image.config.device == device);
        let volumes: Vec<VolumeId> = images.map(|(volume, _)| *volume).collect();
        for volume in volumes {
            self.advance(clients, volume);
        }
    }

    /// A client is gone: the next one opens its images again.
    pub(super) fn lose(&mut self, device: DeviceIndex) {
        for image in self.known.values_mut() {
            if image.config.device == device {
                image.state = ImageState::Wanted;
            }
        }
    }

    fn advance(&mut self, clients: &Clients, volume: VolumeId) {
        let Some(image) = self.known.get_mut(&volume) else {
            return;
        };
        let Some(client) = clients.get(&image.config.device) else {
            return;
        };
        let is_snapshot = image.config.snapshot.is_some();
        let work = match image.state {
            ImageState::Wanted => {
                image.state = ImageState::Opening;
                Work::Open
            }
            ImageState::Readable if client.fenced && !is_snapshot => {
                image.state = ImageState::Locking;
                Work::Lock
            }
            _ => return,
        };
        let config = image.config.clone();
        self.ask(clients, volume, &config, work);
    }

    fn ask(&mut self, clients: &Clients, volume: VolumeId, image: &ImageConfig, work: Work) {
        if let Some(client) = clients.get(&image.device) {
            self.begin(Task {
                volume,
                image: image.clone(),
                device: client.served.device.clone(),
                work,
            });
        }
    }

    /// Takes what the helpers report. Returns messages for the daemon, and whether waiting commands
    /// may go on.
    pub(super) fn take_events(&mut self, clients: &Clients) -> (Vec<FromEngine>, bool) {
        let (mut messages, mut changed) = (Vec::new(), false);
        while let Ok((volume, event)) = self.events.try_recv() {
            let Some(image) = self.known.get_mut(&volume) else {
                // It was removed meanwhile.
                continue;
            };
            changed |= !matches!(event, ImageEvent::Changed | ImageEvent::Measured(Ok(_)));
            match event {
                ImageEvent::Opened(Ok(size_bytes)) => {
                    image.state = ImageState::Readable;
                    messages.push(FromEngine::ImageOpened { volume, size_bytes });
                    self.advance(clients, volume);
                }
                ImageEvent::Locked(Ok(())) => image.state = ImageState::Writable,
                ImageEvent::Measured(Ok(size_bytes)) => {
                    messages.push(FromEngine::ImageOpened { volume, size_bytes });
                }
                ImageEvent::Changed => {
                    let config = image.config.clone();
                    self.ask(clients, volume, &config, Work::Measure);
                }
                ImageEvent::Opened(Err(error)) | ImageEvent::Locked(Err(error)) => {
                    image.state = ImageState::Failed;
                    messages.push(FromEngine::ImageFailed { volume, error });
                }
                // The next change asks again.
                ImageEvent::Measured(Err(_)) => {}
            }
        }
        (messages, changed)
    }

    /// Has every open image measured, so that a new daemon learns its size.
    pub(super) fn measure_all(&self) {
        for (volume, image) in &self.known {
            let is_open = match image.state {
                ImageState::Readable | ImageState::Locking | ImageState::Writable => true,
                ImageState::Wanted | ImageState::Opening | ImageState::Failed => false,
            };
            if is_open {
                report(&self.sender, *volume, ImageEvent::Changed);
            }
        }
    }
}

impl Control {
    pub(super) fn handle_image_events(&mut self) {
        let Devices { images, known, .. } = &mut self.devices;
        let (messages, changed) = images.take_events(known);
        for message in &messages {
            self.say(message);
        }
        if changed {
            self.post_all(|| Post::ImageChanged);
        }
    }
}
