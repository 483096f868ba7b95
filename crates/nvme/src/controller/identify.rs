//! The Identify command (Base 2.0, 5.17): fills the structures of [`crate::identify`].
//!
//! NVM sets, endurance groups, domains and UUID lists are unsupported: those CNS values are invalid
//! fields.

use super::supported::{Face, supports_cns};
use super::{
    AdminEnv, ControllerConfig, ControllerKind, MAX_NSID, NamespaceInfo, Reply, ana, features,
    keep_alive, management,
};
use crate::identify::{
    CSI_NVM, IdentifyController, IdentifyNamespace, IndependentNamespace, NvmIdentifyController,
    cns, nidt,
};
use crate::{NSID_ALL, Sqe, Status, register};
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// CRDT1: the delay after Command Interrupted.
const RETRY_DELAY_100_MS: u16 = 10;

/// NMIC: other controllers may use the namespace.
const NMIC_SHARED: u8 = 1;

/// Bit 0: persistence through power loss; bits 1–6: all types; bit 7: Ignore Existing Key as since
/// revision 1.3.
const RESCAP: u8 = 0xFF;

fn view<T: FromBytes + IntoBytes + KnownLayout + Immutable>(
    out: &mut [u8],
) -> Result<&mut T, Status> {
    T::mut_from_bytes(out).map_err(|_| Status::INTERNAL_ERROR)
}

impl ControllerConfig {
    pub(super) fn identify(
        &self,
        sqe: &Sqe,
        out: &mut [u8],
        env: &dyn AdminEnv,
    ) -> Result<Reply, Status> {
        let (what, nsid) = (sqe.cdw(10) as u8, sqe.nsid());
        let csi = (sqe.cdw(11) >> 24) as u8;
        if !supports_cns(self.face(env), what) {
            return Err(Status::INVALID_FIELD);
        }
        let by_command_set = matches!(
            what,
            cns::CSI_NAMESPACE | cns::CSI_CONTROLLER | cns::CSI_ACTIVE_NAMESPACES
        );
        if by_command_set && csi != CSI_NVM {
            return Err(Status::INVALID_FIELD);
        }
        match what {
            cns::CONTROLLER => self.identify_controller(view(out)?, env),
            cns::NAMESPACE if self.kind == ControllerKind::Management && nsid == NSID_ALL => {
                let id = view(out)?;
                identify_common(id);
                management::identify_formats(0, id);
            }
            cns::ALLOCATED_NAMESPACE => {
                if let Some(info) = self.allocated_namespace(nsid, env)? {
                    self.identify_namespace(&info, view(out)?);
                }
            }
            cns::NAMESPACE => {
                if let Some(info) = self.namespace(nsid, env)? {
                    self.identify_namespace(&info, view(out)?);
                }
            }
            cns::ACTIVE_NAMESPACES | cns::CSI_ACTIVE_NAMESPACES | cns::ALLOCATED_NAMESPACES => {
                self.namespace_list(what, nsid, out, env)?;
            }
            cns::NAMESPACE_DESCRIPTORS => {
                let info = self.namespace(nsid, env)?;
                descriptors(&info.ok_or(Status::INVALID_NAMESPACE_OR_FORMAT)?, out)?;
            }
            // All zero: no storage tags or protection information.
            cns::CSI_NAMESPACE => {
                self.namespace(nsid, env)?;
            }
            cns::CSI_CONTROLLER => {
                // No limits: MDTS does not bound Write Zeroes, and Dataset Management takes 256
                // ranges of any size.
                *view(out)? = NvmIdentifyController::new_zeroed();
            }
            cns::INDEPENDENT_NAMESPACE => {
                if let Some(info) = self.namespace(nsid, env)? {
                    self.identify_independent(&info, view(out)?);
                }
            }
            cns::COMMAND_SETS => {
                // CNTID, CDW10 bits 31:16: this controller's number or FFFFh.
                let cntid = (sqe.cdw(10) >> 16) as u16;
                if cntid != 0xFFFF && cntid != self.cntlid {
                    return Err(Status::INVALID_FIELD);
                }
                // Vector 0 selects command set 0: NVM.
                *out.first_mut().ok_or(Status::INTERNAL_ERROR)? = 1 << CSI_NVM;
            }
            cns::NAMESPACE_CONTROLLERS
            | cns::CONTROLLERS
            | cns::PRIMARY_CONTROLLER
            | cns::SECONDARY_CONTROLLERS => self.identify_controllers(sqe, out, env)?,
            _ => return Err(Status::INVALID_FIELD),
        }
        Ok(Reply::data(out.len()))
    }

    fn identify_independent(&self, info: &NamespaceInfo, id: &mut IndependentNamespace) {
        id.nsfeat = IdentifyNamespace::NSFEAT_UIDREUSE;
        id.nmic = NMIC_SHARED;
        if self.kind == ControllerKind::Io {
            id.rescap = RESCAP;
            id.anagrpid = U32::new(ana::GROUP);
        }
        id.nsattr = nsattr(info);
        id.nstat = 1;
    }

    /// Checks a namespace identifier. `None`: valid but inactive.
    pub(super) fn namespace(
        &self,
        nsid: u32,
        env: &dyn AdminEnv,
    ) -> Result<Option<NamespaceInfo>, Status> {
        if self.kind == ControllerKind::Management {
            return self.attached_namespace(nsid, env);
        }
        if nsid == 0 || nsid > self.namespaces {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT);
        }
        Ok(env.namespace(nsid))
    }

    fn namespace_list(
        &self,
        what: u8,
        after: u32,
        out: &mut [u8],
        env: &dyn AdminEnv,
    ) -> Result<(), Status> {
        if after >= MAX_NSID {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT);
        }
        let list: Vec<u32> = match (what, self.kind) {
            (cns::ALLOCATED_NAMESPACES, _) => env.allocated_after(after),
            (_, ControllerKind::Management) => env.attached_after(after),
            _ => (after + 1..=self.namespaces)
                .filter(|&nsid| env.namespace(nsid).is_some())
                .collect(),
        };
        for (to, nsid) in out.chunks_exact_mut(4).zip(list) {
            to.copy_from_slice(&nsid.to_le_bytes());
        }
        Ok(())
    }

    fn identify_controller(&self, id: &mut IdentifyController, env: &dyn AdminEnv) {
        let config = self;
        id.sn = config.serial;
        id.mn = config.model;
        id.fr = config.firmware;
        id.mdts = config.mdts_exponent();
        id.cntlid = U16::new(config.cntlid);
        id.ver = U32::new(register::VERSION_2_0);
        id.oaes = U32::new(features::feature_events(config.kind));
        id.aerl = super::MAX_EVENT_REQUESTS as u8 - 1;
        // Bit 1: Commands Supported and Effects. Bit 2: 32-bit NUMD and offset. Bit 5: log pages
        // 00h, 12h and 13h, with scopes (but see `io_effects`).
        id.lpa = 1 << 1 | 1 << 2 | 1 << 5;
        id.sqes = 0x66;
        id.cqes = 0x44;
        id.subnqn = config.subnqn.to_field();
        if config.kind.has_io() {
            id.cntrltype = IdentifyController::CNTRLTYPE_IO;
            id.crdt[0] = U16::new(RETRY_DELAY_100_MS);
            // Aborts end at once, so the limit is arbitrary.
            id.acl = 3;
            // One read-only slot: the program itself.
            id.frmw = 1 | 1 << 1;
            id.elpe = super::log_pages::ERROR_ENTRIES as u8 - 1;
            id.nn = U32::new(config.namespaces);
            id.mnan = U32::new(config.namespaces);
            // Compare, Dataset Management, Write Zeroes.
            id.oncs = U16::new(1 | 1 << 2 | 1 << 3);
            // Bit 0: volatile write cache. Bits 2:1: Flush accepts FFFFFFFFh.
            id.vwc = 1 | 0b11 << 1;
        }
        match config.kind {
            ControllerKind::Discovery => {
                id.cntrltype = IdentifyController::CNTRLTYPE_DISCOVERY;
                self.identify_fabrics(id);
            }
            ControllerKind::Io => {
                self.identify_fabrics(id);
                // Hosts may connect several times, each with its own controller. Bit 0: ports; bit
                // 1: controllers; bit 3: ANA.
                id.cmic = 0b1011;
                id.anatt = ana::TRANSITION_SECONDS;
                id.anacap = ana::CAPABILITIES;
                id.anagrpmax = U32::new(ana::GROUP);
                id.nanagrpid = U32::new(ana::GROUP);
                // Reservations.
                id.oncs = U16::new(id.oncs.get() | 1 << 5);
                // Compare and Write. AWUN, AWUPF and ACWU stay 0, one block: every device
                // guarantees that.
                id.fuses = U16::new(1);
            }
            ControllerKind::Pcie => {
                id.vid = U16::new(crate::pcie::VENDOR_ID);
                id.ssvid = U16::new(crate::pcie::VENDOR_ID);
                // The subsystem may have other controllers.
                id.cmic = 0b10;
                // Bits 1:0: SGLs of any alignment and length. Bit 18: SGLs may exceed the data.
                id.sgls = U32::new(1 | 1 << 18);
                // Bit 8: Doorbell Buffer Config. Bit 7: Virtualization Management.
                let primary = u16::from(self.face(env) == Face::Primary);
                id.oacs = U16::new(1 << 8 | primary << 7);
            }
            ControllerKind::Management => self.identify_management(id, env),
        }
    }

    /// Fields specific to Fabrics.
    fn identify_fabrics(&self, id: &mut IdentifyController) {
        let config = self;
        // 128-bit Host Identifier.
        id.ctratt = U32::new(1);
        id.kas = U16::new(keep_alive::KAS_100_MS);
        id.maxcmd = U16::new(config.max_queue_entries.min(0xFFFF) as u16);
        // Bits 1:0: SGLs of any alignment and length. Bit 20: capsule offsets. Bit 21: Transport
        // SGL Data Block.
        id.sgls = U32::new(1 | 1 << 20 | 1 << 21);
        // 64 command bytes plus in-capsule data; 16 completion bytes.
        id.ioccsz = U32::new((64 + config.in_capsule_bytes) / 16);
        id.iorcsz = U32::new(1);
        id.msdbd = 1;
    }

    fn identify_namespace(&self, info: &NamespaceInfo, id: &mut IdentifyNamespace) {
        let geometry = &info.geometry;
        let blocks = |bytes: u32| {
            // 0's based, at least one block.
            let blocks = (bytes / geometry.block_bytes.max(1)).max(1);
            U16::new((blocks - 1).min(0xFFFF) as u16)
        };
        id.nsze = U64::new(geometry.block_count);
        // The whole size can be written.
        id.ncap = id.nsze;
        id.nuse = U64::new(info.used_blocks.min(geometry.block_count));
        identify_common(id);
        id.nsfeat |= IdentifyNamespace::NSFEAT_OPTPERF;
        if self.kind == ControllerKind::Io {
            id.rescap = RESCAP;
            id.anagrpid = U32::new(ana::GROUP);
        }
        // Writes below a memory page are inefficient.
        id.npwg = blocks(4096);
        id.npwa = id.npwg;
        // Only whole extents return to the pool.
        id.npdg = blocks(info.extent_bytes);
        id.npda = id.npdg;
        id.nows = blocks(info.extent_bytes.min(self.mdts_bytes));
        id.nsattr = nsattr(info);
        id.nguid = info.nguid;
        if self.kind == ControllerKind::Management {
            // Thin: the written part. So the namespaces' sum and UNVMCAP are TNVMCAP.
            let used = u128::from(id.nuse.get()) * u128::from(geometry.block_bytes);
            id.nvmcap = U128::new(used);
            management::identify_formats(geometry.block_bytes, id);
        } else {
            id.lbaf[0] = U32::new(geometry.block_bytes.max(1).ilog2() << 16);
        }
    }
}

/// What all namespaces have.
fn identify_common(id: &mut IdentifyNamespace) {
    id.nsfeat = IdentifyNamespace::NSFEAT_THINP | IdentifyNamespace::NSFEAT_UIDREUSE;
    id.nmic = NMIC_SHARED;
    // Deallocated blocks read as zeros; Write Zeroes may deallocate.
    id.dlfeat = 0b001 | 1 << 3;
}

/// NSATTR. NWPC is 0: hosts cannot change it (Base 2.0, 8.12).
fn nsattr(info: &NamespaceInfo) -> u8 {
    u8::from(info.geometry.write_protected)
}

/// Namespace descriptors (Base 2.0, 5.17.2.3): NIDT, NIDL, two reserved bytes, identifier.
fn descriptors(info: &NamespaceInfo, out: &mut [u8]) -> Result<(), Status> {
    let mut at = 0;
    let lists: [(u8, &[u8]); 3] = [
        (nidt::NGUID, &info.nguid),
        (nidt::UUID, &info.uuid),
        (nidt::CSI, &[CSI_NVM]),
    ];
    for (kind, identifier) in lists {
        // A zero identifier is absent; a zero command set is valid.
        if kind != nidt::CSI && identifier.iter().all(|&b| b == 0) {
            continue;
        }
        let end = at + 4 + identifier.len();
        let entry = out.get_mut(at..end).ok_or(Status::INTERNAL_ERROR)?;
        entry[0] = kind;
        entry[1] = identifier.len() as u8;
        entry[4..].copy_from_slice(identifier);
        at = end;
    }
    Ok(())
}
