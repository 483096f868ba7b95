//! Opening and fencing devices.
//!
//! **Design.** The engine takes its own generation's lock on the very descriptor that it does I/O
//! through, before its first request; then a helper thread waits until every earlier generation's
//! lock has fallen: the fence (`shared/design.md`). Who doesn't know what a dead engine has in flight
//! serves the device only then. Who has taken that over serves at once ([`Control::serve_devices`]):
//! only what was carried, and what overlaps it, waits for [`Post::Fenced`]. A device that comes to
//! nothing after that keeps its place, since reactors use it; the daemon may ask for its fence again.
//!
//! Two of them that are one (by another path, link or device node) are refused: no lock would stand
//! between them. **Not here:** the locks themselves (the device crate).

use super::{Control, KnownDevice};
use crate::core::ServedDevice;
use crate::mailbox::{Post, ring_bell};
use forebay_device::{Device, DeviceSpec, OpenOptions};
use forebay_xlate::boundary::message::{DeviceConfig, FromEngine};
use forebay_xlate::{DeviceIndex, kill_point};
use std::sync::Arc;
use std::time::Duration;

/// How long the helper waits before it says that it still does.
const FENCE_NOTICE: Duration = Duration::from_secs(20);
/// How long it waits at all before the device counts as failed.
const FENCE_LIMIT: Duration = Duration::from_secs(3600);

/// From a helper thread.
pub(super) enum News {
    /// Every earlier engine is gone from the device.
    Ready(DeviceIndex),
    /// It isn't yet.
    Waiting(DeviceIndex, String),
    /// It can't be used.
    Failed(DeviceIndex, String),
}

impl Control {
    pub(super) fn set_device(&mut self, request: u64, config: DeviceConfig) {
        let index = config.device;
        if let Some(known) = self.devices.get_mut(&index) {
            let here = &known.served.config;
            let same = here.uuid == config.uuid && here.extents == config.extents;
            let fenced = known.fenced;
            let wait = same && !fenced && !std::mem::replace(&mut known.waiting, true);
            let device = known.served.device.clone();
            self.done(
                request,
                if same {
                    Ok(())
                } else {
                    Err(format!("{index} is another device here"))
                },
            );
            if same && fenced {
                self.say(&FromEngine::DeviceReady { device: index });
            }
            if wait {
                self.wait_for_fence(index, device);
            }
            return;
        }
        match self.open_device(&config) {
            Ok(device) => {
                let device = Arc::new(device);
                let served = ServedDevice {
                    config: Arc::new(config),
                    device: device.clone(),
                };
                self.devices.insert(
                    index,
                    KnownDevice {
                        served,
                        posted: false,
                        waiting: true,
                        fenced: false,
                    },
                );
                self.done(request, Ok(()));
                self.wait_for_fence(index, device);
            }
            Err(error) => self.done(request, Err(error)),
        }
    }

    fn open_device(&self, config: &DeviceConfig) -> Result<Device, String> {
        let spec: DeviceSpec = config
            .spec
            .parse()
            .map_err(|e| format!("{}: {e}", config.spec))?;
        let data_bytes = config.extents.checked_mul(u64::from(config.extent_bytes));
        let needs = data_bytes.and_then(|b| b.checked_add(config.data_offset_bytes));
        let Some(min_capacity_bytes) = needs else {
            return Err(format!("{}: impossible geometry", config.spec));
        };
        let options = OpenOptions {
            data_offset_bytes: config.data_offset_bytes,
            min_capacity_bytes,
            ..OpenOptions::default()
        };
        let device = Device::open(&spec, &options).map_err(|e| e.to_string())?;
        let is_it =
            |known: &&KnownDevice| known.served.device.info().identity == device.info().identity;
        if let Some(twin) = self.devices.values().find(is_it) {
            return Err(format!(
                "{} is the same device as {}",
                config.spec, twin.served.config.spec
            ));
        }
        device
            .take_fence(self.generation)
            .map_err(|e| e.to_string())?;
        Ok(device)
    }

    fn wait_for_fence(&self, index: DeviceIndex, device: Arc<Device>) {
        let (news, bell, generation) = (
            self.device_sender.clone(),
            self.bell.wake.clone(),
            self.generation,
        );
        let wait = move || {
            let tell = |what| {
                let _ = news.send(what);
                ring_bell(&*bell);
            };
            let mut waited = Duration::ZERO;
            loop {
                match device.predecessors_gone(generation) {
                    Ok(true) => return tell(News::Ready(index)),
                    Ok(false) if waited >= FENCE_LIMIT => {
                        let why = "an earlier engine still holds its lock: its I/O has not ended"
                            .to_string();
                        return tell(News::Failed(index, why));
                    }
                    Ok(false) => {
                        if let Err(e) = device.wait_for_predecessors(generation, FENCE_NOTICE) {
                            waited += FENCE_NOTICE;
                            tell(News::Waiting(index, e.to_string()));
                        }
                    }
                    Err(e) => return tell(News::Failed(index, e.to_string())),
                }
            }
        };
        let spawned = std::thread::Builder::new()
            .name(format!("fence-{}", index.0))
            .spawn(wait);
        if let Err(e) = spawned {
            let _ = self
                .device_sender
                .send(News::Failed(index, format!("no thread for the fence: {e}")));
            ring_bell(&*self.bell.wake);
        }
    }

    /// What the dead engine has in flight is taken over: every device that is open is served from now
    /// on, before its fence. Before any reactor hears of what is carried.
    pub(super) fn serve_devices(&mut self) {
        let all: Vec<DeviceIndex> = self.devices.keys().copied().collect();
        for index in all {
            self.serve_device(index);
        }
    }

    fn serve_device(&mut self, index: DeviceIndex) {
        if let Some(known) = self.devices.get_mut(&index)
            && !std::mem::replace(&mut known.posted, true)
        {
            let served = known.served.clone();
            self.post_all(|| Post::Device(served.clone()));
        }
    }

    pub(super) fn take_device_news(&mut self) {
        while let Ok(news) = self.device_news.try_recv() {
            match news {
                News::Ready(index) => {
                    let Some(known) = self.devices.get_mut(&index) else {
                        continue;
                    };
                    known.fenced = true;
                    self.serve_device(index);
                    self.post_all(|| Post::Fenced(index));
                    kill_point!("over.fenced");
                    self.say(&FromEngine::DeviceReady { device: index });
                }
                News::Waiting(index, text) => {
                    self.say(&FromEngine::Notice {
                        text: format!("{index}: {text}"),
                    });
                }
                News::Failed(index, error) => {
                    // Forgotten, so that the daemon may ask again.
                    if let Some(known) = self.devices.get_mut(&index) {
                        known.waiting = false;
                        if !known.posted {
                            self.devices.remove(&index);
                        }
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
