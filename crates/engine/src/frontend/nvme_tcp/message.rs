//! What the control thread says to this frontend.
//!
//! **Purpose.** The reactor carries these without knowing them.
//! **Design.** Each is sent to one reactor, or as a copy to each.
//! **Not here:** what concerns every frontend ([`crate::frontend::Frontend`]).

use crate::exports::Port;
use crate::listener::NewConnection;
use crate::takeover::InheritedPart;
use forebay_nvme::Status;
use forebay_nvme::reservation::Reservations;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::ReserveToken;
use std::sync::Arc;

/// See the module's text.
pub(crate) enum TcpMessage {
    /// A connection that the listener has let in.
    Connection(Box<NewConnection>),
    /// What a dead engine left of this reactor's.
    Inherit(Box<InheritedPart>),
    /// The ports are these now.
    Ports(Arc<Vec<Port>>),
    /// The set of exports changed.
    DiscoveryChanged,
    /// Who may do what with a volume has changed.
    Reservations(VolumeId, Arc<Reservations>),
    /// A reservation command is carried out, or refused; the state is as it is now.
    Reserved(ReserveToken, VolumeId, Status, Arc<Reservations>),
}
