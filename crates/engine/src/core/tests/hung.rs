//! A device that hangs or is not served must not affect others.

use super::*;
use crate::core::turn::{LIVELY_NS, SLEEP_SLICES};

const W: VolumeId = VolumeId(10);

/// A second device and a volume on it, with lane 4.
pub(super) fn second(b: &mut Bench) -> (Arc<Volume>, Arc<TestGate>) {
    let path = b.path.with_file_name("second");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(16 << 20).unwrap();
    let spec = format!("file:{}", path.display()).parse().unwrap();
    let (served, gate) = device(1, &spec);
    b.core.set_device(served);
    b.core.fenced(DeviceIndex(1));
    let region = b.core.region.clone();
    let (lane, volume) = lane(4, W, &region);
    b.core.set_lane(lane);
    allow(b, &volume, 1);
    (volume, gate)
}

/// Maps a volume to a device, writable.
fn allow(b: &mut Bench, volume: &Volume, device: u8) {
    let word = Word::new(DeviceIndex(device), ExtentIndex(0), Rights::ReadWrite).unwrap();
    volume.may_write_to(DeviceIndex(device));
    volume.table.install(volume.whole(), word);
    b.core
        .fault_answered(volume.id(), volume.whole(), Answer::Granted);
}

fn write(extent: u64, len_bytes: u32) -> IoOp {
    IoOp::Write {
        offset_bytes: extent * EXTENT,
        len_bytes,
        fua: false,
    }
}

#[test]
fn a_lane_whose_device_hangs_leaves_room_to_others() {
    let mut b = bench();
    let (_, _) = second(&mut b);
    let volume = b.volume.clone();
    allow(&mut b, &volume, 0);
    b.gate.hold();
    let mut taken = 0;
    while b.start_on(3, write(0, 4096), None).is_some() {
        taken += 1;
        b.turn();
        assert!(taken < 2 * MAX_IOS, "it takes without end");
    }
    assert!(taken > 512, "a lane alone has much: {taken}");
    // Commands of many slices: the other volume's extents are scattered.
    for extent in 0..100 {
        let at = Word::new(
            DeviceIndex(1),
            ExtentIndex(2 * extent % 199),
            Rights::ReadWrite,
        );
        let other = b.core.lane(LaneIndex(4)).unwrap().volume.clone();
        other
            .table
            .install(ExtentRange::new(extent, 1), at.unwrap());
    }
    for extent in 0..64 {
        assert!(
            b.start_on(4, write(extent, 8 * EXTENT as u32), None)
                .is_some()
        );
        assert_eq!(b.end().1, Status::SUCCESS);
    }
    assert!(b.start_on(4, IoOp::Flush, None).is_some());
    assert_eq!(b.end().1, Status::SUCCESS);
    assert_eq!(b.core.slab.busy(), taken);
    b.gate.release();
    for _ in 0..taken {
        assert_eq!(b.end().1, Status::SUCCESS);
    }
    assert_eq!((b.core.slab.busy(), b.core.staging.out()), (0, 0));
}

#[test]
fn slices_of_one_lane_are_never_all_there_are() {
    let mut b = bench();
    second(&mut b);
    for extent in 0..100 {
        b.grant(extent, 2 * extent % 199, Rights::ReadWrite, 1);
    }
    b.gate.hold();
    let all = b.core.slices.free.len();
    // One shared buffer, or buffers would run out first; it is never read here.
    let zeroes = IoOp::WriteZeroes {
        offset_bytes: 0,
        len_bytes: 100 * EXTENT,
        deallocate: false,
        fua: false,
    };
    let mut started = 0;
    for _ in 0..100 {
        started += usize::from(b.start_on(3, zeroes, None).is_some());
        b.turn();
    }
    assert_eq!(started, 100);
    assert!(b.core.slices.free.len() >= all / 2 - 1);
    assert!(b.core.waits.for_slices > 0, "some wait");
    assert!(!b.core.must_turn(), "and keep nobody awake");
    assert!(b.start_on(4, write(0, 4096), None).is_some());
    assert_eq!(b.end().1, Status::SUCCESS);
    b.gate.release();
    for _ in 0..started {
        assert_eq!(b.end().1, Status::SUCCESS);
    }
    assert_eq!(b.core.slices.free.len(), all);
    assert_eq!(b.core.lane(LaneIndex(3)).unwrap().slices, 0);
}

#[test]
fn a_command_that_waits_for_slices_is_interrupted_at_its_limit() {
    let mut b = bench();
    for extent in 0..100 {
        b.grant(extent, 2 * extent % 199, Rights::ReadWrite, 1);
    }
    let free = std::mem::take(&mut b.core.slices.free);
    let slot = b.start(write(0, 4096), Some(&[1; 4096]));
    b.nothing_ends();
    b.core
        .clock
        .set_now_ns(b.core.now_ns() + OWNER_WAIT_LIMIT_NS + 1_000_000_000);
    b.core.tick();
    let done = b.core.next_done().unwrap();
    assert_eq!(
        (done.owner.slot, done.status),
        (slot, Status::COMMAND_INTERRUPTED)
    );
    b.core.staging.release(done.buffer.unwrap());
    b.core.slices.free = free;
}

#[test]
fn a_flush_covers_the_devices_of_its_volume_and_no_others() {
    let mut b = bench();
    let (_, gate) = second(&mut b);
    b.grant(0, 0, Rights::ReadWrite, 1);
    // The other device hangs, which does not concern this volume.
    gate.hold();
    b.start(IoOp::Flush, None);
    assert_eq!(b.end().1, Status::SUCCESS);
    assert_eq!(gate.held(), 0);
    // A missing device does not concern it either.
    let gone = b.core.devices.served[1].take();
    b.start(IoOp::Flush, None);
    assert_eq!(b.end().1, Status::SUCCESS);
    // From now on the volume may write there.
    b.core.devices.served[1] = gone;
    b.volume.may_write_to(DeviceIndex(1));
    let flush = b.start(IoOp::Flush, None);
    b.nothing_ends();
    assert_eq!(gate.held(), 1);
    gate.release();
    assert_eq!(b.end().0, flush);
    // Without that device it waits, with a limit.
    b.core.devices.served[1] = None;
    let flush = b.start(IoOp::Flush, None);
    b.nothing_ends();
    b.core
        .clock
        .set_now_ns(b.core.now_ns() + OWNER_WAIT_LIMIT_NS + 1_000_000_000);
    b.core.tick();
    let done = b.core.next_done().unwrap();
    assert_eq!(
        (done.owner.slot, done.status),
        (flush, Status::COMMAND_INTERRUPTED)
    );
}

#[test]
fn a_flush_that_hangs_is_interrupted_at_its_limit() {
    let mut b = bench();
    b.grant(0, 0, Rights::ReadWrite, 1);
    b.gate.hold();
    let slots = [b.start(IoOp::Flush, None), b.start(IoOp::Flush, None)];
    b.nothing_ends();
    assert!(b.core.has_waiting(), "a sleeping reactor must look");
    b.core.tick();
    assert!(b.core.next_done().is_none());
    b.core
        .clock
        .set_now_ns(b.core.now_ns() + OWNER_WAIT_LIMIT_NS + 1_000_000_000);
    b.core.tick();
    let mut ended: Vec<_> = std::iter::from_fn(|| b.core.next_done()).collect();
    ended.sort_by_key(|done| done.owner.slot);
    assert!(ended.iter().map(|done| done.owner.slot).eq(slots));
    let interrupted = |done: &DoneIo| done.status == Status::COMMAND_INTERRUPTED;
    assert!(ended.iter().all(interrupted));
    // The device is back: no command waits, and the next is served.
    b.gate.release();
    let mut turns = crate::patience::patiently();
    while b.core.has_waiting() {
        turns.next().expect("the flush at the device ends");
        b.turn();
    }
    assert!(b.core.next_done().is_none());
    b.start(IoOp::Flush, None);
    assert_eq!(b.end().1, Status::SUCCESS);
}

#[test]
fn a_volume_that_may_write_nowhere_flushes_at_once() {
    let mut b = bench();
    b.grant(0, 0, Rights::Hole, 100);
    b.gate.hold();
    b.start(IoOp::Flush, None);
    assert_eq!(b.end().1, Status::SUCCESS);
    assert_eq!(b.gate.held(), 0);
}

#[test]
fn settled_when_all_that_was_in_flight_has_ended() {
    let mut b = bench();
    second(&mut b);
    b.grant(0, 0, Rights::ReadWrite, 100);
    let (one, two) = (DeviceIndex(0), DeviceIndex(1));
    b.core.settle(1, one);
    assert!(
        b.upcall().contains("Settled { job: 1 }"),
        "nothing is there"
    );
    // A slice, a flush and a job of the internal lane.
    b.gate.hold();
    b.start(write(0, 4096), Some(&[1; 4096]));
    b.start(IoOp::Flush, None);
    let zero_fill = Job::ZeroFill {
        device: one,
        extents: ExtentRange::new(50, 1),
    };
    b.core.jobs.start(7, zero_fill);
    b.turn();
    assert_eq!(b.gate.held(), 3);
    b.core.settle(2, one);
    b.core.settle(3, two);
    assert!(
        b.upcall().contains("Settled { job: 3 }"),
        "nothing is at the other device"
    );
    b.nothing_ends();
    assert_eq!(b.upcall(), "None");
    b.gate.release();
    // Later operations do not count.
    b.gate
        .hold_some((1 << 20) + 10 * EXTENT..(1 << 20) + 11 * EXTENT, &[]);
    b.start(write(10, 4096), Some(&[2; 4096]));
    assert_eq!((b.end().1, b.end().1), (Status::SUCCESS, Status::SUCCESS));
    let mut heard = Vec::new();
    for _ in crate::patience::patiently() {
        b.turn();
        while let Some(upcall) = b.core.upcalls.pop_front() {
            heard.push(format!("{upcall:?}"));
        }
        if heard.len() == 2 {
            break;
        }
    }
    heard.sort();
    assert!(
        heard[0].contains("JobDone { job: 7, error: None }"),
        "{heard:?}"
    );
    assert!(heard[1].contains("Settled { job: 2 }"), "{heard:?}");
    b.gate.release();
    assert_eq!(b.end().1, Status::SUCCESS);
}

#[test]
fn jobs_of_a_hung_device_hold_up_no_others() {
    let mut b = bench();
    second(&mut b);
    b.gate.hold();
    for job in 0..40 {
        let extents = ExtentRange::new(job, 1);
        let device = DeviceIndex(0);
        b.core.jobs.start(job, Job::ZeroFill { device, extents });
    }
    b.turn();
    assert!(b.gate.held() > 0);
    for job in 100..110 {
        let extents = ExtentRange::new(job, 1);
        let device = DeviceIndex(1);
        b.core.jobs.start(job, Job::ZeroFill { device, extents });
    }
    let mut done = 0;
    for _ in crate::patience::patiently() {
        b.turn();
        while let Some(upcall) = b.core.upcalls.pop_front() {
            let Upcall::JobDone { job, error: None } = upcall else {
                panic!("{upcall:?}");
            };
            assert!((100..110).contains(&job));
            done += 1;
        }
        if done == 10 {
            break;
        }
    }
    assert_eq!(done, 10);
    b.gate.release();
    while b.core.jobs.any() {
        b.turn();
        while b.core.upcalls.pop_front().is_some() {
            done += 1;
        }
    }
    assert_eq!(done, 50);
}

/// A reactor sleeps at once for many operations about to end, not for one or two, nor for a hung
/// device.
#[test]
fn only_busy_devices_are_slept_for() {
    let mut b = bench();
    b.grant(0, 0, Rights::ReadWrite, 100);
    assert_eq!(b.write(0, &[1; 4096]).0, Status::SUCCESS);
    b.gate.hold_some(0..u64::MAX, &[OpKind::Write]);
    for at in 0..SLEEP_SLICES as u64 {
        assert!(!b.core.waits_for_devices(false), "{at}");
        b.start(write(at, 4096), Some(&[2; 4096]));
        b.core.end_turn();
        // An operation ended just now.
        b.core.devices.ended_ns = b.core.now_ns();
    }
    assert!(b.core.waits_for_devices(false));
    b.core.clock.set_now_ns(b.core.devices.ended_ns + LIVELY_NS);
    assert!(!b.core.waits_for_devices(false), "nothing ends any more");
    b.gate.release();
    for _ in 0..SLEEP_SLICES {
        assert_eq!(b.end().1, Status::SUCCESS);
    }
    assert!(!b.core.waits_for_devices(false), "nothing is there");
}
