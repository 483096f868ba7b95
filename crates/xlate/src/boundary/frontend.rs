//! An export's frontend.

use serde::{Deserialize, Serialize};

/// The most I/O queue pairs or rings of a VM.
pub const MAX_VM_QUEUES: u16 = 64;

/// A frontend and its settings.
#[derive(
    Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize,
)]
#[serde(from = "Written", into = "Written")]
pub enum FrontendKind {
    /// NVMe/TCP: any allowed host, by the listeners.
    #[default]
    NvmeTcp,
    /// NVMe over vfio-user: one VM, or one user-space driver.
    NvmePcie {
        /// Doorbells are a shared page, polled while the controller is enabled. Otherwise each
        /// doorbell write that shadow doorbells do not avoid is a message.
        mapped_doorbells: bool,
        /// See [`FrontendKind::VhostUser`].
        pinned_memory: bool,
    },
    /// vhost-user-blk: one VM, or one user-space driver.
    VhostUser {
        /// Request queues, 1 to [`MAX_VM_QUEUES`].
        queues: u16,
        /// The VM has no balloon and returns no pages, so they may be pinned.
        pinned_memory: bool,
    },
}

/// The stored form; newer settings use formerly zero bits.
#[derive(Serialize, Deserialize)]
enum Written {
    NvmeTcp,
    /// One byte, as the boolean that it once was.
    NvmePcie {
        flags: u8,
    },
    VhostUser {
        queues: u16,
    },
}

const MAPPED_DOORBELLS: u8 = 1;
const PINNED_PCIE: u8 = 1 << 1;
const PINNED: u16 = 1 << 15;

impl From<FrontendKind> for Written {
    fn from(frontend: FrontendKind) -> Self {
        match frontend {
            FrontendKind::NvmeTcp => Self::NvmeTcp,
            FrontendKind::NvmePcie {
                mapped_doorbells,
                pinned_memory,
            } => Self::NvmePcie {
                flags: if mapped_doorbells {
                    MAPPED_DOORBELLS
                } else {
                    0
                } | if pinned_memory { PINNED_PCIE } else { 0 },
            },
            FrontendKind::VhostUser {
                queues,
                pinned_memory,
            } => Self::VhostUser {
                queues: queues | if pinned_memory { PINNED } else { 0 },
            },
        }
    }
}

impl From<Written> for FrontendKind {
    fn from(written: Written) -> Self {
        match written {
            Written::NvmeTcp => Self::NvmeTcp,
            Written::NvmePcie { flags } => Self::NvmePcie {
                mapped_doorbells: flags & MAPPED_DOORBELLS != 0,
                pinned_memory: flags & PINNED_PCIE != 0,
            },
            Written::VhostUser { queues } => Self::VhostUser {
                queues: queues & !PINNED,
                pinned_memory: queues & PINNED != 0,
            },
        }
    }
}

impl FrontendKind {
    /// Whether it serves one VM, by its own socket.
    pub const fn is_vm(self) -> bool {
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

    /// Whether its VM keeps all mapped memory, by configuration. No protocol promises it: QEMU
    /// keeps balloons from vfio-user memory, Cloud Hypervisor does not.
    pub const fn keeps_memory(self) -> bool {
        match self {
            Self::NvmeTcp => false,
            Self::NvmePcie { pinned_memory, .. } | Self::VhostUser { pinned_memory, .. } => {
                pinned_memory
            }
        }
    }

    /// A word for records; never 0.
    pub const fn word(self) -> u64 {
        match self {
            Self::NvmeTcp => 1,
            Self::NvmePcie {
                mapped_doorbells,
                pinned_memory,
            } => 2 | (mapped_doorbells as u64) << 8 | (pinned_memory as u64) << 32,
            Self::VhostUser {
                queues,
                pinned_memory,
            } => 3 | (queues as u64) << 8 | (pinned_memory as u64) << 32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_a_word_of_its_own() {
        let all = [
            FrontendKind::NvmeTcp,
            pcie(false, false),
            pcie(true, false),
            pcie(false, true),
            pcie(true, true),
            vhost(1, false),
            vhost(64, false),
            vhost(1, true),
        ];
        let words: std::collections::BTreeSet<u64> = all.iter().map(|f| f.word()).collect();
        assert_eq!(words.len(), all.len());
        assert!(!words.contains(&0));
        for frontend in all {
            let bytes = postcard::to_allocvec(&frontend).expect("encodes");
            assert_eq!(postcard::from_bytes::<FrontendKind>(&bytes), Ok(frontend));
        }
    }

    #[test]
    fn the_frontend_format_without_pinned_memory_is_read() {
        #[derive(Serialize)]
        #[allow(dead_code)]
        enum Before {
            NvmeTcp,
            NvmePcie { mapped_doorbells: bool },
            VhostUser { queues: u16 },
        }
        let before = postcard::to_allocvec(&Before::VhostUser { queues: 7 }).expect("encodes");
        assert_eq!(postcard::from_bytes(&before), Ok(vhost(7, false)));
        assert_eq!(postcard::to_allocvec(&vhost(7, false)), Ok(before));
        for mapped_doorbells in [false, true] {
            let before = postcard::to_allocvec(&Before::NvmePcie { mapped_doorbells });
            let before = before.expect("encodes");
            let now = pcie(mapped_doorbells, false);
            assert_eq!(postcard::from_bytes(&before), Ok(now));
            assert_eq!(postcard::to_allocvec(&now), Ok(before));
        }
    }

    fn pcie(mapped_doorbells: bool, pinned_memory: bool) -> FrontendKind {
        FrontendKind::NvmePcie {
            mapped_doorbells,
            pinned_memory,
        }
    }

    fn vhost(queues: u16, pinned_memory: bool) -> FrontendKind {
        FrontendKind::VhostUser {
            queues,
            pinned_memory,
        }
    }
}
