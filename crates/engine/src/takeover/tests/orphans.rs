//! Spans of connections with damaged records, and freed slots.

use super::*;
use crate::associations::Associations;
use crate::core::RecoveredSpan;
use crate::exports::ExportTable;
use crate::memory::Memory;
use crate::takeover::install::install;

type Sockets = Vec<(u64, Result<SocketFacts, NoFacts>)>;

/// As [`Dead::association`], with a write in slot 2 of queue 11 that was given to device 3.
fn with_a_write() -> (Dead, Sockets) {
    let dead = Dead::new();
    dead.association(2, 10, 1);
    let end = CONNECTED + 72;
    let command = dead.command(11, 2, 2, end, block_write(17, 8));
    let state = CommandState::taken(2).with_device(3);
    command.state.store(state.0, Relaxed);
    let mut sockets = facts(&[10, 11], CONNECTED, ANSWERED);
    sockets[1] = facts(&[11], end, ANSWERED)[0];
    (dead, sockets)
}

fn everything(volume: u64) -> RecoveredSpan {
    RecoveredSpan {
        volume: VolumeId(volume),
        bytes: 0..u64::MAX,
        write: true,
        devices: FenceSet::ALL,
        command: None,
    }
}

#[test]
fn an_export_that_is_not_served_leaves_its_volume() {
    let (dead, sockets) = with_a_write();
    let lane = &dead.region.lanes()[3];
    lane.export.store(1 + 1, Relaxed);
    lane.volume.store(9, Relaxed);
    let spans = || plan(&dead.region, &dead, &sockets, None, &BTreeMap::new(), 5).spans;
    assert!(!spans().after_fence);
    // Any reactor may serve the volume next.
    assert_eq!(spans().by_reactor(2), [[everything(9)], [everything(9)]]);
    // The lane belongs to another export now: it may be any volume.
    lane.export.store(2 + 1, Relaxed);
    assert!(spans().after_fence);
    assert_eq!(spans().by_reactor(1), [[everything(9)]]);
}

#[test]
fn a_command_that_makes_no_sense_now_leaves_its_volume() {
    let (dead, sockets) = with_a_write();
    let end = CONNECTED + 72;
    // It continues, and gets an error; but it was at a device.
    let command = dead.command(11, 2, 2, end, block_write(17, BLOCKS));
    let state = CommandState::taken(2).with_device(3);
    command.state.store(state.0, Relaxed);
    let made = plan(&dead.region, &dead, &sockets, None, &lanes(), 5);
    assert_eq!(summary(&made).0, [10, 11]);
    assert_eq!(made.spans.by_reactor(2)[1], [everything(9)]);
    // Otherwise there is nothing to wait for.
    let state = CommandState::taken(2);
    command.state.store(state.0, Relaxed);
    let made = plan(&dead.region, &dead, &sockets, None, &lanes(), 5);
    assert!(made.spans.by_reactor(2)[1].is_empty());
}

#[test]
fn a_write_still_without_an_r2t_blocks_no_other_command() {
    let (dead, sockets) = with_a_write();
    let command = &dead.region.commands(11)[2];
    command.state.store(CommandState::taken(2).0, Relaxed);
    command.buffer.store(0, Relaxed);
    let made = plan(&dead.region, &dead, &sockets, None, &lanes(), 5);
    assert_eq!(summary(&made).0, [10, 11]);
    assert!(made.spans.by_reactor(2)[1].is_empty());
}

/// Many damaged records give one span per volume.
#[test]
fn damage_everywhere_leaves_one_span_for_each_volume() {
    let dead = Dead::new();
    for queue in 0..64 {
        dead.queue(queue, 0, 1);
        dead.region.queues()[queue as usize]
            .controller
            .store(u64::MAX, Relaxed);
        for command in dead.region.commands(queue as usize) {
            command.state.store(u64::MAX, Relaxed);
        }
    }
    for (lane, record) in dead.region.lanes().iter().enumerate() {
        record.export.store(u64::MAX, Relaxed);
        record.volume.store(lane as u64 % 5 + 8, Relaxed);
    }
    let made = plan(&dead.region, &dead, &[], None, &lanes(), 5);
    let all: Vec<RecoveredSpan> = (8..13).map(everything).collect();
    assert_eq!(made.spans.by_reactor(2), [all.clone(), all]);
}

#[test]
fn a_slot_that_is_being_taken_is_not_yet_anybodys() {
    let dead = Dead::new();
    dead.association(2, 10, 1);
    // It has its former user's constants, whose socket is being closed.
    dead.queue(12, 2, 2);
    let mut sockets = facts(&[10, 11, 12], CONNECTED, ANSWERED);
    let used = &dead.region.queues()[12].used;
    for (state, facts) in [
        (queue_use::MADE, Err(NoFacts::Ended)),
        (queue_use::FREE, Err(NoFacts::Ended)),
        // Freed before anything was read.
        (
            queue_use::FREE,
            Ok(SocketFacts {
                consumed: 0,
                accepted: 128,
            }),
        ),
    ] {
        used.store(state, Relaxed);
        sockets[2].1 = facts;
        let made = plan(&dead.region, &dead, &sockets, None, &lanes(), 5);
        assert_eq!(summary(&made).0, [10, 11]);
    }
    // Consumed bytes show that it was in use.
    for state in [queue_use::MADE, queue_use::FREE] {
        used.store(state, Relaxed);
        sockets[2].1 = sockets[1].1;
        let made = plan(&dead.region, &dead, &sockets, None, &lanes(), 5);
        assert!(summary(&made).0.is_empty());
    }
}

#[test]
fn queue_parameters_are_validated_before_recovery() {
    let dead = Dead::new();
    dead.association(2, 10, 1);
    let record = &dead.region.queues()[11];
    let constants = record.constants(dead.key(), 11).unwrap();
    let odd = QueueConstants {
        params: 0xff,
        ..constants
    };
    record.put_constants(dead.key(), 11, &odd);
    let sockets = facts(&[10, 11], CONNECTED, ANSWERED);
    let made = plan(&dead.region, &dead, &sockets, None, &lanes(), 5);
    assert!(summary(&made).0.is_empty());
}

/// A refused handshake must not be judged again.
#[test]
fn a_newcomer_that_was_answered_ends() {
    let dead = Dead::new();
    let mut sockets = facts(&[1, 2, 3], 0, 0);
    for (socket, accepted) in sockets.iter_mut().zip([0, 128, 152]) {
        let consumed = 0;
        socket.1 = Ok(SocketFacts { consumed, accepted });
    }
    let made = plan(&dead.region, &dead, &sockets, None, &lanes(), 5);
    assert_eq!(made.handshakes, [0, 1]);
    assert_eq!(made.closed, [(2, Closing::Unrecorded)]);
}

/// The bytes of slot 3 of queue 11 are missing.
struct Torn<'a>(&'a Dead);

impl OldBytes for Torn<'_> {
    fn read(&self, place: u64, out: &mut [u8]) -> Option<()> {
        let missing = buffer(11 * 256 + 3).offset_bytes;
        (place != missing).then(|| self.0.read(place, out))?
    }
}

/// A queue without room leaves nothing in its slot.
#[test]
fn a_queue_that_fails_half_way_leaves_no_commands() {
    let (dead, mut sockets) = with_a_write();
    let end = CONNECTED + 144;
    dead.command(11, 3, 3, end, block_write(18, 9));
    let record = &dead.region.queues()[11];
    record.number.store(3, Relaxed);
    record.taken.store(end, Relaxed);
    sockets[1] = facts(&[11], end, ANSWERED)[0];
    let planned = plan(&dead.region, &dead, &sockets, None, &lanes(), 5);
    assert_eq!(summary(&planned).0, [10, 11]);
    let fds: Vec<_> = (sockets.iter())
        .map(|(number, _)| {
            let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC);
            (*number, Arc::new(fd.unwrap()))
        })
        .collect();
    let region = Region::anonymous(8).unwrap();
    let new = Successor {
        region: &region,
        memory: Memory::create().unwrap(),
        reactors: 2,
        lanes: &lanes(),
        exports: &ExportTable::default(),
        associations: &Associations::default(),
    };
    let inheritance = install(planned, &Torn(&dead), &fds, new);
    assert_eq!((inheritance.queues, inheritance.closed.len()), (0, 2));
    for queue in [10, 11] {
        assert_eq!(region.queues()[queue].used.load(Relaxed), queue_use::FREE);
        let all = region.commands(queue).iter();
        assert!(all.clone().all(|c| c.state.load(Relaxed) == 0));
    }
}

#[test]
fn a_socket_that_two_queues_name_ends_once() {
    let dead = Dead::new();
    dead.association(2, 10, 2);
    let record = &dead.region.queues()[12];
    let constants = record.constants(dead.key(), 12).unwrap();
    let twin = QueueConstants {
        socket: 1011,
        ..constants
    };
    record.put_constants(dead.key(), 12, &twin);
    let sockets = facts(&[10, 11], CONNECTED, ANSWERED);
    let made = plan(&dead.region, &dead, &sockets, None, &lanes(), 5);
    let mut closed: Vec<usize> = made.closed.iter().map(|c| c.0).collect();
    closed.sort_unstable();
    assert_eq!(closed, [0, 1]);
}
