//! The daemon's view of a device: small synchronous reads and writes of label and catalog, and the
//! daemon's claim.
//!
//! Files and block devices go through the page cache, while the engine bypasses it. That is sound
//! because their ranges are disjoint: the data area begins at a multiple of 1 MiB. Labels and
//! heartbeats bypass the cache, because another machine may have written them. The daemon needs no
//! fence: its calls end with its process. A thread inside a call carries the device's name
//! (`dying`).

use std::ffi::CString;
use std::path::Path;

use crate::dying::{self, Inside};
use crate::error::DeviceError;
use crate::fence::{FenceError, Holder, Predecessor};
use crate::health::{self, DriveHealth, NoHealth};
pub use crate::kind::DeviceNow;
use crate::kind::spec::DeviceSpec;
use crate::kind::{DeviceInfo, OpenOptions, SyncBackend, local, registry};
use crate::signatures::{self, SCAN_BYTES};

/// The content of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// Both ends read as zeros.
    Blank,
    /// It begins with the caller's magic.
    Ours,
    /// Other data, described.
    Foreign(String),
}

/// A device opened for the daemon. Any thread may use it.
#[derive(Debug)]
pub struct SyncDevice {
    backend: Box<dyn SyncBackend>,
    info: DeviceInfo,
    inside: CString,
}

impl SyncDevice {
    /// Opens it. `options.exclusive` is for the daemon that serves the pool.
    pub fn open(spec: &DeviceSpec, options: &OpenOptions) -> Result<Self, DeviceError> {
        let (spec, kind) = registry::resolved(spec)?;
        let opened = kind.open_sync(&spec, options)?;
        Ok(Self {
            inside: opened.info.identity.thread_name(),
            backend: opened.backend,
            info: opened.info,
        })
    }

    /// A hint: reads the range ahead.
    pub fn will_read(&self, offset_bytes: u64, bytes: u64) {
        self.backend.will_read(offset_bytes, bytes);
    }

    /// As [`crate::Device::info`], but nothing need be aligned.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// The present state; [`SyncDevice::info`] has that at open.
    pub fn poll_now(&self) -> std::io::Result<DeviceNow> {
        self.backend.poll_now()
    }

    /// Reads all of `into`.
    pub fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> std::io::Result<()> {
        self.check(offset_bytes, into.len())?;
        let _inside = Inside::of(&self.inside)?;
        self.backend.read_at(offset_bytes, into)
    }

    /// Reads all of `into` if it is in the page cache; returns whether it was.
    pub fn try_read_at(&self, offset_bytes: u64, into: &mut [u8]) -> bool {
        self.backend.try_read_at(offset_bytes, into)
    }

    /// Writes all of `from`. Durable after [`SyncDevice::sync`].
    pub fn write_at(&self, offset_bytes: u64, from: &[u8]) -> std::io::Result<()> {
        self.check(offset_bytes, from.len())?;
        let _inside = Inside::of(&self.inside)?;
        self.backend.write_at(offset_bytes, from)
    }

    /// Like [`SyncDevice::read_at`], past the page cache; in multiples of 4 KiB.
    pub fn read_direct_at(&self, offset_bytes: u64, into: &mut [u8]) -> std::io::Result<()> {
        self.check(offset_bytes, into.len())?;
        let _inside = Inside::of(&self.inside)?;
        self.backend.read_direct_at(offset_bytes, into)
    }

    /// Like [`SyncDevice::write_at`], past the page cache; in multiples of 4 KiB.
    pub fn write_direct_at(&self, offset_bytes: u64, from: &[u8]) -> std::io::Result<()> {
        self.check(offset_bytes, from.len())?;
        let _inside = Inside::of(&self.inside)?;
        self.backend.write_direct_at(offset_bytes, from)
    }

    /// Makes all writes durable, the device's own cache included.
    pub fn sync(&self) -> std::io::Result<()> {
        let _inside = Inside::of(&self.inside)?;
        self.backend.sync()
    }

    /// Claims the device while it is open. Passes over a dying daemon, unless that is inside a
    /// request to this device: then the device hangs.
    pub fn claim_for_daemon(&self) -> Result<(), FenceError> {
        self.backend.claims().claim(&self.inside)
    }

    /// Checks [`SyncDevice::claim_for_daemon`] without claiming; returns whether it would pass over
    /// a dying daemon.
    pub fn check_claim(&self) -> Result<bool, FenceError> {
        self.backend.claims().would_pass_over(&self.inside)
    }

    /// A call that asks the drive below for its health, and returns its path too. It may take
    /// minutes if the drive hangs, and does not keep this device open.
    pub fn drive_health(
        &self,
    ) -> impl FnOnce() -> Result<(String, DriveHealth), NoHealth> + Send + use<> {
        let (inside, info) = (self.inside.clone(), self.info.clone());
        move || {
            let _inside = Inside::of(&inside);
            health::read(&info)
        }
    }

    /// Whether a thread of this process is inside a request to this device.
    pub fn is_waited_for(&self) -> bool {
        dying::is_inside(Path::new("/proc/self"), &self.inside)
    }

    /// Other holders of locks here.
    pub fn holders(&self) -> Result<Vec<Holder>, FenceError> {
        self.backend.claims().holders()
    }

    /// An earlier engine that still holds its lock here, and its process. Reads much of `/proc`.
    pub fn predecessor(&self, generation: u64) -> Result<Option<Predecessor>, FenceError> {
        self.backend.claims().predecessor(generation)
    }

    /// Classifies the content of both ends (1 MiB each); `own_magic` begins the caller's label.
    pub fn blank_check(&self, own_magic: &[u8]) -> std::io::Result<Content> {
        // The page cache may be older than an engine's writes past it.
        self.backend.drop_cache();
        let capacity = self.info.capacity_bytes;
        let mut head = vec![0; SCAN_BYTES.min(capacity) as usize];
        let mut tail = head.clone();
        self.read_at(0, &mut head)?;
        self.read_at(capacity - tail.len() as u64, &mut tail)?;
        self.backend.drop_cache();
        if !own_magic.is_empty() && head.starts_with(own_magic) {
            return Ok(Content::Ours);
        }
        Ok(signatures::describe(&head, &tail).map_or(Content::Blank, Content::Foreign))
    }

    fn check(&self, offset_bytes: u64, len: usize) -> std::io::Result<()> {
        let inside = offset_bytes
            .checked_add(len as u64)
            .is_some_and(|end| end <= self.info.capacity_bytes);
        if inside {
            return Ok(());
        }
        Err(std::io::Error::new(
            std::io::ErrorKind::InvalidInput,
            format!(
                "{}: {len} bytes at {offset_bytes} are outside its {} bytes",
                self.info.spec, self.info.capacity_bytes
            ),
        ))
    }
}

/// Creates a sparse file; fails if it exists.
pub fn create_sparse_file(path: &Path, size_bytes: u64) -> Result<(), DeviceError> {
    local::create_file(path, size_bytes)
}
