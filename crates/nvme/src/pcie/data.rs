//! Resolves PRP entries and SGL segments (Base 2.0, 4.1.1 and 4.1.2) to memory ranges.
//!
//! Lists are copied once, then checked, and their number is limited. The receiver checks that the
//! ranges are accessible.

use super::{Memory, PAGE_BYTES};
use crate::{SglDescriptor, Sqe, Status};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// PRP lists per command. The longest transfer has 129 entries, hence at most two lists.
const MAX_LISTS: usize = 4;
/// SGL segments per command.
const MAX_SEGMENTS: usize = 16;
/// Descriptors per command.
const MAX_DESCRIPTORS: usize = 512;
/// Descriptors copied at a time.
const CHUNK: usize = 32;

/// Calls `push` with each range of the command's `bytes` bytes.
///
/// An error is the command's status: a bad data pointer, or the error of `push`.
#[inline]
pub fn pieces<M: Memory>(
    sqe: &Sqe,
    bytes: u32,
    memory: &M,
    mut push: impl FnMut(u64, u32) -> Result<(), Status>,
) -> Result<(), Status> {
    if bytes == 0 {
        return Ok(());
    }
    match sqe.psdt() {
        0 => prps(sqe, bytes, memory, &mut push),
        1 => sgl(sqe.sgl(), bytes, memory, &mut push),
        // Metadata SGL, or reserved.
        _ => Err(Status::INVALID_FIELD),
    }
}

#[inline]
fn prps<M: Memory>(
    sqe: &Sqe,
    bytes: u32,
    memory: &M,
    push: &mut impl FnMut(u64, u32) -> Result<(), Status>,
) -> Result<(), Status> {
    let (prp1, prp2) = (sqe.cdw64(6), sqe.cdw64(8));
    if !prp1.is_multiple_of(4) {
        return Err(Status::PRP_OFFSET_INVALID);
    }
    let first = (PAGE_BYTES - prp1 % PAGE_BYTES) as u32;
    push(prp1, first.min(bytes))?;
    let left = bytes.saturating_sub(first);
    if left == 0 {
        return Ok(());
    }
    if left <= PAGE_BYTES as u32 {
        return page(prp2, left, push);
    }
    prp_lists(prp2, left, memory, push)
}

/// A PRP entry after the first: page-aligned.
fn page(
    address: u64,
    bytes: u32,
    push: &mut impl FnMut(u64, u32) -> Result<(), Status>,
) -> Result<(), Status> {
    match address.is_multiple_of(PAGE_BYTES) {
        true => push(address, bytes),
        false => Err(Status::PRP_OFFSET_INVALID),
    }
}

fn prp_lists<M: Memory>(
    mut list: u64,
    mut left: u32,
    memory: &M,
    push: &mut impl FnMut(u64, u32) -> Result<(), Status>,
) -> Result<(), Status> {
    for _ in 0..MAX_LISTS {
        if !list.is_multiple_of(8) {
            return Err(Status::PRP_OFFSET_INVALID);
        }
        let needed = left.div_ceil(PAGE_BYTES as u32) as usize;
        let there = ((PAGE_BYTES - list % PAGE_BYTES) / 8) as usize;
        let count = needed.min(there);
        let mut entries = [0u64; (PAGE_BYTES / 8) as usize];
        if !memory.read(list, entries[..count].as_mut_bytes()) {
            return Err(Status::DATA_TRANSFER_ERROR);
        }
        // If needed, the last entry of a page points to the next list.
        let pages = if needed > there { count - 1 } else { count };
        for entry in &entries[..pages] {
            let bytes = left.min(PAGE_BYTES as u32);
            page(u64::from_le(*entry), bytes, push)?;
            left -= bytes;
        }
        if left == 0 {
            return Ok(());
        }
        list = u64::from_le(entries[count - 1]);
    }
    Err(Status::PRP_OFFSET_INVALID)
}

fn sgl<M: Memory>(
    first: SglDescriptor,
    bytes: u32,
    memory: &M,
    push: &mut impl FnMut(u64, u32) -> Result<(), Status>,
) -> Result<(), Status> {
    let mut walk = Walk { left: bytes, push };
    let mut segment = match first.kind {
        SglDescriptor::DATA_BLOCK_ADDRESS => {
            walk.block(&first)?;
            return walk.end();
        }
        SglDescriptor::SEGMENT | SglDescriptor::LAST_SEGMENT => first,
        _ => return Err(Status::SGL_DESCRIPTOR_TYPE_INVALID),
    };
    let mut seen = 0;
    for _ in 0..MAX_SEGMENTS {
        let last = segment.kind == SglDescriptor::LAST_SEGMENT;
        let length = segment.length_bytes() as usize;
        let count = length / size_of::<SglDescriptor>();
        if count == 0 || !length.is_multiple_of(size_of::<SglDescriptor>()) {
            return Err(Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
        }
        seen += count;
        if seen > MAX_DESCRIPTORS {
            return Err(Status::INVALID_NUMBER_OF_SGL_DESCRIPTORS);
        }
        match walk.segment(segment.address(), count, last, memory)? {
            None => return walk.end(),
            Some(next) => segment = next,
        }
    }
    Err(Status::INVALID_NUMBER_OF_SGL_DESCRIPTORS)
}

/// Walks an SGL.
struct Walk<'a, P> {
    /// Bytes not yet covered.
    left: u32,
    push: &'a mut P,
}

impl<P: FnMut(u64, u32) -> Result<(), Status>> Walk<'_, P> {
    fn block(&mut self, descriptor: &SglDescriptor) -> Result<(), Status> {
        // By SGLS, a list may exceed the data.
        let bytes = descriptor.length_bytes().min(self.left);
        self.left -= bytes;
        match bytes {
            0 => Ok(()),
            _ => (self.push)(descriptor.address(), bytes),
        }
    }

    fn end(&self) -> Result<(), Status> {
        match self.left {
            0 => Ok(()),
            _ => Err(Status::DATA_SGL_LENGTH_INVALID),
        }
    }

    /// Walks a segment; returns the descriptor of the next, if any.
    fn segment<M: Memory>(
        &mut self,
        address: u64,
        count: usize,
        last: bool,
        memory: &M,
    ) -> Result<Option<SglDescriptor>, Status> {
        let mut done = 0;
        while done < count {
            let mut chunk = [SglDescriptor::new_zeroed(); CHUNK];
            let n = (count - done).min(CHUNK);
            let at = address.checked_add((done * size_of::<SglDescriptor>()) as u64);
            let at = at.ok_or(Status::DATA_TRANSFER_ERROR)?;
            if !memory.read(at, chunk[..n].as_mut_bytes()) {
                return Err(Status::DATA_TRANSFER_ERROR);
            }
            for descriptor in &chunk[..n] {
                done += 1;
                let leads_on = !last && done == count;
                match descriptor.kind {
                    SglDescriptor::DATA_BLOCK_ADDRESS if !leads_on => self.block(descriptor)?,
                    SglDescriptor::SEGMENT | SglDescriptor::LAST_SEGMENT if leads_on => {
                        return Ok(Some(*descriptor));
                    }
                    SglDescriptor::DATA_BLOCK_ADDRESS
                    | SglDescriptor::SEGMENT
                    | SglDescriptor::LAST_SEGMENT => {
                        return Err(Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
                    }
                    _ => return Err(Status::SGL_DESCRIPTOR_TYPE_INVALID),
                }
            }
        }
        Ok(None)
    }
}

/// Submission queue entries in these bytes, a multiple of 64.
pub fn entries(bytes: &[u8]) -> &[Sqe] {
    <[Sqe]>::ref_from_bytes(bytes).unwrap_or_default()
}
