//! The heartbeat shows other machines that this engine uses the pool's devices, and notices a
//! take-over by one.
//!
//! **Design.** A thread with its own ring reads each device's block once a period, then writes a
//! higher count. If the block has another holder, the process exits at once. A hung device delays
//! no other. A stopped process (SIGSTOP, a paused VM) may have lost the pool, so a check is valid
//! only until the time in [`Pulse`]; then reactors submit nothing before the next. **Not here:**
//! the format ([`forebay_device::heartbeat`]), and taking a pool over (the daemon).

use forebay_device::heartbeat::{
    Beat, HEARTBEAT_BYTES, HEARTBEAT_OFFSET_BYTES, Holder, PAUSE_MS, PERIOD_MS,
};
use forebay_device::mem::StaticRegion;
use forebay_device::ring::{Ring, RingOptions};
use forebay_device::{Buf, Device, Finish, Op, Submitted};
use forebay_xlate::DeviceIndex;
use rustix::time::{ClockId, clock_gettime};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// The pool was lost to another machine (EX_TEMPFAIL).
const LOST_THE_POOL: i32 = 75;
const DEVICES: usize = 256;
const PERIOD_NS: u64 = PERIOD_MS * 1_000_000;
const PAUSE_NS: u64 = PAUSE_MS * 1_000_000;
/// After this wait for a check, the engine gives up.
const POLL_LIMIT_NS: u64 = 10_000_000_000;
/// Limit of a new device's first check.
const GRACE_NS: u64 = 100_000_000;
const POLL_AGAIN: Duration = Duration::from_millis(1);

/// A cheap clock, some milliseconds late.
fn coarse_ns() -> u64 {
    let t = clock_gettime(ClockId::MonotonicCoarse);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Time until which the last check of the heartbeat blocks is valid.
#[derive(Debug)]
pub(crate) struct Pulse {
    until_ns: AtomicU64,
    /// Entry into the submitting call, else 0. On some file systems (FUSE) it waits for another
    /// request on the file.
    inside_ns: AtomicU64,
}

impl Default for Pulse {
    /// For devices without heartbeat.
    fn default() -> Self {
        Self {
            until_ns: AtomicU64::new(u64::MAX),
            inside_ns: AtomicU64::new(0),
        }
    }
}

impl Pulse {
    /// Returns at once while the last check is valid, else waits for a new one.
    #[inline]
    pub(crate) fn check(&self) {
        if coarse_ns() > self.until_ns.load(Relaxed) {
            self.wait();
        }
    }

    /// Keeps reactors going while a hung device blocks the heartbeat thread. After a pause, that
    /// thread first gets a period for its check.
    fn bridge(&self) {
        let mut last = coarse_ns();
        loop {
            std::thread::sleep(Duration::from_millis(PERIOD_MS));
            let now = coarse_ns();
            let has_paused = now - std::mem::replace(&mut last, now) > PAUSE_NS / 2;
            let inside = self.inside_ns.load(Relaxed);
            if !has_paused && inside > 0 && now.saturating_sub(inside) > PERIOD_NS {
                self.until_ns.store(now + PAUSE_NS, Relaxed);
            }
        }
    }

    #[cold]
    fn wait(&self) {
        let limit = coarse_ns() + POLL_LIMIT_NS;
        while coarse_ns() > self.until_ns.load(Relaxed) {
            if coarse_ns() > limit {
                eprintln!("the engine stalled and can't read its devices' heartbeats: it exits");
                std::process::abort();
            }
            std::thread::sleep(POLL_AGAIN);
        }
    }
}

enum Order {
    Hold(Holder, BTreeSet<DeviceIndex>),
    Device(DeviceIndex, Arc<Device>),
    Forget(DeviceIndex),
}

pub(crate) struct Heart {
    orders: mpsc::Sender<Order>,
    pulse: Arc<Pulse>,
    held: BTreeSet<DeviceIndex>,
}

impl Heart {
    pub(crate) fn start(pulse: Arc<Pulse>) -> io::Result<Self> {
        let (sender, orders) = mpsc::channel();
        let its_pulse = pulse.clone();
        let bridge = pulse.clone();
        std::thread::Builder::new()
            .name("heartbeat-watch".into())
            .spawn(move || bridge.bridge())?;
        let room = StaticRegion::anonymous(DEVICES * HEARTBEAT_BYTES)?;
        std::thread::Builder::new()
            .name("heartbeat".into())
            .spawn(move || {
                let options = RingOptions {
                    // One request per device.
                    entries: DEVICES as u32,
                    cq_entries: 2 * DEVICES as u32,
                    ..RingOptions::default()
                };
                match Ring::new(&options) {
                    Ok(ring) => Beating::new(orders, ring, room, its_pulse).run(),
                    Err(error) => {
                        eprintln!(
                            "this engine exits because it can't create a ring for the heartbeat: {error}"
                        );
                        std::process::exit(1);
                    }
                }
            })?;
        Ok(Self {
            orders: sender,
            pulse,
            held: BTreeSet::new(),
        })
    }

    pub(crate) fn hold(&mut self, holder: Holder, devices: BTreeSet<DeviceIndex>) {
        self.held.clone_from(&devices);
        let _ = self.orders.send(Order::Hold(holder, devices));
    }

    /// Reactors submit nothing before the new device's check, or [`GRACE_NS`].
    pub(crate) fn device(&self, index: DeviceIndex, device: Arc<Device>) {
        if self.held.contains(&index) {
            self.pulse.until_ns.store(0, Relaxed);
        }
        let _ = self.orders.send(Order::Device(index, device));
    }

    pub(crate) fn forget(&self, index: DeviceIndex) {
        let _ = self.orders.send(Order::Forget(index));
    }
}

#[derive(Clone, Copy)]
enum BeatStage {
    Idle,
    Reads(Op),
    Writes(Op),
}

struct Patient {
    device: Arc<Device>,
    /// Differs from an earlier device's with this index.
    serial: u64,
    stage: BeatStage,
    failed: bool,
}

struct Beating {
    orders: mpsc::Receiver<Order>,
    ring: Ring,
    room: StaticRegion,
    pulse: Arc<Pulse>,
    holder: Option<Holder>,
    held: BTreeSet<DeviceIndex>,
    devices: BTreeMap<DeviceIndex, Patient>,
    serial: u64,
    count: u64,
    checking: BTreeSet<DeviceIndex>,
    period_began_ns: u64,
}

impl Beating {
    fn new(
        orders: mpsc::Receiver<Order>,
        ring: Ring,
        room: StaticRegion,
        pulse: Arc<Pulse>,
    ) -> Self {
        Self {
            orders,
            ring,
            room,
            pulse,
            holder: None,
            held: BTreeSet::new(),
            devices: BTreeMap::new(),
            serial: 0,
            count: 0,
            checking: BTreeSet::new(),
            period_began_ns: 0,
        }
    }

    fn run(mut self) {
        let mut next_ns = coarse_ns();
        loop {
            let now = coarse_ns();
            if now >= next_ns {
                next_ns = now + PERIOD_NS;
                self.begin_period(now);
            }
            let mut wake_ns = next_ns;
            if !self.checking.is_empty() && self.pulse.until_ns.load(Relaxed) == 0 {
                let grace_ends = self.period_began_ns + GRACE_NS;
                if now >= grace_ends {
                    self.checked();
                } else {
                    wake_ns = wake_ns.min(grace_ends);
                }
            }
            let pause = Duration::from_nanos(wake_ns.saturating_sub(coarse_ns()));
            if self.is_idle() {
                match self.orders.recv_timeout(pause) {
                    Ok(order) => {
                        self.handle_order(order);
                        next_ns = 0;
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            } else {
                let _ = self.ring.wait(1, Some(pause));
                self.reap();
            }
            while let Ok(order) = self.orders.try_recv() {
                self.handle_order(order);
                next_ns = 0;
            }
        }
    }

    fn is_idle(&self) -> bool {
        let mut devices = self.devices.values();
        devices.all(|patient| matches!(patient.stage, BeatStage::Idle))
    }

    fn handle_order(&mut self, order: Order) {
        match order {
            Order::Hold(holder, held) => {
                self.holder = Some(holder);
                self.held = held;
            }
            Order::Device(index, device) => {
                self.serial += 1;
                let patient = Patient {
                    device,
                    serial: self.serial,
                    stage: BeatStage::Idle,
                    failed: false,
                };
                self.devices.insert(index, patient);
            }
            Order::Forget(index) => {
                // It stays in `held`: it may be opened again.
                self.devices.remove(&index);
                if self.checking.remove(&index) && self.checking.is_empty() {
                    self.checked();
                }
            }
        }
    }

    fn begin_period(&mut self, now: u64) {
        if self.holder.is_none() {
            return;
        }
        // An added device begins no period: others' first checks may be in progress.
        if now.saturating_sub(self.period_began_ns) >= PERIOD_NS {
            if !self.checking.is_empty() && self.period_began_ns > 0 {
                // The remaining devices hang; the others were checked.
                self.checked();
            }
            self.period_began_ns = now;
            self.checking.clear();
        }
        let held: Vec<DeviceIndex> = self.held.iter().copied().collect();
        for index in held {
            let idle = self.devices.get(&index);
            if idle.is_some_and(|patient| matches!(patient.stage, BeatStage::Idle))
                && let Some(block) = self.block(index)
            {
                self.checking.insert(index);
                self.queue_beat(
                    index,
                    BeatStage::Reads(Op::read(HEARTBEAT_OFFSET_BYTES, block)),
                );
            }
        }
        self.enter();
        if self.checking.is_empty() {
            self.checked();
        }
    }

    /// All devices that answer had this holder at the period's start.
    fn checked(&self) {
        if !self.held.is_empty() {
            let until = self.period_began_ns + PAUSE_NS;
            self.pulse.until_ns.store(until, Relaxed);
        }
    }

    fn block(&self, index: DeviceIndex) -> Option<Buf> {
        let at = usize::from(index.0) * HEARTBEAT_BYTES;
        self.room.buf(at, HEARTBEAT_BYTES as u32)
    }

    fn queue_beat(&mut self, index: DeviceIndex, stage: BeatStage) {
        let Some(patient) = self.devices.get_mut(&index) else {
            return;
        };
        let (BeatStage::Reads(mut op) | BeatStage::Writes(mut op)) = stage else {
            return;
        };
        let submitted = patient.device.queue(
            &mut self.ring,
            &mut op,
            patient.serial << 8 | u64::from(index.0),
        );
        patient.stage = match stage {
            BeatStage::Reads(_) => BeatStage::Reads(op),
            _ => BeatStage::Writes(op),
        };
        match submitted {
            Submitted::Queued => {}
            Submitted::Done(result) => self.ended(index, result.map_err(|errno| errno.to_string())),
            Submitted::RingFull => self.ended(index, Err("the ring is full".to_owned())),
            Submitted::NotReady => self.ended(index, Err("it is not ready".to_owned())),
        }
    }

    fn reap(&mut self) {
        let mut done = Vec::new();
        self.ring
            .for_each_completion(|completion| done.push(completion));
        for completion in done {
            let index = DeviceIndex(completion.user_data as u8);
            let here = self.devices.get(&index);
            let Some(patient) = here.filter(|one| one.serial == completion.user_data >> 8) else {
                continue;
            };
            let (BeatStage::Reads(op) | BeatStage::Writes(op)) = patient.stage else {
                continue;
            };
            match patient.device.finish(op, completion.result) {
                Finish::Done => self.ended(index, Ok(())),
                Finish::Failed(errno) => self.ended(index, Err(errno.to_string())),
                Finish::Again(op) => {
                    let again = match patient.stage {
                        BeatStage::Reads(_) => BeatStage::Reads(op),
                        _ => BeatStage::Writes(op),
                    };
                    self.queue_beat(index, again);
                }
            }
        }
        self.enter();
    }

    fn enter(&mut self) {
        self.pulse.inside_ns.store(coarse_ns(), Relaxed);
        let _ = self.ring.submit();
        self.pulse.inside_ns.store(0, Relaxed);
    }

    fn ended(&mut self, index: DeviceIndex, result: Result<(), String>) {
        let Some(patient) = self.devices.get_mut(&index) else {
            return;
        };
        let stage = std::mem::replace(&mut patient.stage, BeatStage::Idle);
        if let Err(error) = &result
            && !std::mem::replace(&mut patient.failed, true)
        {
            eprintln!("the heartbeat of {index} failed: {error}");
        }
        match stage {
            BeatStage::Reads(_) => {
                let was = result.is_ok().then(|| self.check(index)).flatten();
                if self.checking.remove(&index) && self.checking.is_empty() {
                    self.checked();
                }
                if result.is_ok() && self.held.contains(&index) {
                    self.beat(index, was.map_or(0, |beat| beat.count));
                }
            }
            BeatStage::Writes(_) if result.is_ok() => patient.failed = false,
            _ => {}
        }
    }

    /// Does not return if the block has another holder.
    fn check(&self, index: DeviceIndex) -> Option<Beat> {
        let mut bytes = [0; HEARTBEAT_BYTES];
        let at = usize::from(index.0) * HEARTBEAT_BYTES;
        if !self.room.copy_out(at, &mut bytes) {
            return None;
        }
        let beat = Beat::decode(&bytes)?;
        let ours = self.holder.as_ref()?;
        if !beat.holder.is(ours) {
            eprintln!(
                "{index} was taken over by another Forebay, on host {:?}: this engine exits",
                beat.holder.host
            );
            std::process::exit(LOST_THE_POOL);
        }
        Some(beat)
    }

    fn beat(&mut self, index: DeviceIndex, last: u64) {
        let (Some(holder), Some(block)) = (&self.holder, self.block(index)) else {
            return;
        };
        self.count = self.count.max(last) + 1;
        let beat = Beat {
            holder: holder.clone(),
            count: self.count,
            stopped: false,
        };
        let at = usize::from(index.0) * HEARTBEAT_BYTES;
        if self.room.copy_in(at, &beat.encode()) {
            self.queue_beat(
                index,
                BeatStage::Writes(Op::write(HEARTBEAT_OFFSET_BYTES, block)),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_device::{DeviceSpec, OpenOptions};
    use std::time::Instant;

    #[test]
    fn device_that_comes_back_is_looked_at() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let spec: DeviceSpec = format!("file:{}", file.path().display()).parse().unwrap();
        let open = || Arc::new(Device::open(&spec, &OpenOptions::default()).unwrap());
        let pulse = Arc::new(Pulse::default());
        let mut heart = Heart::start(pulse.clone()).unwrap();
        let holder = Holder {
            owner: [1; 16],
            boot: [2; 16],
            host: "here".to_owned(),
        };
        let only = DeviceIndex(0);
        heart.hold(holder, BTreeSet::from([only]));
        for _ in 0..2 {
            heart.device(only, open());
            let limit = Instant::now() + Duration::from_secs(30);
            while coarse_ns() > pulse.until_ns.load(Relaxed) {
                assert!(Instant::now() < limit, "nobody looks at it");
                std::thread::sleep(POLL_AGAIN);
            }
            heart.forget(only);
        }
    }
}
