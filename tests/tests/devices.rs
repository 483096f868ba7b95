//! Only volumes on a device that hangs, fails or is missing suffer.
//!
//! A volume on a hanging device can be deleted, and its data never appears elsewhere. The first two
//! devices hold the catalog. One volume is full before the third device is added; another is filled
//! afterwards, so it has data there.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_device::volatile::{fail_path, hang_path};
use forebay_initiator::IoOp;
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::host::{Habits, Host};
use forebay_tests::shadow::Promise;
use forebay_tests::wait;
use serde_json::Value;

const MINUTE: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
const SIZE: u64 = 16 * MIB;
const LARGE: u64 = 48 * MIB;
/// No first writes, so no extents on other devices.
const IN_PLACE: Habits = Habits {
    reads: 20,
    holes: 0,
    flushes: 5,
    fua: 10,
    longest_bytes: 128 << 10,
    depth: 16,
    per_second: None,
};

struct Lab {
    daemon: Daemon,
    devices: Vec<PathBuf>,
    /// On the first two devices.
    here: Host,
    /// On all three.
    there: Host,
}

impl Lab {
    fn new() -> Result<Self> {
        let daemon = Daemon::start(&DaemonOptions {
            config: "[engine]\nreactors = 2\n".into(),
            ..DaemonOptions::default()
        })?;
        let devices: Vec<PathBuf> = (0..3)
            .map(|i| daemon.folder().join(format!("device{i}")))
            .collect();
        let specs: Vec<String> = devices
            .iter()
            .map(|device| format!("volatile:{}?size=256M", device.display()))
            .collect();
        daemon.create_pool(&["--device", &specs[0], "--device", &specs[1]])?;
        daemon.cli(&["tenant", "create", "t"])?;
        let mut here = create(&daemon, "t/here", SIZE, 1)?;
        here.fill()?;
        here.habits = IN_PLACE;
        // The third device is added under load.
        let over = AtomicBool::new(false);
        let commands = AtomicU64::new(0);
        std::thread::scope(|scope| -> Result<()> {
            let load = scope.spawn(|| {
                here.load(|so_far| {
                    commands.store(so_far, SeqCst);
                    !over.load(SeqCst)
                })
            });
            let result = (|| {
                more(&commands, 50)?;
                daemon.cli(&["device", "add", &specs[2]])?;
                more(&commands, 50)
            })();
            over.store(true, SeqCst);
            let load = load.join().expect("the load does not panic")?;
            result?;
            ensure!(!load.lost && load.interrupted == 0, "{load:?}");
            Ok(())
        })?;
        let mut there = create(&daemon, "t/there", LARGE, 2)?;
        there.fill()?;
        there.habits = IN_PLACE;
        let on_it = volumes_on(&daemon, 2)?;
        ensure!(
            on_it.contains("t/there") && !on_it.contains("t/here"),
            "the third device has {on_it}"
        );
        Ok(Self {
            daemon,
            devices,
            here,
            there,
        })
    }

    fn others_go_on(&mut self) -> Result<()> {
        let load = self.here.load(|commands| commands < 400)?;
        ensure!(
            !load.lost && load.interrupted == 0 && load.no_space == 0 && load.flushes > 0,
            "{load:?}"
        );
        self.here.check()
    }

    fn quarantined_bytes(&self) -> Result<u64> {
        let pool = self.daemon.cli(&["pool", "show"])?;
        pool["quarantined_bytes"]
            .as_u64()
            .context("quarantined_bytes")
    }
}

fn create(daemon: &Daemon, name: &str, size_bytes: u64, number: u64) -> Result<Host> {
    let size = size_bytes.to_string();
    daemon.cli(&["volume", "create", name, "--size", &size])?;
    daemon.cli(&["export", "create", name, "--any-host"])?;
    let address = format!("127.0.0.1:{}", daemon.port()).parse()?;
    Ok(Host::new(address, name, size_bytes, 4096, number))
}

/// Reads a block of each extent; returns the number of failures.
fn partly_fails(host: &mut Host) -> Result<u64> {
    let (_session, mut queue) = host.connect()?;
    let (mut failed, mut read) = (0, 0);
    for lba in (0..host.shadow.blocks()).step_by(16) {
        let op = IoOp::Read { lba, blocks: 1 };
        match queue.execute(&op, vec![0; 4096], MINUTE) {
            Ok(got) => {
                host.shadow.judge(lba, &got)?;
                read += 1;
            }
            Err(forebay_initiator::Error::Status { .. }) => failed += 1,
            Err(error) => return Err(error.into()),
        }
    }
    ensure!(
        failed > 0 && read > 0,
        "{failed} reads failed, {read} went well"
    );
    Ok(failed)
}

fn more(commands: &AtomicU64, count: u64) -> Result<()> {
    let goal = commands.load(SeqCst) + count;
    wait::until("more commands", MINUTE, || {
        Ok((commands.load(SeqCst) >= goal).then_some(()))
    })
}

fn volumes_on(daemon: &Daemon, device: u8) -> Result<String> {
    let shown = daemon.cli(&["device", "show", &device.to_string()])?;
    Ok(shown["volumes"].to_string())
}

fn warnings(daemon: &Daemon) -> Result<String> {
    Ok(daemon.status()?["warnings"].to_string())
}

/// A block of each extent.
fn some_blocks(host: &mut Host) -> Result<Vec<(u64, Vec<u8>)>> {
    let (_session, mut queue) = host.connect()?;
    let lbas = (0..host.shadow.blocks()).step_by(16);
    let blocks = lbas.map(|lba| {
        let read = IoOp::Read { lba, blocks: 1 };
        Ok((lba, queue.execute(&read, vec![0; 4096], MINUTE)?))
    });
    blocks.collect()
}

/// Writes the present content, so that lost writes do not matter.
fn rewrite(host: &mut Host, blocks: &[(u64, Vec<u8>)]) -> Result<()> {
    let (_session, mut queue) = host.connect()?;
    for (lba, data) in blocks {
        let write = IoOp::Write {
            lba: *lba,
            blocks: 1,
            fua: false,
        };
        match queue.execute(&write, data.clone(), MINUTE) {
            Ok(_) | Err(forebay_initiator::Error::Status { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn state(daemon: &Daemon, device: usize) -> Result<Value> {
    let list = daemon.cli(&["device", "list"])?;
    Ok(list[device]["state"].clone())
}

#[test]
fn hung_device_leaves_others_alone() -> Result<()> {
    let mut lab = Lab::new()?;
    let mut gone = create(&lab.daemon, "t/gone", SIZE, 3)?;
    gone.fill()?;
    ensure!(volumes_on(&lab.daemon, 2)?.contains("t/gone"));
    let hang = hang_path(&lab.devices[2]);
    std::fs::write(&hang, "")?;

    // These writes hang, so their extents can't be drained.
    let (session, mut queue) = gone.connect()?;
    for lba in (0..gone.shadow.blocks()).step_by(16 * 8) {
        let op = IoOp::Write {
            lba,
            blocks: 1,
            fua: false,
        };
        if queue.submit(&op, lba, vec![0xee; 4096]).is_err() {
            break;
        }
    }
    let mut done = Vec::new();
    let submitted = queue.in_flight();
    queue.poll(
        &mut done,
        forebay_initiator::Wait::Block,
        Duration::from_millis(300),
    )?;
    let stuck = AtomicBool::new(true);
    let address = lab.there.address;
    let spare = Host::new(address, "t/none", 4096, 4096, 0);
    let mut there = std::mem::replace(&mut lab.there, spare);
    let result = std::thread::scope(|scope| -> Result<()> {
        let load = scope.spawn(|| {
            let load = there.load(|commands| commands < 200);
            stuck.store(false, SeqCst);
            load
        });
        let result = (|| -> Result<()> {
            lab.others_go_on().context("while it hangs")?;
            lab.daemon
                .cli(&["export", "delete", "t/gone", "--disconnect-hosts"])
                .context("unexporting while it hangs")?;
            lab.daemon
                .cli(&["volume", "delete", "t/gone"])
                .context("deleting while it hangs")?;
            lab.others_go_on()
                .context("after a deletion while it hangs")?;
            ensure!(
                lab.quarantined_bytes()? > 0,
                "nothing is quarantined, with {submitted} writes in flight"
            );
            ensure!(stuck.load(SeqCst), "the device did not hang");
            Ok(())
        })();
        std::fs::remove_file(&hang)?;
        let load = load.join().expect("the load does not panic")?;
        result?;
        ensure!(!load.lost && load.no_space == 0, "{load:?}");
        Ok(())
    });
    lab.there = there;
    result?;
    drop((queue, session));
    wait::until("nothing is quarantined any more", MINUTE, || {
        Ok((lab.quarantined_bytes()? == 0).then_some(()))
    })?;
    // The delayed writes have landed; no volume shows them.
    let mut heir = create(&lab.daemon, "t/heir", LARGE, 4)?;
    heir.check()?;
    heir.fill()?;
    heir.check()?;
    lab.there.check()?;
    lab.daemon.pool_check()?;
    lab.daemon.kill_all()?;
    lab.daemon.start_again()?;
    for host in [&mut lab.here, &mut lab.there, &mut heir] {
        host.verify(Promise::Acknowledged)?;
    }
    lab.daemon.stop()
}

/// The device has a catalog copy and the label that names the valid one.
#[test]
fn a_hung_device_with_a_catalog_copy_delays_no_other_device() -> Result<()> {
    let mut daemon = Daemon::start(&DaemonOptions::default())?;
    let devices = ["device0", "device1"].map(|name| daemon.folder().join(name));
    let specs = devices
        .each_ref()
        .map(|device| format!("volatile:{}?size=256M", device.display()));
    daemon.create_pool(&[
        "--device",
        &specs[0],
        "--device",
        &specs[1],
        "--placement",
        "fill",
    ])?;
    daemon.cli(&["tenant", "create", "t"])?;
    let mut here = create(&daemon, "t/here", SIZE, 1)?;
    here.fill()?;
    ensure!(!volumes_on(&daemon, 1)?.contains("t/here"));
    create(&daemon, "t/gone", SIZE, 2)?.fill()?;
    let copies = |daemon: &Daemon| -> Result<Vec<bool>> {
        let pool = daemon.cli(&["pool", "show"])?;
        let copies = pool["catalog"]["copies"].as_array().context("copies")?;
        Ok(copies.iter().map(|copy| copy["is_good"] == true).collect())
    };
    ensure!(copies(&daemon)? == [true, true]);

    let hang = hang_path(&devices[1]);
    std::fs::write(&hang, "")?;
    // Commits continue: first writes, flushes, creating and deleting volumes.
    let load = here.load(|commands| commands < 400)?;
    ensure!(
        !load.lost && load.interrupted == 0 && load.no_space == 0 && load.flushes > 0,
        "{load:?}"
    );
    here.check()?;
    daemon.cli(&["export", "delete", "t/gone", "--disconnect-hosts"])?;
    daemon.cli(&["volume", "delete", "t/gone"])?;
    let mut new = create(&daemon, "t/new", SIZE, 3)?;
    new.fill()?;
    new.verify(Promise::Acknowledged)?;
    wait::until("status says which copy failed", MINUTE, || {
        let said = warnings(&daemon)?;
        let named = said.contains("one good copy") && said.contains("device1");
        Ok((named && said.contains("did not answer")).then_some(()))
    })?;
    ensure!(copies(&daemon)? == [true, false]);
    ensure!(hang.exists(), "it hangs still");
    std::fs::remove_file(&hang)?;
    wait::until("both copies are good again", MINUTE, || {
        let said = warnings(&daemon)?;
        Ok((copies(&daemon)? == [true, true] && !said.contains("one good copy")).then_some(()))
    })?;
    let load = here.load(|commands| commands < 100)?;
    ensure!(!load.lost && load.interrupted == 0, "{load:?}");
    daemon.pool_check()?;
    daemon.kill_all()?;
    // The rebuilt copy is valid.
    let away = daemon.folder().join("away");
    std::fs::create_dir(&away)?;
    std::fs::rename(&devices[0], away.join("device0"))?;
    daemon.start_again()?;
    let volumes = daemon.cli(&["volume", "list"])?.to_string();
    ensure!(
        volumes.contains("here") && volumes.contains("new") && !volumes.contains("gone"),
        "{volumes}"
    );
    daemon.kill_all()?;
    std::fs::rename(away.join("device0"), &devices[0])?;
    daemon.start_again()?;
    for host in [&mut here, &mut new] {
        host.verify(Promise::Acknowledged)?;
    }
    daemon.pool_check()?;
    daemon.stop()
}

#[test]
fn a_failing_or_missing_device_affects_only_its_extents() -> Result<()> {
    let mut lab = Lab::new()?;
    let blocks = some_blocks(&mut lab.there)?;
    let fail = fail_path(&lab.devices[2]);
    std::fs::write(&fail, "")?;
    partly_fails(&mut lab.there)?;
    lab.others_go_on().context("while it fails")?;
    // It is reported, and gets no new extents.
    let name = lab.devices[2].display().to_string();
    rewrite(&mut lab.there, &blocks)?;
    wait::until("the failing device is named", MINUTE, || {
        let named = warnings(&lab.daemon)?.contains(&name);
        Ok((named && state(&lab.daemon, 2)? == "failing").then_some(()))
    })?;
    let list = lab.daemon.cli(&["device", "list"])?;
    ensure!(
        list[2]["errors"]["reads"].as_u64() > Some(0)
            && list[2]["errors"]["writes"].as_u64() > Some(0)
            && list[0]["errors"]["reads"] == 0,
        "{list}"
    );
    ensure!(warnings(&lab.daemon)?.contains("t/there"));
    let mut new = create(&lab.daemon, "t/new", SIZE, 5)?;
    new.fill().context("a new volume while a device fails")?;
    ensure!(!volumes_on(&lab.daemon, 2)?.contains("t/new"));
    std::fs::remove_file(&fail)?;
    wait::until("the device is well again", 3 * MINUTE, || {
        let named = warnings(&lab.daemon)?.contains(&name);
        Ok((!named && state(&lab.daemon, 2)? == "online").then_some(()))
    })?;
    new.check()?;
    lab.daemon.stop()?;

    let device = lab.devices[2].clone();
    // The device is missing, in a folder that is not searched.
    std::fs::create_dir(lab.daemon.folder().join("away"))?;
    let away = lab.daemon.folder().join("away/device2");
    std::fs::rename(&device, &away)?;
    lab.daemon.start_again()?;
    ensure!(
        state(&lab.daemon, 2)? == "missing",
        "{}",
        state(&lab.daemon, 2)?
    );
    lab.others_go_on().context("while it is missing")?;
    lab.here.verify(Promise::Acknowledged)?;
    partly_fails(&mut lab.there)?;
    let warnings = lab.daemon.status()?["warnings"].to_string();
    ensure!(warnings.contains("missing"), "{warnings}");
    let reported = |kind: &str, what: &str| -> Result<usize> {
        let events = forebay_tests::lab::events(&lab.daemon)?;
        let of_kind = events.get(kind).into_iter().flatten();
        let texts = of_kind.map(|event| event["message"].to_string());
        let texts = texts.filter(|text| text.contains(&name) && text.contains(what));
        Ok(texts.count())
    };
    ensure!(reported("device_failed", "is missing")? == 1);
    let returned = reported("device_returned", "is online")?;

    std::fs::rename(&away, &device)?;
    lab.daemon.cli(&["pool", "open"])?;
    wait::until("the device is back", MINUTE, || {
        Ok((state(&lab.daemon, 2)? == "online").then_some(()))
    })?;
    ensure!(reported("device_failed", "is missing")? == 1);
    ensure!(reported("device_returned", "is online")? == returned + 1);
    lab.there.verify(Promise::Acknowledged)?;
    lab.others_go_on().context("when it is back")?;
    lab.daemon.pool_check()?;
    lab.daemon.stop()
}

#[test]
fn a_device_file_cut_short_in_use_is_named_and_stays_named() -> Result<()> {
    let mut daemon = Daemon::start(&DaemonOptions::default())?;
    let paths = ["d0.img", "d1.img"].map(|name| daemon.folder().join(name));
    for path in &paths {
        std::fs::File::create(path)?.set_len(256 * MIB)?;
    }
    let specs = paths
        .each_ref()
        .map(|path| format!("file:{}", path.display()));
    daemon.create_pool(&["--device", &specs[0], "--device", &specs[1]])?;
    daemon.cli(&["tenant", "create", "t"])?;
    let mut host = create(&daemon, "t/v", SIZE, 1)?;
    host.fill()?;
    let list = daemon.cli(&["device", "list"])?;
    let data_at = list[1]["data_offset_bytes"].as_u64().context("offset")?;

    let file = std::fs::File::options().write(true).open(&paths[1])?;
    file.set_len(data_at + 6 * MIB)?;
    wait::until("the cut is noticed", MINUTE, || {
        let said = warnings(&daemon)?;
        let named = said.contains("cut short") && said.contains("d1.img") && said.contains("t/v");
        Ok((named && state(&daemon, 1)? == "failed").then_some(()))
    })?;
    // The rest is not accessible either, so no write extends the file.
    wait::until("rights on it are taken back", MINUTE, || {
        Ok((partly_fails(&mut host)? > SIZE / (64 << 10) * 2 / 5).then_some(()))
    })?;
    file.set_len(256 * MIB)?;
    partly_fails(&mut host)?;
    ensure!(warnings(&daemon)?.contains("cut short"));
    ensure!(state(&daemon, 1)? == "failed");
    // `pool open` reports that the device stays failed.
    for more in [&["--device", &specs[1]][..], &[]] {
        let opened = daemon.cli(&[&["pool", "open"], more].concat());
        let error = opened.err().context("it says that all is well")?;
        ensure!(format!("{error:#}").contains("--force"), "{error:#}");
    }

    daemon.stop()?;
    daemon.start_again()?;
    partly_fails(&mut host)?;
    ensure!(state(&daemon, 1)? == "missing");
    ensure!(warnings(&daemon)?.contains("cut short"));
    ensure!(daemon.cli(&["pool", "open"]).is_err());
    ensure!(
        daemon
            .cli(&["pool", "open", "--device", &specs[1]])
            .is_err()
    );
    ensure!(state(&daemon, 1)? == "missing");
    daemon.cli(&["pool", "open", "--device", &specs[1], "--force"])?;
    wait::until("the device is taken as it is", MINUTE, || {
        Ok((state(&daemon, 1)? == "online").then_some(()))
    })?;
    ensure!(!warnings(&daemon)?.contains("cut short"));
    daemon.stop()?;
    daemon.start_again()?;
    ensure!(!warnings(&daemon)?.contains("cut short"));

    let renamed = daemon.folder().join("renamed.img");
    std::fs::rename(&paths[1], &renamed)?;
    daemon.wait_warnings(|said| said.contains("d1.img is no longer there"))?;
    std::fs::rename(&renamed, &paths[1])?;
    daemon.wait_warnings(|said| !said.contains("d1.img"))?;
    std::fs::remove_file(&paths[1])?;
    wait::until("the removal is noticed", MINUTE, || {
        let said = warnings(&daemon)?;
        Ok((said.contains("d1.img") && said.contains("removed")).then_some(()))
    })?;
    daemon.stop()
}
