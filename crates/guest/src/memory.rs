//! The map from guest addresses to mappings: a few sorted, disjoint regions, removed whole.
//!
//! A mapping stays while commands at devices ([`crate::Pieces`]) or rings ([`crate::Area`]) use it;
//! [`Retired`] tells when none does. For vhost-user a region also has the client's address.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use crate::area::{Area, View, copy_in, copy_out, prefetch};
use crate::mapping::{MapError, Mapping};

/// Limits for one client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Regions at once.
    pub regions: usize,
    /// Their total bytes.
    pub bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            regions: 256,
            bytes: 16 << 40,
        }
    }
}

/// A region to be added.
#[derive(Debug, Clone, Copy)]
pub struct NewRegion<'a> {
    /// Its guest address.
    pub guest_address: u64,
    /// Its address in the client (vhost-user).
    pub user_address: u64,
    /// Its length.
    pub len_bytes: u64,
    /// Whether we may write it.
    pub writable: bool,
    /// File and offset; `None`: the region is known but inaccessible.
    pub file: Option<(BorrowedFd<'a>, u64)>,
}

/// A region of guest memory.
#[derive(Debug, Clone)]
pub struct GuestRegion {
    guest_address: u64,
    user_address: u64,
    len_bytes: u64,
    writable: bool,
    mapping: Option<Arc<Mapping>>,
}

impl GuestRegion {
    /// Maps a region.
    pub fn new(new: &NewRegion<'_>) -> Result<Self, MapError> {
        for begin in [new.guest_address, new.user_address] {
            if new.len_bytes == 0 || begin.checked_add(new.len_bytes - 1).is_none() {
                return Err(MapError::BadRange);
            }
        }
        let mapping = match new.file {
            Some((file, offset)) => Some(Arc::new(Mapping::new(
                file,
                offset,
                new.len_bytes,
                new.writable,
            )?)),
            None => None,
        };
        Ok(Self {
            guest_address: new.guest_address,
            user_address: new.user_address,
            len_bytes: new.len_bytes,
            writable: new.writable,
            mapping,
        })
    }

    /// Its guest address.
    pub fn guest_address(&self) -> u64 {
        self.guest_address
    }

    /// Its address in the client.
    pub fn user_address(&self) -> u64 {
        self.user_address
    }

    /// Its length.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Whether the client allows writes, accessible or not.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Its mapping, if accessible.
    pub fn mapping(&self) -> Option<&Arc<Mapping>> {
        self.mapping.as_ref()
    }

    fn last(&self) -> u64 {
        self.guest_address + (self.len_bytes - 1)
    }
}

/// Removed regions.
#[derive(Debug, Default)]
#[must_use = "the caller must wait until the removed regions are unused"]
pub struct Retired {
    mappings: Vec<Arc<Mapping>>,
    regions: usize,
}

impl Retired {
    /// Whether they are unused, for good. Dropping this unmaps them, which may take long.
    pub fn is_free(&self) -> bool {
        self.is_free_but_for(|_| 0)
    }

    /// As above, with a known number of idle holders of each mapping.
    pub fn is_free_but_for(&self, others: impl Fn(&Arc<Mapping>) -> usize) -> bool {
        // No new holder can appear when only we hold it.
        let mut mappings = self.mappings.iter();
        mappings.all(|mapping| Arc::strong_count(mapping) == 1 + others(mapping))
    }

    /// The mappings.
    pub fn mappings(&self) -> &[Arc<Mapping>] {
        &self.mappings
    }

    /// The number of regions.
    pub fn regions(&self) -> usize {
        self.regions
    }

    /// Adds `others`.
    pub fn and(&mut self, mut others: Self) {
        self.mappings.append(&mut others.mappings);
        self.regions += others.regions;
    }
}

/// The memory of one VM.
#[derive(Debug)]
pub struct GuestMemory {
    limits: Limits,
    /// Sorted by guest address.
    regions: Arc<Vec<GuestRegion>>,
    last: Cell<usize>,
}

/// A lookup's result.
pub(crate) struct FoundRegion<'a> {
    pub(crate) region: usize,
    pub(crate) mapping: &'a Arc<Mapping>,
    pub(crate) from_bytes: u64,
    /// Bytes to the region's end.
    pub(crate) left_bytes: u64,
}

impl Default for GuestMemory {
    fn default() -> Self {
        Self::new(Limits::default())
    }
}

impl GuestMemory {
    /// Empty memory.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            regions: Arc::default(),
            last: Cell::new(0),
        }
    }

    /// The regions.
    pub fn regions(&self) -> &[GuestRegion] {
        &self.regions
    }

    pub(crate) fn all(&self) -> &Arc<Vec<GuestRegion>> {
        &self.regions
    }

    /// Adds a region.
    pub fn map(&mut self, new: &NewRegion<'_>) -> Result<(), MapError> {
        let mut regions = self.regions.to_vec();
        self.admit(&mut regions, new)?;
        self.become_these(regions);
        Ok(())
    }

    /// Replaces all regions, or changes nothing.
    pub fn replace(&mut self, new: &[NewRegion<'_>]) -> Result<Retired, MapError> {
        let mut regions = Vec::new();
        for new in new {
            self.admit(&mut regions, new)?;
        }
        let before = std::mem::take(&mut self.regions);
        self.become_these(regions);
        Ok(retire(before.iter()))
    }

    /// Removes the regions inside a range. `None`, without effect: it would split a region.
    pub fn unmap(&mut self, guest_address: u64, len_bytes: u64) -> Option<Retired> {
        let last = guest_address.checked_add(len_bytes.checked_sub(1)?)?;
        let touches = |r: &&GuestRegion| r.guest_address <= last && guest_address <= r.last();
        let inside = |r: &GuestRegion| guest_address <= r.guest_address && r.last() <= last;
        if !self.regions.iter().filter(touches).all(inside) {
            return None;
        }
        let retired = retire(self.regions.iter().filter(|r| inside(r)));
        let left = self.regions.iter().filter(|r| !inside(r));
        let left = left.cloned().collect();
        self.become_these(left);
        Some(retired)
    }

    /// Removes all regions.
    pub fn unmap_all(&mut self) -> Retired {
        let before = std::mem::take(&mut self.regions);
        self.last.set(0);
        retire(before.iter())
    }

    fn become_these(&mut self, regions: Vec<GuestRegion>) {
        self.regions = Arc::new(regions);
        self.last.set(0);
    }

    fn admit(&self, regions: &mut Vec<GuestRegion>, new: &NewRegion<'_>) -> Result<(), MapError> {
        let Limits {
            regions: limit,
            bytes,
        } = self.limits;
        if regions.len() >= limit {
            return Err(MapError::TooMany { limit });
        }
        let others: u64 = regions.iter().map(|r| r.len_bytes).sum();
        if (others.checked_add(new.len_bytes)).is_none_or(|sum| sum > bytes) {
            return Err(MapError::TooLong { limit_bytes: bytes });
        }
        let Some(last) =
            (new.len_bytes.checked_sub(1)).and_then(|n| n.checked_add(new.guest_address))
        else {
            return Err(MapError::BadRange);
        };
        let at = regions.partition_point(|r| r.guest_address < new.guest_address);
        let before = at.checked_sub(1).and_then(|i| regions.get(i));
        let overlaps = before.is_some_and(|r| r.last() >= new.guest_address)
            || regions.get(at).is_some_and(|r| r.guest_address <= last);
        if overlaps {
            return Err(MapError::Overlaps);
        }
        regions.insert(at, GuestRegion::new(new)?);
        Ok(())
    }

    /// Whether any region is broken. Check it when [`crate::guard::breaks`] changes.
    pub fn is_broken(&self) -> bool {
        let mut mappings = self.regions.iter().filter_map(GuestRegion::mapping);
        mappings.any(|mapping| mapping.is_broken())
    }

    /// Looks up an address; `None` if unmapped or inaccessible.
    #[inline]
    pub(crate) fn find(&self, guest_address: u64) -> Option<FoundRegion<'_>> {
        let mut index = self.last.get();
        let mut region = self.regions.get(index);
        if region.is_none_or(|r| guest_address.wrapping_sub(r.guest_address) >= r.len_bytes) {
            let after = (self.regions).partition_point(|r| r.guest_address <= guest_address);
            index = after.checked_sub(1)?;
            region = self.regions.get(index);
            self.last.set(index);
        }
        let region = region?;
        let from_bytes = guest_address.wrapping_sub(region.guest_address);
        if from_bytes >= region.len_bytes {
            return None;
        }
        Some(FoundRegion {
            region: index,
            mapping: region.mapping.as_ref()?,
            from_bytes,
            left_bytes: region.len_bytes - from_bytes,
        })
    }

    /// A contiguous part of one region, for repeated use, until that is unmapped.
    pub fn area(&self, guest_address: u64, len_bytes: usize) -> Option<Area> {
        let found = self.find(guest_address)?;
        Area::new(found.mapping, found.from_bytes, len_bytes)
    }

    /// An area by the client's address.
    pub fn area_of_user(&self, user_address: u64, len_bytes: usize) -> Option<Area> {
        Area::new(
            self.region_of_user(user_address)?.mapping()?,
            user_address - self.region_of_user(user_address)?.user_address,
            len_bytes,
        )
    }

    /// Converts a client's address to a guest address.
    pub fn guest_address_of_user(&self, user_address: u64) -> Option<u64> {
        let region = self.region_of_user(user_address)?;
        Some(region.guest_address + (user_address - region.user_address))
    }

    fn region_of_user(&self, user_address: u64) -> Option<&GuestRegion> {
        let mut regions = self.regions.iter();
        regions.find(|r| user_address.wrapping_sub(r.user_address) < r.len_bytes)
    }

    /// Bytes of one region for a single use.
    #[inline]
    pub fn view(&self, guest_address: u64, len_bytes: usize) -> Option<View<'_>> {
        let found = self.find(guest_address)?;
        let ptr = found.mapping.at(found.from_bytes, len_bytes as u64)?;
        // SAFETY: found mapped; the borrow keeps this memory, which holds the mapping.
        Some(unsafe { View::new(ptr, len_bytes, self) })
    }

    /// Prefetches an address; does nothing if it is unmapped.
    #[inline]
    pub fn prefetch(&self, guest_address: u64) {
        if let Some(found) = self.find(guest_address)
            && let Some(ptr) = found.mapping.at(found.from_bytes, 1)
        {
            prefetch(ptr.as_ptr());
        }
    }

    /// Stores a byte; false if it is not writable.
    #[inline]
    #[must_use]
    pub fn store_u8(&self, guest_address: u64, value: u8) -> bool {
        let Some(found) = self.find(guest_address) else {
            return false;
        };
        match found.mapping.at(found.from_bytes, 1) {
            Some(ptr) if found.mapping.is_writable() => {
                // SAFETY: mapped and writable; an atomic allows concurrent changes.
                unsafe { AtomicU8::from_ptr(ptr.as_ptr()) }.store(value, Relaxed);
                true
            }
            _ => false,
        }
    }

    /// Copies bytes out, each once, across regions. False: some are missing; others may have been
    /// copied.
    #[must_use]
    pub fn read(&self, guest_address: u64, into: &mut [u8]) -> bool {
        let mut done = 0;
        self.each(guest_address, into.len(), false, |ptr, len| {
            // SAFETY: the lookup found it mapped; this memory holds the mapping.
            unsafe { copy_out(ptr, &mut into[done..done + len]) };
            done += len;
        })
    }

    /// Copies bytes in. False: some are not writable; others may have been written.
    #[must_use]
    pub fn write(&self, guest_address: u64, from: &[u8]) -> bool {
        let mut done = 0;
        self.each(guest_address, from.len(), true, |ptr, len| {
            // SAFETY: as in `read`; the mapping is writable.
            unsafe { copy_in(&from[done..done + len], ptr) };
            done += len;
        })
    }

    #[inline]
    fn each(
        &self,
        guest_address: u64,
        len: usize,
        write: bool,
        mut then: impl FnMut(NonNull<u8>, usize),
    ) -> bool {
        let mut done = 0;
        while done < len {
            let at = guest_address.checked_add(done as u64);
            let Some(found) = at.and_then(|at| self.find(at)) else {
                return false;
            };
            let n = (len - done).min(usize::try_from(found.left_bytes).unwrap_or(usize::MAX));
            let ptr = found.mapping.at(found.from_bytes, n as u64);
            let Some(ptr) = ptr.filter(|_| !write || found.mapping.is_writable()) else {
                return false;
            };
            then(ptr, n);
            done += n;
        }
        true
    }
}

fn retire<'a>(regions: impl Iterator<Item = &'a GuestRegion>) -> Retired {
    let mut retired = Retired::default();
    for region in regions {
        retired.regions += 1;
        if let Some(mapping) = &region.mapping {
            mapping.retire();
            retired.mappings.push(mapping.clone());
        }
    }
    retired
}
