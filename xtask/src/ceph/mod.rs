//! Small Ceph clusters of Debian's packages, without root and without an installation.
//!
//! A [`Cluster`] is one monitor, one manager and some OSDs on sparse files, on loopback, with the
//! pool [`POOL`]. Its folder contains everything, so several may run at once.

mod cluster;
mod config;
mod daemon;
mod packages;

pub use cluster::{Cluster, Options, POOL, stop};
pub use daemon::Daemon;
pub use packages::{Programs, Release};
