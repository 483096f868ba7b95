//! NVMe-MI messages, and the endpoint's command slots, without I/O.
//!
//! [`MiRequest`] and [`MiResponse`] convert messages, for both ends. A [`Responder`] takes requests,
//! carries out control primitives, and passes commands on. [`data`] has response data; [`vendor`]
//! has log pages and Admin commands of our own.
//!
//! Section numbers are those of *NVM Express Management Interface 1.2*. Messages are *out of band*
//! (1.4), with an integrity check. PCIe commands, the Management Endpoint Buffer, Command Initiated
//! Auto Pause and asynchronous events are refused.

mod admin;
mod command;
mod control;
pub mod data;
mod message;
mod request;
mod responder;
mod response;
mod status;
#[cfg(test)]
mod tests;
pub mod vendor;

pub use admin::AdminCommand;
pub use command::{
    ControllerHealthPoll, DataStructure, GetConfiguration, MiCommand, SetConfiguration,
};
pub use control::{ControlPrimitive, endpoint_state};
pub use message::{
    BrokenMessage, MAX_DATA_BYTES, MAX_MESSAGE_BYTES, MESSAGE_TYPE, MiHeader, MiKind, SLOTS, open,
};
pub use request::MiRequest;
pub use responder::{MiDrop, MiStep, MiTicket, Responder};
pub use response::MiResponse;
pub use status::{MiRefusal, MiStatus};
