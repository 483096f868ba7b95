//! A thin volume fills its pool. Then writes that need space get Capacity Exceeded; reads,
//! overwrites and volumes with a reservation are unaffected. Freed space is usable at once.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::{IoOp, dsm_ranges};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::host::{Host, is_no_space};
use forebay_tests::shadow::Promise;
use forebay_tests::wait;
use serde_json::Value;

const MINUTE: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
const EXTENT: u64 = 64 << 10;
const PER_EXTENT: u64 = EXTENT / 4096;
const RESERVED: u64 = 8 * MIB;

fn create(
    daemon: &Daemon,
    name: &str,
    size_bytes: u64,
    number: u64,
    more: &[&str],
) -> Result<Host> {
    let size = size_bytes.to_string();
    let mut args = vec!["volume", "create", name, "--size", &size];
    args.extend(more);
    daemon.cli(&args)?;
    daemon.cli(&["export", "create", name, "--any-host"])?;
    let address = format!("127.0.0.1:{}", daemon.port()).parse()?;
    Ok(Host::new(address, name, size_bytes, 4096, number))
}

fn pool(daemon: &Daemon) -> Result<Value> {
    daemon.cli(&["pool", "show"])
}

#[test]
fn a_thin_volume_as_large_as_the_pool_fills_completely() -> Result<()> {
    let mut daemon = Daemon::start(&DaemonOptions {
        config: "[engine]\nreactors = 2\n".into(),
        ..DaemonOptions::default()
    })?;
    let device = format!("file:{}", daemon.folder().join("pool.img").display());
    daemon.create_pool(&["--device", &device, "--size", "192M"])?;
    daemon.cli(&["tenant", "create", "t"])?;
    let mut promised = create(&daemon, "t/promised", RESERVED, 1, &["--reserve", "full"])?;
    // Space that is reserved for a volume is not free.
    let free = pool(&daemon)?["free_bytes"]
        .as_u64()
        .context("free_bytes")?;
    ensure!(free.is_multiple_of(EXTENT), "{free}");
    let mut large = create(&daemon, "t/large", free, 2, &[])?;
    large
        .fill()
        .context("filling a volume as large as all that is free")?;
    let full = pool(&daemon)?;
    ensure!(full["level"] == "critical", "{full}");
    ensure!(
        full["warnings"].to_string().contains("the pool is full"),
        "{full}"
    );

    let mut late = create(&daemon, "t/late", 4 * MIB, 3, &[])?;
    let (_late_session, mut late_queue) = late.connect()?;
    let refused = late.write_with(&mut late_queue, 0, 1);
    ensure!(is_no_space(&refused), "there was space: {refused:?}");
    late.check()?;
    // Mapped blocks can be overwritten and flushed.
    let load = {
        large.habits.holes = 0;
        large.load(|commands| commands < 300)?
    };
    ensure!(
        load.no_space == 0 && load.flushes > 0 && !load.lost,
        "{load:?}"
    );
    large.check()?;
    promised.fill().context("the volume with a reservation")?;
    promised.check()?;

    // Any volume can use the freed space.
    let extents = 16;
    let (large_session, mut queue) = large.connect()?;
    let hole = large.shadow.begin(0, (extents * PER_EXTENT) as u32, None);
    let ranges = dsm_ranges(&[(0, (extents * PER_EXTENT) as u32)]);
    queue.execute(&IoOp::Deallocate { ranges: 1 }, ranges, MINUTE)?;
    large.shadow.end(&hole, true, false);
    for extent in 0..extents {
        wait::until("the freed space", MINUTE, || {
            let written = late.write_with(&mut late_queue, extent * PER_EXTENT, 1);
            match written {
                Err(_) if is_no_space(&written) => Ok(None),
                other => other.map(Some),
            }
        })?;
    }
    let over = late.write_with(&mut late_queue, extents * PER_EXTENT, 1);
    ensure!(
        is_no_space(&over),
        "there was more space than was freed: {over:?}"
    );
    late.check()?;
    large.check()?;
    late.flush()?;
    large.flush()?;
    promised.flush()?;
    drop((queue, large_session));
    daemon.pool_check()?;
    // A daemon starts with a full pool, also after a power cut.
    daemon.power_cut(&[], 0)?;
    daemon.start_again()?;
    for host in [&mut large, &mut late, &mut promised] {
        host.verify(Promise::Flushed)?;
    }
    daemon.pool_check()?;
    daemon.stop()
}
