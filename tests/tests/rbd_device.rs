//! The device kind `rbd` on a cluster.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use forebay_device::conformance::{Driver, Rng, random_bytes};
use forebay_device::{Device, Errno, IMAGE_SPAN_BYTES, ImageName, Op, OpenOptions, Submitted};
use forebay_rbd::{
    Buffer, ClientConfig, Completions, Image, ImageRequest, Library, OpenMode, Pool, RadosClient,
};
use xtask::ceph::{Cluster, Options, Programs, Release};

const LIBRARIES: &str = "FOREBAY_CEPH_LIBRARIES";
const LIMIT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

struct Lab {
    cluster: Cluster,
    folder: tempfile::TempDir,
    library: Arc<Library>,
}

impl Lab {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let options = Options::new(&folder.path().join("ceph"), Release::V16);
        let cluster = Cluster::start(&options).unwrap();
        let libraries = cluster.programs().client_libraries();
        Self {
            library: Library::load(Some(&libraries)).unwrap(),
            cluster,
            folder,
        }
    }

    /// A client of its own.
    fn device(&self) -> Device {
        let config = self.cluster.config_file();
        let spec = format!("rbd:{}?user=admin&client={:032x}", config.display(), 1);
        Device::open(&spec.parse().unwrap(), &OpenOptions::default()).unwrap()
    }

    /// Another client, which is not ours.
    fn other(&self) -> (Arc<RadosClient>, Arc<Pool>) {
        let mut config = ClientConfig::new("admin");
        config.file = Some(self.cluster.config_file());
        let client = RadosClient::connect(&self.library, &config).unwrap();
        let pool = client.pool("rbd", None).unwrap();
        (client, pool)
    }

    fn create(&self, image: &str, more: &[&str]) {
        let path = format!("rbd/{image}");
        let create = ["create", &path, "--size", "16M"];
        self.cluster.rbd(&[&create, more].concat()).unwrap();
    }

    fn content(&self, image: &str) -> Vec<u8> {
        let file = self.folder.path().join("content");
        let (path, image) = (file.to_str().unwrap(), format!("rbd/{image}"));
        self.cluster
            .rbd(&["export", "--no-progress", &image, path])
            .unwrap();
        let content = std::fs::read(Path::new(path)).unwrap();
        std::fs::remove_file(path).unwrap();
        content
    }
}

fn name(image: &str) -> ImageName {
    ImageName {
        pool: "rbd".to_owned(),
        namespace: String::new(),
        image: image.to_owned(),
        snapshot: None,
    }
}

fn at(span: u32, offset: u64) -> u64 {
    u64::from(span) * IMAGE_SPAN_BYTES + offset
}

fn unwatched() -> Arc<dyn Fn() + Send + Sync> {
    Arc::new(|| {})
}

/// Opens an image for reading and writing.
fn ready(device: &Device, span: u32, image: &str) {
    device.open_image(span, &name(image), unwatched()).unwrap();
    device.lock_image(span).unwrap();
}

fn write(driver: &mut Driver, device: &Device, offset: u64, byte: u8) -> Result<(), Errno> {
    let buf = driver.fill(0, &[byte; 4096]);
    driver.run(device, Op::write(offset, buf))
}

fn read(driver: &mut Driver, device: &Device, offset: u64) -> Result<Vec<u8>, Errno> {
    let buf = driver.fill(0, &[0xee; 4096]);
    driver.run(device, Op::read(offset, buf))?;
    Ok(driver.bytes(0, 4096))
}

fn other_write(image: &Image, byte: u8) -> Result<usize, Errno> {
    let completions = Arc::new(Completions::new().unwrap());
    let mut buffer = Buffer::new(4096);
    buffer.bytes_mut().fill(byte);
    let request = ImageRequest::Write {
        offset: 0,
        length: 4096,
        force_unit_access: false,
    };
    image.submit(request, buffer, 0, &completions).unwrap();
    let begun = Instant::now();
    loop {
        if let Some(ended) = completions.wait(LIMIT).next() {
            return ended.result;
        }
        assert!(begun.elapsed() < LIMIT, "a write hangs");
    }
}

#[test]
fn rbd_device_on_a_cluster() {
    if forebay_tests::ceph::must_skip().unwrap() {
        return;
    }
    if std::env::var_os(LIBRARIES).is_none() {
        // The device finds the libraries as an engine does. This process must not set a variable.
        let programs = Programs::prepare(Release::V16).unwrap();
        let mut again = Command::new(std::env::current_exe().unwrap());
        again.args(["--exact", "--nocapture", "rbd_device_on_a_cluster"]);
        again.env(LIBRARIES, programs.client_libraries());
        assert!(again.status().unwrap().success());
        return;
    }
    let lab = Lab::start();
    for (name, test) in TESTS {
        let begun = Instant::now();
        test(&lab);
        println!("{name}: {:.1} s", begun.elapsed().as_secs_f64());
    }
}

/// A name, and its test.
type Case = (&'static str, fn(&Lab));

const TESTS: &[Case] = &[
    ("states", operations_wait_for_their_image),
    ("failed open", a_failed_open_is_heard_and_repaired),
    ("round trip", scattered_operations_come_back),
    ("cache", writes_are_durable_even_with_a_cache),
    ("resize", an_image_resized_elsewhere),
    ("lock", a_locked_image_is_refused_by_address),
    ("our lock", our_lock_stays_ours),
    ("snapshot", a_snapshot_is_read_only),
    ("fence", a_predecessor_writes_no_more),
    ("quota", a_quota_ends_writes),
    ("full", a_full_cluster_ends_writes),
];

fn operations_wait_for_their_image(lab: &Lab) {
    lab.create("states", &[]);
    let device = lab.device();
    assert!(device.client_address().unwrap().contains(":0/"));
    assert!(!device.is_blocklisted());
    let mut driver = Driver::new();
    let buf = driver.fill(0, &[1; 4096]);
    let mut queue = |mut op: Op| device.queue(&mut driver.ring, &mut op, 0);
    assert_eq!(queue(Op::read(at(3, 0), buf)), Submitted::NotReady);
    assert_eq!(queue(Op::flush()), Submitted::Done(Ok(())));

    let size = device.open_image(3, &name("states"), unwatched());
    assert_eq!(size, Ok(16 * MIB));
    for op in [
        Op::write(at(3, 0), buf),
        Op::write_zeroes(at(3, 0), 512),
        Op::punch(at(3, 0), 512),
    ] {
        assert_eq!(queue(op), Submitted::NotReady);
    }
    assert_eq!(queue(Op::read(at(2, 0), buf)), Submitted::NotReady);
    assert_eq!(read(&mut driver, &device, at(3, 0)), Ok(vec![0; 4096]));
    device.lock_image(3).unwrap();
    write(&mut driver, &device, at(3, 0), 1).unwrap();
    assert_eq!(read(&mut driver, &device, at(3, 0)), Ok(vec![1; 4096]));
    device.close_image(3);
    assert_eq!(read(&mut driver, &device, at(3, 0)), Err(Errno::NODEV));
    assert!(
        device
            .open_image(4096, &name("states"), unwatched())
            .is_err()
    );
}

fn a_failed_open_is_heard_and_repaired(lab: &Lab) {
    let device = lab.device();
    let mut driver = Driver::new();
    let error = device
        .open_image(0, &name("late"), unwatched())
        .unwrap_err();
    assert!(error.contains("rbd/late"), "{error}");
    assert_eq!(read(&mut driver, &device, 0), Err(Errno::NOENT));
    assert!(device.lock_image(0).is_err());
    lab.create("late", &[]);
    ready(&device, 0, "late");
    write(&mut driver, &device, 0, 1).unwrap();
    // Once more: the lock goes from the earlier handle to the next.
    ready(&device, 0, "late");
    assert_eq!(read(&mut driver, &device, 0), Ok(vec![1; 4096]));
}

/// Many operations in flight, each on blocks that no other has.
fn scattered_operations_come_back(lab: &Lab) {
    const BLOCK: usize = 512;
    const OPERATIONS: u64 = 1500;
    lab.create("scattered", &["--object-size", "1M"]);
    let device = lab.device();
    ready(&device, 5, "scattered");
    let mut driver = Driver::new();
    let mut random = Rng::with_seed(31);
    let mut model = vec![0; 16 << 20];
    let mut running: Vec<(u64, std::ops::Range<usize>, Option<Vec<u8>>)> = Vec::new();
    for number in 0..OPERATIONS {
        while running.len() == 16 {
            take(&mut driver, &device, &mut running);
        }
        let blocks = [1, 3, 8, 64, 511][random.usize(..5)];
        let first = random.usize(..model.len() / BLOCK - blocks);
        let range = first * BLOCK..(first + blocks) * BLOCK;
        let overlaps = |(_, other, _): &(_, std::ops::Range<usize>, _)| {
            other.start < range.end && range.start < other.end
        };
        if running.iter().any(overlaps) {
            continue;
        }
        let slots = 1..=16;
        let free = |slot: &u64| running.iter().all(|(used, ..)| used != slot);
        let slot = slots.into_iter().find(free).unwrap();
        let offset = at(5, range.start as u64);
        let len = range.len() as u64;
        let mut expected = None;
        let op = match random.usize(..8) {
            0..3 => {
                expected = Some(model[range.clone()].to_vec());
                Op::read(offset, driver.fill(slot as u32, &vec![0xee; range.len()]))
            }
            kind @ 3..6 => {
                let bytes = random_bytes(&mut random, range.len());
                model[range.clone()].copy_from_slice(&bytes);
                let op = Op::write(offset, driver.fill(slot as u32, &bytes));
                if kind == 5 { op.with_dsync() } else { op }
            }
            kind => {
                model[range.clone()].fill(0);
                match kind {
                    6 => Op::write_zeroes(offset, len),
                    _ => Op::punch(offset, len),
                }
            }
        };
        assert_eq!(driver.start(&device, op, slot), None, "{number}");
        running.push((slot, range, expected));
    }
    while !running.is_empty() {
        take(&mut driver, &device, &mut running);
    }
    assert_eq!(driver.ring.remote_in_flight(), 0);
    assert!(lab.content("scattered") == model, "the image differs");
}

/// The user data, the bytes, and what a read must find.
type Running = (u64, std::ops::Range<usize>, Option<Vec<u8>>);

/// Takes one end.
fn take(driver: &mut Driver, device: &Device, running: &mut Vec<Running>) {
    let (slot, result) = driver.next(device);
    assert_eq!(result, Ok(()));
    let at = running.iter().position(|(used, ..)| *used == slot).unwrap();
    let (_, range, expected) = running.swap_remove(at);
    if let Some(expected) = expected {
        let found = driver.bytes(slot as u32, range.len());
        assert!(found == expected, "a read at {} differs", range.start);
    }
}

fn writes_are_durable_even_with_a_cache(lab: &Lab) {
    // With the exclusive lock, opening the image elsewhere could make the writer flush.
    lab.create("cached", &["--image-feature", "layering"]);
    for (option, value) in [
        ("rbd_cache", "true"),
        ("rbd_cache_policy", "writeback"),
        ("rbd_cache_writethrough_until_flush", "false"),
    ] {
        let set = ["config", "image", "set", "rbd/cached", option, value];
        lab.cluster.rbd(&set).unwrap();
    }
    let device = lab.device();
    ready(&device, 0, "cached");
    let mut driver = Driver::new();
    write(&mut driver, &device, 0, 7).unwrap();
    assert_eq!(lab.content("cached")[..4096], [7; 4096]);
    driver.run(&device, Op::write_zeroes(512, 512)).unwrap();
    assert_eq!(lab.content("cached")[..1024], [[7; 512], [0; 512]].concat());
}

fn an_image_resized_elsewhere(lab: &Lab) {
    lab.create("resized", &[]);
    let device = lab.device();
    let (sender, changes) = sync_channel(64);
    let changed = move || {
        let _ = sender.try_send(());
    };
    let size = device.open_image(1, &name("resized"), Arc::new(changed));
    assert_eq!(size, Ok(16 * MIB));
    device.lock_image(1).unwrap();
    let mut driver = Driver::new();
    write(&mut driver, &device, at(1, 8 * MIB), 3).unwrap();

    let resize = ["resize", "rbd/resized", "--no-progress", "--size"];
    let shrink = [&resize[..], &["4M", "--allow-shrink"]].concat();
    lab.cluster.rbd(&shrink).unwrap();
    size_becomes(&device, 4 * MIB, &changes);
    for offset in [4 * MIB - 512, 4 * MIB, 8 * MIB] {
        let buf = driver.fill(0, &[9; 4096]);
        for op in [
            Op::write(at(1, offset), buf),
            Op::read(at(1, offset), buf),
            Op::write_zeroes(at(1, offset), 4096),
        ] {
            assert_eq!(driver.run(&device, op), Err(Errno::RANGE), "{offset}");
        }
    }
    write(&mut driver, &device, at(1, 4 * MIB - 4096), 4).unwrap();

    lab.cluster.rbd(&[&resize[..], &["32M"]].concat()).unwrap();
    size_becomes(&device, 32 * MIB, &changes);
    let end = at(1, 32 * MIB - 4096);
    write(&mut driver, &device, end, 5).unwrap();
    assert_eq!(read(&mut driver, &device, end), Ok(vec![5; 4096]));
    assert_eq!(
        read(&mut driver, &device, at(1, 8 * MIB)),
        Ok(vec![0; 4096])
    );
}

fn size_becomes(device: &Device, size_bytes: u64, changes: &Receiver<()>) {
    while device.image_size(1).unwrap() != size_bytes {
        changes.recv_timeout(LIMIT).unwrap();
    }
}

fn a_locked_image_is_refused_by_address(lab: &Lab) {
    lab.create("locked", &[]);
    let device = lab.device();
    let mut driver = Driver::new();
    let (owner, pool) = lab.other();
    let address = owner.address().unwrap();
    for explicit in [true, false] {
        let image = pool.image("locked", OpenMode::ReadWrite).unwrap();
        if explicit {
            image.acquire_lock().unwrap();
        } else {
            // librbd locks at the first write, and would give way.
            assert_eq!(other_write(&image, 1), Ok(4096));
        }
        assert!(image.watchers().unwrap().contains(&address));
        device.open_image(0, &name("locked"), unwatched()).unwrap();
        let error = device.lock_image(0).unwrap_err();
        assert!(error.contains(&address), "{error}");
        assert!(image.is_lock_owner().unwrap());
        let buf = driver.fill(0, &[2; 4096]);
        let mut op = Op::write(0, buf);
        let queued = device.queue(&mut driver.ring, &mut op, 0);
        assert_eq!(queued, Submitted::NotReady);
        image.close(LIMIT).unwrap();
    }
    device.lock_image(0).unwrap();
    write(&mut driver, &device, 0, 2).unwrap();

    lab.create("advised", &["--image-feature", "layering"]);
    device.open_image(1, &name("advised"), unwatched()).unwrap();
    device.lock_image(1).unwrap();
    device.close_image(1);
    lab.cluster
        .rbd(&["lock", "add", "rbd/advised", "me"])
        .unwrap();
    let listed = lab
        .cluster
        .rbd_json(&["lock", "ls", "rbd/advised"])
        .unwrap();
    let address = listed[0]["address"].as_str().unwrap();
    device.open_image(1, &name("advised"), unwatched()).unwrap();
    let error = device.lock_image(1).unwrap_err();
    assert!(error.contains(address), "{error}");
}

/// Other clients that ask for our lock are refused, but their snapshots are made.
fn our_lock_stays_ours(lab: &Lab) {
    lab.create("ours", &[]);
    let device = lab.device();
    ready(&device, 0, "ours");
    let mut driver = Driver::new();
    write(&mut driver, &device, 0, 1).unwrap();
    let (_, pool) = lab.other();
    let image = pool.image("ours", OpenMode::ReadWrite).unwrap();
    let owners = image.lock_owners().unwrap();
    assert_eq!(owners, [device.client_address().unwrap()]);
    assert_eq!(other_write(&image, 2), Err(Errno::ROFS));
    assert_eq!(image.acquire_lock().unwrap_err().errno, Errno::ROFS);
    image.take_snapshot("one").unwrap();
    image.close(LIMIT).unwrap();
    write(&mut driver, &device, 0, 3).unwrap();
    assert_eq!(lab.content("ours")[..4096], [3; 4096]);
    assert_eq!(lab.content("ours@one")[..4096], [1; 4096]);
}

fn a_snapshot_is_read_only(lab: &Lab) {
    lab.create("snapped", &[]);
    let device = lab.device();
    ready(&device, 0, "snapped");
    let mut driver = Driver::new();
    write(&mut driver, &device, 0, 1).unwrap();
    lab.cluster
        .rbd(&["snap", "create", "--no-progress", "rbd/snapped@one"])
        .unwrap();
    write(&mut driver, &device, 0, 2).unwrap();
    let snapshot = ImageName {
        snapshot: Some("one".to_owned()),
        ..name("snapped")
    };
    device.open_image(1, &snapshot, unwatched()).unwrap();
    device.lock_image(1).unwrap();
    assert_eq!(read(&mut driver, &device, at(1, 0)), Ok(vec![1; 4096]));
    assert_eq!(write(&mut driver, &device, at(1, 0), 3), Err(Errno::ROFS));
}

fn a_predecessor_writes_no_more(lab: &Lab) {
    lab.create("fenced", &[]);
    let (dead, next) = (lab.device(), lab.device());
    ready(&dead, 0, "fenced");
    let mut driver = Driver::new();
    write(&mut driver, &dead, 0, 1).unwrap();

    next.set_predecessors(vec![dead.client_address().unwrap().to_owned()]);
    assert!(!next.predecessors_gone(2).unwrap());
    next.open_image(0, &name("fenced"), unwatched()).unwrap();
    assert_eq!(read(&mut driver, &next, 0), Ok(vec![1; 4096]));
    next.wait_for_predecessors(2, LIMIT).unwrap();
    assert!(next.predecessors_gone(2).unwrap());
    next.lock_image(0).unwrap();
    write(&mut driver, &next, 4096, 2).unwrap();

    assert!(!dead.is_blocklisted());
    assert_eq!(write(&mut driver, &dead, 0, 9), Err(Errno::SHUTDOWN));
    assert!(dead.is_blocklisted());
    assert!(!next.is_blocklisted());
    let error = dead.open_image(1, &name("fenced"), unwatched());
    assert!(error.unwrap_err().contains("blocklisted"));
    assert_eq!(read(&mut driver, &next, 0), Ok(vec![1; 4096]));
    drop(dead);
    write(&mut driver, &next, 0, 3).unwrap();
}

fn a_quota_ends_writes(lab: &Lab) {
    lab.create("quota", &[]);
    let device = lab.device();
    ready(&device, 0, "quota");
    let mut driver = Driver::new();
    write(&mut driver, &device, 0, 1).unwrap();
    let quota = |bytes| {
        let set = ["osd", "pool", "set-quota", "rbd", "max_bytes", bytes];
        lab.cluster.ceph(&set).unwrap();
    };
    quota("4096");
    assert_eq!(fails(&mut driver, &device), Errno::DQUOT);
    quota("0");
    succeeds(&mut driver, &device);
}

fn a_full_cluster_ends_writes(lab: &Lab) {
    lab.create("full", &[]);
    let device = lab.device();
    ready(&device, 0, "full");
    let mut driver = Driver::new();
    write(&mut driver, &device, 0, 1).unwrap();
    let ratios = |full: &str| {
        for (kind, ratio) in [("nearfull", full), ("backfillfull", full), ("full", full)] {
            let set = format!("set-{kind}-ratio");
            lab.cluster.ceph(&["osd", &set, ratio]).unwrap();
        }
    };
    ratios("0.0001");
    assert_eq!(fails(&mut driver, &device), Errno::NOSPC);
    ratios("0.95");
    succeeds(&mut driver, &device);
}

/// Writes to ever new blocks until one fails. One that exists can still be written.
fn fails(driver: &mut Driver, device: &Device) -> Errno {
    let begun = Instant::now();
    for block in 1..4096 {
        if let Err(errno) = write(driver, device, block * 4096, 2) {
            println!("{errno} after {:.1} s", begun.elapsed().as_secs_f64());
            assert_eq!(read(driver, device, 0), Ok(vec![1; 4096]));
            assert_eq!(write(driver, device, 0, 4), Ok(()));
            return errno;
        }
        assert!(begun.elapsed() < LIMIT, "writes go on");
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("writes go on");
}

/// Writes again once there is room.
fn succeeds(driver: &mut Driver, device: &Device) {
    let begun = Instant::now();
    while let Err(errno) = write(driver, device, 12 * MIB + 4096, 3) {
        assert!(begun.elapsed() < LIMIT, "still {errno}");
        std::thread::sleep(Duration::from_millis(20));
    }
    println!("again after {:.1} s", begun.elapsed().as_secs_f64());
}
