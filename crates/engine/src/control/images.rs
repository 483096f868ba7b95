//! Opening the Ceph images of volumes.
//!
//! **Design.** Helper threads open images, as a cluster may be slow. An image is read once it is
//! open, and written once its client's fence has passed and its exclusive lock is ours. Commands
//! that come before wait, as for a device that is not served. A failed image stays so until the
//! daemon sends its volume again. **Not here:** operations (the device crate).

use super::Control;
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

impl Control {
    /// Opens a volume's image, or tries again.
    pub(super) fn want_image(&mut self, volume: VolumeId, config: ImageConfig) {
        match self.images.known.get_mut(&volume) {
            Some(known) if known.state == ImageState::Failed => known.state = ImageState::Wanted,
            Some(_) => return,
            None => {
                let state = ImageState::Wanted;
                let known = KnownImage { config, state };
                self.images.known.insert(volume, known);
            }
        }
        self.advance_image(volume);
    }

    pub(super) fn forget_image(&mut self, volume: VolumeId) {
        if let Some(KnownImage { config: image, .. }) = self.images.known.remove(&volume)
            && let Some(known) = self.devices.known.get(&image.device)
        {
            let device = known.served.device.clone();
            self.images.begin(Task {
                volume,
                image,
                device,
                work: Work::Close,
            });
        }
    }

    /// After a change of the client's state.
    pub(super) fn advance_images(&mut self, device: DeviceIndex) {
        let of_it = |(_, known): &(&VolumeId, &KnownImage)| known.config.device == device;
        let volumes = self.images.known.iter().filter(of_it);
        let volumes: Vec<VolumeId> = volumes.map(|(volume, _)| *volume).collect();
        for volume in volumes {
            self.advance_image(volume);
        }
    }

    /// Its client is gone: the next one opens its images again.
    pub(super) fn lose_images(&mut self, device: DeviceIndex) {
        for image in self.images.known.values_mut() {
            if image.config.device == device {
                image.state = ImageState::Wanted;
            }
        }
    }

    fn advance_image(&mut self, volume: VolumeId) {
        let Some(image) = self.images.known.get_mut(&volume) else {
            return;
        };
        let Some(client) = self.devices.known.get(&image.config.device) else {
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
        let task = Task {
            volume,
            image: image.config.clone(),
            device: client.served.device.clone(),
            work,
        };
        self.images.begin(task);
    }

    pub(super) fn handle_image_events(&mut self) {
        while let Ok((volume, event)) = self.images.events.try_recv() {
            self.handle_image_event(volume, event);
        }
    }

    fn handle_image_event(&mut self, volume: VolumeId, event: ImageEvent) {
        let Some(image) = self.images.known.get_mut(&volume) else {
            // It was removed meanwhile.
            return;
        };
        let failed = match event {
            ImageEvent::Opened(Ok(size_bytes)) => {
                image.state = ImageState::Readable;
                self.say(&FromEngine::ImageOpened { volume, size_bytes });
                self.advance_image(volume);
                None
            }
            ImageEvent::Locked(Ok(())) => {
                image.state = ImageState::Writable;
                None
            }
            ImageEvent::Measured(Ok(size_bytes)) => {
                self.say(&FromEngine::ImageOpened { volume, size_bytes });
                return;
            }
            ImageEvent::Changed => {
                if let Some(client) = self.devices.known.get(&image.config.device) {
                    let task = Task {
                        volume,
                        image: image.config.clone(),
                        device: client.served.device.clone(),
                        work: Work::Measure,
                    };
                    self.images.begin(task);
                }
                return;
            }
            ImageEvent::Opened(Err(error)) | ImageEvent::Locked(Err(error)) => {
                image.state = ImageState::Failed;
                Some(error)
            }
            // The next change asks again.
            ImageEvent::Measured(Err(error)) => Some(error),
        };
        if let Some(error) = failed {
            self.say(&FromEngine::ImageFailed { volume, error });
        }
        self.post_all(|| Post::ImageChanged);
    }

    /// A new daemon learns of every open image.
    pub(super) fn say_images(&mut self) {
        let open = self.images.known.iter().filter(|(_, image)| {
            !matches!(
                image.state,
                ImageState::Wanted | ImageState::Opening | ImageState::Failed
            )
        });
        let volumes: Vec<VolumeId> = open.map(|(volume, _)| *volume).collect();
        for volume in volumes {
            self.handle_image_event(volume, ImageEvent::Changed);
        }
    }
}
