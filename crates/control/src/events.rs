//! Events: deaths, take-overs, devices, space, hosts, exports and ports; and changes through the
//! API.
//!
//! They are kept in bounded lists and logged. Events that hosts cause have their own list and rate
//! limit, so hosts can't displace other events or fill the log. Changes have two lists, which
//! survive restarts (`journal`).

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::time::Duration;

use tokio::time::timeout;

use crate::changed::Signal;
use crate::clock::now_unix_ms;
use crate::event_files::{Journal, Kept};
use crate::event_numbers::EventNumbers;
use crate::model::events::{
    Audit, ClosedConnections, DeviceFence, Event, EventKind, EventList, TakeoverStats,
};

const EVENTS_KEPT: usize = 1024;
/// Events caused by hosts.
const HOSTS_EVENTS_KEPT: usize = 256;
/// Changes through the API; destructive ones are also kept separately.
const CHANGES_KEPT: usize = 1024;
const DESTRUCTIVE_KEPT: usize = 256;
const WRITE_LIMIT: Duration = Duration::from_secs(2);
/// Events caused by hosts, per kind and second.
const HOSTS_EVENTS_PER_S: u32 = 64;
const WAIT_AT_MOST: Duration = Duration::from_secs(30);
/// Waiting readers: each occupies one of the API's connections, of which there are a few more.
const READERS_MAX: usize = 32;
/// Distinct reasons; an engine has fewer.
const REASONS_MAX: usize = 32;

#[derive(Debug)]
pub(crate) struct Events {
    list: RefCell<VecDeque<Event>>,
    /// Caused by hosts.
    of_hosts: RefCell<VecDeque<Event>>,
    /// Changes through the API, including those by earlier daemons.
    changes: RefCell<VecDeque<Event>>,
    destructive: RefCell<VecDeque<Event>>,
    journal: Option<Journal>,
    /// For each kind caused by hosts: the second of the last event, and the count in it.
    reported: RefCell<BTreeMap<EventKind, (u64, u32)>>,
    numbers: EventNumbers,
    changed: Signal,
    readers: Cell<usize>,
    closed_down: Cell<bool>,
    deaths: Cell<u64>,
    takeovers: Cell<u64>,
    last_pause_ns: Cell<Option<u64>>,
    closed: RefCell<BTreeMap<String, u64>>,
    fences: RefCell<BTreeMap<u8, u64>>,
}

#[derive(Debug, Default)]
pub(crate) struct EventFields {
    /// From a death's detection until its successor acted.
    pub(crate) pause: Option<Duration>,
    /// From a death's detection until the device was fenced.
    pub(crate) fence: Option<(u8, Duration)>,
    /// Closed connections: reason and count.
    pub(crate) closed: Vec<(String, u32)>,
    pub(crate) export: Option<String>,
    pub(crate) device: Option<u8>,
    pub(crate) host: Option<String>,
    /// For events that stand for several.
    pub(crate) count: Option<u64>,
}

impl Default for Events {
    fn default() -> Self {
        Self {
            list: RefCell::default(),
            of_hosts: RefCell::default(),
            changes: RefCell::default(),
            destructive: RefCell::default(),
            journal: None,
            reported: RefCell::default(),
            numbers: EventNumbers::open(None, now_unix_ms(), 0, 0),
            changed: Signal::new(),
            readers: Cell::new(0),
            closed_down: Cell::new(false),
            deaths: Cell::new(0),
            takeovers: Cell::new(0),
            last_pause_ns: Cell::new(None),
            closed: RefCell::default(),
            fences: RefCell::default(),
        }
    }
}

/// A waiting reader; counted until it is dropped.
struct Reader<'a>(&'a Cell<usize>);

impl<'a> Reader<'a> {
    fn new(readers: &'a Cell<usize>) -> Self {
        readers.set(readers.get() + 1);
        Self(readers)
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

fn keep(list: &RefCell<VecDeque<Event>>, most: usize, event: Event) {
    let mut list = list.borrow_mut();
    if list.len() >= most {
        list.pop_front();
    }
    list.push_back(event);
}

fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Whether hosts can cause this event by themselves at any rate.
fn is_of_hosts(kind: EventKind) -> bool {
    matches!(
        kind,
        EventKind::HostConnected
            | EventKind::HostDisconnected
            | EventKind::HostRefused
            | EventKind::ReservationPreempted
    )
}

impl Events {
    fn is_too_many(&self, kind: EventKind) -> bool {
        let second = now_unix_ms() / 1000;
        let mut reported = self.reported.borrow_mut();
        let (last, count) = reported.entry(kind).or_default();
        if *last != second {
            (*last, *count) = (second, 0);
        }
        *count = count.saturating_add(1);
        if *count == HOSTS_EVENTS_PER_S + 1 {
            tracing::warn!(
                "too many events of kind {kind:?} in this second: the others are dropped"
            );
        }
        *count > HOSTS_EVENTS_PER_S
    }

    pub(crate) fn report(
        &self,
        kind: EventKind,
        generation: u64,
        message: String,
        fields: EventFields,
    ) {
        if is_of_hosts(kind) && self.is_too_many(kind) {
            // The reader sees a gap.
            self.numbers.next(now_unix_ms());
            return;
        }
        match kind {
            EventKind::EngineDied
            | EventKind::EngineStuck
            | EventKind::FirmwareFellBack
            | EventKind::NotTakenOver
            | EventKind::ExportQuarantined
            | EventKind::DeviceFailed => tracing::error!(generation, "{message}"),
            EventKind::DaemonDied
            | EventKind::HostRefused
            | EventKind::ReservationPreempted
            | EventKind::PoolSpace
            | EventKind::PartMissing
            | EventKind::Warning => tracing::warn!(generation, "{message}"),
            _ => tracing::info!(generation, "{message}"),
        }
        if kind == EventKind::EngineDied {
            self.deaths.set(self.deaths.get() + 1);
        }
        let pause_ns = fields.pause.map(ns);
        if kind == EventKind::TookOver {
            self.takeovers.set(self.takeovers.get() + 1);
            self.last_pause_ns.set(pause_ns);
        }
        let fence = fields.fence.map(|(device, after)| DeviceFence {
            device,
            fence_ns: ns(after),
        });
        let mut counts = self.closed.borrow_mut();
        for (why, count) in &fields.closed {
            if counts.len() < REASONS_MAX || counts.contains_key(why) {
                *counts.entry(why.clone()).or_default() += u64::from(*count);
            }
        }
        let connections_closed =
            fields
                .closed
                .into_iter()
                .map(|(reason, count)| ClosedConnections {
                    reason,
                    count: count.into(),
                });
        let event = Event {
            generation,
            message,
            export: fields.export,
            device: fields.device,
            host: fields.host,
            count: fields.count,
            pause_ns,
            fence,
            connections_closed: connections_closed.collect(),
            ..Event::new(self.numbers.next(now_unix_ms()), kind)
        };
        match is_of_hosts(kind) {
            true => keep(&self.of_hosts, HOSTS_EVENTS_KEPT, event),
            false => keep(&self.list, EVENTS_KEPT, event),
        }
        self.changed.raise();
    }

    pub(crate) fn kept_in(state_dir: &Path) -> Self {
        let (journal, kept) = match Journal::open(state_dir) {
            Ok((journal, kept)) => (Some(journal), kept),
            Err(error) => {
                tracing::warn!(%error, "changes through the API are not recorded");
                (None, Kept::default())
            }
        };
        let events = Self::default();
        let all = kept.changes.iter().chain(&kept.destructive);
        let newest = all.clone().map(|event| event.sequence).max().unwrap_or(0);
        let newest_ms = all.map(|event| event.at_unix_ms).max().unwrap_or(0);
        let numbers = EventNumbers::open(Some(state_dir), now_unix_ms(), newest, newest_ms);
        for event in kept.changes {
            keep(&events.changes, CHANGES_KEPT, event);
        }
        for event in kept.destructive {
            keep(&events.destructive, DESTRUCTIVE_KEPT, event);
        }
        Self {
            numbers,
            journal,
            ..events
        }
    }

    /// Returns when the change is written, or can't be for now.
    pub(crate) async fn audit(&self, generation: u64, audit: Audit) {
        let message = format!("{}: {}: {}", audit.who(), audit.action, audit.request);
        let result = audit.result.as_str();
        tracing::info!(generation, result, "{message}");
        let destructive = audit.destructive;
        let event = Event {
            generation,
            message,
            audit: Some(audit),
            ..Event::new(self.numbers.next(now_unix_ms()), EventKind::Changed)
        };
        let journal = self.journal.as_ref();
        let written = journal.and_then(|journal| journal.write(&event, destructive));
        match destructive {
            true => keep(&self.destructive, DESTRUCTIVE_KEPT, event),
            false => keep(&self.changes, CHANGES_KEPT, event),
        }
        self.changed.raise();
        if let Some(written) = written {
            let _ = timeout(WRITE_LIMIT, written).await;
        }
    }

    pub(crate) fn note_fence(&self, device: u8, after: Duration) {
        self.fences.borrow_mut().insert(device, ns(after));
    }

    #[cfg(test)]
    pub(crate) fn all(&self) -> Vec<Event> {
        self.after(None).events
    }

    /// The events after this number, or all.
    fn after(&self, after: Option<u64>) -> EventList {
        let newest = self.numbers.newest();
        let seen = after.unwrap_or(0);
        let lists = [&self.list, &self.of_hosts, &self.changes, &self.destructive];
        let mut events = Vec::new();
        for list in lists {
            let list = list.borrow();
            events.extend(list.iter().filter(|event| event.sequence > seen).cloned());
        }
        events.sort_by_key(|event: &Event| event.sequence);
        // Events that earlier daemons did not keep are not counted.
        let of_this = events
            .iter()
            .filter(|event| event.sequence > self.numbers.before);
        let since = newest.saturating_sub(seen.max(self.numbers.before));
        let missed = since.saturating_sub(of_this.count() as u64);
        EventList {
            events,
            missed,
            newest,
        }
    }

    /// Waits if there are none.
    pub(crate) async fn read(&self, after: Option<u64>, wait: Duration) -> EventList {
        let now = || {
            let list = self.after(after);
            let ends = !list.events.is_empty() || self.closed_down.get();
            ends.then_some(list)
        };
        let reader = Reader::new(&self.readers);
        let wait = if reader.0.get() > READERS_MAX {
            Duration::ZERO
        } else {
            wait.min(WAIT_AT_MOST)
        };
        let read = timeout(wait, self.changed.until(now)).await;
        read.unwrap_or_else(|_| self.after(after))
    }

    pub(crate) fn close_down(&self) {
        self.closed_down.set(true);
        self.changed.raise();
    }

    pub(crate) fn stats(&self) -> TakeoverStats {
        let closed = self.closed.borrow();
        let closed = closed.iter().map(|(reason, count)| ClosedConnections {
            reason: reason.clone(),
            count: *count,
        });
        let fences = self.fences.borrow();
        let fences = fences.iter().map(|(device, fence_ns)| DeviceFence {
            device: *device,
            fence_ns: *fence_ns,
        });
        TakeoverStats {
            deaths: self.deaths.get(),
            takeovers: self.takeovers.get(),
            last_pause_ns: self.last_pause_ns.get(),
            connections_closed: closed.collect(),
            last_fences: fences.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_bounded_and_the_counters_go_on() {
        let events = Events::default();
        for n in 0..2000u32 {
            let fields = EventFields {
                pause: Some(Duration::from_nanos(n.into())),
                closed: vec![("its record was damaged".to_owned(), 2)],
                ..EventFields::default()
            };
            events.report(
                EventKind::TookOver,
                n.into(),
                format!("take-over {n}"),
                fields,
            );
        }
        let fields = EventFields {
            closed: (0..100).map(|n| (format!("reason {n}"), 1)).collect(),
            fence: Some((3, Duration::from_nanos(7))),
            ..EventFields::default()
        };
        events.report(EventKind::FencePassed, 0, "x".to_owned(), fields);
        events.note_fence(3, Duration::from_nanos(7));
        let list = events.after(None).events;
        assert_eq!(list.len(), EVENTS_KEPT);
        assert_eq!(list[EVENTS_KEPT - 2].message, "take-over 1999");
        let stats = events.stats();
        assert_eq!((stats.takeovers, stats.last_pause_ns), (2000, Some(1999)));
        let damaged = ClosedConnections {
            reason: "its record was damaged".to_owned(),
            count: 4000,
        };
        assert!(stats.connections_closed.contains(&damaged));
        assert!(stats.connections_closed.len() <= REASONS_MAX);
        assert_eq!(
            stats.last_fences,
            [DeviceFence {
                device: 3,
                fence_ns: 7
            }]
        );
    }

    #[tokio::test]
    async fn ten_thousand_budgets_push_no_destruction_out() {
        let folder = tempfile::tempdir().unwrap();
        let audit = |request: &str, destructive| Audit {
            request: request.to_owned(),
            destructive,
            ..Audit::default()
        };
        let events = Events::kept_in(folder.path());
        report(&events, "a device is gone");
        events.audit(1, audit("DELETE /v1/pool", true)).await;
        for _ in 0..10_000 {
            events.audit(1, audit("PUT budget", false)).await;
        }
        let newest = events.after(None).newest;
        let requests = |events: &Events| {
            let all = events.after(None).events;
            let audits = all.into_iter().filter_map(|event| event.audit);
            audits.map(|audit| audit.request).collect::<Vec<_>>()
        };
        let before = requests(&events);
        assert_eq!(
            (before[0].as_str(), before.len()),
            ("DELETE /v1/pool", 1 + CHANGES_KEPT)
        );
        let first = &events.after(None).events[0];
        assert_eq!(first.message, "a device is gone");
        // The next daemon knows them too, and continues with higher numbers.
        drop(events);
        let events = Events::kept_in(folder.path());
        assert_eq!(requests(&events), before);
        assert!(events.after(Some(newest)).events.is_empty());
        assert_eq!(events.after(None).missed, 0);
        report(&events, "an engine died");
        assert_eq!(texts(&events.after(Some(newest))), ["an engine died"]);
    }

    #[test]
    fn hosts_can_not_push_out_what_else_happened() {
        let events = Events::default();
        report(&events, "a device is gone");
        for n in 0..10_000u32 {
            let kind = match n % 2 {
                0 => EventKind::HostRefused,
                _ => EventKind::ReservationPreempted,
            };
            events.report(kind, 1, format!("host {n}"), EventFields::default());
        }
        report(&events, "an engine died");
        let all = events.after(None);
        let reported = texts(&all);
        assert_eq!(reported[0], "a device is gone");
        assert_eq!(reported.last(), Some(&"an engine died"));
        assert!(
            reported.len() <= 2 + HOSTS_EVENTS_KEPT,
            "{}",
            reported.len()
        );
        assert_eq!(all.missed + reported.len() as u64, 10_002);
        assert!(all.events.is_sorted_by_key(|event| event.sequence));
    }

    fn report(events: &Events, text: &str) {
        events.report(
            EventKind::Warning,
            1,
            text.to_owned(),
            EventFields::default(),
        );
    }

    fn texts(list: &EventList) -> Vec<&str> {
        list.events.iter().map(|e| e.message.as_str()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_gets_what_came_after_the_last_one_it_has() {
        let events = Events::default();
        report(&events, "a");
        report(&events, "b");
        let first = events.read(None, Duration::ZERO).await;
        assert_eq!((texts(&first), first.missed), (vec!["a", "b"], 0));
        assert_eq!(first.events[1].sequence, first.events[0].sequence + 1);
        assert_eq!(first.newest, first.events[1].sequence);
        let later = async {
            tokio::time::sleep(Duration::from_secs(7)).await;
            report(&events, "c");
        };
        let begun = tokio::time::Instant::now();
        let (second, ()) = tokio::join!(
            events.read(Some(first.newest), Duration::from_secs(20)),
            later
        );
        assert_eq!((texts(&second), second.missed), (vec!["c"], 0));
        assert_eq!(begun.elapsed(), Duration::from_secs(7));
        let third = events
            .read(Some(second.newest), Duration::from_secs(20))
            .await;
        assert_eq!((third.events.len(), third.newest), (0, second.newest));
        assert_eq!(begun.elapsed(), Duration::from_secs(27));
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_fell_behind_gets_its_missed_count() {
        let events = Events::default();
        report(&events, "a");
        let first = events.read(None, Duration::ZERO).await;
        for _ in 0..EVENTS_KEPT + 9 {
            report(&events, "b");
        }
        let second = events.read(Some(first.newest), Duration::ZERO).await;
        assert_eq!((second.events.len(), second.missed), (EVENTS_KEPT, 9));
        let all = events.read(None, Duration::ZERO).await;
        assert_eq!(all.missed, 10);
        // A number from another daemon.
        let before = events.read(Some(17), Duration::ZERO).await;
        assert_eq!((before.events.len(), before.missed), (EVENTS_KEPT, 10));
        let ahead = events.read(Some(all.newest + 5), Duration::ZERO).await;
        assert_eq!((ahead.events, ahead.missed), (vec![], 0));
        assert_eq!(ahead.newest, all.newest);
    }

    #[tokio::test(start_paused = true)]
    async fn readers_do_not_take_every_connection_and_none_outlives_the_daemon() {
        let events = Events::default();
        let newest = Some(events.numbers.newest());
        let begun = tokio::time::Instant::now();
        let long = Duration::from_secs(3600);
        let waiting: Vec<_> = (0..READERS_MAX)
            .map(|_| events.read(newest, long))
            .collect();
        let mut waiting = waiting.into_iter().map(Box::pin).collect::<Vec<_>>();
        std::future::poll_fn(|context| {
            for reader in &mut waiting {
                assert!(reader.as_mut().poll(context).is_pending());
            }
            std::task::Poll::Ready(())
        })
        .await;
        events.read(newest, long).await;
        assert_eq!(begun.elapsed(), Duration::ZERO);
        events.close_down();
        for reader in waiting {
            assert_eq!(reader.await.events, []);
        }
        assert_eq!(begun.elapsed(), Duration::ZERO);
        assert_eq!(events.readers.get(), 0);
    }
}
