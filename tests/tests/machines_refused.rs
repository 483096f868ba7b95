//! Events about refused VMs: a second VM on a socket, and memory that is not shared.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Result, ensure};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::lab;
use forebay_tests::vm::{self, Frontend};
use forebay_tests::wait;

const MINUTE: Duration = Duration::from_secs(60);

fn reported(daemon: &Daemon, kind: &str, part: &str) -> Result<()> {
    wait::until(part, MINUTE, || {
        let events = lab::events(daemon)?;
        let of_kind = events.get(kind).into_iter().flatten();
        let mut found = of_kind.filter(|event| {
            let message = event["message"].as_str().unwrap_or_default();
            message.contains(part) && event["export"] == "t/v"
        });
        Ok(found.next().map(drop))
    })
}

fn is_closed(mut socket: UnixStream) -> Result<()> {
    socket.set_read_timeout(Some(MINUTE))?;
    let mut byte = [0];
    ensure!(
        matches!(socket.read(&mut byte), Ok(0) | Err(_)),
        "it is answered"
    );
    Ok(())
}

#[test]
fn a_second_vm_is_reported_as_an_event() -> Result<()> {
    for frontend in [Frontend::VhostUser, Frontend::NvmePcie] {
        let mut daemon = vm::serve(&DaemonOptions::default(), "1G")?;
        let target = vm::export(&daemon, "v", "64M", frontend)?;
        let path = vm::socket(&target);
        let first = UnixStream::connect(path)?;
        reported(&daemon, "host_connected", "a VM connected")?;
        is_closed(UnixStream::connect(path)?)?;
        reported(&daemon, "host_refused", "a second VM")?;
        drop(first);
        reported(&daemon, "host_disconnected", "it hung up")?;
        daemon.stop()?;
    }
    Ok(())
}

#[test]
fn unshared_memory_is_named() -> Result<()> {
    let mut daemon = vm::serve(&DaemonOptions::default(), "1G")?;
    let target = vm::export(&daemon, "v", "64M", Frontend::VhostUser)?;
    let mut socket = UnixStream::connect(vm::socket(&target))?;
    // SET_MEM_TABLE, version 1: one region without a descriptor.
    let words: [u32; 3] = [5, 1, 40];
    let table: [u64; 5] = [1, 0, 1 << 20, 0x7F00_0000_0000, 0];
    let mut message: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    message.extend(table.iter().flat_map(|word| word.to_le_bytes()));
    socket.write_all(&message)?;
    is_closed(socket)?;
    reported(&daemon, "host_disconnected", "share=on")?;
    daemon.stop()
}
