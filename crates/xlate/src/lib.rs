//! # Translation: an IOMMU for block storage
//!
//! The owner (in the daemon) keeps a volume's map. The data path (in the engine) keeps a
//! [`table::Table`] per volume: one atomic word per extent, read without a lock. An empty word is a
//! miss; [`fault::FaultTable`] asks the owner once. A revoke clears words, then waits in
//! [`drain::Drains`] for slices that began under them. [`grants::GrantTable`] lists grants in
//! shared memory that outlives the owner. [`boundary`] is the interface between daemon and engine.
//!
//! The crate does no device I/O and starts no thread.

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
