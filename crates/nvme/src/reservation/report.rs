//! The Reservation Status data structure (Base 2.0, 7.5).

use super::{HostId, MAX_REGISTRANTS, Reservations};
use crate::{Sqe, Status};

/// CNTLID of a registrant without controller.
pub const NO_CONTROLLER: u16 = 0xFFFF;

/// Size of the extended header and of each entry.
const ENTRY_BYTES: usize = 64;

/// Maximum size.
pub const MAX_REPORT_BYTES: usize = ENTRY_BYTES * (MAX_REGISTRANTS + 1);

pub(crate) fn is_extended(sqe: &Sqe) -> bool {
    sqe.cdw(11) & 1 != 0
}

impl Reservations {
    /// Writes the extended structure, truncated to `out`; `cntlid` returns a host's controller or
    /// [`NO_CONTROLLER`].
    ///
    /// Fabrics hosts have 128-bit identifiers, so `extended` false is Host Identifier Inconsistent
    /// Format (Base 2.0, 7.5).
    pub fn report(
        &self,
        extended: bool,
        cntlid: impl Fn(&HostId) -> u16,
        out: &mut [u8],
    ) -> Result<(), Status> {
        if !extended {
            return Err(Status::HOST_IDENTIFIER_INCONSISTENT_FORMAT.with_dnr());
        }
        let mut header = [0; ENTRY_BYTES];
        header[..4].copy_from_slice(&self.generation.to_le_bytes());
        header[4] = self.held.map_or(0, |held| held.rtype as u8);
        header[5..7].copy_from_slice(&(self.registrants.len() as u16).to_le_bytes());
        header[9] = u8::from(self.ptpl);
        let entries = self.registrants.iter().map(|r| {
            let mut entry = [0; ENTRY_BYTES];
            entry[..2].copy_from_slice(&cntlid(&r.host).to_le_bytes());
            entry[2] = u8::from(self.holds(&r.host));
            entry[8..16].copy_from_slice(&r.key.to_le_bytes());
            entry[16..32].copy_from_slice(&r.host);
            entry
        });
        let parts = std::iter::once(header).chain(entries);
        for (to, part) in out.chunks_mut(ENTRY_BYTES).zip(parts) {
            to.copy_from_slice(&part[..to.len()]);
        }
        Ok(())
    }
}
