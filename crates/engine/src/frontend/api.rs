//! The one interface between a reactor and a protocol. A new protocol is a type that implements
//! [`Frontend`] and a line in [`super::MAKERS`].
//!
//! The reactor calls a frontend a few times per turn, not per command. A frontend starts commands
//! in the core under its `FrontendIndex`, and takes its ended ones from there.

use crate::core::Core;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::ExportId;
use std::any::Any;

/// A control thread's message to the frontend that knows its type.
pub(crate) type FrontendMessage = Box<dyn Any + Send>;

/// Serves one client of another frontend that has a small request; true if there was one.
pub(crate) type Beside<'a> = &'a mut dyn FnMut(&mut Core) -> bool;

pub(crate) trait Frontend {
    /// One turn: takes ended commands, then clients' new requests; true if anything was done. It
    /// calls `beside` between its clients, so that other frontends' small requests need not wait
    /// for all of them.
    fn poll(&mut self, core: &mut Core, beside: Beside<'_>) -> bool;

    /// Called first after a sleep, for a frontend whose clients most likely ended it.
    fn poll_after_sleep(&mut self, _core: &mut Core) -> bool {
        false
    }

    /// Serves one client within its base, between the quanta of lanes above theirs; true if there
    /// was one.
    fn poll_between(&mut self, _core: &mut Core) -> bool {
        false
    }

    /// These epoll keys are ready. A frontend finds its own by [`FrontendIndex::key`].
    ///
    /// [`FrontendIndex::key`]: crate::core::FrontendIndex::key
    fn sockets_ready(&mut self, core: &mut Core, keys: &[u64]);

    /// Whether all work left waits for a socket, the core or time.
    fn is_idle(&self) -> bool;

    /// Before a sleep: asks clients to wake the reactor. False: it must not sleep.
    fn arm(&mut self, core: &mut Core) -> bool;

    /// Whether waking the reactor costs clients more than a period of polling costs us.
    fn prefers_polling(&self) -> bool {
        false
    }

    /// The longest sleep while a retry is due that no event announces.
    fn retry_within_ns(&self) -> Option<u64>;

    /// The latest time of the next [`Frontend::tick`].
    fn next_deadline_ns(&self) -> Option<u64>;

    /// Called about ten times a second while the reactor is awake.
    fn tick(&mut self, core: &mut Core);

    /// Whether the control thread must read its sockets first, so that a time limit counts all that
    /// has come.
    fn waits_for_control(&self) -> bool {
        false
    }

    /// Takes a message, or returns it as the error if it is another frontend's.
    fn accept(&mut self, core: &mut Core, message: FrontendMessage) -> Result<(), FrontendMessage>;

    /// An export's volume, name or access list changed. Returns how many commands without
    /// permission are at devices.
    fn export_changed(&mut self, core: &mut Core, export: ExportId) -> u32;

    /// An export is removed. Returns how many of its commands are at devices.
    fn export_removed(&mut self, core: &mut Core, export: ExportId) -> u32;

    fn volume_changed(&mut self, _core: &mut Core, _volume: VolumeId) {}

    fn shares_changed(&mut self, _core: &Core) {}

    fn close_all(&mut self, core: &mut Core);

    /// Clients, including those that are draining.
    fn count(&self) -> usize;
}
