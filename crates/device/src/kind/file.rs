//! The kind `file:/path`, and the daemon's I/O on every descriptor.
//!
//! The daemon uses the page cache, so that nothing need be aligned and catalog reads are cached; a
//! second descriptor bypasses it. Without read-ahead, its cache holds no tenants' data.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::{Advice, Mode, OFlags};
use rustix::io::Errno;

use super::file_io::FileIo;
use super::info::{DeviceInfo, DeviceKind, DeviceNow, Identity, OpenOptions};
use super::local::{CacheUse, Local, Node};
use super::spec::{DeviceSpec, SpecError, SpecText};
use super::{Backend, BackendKind, Opened, SyncBackend};
use crate::error::DeviceError;
use crate::fence::{Claims, FenceError, Holder, Predecessor, lock};

/// The largest address alignment of direct I/O.
const DIRECT_ALIGN_BYTES: usize = 4096;

impl DeviceKind {
    /// A regular file.
    #[allow(
        non_upper_case_globals,
        reason = "named as the variant of an enum that it was"
    )]
    pub const File: Self = Self("file");
}

const LOCAL: Local = Local {
    kind: DeviceKind::File,
    node: Node::File,
    wants_direct: true,
    keeps: true,
};

pub(super) struct FileKind;

impl BackendKind for FileKind {
    fn kind(&self) -> DeviceKind {
        DeviceKind::File
    }

    fn example(&self) -> &'static str {
        "file:/path"
    }

    fn parse(&self, text: &SpecText<'_>) -> Result<DeviceSpec, SpecError> {
        text.only_path(DeviceKind::File)
    }

    fn open(
        &self,
        spec: &DeviceSpec,
        options: &OpenOptions,
    ) -> Result<Opened<Arc<dyn Backend>>, DeviceError> {
        let (fd, info) = LOCAL.open(spec, options, CacheUse::Direct)?;
        let backend = Arc::new(FileIo::new(fd, &info));
        Ok(Opened { info, backend })
    }

    fn open_sync(
        &self,
        spec: &DeviceSpec,
        options: &OpenOptions,
    ) -> Result<Opened<Box<dyn SyncBackend>>, DeviceError> {
        let (fd, info) = LOCAL.open(spec, options, CacheUse::Buffered)?;
        let backend = Box::new(SyncFile::new(fd, &info).with_direct(&info));
        Ok(Opened { info, backend })
    }
}

#[derive(Debug)]
pub(crate) struct SyncFile {
    fd: OwnedFd,
    /// Past the page cache; `None` if that is impossible or there is none.
    direct: Option<OwnedFd>,
    path: PathBuf,
    identity: Identity,
}

impl SyncFile {
    pub(crate) fn new(fd: OwnedFd, info: &DeviceInfo) -> Self {
        // Advice: it only affects speed.
        let _ = rustix::fs::fadvise(&fd, 0, None, Advice::Random);
        Self {
            fd,
            direct: None,
            path: info.spec.path().to_owned(),
            identity: info.identity,
        }
    }

    pub(crate) fn with_direct(mut self, info: &DeviceInfo) -> Self {
        if info.direct {
            let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
            let again = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
            self.direct = rustix::fs::open(again, flags, Mode::empty()).ok();
        }
        self
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl SyncBackend for SyncFile {
    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> io::Result<()> {
        read_all(self.fd(), offset_bytes, into)
    }

    fn write_at(&self, offset_bytes: u64, from: &[u8]) -> io::Result<()> {
        write_all(self.fd(), offset_bytes, from)
    }

    fn sync(&self) -> io::Result<()> {
        loop {
            match rustix::fs::fdatasync(&self.fd) {
                Err(Errno::INTR) => {}
                other => return Ok(other?),
            }
        }
    }

    fn try_read_at(&self, offset_bytes: u64, into: &mut [u8]) -> bool {
        let (count, mut slices) = (into.len(), [io::IoSliceMut::new(into)]);
        let flags = rustix::io::ReadWriteFlags::NOWAIT;
        rustix::io::preadv2(&self.fd, &mut slices, offset_bytes, flags) == Ok(count)
    }

    fn read_direct_at(&self, offset_bytes: u64, into: &mut [u8]) -> io::Result<()> {
        let Some(direct) = &self.direct else {
            return self.read_at(offset_bytes, into);
        };
        let mut room = vec![0; into.len() + DIRECT_ALIGN_BYTES];
        let aligned = aligned(&mut room, into.len());
        read_all(direct.as_fd(), offset_bytes, aligned)?;
        into.copy_from_slice(aligned);
        Ok(())
    }

    fn write_direct_at(&self, offset_bytes: u64, from: &[u8]) -> io::Result<()> {
        let Some(direct) = &self.direct else {
            return self.write_at(offset_bytes, from);
        };
        let mut room = vec![0; from.len() + DIRECT_ALIGN_BYTES];
        let aligned = aligned(&mut room, from.len());
        aligned.copy_from_slice(from);
        write_all(direct.as_fd(), offset_bytes, aligned)
    }

    fn will_read(&self, offset_bytes: u64, bytes: u64) {
        let bytes = std::num::NonZeroU64::new(bytes);
        // Advice: it only affects speed.
        let _ = rustix::fs::fadvise(&self.fd, offset_bytes, bytes, Advice::WillNeed);
    }

    fn drop_cache(&self) {
        let _ = rustix::fs::fadvise(&self.fd, 0, None, Advice::DontNeed);
    }

    fn poll_now(&self) -> io::Result<DeviceNow> {
        let is_block = matches!(self.identity, Identity::Block { .. });
        let is_at_path = match std::fs::metadata(&self.path) {
            Ok(there) => match self.identity {
                Identity::Block { rdev } => there.rdev() == rdev,
                Identity::Inode { dev, ino } => (there.dev(), there.ino()) == (dev, ino),
                Identity::Remote { .. } => false,
            },
            // Other errors say nothing.
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        };
        if is_block {
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

    fn claims(&self) -> &dyn Claims {
        self
    }
}

impl Claims for SyncFile {
    fn claim(&self, inside: &CStr) -> Result<(), FenceError> {
        lock::claim_for_daemon(self.fd(), &self.path, Some(inside)).map(drop)
    }

    fn would_pass_over(&self, inside: &CStr) -> Result<bool, FenceError> {
        lock::passable(self.fd(), &self.path, Some(inside)).map(|passed| !passed.is_empty())
    }

    fn holders(&self) -> Result<Vec<Holder>, FenceError> {
        lock::holders(self.fd(), &self.path)
    }

    fn predecessor(&self, generation: u64) -> Result<Option<Predecessor>, FenceError> {
        lock::predecessor(self.fd(), &self.path, generation)
    }
}

fn read_all(fd: BorrowedFd<'_>, offset_bytes: u64, into: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < into.len() {
        match rustix::io::pread(fd, &mut into[done..], offset_bytes + done as u64) {
            Ok(0) => return Err(cut_short()),
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

fn write_all(fd: BorrowedFd<'_>, offset_bytes: u64, from: &[u8]) -> io::Result<()> {
    let mut done = 0;
    while done < from.len() {
        match rustix::io::pwrite(fd, &from[done..], offset_bytes + done as u64) {
            Ok(0) => return Err(cut_short()),
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// `len` bytes of `room` at an aligned address; `room` has `DIRECT_ALIGN_BYTES` to spare.
fn aligned(room: &mut [u8], len: usize) -> &mut [u8] {
    let at = room.as_ptr().align_offset(DIRECT_ALIGN_BYTES);
    &mut room[at..at + len]
}

fn cut_short() -> io::Error {
    io::Error::new(
        io::ErrorKind::UnexpectedEof,
        "the file is shorter than the device's capacity: it was cut short while open",
    )
}
