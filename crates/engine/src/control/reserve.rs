//! Volumes' reservations, between the daemon and the reactors.
//!
//! **Design.** What the daemon said last is kept, for lanes that are made later. Questions wait in a queue for each
//! volume; the first of it is asked, and asked again of a new daemon, until it is answered or the
//! reactor has given it up. So a volume's commands are decided in the order in which they came.
//!
//! **Not here:** who decides (the daemon), who waits (`tcp::reserve`).

use super::Control;
use crate::mailbox::Post;
use forebay_nvme::Status;
use forebay_nvme::reservation::Reservations;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::{FromEngine, ReserveAsk, ReserveToken};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// See the module's text.
#[derive(Default)]
pub(super) struct Reserves {
    states: BTreeMap<VolumeId, Arc<Reservations>>,
    asked: BTreeMap<VolumeId, VecDeque<ReserveAsk>>,
}

impl Reserves {
    /// What the daemon said last.
    pub(super) fn state(&self, volume: VolumeId) -> Arc<Reservations> {
        self.states.get(&volume).cloned().unwrap_or_default()
    }

    /// A volume is not served any more.
    pub(super) fn forget(&mut self, volume: VolumeId) {
        self.states.remove(&volume);
        self.asked.remove(&volume);
    }

    /// Takes a question away; gives the next one to ask if it was the first.
    fn remove(&mut self, volume: VolumeId, token: ReserveToken) -> Option<ReserveAsk> {
        let queue = self.asked.get_mut(&volume)?;
        let at = queue.iter().position(|ask| ask.token == token)?;
        queue.remove(at);
        let next = queue.front().copied();
        if next.is_none() {
            self.asked.remove(&volume);
        }
        next.filter(|_| at == 0)
    }
}

impl Control {
    /// A host's command.
    pub(super) fn ask_reserve(&mut self, ask: ReserveAsk) {
        let queue = self.reserves.asked.entry(ask.volume).or_default();
        queue.push_back(ask);
        if queue.len() == 1 {
            self.say(&FromEngine::Reserve(ask));
        }
    }

    /// A reactor does not wait for it any more. The daemon may have carried it out.
    pub(super) fn reserve_gone(&mut self, volume: VolumeId, token: ReserveToken) {
        if let Some(next) = self.reserves.remove(volume, token) {
            self.say(&FromEngine::Reserve(next));
        }
    }

    /// A new daemon has not heard what is unanswered.
    pub(super) fn ask_reserves_again(&mut self) {
        let first = self.reserves.asked.values().filter_map(|q| q.front());
        let asked: Vec<ReserveAsk> = first.copied().collect();
        for ask in asked {
            self.say(&FromEngine::Reserve(ask));
        }
    }

    pub(super) fn set_reservations(&mut self, volume: VolumeId, state: Reservations) {
        let state = Arc::new(state);
        self.reserves.states.insert(volume, state.clone());
        self.post_all(|| Post::Reservations(volume, state.clone()));
    }

    /// The daemon has carried a command out, or refused it.
    pub(super) fn reserved(
        &mut self,
        token: ReserveToken,
        volume: VolumeId,
        status: u16,
        state: Reservations,
    ) {
        let state = Arc::new(state);
        self.reserves.states.insert(volume, state.clone());
        let status = Status(status);
        self.post_all(|| Post::Reserved(token, volume, status, state.clone()));
        if let Some(next) = self.reserves.remove(volume, token) {
            self.say(&FromEngine::Reserve(next));
        }
    }
}
