//! Volumes in images of a Ceph cluster: their life, and what separates them from each other.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use forebay_initiator::{IoOp, IoQueue};
use forebay_nvme::Status;
use forebay_rbd::{ClientConfig, ImageOptions, Library, OpenMode, Pool, RadosClient};
use forebay_tests::ceph::{self, NAME, POOL, cluster};
use forebay_tests::host::Host;
use forebay_tests::lab::{BLOCK, Lab, MIB, MINUTE, Noticed};
use forebay_tests::snapshots::{read, refused, write};
use forebay_tests::wait;
use std::sync::Arc;
use xtask::ceph::Cluster;

const IMAGE_BYTES: u64 = 32 * MIB;
const IMAGE_BLOCKS: u64 = IMAGE_BYTES / BLOCK as u64;

fn path(image: &str) -> String {
    format!("{NAME}/{POOL}/{image}")
}

/// Another client of the cluster, in this process.
fn other_client(cluster: &Cluster) -> Result<Arc<Pool>> {
    let library = Library::load(Some(&cluster.programs().client_libraries()));
    let library = library.map_err(|missing| anyhow::anyhow!("{missing}"))?;
    let mut config = ClientConfig::new("admin");
    config.file = Some(cluster.config_file());
    config.keyring = Some(cluster.keyring("client.admin"));
    Ok(RadosClient::connect(&library, &config)?.pool(POOL, None)?)
}

/// An image's content, by Ceph's own tool.
fn content(cluster: &Cluster, lab: &Lab, image: &str) -> Result<Vec<u8>> {
    let file = lab.daemon.folder().join("content");
    cluster.rbd(&["export", "--no-progress", image, &file.to_string_lossy()])?;
    let content = std::fs::read(&file)?;
    std::fs::remove_file(&file)?;
    Ok(content)
}

/// A host of a volume that no load uses.
fn host(lab: &Lab, name: &str) -> Host {
    Host::new(lab.address, &format!("t/{name}"), IMAGE_BYTES, BLOCK, 99)
}

fn status_of(queue: &mut IoQueue, op: &IoOp, buffer: Vec<u8>) -> Result<Status> {
    match queue.execute(op, buffer, MINUTE) {
        Ok(_) => Ok(Status::SUCCESS),
        Err(error) => error.status().ok_or_else(|| error.into()),
    }
}

#[test]
fn rbd_volume_survives_deaths() -> Result<()> {
    let Some(cluster) = cluster()? else {
        return Ok(());
    };
    let mut lab = ceph::lab(&cluster, 2, IMAGE_BYTES, "")?;
    lab.add_volume("local", IMAGE_BYTES)?;
    let image = ceph::image_of(&lab, "t/a")?;
    lab.during_load(Noticed::Nothing, |daemon, progress| {
        progress.more("work", 100)?;
        daemon.kill_engine()?;
        progress.more("work after the engine's death", 100)?;
        daemon.kill_daemon()?;
        daemon.start_again()?;
        progress.more("work after the daemon's death", 100)
    })?;
    lab.during_load(Noticed::Reconnects, |daemon, progress| {
        progress.more("work", 100)?;
        daemon.kill_all()?;
        daemon.start_again()?;
        progress.more("work after the death of both", 100)
    })?;
    lab.check()?;
    let address = lab.daemon.cli(&["volume", "show", "t/a"])?;
    let addresses = address["rbd"]["client_addresses"].as_array();
    ensure!(addresses.is_some_and(|all| all.len() == 1), "{address}");
    let content = content(&cluster, &lab, &image)?;
    ensure!(content.len() as u64 == IMAGE_BYTES, "{}", content.len());
    ensure!(content.iter().any(|byte| *byte != 0), "nothing was written");
    lab.finish()
}

#[test]
fn rbd_image_resized_elsewhere() -> Result<()> {
    let Some(cluster) = cluster()? else {
        return Ok(());
    };
    let mut lab = ceph::lab(&cluster, 1, IMAGE_BYTES, "")?;
    let image = ceph::image_of(&lab, "t/a")?;
    let (session, mut queue) = host(&lab, "a").connect_soon()?;
    let resize = |size: &str| {
        let how = ["resize", "--no-progress", "--allow-shrink", "--size", size];
        cluster.rbd(&[&how[..], &[&image]].concat())
    };
    let blocks_become = |blocks: u64| {
        wait::until("the namespace's new size", MINUTE, || {
            let namespace = session.identify_namespace(1)?.context("a namespace")?;
            Ok((namespace.size_blocks == blocks).then_some(()))
        })
    };
    resize("48M")?;
    blocks_become(IMAGE_BLOCKS * 3 / 2)?;
    ensure!(!session.take_events()?.is_empty(), "no event was sent");
    write(&mut queue, IMAGE_BLOCKS, vec![7; BLOCK as usize])?;

    resize("16M")?;
    blocks_become(IMAGE_BLOCKS / 2)?;
    let beyond = IoOp::Read {
        lba: IMAGE_BLOCKS / 2 - 1,
        blocks: 2,
    };
    let status = status_of(&mut queue, &beyond, vec![0; 2 * BLOCK as usize])?;
    ensure!(status.code() == Status::LBA_OUT_OF_RANGE, "{status:?}");
    write(&mut queue, IMAGE_BLOCKS / 2 - 1, vec![8; BLOCK as usize])?;

    resize("32M")?;
    blocks_become(IMAGE_BLOCKS)?;
    let found = read(&mut queue, IMAGE_BLOCKS / 2 - 1, 2)?;
    let (kept, new) = found.split_at(BLOCK as usize);
    ensure!(kept.iter().all(|byte| *byte == 8), "the kept part changed");
    ensure!(new.iter().all(|byte| *byte == 0), "cut-off data came back");
    drop(queue);
    session.close()?;
    // By the volume's own verb.
    lab.daemon
        .cli(&["volume", "resize", "t/a", "--size", "40M"])?;
    let info = cluster.rbd_json(&["info", &image])?;
    ensure!(info["size"] == 40 * MIB, "{info}");
    lab.daemon.stop()
}

#[test]
fn rbd_snapshot_and_clone() -> Result<()> {
    let Some(cluster) = cluster()? else {
        return Ok(());
    };
    let mut lab = ceph::lab(&cluster, 1, IMAGE_BYTES, "")?;
    let image = ceph::image_of(&lab, "t/a")?;
    let daemon = &lab.daemon;
    let block = BLOCK as usize;
    let (session, mut queue) = host(&lab, "a").connect_soon()?;
    write(&mut queue, 5, vec![1; block])?;
    daemon.cli(&["volume", "snapshot", "t/a@one"])?;
    write(&mut queue, 5, vec![2; block])?;
    let snapshots = cluster.rbd_json(&["snap", "ls", &image])?;
    ensure!(snapshots[0]["name"] == "one", "{snapshots}");

    daemon.cli(&["volume", "clone", "t/a@one", "t/clone"])?;
    let shown = daemon.cli(&["volume", "show", "t/clone"])?;
    ensure!(shown["rbd"]["path"].is_string(), "{shown}");
    for name in ["t/a@one", "t/clone"] {
        daemon.cli(&["export", "create", name, "--any-host"])?;
    }
    let (of_snapshot, mut frozen) = host(&lab, "a@one").connect_soon()?;
    let (of_clone, mut clone) = host(&lab, "clone").connect_soon()?;
    for (queue, byte) in [(&mut queue, 2), (&mut frozen, 1), (&mut clone, 1)] {
        ensure!(read(queue, 5, 1)? == vec![byte; block], "{byte}");
    }
    let op = IoOp::Write {
        lba: 5,
        blocks: 1,
        fua: false,
    };
    let status = status_of(&mut frozen, &op, vec![3; block])?;
    ensure!(status != Status::SUCCESS, "a snapshot was written");
    write(&mut clone, 5, vec![4; block])?;
    for (queue, byte) in [(&mut queue, 2), (&mut frozen, 1), (&mut clone, 4)] {
        ensure!(read(queue, 5, 1)? == vec![byte; block], "{byte}");
    }
    refused(daemon, &["volume", "rollback", "t/a@one"], &["exported"])?;
    drop((queue, frozen, clone));
    for session in [session, of_snapshot, of_clone] {
        session.close()?;
    }
    daemon.cli(&["export", "delete", "t/a", "--disconnect-hosts"])?;
    daemon.cli(&["volume", "rollback", "t/a@one", "--yes"])?;
    daemon.cli(&["export", "create", "t/a", "--any-host"])?;
    let (session, mut queue) = host(&lab, "a").connect_soon()?;
    ensure!(read(&mut queue, 5, 1)? == vec![1; block], "not rolled back");
    drop(queue);
    session.close()?;
    for name in ["t/clone", "t/a@one"] {
        daemon.cli(&["export", "delete", name, "--disconnect-hosts"])?;
        daemon.cli(&["volume", "delete", name, "--with-image", "--yes"])?;
    }
    let images = cluster.rbd(&["ls", POOL])?;
    ensure!(!images.contains("clone"), "{images}");
    let snapshots = cluster.rbd_json(&["snap", "ls", &image])?;
    ensure!(
        snapshots.as_array().is_some_and(Vec::is_empty),
        "{snapshots}"
    );
    lab.daemon.stop()
}

#[test]
fn rbd_exclusive_lock_is_respected() -> Result<()> {
    let Some(cluster) = cluster()? else {
        return Ok(());
    };
    let mut lab = ceph::lab(&cluster, 1, IMAGE_BYTES, "")?;
    let pool = other_client(&cluster)?;
    let _ = pool.remove("locked");
    pool.create("locked", IMAGE_BYTES, &ImageOptions::default())?;
    let image = pool.image("locked", OpenMode::ReadWrite)?;
    image.acquire_lock()?;
    let owner = image.lock_owners()?.pop().context("an owner")?;
    let create = ["volume", "create", "t/locked", "--rbd", &path("locked")];
    refused(&lab.daemon, &create, &["lock", &owner])?;
    image.close(MINUTE)?;
    lab.daemon.cli(&create)?;

    // The lock of an image in use is not given away.
    let image = ceph::image_of(&lab, "t/a")?;
    let (_, name) = image.split_once('/').context("a pool")?;
    let used = pool.image(name, OpenMode::ReadWrite)?;
    let (session, mut queue) = host(&lab, "a").connect_soon()?;
    write(&mut queue, 0, vec![1; BLOCK as usize])?;
    ensure!(used.acquire_lock().is_err(), "another client got the lock");
    write(&mut queue, 0, vec![2; BLOCK as usize])?;
    used.close(MINUTE)?;
    drop(queue);
    session.close()?;
    lab.daemon.stop()
}

#[test]
fn rbd_one_tenant_blocklisted_others_go_on() -> Result<()> {
    let Some(cluster) = cluster()? else {
        return Ok(());
    };
    let mut lab = ceph::lab(&cluster, 1, IMAGE_BYTES, "")?;
    lab.add_volume("local", IMAGE_BYTES)?;
    lab.daemon.cli(&["tenant", "create", "u"])?;
    ceph::add_image_of(&mut lab, "u", "other", IMAGE_BYTES)?;
    lab.hurt = vec![0];
    let shown = lab.daemon.cli(&["volume", "show", "t/a"])?;
    let address = shown["rbd"]["client_addresses"][0].as_str();
    let address = address.context("the client has an address")?.to_owned();
    lab.during_load(Noticed::Nothing, |daemon, progress| {
        progress.more("work", 50)?;
        cluster.ceph(&["osd", "blocklist", "add", &address])?;
        progress.more_of(&[1, 2], "others' work", 200)?;
        wait::until("another client", MINUTE, || {
            let shown = daemon.cli(&["volume", "show", "t/a"])?;
            let addresses = &shown["rbd"]["client_addresses"];
            let is_new = addresses[0].as_str().is_some_and(|now| now != address);
            Ok((is_new && addresses[1].is_null()).then_some(()))
        })?;
        progress.more("work of the new client", 50)
    })?;
    let events = lab.events()?;
    let failed = &events["device_failed"];
    let says = |event: &serde_json::Value| event["message"].to_string().contains("blocklisted");
    ensure!(failed.iter().any(says), "{failed:?}");
    lab.finish()
}

/// Whether a file has these bytes.
fn has(file: &Path, bytes: &[u8]) -> Result<bool> {
    let content = std::fs::read(file)?;
    Ok(content.windows(bytes.len()).any(|part| part == bytes))
}

#[test]
fn key_is_nowhere() -> Result<()> {
    let Some(cluster) = cluster()? else {
        return Ok(());
    };
    let mut lab = ceph::lab(&cluster, 1, IMAGE_BYTES, "")?;
    let keyring = std::fs::read_to_string(cluster.keyring("client.admin"))?;
    let key = keyring.split("key = ").nth(1).context("a key")?.trim();
    ensure!(key.len() > 30, "{keyring}");
    lab.during_load(Noticed::Nothing, |daemon, progress| {
        progress.more("work", 50)?;
        daemon.kill_engine()?;
        progress.more("work after a death", 50)
    })?;
    let events = lab.daemon.cli(&["events"])?.to_string();
    ensure!(!events.contains(key), "the key is in an event");
    let mut folders = vec![lab.daemon.folder().to_owned()];
    let mut files = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() && entry.metadata()?.len() < 64 * MIB {
                files += 1;
                let name = entry.path().display().to_string();
                ensure!(!has(&entry.path(), key.as_bytes())?, "the key is in {name}");
            }
        }
    }
    ensure!(files > 5, "only {files} files");
    ensure!(
        !has(&lab.pool_file(), key.as_bytes())?,
        "the key is in the pool"
    );
    let processes = lab.daemon.processes()?;
    for pid in [processes.daemon, processes.engine] {
        for of in ["cmdline", "environ"] {
            let file = format!("/proc/{pid}/{of}");
            ensure!(
                !has(Path::new(&file), key.as_bytes())?,
                "the key is in {file}"
            );
        }
    }
    lab.finish()
}

#[test]
fn cephx_wrong_key_says_so() -> Result<()> {
    let Some(cluster) = cluster()? else {
        return Ok(());
    };
    cluster.rbd(&["create", "--size", "32M", &format!("{POOL}/guarded")])?;
    let folder = tempfile::tempdir()?;
    let wrong = folder.path().join("wrong.keyring");
    let key = "AQBSdFhcwPsSAhAAzcl3sRvKyYzQmRdDOF1NOg==";
    std::fs::write(&wrong, format!("[client.admin]\n\tkey = {key}\n"))?;
    let weak = folder.path().join("weak.keyring");
    let caps = ["mon", "allow r", "osd", "allow r"];
    let made = [&["auth", "get-or-create", "client.weak"][..], &caps].concat();
    std::fs::write(&weak, cluster.ceph(&made)?)?;
    let more = format!(
        "[ceph.wrong]\nconfig = {conf:?}\nkeyring = {wrong:?}\n\
        [ceph.weak]\nconfig = {conf:?}\nuser = \"weak\"\nkeyring = {weak:?}\n",
        conf = cluster.config_file(),
    );
    let mut lab = ceph::lab(&cluster, 0, IMAGE_BYTES, &more)?;
    let create = |cluster: &str, name: &str| {
        let path = format!("{cluster}/{POOL}/{name}");
        ["volume", "create", "t/v", "--size", "32M", "--rbd", &path].map(str::to_owned)
    };
    for (of, image, says) in [
        ("wrong", "guarded", ["wrong", "key"]),
        ("weak", "new", ["weak", "capabilit"]),
    ] {
        let args = create(of, image);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        refused(&lab.daemon, &args, &says)?;
    }
    let volumes = lab.daemon.cli(&["volume", "list"])?;
    ensure!(volumes.as_array().is_some_and(Vec::is_empty), "{volumes}");
    lab.daemon.stop()
}

#[test]
fn rbd_namespaces_pools_and_deletion() -> Result<()> {
    let Some(cluster) = cluster()? else {
        return Ok(());
    };
    let mut lab = ceph::lab(&cluster, 0, IMAGE_BYTES, "")?;
    let in_namespace = format!("{POOL}/apart");
    cluster.rbd(&["namespace", "create", &in_namespace])?;
    let image = format!("{in_namespace}/x");
    let daemon = &lab.daemon;
    let create = ["volume", "create", "t/x", "--size", "32M", "--rbd"];
    daemon.cli(&[&create[..], &[&format!("{NAME}/{image}")]].concat())?;
    let again = [
        "volume",
        "create",
        "t/y",
        "--rbd",
        &format!("{NAME}/{image}"),
    ];
    refused(daemon, &again, &["t/x"])?;
    refused(
        daemon,
        &[
            "volume",
            "create",
            "t/y",
            "--rbd",
            &format!("{NAME}/nopool/x"),
        ],
        &["nopool"],
    )?;
    refused(
        daemon,
        &["volume", "create", "t/y", "--rbd", &path("nothing")],
        &["nothing", "--size"],
    )?;
    daemon.cli(&["volume", "delete", "t/x", "--yes"])?;
    ensure!(
        cluster.rbd(&["ls", &in_namespace])?.contains('x'),
        "it is gone"
    );
    daemon.cli(&[
        "volume",
        "create",
        "t/x",
        "--rbd",
        &format!("{NAME}/{image}"),
    ])?;
    daemon.cli(&["volume", "delete", "t/x", "--with-image", "--yes"])?;
    ensure!(
        cluster.rbd(&["ls", &in_namespace])?.trim().is_empty(),
        "it stays"
    );
    lab.daemon.stop()
}
