//! A Ceph cluster that the tests of one program share.
//!
//! It starts with the first test and ends with the program. Tests use it one after the other, and
//! leave it healthy. Where Ceph's packages can't be had, its tests are skipped, except in CI.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use xtask::ceph::{self, Cluster, Options, Programs, Release};

use crate::daemon::target_folder;
use crate::lab::{Lab, LabOptions};

/// The cluster's name in a daemon's configuration.
pub const NAME: &str = "c";
/// The pool that `cargo xtask ceph up` makes.
pub const POOL: &str = ceph::POOL;

/// The number of images that tests have made: no name is used twice.
static IMAGES: AtomicU64 = AtomicU64::new(0);
static CLUSTER: Mutex<Option<(Cluster, ChildStdin)>> = Mutex::new(None);

/// The shared cluster, for one test at a time.
#[derive(Debug)]
pub struct SharedCluster(MutexGuard<'static, Option<(Cluster, ChildStdin)>>);

impl std::ops::Deref for SharedCluster {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        &self.0.as_ref().expect("it runs").0
    }
}

impl std::ops::DerefMut for SharedCluster {
    fn deref_mut(&mut self) -> &mut Cluster {
        &mut self.0.as_mut().expect("it runs").0
    }
}

/// Ends the cluster with this program, however that ends: then its input closes.
fn end_with_this(folder: &Path) -> Result<ChildStdin> {
    // A pid's file has no newline, so each is read alone.
    let wait = r#"cat; for pid in "$0"/pids/*; do kill -9 "$(cat "$pid")"; done; rm -rf "$0""#;
    let mut waiting = Command::new("sh")
        .args(["-c", wait])
        .arg(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    waiting.stdin.take().context("its input is piped")
}

/// Whether to skip a test because Ceph's packages can't be had. In CI, that is an error.
pub fn must_skip() -> Result<bool> {
    match Programs::prepare(Release::V16) {
        Ok(_) => Ok(false),
        Err(error) if std::env::var_os("CI").is_some() => {
            Err(error.context("CI needs Ceph's packages"))
        }
        Err(error) => {
            println!("skipped: Ceph's packages can't be had: {error:#}");
            Ok(true)
        }
    }
}

/// The shared cluster, with authentication. `None`: skip the test.
pub fn cluster() -> Result<Option<SharedCluster>> {
    let mut shared = CLUSTER.lock().unwrap_or_else(PoisonError::into_inner);
    if shared.is_none() {
        if must_skip()? {
            return Ok(None);
        }
        let number = RandomState::new().build_hasher().finish();
        let folder = target_folder().join(format!("tmp/ceph-{number:016x}"));
        let mut options = Options::new(&folder, Release::V16);
        options.has_cephx = true;
        options.is_left_running = true;
        let input = end_with_this(&options.folder)?;
        *shared = Some((Cluster::start(&options)?, input));
    }
    Ok(Some(SharedCluster(shared)))
}

/// Configuration of a daemon that uses the cluster, with more lines for its table.
#[must_use]
pub fn config(cluster: &Cluster, more: &str) -> String {
    format!(
        "[ceph.{NAME}]\nconfig = {:?}\nkeyring = {:?}\n{more}\n",
        cluster.config_file(),
        cluster.keyring("client.admin"),
    )
}

/// Environment of a daemon that uses the cluster.
#[must_use]
pub fn environment(cluster: &Cluster) -> Vec<(String, String)> {
    let libraries = cluster.programs().client_libraries();
    let libraries = libraries.display().to_string();
    vec![
        ("LD_LIBRARY_PATH".to_owned(), libraries.clone()),
        ("FOREBAY_CEPH_LIBRARIES".to_owned(), libraries),
    ]
}

/// A lab with two reactors and this many volumes in new images, `a`, `b`, ….
pub fn lab(cluster: &Cluster, images: u8, size_bytes: u64, more: &str) -> Result<Lab> {
    let mut lab = Lab::new(&LabOptions {
        config: config(cluster, more) + "[engine]\nreactors = 2\n",
        environment: environment(cluster),
        ..LabOptions::default()
    })?;
    for name in (b'a'..).take(images.into()) {
        add_image(&mut lab, &char::from(name).to_string(), size_bytes)?;
    }
    Ok(lab)
}

/// The image of a volume, as `POOL/IMAGE`.
pub fn image_of(lab: &Lab, volume: &str) -> Result<String> {
    let shown = lab.daemon.cli(&["volume", "show", volume])?;
    let path = shown["rbd"]["path"].as_str();
    let path = path.with_context(|| format!("no image: {shown}"))?;
    let (_, image) = path.split_once('/').context("a cluster")?;
    Ok(image.to_owned())
}

/// Adds a volume in a new image, with its export and host.
pub fn add_image(lab: &mut Lab, name: &str, size_bytes: u64) -> Result<()> {
    add_image_of(lab, "t", name, size_bytes)
}

/// [`add_image`] of another tenant.
pub fn add_image_of(lab: &mut Lab, tenant: &str, name: &str, size_bytes: u64) -> Result<()> {
    let number = IMAGES.fetch_add(1, Relaxed);
    let path = format!("{NAME}/{POOL}/{name}.{number}");
    let more = ["--rbd", &path, "--block-size", "4096"];
    lab.add_volume_of(tenant, name, size_bytes, &more)
}
