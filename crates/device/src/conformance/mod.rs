//! The suite that every kind of device passes, its fence included. A failed check panics.
//!
//! The random part compares with a model in memory.

mod daemon;
mod driver;
mod fence;
mod gate;
mod many;
mod plain;
mod scattered;
#[cfg(test)]
mod tests;

use rustix::io::Errno;

use self::driver::SLOT_BYTES;
pub use self::driver::{Driver, Rng, random_bytes};
use self::many::many_in_flight;
use crate::device::Device;
use crate::kind::DeviceKind;
use crate::op::Op;

/// The device under test.
pub struct Subject<'a> {
    /// Opens the device, the same one each time.
    pub open: &'a dyn Fn() -> Device,
    /// First byte for the suite: at least 8 MiB to the end, a multiple of 1 MiB, never written
    /// before.
    pub from_bytes: u64,
    /// Whether the device keeps data.
    pub keeps: bool,
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
        let plain = plain::without_fallocate(&(subject.open)());
        zeroing_is_exact(&mut driver, &plain, from);
        many_in_flight(&mut driver, &plain, from, 0xfeed);
        the_last_block_is_usable(&mut driver, &device);
        punching_gives_space_back(&mut driver, &device, from);
        daemon::both_see_one_device(&mut driver, subject, &device);
        in_registered_memory(subject, &device);
    } else {
        writes_vanish(&mut driver, &device, from);
        scattered::nothing_is_put_there(&mut driver, &device, from);
    }
    drop(device);
    fence::fence_is_kept(subject);
    gate::gate_holds_and_fails(subject);
    gate::gate_holds_pieces(subject);
}

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
    let mut rng = Rng::with_seed(7);
    for (at, len) in [
        (0, block),
        (block, 3 * block),
        (65536, 65536),
        ((2 << 20) - block, 2 * block),
        (1 << 20, SLOT_BYTES as usize),
    ] {
        let at = from + at as u64;
        let bytes = random_bytes(&mut rng, len);
        driver.write(device, at, &bytes);
        assert_eq!(driver.read(device, at, len), bytes, "at {at}");
        driver.run(device, Op::flush()).expect("flush");
        let other = (subject.open)();
        assert!(
            driver.read(&other, at, len) == bytes,
            "at {at}, opened anew"
        );
        let bytes = random_bytes(&mut rng, len);
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

/// Only files show their allocated space.
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
    // As a tenant's deallocation inside an extent.
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
        let two = driver.buf(0, 2 * block as u32);
        let both = Op::write(from - block as u64, two);
        assert_eq!(driver.start(device, both, 1), Some(Err(Errno::INVAL)));
    }
}
