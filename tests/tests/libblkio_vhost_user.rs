//! libblkio's vhost-user driver, a third frontend implementation: QEMU's tools use it to read our
//! driver's data, and vice versa.

use std::time::Duration;

use anyhow::{Result, ensure};
use forebay_initiator::vm::{Op, Options};
use forebay_tests::daemon::DaemonOptions;
use forebay_tests::guest::tools::Tools;
use forebay_tests::vm::{self, Frontend};
use xtask::process;

const LIMIT: Duration = Duration::from_secs(120);

#[test]
#[ignore = "needs QEMU's tools: cargo xtask test guest"]
fn libblkio_vhost_user() -> Result<()> {
    let tools = Tools::prepare()?;
    let mut daemon = vm::serve(&DaemonOptions::default(), "1G")?;
    let target = vm::export(&daemon, "disk", "64M", Frontend::VhostUser)?;
    let disk = format!(
        "driver=virtio-blk-vhost-user,path={},cache.direct=on",
        vm::socket(&target).display()
    );
    let io = |commands: &[&str]| {
        let mut command = tools.command("qemu-io");
        command.args(["--image-opts", &disk]);
        for text in commands {
            command.args(["-c", text]);
        }
        let said = process::text(&mut command, LIMIT);
        let said = said.map_err(|error| daemon.with_logs(error))?;
        ensure!(!said.contains("failed"), "{said}");
        Ok(said)
    };
    io(&[
        "write -P 0x5a 1M 4M",
        "read -P 0x5a 1M 4M",
        "write -z 2M 1M",
        "read -P 0 2M 1M",
        "discard 3M 1M",
        "flush",
    ])?;
    let mut bench = tools.command("qemu-img");
    bench.args([
        "bench", "-c", "5000", "-d", "16", "-s", "4k", "-o", "8M", "-w",
    ]);
    bench.args(["-n", "-t", "none", "--image-opts", &disk]);
    process::text(&mut bench, LIMIT).map_err(|error| daemon.with_logs(error))?;

    let mut ours = vm::connect(&target, &Options::default())?;
    let mut queues = ours.take_queues();
    for (offset_bytes, byte) in [(1 << 20, 0x5a), (2 << 20, 0), (4 << 20, 0x5a), (6 << 20, 0)] {
        let bytes = 4096;
        vm::execute(
            &mut *queues[0],
            Op::Read {
                offset_bytes,
                bytes,
            },
        )?;
        let mut seen = [1; 4096];
        queues[0].get(0, &mut seen);
        ensure!(seen == [byte; 4096], "at {offset_bytes}: {:x}", seen[0]);
    }
    queues[0].put(0, &[0xa5; 4096]);
    vm::execute(
        &mut *queues[0],
        Op::Write {
            offset_bytes: 0,
            bytes: 4096,
        },
    )?;
    drop(queues);
    ours.close()?;
    io(&["read -P 0xa5 0 4k"])?;
    daemon.cli(&["volume", "resize", "t/disk", "--size", "96M"])?;
    let said = io(&["write -P 0x77 90M 1M", "read -P 0x77 90M 1M", "length"])?;
    ensure!(said.contains("96 MiB"), "{said}");
    daemon.pool_check()?;
    daemon.stop()
}
