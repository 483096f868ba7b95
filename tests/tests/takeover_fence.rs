//! I/O of a dead engine or a closed connection that is still at the device. It is not repeated,
//! answered or overlapped before the device is done, and late data harms nothing else.
//!
//! The pool's file delays reads and writes ([`forebay_tests::hold`]). Order is shown by events:
//! other commands complete meanwhile.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::{Done, IoOp, IoQueue, Options, Session, Wait};
use forebay_tests::daemon::target_folder;
use forebay_tests::hold::{Hold, find_block};
use forebay_tests::lab::{Lab, LabOptions, MIB, MINUTE};
use forebay_tests::wait;

const A: &str = "nqn.2026-01.test:host-a";
const B: &str = "nqn.2026-01.test:host-b";
const BLOCK: usize = 4096;
/// Blocks with known initial content.
const BLOCKS: u64 = 256;
/// The delayed block.
const HELD: u64 = 7;

struct Stage {
    // Dropped before the file that it uses.
    lab: Lab,
    hold: Hold,
    _folder: tempfile::TempDir,
    /// The delayed block's place on the device.
    place: u64,
}

/// Content of block `lba`; version 1 is the initial one.
fn content(lba: u64, version: u8) -> Vec<u8> {
    let mut block = vec![version; BLOCK];
    for (i, word) in block.chunks_exact_mut(8).enumerate() {
        word[..7].copy_from_slice(&(lba << 16 | i as u64).to_le_bytes()[..7]);
    }
    block
}

impl Stage {
    fn new() -> Result<Self> {
        let parent = target_folder().join("tmp");
        std::fs::create_dir_all(&parent)?;
        let folder = tempfile::Builder::new()
            .prefix("hold-")
            .tempdir_in(parent.canonicalize()?)?;
        let hold = Hold::new(folder.path(), 512 * MIB)?;
        let lab = Lab::new(&LabOptions {
            devices: vec![format!("file:{}", hold.path().display())],
            config: "[engine]\nreactors = 1\n".into(),
            ..LabOptions::default()
        })?;
        lab.daemon
            .cli(&["volume", "create", "t/v", "--size", "64M"])?;
        lab.daemon.cli(&["export", "create", "t/v", "--any-host"])?;
        let mut line = Line::new(lab.address, A)?;
        for lba in 0..BLOCKS {
            line.write(lba, 1)?;
            line.wait(lba)?;
        }
        line.submit(u64::MAX, &IoOp::Flush, vec![])?;
        line.wait(u64::MAX)?;
        let place = find_block(hold.backing(), &content(HELD, 1))?;
        Ok(Self {
            lab,
            hold,
            _folder: folder,
            place,
        })
    }

    fn range(&self) -> std::ops::Range<u64> {
        self.place..self.place + BLOCK as u64
    }

    fn kill_engine(&self) -> Result<()> {
        let dead = self.lab.daemon.kill_engine()?;
        self.lab.daemon.wait_engine_after(dead.generation, MINUTE)?;
        Ok(())
    }

    /// The delayed block's content on the device.
    fn on_device(&self) -> Result<Vec<u8>> {
        let mut block = vec![0; BLOCK];
        std::fs::File::open(self.hold.backing())?.read_exact_at(&mut block, self.place)?;
        Ok(block)
    }

    fn end(mut self) -> Result<()> {
        self.lab.daemon.pool_check()?;
        self.lab.daemon.stop()
    }
}

/// Its commands are identified by their block.
struct Line {
    queue: IoQueue,
    _session: Session,
    ended: BTreeMap<u64, Done>,
}

impl Line {
    fn new(address: SocketAddr, host: &str) -> Result<Self> {
        let options = Options {
            command_timeout: MINUTE,
            queue_entries: 64,
            ..Options::default()
        };
        let nqn = "nqn.2026-01.io.forebay:test:t.v";
        let mut last = None;
        let connected = wait::until("a connection", MINUTE, || {
            let connected = Session::connect(address, nqn, host, &options);
            Ok(connected.map_err(|error| last = Some(error)).ok())
        });
        let mut session = connected.with_context(|| format!("{last:?}"))?;
        Ok(Self {
            queue: session.open_queue(1)?,
            _session: session,
            ended: BTreeMap::new(),
        })
    }

    fn submit(&mut self, tag: u64, op: &IoOp, data: Vec<u8>) -> Result<()> {
        let taken = self.queue.submit(op, tag, data);
        ensure!(taken.is_ok(), "{op:?} was not taken");
        self.poll(Duration::ZERO)
    }

    fn poll(&mut self, limit: Duration) -> Result<()> {
        let mut done = Vec::new();
        self.queue.poll(&mut done, Wait::Block, limit)?;
        for end in done {
            let before = self.ended.insert(end.tag, end);
            ensure!(before.is_none(), "ended twice");
        }
        Ok(())
    }

    fn write(&mut self, lba: u64, version: u8) -> Result<()> {
        let op = IoOp::Write {
            lba,
            blocks: 1,
            fua: false,
        };
        self.submit(lba, &op, content(lba, version))
    }

    fn read(&mut self, tag: u64, lba: u64) -> Result<()> {
        let op = IoOp::Read { lba, blocks: 1 };
        self.submit(tag, &op, vec![0; BLOCK])
    }

    fn wait(&mut self, tag: u64) -> Result<Vec<u8>> {
        let ended = wait::until("a command's end", MINUTE, || {
            self.poll(Duration::from_millis(5))?;
            Ok(self.ended.remove(&tag))
        })?;
        ensure!(ended.status.is_success(), "{:?}", ended.status);
        Ok(ended.buf)
    }

    /// Reads and writes other blocks successfully.
    fn others_are_served(&mut self) -> Result<()> {
        for round in 0..4 {
            for lba in (0..32).filter(|lba| *lba != HELD) {
                let lba = lba + 32 * (round % 2);
                let op = IoOp::Read { lba, blocks: 1 };
                self.submit(1000 + lba, &op, vec![0; BLOCK])?;
            }
            for lba in (0..32).filter(|lba| *lba != HELD) {
                let lba = lba + 32 * (round % 2);
                let read = self.wait(1000 + lba)?;
                ensure!(read == content(lba, 1), "block {lba} has changed");
            }
            self.write(200 + round, 1)?;
            self.wait(200 + round)?;
        }
        Ok(())
    }

    fn not_ended(&self, tag: u64, what: &str) -> Result<()> {
        ensure!(!self.ended.contains_key(&tag), "{what} ended too early");
        Ok(())
    }
}

#[test]
fn fence_holds_late_write() -> Result<()> {
    let stage = Stage::new()?;
    let mut line = Line::new(stage.lab.address, A)?;
    stage.hold.hold_writes(stage.range());
    line.write(HELD, 2)?;
    stage.hold.wait_held(1)?;
    stage.kill_engine()?;
    // Overlapping commands wait; all others are served on the same connection.
    line.read(5000, HELD)?;
    line.others_are_served()?;
    line.not_ended(HELD, "the write that is still at the device")?;
    line.not_ended(5000, "a read of its block")?;
    ensure!(stage.hold.held().len() == 1, "it was executed again");
    ensure!(stage.on_device()? == content(HELD, 1));
    stage.hold.release();
    line.wait(HELD)?;
    ensure!(line.wait(5000)? == content(HELD, 2), "an old read");
    ensure!(stage.on_device()? == content(HELD, 2));
    line.others_are_served()?;
    stage.end()
}

/// The fence still waits for the first death's write.
#[test]
fn fence_holds_through_many_deaths() -> Result<()> {
    let stage = Stage::new()?;
    let mut line = Line::new(stage.lab.address, A)?;
    stage.hold.hold_writes(stage.range());
    line.write(HELD, 2)?;
    stage.hold.wait_held(1)?;
    for _ in 0..3 {
        stage.kill_engine()?;
        line.others_are_served()?;
    }
    line.not_ended(HELD, "the write that is still at the device")?;
    ensure!(stage.hold.held().len() == 1, "it was executed again");
    stage.hold.release();
    line.wait(HELD)?;
    ensure!(stage.on_device()? == content(HELD, 2));
    stage.end()
}

#[test]
fn fence_holds_late_read() -> Result<()> {
    let stage = Stage::new()?;
    let mut line = Line::new(stage.lab.address, A)?;
    stage.hold.hold_reads(stage.range());
    line.read(5000, HELD)?;
    stage.hold.wait_held(1)?;
    stage.kill_engine()?;
    line.write(HELD, 2)?;
    line.others_are_served()?;
    line.not_ended(5000, "the read that is still at the device")?;
    line.not_ended(HELD, "a write of its block")?;
    ensure!(stage.hold.held().len() == 1, "it was executed again");
    // It lands in the dead engine's memory while the successor's buffers hold other data.
    for lba in (8..40).filter(|lba| *lba != HELD) {
        line.read(1000 + lba, lba)?;
    }
    stage.hold.release();
    for lba in (8..40).filter(|lba| *lba != HELD) {
        ensure!(line.wait(1000 + lba)? == content(lba, 1), "block {lba}");
    }
    let read = line.wait(5000)?;
    ensure!(read == content(HELD, 1), "it is older than the write");
    line.wait(HELD)?;
    ensure!(stage.on_device()? == content(HELD, 2));
    stage.end()
}

#[test]
fn failover_ghost_write() -> Result<()> {
    for death in [false, true] {
        let stage = Stage::new()?;
        let mut first = Line::new(stage.lab.address, A)?;
        stage.hold.hold_writes(stage.range());
        first.write(HELD, 2)?;
        stage.hold.wait_held(1)?;
        drop(first);
        if death {
            stage.kill_engine()?;
        }
        let mut second = Line::new(stage.lab.address, B)?;
        second.write(HELD, 3)?;
        second.others_are_served()?;
        second.not_ended(HELD, "a write over another host's")?;
        ensure!(stage.hold.held().len() == 1, "it overtook the ghost");
        stage.hold.release();
        second.wait(HELD)?;
        ensure!(stage.on_device()? == content(HELD, 3), "the ghost won");
        second.read(5000, HELD)?;
        ensure!(second.wait(5000)? == content(HELD, 3));
        stage
            .end()
            .with_context(|| format!("with a death between: {death}"))?;
    }
    Ok(())
}

fn late_read_spares_waiting_data() -> Result<()> {
    let stage = Stage::new()?;
    let mut first = Line::new(stage.lab.address, A)?;
    stage.hold.hold_reads(stage.range());
    stage.hold.hold_writes(stage.range());
    let blocks = HELD..HELD + 4;
    let all = IoOp::Write {
        lba: HELD,
        blocks: 4,
        fua: false,
    };
    let data = blocks.clone().flat_map(|lba| content(lba, 2)).collect();
    // The read first: the kernel's lock on the file may delay it behind a delayed write.
    first.read(5000, HELD)?;
    stage.hold.wait_held(1)?;
    first.submit(6000, &all, data)?;
    // The host must poll, because its data is sent after an R2T.
    wait::until("both are held", MINUTE, || {
        first.poll(Duration::from_millis(5))?;
        Ok((stage.hold.held().len() == 2).then_some(()))
    })?;
    drop(first);
    // They wait for the closed connection's write.
    let mut second = Line::new(stage.lab.address, B)?;
    for lba in blocks.clone() {
        second.write(lba, 3)?;
    }
    let poll = |second: &mut Line| -> Result<()> {
        for lba in 100..140 {
            second.read(1000 + lba, lba)?;
            ensure!(second.wait(1000 + lba)? == content(lba, 1), "block {lba}");
        }
        Ok(())
    };
    poll(&mut second)?;
    for lba in blocks.clone() {
        second.not_ended(lba, "a write over a held one")?;
    }
    stage.hold.release_reads();
    poll(&mut second)?;
    stage.hold.release();
    for lba in blocks.clone() {
        second.wait(lba)?;
    }
    for lba in blocks {
        second.read(5000 + lba, lba)?;
        let read = second.wait(5000 + lba)?;
        ensure!(read == content(lba, 3), "block {lba} has others' data");
    }
    stage.end()
}

#[test]
fn buffer_reuse_after_cancel() -> Result<()> {
    late_read_spares_waiting_data()?;
    for death in [false, true] {
        let stage = Stage::new()?;
        let mut first = Line::new(stage.lab.address, A)?;
        stage.hold.hold_reads(stage.range());
        first.read(5000, HELD)?;
        stage.hold.wait_held(1)?;
        // Its command is gone, but the device still has its buffer's address.
        drop(first);
        if death {
            stage.kill_engine()?;
        }
        let mut lines = (0..6)
            .map(|_| Line::new(stage.lab.address, B))
            .collect::<Result<Vec<_>>>()?;
        let blocks = || (8..40).filter(|lba| *lba != HELD);
        for round in 0..20 {
            for line in &mut lines {
                for lba in blocks() {
                    line.read(1000 + lba, lba)?;
                }
            }
            if round == 10 {
                stage.hold.release();
            }
            for line in &mut lines {
                for lba in blocks() {
                    let read = line.wait(1000 + lba)?;
                    ensure!(read == content(lba, 1), "block {lba} in round {round}");
                }
            }
        }
        drop(lines);
        stage
            .end()
            .with_context(|| format!("with a death between: {death}"))?;
    }
    Ok(())
}
