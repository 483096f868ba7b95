//! A device as the daemon uses it: small synchronous reads and writes of the label and the catalog area.
//!
//! **Purpose.** Arbitrary byte ranges, made durable when asked, and the daemon's exclusive claim.
//!
//! **Design.** Nothing need be aligned, and what the kind caches is cached: files and block devices are read and written
//! through the page cache. The engine goes past it on the same device; that is sound because the two never touch the same
//! range, and the data area begins at a multiple of 1 MiB. Labels and heartbeats bypass the page cache: another machine,
//! or another name of the device, may have written there.
//!
//! **What it does not do.** It never reads or writes where tenants' data is, except [`SyncDevice::blank_check`] before
//! there is a pool. It is no fence: its calls have ended when its process has. (A thread inside one is named after the
//! device meanwhile, so that it is known of a process that can't end what it waits for.)

use std::ffi::CString;
use std::path::Path;

use crate::dying::{self, Inside};
use crate::error::DeviceError;
use crate::fence::{FenceError, Holder, Predecessor};
pub use crate::kind::DeviceNow;
use crate::kind::spec::DeviceSpec;
use crate::kind::{DeviceInfo, OpenOptions, SyncBackend, local, registry};
use crate::signatures::{self, LOOK_BYTES};

/// What a device holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// Both ends read as zeros.
    Blank,
    /// It begins with the caller's own mark.
    Ours,
    /// Something else: what it looks like.
    Foreign(String),
}

/// A device opened for the daemon. Any thread may use it.
#[derive(Debug)]
pub struct SyncDevice {
    backend: Box<dyn SyncBackend>,
    info: DeviceInfo,
    /// What a thread inside a request is called.
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

    /// A hint: this range is read soon. It is read ahead into the page cache.
    pub fn will_read(&self, offset_bytes: u64, bytes: u64) {
        self.backend.will_read(offset_bytes, bytes);
    }

    /// What is known about it: the same that [`crate::Device`] says. (Alignment is the engine's business; here nothing
    /// need be aligned.)
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Looks at how it is now: [`SyncDevice::info`] says how it was when it was opened.
    pub fn look_now(&self) -> std::io::Result<DeviceNow> {
        self.backend.look_now()
    }

    /// Reads all of `into`.
    pub fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> std::io::Result<()> {
        self.check(offset_bytes, into.len())?;
        let _inside = Inside::of(&self.inside)?;
        self.backend.read_at(offset_bytes, into)
    }

    /// Reads all of `into` if it is in the page cache; whether it was.
    pub fn try_read_at(&self, offset_bytes: u64, into: &mut [u8]) -> bool {
        self.backend.try_read_at(offset_bytes, into)
    }

    /// Writes all of `from`. Durable after [`SyncDevice::sync`].
    pub fn write_at(&self, offset_bytes: u64, from: &[u8]) -> std::io::Result<()> {
        self.check(offset_bytes, from.len())?;
        let _inside = Inside::of(&self.inside)?;
        self.backend.write_at(offset_bytes, from)
    }

    /// As [`SyncDevice::read_at`], past the page cache; offset and length are multiples of 4 KiB.
    pub fn read_direct_at(&self, offset_bytes: u64, into: &mut [u8]) -> std::io::Result<()> {
        self.check(offset_bytes, into.len())?;
        let _inside = Inside::of(&self.inside)?;
        self.backend.read_direct_at(offset_bytes, into)
    }

    /// As [`SyncDevice::write_at`], past the page cache; offset and length are multiples of 4 KiB.
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

    /// Claims it for this daemon, for as long as this device is open. An earlier daemon that is being killed and can't
    /// end is passed over, unless it is inside a request to this very device: then the device hangs.
    pub fn claim_for_daemon(&self) -> Result<(), FenceError> {
        self.backend.claims().claim(&self.inside)
    }

    /// Whether [`SyncDevice::claim_for_daemon`] would do; nothing is taken. `true` if a daemon that is being killed has
    /// a claim that would be passed over.
    pub fn look_at_claim(&self) -> Result<bool, FenceError> {
        self.backend.claims().would_pass_over(&self.inside)
    }

    /// Whether a thread of this very process is inside a request to this device.
    pub fn is_waited_for(&self) -> bool {
        dying::is_inside(Path::new("/proc/self"), &self.inside)
    }

    /// Who else holds locks here.
    pub fn holders(&self) -> Result<Vec<Holder>, FenceError> {
        self.backend.claims().holders()
    }

    /// The engine before `generation` that still has its lock here, and its process. Reads much of `/proc`.
    pub fn predecessor(&self, generation: u64) -> Result<Option<Predecessor>, FenceError> {
        self.backend.claims().predecessor(generation)
    }

    /// Looks at both ends (1 MiB each): is there something that should not be written over? `own_magic` is what the
    /// caller's label begins with.
    pub fn blank_check(&self, own_magic: &[u8]) -> std::io::Result<Content> {
        // What is in the page cache may be older than what an engine wrote past it.
        self.backend.drop_cache();
        let capacity = self.info.capacity_bytes;
        // At most 1 MiB.
        let mut head = vec![0; LOOK_BYTES.min(capacity) as usize];
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

/// Makes a new sparse file of `size_bytes`. Refuses one that exists.
pub fn create_sparse_file(path: &Path, size_bytes: u64) -> Result<(), DeviceError> {
    local::create_file(path, size_bytes)
}
