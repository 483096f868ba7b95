//! Faults of a Ceph cluster under volumes: each has an outcome, which the book's table names.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::{IoOp, IoQueue};
use forebay_nvme::Status;
use forebay_tests::ceph::{self, NAME, POOL, cluster};
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
    cluster.pause(Monitor)?;
    let path = format!("{NAME}/{POOL}/none");
    let create = ["volume", "create", "t/none", "--size", "8M", "--rbd", &path];
    let said = refused(&lab.daemon, &create, &[NAME]);
    cluster.resume(Monitor)?;
    said?;
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
    cluster.ceph(&["osd", "set-full-ratio", "0.0001"])?;
    let full = becomes(&mut queue, Status::CAPACITY_EXCEEDED);
    let found = read(&mut queue, 0, 1);
    cluster.ceph(&["osd", "set-full-ratio", "0.97"])?;
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

/// Junk writes of a host that goes away: nobody repeats them, and they delay what is behind them.
fn leave_junk(lab: &Lab, first: u64) -> Result<()> {
    let (session, mut queue) = host(lab, "a").connect_soon()?;
    for lba in 0..JUNK {
        let data = vec![0xee; BLOCK as usize];
        let sent = queue.submit(&write_op(first + lba), lba, data);
        ensure!(sent.is_ok(), "the queue is full");
    }
    let mut none = Vec::new();
    let _ = queue.poll(
        &mut none,
        forebay_initiator::Wait::Block,
        Duration::from_millis(300),
    )?;
    ensure!(none.is_empty(), "the OSD does not stand still");
    drop(queue.abandon());
    drop(session);
    Ok(())
}

const JUNK: u64 = 60;
const CONTESTED: u64 = 0;

/// What a block has at the end: a dead engine's write is in the OSD's queue behind others, while
/// the successor repeats it, and the host then writes something new.
fn late_write(environment: &[(&str, &str)]) -> Result<Option<u8>> {
    let Some(cluster) = cluster()? else {
        return Ok(None);
    };
    // One message of a client at a time, so that the successor's overtake the dead engine's.
    cluster.ceph(&[
        "tell",
        "osd.0",
        "config",
        "set",
        "osd_client_message_cap",
        "1",
    ])?;
    let mut options = LabOptions {
        config: ceph::config(&cluster, ""),
        environment: ceph::environment(&cluster),
        ..LabOptions::default()
    };
    let more = environment
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    options.environment.extend(more);
    let mut lab = Lab::new(&options)?;
    ceph::add_image(&mut lab, "a", IMAGE_BYTES)?;
    let (session, mut queue) = host(&lab, "a").connect_soon()?;
    write(&mut queue, CONTESTED, vec![1; BLOCK as usize])?;
    cluster.pause(Osd(0))?;
    leave_junk(&lab, 1000)?;
    let sent = queue.submit(&write_op(CONTESTED), 1, vec![2; BLOCK as usize]);
    ensure!(sent.is_ok(), "the queue is full");
    let mut done = Vec::new();
    queue.poll(
        &mut done,
        forebay_initiator::Wait::Block,
        Duration::from_millis(300),
    )?;
    ensure!(done.is_empty(), "the OSD does not stand still");
    leave_junk(&lab, 2000)?;
    let before = lab.daemon.kill_engine()?;
    lab.daemon.wait_engine_after(before.generation, MINUTE)?;
    std::thread::sleep(Duration::from_millis(500));
    cluster.resume(Osd(0))?;
    wait::until("the repeated write", MINUTE, || {
        queue.poll(
            &mut done,
            forebay_initiator::Wait::Block,
            Duration::from_millis(10),
        )?;
        Ok((!done.is_empty()).then_some(()))
    })?;
    write(&mut queue, CONTESTED, vec![3; BLOCK as usize])?;
    // Everything of the dead engine's connection is behind us once the OSD is idle.
    wait::until("an idle OSD", MINUTE, || {
        let ops = cluster.ceph_json(&["tell", "osd.0", "dump_ops_in_flight"])?;
        Ok((ops["num_ops"] == 0).then_some(()))
    })?;
    std::thread::sleep(Duration::from_secs(1));
    let found = read(&mut queue, CONTESTED, 1)?;
    drop(queue);
    session.close()?;
    cluster.ceph(&[
        "tell",
        "osd.0",
        "config",
        "set",
        "osd_client_message_cap",
        "256",
    ])?;
    lab.daemon.stop()?;
    Ok(found.first().copied())
}

#[test]
fn rbd_engine_sigkill_no_late_write() -> Result<()> {
    for _ in 0..3 {
        let Some(found) = late_write(&[])? else {
            return Ok(());
        };
        ensure!(found == 3, "a dead engine's write came late: {found}");
    }
    Ok(())
}

/// The scenario can fail: without the blocklist, the dead engine's write comes late.
#[test]
fn rbd_late_write_without_a_blocklist() -> Result<()> {
    for _ in 0..10 {
        match late_write(&[("FOREBAY_TEST_NO_BLOCKLIST", "1")])? {
            None | Some(2) => return Ok(()),
            Some(_) => {}
        }
    }
    anyhow::bail!("no write came late: the scenario tests nothing")
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
