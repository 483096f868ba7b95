//! Serializes requests that change a volume, its budget or its exports, in order of arrival, until
//! the engine has answered. The lock belongs to the volume's name, so it includes creation and
//! deletion.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio::time::timeout;

use crate::base::Base;
use crate::model::error::ApiError;

#[derive(Debug, Default)]
pub(crate) struct Turns(RefCell<BTreeMap<String, Arc<Mutex<()>>>>);

/// Ends the turn when dropped.
pub(crate) type TurnGuard = OwnedMutexGuard<()>;

impl Turns {
    async fn of(&self, name: String) -> TurnGuard {
        let lock = {
            let mut locks = self.0.borrow_mut();
            locks.retain(|_, lock| Arc::strong_count(lock) > 1);
            locks.entry(name).or_default().clone()
        };
        lock.lock_owned().await
    }
}

/// The volume's name, also for one of its exports.
fn name_of(tenant: &str, volume: &str) -> String {
    let volume = volume.split_once('@').map_or(volume, |(volume, _)| volume);
    format!("{tenant}/{volume}")
}

impl Base {
    /// Waits until no other request changes the volume. Each request ends, because all its waits
    /// have limits.
    pub(crate) async fn turn(&self, tenant: &str, volume: &str) -> TurnGuard {
        self.turns.of(name_of(tenant, volume)).await
    }

    pub(crate) async fn turn_for_api(
        &self,
        tenant: &str,
        volume: &str,
    ) -> Result<TurnGuard, ApiError> {
        let turn = timeout(self.limits.request, self.turn(tenant, volume)).await;
        turn.map_err(|_| {
            let name = name_of(tenant, volume);
            ApiError::in_use(format!("another request is still changing volume {name}"))
                .hint("try again when it has ended")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn turns_follow_one_another_and_leave_nothing() {
        let turns = Turns::default();
        let first = turns.of(name_of("acme", "db@7")).await;
        let mut second = Box::pin(turns.of(name_of("acme", "db")));
        let other = turns.of(name_of("acme", "logs")).await;
        tokio::select! {
            biased;
            _ = &mut second => panic!("two have a turn"),
            () = std::future::ready(()) => {}
        }
        drop(first);
        drop(second.await);
        drop(other);
        drop(turns.of(name_of("acme", "new")).await);
        assert_eq!(turns.0.borrow().len(), 1);
    }
}
