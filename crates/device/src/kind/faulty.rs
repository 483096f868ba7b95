//! A file with configurable faults around it, for tests.
//!
//! The file `.faults` beside it holds the faults ([`set`] replaces it atomically). Chance comes
//! from the spec's seed, the engine's generation and the operation's number, so that runs can be
//! repeated. The daemon gets only `daemon_error`, `daemon_delay` and `hang`. The effect of a lost
//! flush after a power cut isn't simulated (see [`crate::volatile`]). A delayed or hanging
//! operation isn't at the device yet, so it dies with its process.

use std::fmt::{self, Write};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fastrand::Rng;
use io_uring::types::Timespec;
use rustix::io::Errno;

use super::file::SyncFile;
use super::file_io::FileIo;
use super::hang::{HangGate, POLL_AGAIN};
use super::info::{DeviceKind, DeviceNow, OpenOptions};
use super::local::{CacheUse, Local, Node};
use super::spec::{DeviceSpec, SpecError, SpecText};
use super::{Backend, BackendKind, Opened, SyncBackend, note};
use crate::error::DeviceError;
use crate::fence::{Claims, Fence, FenceError};
use crate::mem::{IoMemory, Named};
use crate::op::{Finish, Op, OpKind, Submitted};
use crate::ring::{Ring, RingIo};
use crate::vectors::Bufs;

/// The longest delay of one operation.
pub const MAX_DELAY_MS: u64 = 1000;
const TRAP_BYTES: u64 = 4096;

/// A device's faults. The default has none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    /// Per million operations: end with `EIO` and do nothing.
    pub error_ppm: u64,
    /// Per million writes: carried out in part, then `EIO`.
    pub torn_ppm: u64,
    /// Per million operations: begin late.
    pub delay_ppm: u64,
    /// The longest delay, up to [`MAX_DELAY_MS`].
    pub delay_ms: u64,
    /// Per million reads, writes and flushes of the daemon: end with `EIO`.
    pub daemon_error_ppm: u64,
    /// Delay of each read, write and flush of the daemon.
    pub daemon_delay_ms: u64,
    /// No operation begins.
    pub hang: bool,
    /// Flushes succeed and do nothing.
    pub lose_flushes: bool,
    /// Offset of a 4 KiB block; reading or writing it aborts the engine.
    pub poison: Option<u64>,
    /// Offset of a 4 KiB block; reading or writing it stops the reactor for good.
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
    /// `None` if a line is invalid.
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

/// The file with the faults of the device at `device`.
pub fn faults_path(device: &Path) -> PathBuf {
    super::volatile::beside(device, "faults")
}

/// Sets the faults of the device at `device`, in every process that has it open.
pub fn set(device: &Path, faults: &Faults) -> std::io::Result<()> {
    let mut text = String::new();
    let _ = write!(text, "{faults}");
    let next = super::volatile::beside(device, "faults.next");
    std::fs::write(&next, text)?;
    // A new file each time, so that even quick changes are seen.
    std::fs::rename(next, faults_path(device))
}

static ALLOWED: AtomicBool = AtomicBool::new(false);

/// Allows this process to open faulty devices.
pub fn allow() {
    ALLOWED.store(true, Ordering::Relaxed);
}

fn refuse_unless_allowed(spec: &DeviceSpec) -> Result<(), DeviceError> {
    if ALLOWED.load(Ordering::Relaxed) {
        return Ok(());
    }
    Err(DeviceError::Unusable {
        path: spec.path().to_owned(),
        what:
            "a device that fails on purpose is refused; set `allow_faulty = true` in [devices] to allow it"
                .to_owned(),
    })
}

impl DeviceKind {
    /// For tests: a file with faults.
    #[allow(
        non_upper_case_globals,
        reason = "named as the variant of an enum that it was"
    )]
    pub const Faulty: Self = Self("faulty");
}

const LOCAL: Local = Local {
    kind: DeviceKind::Faulty,
    node: Node::File,
    wants_direct: true,
    keeps: true,
};

pub(super) struct FaultyKind;

impl BackendKind for FaultyKind {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Faulty
    }

    fn example(&self) -> &'static str {
        ""
    }

    fn parse(&self, text: &SpecText<'_>) -> Result<DeviceSpec, SpecError> {
        let (rest, seed) = text.rest.split_once("&seed=").unwrap_or((text.rest, "0"));
        let seed: u64 = seed.parse().map_err(|_| text.unknown_option(seed))?;
        let spec = SpecText { rest, ..*text }.path_and_size(DeviceKind::Faulty)?;
        Ok(spec.with_options(format!("seed={seed}")))
    }

    fn open(
        &self,
        spec: &DeviceSpec,
        options: &OpenOptions,
    ) -> Result<Opened<Arc<dyn Backend>>, DeviceError> {
        refuse_unless_allowed(spec)?;
        let (fd, info) = LOCAL.open(spec, options, CacheUse::Direct)?;
        let backend = Arc::new(Faulty {
            inner: Box::new(FileIo::new(fd, &info)),
            faults: Injector::new(spec)?,
            block_bytes: info.block_bytes,
        });
        Ok(Opened { info, backend })
    }

    fn open_sync(
        &self,
        spec: &DeviceSpec,
        options: &OpenOptions,
    ) -> Result<Opened<Box<dyn SyncBackend>>, DeviceError> {
        refuse_unless_allowed(spec)?;
        let (fd, info) = LOCAL.open(spec, options, CacheUse::Buffered)?;
        let backend = Box::new(SyncFaulty {
            inner: Box::new(SyncFile::new(fd, &info)),
            faults: Injector::new(spec)?,
        });
        Ok(Opened { info, backend })
    }
}

#[derive(Debug)]
struct Faulty {
    inner: Box<dyn Backend>,
    faults: Injector,
    block_bytes: u32,
}

#[derive(Debug)]
struct SyncFaulty {
    inner: Box<dyn SyncBackend>,
    faults: Injector,
}

#[derive(Debug)]
struct Injector {
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

type Stamp = (u64, i64, i64);

impl Switches {
    /// The current faults; an error if the file is invalid.
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

impl Injector {
    fn new(spec: &DeviceSpec) -> Result<Self, DeviceError> {
        let path = spec.path();
        let gate = HangGate::new()
            .map_err(|errno| DeviceError::from_errno(path, "creating an eventfd", errno))?;
        let seed = (spec.options().strip_prefix("seed=")).and_then(|seed| seed.parse().ok());
        Ok(Self {
            switches: Arc::new(Switches {
                path: faults_path(path),
                known: Mutex::default(),
            }),
            gate,
            seed: AtomicU64::new(seed.unwrap_or(0)),
            operations: AtomicU64::new(0),
        })
    }

    /// Gives each engine different random numbers.
    fn generation_is(&self, generation: u64) {
        self.seed.fetch_add(mix(generation), Ordering::Relaxed);
    }

    fn before_daemon_io(&self) -> Result<(), Errno> {
        while self.switches.hangs() {
            std::thread::sleep(POLL_AGAIN);
        }
        let faults = self.switches.now()?;
        std::thread::sleep(Duration::from_millis(faults.daemon_delay_ms));
        match self.chance().hits(faults.daemon_error_ppm) {
            true => Err(Errno::IO),
            false => Ok(()),
        }
    }

    fn hangs(&self) -> bool {
        let switches = self.switches.clone();
        self.gate.shut_while(move || switches.hangs())
    }

    fn chance(&self) -> Chance {
        let number = self.operations.fetch_add(1, Ordering::Relaxed);
        let seed = self.seed.load(Ordering::Relaxed) ^ number.rotate_left(32);
        Chance(Rng::with_seed(mix(seed)))
    }
}

impl Backend for Faulty {
    fn submit(&self, ring: &mut Ring, op: &mut Op, user_data: u64) -> Submitted {
        let faults = match self.faults.switches.now() {
            Ok(faults) => faults,
            Err(errno) => return Submitted::Done(Err(errno)),
        };
        if touches(op, faults.poison) {
            std::process::abort();
        }
        while touches(op, faults.spin) {
            std::hint::spin_loop();
        }
        if ring.free_entries() < 2 {
            return Submitted::RingFull;
        }
        op.note &= !note::TORN;
        let mut chance = self.faults.chance();
        let io = if chance.hits(faults.error_ppm) {
            Err(Errno::IO.raw_os_error().saturating_neg())
        } else if faults.lose_flushes && op.kind == OpKind::Flush {
            Err(0)
        } else if op.kind == OpKind::Write && chance.hits(faults.torn_ppm) {
            op.note |= note::TORN;
            let part = part(op, &mut chance, self.block_bytes);
            part.and_then(|mut part| self.inner.request(&mut part))
                .ok_or(0)
        } else {
            // The device below is a file, which always has a request.
            self.inner.request(op).ok_or(0)
        };
        let request = match io {
            Ok(io) => ring.request(&io, user_data),
            Err(result) => ring.answer(result, user_data),
        };
        let pushed = if self.faults.hangs() {
            ring.push_request_behind(self.faults.gate.fd(), &request)
        } else if chance.hits(faults.delay_ppm) {
            let limit = faults.delay_ms.clamp(1, MAX_DELAY_MS);
            let delay = &DELAYS[chance.below(limit) as usize];
            ring.push_request_after(delay, &request)
        } else {
            ring.push_request(&request)
        };
        pushed.into()
    }

    fn finish(&self, op: Op, result: i32) -> Finish {
        match op.note & note::TORN {
            0 => self.inner.finish(op, result),
            _ => Finish::Failed(Errno::IO),
        }
    }

    fn request(&self, op: &mut Op) -> Option<RingIo<'_>> {
        self.inner.request(op)
    }

    fn fence(&self) -> &dyn Fence {
        self
    }
}

impl Fence for Faulty {
    fn take(&self, generation: u64) -> Result<(), FenceError> {
        self.faults.generation_is(generation);
        self.inner.fence().take(generation)
    }

    fn predecessors_gone(&self, generation: u64) -> Result<bool, FenceError> {
        self.inner.fence().predecessors_gone(generation)
    }

    fn wait_for_predecessors(
        &self,
        generation: u64,
        limit: Duration,
    ) -> Result<Duration, FenceError> {
        self.inner.fence().wait_for_predecessors(generation, limit)
    }
}

impl SyncBackend for SyncFaulty {
    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> io::Result<()> {
        self.faults.before_daemon_io()?;
        self.inner.read_at(offset_bytes, into)
    }

    fn write_at(&self, offset_bytes: u64, from: &[u8]) -> io::Result<()> {
        self.faults.before_daemon_io()?;
        self.inner.write_at(offset_bytes, from)
    }

    fn sync(&self) -> io::Result<()> {
        self.faults.before_daemon_io()?;
        self.inner.sync()
    }

    fn try_read_at(&self, offset_bytes: u64, into: &mut [u8]) -> bool {
        let faults = self.faults.switches.now();
        let is_late = faults.is_ok_and(|faults| faults.daemon_delay_ms > 0);
        !is_late && self.inner.try_read_at(offset_bytes, into)
    }

    fn will_read(&self, offset_bytes: u64, bytes: u64) {
        self.inner.will_read(offset_bytes, bytes);
    }

    fn drop_cache(&self) {
        self.inner.drop_cache();
    }

    fn poll_now(&self) -> io::Result<DeviceNow> {
        self.inner.poll_now()
    }

    fn claims(&self) -> &dyn Claims {
        self.inner.claims()
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

/// The beginning or the end of a write; `None` if it is a single block or piece.
fn part(op: &Op, chance: &mut Chance, block_bytes: u32) -> Option<Op> {
    let block_bytes = u64::from(block_bytes);
    let buf = match op.memory()? {
        IoMemory::One(buf) => buf,
        // Between two pieces, so that their list stays intact.
        IoMemory::Many(bufs) => return part_of_pieces(op, bufs, chance, block_bytes),
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
    let first = bufs.iter().take(usize::try_from(count).ok()?);
    let len_bytes = first.map(|buf| buf.len_bytes()).sum();
    let first = Bufs::again(bufs.ptr(), len_bytes, u32::try_from(count).ok()?);
    u64::from(len_bytes)
        .is_multiple_of(block_bytes)
        .then_some(Op {
            len_bytes: u64::from(len_bytes),
            named: first.named(),
            ..*op
        })
}

struct Chance(Rng);

impl Chance {
    /// Below `bound`; 0 if that is 0.
    fn below(&mut self, bound: u64) -> u64 {
        self.0.u64(..bound.max(1))
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

/// 1 ms to the longest. Static, because the kernel reads the time only at submission.
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
