//! A device in memory: `ram:/path?size=1G`.
//!
//! Operations are copies through a mapping (`ram_map`) and end while they are submitted. So nothing
//! is in flight after the process exits, and the lock on the file falls then.

use std::sync::Arc;

use rustix::io::Errno;

use super::file::SyncFile;
use super::file_io::FileIo;
use super::info::{DeviceKind, OpenOptions};
use super::local::{CacheUse, Local, Node};
use super::ram_map::RamMap;
use super::spec::{DeviceSpec, SpecError, SpecText};
use super::{AtOnce, Backend, BackendKind, Opened, SyncBackend};
use crate::error::DeviceError;
use crate::fence::Fence;
use crate::mem::Buf;
use crate::op::{Finish, Op, OpKind, Submitted};
use crate::ring::{Ring, RingIo};

impl DeviceKind {
    /// A mapped file.
    #[allow(
        non_upper_case_globals,
        reason = "named as the variant of an enum that it was"
    )]
    pub const Ram: Self = Self("ram");
}

const LOCAL: Local = Local {
    kind: DeviceKind::Ram,
    node: Node::File,
    wants_direct: false,
    keeps: true,
};

pub(super) struct RamKind;

impl BackendKind for RamKind {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Ram
    }

    fn example(&self) -> &'static str {
        "ram:/path?size=1G"
    }

    fn parse(&self, text: &SpecText<'_>) -> Result<DeviceSpec, SpecError> {
        text.path_and_size(DeviceKind::Ram)
    }

    fn open(
        &self,
        spec: &DeviceSpec,
        options: &OpenOptions,
    ) -> Result<Opened<Arc<dyn Backend>>, DeviceError> {
        let (fd, info) = LOCAL.open(spec, options, CacheUse::Direct)?;
        let file = FileIo::new(fd, &info);
        let map = RamMap::map(file.fd(), info.capacity_bytes)
            .map_err(|errno| DeviceError::from_errno(file.path(), "mapping it", errno))?;
        let backend = Arc::new(Ram { file, map });
        Ok(Opened { info, backend })
    }

    fn open_sync(
        &self,
        spec: &DeviceSpec,
        options: &OpenOptions,
    ) -> Result<Opened<Box<dyn SyncBackend>>, DeviceError> {
        let (fd, info) = LOCAL.open(spec, options, CacheUse::Buffered)?;
        let backend = Box::new(SyncFile::new(fd, &info));
        Ok(Opened { info, backend })
    }
}

#[derive(Debug)]
struct Ram {
    file: FileIo,
    map: RamMap,
}

impl Ram {
    fn carry_out(&self, op: &Op) -> Result<(), Errno> {
        let (fd, at) = (self.file.fd(), op.offset_bytes);
        match (op.kind, op.memory()) {
            (OpKind::Read, Some(memory)) => {
                memory.try_each(|before, buf| self.map.read(fd, at + before, buf))
            }
            (OpKind::Write, Some(memory)) => {
                memory.try_each(|before, buf| self.map.write(fd, at + before, buf))
            }
            (OpKind::Flush, _) => Ok(()),
            _ => self.map.punch(fd, at, op.len_bytes),
        }
    }
}

impl Backend for Ram {
    fn submit(&self, _ring: &mut Ring, op: &mut Op, _user_data: u64) -> Submitted {
        Submitted::Done(self.carry_out(op))
    }

    // Only a wrapper has requests in the ring.
    fn finish(&self, op: Op, result: i32) -> Finish {
        self.file.finish(op, result)
    }

    fn request(&self, op: &mut Op) -> Option<RingIo<'_>> {
        self.file.request(op)
    }

    fn at_once(&self) -> AtOnce {
        AtOnce {
            copies: true,
            ..AtOnce::NEVER
        }
    }

    fn copy(&self, write: bool, offset_bytes: u64, buf: Buf) -> Result<(), Errno> {
        match write {
            true => self.map.write(self.file.fd(), offset_bytes, buf),
            false => self.map.read(self.file.fd(), offset_bytes, buf),
        }
    }

    fn fence(&self) -> &dyn Fence {
        &self.file
    }
}
