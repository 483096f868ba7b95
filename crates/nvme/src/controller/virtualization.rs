//! Primary and secondary controllers (Base 2.0, 8.26), and controller lists.
//!
//! The subsystem's controller with the lowest identifier is the primary. The operator assigns
//! controllers to VMs, and queues and vectors are fixed. So Virtualization Management confirms the
//! present state and refuses changes, and no host controls another VM's controller.

use super::{AdminEnv, ControllerConfig, ControllerKind, Reply, SubsystemController};
use crate::identify::{PrimaryController, PrimaryResources, SecondaryControllers, cns};
use crate::pcie::{MAX_IO_QUEUES, VECTORS};
use crate::{NSID_ALL, Sqe, Status};
use zerocopy::FromBytes;
use zerocopy::little_endian::{U16, U32};

/// VQ and VI.
const CRT: u8 = 0b11;
/// Queue pairs per controller, including the admin queue.
const QUEUE_PAIRS: u16 = MAX_IO_QUEUES + 1;

/// Virtualization Management actions (Base 2.0, 5.28).
mod act {
    pub(super) const PRIMARY_FLEXIBLE_ALLOCATION: u32 = 0x1;
    pub(super) const SECONDARY_OFFLINE: u32 = 0x7;
    pub(super) const SECONDARY_ASSIGN: u32 = 0x8;
    pub(super) const SECONDARY_ONLINE: u32 = 0x9;
}

impl ControllerConfig {
    /// The subsystem's controllers, including this one.
    fn subsystem(&self, env: &dyn AdminEnv) -> Vec<SubsystemController> {
        let mut all = env.controllers();
        if all.iter().all(|c| c.cntlid != self.cntlid) {
            all.push(SubsystemController {
                cntlid: self.cntlid,
                online: true,
            });
        }
        all.sort_unstable_by_key(|c| c.cntlid);
        all
    }

    fn cntlids(&self, env: &dyn AdminEnv) -> Vec<u16> {
        self.subsystem(env).iter().map(|c| c.cntlid).collect()
    }

    /// Queue pairs and vectors of each controller; a management endpoint does not share them out.
    fn resources(&self) -> (u16, u16) {
        match self.kind {
            ControllerKind::Management => (0, 0),
            _ => (QUEUE_PAIRS, VECTORS),
        }
    }

    /// Whether this is the primary; false while the others are unknown.
    pub(super) fn is_primary(&self, env: &dyn AdminEnv) -> bool {
        let first = env.controllers().iter().map(|c| c.cntlid).min();
        first == Some(self.cntlid)
    }

    fn secondaries(&self, env: &dyn AdminEnv) -> Vec<SubsystemController> {
        let mut all = self.subsystem(env);
        all.retain(|c| c.cntlid != self.cntlid);
        all
    }

    /// CNS 12h to 15h.
    pub(super) fn identify_controllers(
        &self,
        sqe: &Sqe,
        out: &mut [u8],
        env: &dyn AdminEnv,
    ) -> Result<(), Status> {
        let what = sqe.cdw(10) as u8;
        let from = (sqe.cdw(10) >> 16) as u16;
        match what {
            cns::NAMESPACE_CONTROLLERS | cns::CONTROLLERS => {
                let mut ids = match (what, sqe.nsid()) {
                    (cns::CONTROLLERS, _) => self.cntlids(env),
                    (_, NSID_ALL) => return Err(Status::INVALID_FIELD),
                    (_, nsid) if self.kind == ControllerKind::Management => {
                        self.allocated_namespace(nsid, env)?;
                        env.controllers_of(nsid)
                    }
                    (_, nsid) => match self.namespace(nsid, env)? {
                        Some(_) => self.cntlids(env),
                        None => Vec::new(),
                    },
                };
                ids.retain(|id| *id >= from);
                let mut count = 0u16;
                for (to, id) in out.chunks_exact_mut(2).skip(1).zip(ids) {
                    to.copy_from_slice(&id.to_le_bytes());
                    count += 1;
                }
                let first = out.get_mut(..2).ok_or(Status::INTERNAL_ERROR)?;
                first.copy_from_slice(&count.to_le_bytes());
            }
            cns::PRIMARY_CONTROLLER => {
                let id = PrimaryController::mut_from_bytes(out);
                let id = id.map_err(|_| Status::INTERNAL_ERROR)?;
                let secondaries = self.secondaries(env).len() as u32;
                let resources = |each: u16| {
                    let total = u32::from(each) * secondaries;
                    // Without secondaries nothing is flexible.
                    let flexible = if secondaries > 0 { each } else { 0 };
                    PrimaryResources {
                        flexible_total: U32::new(total),
                        flexible_assigned: U32::new(total),
                        flexible_primary: U16::new(0),
                        private_total: U16::new(each),
                        secondary_maximum: U16::new(flexible),
                        granularity: U16::new(flexible),
                        reserved16: [0; 16],
                    }
                };
                id.cntlid = U16::new(self.cntlid);
                let (queue_pairs, vectors) = self.resources();
                id.crt = if queue_pairs > 0 { CRT } else { 0 };
                id.vq = resources(queue_pairs);
                id.vi = resources(vectors);
            }
            _ => {
                let list = SecondaryControllers::mut_from_bytes(out);
                let list = list.map_err(|_| Status::INTERNAL_ERROR)?;
                let all = self.secondaries(env);
                let from = all.iter().filter(|c| c.cntlid >= from);
                for (entry, controller) in list.entries.iter_mut().zip(from) {
                    entry.scid = U16::new(controller.cntlid);
                    entry.pcid = U16::new(self.cntlid);
                    entry.scs = u8::from(controller.online);
                    // VFN stays 0: these are physical functions (CMIC bit 2 is 0).
                    let (queue_pairs, vectors) = self.resources();
                    entry.nvq = U16::new(queue_pairs);
                    entry.nvi = U16::new(vectors);
                    list.count += 1;
                }
            }
        }
        Ok(())
    }

    /// Base 2.0, 5.28.
    pub(super) fn virtualization_management(
        &self,
        sqe: &Sqe,
        env: &dyn AdminEnv,
    ) -> Result<Reply, Status> {
        let (action, kind) = (sqe.cdw(10) & 0xF, sqe.cdw(10) >> 8 & 7);
        let cntlid = (sqe.cdw(10) >> 16) as u16;
        let number = sqe.cdw(11) as u16;
        let each = || match kind {
            0 => Ok(QUEUE_PAIRS),
            1 => Ok(VECTORS),
            _ => Err(Status::INVALID_RESOURCE_IDENTIFIER),
        };
        let mut found = self.secondaries(env).into_iter();
        let found = found.find(|c| c.cntlid == cntlid);
        let secondary = || found.ok_or(Status::INVALID_CONTROLLER_IDENTIFIER);
        let as_is = |good: bool| match good {
            true => Ok(number),
            false => Err(Status::INVALID_NUMBER_OF_CONTROLLER_RESOURCES),
        };
        let confirmed = match action {
            act::PRIMARY_FLEXIBLE_ALLOCATION => {
                each()?;
                match cntlid == self.cntlid {
                    true => as_is(number == 0)?,
                    false => return Err(Status::INVALID_CONTROLLER_IDENTIFIER),
                }
            }
            act::SECONDARY_ASSIGN => {
                let each = each()?;
                secondary()?;
                as_is(number == each)?
            }
            act::SECONDARY_ONLINE if secondary()?.online => 0,
            act::SECONDARY_OFFLINE if !secondary()?.online => 0,
            act::SECONDARY_ONLINE | act::SECONDARY_OFFLINE => {
                return Err(Status::INVALID_SECONDARY_CONTROLLER_STATE);
            }
            _ => return Err(Status::INVALID_FIELD),
        };
        Ok(Reply::result(u32::from(confirmed)))
    }
}
