//! Forebay's control plane: the REST API, and the daemon that owns the pool and keeps an engine
//! running.
//!
//! One thread with an async runtime has all state; API handlers send it closures. From the ground
//! up: `model` (bodies of the API), `firmware`, `base`, `link`, `states`, `mapping`, `statistics`, `qos`,
//! `exports`, `health`, `devices`, `owner`, `supervisor`, `daemon`, `api` and `out_of_band`, `run`. Each uses
//! only those before it. Nothing here is on the I/O path.

pub mod api;
mod base;
mod changed;
mod clock;
mod clusters;
pub mod config;
mod daemon;
mod devices;
mod event_files;
mod event_numbers;
mod events;
mod exports;
mod files;
pub mod firmware;
mod health;
mod link;
mod mapping;
mod metrics;
pub mod model;
mod out_of_band;
mod owner;
mod ownership;
mod qos;
mod readiness;
mod run;
mod states;
mod statistics;
mod store;
mod supervisor;
mod systemd;

pub use daemon::DaemonError;
pub use run::{EndedBy, run};
