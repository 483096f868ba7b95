//! Reservations of volumes, between the daemon and the reactors.
//!
//! **Design.** The daemon's last state is kept for later lanes. The daemon has one request per
//! volume at a time, repeated to a new daemon. Others wait in a queue per host, served round-robin,
//! so that a busy host cannot block one that fences it. A request given up by its reactor is
//! dropped, unless it is at the daemon. **Not here:** decisions (the daemon's), waiting commands
//! (`frontend::nvme_tcp::reserve`).

use super::Control;
use crate::frontend::nvme_tcp::TcpMessage;
use crate::reactor::mailbox::Post;
use forebay_nvme::Status;
use forebay_nvme::reservation::Reservations;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::{FromEngine, ReserveAsk, ReserveToken};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

struct ReserveQueue {
    /// The request at the daemon.
    now: ReserveAsk,
    /// No reactor waits for `now`.
    is_gone: bool,
    /// Other requests by host, the next one first; no queue is empty.
    later: VecDeque<VecDeque<ReserveAsk>>,
}

#[derive(Default)]
pub(super) struct Reserves {
    states: BTreeMap<VolumeId, Arc<Reservations>>,
    asked: BTreeMap<VolumeId, ReserveQueue>,
}

impl Reserves {
    pub(super) fn state(&self, volume: VolumeId) -> Arc<Reservations> {
        self.states.get(&volume).cloned().unwrap_or_default()
    }

    pub(super) fn forget(&mut self, volume: VolumeId) {
        self.states.remove(&volume);
        self.asked.remove(&volume);
    }

    /// Adds a request; true if it must go to the daemon now.
    fn ask(&mut self, ask: ReserveAsk) -> bool {
        let Some(asked) = self.asked.get_mut(&ask.volume) else {
            let first = ReserveQueue {
                now: ask,
                is_gone: false,
                later: VecDeque::new(),
            };
            self.asked.insert(ask.volume, first);
            return true;
        };
        let mut hosts = asked.later.iter_mut();
        match hosts.find(|of_host| of_host[0].host == ask.host) {
            Some(of_host) => of_host.push_back(ask),
            None => asked.later.push_back(VecDeque::from([ask])),
        }
        false
    }

    fn gone(&mut self, volume: VolumeId, token: ReserveToken) {
        let Some(asked) = self.asked.get_mut(&volume) else {
            return;
        };
        asked.is_gone |= asked.now.token == token;
        for of_host in &mut asked.later {
            of_host.retain(|ask| ask.token != token);
        }
        asked.later.retain(|of_host| !of_host.is_empty());
    }

    /// The daemon has answered; returns the next request.
    fn next(&mut self, volume: VolumeId, token: ReserveToken) -> Option<ReserveAsk> {
        let asked = self.asked.get_mut(&volume)?;
        if asked.now.token != token {
            return None;
        }
        let Some(mut of_host) = asked.later.pop_front() else {
            self.asked.remove(&volume);
            return None;
        };
        let next = of_host.pop_front()?;
        if !of_host.is_empty() {
            asked.later.push_back(of_host);
        }
        (asked.now, asked.is_gone) = (next, false);
        Some(next)
    }

    fn again(&mut self) -> Vec<ReserveAsk> {
        let asked: Vec<(ReserveAsk, bool)> =
            (self.asked.values()).map(|a| (a.now, a.is_gone)).collect();
        let again = asked
            .into_iter()
            .filter_map(|(ask, is_gone)| match is_gone {
                true => self.next(ask.volume, ask.token),
                false => Some(ask),
            });
        again.collect()
    }
}

impl Control {
    pub(super) fn ask_reserve(&mut self, ask: ReserveAsk) {
        if self.reserves.ask(ask) {
            self.say(&FromEngine::Reserve(ask));
        }
    }

    /// The daemon may still carry it out.
    pub(super) fn reserve_gone(&mut self, volume: VolumeId, token: ReserveToken) {
        self.reserves.gone(volume, token);
    }

    pub(super) fn ask_reserves_again(&mut self) {
        for ask in self.reserves.again() {
            self.say(&FromEngine::Reserve(ask));
        }
    }

    pub(super) fn set_reservations(&mut self, volume: VolumeId, state: Reservations) {
        let state = Arc::new(state);
        self.reserves.states.insert(volume, state.clone());
        self.post_all(|| Post::Frontend(Box::new(TcpMessage::Reservations(volume, state.clone()))));
    }

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
        self.post_all(|| {
            let message = TcpMessage::Reserved(token, volume, status, state.clone());
            Post::Frontend(Box::new(message))
        });
        if let Some(next) = self.reserves.next(volume, token) {
            self.say(&FromEngine::Reserve(next));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V: VolumeId = VolumeId(1);

    fn token(number: u64) -> ReserveToken {
        ReserveToken { socket: 1, number }
    }

    fn ask(host: u8, number: u64) -> ReserveAsk {
        ReserveAsk {
            token: token(number),
            volume: V,
            host: [host; 16],
            action: 0,
            keys: [0; 2],
        }
    }

    fn asked(reserves: &mut Reserves, first: u64) -> Vec<u64> {
        let mut all = vec![first];
        while let Some(next) = reserves.next(V, token(all[all.len() - 1])) {
            all.push(next.token.number);
        }
        all
    }

    #[test]
    fn hosts_take_turns() {
        let mut reserves = Reserves::default();
        assert!(reserves.ask(ask(1, 1)));
        for number in 2..100 {
            assert!(!reserves.ask(ask(1, number)));
        }
        assert!(!reserves.ask(ask(2, 100)));
        assert!(!reserves.ask(ask(2, 101)));
        assert!(!reserves.ask(ask(3, 102)));
        let all = asked(&mut reserves, 1);
        assert_eq!(all[..7], [1, 2, 100, 102, 3, 101, 4]);
        assert_eq!(all.len(), 102);
        assert!(reserves.ask(ask(1, 103)), "nothing is left");
    }

    #[test]
    fn abandoned_reservation_requests_are_not_sent() {
        let mut reserves = Reserves::default();
        for number in 1..6 {
            reserves.ask(ask(number as u8 % 2, number));
        }
        for number in [1, 2, 4, 5] {
            reserves.gone(V, token(number));
        }
        assert!(!reserves.ask(ask(2, 6)));
        assert_eq!(reserves.next(V, token(2)), None, "an answer to no question");
        assert_eq!(asked(&mut reserves, 1), [1, 3, 6]);
        reserves.ask(ask(1, 7));
        reserves.ask(ask(1, 8));
        assert_eq!(reserves.again(), [ask(1, 7)]);
        reserves.gone(V, token(7));
        assert_eq!(reserves.again(), [ask(1, 8)]);
        reserves.gone(V, token(8));
        assert!(reserves.again().is_empty());
        assert!(reserves.ask(ask(1, 9)));
    }
}
