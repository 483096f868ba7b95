//! What happened to this daemon's engines.
//!
//! Purpose: an operator, or a test, can see each death, how it was survived, and what it cost.
//! Design: a bounded list in memory, newest last, and counters that only grow; everything is logged as
//! well. It outlives the pool's being opened anew.
//! Not here: the reports of deaths, which are files (`supervisor::report`).

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::api::events::{ClosedConnections, DeviceFence, Event, EventKind, TakeoverStats};
use crate::owner::now_unix_ms;

/// Events that are kept.
const EVENTS_KEPT: usize = 256;
/// Reasons that are told apart; an engine has fewer.
const REASONS_MAX: usize = 32;

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Events {
    list: RefCell<VecDeque<Event>>,
    takeovers: Cell<u64>,
    last_pause_ns: Cell<Option<u64>>,
    closed: RefCell<BTreeMap<String, u64>>,
    fences: RefCell<BTreeMap<u8, u64>>,
}

/// What an event has beside its text.
#[derive(Debug, Default)]
pub(crate) struct News {
    /// From a death seen until its successor acted.
    pub(crate) pause: Option<Duration>,
    /// From a death seen until a device was free of it.
    pub(crate) fence: Option<(u8, Duration)>,
    /// Connections that were closed: why, and how many.
    pub(crate) closed: Vec<(String, u32)>,
    /// The export, if it is about one.
    pub(crate) export: Option<String>,
}

fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Events {
    /// Something happened.
    pub(crate) fn tell(&self, kind: EventKind, generation: u64, message: String, news: News) {
        match kind {
            EventKind::FencePassed | EventKind::TookOver | EventKind::ExportResumed => {
                tracing::info!(generation, "{message}");
            }
            _ => tracing::error!(generation, "{message}"),
        }
        let pause_ns = news.pause.map(ns);
        if kind == EventKind::TookOver {
            self.takeovers.set(self.takeovers.get() + 1);
            self.last_pause_ns.set(pause_ns);
        }
        let fence = news.fence.map(|(device, after)| DeviceFence {
            device,
            fence_ns: ns(after),
        });
        let mut counts = self.closed.borrow_mut();
        for (why, count) in &news.closed {
            if counts.len() < REASONS_MAX || counts.contains_key(why) {
                *counts.entry(why.clone()).or_default() += u64::from(*count);
            }
        }
        let connections_closed = news
            .closed
            .into_iter()
            .map(|(reason, count)| ClosedConnections {
                reason,
                count: count.into(),
            });
        let event = Event {
            at_unix_ms: now_unix_ms(),
            kind,
            generation,
            message,
            export: news.export,
            pause_ns,
            fence,
            connections_closed: connections_closed.collect(),
        };
        let mut list = self.list.borrow_mut();
        if list.len() >= EVENTS_KEPT {
            list.pop_front();
        }
        list.push_back(event);
    }

    /// How long after a death a device was free of it: counted, but no event.
    pub(crate) fn note_fence(&self, device: u8, after: Duration) {
        self.fences.borrow_mut().insert(device, ns(after));
    }

    /// All that are kept, oldest first.
    pub(crate) fn list(&self) -> Vec<Event> {
        self.list.borrow().iter().cloned().collect()
    }

    /// What is counted.
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
        for n in 0..1000u32 {
            let news = News {
                pause: Some(Duration::from_nanos(n.into())),
                closed: vec![("its record was damaged".to_owned(), 2)],
                ..News::default()
            };
            events.tell(
                EventKind::TookOver,
                n.into(),
                format!("take-over {n}"),
                news,
            );
        }
        let news = News {
            closed: (0..100).map(|n| (format!("reason {n}"), 1)).collect(),
            fence: Some((3, Duration::from_nanos(7))),
            ..News::default()
        };
        events.tell(EventKind::FencePassed, 0, "x".to_owned(), news);
        events.note_fence(3, Duration::from_nanos(7));
        let list = events.list();
        assert_eq!(list.len(), EVENTS_KEPT);
        assert_eq!(list[EVENTS_KEPT - 2].message, "take-over 999");
        let stats = events.stats();
        assert_eq!((stats.takeovers, stats.last_pause_ns), (1000, Some(999)));
        let damaged = ClosedConnections {
            reason: "its record was damaged".to_owned(),
            count: 2000,
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
}
