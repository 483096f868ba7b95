//! The order rules of NVMe with one queue on several reactors, against a model.
//!
//! **Design.** Random commands on few blocks; random turns, closes and interrupts; reproducible.
//! For each block the model keeps its writes: start, end (or close of the connection), and whether
//! it may have failed. A block may hold any write that no other one certainly follows. A write
//! follows if it began after the first had ended, or, with a compare-and-write, after it had begun.
//! At the end power fails: writes that ended before a successful flush began must be there.

use super::*;
use forebay_device::power;
use forebay_qos::budget::Budget;
use std::collections::BTreeMap;

const BLOCKS: u64 = 24;
const SLOTS: u16 = 100;

#[derive(Clone, Copy, Debug)]
struct Written {
    slot_number: u64,
    value: u32,
    from: u64,
    /// When its end was known.
    until: Option<u64>,
    pair: bool,
    /// It may have failed.
    perhaps: bool,
}

impl Written {
    /// Whether it certainly follows `before`.
    fn follows(&self, before: &Written) -> bool {
        before.until.is_some_and(|until| self.from > until)
            || (self.pair || before.pair) && self.from > before.from
    }
}

enum What {
    Read { block: u64, blocks: u64 },
    Write { block: u64, blocks: u64 },
    Pair { block: u64, expected: u32 },
    Flush,
}

struct Command {
    what: What,
    /// When it began; also its number.
    from: u64,
    queue: u32,
    value: u32,
    /// Its end no longer orders later commands.
    closed: bool,
}

struct Run {
    t: Two,
    random: fastrand::Rng,
    now: u64,
    queue: u32,
    value: u32,
    hand: BTreeMap<(u32, u16), Command>,
    /// Most commands at once.
    most: usize,
    /// The test's clock, which advances by steps and during waits for a budget.
    clock_ns: Option<u64>,
    blocks: Vec<Vec<Written>>,
    /// Start of the last successful flush.
    flushed: u64,
    pairs: [u32; 2],
}

fn pattern(value: u32) -> [u8; 4096] {
    let mut bytes = [0; 4096];
    for word in bytes.chunks_exact_mut(4) {
        word.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// The value that fills a block.
fn value_of(bytes: &[u8]) -> Option<u32> {
    let value = u32::from_le_bytes(bytes[..4].try_into().unwrap());
    (bytes == pattern(value)).then_some(value)
}

impl Run {
    fn new(kind: &str, spread: Spread, seed: u64) -> Self {
        Self {
            t: two(kind, spread),
            random: fastrand::Rng::with_seed(seed),
            now: 1,
            queue: 0,
            value: 0,
            hand: BTreeMap::new(),
            most: 40,
            clock_ns: None,
            blocks: vec![vec![]; BLOCKS as usize],
            flushed: 0,
            pairs: [0; 2],
        }
    }

    /// Values that a block may hold for a command that began at `before`.
    fn candidates(&self, block: u64, before: u64) -> Vec<u32> {
        let of_block = &self.blocks[block as usize];
        let older = || of_block.iter().filter(move |w| w.from < before);
        let mut all: Vec<u32> = older()
            .filter(|w| !older().any(|o| !o.perhaps && o.follows(w)))
            .map(|w| w.value)
            .collect();
        if older().all(|w| w.perhaps || w.until.is_none_or(|until| until > before) && !w.pair) {
            all.push(0);
        }
        all
    }

    /// Whether no write of the block was at its device since then.
    fn is_quiet(&self, block: u64, since: u64) -> bool {
        let of_block = &self.blocks[block as usize];
        of_block
            .iter()
            .all(|w| w.until.is_some_and(|until| until < since))
    }

    fn pass(&mut self) {
        if let Some(clock_ns) = &mut self.clock_ns {
            *clock_ns += 20_000;
            self.t.b.core.clock.set_clock_ns(*clock_ns);
            self.t.other.clock.set_clock_ns(*clock_ns);
        }
    }

    fn begin(&mut self) {
        for _ in crate::patience::patiently() {
            if self.hand.len() < self.most {
                break;
            }
            if self.t.b.core.qos.throttled.count > 0 {
                self.pass();
            }
            self.t.turn_other();
            self.t.b.turn();
            self.take_ended();
        }
        let slot = (0..SLOTS).find(|slot| !self.hand.contains_key(&(self.queue, *slot)));
        let slot = slot.expect("no more are in hand");
        self.now += 1;
        let (from, queue) = (self.now, self.queue);
        let block = self.random.u64(..BLOCKS);
        let blocks = (1 + self.random.u64(..6)).min(BLOCKS - block);
        let dice = self.random.u64(..100);
        self.value += 1;
        let value = self.value;
        let (what, op) = match dice {
            0..40 => (What::Write { block, blocks }, write(block, blocks)),
            40..80 => (What::Read { block, blocks }, read(block, blocks)),
            80..88 => (What::Flush, IoOp::Flush),
            _ => {
                // Expects the present value, or a wrong one.
                let found = self.candidates(block, from);
                let at = self.random.usize(..found.len() + 1);
                let expected = found.get(at).copied().unwrap_or(u32::MAX);
                let op = IoOp::CompareAndWrite {
                    offset_bytes: block * BLOCK,
                    len_bytes: BLOCK as u32,
                    fua: false,
                };
                (What::Pair { block, expected }, op)
            }
        };
        let mut buffer = match op.len_bytes() {
            0 => None,
            len => Some(self.t.b.core.staging.allocate(len as u32).unwrap()),
        };
        if op.writes()
            && let Some(buffer) = &mut buffer
        {
            let blocks = buffer.as_mut_slice().chunks_exact_mut(BLOCK as usize);
            blocks.for_each(|b| b.copy_from_slice(&pattern(value)));
        }
        let new = NewIo {
            owner: Issuer {
                frontend: FrontendIndex(0),
                conn: queue,
                conn_generation: 0,
                slot,
            },
            lane: LANE,
            op,
            buffer,
            record: CommandRef::new(queue, slot),
            over_ns: None,
        };
        self.t.b.core.begin_turn();
        let written = |pair| Written {
            slot_number: from,
            value,
            from,
            until: None,
            pair,
            perhaps: pair,
        };
        let started = match &what {
            What::Pair { block, expected } => {
                self.blocks[*block as usize].push(written(true));
                let bytes = pattern(*expected);
                let expected = Expected {
                    bytes: &bytes,
                    durable: dice > 97,
                };
                self.t.b.core.start_comparing(new, expected)
            }
            What::Write { block, blocks } => {
                let all = &mut self.blocks[*block as usize..(*block + *blocks) as usize];
                all.iter_mut().for_each(|b| b.push(written(false)));
                self.t.b.core.start(new)
            }
            _ => self.t.b.core.start(new),
        };
        assert!(started.is_ok(), "there is room");
        let command = Command {
            what,
            from,
            queue,
            value,
            closed: false,
        };
        self.hand.insert((queue, slot), command);
    }

    fn take_ended(&mut self) {
        while let Some(done) = self.t.b.core.next_done() {
            self.now += 1;
            let key = (done.owner.conn, done.owner.slot);
            let command = self.hand.remove(&key).expect("it was in hand, once");
            self.ended(&command, &done);
            self.t
                .b
                .core
                .recovered
                .pair_answered(CommandRef::new(key.0, key.1));
            if let Some(buffer) = done.buffer {
                self.t.b.core.staging.release(buffer);
            }
        }
    }

    fn ended(&mut self, command: &Command, done: &DoneIo) {
        let (now, ok) = (self.now, done.status == Status::SUCCESS);
        let retry = done.status == Status::COMMAND_INTERRUPTED;
        let (block, blocks) = match command.what {
            What::Flush => {
                assert!(ok || retry, "{:?}", done.status);
                if ok {
                    self.flushed = self.flushed.max(command.from);
                }
                return;
            }
            What::Read { block, blocks } => {
                assert!(ok || retry, "{:?}", done.status);
                let bytes = done.buffer.as_ref().unwrap().as_slice();
                for (at, bytes) in (block..block + blocks).zip(bytes.chunks_exact(4096)) {
                    if ok && self.is_quiet(at, command.from) {
                        let found = value_of(bytes).expect("a whole block");
                        let may = self.candidates(at, command.from);
                        assert!(may.contains(&found), "block {at}: {found}, not {may:?}");
                    }
                }
                return;
            }
            What::Write { block, blocks } => {
                assert!(ok || retry, "{:?}", done.status);
                (block, blocks)
            }
            What::Pair { block, expected } => {
                let may = self.candidates(block, command.from);
                let differs = done.status == Status::COMPARE_FAILURE;
                assert!(ok || retry || differs, "{:?}", done.status);
                if ok {
                    assert!(may.contains(&expected), "{expected} is not of {may:?}");
                } else if differs {
                    assert!(may.iter().any(|m| *m != expected), "only {may:?}");
                }
                self.pairs[usize::from(ok)] += 1;
                if differs {
                    self.blocks[block as usize].retain(|w| w.slot_number != command.from);
                }
                (block, 1)
            }
        };
        for of_block in &mut self.blocks[block as usize..(block + blocks) as usize] {
            let own = of_block
                .iter_mut()
                .filter(|w| w.slot_number == command.from);
            for written in own {
                written.until.get_or_insert(now);
                written.perhaps = !ok;
                assert_eq!(written.value, command.value);
            }
        }
    }

    /// Closes a connection; the next one's commands are not overtaken.
    fn close(&mut self) {
        self.now += 1;
        self.t.b.core.recovered.orphan(self.queue);
        let now = self.now;
        for command in self.hand.values_mut().filter(|c| c.queue == self.queue) {
            command.closed = true;
            for written in self.blocks.iter_mut().flatten() {
                if written.slot_number == command.from {
                    written.until.get_or_insert(now);
                    written.perhaps = true;
                }
            }
        }
        self.queue += 1;
    }

    fn step(&mut self) {
        self.pass();
        match self.random.u64(..100) {
            0..75 => self.begin(),
            75..86 => {
                let reads = self.clock_ns.is_some() && self.random.u64(..8) == 0;
                self.t.turn_other_with(reads);
            }
            86..97 => {
                self.t.b.turn();
                self.take_ended();
            }
            97 => {
                // Interrupts some waiting commands.
                let slot = self.random.u16(..SLOTS);
                let status = Status::COMMAND_INTERRUPTED;
                self.t
                    .b
                    .core
                    .end_waiting(status, |owner, _, _| owner.slot == slot);
                self.take_ended();
            }
            98 if self.random.u64(..4) == 0 => self.close(),
            _ => {
                // Forgets old writes that cannot come back.
                for of_block in &mut self.blocks {
                    let all = of_block.clone();
                    let flushed = self.flushed;
                    let lasts = |o: &Written| !o.perhaps && o.until.is_some_and(|u| u < flushed);
                    of_block.retain(|w| !all.iter().any(|o| lasts(o) && o.follows(w)));
                }
            }
        }
    }

    fn finish(&mut self) {
        for _ in crate::patience::patiently() {
            self.t.b.turn();
            self.take_ended();
            if self.hand.is_empty() {
                break;
            }
            self.t.turn_other();
        }
        assert!(self.hand.is_empty());
        self.t.b.turn();
        self.t.nothing_is_left();
    }

    /// Checks the final contents.
    fn check(&self, path: &std::path::Path, flushed: u64) {
        let raw = std::fs::read(path).unwrap();
        for block in 0..BLOCKS {
            let at = (1 << 20) + 3 * EXTENT + block * BLOCK;
            let found = value_of(&raw[at as usize..][..4096]);
            let of_block = &self.blocks[block as usize];
            let lasts = |o: &&Written| !o.perhaps && o.until.is_some_and(|u| u < flushed);
            let gone = |w: &Written| of_block.iter().filter(lasts).any(|o| o.follows(w));
            let mut may: Vec<u32> = (of_block.iter().filter(|w| !gone(w)))
                .map(|w| w.value)
                .collect();
            if !of_block.iter().any(|o| lasts(&o)) {
                may.push(0);
            }
            // Unflushed writes may be torn.
            let torn = of_block.iter().any(|w| !lasts(&w) && !gone(w));
            let good = found.map_or(torn, |found| may.contains(&found) || torn && found == 0);
            assert!(good, "block {block}: {found:?}, not {may:?}");
        }
    }
}

/// While the other reactor sometimes has own work and returns operations.
#[test]
fn returning_operations_keep_the_order_rules() {
    for (kind, seed) in [("file", 21), ("ram", 22)] {
        let mut run = Run::new(kind, Spread::OneToN, seed);
        let region = run.t.b.core.region.clone();
        run.t.other.set_lane(quiet_lane(&region));
        run.clock_ns = Some(run.t.b.core.now_ns());
        (0..4000).for_each(|_| run.step());
        run.finish();
        let carried_out = run.t.other.record().carried_out.load(Relaxed);
        let back = run.t.handed_over() - carried_out;
        assert!(
            back > 10 && carried_out > 100,
            "{kind}: {back} came back, {carried_out} did not"
        );
        assert!(run.pairs.iter().all(|n| *n > 0) && run.flushed > 0);
        if kind == "file" {
            run.check(&run.t.b.path, run.now + 1);
        }
    }
}

/// While most commands wait for a budget, which is sometimes removed.
#[test]
fn order_rules_are_kept_within_a_budget() {
    for (kind, spread) in [("file", Spread::OneToN), ("ram", Spread::OneToN)] {
        let mut run = Run::new(kind, spread, 11);
        // As many as may wait.
        run.most = 22;
        run.clock_ns = Some(run.t.b.core.now_ns());
        for step in 0..1500 {
            match step % 300 {
                0 => run.t.b.core.admit_all_by(&Budget::fixed(10_000)),
                280 => run.t.b.core.set_admission(None),
                _ => run.step(),
            }
        }
        run.t.b.core.set_admission(None);
        run.finish();
        let throttled = &run.t.b.core.lanes.get(LANE).unwrap().record().throttled_ops;
        let (throttled, handed_over) = (throttled.load(Relaxed), run.t.handed_over());
        assert!(
            throttled > 0 && handed_over > 0,
            "{kind}: {throttled} waited, {handed_over} were away"
        );
        assert!(run.pairs.iter().all(|n| *n > 0) && run.flushed > 0);
        if kind == "file" {
            run.check(&run.t.b.path, run.now + 1);
        }
    }
}

#[test]
fn one_to_n_keeps_order_rules() {
    let ways = [Spread::OneToN; 3];
    for (kind, steps) in [("file", 2000), ("ram", 2000), ("volatile", 400)] {
        for (seed, spread) in (7..).zip(ways) {
            let mut run = Run::new(kind, spread, seed);
            (0..steps).for_each(|_| run.step());
            run.finish();
            let what = format!("{kind}, {spread:?}");
            assert!(
                run.t.handed_over() > steps / 100,
                "{what}: nothing was away"
            );
            assert!(
                run.pairs.iter().all(|n| *n > 0) && run.flushed > 0,
                "{what}"
            );
            if kind == "volatile" {
                let path = run.t.b.path.clone();
                let last = run.now + 1;
                run.check(&path, last);
                let Two { b, other } = &mut run.t;
                b.core.devices.served[0] = None;
                other.devices.served[0] = None;
                power::cut(&path, seed).unwrap();
                run.check(&path, run.flushed);
            } else if kind == "file" {
                run.check(&run.t.b.path, run.now + 1);
            }
        }
    }
}
