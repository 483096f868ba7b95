//! Where a command's data lies in guest memory.
//!
//! **Design.** A frontend has one [`Pieces`], fills it from a command's list of addresses, and hands it to the core,
//! which takes over what it holds ([`Hold`]): the mappings in question stay mapped until that is dropped, after the
//! devices are done. Neighbours that lie together become one piece. Nothing is allocated. The mapping that a command's
//! first piece lay in is held on for the next command, which needs no count then: [`Pieces::let_go`] ends that.
//!
//! **What it does not do.** It doesn't say what may be at a device as it is: the device does.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;

use forebay_device::Buf;

use crate::area::{copy_in, copy_out};
use crate::mapping::Mapping;
use crate::memory::{GuestMemory, GuestRegion};

/// The most pieces of one command: 128 pages, a first one that begins within a page, and some room.
pub const MAX_PIECES: usize = 144;
/// Mappings that are held one by one; who needs more holds all of them.
const FEW: usize = 3;

/// A contiguous piece of guest memory: an address and a length, which are worth something only while somebody holds the
/// mapping.
#[derive(Debug, Clone, Copy)]
pub struct GuestSlice {
    ptr: NonNull<u8>,
    len_bytes: u32,
}

// SAFETY: an address and a length; using it is what `GuestSlice::buf` makes its caller answer for.
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

    /// As what a device's operation names.
    ///
    /// # Safety
    /// The [`Hold`] of the [`Pieces`] that it came from lives until the operation's completion was taken, and for a read
    /// the piece was collected for writing into.
    #[inline]
    pub unsafe fn buf(&self) -> Buf {
        // SAFETY: mapped, with the rights in question, for as long as the caller says; nobody has a reference to guest
        // memory.
        unsafe { Buf::new(self.ptr, self.len_bytes) }
    }
}

/// What keeps a command's memory mapped.
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

/// Why a range isn't a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PieceError {
    /// Some of it is no memory that can be reached, or may not be written.
    #[error("the address is not in the guest's memory")]
    NotMapped,
    /// There are [`MAX_PIECES`] already.
    #[error("the data lies in more than {MAX_PIECES} pieces")]
    TooMany,
}

/// See the module's text.
#[derive(Debug)]
pub struct Pieces {
    slices: [GuestSlice; MAX_PIECES],
    count: usize,
    len_bytes: u32,
    /// Whether they may be written, all of them.
    writable: bool,
    hold: Hold,
    /// The numbers of the regions that are held one by one.
    regions: [usize; FEW],
    held: usize,
    /// The region that the last piece is in.
    last_region: usize,
}

impl Default for Pieces {
    fn default() -> Self {
        Self::new()
    }
}

impl Pieces {
    /// None.
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

    /// Lets go of everything, of the mapping that was kept for the next command too: before memory is taken away.
    pub fn let_go(&mut self) {
        self.clear();
        self.hold = Hold::default();
    }

    /// Forgets what it has: for the next command. One mapping may still be held.
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

    /// Adds a range of guest memory, of one region or of several that follow each other; for `write` all of it may be
    /// written. All of one `Pieces` must be of one memory, unchanged since it was cleared.
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
                // Only where they lie in one mapping: neighbours in memory may be two by chance.
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
            // As it was for the last command.
            Some(Some(kept)) if Arc::ptr_eq(kept, mapping) => self.regions[self.held] = region,
            Some(few) => {
                *few = Some(mapping.clone());
                self.regions[self.held] = region;
            }
            None => self.hold.all = Some(memory.all().clone()),
        }
        self.held += 1;
    }

    /// How many.
    #[inline]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Bytes of all of them.
    #[inline]
    pub fn len_bytes(&self) -> u32 {
        self.len_bytes
    }

    /// Whether all of them may be written.
    #[inline]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// They, in their order.
    #[inline]
    pub fn slices(&self) -> &[GuestSlice] {
        &self.slices[..self.count]
    }

    /// Takes what keeps them mapped, and forgets them: for whoever has copied [`Pieces::slices`].
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

    /// Copies bytes out, each once, beginning so far into them. False, and nothing is done, if they aren't so long.
    #[must_use]
    pub fn read(&self, from_bytes: u32, into: &mut [u8]) -> bool {
        let mut done = 0;
        self.each(from_bytes, into.len(), |ptr, len| {
            // SAFETY: a piece, whose mapping `self` holds.
            unsafe { copy_out(ptr, &mut into[done..done + len]) };
            done += len;
        })
    }

    /// Copies bytes in. False, and nothing is done, if they aren't so long, or may not be written.
    #[must_use]
    pub fn write(&self, from_bytes: u32, from: &[u8]) -> bool {
        let mut done = 0;
        self.writable
            && self.each(from_bytes, from.len(), |ptr, len| {
                // SAFETY: as in `read`, and all of them may be written.
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
