//! Reads the discovery log page, over its own connection.
//!
//! The read restarts if the page's generation changes (Base 5.16.1.23). Referrals are not followed.

use std::net::SocketAddr;

use forebay_nvme::fabrics::{DiscoveryLogEntry, DiscoveryLogHeader};
use forebay_nvme::host::command;
use forebay_nvme::nqn::DISCOVERY_NQN;
use zerocopy::FromBytes;

use crate::admin::Admin;
use crate::{Error, Options};

const HEADER_BYTES: u32 = size_of::<DiscoveryLogHeader>() as u32;
const ENTRY_BYTES: u32 = size_of::<DiscoveryLogEntry>() as u32;
const CHUNK: u64 = 16;
/// A bound on the count that a peer reports.
const MAX_ENTRIES: u64 = 16 * 1024;
/// Reads of a page that keeps changing.
const ATTEMPTS: u32 = 5;

/// A subsystem in the discovery log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Discovered {
    /// SUBNQN.
    pub subnqn: String,
    /// SUBTYPE: 2 is an NVM subsystem, 1 a referral, 3 the discovery service itself.
    pub subtype: u8,
    /// TRTYPE: 3 is TCP.
    pub trtype: u8,
    /// TRADDR.
    pub traddr: String,
    /// TRSVCID, the port.
    pub trsvcid: String,
}

impl Discovered {
    /// Whether it is an NVM subsystem over TCP.
    #[must_use]
    pub fn is_nvm_tcp(&self) -> bool {
        self.subtype == DiscoveryLogEntry::SUBTYPE_NVM
            && self.trtype == DiscoveryLogEntry::TRTYPE_TCP
    }
}

/// Functions that need no session.
#[derive(Debug)]
pub struct Host;

impl Host {
    /// Lists the subsystems that the discovery service shows to a host.
    ///
    /// # Errors
    /// The service can't be reached, refuses, or does not answer in time.
    pub fn discover(addr: SocketAddr, hostnqn: &str) -> Result<Vec<Discovered>, Error> {
        Self::discover_with(addr, hostnqn, &Options::default())
    }

    /// [`Host::discover`] with digests and time limits.
    pub fn discover_with(
        addr: SocketAddr,
        hostnqn: &str,
        options: &Options,
    ) -> Result<Vec<Discovered>, Error> {
        let identity = options.identity(DISCOVERY_NQN, hostnqn)?;
        let mut admin = Admin::open(addr, &identity, 0, &options.connection())?;
        for _ in 0..ATTEMPTS {
            let before = header(&mut admin, addr)?;
            let count = before.numrec.get();
            if count > MAX_ENTRIES {
                let what = format!("the discovery log claims {count} entries");
                return Err(Error::Unusable { addr, what });
            }
            let mut entries = Vec::new();
            while (entries.len() as u64) < count {
                let at = entries.len() as u64;
                let offset = u64::from(HEADER_BYTES) + at * u64::from(ENTRY_BYTES);
                let bytes = (count - at).min(CHUNK) as u32 * ENTRY_BYTES;
                let page = admin.log_page(command::log::DISCOVERY, offset, bytes)?;
                entries.extend(page.chunks_exact(ENTRY_BYTES as usize).filter_map(entry));
                if (entries.len() as u64) <= at {
                    let what = "the discovery log has entries that can't be read".into();
                    return Err(Error::Unusable { addr, what });
                }
            }
            if header(&mut admin, addr)?.genctr == before.genctr {
                let _ = admin.shut_down();
                return Ok(entries);
            }
        }
        Err(Error::Unusable {
            addr,
            what: format!("the discovery log changed {ATTEMPTS} times while it was read; retry"),
        })
    }
}

fn header(admin: &mut Admin, addr: SocketAddr) -> Result<DiscoveryLogHeader, Error> {
    let page = admin.log_page(command::log::DISCOVERY, 0, HEADER_BYTES)?;
    DiscoveryLogHeader::read_from_bytes(&page).map_err(|_| Error::Unusable {
        addr,
        what: "the discovery log is too short".into(),
    })
}

fn entry(bytes: &[u8]) -> Option<Discovered> {
    let entry = DiscoveryLogEntry::ref_from_bytes(bytes).ok()?;
    Some(Discovered {
        subnqn: text(&entry.subnqn),
        subtype: entry.subtype,
        trtype: entry.trtype,
        traddr: text(&entry.traddr),
        trsvcid: text(&entry.trsvcid),
    })
}

fn text(field: &[u8]) -> String {
    let end = field.iter().position(|&b| b == 0).unwrap_or(field.len());
    String::from_utf8_lossy(&field[..end]).trim_end().to_owned()
}
