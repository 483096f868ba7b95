//! Positions in a stream, and the bytes of it that were received and not taken.
//!
//! **Design.** Every byte has a position, counted from the connection's first. The bytes of a stretch
//! of positions may be in a kept buffer, in the dead reactor's receive buffer, or partly in each: what
//! each begins with is recorded, so nothing is concluded from the order in which they were written.
//!
//! **Not here:** what the bytes say.

use super::Damage;

/// Bytes of a stream that are at hand.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stretch<'a> {
    /// The position of the first.
    pub at: u64,
    /// The bytes.
    pub bytes: &'a [u8],
}

impl<'a> Stretch<'a> {
    /// Whether it has a position.
    pub(super) fn has(&self, position: u64) -> bool {
        self.from(position).is_some()
    }

    /// From a position on, if it has that one.
    fn from(&self, position: u64) -> Option<&'a [u8]> {
        let skip = usize::try_from(position.checked_sub(self.at)?).ok()?;
        self.bytes.get(skip..).filter(|bytes| !bytes.is_empty())
    }
}

/// Collects the bytes of the positions `from..to` in `out`, each from the first of `stretches` that has
/// it; returns how many they are.
///
/// # Errors
/// When one of them is nowhere, or they don't fit.
pub(super) fn gather(
    from: u64,
    to: u64,
    stretches: &[Stretch<'_>],
    out: &mut [u8],
) -> Result<usize, Damage> {
    let wanted = to
        .checked_sub(from)
        .and_then(|n| usize::try_from(n).ok())
        .filter(|n| *n <= out.len())
        .ok_or(Damage("more unread bytes than are ever kept"))?;
    let mut have = 0;
    while have < wanted {
        let bytes = stretches
            .iter()
            .find_map(|s| s.from(from + have as u64))
            .ok_or(Damage("unread bytes are nowhere"))?;
        let n = bytes.len().min(wanted - have);
        out[have..have + n].copy_from_slice(&bytes[..n]);
        have += n;
    }
    Ok(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_byte_comes_from_where_it_is(from in 0u64..50, len in 0u64..60, parts in proptest::collection::vec((0u64..100, 0usize..60), 0..4)) {
            let stream: Vec<u8> = (0..200).collect();
            let stretches: Vec<Stretch<'_>> = parts
                .iter()
                .map(|(at, len)| Stretch { at: *at, bytes: &stream[*at as usize..][..*len] })
                .collect();
            let there = |p: u64| stretches.iter().any(|s| s.at <= p && p < s.at + s.bytes.len() as u64);
            let mut out = [0; 64];
            match gather(from, from + len, &stretches, &mut out) {
                Ok(n) => {
                    prop_assert_eq!(n as u64, len);
                    prop_assert_eq!(&out[..n], &stream[from as usize..(from + len) as usize]);
                }
                Err(_) => prop_assert!((from..from + len).any(|p| !there(p))),
            }
        }
    }

    #[test]
    fn positions_at_the_end_of_the_world_are_damage() {
        let far = Stretch {
            at: u64::MAX - 2,
            bytes: &[1; 8],
        };
        assert!(gather(5, 4, &[far], &mut [0; 8]).is_err());
        assert!(gather(0, u64::MAX, &[far], &mut [0; 8]).is_err());
        assert_eq!(gather(u64::MAX - 2, u64::MAX, &[far], &mut [0; 8]), Ok(2));
    }
}
