//! The exports, as those who look names up need them: the door, and discovery controllers.
//!
//! **Design.** A snapshot behind a mutex, replaced by the control thread and cloned (one reference
//! count) by readers on admin paths only. **Not here:** lanes, which hold the same configuration.

use forebay_xlate::boundary::message::{ExportConfig, ExportId};
use std::sync::{Arc, Mutex};

/// An export and where it is served.
#[derive(Clone, Debug)]
pub struct Served {
    /// Its configuration.
    pub config: Arc<ExportConfig>,
    /// The reactor that serves it.
    pub reactor: usize,
}

impl Served {
    /// Whether a host may connect.
    pub fn allows(&self, host_nqn: &str) -> bool {
        self.config.any_host || self.config.hosts.iter().any(|h| h == host_nqn)
    }
}

/// See the module's text.
#[derive(Clone, Debug, Default)]
pub struct Exports {
    inner: Arc<Mutex<Snapshot>>,
}

#[derive(Clone, Debug, Default)]
struct Snapshot {
    exports: Arc<Vec<Served>>,
    addresses: Arc<Vec<String>>,
    generation: u64,
}

impl Exports {
    fn with<T>(&self, f: impl FnOnce(&mut Snapshot) -> T) -> T {
        f(&mut self
            .inner
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// All of them now.
    pub fn all(&self) -> Arc<Vec<Served>> {
        self.with(|s| s.exports.clone())
    }

    /// The addresses that are listened on.
    pub fn addresses(&self) -> Arc<Vec<String>> {
        self.with(|s| s.addresses.clone())
    }

    /// Rises with each change (the discovery log's generation counter).
    pub fn generation(&self) -> u64 {
        self.with(|s| s.generation)
    }

    /// The export of this subsystem.
    pub fn by_nqn(&self, nqn: &str) -> Option<Served> {
        self.all().iter().find(|e| e.config.nqn == nqn).cloned()
    }

    /// Adds or replaces one.
    pub fn set(&self, served: Served) {
        self.with(|s| {
            let mut exports = (*s.exports).clone();
            exports.retain(|e| e.config.export != served.config.export);
            exports.push(served);
            s.exports = Arc::new(exports);
            s.generation += 1;
        });
    }

    /// Takes one out.
    pub fn remove(&self, id: ExportId) {
        self.with(|s| {
            let mut exports = (*s.exports).clone();
            exports.retain(|e| e.config.export != id);
            s.exports = Arc::new(exports);
            s.generation += 1;
        });
    }

    /// Says which addresses are listened on.
    pub fn set_addresses(&self, addresses: Vec<String>) {
        self.with(|s| {
            s.addresses = Arc::new(addresses);
            s.generation += 1;
        });
    }
}
