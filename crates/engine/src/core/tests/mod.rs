//! The core on real device files; the test acts as the owner.

use super::*;
use crate::volume::Volume;
use forebay_device::gate::TestGate;
use forebay_device::ring::RingOptions;
use forebay_device::{Device, DeviceSpec, Errno, OpKind, OpenOptions, Registration};
use forebay_xlate::boundary::message::{
    DeviceConfig, DeviceFence, ExportConfig, ExportId, FaultFailure, Job, VolumeConfig,
};
use forebay_xlate::reactor_side::Answer;
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, Rights, VolumeId, Word};

const EXTENT: u64 = 64 << 10;
const V: VolumeId = VolumeId(9);

mod admit;
mod copies;
mod delays;
mod errors;
mod fused;
mod guest;
mod hung;
mod offload;
mod orders;
mod overwrites;
mod parked;
mod preallocated;
mod recovered;
mod registered;
mod speed;
mod unready;
mod zeroing;

struct Bench {
    core: Core,
    gate: Arc<TestGate>,
    volume: Arc<Volume>,
    path: std::path::PathBuf,
    _dir: tempfile::TempDir,
    next_slot: u16,
    /// The queue of [`Bench::start`]'s commands.
    queue: u32,
}

/// A device of 200 extents, and the gate before it.
fn device(index: u8, spec: &DeviceSpec) -> (ServedDevice, Arc<TestGate>) {
    let options = OpenOptions {
        create_missing: true,
        ..OpenOptions::default()
    };
    let mut device = Device::open(spec, &options).unwrap();
    let gate = TestGate::new();
    device.attach_gate(gate.clone());
    let config = DeviceConfig {
        device: DeviceIndex(index),
        uuid: [1; 16],
        spec: spec.to_string(),
        data_offset_bytes: 1 << 20,
        extent_bytes: EXTENT as u32,
        extents: 200,
        fence: DeviceFence::Locks,
    };
    let served = ServedDevice {
        config: Arc::new(config),
        device: Arc::new(device),
    };
    (served, gate)
}

/// A volume of 100 extents and its lane.
fn lane(lane: u32, volume: VolumeId, region: &Arc<Region>) -> (Lane, Arc<Volume>) {
    let config = VolumeConfig {
        volume,
        uuid: [2; 16],
        read_only: false,
        size_bytes: 100 * EXTENT,
        block_bytes: 4096,
        extent_bytes: EXTENT as u32,
        epoch: 0,
        image: None,
    };
    let served = Arc::new(Volume::new(config).unwrap());
    let export = ExportConfig {
        export: ExportId(volume.0),
        volume,
        nqn: format!("nqn.2026-01.io.forebay:t.v{}", volume.0),
        serial: "s".into(),
        hosts: Default::default(),
        any_host: true,
        frontend: Default::default(),
    };
    let lane = Lane::new(
        LaneIndex(lane),
        served.clone(),
        Arc::new(export),
        region.clone(),
    );
    (lane, served)
}

/// With a device before its fence.
fn unfenced(kind: &str) -> Bench {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("device");
    let spec: DeviceSpec = match kind {
        "ram" | "volatile" => {
            let spec = format!("{kind}:{}?size=16M", path.display());
            spec.parse().unwrap()
        }
        _ => {
            std::fs::File::create(&path)
                .unwrap()
                .set_len(16 << 20)
                .unwrap();
            format!("file:{}", path.display()).parse().unwrap()
        }
    };
    let (served, gate) = device(0, &spec);
    let region = Arc::new(Region::anonymous(1).unwrap());
    let ring = Ring::new(&RingOptions::default()).unwrap();
    let mut core = Core::new(0, region.clone(), Staging::new().unwrap(), ring);
    core.set_device(served);
    let (lane, volume) = lane(3, V, &region);
    core.set_lane(lane);
    Bench {
        core,
        gate,
        volume,
        path,
        _dir: dir,
        next_slot: 0,
        queue: 0,
    }
}

fn bench_with(kind: &str) -> Bench {
    let mut b = unfenced(kind);
    b.core.fenced(DeviceIndex(0));
    b
}

fn bench() -> Bench {
    bench_with("file")
}

impl Bench {
    fn start(&mut self, op: IoOp, data: Option<&[u8]>) -> u16 {
        self.start_on(3, op, data).unwrap()
    }

    /// The slot, or `None` if the core has no room for that lane.
    fn start_on(&mut self, lane: u32, op: IoOp, data: Option<&[u8]>) -> Option<u16> {
        let slot = self.next_slot;
        self.next_slot += 1;
        let len = match op {
            IoOp::Read { len_bytes, .. } | IoOp::Write { len_bytes, .. } => len_bytes,
            IoOp::Deallocate { ranges } => u32::from(ranges) * 16,
            _ => 0,
        };
        let buffer = (len > 0).then(|| {
            let mut b = self.core.staging.allocate(len).unwrap();
            match data {
                Some(data) => b.as_mut_slice().copy_from_slice(data),
                None => b.as_mut_slice().fill(0x77),
            }
            b
        });
        let new = NewIo {
            owner: Issuer {
                frontend: FrontendIndex(0),
                conn: 0,
                conn_generation: 0,
                slot,
            },
            lane: LaneIndex(lane),
            op,
            buffer,
            record: CommandRef::new(self.queue, slot),
            over_ns: None,
        };
        self.core.begin_turn();
        match self.core.start(new) {
            Ok(()) => Some(slot),
            Err(new) => {
                if let Some(buffer) = new.buffer {
                    self.core.staging.release(buffer);
                }
                None
            }
        }
    }

    fn turn(&mut self) {
        self.core.begin_turn();
        self.core.end_turn();
        self.core.reap();
    }

    /// Turns until a command ends; (slot, status, its bytes).
    fn end(&mut self) -> (u16, Status, Vec<u8>) {
        for _ in crate::patience::patiently() {
            if let Some(done) = self.core.next_done() {
                let bytes = done
                    .buffer
                    .as_ref()
                    .map(|b| b.as_slice().to_vec())
                    .unwrap_or_default();
                if let Some(b) = done.buffer {
                    self.core.staging.release(b);
                }
                let record = CommandRef::new(self.queue, done.owner.slot);
                self.core.recovered.pair_answered(record);
                return (done.owner.slot, done.status, bytes);
            }
            self.turn();
        }
        panic!("no command ended");
    }

    fn nothing_ends(&mut self) {
        for _ in 0..50 {
            self.turn();
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
        assert!(self.core.next_done().is_none());
    }

    fn grant(&mut self, extent: u64, at: u64, rights: Rights, count: u64) {
        let word = Word::new(DeviceIndex(0), ExtentIndex(at), rights).unwrap();
        let range = ExtentRange::new(extent, count);
        if rights == Rights::ReadWrite {
            self.volume.may_write_to(DeviceIndex(0));
        }
        self.volume.table.install(range, word);
        self.core.fault_answered(V, range, Answer::Granted);
    }

    fn upcall(&mut self) -> String {
        format!("{:?}", self.core.upcalls.pop_front())
    }

    fn turn_until_upcall(&mut self) {
        for _ in crate::patience::patiently() {
            self.turn();
            if !self.core.upcalls.is_empty() {
                return;
            }
        }
        panic!("nothing was said");
    }

    fn write(&mut self, at: u64, data: &[u8]) -> (Status, u16) {
        let len_bytes = data.len() as u32;
        let slot = self.start(
            IoOp::Write {
                offset_bytes: at,
                len_bytes,
                fua: false,
            },
            Some(data),
        );
        let (ended, status, _) = self.end();
        assert_eq!(ended, slot);
        (status, slot)
    }

    fn read(&mut self, at: u64, len_bytes: u32) -> Vec<u8> {
        self.start(
            IoOp::Read {
                offset_bytes: at,
                len_bytes,
            },
            None,
        );
        let (_, status, bytes) = self.end();
        assert_eq!(status, Status::SUCCESS);
        bytes
    }
}

#[test]
fn a_hole_reads_zeros_and_a_write_to_it_faults() {
    let mut b = bench();
    b.start(
        IoOp::Read {
            offset_bytes: 0,
            len_bytes: 8192,
        },
        None,
    );
    assert!(
        b.upcall()
            .contains("Fault { volume: VolumeId(9), extent: 0, write: false, whole: false }")
    );
    b.nothing_ends();
    b.grant(0, 0, Rights::Hole, 10);
    assert_eq!(b.end().2, vec![0; 8192]);
    b.start(
        IoOp::Write {
            offset_bytes: 4096,
            len_bytes: 4096,
            fua: false,
        },
        Some(&[5; 4096]),
    );
    assert!(b.upcall().contains("extent: 0, write: true"));
    b.grant(0, 7, Rights::ReadWrite, 1);
    assert_eq!(b.end().1, Status::SUCCESS);
    let mut want = vec![0; 4096];
    want.extend([5; 4096]);
    assert_eq!(b.read(0, 8192), want);
}

#[test]
fn a_command_across_scattered_extents_lands_in_order() {
    for kind in ["file", "ram"] {
        let mut b = bench_with(kind);
        for (extent, at) in [(0, 50), (1, 51), (2, 10), (3, 90)] {
            b.grant(extent, at, Rights::ReadWrite, 1);
        }
        let data: Vec<u8> = (0..4 * EXTENT - 8192)
            .map(|i| (i / 512) as u8 ^ i as u8)
            .collect();
        assert_eq!(b.write(4096, &data).0, Status::SUCCESS);
        assert_eq!(b.read(4096, data.len() as u32), data, "{kind}");
        let raw = std::fs::read(&b.path).unwrap();
        let at = (1 << 20) + 10 * EXTENT as usize;
        assert_eq!(
            &raw[at..at + 4096],
            &data[2 * EXTENT as usize - 4096..][..4096]
        );
    }
}

#[test]
fn parked_command_is_translated_again() {
    let mut b = bench();
    b.grant(0, 1, Rights::ReadWrite, 1);
    // Extent 0 is submitted, extent 1 parks.
    b.start(
        IoOp::Write {
            offset_bytes: EXTENT - 4096,
            len_bytes: 8192,
            fua: false,
        },
        Some(&[3; 8192]),
    );
    assert!(b.upcall().contains("extent: 1, write: true"));
    b.grant(1, 2, Rights::Read, 1);
    assert!(
        b.upcall().contains("extent: 1, write: true"),
        "a read grant doesn't satisfy a write"
    );
    b.grant(1, 2, Rights::ReadWrite, 1);
    assert_eq!(b.end().1, Status::SUCCESS);
    assert_eq!(b.read(EXTENT - 4096, 8192), vec![3; 8192]);
}

#[test]
fn revoke_waits_for_inflight() {
    let mut b = bench();
    b.grant(0, 1, Rights::ReadWrite, 4);
    b.gate.hold();
    let write = b.start(
        IoOp::Write {
            offset_bytes: EXTENT,
            len_bytes: 4096,
            fua: false,
        },
        Some(&[1; 4096]),
    );
    let read = b.start(
        IoOp::Read {
            offset_bytes: 3 * EXTENT,
            len_bytes: 4096,
        },
        None,
    );
    b.turn();
    assert_eq!(b.gate.held(), 2);
    // A revoke that overlaps nothing in flight is acknowledged at once.
    b.volume.table.clear(ExtentRange::new(0, 1));
    b.core
        .slices
        .revoke(1, V, ExtentRange::new(0, 1), false, &mut b.core.upcalls);
    assert!(b.upcall().contains("Drained { revoke: 1 }"));
    b.volume.table.clear(ExtentRange::new(1, 1));
    b.core
        .slices
        .revoke(2, V, ExtentRange::new(1, 1), false, &mut b.core.upcalls);
    // A command after the revoke faults and is not waited for.
    let late = b.start(
        IoOp::Write {
            offset_bytes: EXTENT,
            len_bytes: 4096,
            fua: false,
        },
        Some(&[2; 4096]),
    );
    assert!(b.upcall().contains("Fault"));
    b.nothing_ends();
    assert_eq!(
        b.upcall(),
        "None",
        "not acknowledged while the write is in flight"
    );
    b.gate.release();
    let mut ended = [b.end(), b.end()];
    ended.sort_by_key(|e| e.0);
    assert_eq!((ended[0].0, ended[0].1), (write, Status::SUCCESS));
    assert_eq!((ended[1].0, ended[1].1), (read, Status::SUCCESS));
    assert!(b.upcall().contains("Drained { revoke: 2 }"));
    b.grant(1, 100, Rights::ReadWrite, 1);
    assert_eq!(b.end().0, late);
    assert_eq!(
        b.read(EXTENT, 4096),
        vec![2; 4096],
        "the new place holds the later write alone"
    );
}

#[test]
fn flush_goes_to_the_device_then_to_the_owner() {
    let mut b = bench();
    b.volume.granted(5);
    b.grant(0, 1, Rights::ReadWrite, 1);
    assert_eq!(b.write(0, &[1; 4096]).0, Status::SUCCESS);
    b.gate.hold_some(0..u64::MAX, &[OpKind::Flush]);
    b.start(IoOp::Flush, None);
    let second = b.start(IoOp::Flush, None);
    b.nothing_ends();
    assert_eq!(b.gate.held(), 1, "the second waits for the next flush");
    assert_eq!(b.upcall(), "None", "the owner is asked after the device");
    b.gate.release();
    b.turn_until_upcall();
    assert!(
        b.upcall()
            .contains("CommitWanted { volume: VolumeId(9), sequence: 5 }")
    );
    b.nothing_ends();
    b.volume.committed(5);
    b.core.commit_ended(V, Ok(()));
    assert_eq!(b.end().1, Status::SUCCESS);
    assert_eq!(b.end().0, second);
    // Nothing is uncommitted, so the owner is not asked.
    b.start(IoOp::Flush, None);
    assert_eq!(b.end().1, Status::SUCCESS);
    assert_eq!(b.upcall(), "None");
}

#[test]
fn fua_waits_for_an_uncommitted_mapping() {
    let mut b = bench();
    b.volume.granted(2);
    b.grant(0, 1, Rights::ReadWrite, 1);
    b.start(
        IoOp::Write {
            offset_bytes: 0,
            len_bytes: 4096,
            fua: true,
        },
        Some(&[1; 4096]),
    );
    b.turn_until_upcall();
    assert!(b.upcall().contains("CommitWanted"));
    b.nothing_ends();
    b.core.commit_ended(V, Err(2));
    assert_eq!(b.end().1, Status::INTERNAL_ERROR);
    b.volume.committed(2);
    b.start(
        IoOp::Write {
            offset_bytes: 0,
            len_bytes: 4096,
            fua: true,
        },
        Some(&[2; 4096]),
    );
    assert_eq!(b.end().1, Status::SUCCESS);
    assert_eq!(b.upcall(), "None");
}

#[test]
fn an_unanswered_fault_ends_with_command_interrupted() {
    let mut b = bench();
    b.start(
        IoOp::Read {
            offset_bytes: 0,
            len_bytes: 4096,
        },
        None,
    );
    b.core.clock.now_ns += OWNER_WAIT_LIMIT_NS - 1;
    b.core.tick();
    assert!(b.core.next_done().is_none());
    b.core.clock.now_ns += 2;
    b.core.tick();
    let done = b.core.next_done().unwrap();
    assert_eq!(done.status, Status::COMMAND_INTERRUPTED);
    b.core.staging.release(done.buffer.unwrap());
}

#[test]
fn the_internal_lane_zero_fills() {
    let mut b = bench();
    b.grant(0, 1, Rights::ReadWrite, 4);
    assert_eq!(b.write(0, &vec![9; 4 * EXTENT as usize]).0, Status::SUCCESS);
    let device = DeviceIndex(0);
    b.core.jobs.start(
        1,
        Job::ZeroFill {
            device,
            extents: ExtentRange::new(2, 2),
        },
    );
    b.core.jobs.start(2, Job::Flush { device });
    b.core.jobs.start(
        3,
        Job::ZeroFill {
            device,
            extents: ExtentRange::new(199, 2),
        },
    );
    b.core.jobs.start(
        4,
        Job::Flush {
            device: DeviceIndex(4),
        },
    );
    let mut seen = Vec::new();
    for _ in crate::patience::patiently() {
        b.turn();
        while let Some(u) = b.core.upcalls.pop_front() {
            seen.push(format!("{u:?}"));
        }
        if seen.len() == 4 {
            break;
        }
    }
    seen.sort();
    assert!(
        seen[0].contains("job: 1, error: None") && seen[1].contains("job: 2, error: None"),
        "{seen:?}"
    );
    assert!(seen[2].contains("job: 3, error: Some") && seen[3].contains("job: 4, error: Some"));
    assert!(!b.core.jobs.any());
    let got = b.read(0, 4 * EXTENT as u32);
    let (a, z) = (EXTENT as usize, 3 * EXTENT as usize);
    assert!(
        got[..a].iter().all(|x| *x == 9)
            && got[a..z].iter().all(|x| *x == 0)
            && got[z..].iter().all(|x| *x == 9)
    );
}

#[test]
fn a_removed_lane_goes_when_its_commands_have() {
    let mut b = bench();
    b.start(
        IoOp::Read {
            offset_bytes: 0,
            len_bytes: 4096,
        },
        None,
    );
    assert!(b.upcall().contains("Fault"));
    b.gate.hold();
    b.grant(0, 1, Rights::Read, 1);
    b.core.remove_lane(LaneIndex(3));
    b.nothing_ends();
    assert_eq!(b.upcall(), "None");
    b.gate.release();
    assert_eq!(b.end().1, Status::SUCCESS);
    assert!(b.upcall().contains("LaneGone { lane: LaneIndex(3) }"));
    b.start(IoOp::Flush, None);
    assert_eq!(b.end().1, Status::INVALID_NAMESPACE_OR_FORMAT);
}

#[test]
fn a_device_that_is_not_served_yet_is_waited_for() {
    let mut b = bench();
    b.grant(0, 1, Rights::ReadWrite, 1);
    let served = b.core.devices.served[0].take().unwrap();
    let write = b.start(
        IoOp::Write {
            offset_bytes: 0,
            len_bytes: 4096,
            fua: false,
        },
        Some(&[8; 4096]),
    );
    b.start(IoOp::Flush, None);
    b.nothing_ends();
    b.core.set_device(served);
    let mut ended = [b.end(), b.end()];
    ended.sort_by_key(|e| e.0);
    assert_eq!(
        (ended[0].0, ended[0].1, ended[1].1),
        (write, Status::SUCCESS, Status::SUCCESS)
    );
    assert_eq!(b.read(0, 4096), vec![8; 4096]);
}
