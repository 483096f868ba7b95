//! Binds the configured addresses, or takes their sockets from a dead or living engine.
//!
//! An address that can't be bound is a missing part (`parts`) and is retried. The start fails only
//! if another process has the address and nothing else would be served.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;

use forebay_xlate::boundary::message::Held;

use super::{Daemon, DaemonError};
use crate::owner::session::Greeting;

impl Daemon {
    pub(super) fn keep_listeners(&self, greeting: &Greeting) -> io::Result<()> {
        let mut listeners = self.spare_listeners.borrow_mut();
        for (held, descriptors) in &greeting.held {
            if let (Held::Listener(address), Some(descriptor)) = (held, descriptors.first())
                && !listeners.contains_key(address)
            {
                listeners.insert(address.clone(), descriptor.try_clone()?);
            }
        }
        Ok(())
    }

    /// Returns addresses that another process has.
    pub(super) fn bind_listeners(&self) -> Vec<SocketAddr> {
        let held = self.addresses();
        let mut in_use = Vec::new();
        let listen = self.listen.borrow().clone();
        for &address in &listen.nvme_tcp {
            // Port 0 means any port: a held socket of that address will do.
            let is_held = held.iter().any(|held| {
                held.parse::<SocketAddr>().is_ok_and(|held| {
                    held == address || address.port() == 0 && held.ip() == address.ip()
                })
            });
            let bound = match is_held {
                true => Ok(()),
                false => bind(address).map(|(bound, fd)| {
                    let mut listeners = self.spare_listeners.borrow_mut();
                    listeners.insert(bound.to_string(), fd);
                }),
            };
            if matches!(&bound, Err(error) if error.kind() == io::ErrorKind::AddrInUse) {
                in_use.push(address);
            }
            let trouble = bound.map_err(|error| {
                format!(
                    "hosts can't connect at {address}: can't listen there: {error}; {}; the daemon keeps retrying",
                    remedy(&error, "nvme_tcp", listen.in_the_way_of(address))
                )
            });
            self.note_part(&listener(address), trouble);
        }
        in_use
    }

    /// An address of another process is an error if nothing else would be served. `is_served`: an
    /// engine or a VM is, or that process will end.
    pub(super) fn bind_listeners_at_start(&self, is_served: bool) -> Result<(), DaemonError> {
        let in_use = self.bind_listeners();
        self.listens.set(true);
        match in_use.first() {
            Some(address) if !is_served && self.addresses().is_empty() => {
                let error = io::Error::from(rustix::io::Errno::ADDRINUSE);
                let own = self.listen.borrow().in_the_way_of(*address);
                Err(
                    DaemonError::new(format!("can't listen on {address}: {error}"))
                        .with_hint(remedy(&error, "nvme_tcp", own)),
                )
            }
            _ => Ok(()),
        }
    }

    pub(super) async fn listen_at_the_rest(&self) {
        if self.changing_pool.get() || !self.listens.get() {
            return;
        }
        self.bind_listeners();
        if let Some(serving) = self.serving() {
            let new = std::mem::take(&mut *self.spare_listeners.borrow_mut());
            serving.owner.ports.listen_also(new).await;
        }
    }

    pub(super) fn keep_metrics(&self) {
        let wanted = self.listen.borrow().metrics;
        let mut metrics = self.metrics.borrow_mut();
        if let Some((address, task)) = metrics.take() {
            if wanted == Some(address) {
                *metrics = Some((address, task));
                return;
            }
            task.abort();
        }
        let Some(address) = wanted else {
            return;
        };
        let bound = bind_metrics(address).map(|listener| {
            *metrics = Some((address, (self.serve_metrics)(listener)));
        });
        drop(metrics);
        let own = self.listen.borrow().in_the_way_of(address);
        let trouble = bound.map_err(|error| {
            format!(
                "metrics can't be read at {address}: can't listen there: {error}; {}; the daemon keeps retrying",
                remedy(&error, "metrics", own)
            )
        });
        self.note_part(&metrics_at(address), trouble);
    }
}

pub(super) fn listener(address: SocketAddr) -> String {
    format!("the listener {address}")
}

pub(super) fn metrics_at(address: SocketAddr) -> String {
    format!("the metrics address {address}")
}

/// `own`: the configured address that is in the way.
fn remedy(error: &io::Error, key: &str, own: Option<SocketAddr>) -> String {
    match (error.kind(), own) {
        (io::ErrorKind::AddrInUse, Some(own)) => format!(
            "{own}, another address under [listen] in forebay.toml, conflicts with it: change `{key}` or that address"
        ),
        (io::ErrorKind::AddrInUse, None) => format!(
            "another program listens there, or an engine that run_dir no longer records (`ss -ltnp` shows it): stop \
            it, or change `{key}` under [listen] in forebay.toml"
        ),
        _ => format!("see `{key}` under [listen] in forebay.toml"),
    }
}

fn bind(address: SocketAddr) -> io::Result<(SocketAddr, OwnedFd)> {
    // Sets SO_REUSEADDR: a restart must not wait for connections in TIME_WAIT.
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    // Many hosts reconnect at once after an engine's death.
    rustix::net::listen(&listener, 1024)?;
    Ok((listener.local_addr()?, listener.into()))
}

fn bind_metrics(address: SocketAddr) -> io::Result<tokio::net::TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    tokio::net::TcpListener::from_std(listener)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{DaemonConfig, Listen};
    use crate::ownership::Installation;

    #[test]
    fn an_address_in_use_is_reported_and_retried_until_free() {
        let other = TcpListener::bind("127.77.0.1:0").unwrap();
        let address = other.local_addr().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let me = Installation::claim(folder.path()).unwrap();
        let config = DaemonConfig {
            listen: Listen {
                nvme_tcp: vec![address],
                metrics: None,
            },
            ..DaemonConfig::empty()
        };
        let no_metrics = Box::new(|_| tokio::task::spawn_local(async {}));
        let daemon = Daemon::new(config, std::sync::Arc::new(me), Box::new(()), no_metrics);
        let error = daemon.bind_listeners_at_start(false).unwrap_err();
        assert!(error.to_string().contains(&address.to_string()), "{error}");
        for _ in 0..2 {
            daemon.bind_listeners_at_start(true).unwrap();
            let reported = daemon.part_warnings();
            assert!(
                reported.len() == 1 && reported[0].contains(&address.to_string()),
                "{reported:?}"
            );
            assert!(daemon.addresses().is_empty());
        }
        drop(other);
        for _ in 0..2 {
            assert!(daemon.bind_listeners().is_empty());
            assert!(daemon.part_warnings().is_empty());
            assert_eq!(daemon.addresses(), [address.to_string()]);
        }
        std::net::TcpStream::connect(address).unwrap();
    }
}
