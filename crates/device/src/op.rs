//! Operations on a device, as plain values without memory of their own.
//!
//! [`crate::Device::queue`] notes in an [`Op`] which method it chose; [`crate::Device::finish`]
//! returns the rest. Offsets are absolute on the device.

use rustix::io::Errno;

use crate::mem::{Buf, IoMemory, Named};
use crate::vectors::Bufs;

/// The kinds of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// Bytes from the device into memory.
    Read,
    /// Bytes from memory to the device.
    Write,
    /// Makes everything durable that completed before.
    Flush,
    /// The range reads as zeros; the device may keep or free its space.
    WriteZeroes,
    /// The range reads as zeros, and its space is freed where possible.
    Punch,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    ZeroRange,
    PunchHole,
    WriteZeros,
}

/// The result of a submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Submitted {
    /// It ended during the call: no completion comes, and `finish` must not be called.
    Done(Result<(), Errno>),
    /// A completion with the user data will come.
    Queued,
    /// The ring is full; nothing was submitted.
    RingFull,
    /// The image is not open, or not yet writable; nothing was submitted. Try again once that has
    /// changed. Never for a flush.
    NotReady,
}

/// What a completion means.
#[derive(Debug, Clone, Copy)]
pub enum Finish {
    /// It is complete.
    Done,
    /// Submit this rest with the same user data.
    Again(Op),
    /// It failed, perhaps after a part was done.
    Failed(Errno),
}

/// One operation.
#[derive(Debug, Clone, Copy)]
pub struct Op {
    pub(crate) kind: OpKind,
    pub(crate) method: Method,
    pub(crate) dsync: bool,
    /// Notes for `finish`; 0 in a new operation. The highest bits belong to wrappers.
    pub(crate) note: u32,
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u64,
    pub(crate) named: Option<Named>,
}

impl Op {
    const fn new(kind: OpKind, offset_bytes: u64, len_bytes: u64, named: Option<Named>) -> Self {
        Self {
            kind,
            method: Method::WriteZeros,
            dsync: false,
            note: 0,
            offset_bytes,
            len_bytes,
            named,
        }
    }

    /// Fills the whole of `buf` from `offset_bytes` on.
    pub const fn read(offset_bytes: u64, buf: Buf) -> Self {
        Self::new(
            OpKind::Read,
            offset_bytes,
            buf.len_bytes() as u64,
            Some(Named::one(buf)),
        )
    }

    /// Writes the whole of `buf` to `offset_bytes`.
    pub const fn write(offset_bytes: u64, buf: Buf) -> Self {
        Self::new(
            OpKind::Write,
            offset_bytes,
            buf.len_bytes() as u64,
            Some(Named::one(buf)),
        )
    }

    /// Fills `bufs` in order. Their list must not change until the operation has ended.
    pub fn read_pieces(offset_bytes: u64, bufs: Bufs) -> Self {
        let (named, len_bytes) = (bufs.named(), u64::from(bufs.len_bytes()));
        Self::new(OpKind::Read, offset_bytes, len_bytes, named)
    }

    /// Writes `bufs` in order. Their list must not change until the operation has ended.
    pub fn write_pieces(offset_bytes: u64, bufs: Bufs) -> Self {
        let (named, len_bytes) = (bufs.named(), u64::from(bufs.len_bytes()));
        Self::new(OpKind::Write, offset_bytes, len_bytes, named)
    }

    /// Makes a write durable before it completes.
    #[must_use]
    pub const fn with_dsync(mut self) -> Self {
        self.dsync = true;
        self
    }

    /// Makes all writes durable that completed before its submission.
    pub const fn flush() -> Self {
        Self::new(OpKind::Flush, 0, 0, None)
    }

    /// Zeroes a range.
    pub const fn write_zeroes(offset_bytes: u64, len_bytes: u64) -> Self {
        Self::new(OpKind::WriteZeroes, offset_bytes, len_bytes, None)
    }

    /// Zeroes a range and frees its space where possible.
    pub const fn punch(offset_bytes: u64, len_bytes: u64) -> Self {
        Self::new(OpKind::Punch, offset_bytes, len_bytes, None)
    }

    /// Its kind.
    pub const fn kind(&self) -> OpKind {
        self.kind
    }

    /// Its first byte on the device.
    pub const fn offset_bytes(&self) -> u64 {
        self.offset_bytes
    }

    /// Its length; 0 for a flush.
    pub const fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    pub(crate) fn memory(&self) -> Option<IoMemory> {
        self.named.map(Named::get)
    }

    /// The operation without its first `done_bytes`; `None` if nothing is left. A list of pieces is
    /// shortened in place.
    pub(crate) fn rest(&self, done_bytes: u64) -> Option<Self> {
        let len_bytes = self.len_bytes.checked_sub(done_bytes).filter(|n| *n > 0)?;
        let named = match self.memory() {
            Some(IoMemory::One(buf)) => Some(Named::one(buf.slice(
                u32::try_from(done_bytes).ok()?,
                u32::try_from(len_bytes).ok()?,
            )?)),
            Some(IoMemory::Many(bufs)) => bufs.rest(u32::try_from(done_bytes).ok()?)?.named(),
            None => None,
        };
        Some(Self {
            offset_bytes: self.offset_bytes.checked_add(done_bytes)?,
            len_bytes,
            named,
            ..*self
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::StaticRegion;

    #[test]
    fn the_rest_of_an_operation() {
        let region = StaticRegion::anonymous(8192).expect("maps");
        let buf = region.buf(0, 8192).expect("inside");
        let rest = Op::read(4096, buf).rest(512).expect("something is left");
        assert_eq!((rest.offset_bytes(), rest.len_bytes()), (4608, 7680));
        let Some(IoMemory::One(rest_buf)) = rest.memory() else {
            panic!("a read has a buffer");
        };
        assert_eq!(rest_buf.len_bytes(), 7680);
        assert_eq!(rest_buf.ptr().addr().get(), buf.ptr().addr().get() + 512);
        assert!(Op::read(4096, buf).rest(8192).is_none());
        assert!(Op::punch(0, 10).rest(11).is_none());
        assert!(Op::flush().rest(0).is_none());
        assert!(size_of::<Op>() <= 40, "{}", size_of::<Op>());
    }
}
