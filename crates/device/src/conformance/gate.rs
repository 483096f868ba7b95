//! The gate ([`crate::gate`]) holds and fails operations on every kind.

use std::time::Duration;

use rustix::io::Errno;

use super::Subject;
use super::driver::{Driver, Rng, random_bytes};
use super::scattered::{bytes_of, fill, list, places};
use crate::gate::TestGate;
use crate::op::{Op, OpKind};
use crate::ring::Wake;

pub(super) fn gate_holds_and_fails(subject: &Subject<'_>) {
    let mut device = (subject.open)();
    let gate = TestGate::new();
    device.attach_gate(gate.clone());
    let mut driver = Driver::new();
    let from = subject.from_bytes;
    let bytes = random_bytes(&mut Rng::with_seed(99), 65536);

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
        Wake::Completions
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

pub(super) fn gate_holds_pieces(subject: &Subject<'_>) {
    let mut device = (subject.open)();
    let gate = TestGate::new();
    device.attach_gate(gate.clone());
    let mut driver = Driver::new();
    let from = subject.from_bytes;
    let places = places(device.info().block_bytes);
    let bytes = random_bytes(
        &mut Rng::with_seed(34),
        places.iter().map(|place| place.2 as usize).sum(),
    );
    for kind in [OpKind::Write, OpKind::Read] {
        gate.hold();
        let bufs = list(&mut driver, &places);
        let op = match kind {
            OpKind::Write => {
                fill(&driver, &places, &bytes);
                Op::write_pieces(from, bufs)
            }
            _ => {
                fill(&driver, &places, &vec![0x55; bytes.len()]);
                Op::read_pieces(from, bufs)
            }
        };
        assert_eq!(driver.start(&device, op, 1), None);
        assert_eq!(gate.held(), 1);
        gate.release();
        assert_eq!(driver.next(&device), (1, Ok(())));
    }
    let found = bytes_of(&driver, &places);
    let kept = found.iter().all(|byte| *byte == 0x55);
    assert!(if subject.keeps { found == bytes } else { kept });
    let op = Op::write_pieces(from, list(&mut driver, &places));
    gate.fail(from..from + 1, &[], Errno::IO, 1);
    assert_eq!(driver.run(&device, op), Err(Errno::IO));
    assert_eq!(driver.run(&device, op), Ok(()));
}
