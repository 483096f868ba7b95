//! A device that fails as told: for tests.
//!
//! **Purpose.** Show what the layers above make of a bad device: errors, slowness, a hang, a write of which only a part
//! is carried out, a flush that is a lie, and a block that ends or stops the engine that touches it.
//!
//! **Design.** A file, with the kernel's real I/O and the fence's real locks; faults are added around it. What to do
//! stands in a text file beside it, `.faults` ([`set`] replaces it in one step; without it the device is a file like any
//! other), and is read again whenever it has changed. Chance comes from the spec's seed, the engine's generation and
//! the operation's number, so that a run can be repeated. Errors, delays and lies are for the engine's operations;
//! `daemon_error`, `daemon_delay` and `hang` are for what the daemon reads and writes too. [`allow`] must have been called in the process, so that
//! no such device is used by mistake.
//!
//! **What it does not do.** What a lost flush leaves after a power cut isn't played (see [`crate::volatile`]). A delayed
//! or hanging operation isn't at the device yet, so it dies with its process.

use std::fmt::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use io_uring::types::Timespec;
use rustix::io::Errno;

use crate::device::{Device, Submitted};
use crate::error::DeviceError;
use crate::hang::{HangGate, LOOK_AGAIN};
use crate::mem::{Memory, Named};
use crate::op::{Op, OpKind};
use crate::ring::{Io, Ring};
use crate::spec::DeviceSpec;
use crate::vectors::Bufs;

/// The longest delay of one operation.
pub const MAX_DELAY_MS: u64 = 1000;
/// What poisons: a touch of any of it counts.
const TRAP_BYTES: u64 = 4096;

/// What a device does wrong. All off: nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    /// So many of a million operations end with `EIO` and do nothing.
    pub error_ppm: u64,
    /// So many of a million writes are carried out in part, and end with `EIO`.
    pub torn_ppm: u64,
    /// So many of a million operations begin late.
    pub delay_ppm: u64,
    /// So late at most, up to [`MAX_DELAY_MS`].
    pub delay_ms: u64,
    /// So many of a million of the daemon's reads, writes and flushes end with `EIO`.
    pub daemon_error_ppm: u64,
    /// Each of the daemon's reads, writes and flushes takes so long.
    pub daemon_delay_ms: u64,
    /// Nothing begins.
    pub hang: bool,
    /// Flushes end well and do nothing.
    pub lose_flushes: bool,
    /// Reading or writing this place (4 KiB) aborts the engine.
    pub poison: Option<u64>,
    /// Reading or writing this place (4 KiB) stops the reactor for good.
    pub spin: Option<u64>,
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "error_ppm={}", self.error_ppm)?;
        writeln!(f, "torn_ppm={}", self.torn_ppm)?;
        writeln!(f, "delay_ppm={}", self.delay_ppm)?;
        writeln!(f, "delay_ms={}", self.delay_ms)?;
        writeln!(f, "daemon_error_ppm={}", self.daemon_error_ppm)?;
        writeln!(f, "daemon_delay_ms={}", self.daemon_delay_ms)?;
        writeln!(f, "hang={}", u64::from(self.hang))?;
        writeln!(f, "lose_flushes={}", u64::from(self.lose_flushes))?;
        for (name, place) in [("poison", self.poison), ("spin", self.spin)] {
            if let Some(place) = place {
                writeln!(f, "{name}={place}")?;
            }
        }
        Ok(())
    }
}

impl Faults {
    /// `None`: there is a line that can't be understood.
    fn parse(text: &str) -> Option<Self> {
        let mut faults = Self::default();
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            let (key, value) = line.split_once('=')?;
            let value: u64 = value.trim().parse().ok()?;
            match key.trim() {
                "error_ppm" => faults.error_ppm = value,
                "torn_ppm" => faults.torn_ppm = value,
                "delay_ppm" => faults.delay_ppm = value,
                "delay_ms" => faults.delay_ms = value,
                "daemon_error_ppm" => faults.daemon_error_ppm = value,
                "daemon_delay_ms" => faults.daemon_delay_ms = value,
                "hang" => faults.hang = value != 0,
                "lose_flushes" => faults.lose_flushes = value != 0,
                "poison" => faults.poison = Some(value),
                "spin" => faults.spin = Some(value),
                _ => return None,
            }
        }
        Some(faults)
    }
}

/// The file that says what the device at `device` does wrong.
pub fn faults_path(device: &Path) -> PathBuf {
    crate::volatile::beside(device, "faults")
}

/// From now on the device at `device` does this wrong, in every process that has it open.
pub fn set(device: &Path, faults: &Faults) -> std::io::Result<()> {
    let mut text = String::new();
    let _ = write!(text, "{faults}");
    let next = crate::volatile::beside(device, "faults.next");
    std::fs::write(&next, text)?;
    // Another file each time, so that a change is seen however quickly it comes.
    std::fs::rename(next, faults_path(device))
}

static ALLOWED: AtomicBool = AtomicBool::new(false);

/// Allows this process to open such devices.
pub fn allow() {
    ALLOWED.store(true, Ordering::Relaxed);
}

pub(crate) fn refuse_unless_allowed(spec: &DeviceSpec) -> Result<(), DeviceError> {
    if ALLOWED.load(Ordering::Relaxed) {
        return Ok(());
    }
    Err(DeviceError::Unusable {
        path: spec.path().to_owned(),
        what:
            "a device that fails on purpose is refused; `allow_faulty = true` in [devices] allows it"
                .to_owned(),
    })
}

/// One process's view.
#[derive(Debug)]
pub(crate) struct Faulty {
    switches: Arc<Switches>,
    gate: Arc<HangGate>,
    seed: AtomicU64,
    operations: AtomicU64,
}

#[derive(Debug)]
struct Switches {
    path: PathBuf,
    known: Mutex<(Option<Stamp>, Faults)>,
}

/// Which file it was: inode, and when it last changed.
type Stamp = (u64, i64, i64);

impl Switches {
    /// What is to be done now; a file that can't be understood is an error.
    fn now(&self) -> Result<Faults, Errno> {
        let stamp = rustix::fs::stat(&self.path)
            .ok()
            .map(|stat| (stat.st_ino, stat.st_ctime, stat.st_ctime_nsec as i64));
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.0 != stamp {
            let faults = match std::fs::read_to_string(&self.path) {
                Ok(text) => Faults::parse(&text).ok_or(Errno::INVAL)?,
                Err(_) => Faults::default(),
            };
            *known = (stamp, faults);
        }
        Ok(known.1)
    }

    fn hangs(&self) -> bool {
        self.now().is_ok_and(|faults| faults.hang)
    }
}

impl Faulty {
    /// `None`: a device of another kind.
    pub(crate) fn open(spec: &DeviceSpec) -> Result<Option<Self>, DeviceError> {
        let DeviceSpec::Faulty { path, seed, .. } = spec else {
            return Ok(None);
        };
        let gate = HangGate::new()
            .map_err(|errno| DeviceError::from_errno(path, "making an eventfd", errno))?;
        Ok(Some(Self {
            switches: Arc::new(Switches {
                path: faults_path(path),
                known: Mutex::default(),
            }),
            gate,
            seed: AtomicU64::new(*seed),
            operations: AtomicU64::new(0),
        }))
    }

    /// Chance differs from one engine to the next.
    pub(crate) fn generation_is(&self, generation: u64) {
        self.seed.fetch_add(mix(generation), Ordering::Relaxed);
    }

    /// As [`Device::submit`], checks done.
    pub(crate) fn submit(
        &self,
        device: &Device,
        ring: &mut Ring,
        op: &mut Op,
        user_data: u64,
    ) -> Submitted {
        let faults = match self.switches.now() {
            Ok(faults) => faults,
            Err(errno) => return Submitted::Done(Err(errno)),
        };
        if touches(op, faults.poison) {
            std::process::abort();
        }
        while touches(op, faults.spin) {
            std::hint::spin_loop();
        }
        // An operation and what it waits for.
        if ring.free_entries() < 2 {
            return Submitted::RingFull;
        }
        let mut chance = self.chance();
        let is_write = op.kind == OpKind::Write;
        let io = if chance.hits(faults.error_ppm) {
            Io::Answer {
                result: Errno::IO.raw_os_error().saturating_neg(),
                user_data,
            }
        } else if faults.lose_flushes && op.kind == OpKind::Flush {
            Io::Answer {
                result: 0,
                user_data,
            }
        } else if is_write && chance.hits(faults.torn_ppm) {
            op.torn = true;
            match part(op, &mut chance, device.info().block_bytes) {
                Some(mut part) => device.io(&mut part),
                None => Io::Answer {
                    result: 0,
                    user_data,
                },
            }
        } else {
            device.io(op)
        };
        let hang = self.switches.clone();
        let pushed = if self.gate.shut_while(move || hang.hangs()) {
            ring.push_io_behind(self.gate.fd(), &io, user_data)
        } else if chance.hits(faults.delay_ppm) {
            let limit = faults.delay_ms.clamp(1, MAX_DELAY_MS);
            let delay = &DELAYS[chance.below(limit) as usize];
            ring.push_io_after(delay, &io, user_data)
        } else {
            ring.push_io(&io, user_data)
        };
        match pushed {
            Ok(()) => Submitted::Queued,
            Err(crate::ring::RingFull) => Submitted::RingFull,
        }
    }

    /// Whether each of the daemon's requests takes long.
    pub(crate) fn delays_daemon(&self) -> bool {
        self.switches
            .now()
            .is_ok_and(|faults| faults.daemon_delay_ms > 0)
    }

    /// Before the daemon reads, writes or flushes.
    pub(crate) fn before_daemon_io(&self) -> Result<(), Errno> {
        while self.switches.hangs() {
            std::thread::sleep(LOOK_AGAIN);
        }
        let faults = self.switches.now()?;
        std::thread::sleep(Duration::from_millis(faults.daemon_delay_ms));
        match self.chance().hits(faults.daemon_error_ppm) {
            true => Err(Errno::IO),
            false => Ok(()),
        }
    }

    fn chance(&self) -> Chance {
        let number = self.operations.fetch_add(1, Ordering::Relaxed);
        Chance(mix(
            self.seed.load(Ordering::Relaxed) ^ number.rotate_left(32)
        ))
    }
}

fn touches(op: &Op, place: Option<u64>) -> bool {
    let transfers = matches!(op.kind, OpKind::Read | OpKind::Write);
    place.is_some_and(|place| {
        transfers
            && op.offset_bytes < place.saturating_add(TRAP_BYTES)
            && place < op.offset_bytes.saturating_add(op.len_bytes)
    })
}

/// The beginning or the end of a write; `None`: it is one block, or one piece, and nothing of it is carried out.
fn part(op: &Op, chance: &mut Chance, block_bytes: u32) -> Option<Op> {
    let block_bytes = u64::from(block_bytes);
    let buf = match op.memory()? {
        Memory::One(buf) => buf,
        // Between two pieces: their list stays as it is, for another attempt.
        Memory::Many(bufs) => return part_of_pieces(op, bufs, chance, block_bytes),
    };
    let others = (op.len_bytes / block_bytes)
        .checked_sub(1)
        .filter(|n| *n > 0)?;
    let first = (1 + chance.below(others)) * block_bytes;
    if chance.hits(500_000) {
        return op.rest(first);
    }
    Some(Op {
        len_bytes: first,
        named: Some(Named::one(buf.slice(0, u32::try_from(first).ok()?)?)),
        ..*op
    })
}

fn part_of_pieces(op: &Op, bufs: Bufs, chance: &mut Chance, block_bytes: u64) -> Option<Op> {
    let count = 1 + chance.below(u64::from(bufs.count()).checked_sub(1)?);
    let first = bufs.first(u32::try_from(count).ok()?);
    let len_bytes = u64::from(first.len_bytes());
    len_bytes.is_multiple_of(block_bytes).then_some(Op {
        len_bytes,
        named: first.named(),
        ..*op
    })
}

/// Random numbers of one operation.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Below `bound`; 0 below 0.
    fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    fn hits(&mut self, ppm: u64) -> bool {
        self.below(1_000_000) < ppm
    }
}

/// A bijection that spreads every bit.
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// 1 ms to the longest: the kernel reads such a time when the operation is handed over, after the call that chose it.
static DELAYS: [Timespec; MAX_DELAY_MS as usize] = {
    let mut delays = [const { Timespec::new() }; MAX_DELAY_MS as usize];
    let mut i = 0;
    while i < delays.len() {
        let ms = i as u64 + 1;
        delays[i] = Timespec::new()
            .sec(ms / 1000)
            .nsec((ms % 1000) as u32 * 1_000_000);
        i += 1;
    }
    delays
};
