//! A way into a volume for one command.
//!
//! Purpose: whoever may use the API may read and write a volume for a moment, through the same door as
//! every host.
//! Design: the transfer's host name is put on the volume's export, or on an export made for it; a guard takes it away
//! again, however the command ends.
//! Not here: connecting.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use forebay_control::api::client::{Client, ClientError};
use forebay_control::api::model::{Done, Export, ExportCreate, ExportFrontend, ExportUpdate};

use crate::cli::VolumeName;
use crate::command::export::path;
use crate::failure::{Failure, Outcome};

/// Access to a volume, for as long as it lives.
pub(super) struct Access<'a> {
    client: &'a Client,
    volume: &'a VolumeName,
    id: u64,
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
    /// The export of `volume` over NVMe/TCP, if there is one. Fails if it has only others, beside which there may be none.
    pub(super) fn existing(client: &Client, volume: &VolumeName) -> Outcome<Option<Export>> {
        let mut exports: Vec<Export> = client.get("/v1/exports")?;
        exports.retain(|export| export.tenant == volume.tenant && export.volume == volume.volume);
        let is_tcp = |export: &Export| export.frontend == ExportFrontend::NvmeTcp;
        if exports.is_empty() || exports.iter().any(is_tcp) {
            return Ok(exports.into_iter().find(is_tcp));
        }
        Err(Failure::new(format!(
            "the volume {volume} is exported to a virtual machine; images are moved over NVMe/TCP"
        ))
        .hint(format!(
            "delete the export, and make it again afterwards: `forebay export delete {volume}`"
        )))
    }

    /// Opens `volume` for `host_nqn`, through the export there is or one made for it.
    pub(super) fn open(
        client: &'a Client,
        volume: &'a VolumeName,
        existing: Option<&Export>,
        host_nqn: &str,
    ) -> Outcome<Self> {
        let hosts = vec![host_nqn.to_owned()];
        let export: Export = if let Some(existing) = existing {
            let body = ExportUpdate {
                add_hosts: hosts,
                ..ExportUpdate::default()
            };
            client.patch(&format!("{}@{}", path(volume), existing.id), &body)?
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
            id: export.id,
            made_export: existing.is_none(),
            open: true,
            host_nqn: host_nqn.to_owned(),
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
        let path = format!("{}@{}", path(self.volume), self.id);
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
