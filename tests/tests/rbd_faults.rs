//! Faults of a Ceph cluster under volumes: each has an outcome, which the book's table names.

use anyhow::{Context, Result, ensure};
use forebay_initiator::{IoOp, IoQueue};
use forebay_nvme::Status;
use forebay_tests::ceph::{self, POOL, cluster};
use forebay_tests::host::Host;
use forebay_tests::lab::{BLOCK, Lab, LabOptions, MIB, MINUTE, Noticed};
use forebay_tests::snapshots::{read, refused, write};
use forebay_tests::wait;
use xtask::ceph::Daemon::{Monitor, Osd};

const IMAGE_BYTES: u64 = 32 * MIB;
/// With many objects that are never written.
const LARGE_BYTES: u64 = 16 << 30;

/// A host of a volume that no load uses.
fn host(lab: &Lab, name: &str) -> Host {
    Host::new(lab.address, &format!("t/{name}"), IMAGE_BYTES, BLOCK, 99)
}

fn write_op(lba: u64) -> IoOp {
    IoOp::Write {
        lba,
        blocks: 1,
        fua: false,
    }
}

/// The status of a write.
fn status_of(queue: &mut IoQueue, lba: u64) -> Result<Status> {
    match queue.execute(&write_op(lba), vec![9; BLOCK as usize], MINUTE) {
        Ok(_) => Ok(Status::SUCCESS),
        Err(error) => match error.status() {
            Some(status) => Ok(status.code()),
            None => Err(error.into()),
        },
    }
}

#[test]
fn rbd_osd_down_and_back() -> Result<()> {
    let Some(mut cluster) = cluster()? else {
        return Ok(());
    };
    let mut lab = ceph::lab(&cluster, 1, IMAGE_BYTES, "")?;
    lab.add_volume("local", IMAGE_BYTES)?;
    lab.during_load(Noticed::Nothing, |_, progress| {
        progress.more("work", 100)?;
        cluster.kill(Osd(0))?;
        progress.more_of(&[1], "work on a local volume", 300)?;
        cluster.start_daemon(Osd(0))?;
        progress.more("work when the OSD is back", 100)?;
        cluster.pause(Osd(0))?;
        progress.more_of(&[1], "work on a local volume", 300)?;
        cluster.resume(Osd(0))?;
        progress.more("work when the OSD goes on", 100)
    })?;
    cluster.wait_until_clean()?;
    lab.finish()
}

#[test]
fn rbd_no_monitor() -> Result<()> {
    let Some(cluster) = cluster()? else {
        return Ok(());
    };
    let mut lab = ceph::lab(&cluster, 1, IMAGE_BYTES, "")?;
    lab.add_volume("local", IMAGE_BYTES)?;
    lab.during_load(Noticed::Nothing, |daemon, progress| {
        progress.more("work", 100)?;
        cluster.pause(Monitor)?;
        progress.more("work without a monitor", 100)?;
        daemon.kill_engine()?;
        progress.more_of(&[1], "work on a local volume", 300)?;
        cluster.resume(Monitor)?;
        progress.more("work when the monitor is back", 100)
    })?;
    lab.finish()
}

#[test]
fn rbd_cluster_full() -> Result<()> {
    let Some(cluster) = cluster()? else {
        return Ok(());
    };
    let lab = ceph::lab(&cluster, 1, LARGE_BYTES, "")?;
    let (session, mut queue) = host(&lab, "a").connect_soon()?;
    write(&mut queue, 0, vec![1; BLOCK as usize])?;
    let mut lba = 0;
    let mut becomes = |queue: &mut IoQueue, wanted: Status| {
        wait::until("the write's status", MINUTE, || {
            // A new object each time: overwrites need no space.
            lba = (lba + 1024) % (LARGE_BYTES / u64::from(BLOCK));
            Ok((status_of(queue, lba)? == wanted).then_some(()))
        })
    };
    let set_ratios = |ratio: &str| -> Result<()> {
        for kind in ["nearfull", "backfillfull", "full"] {
            cluster.ceph(&["osd", &format!("set-{kind}-ratio"), ratio])?;
        }
        Ok(())
    };
    set_ratios("0.0001")?;
    let full = becomes(&mut queue, Status::CAPACITY_EXCEEDED);
    let found = read(&mut queue, 0, 1);
    set_ratios("0.95")?;
    full?;
    ensure!(found? == vec![1; BLOCK as usize], "reads go on");
    becomes(&mut queue, Status::SUCCESS)?;

    cluster.ceph(&["osd", "pool", "set-quota", POOL, "max_bytes", "4096"])?;
    let full = becomes(&mut queue, Status::CAPACITY_EXCEEDED);
    cluster.ceph(&["osd", "pool", "set-quota", POOL, "max_bytes", "0"])?;
    full?;
    becomes(&mut queue, Status::SUCCESS)?;
    drop(queue);
    session.close()?;
    let mut lab = lab;
    lab.daemon.stop()
}

#[test]
fn rbd_image_deleted() -> Result<()> {
    let Some(cluster) = cluster()? else {
        return Ok(());
    };
    let mut lab = ceph::lab(&cluster, 2, IMAGE_BYTES, "")?;
    let image = ceph::image_of(&lab, "t/a")?;
    // In use, it can't be removed.
    ensure!(
        cluster.rbd(&["rm", "--no-progress", &image]).is_err(),
        "removed in use"
    );
    lab.daemon.stop()?;
    wait::until("the image's end", MINUTE, || {
        Ok(cluster.rbd(&["rm", "--no-progress", &image]).ok())
    })?;
    lab.daemon.start_again()?;
    let (session, mut queue) = host(&lab, "a").connect_soon()?;
    let status = status_of(&mut queue, 0)?;
    ensure!(status != Status::SUCCESS, "a write into a deleted image");
    let (other, mut others) = host(&lab, "b").connect_soon()?;
    write(&mut others, 0, vec![1; BLOCK as usize])?;
    let events = lab.events()?;
    let failed = events.get("device_failed").context("an event")?;
    let says = |event: &serde_json::Value| event["message"].to_string().contains(&image);
    ensure!(failed.iter().any(says), "{failed:?}");

    cluster.rbd(&["create", "--size", "32M", &image])?;
    wait::until("a write into the new image", MINUTE, || {
        Ok((status_of(&mut queue, 0)? == Status::SUCCESS).then_some(()))
    })?;
    drop((queue, others));
    session.close()?;
    other.close()?;
    lab.daemon.stop()
}

#[test]
fn no_librbd_no_problem() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let config = "[ceph.c]\nconfig = \"/nowhere/ceph.conf\"\n[engine]\nreactors = 1\n";
    let nowhere = folder.path().display().to_string();
    let mut lab = Lab::new(&LabOptions {
        config: config.to_owned(),
        environment: vec![("FOREBAY_CEPH_LIBRARIES".to_owned(), nowhere)],
        ..LabOptions::default()
    })?;
    lab.add_volume("local", IMAGE_BYTES)?;
    lab.during_load(Noticed::Nothing, |_, progress| progress.more("work", 50))?;
    let create = [
        "volume", "create", "t/v", "--size", "8M", "--rbd", "c/rbd/v",
    ];
    refused(&lab.daemon, &create, &["librbd", "apt install"])?;
    lab.finish()
}
