//! NVMe controllers over vfio-user with our own driver, which shares only NVMe's types with the
//! target: doorbells, zero copies, deaths of the engine, many controllers.

use std::ops::ControlFlow;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_device::faulty::{self, Faults};
use forebay_initiator::vm::pcie::Pcie;
use forebay_initiator::vm::verify::{VmVerifier, VmVerify};
use forebay_initiator::vm::{Disk, DiskStatus, Doorbells, Op, Options, Target};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::lab;
use forebay_tests::vm::{self, Frontend};
use forebay_tests::wait;

const MINUTE: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
const WRITES: u64 = 1500;

fn shapes() -> Vec<(Frontend, u32, Options)> {
    let of = |doorbells, queues, interrupts| Options {
        depth: 16,
        doorbells,
        queues,
        interrupts,
        ..Options::default()
    };
    vec![
        (Frontend::NvmePcie, 4096, of(Doorbells::Shadow, 4, false)),
        (
            Frontend::NvmePcie,
            128 << 10,
            of(Doorbells::Shadow, 1, true),
        ),
        (Frontend::NvmePcie, 8192, of(Doorbells::Trapped, 1, true)),
        (Frontend::MappedPcie, 4096, of(Doorbells::Mapped, 2, false)),
        (
            Frontend::MappedPcie,
            512 << 10,
            of(Doorbells::Mapped, 1, true),
        ),
        // The most queues, each with its own vector.
        (Frontend::NvmePcie, 4096, of(Doorbells::Shadow, 64, true)),
        // The longest queues.
        (
            Frontend::NvmePcie,
            4096,
            Options {
                depth: 1023,
                ..of(Doorbells::Shadow, 2, true)
            },
        ),
        // Interrupts after eight completions or 200 us; scatter/gather lists.
        (
            Frontend::NvmePcie,
            128 << 10,
            Options {
                gather: 7 | 2 << 8,
                sgl: true,
                ..of(Doorbells::Shadow, 2, true)
            },
        ),
    ]
}

/// Includes `zero_copy_counters`: NVMe data is never copied.
#[test]
fn verified_load_in_every_shape() -> Result<()> {
    let mut daemon = vm::serve(&DaemonOptions::default(), "1G")?;
    for (number, (frontend, block_bytes, options)) in shapes().into_iter().enumerate() {
        let what = format!("{frontend:?}, {options:?}");
        let target = vm::export(&daemon, &format!("v{number}"), "64M", frontend)?;
        let spec = VmVerify {
            block_bytes,
            span_bytes: Some(32 * MIB),
            seed: number as u64 + 1,
            ..VmVerify::new(target, options)
        };
        verified(spec).with_context(|| what)?;
    }
    let stats = daemon.cli(&["stats"])?;
    for lane in stats["lanes"].as_array().context("no lanes")? {
        ensure!(lane["copied_bytes"] == 0, "{lane}");
    }
    daemon.pool_check()?;
    daemon.stop()
}

fn verified(spec: VmVerify) -> Result<()> {
    let writes = WRITES.min(256 * MIB / u64::from(spec.block_bytes));
    let mut verifier = VmVerifier::connect(spec)?;
    let written = verifier.write(&mut |now| {
        if now < writes {
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

#[test]
fn kill9_engine_verified_pcie() -> Result<()> {
    let deaths = lab::count_from("FOREBAY_MACHINE_KILLS", 8);
    for (frontend, doorbells, interrupts, queues) in [
        (Frontend::NvmePcie, Doorbells::Shadow, true, 2),
        (Frontend::MappedPcie, Doorbells::Mapped, false, 1),
    ] {
        let mut daemon = vm::serve(&DaemonOptions::default(), "1G")?;
        let target = vm::export(&daemon, "v", "64M", frontend)?;
        let options = Options {
            doorbells,
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
        vm::verified_over_deaths(&mut daemon, spec, deaths)
            .with_context(|| format!("{frontend:?}"))?;
        let takeover = daemon.cli(&["stats"])?["takeover"].clone();
        ensure!(takeover["takeovers"] == deaths, "{takeover}");
        daemon.pool_check()?;
        daemon.stop()?;
    }
    Ok(())
}

#[test]
fn sixty_four_controllers() -> Result<()> {
    const CONTROLLERS: u8 = 64;
    let mut daemon = vm::serve(&DaemonOptions::default(), "4G")?;
    let options = Options {
        depth: 4,
        ..Options::default()
    };
    let mut vms = Vec::new();
    for number in 0..CONTROLLERS {
        let name = format!("v{number}");
        let target = vm::export(&daemon, &name, "16M", Frontend::NvmePcie)?;
        let mut disk = vm::connect(&target, &options)?;
        let queues = disk.take_queues();
        vms.push((number, disk, queues));
    }
    let (offset_bytes, bytes) = (MIB, 4096);
    let write = Op::Write {
        offset_bytes,
        bytes,
    };
    let read = Op::Read {
        offset_bytes,
        bytes,
    };
    for (number, _, queues) in &mut vms {
        queues[0].put(0, &[*number; 4096]);
        vm::execute(&mut *queues[0], write)?;
    }
    let dead = daemon.kill_engine()?;
    daemon.wait_engine_after(dead.generation, MINUTE)?;
    for (number, disk, queues) in &mut vms {
        queues[0].put(0, &[0xff; 4096]);
        vm::execute(&mut *queues[0], read)?;
        let mut seen = [0; 4096];
        queues[0].get(0, &mut seen);
        ensure!(
            seen == [*number; 4096],
            "controller {number} reads another's"
        );
        ensure!(disk.is_open());
    }
    let stats = daemon.cli(&["stats"])?;
    let lanes = stats["lanes"].as_array().context("no lanes")?;
    let connected = lanes.iter().filter(|lane| lane["queues"] == 1).count();
    ensure!(
        connected == usize::from(CONTROLLERS),
        "{connected} connected"
    );
    for (_, disk, queues) in vms {
        drop(queues);
        disk.close()?;
    }
    daemon.stop()
}

/// The device hangs. The documented number of commands is in flight, and the others wait in the
/// VM's memory. Later all succeed.
#[test]
fn full_queues_wait_for_the_commands_in_hand() -> Result<()> {
    const QUEUES: u16 = 64;
    const DEPTH: u16 = 1023;
    const IN_HAND: u64 = 1024;
    /// Slots of each queue that read; only their data is ever touched.
    const READS: u16 = 16;
    let mut daemon = Daemon::start(&DaemonOptions {
        config: "[devices]\nallow_faulty = true\n".into(),
        ..DaemonOptions::default()
    })?;
    let pool = daemon.folder().join("pool.img");
    let device = format!("faulty:{}?size=1G&seed=1", pool.display());
    daemon.create_pool(&["--device", &device])?;
    daemon.cli(&["tenant", "create", "t"])?;
    let target = vm::export(&daemon, "v", "64M", Frontend::NvmePcie)?;
    vm::fill(&target, MIB, 3)?;
    let options = Options {
        queues: QUEUES,
        depth: DEPTH,
        limit: MINUTE,
        ..Options::default()
    };
    let mut disk = vm::connect(&target, &options)?;
    let mut queues = disk.take_queues();
    ensure!(queues.len() == usize::from(QUEUES));
    let hang = Faults {
        hang: true,
        ..Faults::default()
    };
    faulty::set(&pool, &hang)?;
    for queue in &mut queues {
        for slot in 0..DEPTH {
            let read = Op::Read {
                offset_bytes: u64::from(slot) * 4096,
                bytes: 4096,
            };
            queue.submit(slot, if slot < READS { read } else { Op::Flush })?;
        }
        queue.kick()?;
    }
    wait::until("all that there may be is in hand", MINUTE, || {
        let in_hand = vm::lane(&daemon)?["in_flight"].as_u64();
        ensure!(in_hand <= Some(IN_HAND), "{in_hand:?} in hand");
        Ok((in_hand == Some(IN_HAND)).then_some(()))
    })?;
    faulty::set(&pool, &Faults::default())?;
    let all = u32::from(QUEUES) * u32::from(DEPTH);
    let (mut ended, mut done) = (0, Vec::new());
    wait::until("the end of all", MINUTE, || {
        for queue in &mut queues {
            queue.poll(&mut done)?;
        }
        ended += done.len() as u32;
        for done in done.drain(..) {
            ensure!(done.ended == DiskStatus::Well, "it ended {:?}", done.ended);
        }
        Ok((ended == all).then_some(()))
    })?;
    drop(queues);
    disk.close()?;
    daemon.stop()
}

#[test]
fn zero_copy_counters_over_a_block_device() -> Result<()> {
    let mut daemon = Daemon::start(&DaemonOptions::default())?;
    let Some(device) = Loop::over(&daemon.folder().join("device.img"))? else {
        return Ok(());
    };
    daemon.create_pool(&["--device", &device.0])?;
    daemon.cli(&["tenant", "create", "t"])?;
    for (name, frontend) in [("p", Frontend::NvmePcie), ("v", Frontend::VhostUser)] {
        let target = vm::export(&daemon, name, "64M", frontend)?;
        let options = Options {
            depth: 16,
            interrupts: true,
            ..Options::default()
        };
        verified(VmVerify {
            block_bytes: 64 << 10,
            span_bytes: Some(32 * MIB),
            ..VmVerify::new(target, options)
        })
        .with_context(|| format!("{frontend:?}"))?;
    }
    let stats = daemon.cli(&["stats"])?;
    for lane in stats["lanes"].as_array().context("no lanes")? {
        ensure!(lane["copied_bytes"] == 0, "{lane}");
        ensure!(lane["write"]["ops"].as_u64() > Some(0), "{lane}");
    }
    daemon.pool_check()?;
    daemon.stop()
}

struct Loop(String);

impl Loop {
    /// Prints a message if there are no loop devices.
    fn over(file: &std::path::Path) -> Result<Option<Self>> {
        std::fs::File::create_new(file)?.set_len(1 << 30)?;
        let mut losetup = std::process::Command::new("losetup");
        let made = losetup.args(["--find", "--show"]).arg(file).output();
        let why = match made {
            Ok(made) if made.status.success() => {
                let path = String::from_utf8(made.stdout)?;
                return Ok(Some(Self(path.trim().to_owned())));
            }
            Ok(made) => String::from_utf8_lossy(&made.stderr).into_owned(),
            Err(error) => error.to_string(),
        };
        eprintln!("NOT RUN: this needs a loop device: {why}");
        Ok(None)
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let mut losetup = std::process::Command::new("losetup");
        // If it is still open, it is detached at the last close.
        let _ = losetup.args(["--detach", &self.0]).status();
    }
}

/// Deleting an export first asks the VM to release the disk.
#[test]
fn growth_and_removal() -> Result<()> {
    let mut daemon = vm::serve(&DaemonOptions::default(), "1G")?;
    let target = vm::export(&daemon, "v", "64M", Frontend::NvmePcie)?;
    let Target::VfioUser(path) = &target else {
        unreachable!("it was asked for");
    };
    let mut disk = Pcie::connect(path, &Options::default())?;
    ensure!(disk.has_shadow_doorbells());
    ensure!(disk.geometry().size_bytes == 64 * MIB);
    daemon.cli(&["volume", "resize", "t/v", "--size", "96M"])?;
    wait::until("the controller's new size", MINUTE, || {
        Ok((disk.refresh()?.size_bytes == 96 * MIB).then_some(()))
    })?;
    daemon.cli(&["export", "delete", "t/v", "--disconnect-hosts"])?;
    ensure!(disk.wait_removal(MINUTE)?, "nobody asked for the removal");
    wait::until("the connection's end", MINUTE, || {
        Ok((!disk.is_open()).then_some(()))
    })?;
    daemon.stop()
}
