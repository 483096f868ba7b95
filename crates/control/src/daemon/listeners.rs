//! Where hosts connect.
//!
//! Purpose: each configured address has a socket, a dead or living engine's or a new one.
//! Design: a daemon that was killed while it waits for a device keeps its sockets until that ends. So while a device is
//! silent, an address that is in use does not keep the daemon from serving what it can: it is told of, tried again every
//! few seconds, and given to the engine when it is free. Otherwise it is an error of whoever configured it.
//! Not here: the sockets of machines (`owner::machines`), how hosts should use a port (`owner::ports`).

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::rc::Rc;

use forebay_xlate::boundary::message::Held;
use tokio::time::sleep;

use super::reopen::LOOK_AGAIN;
use super::{Daemon, DaemonError};
use crate::owner::session::Greeting;

impl Daemon {
    /// Has what an engine listens on, too.
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

    /// Binds the configured addresses that no engine holds. `may_wait`: those that somebody else has are left for later.
    pub(super) fn bind_listeners(&self, may_wait: bool) -> Result<(), DaemonError> {
        let held = self.addresses();
        let may_wait = may_wait || !self.in_use.borrow().is_empty();
        for address in &self.config.nvme_tcp {
            // A configured port 0 is any port: one that is held for the address will do.
            let is_held = held.iter().any(|held| {
                held.parse::<SocketAddr>().is_ok_and(|held| {
                    held == *address || address.port() == 0 && held.ip() == address.ip()
                })
            });
            if is_held {
                self.in_use.borrow_mut().remove(address);
                continue;
            }
            let (bound, fd) = match bind(*address) {
                Ok(bound) => bound,
                Err(error) if may_wait && error.kind() == io::ErrorKind::AddrInUse => {
                    if self.in_use.borrow_mut().insert(*address) {
                        tracing::warn!(%address, "somebody else listens there: it is tried again");
                    }
                    continue;
                }
                Err(error) => return Err(can_not_listen(*address, &error)),
            };
            if self.in_use.borrow_mut().remove(address) {
                tracing::info!(%address, "listens there now");
            }
            self.spare_listeners
                .borrow_mut()
                .insert(bound.to_string(), fd);
        }
        Ok(())
    }

    /// Listens where it could not before, as soon as it can. Runs for ever.
    pub(super) async fn listen_at_the_rest(self: Rc<Self>) {
        loop {
            sleep(LOOK_AGAIN).await;
            if self.in_use.borrow().is_empty() || self.changing_pool.get() {
                continue;
            }
            if let Err(error) = self.bind_listeners(true) {
                tracing::warn!(%error, "trying again to listen");
            }
            if let Some(serving) = self.serving() {
                let new = std::mem::take(&mut *self.spare_listeners.borrow_mut());
                serving.owner.listen_also(new).await;
            }
        }
    }

    /// What an operator should know of addresses that are waited for.
    pub(super) fn addresses_in_use(&self) -> Vec<String> {
        let told = |address: &SocketAddr| {
            format!(
                "nobody can connect at {address}: another process listens there, perhaps one of before that hangs at a device; it is tried again until that has ended"
            )
        };
        self.in_use.borrow().iter().map(told).collect()
    }
}

fn can_not_listen(address: SocketAddr, error: &io::Error) -> DaemonError {
    let told = DaemonError::new(format!("can't listen on {address}: {error}"));
    told.with_hint(match error.kind() {
        io::ErrorKind::AddrInUse => {
            "another program listens there, or an engine of which run_dir knows nothing any more (`ss -ltnp` says which): stop it, or change `nvme_tcp` under [listen] in forebay.toml"
        }
        _ => "see `nvme_tcp` under [listen] in forebay.toml",
    })
}

fn bind(address: SocketAddr) -> io::Result<(SocketAddr, OwnedFd)> {
    // Sets SO_REUSEADDR, so that a restart doesn't wait for old connections' last state.
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    // Room for many hosts that reconnect at once, after an engine's death.
    rustix::net::listen(&listener, 1024)?;
    Ok((listener.local_addr()?, listener.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DaemonConfig;
    use crate::ownership::Installation;

    #[test]
    fn an_address_that_somebody_has_is_told_of_and_tried_until_it_is_free() {
        // Nobody else is given one of these.
        let other = TcpListener::bind("127.77.0.1:0").unwrap();
        let address = other.local_addr().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let me = Installation::claim(folder.path()).unwrap();
        let config = DaemonConfig {
            nvme_tcp: vec![address],
            ..DaemonConfig::empty()
        };
        let daemon = Daemon::new(config, std::sync::Arc::new(me));
        let error = daemon.bind_listeners(false).unwrap_err();
        assert!(error.to_string().contains(&address.to_string()), "{error}");
        assert!(daemon.addresses_in_use().is_empty());
        // While a device is silent it is waited for, and from then on.
        for may_wait in [true, true, false] {
            daemon.bind_listeners(may_wait).unwrap();
            let told = daemon.addresses_in_use();
            assert!(
                told.len() == 1 && told[0].contains(&address.to_string()),
                "{told:?}"
            );
            assert!(daemon.addresses().is_empty());
        }
        drop(other);
        for _ in 0..2 {
            daemon.bind_listeners(true).unwrap();
            assert!(daemon.addresses_in_use().is_empty());
            assert_eq!(daemon.addresses(), [address.to_string()]);
        }
        std::net::TcpStream::connect(address).unwrap();
    }
}
