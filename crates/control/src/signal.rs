//! Waiting for a condition that somebody else on this thread makes true.
//!
//! Purpose: the owner's tasks share plain state and wait for each other's changes.
//! Design: a counter that is raised after each change; a waiter checks its condition, waits for the
//! counter, checks again. No wake-up is lost, since it subscribes before it checks.
//! Not here: what is waited for, and time limits (callers put those around).

use tokio::sync::watch;

/// Raised after a change.
#[derive(Debug)]
pub(crate) struct Signal(watch::Sender<u64>);

impl Signal {
    pub(crate) fn new() -> Self {
        Self(watch::Sender::new(0))
    }

    /// Something changed: every waiter checks again.
    pub(crate) fn raise(&self) {
        self.0.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Waits until `check` has something.
    pub(crate) async fn until<T>(&self, mut check: impl FnMut() -> Option<T>) -> T {
        let mut changes = self.0.subscribe();
        loop {
            if let Some(found) = check() {
                return found;
            }
            // The sender lives in `self`, so this can't fail.
            let _ = changes.changed().await;
        }
    }

    /// Waits for the next raise.
    pub(crate) async fn next(&self) {
        let mut first = true;
        self.until(|| (!std::mem::take(&mut first)).then_some(()))
            .await;
    }
}
