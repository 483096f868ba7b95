//! MCTP without I/O: *MCTP Base Specification* (DSP0236) 1.3 over *MCTP Serial Transport Binding*
//! (DSP0253) 1.0.
//!
//! [`serial`] finds packets in a stream of bytes, and frames them. An [`Endpoint`] assembles
//! packets to messages, answers control requests, and cuts messages into packets. It is a simple
//! endpoint on one bus.
//!
//! There is no socket, thread or clock: callers pass `now_ns`, of any origin, which never goes back.
//! No received byte can cause a panic. An endpoint's memory is bounded by [`MAX_ASSEMBLIES`] times
//! the longest message type ([`MessageType::limit_bytes`]).
//!
//! Bridges, EID pools, vendor-defined messages, rate limits and encryption are not supported.

mod endpoint;
mod packet;
pub mod serial;

pub use endpoint::{
    ASSEMBLY_TIMEOUT_NS, Address, ControlAnswer, DropReason, Drops, Endpoint, EndpointConfig,
    MAX_ASSEMBLIES, Message, MessageType, NVME_MI, Received,
};
pub use packet::{
    BASELINE_UNIT_BYTES, EID_BROADCAST, EID_NULL, HEADER_BYTES, MAX_PACKET_BYTES, MAX_UNIT_BYTES,
    Packet, Packets,
};
