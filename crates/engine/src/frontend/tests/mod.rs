//! A real reactor serves a test-only frontend.

pub(super) mod memory_queue;

use super::vm::closer::Closer;
use super::{FrontendParts, all};
use crate::bell::ControlBell;
use crate::core::staging::Staging;
use crate::core::{Core, IoOp, ServedDevice};
use crate::lane::{Lane, LaneIndex};
use crate::memory::{Memory, ReactorMemory};
use crate::reactor::mailbox::{Post, mailbox};
use crate::reactor::{Reactor, Sockets};
use crate::volume::Volume;
use forebay_device::ring::{Ring, RingOptions};
use forebay_device::{Device, OpenOptions};
use forebay_nvme::Status;
use forebay_xlate::boundary::message::{
    DeviceConfig, DeviceFence, ExportConfig, ExportId, VolumeConfig,
};
use forebay_xlate::boundary::region::Region;
use forebay_xlate::{DeviceIndex, ExtentIndex, ExtentRange, Rights, VolumeId, Word};
use memory_queue::Request;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

const EXTENT: u32 = 64 << 10;

fn device(path: &std::path::Path) -> ServedDevice {
    std::fs::File::create(path)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    let spec = format!("file:{}", path.display()).parse().unwrap();
    let device = Device::open(&spec, &OpenOptions::default()).unwrap();
    ServedDevice {
        config: Arc::new(DeviceConfig {
            device: DeviceIndex(0),
            spec: spec.to_string(),
            uuid: [1; 16],
            data_offset_bytes: 0,
            extent_bytes: EXTENT,
            extents: 16,
            fence: DeviceFence::Locks,
        }),
        device: Arc::new(device),
    }
}

/// A lane of a volume that is mapped to the device's first extents.
fn lane(region: &Arc<Region>) -> Lane {
    let volume = Volume::new(VolumeConfig {
        volume: VolumeId(1),
        uuid: [1; 16],
        read_only: false,
        size_bytes: 4 * u64::from(EXTENT),
        block_bytes: 4096,
        extent_bytes: EXTENT,
        epoch: 0,
        image: None,
    });
    let volume = Arc::new(volume.unwrap());
    for at in 0..4 {
        let word = Word::new(DeviceIndex(0), ExtentIndex(at), Rights::ReadWrite).unwrap();
        volume.table.install(ExtentRange::new(at, 1), word);
    }
    let export = ExportConfig {
        export: ExportId(1),
        volume: VolumeId(1),
        nqn: "nqn.2026-01.io.forebay:t.v".into(),
        serial: "s".into(),
        hosts: Default::default(),
        any_host: true,
        frontend: Default::default(),
    };
    Lane::new(LaneIndex(0), volume, Arc::new(export), region.clone())
}

#[test]
fn a_frontend_that_is_one_file_and_one_line_serves_a_write_and_a_read() {
    let dir = tempfile::tempdir().unwrap();
    let region = Arc::new(Region::anonymous(1).unwrap());
    let (mut posts, mailbox) = mailbox(ControlBell::new().unwrap()).unwrap();
    let its_region = region.clone();
    let reactor = std::thread::spawn(move || {
        let memory = Memory::create().unwrap();
        let ReactorMemory { receive, staging } = memory.reactor(0).unwrap();
        let ring = Ring::new(&RingOptions::default()).unwrap();
        let core = Core::new(0, its_region.clone(), Staging::over(staging), ring);
        let sockets = Sockets::new(mailbox.wake_fd()).unwrap();
        let frontends = all(FrontendParts {
            reactor: 0,
            region: its_region,
            epoll: sockets.epoll().clone(),
            memory,
            receive: Some(receive),
            closer: Closer::start().unwrap(),
            cpus: None,
        });
        Reactor {
            core,
            frontends,
            mailbox,
            sockets,
        }
        .run();
    });
    posts.post(Post::Device(device(&dir.path().join("device"))));
    posts.post(Post::Fenced(DeviceIndex(0)));
    posts.post(Post::Lane(Box::new(lane(&region)), 1));
    let mut ask = |op, data: &[u8]| {
        let (answer, answers) = channel();
        let request = Request {
            export: ExportId(1),
            op,
            data: data.to_vec(),
            answer,
        };
        posts.post(Post::Frontend(Box::new(request)));
        answers.recv_timeout(Duration::from_secs(20)).unwrap()
    };
    let (offset_bytes, len_bytes) = (u64::from(EXTENT) - 4096, 8192);
    let data = vec![0x5A; len_bytes as usize];
    let write = IoOp::Write {
        offset_bytes,
        len_bytes,
        fua: false,
    };
    assert_eq!(ask(write, &data).0, Status::SUCCESS);
    let read = IoOp::Read {
        offset_bytes,
        len_bytes,
    };
    assert_eq!(ask(read, &[]), (Status::SUCCESS, data));
    posts.post(Post::Stop);
    reactor.join().unwrap();
}
