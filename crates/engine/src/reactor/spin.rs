//! How long a reactor polls without finding anything before it sleeps.
//!
//! Purpose: a sleep costs whoever wakes it and whoever is woken tens of microseconds. A host that asks anew as soon as it is
//! answered would meet a sleeping reactor again and again, each time a little too late.
//! Design: a short while; and after a pause that was over soon though it was slept through, long enough for another such
//! pause. One that lasts makes it short again. So a long poll that finds nothing is the only one until the next pause that
//! is over soon, and who is idle pays the short while.
//! Not here: when a reactor may sleep at all ([`crate::reactor`]).

/// The short while.
const SHORT_NS: u64 = 30_000;
/// The longer one. Pauses are measured with what it took to wake.
const LONG_NS: u64 = 150_000;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Spin {
    limit_ns: u64,
}

impl Spin {
    /// Nothing is known yet.
    pub(crate) fn new() -> Self {
        Self { limit_ns: SHORT_NS }
    }

    /// How long it is, in ns.
    #[inline]
    pub(crate) fn limit_ns(&self) -> u64 {
        self.limit_ns
    }

    /// A pause is over, in which it was polled in vain and then slept: so long in all.
    pub(crate) fn paused(&mut self, ns: u64) {
        self.limit_ns = match ns < LONG_NS {
            true => LONG_NS,
            false => SHORT_NS,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What a pause costs: how long it was polled in vain; 0 where it was not slept.
    fn pause(spin: &mut Spin, ns: u64) -> u64 {
        let limit = spin.limit_ns();
        if ns <= limit {
            return 0;
        }
        spin.paused(ns);
        limit
    }

    #[test]
    fn even_pauses_are_slept_through_once_or_polled_short() {
        for ns in (1..=1000).map(|us| us * 1000) {
            let mut spin = Spin::new();
            pause(&mut spin, ns);
            let cost = if ns < LONG_NS { 0 } else { SHORT_NS };
            for _ in 0..10 {
                assert_eq!(pause(&mut spin, ns), cost, "{ns}");
            }
        }
    }

    proptest! {
        #[test]
        fn who_is_idle_polls_short(pauses in proptest::collection::vec(1u64..400_000, 1..200)) {
            let mut spin = Spin::new();
            let (mut soon, mut long) = (0, 0);
            for ns in pauses {
                match pause(&mut spin, ns) {
                    0 => {}
                    SHORT_NS => soon += u32::from(ns < LONG_NS),
                    polled => {
                        prop_assert_eq!(polled, LONG_NS);
                        long += 1;
                    }
                }
                // Each long poll in vain was asked for by a pause of its own.
                prop_assert!(long <= soon);
            }
            pause(&mut spin, 1_000_000_000);
            prop_assert_eq!(spin.limit_ns(), SHORT_NS);
        }
    }
}
