//! Ceph's librados and librbd, loaded at run time: images, and asynchronous I/O on them.
//!
//! **Design.** [`Library`] finds the functions of Ceph 16 or newer. The build needs no part of
//! Ceph. A [`RadosClient`] has a session with a cluster, a [`Pool`] a pool's namespace, an [`Image`]
//! an open image; each keeps the former alive. An operation owns its [`Buffer`]. librbd's thread
//! puts the ended ones into [`Completions`], which a reactor polls.
//!
//! **Waits.** Only [`Image::submit`] and [`Completions`] never wait. The other calls wait for the
//! cluster, at most as long as the limits in [`ClientConfig`] say.
//!
//! **Processes.** Don't fork after [`RadosClient::connect`]: librados' threads don't follow, and the
//! child hangs. Drop all clients before `exit`: Ceph aborts the process otherwise.
//!
//! **Not here:** volumes, devices, retries, journaling, mirroring and encryption of images.

mod calls;
mod config;
mod error;
mod image;
mod library;

pub use calls::{
    Batch, Buffer, Completions, Ended, Image, ImageRequest, Pool, RadosClient, RefusedRequest,
    UpdateWatch,
};
pub use config::{ClientConfig, ClusterUsage};
pub use error::RbdError;
pub use image::{ImageInfo, ImageOptions, OpenMode, ParentImage, Snapshot, feature};
pub use library::{Library, LibraryMissing};
