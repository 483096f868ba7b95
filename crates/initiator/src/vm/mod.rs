//! Drivers of VM disks without a VM, in one process, sharing only `forebay_nvme`'s types with the
//! target.
//!
//! [`vhost`] is a vhost-user frontend with a virtio-blk driver, [`pcie`] a vfio-user client with an
//! NVMe PCIe driver. A [`Disk`] has a socket, a memory file shared with the target, and [`Queue`]s,
//! each used by one thread. A slot holds one command and has a fixed place for its data. An
//! unexpected completion is an error.

mod disk;
mod error;
mod event;
pub mod load;
mod memory;
mod options;
pub mod pcie;
mod socket;
pub mod verify;
pub mod vhost;

pub use disk::{Disk, DiskCompletion, DiskStatus, Geometry, Op, Queue};
pub use error::Error;
pub use options::{Doorbells, Options, Ring, Target};

/// Connects to a disk, with `options.queues` queues.
pub fn connect(target: &Target, options: &Options) -> Result<Box<dyn Disk>, Error> {
    options.check()?;
    Ok(match target {
        Target::VhostUser(path) => Box::new(vhost::Vhost::connect(path, options)?),
        Target::VfioUser(path) => Box::new(pcie::Pcie::connect(path, options)?),
    })
}
