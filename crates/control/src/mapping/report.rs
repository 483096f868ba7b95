//! Tells the engine of a new session which grants the table lists.
//!
//! Before it serves, it learns what each FLUSH must cover and wait for. Later it gets every grant
//! that the pool confirms, in parts and unasked; a fault would get the same answer.

use std::collections::BTreeSet;

use forebay_xlate::boundary::message::{GrantOf, MAX_BATCH};
use forebay_xlate::grants::{Grant, copied_for};
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, Rights, VolumeId, Word};

use crate::link::session::Session;
use crate::mapping::revoke::Revoker;

impl Revoker {
    pub(crate) fn send_flush_state(&self, session: &Session) {
        let (mut covered, mut uncommitted) = (BTreeSet::new(), Vec::new());
        let core = self.base.core.borrow();
        let protocol = self.locks.protocol.borrow();
        for grant in core.grants.iter() {
            let is_hole = grant.word.rights() == Some(Rights::Hole);
            if is_hole || copied_for(grant.volume).is_some() {
                continue;
            }
            covered.insert((grant.volume, grant.word.device()));
            if grant.commit_sequence > core.pool.volumes().durable_seq(grant.volume) {
                protocol.republish_one(grant, &mut uncommitted);
            }
        }
        drop((core, protocol));
        covered.extend(
            self.flusher
                .may_hold_unflushed()
                .into_iter()
                .map(|(d, v)| (v, d)),
        );
        for (volume, device) in covered {
            publish_device(session, volume, device);
        }
        for grant in uncommitted {
            self.publish_grant(session, grant);
        }
    }

    /// In parts, so that faults are answered in between. Each part reads the table anew, without
    /// ranges revoked meanwhile.
    pub(crate) async fn publish_all_grants(&self, session: &Session) {
        let mut place = None;
        loop {
            let mut listed = Vec::new();
            {
                let core = self.base.core.borrow();
                let protocol = self.locks.protocol.borrow();
                let mut next: Box<dyn Iterator<Item = &Grant>> = match place {
                    Some(place) => Box::new(core.grants.iter_after(place)),
                    None => Box::new(core.grants.iter()),
                };
                place = None;
                for grant in next.by_ref().take(MAX_BATCH) {
                    protocol.republish_one(grant, &mut listed);
                    place = Some((grant.volume, grant.range.first));
                }
            }
            for grant in listed {
                self.publish_grant(session, grant);
            }
            if place.is_none() || session.is_over() {
                return;
            }
            tokio::task::yield_now().await;
        }
    }

    /// Grants the parts of an entry that the pool still maps there.
    fn publish_grant(&self, session: &Session, mut listed: GrantOf) {
        if listed.commit_sequence
            <= self
                .base
                .core
                .borrow()
                .pool
                .volumes()
                .durable_seq(listed.volume)
        {
            listed.commit_sequence = 0;
        }
        let part = |at: u64, count: u64| {
            let word = Word::from_bits(listed.word).advance(at - listed.range.first);
            GrantOf {
                range: ExtentRange::new(at, count),
                word: word.bits(),
                ..listed
            }
        };
        if listed.range.count == 0 {
            session.grant(listed);
        }
        let mut at = listed.range.first;
        while at < listed.range.end() {
            let word = Word::from_bits(part(at, 1).word);
            let left = listed.range.end() - at;
            // A missing device serves nothing, but a FLUSH must know of it.
            let (is_there, count) = self.base.core.borrow().pool.volumes().maps_at(
                listed.volume,
                ExtentIndex(at),
                word.device(),
                word.extent(),
                left,
            );
            // An empty grant still makes FLUSH cover the device.
            session.grant(part(at, if is_there { count } else { 0 }));
            at += count;
        }
    }
}

pub(crate) fn publish_device(session: &Session, volume: VolumeId, device: DeviceIndex) {
    if let Some(word) = Word::new(device, ExtentIndex(0), Rights::ReadWrite) {
        session.grant(GrantOf {
            volume,
            range: ExtentRange::new(0, 0),
            word: word.bits(),
            commit_sequence: 0,
        });
    }
}
