//! The control thread's messages to this frontend, to one reactor or a copy to each. **Not here:**
//! messages for every frontend ([`crate::frontend::Frontend`]).

use crate::exports::Port;
use crate::listener::NewConnection;
use crate::takeover::InheritedPart;
use forebay_nvme::Status;
use forebay_nvme::reservation::Reservations;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::ReserveToken;
use std::sync::Arc;

pub(crate) enum TcpMessage {
    Connection(Box<NewConnection>),
    /// This reactor's part of a dead engine's state.
    Inherit(Box<InheritedPart>),
    Ports(Arc<Vec<Port>>),
    DiscoveryChanged,
    Reservations(VolumeId, Arc<Reservations>),
    /// A reservation command is carried out or refused; the state is the current one.
    Reserved(ReserveToken, VolumeId, Status, Arc<Reservations>),
}
