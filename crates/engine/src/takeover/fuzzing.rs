//! Entry of the fuzz target: converts a dead engine's region with arbitrary changes.
//!
//! **Design.** The input changes raw words, whole commands and queues with correct checksums, and
//! the kernel's counters; then all is restored. Checked: no panic, one outcome per socket, valid
//! slots and lists, at most one whole-volume span per volume. **Not here:** the target (`fuzz/`
//! beside the crates).

use super::counters::{NoFacts, SocketFacts};
use super::dead::{ANSWERED, CONNECTED, Dead, block_write, facts, lanes};
use super::plan::plan;
use super::*;
use forebay_nvme::Sqe;
use forebay_nvme::io::{FUSE_FIRST, FUSE_SECOND};
use forebay_xlate::boundary::region::{
    CommandStage, CommandState, MAX_QUEUE_ENTRIES, QueueConstants,
};
use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;
use zerocopy::FromBytes;

const QUEUES: [u32; 9] = [10, 11, 12, 20, 21, 22, 30, 31, 32];
const COMMANDS: u16 = 8;
/// One change: kind, queue, place, and a value or a command.
const CHANGE_BYTES: usize = 12;

struct Template {
    dead: Dead,
    words: Vec<(usize, u64)>,
}

fn template() -> Template {
    let mut dead = Dead::new();
    for (slot, first) in [(2, 10), (5, 20), (6, 30)] {
        dead.association(slot, first, 2);
        for queue in first..first + 3 {
            let mut end = CONNECTED;
            for slot in 0..COMMANDS {
                end += 72;
                let number = 2 + u64::from(slot);
                let mut sqe = block_write(slot, number);
                // The last two are a pair.
                sqe.flags |= match slot {
                    6 => FUSE_FIRST,
                    7 => FUSE_SECOND,
                    _ => 0,
                };
                let command = dead.command(queue, slot, number, end, sqe);
                let taken = CommandState::taken(number);
                let state = match slot {
                    2 => taken.with_device(1),
                    3 => taken.with_stage(CommandStage::Asked),
                    5 => {
                        dead.ask_in_parts(queue, slot, 300 << 10, [1024, 32768, 5, 0]);
                        continue;
                    }
                    7 => taken.with_device(1).with_stage(CommandStage::Passed),
                    _ => continue,
                };
                command.state.store(state.0, Relaxed);
            }
            let record = &dead.region.queues()[queue as usize];
            record.number.store(u64::from(COMMANDS) + 1, Relaxed);
            record.taken.store(end, Relaxed);
            dead.answer(queue, ANSWERED, 1, 100);
            dead.answer(queue, ANSWERED + 124, 0, 0);
        }
    }
    let lane = &dead.region.lanes()[3];
    lane.export.store(1 + 1, Relaxed);
    lane.volume.store(9, Relaxed);
    let mut used = Vec::new();
    {
        let region = &dead.region;
        let mut add = |at: usize, bytes: usize| used.extend((at..at + bytes).step_by(8));
        let base = place(region, region.header());
        // Not magic and version: other layouts are refused before.
        add(base + 16, 112);
        add(place(region, region.reactors()), 2 * 128);
        add(place(region, lane), 32);
        for slot in [2, 5, 6] {
            add(place(region, &region.controllers()[slot]), 64 + 2 * 480);
        }
        for queue in QUEUES {
            let queue = queue as usize;
            let record = &region.queues()[queue];
            add(place(region, record), size_of_val(record));
            let commands = &region.commands(queue)[..8];
            add(place(region, commands), size_of_val(commands));
            let items = &region.items(queue)[..4];
            add(place(region, items), size_of_val(items));
        }
    }
    let words = used
        .into_iter()
        .map(|at| (at, word(&dead.region, at).load(Relaxed)))
        .collect();
    Template { dead, words }
}

/// Offset of a table in the region.
fn place<T: ?Sized>(region: &Region, table: &T) -> usize {
    let base = std::ptr::from_ref(region.header()).addr();
    std::ptr::from_ref(table).cast::<u8>().addr() - base
}

fn word(region: &Region, at: usize) -> &AtomicU64 {
    let cells = region.memory().cells::<AtomicU64>(at, 1);
    &cells.expect("within the region")[0]
}

impl Template {
    /// Carries out a change; returns the rest of the input.
    fn change<'a>(
        &self,
        input: &'a [u8],
        sockets: &mut [(u64, Result<SocketFacts, NoFacts>)],
        blamed: &mut Option<Blamed>,
    ) -> Option<&'a [u8]> {
        let (change, mut rest) = input.split_at_checked(CHANGE_BYTES)?;
        let which = usize::from(u16::from_le_bytes([change[2], change[3]]));
        let value = u64::from_le_bytes(change[4..].try_into().ok()?);
        let of = usize::from(change[1]) % QUEUES.len();
        let queue = QUEUES[of];
        let record = &self.dead.region.queues()[queue as usize];
        let any = word(&self.dead.region, self.words[which % self.words.len()].0);
        match change[0] % 9 {
            0 => any.store(value, Relaxed),
            1 => _ = any.fetch_xor(1 << (value % 64), Relaxed),
            2 => _ = any.fetch_add(value as i8 as u64, Relaxed),
            3 => {
                // As its host could have sent it.
                let (sqe, after) = rest.split_at_checked(64)?;
                rest = after;
                let sqe = Sqe::read_from_bytes(sqe).ok()?;
                let slot = which as u16 % 8;
                let number = u64::from(slot) + 2;
                let command = self.dead.command(queue, slot, number, value, sqe);
                if change[1] & 0x80 != 0 {
                    let state = CommandState::taken(number).with_device(change[1] & 3);
                    command.state.store(state.0, Relaxed);
                }
            }
            4 => {
                let key = self.dead.region.header().key.load(Relaxed);
                let constants = record.constants(key, queue)?;
                let constants = match which % 4 {
                    0 => QueueConstants {
                        socket: value % 64 + 1000,
                        ..constants
                    },
                    1 => QueueConstants {
                        params: value,
                        ..constants
                    },
                    2 => QueueConstants {
                        controller: value as u32 % 8,
                        ..constants
                    },
                    _ => QueueConstants {
                        keep: value as u32,
                        reactor: (value >> 32) as u32,
                        ..constants
                    },
                };
                record.put_constants(key, queue, &constants);
            }
            5 => {
                let consumed = value % 8192;
                let accepted = value >> 32 & 0xffff;
                sockets[of].1 = Ok(SocketFacts { consumed, accepted });
            }
            6 => sockets[of].1 = Err(NoFacts::Ended),
            7 => {
                *blamed = Some(Blamed::Queue {
                    queue,
                    slot: (value % 8 != 7).then_some(which as u16 % 8),
                });
            }
            _ => {
                _ = self.dead.region.queues()[which % 64]
                    .used
                    .swap(value % 5, Relaxed)
            }
        }
        Some(rest)
    }

    fn put_back(&self) {
        for (at, value) in &self.words {
            word(&self.dead.region, *at).store(*value, Relaxed);
        }
        for (queue, record) in (0..).zip(&self.dead.region.queues()[..64]) {
            if !QUEUES.contains(&queue) {
                record.used.store(0, Relaxed);
            }
        }
    }
}

/// Converts a dead engine's region with the input's changes.
pub fn region(input: &[u8]) {
    thread_local! {
        static TEMPLATE: Template = template();
    }
    TEMPLATE.with(|template| {
        let end = CONNECTED + u64::from(COMMANDS) * 72;
        let mut sockets = facts(&QUEUES, end, ANSWERED + 50);
        let mut blamed = None;
        let mut rest = input;
        while let Some(after) = template.change(rest, &mut sockets, &mut blamed) {
            rest = after;
        }
        let dead = &template.dead;
        let made = plan(&dead.region, dead, &sockets, blamed, &lanes(), 5);
        let mut fates = Vec::new();
        for queue in made.controllers.iter().flat_map(|c| &c.queues) {
            fates.push(queue.socket);
            let slots: BTreeSet<u16> = queue.commands().map(|(c, _)| c.slot).collect();
            assert_eq!(slots.len(), queue.commands().count());
            assert!(slots.iter().all(|s| usize::from(*s) < MAX_QUEUE_ENTRIES));
            let items = queue.old.items.items.len();
            assert!(queue.converted.sent.items <= items);
        }
        fates.extend(made.closed.iter().map(|c| c.0));
        fates.extend(&made.handshakes);
        fates.sort_unstable();
        assert!(fates.into_iter().eq(0..sockets.len()), "one fate each");
        let after = made.spans.by_reactor(2);
        for spans in &after {
            let whole = spans.iter().filter(|s| s.bytes == (0..u64::MAX));
            let volumes: BTreeSet<_> = whole.clone().map(|s| s.volume).collect();
            assert_eq!(volumes.len(), whole.count(), "one for all of a volume");
        }
        template.put_back();
    });
}

#[cfg(test)]
#[test]
fn the_template_is_sound_and_put_back() {
    let dead = template().dead;
    let end = CONNECTED + u64::from(COMMANDS) * 72;
    let sockets = facts(&QUEUES, end, ANSWERED + 50);
    let made = plan(&dead.region, &dead, &sockets, None, &lanes(), 5);
    assert_eq!(made.closed.len(), 0, "{:?}", made.closed);
    let next: Vec<Next> = (made.controllers[0].queues[1].commands())
        .map(|(_, next)| *next)
        .collect();
    assert!(matches!(next[5], Next::Data { r2ts: 3, .. }), "{next:?}");
    assert!(matches!(next[7], Next::Passed { .. }), "{next:?}");
    let mut input = Vec::new();
    for i in 0..4000u32 {
        input.extend_from_slice(&i.wrapping_mul(0x9e37_79b9).to_le_bytes());
        if i % 50 == 0 {
            region(&input);
            input.clear();
        }
    }
}
