//! Waiting with a limit.
//!
//! Purpose: tests never assert on time, but they never hang either.
//! Design: poll until the condition holds; at the limit, say what was waited for and what was seen.
//! Not here: a clock of our own.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

const POLL: Duration = Duration::from_millis(50);
/// A machine that is slow or stands still now and then has so many times a limit: limits are for what hangs.
pub const PATIENCE: u32 = 3;

/// Calls `probe` until it returns a value; `Ok(None)` means not yet.
///
/// # Errors
/// If `probe` fails, or has returned no value within [`PATIENCE`] times `limit`.
pub fn until<T>(
    what: &str,
    limit: Duration,
    mut probe: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let limit = limit * PATIENCE;
    let end = Instant::now() + limit;
    loop {
        if let Some(value) = probe()? {
            return Ok(value);
        }
        if Instant::now() >= end {
            bail!("waited {} s for this: {what}", limit.as_secs());
        }
        std::thread::sleep(POLL);
    }
}
