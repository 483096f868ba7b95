//! Take-over: how an engine goes on where a dead one stopped.
//!
//! **Purpose.** Hosts must not notice that the engine died: their TCP connections stay, every command
//! they sent is answered once, and no write lands after a later one.
//!
//! **Design.** The daemon holds what outlives an engine: its sockets, its state region, its memory. It
//! gives them to the successor, which *converts* them ([`Pending::convert`]): the dead engine's records
//! are read once into private memory ([`snapshot`]), the kernel says how far each stream was consumed
//! and accepted ([`counters`]), and from both follows what each queue has still to do. All of that is
//! written into the successor's own region and memory, and nothing else is touched: until the daemon says
//! `Resume`, the dead engine's records stay the truth, and a successor that dies is replaced by another.
//! With `Resume` the reactors get their [`Part`]s and serve.
//!
//! Every byte of the dead engine's region is hostile input. What is found damaged closes its own
//! association and no other.
//!
//! **What it does not do.** It waits for no fence ([`crate::core`] does), and decides nothing about whom
//! to blame (the daemon does).

pub(crate) mod counters;

use crate::lane::LaneIndex;
use counters::SocketFacts;
use forebay_nvme::Sqe;
use forebay_xlate::DeviceIndex;
