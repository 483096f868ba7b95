//! Waits for conditions that other tasks on this thread change.
//!
//! A counter is raised after each change. A waiter subscribes before it checks its condition, so no
//! wake-up is lost.

use tokio::sync::watch;

#[derive(Debug)]
pub(crate) struct Signal(watch::Sender<u64>);

impl Signal {
    pub(crate) fn new() -> Self {
        Self(watch::Sender::new(0))
    }

    pub(crate) fn raise(&self) {
        self.0.send_modify(|count| *count = count.wrapping_add(1));
    }

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

    pub(crate) async fn next(&self) {
        let mut first = true;
        self.until(|| (!std::mem::take(&mut first)).then_some(()))
            .await;
    }
}
