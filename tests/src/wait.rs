//! Polls until a condition holds, with a limit. Tests never assert on time, but never hang.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

const POLL: Duration = Duration::from_millis(50);
/// A factor on every limit, for slow nodes; limits only catch hangs.
pub const PATIENCE: u32 = 3;

/// Calls `probe` until it returns a value, for at most [`PATIENCE`] times `limit`.
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
