//! What a frontend must do: the one interface between a reactor and a protocol.
//!
//! **Purpose.** A reactor runs every protocol alike; a new one is a type that implements [`Frontend`] and a line in
//! [`super::MAKERS`].
//! **Design.** The reactor calls a frontend a few times a turn, never once for each command. A frontend starts commands in
//! the core with its `FrontendIndex`, and takes from the core those of its own that have ended.
//! **Not here:** what a command is ([`crate::core`]), what a message means (each protocol's own type).

use crate::core::Core;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::ExportId;
use std::any::Any;

/// A message from the control thread to the frontend that knows its type.
pub(crate) type FrontendMessage = Box<dyn Any + Send>;

/// Serves a client of another frontend that waits for little; true if there was one.
pub(crate) type Beside<'a> = &'a mut dyn FnMut(&mut Core) -> bool;

/// See the module's text.
pub(crate) trait Frontend {
    /// One turn: takes what the core has ended, then what clients have asked for. True if anything was done. It calls
    /// `beside` between its clients, so that others' small requests don't wait for all of them.
    fn poll(&mut self, core: &mut Core, beside: Beside<'_>) -> bool;

    /// The same first thing after a sleep, for a frontend whose clients most likely ended it.
    fn poll_after_sleep(&mut self, _core: &mut Core) -> bool {
        false
    }

    /// Serves one client within its base that has asked for something, between the quanta of those above theirs. True if
    /// there was one.
    fn poll_between(&mut self, _core: &mut Core) -> bool {
        false
    }

    /// These epoll keys are ready. The frontend finds its own by [`FrontendIndex::key`].
    ///
    /// [`FrontendIndex::key`]: crate::core::FrontendIndex::key
    fn sockets_ready(&mut self, core: &mut Core, keys: &[u64]);

    /// Whether whatever is left to do waits for a socket, the core or time.
    fn is_idle(&self) -> bool;

    /// The reactor is about to sleep: has clients wake it. False: it must not sleep.
    fn arm(&mut self, core: &mut Core) -> bool;

    /// Whether waking the reactor costs clients more than a while of polling costs us.
    fn prefers_polling(&self) -> bool {
        false
    }

    /// The longest sleep while something must be tried again that no event announces.
    fn retry_within_ns(&self) -> Option<u64>;

    /// When [`Frontend::tick`] has something to do at the latest.
    fn next_deadline_ns(&self) -> Option<u64>;

    /// Checks time limits: about ten times a second while the reactor is awake.
    fn tick(&mut self, core: &mut Core);

    /// Whether the control thread must look at its sockets, so that a time limit is judged by what has come.
    fn waits_for_control(&self) -> bool {
        false
    }

    /// Takes a message, or gives it back if its type is another frontend's.
    ///
    /// # Errors
    /// The message itself.
    fn accept(&mut self, core: &mut Core, message: FrontendMessage) -> Result<(), FrontendMessage>;

    /// An export's volume, name or access list changed. Returns how many commands that lost their right are at devices.
    fn export_changed(&mut self, core: &mut Core, export: ExportId) -> u32;

    /// An export is removed. Returns how many of its commands are at devices.
    fn export_removed(&mut self, core: &mut Core, export: ExportId) -> u32;

    /// The owner says something else about a volume.
    fn volume_changed(&mut self, _core: &mut Core, _volume: VolumeId) {}

    /// Volumes may be other tenants' than they were.
    fn shares_changed(&mut self, _core: &Core) {}

    /// Closes every client, and takes no more.
    fn close_all(&mut self, core: &mut Core);

    /// Clients, those that wait for their last commands too.
    fn count(&self) -> usize;
}
