//! A device as the daemon uses it: small synchronous reads and writes of the label and the catalog area.
//!
//! **Purpose.** Arbitrary byte ranges, made durable when asked, and the daemon's exclusive claim.
//!
//! **Design.** Through the page cache (`pread`, `pwrite`, `fdatasync`), so nothing need be aligned and the catalog's
//! own reads are cached. The engine goes past the page cache on the same device; that is sound because the two never
//! touch the same range, and the data area begins at a multiple of 1 MiB. Reading ahead is switched off, so that the
//! daemon's cache doesn't hold the tenants' data. Labels and heartbeats bypass the page cache: another machine, or
//! another name of the device, may have written there.
//!
//! **What it does not do.** It never reads or writes where tenants' data is, except [`SyncDevice::blank_check`] before
//! there is a pool. It is no fence: its calls have ended when its process has. (A thread inside one is named after the
//! device meanwhile, so that it is known of a process that can't end what it waits for.)

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{Advice, Mode, OFlags};
use rustix::io::Errno;

use crate::dying::{self, Inside};
use crate::error::DeviceError;
use crate::fence::{self, FenceError, Holder, Predecessor};
use crate::open::{Access, DeviceInfo, DeviceKind, Identity, OpenOptions};
use crate::signatures::{self, LOOK_BYTES};
use crate::spec::DeviceSpec;

/// What direct I/O needs at most, of addresses.
const DIRECT_ALIGN_BYTES: usize = 4096;

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

/// How a device is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceNow {
    /// Bytes that it holds.
    pub size_bytes: u64,
    /// Whether it can be opened again: a removed file can't.
    pub has_name: bool,
    /// Whether it is what its path names.
    pub is_at_path: bool,
}

/// A device opened for the daemon. Any thread may use it.
#[derive(Debug)]
pub struct SyncDevice {
    fd: OwnedFd,
    /// Past the page cache; none where that is impossible, or where there is none to bypass.
    direct: Option<OwnedFd>,
    info: DeviceInfo,
    /// What a thread inside a request is called.
    inside: CString,
    #[cfg(feature = "test-device")]
    volatile: Option<crate::volatile::Volatile>,
    #[cfg(feature = "test-device")]
    faulty: Option<crate::faulty::Faulty>,
}

impl SyncDevice {
    /// Opens it. `options.exclusive` is for the daemon that serves the pool.
    pub fn open(spec: &DeviceSpec, options: &OpenOptions) -> Result<Self, DeviceError> {
        let opened = crate::open::open(spec, options, Access::Buffered)?;
        // Advice: without it everything is right, only slower.
        let _ = rustix::fs::fadvise(&opened.fd, 0, None, Advice::Random);
        #[cfg(feature = "test-device")]
        let volatile = match opened.info.kind {
            DeviceKind::Volatile => Some(crate::volatile::Volatile::open(
                opened.info.spec.path(),
                opened.fd.as_fd(),
            )?),
            _ => None,
        };
        let direct = match opened.info.kind {
            DeviceKind::File | DeviceKind::Block if opened.info.direct => {
                let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
                let again = format!("/proc/self/fd/{}", opened.fd.as_raw_fd());
                rustix::fs::open(again, flags, Mode::empty()).ok()
            }
            _ => None,
        };
        Ok(Self {
            direct,
            #[cfg(feature = "test-device")]
            volatile,
            #[cfg(feature = "test-device")]
            faulty: crate::faulty::Faulty::open(&opened.info.spec)?,
            fd: opened.fd,
            inside: dying::thread_name(&opened.info.identity),
            info: opened.info,
        })
    }

    /// A hint: this range is read soon. It is read ahead into the page cache.
    pub fn will_read(&self, offset_bytes: u64, bytes: u64) {
        let bytes = std::num::NonZeroU64::new(bytes);
        // Advice: without it everything is right, only slower.
        let _ = rustix::fs::fadvise(&self.fd, offset_bytes, bytes, Advice::WillNeed);
    }

    /// What is known about it: the same that [`crate::Device`] says. (Alignment is the engine's business; here nothing
    /// need be aligned.)
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Looks at how it is now: [`SyncDevice::info`] says how it was when it was opened.
    pub fn look_now(&self) -> std::io::Result<DeviceNow> {
        let path = self.info.spec.path();
        let is_at_path = match std::fs::metadata(path) {
            Ok(there) => match self.info.identity {
                Identity::Block { rdev } => there.rdev() == rdev,
                Identity::Inode { dev, ino } => (there.dev(), there.ino()) == (dev, ino),
            },
            // Other errors don't tell.
            Err(error) => error.kind() != std::io::ErrorKind::NotFound,
        };
        if self.info.kind == DeviceKind::Block {
            let end = rustix::fs::SeekFrom::End(0);
            return Ok(DeviceNow {
                size_bytes: rustix::fs::seek(&self.fd, end)?,
                has_name: true,
                is_at_path,
            });
        }
        let stat = rustix::fs::fstat(&self.fd)?;
        Ok(DeviceNow {
            size_bytes: u64::try_from(stat.st_size).unwrap_or(0),
            has_name: stat.st_nlink > 0,
            is_at_path,
        })
    }

    /// Reads all of `into`.
    pub fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> std::io::Result<()> {
        self.check(offset_bytes, into.len())?;
        let _inside = Inside::of(&self.inside)?;
        #[cfg(feature = "test-device")]
        if let Some(volatile) = &self.volatile {
            volatile.wait_while_hanging()?;
        }
        #[cfg(feature = "test-device")]
        if let Some(faulty) = &self.faulty {
            faulty.before_daemon_io()?;
        }
        let mut done = 0;
        while done < into.len() {
            match rustix::io::pread(&self.fd, &mut into[done..], offset_bytes + done as u64) {
                Ok(0) => return Err(cut_short()),
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Reads all of `into` if it is in the page cache; whether it was.
    pub fn try_read_at(&self, offset_bytes: u64, into: &mut [u8]) -> bool {
        #[cfg(feature = "test-device")]
        if self.volatile.is_some() || self.faulty.as_ref().is_some_and(|f| f.delays_daemon()) {
            return false;
        }
        let (count, mut slices) = (into.len(), [std::io::IoSliceMut::new(into)]);
        let flags = rustix::io::ReadWriteFlags::NOWAIT;
        rustix::io::preadv2(&self.fd, &mut slices, offset_bytes, flags) == Ok(count)
    }

    /// Writes all of `from`. Durable after [`SyncDevice::sync`].
    pub fn write_at(&self, offset_bytes: u64, from: &[u8]) -> std::io::Result<()> {
        self.check(offset_bytes, from.len())?;
        let _inside = Inside::of(&self.inside)?;
        #[cfg(feature = "test-device")]
        if let Some(volatile) = &self.volatile {
            return Ok(volatile.write_at(self.fd.as_fd(), offset_bytes, from)?);
        }
        #[cfg(feature = "test-device")]
        if let Some(faulty) = &self.faulty {
            faulty.before_daemon_io()?;
        }
        let mut done = 0;
        while done < from.len() {
            match rustix::io::pwrite(&self.fd, &from[done..], offset_bytes + done as u64) {
                Ok(0) => return Err(cut_short()),
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// As [`SyncDevice::read_at`], past the page cache; offset and length are multiples of 4 KiB.
    pub fn read_direct_at(&self, offset_bytes: u64, into: &mut [u8]) -> std::io::Result<()> {
        let Some(direct) = &self.direct else {
            return self.read_at(offset_bytes, into);
        };
        self.check(offset_bytes, into.len())?;
        let _inside = Inside::of(&self.inside)?;
        let mut room = vec![0; into.len() + DIRECT_ALIGN_BYTES];
        let aligned = aligned(&mut room, into.len());
        let mut done = 0;
        while done < aligned.len() {
            match rustix::io::pread(direct, &mut aligned[done..], offset_bytes + done as u64) {
                Ok(0) => return Err(cut_short()),
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        into.copy_from_slice(aligned);
        Ok(())
    }

    /// As [`SyncDevice::write_at`], past the page cache; offset and length are multiples of 4 KiB.
    pub fn write_direct_at(&self, offset_bytes: u64, from: &[u8]) -> std::io::Result<()> {
        let Some(direct) = &self.direct else {
            return self.write_at(offset_bytes, from);
        };
        self.check(offset_bytes, from.len())?;
        let _inside = Inside::of(&self.inside)?;
        let mut room = vec![0; from.len() + DIRECT_ALIGN_BYTES];
        let aligned = aligned(&mut room, from.len());
        aligned.copy_from_slice(from);
        let mut done = 0;
        while done < aligned.len() {
            match rustix::io::pwrite(direct, &aligned[done..], offset_bytes + done as u64) {
                Ok(0) => return Err(cut_short()),
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Makes all writes durable, the device's own cache included.
    pub fn sync(&self) -> std::io::Result<()> {
        let _inside = Inside::of(&self.inside)?;
        #[cfg(feature = "test-device")]
        if let Some(volatile) = &self.volatile {
            return Ok(volatile.sync(self.fd.as_fd())?);
        }
        #[cfg(feature = "test-device")]
        if let Some(faulty) = &self.faulty {
            faulty.before_daemon_io()?;
        }
        loop {
            match rustix::fs::fdatasync(&self.fd) {
                Err(Errno::INTR) => {}
                other => return Ok(other?),
            }
        }
    }

    /// Claims it for this daemon, for as long as this device is open. An earlier daemon that is being killed and can't
    /// end is passed over, unless it is inside a request to this very device: then the device hangs.
    pub fn claim_for_daemon(&self) -> Result<(), FenceError> {
        let (fd, path) = (self.fd.as_fd(), self.info.spec.path());
        fence::claim_for_daemon(fd, path, Some(&self.inside)).map(drop)
    }

    /// Whether [`SyncDevice::claim_for_daemon`] would do; nothing is taken. `true` if a daemon that is being killed has
    /// a claim that would be passed over.
    pub fn look_at_claim(&self) -> Result<bool, FenceError> {
        let (fd, path) = (self.fd.as_fd(), self.info.spec.path());
        fence::passable(fd, path, Some(&self.inside)).map(|passed| !passed.is_empty())
    }

    /// Whether a thread of this very process is inside a request to this device.
    pub fn is_waited_for(&self) -> bool {
        dying::is_inside(Path::new("/proc/self"), &self.inside)
    }

    /// Who else holds locks here.
    pub fn holders(&self) -> Result<Vec<Holder>, FenceError> {
        fence::holders(self.fd.as_fd(), self.info.spec.path())
    }

    /// The engine before `generation` that still has its lock here, and its process. Reads much of `/proc`.
    pub fn predecessor(&self, generation: u64) -> Result<Option<Predecessor>, FenceError> {
        fence::predecessor(self.fd.as_fd(), self.info.spec.path(), generation)
    }

    /// Looks at both ends (1 MiB each): is there something that should not be written over? `own_magic` is what the
    /// caller's label begins with.
    pub fn blank_check(&self, own_magic: &[u8]) -> std::io::Result<Content> {
        // What is in the page cache may be older than what an engine wrote past it.
        let _ = rustix::fs::fadvise(&self.fd, 0, None, Advice::DontNeed);
        let capacity = self.info.capacity_bytes;
        // At most 1 MiB.
        let mut head = vec![0; LOOK_BYTES.min(capacity) as usize];
        let mut tail = head.clone();
        self.read_at(0, &mut head)?;
        self.read_at(capacity - tail.len() as u64, &mut tail)?;
        let _ = rustix::fs::fadvise(&self.fd, 0, None, Advice::DontNeed);
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
    crate::open::create_file(path, size_bytes)
}

/// `len` bytes of `room`, which has `DIRECT_ALIGN_BYTES` more, at an aligned address.
fn aligned(room: &mut [u8], len: usize) -> &mut [u8] {
    let at = room.as_ptr().align_offset(DIRECT_ALIGN_BYTES);
    &mut room[at..at + len]
}

fn cut_short() -> std::io::Error {
    std::io::Error::new(
        std::io::ErrorKind::UnexpectedEof,
        "the device ends before its capacity: the file was cut short while open",
    )
}
