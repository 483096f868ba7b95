//! vhost-user-blk disks with our own driver, which shares no code with the target: rings, zero
//! copies, huge pages, deaths of the engine, growth, removal.

use std::ops::ControlFlow;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::vm::verify::{VmVerifier, VmVerify};
use forebay_initiator::vm::vhost::Vhost;
use forebay_initiator::vm::{Disk, DiskStatus, Op, Options, Ring, Target};
use forebay_tests::daemon::DaemonOptions;
use forebay_tests::lab;
use forebay_tests::vm::{self, Frontend};
use forebay_tests::wait;

const MINUTE: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
const WRITES: u64 = 1500;

fn shapes() -> Vec<(&'static str, u32, Options)> {
    let plain = Options {
        depth: 16,
        ..Options::default()
    };
    let of = |change: fn(&mut Options)| {
        let mut options = plain.clone();
        change(&mut options);
        options
    };
    vec![
        ("split", 4096, of(|o| o.queues = 4)),
        (
            "split, direct, scattered",
            64 << 10,
            of(|o| {
                o.indirect = false;
                o.piece_bytes = 4096;
            }),
        ),
        (
            "split, no event index, interrupts",
            4096,
            of(|o| {
                o.event_idx = false;
                o.interrupts = true;
            }),
        ),
        (
            "packed, scattered",
            128 << 10,
            of(|o| {
                o.ring = Ring::Packed;
                o.piece_bytes = 4096;
                o.queues = 2;
            }),
        ),
        (
            "packed, direct, interrupts",
            16 << 10,
            of(|o| {
                o.ring = Ring::Packed;
                o.indirect = false;
                o.interrupts = true;
            }),
        ),
    ]
}

#[test]
fn verified_load_in_every_shape() -> Result<()> {
    let mut daemon = vm::serve(&DaemonOptions::default(), "1G")?;
    for (number, (what, block_bytes, options)) in shapes().into_iter().enumerate() {
        let name = format!("v{number}");
        let target = vm::export(&daemon, &name, "64M", Frontend::VhostUser)?;
        let spec = VmVerify {
            block_bytes,
            span_bytes: Some(32 * MIB),
            seed: number as u64 + 1,
            ..VmVerify::new(target, options)
        };
        verified(spec).with_context(|| what.to_owned())?;
    }
    daemon.pool_check()?;
    daemon.stop()
}

fn verified(spec: VmVerify) -> Result<()> {
    let mut verifier = VmVerifier::connect(spec)?;
    let written = verifier.write(&mut |writes| {
        if writes < WRITES {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        }
    })?;
    ensure!(written.errors == 0, "{:?}", written.first_error);
    verifier.flush()?;
    let read = verifier.read_back()?;
    ensure!(read.is_clean() && read.bytes >= 32 * MIB, "{read}");
    verifier.close()?;
    Ok(())
}

/// Aligned data is not copied; other copies are counted.
#[test]
fn zero_copy_counters() -> Result<()> {
    let mut daemon = vm::serve(&DaemonOptions::default(), "1G")?;
    let target = vm::export(&daemon, "v", "64M", Frontend::VhostUser)?;
    for (block_bytes, ring) in [(4096, Ring::Split), (128 << 10, Ring::Packed)] {
        let options = Options {
            ring,
            piece_bytes: 4096,
            ..Options::default()
        };
        let spec = VmVerify {
            block_bytes,
            span_bytes: Some(32 * MIB),
            initial: forebay_initiator::verify::Initial::Any,
            seed: block_bytes.into(),
            ..VmVerify::new(target.clone(), options)
        };
        let mut verifier = VmVerifier::connect(spec)?;
        verifier.write(&mut |writes| {
            if writes < WRITES {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        })?;
        let read = verifier.read_back()?;
        ensure!(read.is_clean(), "{read}");
        verifier.close()?;
    }
    let lane = vm::lane(&daemon)?;
    ensure!(lane["copied_bytes"] == 0, "{lane}");
    ensure!(lane["write"]["ops"].as_u64() >= Some(2 * WRITES), "{lane}");

    let options = Options {
        odd: true,
        depth: 1,
        ..Options::default()
    };
    let mut disk = vm::connect(&target, &options)?;
    let mut queues = disk.take_queues();
    let op = Op::Write {
        offset_bytes: 0,
        bytes: 4096,
    };
    vm::execute(&mut *queues[0], op)?;
    drop(queues);
    disk.close()?;
    let lane = vm::lane(&daemon)?;
    ensure!(lane["copied_bytes"] == 4096, "{lane}");
    daemon.stop()
}

#[test]
fn kill9_engine_verified_vhost() -> Result<()> {
    let deaths = lab::count_from("FOREBAY_MACHINE_KILLS", 8);
    for (ring, interrupts, queues) in [(Ring::Split, false, 2), (Ring::Packed, true, 1)] {
        let mut daemon = vm::serve(&DaemonOptions::default(), "1G")?;
        let target = vm::export(&daemon, "v", "64M", Frontend::VhostUser)?;
        let options = Options {
            ring,
            interrupts,
            queues,
            depth: 16,
            ..Options::default()
        };
        let spec = VmVerify {
            flush_every_writes: 100,
            span_bytes: Some(16 * MIB),
            ..VmVerify::new(target, options)
        };
        vm::verified_over_deaths(&mut daemon, spec, deaths).with_context(|| format!("{ring:?}"))?;
        let takeover = daemon.cli(&["stats"])?["takeover"].clone();
        ensure!(takeover["takeovers"] == deaths, "{takeover}");
        daemon.pool_check()?;
        daemon.stop()?;
    }
    Ok(())
}

#[test]
fn discard_zeroes_and_growth() -> Result<()> {
    let mut daemon = vm::serve(&DaemonOptions::default(), "1G")?;
    let target = vm::export(&daemon, "v", "64M", Frontend::VhostUser)?;
    let Target::VhostUser(path) = &target else {
        unreachable!("it was asked for");
    };
    let options = Options {
        depth: 1,
        ..Options::default()
    };
    let mut disk = Vhost::connect(path, &options)?;
    let geometry = disk.geometry();
    ensure!(geometry.size_bytes == 64 * MIB, "{geometry:?}");
    ensure!(geometry.can_flush && geometry.can_discard && geometry.can_write_zeroes);
    let mut queues = disk.take_queues();
    let queue = &mut *queues[0];
    let bytes = 4096;
    for (offset_bytes, gone) in [
        (
            0,
            Op::Discard {
                offset_bytes: 0,
                bytes,
            },
        ),
        (
            8192,
            Op::WriteZeroes {
                offset_bytes: 8192,
                bytes,
            },
        ),
    ] {
        queue.put(0, &[7; 4096]);
        vm::execute(
            queue,
            Op::Write {
                offset_bytes,
                bytes,
            },
        )?;
        vm::execute(queue, gone)?;
        vm::execute(
            queue,
            Op::Read {
                offset_bytes,
                bytes,
            },
        )?;
        let mut seen = [1; 4096];
        queue.get(0, &mut seen);
        ensure!(seen == [0; 4096], "{gone:?} left something");
    }
    let beyond = Op::Read {
        offset_bytes: 64 * MIB,
        bytes,
    };
    let ended = vm::end_of(queue, beyond)?;
    ensure!(
        ended == DiskStatus::Virtio(1),
        "a read beyond the end: {ended:?}"
    );

    daemon.cli(&["volume", "resize", "t/v", "--size", "96M"])?;
    ensure!(disk.wait_config_change(MINUTE)?, "growth was not told");
    let grown = disk.refresh()?;
    ensure!(grown.size_bytes == 96 * MIB, "{grown:?}");
    vm::execute(queue, beyond)?;
    drop(queues);
    Box::new(disk).close()?;
    daemon.stop()
}

/// Reserved until dropped.
struct HugePages(u64);

impl HugePages {
    const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

    fn number(name: &str) -> Option<u64> {
        let text = std::fs::read_to_string(format!("{}/{name}", Self::POOL)).ok()?;
        text.trim().parse().ok()
    }

    fn set(pages: u64) -> Option<()> {
        std::fs::write(format!("{}/nr_hugepages", Self::POOL), pages.to_string()).ok()
    }

    /// `None` if the kernel lacks them, or does not allow it.
    fn set_aside(pages: u64) -> Option<Self> {
        let own = Self(Self::number("nr_hugepages")?);
        Self::set(own.0 + pages)?;
        (Self::number("free_hugepages")? >= pages).then_some(own)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = Self::set(self.0);
    }
}

/// Whether this kernel can share registered memory between rings (Linux 6.13).
fn registers() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split('.').map(|n| n.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(6), Some(13))
}

#[test]
fn huge_pages_are_registered_and_not_copied() -> Result<()> {
    let Some(_pages) = HugePages::set_aside(16) else {
        println!("skipped: this machine has no 16 huge pages to give, or no right to ask");
        return Ok(());
    };
    let mut daemon = vm::serve(&DaemonOptions::default(), "1G")?;
    daemon.cli(&["volume", "create", "t/v", "--size", "64M"])?;
    let pinned = &["--pinned-memory"];
    let target = vm::export_as(&daemon, "t/v", Frontend::VhostUser, pinned)?;
    let options = Options {
        queues: 2,
        depth: 16,
        slot_bytes: 64 << 10,
        huge_pages: true,
        ..Options::default()
    };
    let spec = VmVerify {
        block_bytes: 64 << 10,
        span_bytes: Some(32 * MIB),
        ..VmVerify::new(target, options)
    };
    let mut verifier = VmVerifier::connect(spec)?;
    let mut until = |writes| {
        verifier.write(&mut |done| match done < writes {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        })
    };
    let written = until(WRITES)?;
    ensure!(written.errors == 0, "{:?}", written.first_error);
    if registers() {
        wait::until("its memory is registered", MINUTE, || {
            let registered = vm::lane(&daemon)?["registered_bytes"].as_u64();
            Ok((registered >= Some(2 * MIB)).then_some(()))
        })?;
    } else {
        println!("not looked at: registered memory needs Linux 6.13");
    }
    let written = until(WRITES)?;
    ensure!(written.errors == 0, "{:?}", written.first_error);
    let read = verifier.read_back()?;
    ensure!(read.is_clean() && read.bytes >= 32 * MIB, "{read}");
    verifier.close()?;
    let lane = vm::lane(&daemon)?;
    ensure!(lane["copied_bytes"] == 0, "{lane}");
    daemon.pool_check()?;
    daemon.stop()
}

#[test]
fn a_connected_disk_is_removed_and_made_again() -> Result<()> {
    let mut daemon = vm::serve(&DaemonOptions::default(), "1G")?;
    let target = vm::export(&daemon, "goes", "64M", Frontend::VhostUser)?;
    let other = vm::export(&daemon, "stays", "64M", Frontend::VhostUser)?;
    let options = Options {
        depth: 1,
        ..Options::default()
    };
    let connect = |target| vm::connect(target, &options);
    let (mut goes, mut stays) = (connect(&target)?, connect(&other)?);
    let mut queues = [goes.take_queues(), stays.take_queues()];
    let (offset_bytes, bytes) = (8192, 4096);
    let write = Op::Write {
        offset_bytes,
        bytes,
    };
    let read = Op::Read {
        offset_bytes,
        bytes,
    };
    for queues in &mut queues {
        queues[0].put(0, &[7; 4096]);
        vm::execute(&mut *queues[0], write)?;
    }
    // The protocol has no message for it, so the connection ends.
    daemon.cli(&["export", "delete", "t/goes", "--disconnect-hosts"])?;
    let path = vm::socket(&target);
    wait::until("the end of connection and socket", MINUTE, || {
        Ok((!goes.is_open() && !path.exists()).then_some(()))
    })?;
    ensure!(stays.is_open());
    vm::execute(&mut *queues[1][0], write)?;
    // A new export has the old path and data.
    let again = vm::export_as(&daemon, "t/goes", Frontend::VhostUser, &[])?;
    ensure!(again == target, "another place: {again:?}");
    let mut disk = connect(&again)?;
    let mut found = disk.take_queues();
    vm::execute(&mut *found[0], read)?;
    let mut seen = [0; 4096];
    found[0].get(0, &mut seen);
    ensure!(seen == [7; 4096], "it lost what was written");
    drop((queues, found));
    disk.close()?;
    stays.close()?;
    ensure!(daemon.processes()?.generation == 1, "the engine died of it");
    daemon.pool_check()?;
    daemon.stop()
}
