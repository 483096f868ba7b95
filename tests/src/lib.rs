//! Tools of the whole-system tests in `tests/tests/`. Nothing is simulated.
//!
//! [`daemon`] runs `forebay`, [`lab`] with a pool and hosts. [`host`] loads a volume, and
//! [`shadow`] knows its content. [`guest`] boots Linux; [`machine`] drives VM disks. [`sandbox`]
//! isolates a test, and [`book`] reads commands from the documentation. [`api`] sends API requests,
//! [`exposition`] reads metrics, [`hold`] delays I/O, [`system`] measures and stops processes,
//! [`wait`] waits with a limit.

pub mod api;
pub mod book;
pub mod daemon;
pub mod disk;
pub mod exposition;
pub mod guest;
pub mod hold;
pub mod host;
pub mod lab;
pub mod machine;
pub mod sandbox;
pub mod shadow;
pub mod system;
pub mod wait;
