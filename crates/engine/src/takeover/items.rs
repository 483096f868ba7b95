//! Splits a queue's transmit items into sent and unsent.
//!
//! **Design.** Items are contiguous in the stream, with absolute positions. So the kernel's count
//! of accepted bytes alone decides; the engine's notes are not used. **Not here:** records
//! ([`super::snapshot`]).

use super::Damage;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Extent {
    /// Position of its first byte.
    pub start: u64,
    /// Header and data.
    pub len: u64,
}

impl Extent {
    fn end(&self) -> Result<u64, Damage> {
        self.start
            .checked_add(self.len)
            .ok_or(Damage("an item ends beyond every stream"))
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Sent {
    /// Items that are sent completely.
    pub items: usize,
    /// Sent bytes of the next one.
    pub skip: u64,
    /// Position after the last item.
    pub published: u64,
}

/// `tx_at`: start of an empty list; `accepted`: bytes that the kernel took.
///
/// # Errors
/// The items are not contiguous, or the kernel took other bytes.
pub(super) fn split(items: &[Extent], tx_at: u64, accepted: u64) -> Result<Sent, Damage> {
    let mut published = items.first().map_or(tx_at, |item| item.start);
    if items.first().is_some_and(|item| item.start > accepted)
        || items.is_empty() && tx_at != accepted
    {
        return Err(Damage("more was sent than was published"));
    }
    let mut sent = Sent {
        items: 0,
        skip: 0,
        published,
    };
    for item in items {
        if item.start != published || item.len == 0 {
            return Err(Damage("items are not contiguous"));
        }
        published = item.end()?;
        if published <= accepted {
            sent.items += 1;
        } else if item.start < accepted {
            sent.skip = accepted - item.start;
        }
    }
    if accepted > published {
        return Err(Damage("the kernel took more than was published"));
    }
    Ok(Sent { published, ..sent })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_kernels_count_splits_the_list(start in 0u64..1000, lens in proptest::collection::vec(1u64..50, 1..20), cut in 0u64..1000) {
            let mut at = start;
            let items: Vec<Extent> = lens
                .iter()
                .map(|len| {
                    at += len;
                    Extent { start: at - len, len: *len }
                })
                .collect();
            let accepted = start + cut % (at - start + 1);
            let sent = split(&items, 7, accepted).unwrap();
            prop_assert_eq!(sent.published, at);
            let whole: u64 = lens[..sent.items].iter().sum();
            prop_assert_eq!(start + whole + sent.skip, accepted);
            prop_assert!(sent.items == items.len() && sent.skip == 0 || sent.skip < lens[sent.items]);
            prop_assert!(split(&items, 7, at + 1).is_err());
            prop_assert!(start == 0 || split(&items, 7, start - 1).is_err());
            let mut torn = items.clone();
            torn[lens.len() / 2].start += 1;
            prop_assert!(lens.len() < 2 || split(&torn, 7, accepted).is_err());
        }
    }

    #[test]
    fn an_empty_list_says_where_it_is() {
        let sent = split(&[], 70, 70).unwrap();
        assert_eq!((sent.items, sent.skip, sent.published), (0, 0, 70));
        assert!(split(&[], 70, 71).is_err() && split(&[], 70, 69).is_err());
        let endless = Extent {
            start: u64::MAX - 1,
            len: 5,
        };
        assert!(split(&[endless], 0, u64::MAX).is_err());
    }
}
