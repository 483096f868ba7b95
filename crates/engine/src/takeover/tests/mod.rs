//! Conversion of hand-made regions: deaths at each moment, and damage.

mod damage;
mod in_parts;
mod orphans;

use super::counters::{NoFacts, SocketFacts};
use super::dead::*;
use super::plan::{Plan, plan};
use super::queue::{Converted, convert_queue};
use super::snapshot::OldQueue;
use super::*;
use forebay_xlate::boundary::region::item::NO_SLOT;
use forebay_xlate::boundary::region::queue::{InData, Kept};
use forebay_xlate::boundary::region::{
    Asked, CommandStage, CommandState, MAX_QUEUE_ENTRIES, QueueConstants, queue_use, rx_word,
};
use forebay_xlate::{DeviceIndex, VolumeId};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

impl Dead {
    fn convert(&self, queue: u32, consumed: u64, accepted: u64) -> Result<Converted, Damage> {
        let old = OldQueue::read(&self.region, self, queue)?;
        convert_queue(&old, self, SocketFacts { consumed, accepted }, None)
    }

    /// The reactor received for this queue last.
    fn receives(&self, queue: u32, base: u64) {
        let reactor = &self.region.reactors()[0];
        reactor.rx_base.store(base, Relaxed);
        reactor.rx_queue.store(rx_word(queue, base), Relaxed);
    }
}

#[test]
fn a_quiet_queue_goes_on_where_it_is() {
    let dead = Dead::new();
    dead.queue(4, 0, 1);
    let c = dead.convert(4, CONNECTED, ANSWERED).unwrap();
    assert_eq!((c.taken, c.number, c.in_socket), (CONNECTED, 1, 0));
    assert!(c.unread.is_empty() && c.commands.is_empty() && c.data.is_none());
    // Counters that the records do not explain.
    assert!(dead.convert(4, CONNECTED + 1, ANSWERED).is_err());
    assert!(dead.convert(4, CONNECTED, ANSWERED + 1).is_err());
    assert!(dead.convert(4, CONNECTED, ANSWERED - 1).is_err());
    // Only the Connect is recorded before it is read, and then nothing is read.
    assert_eq!(dead.convert(4, 0, ANSWERED).unwrap().in_socket, CONNECTED);
    assert!(dead.convert(4, 5, ANSWERED).is_err());
}

#[test]
fn a_command_that_is_recorded_is_taken() {
    let dead = Dead::new();
    dead.queue(4, 0, 1);
    let end = CONNECTED + 72 + 4096;
    dead.command(4, 2, 2, end, block_write(17, 8));
    // Death before the stream's position was stored.
    let c = dead.convert(4, end, ANSWERED).unwrap();
    assert_eq!((c.taken, c.number), (end, 2));
    let fenced = FenceSet::None;
    assert_eq!(c.commands[0].1, Next::Begin { fenced });
    assert_eq!(c.commands[0].0.buffer, Some(buffer(4 * 256 + 2)));
    // At most one command can be ahead.
    dead.command(4, 3, 3, end + 72, block_write(18, 9));
    assert!(dead.convert(4, end + 72, ANSWERED).is_err());
    let record = &dead.region.queues()[4];
    record.number.store(2, Relaxed);
    record.taken.store(end, Relaxed);
    assert_eq!(dead.convert(4, end + 72, ANSWERED).unwrap().number, 3);
    // Unread bytes cannot be taken.
    assert!(dead.convert(4, end + 71, ANSWERED).is_err());
}

#[test]
fn unread_bytes_are_kept_or_in_the_receive_buffer() {
    let mut dead = Dead::new();
    dead.queue(4, 0, 1);
    let stream = |at: u64| at as u8 ^ 0x5a;
    let bytes = |from: u64, len: u64| (from..from + len).map(stream).collect::<Vec<u8>>();
    let record = &dead.region.queues()[4];
    record.kept_at[1].store(CONNECTED - 10, Relaxed);
    record.kept.store(
        Kept {
            which: 1,
            bytes: 30,
        }
        .word(),
        Relaxed,
    );
    let kept_at = crate::memory::keep_at(4, 1).unwrap();
    dead.bytes.insert(kept_at, bytes(CONNECTED - 10, 30));
    let c = dead.convert(4, CONNECTED + 20, ANSWERED).unwrap();
    assert_eq!(c.unread, bytes(CONNECTED, 20));
    // A later receive would have its own record.
    assert!(dead.convert(4, CONNECTED + 50, ANSWERED).is_err());
    dead.receives(4, CONNECTED + 20);
    let received_at = crate::memory::receive_buffer_at(0).unwrap()
        + forebay_xlate::boundary::region::RECEIVE_AT as u64;
    dead.bytes.insert(received_at, bytes(CONNECTED + 20, 30));
    let c = dead.convert(4, CONNECTED + 50, ANSWERED).unwrap();
    assert_eq!(c.unread, bytes(CONNECTED, 50));
    // The buffer held another queue's bytes, or may have.
    dead.receives(5, CONNECTED + 20);
    assert!(dead.convert(4, CONNECTED + 50, ANSWERED).is_err());
    let reactor = &dead.region.reactors()[0];
    for bit in 0..64 {
        for word in [&reactor.rx_base, &reactor.rx_queue] {
            dead.receives(4, CONNECTED + 20);
            word.fetch_xor(1 << bit, Relaxed);
            assert!(dead.convert(4, CONNECTED + 50, ANSWERED).is_err(), "{bit}");
        }
    }
}

#[test]
fn answers_are_sent_as_far_as_the_kernel_took_them() {
    let mut dead = Dead::new();
    dead.queue(4, 0, 1);
    let mut end = CONNECTED;
    for slot in 0..3u16 {
        end += 72;
        dead.command(4, slot, 2 + u64::from(slot), end, block_write(slot, 8));
    }
    let record = &dead.region.queues()[4];
    record.number.store(4, Relaxed);
    record.taken.store(end, Relaxed);
    dead.answer(4, ANSWERED, 1, 4096);
    dead.answer(4, ANSWERED + 24 + 4096, 0, 0);
    let last = ANSWERED + 24 + 4096 + 24;
    let becomes = |accepted: u64| -> Vec<(u16, Next)> {
        let c = dead.convert(4, end, accepted).unwrap();
        c.commands.iter().map(|(c, next)| (c.slot, *next)).collect()
    };
    let again = Next::Begin {
        fenced: FenceSet::None,
    };
    use Next::Answered;
    assert_eq!(
        becomes(ANSWERED),
        [(0, Answered), (1, Answered), (2, again)]
    );
    assert_eq!(
        becomes(ANSWERED + 30),
        [(0, Answered), (1, Answered), (2, again)]
    );
    assert_eq!(becomes(ANSWERED + 24 + 4096), [(0, Answered), (2, again)]);
    assert_eq!(becomes(last), [(2, again)]);
    let c = dead.convert(4, end, ANSWERED + 30).unwrap();
    assert_eq!((c.sent.items, c.sent.skip, c.sent.published), (0, 30, last));
    assert!(dead.convert(4, end, last + 1).is_err());
    // The slot of a sent answer may be free, that of an unsent one may not.
    dead.region.commands(4)[1].state.store(0, Relaxed);
    assert!(dead.convert(4, end, last - 1).is_ok());
    assert!(dead.convert(4, end, ANSWERED + 30).is_err());
}

#[test]
fn data_that_was_asked_for_goes_on() {
    let dead = Dead::new();
    dead.queue(4, 0, 1);
    let end = CONNECTED + 72;
    let command = dead.command(4, 2, 2, end, block_write(17, 8));
    let asked = Asked::Whole(0);
    command.asked.store(asked.word(), Relaxed);
    command.asked_at.store(ANSWERED, Relaxed);
    let state = CommandState::taken(2).with_stage(CommandStage::Asked);
    command.state.store(state.0, Relaxed);
    let record = &dead.region.queues()[4];
    record.number.store(2, Relaxed);
    record.taken.store(end, Relaxed);
    let c = dead.convert(4, end, ANSWERED).unwrap();
    assert_eq!(c.commands[0].1, Next::Data { asked, r2ts: 1 });
    // Its R2T was not published: it is sent again, without a buffer.
    command.asked_at.store(ANSWERED + 24, Relaxed);
    let c = dead.convert(4, end, ANSWERED).unwrap();
    let fenced = FenceSet::None;
    assert_eq!(c.commands[0].1, Next::Begin { fenced });
    assert_eq!(c.commands[0].0.buffer, None);
    command.asked_at.store(ANSWERED, Relaxed);

    // All data came, and only the stream's position shows it.
    command.asked.store(Asked::Whole(4096).word(), Relaxed);
    let c = dead.convert(4, end, ANSWERED).unwrap();
    assert_eq!(c.commands[0].1, Next::Begin { fenced });
    assert_eq!(c.commands[0].0.buffer, Some(buffer(4 * 256 + 2)));
    command.asked.store(asked.word(), Relaxed);

    // In the middle of a PDU's data, read straight into the buffer.
    let data = InData {
        begin: end + 24,
        end: end + 24 + 4096 + 4,
        slot: 2,
        offset_bytes: 0,
        digest: true,
    };
    record.put_data(&data);
    record.taken.store(data.begin + 100, Relaxed);
    dead.receives(4, data.begin + 4096);
    let c = dead.convert(4, data.begin + 700, ANSWERED).unwrap();
    assert_eq!((c.taken, c.data), (data.begin + 700, Some(data)));
    let c = dead.convert(4, data.end - 2, ANSWERED).unwrap();
    assert_eq!((c.taken, c.unread.len()), (data.end - 4, 2));
    // All data of a PDU came without a record: none is waited for.
    for len in [2048, 4096] {
        let data = InData {
            end: data.begin + len,
            digest: false,
            ..data
        };
        record.put_data(&data);
        dead.receives(4, data.end);
        let c = dead.convert(4, data.end, ANSWERED).unwrap();
        assert_eq!((c.taken, c.data), (data.end, None));
        let goes_on = Next::Data {
            asked: Asked::Whole(2048),
            r2ts: 1,
        };
        let wanted = [goes_on, Next::Begin { fenced }];
        assert_eq!(c.commands[0].1, wanted[usize::from(len == 4096)]);
    }
    record.put_data(&data);
    dead.receives(4, data.begin + 4096);
    // All data came, and the command's record shows it.
    command.state.store(CommandState::taken(2).0, Relaxed);
    let c = dead.convert(4, data.end, ANSWERED).unwrap();
    assert_eq!((c.taken, c.data), (data.end, None));
    // Data of a missing command.
    command.state.store(0, Relaxed);
    assert!(dead.convert(4, data.end, ANSWERED).is_err());
}

#[test]
fn a_conflicts_answer_is_given_once() {
    let mut dead = Dead::new();
    dead.queue(4, 0, 1);
    let record = &dead.region.queues()[4];
    record.odd_number.store(2, Relaxed);
    record.odd_tx.store(ANSWERED + 24, Relaxed);
    record.odd_taken.store(CONNECTED + 72, Relaxed);
    let rx = crate::memory::receive_buffer_at(0).unwrap();
    assert!(rx > 0);
    dead.receives(4, CONNECTED);
    // Not published: it is taken again.
    let c = dead.convert(4, CONNECTED + 72, ANSWERED).unwrap();
    assert_eq!((c.taken, c.number, c.unread.len()), (CONNECTED, 1, 72));
    dead.answer(4, ANSWERED, NO_SLOT, 0);
    let c = dead.convert(4, CONNECTED + 72, ANSWERED).unwrap();
    assert_eq!((c.taken, c.number, c.unread.len()), (CONNECTED + 72, 2, 0));
}

#[test]
fn the_third_death_of_a_command_is_its_last() {
    let dead = Dead::new();
    dead.queue(4, 0, 1);
    let end = CONNECTED + 72;
    let command = dead.command(4, 2, 2, end, block_write(17, 8));
    let becomes = |blamed: Option<u16>| {
        let old = OldQueue::read(&dead.region, &dead, 4).unwrap();
        let facts = SocketFacts {
            consumed: end,
            accepted: ANSWERED,
        };
        let c = convert_queue(&old, &dead, facts, blamed).unwrap();
        (c.commands[0].0.state.attempts(), c.commands[0].1)
    };
    let fenced = FenceSet::None;
    assert_eq!(becomes(None), (0, Next::Begin { fenced }));
    assert_eq!(becomes(Some(3)), (0, Next::Begin { fenced }));
    assert_eq!(becomes(Some(2)), (1, Next::Begin { fenced }));
    let state = CommandState::taken(2).with_attempts(1).with_device(3);
    command.state.store(state.0, Relaxed);
    let fenced = FenceSet::One(DeviceIndex(3));
    assert_eq!(becomes(None), (1, Next::Begin { fenced }));
    assert_eq!(becomes(Some(2)), (2, Next::Poisoned));
}

fn summary(plan: &Plan) -> (Vec<u32>, Vec<(usize, Closing)>) {
    let queues = plan.controllers.iter().flat_map(|c| &c.queues);
    (queues.map(|q| q.old.queue).collect(), plan.closed.clone())
}

#[test]
fn an_association_lives_and_dies_as_a_whole() {
    let dead = Dead::new();
    dead.association(2, 10, 2);
    dead.association(5, 20, 1);
    let all = [10, 11, 12, 20, 21];
    let mut sockets = facts(&all, CONNECTED, ANSWERED);
    let made = plan(&dead.region, &dead, &sockets, None, &lanes(), 5);
    assert_eq!(summary(&made), (all.to_vec(), vec![]));
    // An ended I/O queue goes alone; an ended admin queue ends the association.
    sockets[2].1 = Err(NoFacts::Ended);
    sockets[3].1 = Err(NoFacts::Ended);
    let made = plan(&dead.region, &dead, &sockets, None, &lanes(), 5);
    let closed = vec![
        (2, Closing::Ended),
        (3, Closing::Ended),
        (4, Closing::NoAdmin),
    ];
    assert_eq!(summary(&made), (vec![10, 11], closed));
    assert!(!made.controllers[0].controller.io_queue_connected(2));
    assert!(made.controllers[0].controller.io_queue_connected(1));
    // A queue whose bytes killed the engine ends too.
    let sockets = facts(&all, CONNECTED, ANSWERED);
    let blamed = Some(Blamed::Queue {
        queue: 11,
        slot: None,
    });
    let made = plan(&dead.region, &dead, &sockets, blamed, &lanes(), 5);
    let mut closed = summary(&made);
    closed.1.sort();
    let blamed = [0, 1, 2].map(|at| (at, Closing::Blamed)).to_vec();
    assert_eq!(closed, (vec![20, 21], blamed));
    let made = plan(&dead.region, &dead, &sockets, None, &BTreeMap::new(), 5);
    assert!(made.controllers.is_empty());
    assert!(
        made.closed
            .iter()
            .all(|(_, why)| *why == Closing::NotServed)
    );
}

#[test]
fn sockets_without_records_are_newcomers_or_end() {
    let dead = Dead::new();
    let mut sockets = facts(&[1, 2, 3, 4], 0, 0);
    sockets[1].1 = Ok(SocketFacts {
        consumed: 128,
        accepted: 128,
    });
    sockets[2].1 = Err(NoFacts::Moving);
    let blamed = Some(Blamed::Handshake { socket: 1004 });
    let made = plan(&dead.region, &dead, &sockets, blamed, &lanes(), 5);
    assert_eq!(made.handshakes, [0]);
    let why = [Closing::Unrecorded, Closing::Unreadable, Closing::Blamed];
    let closed: Vec<_> = (1..).zip(why).collect();
    assert_eq!(made.closed, closed);
}

#[test]
fn an_ended_connection_leaves_orphan_writes() {
    let dead = Dead::new();
    dead.association(2, 10, 1);
    let end = CONNECTED + 72;
    let command = dead.command(11, 2, 2, end, block_write(17, 8));
    let sockets = facts(&[10, 11], CONNECTED, ANSWERED);
    let mut sockets_io_taken = sockets.clone();
    sockets_io_taken[1].1 = Ok(SocketFacts {
        consumed: end,
        accepted: ANSWERED,
    });
    let spans = |sockets: &[_]| {
        let made = plan(&dead.region, &dead, sockets, None, &lanes(), 5);
        let mut by_reactor = made.spans.by_reactor(2);
        // Spans without a command go to all reactors: the volume may move.
        let (one, other) = (by_reactor.remove(1), by_reactor.remove(0));
        let orphans = one.iter().filter(|s| s.command.is_none());
        assert!(other.iter().eq(orphans));
        one
    };
    let own = spans(&sockets_io_taken);
    assert_eq!((own.len(), own[0].bytes.clone()), (1, 8 * 4096..9 * 4096));
    assert!(own[0].command.is_some() && own[0].devices == FenceSet::None);
    // It reached a device, and its connection is damaged: fewer bytes were consumed than taken.
    let state = CommandState::taken(2).with_device(3);
    command.state.store(state.0, Relaxed);
    let left = spans(&sockets);
    assert_eq!((left.len(), left[0].bytes.clone()), (1, 8 * 4096..9 * 4096));
    assert_eq!(
        (left[0].command, left[0].devices),
        (None, FenceSet::One(DeviceIndex(3)))
    );
    // The record is damaged: the write may be anywhere.
    command.check.store(5, Relaxed);
    let left = spans(&sockets);
    assert_eq!((left.len(), left[0].bytes.clone()), (1, 0..u64::MAX));
    assert_eq!((left[0].command, left[0].devices), (None, FenceSet::ALL));
    // The volume is unknown, so every volume counts.
    dead.region.queues()[11].controller.store(77, Relaxed);
    assert_eq!(spans(&sockets).len(), 1);
}
