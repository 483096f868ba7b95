//! Snapshots and clones, while hosts write: their moment and their content.
//!
//! `FOREBAY_TEST_SEED` is the seed of commands and names; timing differs.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::thread::ScopedJoinHandle;

use anyhow::{Context, Result, bail, ensure};
use forebay_initiator::verify::pattern::{self, Content, SECTOR_BYTES};
use forebay_initiator::{Error, IoOp, IoQueue, Wait, dsm_ranges};
use forebay_tests::host::{Dice, Host};
use forebay_tests::lab::{BLOCK, Lab, LabOptions, MINUTE, count_from};
use forebay_tests::snapshots::{
    BLOCKS, EXTENT_BLOCKS, SIZE, content, delete, ensure_same, export, host, read_all, refused,
    snapshot, wait_all_space_free, write,
};
use forebay_tests::wait;

const DEPTH: usize = 16;
/// Seed of the writer's pattern, and of the clones' own writes.
const WRITER: u64 = 0xa;
const CLONER: u64 = 0xc;

/// Namespace Is Write Protected (NVMe Base 2.1, figure "Generic Command Status Values").
const WRITE_PROTECTED: (u8, u8) = (0, 0x20);

fn seed() -> u64 {
    let seed = count_from("FOREBAY_TEST_SEED", 29);
    println!("FOREBAY_TEST_SEED={seed}");
    seed
}

/// Each block's number; 0: never written.
fn numbers(bytes: &[u8]) -> Result<Vec<usize>> {
    let number = |(at, sector): (usize, &[u8])| match pattern::read(sector) {
        Content::Zeros => Ok(0),
        Content::Written {
            seed: WRITER,
            sector,
            version,
        } if sector == at as u64 => Ok(version as usize),
        other => bail!("sector {at}: {other}"),
    };
    let sectors = bytes.chunks(SECTOR_BYTES).enumerate().map(number);
    let sectors = sectors.collect::<Result<Vec<usize>>>()?;
    let blocks = sectors.chunks(BLOCK as usize / SECTOR_BYTES).enumerate();
    let block = |(at, sectors): (usize, &[usize])| {
        let first = sectors[0];
        ensure!(
            sectors.iter().all(|number| *number == first),
            "block {at} is a mixture: {sectors:?}"
        );
        Ok(first)
    };
    blocks.map(block).collect()
}

/// All writes of the writer: for each block, when each was issued and acknowledged.
#[derive(Debug)]
struct Log {
    clock: u64,
    blocks: Vec<Vec<(u64, u64)>>,
}

impl Log {
    fn new() -> Self {
        Self {
            clock: 0,
            blocks: vec![Vec::new(); BLOCKS],
        }
    }

    /// Issues a write; returns its data.
    fn begin(&mut self, lba: u64, blocks: u32) -> Vec<u8> {
        self.clock += 1;
        let mut data = vec![0; blocks as usize * BLOCK as usize];
        let sectors = u64::from(BLOCK) / SECTOR_BYTES as u64;
        for (lba, data) in (lba..).zip(data.chunks_exact_mut(BLOCK as usize)) {
            let writes = &mut self.blocks[lba as usize];
            writes.push((self.clock, u64::MAX));
            pattern::fill(data, WRITER, lba * sectors, writes.len() as u32);
        }
        data
    }

    fn end(&mut self, lba: u64, blocks: u32) {
        self.clock += 1;
        for writes in &mut self.blocks[lba as usize..lba as usize + blocks as usize] {
            if let Some(last) = writes.last_mut() {
                last.1 = self.clock;
            }
        }
    }

    /// Each block's last acknowledged number.
    fn acknowledged(&self) -> Vec<usize> {
        let ended = |writes: &Vec<(u64, u64)>| writes.iter().filter(|w| w.1 < u64::MAX).count();
        self.blocks.iter().map(ended).collect()
    }

    /// Each block's last issued number.
    fn issued(&self) -> Vec<usize> {
        self.blocks.iter().map(Vec::len).collect()
    }

    /// Fails unless one moment has exactly these numbers: no write is missing that was
    /// acknowledged before another one there was issued.
    fn judge_moment(&self, numbers: &[usize]) -> Result<()> {
        let there = self.blocks.iter().zip(numbers);
        let begun = there.filter_map(|(writes, number)| writes.get(number.checked_sub(1)?));
        let last_begun = begun.map(|write| write.0).max().unwrap_or(0);
        for (block, (writes, number)) in self.blocks.iter().zip(numbers).enumerate() {
            let missing = writes.get(*number).map_or(u64::MAX, |write| write.1);
            ensure!(
                missing > last_begun,
                "block {block}: number {} of time {missing} is missing, one of time {last_begun} \
                 is there",
                number + 1
            );
        }
        Ok(())
    }
}

/// A range, as long as a first write, a part of an extent or a whole one.
fn range(dice: &mut Dice) -> (u64, u32) {
    let all = BLOCKS as u64;
    match dice.u64(..8) {
        0 => (
            dice.u64(..all / EXTENT_BLOCKS) * EXTENT_BLOCKS,
            EXTENT_BLOCKS as u32,
        ),
        1..=3 => (dice.u64(..all - 24), 1 + dice.u32(..24)),
        _ => (dice.u64(..all), 1),
    }
}

/// Writes random ranges until `over`.
fn write_until(host: &Host, log: &Mutex<Log>, dice: &mut Dice, over: &AtomicBool) -> Result<()> {
    let log = || log.lock().expect("no other thread panicked");
    let (_session, mut queue) = host.connect_soon()?;
    let mut running = HashMap::new();
    let mut busy = vec![false; BLOCKS];
    let mut done = Vec::new();
    let mut tag = 0;
    loop {
        let goes_on = !over.load(SeqCst);
        while goes_on && queue.in_flight() < DEPTH {
            let (lba, blocks) = range(dice);
            let place = lba as usize..lba as usize + blocks as usize;
            if busy[place.clone()].contains(&true) {
                continue;
            }
            busy[place].fill(true);
            let data = log().begin(lba, blocks);
            let op = IoOp::Write {
                lba,
                blocks,
                fua: false,
            };
            tag += 1;
            ensure!(queue.submit(&op, tag, data).is_ok(), "not accepted");
            running.insert(tag, (lba, blocks));
        }
        if running.is_empty() {
            return Ok(());
        }
        queue.poll(&mut done, Wait::Block, MINUTE)?;
        for end in done.drain(..) {
            let (lba, blocks) = running.remove(&end.tag).context("it ended twice")?;
            ensure!(end.status.is_success(), "write of {lba}: {:?}", end.status);
            log().end(lba, blocks);
            busy[lba as usize..lba as usize + blocks as usize].fill(false);
        }
    }
}

fn ensure_write_protected(queue: &mut IoQueue) -> Result<()> {
    let write = IoOp::Write {
        lba: 3,
        blocks: 1,
        fua: false,
    };
    let zeroes = IoOp::WriteZeroes {
        lba: 3,
        blocks: 1,
        deallocate: true,
    };
    let deallocate = IoOp::Deallocate { ranges: 1 };
    let commands = [
        (write, vec![7; BLOCK as usize]),
        (zeroes, Vec::new()),
        (deallocate, dsm_ranges(&[(3, 1)])),
    ];
    for (op, data) in commands {
        let ended = queue.execute(&op, data, MINUTE);
        let is_protected = matches!(
            &ended,
            Err(Error::Status { status, .. })
                if (status.sct(), status.sc()) == WRITE_PROTECTED && status.dnr()
        );
        ensure!(is_protected, "{op:?}: {:?}", ended.err());
    }
    Ok(())
}

/// Takes a snapshot and a clone, and exports them; returns their names and content.
fn snapshot_and_clone(
    lab: &Lab,
    log: &Mutex<Log>,
    number: u64,
    dice: &mut Dice,
) -> Result<[(String, Vec<u8>); 2]> {
    let log = || log.lock().expect("no other thread panicked");
    let (name, clone) = (format!("t/a@s{number}"), format!("t/c{number}"));
    let before = log().acknowledged();
    snapshot(&lab.daemon, &name)?;
    let after = log().issued();
    lab.daemon.cli(&["volume", "clone", &name, &clone])?;
    ensure!(export(&lab.daemon, &name)?["read_only"] == true);
    ensure!(export(&lab.daemon, &clone)?["read_only"] == false);

    let (_session, mut queue) = host(lab.address, &name).connect_soon()?;
    let taken = read_all(&mut queue)?;
    let found = numbers(&taken).with_context(|| name.clone())?;
    for (block, number) in found.iter().enumerate() {
        ensure!(
            (before[block]..=after[block]).contains(number),
            "{name}, block {block}: number {number}, not one of {}..={}",
            before[block],
            after[block]
        );
    }
    log().judge_moment(&found).with_context(|| name.clone())?;
    ensure_write_protected(&mut queue).with_context(|| name.clone())?;

    let (_session, mut clone_queue) = host(lab.address, &clone).connect_soon()?;
    ensure_same(&clone, &read_all(&mut clone_queue)?, &taken)?;
    let mut cloned = taken.clone();
    for _ in 0..8 {
        let (lba, blocks) = range(dice);
        let from = lba as usize * BLOCK as usize;
        let data = &mut cloned[from..from + blocks as usize * BLOCK as usize];
        pattern::fill(data, CLONER, from as u64 / SECTOR_BYTES as u64, 1);
        write(&mut clone_queue, lba, data.to_vec())?;
    }
    ensure_same(&clone, &read_all(&mut clone_queue)?, &cloned)?;
    ensure_same(&name, &read_all(&mut queue)?, &taken)?;
    Ok([(name, taken), (clone, cloned)])
}

fn wait_for_writes(log: &Mutex<Log>, writer: &ScopedJoinHandle<'_, Result<()>>) -> Result<()> {
    let now = || log.lock().expect("no other thread panicked").clock;
    let goal = now() + 400;
    wait::until("more writes", MINUTE, || {
        ensure!(!writer.is_finished(), "the writer gave up");
        Ok((now() >= goal).then_some(()))
    })
}

#[test]
fn snapshot_under_write() -> Result<()> {
    let mut dice = Dice::with_seed(seed());
    let lab = Lab::new(&LabOptions::volumes(1, SIZE))?;
    let log = Mutex::new(Log::new());
    let writing = host(lab.address, "t/a");
    {
        // Half of the volume has data.
        let (_session, mut queue) = writing.connect_soon()?;
        let mut log = log.lock().expect("no other thread panicked");
        for lba in (0..BLOCKS as u64).step_by(64) {
            let data = log.begin(lba, 32);
            write(&mut queue, lba, data)?;
            log.end(lba, 32);
        }
    }
    let mut known: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    let over = AtomicBool::new(false);
    let mut writer_dice = dice.fork();
    std::thread::scope(|scope| -> Result<()> {
        let writer = scope.spawn(|| write_until(&writing, &log, &mut writer_dice, &over));
        let mut snapshots = || -> Result<()> {
            for number in 0..10 {
                wait_for_writes(&log, &writer)?;
                known.extend(snapshot_and_clone(&lab, &log, number, &mut dice)?);
            }
            wait_for_writes(&log, &writer)
        };
        let taken = snapshots();
        over.store(true, SeqCst);
        writer.join().expect("the writer does not panic")?;
        taken
    })
    .map_err(|error| lab.daemon.with_logs(error))?;

    let last = content(lab.address, "t/a")?;
    let log = log.into_inner()?;
    ensure!(numbers(&last)? == log.issued(), "the volume's last numbers");
    known.insert("t/a".into(), last);
    for (name, bytes) in &known {
        ensure_same(name, &content(lab.address, name)?, bytes)?;
    }
    lab.daemon.pool_check()?;
    let mut names: Vec<String> = known.keys().cloned().collect();
    dice.shuffle(&mut names);
    while let Some(name) = names.pop() {
        delete(&lab.daemon, &name)?;
        if let Some(left) = dice.choice(&names) {
            ensure_same(left, &content(lab.address, left)?, &known[left])
                .with_context(|| format!("after the deletion of {name}, before {names:?}"))?;
        }
    }
    wait_all_space_free(&lab.daemon)?;
    lab.daemon.pool_check()
}

/// Writes number after number to a block of `a`, and after the acknowledgement to that of `b`.
fn write_both(address: SocketAddr, lane: u64, last: &AtomicU32, over: &AtomicBool) -> Result<()> {
    let (_first, mut a) = host(address, "t/a").connect_soon()?;
    let (_second, mut b) = host(address, "t/b").connect_soon()?;
    let lba = lane * EXTENT_BLOCKS;
    for number in 1.. {
        if over.load(SeqCst) {
            break;
        }
        let mut data = vec![0; BLOCK as usize];
        pattern::fill(
            &mut data,
            WRITER,
            lba * u64::from(BLOCK) / SECTOR_BYTES as u64,
            number,
        );
        write(&mut a, lba, data.clone())?;
        write(&mut b, lba, data)?;
        last.store(number, SeqCst);
    }
    Ok(())
}

#[test]
fn snapshot_group_is_one_moment() -> Result<()> {
    const LANES: u64 = 4;
    let lab = Lab::new(&LabOptions::volumes(2, SIZE))?;
    let over = AtomicBool::new(false);
    let lasts: Vec<AtomicU32> = (0..LANES).map(|_| AtomicU32::new(0)).collect();
    std::thread::scope(|scope| -> Result<()> {
        let writers: Vec<_> = (0..LANES)
            .zip(&lasts)
            .map(|(lane, last)| {
                let over = &over;
                scope.spawn(move || write_both(lab.address, lane, last, over))
            })
            .collect();
        let groups = || -> Result<()> {
            for round in 0..12 {
                let before: Vec<u32> = lasts.iter().map(|last| last.load(SeqCst)).collect();
                wait::until("more writes", MINUTE, || {
                    ensure!(!writers.iter().any(ScopedJoinHandle::is_finished));
                    let mut all = lasts.iter().zip(&before);
                    Ok(all
                        .all(|(last, before)| last.load(SeqCst) > before + 3)
                        .then_some(()))
                })?;
                let least: Vec<u32> = lasts.iter().map(|last| last.load(SeqCst)).collect();
                // The order of names does not matter.
                let mut group = [format!("t/a@s{round}"), format!("t/b@s{round}")];
                let command = |names: &[String; 2]| {
                    lab.daemon
                        .cli(&["volume", "snapshot", &names[0], &names[1]])
                };
                if round % 2 == 1 {
                    group.reverse();
                }
                command(&group)?;
                group.sort();
                for name in &group {
                    export(&lab.daemon, name)?;
                }
                let a = numbers(&content(lab.address, &group[0])?)?;
                let b = numbers(&content(lab.address, &group[1])?)?;
                for (lane, least) in least.iter().enumerate() {
                    let block = lane * EXTENT_BLOCKS as usize;
                    let (a, b) = (a[block], b[block]);
                    ensure!(
                        (a == b || a == b + 1) && b >= *least as usize,
                        "{group:?}, lane {lane}: {a} and {b}, at least {least}"
                    );
                }
            }
            Ok(())
        };
        let taken = groups();
        over.store(true, SeqCst);
        for writer in writers {
            writer.join().expect("a writer does not panic")?;
        }
        taken
    })
    .map_err(|error| lab.daemon.with_logs(error))?;
    // If one can't be taken, none is.
    snapshot(&lab.daemon, "t/b@taken")?;
    let group = ["volume", "snapshot", "t/a@taken", "t/b@taken"];
    refused(&lab.daemon, &group, &["already has", "b@taken"])?;
    refused(&lab.daemon, &["volume", "show", "t/a@taken"], &["a@taken"])?;
    lab.daemon.pool_check()
}
