//! A daemon with an out-of-band endpoint, and its client.

use std::path::PathBuf;

use anyhow::{Context, Result};
use forebay_initiator::mi::MiClient;
use forebay_nvme::Sqe;
use forebay_nvme::opcode::admin;

use crate::daemon::{Daemon, DaemonOptions};

/// The endpoint's socket, beside the configuration.
const SOCKET: &str = "mctp.sock";
/// All rights.
pub const ALL_RIGHTS: &str =
    "\"namespaces\", \"budgets\", \"devices\", \"format\", \"configuration\", \"firmware\"";

/// `[out_of_band]` at a socket, with rights and more lines, for a daemon's configuration.
#[must_use]
pub fn table(allow: &str, more: &str) -> String {
    format!("[out_of_band]\nserial = \"unix:{SOCKET}\"\nallow = [{allow}]\n{more}")
}

/// A daemon with a pool of 256 MiB and an endpoint.
pub fn daemon(allow: &str, more: &str) -> Result<Daemon> {
    let daemon = Daemon::start(&DaemonOptions {
        config: table(allow, more),
        ..DaemonOptions::default()
    })?;
    let device = format!("file:{}", daemon.folder().join("pool.img").display());
    daemon.create_pool(&["--device", &device, "--size", "256M"])?;
    Ok(daemon)
}

/// The path of the endpoint's socket.
#[must_use]
pub fn socket(daemon: &Daemon) -> PathBuf {
    daemon.folder().join(SOCKET)
}

/// A client of the endpoint.
pub fn client(daemon: &Daemon) -> Result<MiClient> {
    MiClient::open(&socket(daemon)).context("the endpoint's socket")
}

/// An Admin command with dwords 10 and 11.
#[must_use]
pub fn command(opcode: u8, nsid: u32, cdw10: u32, cdw11: u32) -> Sqe {
    let mut sqe = Sqe::new(opcode, 0);
    sqe.nsid = nsid.into();
    sqe.cdw10_15[0] = cdw10.into();
    sqe.cdw10_15[1] = cdw11.into();
    sqe
}

/// Creates a namespace; returns its NSID.
pub fn create(client: &mut MiClient, blocks: u64) -> Result<u32> {
    let mut data = vec![0; 4096];
    data[..8].copy_from_slice(&blocks.to_le_bytes());
    data[8..16].copy_from_slice(&blocks.to_le_bytes());
    let nsid = client.admin_write(0, command(admin::NAMESPACE_MANAGEMENT, 0, 0, 0), &data)?;
    Ok(u32::try_from(nsid)?)
}

/// Attaches a namespace to a controller, or detaches it.
pub fn attach(client: &mut MiClient, nsid: u32, controller: u16, attach: bool) -> Result<()> {
    attachment(client, nsid, &[controller], attach)
}

/// Attaches a namespace to several controllers with one command.
pub fn attach_all(client: &mut MiClient, nsid: u32, controllers: &[u16]) -> Result<()> {
    attachment(client, nsid, controllers, true)
}

fn attachment(client: &mut MiClient, nsid: u32, controllers: &[u16], attach: bool) -> Result<()> {
    let count = u16::try_from(controllers.len())?;
    let list = std::iter::once(&count).chain(controllers);
    let mut data: Vec<u8> = list.flat_map(|entry| entry.to_le_bytes()).collect();
    data.resize(4096, 0);
    let select = u32::from(!attach);
    client.admin_write(
        0,
        command(admin::NAMESPACE_ATTACHMENT, nsid, select, 0),
        &data,
    )?;
    Ok(())
}

/// Deletes a namespace.
pub fn delete(client: &mut MiClient, nsid: u32) -> Result<()> {
    client.admin_write(0, command(admin::NAMESPACE_MANAGEMENT, nsid, 1, 0), &[])?;
    Ok(())
}

/// A list of NSIDs from Identify.
pub fn namespaces(client: &mut MiClient, controller: u16, cns: u8) -> Result<Vec<u32>> {
    let (_, list) =
        client.admin_read(controller, command(admin::IDENTIFY, 0, cns.into(), 0), 4096)?;
    let (entries, _) = list.as_chunks();
    let all = entries.iter().map(|entry| u32::from_le_bytes(*entry));
    Ok(all.take_while(|nsid| *nsid != 0).collect())
}
