//! Forebay's control plane.
//!
//! Purpose: the REST API, and the daemon behind it that owns the pool and keeps an engine running.
//! Design: one thread, an async runtime, and one loop (the owner) that alone changes state; API
//! handlers send it requests. Nothing here is on the I/O path.
//! Not here: moving tenant data (the engine's internal lane does that), the command line.

pub mod api;
pub mod config;
pub mod daemon;
mod devices;
mod event_numbers;
mod events;
mod files;
mod journal;
mod metrics;
mod owner;
mod ownership;
mod readiness;
mod signal;
mod store;
mod supervisor;
mod systemd;
