//! Detects stuck threads of the engine, so that the supervisor replaces it.
//!
//! Reactors store the time of their turns, and the control thread its wake-ups. A thread counts as
//! stuck after several checks in a row. Time in which the daemon itself stood still does not count:
//! the whole node may have been paused. A stopped process counts as stuck too.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use forebay_xlate::boundary::region::{MAX_REACTORS, MAX_SLEEP_NS, Region};

const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Checks in a row that must find a thread stuck.
const POLLS: u32 = 3;

/// The control thread, in place of a reactor's number.
pub(super) const CONTROL: usize = MAX_REACTORS;
/// The control thread's limit is this many times a reactor's, because no I/O waits for it.
const CONTROL_PATIENCE: u32 = 2;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stuck {
    pub(super) thread: usize,
    pub(super) since: Duration,
}

fn monotonic() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec as u32)
}

pub(super) fn name(thread: usize) -> String {
    match thread {
        CONTROL => "the control thread".to_owned(),
        reactor => format!("reactor {reactor}"),
    }
}

/// Waits until an awake thread has taken no turn for `after`; forever if that is zero.
pub(super) async fn stuck(region: &Region, after: Duration) -> Stuck {
    if after.is_zero() {
        return std::future::pending().await;
    }
    let mut seen = Seen::default();
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        let now = monotonic();
        let from = seen.counts_from(now, after);
        if let Some((thread, turn)) = seen.again(check(region, now, from, after)) {
            return Stuck {
                thread,
                since: now.saturating_sub(Duration::from_nanos(turn)),
            };
        }
    }
}

/// The late thread and its last turn, and how often it was found.
#[derive(Debug, Default)]
struct Seen {
    last: Option<(usize, u64)>,
    times: u32,
    checked: Option<Duration>,
    from: Duration,
}

impl Seen {
    /// The time since which this daemon has not stood still for long.
    fn counts_from(&mut self, now: Duration, after: Duration) -> Duration {
        let last = self.checked.replace(now).unwrap_or(now);
        if now.saturating_sub(last) > after / 2 {
            self.from = now;
        }
        self.from
    }

    /// Returns the thread once it was found often enough.
    fn again(&mut self, late: Option<(usize, u64)>) -> Option<(usize, u64)> {
        self.times = if late.is_some() && late == self.last {
            self.times + 1
        } else {
            1
        };
        self.last = late;
        late.filter(|_| self.times >= POLLS)
    }
}

pub(super) fn note(region: &Region, thread: usize) {
    region.header().stuck.store(thread as u64 + 1, Relaxed);
}

/// Returns the thread's last turn, too.
fn check(region: &Region, now: Duration, from: Duration, after: Duration) -> Option<(usize, u64)> {
    let reactors = region.header().reactors.load(Relaxed);
    let reactors = reactors.min(MAX_REACTORS as u64) as usize;
    let reactors = region.reactors()[..reactors].iter().enumerate();
    let reactors = reactors.map(|(number, reactor)| {
        let limit = match reactor.asleep.load(Relaxed) {
            0 => after,
            _ => after + Duration::from_nanos(MAX_SLEEP_NS),
        };
        (number, reactor.last_turn_ns.load(Relaxed), limit)
    });
    let since = region.header().control_since_ns.load(Relaxed);
    let control = (CONTROL, since, after * CONTROL_PATIENCE);
    reactors.chain([control]).find_map(|(thread, turn, limit)| {
        let age = now.saturating_sub(Duration::from_nanos(turn).max(from));
        // A thread that has not begun has no turn.
        (turn != 0 && age > limit).then_some((thread, turn))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sleeping_reactor_gets_a_longer_watchdog_limit() {
        let region = Region::anonymous(1).unwrap();
        let after = Duration::from_secs(5);
        let now = Duration::from_secs(100);
        region.header().reactors.store(3, Relaxed);
        let at = |number: usize, seconds: u64, asleep: u64| {
            let reactor = &region.reactors()[number];
            reactor.last_turn_ns.store(seconds * 1_000_000_000, Relaxed);
            reactor.asleep.store(asleep, Relaxed);
        };
        at(0, 99, 0);
        at(1, 86, 1);
        assert_eq!(check(&region, now, Duration::ZERO, after), None);
        at(1, 84, 1);
        assert_eq!(
            check(&region, now, Duration::ZERO, after),
            Some((1, 84_000_000_000))
        );
        at(1, 86, 1);
        at(2, 94, 0);
        assert_eq!(
            check(&region, now, Duration::ZERO, after),
            Some((2, 94_000_000_000))
        );
        at(2, 200, 0);
        assert_eq!(
            check(&region, now, Duration::ZERO, after),
            None,
            "a time to come"
        );
        region.header().reactors.store(u64::MAX, Relaxed);
        assert_eq!(check(&region, now, Duration::ZERO, after), None, "bounded");
        let control = |seconds: u64| {
            let since = &region.header().control_since_ns;
            since.store(seconds * 1_000_000_000, Relaxed);
        };
        control(91);
        assert_eq!(check(&region, now, Duration::ZERO, after), None);
        control(89);
        assert_eq!(
            check(&region, now, Duration::ZERO, after),
            Some((CONTROL, 89_000_000_000))
        );
    }

    #[test]
    fn a_paused_host_is_not_taken_for_a_stuck_reactor() {
        let mut seen = Seen::default();
        // Each turn was long ago, but it is another one each time.
        for turn in 0..100 {
            assert_eq!(seen.again(Some((0, turn))), None);
        }
        assert_eq!(seen.again(None), None);
        for _ in 1..POLLS {
            assert_eq!(seen.again(Some((1, 7))), None);
        }
        assert_eq!(seen.again(Some((1, 7))), Some((1, 7)));
    }

    #[test]
    fn time_in_which_the_daemon_stood_still_does_not_count() {
        let region = Region::anonymous(1).unwrap();
        let after = Duration::from_secs(5);
        region.header().reactors.store(1, Relaxed);
        region.reactors()[0]
            .last_turn_ns
            .store(10_000_000_000, Relaxed);
        let mut seen = Seen::default();
        let mut late = |seconds: u64| {
            let now = Duration::from_secs(seconds);
            let from = seen.counts_from(now, after);
            check(&region, now, from, after).is_some()
        };
        assert!(!late(12));
        // The whole node was paused.
        assert!(!late(60));
        assert!(!late(62) && !late(64));
        assert!(late(66), "it had its time again");
    }
}
