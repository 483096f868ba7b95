//! A command's data in guest memory.
//!
//! A frontend fills its [`Pieces`]; the core takes their [`Hold`], which keeps the mappings until
//! the devices are done. Adjacent ranges merge, and nothing is allocated. The first mapping stays
//! held for the next command, to save a reference count; [`Pieces::let_go`] ends that.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;

use forebay_device::Buf;

use crate::area::{copy_in, copy_out};
use crate::mapping::Mapping;
use crate::memory::{GuestMemory, GuestRegion};

/// 128 pages, an unaligned start, and some spare.
pub const MAX_PIECES: usize = 144;
/// Mappings held one by one; a command with more holds all.
const FEW: usize = 3;

/// A contiguous piece, valid only while its mapping is held.
#[derive(Debug, Clone, Copy)]
pub struct GuestSlice {
    ptr: NonNull<u8>,
    len_bytes: u32,
}

// SAFETY: an address and a length; the caller of `GuestSlice::buf` answers for their use.
unsafe impl Send for GuestSlice {}

impl GuestSlice {
    const NONE: Self = Self {
        ptr: NonNull::dangling(),
        len_bytes: 0,
    };

    /// Its length.
    #[inline]
    pub fn len_bytes(&self) -> u32 {
        self.len_bytes
    }

    /// As a buffer of a device operation.
    ///
    /// # Safety
    /// The [`Hold`] of its [`Pieces`] lives until the operation's completion was taken. For a read,
    /// the piece was collected for writing.
    #[inline]
    pub unsafe fn buf(&self) -> Buf {
        // SAFETY: mapped with these rights as the caller says; guest memory has no references.
        unsafe { Buf::new(self.ptr, self.len_bytes) }
    }
}

/// Keeps a command's memory mapped.
#[derive(Debug, Default)]
pub struct Hold {
    few: [Option<Arc<Mapping>>; FEW],
    all: Option<Arc<Vec<GuestRegion>>>,
}

impl Hold {
    /// Whether any of it is broken.
    pub fn is_broken(&self) -> bool {
        let all = self.all.iter().flat_map(|all| all.iter());
        let all = all.filter_map(GuestRegion::mapping);
        self.few.iter().flatten().chain(all).any(|m| m.is_broken())
    }
}

/// Why a range is not a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PieceError {
    /// Part of it is inaccessible or not writable.
    #[error("the address is not in the guest's memory")]
    NotMapped,
    /// More than [`MAX_PIECES`].
    #[error("the data lies in more than {MAX_PIECES} pieces")]
    TooMany,
}

/// The pieces of one command's data.
#[derive(Debug)]
pub struct Pieces {
    slices: [GuestSlice; MAX_PIECES],
    count: usize,
    len_bytes: u32,
    /// Whether all are writable.
    writable: bool,
    hold: Hold,
    /// The regions held one by one.
    regions: [usize; FEW],
    held: usize,
    /// The last piece's region.
    last_region: usize,
}

impl Default for Pieces {
    fn default() -> Self {
        Self::new()
    }
}

impl Pieces {
    /// No pieces.
    pub fn new() -> Self {
        Self {
            slices: [GuestSlice::NONE; MAX_PIECES],
            count: 0,
            len_bytes: 0,
            writable: true,
            hold: Hold::default(),
            regions: [usize::MAX; FEW],
            held: 0,
            last_region: usize::MAX,
        }
    }

    /// Releases everything, including the mapping kept for the next command, before memory is
    /// removed.
    pub fn let_go(&mut self) {
        self.clear();
        self.hold = Hold::default();
    }

    /// Removes the pieces; one mapping may stay held.
    #[inline]
    pub fn clear(&mut self) {
        if self.held > 1 {
            self.hold.few[1..].fill(None);
            self.hold.all = None;
        }
        self.held = 0;
        self.last_region = usize::MAX;
        self.count = 0;
        self.len_bytes = 0;
        self.writable = true;
    }

    /// Adds a range, in one region or several adjacent ones. With `write`, the range must be
    /// writable. Until `clear`, all ranges must be of one unchanged memory.
    #[inline]
    pub fn push(
        &mut self,
        memory: &GuestMemory,
        guest_address: u64,
        len_bytes: u32,
        write: bool,
    ) -> Result<(), PieceError> {
        let mut at = guest_address;
        let mut left = len_bytes;
        while left > 0 {
            let found = memory.find(at).ok_or(PieceError::NotMapped)?;
            let n = left.min(u32::try_from(found.left_bytes).unwrap_or(u32::MAX));
            let ptr = found.mapping.at(found.from_bytes, u64::from(n));
            let ptr = ptr.ok_or(PieceError::NotMapped)?;
            let writable = found.mapping.is_writable();
            if write && !writable {
                return Err(PieceError::NotMapped);
            }
            let sum = self.len_bytes.checked_add(n).ok_or(PieceError::TooMany)?;
            match self.slices[..self.count].last_mut() {
                // Only in one mapping: adjacent mappings may be unrelated.
                Some(last)
                    if self.last_region == found.region
                        && last.ptr.addr().get() + last.len_bytes as usize == ptr.addr().get() =>
                {
                    last.len_bytes += n;
                }
                _ => {
                    let place = self.slices.get_mut(self.count);
                    let place = place.ok_or(PieceError::TooMany)?;
                    *place = GuestSlice { ptr, len_bytes: n };
                    self.count += 1;
                }
            }
            if self.last_region != found.region && !self.is_held(found.region) {
                self.keep(found.region, found.mapping, memory);
            }
            self.last_region = found.region;
            self.writable &= writable;
            self.len_bytes = sum;
            left -= n;
            at = match at.checked_add(u64::from(n)) {
                Some(at) => at,
                None if left == 0 => break,
                None => return Err(PieceError::NotMapped),
            };
        }
        Ok(())
    }

    #[inline]
    fn is_held(&self, region: usize) -> bool {
        self.held > FEW || self.regions[..self.held].contains(&region)
    }

    #[inline]
    fn keep(&mut self, region: usize, mapping: &Arc<Mapping>, memory: &GuestMemory) {
        match self.hold.few.get_mut(self.held) {
            // Kept from the last command.
            Some(Some(kept)) if Arc::ptr_eq(kept, mapping) => self.regions[self.held] = region,
            Some(few) => {
                *few = Some(mapping.clone());
                self.regions[self.held] = region;
            }
            None => self.hold.all = Some(memory.all().clone()),
        }
        self.held += 1;
    }

    /// Number of pieces.
    #[inline]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Their total bytes.
    #[inline]
    pub fn len_bytes(&self) -> u32 {
        self.len_bytes
    }

    /// Whether all are writable.
    #[inline]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// The pieces in order.
    #[inline]
    pub fn slices(&self) -> &[GuestSlice] {
        &self.slices[..self.count]
    }

    /// Takes the hold, and removes the pieces: copy [`Pieces::slices`] first.
    #[inline]
    #[must_use = "they are mapped while this lives"]
    pub fn take(&mut self) -> Hold {
        let hold = match self.held {
            0 => Hold::default(),
            _ => std::mem::take(&mut self.hold),
        };
        self.held = 0;
        self.clear();
        hold
    }

    /// Copies bytes out, each once. False, without effect, if there are too few bytes.
    #[must_use]
    pub fn read(&self, from_bytes: u32, into: &mut [u8]) -> bool {
        let mut done = 0;
        self.each(from_bytes, into.len(), |ptr, len| {
            // SAFETY: a piece, whose mapping `self` holds.
            unsafe { copy_out(ptr, &mut into[done..done + len]) };
            done += len;
        })
    }

    /// Copies bytes in. False, without effect, if too short or not writable.
    #[must_use]
    pub fn write(&self, from_bytes: u32, from: &[u8]) -> bool {
        let mut done = 0;
        self.writable
            && self.each(from_bytes, from.len(), |ptr, len| {
                // SAFETY: as in `read`; all pieces are writable.
                unsafe { copy_in(&from[done..done + len], ptr) };
                done += len;
            })
    }

    fn each(&self, from_bytes: u32, len: usize, mut then: impl FnMut(NonNull<u8>, usize)) -> bool {
        let (mut skip, mut left) = (from_bytes as usize, len);
        if skip
            .checked_add(left)
            .is_none_or(|end| end > self.len_bytes as usize)
        {
            return false;
        }
        for slice in self.slices() {
            let whole = slice.len_bytes as usize;
            let from = skip.min(whole);
            let n = left.min(whole - from);
            if n > 0 {
                // SAFETY: `from` is inside the piece.
                then(unsafe { slice.ptr.add(from) }, n);
            }
            skip -= from;
            left -= n;
        }
        left == 0
    }
}
