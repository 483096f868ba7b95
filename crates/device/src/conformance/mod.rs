//! The suite that every kind of device passes, its fence included.
//!
//! **Purpose.** The engine and the pool rely on a few sentences about devices; here each is a check, the same for all
//! kinds, so that a new kind is right or is told where it isn't.
//!
//! **Design.** A [`Subject`] opens the device anew as often as it's asked, and says which bytes the suite may use.
//! Operations go through a [`Driver`]: a ring, and the few lines that every user of [`Device`] needs around it. The
//! random part compares with a model in memory, with many operations in flight, of which some go to several pieces of
//! memory (`scattered`). A failed check panics.
//!
//! **What it does not do.** It kills no process (the fence across a death is in this crate's tests), cuts no power, and
//! measures nothing.

mod scattered;

use std::collections::HashMap;
use std::time::Duration;

use rustix::io::Errno;

use crate::device::{Device, Finish, Submitted};
use crate::fence::{FenceError, Holder, who_holds};
use crate::fixed::Pinned;
use crate::gate::TestGate;
use crate::mem::{Buf, StaticRegion};
use crate::op::{Op, OpKind};
use crate::open::DeviceKind;
use crate::ring::{Completion, Ring, RingOptions};
use crate::vectors::Vectors;

/// Nothing here takes this long, except if it hangs.
const HANG: Duration = Duration::from_secs(60);
/// Each of these has a slot in the driver's memory.
const SLOTS: u32 = 64;
const SLOT_BYTES: u32 = 256 * 1024;

/// A device to be judged.
pub struct Subject<'a> {
    /// Opens the device, the same one each time.
    pub open: &'a dyn Fn() -> Device,
    /// The suite uses the bytes from here to the end: at least 8 MiB, a multiple of 1 MiB, and never written before.
    pub from_bytes: u64,
    /// Whether the device keeps what is written.
    pub keeps: bool,
}

/// Runs operations on one device, many at once if asked.
#[derive(Debug)]
pub struct Driver {
    /// The ring.
    pub ring: Ring,
    region: StaticRegion,
    running: HashMap<u64, Op>,
    lists: Vectors,
}

impl Driver {
    /// A driver with a ring of a few entries, so that it gets full.
    pub fn new() -> Self {
        Self::with_ring(&RingOptions {
            entries: 16,
            cq_entries: 64,
            ..RingOptions::default()
        })
    }

    /// A driver with another ring.
    pub fn with_ring(options: &RingOptions) -> Self {
        Self {
            ring: Ring::new(options).expect("io_uring works here"),
            region: StaticRegion::anonymous((SLOTS * SLOT_BYTES) as usize).expect("memory"),
            running: HashMap::new(),
            lists: Vectors::new(SLOTS as usize, scattered::PIECES).expect("memory"),
        }
    }

    /// The same with its memory registered; `None`: the kernel doesn't know how (before Linux 6.13).
    pub fn registered() -> Option<Self> {
        let mut driver = Self::new();
        let pinned = Pinned::of_region(&driver.region).expect("16 MiB can be held");
        driver.ring.register(pinned).ok()?;
        Some(driver)
    }

    /// The first `len_bytes` of a slot.
    pub fn buf(&self, slot: u32, len_bytes: u32) -> Buf {
        assert!(slot < SLOTS && len_bytes <= SLOT_BYTES);
        self.region
            .buf((slot * SLOT_BYTES) as usize, len_bytes)
            .expect("inside")
    }

    /// Fills a slot.
    pub fn fill(&self, slot: u32, bytes: &[u8]) -> Buf {
        assert!(self.region.copy_in((slot * SLOT_BYTES) as usize, bytes));
        self.buf(slot, bytes.len() as u32)
    }

    /// What is in a slot.
    pub fn bytes(&self, slot: u32, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        assert!(
            self.region
                .copy_out((slot * SLOT_BYTES) as usize, &mut bytes)
        );
        bytes
    }

    /// Starts an operation; its end, if it came at once.
    pub fn start(&mut self, device: &Device, op: Op, user_data: u64) -> Option<Result<(), Errno>> {
        if device.is_native() {
            self.ring.prepare_native().expect("a second ring");
        }
        let mut op = op;
        loop {
            match device.submit(&mut self.ring, &mut op, user_data) {
                Submitted::Done(result) => return Some(result),
                Submitted::Queued => {
                    assert!(self.running.insert(user_data, op).is_none(), "mark in use");
                    return None;
                }
                Submitted::RingFull => {
                    self.ring.submit().expect("submit");
                }
            }
        }
    }

    /// Waits for some operation's end.
    pub fn next(&mut self, device: &Device) -> (u64, Result<(), Errno>) {
        loop {
            let mut done = [Completion::default(); 1];
            while self.ring.drain(&mut done) == 0 {
                let wake = self.ring.wait(1, Some(HANG)).expect("wait");
                assert_ne!(wake, crate::ring::Wake::TimedOut, "an operation hangs");
            }
            let [Completion { user_data, result }] = done;
            let op = self.running.remove(&user_data).expect("a known mark");
            match device.finish(op, result) {
                Finish::Done => return (user_data, Ok(())),
                Finish::Failed(errno) => return (user_data, Err(errno)),
                Finish::Again(rest) => {
                    if let Some(result) = self.start(device, rest, user_data) {
                        return (user_data, result);
                    }
                }
            }
        }
    }

    /// Runs one operation to its end.
    pub fn run(&mut self, device: &Device, op: Op) -> Result<(), Errno> {
        match self.start(device, op, 0) {
            Some(result) => result,
            None => self.next(device).1,
        }
    }

    /// Reads a range of any length that fits a slot.
    pub fn read(&mut self, device: &Device, offset_bytes: u64, len: usize) -> Vec<u8> {
        let buf = self.buf(0, len as u32);
        self.run(device, Op::read(offset_bytes, buf)).expect("read");
        self.bytes(0, len)
    }

    /// Writes a range.
    pub fn write(&mut self, device: &Device, offset_bytes: u64, bytes: &[u8]) {
        let buf = self.fill(0, bytes);
        self.run(device, Op::write(offset_bytes, buf))
            .expect("write");
    }
}

impl Default for Driver {
    fn default() -> Self {
        Self::new()
    }
}

/// A small generator of numbers that look random: the same for the same seed.
#[derive(Debug, Clone)]
pub struct Rng(pub u64);

impl Rng {
    /// The next number.
    pub fn number(&mut self) -> u64 {
        // Xorshift64*: any odd multiplier does, any seed but zero.
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// The next number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.number() % limit
    }

    /// So many bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| (self.number() >> 32) as u8).collect()
    }
}

/// Runs all checks.
pub fn run(subject: &Subject<'_>) {
    let device = (subject.open)();
    let from = subject.from_bytes;
    let capacity = device.info().capacity_bytes;
    assert!(capacity >= from + (8 << 20), "too small for the suite");
    info_is_sound(&device);
    let mut driver = Driver::new();
    never_written_reads_zero(&mut driver, &device, from);
    bad_ranges_are_refused(&mut driver, &device);
    flush_completes(&mut driver, &device);
    scattered::bad_pieces_are_refused(&mut driver, &device);
    if subject.keeps {
        scattered::pieces_are_read_and_written(&mut driver, &device, from);
        scattered::a_rest_goes_where_it_should(&mut driver, &device, from);
        writes_are_read_back(&mut driver, subject, &device);
        zeroing_is_exact(&mut driver, &device, from);
        many_in_flight(&mut driver, &device, from, 0x5eed);
        // And again without the quick ways of zeroing.
        let plain = (subject.open)();
        plain.forget_fallocate();
        zeroing_is_exact(&mut driver, &plain, from);
        many_in_flight(&mut driver, &plain, from, 0xfeed);
        the_last_block_is_usable(&mut driver, &device);
        punching_gives_space_back(&mut driver, &device, from);
        in_registered_memory(subject, &device);
    } else {
        writes_vanish(&mut driver, &device, from);
        scattered::nothing_is_put_there(&mut driver, &device, from);
    }
    drop(device);
    fence_is_kept(subject);
    gate_holds_and_fails(subject);
    scattered::gate_holds_pieces(subject);
}

/// The same once more with memory that the ring knows.
fn in_registered_memory(subject: &Subject<'_>, device: &Device) {
    let Some(mut driver) = Driver::registered() else {
        eprintln!("registered memory is not tried: it needs Linux 6.13");
        return;
    };
    let from = subject.from_bytes;
    scattered::pieces_are_read_and_written(&mut driver, device, from);
    scattered::a_rest_goes_where_it_should(&mut driver, device, from);
    writes_are_read_back(&mut driver, subject, device);
    many_in_flight(&mut driver, device, from, 0xf1ed);
    // Devices that are files or below go by the ring.
    let direct = matches!(device.info().kind, DeviceKind::File | DeviceKind::Block);
    assert!(!direct || driver.ring.fixed_requests() > 100);
}

fn info_is_sound(device: &Device) {
    let info = device.info();
    for align in [
        info.block_bytes,
        info.physical_block_bytes,
        info.memory_align_bytes,
        info.offset_align_bytes,
    ] {
        assert!(align.is_power_of_two(), "{info:?}");
    }
    assert!(info.block_bytes >= 512 && info.physical_block_bytes >= info.block_bytes);
    assert!(
        info.capacity_bytes
            .is_multiple_of(u64::from(info.block_bytes))
    );
    assert_eq!(info.offset_align_bytes, info.block_bytes);
}

fn never_written_reads_zero(driver: &mut Driver, device: &Device, from: u64) {
    for at in [0, 1 << 20, 7 << 20] {
        let buf = driver.fill(0, &vec![0xaa; SLOT_BYTES as usize]);
        driver.run(device, Op::read(from + at, buf)).expect("read");
        let bytes = driver.bytes(0, SLOT_BYTES as usize);
        assert!(bytes.iter().all(|byte| *byte == 0), "at {at}");
    }
}

fn bad_ranges_are_refused(driver: &mut Driver, device: &Device) {
    let info = device.info().clone();
    let (block, capacity) = (info.block_bytes, info.capacity_bytes);
    let good = driver.buf(0, block);
    let refused = Some(Err(Errno::INVAL));
    for at in [
        capacity,
        capacity + u64::from(block),
        u64::MAX - u64::from(block) + 1,
        1 << 62,
        1,
        u64::from(block) / 2,
        u64::MAX,
    ] {
        assert_eq!(driver.start(device, Op::read(at, good), 1), refused, "{at}");
        assert_eq!(
            driver.start(device, Op::write(at, good), 1),
            refused,
            "{at}"
        );
        let len = u64::from(block);
        assert_eq!(driver.start(device, Op::write_zeroes(at, len), 1), refused);
        assert_eq!(driver.start(device, Op::punch(at, len), 1), refused);
    }
    for len in [0, 1, u64::from(block) - 1, u64::from(block) + 1, u64::MAX] {
        let at = capacity - u64::from(block);
        assert_eq!(
            driver.start(device, Op::punch(at, len), 1),
            refused,
            "{len}"
        );
        assert_eq!(driver.start(device, Op::write_zeroes(at, len), 1), refused);
    }
    let two = driver.buf(0, 2 * block);
    let straddling = Op::write(capacity - u64::from(block), two);
    assert_eq!(driver.start(device, straddling, 1), refused);
    let odd = driver.buf(0, block - 1);
    assert_eq!(driver.start(device, Op::read(0, odd), 1), refused);
    let empty = driver.buf(0, 0);
    assert_eq!(driver.start(device, Op::read(0, empty), 1), refused);
    if info.memory_align_bytes > 1 {
        let crooked = driver.buf(0, block + 1).slice(1, block).expect("inside");
        assert_eq!(driver.start(device, Op::read(0, crooked), 1), refused);
    }
    assert_eq!(driver.ring.queued(), 0, "a refused operation was queued");
}

fn flush_completes(driver: &mut Driver, device: &Device) {
    for _ in 0..3 {
        driver.run(device, Op::flush()).expect("flush");
    }
}

fn writes_are_read_back(driver: &mut Driver, subject: &Subject<'_>, device: &Device) {
    let (from, block) = (subject.from_bytes, device.info().block_bytes as usize);
    let mut rng = Rng(7);
    for (at, len) in [
        (0, block),
        (block, 3 * block),
        (65536, 65536),
        ((2 << 20) - block, 2 * block),
        (1 << 20, SLOT_BYTES as usize),
    ] {
        let at = from + at as u64;
        let bytes = rng.bytes(len);
        driver.write(device, at, &bytes);
        assert_eq!(driver.read(device, at, len), bytes, "at {at}");
        driver.run(device, Op::flush()).expect("flush");
        // Whoever opens it afterwards sees the same.
        let other = (subject.open)();
        assert!(
            driver.read(&other, at, len) == bytes,
            "at {at}, opened anew"
        );
        // A durable write over it.
        let bytes = rng.bytes(len);
        let buf = driver.fill(0, &bytes);
        let op = Op::write(at, buf).with_dsync();
        driver.run(device, op).expect("durable write");
        assert!(driver.read(&other, at, len) == bytes, "at {at}, durable");
    }
}

fn zeroing_is_exact(driver: &mut Driver, device: &Device, from: u64) {
    let block = device.info().block_bytes as usize;
    let page = block.max(4096);
    let zeroings: [fn(u64, u64) -> Op; 2] = [Op::write_zeroes, Op::punch];
    for (index, make) in zeroings.into_iter().enumerate() {
        for (at, len) in [
            (0, block),
            (block, block),
            (page - block, 2 * block),
            (page, page),
            (page + block, 4 * page),
            (0, 3 * 65536 + block),
            // Never written before: stays zero.
            (3 << 20, 65536),
        ] {
            let area = 4 << 20;
            let (start, size) = (from + area, SLOT_BYTES as usize);
            let mut expected = vec![index as u8 + 1; size];
            driver.write(device, start, &expected);
            driver
                .run(device, make(start + at as u64, len as u64))
                .expect("zeroing");
            let end = size.min(at + len);
            expected[at.min(size)..end.max(at.min(size))].fill(0);
            let found = driver.read(device, start, size);
            let wrong = found.iter().zip(&expected).position(|(a, b)| a != b);
            assert_eq!(wrong, None, "zeroed {len} at {at} with method {index}");
            // Writable again.
            driver.write(device, start + at as u64, &vec![9; block]);
            assert_eq!(
                driver.read(device, start + at as u64, block),
                vec![9; block]
            );
            let rest = make(start + at as u64, block as u64);
            driver.run(device, rest).expect("zeroing");
        }
    }
}

/// Random operations on disjoint chunks, up to [`SLOTS`] in flight, against a model.
fn many_in_flight(driver: &mut Driver, device: &Device, from: u64, seed: u64) {
    const CHUNKS: u64 = 48;
    const CHUNK_BYTES: usize = 32 * 1024;
    let block = device.info().block_bytes as usize;
    let blocks = (CHUNK_BYTES / block) as u64;
    let mut rng = Rng(seed);
    let at = |chunk: u64| from + (5 << 20) + chunk * CHUNK_BYTES as u64;
    let mut model: Vec<Vec<u8>> = Vec::new();
    for chunk in 0..CHUNKS {
        driver
            .run(device, Op::write_zeroes(at(chunk), CHUNK_BYTES as u64))
            .expect("zeroing");
        model.push(vec![0; CHUNK_BYTES]);
    }
    let mut expected: HashMap<u64, Vec<u8>> = HashMap::new();
    let judge = |driver: &Driver, expected: &mut HashMap<u64, Vec<u8>>, chunk: u64, result| {
        assert_eq!(result, Ok(()), "chunk {chunk}");
        if let Some(bytes) = expected.remove(&chunk) {
            let found = driver.bytes(chunk as u32, bytes.len());
            assert!(found == bytes, "chunk {chunk} reads wrong");
        }
    };
    let mut busy = vec![false; CHUNKS as usize];
    for round in 0..2000 {
        let chunk = rng.below(CHUNKS);
        while busy[chunk as usize] {
            let (ended, result) = driver.next(device);
            busy[ended as usize] = false;
            if ended < CHUNKS {
                judge(driver, &mut expected, ended, result);
            }
        }
        let first = rng.below(blocks);
        let count = 1 + rng.below(blocks - first);
        let (start, len) = (first as usize * block, count as usize * block);
        let offset = at(chunk) + start as u64;
        let part = &mut model[chunk as usize][start..start + len];
        let op = match rng.below(8) {
            0..=2 => {
                part.copy_from_slice(&rng.bytes(len));
                let buf = driver.fill(chunk as u32, part);
                let op = match scattered::in_pieces(driver, chunk, buf, block, &mut rng) {
                    Some(bufs) => Op::write_pieces(offset, bufs),
                    None => Op::write(offset, buf),
                };
                if round % 50 == 0 { op.with_dsync() } else { op }
            }
            3 => {
                part.fill(0);
                Op::punch(offset, len as u64)
            }
            4 => {
                part.fill(0);
                Op::write_zeroes(offset, len as u64)
            }
            5 if round % 20 == 0 => Op::flush(),
            _ => {
                expected.insert(chunk, part.to_vec());
                let buf = driver.buf(chunk as u32, len as u32);
                match scattered::in_pieces(driver, chunk, buf, block, &mut rng) {
                    Some(bufs) => Op::read_pieces(offset, bufs),
                    None => Op::read(offset, buf),
                }
            }
        };
        match driver.start(device, op, chunk) {
            Some(result) => judge(driver, &mut expected, chunk, result),
            None => busy[chunk as usize] = true,
        }
    }
    while busy.contains(&true) {
        let (ended, result) = driver.next(device);
        busy[ended as usize] = false;
        judge(driver, &mut expected, ended, result);
    }
    for (chunk, bytes) in model.iter().enumerate() {
        let found = driver.read(device, at(chunk as u64), CHUNK_BYTES);
        assert!(found == *bytes, "chunk {chunk} at the end");
    }
}

fn the_last_block_is_usable(driver: &mut Driver, device: &Device) {
    let block = device.info().block_bytes as usize;
    let at = device.info().capacity_bytes - block as u64;
    driver.write(device, at, &vec![0x77; block]);
    assert_eq!(driver.read(device, at, block), vec![0x77; block]);
    for op in [
        Op::punch(at, block as u64),
        Op::write_zeroes(at, block as u64),
    ] {
        driver.run(device, op).expect("zeroing the last block");
        assert_eq!(driver.read(device, at, block), vec![0; block]);
    }
}

/// Where the space can be seen from here: for files.
fn punching_gives_space_back(driver: &mut Driver, device: &Device, from: u64) {
    let info = device.info();
    if !info.can_punch || info.kind == DeviceKind::Block {
        return;
    }
    let allocated_bytes = || {
        let stat = rustix::fs::stat(info.spec.path()).expect("it is there");
        u64::try_from(stat.st_blocks).expect("not negative") * 512
    };
    let mut punch = |at, len| {
        driver
            .run(device, Op::punch(from + at, len))
            .expect("punch");
    };
    // The file system's own bookkeeping comes and goes by a few blocks.
    let slack = 16384;
    punch(0, 8 << 20);
    let empty = allocated_bytes();
    let mut writer = Driver::new();
    for at in 0..4 {
        writer.write(device, from + at * 65536, &[3; 65536]);
    }
    writer.run(device, Op::flush()).expect("flush");
    let full = allocated_bytes();
    assert!(full + slack >= empty + 4 * 65536, "nothing was allocated");
    // Inside of what was written, as a tenant's deallocation inside an extent.
    punch(65536 + 8192, 49152);
    let less = allocated_bytes();
    assert!(less <= full - 49152 + slack, "{full} became {less}");
    punch(0, 4 * 65536);
    let none = allocated_bytes();
    assert!(none <= empty + slack, "{none} is left of {full}");
}

fn writes_vanish(driver: &mut Driver, device: &Device, from: u64) {
    let block = device.info().block_bytes as usize;
    driver.write(device, from, &vec![0x77; block]);
    let buf = driver.fill(1, &vec![0x77; block]);
    let op = Op::write(from, buf).with_dsync();
    driver.run(device, op).expect("durable write");
    assert_eq!(driver.read(device, from, block), vec![0; block]);
    for op in [
        Op::punch(from, 1 << 20),
        Op::write_zeroes(from, device.info().capacity_bytes - from),
    ] {
        driver.run(device, op).expect("zeroing nothing");
    }
    if from > 0 {
        // Neither label nor nothing, but both.
        let two = driver.buf(0, 2 * block as u32);
        let both = Op::write(from - block as u64, two);
        assert_eq!(driver.start(device, both, 1), Some(Err(Errno::INVAL)));
    }
}

fn fence_is_kept(subject: &Subject<'_>) {
    let (old, new) = ((subject.open)(), (subject.open)());
    let path = old.info().spec.path().to_owned();
    assert_eq!(old.info().identity, new.info().identity);
    old.take_fence(5).expect("free");
    let again = new.take_fence(5).expect_err("held");
    assert!(matches!(again, FenceError::Held { .. }), "{again}");
    new.take_fence(6)
        .expect("a younger generation starts beside");
    assert!(!new.predecessors_gone(6).expect("ask"));
    let late = new.wait_for_predecessors(6, Duration::ZERO);
    assert!(
        matches!(late, Err(FenceError::TimedOut { predecessor: 5, .. })),
        "{late:?}"
    );
    let older = (subject.open)().take_fence(4).expect_err("too old");
    assert!(matches!(older, FenceError::NewerEngine { .. }), "{older}");
    assert_eq!(
        who_holds(&path).expect("ask"),
        [5, 6].map(|generation| Holder::Engine { generation })
    );
    // Both work meanwhile.
    let mut driver = Driver::new();
    for device in [&old, &new] {
        driver.read(device, subject.from_bytes, 65536);
    }
    drop(old);
    new.wait_for_predecessors(6, HANG).expect("alone");
    drop(driver);
    drop(new);
    let next = (subject.open)();
    next.take_fence(7).expect("free");
    next.wait_for_predecessors(7, HANG).expect("alone");
}

fn gate_holds_and_fails(subject: &Subject<'_>) {
    let mut device = (subject.open)();
    let gate = TestGate::new();
    device.attach_gate(gate.clone());
    let mut driver = Driver::new();
    let from = subject.from_bytes;
    let bytes = Rng(99).bytes(65536);

    gate.hold();
    let ops = [
        Op::write(from, driver.fill(1, &bytes)),
        Op::read(from + (1 << 20), driver.buf(2, 65536)),
        Op::flush(),
        Op::punch(from + (2 << 20), 65536),
        Op::write_zeroes(from + (3 << 20), 65536),
    ];
    for (index, op) in ops.into_iter().enumerate() {
        assert_eq!(driver.start(&device, op, index as u64), None);
    }
    let little = Some(Duration::from_millis(20));
    assert_ne!(
        driver.ring.wait(1, little).expect("wait"),
        crate::ring::Wake::Completions
    );
    assert_eq!(gate.held(), 5);
    gate.release();
    for _ in 0..5 {
        assert_eq!(driver.next(&device).1, Ok(()));
    }
    assert_eq!(gate.held(), 0);
    if subject.keeps {
        assert!(driver.read(&device, from, 65536) == bytes);
    }

    // Only a part, and only writes.
    gate.hold_some(from..from + 65536, &[OpKind::Write]);
    let held = Op::write(from, driver.fill(1, &bytes));
    assert_eq!(driver.start(&device, held, 77), None);
    driver.read(&device, from, 65536);
    driver.write(&device, from + 65536, &bytes);
    assert_eq!(gate.held(), 1);
    gate.release();
    assert_eq!(driver.next(&device), (77, Ok(())));

    gate.fail(from..from + 1, &[OpKind::Read], Errno::IO, 2);
    let read = Op::read(from, driver.buf(0, 65536));
    for expected in [Err(Errno::IO), Err(Errno::IO), Ok(())] {
        assert_eq!(driver.run(&device, read), expected);
    }
    gate.hold();
    gate.fail(from..from + 1, &[], Errno::NOSPC, 1);
    let write = Op::write(from, driver.buf(0, 65536));
    assert_eq!(driver.start(&device, write, 3), None);
    gate.release();
    assert_eq!(driver.next(&device), (3, Err(Errno::NOSPC)));
}
