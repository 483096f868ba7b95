//! A sparse pool file on a filesystem that fills up. Other tenants are unharmed, written data reads
//! back, a daemon starts, and deleting the filler's volume frees space.
//!
//! A small ext4 from an image file holds the pool, state and run folders. Mounting needs root:
//! elsewhere the test is skipped, but in CI root must be able to mount.

use std::fs::File;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::verify::{Initial, Verifier, VerifySpec, WriteGoal};
use forebay_initiator::{Error, IoOp, Options, Session};
use forebay_tests::daemon::{Daemon, DaemonOptions, target_folder};
use forebay_tests::wait;
use xtask::process;

const HOST: &str = "nqn.2026-01.test:host";
const MINUTE: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
/// Includes the journal, the grant table and the catalog.
const DISK_BYTES: u64 = 120 * MIB;
const FILL_CHUNK_BYTES: usize = 256 << 10;
/// 128 MiB, far more than a page of the grant table or of the catalog describes.
const INSIST_CHUNKS: u32 = 512;
/// Retries of one write of the filler.
const RETRIES: u32 = 50;

struct SmallDisk {
    _folder: tempfile::TempDir,
    mounted_at: PathBuf,
}

impl SmallDisk {
    fn mount() -> Result<Self> {
        let parent = target_folder().join("tmp");
        std::fs::create_dir_all(&parent)?;
        let folder = tempfile::Builder::new()
            .prefix("d-")
            .tempdir_in(parent.canonicalize()?)?;
        let image = folder.path().join("image");
        File::create_new(&image)?.set_len(DISK_BYTES)?;
        // -m 0: no space reserved for root.
        let mut mkfs = Command::new("mkfs.ext4");
        process::output(mkfs.args(["-q", "-F", "-m", "0"]).arg(&image), MINUTE)?;
        let mounted_at = folder.path().join("m");
        std::fs::create_dir(&mounted_at)?;
        let mut mount = Command::new("mount");
        mount.args(["-o", "loop"]).arg(&image).arg(&mounted_at);
        process::output(&mut mount, MINUTE)?;
        Ok(Self {
            _folder: folder,
            mounted_at,
        })
    }

    fn free_bytes(&self) -> Result<u64> {
        let stat = rustix::fs::statvfs(&self.mounted_at)?;
        Ok(stat.f_bavail * stat.f_frsize)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let unmount = |lazy: &[&str]| {
            let mut command = Command::new("umount");
            process::output(command.args(lazy).arg(&self.mounted_at), MINUTE)
        };
        // A killed process may use it for a moment longer.
        let unmounted = wait::until("it is unmounted", Duration::from_secs(10), || {
            Ok(unmount(&[]).ok())
        });
        if unmounted.is_err()
            && let Err(error) = unmount(&["--lazy"])
        {
            eprintln!("{} is still mounted: {error:#}", self.mounted_at.display());
        }
    }
}

/// `None` if this user or node can't mount one.
fn small_disk() -> Result<Option<SmallDisk>> {
    let is_root = rustix::process::geteuid().is_root();
    let in_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
    match SmallDisk::mount() {
        Ok(disk) => Ok(Some(disk)),
        Err(error) if is_root && in_ci => Err(error.context("root in CI must be able to mount")),
        Err(error) => {
            eprintln!("SKIPPED full_disk: no filesystem can be mounted here: {error:#}");
            Ok(None)
        }
    }
}

fn nqn(tenant: &str) -> String {
    format!("nqn.2026-01.io.forebay:test:{tenant}.v")
}

/// Writes until there is no space, and [`INSIST_CHUNKS`] more, for whose extents the daemon may
/// lack space too. Returns the bytes accepted before the first refusal.
fn fill(address: SocketAddr, volume_bytes: u64) -> Result<u64> {
    let mut session = Session::connect(address, &nqn("filler"), HOST, &Options::default())?;
    let mut queue = session.open_queue(1)?;
    let blocks = FILL_CHUNK_BYTES as u32 / queue.block_bytes();
    let mut at = 0;
    let mut retries = 0;
    let mut took = None;
    let mut insist = INSIST_CHUNKS;
    while at < volume_bytes && insist > 0 {
        insist -= u32::from(took.is_some());
        let op = IoOp::Write {
            lba: at / u64::from(queue.block_bytes()),
            blocks,
            fua: false,
        };
        match queue.execute(&op, vec![0x5a; FILL_CHUNK_BYTES], 2 * MINUTE) {
            Ok(_) => {
                at += FILL_CHUNK_BYTES as u64;
                retries = 0;
            }
            Err(Error::Status { status, .. })
                // NVMe Base 2.1, figure "Generic Command Status Values": Capacity Exceeded.
                if (status.sct(), status.sc()) == (0, 0x81) =>
            {
                took.get_or_insert(at);
                at += FILL_CHUNK_BYTES as u64;
                retries = 0;
            }
            Err(Error::Status { status, .. }) if !status.dnr() && retries < RETRIES => {
                retries += 1;
                std::thread::sleep(Duration::from_millis(100));
            }
            Err(error) => return Err(error).context(format!("filling, at byte {at}")),
        }
    }
    took.context("the volume took all: the disk did not fill up")
}

/// The filler's first bytes are intact.
fn filler_reads(address: SocketAddr) -> Result<()> {
    let mut session = Session::connect(address, &nqn("filler"), HOST, &Options::default())?;
    let mut queue = session.open_queue(1)?;
    let blocks = FILL_CHUNK_BYTES as u32 / queue.block_bytes();
    let read = queue.execute(
        &IoOp::Read { lba: 0, blocks },
        vec![0; FILL_CHUNK_BYTES],
        MINUTE,
    )?;
    ensure!(read.iter().all(|byte| *byte == 0x5a), "the filler's data");
    Ok(())
}

fn reads_back(verifier: &mut Verifier) -> Result<()> {
    let report = verifier.read_back(&mut |_| ())?;
    ensure!(report.is_clean(), "{report}");
    Ok(())
}

fn writes(verifier: &mut Verifier, bytes: u64) -> Result<()> {
    let report = verifier.write(WriteGoal::Bytes(bytes), &mut |_| ControlFlow::Continue(()))?;
    ensure!(report.errors == 0, "{:?}", report.first_error);
    Ok(verifier.flush()?)
}

fn make_volume(daemon: &Daemon, tenant: &str, size: &str) -> Result<()> {
    let volume = format!("{tenant}/v");
    daemon.cli(&["tenant", "create", tenant])?;
    daemon.cli(&["volume", "create", &volume, "--size", size])?;
    daemon.cli(&["export", "create", &volume, "--any-host"])?;
    Ok(())
}

fn start(parent: &Path) -> Result<Daemon> {
    Daemon::start(&DaemonOptions {
        folder_parent: Some(parent.to_owned()),
        ..DaemonOptions::default()
    })
}

#[test]
fn a_full_disk_below_the_pool_is_survived_and_space_comes_back() -> Result<()> {
    // Must be dropped after the daemon.
    let Some(disk) = small_disk()? else {
        return Ok(());
    };
    let mut daemon = start(&disk.mounted_at)?;
    let file = daemon.folder().join("pool.img");
    let device = format!("file:{}", file.display());
    let too_large = [
        "pool", "create", "--device", &device, "--create", "--size", "1G",
    ];
    let error = format!("{:#}", daemon.cli(&too_large).unwrap_err());
    ensure!(
        error.contains("1 GiB") && error.contains("are free"),
        "{error}"
    );
    // A file made by hand may exceed the free space, which may grow later.
    File::create_new(&file)?.set_len(1 << 30)?;
    let before = daemon.create_pool(&["--device", &device])?;
    make_volume(&daemon, "keeper", "64M")?;
    make_volume(&daemon, "filler", "512M")?;
    let address = format!("127.0.0.1:{}", daemon.port()).parse()?;

    let mut keeper = Verifier::connect(VerifySpec {
        initial: Initial::Zeros,
        block_bytes: 64 << 10,
        ..VerifySpec::new(address, &nqn("keeper"), HOST)
    })?;
    writes(&mut keeper, 4 * MIB)?;
    let took = fill(address, 512 * MIB)?;
    ensure!(took > 8 * MIB, "it was full after {took} bytes already");
    let free = disk.free_bytes()?;
    ensure!(free < MIB, "no space, though {free} bytes are free");

    ensure!(
        daemon.processes()? == before,
        "a full disk ended a process: {before:?}, {:?}",
        daemon.status()?
    );
    reads_back(&mut keeper).context("the other tenant's data on the full disk")?;
    filler_reads(address)?;

    daemon.kill_daemon()?;
    daemon.start_again()?;
    ensure!(
        daemon.processes()?.engine == before.engine,
        "the engine lives on"
    );
    reads_back(&mut keeper).context("after the daemon's restart on the full disk")?;
    filler_reads(address)?;

    // A regular stop and start leaves less space than before.
    daemon.stop()?;
    daemon.start_again()?;
    reads_back(&mut keeper).context("after a stop and a start on the full disk")?;

    let full = disk.free_bytes()?;
    daemon.cli(&["export", "delete", "filler/v", "--disconnect-hosts"])?;
    daemon.cli(&["volume", "delete", "filler/v"])?;
    wait::until("the filesystem has room again", 2 * MINUTE, || {
        let free = disk.free_bytes()?;
        Ok((free >= full + took / 2).then_some(()))
    })?;
    writes(&mut keeper, 8 * MIB).context("with room again")?;
    reads_back(&mut keeper)?;
    drop(keeper);
    daemon.stop()
}
