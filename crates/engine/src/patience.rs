//! How long a test waits for events: by time, which suits a busy machine.

use std::time::{Duration, Instant};

/// Iterates for at most a minute, with short sleeps.
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
