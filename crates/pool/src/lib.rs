//! The pool: labels, catalog, and the owner of every extent.
//!
//! **Purpose.** A pool is a set of devices cut into extents, and the volumes that those extents
//! hold. This crate knows which volume owns which extent, survives any crash with that knowledge,
//! and answers the data path's faults.
//!
//! **Design.** [`Pool`] is the truth in memory. Each operation changes it and marks the records it
//! touched; [`Pool::take_batch`] encodes them as they are now, [`Catalog::commit`] makes them
//! durable (on any thread), and [`Pool::committed`] promotes what waited for that: reserved extents
//! become grantable, released ones may be laundered, mappings count as durable. The catalog is a
//! redb database in a file that is kept twice, on two devices where there are two, each block of it
//! under a checksum; each device carries a [`label`].
//!
//! **Not here:** the network, an async runtime, tenant data; threads but those of [`BoundedStore`]. The pool never opens a
//! device: it is given [`BlockStore`]s, and uses them for labels and the catalog only. Zeroing,
//! flushing and revoking are the caller's; each operation says what must have happened before it.

mod add;
mod admin;
mod adopt;
mod ahead;
mod area;
mod batch;
mod bounded;
mod budgets;
mod catalog;
mod check;
mod codec;
mod create;
mod delete;
mod devices;
mod error;
mod extents;
#[cfg(fuzzing)]
pub mod fuzzing;
mod guard;
mod hosts;
pub mod label;
mod layout;
mod lineage;
mod load;
mod mirror;
mod open;
mod owner;
mod pending;
mod placement;
mod pool;
mod probe;
mod quarantine;
mod records;
mod reservations;
mod runs;
mod session;
mod space;
mod stock;
mod store;
mod uuid;
mod volume_map;

pub use add::add_device;
pub use admin::{MAX_HOSTS, MAX_VOLUME_BYTES, NQN_PREFIX, NewVolume};
pub use adopt::{Adopted, AdoptionReport};
pub use ahead::Around;
pub use batch::{Batch, BatchId};
pub use bounded::BoundedStore;
pub use catalog::{Catalog, CatalogHealth, CatalogUsage};
pub use check::{Check, CheckProblem, CheckReport, check_catalog};
pub use create::{NewDevice, PoolSpec, create, destroy};
pub use error::{ErrorKind, PoolError, Result};
pub use extents::{ExtentState, Health};
pub use guard::panic_is_caught;
pub use hosts::{MAX_PORTS, MAX_RECENT};
pub use label::{Label, LabelCopies, LabelFormat, LabelOwner, Stamp};
pub use layout::{
    DEFAULT_EXTENT_BYTES, MAX_DEVICES, MAX_EXTENT_BYTES, MIN_EXTENT_BYTES, check_room,
};
pub use lineage::Epoch;
pub use mirror::{CatalogCopy, CopyState};
pub use open::{MissingDevice, OpenDevice, Opened, open};
pub use owner::{FaultAnswer, Released};
pub use pool::{Pool, VolumeSpace};
pub use probe::{Probe, probe};
pub use quarantine::QuarantineMark;
pub use records::{
    DeviceRecord, ExportId, ExportRecord, HostReservations, NewExport, PoolInfo, PortRecord,
    SocketOwner, TenantId, TenantRecord, VolumeRecord,
};
pub use runs::DeviceRun;
pub use session::Stamped;
pub use space::{Placement, PoolSettings, Space, SpaceLevel};
pub use store::{BLOCK_BYTES, BlockStore, MemStore};
pub use uuid::Uuid;
