//! Tools of the whole-system tests in `tests/tests/`. Nothing is simulated.
//!
//! [`daemon`] runs `forebay`, [`lab`] with a pool and hosts. [`host`] loads a volume; [`shadow`]
//! knows its content. [`guest`] boots Linux, [`vm`] drives VM disks, [`sandbox`] isolates a
//! test, [`hold`] delays I/O. [`mctp`] and [`nvme_cli`] are management controllers.

pub mod api;
pub mod book;
pub mod ceph;
pub mod daemon;
pub mod disk;
pub mod exposition;
pub mod guest;
pub mod hold;
pub mod host;
pub mod lab;
pub mod mctp;
pub mod nvme_cli;
pub mod out_of_band;
pub mod sandbox;
pub mod shadow;
pub mod snapshots;
pub mod system;
pub mod vm;
pub mod wait;
