//! The pool: labels, catalog, and the owner of every extent.
//!
//! A pool is a set of devices cut into extents, and the volumes that hold them. This crate keeps
//! each extent's owner across any crash, and answers the data path's faults.
//!
//! Operations change [`Pool`] in memory. [`Pool::take_batch`] encodes the touched records,
//! [`Catalog::commit`] makes them durable on any thread, and [`Pool::committed`] does the rest. The
//! catalog is a checksummed redb database in two copies, on two devices if possible; each device
//! has a [`label`].
//!
//! **Not here:** network, tenant data, threads except those of [`BoundedStore`]. The pool uses
//! [`BlockStore`]s for labels and catalog only. The caller zeroes, flushes and revokes; each
//! operation states what must come first.

mod catalog;
mod check;
mod codec;
mod error;
mod extents;
mod features;
#[cfg(fuzzing)]
pub mod fuzzing;
mod guard;
mod journal;
pub mod label;
mod layout;
mod mirror;
mod open;
mod pool;
mod records;
mod store;
mod volumes;

pub use catalog::{Catalog, CatalogHealth, CatalogUsage};
pub use check::{Check, CheckProblem, CheckReport, check_catalog};
pub use error::{ErrorKind, PoolError, Result};
pub use extents::{
    DeviceHealth, ExtentState,
    allocator::Allocator,
    quarantine::QuarantineMark,
    runs::DeviceRun,
    space::{Placement, PoolSettings, Space, SpaceLevel},
};
pub use guard::panic_is_caught;
pub use journal::{
    Journal,
    batch::{Batch, BatchId},
};
pub use label::{
    Label, LabelCopies, LabelFormat, LabelOwner, Stamp,
    probe::{Probe, probe},
};
pub use layout::{
    DEFAULT_EXTENT_BYTES, MAX_DEVICES, MAX_EXTENT_BYTES, MIN_EXTENT_BYTES, check_room,
};
pub use mirror::{CatalogCopy, CopyState, lineage::Epoch};
pub use open::{
    MissingDevice, OpenDevice, Opened,
    add::add_device,
    create::{NewDevice, PoolSpec, create, destroy},
    open,
    stamp::Stamped,
};
pub use pool::{
    Pool,
    admin::{MAX_VOLUME_BYTES, NewVolume},
    adopt::{Adopted, AdoptionReport},
    budgets::Budgets,
    exports::{Exports, MAX_HOSTS, NQN_PREFIX},
    hosts::{Hosts, MAX_PORTS, MAX_RECENT},
    images::{Images, NewImageVolume},
    snapshots::{NewClone, NewSnapshot, SNAPSHOT_MARK, Snapshots},
    tenants::Tenants,
};
pub use records::{
    ClientOwner, ClientRecord, DeviceRecord, ExportId, ExportRecord, HostReservations, ImageRecord,
    LayerId, Layering, NewExport, PoolInfo, PortRecord, SocketOwner, TenantId, TenantRecord,
    VolumeRecord,
};
pub use store::{BLOCK_BYTES, BlockStore, MemStore, bounded::BoundedStore};
pub use volumes::{
    VolumeSpace, Volumes,
    copies::{CopyFailure, ExtentCopy},
    faults::{FaultAnswer, Released},
    images::IMAGE_EXTENT_BYTES,
    merge::MergeStep,
    needed::{Unneeded, UnneededCursor},
    preallocated::Around,
};
