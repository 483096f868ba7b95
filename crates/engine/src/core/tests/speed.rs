//! A fixed load on the core alone, timed by `cargo xtask bench device`.
//!
//! **Design.** Random 4 KiB operations in a file; the ring is polled or slept in as by a reactor.
//! `FOREBAY_SPEED=/path:randread:32:2` means two seconds of reads at depth 32 in this file, without
//! its first MiB. It prints commands per second, and processor time of each in ns.

use super::*;
use forebay_xlate::boundary::region::CommandState;
use rustix::time::{ClockId, clock_gettime};

const VARIABLE: &str = "FOREBAY_SPEED";
const BLOCK: u32 = 4096;
const BASE: u64 = 1 << 20;

struct Load {
    core: Core,
    blocks: u64,
    write: bool,
    random: u64,
    number: u64,
}

impl Load {
    fn new(path: &std::path::Path, write: bool) -> Self {
        let spec: DeviceSpec = format!("file:{}", path.display()).parse().unwrap();
        let device = Device::open(&spec, &OpenOptions::default()).unwrap();
        let extents = (std::fs::metadata(path).unwrap().len() - BASE) / EXTENT;
        let config = DeviceConfig {
            device: DeviceIndex(0),
            uuid: [1; 16],
            spec: spec.to_string(),
            data_offset_bytes: BASE,
            extent_bytes: EXTENT as u32,
            extents,
            fence: DeviceFence::Locks,
        };
        let region = Arc::new(Region::anonymous(1).unwrap());
        let ring = Ring::new(&RingOptions::default()).unwrap();
        let mut core = Core::new(0, region.clone(), Staging::new().unwrap(), ring);
        core.set_device(ServedDevice {
            config: Arc::new(config),
            device: Arc::new(device),
        });
        core.fenced(DeviceIndex(0));
        let (mut lane, _) = lane(3, V, &region);
        let config = VolumeConfig {
            size_bytes: extents * EXTENT,
            ..lane.volume.config.clone()
        };
        let volume = Arc::new(Volume::new(config).unwrap());
        lane.volume = volume.clone();
        core.set_lane(lane);
        let word = Word::new(DeviceIndex(0), ExtentIndex(0), Rights::ReadWrite).unwrap();
        volume.may_write_to(DeviceIndex(0));
        volume.table.install(ExtentRange::new(0, extents), word);
        Self {
            core,
            blocks: extents * (EXTENT / u64::from(BLOCK)),
            write,
            random: 1,
            number: 0,
        }
    }

    fn start(&mut self, slot: u16) {
        self.random = self.random.wrapping_mul(0x5851_f42d_4c95_7f2d) | 1;
        self.number += 1;
        let block = (u128::from(self.random ^ self.random >> 33) * u128::from(self.blocks)) >> 64;
        let offset_bytes = block as u64 * u64::from(BLOCK);
        let op = match self.write {
            true => IoOp::Write {
                offset_bytes,
                len_bytes: BLOCK,
                fua: false,
            },
            false => IoOp::Read {
                offset_bytes,
                len_bytes: BLOCK,
            },
        };
        let record = CommandRef::new(0, slot);
        let state = CommandState::taken(self.number).0;
        self.core.records.commands[record.place()]
            .state
            .store(state, Relaxed);
        let new = NewIo {
            owner: Issuer {
                frontend: FrontendIndex(0),
                conn: 0,
                conn_generation: 0,
                slot,
            },
            lane: LaneIndex(3),
            op,
            buffer: self.core.staging.allocate(BLOCK),
            record,
            over_ns: None,
        };
        assert!(self.core.start(new).is_ok());
    }

    /// Takes ended commands, and restarts them while `more`. Returns their number.
    fn turn(&mut self, more: bool) -> u64 {
        self.core.begin_turn();
        self.core.reap();
        let mut ended = 0;
        while let Some(done) = self.core.next_done() {
            assert_eq!(done.status, Status::SUCCESS);
            self.core.staging.release(done.buffer.unwrap());
            ended += 1;
            if more {
                self.start(done.owner.slot);
            }
        }
        self.core.end_turn();
        if ended == 0 && self.core.waits_for_devices(false) {
            let limit = std::time::Duration::from_millis(100);
            self.core.devices.ring.wait(1, Some(limit)).unwrap();
        }
        ended
    }
}

#[test]
fn a_device_is_loaded() {
    let (mut path, mut write, mut depth, mut seconds) = (None, true, 8, 0.0);
    let wanted = std::env::var(VARIABLE);
    if let Ok(wanted) = &wanted {
        let mut words = wanted.split(':');
        path = words.next().map(std::path::PathBuf::from);
        write = words.next() == Some("randwrite");
        depth = words.next().unwrap().parse().unwrap();
        seconds = words.next().unwrap().parse().unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    let path = path.unwrap_or_else(|| {
        let path = dir.path().join("device");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(8 << 20).unwrap();
        path
    });
    let mut load = Load::new(&path, write);
    let cpu = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        std::time::Duration::new(time.tv_sec as u64, time.tv_nsec as u32).as_secs_f64()
    };
    let (begun, cpu_before) = (std::time::Instant::now(), cpu());
    load.core.begin_turn();
    for slot in 0..depth {
        load.start(slot);
    }
    load.core.end_turn();
    let (mut ended, mut left) = (0, u64::from(depth));
    loop {
        let more = ended < 64 || begun.elapsed().as_secs_f64() < seconds;
        let now = load.turn(more);
        ended += now;
        if !more {
            left -= now;
            if left == 0 {
                break;
            }
        }
    }
    let iops = ended as f64 / begun.elapsed().as_secs_f64();
    println!(
        "iops {iops} ns {}",
        (cpu() - cpu_before) * 1e9 / ended as f64
    );
    assert_eq!(load.core.staging.out(), 0);
}
