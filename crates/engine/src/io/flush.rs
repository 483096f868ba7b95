//! Device flushes, at most one per device and reactor. Commands that ask meanwhile share the next
//! one, so flushes of many tenants are merged. **Not here:** the choice of devices, and commits
//! ([`crate::core`]).

use crate::io::devices::{DeviceRing, kind};
use crate::io::slab::MAX_IOS;
use forebay_device::{Errno, Finish, Op, Submitted};
use forebay_xlate::DeviceIndex;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Waiter {
    Io(u32),
    Job(u64),
}

#[derive(Debug)]
enum Running {
    No,
    /// To be submitted once the ring has room.
    Wanted,
    Yes(Op),
}

#[derive(Debug)]
struct DeviceFlush {
    running: Running,
    now: Vec<Waiter>,
    next: Vec<Waiter>,
}

#[derive(Debug)]
pub(crate) struct Flusher {
    devices: Vec<DeviceFlush>,
    retry: bool,
}

impl Flusher {
    pub(crate) fn new() -> Self {
        let each = |_| DeviceFlush {
            running: Running::No,
            now: Vec::new(),
            next: Vec::new(),
        };
        Self {
            devices: (0..256).map(each).collect(),
            retry: false,
        }
    }

    pub(crate) fn is_busy(&self) -> bool {
        let idle = |flush: &DeviceFlush| matches!(flush.running, Running::No);
        !self.devices.iter().all(idle)
    }

    pub(crate) fn is_at_device(&self, device: DeviceIndex) -> bool {
        matches!(self.devices[usize::from(device.0)].running, Running::Yes(_))
    }

    /// The flush begins after now. Returns its result if it ended at once.
    pub(crate) fn ask(
        &mut self,
        device: u8,
        waiter: Waiter,
        devices: &mut DeviceRing,
    ) -> Option<Result<(), Errno>> {
        let flush = &mut self.devices[usize::from(device)];
        for list in [&mut flush.now, &mut flush.next] {
            if list.capacity() == 0 {
                // Allocated once per device.
                list.reserve_exact(MAX_IOS + 64);
            }
        }
        match flush.running {
            Running::No => {
                flush.now.push(waiter);
                return self.run(device, devices);
            }
            Running::Wanted => flush.now.push(waiter),
            Running::Yes(_) => flush.next.push(waiter),
        }
        None
    }

    fn run(&mut self, device: u8, devices: &mut DeviceRing) -> Option<Result<(), Errno>> {
        let mut op = Op::flush();
        let submitted = devices.queue(device, &mut op, kind::FLUSH, u64::from(device))?;
        let flush = &mut self.devices[usize::from(device)];
        match submitted {
            Submitted::Queued => flush.running = Running::Yes(op),
            Submitted::RingFull => {
                flush.running = Running::Wanted;
                self.retry = true;
            }
            Submitted::Done(result) => return Some(result),
            // Never, as a flush concerns no single image.
            Submitted::NotReady => return Some(Err(Errno::NODEV)),
        }
        None
    }

    /// Whether to call [`Flusher::try_again`].
    pub(crate) fn must_retry(&mut self) -> bool {
        std::mem::take(&mut self.retry)
    }

    pub(crate) fn try_again(
        &mut self,
        device: u8,
        devices: &mut DeviceRing,
    ) -> Option<Result<(), Errno>> {
        match self.devices[usize::from(device)].running {
            Running::Wanted => self.run(device, devices),
            _ => None,
        }
    }

    /// Handles a completion; `None` if the flush continues.
    pub(crate) fn completed(
        &mut self,
        device: u8,
        result: i32,
        devices: &mut DeviceRing,
    ) -> Option<Result<(), Errno>> {
        let Running::Yes(op) = &self.devices[usize::from(device)].running else {
            return None;
        };
        match devices.finish(device, *op, result)? {
            Finish::Done => Some(Ok(())),
            Finish::Failed(errno) => Some(Err(errno)),
            Finish::Again(_) => self.run(device, devices),
        }
    }

    /// Returns its waiters, and the next flush's result if that ended at once.
    pub(crate) fn ended(
        &mut self,
        device: u8,
        devices: &mut DeviceRing,
    ) -> (Vec<Waiter>, Option<Result<(), Errno>>) {
        let flush = &mut self.devices[usize::from(device)];
        flush.running = Running::No;
        let ended = std::mem::take(&mut flush.now);
        flush.now = std::mem::take(&mut flush.next);
        let next = match flush.now.is_empty() {
            true => None,
            false => self.run(device, devices),
        };
        (ended, next)
    }

    /// Keeps an empty list for the next flush.
    pub(crate) fn keep(&mut self, device: u8, list: Vec<Waiter>) {
        let flush = &mut self.devices[usize::from(device)];
        if flush.next.capacity() == 0 {
            flush.next = list;
        } else if flush.now.capacity() == 0 {
            flush.now = list;
        }
    }

    pub(crate) fn forget(&mut self, index: u32) {
        for flush in &mut self.devices {
            for list in [&mut flush.now, &mut flush.next] {
                list.retain(|waiter| !matches!(waiter, Waiter::Io(other) if *other == index));
            }
        }
    }
}
