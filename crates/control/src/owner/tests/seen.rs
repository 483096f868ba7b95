//! Tests of statistics and of hosts' events.

use std::sync::atomic::Ordering::{Relaxed, Release};

use forebay_xlate::boundary::message::{FromEngine, Past};
use forebay_xlate::boundary::region::{ControllerContent, OpKind};

use super::*;
use crate::model::events::{EventKind, TakeoverStats};
use crate::model::stats::LaneStats;

impl Life {
    fn lane(&self, volume: &str, lane: usize) -> u64 {
        let export = self.owner.exports.export_id("t", volume).unwrap();
        let record = &self.fake.region.lanes()[lane];
        record.export.store(export.0 + 1, Release);
        record.connections.store(1, Relaxed);
        export.0
    }

    /// Counts reads of 4096 bytes and 1 us.
    fn reads(&self, lane: usize, count: u64) {
        for _ in 0..count {
            let ops = &self.fake.region.lanes()[lane].ops;
            ops[OpKind::Read as usize].record(4096, 1000, false);
        }
    }

    fn stats(&self) -> Vec<LaneStats> {
        self.owner.statistics.stats(TakeoverStats::default()).lanes
    }

    fn connects(&self, controller: u32, lane: usize, name: &str) {
        let region = &self.fake.region;
        let record = &region.controllers()[controller as usize];
        record.lane.store(lane as u64, Relaxed);
        let mut state = [0; 56];
        for (word, bytes) in state.iter_mut().zip(name.as_bytes().chunks(8)) {
            let mut eight = [0; 8];
            eight[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_le_bytes(eight);
        }
        let content = ControllerContent {
            sequence: 1,
            valid_from: 0,
            blocks: 0,
            state,
        };
        record.put_state(region.header().key.load(Relaxed), controller, &content);
        record.used.store(1, Release);
    }

    fn disconnects(&self, controller: usize) {
        self.fake.region.controllers()[controller]
            .used
            .store(0, Release);
    }

    fn statistics(&mut self) -> Vec<(VolumeId, u64, u8, u8)> {
        let log = std::mem::take(&mut self.fake.log);
        let statistics = log.into_iter().filter_map(|message| match message {
            ToEngine::VolumeStatistics {
                volume,
                used_bytes,
                spare_percent,
                warnings,
                ..
            } => Some((volume, used_bytes, spare_percent, warnings)),
            _ => None,
        });
        statistics.collect()
    }
}

#[test]
fn counters_do_not_fall_when_processes_die() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.volume("a", 1 << 20).await;
        life.export("a").await;
        life.lane("a", 3);
        life.reads(3, 5);
        let counted = |life: &Life| {
            let lanes = life.stats();
            assert_eq!(lanes.len(), 1);
            let read = &lanes[0].read;
            assert_eq!(read.bytes, read.ops * 4096);
            assert_eq!(read.latency.total.count, read.ops);
            assert_eq!(read.latency.total.sum_ns, read.ops * 1000);
            (read.ops, lanes[0].queues)
        };
        assert_eq!(counted(&life), (5, 1));
        life.fake.hang_up();
        let owner = life.owner.clone();
        let alone = || owner.link.session().is_none().then_some(());
        owner.link.session_changed.until(alone).await;
        assert_eq!(counted(&life), (5, 0), "nobody counts now");
        life.replace_engine(|_| {}).await;
        life.fake.settle().await;
        assert_eq!(counted(&life), (5, 0));
        life.lane("a", 0);
        life.reads(0, 2);
        assert_eq!(counted(&life), (7, 1));
        let session = owner.link.session().unwrap();
        owner.statistics.count_on(&session);
        assert_eq!(counted(&life), (7, 1));
        owner.statistics.save_statistics(true).await;
        drop((owner, session));
        let mut fake = life.kill().await;
        fake.take_the_rest();
        let life = Life::take_over(&place, Begin::default(), fake).await;
        life.reads(0, 1);
        assert_eq!(counted(&life), (8, 1));
        // If both die, only the counts since the last save are lost.
        life.owner.statistics.save_statistics(true).await;
        life.reads(0, 4);
        assert_eq!(counted(&life), (12, 1));
        let before = life.kill().await;
        let begin = Begin {
            generation: 9,
            ..Begin::default()
        };
        let life = Life::next(&place, begin, &before).await;
        assert_eq!(counted(&life), (8, 0));
    });
}

/// A host's SMART log continues: each engine gets the sum of its predecessors' counts.
#[test]
fn figures_go_on_where_they_were() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.volume("a", 1 << 20).await;
        life.export("a").await;
        let reported = |life: &mut Life| {
            let log = std::mem::take(&mut life.fake.log).into_iter();
            let pasts = log.filter_map(|message| match message {
                ToEngine::VolumeStatistics { past, .. } => Some(past),
                _ => None,
            });
            let pasts: Vec<Past> = pasts.collect();
            let last = *pasts.last().unwrap();
            assert!(last.created_s > 0);
            (last.reads, last.bytes_read, last.media_errors)
        };
        life.lane("a", 3);
        for (lane, reads, before) in [(3, 5, (5, 20_480, 1)), (0, 2, (7, 28_672, 2))] {
            life.reads(lane, reads);
            life.fake.region.lanes()[lane]
                .media_errors
                .store(1, Relaxed);
            life.fake.hang_up();
            life.replace_engine(|_| {}).await;
            life.fake.settle().await;
            assert_eq!(reported(&mut life), before);
            life.lane("a", 0);
        }
        life.owner.statistics.save_statistics(true).await;
        let mut fake = life.kill().await;
        fake.take_the_rest();
        fake.log.clear();
        let mut life = Life::take_over(&place, Begin::default(), fake).await;
        life.fake.settle().await;
        assert_eq!(reported(&mut life), (7, 28_672, 2));
    });
}

#[test]
fn a_dead_engines_counters_are_not_trusted() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.volume("a", 1 << 20).await;
        life.export("a").await;
        let export = life.lane("a", 1);
        for lane in life.fake.region.lanes() {
            lane.export.store(u64::MAX, Relaxed);
        }
        for lane in [1, 2] {
            let record = &life.fake.region.lanes()[lane];
            record.export.store(export + 1, Relaxed);
            for ops in &record.ops {
                ops.counters().for_each(|c| c.store(u64::MAX, Relaxed));
            }
        }
        for _engine in 0..2 {
            life.fake.hang_up();
            life.replace_engine(|_| {}).await;
            life.fake.settle().await;
            life.lane("a", 0);
            life.reads(0, 1);
            let lanes = life.stats();
            assert_eq!(lanes.len(), 1);
            assert_eq!(lanes[0].read.ops, u64::MAX);
            assert_eq!(lanes[0].read.latency.total.sum_ns, u64::MAX);
        }
    });
}

#[test]
fn hosts_that_come_and_go_are_events() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.volume("a", 1 << 20).await;
        life.export("a").await;
        let owner = life.owner.clone();
        let seen = |kind: EventKind| {
            let events = owner.base.events.all();
            let of = events.into_iter().filter(|event| event.kind == kind);
            of.map(|event| (event.host, event.count.unwrap_or(0)))
                .collect::<Vec<_>>()
        };
        owner.hosts.poll_hosts();
        life.lane("a", 0);
        life.connects(7, 0, "nqn.one");
        life.connects(8, 0, "nqn.one");
        life.connects(9, 0, "nqn.two");
        owner.hosts.poll_hosts();
        owner.hosts.poll_hosts();
        let one = (Some("nqn.one".to_owned()), 1);
        let two = (Some("nqn.two".to_owned()), 1);
        assert_eq!(seen(EventKind::HostConnected), [one.clone(), two.clone()]);
        life.disconnects(8);
        life.disconnects(9);
        owner.hosts.poll_hosts();
        assert_eq!(seen(EventKind::HostDisconnected), [two]);
        for host in 0..500 {
            life.connects(100 + host, 0, &format!("nqn.{host}"));
        }
        owner.hosts.poll_hosts();
        assert_eq!(seen(EventKind::HostConnected).last(), Some(&(None, 500)));
        assert_eq!(seen(EventKind::HostConnected).len(), 3);
        // The engine dies; its successor has all hosts but one once it acts.
        life.fake.hang_up();
        life.replace_engine(|_| {}).await;
        owner.hosts.poll_hosts();
        life.lane("a", 0);
        for host in 0..500 {
            life.connects(100 + host, 0, &format!("nqn.{host}"));
        }
        life.fake.settle().await;
        owner.hosts.poll_hosts();
        assert_eq!(seen(EventKind::HostDisconnected).last(), Some(&one));
        assert_eq!(seen(EventKind::HostDisconnected).len(), 2);
        assert_eq!(seen(EventKind::HostConnected).len(), 3);
        (0..500).for_each(|host| life.disconnects(100 + host));
        owner.link.acting.set(1);
        owner.hosts.poll_hosts();
        assert_eq!(seen(EventKind::HostDisconnected).len(), 2);
        owner.link.acting.set(2);
        owner.hosts.poll_hosts();
        assert_eq!(seen(EventKind::HostDisconnected).last(), Some(&(None, 500)));
    });
}

#[test]
fn a_host_leaves_an_export_that_has_ended_by_name() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.volume("a", 1 << 20).await;
        life.export("a").await;
        let owner = life.owner.clone();
        life.lane("a", 0);
        life.connects(7, 0, "nqn.one");
        owner.hosts.poll_hosts();
        let ending = owner.exports.clone();
        let ended = ending.export_delete("t".to_owned(), "a".to_owned(), true);
        life.with_engine(ended).await.unwrap();
        life.disconnects(7);
        owner.hosts.poll_hosts();
        let events = owner.base.events.all();
        let left = events
            .iter()
            .find(|event| event.kind == EventKind::HostDisconnected);
        let left = left.unwrap();
        assert_eq!(left.message, "host nqn.one disconnected from t/a");
        assert_eq!(left.export.as_deref(), Some("t/a"));
    });
}

#[test]
fn the_engine_hears_how_full_volumes_and_pool_are() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        let a = life.volume("a", 16 << 20).await;
        let owner = life.owner.clone();
        let beats = |count: usize| (0..count).for_each(|_| owner.statistics.poll_statistics());
        beats(1);
        life.fake.settle().await;
        assert_eq!(life.statistics(), [(a, 0, 100, 0)], "a new volume at once");
        for extent in 0..16 {
            life.fake.write(a, extent).await;
        }
        // Every ten beats, not at each write. The owner's own one-second beat may add some on a
        // slow node.
        beats(4);
        life.fake.settle().await;
        assert_eq!(life.statistics(), []);
        beats(10);
        life.fake.settle().await;
        let reported = life.statistics();
        assert_eq!(reported.len(), 1);
        let (_, used_bytes, spare, warnings) = reported[0];
        assert_eq!((used_bytes, warnings), (16 * EXTENT, 0));
        assert!(spare < 100);
        // A nearly full pool is reported at once, except to volumes that have all their space.
        let update = crate::model::PoolUpdate {
            placement: None,
            warn_percent: Some(1),
            critical_percent: Some(2),
        };
        life.fake.log.clear();
        life.with_engine(owner.reports.pool_update(update))
            .await
            .unwrap();
        let reserve = crate::model::VolumeUpdate {
            size_bytes: None,
            reserved_bytes: Some(1 << 20),
            shrink: false,
        };
        let b = life.volume("b", 1 << 20).await;
        let update = owner
            .volumes
            .volume_update("t".to_owned(), "b".to_owned(), reserve);
        life.with_engine(update).await.unwrap();
        beats(1);
        life.fake.settle().await;
        let reported = life.statistics();
        let last = |of| reported.iter().rev().find(|(volume, ..)| *volume == of);
        assert_eq!(
            last(a).map(|statistics| statistics.3),
            Some(1),
            "{reported:?}"
        );
        assert_eq!(last(b), Some(&(b, 0, 100, 0)));
        life.fake.hang_up();
        life.replace_engine(|_| {}).await;
        life.fake.settle().await;
        assert_eq!(life.statistics().len(), 2);
    });
}

#[test]
fn a_change_of_an_export_is_answered_when_hosts_are_shut_out() {
    run(async {
        let place = Place::new();
        let mut life = Life::first(&place, Begin::default()).await;
        life.volume("a", 1 << 20).await;
        life.export("a").await;
        life.fake.settle_exports = false;
        let owner = life.owner.clone();
        let change = |any_host| {
            let body = crate::model::ExportUpdate {
                any_host: Some(any_host),
                ..Default::default()
            };
            Box::pin(
                owner
                    .exports
                    .export_update("t".to_owned(), "a".to_owned(), body),
            )
        };
        let reported = |message: &ToEngine| match message {
            ToEngine::SetExport { request, .. } => Some(*request),
            _ => None,
        };
        let mut first = change(false);
        let request = tokio::select! {
            early = &mut first => panic!("{early:?}"),
            request = life.fake.until(reported) => request,
        };
        tokio::select! {
            early = &mut first => panic!("{early:?}"),
            () = life.fake.settle() => {}
        }
        let settled = FromEngine::ExportSettled {
            request,
            at_devices: 3,
        };
        life.fake.say(&settled);
        let shown = life.with_engine(first).await.unwrap();
        assert_eq!(shown.commands_ending, 3);
        let shown = owner.exports.export_show("t", "a").unwrap();
        assert_eq!(shown.commands_ending, 0);
        let mut second = change(true);
        tokio::select! {
            early = &mut second => panic!("{early:?}"),
            _ = life.fake.until(reported) => {}
        }
        life.fake.hang_up();
        assert!(second.await.unwrap().any_host);
        let kinds = owner.base.events.all().into_iter().map(|event| event.kind);
        let expected = [
            EventKind::ExportCreated,
            EventKind::ExportChanged,
            EventKind::ExportChanged,
        ];
        assert_eq!(kinds.collect::<Vec<_>>(), expected);
    });
}
