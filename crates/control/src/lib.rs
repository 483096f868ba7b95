//! Forebay's control plane.
//!
//! Purpose: the REST API, and the daemon behind it that owns the pool and keeps an engine running.
//! Design: one thread, an async runtime, and one loop that alone changes state; handlers of the API
//! send it closures. From the ground up: `model` (bodies of the API), `devices`, `owner`, `supervisor`, `daemon`, `api`,
//! `run`. Each uses only those before it. Nothing here is on the I/O path.
//! Not here: moving tenant data (the engine's internal lane does that), the command line.

pub mod api;
mod base;
mod clock;
pub mod config;
mod daemon;
mod devices;
mod event_numbers;
mod events;
mod exports;
mod files;
mod health;
mod journal;
mod link;
mod mapping;
mod metrics;
pub mod model;
mod owner;
mod ownership;
mod qos;
mod readiness;
mod run;
mod signal;
mod states;
mod statistics;
mod store;
mod supervisor;
mod systemd;

pub use daemon::DaemonError;
pub use run::{EndedBy, run};
