//! Space that another tenant used reads as zeros, at once and after a restart, on a file and in
//! memory.
//!
//! A volume fills a small pool and is deleted. Another tenant's volume gets its extents by
//! single-block writes.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Result, ensure};
use forebay_initiator::load::{self, Access, Amount, LoadSpec};
use forebay_initiator::{IoOp, IoQueue, Options, Session};
use forebay_tests::daemon::{Daemon, DaemonOptions};

const HOST: &str = "nqn.2026-01.test:host";
const LIMIT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
const EXTENT: u64 = 64 << 10;
const SIZE: u64 = 160 * MIB;

fn nqn(tenant: &str) -> String {
    format!("nqn.2026-01.io.forebay:test:{tenant}.v")
}

fn export(daemon: &Daemon, tenant: &str) -> Result<()> {
    let volume = format!("{tenant}/v");
    daemon.cli(&["tenant", "create", tenant])?;
    daemon.cli(&["volume", "create", &volume, "--size", &SIZE.to_string()])?;
    daemon.cli(&["export", "create", &volume, "--any-host"])?;
    Ok(())
}

/// A different block in each extent.
fn written(extent: u64) -> u64 {
    extent * (EXTENT / BLOCK) + extent % (EXTENT / BLOCK)
}

fn check(queue: &mut IoQueue) -> Result<()> {
    for extent in 0..SIZE / EXTENT {
        let (lba, blocks) = (extent * (EXTENT / BLOCK), (EXTENT / BLOCK) as u32);
        let got = queue.execute(
            &IoOp::Read { lba, blocks },
            vec![0xEE; EXTENT as usize],
            LIMIT,
        )?;
        for (i, block) in got.chunks(BLOCK as usize).enumerate() {
            let here = lba + i as u64;
            let want = if here == written(extent) { 0x5A } else { 0 };
            ensure!(
                block.iter().all(|byte| *byte == want),
                "block {here} shows foreign bytes"
            );
        }
    }
    Ok(())
}

fn open(address: SocketAddr, tenant: &str) -> Result<(Session, IoQueue)> {
    let mut session = Session::connect(address, &nqn(tenant), HOST, &Options::default())?;
    let queue = session.open_queue(1)?;
    Ok((session, queue))
}

fn run(device: impl Fn(&Daemon) -> String, size: &[&str]) -> Result<()> {
    let mut daemon = Daemon::start(&DaemonOptions::default())?;
    let device = device(&daemon);
    let mut create = vec!["--device", device.as_str()];
    create.extend(size);
    daemon.create_pool(&create)?;
    let address: SocketAddr = format!("127.0.0.1:{}", daemon.port()).parse()?;
    export(&daemon, "first")?;
    let fill = LoadSpec {
        read_percent: 0,
        block_bytes: 65536,
        queue_depth: 8,
        access: Access::Sequential,
        amount: Amount::Bytes(SIZE),
        ..LoadSpec::new(address, &nqn("first"), HOST)
    };
    ensure!(load::run(&fill, &mut |_| {})?.errors == 0);
    daemon.cli(&["export", "delete", "first/v", "--disconnect-hosts"])?;
    daemon.cli(&["volume", "delete", "first/v"])?;
    export(&daemon, "second")?;
    let (session, mut queue) = open(address, "second")?;
    for extent in 0..SIZE / EXTENT {
        let op = IoOp::Write {
            lba: written(extent),
            blocks: 1,
            fua: false,
        };
        queue.execute(&op, vec![0x5A; BLOCK as usize], LIMIT)?;
    }
    check(&mut queue)?;
    queue.execute(&IoOp::Flush, vec![], LIMIT)?;
    drop(queue);
    session.close()?;
    daemon.stop()?;
    daemon.start_again()?;
    let (session, mut queue) = open(address, "second")?;
    check(&mut queue)?;
    drop(queue);
    session.close()?;
    daemon.stop()
}

#[test]
fn thin_alloc_reads_zero_everywhere() -> Result<()> {
    run(
        |daemon| format!("file:{}", daemon.folder().join("pool.img").display()),
        &["--size", "256M"],
    )
}

#[test]
fn thin_alloc_reads_zero_everywhere_in_memory() -> Result<()> {
    let folder = tempfile::tempdir_in("/dev/shm")?;
    run(
        |_| format!("ram:{}?size=256M", folder.path().join("pool").display()),
        &[],
    )
}
