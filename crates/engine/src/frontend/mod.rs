//! The protocols that tenants speak.
//!
//! **Purpose.** Turns what hosts and VMs say into commands, and commands that ended into answers.
//!
//! **Design.** A folder for each protocol; [`vm`] has what those of VMs share: sockets, guest memory, records.
//!
//! **Not here:** what happens to a command ([`crate::core`]), who calls a frontend and when ([`crate::reactor`]).

pub(crate) mod nvme_tcp;
pub(crate) mod vfio_user;
pub(crate) mod vhost_user;
pub(crate) mod vm;
