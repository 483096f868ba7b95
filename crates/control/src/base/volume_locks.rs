//! Serializes requests that change a volume, its budget or its exports, in order of arrival, until
//! the engine has answered. The lock belongs to the volume's name, so it includes creation and
//! deletion.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
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

/// The volume's name, also for its snapshots and exports.
fn name_of(tenant: &str, volume: &str) -> String {
    format!("{tenant}/{}", volume_of(volume))
}

fn volume_of(name: &str) -> &str {
    name.split_once('@').map_or(name, |(volume, _)| volume)
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

    /// The turns of several volumes, each as tenant and name.
    pub(crate) async fn turns_for_api(
        &self,
        volumes: &[(&str, &str)],
    ) -> Result<Vec<TurnGuard>, ApiError> {
        let mut turns = Vec::new();
        for (tenant, volume) in in_order(volumes) {
            turns.push(self.turn_for_api(tenant, volume).await?);
        }
        Ok(turns)
    }
}

/// Each volume once, in one order, so that two requests don't wait for each other.
fn in_order<'a>(volumes: &[(&'a str, &'a str)]) -> BTreeSet<(&'a str, &'a str)> {
    let volumes = volumes.iter();
    volumes
        .map(|(tenant, name)| (*tenant, volume_of(name)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_turns_come_once_each_and_in_one_order() {
        let volumes = [("b", "a"), ("a", "log@x"), ("a", "db@y"), ("a", "db")];
        let ordered: Vec<_> = in_order(&volumes).into_iter().collect();
        assert_eq!(ordered, [("a", "db"), ("a", "log"), ("b", "a")]);
    }

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
