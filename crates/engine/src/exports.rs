//! The exports, for lookups by the listener and discovery controllers.
//!
//! **Design.** A snapshot behind a mutex, cloned on admin paths (one reference count). A host's
//! list is made once after each change. **Not here:** lanes, which hold the same configuration.

use forebay_nvme::Nqn;
use forebay_nvme::controller::Ana;
use forebay_xlate::boundary::message::{ExportConfig, ExportId};
use forebay_xlate::boundary::region::MAX_CONTROLLERS;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

#[derive(Clone, Debug)]
pub(crate) struct Served {
    pub config: Arc<ExportConfig>,
    pub reactor: usize,
}

impl Served {
    /// Whether a host may connect over the network.
    pub(crate) fn allows(&self, host_nqn: &str) -> bool {
        !self.config.frontend.is_vm()
            && (self.config.any_host || self.config.hosts.contains(host_nqn))
    }
}

/// A port of all subsystems; it may not be open yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Port {
    /// A wildcard is every address with this TCP port.
    pub address: SocketAddr,
    pub id: u16,
    pub ana: Ana,
}

/// The one with the local address, else a wildcard with its TCP port.
pub(crate) fn port_of(ports: &[Port], local: SocketAddr) -> Option<&Port> {
    // Ignores the scope, and IPv4 mapped to IPv6.
    let plain = |a: SocketAddr| SocketAddr::new(a.ip().to_canonical(), a.port());
    let exact = |p: &&Port| plain(p.address) == plain(local);
    let any = |p: &&Port| {
        p.address.ip().to_canonical().is_unspecified() && p.address.port() == local.port()
    };
    (ports.iter().find(exact)).or_else(|| ports.iter().find(any))
}

#[derive(Debug)]
pub(crate) struct Subsystems {
    pub nqns: Vec<Nqn>,
    /// [`fnv`] of the names, a line each.
    pub hash: u64,
}

impl Default for Subsystems {
    fn default() -> Self {
        Self::of(Vec::new())
    }
}

impl Subsystems {
    fn of(nqns: Vec<Nqn>) -> Self {
        let line = |hash, nqn: &Nqn| fnv(fnv(hash, nqn.as_str()), "\n");
        let hash = nqns.iter().fold(0xcbf2_9ce4_8422_2325, line);
        Self { nqns, hash }
    }
}

/// Continues an FNV-1a hash with `text`.
pub(crate) fn fnv(hash: u64, text: &str) -> u64 {
    text.bytes().fold(hash, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[derive(Clone, Debug, Default)]
pub(crate) struct ExportTable {
    inner: Arc<Mutex<Snapshot>>,
}

#[derive(Clone, Debug, Default)]
struct Snapshot {
    exports: Arc<Vec<Served>>,
    addresses: Arc<Vec<String>>,
    ports: Arc<Vec<Port>>,
    /// Lists made since the last change.
    lists: BTreeMap<Nqn, Arc<Subsystems>>,
    #[cfg(test)]
    checked: u64,
}

impl ExportTable {
    fn with<T>(&self, f: impl FnOnce(&mut Snapshot) -> T) -> T {
        f(&mut self
            .inner
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    pub(crate) fn all(&self) -> Arc<Vec<Served>> {
        self.with(|s| s.exports.clone())
    }

    pub(crate) fn list_of(&self, host: &Nqn) -> Arc<Subsystems> {
        if let Some(list) = self.with(|s| s.lists.get(host).cloned()) {
            return list;
        }
        let all = self.all();
        let seen = all.iter().filter(|s| s.allows(host.as_str()));
        let nqns = seen.filter_map(|s| Nqn::parse(&s.config.nqn).ok());
        let list = Arc::new(Subsystems::of(nqns.collect()));
        self.with(|s| {
            #[cfg(test)]
            {
                s.checked += all.len() as u64;
            }
            if Arc::ptr_eq(&s.exports, &all) {
                // As many hosts as there can be at once.
                if s.lists.len() >= MAX_CONTROLLERS {
                    s.lists.clear();
                }
                s.lists.insert(*host, list.clone());
            }
        });
        list
    }

    #[cfg(test)]
    pub(crate) fn checked(&self) -> u64 {
        self.with(|s| s.checked)
    }

    pub(crate) fn addresses(&self) -> Arc<Vec<String>> {
        self.with(|s| s.addresses.clone())
    }

    pub(crate) fn ports(&self) -> Arc<Vec<Port>> {
        self.with(|s| s.ports.clone())
    }

    /// The export of this subsystem, if served over the network.
    pub(crate) fn by_nqn(&self, nqn: &str) -> Option<Served> {
        let all = self.all();
        let mut all = all.iter().filter(|e| !e.config.frontend.is_vm());
        all.find(|e| e.config.nqn == nqn).cloned()
    }

    pub(crate) fn set(&self, served: Served) {
        self.with(|s| {
            let mut exports = (*s.exports).clone();
            exports.retain(|e| e.config.export != served.config.export);
            exports.push(served);
            s.exports = Arc::new(exports);
            s.lists.clear();
        });
    }

    pub(crate) fn remove(&self, id: ExportId) {
        self.with(|s| {
            let mut exports = (*s.exports).clone();
            exports.retain(|e| e.config.export != id);
            s.exports = Arc::new(exports);
            s.lists.clear();
        });
    }

    pub(crate) fn set_addresses(&self, addresses: Vec<String>) {
        self.with(|s| s.addresses = Arc::new(addresses));
    }

    /// Adds or updates a port; returns all ports.
    pub(crate) fn set_port(&self, port: Port) -> Arc<Vec<Port>> {
        self.with(|s| {
            let mut ports = (*s.ports).clone();
            ports.retain(|p| p.address != port.address);
            ports.push(port);
            s.ports = Arc::new(ports);
            s.ports.clone()
        })
    }
}
