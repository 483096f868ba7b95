//! Tests of NVMe reservations over deaths of daemon and engine.

use forebay_nvme::Status;
use forebay_nvme::reservation::Reservations;
use forebay_xlate::boundary::message::{FromEngine, ReserveAsk, ReserveToken};

use super::*;
use crate::model::events::EventKind;

const HOST_A: [u8; 16] = [0xa; 16];
const HOST_B: [u8; 16] = [0xb; 16];
/// Reservation Register with CPTPL "keep" and RREGA 0 or 1 (NVMe Base 2.0, 7.3).
const REGISTER: u32 = 0x0d << 16;
const UNREGISTER: u32 = REGISTER | 1;
/// CPTPL "set to 1", as Linux sends it.
const PERSIST: u32 = 3 << 30;
/// Reservation Acquire, type 1 (7.2).
const ACQUIRE: u32 = 0x11 << 16 | 1 << 8;
const PREEMPT: u32 = ACQUIRE | 1;

fn ask(volume: VolumeId, number: u64, host: [u8; 16], action: u32, keys: [u64; 2]) -> ReserveAsk {
    ReserveAsk {
        token: ReserveToken {
            socket: 1 << 32 | u64::from(host[0]),
            number,
        },
        volume,
        host,
        action,
        keys,
    }
}

impl Life {
    /// Returns the answer's status without Do Not Retry, and the state.
    async fn reserve(&mut self, ask: ReserveAsk) -> (Status, Reservations) {
        self.fake.say(&FromEngine::Reserve(ask));
        self.reserved(ask.token).await
    }

    async fn reserved(&mut self, wanted: ReserveToken) -> (Status, Reservations) {
        let answer = |message: &ToEngine| match message {
            ToEngine::Reserved {
                token,
                status,
                state,
                ..
            } if *token == wanted => Some((Status(*status).code(), state.clone())),
            _ => None,
        };
        self.fake.until(answer).await
    }

    fn state(&self, volume: VolumeId) -> Option<Reservations> {
        let core = self.owner.base.core.borrow();
        let known = core.pool.hosts().reservations_of(volume);
        known.map(|known| known.state.clone())
    }
}

/// In order; `None` stands for an export's message.
fn reported(fake: &Fake) -> Vec<Option<(VolumeId, Reservations)>> {
    let said = |message: &ToEngine| match message {
        ToEngine::SetReservations { volume, state, .. } => Some(Some((*volume, state.clone()))),
        ToEngine::SetExport { .. } => Some(None),
        _ => None,
    };
    fake.log.iter().filter_map(said).collect()
}

fn begin(generation: u64) -> Begin {
    Begin {
        generation,
        ..Begin::default()
    }
}

#[test]
fn a_command_counts_once_however_often_it_is_asked_for() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 1 << 20).await;
        let register = ask(a, 1, HOST_A, REGISTER | PERSIST, [0, 7]);
        let (status, state) = life.reserve(register).await;
        assert_eq!((status, state.generation()), (Status::SUCCESS, 1));
        assert!(state.ptpl());
        let (status, again) = life.reserve(register).await;
        assert_eq!((status, again), (Status::SUCCESS, state));
        let other = ask(a, 1, HOST_B, ACQUIRE, [7, 0]);
        let (status, state) = life.reserve(other).await;
        assert_eq!(status, Status::RESERVATION_CONFLICT);
        assert_eq!(state.generation(), 1);
        let unregister = ask(a, 2, HOST_A, UNREGISTER, [7, 0]);
        assert_eq!(life.reserve(unregister).await.0, Status::SUCCESS);
        // Executed again, it would be refused.
        assert_eq!(life.reserve(unregister).await.0, Status::SUCCESS);
        let third = ask(a, 3, HOST_A, UNREGISTER, [7, 0]);
        assert_eq!(life.reserve(third).await.0, Status::RESERVATION_CONFLICT);
        let nowhere = ask(VolumeId(999), 4, HOST_A, REGISTER, [0, 7]);
        let (status, _) = life.reserve(nowhere).await;
        assert_eq!(status, Status::INVALID_NAMESPACE_OR_FORMAT);
        let nonsense = ask(a, 5, HOST_A, u32::MAX, [u64::MAX; 2]);
        assert_ne!(life.reserve(nonsense).await.0, Status::SUCCESS);
        assert_eq!(life.state(a).unwrap().generation(), 2);
    });
}

async fn killed(place: &Place, committed: bool) {
    let mut life = Life::first(place, Begin::default()).await;
    let a = life.volume("a", 1 << 20).await;
    life.export("a").await;
    life.reserve(ask(a, 1, HOST_A, REGISTER, [0, 7])).await;
    let acquire = ask(a, 2, HOST_A, ACQUIRE, [7, 0]);
    assert_eq!(life.reserve(acquire).await.0, Status::SUCCESS);
    let unregister = ask(a, 3, HOST_A, UNREGISTER, [7, 0]);
    assert_eq!(life.owner.reservations.reserve(&unregister), Ok(true));
    if committed {
        life.owner.base.commit().await.unwrap();
    }
    let mut fake = life.kill().await;
    fake.take_the_rest();
    fake.log.clear();
    let mut life = Life::take_over(place, Begin::default(), fake).await;
    let before = life.state(a).unwrap();
    let registered = before.registrants().len();
    assert_eq!(registered, if committed { 0 } else { 1 });
    assert_eq!(reported(&life.fake), [Some((a, before)), None]);
    let (status, state) = life.reserve(unregister).await;
    assert_eq!(status, Status::SUCCESS);
    assert!(state.registrants().is_empty() && state.reservation_type().is_none());
    assert_eq!(state.generation(), 2);
    assert_eq!(life.reserve(unregister).await, (Status::SUCCESS, state));
}

#[test]
fn a_daemon_that_dies_before_the_commit_has_done_nothing() {
    run(async { killed(&Place::new(), false).await });
}

#[test]
fn a_daemon_that_dies_after_the_commit_has_done_it() {
    run(async { killed(&Place::new(), true).await });
}

#[test]
fn nothing_is_answered_before_it_is_durable() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 1 << 20).await;
        let register = ask(a, 1, HOST_A, REGISTER, [0, 7]);
        life.fake.say(&FromEngine::Reserve(register));
        life.reserved(register.token).await;
        life.kill().await;
        let owner = owner_of(&place, &begin(2), false);
        let core = owner.base.core.borrow();
        let known = core.pool.hosts().reservations_of(a).unwrap();
        assert_eq!(known.state.registrants().len(), 1);
        assert_eq!(known.recent, [register.token]);
        drop(core);
        owner.close();
    });
}

#[test]
fn reservations_without_persistence_end_at_a_reboot() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let (a, b) = (
            life.volume("a", 1 << 20).await,
            life.volume("b", 1 << 20).await,
        );
        life.reserve(ask(a, 1, HOST_A, REGISTER, [0, 7])).await;
        let persists = ask(b, 2, HOST_A, REGISTER | PERSIST, [0, 7]);
        life.reserve(persists).await;
        life.reserve(ask(b, 3, HOST_A, ACQUIRE, [7, 0])).await;
        // The death of both processes is no power loss.
        let before = life.kill().await;
        let life = Life::next(&place, begin(2), &before).await;
        assert_eq!(life.state(a).unwrap().registrants().len(), 1);
        // Neither is an orderly stop, which leaves no grant table.
        let before = life.kill().await;
        std::fs::remove_file(place.grants()).unwrap();
        let life = Life::next(&place, begin(3), &before).await;
        assert_eq!(life.state(a).unwrap().registrants().len(), 1);
        let before = life.kill().await;
        let restarted = Begin {
            boot: [8; 16],
            ..begin(4)
        };
        let life = Life::next(&place, restarted, &before).await;
        assert_eq!(life.state(a).unwrap().registrants(), []);
        let kept = life.state(b).unwrap();
        assert_eq!(kept.registrants().len(), 1);
        assert!(kept.holds(&HOST_A));
        life.kill().await;
        let again = Begin {
            boot: [8; 16],
            ..begin(5)
        };
        let owner = owner_of(&place, &again, false);
        let lost = owner
            .base
            .core
            .borrow()
            .pool
            .hosts()
            .reservations_of(a)
            .cloned();
        assert_eq!(lost.unwrap().state.registrants(), []);
        owner.close();
    });
}

#[test]
fn they_go_with_their_volume() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 1 << 20).await;
        life.reserve(ask(a, 1, HOST_A, REGISTER, [0, 7])).await;
        let owner = life.owner.clone();
        let delete = owner.volumes.volume_delete("t".to_owned(), "a".to_owned());
        life.with_engine(delete).await.unwrap();
        assert_eq!(life.state(a), None);
        drop(owner);
        life.kill().await;
        let owner = owner_of(&place, &begin(2), false);
        assert_eq!(
            owner
                .base
                .core
                .borrow()
                .pool
                .hosts()
                .all_reservations()
                .count(),
            0
        );
        owner.close();
    });
}

#[test]
fn reservation_holders_and_preemption_are_shown() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 1 << 20).await;
        assert_eq!(
            life.owner.base.volume_show("t", "a").unwrap().reservation,
            None
        );
        life.reserve(ask(a, 1, HOST_A, REGISTER, [0, 7])).await;
        life.reserve(ask(a, 2, HOST_A, ACQUIRE, [7, 0])).await;
        life.reserve(ask(a, 1, HOST_B, REGISTER, [0, 0x1f])).await;
        let shown = life.owner.base.volume_show("t", "a").unwrap().reservation;
        let shown = shown.unwrap();
        assert_eq!(shown.registrants.len(), 2);
        assert!(shown.registrants[0].is_holder && !shown.registrants[1].is_holder);
        assert_eq!(shown.registrants[1].key, "0x1f");
        assert!(life.owner.base.events.all().is_empty());
        let preempt = ask(a, 2, HOST_B, PREEMPT, [0x1f, 7]);
        let (status, state) = life.reserve(preempt).await;
        assert_eq!(status, Status::SUCCESS);
        assert!(state.holds(&HOST_B));
        life.reserve(preempt).await;
        let events = life.owner.base.events.all();
        assert_eq!(events.len(), 1);
        assert_eq!(events[0].kind, EventKind::ReservationPreempted);
        assert!(events[0].message.contains("t/a"), "{}", events[0].message);
        let lost = "0a0a0a0a-0a0a-0a0a-0a0a-0a0a0a0a0a0a";
        assert!(events[0].message.contains(lost), "{}", events[0].message);
    });
}

#[test]
fn a_snapshot_without_exports_keeps_its_registrations() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 1 << 20).await;
        let s = life.snapshot(a, "s").await;
        life.export("a@s").await;
        let register = ask(s, 1, HOST_A, REGISTER | PERSIST, [0, 7]);
        let (status, _) = life.reserve(register).await;
        assert_eq!(status, Status::SUCCESS);
        let owner = life.owner.clone();
        let deleted = owner.exports.export_delete("t".into(), "a@s".into(), false);
        life.with_engine(deleted).await.unwrap();
        let removed = |m: &&ToEngine| matches!(m, ToEngine::RemoveVolume { .. });
        assert_eq!(life.fake.log.iter().filter(removed).count(), 0);
    });
}
