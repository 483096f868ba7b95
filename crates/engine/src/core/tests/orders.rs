//! No write lands after a later one, in any order of events.
//!
//! A run recovers some writes, starts them and others in any order, closes connections, passes
//! fences and releases operations, all at random. Each step checks the commands in flight.

use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 8;

#[derive(Clone, Debug)]
struct Range {
    first: u64,
    count: u64,
}

#[derive(Clone, Debug)]
enum Step {
    /// Starts the nth recovered write, unless it is started.
    Again(usize),
    /// A new write, of connection 1 or 2.
    New(Range, u32),
    Fence(u8),
    Close(u32),
    Hold,
    Release,
    Turns(usize),
}

fn range() -> impl Strategy<Value = Range> {
    (0..BLOCKS, 1..4u64).prop_map(|(first, count)| Range {
        first,
        count: count.min(BLOCKS - first),
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..6usize).prop_map(Step::Again),
        4 => (range(), 1..3u32).prop_map(|(range, queue)| Step::New(range, queue)),
        1 => (0..2u8).prop_map(Step::Fence),
        1 => (1..3u32).prop_map(Step::Close),
        1 => Just(Step::Hold),
        1 => Just(Step::Release),
        3 => (1..4usize).prop_map(Step::Turns),
    ]
}

/// A write; its number is its slot and its data.
struct Write {
    range: Range,
    queue: u32,
    /// `Some` if recovered; inside, the device whose fence it waits for.
    fence: Option<Option<u8>>,
    /// When its connection was closed.
    closed: Option<usize>,
    started: usize,
    status: Option<Status>,
}

struct Run {
    b: Bench,
    writes: BTreeMap<u16, Write>,
    fenced: BTreeSet<u8>,
    now: usize,
}

impl Run {
    fn start(&mut self, slot: u16) {
        let write = &self.writes[&slot];
        let op = IoOp::Write {
            offset_bytes: write.range.first * BLOCK,
            len_bytes: (write.range.count * BLOCK) as u32,
            fua: false,
        };
        let data = vec![slot as u8; (write.range.count * BLOCK) as usize];
        (self.b.queue, self.b.next_slot) = (write.queue, slot);
        assert_eq!(self.b.start(op, Some(&data)), slot);
    }

    fn turn(&mut self) {
        self.b.turn();
        while let Some(done) = self.b.core.next_done() {
            let write = self.writes.get_mut(&done.owner.slot).unwrap();
            assert_eq!(write.status.replace(done.status), None, "ended once");
            self.b.core.staging.release(done.buffer.unwrap());
        }
        self.check();
    }

    /// Commands in flight overlap only where they may.
    fn check(&self) {
        let slots: BTreeSet<u16> = (self.b.core.slices.iter())
            .map(|slice| self.b.core.slab[slice.io as usize].owner.slot)
            .collect();
        for (a, write) in slots.iter().map(|slot| (slot, &self.writes[slot])) {
            if let Some(Some(device)) = write.fence {
                assert!(self.fenced.contains(&device), "{a} goes before its fence");
            }
            for (other, left) in &self.writes {
                let waits = |device: u8| !self.fenced.contains(&device);
                let overlap = left.range.first < write.range.first + write.range.count
                    && write.range.first < left.range.first + left.range.count;
                let unfenced = left.fence.flatten().is_some_and(waits);
                assert!(
                    !(overlap && unfenced),
                    "{a} goes before the fence of {other}"
                );
            }
            for (other, second) in slots.range(a + 1..).map(|slot| (slot, &self.writes[slot])) {
                let (first, end) = (write.range.first, write.range.first + write.range.count);
                let from = second.range.first;
                if from >= end || from + second.range.count <= first {
                    continue;
                }
                let recovered = write.fence.is_some() || second.fence.is_some();
                assert!(!recovered, "{a} and {other} are in flight together");
                // Both are new, so neither was closed when the other started.
                for (one, two) in [(write, second), (second, write)] {
                    let late = one.closed.is_some_and(|at| at < two.started);
                    assert!(!late, "{a} and {other}: one was a closed connection's");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]
    #[test]
    fn nothing_overlaps_writes_that_may_still_land(
        recovered in proptest::collection::vec((range(), 0..3u8), 0..6),
        steps in proptest::collection::vec(step(), 0..60),
    ) {
        let mut b = unfenced("file");
        b.grant(0, 0, Rights::ReadWrite, 100);
        let mut run = Run { b, writes: BTreeMap::new(), fenced: BTreeSet::new(), now: 0 };
        let mut spans = Vec::new();
        for (slot, (range, fence)) in (1u16..).zip(&recovered) {
            let fence = (*fence < 2).then_some(*fence);
            let queue = 1 + u32::from(slot) % 2;
            spans.push(RecoveredSpan {
                volume: V,
                bytes: range.first * BLOCK..(range.first + range.count) * BLOCK,
                write: true,
                devices: fence.map_or(FenceSet::None, |d| FenceSet::One(DeviceIndex(d))),
                command: Some(CommandRef::new(queue, slot)),
            });
            let write = Write {
                range: range.clone(),
                queue,
                fence: Some(fence),
                closed: None,
                started: usize::MAX,
                status: None,
            };
            run.writes.insert(slot, write);
        }
        run.b.core.recovered.recover(&spans);
        let mut next = 100u16;
        for step in &steps {
            run.now += 1;
            let now = run.now;
            match step {
                Step::Again(n) => {
                    let slot = *n as u16 + 1;
                    let waits = |w: &&mut Write| w.started == usize::MAX && w.closed.is_none();
                    if let Some(write) = run.writes.get_mut(&slot).filter(waits) {
                        write.started = now;
                        run.start(slot);
                    }
                }
                Step::New(range, queue) => {
                    let write = Write {
                        range: range.clone(),
                        queue: *queue,
                        fence: None,
                        closed: None,
                        started: now,
                        status: None,
                    };
                    run.writes.insert(next, write);
                    run.start(next);
                    next += 1;
                }
                Step::Fence(device) => {
                    run.fenced.insert(*device);
                    run.b.core.fenced(DeviceIndex(*device));
                }
                Step::Close(queue) => {
                    run.b.core.recovered.orphan(*queue);
                    for write in run.writes.values_mut().filter(|w| w.queue == *queue) {
                        write.closed.get_or_insert(now);
                    }
                }
                Step::Hold => run.b.gate.hold(),
                Step::Release => run.b.gate.release(),
                Step::Turns(turns) => (0..*turns).for_each(|_| run.turn()),
            }
            run.check();
        }
        // All may continue; the last write must win.
        run.b.gate.release();
        for slot in 1..=recovered.len() as u16 {
            let write = run.writes.get_mut(&slot).unwrap();
            if write.started == usize::MAX && write.closed.is_none() {
                write.started = run.now;
                run.start(slot);
            }
        }
        for device in 0..2 {
            run.fenced.insert(device);
            run.b.core.fenced(DeviceIndex(device));
        }
        let open = |w: &Write| w.started != usize::MAX && w.status.is_none();
        for _ in crate::patience::patiently() {
            run.turn();
            if !run.writes.values().any(open) && !run.b.core.recovered.any() {
                break;
            }
        }
        prop_assert!(!run.writes.values().any(open) && !run.b.core.recovered.any());
        prop_assert_eq!(run.b.core.staging.out(), 0);
        for write in run.writes.values().filter(|w| w.started != usize::MAX) {
            let interrupted = Some(Status::COMMAND_INTERRUPTED);
            let closed = write.closed.is_some() && write.status == interrupted;
            prop_assert!(closed || write.status == Some(Status::SUCCESS), "{:?}", write.status);
        }
        for block in 0..BLOCKS {
            let here = |w: &&Write| {
                let end = w.range.first + w.range.count;
                (w.range.first..end).contains(&block) && w.status == Some(Status::SUCCESS)
            };
            let bytes = run.b.read(block * BLOCK, BLOCK as u32);
            let last = u16::from(bytes[0]);
            prop_assert!(bytes.iter().all(|b| *b == bytes[0]));
            let Some(write) = run.writes.get(&last) else {
                // No acknowledged write is lost.
                prop_assert_eq!(run.writes.values().filter(here).count(), 0);
                continue;
            };
            let later = |(slot, w): &(&u16, &Write)| here(w) && match (write.fence, w.fence) {
                (Some(_), Some(_)) => **slot > last,
                (Some(_), None) => true,
                (None, Some(_)) => false,
                // Begun after the other's connection was closed.
                (None, None) => write.closed.is_some_and(|at| at < w.started),
            };
            let later = run.writes.iter().find(later).map(|(slot, _)| *slot);
            prop_assert_eq!(later, None, "{} stays, and came before", last);
        }
    }
}
