//! How long an idle reactor polls before it sleeps.
//!
//! **Design.** A wakeup costs tens of microseconds on both sides. A host that sends a command soon
//! after each answer would meet a sleeping reactor every time. So a reactor polls briefly, and
//! longer after a short pause that it slept through; a long pause resets this. Each long, useless
//! poll thus follows its own short pause. **Not here:** when it may sleep at all
//! ([`crate::reactor`]).

const SHORT_NS: u64 = 30_000;
/// The longer polling time. Shorter pauses, including the wakeup, count as short.
const LONG_NS: u64 = 150_000;

#[derive(Debug)]
pub(crate) struct Spin {
    limit_ns: u64,
}

impl Spin {
    pub(crate) fn new() -> Self {
        Self { limit_ns: SHORT_NS }
    }

    #[inline]
    pub(crate) fn limit_ns(&self) -> u64 {
        self.limit_ns
    }

    /// Reports a pause that ended after polling and sleep.
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

    /// The useless polling time of a pause; 0 if it had no sleep.
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
        fn an_idle_reactor_polls_briefly(pauses in proptest::collection::vec(1u64..400_000, 1..200)) {
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
                prop_assert!(long <= soon);
            }
            pause(&mut spin, 1_000_000_000);
            prop_assert_eq!(spin.limit_ns(), SHORT_NS);
        }
    }
}
