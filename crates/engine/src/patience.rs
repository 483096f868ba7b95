//! How long a test waits for what comes from elsewhere.
//!
//! Purpose: loops in tests that turn until something has happened end late on a machine that is busy, and never because
//! of a count of turns.
//! Design: an iterator, for use in a `for`; it sleeps a little between two turns.
//! Not here: anything outside tests.

use std::time::{Duration, Instant};

/// Turns for a minute at most; whoever loops leaves when it has what it waits for.
pub(crate) fn patiently() -> impl Iterator<Item = ()> {
    let end = Instant::now() + Duration::from_secs(60);
    let mut turn = 0u32;
    std::iter::from_fn(move || {
        turn = turn.saturating_add(1);
        if turn > 100 {
            std::thread::sleep(Duration::from_micros(100));
        }
        (Instant::now() < end).then_some(())
    })
}
