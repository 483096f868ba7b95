//! Decides how many free buffers a reactor keeps: BurstCBS's memory pool.
//!
//! Each lane keeps some buffers of each size: [`OWN_BUFFERS`] of the smallest, half as many of each
//! next size. A burst borrows more. After [`BURST_OVER`] checks without a burst, the extra free
//! buffers return to the kernel, a few at each check.

/// Most bytes to return at one check: the kernel takes pages one by one while the reactor waits.
const RETURNED_BYTES: u32 = 1 << 20;
/// Most buffers to return at one check: each may cost a system call.
const RETURNED_BUFFERS: u32 = 64;

/// The smallest buffers that each lane keeps.
pub const OWN_BUFFERS: u32 = 8;
/// Checks, 0.1 s apart, after which a burst is over.
pub const BURST_OVER: u32 = 5;

/// The buffers that these lanes keep; size 0 is the smallest.
#[must_use]
pub fn own(size: usize, lanes: u32) -> u32 {
    let of_one = OWN_BUFFERS.checked_shr(size as u32).unwrap_or(0);
    of_one.saturating_mul(lanes)
}

/// The most buffers of this size to return at one check.
#[must_use]
pub fn returned_at_once(bytes: u32) -> u32 {
    (RETURNED_BYTES / bytes.max(1)).clamp(1, RETURNED_BUFFERS)
}

/// Counts the buffers of one size.
#[derive(Clone, Default, Debug)]
pub struct Used {
    out: u32,
    /// The most in use since the last check.
    most_out: u32,
    /// Consecutive checks without a burst.
    calm: u32,
}

impl Used {
    /// No buffer in use.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            out: 0,
            most_out: 0,
            calm: 0,
        }
    }

    /// Buffers in use.
    #[inline]
    #[must_use]
    pub fn out(&self) -> u32 {
        self.out
    }

    /// Counts a buffer in use.
    #[inline]
    pub fn acquire(&mut self) {
        self.out += 1;
        self.most_out = self.most_out.max(self.out);
    }

    /// Counts a freed buffer.
    #[inline]
    pub fn release(&mut self) {
        self.out -= 1;
    }

    /// Checks whether a burst is over, when `own` buffers are kept. If so, returns how many free
    /// ones to keep.
    pub fn poll(&mut self, own: u32) -> Option<u32> {
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
    fn a_burst_is_over_after_several_checks_without_one() {
        let own = [0, 1, 2, 3, 4, 40].map(|size| own(size, 2));
        assert_eq!(own, [16, 8, 4, 2, 0, 0]);
        let mut used = Used::default();
        let burst = |used: &mut Used| {
            (0..9).for_each(|_| used.acquire());
            (0..9).for_each(|_| used.release());
        };
        burst(&mut used);
        used.acquire();
        let polls: Vec<_> = (0..7).map(|_| used.poll(8)).collect();
        assert_eq!(polls, [None, None, None, None, None, Some(7), Some(7)]);
        burst(&mut used);
        assert_eq!((used.poll(8), used.out()), (None, 1));
        assert_eq!(
            [4 << 10, 64 << 10, 4 << 20].map(returned_at_once),
            [64, 16, 1]
        );
    }
}
