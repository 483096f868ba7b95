//! # Translation: an IOMMU for block storage
//!
//! **Purpose.** Everything that is true of grants, wherever they come from: what a grant is, the
//! tables that hold them, how a miss is asked for once, and how a revoke waits for what is in
//! flight. The module [`boundary`] is all that crosses between the daemon and the engine.
//!
//! **Design.** The owner (in the daemon) keeps a volume's map. The data path (in the engine) keeps a
//! [`table::Table`] for each volume: one atomic word an extent, read without a lock. A word that is
//! empty is a miss; [`fault::FaultTable`] sees to it that the owner is asked once per extent. A
//! revoke clears words and then waits in [`drain::Drains`] until the slices that started under them
//! have ended. [`grants::GrantTable`] is the owner's record of what is outstanding, in shared memory,
//! so that it outlives the owner.
//!
//! **What it does not do.** It does no I/O on devices, knows no pool, and starts no thread.

#![deny(unsafe_code)]

pub mod boundary;
pub mod drain;
pub mod engine_side;
pub mod fault;
pub mod grants;
pub mod kill;
pub mod owner_side;
pub mod reactor_side;
pub mod reactors;
pub mod shm;
pub mod table;
pub mod types;
pub mod word;

pub use types::{DeviceIndex, ExtentIndex, ExtentRange, Rights, VolumeId};
pub use word::Word;
