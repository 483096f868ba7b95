//! A daemon that is killed while it waits for a device keeps its claim until that ends.
//!
//! Purpose: the next daemon must know that claim from a living daemon's: then it goes on without the device.
//! Design: the device is a file whose reads the test holds (a held write would hold up opening it too, as the kernel
//! locks the file). Both daemons are this test in processes of their own, told by a variable what to do: the test itself
//! must not touch the file.
//! Not here: what a daemon makes of it (`control`'s devices).

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_device::sync_io::SyncDevice;
use forebay_device::{DeviceSpec, OpenOptions};
use forebay_tests::hold::Hold;

const TOLD: &str = "FOREBAY_TEST_CLAIM";
const PATH: &str = "FOREBAY_TEST_CLAIM_PATH";
const HELD_AT: u64 = 1 << 20;

fn another(told: &str, hold: &Hold) -> Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args([
            "--exact",
            "a_killed_daemons_claim_is_no_living_ones",
            "--nocapture",
        ])
        .env(TOLD, told)
        .env(PATH, hold.path())
        .stdout(Stdio::piped());
    Ok(command.spawn()?)
}

/// What another process says of the claim.
fn asked(hold: &Hold) -> Result<String> {
    let output = another("ask", hold)?.wait_with_output()?;
    let text = String::from_utf8(output.stdout)?;
    let said = text.lines().find_map(|line| line.split_once("claim: "));
    let (_, said) = said.with_context(|| format!("it said nothing: {text}"))?;
    Ok(said.to_owned())
}

/// What a process of its own does.
fn act(told: &str) -> Result<()> {
    let spec: DeviceSpec = std::env::var(PATH)?.parse()?;
    let device = SyncDevice::open(&spec, &OpenOptions::default())?;
    if told == "claim and read" {
        device.claim_for_daemon()?;
        device.read_at(HELD_AT, &mut [0; 4096])?;
        return Ok(());
    }
    let said = match device.claim_for_daemon() {
        Ok(()) => "free",
        Err(_) if device.is_claimant_dying() => "of one that is being killed",
        Err(_) => "of one that lives",
    };
    println!("claim: {said}");
    Ok(())
}

#[test]
fn a_killed_daemons_claim_is_no_living_ones() -> Result<()> {
    if let Ok(told) = std::env::var(TOLD) {
        return act(&told);
    }
    let folder = tempfile::tempdir()?;
    let hold = Hold::new(folder.path(), 8 << 20)?;
    ensure!(asked(&hold)? == "free");
    hold.hold_reads(HELD_AT..HELD_AT + 4096);
    let mut first = another("claim and read", &hold)?;
    hold.wait_held(1)?;
    ensure!(asked(&hold)? == "of one that lives");
    first.kill()?;
    // It takes a moment to get there.
    let begin = std::time::Instant::now();
    while asked(&hold)? != "of one that is being killed" {
        ensure!(
            begin.elapsed() < Duration::from_secs(20),
            "{}",
            asked(&hold)?
        );
    }
    ensure!(first.try_wait()?.is_none(), "it can't end");
    hold.release();
    first.wait()?;
    ensure!(asked(&hold)? == "free");
    Ok(())
}
