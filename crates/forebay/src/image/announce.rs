//! Announces an image transfer to the daemon, which admits its host and refuses other changes of
//! the volume.
//!
//! A thread renews the announcement, across daemon restarts. A refused renewal ends the transfer:
//! another host uses the volume.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use forebay_control::api::client::{Client, ClientError};
use forebay_control::model::error::ErrorKind;
use forebay_control::model::{Done, TRANSFER_HOST_PREFIX, Transfer, TransferKind, TransferPut};

use crate::api_paths;
use crate::cli::names::VolumeName;
use crate::failure::{Failure, Outcome, While};

/// A third of the daemon's limit.
const RENEW_EVERY: Duration = Duration::from_secs(10);

/// The daemon knows of the transfer as long as this lives.
pub(super) struct Announced {
    client: Client,
    path: String,
    body: TransferPut,
    pub(super) host_nqn: String,
    /// How to reach the volume, and its initial state.
    pub(super) access: Transfer,
    stop: Option<Sender<()>>,
    renewer: Option<JoinHandle<()>>,
    lost: Arc<Mutex<Option<Failure>>>,
    is_open: bool,
}

impl Announced {
    pub(super) fn new(
        client: &Client,
        name: &VolumeName,
        kind: TransferKind,
        overwrite: bool,
    ) -> Outcome<Self> {
        let uuid = std::fs::read_to_string("/proc/sys/kernel/random/uuid")
            .while_doing("generate a host NQN")?;
        let host_nqn = format!("{TRANSFER_HOST_PREFIX}{}", uuid.trim());
        let path = format!("{}/transfer", api_paths::volume(name));
        let mut body = TransferPut {
            host: host_nqn.clone(),
            kind,
            overwrite,
            renew: false,
        };
        let access = client.put(&path, &body)?;
        body.renew = true;
        let (stop, stopped) = channel();
        let mut announced = Self {
            client: client.clone(),
            path,
            body: body.clone(),
            host_nqn,
            access,
            stop: Some(stop),
            renewer: None,
            lost: Arc::default(),
            is_open: true,
        };
        let (client, path) = (announced.client.clone(), announced.path.clone());
        let lost = announced.lost.clone();
        let renewer = std::thread::Builder::new()
            .name("renew".to_owned())
            .spawn(move || {
                let failure = renew_until(&client, &path, &body, &stopped);
                *lost.lock().unwrap_or_else(PoisonError::into_inner) = failure;
            })
            .while_doing("start a thread")?;
        announced.renewer = Some(renewer);
        Ok(announced)
    }

    pub(super) fn address(&self) -> Outcome<SocketAddr> {
        let addresses = self.access.addresses.iter();
        let mut address: SocketAddr = addresses
            .filter_map(|text| text.parse().ok())
            .min_by_key(|address: &SocketAddr| !address.ip().is_loopback())
            .ok_or_else(|| {
                Failure::new("the daemon has no NVMe/TCP listener, which image transfers need")
                    .hint(
                        "set `nvme_tcp` under [listen] in its configuration; `forebay status` shows the listeners",
                    )
            })?;
        if address.ip().is_unspecified() {
            address.set_ip(match address.ip() {
                IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
            });
        }
        Ok(address)
    }

    /// Ends the transfer; the daemon withdraws access.
    pub(super) fn close(mut self) -> Outcome {
        self.end_renewing();
        self.is_open = false;
        self.end().while_doing("end the transfer")
    }

    fn end(&self) -> Result<(), ClientError> {
        let path = format!("{}?host={}", self.path, self.host_nqn);
        self.client.delete::<Done>(&path).map(drop)
    }

    fn end_renewing(&mut self) {
        drop(self.stop.take());
        if let Some(renewer) = self.renewer.take() {
            let _ = renewer.join();
        }
    }

    pub(super) fn check_now(&self) -> Outcome {
        renew(&self.client, &self.path, &self.body).map_or(Ok(()), Err)
    }

    /// Fails if another host was seen to use the volume.
    pub(super) fn check(&self) -> Outcome {
        let mut lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        lost.take().map_or(Ok(()), Err)
    }
}

fn renew_until(
    client: &Client,
    path: &str,
    body: &TransferPut,
    stopped: &Receiver<()>,
) -> Option<Failure> {
    loop {
        match stopped.recv_timeout(RENEW_EVERY) {
            Err(RecvTimeoutError::Timeout) => {}
            _ => return None,
        }
        if let Some(failure) = renew(client, path, body) {
            return Some(failure);
        }
    }
}

/// The reason to end the transfer, if the daemon gives one. A daemon that does not answer may come
/// back.
fn renew(client: &Client, path: &str, body: &TransferPut) -> Option<Failure> {
    match client.put::<_, Transfer>(path, body) {
        Err(ClientError::Refused(error))
            if matches!(error.kind, ErrorKind::InUse | ErrorKind::NotFound) =>
        {
            let message = format!("the image was not transferred completely: {error}");
            Some(Failure::new(message).hint("disconnect the volume's hosts, and start again"))
        }
        _ => None,
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        self.end_renewing();
        if self.is_open {
            // On failure, the announcement expires.
            let _ = self.end();
        }
    }
}
