//! Steps of tests of snapshots.

use std::net::SocketAddr;

use anyhow::{Context, Result, bail, ensure};
use forebay_initiator::verify::pattern::{self, SECTOR_BYTES};
use forebay_initiator::{IoOp, IoQueue};
use serde_json::Value;

use crate::daemon::Daemon;
use crate::host::Host;
use crate::lab::{BLOCK, MIB, MINUTE};
use crate::wait;

/// Bytes of each volume.
pub const SIZE: u64 = 8 * MIB;
/// Blocks of each volume.
pub const BLOCKS: usize = (SIZE / BLOCK as u64) as usize;
/// Blocks of an extent.
pub const EXTENT_BLOCKS: u64 = 16;

/// Runs a command that must fail with each of these texts in its error, which it returns.
pub fn refused(daemon: &Daemon, args: &[&str], says: &[&str]) -> Result<String> {
    let output = daemon.cli_command(args).output()?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success(), "{args:?} was not refused");
    for part in says {
        ensure!(text.contains(part), "{args:?}: '{part}' is not in: {text}");
    }
    Ok(text)
}

/// Takes one snapshot.
pub fn snapshot(daemon: &Daemon, name: &str) -> Result<()> {
    daemon.cli(&["volume", "snapshot", name]).map(|_| ())
}

/// Exports a volume, snapshot or clone to every host.
pub fn export(daemon: &Daemon, name: &str) -> Result<Value> {
    daemon.cli(&["export", "create", name, "--any-host"])
}

/// Deletes a volume or snapshot with its export.
pub fn delete(daemon: &Daemon, name: &str) -> Result<()> {
    daemon.cli(&["export", "delete", name, "--disconnect-hosts"])?;
    daemon.cli(&["volume", "delete", name]).map(|_| ())
}

/// Waits until nothing is used, and all space is clean.
pub fn wait_all_space_free(daemon: &Daemon) -> Result<()> {
    wait::until("free space", MINUTE, || {
        let pool = daemon.cli(&["pool", "show"])?;
        let is_free = pool["used_bytes"] == 0 && pool["clean_bytes"] == pool["capacity_bytes"];
        Ok(is_free.then_some(()))
    })
}

/// A host of an exported volume of [`SIZE`] bytes.
pub fn host(address: SocketAddr, name: &str) -> Host {
    Host::new(address, name, SIZE, BLOCK, 0)
}

/// Reads blocks.
pub fn read(queue: &mut IoQueue, lba: u64, blocks: u32) -> Result<Vec<u8>> {
    let buffer = vec![0; blocks as usize * BLOCK as usize];
    Ok(queue.execute(&IoOp::Read { lba, blocks }, buffer, MINUTE)?)
}

/// Writes whole blocks.
pub fn write(queue: &mut IoQueue, lba: u64, data: Vec<u8>) -> Result<()> {
    let blocks = data.len() as u32 / BLOCK;
    let op = IoOp::Write {
        lba,
        blocks,
        fua: false,
    };
    queue.execute(&op, data, MINUTE)?;
    Ok(())
}

/// Reads a volume of [`SIZE`] bytes.
pub fn read_all(queue: &mut IoQueue) -> Result<Vec<u8>> {
    let mut all = Vec::new();
    for lba in (0..BLOCKS as u64).step_by(32) {
        all.append(&mut read(queue, lba, 32)?);
    }
    Ok(all)
}

/// The content of an exported volume, snapshot or clone.
pub fn content(address: SocketAddr, name: &str) -> Result<Vec<u8>> {
    let (_session, mut queue) = host(address, name).connect_soon()?;
    read_all(&mut queue).with_context(|| format!("reading {name}"))
}

/// Compares the content of volumes, and describes the first difference.
pub fn ensure_same(what: &str, found: &[u8], wanted: &[u8]) -> Result<()> {
    let block = BLOCK as usize;
    let mut pairs = found.chunks(block).zip(wanted.chunks(block));
    if let Some(at) = pairs.position(|(found, wanted)| found != wanted) {
        let at = at * block..at * block + SECTOR_BYTES;
        let (found, wanted) = (
            pattern::read(&found[at.clone()]),
            pattern::read(&wanted[at.clone()]),
        );
        bail!("{what}, byte {}: {found} instead of {wanted}", at.start);
    }
    ensure!(found.len() == wanted.len(), "{what}: other length");
    Ok(())
}
