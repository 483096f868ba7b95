//! What only the controllers of a management endpoint have: allocated namespaces (Base 2.0, 8.11),
//! capacity, and a list of changed namespaces with any identifiers.

use super::log_pages::part;
use super::supported::Face;
use super::{AdminEnv, ControllerConfig, MAX_NSID, NamespaceInfo};
use crate::identify::{IdentifyController, IdentifyNamespace};
use crate::log_page::CHANGED_NAMESPACE_LIST_BYTES;
use crate::management::BLOCK_BYTES;
use crate::{NSID_ALL, Status};
use std::collections::BTreeMap;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U128};

/// OACS: Namespace Management, firmware commands, Format NVM.
const OACS: u16 = 1 << 3 | 1 << 2 | 1 << 1;
/// FRMW: activation without reset, two slots, slot 1 read-only: it holds the installed program.
const FRMW: u8 = 1 << 4 | 2 << 1 | 1;
/// FWUG: pieces of an image are multiples of 4 KiB.
const GRANULARITY: u8 = 1;

impl ControllerConfig {
    /// Checks a namespace identifier. `None`: valid but unallocated.
    pub(super) fn allocated_namespace(
        &self,
        nsid: u32,
        env: &dyn AdminEnv,
    ) -> Result<Option<NamespaceInfo>, Status> {
        match nsid {
            1..=MAX_NSID => Ok(env.namespace(nsid)),
            _ => Err(Status::INVALID_NAMESPACE_OR_FORMAT),
        }
    }

    /// Checks a namespace identifier. `None`: valid but not attached to this controller.
    pub(super) fn attached_namespace(
        &self,
        nsid: u32,
        env: &dyn AdminEnv,
    ) -> Result<Option<NamespaceInfo>, Status> {
        let info = self.allocated_namespace(nsid, env)?;
        let attached = env.attached_after(nsid - 1).first() == Some(&nsid);
        Ok(info.filter(|_| attached))
    }

    pub(super) fn identify_management(&self, id: &mut IdentifyController, env: &dyn AdminEnv) {
        let (total, unallocated) = env.capacity();
        id.nvmsr = 1;
        // Bit 0: ports. Bit 1: controllers.
        id.cmic = 0b11;
        id.acl = 0;
        id.aerl = 0;
        id.fr = env
            .firmware()
            .and_then(|firmware| firmware.active())
            .unwrap_or(self.firmware);
        id.oacs = U16::new(OACS);
        id.frmw = FRMW;
        id.fwug = GRANULARITY;
        // Format of all namespaces would erase every tenant.
        id.fna = 1 << 3;
        id.tnvmcap = U128::new(total);
        id.unvmcap = U128::new(unallocated);
        id.nn = U32::new(MAX_NSID);
        if self.face(env) == Face::Management {
            id.cntrltype = IdentifyController::CNTRLTYPE_ADMINISTRATIVE;
            id.oncs = U16::new(0);
        }
    }
}

/// The formats of all namespaces; one of this block size has FLBAS.
pub(super) fn identify_formats(block_bytes: u32, id: &mut IdentifyNamespace) {
    id.nlbaf = BLOCK_BYTES.len() as u8 - 1;
    for (index, (format, bytes)) in id.lbaf.iter_mut().zip(BLOCK_BYTES).enumerate() {
        *format = U32::new(bytes.ilog2() << 16);
        if bytes == block_bytes {
            id.flbas = index as u8;
        }
    }
}

/// Namespaces for the Changed Namespace List (Base 2.0, 5.16.1.5); `true`: the client read it.
#[derive(Clone, Debug, Default)]
pub(super) struct ChangedNamespaces(BTreeMap<u32, bool>);

impl ChangedNamespaces {
    const MOST: usize = CHANGED_NAMESPACE_LIST_BYTES / 4;

    /// A namespace without a place becomes [`NSID_ALL`], which stands for the whole list.
    pub(super) fn add(&mut self, nsid: u32) {
        let place = self.0.len() < Self::MOST || self.0.contains_key(&nsid);
        self.0.insert(if place { nsid } else { NSID_ALL }, false);
    }

    pub(super) fn read(&mut self, offset: u64, retain: bool, out: &mut [u8]) -> Result<(), Status> {
        let mut page = [U32::new(0); Self::MOST];
        if self.0.contains_key(&NSID_ALL) {
            page[0] = U32::new(NSID_ALL);
        } else {
            for (to, nsid) in page.iter_mut().zip(self.0.keys()) {
                *to = U32::new(*nsid);
            }
        }
        part(page.as_bytes(), offset, out)?;
        // A change after the first piece must not be lost.
        if offset == 0 {
            self.0.values_mut().for_each(|read| *read = true);
        }
        if !retain {
            self.0.retain(|_, read| !*read);
        }
        Ok(())
    }
}
