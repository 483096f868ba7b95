//! Two tiers of buffers: what stays at hand for whoever is served, and what a burst has borrowed beyond that.
//!
//! **Design.** BurstCBS's memory pool. Each lane keeps some buffers of each size at hand: [`OWN_BUFFERS`] of the smallest, half as many of
//! each next size. Others are borrowed. A burst keeps them until, for [`BURST_OVER`] looks, no more than the first tier was out since the
//! look before. Then free buffers beyond that tier go back, a few at each look.
//! **Not here:** the buffers, the time between looks, giving memory back (a reactor's staging memory and the simulator's model of it).

/// So much goes back at one look: the kernel takes pages away one by one, and meanwhile a reactor does nothing else,
const RETURNED_BYTES: u32 = 1 << 20;
/// in at most so many buffers, each of which may be a call.
const RETURNED_BUFFERS: u32 = 64;

/// Of the smallest buffers, so many stay at hand for each lane.
pub const OWN_BUFFERS: u32 = 8;
/// A burst is over after so many looks, 0.1 s apart, that found no more than the first tier out.
pub const BURST_OVER: u32 = 5;

/// Of a size, 0 being the smallest, what stays at hand for so many lanes.
#[must_use]
pub fn own(size: usize, lanes: u32) -> u32 {
    let of_one = OWN_BUFFERS.checked_shr(size as u32).unwrap_or(0);
    of_one.saturating_mul(lanes)
}

/// How many buffers of so many bytes go back at one look at most.
#[must_use]
pub fn returned_at_once(bytes: u32) -> u32 {
    (RETURNED_BYTES / bytes.max(1)).clamp(1, RETURNED_BUFFERS)
}

/// The buffers of one size, as far as they are counted.
#[derive(Clone, Default, Debug)]
pub struct Used {
    out: u32,
    /// The most that were out since the last look.
    most_out: u32,
    /// Looks in a row at which there was no burst.
    calm: u32,
}

impl Used {
    /// None is out.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            out: 0,
            most_out: 0,
            calm: 0,
        }
    }

    /// How many are out.
    #[inline]
    #[must_use]
    pub fn out(&self) -> u32 {
        self.out
    }

    /// One is taken.
    #[inline]
    pub fn take(&mut self) {
        self.out += 1;
        self.most_out = self.most_out.max(self.out);
    }

    /// One is back.
    #[inline]
    pub fn give(&mut self) {
        self.out -= 1;
    }

    /// Looks whether a burst is over, where so many stay at hand. If so, this many of the free ones are kept.
    pub fn look(&mut self, own: u32) -> Option<u32> {
        let most = std::mem::replace(&mut self.most_out, self.out);
        self.calm = match most > own {
            true => 0,
            false => self.calm.saturating_add(1),
        };
        (self.calm >= BURST_OVER).then(|| own.saturating_sub(self.out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_over_once_no_more_than_the_first_tier_was_out_for_so_many_looks() {
        let own = [0, 1, 2, 3, 4, 40].map(|size| own(size, 2));
        assert_eq!(own, [16, 8, 4, 2, 0, 0]);
        let mut used = Used::default();
        let burst = |used: &mut Used| {
            (0..9).for_each(|_| used.take());
            (0..9).for_each(|_| used.give());
        };
        burst(&mut used);
        used.take();
        let looks: Vec<_> = (0..7).map(|_| used.look(8)).collect();
        assert_eq!(looks, [None, None, None, None, None, Some(7), Some(7)]);
        burst(&mut used);
        assert_eq!((used.look(8), used.out()), (None, 1));
        assert_eq!(
            [4 << 10, 64 << 10, 4 << 20].map(returned_at_once),
            [64, 16, 1]
        );
    }
}
