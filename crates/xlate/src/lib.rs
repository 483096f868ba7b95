//! # Translation: an IOMMU for block storage
//!
//! Everything about grants: their form, the tables that hold them, faults and revokes. Module
//! [`boundary`] is the whole interface between daemon and engine.
//!
//! The owner (in the daemon) keeps a volume's map. The data path (in the engine) keeps a
//! [`table::Table`] per volume: one atomic word for each extent, read without a lock. An empty word
//! is a miss; [`fault::FaultTable`] asks the owner once per extent. A revoke clears words, then
//! waits in [`drain::Drains`] until the slices that began under them have ended.
//! [`grants::GrantTable`] lists outstanding grants in shared memory, so that the list outlives the
//! owner.
//!
//! The crate does no device I/O, knows no pool and starts no thread.

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
