//! Lists of pieces of memory, for requests with scattered data.
//!
//! The kernel reads a list at submission, and again when a rest is resubmitted, so it must stay in
//! place. Its memory is never unmapped; untouched pages cost nothing. The caller tracks which lists
//! are in use.
#![allow(unsafe_code)]

use std::io;
use std::ptr::NonNull;

use crate::mem::{Buf, Named, StaticRegion};

/// The kernel's limit for one request (`UIO_MAXIOV`).
pub(crate) const MAX_LIST: usize = 1024;

/// Several pieces of memory for one operation, in order.
#[derive(Debug, Clone, Copy)]
pub struct Bufs {
    ptr: NonNull<libc::iovec>,
    len_bytes: u32,
    count: u32,
}

// SAFETY: addresses and lengths, in memory that is never unmapped; each piece has `Buf::new`'s
// contract.
unsafe impl Send for Bufs {}
// SAFETY: as for Send. Lists are changed by `Vectors`, which is borrowed for it, and by the one
// operation that names them.
unsafe impl Sync for Bufs {}

impl Bufs {
    pub(crate) fn again(ptr: NonNull<libc::iovec>, len_bytes: u32, count: u32) -> Self {
        Self {
            ptr,
            len_bytes,
            count,
        }
    }

    /// The compact form; a single piece becomes a plain buffer. `None` if empty.
    pub(crate) fn named(self) -> Option<Named> {
        match self.count {
            0 => None,
            1 => self.iter().next().map(Named::one),
            _ => Some(Named::list(self.ptr, self.len_bytes, self.count)),
        }
    }

    /// Total bytes.
    pub fn len_bytes(&self) -> u32 {
        self.len_bytes
    }

    /// Number of pieces.
    pub fn count(&self) -> u32 {
        self.count
    }

    pub(crate) fn are_of_pages(&self, page_bytes: usize) -> bool {
        let mut before_ends_well = true;
        self.iter().enumerate().all(|(at, buf)| {
            let from = buf.ptr().addr().get();
            let fits = before_ends_well && (at == 0 || from.is_multiple_of(page_bytes));
            before_ends_well = (from + buf.len_bytes() as usize).is_multiple_of(page_bytes);
            fits
        })
    }

    pub(crate) fn ptr(&self) -> NonNull<libc::iovec> {
        self.ptr
    }

    /// The pieces, in order.
    pub fn iter(&self) -> impl Iterator<Item = Buf> + use<> {
        let Self { ptr, count, .. } = *self;
        // SAFETY: entries of a list, checked by `Vectors::bufs`; its memory is never unmapped.
        (0..count as usize).filter_map(move |at| unsafe { buf(ptr.add(at)) })
    }

    /// The pieces without the first `done_bytes`; changes the list in place.
    pub(crate) fn rest(self, done_bytes: u32) -> Option<Self> {
        let len_bytes = self.len_bytes.checked_sub(done_bytes)?;
        let (mut ptr, mut count, mut left) = (self.ptr, self.count, done_bytes as usize);
        while count > 0 && left > 0 {
            // SAFETY: an entry of the list. The operation that names it has ended and its caller
            // wants the rest, so nothing else changes it.
            unsafe {
                let entry = ptr.as_mut();
                let n = left.min(entry.iov_len);
                left -= n;
                if n == entry.iov_len {
                    (ptr, count) = (ptr.add(1), count - 1);
                } else {
                    entry.iov_base = entry.iov_base.wrapping_byte_add(n);
                    entry.iov_len -= n;
                }
            }
        }
        (left == 0).then_some(Self {
            ptr,
            len_bytes,
            count,
        })
    }
}

/// The buffer of an entry; `None` if it was never set.
///
/// # Safety
/// An entry of a list, within the contract of the buffer put there.
unsafe fn buf(entry: NonNull<libc::iovec>) -> Option<Buf> {
    // SAFETY: as above; the entry holds a `Buf` or a part of one, so its length fits `u32`.
    unsafe {
        let entry = entry.read();
        let ptr = NonNull::new(entry.iov_base.cast())?;
        Some(Buf::new(ptr, entry.iov_len as u32))
    }
}

/// Lists of equal size. See the module.
#[derive(Debug)]
pub struct Vectors {
    region: StaticRegion,
    lists: usize,
    pieces: usize,
}

impl Vectors {
    /// Creates lists; `EINVAL` for lists longer than 1024.
    pub fn new(lists: usize, pieces: usize) -> io::Result<Self> {
        let bytes = lists.checked_mul(pieces);
        let bytes = bytes.and_then(|n| n.checked_mul(size_of::<libc::iovec>()));
        let bytes = bytes.filter(|n| *n > 0 && pieces <= MAX_LIST);
        let bytes = bytes.ok_or(rustix::io::Errno::INVAL)?;
        Ok(Self {
            region: StaticRegion::anonymous(bytes)?,
            lists,
            pieces,
        })
    }

    fn entries(&self, list: usize, from: usize, count: usize) -> Option<NonNull<libc::iovec>> {
        if list >= self.lists || from.checked_add(count)? > self.pieces {
            return None;
        }
        let size = size_of::<libc::iovec>();
        let ptr = self
            .region
            .at((list * self.pieces + from) * size, count * size)?;
        Some(ptr.cast())
    }

    /// Sets an entry of a list; false if it doesn't exist.
    pub fn set(&mut self, list: usize, at: usize, buf: Buf) -> bool {
        let Some(entry) = self.entries(list, at, 1) else {
            return false;
        };
        // SAFETY: an entry, aligned because the region is page aligned.
        unsafe {
            entry.write(libc::iovec {
                iov_base: buf.ptr().as_ptr().cast(),
                iov_len: buf.len_bytes() as usize,
            });
        }
        true
    }

    /// Number of entries from `from` on that hold exactly `len_bytes`, and whether the last was cut
    /// in two. Then the entries behind it, of the list's first `count`, move up by one. `None`,
    /// without a change, if there are too few bytes or no room.
    pub fn cut(
        &mut self,
        list: usize,
        from: usize,
        count: usize,
        len_bytes: u32,
    ) -> Option<(usize, bool)> {
        let entries = self.entries(list, 0, count)?;
        let (mut at, mut left) = (from, len_bytes as usize);
        while left > 0 {
            if at >= count {
                return None;
            }
            // SAFETY: one of the first `count` entries.
            let len = unsafe { entries.add(at).read() }.iov_len;
            if len > left {
                break;
            }
            left -= len;
            at += 1;
        }
        if left == 0 {
            return Some((at - from, false));
        }
        self.entries(list, 0, count + 1)?;
        // SAFETY: `at` is below `count`, and there is room for one more entry. Only operations use
        // the list meanwhile, and they name entries before `from`.
        unsafe {
            let first = entries.add(at);
            first.copy_to(first.add(1), count - at);
            (*first.as_ptr()).iov_len = left;
            let second = first.add(1).as_ptr();
            (*second).iov_base = (*second).iov_base.wrapping_byte_add(left);
            (*second).iov_len -= left;
        }
        Some((at + 1 - from, true))
    }

    /// Entries of a list, for an operation; `None` if the list is too short or the bytes exceed
    /// `u32`.
    ///
    /// # Safety
    /// Each entry was [set](Vectors::set) for this operation, and the contract of its [`Buf`] holds
    /// until the operation has ended. Until then, neither these entries nor those behind them
    /// change, except by [`Vectors::cut`] of entries behind them.
    pub unsafe fn bufs(&self, list: usize, from: usize, count: usize) -> Option<Bufs> {
        let ptr = self.entries(list, from, count)?;
        let mut len_bytes = 0u32;
        for at in 0..count {
            // SAFETY: inside the list.
            let len = unsafe { ptr.add(at).read() }.iov_len;
            len_bytes = len_bytes.checked_add(u32::try_from(len).ok()?)?;
        }
        Some(Bufs {
            ptr,
            len_bytes,
            count: u32::try_from(count).ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lists(lens: &[u32], room: usize) -> (Vectors, StaticRegion) {
        let region = StaticRegion::anonymous(1 << 20).expect("maps");
        let mut lists = Vectors::new(2, lens.len() + room).expect("maps");
        let mut from = 0;
        for (at, len) in lens.iter().enumerate() {
            let buf = region.buf(from, *len).expect("inside");
            assert!(lists.set(1, at, buf));
            from += *len as usize + 1;
        }
        (lists, region)
    }

    fn addresses(bufs: impl Iterator<Item = Buf>) -> Vec<usize> {
        let of = |buf: Buf| {
            let from = buf.ptr().addr().get();
            from..from + buf.len_bytes() as usize
        };
        bufs.flat_map(of).collect()
    }

    proptest! {
        #[test]
        fn cuts_cover_exactly_the_bytes(
            lens in prop::collection::vec(1u32..20, 1..12),
            cuts in prop::collection::vec(1u32..40, 0..12),
        ) {
            let (mut lists, _region) = lists(&lens, cuts.len());
            let sum: u32 = lens.iter().sum();
            // SAFETY: all were set, of memory that is never unmapped.
            let bufs = |lists: &Vectors, from, n| unsafe { lists.bufs(1, from, n) }.expect("bufs");
            let expected = addresses(bufs(&lists, 0, lens.len()).iter());
            let (mut from, mut count, mut done) = (0, lens.len(), 0);
            let mut found = Vec::new();
            for cut in cuts {
                let cut = cut.min(sum - done);
                if cut == 0 {
                    break;
                }
                let (n, more) = lists.cut(1, from, count, cut).expect("room and bytes");
                count += usize::from(more);
                let part = bufs(&lists, from, n);
                prop_assert_eq!(part.len_bytes(), cut);
                found.extend(addresses(part.iter()));
                from += n;
                done += cut;
            }
            found.extend(addresses(bufs(&lists, from, count - from).iter()));
            prop_assert_eq!(found, expected);
            prop_assert_eq!(lists.cut(1, from, count, sum - done + 1), None);
        }

        #[test]
        fn the_rest_of_a_vector_follows_the_done_bytes(lens in prop::collection::vec(1u32..20, 1..12), done in 0u32..240) {
            let (lists, _region) = lists(&lens, 0);
            // SAFETY: as above.
            let bufs = unsafe { lists.bufs(1, 0, lens.len()) }.expect("bufs");
            let all = addresses(bufs.iter());
            match bufs.rest(done) {
                None => prop_assert!(done > bufs.len_bytes()),
                Some(rest) => {
                    prop_assert_eq!(rest.len_bytes(), bufs.len_bytes() - done);
                    prop_assert_eq!(addresses(rest.iter()), &all[done as usize..]);
                }
            }
        }
    }

    #[test]
    fn lists_end_where_they_end() {
        let (mut lists, region) = lists(&[4, 4], 0);
        let buf = region.buf(0, 4).expect("inside");
        assert!(!lists.set(1, 2, buf) && !lists.set(2, 0, buf));
        assert_eq!(lists.cut(1, 0, 2, 3), None, "no room");
        assert_eq!(lists.cut(1, 0, 2, 8), Some((2, false)));
        assert_eq!(lists.cut(1, 0, 3, 1), None);
        // SAFETY: returns `None`, so nothing is accessed.
        assert!(unsafe { lists.bufs(1, 1, 2) }.is_none());
        assert!(Vectors::new(1, MAX_LIST + 1).is_err() && Vectors::new(0, 1).is_err());
        assert!(Vectors::new(usize::MAX, 2).is_err());
    }
}
