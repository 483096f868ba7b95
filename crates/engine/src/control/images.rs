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
    attempt: u64,
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
    /// Counts its openings: events of an earlier one, perhaps by another client, are void.
    attempt: u64,
    measuring: Measuring,
}

/// Whether its size is being asked for. Others' changes may come faster than answers.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Measuring {
    #[default]
    No,
    Yes,
    /// It has changed meanwhile.
    Again,
}

/// A volume, the attempt, and what happened.
type Event = (VolumeId, u64, ImageEvent);
type Events = (mpsc::Sender<Event>, Arc<OwnedFd>);

pub(super) struct Images {
    known: BTreeMap<VolumeId, KnownImage>,
    /// The helpers' work, by client and number.
    work: BTreeMap<(DeviceIndex, u32), mpsc::Sender<Task>>,
    events: mpsc::Receiver<Event>,
    sender: Events,
}

fn report((events, bell): &Events, volume: VolumeId, attempt: u64, event: ImageEvent) {
    let _ = events.send((volume, attempt, event));
    ring_bell(&**bell);
}

fn carry_out(task: Task, events: &Events) {
    let Task {
        volume,
        attempt,
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
                Arc::new(move || report(&events, volume, attempt, ImageEvent::Changed))
            };
            ImageEvent::Opened(device.open_image(image.span, &name, changed))
        }
        Work::Lock => ImageEvent::Locked(device.lock_image(image.span)),
        Work::Measure => ImageEvent::Measured(device.image_size(image.span)),
        Work::Close => return device.close_image(image.span),
    };
    report(events, volume, attempt, event);
}

/// The clients that the engine has, by device.
pub(super) type Clients = BTreeMap<DeviceIndex, KnownDevice>;

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

    /// Opens a volume's image, or tries again.
    pub(super) fn want(&mut self, clients: &Clients, volume: VolumeId, config: ImageConfig) {
        match self.known.get_mut(&volume) {
            Some(known) if known.state == ImageState::Failed => known.state = ImageState::Wanted,
            Some(_) => return,
            None => {
                let known = KnownImage {
                    config,
                    state: ImageState::Wanted,
                    attempt: 0,
                    measuring: Measuring::No,
                };
                self.known.insert(volume, known);
            }
        }
        self.advance(clients, volume);
    }

    pub(super) fn forget(&mut self, clients: &Clients, volume: VolumeId) {
        if let Some(image) = self.known.remove(&volume) {
            self.ask(clients, volume, &image, Work::Close);
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
                image.attempt += 1;
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
                image.attempt += 1;
                image.measuring = Measuring::No;
                Work::Open
            }
            ImageState::Readable if client.fenced && !is_snapshot => {
                image.state = ImageState::Locking;
                Work::Lock
            }
            _ => return,
        };
        let task = task(client, volume, image, work);
        self.begin(task);
    }

    fn ask(&mut self, clients: &Clients, volume: VolumeId, image: &KnownImage, work: Work) {
        if let Some(client) = clients.get(&image.config.device) {
            self.begin(task(client, volume, image, work));
        }
    }

    /// Asks for an image's size, unless that is going on.
    fn measure(&mut self, clients: &Clients, volume: VolumeId) {
        let Some(image) = self.known.get_mut(&volume) else {
            return;
        };
        if image.measuring != Measuring::No {
            image.measuring = Measuring::Again;
        } else if let Some(client) = clients.get(&image.config.device) {
            image.measuring = Measuring::Yes;
            let task = task(client, volume, image, Work::Measure);
            self.begin(task);
        }
    }

    /// Takes what the helpers report. Returns messages for the daemon, and whether waiting commands
    /// may go on.
    pub(super) fn take_events(&mut self, clients: &Clients) -> (Vec<FromEngine>, bool) {
        let (mut messages, mut changed) = (Vec::new(), false);
        while let Ok((volume, attempt, event)) = self.events.try_recv() {
            let image = self.known.get_mut(&volume);
            // It may have been removed meanwhile, or opened again.
            let Some(image) = image.filter(|image| image.attempt == attempt) else {
                continue;
            };
            changed |= !matches!(event, ImageEvent::Changed | ImageEvent::Measured(_));
            match event {
                ImageEvent::Opened(Ok(size_bytes)) => {
                    image.state = ImageState::Readable;
                    messages.push(FromEngine::ImageOpened { volume, size_bytes });
                    self.advance(clients, volume);
                }
                ImageEvent::Locked(Ok(())) => image.state = ImageState::Writable,
                ImageEvent::Opened(Err(error)) | ImageEvent::Locked(Err(error)) => {
                    image.state = ImageState::Failed;
                    messages.push(FromEngine::ImageFailed { volume, error });
                }
                ImageEvent::Changed => self.measure(clients, volume),
                ImageEvent::Measured(size_bytes) => {
                    // After an error, the next change asks again.
                    if let Ok(size_bytes) = size_bytes {
                        messages.push(FromEngine::ImageOpened { volume, size_bytes });
                    }
                    if std::mem::take(&mut image.measuring) == Measuring::Again {
                        self.measure(clients, volume);
                    }
                }
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
                report(&self.sender, *volume, image.attempt, ImageEvent::Changed);
            }
        }
    }
}

fn task(client: &KnownDevice, volume: VolumeId, image: &KnownImage, work: Work) -> Task {
    Task {
        volume,
        attempt: image.attempt,
        image: image.config.clone(),
        device: client.served.device.clone(),
        work,
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

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    const VOLUME: VolumeId = VolumeId(1);
    const DEVICE: DeviceIndex = DeviceIndex(255);

    fn state(images: &Images) -> (ImageState, u64) {
        let image = &images.known[&VOLUME];
        (image.state, image.attempt)
    }

    /// A lost client's helper may report late; the next client has not opened the image.
    #[test]
    fn events_of_a_lost_client_are_void() {
        let bell = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let mut images = Images::new(bell);
        let clients = Clients::new();
        let config = ImageConfig {
            device: DEVICE,
            span: 3,
            pool: "rbd".to_owned(),
            namespace: String::new(),
            image: "a".to_owned(),
            snapshot: None,
        };
        images.want(&clients, VOLUME, config);
        let event = |images: &mut Images, attempt, event| {
            report(&images.sender, VOLUME, attempt, event);
            images.take_events(&Clients::new())
        };
        let (messages, changed) = event(&mut images, 0, ImageEvent::Opened(Ok(4096)));
        assert_eq!((messages.len(), changed), (1, true));
        assert!(state(&images) == (ImageState::Readable, 0));

        images.lose(DEVICE);
        for late in [
            ImageEvent::Locked(Ok(())),
            ImageEvent::Opened(Ok(4096)),
            ImageEvent::Locked(Err("blocklisted".to_owned())),
        ] {
            let (messages, changed) = event(&mut images, 0, late);
            assert_eq!((messages.len(), changed), (0, false));
            assert!(state(&images) == (ImageState::Wanted, 1));
        }
        event(&mut images, 1, ImageEvent::Locked(Ok(())));
        assert!(state(&images).0 == ImageState::Writable);
    }
}
