//! Positions in a stream, and bytes that were received but not taken.
//!
//! **Design.** Bytes may be in a kept buffer, in the dead reactor's receive buffer, or in both.
//! Each start is recorded, so the order of writes does not matter.

use super::{Damage, OldBytes};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Stretch {
    /// Position of the first byte.
    pub at: u64,
    pub len: u64,
    /// Offset of the first byte in the memory file.
    pub place: u64,
}

impl Stretch {
    pub(super) fn has(&self, position: u64) -> bool {
        self.from(position).is_some()
    }

    /// (Offset in the memory file, bytes from it on)
    fn from(&self, position: u64) -> Option<(u64, u64)> {
        let skip = position.checked_sub(self.at)?;
        let left = self.len.checked_sub(skip).filter(|left| *left > 0)?;
        Some((self.place.checked_add(skip)?, left))
    }
}

/// From the first of `stretches` that has each byte.
///
/// # Errors
/// A byte is missing.
pub(super) fn gather(
    from: u64,
    stretches: &[Stretch],
    memory: &(impl OldBytes + ?Sized),
    out: &mut [u8],
) -> Result<(), Damage> {
    let nowhere = Damage("unread bytes are missing");
    from.checked_add(out.len() as u64).ok_or(nowhere)?;
    let mut have = 0;
    while have < out.len() {
        let (place, left) = stretches
            .iter()
            .find_map(|s| s.from(from + have as u64))
            .ok_or(nowhere)?;
        let n = usize::try_from(left).map_or(out.len() - have, |n| n.min(out.len() - have));
        memory
            .read(place, &mut out[have..have + n])
            .ok_or(nowhere)?;
        have += n;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    struct Stream;

    impl OldBytes for Stream {
        fn read(&self, place: u64, out: &mut [u8]) -> Option<()> {
            let end = place.checked_add(out.len() as u64)?;
            for (to, at) in out.iter_mut().zip(place..) {
                *to = at as u8;
            }
            (end <= 1000).then_some(())
        }
    }

    proptest! {
        #[test]
        fn every_byte_comes_from_where_it_is(from in 0u64..50, len in 0usize..60, parts in proptest::collection::vec((0u64..100, 0u64..60), 0..4)) {
            let stretches: Vec<Stretch> = parts
                .iter()
                .map(|(at, len)| Stretch { at: *at, len: *len, place: at + 256 })
                .collect();
            let there = |p: u64| stretches.iter().any(|s| s.at <= p && p < s.at + s.len);
            let mut out = vec![0; len];
            let want: Vec<u8> = (from..from + len as u64).map(|p| p as u8).collect();
            match gather(from, &stretches, &Stream, &mut out) {
                Ok(()) => prop_assert_eq!(out, want),
                Err(_) => prop_assert!((from..from + len as u64).any(|p| !there(p))),
            }
        }
    }

    #[test]
    fn positions_at_the_end_of_the_world_are_damage() {
        let far = Stretch {
            at: u64::MAX - 2,
            len: 8,
            place: 0,
        };
        assert!(gather(5, &[far], &Stream, &mut [0; 8]).is_err());
        assert!(gather(u64::MAX - 2, &[far], &Stream, &mut [0; 2]).is_ok());
        assert!(gather(u64::MAX - 2, &[far], &Stream, &mut [0; 5]).is_err());
        let outside = Stretch {
            at: 0,
            len: u64::MAX,
            place: u64::MAX - 1,
        };
        assert!(gather(0, &[outside], &Stream, &mut [0; 8]).is_err());
    }
}
