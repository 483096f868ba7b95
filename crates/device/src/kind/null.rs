//! A device without data: `null:/path?size=64G`.
//!
//! **Purpose.** What the layers above cost by themselves can be measured.
//!
//! **Design.** A file keeps label and catalog; from `OpenOptions::data_offset_bytes` on nothing is kept, and an operation
//! ends while it is submitted. What is below goes to the file by the ring.
//!
//! **Not here:** zeros for whoever reads into memory of its own: that keeps what it holds.

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
    /// Nothing but a label.
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

/// See the module.
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
    let note = "it keeps no data: what volumes place there is lost, on purpose";
    info.notes.push(note.to_owned());
}

/// The engine's view.
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
            // Label and data are different worlds; nothing may be in both.
            if op.offset_bytes + op.len_bytes > self.nothing_from_bytes {
                return Submitted::Done(Err(Errno::INVAL));
            }
            return self.file.submit(ring, op, user_data);
        }
        // A buffer may hold others' bytes. Pieces are the reader's own memory, and keep what they hold.
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
