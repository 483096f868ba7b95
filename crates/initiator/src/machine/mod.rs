//! Drivers of virtual machines' disks, without a virtual machine.
//!
//! # Purpose
//! What a guest and its hypervisor do, in one process: [`vhost`] is a vhost-user frontend with a virtio-blk driver,
//! [`pcie`] a vfio-user client with an NVMe PCIe driver. [`load`] measures through either, [`verify`] writes data that
//! proves where and when it was written. Tests kill targets under them, benchmarks compare targets with them.
//!
//! # Design
//! A [`Disk`] is the device: its socket, its memory (one memory file, shared with the target), its geometry. Its
//! [`Queue`]s are each used by one thread and have slots; a slot has one command at a time and a fixed place for its
//! data in the memory, so nothing is copied, moved or allocated while commands fly. What the target says is checked:
//! a completion of what is not in flight ends the queue with an error.
//!
//! # What it does not do
//! It shares no code with the target beyond `forebay_nvme`'s types. It does not split commands, has no page cache, and
//! is no hypervisor: nothing executes.

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

/// Connects to a disk, with `options.queues` queues of `options.depth` slots.
///
/// # Errors
/// It can't be reached, or not be used as asked.
pub fn connect(target: &Target, options: &Options) -> Result<Box<dyn Disk>, Error> {
    options.check()?;
    Ok(match target {
        Target::VhostUser(path) => Box::new(vhost::Vhost::connect(path, options)?),
        Target::VfioUser(path) => Box::new(pcie::Pcie::connect(path, options)?),
    })
}
