//! Numbers and times of events, which never fall.
//!
//! Purpose: a reader that has a number finds everything newer by it, over restarts and over a clock that is set back.
//! Design: the first number of a daemon's life is its clock's microseconds. A file of the state folder has a number that
//! none has reached yet, and a time; both are raised in large steps, before they are needed.
//! Not here: the events (`events`).

use std::cell::Cell;
use std::path::{Path, PathBuf};

/// So many numbers are reserved at once.
const STEP: u64 = 1 << 20;
const FILE: &str = "event-number";

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct EventNumbers {
    file: Option<PathBuf>,
    /// The number before the first.
    pub(crate) before: u64,
    newest: Cell<u64>,
    reserved: Cell<u64>,
    at_ms: Cell<u64>,
}

impl EventNumbers {
    /// Numbers above `newest`, which is kept, and above all that earlier daemons with this state folder gave out. Times are
    /// not before `newest_ms`.
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
            at_ms: Cell::new(now_ms.max(newest_ms).max(kept_ms)),
        }
    }

    pub(crate) fn newest(&self) -> u64 {
        self.newest.get()
    }

    /// The next event's number and time.
    pub(crate) fn next(&self, now_ms: u64) -> (u64, u64) {
        let number = self.newest.get() + 1;
        if number > self.reserved.get() {
            self.reserve();
        }
        self.newest.set(number);
        self.at_ms.set(self.at_ms.get().max(now_ms));
        (number, self.at_ms.get())
    }

    /// Makes durable that numbers up to a step further may be given out.
    fn reserve(&self) {
        let reserved = self.newest.get() + STEP;
        self.reserved.set(reserved);
        let Some(file) = &self.file else {
            return;
        };
        let new = file.with_extension("new");
        let text = format!("{reserved} {}\n", self.at_ms.get());
        let written = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, file));
        if let Err(error) = written {
            tracing::warn!(path = %file.display(), %error, "the number of the next event is not kept");
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
                // The clock goes back while the daemon lives, too.
                let now_ms = now_ms - step % 2 * HOUR_MS;
                let next = numbers.next(now_ms);
                assert!(next.0 > number && next.1 >= at_ms, "life {life}: {next:?}");
                (number, at_ms) = next;
            }
            now_ms -= HOUR_MS;
        }
        // What is kept elsewhere counts as well.
        let numbers = EventNumbers::open(None, 5, 9_000_000, 77);
        assert_eq!(numbers.next(6), (9_000_001, 77));
    }
}
