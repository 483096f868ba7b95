//! Tests of take-over.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use forebay_xlate::DeviceIndex;
use forebay_xlate::boundary::message::{Blamed, FromEngine};

use super::*;
use crate::link::session::{Conversion, DeviceState, Estate};
use crate::model::events::{Event, EventKind};
use crate::owner::EngineProgress;

type Reported = Rc<RefCell<Vec<EngineProgress>>>;

/// A sequence of engines under one daemon.
struct Line {
    life: Life,
    estate: Rc<RefCell<Option<Estate>>>,
    reported: Reported,
    serving: tokio::task::JoinHandle<()>,
    session: Rc<Session>,
    hosts: Vec<(u64, UnixStream)>,
}

impl Line {
    async fn begin(place: &Place, connections: u64) -> Self {
        let mut life = Life::first(place, Begin::default()).await;
        life.volume("a", 1 << 20).await;
        life.export("a").await;
        let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let listeners = &life.owner.ports.listeners;
        listeners
            .borrow_mut()
            .insert("here".to_owned(), address.into());
        let session = life.owner.link.session().unwrap();
        let mut line = Self {
            life,
            estate: Rc::default(),
            reported: Reported::default(),
            serving: tokio::task::spawn_local(async {}),
            session,
            hosts: Vec::new(),
        };
        line.next().await;
        line.until(|reported| *reported == EngineProgress::Running)
            .await;
        for socket in 1..=connections {
            let host = line.life.fake.deposit(socket);
            line.hosts.push((socket, host));
        }
        while line.session.sockets() < line.hosts.len() {
            line.life.fake.send_queued();
            tokio::task::yield_now().await;
        }
        line
    }

    async fn die(&mut self, blamed: Option<Blamed>) {
        let dead = std::mem::replace(&mut self.life.fake, Fake::new(0).0);
        let generation = dead.generation;
        drop(dead);
        self.serving.abort();
        let _ = (&mut self.serving).await;
        self.life.owner.link.hang_up(&self.session);
        let mut estate = self.estate.borrow_mut();
        if estate.is_none() {
            *estate = self.session.take_estate(blamed);
        }
        drop(estate);
        self.life.fake.generation = generation;
    }

    async fn next(&mut self) {
        let (fake, fd) = Fake::new(self.life.fake.generation + 1);
        self.life.fake = fake.after(&self.life.fake).with_memory();
        let owner = self.life.owner.clone();
        let pool = owner.base.core.borrow().pool.info().uuid.into_bytes();
        let greet = Session::greet(fd, pool, None, Duration::from_secs(60));
        let (greeting, _) = tokio::join!(greet, self.life.fake.welcome(pool, None));
        let greeting = greeting.unwrap();
        self.session = greeting.session.clone();
        self.reported.borrow_mut().clear();
        let (estate, reported) = (self.estate.clone(), self.reported.clone());
        self.serving = tokio::task::spawn_local(async move {
            let progress = |progress| reported.borrow_mut().push(progress);
            owner.serve(greeting, &estate, progress).await;
        });
    }

    async fn until(&mut self, wanted: impl Fn(&EngineProgress) -> bool) {
        loop {
            tokio::select! {
                biased;
                () = tokio::task::yield_now() => {}
                () = self.life.fake.until(|_| None::<()>) => {}
            }
            if self.reported.borrow().iter().any(&wanted) {
                return;
            }
            self.life.fake.listen(Duration::from_millis(5)).await;
        }
    }

    async fn hear(&mut self, wanted: fn(&ToEngine) -> bool) {
        self.life.fake.until(|m| wanted(m).then_some(())).await;
    }

    fn convert(&mut self) {
        let converted = FromEngine::Converted {
            request: self.life.fake.given.request,
            queues: 2,
            vms: 0,
            commands: 5,
            closed: vec![("damaged records".to_owned(), 1)],
        };
        self.life.fake.say(&converted);
    }

    /// Each host reads its number.
    fn check_connections(&mut self) {
        let given = std::mem::take(&mut self.life.fake.given.sockets);
        assert_eq!(given.len(), self.hosts.len());
        for ((number, ours), (wanted, host)) in given.into_iter().zip(&mut self.hosts) {
            assert_eq!(number, *wanted);
            let mut ours = UnixStream::from(ours);
            ours.write_all(&number.to_le_bytes()).unwrap();
            let mut heard = [0; 8];
            host.read_exact(&mut heard).unwrap();
            assert_eq!(u64::from_le_bytes(heard), *wanted);
        }
    }

    fn position(&self, wanted: fn(&ToEngine) -> bool) -> Option<usize> {
        self.life.fake.log.iter().position(wanted)
    }
}

fn is_take_over(message: &ToEngine) -> bool {
    matches!(message, ToEngine::TakeOver { .. })
}

fn is_sockets_end(message: &ToEngine) -> bool {
    matches!(message, ToEngine::SocketsEnd)
}

fn is_resume(message: &ToEngine) -> bool {
    matches!(message, ToEngine::Resume { .. })
}

fn is_listener(message: &ToEngine) -> bool {
    matches!(message, ToEngine::SetListener { .. })
}

#[test]
fn a_successor_gets_all_state_before_it_resumes() {
    run(async {
        let place = Place::new();
        let mut line = Line::begin(&place, 300).await;
        // One connection ends before the death, and one is accepted just before.
        line.life.fake.say(&FromEngine::SocketGone { socket: 7 });
        line.hosts.retain(|(socket, _)| *socket != 7);
        let last = line.life.fake.deposit(301);
        line.hosts.push((301, last));
        let blamed = Blamed::Handshake { socket: 9 };
        line.die(Some(blamed)).await;
        line.next().await;
        line.hear(is_sockets_end).await;
        let given = &line.life.fake.given;
        assert_eq!((given.generation, given.blamed), (2, Some(blamed)));
        assert_eq!(given.files.len(), 2);
        line.check_connections();
        // Everything needed for the take-over came first, and the listeners come later.
        let take_over = line.position(is_take_over).unwrap();
        for needed in [
            |m: &ToEngine| matches!(m, ToEngine::SetDevice { .. }),
            |m: &ToEngine| matches!(m, ToEngine::SetVolume { .. }),
            |m: &ToEngine| matches!(m, ToEngine::SetExport { .. }),
        ] {
            assert!(line.position(needed).unwrap() < take_over);
        }
        line.life.fake.settle().await;
        assert_eq!(line.position(is_resume), None, "it has not converted yet");
        assert_eq!(line.position(is_listener), None);
        assert_eq!(
            line.session.sockets(),
            0,
            "they are still the dead engine's"
        );
        line.convert();
        line.until(|reported| *reported == EngineProgress::Running)
            .await;
        assert!(line.position(is_resume).unwrap() < line.position(is_listener).unwrap());
        let conversion = Conversion {
            queues: 2,
            vms: 0,
            commands: 5,
            closed: vec![("damaged records".to_owned(), 1)],
        };
        let reported = [
            EngineProgress::Converted(conversion),
            EngineProgress::Resumed,
            EngineProgress::Running,
        ];
        assert_eq!(*line.reported.borrow(), reported);
        assert_eq!(line.session.sockets(), 300);
        assert!(line.estate.borrow().is_none());
    });
}

#[test]
fn a_successor_that_dies_too_early_leaves_everything_as_it_was() {
    run(async {
        let place = Place::new();
        let mut line = Line::begin(&place, 3).await;
        line.die(None).await;
        for (tries, at) in [is_take_over, is_sockets_end].into_iter().enumerate() {
            line.next().await;
            line.hear(at).await;
            line.die(None).await;
            let estate = line.estate.borrow();
            let estate = estate.as_ref().unwrap();
            assert_eq!((estate.generation, estate.sockets()), (2, 3));
            assert_eq!(estate.tries, tries as u32 + 1);
        }
        // It has taken over, but the daemon does not know.
        line.next().await;
        line.hear(is_sockets_end).await;
        line.serving.abort();
        line.convert();
        line.die(None).await;
        assert_eq!(line.estate.borrow().as_ref().unwrap().generation, 2);
        line.next().await;
        line.hear(is_sockets_end).await;
        assert_eq!(line.life.fake.given.generation, 2);
        line.check_connections();
        line.convert();
        line.until(|reported| *reported == EngineProgress::Running)
            .await;
    });
}

#[test]
fn a_converted_successor_leaves_its_own_records() {
    run(async {
        let place = Place::new();
        let mut line = Line::begin(&place, 3).await;
        line.die(None).await;
        line.next().await;
        line.life.fake.answer_requests = false;
        line.hear(is_sockets_end).await;
        line.convert();
        line.until(|reported| matches!(reported, EngineProgress::Converted(_)))
            .await;
        // It may die before it has read `Resume`.
        line.die(None).await;
        let generation = line.estate.borrow().as_ref().unwrap().generation;
        assert_eq!(
            (generation, line.estate.borrow().as_ref().unwrap().tries),
            (3, 0)
        );
        line.next().await;
        line.hear(is_sockets_end).await;
        assert_eq!(line.life.fake.given.generation, 3);
        line.check_connections();
    });
}

#[test]
fn an_unreadable_estate_is_dropped_and_hosts_reconnect() {
    run(async {
        let place = Place::new();
        let mut line = Line::begin(&place, 1).await;
        line.die(None).await;
        line.next().await;
        line.hear(is_sockets_end).await;
        let refused = FromEngine::Refused {
            request: line.life.fake.given.request,
            error: "another layout".to_owned(),
        };
        line.life.fake.say(&refused);
        line.until(|reported| *reported == EngineProgress::Running)
            .await;
        assert_eq!(line.position(is_resume), None);
        assert!(
            line.position(is_listener).is_some(),
            "whoever is new is served"
        );
        assert!(line.estate.borrow().is_none());
        line.life.fake.given.sockets.clear();
        let (_, host) = &mut line.hosts[0];
        assert_eq!(host.read(&mut [0; 8]).unwrap(), 0, "its host hears of it");
    });
}

#[test]
fn a_flush_knows_its_devices_before_the_successor_acts() {
    run(async {
        let place = Place::with_devices(2);
        let mut line = Line::begin(&place, 0).await;
        let volume = line.life.volume("b", 16 << 20).await;
        for extent in 0..48 {
            line.life.fake.write(volume, extent).await;
        }
        let committed = line.life.fake.highest_sequence(volume);
        assert!(line.life.fake.flush(volume, committed).await);
        for extent in 48..50 {
            line.life.fake.write(volume, extent).await;
        }
        line.die(None).await;
        line.next().await;
        line.hear(is_take_over).await;
        let before = |line: &Line| -> Vec<_> {
            let grants = line.life.fake.log.iter().filter_map(|m| match m {
                ToEngine::Grants { grants } => Some(grants.clone()),
                _ => None,
            });
            grants.flatten().filter(|g| g.volume == volume).collect()
        };
        let reported = before(&line);
        let mut devices: Vec<u8> = reported
            .iter()
            .map(|g| forebay_xlate::Word::from_bits(g.word).device().0)
            .collect();
        devices.sort_unstable();
        devices.dedup();
        assert_eq!(devices, [0, 1], "a FLUSH must cover both");
        let waits: u64 = reported
            .iter()
            .filter(|g| g.commit_sequence > 0)
            .map(|g| g.range.count)
            .sum();
        assert_eq!(waits, 2, "and wait for what is not committed");
        let committed: u64 = reported
            .iter()
            .filter(|g| g.commit_sequence == 0)
            .map(|g| g.range.count)
            .sum();
        assert_eq!(committed, 0, "the rest delays nobody");
        line.hear(is_sockets_end).await;
        line.convert();
        line.until(|reported| *reported == EngineProgress::Running)
            .await;
        line.life.fake.settle().await;
        let all: u64 = before(&line).iter().map(|g| g.range.count).sum();
        assert!(all >= 50, "{all}");
    });
}

#[test]
fn a_flush_does_not_wait_for_the_fence() {
    run(async {
        let place = Place::with_devices(2);
        let mut line = Line::begin(&place, 0).await;
        let volume = line.life.volume("b", 16 << 20).await;
        for extent in 0..64 {
            line.life.fake.write(volume, extent).await;
        }
        line.die(None).await;
        line.life.fake.devices_ready = false;
        line.next().await;
        line.hear(is_sockets_end).await;
        line.convert();
        line.until(|reported| *reported == EngineProgress::Running)
            .await;
        line.life.fake.settle().await;
        let last = line.life.fake.highest_sequence(volume);
        assert!(last > 0, "there is something to commit");
        assert!(
            line.life.fake.flush(volume, last).await,
            "the engine has flushed both devices, fenced or not"
        );
    });
}

#[test]
fn a_new_daemon_collects_what_the_engine_holds() {
    run(async {
        let place = Place::new();
        let life = Life::first(&place, Begin::default()).await;
        let mut fake = life.kill().await.with_memory();
        let mut hosts = Vec::new();
        for socket in 1..=200u64 {
            let (ours, host) = UnixStream::pair().unwrap();
            let held = forebay_xlate::boundary::message::Held::Socket(socket);
            fake.held.push((held, vec![ours.into()]));
            hosts.push(host);
        }
        let life = Life::take_over(&place, Begin::default(), fake).await;
        let session = life.owner.link.session().unwrap();
        assert_eq!(session.sockets(), 200);
        assert_eq!(session.take_estate(None).unwrap().sockets(), 200);
    });
}

#[test]
fn a_quarantined_export_stays_off_until_an_operator_clears_it() {
    run(async {
        let place = Place::new();
        let mut line = Line::begin(&place, 0).await;
        line.life.volume("b", 1 << 20).await;
        line.life.export("b").await;
        let owner = line.life.owner.clone();
        let export = owner.exports.export_id("t", "a").unwrap();
        for _ in 0..5 {
            owner.exports.blame_export(export, "command 7", 2);
        }
        let events = owner.base.events.all();
        let reported = |event: &&Event| event.kind == EventKind::ExportQuarantined;
        let events: Vec<&Event> = events.iter().filter(reported).collect();
        assert_eq!(events.len(), 1);
        let event = events[0];
        assert_eq!(event.export.as_deref(), Some("t/a"));
        assert!(event.message.contains("command 7"), "{}", event.message);
        line.die(None).await;
        line.next().await;
        line.hear(is_take_over).await;
        let reported = |line: &Line| -> Vec<u64> {
            let exports = line.life.fake.log.iter().filter_map(|m| match m {
                ToEngine::SetExport { export, .. } => Some(export.export.0),
                _ => None,
            });
            exports.collect()
        };
        let other = owner.exports.export_id("t", "b").unwrap().0;
        assert_eq!(reported(&line), [other]);
        line.hear(is_sockets_end).await;
        line.convert();
        line.until(|reported| *reported == EngineProgress::Running)
            .await;
        let shown = owner.exports.export_show("t", "a").unwrap();
        assert!(shown.quarantined.unwrap().contains("command 7"));
        assert!(owner.exports.quarantine_warnings()[0].contains("forebay export resume t/a"));
        let change = crate::model::ExportUpdate::default();
        let changed = owner
            .exports
            .export_update("t".to_owned(), "a".to_owned(), change);
        line.life.with_engine(changed).await.unwrap();
        assert_eq!(reported(&line), [other]);
        let resumed = owner.exports.export_resume("t".to_owned(), "a".to_owned());
        let shown = line.life.with_engine(resumed).await.unwrap();
        assert_eq!(shown.quarantined, None);
        assert_eq!(reported(&line), [other, export.0]);
    });
}

#[test]
fn connections_leave_descriptors_for_engines() {
    run(async {
        let place = Place::new();
        let mut line = Line::begin(&place, 1).await;
        let open = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let one = open();
        let number = u64::from(one.as_raw_fd().unsigned_abs());
        line.session.keep_socket_below(2, vec![one], number + 1);
        let (gone, _other_end) = UnixStream::pair().unwrap();
        let number = u64::from(gone.as_raw_fd().unsigned_abs());
        line.session.keep_socket_below(3, vec![gone.into()], number);
        assert_eq!(line.session.sockets(), 2);
        line.die(None).await;
        assert_eq!(line.estate.borrow().as_ref().unwrap().sockets(), 2);
    });
}

#[test]
fn a_fence_is_of_devices_that_a_successor_began_with() {
    run(async {
        let place = Place::with_devices(2);
        let line = Line::begin(&place, 0).await;
        let mut waiting = line.session.published_devices().await;
        assert_eq!(waiting.len(), 2);
        let devices: Vec<DeviceIndex> = waiting.iter().copied().collect();
        line.session.set_device(devices[0], DeviceState::Opening);
        line.session.set_device(DeviceIndex(9), DeviceState::Ready);
        assert_eq!(
            line.session.next_fence(&mut waiting).await,
            Some(devices[1])
        );
        line.session
            .set_device(devices[0], DeviceState::Failed("gone".to_owned()));
        assert_eq!(line.session.next_fence(&mut waiting).await, None);
        assert!(waiting.is_empty());
    });
}
