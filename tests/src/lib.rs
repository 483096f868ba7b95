//! Whole-system tests: what they stand on.
//!
//! Purpose: [`daemon`] starts the real `forebay` and talks to it as a person would; [`guest`] boots a
//! Linux guest, the stock host that Forebay is made for; [`host`] does everything to a volume that a host
//! may do; [`api`] asks a daemon as fast as it can; and [`shadow`] remembers what may be there; [`lab`] is a pool with hosts at work; [`machine`] is what machines' disks are tested with; [`sandbox`] is a machine of its own for what is
//! installed or typed, and [`book`] what README and book say to type; [`exposition`] reads metrics; [`hold`] is a file whose reads and writes a test holds;
//! [`system`] measures and stops processes; [`wait`] is how tests wait.
//! Design: tests are ordinary integration tests in `tests/tests/`. Nothing is simulated here; whatever
//! a test starts ends with it, killed by its pid if need be, and every wait has a limit.
//! Not here: unit tests (each crate has its own), benchmarks (`cargo xtask bench`).

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
