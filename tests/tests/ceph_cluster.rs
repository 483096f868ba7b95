//! The Ceph cluster that tests and people start with `cargo xtask ceph up`.

use std::path::Path;

use anyhow::{Result, ensure};
use xtask::ceph::{self, Cluster, Daemon, Options, Release};

const IMAGE: &str = "rbd/one";
const IMAGE_BYTES: usize = 16 << 20;
const OSD: Daemon = Daemon::Osd(0);

#[test]
fn ceph_up_serves_an_image() -> Result<()> {
    if forebay_tests::ceph::must_skip()? {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let mut options = Options::new(&folder.path().join("ceph"), Release::V16);
    options.has_cephx = true;
    let mut cluster = Cluster::start(&options)?;
    let health = cluster.ceph_json(&["health"])?;
    ensure!(health["status"] == "HEALTH_OK", "{health}");

    cluster.rbd(&["create", IMAGE, "--size", "16M"])?;
    let info = cluster.rbd_json(&["info", IMAGE])?;
    ensure!(info["size"] == IMAGE_BYTES, "{info}");
    let write = ["--io-type", "write", "--io-size", "64K", "--io-total", "8M"];
    cluster.rbd(&[&["bench", IMAGE], &write[..]].concat())?;
    let written = content(&cluster, &folder.path().join("written"))?;
    ensure!(written.len() == IMAGE_BYTES, "{} bytes", written.len());
    ensure!(written.iter().any(|byte| *byte != 0), "all bytes are 0");

    let first = cluster.pid(OSD)?;
    cluster.kill(OSD)?;
    ensure!(has_ended(first), "{OSD} goes on");
    cluster.start_daemon(OSD)?;
    ensure!(cluster.start_daemon(OSD).is_err(), "{OSD} runs twice");
    let read = content(&cluster, &folder.path().join("read"))?;
    ensure!(read == written, "a restarted OSD has other data");
    cluster.wait_until_clean()?;

    let daemons = cluster.daemons().into_iter();
    let pids: Vec<u32> = daemons
        .map(|daemon| cluster.pid(daemon))
        .collect::<Result<_>>()?;
    ensure!(pids.len() == 3, "{pids:?}");
    ensure!(!pids.iter().copied().any(has_ended), "one has ended");
    ceph::stop(&options.folder)?;
    ensure!(pids.into_iter().all(has_ended), "one goes on");
    ensure!(!options.folder.exists(), "the folder is there");
    Ok(())
}

fn content(cluster: &Cluster, file: &Path) -> Result<Vec<u8>> {
    cluster.rbd(&["export", "--no-progress", IMAGE, &file.to_string_lossy()])?;
    Ok(std::fs::read(file)?)
}

/// A process that has ended has no arguments, even if no parent has waited for it.
fn has_ended(pid: u32) -> bool {
    let arguments = std::fs::read(format!("/proc/{pid}/cmdline"));
    arguments.unwrap_or_default().is_empty()
}
