//! A device without data, `null:/path?size=64G`, to measure the layers above.
//!
//! A file keeps label and catalog. From `OpenOptions::data_offset_bytes` on, data is discarded.

use std::sync::Arc;

use rustix::io::Errno;

use super::file::SyncFile;
use super::file_io::FileIo;
use super::info::{DeviceInfo, DeviceKind, OpenOptions};
use super::local::{CacheUse, Local, Node};
use super::spec::{DeviceSpec, SpecError, SpecText};
use super::{AtOnce, Backend, BackendKind, Opened, SyncBackend};
use crate::error::DeviceError;
use crate::fence::Fence;
use crate::mem::IoMemory;
use crate::op::{Finish, Op, OpKind, Submitted};
use crate::ring::Ring;

impl DeviceKind {
    /// Keeps only label and catalog.
    #[allow(
        non_upper_case_globals,
        reason = "named as the variant of an enum that it was"
    )]
    pub const Null: Self = Self("null");
}

const LOCAL: Local = Local {
    kind: DeviceKind::Null,
    node: Node::File,
    wants_direct: false,
    keeps: false,
};

pub(super) struct NullKind;

impl BackendKind for NullKind {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Null
    }

    fn example(&self) -> &'static str {
        "null:/path?size=64G"
    }

    fn parse(&self, text: &SpecText<'_>) -> Result<DeviceSpec, SpecError> {
        text.path_and_size(DeviceKind::Null)
    }

    fn open(
        &self,
        spec: &DeviceSpec,
        options: &OpenOptions,
    ) -> Result<Opened<Arc<dyn Backend>>, DeviceError> {
        let (fd, mut info) = LOCAL.open(spec, options, CacheUse::Direct)?;
        warn(&mut info);
        let backend = Arc::new(Null {
            file: FileIo::new(fd, &info),
            nothing_from_bytes: options.data_offset_bytes,
        });
        Ok(Opened { info, backend })
    }

    fn open_sync(
        &self,
        spec: &DeviceSpec,
        options: &OpenOptions,
    ) -> Result<Opened<Box<dyn SyncBackend>>, DeviceError> {
        let (fd, mut info) = LOCAL.open(spec, options, CacheUse::Buffered)?;
        warn(&mut info);
        let backend = Box::new(SyncFile::new(fd, &info));
        Ok(Opened { info, backend })
    }
}

fn warn(info: &mut DeviceInfo) {
    let note = "it keeps no data: what volumes write to it is lost, by design";
    info.notes.push(note.to_owned());
}

#[derive(Debug)]
struct Null {
    file: FileIo,
    nothing_from_bytes: u64,
}

impl Backend for Null {
    fn submit(&self, ring: &mut Ring, op: &mut Op, user_data: u64) -> Submitted {
        if op.kind == OpKind::Flush {
            return Submitted::Done(Ok(()));
        }
        if op.offset_bytes < self.nothing_from_bytes {
            if op.offset_bytes + op.len_bytes > self.nothing_from_bytes {
                return Submitted::Done(Err(Errno::INVAL));
            }
            return self.file.submit(ring, op, user_data);
        }
        // A single buffer may hold another tenant's bytes. Pieces are the reader's own memory, and
        // stay as they are.
        if let (OpKind::Read, Some(IoMemory::One(buf))) = (op.kind, op.memory()) {
            buf.fill_zero();
        }
        Submitted::Done(Ok(()))
    }

    fn finish(&self, op: Op, result: i32) -> Finish {
        self.file.finish(op, result)
    }

    fn at_once(&self) -> AtOnce {
        AtOnce {
            nothing_from_bytes: self.nothing_from_bytes,
            ..AtOnce::NEVER
        }
    }

    fn fence(&self) -> &dyn Fence {
        &self.file
    }
}
