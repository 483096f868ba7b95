//! How tenants reach an export: its frontend.
//!
//! **Not here:** the protocols, and where a machine's socket is (the daemon makes it).

use serde::{Deserialize, Serialize};

/// The most queue pairs, besides the admin queue's, and the most rings that a machine may use.
pub const MAX_MACHINE_QUEUES: u16 = 64;

/// See the module's text.
#[derive(
    Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize,
)]
pub enum Frontend {
    /// NVMe/TCP: any host that is allowed, by the listeners.
    #[default]
    NvmeTcp,
    /// NVMe over vfio-user: one virtual machine, or one user-space driver.
    NvmePcie {
        /// Doorbells are a shared page that is polled while the controller is enabled; else each store to
        /// one that the shadow doorbells don't spare is a message.
        mapped_doorbells: bool,
    },
    /// vhost-user-blk: one virtual machine, or one user-space driver.
    VhostUser {
        /// Request queues, 1 to [`MAX_MACHINE_QUEUES`].
        queues: u16,
    },
}

impl Frontend {
    /// Whether it has a socket of its own and one client, who hands over its memory.
    pub const fn is_machine(self) -> bool {
        !matches!(self, Self::NvmeTcp)
    }

    /// Its name for people and for the API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NvmeTcp => "nvme-tcp",
            Self::NvmePcie { .. } => "nvme-pcie",
            Self::VhostUser { .. } => "vhost-user",
        }
    }

    /// A word for records: which it is, with its settings; never 0.
    pub const fn word(self) -> u64 {
        match self {
            Self::NvmeTcp => 1,
            Self::NvmePcie { mapped_doorbells } => 2 | (mapped_doorbells as u64) << 8,
            Self::VhostUser { queues } => 3 | (queues as u64) << 8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_a_word_of_its_own() {
        let all = [
            Frontend::NvmeTcp,
            Frontend::NvmePcie {
                mapped_doorbells: false,
            },
            Frontend::NvmePcie {
                mapped_doorbells: true,
            },
            Frontend::VhostUser { queues: 1 },
            Frontend::VhostUser { queues: 64 },
        ];
        let words: std::collections::BTreeSet<u64> = all.iter().map(|f| f.word()).collect();
        assert_eq!(words.len(), all.len());
        assert!(!words.contains(&0));
    }
}
