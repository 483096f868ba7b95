//! Numbers and times of events, which never decrease, not even after a restart or when the clock is
//! set back.
//!
//! A daemon's first number is its clock in microseconds. A file in the state folder reserves
//! numbers and times in steps, ahead of use. After the clock was set back, times run at half speed
//! until it has caught up.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const STEP: u64 = 1 << 20;
/// Event times are reserved this far ahead, ms. After a restart, event times may lead the clock by
/// as much.
const STEP_MS: u64 = 1000;
const FILE: &str = "event-number";

#[derive(Debug)]
pub(crate) struct EventNumbers {
    file: Option<PathBuf>,
    /// The number before the first.
    pub(crate) before: u64,
    newest: Cell<u64>,
    reserved: Cell<u64>,
    reserved_ms: Cell<u64>,
    /// The newest time taken from the clock, and when.
    clock: Cell<(u64, Instant)>,
}

fn half_ms(since: Duration) -> u64 {
    u64::try_from((since / 2).as_millis()).unwrap_or(u64::MAX)
}

impl EventNumbers {
    /// Numbers are above `newest`, a recorded one, and above all from earlier daemons with this
    /// state folder. Times are not before `newest_ms`.
    pub(crate) fn open(folder: Option<&Path>, now_ms: u64, newest: u64, newest_ms: u64) -> Self {
        // A daemon always has a state folder; a unit test may have none.
        let folder = folder.filter(|folder| !folder.as_os_str().is_empty());
        let file = folder.map(|folder| folder.join(FILE));
        let text = file
            .as_ref()
            .and_then(|file| std::fs::read_to_string(file).ok());
        let text = text.unwrap_or_default();
        let mut kept = text
            .split_whitespace()
            .map(|word| word.parse().unwrap_or(0));
        let (kept, kept_ms) = (kept.next().unwrap_or(0), kept.next().unwrap_or(0));
        let before = now_ms.saturating_mul(1000).max(newest).max(kept);
        Self {
            file,
            before,
            newest: Cell::new(before),
            reserved: Cell::new(before),
            reserved_ms: Cell::new(0),
            clock: Cell::new((now_ms.max(newest_ms).max(kept_ms), Instant::now())),
        }
    }

    pub(crate) fn newest(&self) -> u64 {
        self.newest.get()
    }

    pub(crate) fn next(&self, now_ms: u64) -> (u64, u64) {
        self.next_at(now_ms, Instant::now())
    }

    fn next_at(&self, now_ms: u64, now: Instant) -> (u64, u64) {
        let number = self.newest.get() + 1;
        self.newest.set(number);
        let (newest_ms, then) = self.clock.get();
        let since = now.saturating_duration_since(then);
        let at_ms = now_ms.max(newest_ms.saturating_add(half_ms(since)));
        if at_ms == now_ms {
            self.clock.set((now_ms, now));
        }
        if number > self.reserved.get() || at_ms > self.reserved_ms.get() {
            self.reserve(number.saturating_add(STEP), at_ms.saturating_add(STEP_MS));
        }
        (number, at_ms)
    }

    fn reserve(&self, number: u64, at_ms: u64) {
        self.reserved.set(number);
        self.reserved_ms.set(at_ms);
        let Some(file) = &self.file else {
            return;
        };
        let new = file.with_extension("new");
        let text = format!("{number} {at_ms}\n");
        let written = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, file));
        if let Err(error) = written {
            tracing::warn!(path = %file.display(), %error, "can't save the number of the next event");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_numbers_never_fall() {
        const HOUR_MS: u64 = 3_600_000;
        let folder = tempfile::tempdir().unwrap();
        let mut now_ms = 1_800_000_000_000;
        let (mut number, mut at_ms) = (0, 0);
        for life in 0..4 {
            let numbers = EventNumbers::open(Some(folder.path()), now_ms, 0, 0);
            for step in 0..2 * STEP {
                // The clock is also set back while the daemon runs.
                let now_ms = now_ms - step % 2 * HOUR_MS;
                let next = numbers.next(now_ms);
                assert!(next.0 > number && next.1 >= at_ms, "life {life}: {next:?}");
                (number, at_ms) = next;
            }
            now_ms -= HOUR_MS;
        }
        // Numbers recorded elsewhere count, too.
        let numbers = EventNumbers::open(None, 5, 9_000_000, 3_000_000);
        let (number, at_ms) = numbers.next(6);
        assert!(
            number == 9_000_001 && at_ms >= 3_000_000,
            "{number} {at_ms}"
        );
    }

    #[test]
    fn times_go_on_after_the_clock_was_set_back() {
        let numbers = EventNumbers::open(None, 10_000, 0, 0);
        let begun = numbers.clock.get().1;
        let at = |seconds: u64, now_ms| {
            let now = begun + Duration::from_secs(seconds);
            numbers.next_at(now_ms, now).1
        };
        assert_eq!(at(1, 11_000), 11_000);
        assert_eq!(at(2, 6_000), 11_500);
        assert_eq!(at(3, 7_000), 12_000);
        assert_eq!(at(13, 17_000), 17_000);
        assert_eq!(at(14, 18_000), 18_000);
    }
}
