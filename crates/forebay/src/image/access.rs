//! A way into a volume for one command.
//!
//! Purpose: whoever may use the API may read and write a volume for a moment, through the same door as
//! every host.
//! Design: a host name made up for this one time is put on the volume's export, or on an export made
//! for it; a guard takes it away again, however the command ends.
//! Not here: connecting.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use forebay_control::api::client::{Client, ClientError};
use forebay_control::api::error::ErrorKind;
use forebay_control::api::model::{Done, Export, ExportCreate, ExportUpdate};

use crate::cli::VolumeName;
use crate::command::export::path;
use crate::failure::{Failure, Outcome, While};

/// Access to a volume, for as long as it lives.
pub(super) struct Access<'a> {
    client: &'a Client,
    volume: &'a VolumeName,
    made_export: bool,
    open: bool,
    /// The name to connect with.
    pub(super) host_nqn: String,
    /// The volume's subsystem.
    pub(super) nqn: String,
    /// Where it is.
    pub(super) address: SocketAddr,
}

impl<'a> Access<'a> {
    /// The export of `volume`, if there is one.
    pub(super) fn existing(client: &Client, volume: &VolumeName) -> Outcome<Option<Export>> {
        match client.get::<Export>(&path(volume)) {
            Ok(export) => Ok(Some(export)),
            Err(ClientError::Refused(error)) if error.kind == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens `volume` for a name of its own.
    pub(super) fn open(
        client: &'a Client,
        volume: &'a VolumeName,
        exported: bool,
    ) -> Outcome<Self> {
        let uuid = std::fs::read_to_string("/proc/sys/kernel/random/uuid")
            .while_doing("make up a host name")?;
        let host_nqn = format!("nqn.2014-08.org.nvmexpress:uuid:{}", uuid.trim());
        let hosts = vec![host_nqn.clone()];
        let export: Export = if exported {
            let body = ExportUpdate {
                add_hosts: hosts,
                ..ExportUpdate::default()
            };
            client.patch(&path(volume), &body)?
        } else {
            let body = ExportCreate {
                tenant: volume.tenant.clone(),
                volume: volume.volume.clone(),
                hosts,
                any_host: false,
                ..ExportCreate::default()
            };
            client.post("/v1/exports", &body)?
        };
        let mut access = Self {
            client,
            volume,
            made_export: !exported,
            open: true,
            host_nqn,
            nqn: export.nqn.clone(),
            address: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
        };
        // From here on the guard cleans up.
        access.address = address(&export)?;
        Ok(access)
    }

    /// Ends the access, and says if that failed.
    pub(super) fn close(mut self) -> Outcome {
        self.end().map_err(|error| {
            Failure::new(format!(
                "can't take back the access to {}: {error}",
                self.volume
            ))
            .hint(if self.made_export {
                format!("end it with `forebay export delete {}`", self.volume)
            } else {
                format!("the name {} is still on its export", self.host_nqn)
            })
        })
    }

    fn end(&mut self) -> Result<(), ClientError> {
        if !std::mem::take(&mut self.open) {
            return Ok(());
        }
        let path = path(self.volume);
        if self.made_export {
            // Nobody else knows its name.
            self.client
                .delete::<Done>(&format!("{path}?disconnect_hosts=true"))?;
        } else {
            let body = ExportUpdate {
                remove_hosts: vec![self.host_nqn.clone()],
                disconnect_hosts: true,
                ..ExportUpdate::default()
            };
            self.client.patch::<_, Export>(&path, &body)?;
        }
        Ok(())
    }
}

impl Drop for Access<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!(
                "warning: can't take back the access to {}: {error}",
                self.volume
            );
        }
    }
}

/// Where this machine reaches an export.
fn address(export: &Export) -> Outcome<SocketAddr> {
    let addresses = export.addresses.iter().filter_map(|text| text.parse().ok());
    let mut address: SocketAddr = addresses
        .min_by_key(|address: &SocketAddr| !address.ip().is_loopback())
        .ok_or_else(|| {
            Failure::new(format!(
                "the export {} has no address to connect to",
                export.nqn
            ))
        })?;
    if address.ip().is_unspecified() {
        address.set_ip(match address.ip() {
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    Ok(address)
}
