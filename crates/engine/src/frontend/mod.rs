//! The protocols that tenants use: each turns requests into commands, and ended commands into
//! answers. Each has a folder; [`vm`] has the common part of the VM protocols. **Not here:** what
//! happens to a command ([`crate::core`]), who calls a frontend and when ([`crate::reactor`]).

mod api;
pub(crate) mod nvme_tcp;
#[cfg(test)]
mod tests;
pub(crate) mod vfio_user;
pub(crate) mod vhost_user;
pub(crate) mod vm;

use crate::core::{FrontendIndex, MAX_FRONTENDS};
use crate::memory::{Memory, ReceiveBuffer};
pub(crate) use api::{Beside, Frontend, FrontendMessage};
use forebay_xlate::boundary::message::FrontendKind as Kind;
use forebay_xlate::boundary::region::Region;
use rustix::thread::CpuSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vm::Vms;
use vm::closer::Closer;
use vm::protocol::{Closing, Protocol, Turn};

pub(crate) struct FrontendParts {
    pub reactor: usize,
    pub region: Arc<Region>,
    pub epoll: Arc<OwnedFd>,
    pub memory: &'static Memory,
    /// The reactor's receive buffer; one frontend takes it.
    pub receive: Option<ReceiveBuffer>,
    pub closer: Closer,
    /// Processors for helper threads; `None`: the reactor's own.
    pub cpus: Option<CpuSet>,
}

/// `None`: it has nothing to serve.
type Maker = fn(FrontendIndex, &mut FrontendParts) -> Option<Box<dyn Frontend>>;

/// All frontends, in the order of a turn.
const MAKERS: &[Maker] = &[
    nvme_tcp,
    vms,
    #[cfg(test)]
    tests::memory_queue::make,
];

const _: () = assert!(MAKERS.len() <= MAX_FRONTENDS);

pub(crate) fn all(mut parts: FrontendParts) -> Vec<Box<dyn Frontend>> {
    let indexed = (0u8..).map(FrontendIndex).zip(MAKERS);
    indexed
        .filter_map(|(index, make)| make(index, &mut parts))
        .collect()
}

fn nvme_tcp(index: FrontendIndex, parts: &mut FrontendParts) -> Option<Box<dyn Frontend>> {
    let receive = parts.receive.take()?;
    let (region, epoll) = (&parts.region, parts.epoll.clone());
    let (reactor, memory) = (parts.reactor, parts.memory);
    let frontend = nvme_tcp::NvmeTcp::new(index, reactor, region, epoll, memory, receive);
    Some(Box::new(frontend))
}

fn vms(index: FrontendIndex, parts: &mut FrontendParts) -> Option<Box<dyn Frontend>> {
    let (epoll, closer) = (parts.epoll.clone(), parts.closer.clone());
    let frontend = Vms::new(index, epoll, closer, vm_protocol);
    Some(Box::new(frontend.beside(parts.cpus)))
}

pub(crate) fn vm_protocol(turn: &mut Turn<'_>) -> Result<Box<dyn Protocol>, Closing> {
    match turn.client.export().frontend {
        Kind::NvmeTcp => Err(Closing("its export is not a VM export")),
        Kind::NvmePcie { .. } => Ok(Box::new(vfio_user::Pcie::new(turn)?)),
        Kind::VhostUser { queues, .. } => Ok(Box::new(vhost_user::Vhost::new(turn, queues)?)),
    }
}
