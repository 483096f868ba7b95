//! Tests of ports and ANA states over deaths of daemon and engine.

use forebay_xlate::boundary::message::{PathState, PortConfig};

use super::*;
use crate::model::error::ApiError;
use crate::model::events::EventKind;
use crate::model::{AnaState as Shown, Port, PortUpdate};

impl Life {
    fn listen(&self, addresses: &[&str]) {
        for address in addresses {
            let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let mut listeners = self.owner.ports.listeners.borrow_mut();
            listeners.insert((*address).to_owned(), socket.into());
        }
        self.owner.ports.note_ports();
    }

    async fn set_port(
        &mut self,
        address: &str,
        ana: Shown,
        let_hosts_wait: bool,
    ) -> Result<Port, ApiError> {
        let owner = self.owner.clone();
        let body = PortUpdate {
            ana,
            let_hosts_wait,
        };
        self.with_engine(async { owner.ports.port_update(address, body).await })
            .await
    }
}

fn reported(fake: &Fake) -> Vec<PortConfig> {
    let said = |message: &ToEngine| match message {
        ToEngine::SetPort { port, .. } => Some(port.clone()),
        _ => None,
    };
    fake.log.iter().filter_map(said).collect()
}

fn is_listener(message: &ToEngine) -> bool {
    matches!(message, ToEngine::SetListener { .. })
}

#[test]
fn a_ports_state_is_durable_and_its_count_never_falls() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.listen(&["a:1", "b:1"]);
        let shown = life.owner.ports.port_list();
        let ids: Vec<u16> = shown.iter().map(|port| port.id).collect();
        assert_eq!(ids, [1, 2]);
        let port = life.set_port("a:1", Shown::Inaccessible, false).await;
        assert_eq!(port.unwrap().changes, 1);
        let same = life.set_port("a:1", Shown::Inaccessible, false).await;
        assert_eq!(same.unwrap().changes, 1);
        life.set_port("a:1", Shown::NonOptimized, false)
            .await
            .unwrap();
        let states: Vec<_> = reported(&life.fake)
            .iter()
            .map(|p| (p.ana, p.changes))
            .collect();
        let expected = [(PathState::Inaccessible, 1), (PathState::NonOptimized, 2)];
        assert_eq!(states, expected);
        let events = life.owner.base.events.all();
        assert_eq!(events.len(), 2);
        assert!(events.iter().all(|e| e.kind == EventKind::PortChanged));
        // The next daemon has one more listener, which sorts first.
        let before = life.kill().await;
        let begin = Begin {
            generation: 2,
            ..Begin::default()
        };
        let mut life = Life::next(&place, begin, &before).await;
        life.listen(&["A:1", "a:1", "b:1"]);
        let of = |address: &str| {
            let ports = life.owner.ports.port_list();
            let port = ports.into_iter().find(|port| port.address == address);
            port.map(|port| (port.id, port.ana, port.changes)).unwrap()
        };
        assert_eq!(of("a:1"), (1, Shown::NonOptimized, 2));
        assert_eq!(of("b:1"), (2, Shown::Optimized, 0));
        assert_eq!(of("A:1"), (3, Shown::Optimized, 0));
        life.replace_engine(|_| {}).await;
        life.fake.settle().await;
        assert_eq!(reported(&life.fake).len(), 3);
        let at = |is: fn(&ToEngine) -> bool| life.fake.log.iter().position(is).unwrap();
        assert!(at(|m| matches!(m, ToEngine::SetPort { .. })) < at(is_listener));
    });
}

#[test]
fn an_engine_gets_a_port_change_only_once_durable() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.listen(&["a:1", "b:1"]);
        life.owner.base.commit().await.unwrap();
        let owner = life.owner.clone();
        let update = PortUpdate {
            ana: Shown::NonOptimized,
            let_hosts_wait: false,
        };
        let mut change = Box::pin(owner.ports.port_update("a:1", update));
        let early = std::future::poll_fn(|context| {
            std::task::Poll::Ready(change.as_mut().poll(context).is_ready())
        });
        assert!(!early.await);
        let session = owner.link.session().unwrap();
        owner.ports.say_ports(&session);
        let ports = |message: &ToEngine| match message {
            ToEngine::SetPort { port, .. } if port.address == "a:1" => Some(port.changes),
            _ => None,
        };
        assert_eq!(life.fake.until(ports).await, 0);
        life.with_engine(change).await.unwrap();
        owner.ports.say_ports(&session);
        assert_eq!(life.fake.until(ports).await, 1);
    });
}

#[test]
fn the_last_port_stays_accessible_unless_hosts_may_wait() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.listen(&["a:1", "b:1"]);
        let unknown = life.set_port("c:1", Shown::NonOptimized, false).await;
        assert!(unknown.unwrap_err().message.contains("no port at c:1"));
        life.set_port("a:1", Shown::Inaccessible, false)
            .await
            .unwrap();
        let last = life.set_port("b:1", Shown::Inaccessible, false).await;
        assert!(last.unwrap_err().message.contains("no other port"));
        assert_eq!(life.owner.ports.port_list()[1].ana, Shown::Optimized);
        life.set_port("b:1", Shown::Inaccessible, true)
            .await
            .unwrap();
        assert_eq!(life.owner.ports.port_list()[1].ana, Shown::Inaccessible);
    });
}
