//! User-space drivers (`forebay bench vm`) are killed while they write. Their export is usable
//! again at once, no late write lands, and other data survives.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::vm::Target;
use forebay_tests::daemon::{Daemon, DaemonOptions, program};
use forebay_tests::lab;
use forebay_tests::vm::{self, Frontend};
use forebay_tests::wait;

const MINUTE: Duration = Duration::from_secs(60);
/// The checked area, in front of the drivers' area.
const KEPT_BYTES: u64 = 8 << 20;

#[test]
fn client_kill_and_restart() -> Result<()> {
    let kills = lab::count_from("FOREBAY_CLIENT_KILLS", 4);
    for frontend in [
        Frontend::VhostUser,
        Frontend::NvmePcie,
        Frontend::MappedPcie,
    ] {
        let mut daemon = vm::serve(&DaemonOptions::default(), "1G")?;
        let target = vm::export(&daemon, "v", "64M", frontend)?;
        vm::fill(&target, KEPT_BYTES, 7)?;
        for kill in 0..kills {
            let mut driver = Driver::start(&target, frontend)?;
            let before = writes(&daemon)?;
            wait::until("the driver's writes", MINUTE, || {
                if let Some(status) = driver.0.try_wait()? {
                    anyhow::bail!("the driver ended: {status}");
                }
                Ok((writes(&daemon)? > before).then_some(()))
            })?;
            drop(driver);
            vm::poll(&target, KEPT_BYTES, 7)
                .with_context(|| format!("{frontend:?} after kill {kill}"))?;
        }
        daemon.pool_check()?;
        ensure!(daemon.processes()?.generation == 1, "the engine died of it");
        daemon.stop()?;
    }
    Ok(())
}

fn writes(daemon: &Daemon) -> Result<u64> {
    let lane = vm::lane(daemon)?;
    lane["write"]["ops"].as_u64().context("no writes counted")
}

/// A driver process, killed when dropped.
struct Driver(Child);

impl Driver {
    fn start(target: &Target, frontend: Frontend) -> Result<Self> {
        let (option, path): (_, &PathBuf) = match target {
            Target::VhostUser(path) => ("--vhost-user", path),
            Target::VfioUser(path) => ("--vfio-user", path),
        };
        let mut command = Command::new(program());
        command
            .args(["bench", "machine", option])
            .arg(path)
            .args(["--rw", "randwrite", "--first", "8M", "--interrupts"])
            .args(["--bs", "64K", "--seconds", "600"])
            .stdout(Stdio::null())
            .stdin(Stdio::null());
        if frontend == Frontend::MappedPcie {
            command.args(["--doorbells", "mapped"]);
        }
        Ok(Self(command.spawn().context("cannot start the driver")?))
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
