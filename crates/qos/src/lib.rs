//! # Quality of service: a base for each tenant, and the rest for those that can use it
//!
//! This crate decides which I/O may begin now, by the BurstCBS algorithm (OSDI '24). [`admission`]
//! decides which bases a node accepts, and [`placement`] where. [`cost`] says what an I/O costs;
//! [`estimator`] corrects that. The [`scheduler`] of each reactor divides a window's resources;
//! reactors agree through a [`ledger`].
//!
//! The crate has no clock, thread or I/O: time is a number of windows. An I/O allocates nothing.

#![deny(unsafe_code)]
// Most loops over resources use several arrays.
#![allow(clippy::needless_range_loop)]

pub mod admission;
pub mod budget;
pub mod cost;
pub mod credit;
pub mod estimator;
pub mod ledger;
pub mod params;
pub mod placement;
pub mod resources;
pub mod scheduler;
pub mod spare_buffers;
pub mod spread;
pub mod stated_budget;
