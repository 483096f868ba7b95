//! The kind `block:/path`: disks, partitions, and NVMe namespaces.
//!
//! Where possible, reads and writes of a namespace are NVMe commands (`nvme`); the rest, and
//! retries, use the block layer. Each of the two descriptors carries a fence lock for its own
//! requests.

use std::sync::Arc;
use std::time::Duration;

use super::file::SyncFile;
use super::file_io::FileIo;
use super::info::{DeviceInfo, DeviceKind, Identity, OpenOptions};
use super::local::{CacheUse, Local, Node};
use super::nvme::Native;
use super::spec::{DeviceSpec, SpecError, SpecText};
use super::{Backend, BackendKind, Opened, SyncBackend};
use crate::error::DeviceError;
use crate::fence::{Fence, FenceError, lock};
use crate::op::{Finish, Op, Submitted};
use crate::ring::{Ring, RingIo};

/// In an operation's note: submitted as an NVMe command.
const WENT_NATIVE: u32 = 1;
/// In an operation's note: use the block layer.
const GOES_USUAL: u32 = 2;

impl DeviceKind {
    /// A block device.
    #[allow(
        non_upper_case_globals,
        reason = "named as the variant of an enum that it was"
    )]
    pub const Block: Self = Self("block");
}

const LOCAL: Local = Local {
    kind: DeviceKind::Block,
    node: Node::Block,
    wants_direct: true,
    keeps: true,
};

pub(super) struct BlockKind;

impl BackendKind for BlockKind {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Block
    }

    fn example(&self) -> &'static str {
        "block:/path"
    }

    fn parse(&self, text: &SpecText<'_>) -> Result<DeviceSpec, SpecError> {
        text.only_path(DeviceKind::Block)
    }

    fn open(
        &self,
        spec: &DeviceSpec,
        options: &OpenOptions,
    ) -> Result<Opened<Arc<dyn Backend>>, DeviceError> {
        let (fd, info) = LOCAL.open(spec, options, CacheUse::Direct)?;
        let file = FileIo::new(fd, &info);
        let backend: Arc<dyn Backend> = match find_native(&info, &file)? {
            Some(native) => Arc::new(Namespace { file, native }),
            None => Arc::new(file),
        };
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

fn find_native(info: &DeviceInfo, file: &FileIo) -> Result<Option<Native>, DeviceError> {
    let Identity::Block { rdev } = info.identity else {
        return Ok(None);
    };
    let (major, minor) = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
    let doing = "identifying its NVMe namespace";
    Native::find(major, minor, file.fd())
        .map_err(|errno| DeviceError::from_errno(file.path(), doing, errno))
}

#[derive(Debug)]
struct Namespace {
    file: FileIo,
    native: Native,
}

impl Backend for Namespace {
    fn submit(&self, ring: &mut Ring, op: &mut Op, user_data: u64) -> Submitted {
        if op.note & GOES_USUAL == 0
            && ring.takes_native()
            && let Some(io) = self.native.io(op)
        {
            let pushed = ring.push_io(&io, user_data);
            if pushed.is_ok() {
                op.note |= WENT_NATIVE;
            }
            return pushed.into();
        }
        self.file.submit(ring, op, user_data)
    }

    fn finish(&self, op: Op, result: i32) -> Finish {
        if op.note & WENT_NATIVE == 0 {
            return self.file.finish(op, result);
        }
        if self.native.is_done(result) {
            return Finish::Done;
        }
        let note = op.note & !WENT_NATIVE | GOES_USUAL;
        Finish::Again(Op { note, ..op })
    }

    fn request(&self, op: &mut Op) -> Option<RingIo<'_>> {
        self.file.request(op)
    }

    fn is_native(&self) -> bool {
        true
    }

    fn native_commands(&self) -> u64 {
        self.native.done()
    }

    fn fence(&self) -> &dyn Fence {
        self
    }
}

impl Fence for Namespace {
    fn take(&self, generation: u64) -> Result<(), FenceError> {
        self.file.take(generation)?;
        lock::take(self.native.fd(), self.file.path(), generation)
    }

    fn predecessors_gone(&self, generation: u64) -> Result<bool, FenceError> {
        let native = || lock::predecessors_gone(self.native.fd(), self.file.path(), generation);
        Ok(self.file.predecessors_gone(generation)? && native()?)
    }

    fn wait_for_predecessors(
        &self,
        generation: u64,
        limit: Duration,
    ) -> Result<Duration, FenceError> {
        let first = self.file.wait_for_predecessors(generation, limit)?;
        let (fd, limit) = (self.native.fd(), limit.saturating_sub(first));
        Ok(first + lock::wait_for_predecessors(fd, self.file.path(), generation, limit)?)
    }
}
